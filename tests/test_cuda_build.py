"""The CUDA kernels without a GPU: they compile for Hopper without surprise spills, the parameter block matches, the planner plans."""

import ctypes
import re
import shutil

import pytest
import torch

from kda_ckpt import cuda_kda
from kda_ckpt.cuda_kda import (
    CudaBackend,
    Params,
    build_key,
    check_here,
    compile_nvcc,
    cost,
    plan,
    sources,
    workspace_bytes,
)

SPILLS_ALLOWED = {
    "segments": 32,  # two chains leave a producer 88 registers; a few words once a tile
    "prefill": 4,  # one word, once a block
}
SMS = 132


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_compiles_for_hopper_and_says_what_it_costs(capsys):
    cubin, report = compile_nvcc(shutil.which("nvcc"), report=True)
    assert cubin[:4] == b"\x7fELF"
    kernels = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        report,
        re.S,
    )
    with capsys.disabled():
        for name, stores, loads, registers in kernels:
            print(f"\n  {name:9s} {registers:>3s} registers, {stores} bytes of spill stores, {loads} of loads", end="")
    assert {name for name, *_ in kernels} == set(cuda_kda.THREADS)
    for name, stores, loads, registers in kernels:
        assert max(int(stores), int(loads)) <= SPILLS_ALLOWED.get(name, 0), f"{name} spills"
        assert int(registers) * cuda_kda.THREADS[name] <= 65536


def test_parameter_block_is_the_kernels_own():
    body = re.search(r"struct Params \{(.*?)\n\};", sources()["common.cuh"], re.S).group(1)
    code = re.sub(r"//.*", "", body)
    names = [
        n.strip(" *\n")
        for line in code.split(";")
        if line.strip()
        for n in re.sub(r"^\s*(const )?\w+ ", "", line.strip()).split(",")
    ]
    assert names == [name for name, _ in Params._fields_]
    assert ctypes.sizeof(Params) % 8 == 0


def test_build_key_follows_sources_and_compiler(monkeypatch):
    key = build_key("nvcc 13.0")
    assert key == build_key("nvcc 13.0") != build_key("nvrtc 13.0")
    monkeypatch.setattr(cuda_kda, "sources", lambda: {"flashkda.cu": "// another"})
    assert build_key("nvcc 13.0") != key


def test_shared_memory_and_blocks_agree_with_the_sources():
    text = sources()["common.cuh"]
    assert f"SMEM_BYTES = {cuda_kda.SMEM_BYTES['prefill'] // 1024} * 1024" in text
    assert f"PROBE = {cuda_kda.PROBE};" in text


@pytest.mark.parametrize(
    "rows, heads, length", [(1, 12, 8192), (4, 12, 8192), (1, 32, 8192), (1, 12, 2048), (3, 1, 777)]
)
def test_plan_covers_every_row(rows, heads, length):
    chosen = plan(rows * length, rows, heads, SMS)
    assert chosen.segment_len % 16 == 0
    if chosen.units:
        assert rows * -(-length // chosen.segment_len) <= chosen.units


@pytest.mark.parametrize("lens", [[5000, 1, 1], [0, 0, 4096], [100, 3000, 2500]])
@pytest.mark.parametrize("segments", [2, 3, 7])
def test_units_bound_the_segments_of_ragged_rows(lens, segments):
    chosen = plan(sum(lens), len(lens), 2, SMS, None, segments)
    assert sum(max(1, -(-n // chosen.segment_len)) for n in lens) <= chosen.units


def test_plan_cuts_where_it_pays():
    assert plan(8192, 1, 12, SMS).units > 4  # few heads, long row: many segments
    assert plan(8192, 1, 96, SMS).units == 0  # heads enough for the chip
    assert plan(65536, 64, 12, SMS) == (0, 0, True, 1)  # many rows: long ones first
    assert plan(16, 1, 1, SMS).units == 0
    assert plan(4 * 8192, 4, 12, SMS) == (0, 0, True, 2)  # half the chip idle: V in two
    assert plan(8192, 1, 12, SMS, None, 1).units == 0
    assert cost(12, 512, 11, 1, SMS) < cost(12, 512, 1, 1, SMS) < cost(132, 512, 2, 1, SMS)


def test_workspace_is_two_matrices_and_a_flag_a_segment():
    chosen = plan(8192, 1, 12, SMS, None, 4)
    assert workspace_bytes(chosen, 12) == chosen.units * 12 * (2 * 128 * 128 * 4 + 4)
    assert workspace_bytes(plan(16, 1, 1, SMS), 1) == 0


def test_refuses_what_it_cannot_do():
    q = torch.zeros(4, 2, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="CUDA device"):
        check_here(dict(q=q), -5.0)
    backend = CudaBackend()
    good = dict(head_dim=128, dtype=torch.bfloat16, state_dtype=torch.float32, safe_gate=True)
    assert backend.supports(**good) == (True, "")
    for change in (
        dict(head_dim=64),
        dict(dtype=torch.float16),
        dict(state_dtype=torch.float16),
        dict(safe_gate=False),
    ):
        ok, reason = backend.supports(**{**good, **change})
        assert not ok and next(iter(change)) in reason
    if not torch.cuda.is_available():
        assert backend.available() == (False, "torch sees no CUDA device")


def test_no_compiler_is_a_clear_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_CKPT_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_kda, "compilers", lambda: [])
    with pytest.raises(RuntimeError, match="neither libnvrtc nor nvcc"):
        cuda_kda.build()
    monkeypatch.setattr(cuda_kda, "compilers", lambda: [("one", lambda: b"cubin")])
    assert cuda_kda.build() == b"cubin" and len(list(tmp_path.glob("*.cubin"))) == 1
    monkeypatch.setattr(cuda_kda, "compilers", lambda: [("one", lambda: pytest.fail("compiled twice"))])
    assert cuda_kda.build() == b"cubin"

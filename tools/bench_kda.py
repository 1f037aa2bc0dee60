"""Time KDA prefill, the store kernel and decode on a GPU: our backends beside their peers, and write one JSON file.

    python tools/bench_kda.py --backends triton,cuda --peers vllm,vllm_ckpt,cudnn,fla --out nbs/results/kda_prefill_h200.json

Ten shapes, three gate regimes, bf16, head dim 128, initial and final float32 states; NAME_ckpt is the same call with one
checkpoint a row. Times are medians in microseconds. A peer that is not installed is skipped with a word: `--peers-dir`
is a folder with vllm/_flashkda_C.abi3.so; cudnn (nvidia-cudnn-frontend) and fla (flash-linear-attention) are imported.
Errors are relative, to the float64 recurrence of a row of 300 tokens. Nothing here needs the peers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

import torch
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpu_machine import machine, write

from kda_ckpt.backends import get_backend
from kda_ckpt.reference import kda_recurrent, random_inputs, relative_error

SHAPES = (
    ("1x2048", [2048], 12),
    ("1x8192", [8192], 12),
    ("1x32768", [32768], 12),
    ("1x8192", [8192], 32),
    ("1x8192", [8192], 96),
    ("4x8192", [8192] * 4, 12),
    ("16x8192", [8192] * 16, 12),
    ("64x1024", [1024] * 64, 12),
    ("8x1024", [1024] * 8, 96),
    ("ragged", [1300, 547, 2048, 963, 271, 3063], 96),
)
GROWTH = (2048, 8192, 32768, 131072, 262144)
REGIMES = ("fast", "slow", "mixed")
D = 128


def offsets_of(inputs: dict) -> torch.Tensor:
    """One checkpoint a row: the last multiple of 16 inside it."""
    return ((inputs["cu_seqlens"].diff() - 1) // 16 * 16).to(torch.int32)


def our_runner(name: str):
    """inputs, checkpoint -> (a function that runs one prefill, its outputs) for one of our backends."""
    backend = get_backend(name)

    def make(x: dict, checkpoint: bool):
        fixed = dict(out=torch.empty_like(x["v"]), final_state=torch.empty_like(x["initial_state"]))
        if checkpoint:
            fixed |= dict(checkpoint_offsets=offsets_of(x), checkpoint_state=torch.empty_like(x["initial_state"]))
        return lambda: backend.prefill(**x, **fixed)[:2]

    return make


def vllm_runner(folder: Path):
    """FlashKDA as vLLM's wheel ships it."""
    torch.ops.load_library(str((folder / "vllm" / "_flashkda_C.abi3.so").resolve()))
    op = torch.ops._flashkda_C

    def make(x: dict, checkpoint: bool):
        q, k, v, g, beta = (x[n][None] for n in ("q", "k", "v", "g", "beta"))
        T, H, N = q.shape[1], q.shape[2], x["cu_seqlens"].numel() - 1
        out, final = torch.empty_like(v), torch.empty_like(x["initial_state"])
        scratch = torch.empty(op.get_workspace_size(T, H, N), dtype=torch.uint8, device=q.device)
        saved, offsets = (torch.empty_like(final), offsets_of(x)) if checkpoint else (None, None)

        def run():
            op.fwd(q, k, v, g, beta, D**-0.5, out, scratch, x["A_log"], x["dt_bias"], x["lower_bound"],
                   x["initial_state"], final, x["cu_seqlens"], saved, offsets)  # fmt: skip
            return out[0], final

        return run

    return make


def cudnn_runner(_: Path):
    """cuDNN frontend's Hopper kernel: float32 gate and beta, no checkpoints."""
    from cudnn.linear_attention.hopper import cuda_host as host

    flags = host.FLAG_L2NORM | host.FLAG_SAFE_GATE | host.FLAG_BETA_SIGMOID

    def make(x: dict, checkpoint: bool):
        if checkpoint:
            raise NotImplementedError("no checkpoints")
        (T, H, _), N = x["q"].shape, x["cu_seqlens"].numel() - 1
        out, final = torch.empty_like(x["v"]), torch.empty_like(x["initial_state"])
        g, beta, keep = x["g"].float(), x["beta"].float(), x

        def run():
            p = {n: t.data_ptr() for n, t in keep.items() if isinstance(t, torch.Tensor)}
            host.launch(0, torch.cuda.current_stream().cuda_stream, p["q"], p["k"], p["v"], g.data_ptr(), beta.data_ptr(),
                        p["cu_seqlens"], p["initial_state"], out.data_ptr(), final.data_ptr(), T, N, H, p["A_log"],
                        p["dt_bias"], x["lower_bound"], flags, D**-0.5)  # fmt: skip
            return out, final

        return run

    return make


def fla_runner(_: Path):
    """flash-linear-attention's chunk_kda in Triton, no checkpoints."""
    os.environ["FLA_FLASH_KDA"] = "0"
    from fla.ops.kda import chunk_kda

    def make(x: dict, checkpoint: bool):
        if checkpoint:
            raise NotImplementedError("no checkpoints")
        packed = {n: x[n][None] for n in ("q", "k", "v", "g", "beta")}
        cu = x["cu_seqlens"].long()

        @torch.inference_mode()
        def run():
            out, final = chunk_kda(**packed, scale=D**-0.5, initial_state=x["initial_state"], output_final_state=True,
                                   use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                                   safe_gate=True, A_log=x["A_log"], dt_bias=x["dt_bias"].flatten(),
                                   lower_bound=x["lower_bound"], transpose_state_layout=True, cu_seqlens=cu)  # fmt: skip
            return out[0], final

        return run

    return make


PEERS = dict(vllm=vllm_runner, vllm_ckpt=vllm_runner, cudnn=cudnn_runner, fla=fla_runner)


def runners(backends: list[str], peers: list[str], folder: Path) -> dict:
    """name -> (maker, checkpoint?) of everything that is there; the rest is named and skipped."""
    found = {}
    for name in backends:
        try:
            make = our_runner(name)
            found |= {name: (make, False), f"{name}_ckpt": (make, True)}
        except (RuntimeError, ValueError) as error:
            print(f"skipped {name}: {error}", file=sys.stderr)
    for name in peers:
        try:
            found[name] = PEERS[name](folder), name.endswith("_ckpt")
        except Exception as error:  # a peer may fail to load in any way of its own
            print(f"skipped {name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return found


REP = 50  # milliseconds each measurement repeats for


def microseconds(run) -> float:
    return round(do_bench(run, warmup=REP // 4, rep=REP, return_mode="median") * 1e3, 1)


def errors(found: dict) -> dict:
    """Relative error of out and final state to float64, per regime and runner."""
    table = {}
    for regime in REGIMES:
        x = random_inputs([300], 4, D, regime, seed=1, dtype=torch.bfloat16, device="cuda")
        exact = kda_recurrent(**x)
        for name, (make, checkpoint) in found.items():
            try:
                out, final = make(x, checkpoint)()
                pair = [relative_error(out, exact.out), relative_error(final, exact.final_state)]
                table.setdefault(regime, {})[name] = [round(e, 6) for e in pair]
                print(f"{regime} {name}: error {pair[0]:.2e} (out), {pair[1]:.2e} (state)", flush=True)
            except Exception as error:
                table.setdefault(regime, {})[name] = f"{type(error).__name__}: {str(error)[:120]}"
    return table


def time_shapes(found: dict, regimes: list[str], copy_gbs: float) -> list[dict]:
    rows = []
    for regime in regimes:
        for name, lens, heads in SHAPES:
            x = inputs(lens, heads, regime)
            tokens = sum(lens)
            moved = 5 * tokens * heads * D * 2 + tokens * heads * 2 + 2 * x["initial_state"].numel() * 4
            row = dict(regime=regime, shape=name, heads=heads, tokens=tokens, us={})
            row["floor_us"] = round(moved / copy_gbs / 1e3, 1)
            for runner, (make, checkpoint) in found.items():
                try:
                    row["us"][runner] = microseconds(make(x, checkpoint))
                except Exception as error:
                    row["us"][runner] = None
                    print(f"{runner} at {name} {regime}: {type(error).__name__}: {str(error)[:160]}", file=sys.stderr)
            rows.append(row)
            print(json.dumps(row), flush=True)
            del x
            torch.cuda.empty_cache()
    return rows


def inputs(lens: list[int], heads: int, regime: str) -> dict:
    """As `random_inputs`, for many tokens: drawn on the GPU with the same distributions."""
    x = random_inputs([1], heads, D, regime, dtype=torch.bfloat16, device="cuda")
    T, N = sum(lens), len(lens)
    rng = torch.Generator("cuda").manual_seed(0)
    acts = {n: torch.randn(T, heads, D, generator=rng, device="cuda").bfloat16() for n in ("q", "k", "v", "g")}
    if regime == "slow":
        acts["g"] = 0.5 * acts["g"]
    beta = torch.randn(T, heads, generator=rng, device="cuda").bfloat16()
    state = 0.1 * torch.randn(N, heads, D, D, generator=rng, device="cuda")
    cu = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    return x | acts | dict(beta=beta, initial_state=state, cu_seqlens=cu)


def time_growth(name: str) -> list[list[float]]:
    """[tokens, us] of one row with 12 heads at slow gates, one checkpoint."""
    found = []
    for tokens in GROWTH:
        found.append([tokens, microseconds(our_runner(name)(inputs([tokens], 12, "slow"), True))])
        torch.cuda.empty_cache()
    return found


def time_store(name: str, rows: int = 64, heads: int = 96) -> dict:
    """The store kernel: every row's checkpoint to its slot. GB/s counts bytes read and written."""
    backend, C, tokens = get_backend(name), 3 * heads * D, 32
    state = torch.empty(rows + 1, heads, D, D, device="cuda")
    conv = torch.empty(rows + 1, C, 3, device="cuda", dtype=torch.bfloat16)
    saved = torch.randn(rows, heads, D, D, device="cuda")
    x = torch.randn(rows * tokens, C, device="cuda").bfloat16()
    args = dict(
        conv_cache=conv, state_cache=state, x=x, initial_windows=None, checkpoint_state=saved,
        cu_seqlens=torch.arange(rows + 1, device="cuda", dtype=torch.int32) * tokens,
        checkpoint_offsets=torch.full((rows,), 16, device="cuda", dtype=torch.int32),
        state_indices=torch.randperm(rows, device="cuda") + 1,
    )  # fmt: skip
    us = microseconds(lambda: backend.store_cache_checkpoints(**args))
    moved = 2 * (saved.numel() * 4 + rows * C * 3 * 2)
    return dict(rows=rows, heads=heads, us=us, gbs=round(moved / us / 1e3, 1))


def time_decode(name: str, batch: int = 64, heads: int = 32) -> dict:
    """One decoded token for a batch, in place. GB/s counts the states and windows read and written."""
    backend, C = get_backend(name), 3 * heads * D
    state = torch.randn(batch + 1, heads, D, D, device="cuda")
    conv = torch.randn(batch + 1, C, 3, device="cuda").bfloat16()
    slots = torch.randperm(batch, device="cuda") + 1
    x = random_inputs([batch], heads, D, "slow", dtype=torch.bfloat16, device="cuda")
    args = {n: x[n] for n in ("g", "beta", "A_log", "dt_bias", "lower_bound")}
    args |= dict(x=torch.randn(batch, C, device="cuda").bfloat16(), weight=torch.randn(C, 4, device="cuda").bfloat16())
    args |= dict(conv_cache=conv, state_cache=state, load_slots=slots, store_slots=slots)
    us = microseconds(lambda: backend.decode(**args))
    moved = 2 * (batch * heads * D * D * 4 + batch * C * 3 * 2) + batch * C * 2
    return dict(batch=batch, heads=heads, us=us, gbs=round(moved / us / 1e3, 1))


def summary(result: dict) -> None:
    """Geometric means over the shapes, and the least, against fla; the cost of checkpoints."""
    for ours in [n for n in ("triton", "cuda") if any(n in row["us"] for row in result["rows"])]:
        for regime in REGIMES:
            rows = [r["us"] for r in result["rows"] if r["regime"] == regime and r["us"].get(ours)]
            mean = lambda xs: math.exp(sum(map(math.log, xs)) / len(xs)) if xs else float("nan")  # noqa: E731
            for peer in ("fla", "vllm", "cudnn"):
                gains = [r[peer] / r[ours] for r in rows if r.get(peer)]
                if gains:
                    print(f"{ours} {regime}: {mean(gains):.2f}x {peer} (least {min(gains):.2f}x)")
            costs = [r[f"{ours}_ckpt"] / r[ours] for r in rows if r.get(f"{ours}_ckpt")]
            if costs:
                print(
                    f"{ours} {regime}: checkpoints cost {100 * (mean(costs) - 1):.1f} % (most {100 * (max(costs) - 1):.1f} %)"
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="triton,cuda")
    parser.add_argument("--peers", default="vllm,vllm_ckpt,cudnn,fla")
    parser.add_argument("--peers-dir", type=Path, default=Path(".peers"))
    parser.add_argument("--regimes", default=",".join(REGIMES))
    parser.add_argument("--out", type=Path, default=Path("nbs/results/kda_prefill.json"))
    parser.add_argument("--rep", type=int, default=REP, help="milliseconds each measurement repeats for")
    args = parser.parse_args()
    globals()["REP"] = args.rep
    if not torch.cuda.is_available():
        print("bench_kda: needs a CUDA device", file=sys.stderr)
        return 2
    names = lambda text: [each for each in text.split(",") if each]  # noqa: E731
    found = runners(names(args.backends), names(args.peers), args.peers_dir)
    result = machine()
    result["errors"] = errors(found)
    ours = [n for n in names(args.backends) if n in found]
    result["store"] = {n: time_store(n) for n in ours}
    result["decode"] = {n: time_decode(n) for n in ours}
    print(json.dumps(dict(store=result["store"], decode=result["decode"], copy_gbs=result["copy_gbs"])), flush=True)
    result["rows"] = []
    for regime in names(args.regimes):  # written after each, so that a run cut short is not lost
        result["rows"] += time_shapes(found, [regime], result["copy_gbs"])
        write(args.out, result)
    result["growth"] = {name: time_growth(name) for name in ours}
    write(args.out, result)
    summary(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

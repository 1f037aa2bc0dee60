"""compute-sanitizer over the CUDA kernels: memcheck, racecheck and synccheck on a few small calls that take every path.

    python tools/sanitize_cuda.py [memcheck racecheck synccheck]

Exit code 1 when a tool finds something or the calls fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

TOOLS = ("memcheck", "racecheck", "synccheck")


def calls() -> None:
    """Partial tiles, an empty row, checkpoints, bf16 states; rows cut, with forgotten and remembered segments."""
    import itertools

    import torch

    from kda_ckpt.cuda_kda import flashkda_prefill

    def run(lens, heads, bias, segments, v_parts=1, offsets=None, dtype=torch.float32, beta_dtype=torch.bfloat16):
        torch.manual_seed(0)
        T, N = sum(lens), len(lens)
        q, k, v, g = (torch.randn(T, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        beta = torch.randn(T, heads, device="cuda", dtype=beta_dtype)
        cu = torch.tensor([0, *itertools.accumulate(lens)], device="cuda", dtype=torch.int32)
        flashkda_prefill(
            q, k, v, g, beta, A_log=torch.zeros(heads, device="cuda"), cu_seqlens=cu, lower_bound=-5.0,
            dt_bias=torch.full((heads, 128), bias, device="cuda"), segments=segments, v_parts=v_parts,
            initial_state=torch.randn(N, heads, 128, 128, device="cuda", dtype=dtype),
            checkpoint_offsets=None if offsets is None else torch.tensor(offsets, device="cuda", dtype=torch.int32),
        )  # fmt: skip
        torch.cuda.synchronize()

    run([37, 0, 16], 2, -4.0, 1, offsets=[[20, 3], [0, 0], [15, 0]], dtype=torch.bfloat16)
    run([200], 1, -6.0, 4, offsets=[100], beta_dtype=torch.float32)
    run([200], 1, 1.0, 4, v_parts=2)
    print("all calls ran")


def main() -> int:
    if sys.argv[1:] == ["--calls"]:
        calls()
        return 0
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    failed = 0
    for tool in sys.argv[1:] or TOOLS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--calls"]
        env = {**os.environ, "KDA_CKPT_DEFINES": "-DEVERY_LANE_ARRIVES"}  # see common.cuh, warp_arrive
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip(" =")]
        shown = lines[-2:] if done.returncode == 0 else [*lines[:40], "...", *lines[-4:]]
        print(f"{tool}: {'clean' if done.returncode == 0 else 'FAILED'}\n  " + "\n  ".join(shown))
        failed += done.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

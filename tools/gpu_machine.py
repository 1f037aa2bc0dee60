"""What a measurement ran on: the GPU, versions, commit and date, and the two rates that floors are computed from."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path

import torch

from kda_ckpt.ttft import git_commit

try:
    import triton
except ImportError:
    triton = None


def facts() -> dict:
    """GPU, versions, commit and date. If KDA_CKPT_COMMIT is set, it says the commit."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "triton": triton and triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": git_commit() or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def rates(rep: int = 50) -> dict:
    """GB/s of a copy of 1 GiB, bytes read and written, and TFLOP/s of a bf16 product of 8192 × 8192 matrices.

    Medians over about `rep` milliseconds each.
    """
    from triton.testing import do_bench

    def seconds(call) -> float:
        return do_bench(call, warmup=rep // 4, rep=rep, return_mode="median") / 1e3

    source, n = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"), 8192
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds(lambda: target.copy_(source))
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * n**3 / seconds(lambda: a @ b)
    return {"copy_gbs": round(copy / 1e9, 1), "matmul_tflops": round(matmul / 1e12, 1)}


def machine() -> dict:
    """All of it; needs a GPU."""
    found = facts() | rates()
    torch.cuda.empty_cache()
    return found


def write(path: Path, result: dict) -> None:
    """A result as JSON, in a directory that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

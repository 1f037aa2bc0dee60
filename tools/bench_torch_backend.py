"""How much faster than the token-by-token loop is the torch backend's prefill on this machine's CPU?

    python tools/bench_torch_backend.py [--write]

Both run in float32 on the same inputs, alternately, and the fastest runs are compared: other programs can only slow
a run down. Prints one JSON line; --write also stores it as nbs/results/torch_backend_cpu.json, which the notebook
on the torch backend shows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import time
from pathlib import Path

import torch

from kda_ckpt.backends import TorchBackend
from kda_ckpt.reference import kda_recurrent, random_inputs, relative_error

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "nbs" / "results" / "torch_backend_cpu.json"


def milliseconds(run) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def measure(tokens: int, heads: int, head_dim: int, repeats: int) -> dict:
    """Fastest runs in ms of the loop and of the tiles, and the tiles' error against the float64 loop."""
    x, backend = random_inputs([tokens], heads, head_dim, "mixed"), TorchBackend()
    ways = {
        "loop_ms": lambda: kda_recurrent(**x, dtype=torch.float32),
        "tiles_ms": lambda: backend.prefill(**x),
    }
    for run in ways.values():
        run()  # warm up
    times = {name: [] for name in ways}
    for _ in range(repeats):
        times["loop_ms"].append(milliseconds(ways["loop_ms"]))
        times["tiles_ms"] += [milliseconds(ways["tiles_ms"]) for _ in range(3)]
    result = {name: round(min(each), 2) for name, each in times.items()}
    error = relative_error(backend.prefill(**x).out, kda_recurrent(**x).out)
    shape = dict(tokens=tokens, heads=heads, head_dim=head_dim)
    return shape | result | dict(speedup=round(result["loop_ms"] / result["tiles_ms"], 1), error=float(f"{error:.2g}"))


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str:
    """The commit of this checkout, with a + when files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
        return head + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"store the result as {RESULT.relative_to(ROOT)}")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = measure(2048, 4, 64, args.repeats) | dict(dtype="float32")
    result["lengths"] = [measure(tokens, 4, 32, max(args.repeats // 3, 1)) for tokens in (16, 64, 256, 1024, 4096)]
    result |= dict(cpu=cpu_name(), threads=torch.get_num_threads(), torch=torch.__version__, commit=commit())
    result["date"] = datetime.date.today().isoformat()
    print(json.dumps(result))
    if args.write:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

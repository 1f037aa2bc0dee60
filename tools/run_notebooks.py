"""Run notebooks in place so that they are saved with their outputs.

    python tools/run_notebooks.py [nbs/01_mamba_spec.ipynb ...]

Cells flagged `#| cuda` run only where torch sees a GPU, cells flagged `#| slow` only with --slow; a skipped cell
keeps the outputs that are stored with it. Exit code 1 when a cell raises.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent


class FlaggedClient(NotebookClient):
    """A notebook client that leaves out cells with certain nbdev flags."""

    skip: frozenset[str] = frozenset()

    async def async_execute_cell(self, cell, cell_index, *args, **kwargs):
        flags = set(re.findall(r"^#\|\s*(\w+)", cell.source, flags=re.M))
        if cell.cell_type == "code" and flags & self.skip:
            return cell
        return await super().async_execute_cell(cell, cell_index, *args, **kwargs)


def run(path: Path, skip: frozenset[str]) -> None:
    """Execute one notebook and write it back with its outputs."""
    nb = nbformat.read(path, as_version=4)
    client = FlaggedClient(nb, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}})
    client.skip = skip
    client.execute()
    for cell in nb.cells:
        cell.metadata.pop("execution", None)
    nbformat.write(nb, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--slow", action="store_true", help="run the cells flagged slow as well")
    args = parser.parse_args()
    try:
        import torch

        has_gpu = torch.cuda.is_available()
    except ImportError:
        has_gpu = False
    os.environ.pop("MPLBACKEND", None)  # so that figures are shown inline, and thus saved
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads are slow on a busy machine
    skip = frozenset(({"cuda"} if not has_gpu else set()) | ({"slow"} if not args.slow else set()))
    failed = 0
    for path in args.notebooks or sorted((ROOT / "nbs").glob("*.ipynb")):
        start = time.perf_counter()
        try:
            run(path, skip)
            print(f"{path.name}: ran in {time.perf_counter() - start:.1f} s")
        except CellExecutionError as error:
            failed += 1
            print(f"{path.name}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Check that the package, the notebooks and README.md are exactly what their sources give.

In a copy of the tree, export the notebooks, clean them and make the README; nothing may change.
Exit code 1, with the names of the files, when something does.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRACKED = ("kda_ckpt", "nbs", "README.md", "pyproject.toml")
SOURCES = (*TRACKED, "settings.ini", "tools", "LICENSE")


def files(root: Path) -> dict[str, Path]:
    """The files that generation may touch, by their path below `root`."""
    found = [root / name for name in TRACKED if (root / name).is_file()]
    for name in ("kda_ckpt", "nbs"):
        found += [
            p
            for p in (root / name).rglob("*")
            if p.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & {*p.parts}
        ]
    return {str(path.relative_to(root)): path for path in found}


def run(script: str, cwd: Path) -> None:
    """Run a script of this environment inside the copy."""
    env = os.environ | {"PYTHONPATH": str(cwd)}
    subprocess.run([str(Path(sys.executable).parent / script)], cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "tree"
        copy.mkdir()
        for name in SOURCES:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
            elif source.exists():
                shutil.copy2(source, copy / name)
        run("nbdev_export", copy)
        run("nbdev_clean", copy)
        subprocess.run([sys.executable, "tools/make_readme.py"], cwd=copy, check=True)
        before, after = files(ROOT), files(copy)
        changed = sorted(
            name
            for name in before.keys() | after.keys()
            if name not in before or name not in after or not filecmp.cmp(before[name], after[name], shallow=False)
        )
    for name in changed:
        print(f"{name}: not what its source gives; run nbdev_export, nbdev_clean and make readme", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    raise SystemExit(main())

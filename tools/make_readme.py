"""Make README.md from nbs/index.ipynb, with nbconvert.

Cells flagged `#| hide` are left out and flag lines are dropped. Pictures go to nbs/readme_files/.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "nbs" / "readme_files"


def main() -> int:
    nb = nbformat.read(ROOT / "nbs" / "index.ipynb", as_version=4)
    nb.cells = [cell for cell in nb.cells if not re.search(r"^#\|\s*hide", cell.source, flags=re.M)]
    for cell in nb.cells:
        cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M)
    text, resources = MarkdownExporter().from_notebook_node(nb, resources={"output_files_dir": "nbs/readme_files"})
    shutil.rmtree(PICTURES, ignore_errors=True)
    for name, data in resources.get("outputs", {}).items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    lines = [line.rstrip() for line in text.strip().splitlines()]
    (ROOT / "README.md").write_text("\n".join(["<!-- Made from nbs/index.ipynb by `make readme`. -->", "", *lines, ""]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

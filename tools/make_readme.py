"""Make README.md from nbs/index.ipynb, with nbconvert.

Cells flagged `#| hide` are left out, of cells flagged `#| hide_input` only the output is shown, and flag lines are
dropped. Links are made relative to the repository's root, and pictures go to nbs/readme_files/.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "nbs" / "readme_files"


def main() -> int:
    nb = nbformat.read(ROOT / "nbs" / "index.ipynb", as_version=4)
    nb.metadata.language_info = {"name": "python"}
    nb.cells = [cell for cell in nb.cells if not re.search(r"^#\|\s*hide\s*$", cell.source, flags=re.M)]
    for cell in nb.cells:
        if re.search(r"^#\|\s*hide_input\s*$", cell.source, flags=re.M):
            cell.metadata.tags = ["hide_input"]
        cell.source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M)
        cell.source = re.sub(r"\]\((\w+\.ipynb)\)", r"](nbs/\1)", cell.source).replace("](../", "](")
    config = Config({"TagRemovePreprocessor": {"enabled": True, "remove_input_tags": {"hide_input"}}})
    text, resources = MarkdownExporter(config=config).from_notebook_node(
        nb, resources={"output_files_dir": "nbs/readme_files"}
    )
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

# SPDX-License-Identifier: Apache-2.0
"""Writes the tutorial's page as a notebook without outputs: ``python docs/_site/notebook.py``.

Python and commands become cells, the text between them too; pasted output is left out. A test
compares the file with the page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
PAGE, NOTEBOOK = DOCS / "tutorial.md", DOCS / "examples" / "tutorial.ipynb"
SITE = "https://github.com/keymix/keymix/blob/main/docs/"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^<!--.*?-->\n*", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
_PAGE_ONLY = re.compile(r"^<!-- page -->$.*?^<!-- /page -->\n*", re.MULTILINE | re.DOTALL)


def notebook() -> str:
    """Return the notebook of the page as it stands."""
    text = _COMMENT.sub("", _PAGE_ONLY.sub("", PAGE.read_text(encoding="utf-8")))
    cells: list[dict[str, object]] = []
    end = 0
    for block in _BLOCK.finditer(text):
        _add(cells, "markdown", _LINK.sub(rf"]({SITE}\1)", text[end : block.start()]))
        language, content = block.groups()
        if language == "bash":
            content = "".join(f"!{line}\n" for line in content.splitlines())
        if language in ("bash", "python"):
            _add(cells, "code", content)
        end = block.end()
    _add(cells, "markdown", _LINK.sub(rf"]({SITE}\1)", text[end:]))
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    whole = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _add(cells: list[dict[str, object]], kind: str, text: str) -> None:
    if not text.strip():
        return
    cell: dict[str, object] = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    cells.append(cell | {"source": text.strip("\n").splitlines(keepends=True)})


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")

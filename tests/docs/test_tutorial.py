# SPDX-License-Identifier: Apache-2.0
"""The tutorial's notebook is its page, and runs from the first cell to the last."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from documents import DOCS, blocks

NOTEBOOK = DOCS / "examples" / "tutorial.ipynb"
# Commands run where the cells do, with costs made up and charts left empty: these take longer than
# all else.
_DRIVER = """
import json, shlex, sys
from costs import cheap_costs, no_trials
from keymix.cli import main
from keymix.report import svg
svg._drawn = lambda *_: "<svg></svg>"
namespace = {"__name__": "__main__"}
with cheap_costs(), no_trials():
    for number, cell in enumerate(json.load(sys.stdin)):
        print(f"== {number}", flush=True)
        for line in cell.splitlines() if cell.startswith("!") else ():
            assert main(shlex.split(line)[1:]) == 0
        if not cell.startswith("!"):
            exec(compile(cell, f"cell {number}", "exec"), namespace)
"""


def cells(kind: str) -> list[str]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def test_the_notebook_is_what_its_script_makes_of_the_page() -> None:
    made = run_path(str(DOCS / "_site" / "notebook.py"))["notebook"]()
    assert NOTEBOOK.read_text(encoding="utf-8") == made, "run docs/_site/notebook.py"


def test_notebooks_have_no_outputs() -> None:
    found = list(DOCS.rglob("*.ipynb"))
    assert NOTEBOOK in found
    for path in found:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            assert not cell.get("outputs")
            assert cell.get("execution_count") is None


def test_code_is_that_of_the_page_and_no_link_is_relative() -> None:
    shown = [
        b.text.strip() for b in blocks(DOCS / "tutorial.md") if b.language in ("bash", "python")
    ]
    assert [re.sub("^!", "", cell, flags=re.M) for cell in cells("code")] == shown
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(cells("markdown")))
    assert len(links) > 5
    assert all(link.startswith("https://") for link in links)


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_the_page_says(tmp_path: Path) -> None:
    """Every cell in one new process, with one seed and epoch in place of the page's."""
    code, few = cells("code"), "--seeds 1 --epochs 1 --processes 1"
    short = [re.sub(r"--seeds \d+ --epochs \d+", few, cell) for cell in code]
    assert short != code
    rooms = os.pathsep.join(str(DOCS.parent / room) for room in ("src", "tests"))
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": rooms},
        input=json.dumps(short),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = re.split(r"^== \d+\n", done.stdout, flags=re.M)[1:]
    assert len(printed) == len(code)
    written, checked, compared, predicted, loaded, *_, shapes = printed
    pasted = [b.text for b in blocks(DOCS / "tutorial.md") if b.language == "text"]
    assert written == pasted[0]
    table = pasted[1].partition("\nlevel ")[0]
    assert checked.replace("\t", " ").split()[: len(table.split())] == table.split()
    for name in ("softmax", "static_key", "identity", "plain network"):
        assert re.search(rf"^{name}\t", compared, re.M)
        assert re.search(rf"^{name} ", pasted[2], re.M)
    files = re.findall(r"digits-new/\d+\.png", pasted[3])
    assert re.findall(r"digits-new/\d+\.png", predicted) == files
    assert re.findall(r"digits-new/\d+\.png", loaded) == files
    assert shapes == pasted[-1]

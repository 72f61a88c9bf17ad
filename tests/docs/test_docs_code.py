# SPDX-License-Identifier: Apache-2.0
"""Python in the documents runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from documents import DOCS, DOCUMENTS, ROOT, Block, blocks

WITH_PYTHON = [
    path for path in DOCUMENTS if any(block.language == "python" for block in blocks(path))
]

# Runs a document's blocks one after the other in one namespace; each stands on its own line count,
# so that a traceback names the line of the document.
_DRIVER = """
import json, sys
namespace = {"__name__": "__main__"}
for path, line, text in json.loads(sys.stdin.read()):
    exec(compile("\\n" * line + text, path, "exec"), namespace)
"""


def run_blocks(chosen: list[Block], folder: Path) -> subprocess.CompletedProcess[str]:
    import json

    handed = json.dumps([(str(b.path), b.line, b.text) for b in chosen])
    return subprocess.run(
        [sys.executable, "-c", _DRIVER],
        input=handed,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("path", WITH_PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run_in_order(path: Path, tmp_path: Path) -> None:
    chosen = [b for b in blocks(path) if b.language == "python" and b.not_run is None]
    ran = run_blocks(chosen, tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_a_block_that_fails_is_told_with_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nx = 1\nraise LookupError(x)\n```\n", encoding="utf-8")
    ran = run_blocks(blocks(page), tmp_path)
    assert ran.returncode != 0
    assert 'page.md", line 5' in ran.stderr


def test_blocks_that_are_not_run_say_why() -> None:
    silent = [
        str(block)
        for path in DOCUMENTS
        for block in blocks(path)
        if block.not_run is not None and len(block.not_run.split()) < 3
    ]
    assert not silent, f"<!-- not run: … --> needs a reason: {silent}"


def test_the_own_mixer_page_shows_the_example_file() -> None:
    shown = [b.text for b in blocks(DOCS / "own-mixer.md") if b.language == "python"]
    example = (DOCS / "examples" / "my_mixer.py").read_text(encoding="utf-8")
    assert example in shown


def test_the_figure_is_what_its_script_draws() -> None:
    namespace: dict[str, object] = {"__name__": "mechanisms"}
    source = (DOCS / "figures" / "mechanisms.py").read_text(encoding="utf-8")
    exec(compile(source, "mechanisms.py", "exec"), namespace)
    drawn = namespace["figure"]()  # type: ignore[operator]
    kept = (DOCS / "figures" / "mechanisms.svg").read_text(encoding="utf-8")
    assert kept == drawn, "run docs/figures/mechanisms.py"

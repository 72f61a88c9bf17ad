# SPDX-License-Identifier: Apache-2.0
"""Write ``docs/terminal.md``: how a comparison ends in terminals of four widths.

python docs/figures/terminal.py
"""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from keymix.cli import console
from keymix.cli.comparison import print_result
from keymix.compare.run import Comparison
from keymix.report.record import opened

DOCS = Path(__file__).parents[1]
RECORD = DOCS / "results/cifar10-20-epochs/results.json"
WIDTHS = (60, 80, 100, 140)

HEAD = """# A comparison at the terminal

How does the table of a comparison fit a narrow terminal? It leaves out the less important columns
and names them below, and never cuts a name or a number. Score, difference, interval and certainty
stay longest. The last lines are the answer, what to do next, and the report. `--open` shows the
report in the browser, and `--json` prints everything for programs.

These screens are those of [10,000 CIFAR-10 images](results/cifar10-20-epochs.md). They are drawn
from its record by `python docs/figures/terminal.py`.
"""


def screen(width: int) -> str:
    """Return what a terminal of a width shows at the end of the comparison."""
    stream = io.StringIO()
    shown = Console(
        file=stream, width=width, soft_wrap=True, highlight=False, emoji=False, no_color=True,
        force_terminal=True, color_system=None,
    )  # fmt: skip
    before = console.out, console.err
    console.out = console.err = shown
    try:
        record = opened(json.loads(RECORD.read_text("utf-8")), where=RECORD.name)
        print_result(Comparison(out=Path("keymix-compare"), record=record))
    finally:
        console.out, console.err = before
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def page() -> str:
    """Return the page."""
    parts = [f"## {width} columns\n\n```text\n{screen(width)}\n```\n" for width in WIDTHS]
    return "\n".join([HEAD, *parts])


if __name__ == "__main__":
    (DOCS / "terminal.md").write_text(page(), encoding="utf-8")

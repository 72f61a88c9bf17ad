# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze memory``: peak memory of attention against the number of tokens."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.cli import console
from keymix.cli.analyze_complexity import watching
from keymix.cli.console import VerbParser, whole_number
from keymix.errors import UserError

if TYPE_CHECKING:
    from keymix.analysis.memory_record import MemoryGrowth, MemoryRecord

SUMMARY = "peak memory of attention against tokens, beside QKFormer's Table 8"
RECORD, PAGE, CSV = "memory.json", "memory.html", "memory.csv"
MOST_SIDES = 1000

_DESCRIPTION = """\
Measure the peak memory of mixers' attention alone, without projections and gradients, on one
image in one time step, against the square root of the tokens; beside QKFormer's Table 8 and
Fig. 4, Q-K token attention against spiking self-attention."""

_EPILOG = """\
examples:
  keymix analyze memory
  keymix analyze memory --out memory
  keymix analyze memory --order linear --sides 10-200:10
  keymix analyze memory --mixers qkta,qkca,sdsa,'ssa(order=linear)',mhsa --sides 10-100:10
  keymix analyze memory --device cuda --out memory-on-gpu
The largest of the defaults holds a map of 6 GB; what does not fit is told and left out.
"""


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix analyze memory",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add(
        "--mixers",
        default="qkta,ssa",
        metavar="LIST",
        help="with commas, options in parentheses; the others are given as multiples of the first "
        "(default qkta,ssa)",
    )
    add(
        "--order",
        choices=("quadratic", "linear", "auto"),
        default="quadratic",
        help="of SSA's product where a mixer names none (default quadratic, the published one)",
    )
    add(
        "--sides",
        default="10-200:10",
        metavar="LIST",
        help="square roots of the numbers of tokens: 10,50,100 or 10-200:10 (default 10-200:10)",
    )
    add("--dim", type=int, default=256, metavar="C", help="width of the tokens (default 256)")
    add("--heads", type=int, default=1, metavar="H", help="attention heads (default 1)")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, … (default cpu)")
    add("--out", metavar="DIR", help=f"write {PAGE}, {RECORD} and {CSV} there")
    add("--overwrite", action="store_true", help="replace the analysis that is in DIR")
    add("--json", action="store_true", help="print the whole record as JSON")
    add("--markdown", action="store_true", help="print the table as Markdown")
    made.add_imports()
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix analyze memory``.

    Args:
        argv: The words after ``memory``.

    Returns:
        0; mistakes are raised as UserError.
    """
    given = parser().parse_args(argv)
    if given.json and given.markdown:
        raise UserError("--json and --markdown exclude each other: give one.")
    sides = _sides(given.sides)
    folder = None
    if given.out is not None:
        folder = console.checked_folder(given.out, RECORD, overwrite=given.overwrite)

    from keymix.analysis.memory_growth import memory_growth_parts
    from keymix.train.signals import interruptible

    known: list[MemoryGrowth] = []
    with (
        interruptible(lambda: _stands(known, given.out)),
        console.made_folder(folder, lambda: bool(known)),
        watching() as progress,
    ):
        parts = memory_growth_parts(
            given.mixers,
            dim=given.dim,
            num_heads=given.heads,
            sides=sides,
            order=given.order,
            device=given.device,
            imports=given.imports,
            progress=progress,
        )
        try:
            for part in parts:
                known[:] = [part]
        except KeyboardInterrupt:
            if known:
                _deliver(known[-1], argv, folder, given)
            raise
    _deliver(known[-1], argv, folder, given)
    return 0


def _sides(text: str) -> tuple[int, ...]:
    """Read square roots of numbers of tokens.

    Raises:
        UserError: If they are none.
    """
    found: list[int] = []
    try:
        for part in filter(None, (each.strip() for each in text.split(","))):
            span, _, step = part.partition(":")
            first, dash, last = span.partition("-")
            ends = whole_number(first), whole_number(last if dash else first)
            if max(ends) > MOST_SIDES:
                raise ValueError
            found += range(ends[0], ends[1] + 1, whole_number(step or "1"))
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UserError(
            f"--sides {text!r}: give numbers from 1 to {MOST_SIDES:,} with commas, such as "
            "10,50,100, or a range with its step, such as 10-200:10."
        )
    return tuple(found)


def _stands(known: list[MemoryGrowth], out: str | None) -> str:
    """Say what is kept when a signal ends the work."""
    if not known:
        return "nothing was measured yet"
    done = max(row.side for row in known[-1].rows)
    if out is None:
        return f"above stands what was measured up to sqrt(N) = {done}"
    return (
        f"{out!r} holds what was measured up to sqrt(N) = {done}; the same command with "
        "--overwrite measures all"
    )


def _deliver(
    study: MemoryGrowth, argv: list[str], folder: Path | None, given: argparse.Namespace
) -> None:
    """Write the files and tell the result."""
    from keymix.analysis.memory_record import MemoryRecord
    from keymix.analysis.study_record import joined
    from keymix.report import memory

    frame = console.frame("analyze", "memory", *argv)
    lines = dict(frame.environment)
    if study.device == "cpu":
        lines.pop("device", None)
    record = joined(MemoryRecord, study, frame, environment=lines)
    if folder is not None:
        _write(record, folder)
    shown = memory.table(record)
    if given.json:
        console.say_json(record)
    elif given.markdown:
        console.say(f"{shown.title}\n\n{shown.markdown()}".rstrip())
    elif console.out.is_terminal:
        console.show(shown)
    else:
        for line in memory.rows(record).piped():
            console.line(line)
    for row in study.rows:
        if row.reason is not None:
            console.note(f"{row.mixer} at sqrt(N) = {row.side}: {row.reason}")
    if folder is not None:
        console.note(f"{folder / PAGE} shows it; {RECORD} and {CSV} lie beside it")


def _write(record: MemoryRecord, folder: Path) -> None:
    from keymix.report import memory
    from keymix.train.files import write_text

    write_text(folder / RECORD, console.json_text(record))
    write_text(folder / CSV, memory.rows(record).csv())
    write_text(folder / PAGE, memory.render(record))

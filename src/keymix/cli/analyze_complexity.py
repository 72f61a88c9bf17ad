# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze complexity``: the papers' formulas beside counts, latency and memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from keymix.cli import console
from keymix.cli.console import VerbParser, whole_number
from keymix.errors import UserError, one_line

if TYPE_CHECKING:
    from keymix.analysis.complexity_record import Complexity, ComplexityRecord
    from keymix.analysis.complexity_scaling import Progress

SUMMARY = "the papers' formulas of cost beside counts; latency and memory against tokens"
RECORD, PAGE = "complexity.json", "complexity.html"

_DESCRIPTION = """\
Put the papers' formulas of what token mixers cost beside counts of the mixers themselves (SKA
Tables 6 and 7 and Fig. 4, Table 1 of key-value attention, Table 1 of QKFormer), and measure
latency and peak memory against the number of tokens, all mixers in turns. Every registered mixer
is in."""

_EPILOG = """\
examples:
  keymix analyze complexity
  keymix analyze complexity --out cost
  keymix analyze complexity --tokens none --json             counts alone, in seconds
  keymix analyze complexity --mixers mhsa,ska,cska --tokens 196,784,3136 --repeats 20
  keymix analyze complexity --dim 768 --heads 12 --at 196 --pos-dim 50 --tokens none
  keymix analyze complexity --import my_mixer.py
"""


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix analyze complexity",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--dim", type=int, default=256, metavar="D", help="width of the tokens (default 256)")
    add("--heads", type=int, default=8, metavar="H", help="attention heads (default 8)")
    add("--at", type=int, default=256, metavar="N", help="tokens of the tables (default 256)")
    add(
        "--pos-dim",
        type=int,
        default=50,
        metavar="M",
        help="channels of key-value attention's code of index pairs (default 50)",
    )
    add(
        "--tokens",
        default="49,196,784",
        metavar="LIST",
        help="where latency and memory are measured, each number on the grid nearest to a "
        "square; none measures nothing (default 49,196,784)",
    )
    add(
        "--mixers",
        metavar="LIST",
        help="with commas, options in parentheses: mhsa,'ska(activation=relu)' (default: all)",
    )
    add("--repeats", type=int, default=16, metavar="N", help="rounds of timing (default 16)")
    add(
        "--batch",
        type=int,
        default=1,
        metavar="B",
        help="images a batch, for memory; latency is of one image (default 1)",
    )
    add("--time-steps", type=int, default=4, metavar="T", help="of spiking mixers (default 4)")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, … (default cpu)")
    add("--out", metavar="DIR", help=f"write {PAGE}, {RECORD} and CSV files there")
    add("--overwrite", action="store_true", help="replace the analysis that is in DIR")
    add("--json", action="store_true", help="print the whole record as JSON")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    made.add_imports()
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix analyze complexity``.

    Args:
        argv: The words after ``complexity``.

    Returns:
        0; mistakes are raised as UserError.
    """
    given = parser().parse_args(argv)
    if given.json and given.markdown:
        raise UserError("--json and --markdown exclude each other: give one.")
    tokens = _tokens(given.tokens)
    folder = None
    if given.out is not None:
        folder = console.checked_folder(given.out, RECORD, overwrite=given.overwrite)

    from keymix.analysis.complexity import complexity_parts
    from keymix.train.signals import interruptible

    known: list[Complexity] = []
    with (
        interruptible(lambda: _stands(known, given.out)),
        console.made_folder(folder, lambda: bool(known)),
        watching() as progress,
    ):
        parts = complexity_parts(
            given.mixers,
            dim=given.dim,
            num_heads=given.heads,
            at=given.at,
            pos_dim=given.pos_dim,
            tokens=tokens,
            repeats=given.repeats,
            batch_size=given.batch,
            device=given.device,
            time_steps=given.time_steps,
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


def _tokens(text: str) -> tuple[int, ...]:
    if text.strip().lower() == "none":
        return ()
    try:
        numbers = tuple(whole_number(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = ()
    if not numbers:
        raise UserError(
            f"--tokens {text!r}: give numbers of tokens with commas, such as 49,196, or none."
        )
    return numbers


def _stands(known: list[Complexity], out: str | None) -> str:
    """Say what is kept when a signal ends the work."""
    if not known:
        return "nothing was counted yet"
    done = list(dict.fromkeys(row.tokens for row in known[-1].scaling))
    measured = f"was measured at {', '.join(map(str, done))} tokens" if done else "was counted"
    if out is None:
        return f"above stands what {measured}"
    return f"{out!r} holds what {measured}; the same command with --overwrite measures all"


def _record(study: Complexity, argv: list[str]) -> ComplexityRecord:
    from keymix.analysis.complexity_record import ComplexityRecord
    from keymix.analysis.study_record import joined

    frame = console.frame("analyze", "complexity", *argv)
    lines = {**frame.environment, "threads": str(study.setting.threads)}
    if study.setting.device == "cpu":
        lines.pop("device", None)
    return joined(ComplexityRecord, study, frame, environment=lines)


def _deliver(
    study: Complexity, argv: list[str], folder: Path | None, given: argparse.Namespace
) -> None:
    """Write the files and tell the result."""
    from keymix.report.complexity_tables import tables

    record = _record(study, argv)
    if folder is not None:
        _write(record, folder)
    shown = [table for table in tables(record) if table.shown]
    if given.json:
        console.say_json(record)
    elif given.markdown:
        console.say("\n".join(f"{table.title}\n\n{table.markdown()}" for table in shown).rstrip())
    elif console.out.is_terminal:
        for table in shown:
            console.show(table)
    else:
        for table in shown:
            for line in table.piped():
                console.line((table.key, *line))
    if folder is not None:
        console.note(f"{folder / PAGE} shows it; {RECORD} and CSV files lie beside it")


def _write(record: ComplexityRecord, folder: Path) -> None:
    from keymix.report.complexity import render
    from keymix.report.complexity_tables import tables
    from keymix.train.files import write_text

    csvs = {f"complexity-{table.key}.csv": table.csv() for table in tables(record) if table.saved}
    texts = {RECORD: console.json_text(record), **csvs}
    for stale in folder.glob("complexity-*.csv"):
        if stale.name not in texts:
            stale.unlink()
    for name, text in {**texts, PAGE: render(record)}.items():
        write_text(folder / name, text)


@contextmanager
def watching() -> Iterator[Progress]:
    """Show progress on standard error: a bar at a terminal, else a line for each step."""
    if not console.err.is_terminal:
        yield _lines()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console.err, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda told, share: bar.update(task, completed=share, description=one_line(told))


def _lines() -> Progress:
    """Tell each step once, when it begins; single mixers and rounds pass unsaid."""
    last = ""

    def line(told: str, share: float) -> None:
        nonlocal last
        step = told.partition(",")[0]
        if step != last and not step.startswith("counting ") and ": trying " not in step:
            last = step
            console.note(told)

    return line

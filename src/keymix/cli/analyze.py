# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze``: what models attend to, whether they collapse, what mixers cost."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from keymix.cli import console
from keymix.cli.console import VerbParser
from keymix.errors import UserError, one_line
from keymix.report.result import Result
from keymix.studies.study import Session, Study, get_study, list_studies

_HINT = "`keymix analyze attention --help` and so on say more."


def main(argv: list[str]) -> int:
    """Run ``keymix analyze``: 0, or 2 if an input was broken (it is named; the others are read)."""
    VerbParser.run_files(_imports(argv))
    if argv[:1] in (["-h"], ["--help"]):
        console.say(_help())
        return 0
    study = get_study(argv[0] if argv else "")
    given = parser(study).parse_args(argv[1:])
    if given.json and given.markdown:
        raise UserError("--json and --markdown exclude each other: give one.")
    if given.open and given.out is None:
        raise UserError("--open shows the page that --out DIR writes: name a folder.")
    folder = None
    if given.out is not None:
        from keymix.train.files import checked_output

        folder = checked_output(
            Path(given.out),
            manifest=f"{study.name}.json",
            what="results of this analysis",
            overwrite=given.overwrite,
        )
    from keymix.train.environment import frame
    from keymix.train.signals import interruptible

    made_by = frame(shlex.join(["keymix", "analyze", *argv]))
    session = Session(note=console.note, working=lambda: console.working(_lines()))
    found = None
    with (
        interruptible(lambda: _stopped(found, given.out)),
        console.made_folder(folder, lambda: found is not None),
    ):
        try:
            for known in study.run(given, session):
                found = known
                found.made_by = made_by
        except KeyboardInterrupt:
            if found is not None:
                _deliver(found, folder, given)
            raise
    assert found is not None
    return _deliver(found, folder, given)


def _imports(argv: list[str]) -> list[str]:
    """Read ``--import`` off a command line: a file may register the analysis that it names."""
    after = [word for before, word in pairwise(argv) if before == "--import"]
    return [*after, *(w.partition("=")[2] for w in argv if w.startswith("--import="))]


def _stopped(known: Result | None, out: str | None) -> str:
    """Say what is kept when a signal ends the work."""
    if known is None:
        return "nothing was written"
    if out is None:
        return "the tables above show what was measured"
    return f"{out!r} has what was measured; the same command with --overwrite does all"


def parsers() -> dict[str, VerbParser]:
    """Return the parsers of the command lines, by what follows ``keymix``."""
    return {f"analyze {name}": parser(get_study(name)) for name in list_studies()}


def parser(study: Study[Any]) -> VerbParser:
    """Return the parser of a study's command line."""
    made = VerbParser(
        prog=f"keymix analyze {study.name}",
        description=study.description,
        epilog=study.examples,
    )
    study.add_options(made.add_argument)
    made.add_out(f"{study.name}.html, {study.name}.json, and every table and chart as a file")
    made.add_json()
    made.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    made.add_open()
    made.add_imports()
    return made


def _help() -> str:
    studies = {name: get_study(name) for name in list_studies()}
    usages = [
        parser(study).format_usage().removeprefix("usage: ").rstrip() for study in studies.values()
    ]
    rows = [f"  {name:<11} {study.summary}" for name, study in studies.items()]
    return "usage: " + "\n       ".join(usages) + "\n\n" + "\n".join(rows) + "\n\n" + _HINT


def _deliver(found: Result, folder: Path | None, given: argparse.Namespace) -> int:
    """Write the files and print the result; return the exit code."""
    if folder is not None:
        _write(found, folder)
    shown = [table for table in found.tables.values() if table.shown]
    if given.json:
        console.say_json(found.to_dict())
    elif given.markdown:
        console.say("\n".join(f"{table.title}\n\n{table.markdown()}" for table in shown).rstrip())
    elif console.out.is_terminal:
        for label, lines in found.sentences.items():
            console.out.print(one_line(label), style="bold", markup=False)
            console.say("\n".join(f"  {one_line(line)}" for line in lines) + "\n")
        for table in shown:
            console.show(table)
    else:
        for table in shown:
            for cells in table.piped():
                console.line((table.key, *cells) if len(shown) > 1 else cells)
        for label, lines in found.sentences.items():
            for line in lines:
                console.note(one_line(f"{label}: {line}"))
    for line in found.notes:
        console.note(one_line(line))
    if folder is not None:
        page = folder / f"{found.name}.html"
        console.note(f"{page} shows it; next to it: {found.name}.json, tables and charts")
        if given.open:
            console.open_page(page)
    code = console.report_broken(found.left_out)
    if not given.json:
        last = console.say if console.out.is_terminal and not given.markdown else console.note
        last(one_line(found.answer))
    return code


def _write(found: Result, folder: Path) -> None:
    """Write files; those of an earlier analysis that are not among them go."""
    from keymix.train.files import write_bytes

    made = found.files()
    for name, content in made.items():
        write_bytes(folder / name, content.encode() if isinstance(content, str) else content)
    for old in folder.glob(f"{found.name}-*"):
        if old.name not in made and old.suffix in (".csv", ".png", ".svg"):
            old.unlink(missing_ok=True)


def _lines() -> Callable[[str, float], None]:
    """Write each step once, when it begins; single mixers and rounds are left out."""
    last = ""

    def line(text: str, share: float) -> None:
        nonlocal last
        step = text.partition(",")[0]
        if step != last and not step.startswith("counting ") and ": trying " not in step:
            last = step
            console.note(text)

    return line

# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze``: what models attend to, whether they collapse, what mixers cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from keymix.cli import console
from keymix.cli.console import VerbParser
from keymix.errors import UserError, one_line
from keymix.records import to_json
from keymix.studies.study import Content, Session, Study, get_study, list_studies

_HINT = "`keymix analyze attention --help` and so on say more."


def main(argv: list[str]) -> int:
    """Run ``keymix analyze``: 0, or 2 if an input was broken (it is named; the others are read)."""
    if argv[:1] in (["-h"], ["--help"]):
        console.say(_help())
        return 0
    study = get_study(argv[0] if argv else "")
    given = parser(study).parse_args(argv[1:])
    if study.markdown and given.json and given.markdown:
        raise UserError("--json and --markdown exclude each other: give one.")
    if given.open and given.out is None:
        raise UserError("--open shows the page that --out DIR writes: name a folder.")
    study.check(given)
    folder = None
    if given.out is not None:
        from keymix.train.files import checked_output

        folder = checked_output(
            Path(given.out),
            manifest=study.record_file,
            what="results of this analysis",
            overwrite=given.overwrite,
        )
    VerbParser.run_imports(given)

    from keymix.train.signals import interruptible

    session = Session(
        frame=partial(console.frame, "analyze", *argv),
        note=console.note,
        reading=_reading,
        working=_working,
    )
    found = None
    with (
        interruptible(lambda: study.stopped(found, given.out)),
        console.made_folder(folder, lambda: found is not None),
    ):
        try:
            for known in study.run(given, session):
                found = known
        except KeyboardInterrupt:
            if found is not None:
                _deliver(study, found, session, folder, given)
            raise
    return _deliver(study, found, session, folder, given)


def parsers() -> dict[str, VerbParser]:
    """Return the parsers of the command lines, by what follows ``keymix``."""
    return {f"analyze {name}": parser(get_study(name)) for name in list_studies()}


def parser(study: Study[Any, Any]) -> VerbParser:
    """Return the parser of a study's command line."""
    made = VerbParser(
        prog=f"keymix analyze {study.name}",
        description=study.description,
        epilog=study.examples,
    )
    add = made.add_argument
    study.add_options(add)
    made.add_out(study.writes, required=study.needs_folder)
    made.add_json()
    if study.markdown:
        add("--markdown", action="store_true", help="print the tables as Markdown")
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


def _deliver(
    study: Study[Any, Any],
    found: Any,
    session: Session,
    folder: Path | None,
    given: argparse.Namespace,
) -> int:
    """Write the files and print the result; return the exit code."""
    record = study.record(found, session)
    answer = study.answer(record)
    kept = {"answer": answer, **to_json(record)}
    if folder is not None:
        record_file = {study.record_file: console.json_text(kept)}
        _write(study, {**record_file, **session.made, **study.files(record)}, folder)
    markdown = study.markdown and given.markdown
    if given.json:
        console.say_json(kept)
    elif markdown:
        shown = [table for table in study.tables(record) if table.shown]
        console.say("\n".join(f"{table.title}\n\n{table.markdown()}" for table in shown).rstrip())
    elif console.out.is_terminal:
        _print_for_person(study, record)
    else:
        for table in study.piped(record):
            for cells in table.piped():
                console.line((table.key, *cells) if table.key else cells)
        for line in study.notes(record):
            console.note(one_line(line))
    if folder is not None:
        console.note(f"{folder / study.page_file} shows it; next to it: {study.also_written}")
        if given.open:
            console.open_page(folder / study.page_file)
    code = console.report_broken(study.broken(record))
    if not given.json:
        last = console.say if console.out.is_terminal and not markdown else console.note
        last(one_line(answer))
    return code


def _print_for_person(study: Study[Any, Any], record: Any) -> None:
    for label, lines in study.words(record):
        console.out.print(one_line(label), style="bold", markup=False)
        console.say("\n".join(f"  {one_line(line)}" for line in lines) + "\n")
    for table in study.tables(record):
        if table.shown:
            console.show(table)
    closing = study.closing(record)
    if closing:
        console.say(closing)


def _write(study: Study[Any, Any], made: Mapping[str, Content], folder: Path) -> None:
    """Write files; those of an earlier analysis that are not among them go."""
    from keymix.train.files import write_arrays, write_bytes, write_text

    stale = study.earlier_files(folder) - made.keys()
    for name, content in made.items():
        if isinstance(content, str):
            write_text(folder / name, content)
        elif isinstance(content, Mapping):
            write_arrays(folder / name, content)
        else:
            write_bytes(folder / name, content)
    for name in stale:
        (folder / name).unlink(missing_ok=True)


@contextmanager
def _reading(label: str, total: int, nouns: str) -> Iterator[Callable[[int], None] | None]:
    """Show how many inputs were read: a bar at a terminal, else a line for each model."""
    label = one_line(label)
    if not console.err.is_terminal:
        console.note(f"reading {total} {nouns} with {label}")
        yield None
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    text = TextColumn("{task.description}")
    with Progress(*columns, text, console=console.err, transient=True) as bar:
        task = bar.add_task(escape(label), total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _working() -> Iterator[Callable[[str, float], None]]:
    """Show what is being done: a bar at a terminal, else a line for each step."""
    if not console.err.is_terminal:
        yield _lines()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console.err, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, share: bar.update(task, completed=share, description=one_line(text))


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

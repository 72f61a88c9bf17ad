# SPDX-License-Identifier: Apache-2.0
"""Validates a data set before hours are spent: reads every image, goes on after a problem."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from keymix.data import contents
from keymix.data.files import existing_folder, existing_path
from keymix.data.findings import FAULTS, STOPS, WARNING, Report
from keymix.data.kinds import RECORDING
from keymix.data.sequences import sequences_of
from keymix.data.sources.base import Fault, Faults, Source
from keymix.data.specs import DataSpec, Options, find_spec, kind_of, parse
from keymix.data.splits import carve
from keymix.data.survey import Survey
from keymix.errors import UserError

Progress: TypeAlias = Callable[[int, int], None]


def check(
    what: str,
    *,
    progress: Progress | None = None,
    time_steps: int | None = None,
    masks: str | None = None,
    stack: int | None = None,
    split_by: str | None = None,
    test_fraction: float | None = None,
    cell_mib: int | None = None,
) -> Report:
    """Decode every image of a data set and tell all that is wrong with it.

    Images are compared by their decoded pixels, in the splits that training uses: the source's own,
    or those carved by `keymix.data.load` without options; of images with masks, validation is a
    sixth of what test leaves, as in the recipes for them. Sizes and hashes stay in memory, images
    do not.
    """
    entry, argument = resolve(what)
    options = Options(
        time_steps=time_steps,
        masks=masks,
        stack=stack,
        split_by=split_by,
        test_fraction=test_fraction,
        cell_mib=cell_mib,
    )
    if time_steps is not None and not entry.takes("time_steps"):
        raise UserError(
            f"time_steps={time_steps} is for {RECORDING.holds}; data {what} holds "
            f"{entry.input_kind.holds}. Leave --time-steps out."
        )
    entry.check_settings(what, options.of_one_kind)
    report = Report(spec=f"{entry.name}:{argument}" if argument else entry.name)
    faults, words = Faults(collect=True), _words(entry)
    try:
        source = entry.open(argument, faults, **options.of_opening)
    except UserError as error:
        if not entry.on_disk or not Path(argument).expanduser().exists():
            raise
        given = {name: value for name, value in options.of_opening.items() if value is not None}
        if given.keys() - {"cell_mib"} and _opens(entry, argument):
            raise  # a setting is at fault, not the data
        _add_faults(report, faults.found, words)
        report.add(STOPS, "sets that cannot be opened", [str(error)], "")
        return report
    tables = source.tables
    report.facts["images"] = {name: len(table) for name, table in tables.items()}
    report.facts["notes"] = list(source.notes)
    total, done = sum(map(len, tables.values())), 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    targets, opened = source.train.targets, len(faults.found)
    splits = _splits(report, source, options, faulty=bool(opened))
    surveys = _survey(source, faults, options, count)
    _add_faults(report, faults.found, words)
    images = contents.Images(source.classes, tables, surveys, splits, source.kind)
    contents.add_broken(report, images)
    contents.add_remarks(report, images)
    contents.add_copies(report, images)
    contents.add_cases(report, images, grouped=source.grouped)
    known = {fault.kind for fault in faults.found}
    contents.findings_of(targets).check(report, images, source, known)
    if targets.groups is None or not source.grouped:
        contents.add_sequences(report, sequences_of(tables), targets.kind)
    contents.add_sizes(report, images)
    contents.add_traits(report, images)
    items = source.items
    remedy = f"they are not read: move them, or {source.kind.stored}"
    report.add(WARNING, f"files that are no {items} by their name", faults.strangers, remedy)
    return report


def _survey(
    source: Source, faults: Faults, options: Options, count: Callable[[int], None]
) -> dict[str, Survey]:
    """Look at all inputs as their source says."""
    module, _, name = source.surveyed.partition(":")
    look = getattr(importlib.import_module(module), name)
    return cast("dict[str, Survey]", look(source, source.tables, faults, options, count))


def _opens(entry: DataSpec, argument: str) -> bool:
    try:
        entry.open(argument, Faults(collect=True))
    except UserError:
        return False
    return True


def resolve(what: str) -> tuple[DataSpec, str]:
    """Resolve a spec, or a path by what lies there, into its row and its argument."""
    path = Path(what).expanduser()
    if find_spec(what) is None and path.exists():
        what = f"{kind_of(path)}:{what}"
    entry, argument = parse(what)
    if entry.on_disk and not entry.says_where:
        place = existing_path if entry.takes("cell_mib") else existing_folder  # one file will do
        place(entry.name, argument)
    return entry, argument


def _splits(
    report: Report, source: Source, options: Options, *, faulty: bool
) -> dict[str, NDArray[np.str_]]:
    """Tell the split of every row: as carved, or the table's name where nothing can be carved."""
    tables = source.tables
    splits = {name: np.full(len(table), name, dtype="<U5") for name, table in tables.items()}
    if faulty and source.train.targets.groups is None:
        return splits  # there may be inputs without a stratum
    try:
        parts, notes = carve(
            source,
            report.spec,
            None,
            source.checked_fraction,
            0,
            split_by=options.split_by,
            test_fraction=options.test_fraction,
        )
    except UserError as error:
        if options.test_fraction is not None and len(tables) > 1:
            raise  # the option is at fault, not the data
        report.add(STOPS, "splits left empty", [str(error)], "")
        return splits
    for name, part in parts.items():
        splits[part.origin][part.rows] = name
    report.facts["splits"] = {name: len(part.rows) for name, part in parts.items()}
    report.facts["notes"] = notes
    return splits


def _words(entry: DataSpec) -> dict[str, tuple[str, str]]:
    """Put the kinds of faults of such data in words: what, and what to do."""
    items = entry.input_kind.nouns
    words = {kind: (what, remedy.format(items=items)) for kind, (what, remedy) in FAULTS.items()}
    if entry.target_kind.faults:
        module, _, name = entry.target_kind.faults.partition(":")
        words |= getattr(importlib.import_module(module), name)
    return words


def _add_faults(
    report: Report, found: Sequence[Fault], words: Mapping[str, tuple[str, str]]
) -> None:
    for kind in dict.fromkeys((*words, *(fault.kind for fault in found))):
        of_kind = [fault for fault in found if fault.kind == kind]
        details = [{"id": fault.culprit, "reason": fault.message} for fault in of_kind]
        what, remedy = words.get(kind, (kind, ""))
        report.add(STOPS, what, [fault.message for fault in of_kind], remedy, details)

# SPDX-License-Identifier: Apache-2.0
"""Validates a data set before hours are spent: reads every image, goes on after a problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from keymix.data import contents
from keymix.data.carve import carve
from keymix.data.findings import FAULTS, STOPS, WARNING, Finding, Report
from keymix.data.kinds import RECORDING
from keymix.data.sequences import sequences_of
from keymix.data.sources.base import Faults, Source, Table
from keymix.data.specs import (
    SPECS,
    DataSpec,
    existing_folder,
    existing_path,
    kind_of,
    named,
    parse,
)
from keymix.data.survey import survey
from keymix.data.tasks import SEGMENTATION
from keymix.errors import UserError

Progress: TypeAlias = Callable[[int, int], None]

_ON_DISK = ("folder", "imagenet", "parquet", "events", "cifar10dvs", "dvs128", "uwgi", "masks")

# they say themselves where to get a set that is not there, or how it is laid out
_TELL_WHERE = ("cifar10dvs", "dvs128", "uwgi", "masks")


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

    Args:
        what: A data spec, or a path, whose kind is found out.
        progress: Called with the number of images done and of all.
        time_steps: Of recordings of events, frames that would be made of each; 10 by default.
        masks: Of images with masks, as in `keymix.data.load`; like the next three.
        stack: Slices that would be the channels of an image.
        split_by: How they would be split.
        test_fraction: Share that would become test.
        cell_mib: Of parquet files, most MiB that an encoded image may take; 64 by default.

    Raises:
        UserError: If there is no such data set, or it cannot be had; or a setting is given for data
            that have none.
    """
    entry, argument = resolve(what)
    if time_steps is not None and not entry.events:
        raise UserError(
            f"time_steps={time_steps} is for recordings of events; data {what} holds images. Leave "
            "--time-steps out."
        )
    of_masks = {"masks": masks, "stack": stack, "split_by": split_by}
    others: dict[str, object] = {"test_fraction": test_fraction, "cell_mib": cell_mib}
    entry.check_settings(what, of_masks | others)
    report = Report(spec=f"{entry.name}:{argument}" if argument else entry.name)
    faults, kinds = Faults(collect=True), FAULTS
    segments = entry.task == SEGMENTATION.name
    if segments:
        from keymix.data.segmentation.table import KINDS

        kinds = {**FAULTS, **KINDS}
    try:
        source = entry.open(argument, faults, **of_masks, cell_mib=cell_mib)
    except UserError as error:
        if entry.name not in _ON_DISK or not Path(argument).expanduser().exists():
            raise
        if any(of_masks.values()) and _opens(entry, argument):
            raise  # a setting is at fault, not the data
        _add_faults(report, faults, kinds)
        report.add(STOPS, "sets that cannot be opened", [str(error)], "")
        return report
    given = {"train": source.train, "val": source.val, "test": source.test}
    tables = {name: table for name, table in given.items() if table is not None}
    report.facts["images"] = {name: len(table) for name, table in tables.items()}
    report.facts["notes"] = list(source.notes)
    total, done = sum(map(len, tables.values())), 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    if segments:
        from keymix.data.segmentation.check import Settings, check_scans

        settings = Settings(stack=stack, split_by=split_by, test_fraction=test_fraction)
        check_scans(report, source, faults, settings, count)
        _add_faults(report, faults, kinds)
    else:
        _add_faults(report, faults, kinds)
        _check_images(report, source, tables, faults, count, time_steps)
    remedy = "they are not read: move them, or give them an image's ending"
    if source.kind is RECORDING:
        remedy = "they are not read: move them, or store them as .npz"
    report.add(WARNING, "files that are no images by their name", faults.strangers, remedy)
    if source.kind is RECORDING:
        report.findings = [_of_recordings(found) for found in report.findings]
    return report


def _opens(entry: DataSpec, argument: str) -> bool:
    try:
        entry.open(argument, Faults(collect=True))
    except UserError:
        return False
    return True


def _check_images(
    report: Report,
    source: Source,
    tables: dict[str, Table],
    faults: Faults,
    count: Callable[[int], None],
    time_steps: int | None,
) -> None:
    """Look at every image or recording that has a class."""
    splits = _splits(report, tables, source if not faults.found else None)
    if source.kind is RECORDING:
        from keymix.data.events.loading import TIME_STEPS
        from keymix.data.events.survey import survey_events

        steps = TIME_STEPS if time_steps is None else time_steps
        surveys = survey_events(tables, count, steps)
    else:
        surveys = {name: survey(table, source.in_chans, count) for name, table in tables.items()}
    images = contents.Images(source.classes, tables, surveys, splits)
    contents.add_broken(report, images)
    if source.kind is RECORDING:
        contents.add_sparse(report, images, steps)
    contents.add_copies(report, images)
    known = {fault.kind for fault in faults.found}
    if "unreadable file" not in known:  # its rows are of unknown classes
        told = bool(known & {"empty class", "unknown class"})
        contents.add_classes(report, images, empty_told=told)
    contents.add_sequences(report, sequences_of(tables), masks=False)
    contents.add_sizes(report, images)
    contents.add_traits(report, images)


def _of_recordings(found: Finding) -> Finding:
    """Call recordings what was said of images; files keep their names."""
    where = [line.replace(" training images,", " training recordings,") for line in found.where]
    what, remedy = (named(text, events=True) for text in (found.what, found.remedy))
    return replace(found, what=what, remedy=remedy, where=where)


def resolve(what: str) -> tuple[DataSpec, str]:
    """Resolve a spec, or a path by what lies there, into its row and its argument.

    Raises:
        UserError: If the spec is unknown, or nothing is there.
    """
    path = Path(what).expanduser()
    if what.partition(":")[0] not in {spec.name for spec in SPECS} and path.exists():
        what = f"{kind_of(path)}:{what}"
    entry, argument = parse(what)
    if entry.name == "parquet":
        existing_path(entry.name, argument)
    elif entry.name in _ON_DISK and entry.name not in _TELL_WHERE:
        existing_folder(entry.name, argument)
    return entry, argument


def _splits(
    report: Report, tables: dict[str, Table], source: Source | None
) -> dict[str, NDArray[np.str_]]:
    """Tell the split of every row: as carved, or the table's name where nothing can be carved."""
    splits = {name: np.full(len(table), name, dtype="<U5") for name, table in tables.items()}
    if source is None:
        return splits
    try:
        parts, notes = carve(source, report.spec, None, 0.1, 0)
    except UserError as error:
        report.add(STOPS, "splits left empty", [str(error)], "")
        return splits
    for name, part in parts.items():
        splits[part.origin][part.rows] = name
    report.facts["splits"] = {name: len(part.rows) for name, part in parts.items()}
    report.facts["notes"] = notes
    return splits


def _add_faults(report: Report, faults: Faults, kinds: Mapping[str, tuple[str, str]]) -> None:
    for kind, (what, remedy) in kinds.items():
        found = [fault for fault in faults.found if fault.kind == kind]
        details = [{"id": fault.culprit, "reason": fault.message} for fault in found]
        report.add(STOPS, what, [fault.message for fault in found], remedy, details)

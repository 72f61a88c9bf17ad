# SPDX-License-Identifier: Apache-2.0
"""Validates a data set before hours are spent.

`check` reads every input and continues after a problem. `quick_check` is its cheap part, for
loaded data: seconds, whatever the size. It finds what falsifies a comparison without a sign of it:
copies in several splits or with several labels, cases in several splits, missing rows of masks,
frames of sequences, uneven classes. What there was no time for is named.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from keymix.data import findings
from keymix.data.dataset import ImageData, Split
from keymix.data.decode import DAMAGE
from keymix.data.files import existing_folder, existing_path, threads
from keymix.data.findings import FAULTS, STOPS, WARNING, Report
from keymix.data.kinds import RECORDING
from keymix.data.sequences import sequences_of
from keymix.data.sources.base import Fault, Faults, Source
from keymix.data.specs import DataSpec, Options, find_spec, kind_of, look_up, parse
from keymix.data.splits import make_splits
from keymix.data.survey import Survey, hash_of
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
    """Decode every image of a data set and report all that is wrong with it.

    Images are compared by their decoded pixels, in the splits that training uses: the source's own,
    or those split by `keymix.data.load` without options; of images with masks, validation is a
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
    surveys = look_up(source.surveyed)(source, faults, options, count)
    _add_faults(report, faults.found, words)
    images = findings.Images(source.classes, tables, surveys, splits, source.kind)
    findings.add_broken(report, images)
    findings.add_remarks(report, images)
    findings.add_copies(report, images)
    findings.add_cases(report, images, grouped=source.grouped)
    known = {fault.kind for fault in faults.found}
    looked_for: findings.TargetFindings = look_up(targets.findings)()
    looked_for.check(report, images, source, known)
    if targets.groups is None or not source.grouped:
        found = sequences_of(tables)
        findings.add_sequences(report, found, targets.kind, own_split=len(tables) > 1)
    findings.add_sizes(report, images)
    findings.add_traits(report, images)
    items = source.items
    remedy = f"they are not read: move them, or {source.kind.stored}"
    report.add(WARNING, f"files that are no {items} by their name", faults.strangers, remedy)
    return report


def _opens(entry: DataSpec, argument: str) -> bool:
    try:
        entry.open(argument, Faults(collect=True))
    except UserError:
        return False
    return True


def resolve(what: str) -> tuple[DataSpec, str]:
    """Resolve a spec, or a path by what lies there, into its row and its argument."""
    path = Path(what).expanduser()
    if what and find_spec(what) is None and path.exists():
        what = f"{kind_of(path)}:{what}"
    entry, argument = parse(what)
    if entry.on_disk and not entry.says_where:
        place = existing_path if entry.takes("cell_mib") else existing_folder  # one file will do
        place(entry.name, argument)
    return entry, argument


def _splits(
    report: Report, source: Source, options: Options, *, faulty: bool
) -> dict[str, NDArray[np.str_]]:
    """Return the split of every row: as split, or the table's name where nothing can be split."""
    tables = source.tables
    splits = {name: np.full(len(table), name, dtype="<U5") for name, table in tables.items()}
    if faulty and source.train.targets.groups is None:
        return splits  # there may be inputs without a stratum
    try:
        parts, notes = make_splits(
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
    return {kind: (what, remedy.format(items=items)) for kind, (what, remedy) in FAULTS.items()}


def _add_faults(
    report: Report, found: Sequence[Fault], words: Mapping[str, tuple[str, str]]
) -> None:
    for kind in dict.fromkeys((*words, *(fault.kind for fault in found))):
        of_kind = [fault for fault in found if fault.kind == kind]
        details = [{"id": fault.culprit, "reason": fault.message} for fault in of_kind]
        what, remedy = words.get(kind, (kind, ""))
        report.add(STOPS, what, [fault.message for fault in of_kind], remedy, details)


SECONDS = 10.0
"""Time for images that are read one by one; of those in memory all are looked at."""
_CHUNK = 64  # images between two looks at the clock
_THREADS = 4
_FIRST = 0.8  # share of the time for a first look; the rest is for the copies that it finds


def quick_check(
    data: ImageData, *, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
) -> Report:
    """Look for what would falsify a comparison on data, for some seconds.

    Copies are found by the pixels that a model sees. JPEG files that are read one by one are
    decoded smaller first, and whole where two are equal so.

    Returns the findings. Facts are ``looked_at`` (images, and of how many), ``not_looked_at``
    (sentences) and, where there are any, ``sequences``.
    """
    report = Report(spec=data.spec)
    start = clock()

    def late(share: float = 1.0) -> bool:
        return clock() - start > share * seconds

    missed = []
    targets, items = data.train.targets, data.kind.nouns
    grouped = data.facts.grouped is not False
    if targets.groups is None or not grouped:
        tables = {split.name: split.table for split in data.splits}
        try:
            found = sequences_of(tables, late=late)
            own_split = data.test.origin != "train"
            findings.add_sequences(report, found, targets.kind, own_split=own_split)
        except TimeoutError:
            missed.append(f"whether {items} are frames of sequences")
    looks = _looks(data, (lambda share: False) if data.train.inputs.quick else late)
    images = findings.Images(
        data.classes,
        {split.name: split.table for split in data.splits},
        looks,
        {name: np.full(len(look.sizes), name) for name, look in looks.items()},
        data.kind,
    )
    findings.add_copies(report, images)
    findings.add_cases(report, images, grouped=grouped)
    looked_for: findings.TargetFindings = look_up(targets.findings)()
    looked_for.quick_check(report, images, data)
    seen = sum(int(look.tried.sum()) for look in looks.values())
    every = sum(map(len, data.splits))
    if seen < every:
        missed.append(f"copies among {every - seen:,} of {every:,} {items}")
    report.facts["looked_at"] = {"images": seen, "of": every}
    report.facts["not_looked_at"] = missed
    return report


class _Look(Survey):
    """What was seen of a split, and which inputs were tried; sizes are 0 if not decoded."""

    def __init__(self, count: int) -> None:
        super().__init__(count, targets=True)
        self.tried = np.zeros(count, dtype=np.bool_)


def _looks(data: ImageData, late: Callable[[float], bool]) -> dict[str, _Look]:
    """Hash images in an order that is always the same until it is late."""
    looks = {split.name: _Look(len(split)) for split in data.splits}
    splits = {split.name: split for split in data.splits}

    def see(place: tuple[str, int], whole: bool = False) -> None:
        name, i = place
        look = looks[name]
        look.tried[i] = not late(1.0 if whole else _FIRST)
        look.sizes[i] = 0
        if look.tried[i]:
            with suppress(*DAMAGE):  # a broken image is no copy, and training names it
                _see(splits[name], i, look, whole=whole)

    with threads(_THREADS) as pool:
        for chunk in _chunks(data):
            for _ in pool.imap(see, chunk):
                pass
            if late(_FIRST):
                break
        for _ in pool.imap(partial(see, whole=True), _alike(data, looks)):
            pass
    return looks


def _alike(data: ImageData, looks: dict[str, _Look]) -> list[tuple[str, int]]:
    """List the images that were decoded smaller and equal another one so."""
    if not data.train.inputs.drafted:
        return []
    places = [
        (name, int(i)) for name, look in looks.items() for i in np.flatnonzero(look.sizes[:, 0])
    ]
    hashes = [looks[name].hashes[i].tobytes() for name, i in places]
    often = Counter(hashes)
    return [place for place, one in zip(places, hashes, strict=True) if often[one] > 1]


def _chunks(data: ImageData) -> Iterator[list[tuple[str, int]]]:
    """Go through images to learn from and images to measure on by turns, so that copies meet."""
    random = np.random.default_rng(0)
    others = [(split.name, i) for split in data.splits[1:] for i in range(len(split))]
    learned = [("train", i) for i in random.permutation(len(data.train)).tolist()]
    measured = [others[k] for k in random.permutation(len(others)).tolist()]
    half = _CHUNK // 2
    for at in range(0, max(len(learned), len(measured)), half):
        yield learned[at : at + half] + measured[at : at + half]


def _see(split: Split, i: int, look: _Look, *, whole: bool = False) -> None:
    content, look.blank[i] = split.inputs.content(i, whole=whole)
    look.hashes[i] = hash_of(content)
    if look.targets is not None:
        look.targets[i] = hash_of(split.targets.content(i))
    look.sizes[i] = split.image_size[::-1]

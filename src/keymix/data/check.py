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
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keymix.data.dataset import ImageData
from keymix.data.decode import DAMAGE, dim
from keymix.data.files import threads
from keymix.data.findings import Balance, Report
from keymix.data.looks import SPLITS, Look, Samples, hash_of
from keymix.data.sequences import Sequences, sequences_of
from keymix.data.sources.base import Fault, Faults, Source
from keymix.data.specs import DataSpec, Options, find_spec, kind_of, look_up, parse
from keymix.data.splits import make_splits
from keymix.data.streams import IntArray
from keymix.errors import UserError

Progress: TypeAlias = Callable[[int, int], None]
_TINY = 8  # pixels per side
_TINY_SHARE = 0.25  # of the median side


def check(
    what: str,
    *,
    progress: Progress | None = None,
    time_steps: int | None = None,
    masks: str | None = None,
    stack: int | None = None,
    split_by: str | None = None,
    test_fraction: float | None = None,
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
    )
    entry.check_settings(what, options.of_one_kind)
    spec = f"{entry.name}:{argument}" if argument else entry.name
    report = Report(spec=spec, kind=entry.input_kind, target=entry.target_kind)
    faults = Faults(collect=True)
    try:
        source = entry.open(argument, faults, **options.of_opening)
    except UserError as error:
        there = entry.on_disk and Path(argument).expanduser().exists()
        if not there or any((masks, stack, split_by)):
            raise  # the command may be at fault, not the data
        _add_faults(report, faults, None)
        report.add("unopened", [str(error)])
        return report
    tables = source.tables
    counts = {name: len(table) for name, table in tables.items()}
    report.state("images", counts, _listed(counts))
    report.lines[-1] = (source.kind.nouns, _listed(counts))
    report.facts["notes"] = list(source.notes)
    origin = np.repeat([*tables], [*counts.values()])
    samples = Samples(
        tables,
        [table.targets for table in tables.values()],
        origin,
        _splits(report, source, options, origin, faulty=bool(faults.found)),
        classes=source.classes,
        kind=source.kind,
    )
    report.target = samples.target
    samples.look_at_all(source, options, progress or (lambda done, total: None))
    _add_faults(report, faults, samples)
    for kind, reasons in sorted(samples.remarks.items()):
        report.add(kind, [samples.item(k, reasons[k]) for k in sorted(reasons)])
    _add_rules(report, samples, source, grouped=source.grouped, sound=not faults.found)
    if samples.groups == [] or not source.grouped:
        _add_sequences(report, sequences_of(tables), own_split=len(tables) > 1)
    _add_sizes(report, samples)
    if text := dim(samples.brightest):
        report.add("dark", [text])
    report.add("stranger", faults.strangers)
    report.lines += [("note", note) for note in report.facts["notes"]]
    return report


def resolve(what: str) -> tuple[DataSpec, str]:
    """Resolve a spec, or a path by what lies there, into its row and its argument."""
    path = Path(what).expanduser()
    if what and find_spec(what) is None and path.exists():
        what = f"{kind_of(path)}:{what}"
    return parse(what)


def _splits(
    report: Report, source: Source, options: Options, origin: NDArray[np.str_], *, faulty: bool
) -> NDArray[np.str_]:
    """Return the split of every sample: as split, or its table where nothing can be split."""
    if faulty and source.train.targets.groups is None:
        return origin  # there may be inputs without a stratum
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
        if options.test_fraction is not None and len(source.tables) > 1:
            raise  # the option is at fault, not the data
        report.add("unsplit", [str(error)])
        return origin
    splits = origin.astype("<U5")
    for name, part in parts.items():
        splits[np.flatnonzero(origin == part.origin)[part.rows]] = name
    counts = {name: len(part.rows) for name, part in parts.items()}
    report.state("splits", counts, _listed(counts))
    report.facts["notes"] = notes
    return splits


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def _add_faults(report: Report, faults: Faults, samples: Samples | None) -> None:
    """Report what the source and single samples have faults of, each once."""
    found: dict[str, dict[tuple[str, str], dict[str, str]]] = {}
    each: list[tuple[Fault, dict[str, str]]] = [(fault, {}) for fault in faults.found]
    if samples is not None:  # one file may be of several stacks
        rows = sorted(samples.faults)
        each += [(fault, samples.item(k)) for k in rows for fault in samples.faults[k]]
    for fault, place in each:
        item = {**place, "id": fault.culprit, "reason": fault.message}
        found.setdefault(fault.kind, {}).setdefault((fault.culprit, fault.message), item)
    for kind, items in found.items():
        report.add(kind, list(items.values()))


def _add_rules(
    report: Report, samples: Samples, about: Source | ImageData, *, grouped: bool, sound: bool
) -> None:
    """Report copies, groups in several splits, and what is odd about targets.

    Classes are compared where all could be read (`sound`): others may be of what is missing.
    """
    _add_copies(report, samples)
    if grouped and samples.groups:
        _add_groups(report, samples)
    described = samples.targets[0].described
    if described:
        counts = look_up(described)(report, samples, about)
        if sound and not samples.faults:
            _add_classes(report, samples.classes, counts)


def _add_copies(report: Report, samples: Samples) -> None:
    """Group equal samples: in several splits, with several targets, or plain copies."""
    whole = samples.decoded
    whole[list(samples.remarks.get("blank", ()))] = False
    _, group, times = np.unique(samples.hashes, return_inverse=True, return_counts=True)
    groups: dict[int, list[int]] = {}
    for k in np.flatnonzero((times[group] > 1) & whole).tolist():
        groups.setdefault(int(group[k]), []).append(k)
    found: dict[str, list[list[dict[str, str]]]] = {"leak": [], "conflict": [], "copies": []}
    for rows in groups.values():
        members = [samples.item(k) for k in rows]
        leaking = len({one["split"] for one in members}) > 1
        conflicting = len({samples.content(k) for k in rows} - {None}) > 1
        if leaking:
            found["leak"].append(members)
        if conflicting:
            found["conflict"].append(members)
        if not leaking and not conflicting:
            found["copies"].append(members)
    for kind, items in found.items():
        report.add(kind, items)


def _add_groups(report: Report, samples: Samples) -> None:
    """Count the cases of each split; find those in several, and splits of a single one."""
    of: dict[str, set[str]] = {}
    for group, split in zip(samples.groups, samples.split.tolist(), strict=True):
        of.setdefault(group, set()).add(split)
    counts = Counter(split for splits in of.values() for split in splits)
    listed = {name: counts[name] for name in SPLITS if counts[name]}
    report.state("cases", listed, _listed(listed))
    shared = [
        {"id": group, "reason": ", ".join(sorted(of[group], key=SPLITS.index))}
        for group in sorted(of)
        if len(of[group]) > 1
    ]
    report.add("groups", shared)
    report.add("lone group", [name for name in SPLITS if counts[name] == 1])


def describe_classes(
    report: Report, samples: Samples, about: Source | ImageData
) -> dict[str, IntArray]:
    """Report the inputs of each class, and imbalance; count them by the source's own splits."""
    del about
    counts = samples.count(samples.strata, samples.origin)
    train, names, items = counts["train"], samples.classes, samples.kind.nouns
    if not train.any():
        return counts  # no label could be read
    facts = {
        name: {split: int(number[c]) for split, number in counts.items()}
        for c, name in enumerate(names)
    }
    least, most = names[int(train.argmin())], names[int(train.argmax())]
    text = f"{len(names)}; smallest {least} ({train.min()}), largest {most} ({train.max()})"
    report.state("classes", facts, text)
    balance = Balance(dict(zip(names, train.tolist(), strict=True)))
    if balance.uneven:
        largest, smallest = balance.largest, balance.smallest
        line = f"{largest} has {balance.counts[largest]} training {items}, {smallest} "
        report.add("uneven", [line + str(balance.counts[smallest])])
    return counts


def _add_classes(report: Report, names: Sequence[str], counts: Mapping[str, IntArray]) -> None:
    """Name the classes that a split lacks, and those that train has once."""
    if "train" not in counts:
        return
    train = counts["train"]
    lacking = {"train lacks": train == 0, "single": train == 1}
    for split in ("val", "test"):
        if split in counts:
            lacking[f"{split} lacks"] = (counts[split] == 0) & (train > 0)
    for kind, which in lacking.items():
        report.add(kind, [names[c] for c in np.flatnonzero(which).tolist()])


def _add_sequences(report: Report, found: Sequences | None, *, own_split: bool) -> None:
    """Name the sequences whose frames are taken for independent images.

    A split that is drawn frame by frame tests on what was learned from. The data set's own split
    stays as it is, since published scores are of it.
    """
    if found is not None:
        report.facts["sequences"] = {"images": found.count, "sequences": found.images}
        items = [{"id": name, "reason": f"{n} images"} for name, n in found.images.items()]
        report.add("own sequences" if own_split else "sequences", items)


def _add_sizes(report: Report, samples: Samples) -> None:
    """Say which sizes there are, and very small images."""
    known = np.flatnonzero(samples.sizes[:, 0])
    if not len(known):
        return
    sizes = samples.sizes[known]
    counted = Counter(map(tuple, sizes.tolist()))
    ((width, height), times), area = counted.most_common(1)[0], sizes.prod(axis=1)
    facts: dict[str, Any] = {
        "different": len(counted),
        "common": {"width": width, "height": height, "images": times},
    }
    text = f"all {width}x{height}"
    if len(counted) > 1:
        text = f"{len(counted)} different; common {width}x{height} ({times} images)"
    for which, at in (("smallest", area.argmin()), ("largest", area.argmax())):
        (w, h), name = sizes[at].tolist(), samples.id(int(known[at]))
        facts[which] = {"width": w, "height": h, "id": name}
        text += f"; {which} {w}x{h} ({name})" if len(counted) > 1 else ""
    report.state("sizes", facts, text)
    side = sizes.min(axis=1)
    tiny = side < max(_TINY, int(_TINY_SHARE * float(np.median(side))))
    rows = zip(known[tiny].tolist(), sizes[tiny].tolist(), strict=True)
    report.add("tiny", [samples.item(k, f"{w}x{h}") for k, (w, h) in rows])


SECONDS = 10.0
"""Time for images that are read one by one; of those in memory all are looked at."""
_AT_ONCE = 64  # images between two looks at the clock
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
    start = clock()

    def late(share: float = 1.0) -> bool:
        return clock() - start > share * seconds

    tables = {split.name: split.table for split in data.splits}
    sizes = [len(split) for split in data.splits]
    samples = Samples(
        tables,
        [split.targets for split in data.splits],
        np.repeat([split.origin for split in data.splits], sizes),
        np.repeat([split.name for split in data.splits], sizes),
        classes=data.classes,
        kind=data.kind,
    )
    report = Report(spec=data.spec, kind=data.kind, target=samples.target)
    missed = []
    grouped = data.facts.grouped is not False
    if not samples.groups or not grouped:
        try:
            found = sequences_of(tables, late=late)
            _add_sequences(report, found, own_split=data.test.origin != "train")
        except TimeoutError:
            missed.append(f"whether {data.kind.nouns} are frames of sequences")
    tried = _look(data, samples, (lambda share: False) if data.train.inputs.quick else late)
    report.add("blank", [samples.item(k) for k in sorted(samples.remarks.get("blank", ()))])
    _add_rules(report, samples, data, grouped=grouped, sound=True)
    every = len(samples)
    if tried < every:
        missed.append(f"copies among {every - tried:,} of {every:,} {data.kind.nouns}")
    report.facts["looked_at"] = {"images": tried, "of": every}
    report.facts["not_looked_at"] = missed
    return report


def _look(data: ImageData, samples: Samples, late: Callable[[float], bool]) -> int:
    """Hash images in an order that is always the same until it is late; say how many."""
    tried = np.zeros(len(samples), dtype=np.bool_)

    def see(k: int, whole: bool = False) -> None:
        tried[k] = not late(1.0 if whole else _FIRST)
        samples.hashes[k] = np.void(bytes(samples.hashes.itemsize))
        if tried[k]:
            number, i = samples.place(k)
            with suppress(*DAMAGE):  # a broken image is no copy, and training names it
                content, blank = data.splits[number].inputs.content(i, whole=whole)
                remarks = {"blank": ""} if blank else {}
                samples.keep(k, Look(hash=hash_of(content), remarks=remarks))

    with threads(_THREADS) as pool:
        for chunk in _chunks(data):
            for _ in pool.imap(see, chunk):
                pass
            if late(_FIRST):
                break
        if data.train.inputs.drafted:  # those that were decoded smaller and equal another so
            _, group, times = np.unique(samples.hashes, return_inverse=True, return_counts=True)
            alike = np.flatnonzero((times[group] > 1) & samples.decoded).tolist()
            for _ in pool.imap(lambda k: see(k, whole=True), alike):
                pass
    return int(tried.sum())


def _chunks(data: ImageData) -> Iterator[list[int]]:
    """Go through images to learn from and images to measure on by turns, so that copies meet."""
    random = np.random.default_rng(0)
    learned = random.permutation(len(data.train)).tolist()
    others = (len(data.train) + random.permutation(len(data.val) + len(data.test))).tolist()
    half = _AT_ONCE // 2
    for at in range(0, max(len(learned), len(others)), half):
        yield learned[at : at + half] + others[at : at + half]

# SPDX-License-Identifier: Apache-2.0
"""Validates a data set before hours are spent.

`check` reads every input and continues after a problem. `quick_check` is its cheap part, for
loaded data: seconds, whatever the size. It finds what falsifies a comparison without a sign of it:
copies in several splits or with several labels, cases in several splits, missing rows of masks,
frames of sequences, uneven classes. What there was no time for is named.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keymix.data.dataset import ImageData, Split
from keymix.data.decode import DAMAGE, Encoded, dim
from keymix.data.files import ranges, threads
from keymix.data.findings import FALSIFIES, UNEVEN, WARNING, Report
from keymix.data.kinds import CLASS, RECORDING, InputKind, TargetKind
from keymix.data.looks import HASH, ONE_COLOUR, Seen, blank, hash_of, look_whole, target_bytes
from keymix.data.sample import SPLITS, Fault, Faults, Row, Source, digest_of, select
from keymix.data.sequences import sequences_of
from keymix.data.specs import DataSpec, Options, find_spec, kind_of, look_up, parse
from keymix.data.splits import Table, make_splits
from keymix.data.streams import IntArray
from keymix.errors import UserError

Progress: TypeAlias = Callable[[int, int], None]
_TINY = 8  # pixels per side
_TINY_SHARE = 0.25  # of the median side
_AT_ONCE = 4096  # rows whose encoded images may be in memory
_CHUNK = 32  # samples per task
_THREADS = min(8, os.cpu_count() or 1)
_WITHOUT = {
    "train": "no model can learn it",
    "val": "what a model makes of it is not validated",
    "test": "what a model makes of it cannot be measured",
}
"""Why a class matters of which a split has no input."""


@dataclass(eq=False, kw_only=True)
class Samples:
    """All samples of a data set in one row, and what was seen of each."""

    row: Callable[[int], Row]
    origin: NDArray[np.str_]  # the source's own table of each sample
    split: NDArray[np.str_]
    strata: IntArray
    groups: Sequence[str]  # none where nothing binds samples together
    classes: Sequence[str]
    kind: InputKind
    target: TargetKind
    seen: dict[int, Seen] = field(default_factory=dict)  # those with more than a hash and a size

    def __post_init__(self) -> None:
        self.hashes = np.zeros(len(self), dtype=f"V{HASH}")
        self.sizes = np.zeros((len(self), 2), dtype=np.int64)  # width and height, pixels

    def __len__(self) -> int:
        return len(self.split)

    def keep(self, k: int, seen: Seen) -> None:
        """Keep what was seen of sample ``k``."""
        self.hashes[k] = np.void(seen.hash)
        self.sizes[k] = (seen.size or (0, 0))[::-1]
        if seen.faults or seen.odd or seen.converted or seen.own is not None or seen.brightest:
            self.seen[k] = seen

    @property
    def decoded(self) -> NDArray[np.bool_]:
        """Mark the samples that could be decoded."""
        marked: NDArray[np.bool_] = np.any(self.hashes.view(np.uint64).reshape(-1, 2), axis=1)
        return marked

    @property
    def faulty(self) -> bool:
        """Whether any sample has a fault."""
        return any(seen.faults for seen in self.seen.values())

    @property
    def odd(self) -> list[dict[str, str]]:
        """Name the samples with something odd."""
        return [self.item(k, ", ".join(seen.odd)) for k, seen in self.seen.items() if seen.odd]

    def content(self, k: int) -> bytes | None:
        """Return bytes that identify the target of sample ``k``; None if it cannot be read."""
        try:
            return target_bytes(self.row(k).read_target())
        except (UserError, *DAMAGE):
            return None

    def item(self, k: int, reason: str = "") -> dict[str, str]:
        """Name sample ``k``, its split, and its class or case."""
        item = {"id": self.row(k).id, "split": str(self.split[k])}
        if self.classes and self.target is CLASS and self.strata[k] >= 0:
            item["class"] = self.classes[self.strata[k]]
        elif len(self.groups):
            item["case"] = self.groups[k]
        return {**item, "reason": reason} if reason else item


def check(what: str, options: Options | None = None, *, progress: Progress | None = None) -> Report:
    """Decode every image of a data set and report all that is wrong with it.

    Images are compared by their decoded pixels, in the splits that training uses: the source's own,
    or those split by `keymix.data.load` without options; of images with masks, validation is a
    sixth of what test leaves, as in the recipes for them. Sizes and hashes stay in memory, images
    do not.
    """
    entry, argument = resolve(what)
    options = options or Options()
    entry.check_settings(what, options.of_one_kind)
    spec = f"{entry.name}:{argument}" if argument else entry.name
    report = Report(spec=spec, kind=entry.input_kind, target=entry.target_kind)
    faults = Faults(collect=True)
    try:
        source = entry.open(argument, faults, options).by_position(spec)
    except UserError as error:
        there = entry.on_disk and Path(argument).expanduser().exists()
        if not there or any((options.masks, options.stack, options.split_by)):
            raise  # the command may be at fault, not the data
        _add_faults(report, faults)
        report.add("unfit", [str(error)])
        return report
    target = entry.target_kind
    table = Table.of(source.rows, target)
    counts = {name: int((table.split == name).sum()) for name in SPLITS}
    counts = {name: number for name, number in counts.items() if number}
    report.state("images", counts, _listed(counts))
    report.lines[-1] = (source.kind.nouns, _listed(counts))
    report.kind = source.kind
    report.facts["notes"] = list(source.notes)
    samples = Samples(
        row=source.rows.__getitem__,
        origin=table.split,
        split=_splits(report, source, table, options, faulty=bool(faults.found)),
        strata=table.strata,
        groups=[*table.groups] if table.keys else (),
        classes=source.classes,
        kind=source.kind,
        target=target,
    )
    _look_at_all(samples, source, progress or (lambda done, total: None))
    faults.found += source.loose
    _add_faults(report, faults, samples)
    report.add("odd", samples.odd)
    shown = {k: seen.converted for k, seen in samples.seen.items() if seen.converted}
    report.add("converted", [samples.item(k, text) for k, text in shown.items()])
    for kind, (level, items) in source.found.items():
        report.add(kind, items, level=level)
    _add_rules(report, samples, source, grouped=source.grouped, sound=not faults.found)
    if not len(samples.groups) or not source.grouped:
        found = sequences_of(samples.row, samples.origin.tolist())
        _add_sequences(report, found, own_split=len(counts) > 1)
    _add_sizes(report, samples)
    if text := dim(max((seen.brightest for seen in samples.seen.values()), default=0)):
        report.add("odd", [text])
    report.add("stranger", faults.strangers)
    report.lines += [("note", note) for note in report.facts["notes"]]
    return report


def resolve(what: str) -> tuple[DataSpec, str]:
    """Resolve a spec, or a path by what lies there, into its row and its argument."""
    path = Path(what).expanduser()
    if what and find_spec(what) is None and path.exists():
        what = f"{kind_of(path)}:{what}"
    return parse(what)


def _look_at_all(samples: Samples, source: Source, progress: Progress) -> None:
    """Look at every sample; the encoded images of a few are in memory at a time."""
    done = 0
    with warnings.catch_warnings(), threads(_THREADS) as pool:
        warnings.simplefilter("ignore")  # Pillow's, on odd files that it reads
        for stretch in ranges(len(samples), _AT_ONCE):
            index = np.arange(stretch.start, stretch.stop, dtype=np.int64)
            try:
                rows = select(source.rows, index)
            except UserError as error:  # a file of many images
                for k in stretch:
                    samples.keep(k, Seen(faults=[Fault(samples.row(k).id, str(error))]))
                done += len(stretch)
                progress(done, len(samples))
                continue

            def work(chunk: range, rows: Sequence[Row] = rows, first: int = stretch.start) -> int:
                for i in chunk:
                    seen = look_whole(rows[i], samples.target, source.kind, source.in_chans)
                    samples.keep(first + i, seen)
                return len(chunk)

            for number in pool.imap(work, ranges(len(rows), _CHUNK)):
                done += number
                progress(done, len(samples))
    samples.seen = dict(sorted(samples.seen.items()))


def _splits(
    report: Report, source: Source, table: Table, options: Options, *, faulty: bool
) -> NDArray[np.str_]:
    """Return the split of every sample: as split, or its table where nothing can be split."""
    if faulty and not table.keys:
        return table.split  # there may be inputs without a stratum
    if report.target.val_fraction:
        options = replace(options, val_fraction=report.target.val_fraction)
    try:
        parts, notes = make_splits(source, table, report.spec, options)
    except UserError as error:
        if options.test_fraction is not None and len(set(table.split)) > 1:
            raise  # the option is at fault, not the data
        report.add("unfit", [str(error)])
        return table.split
    splits = table.split.copy()
    for name, part in parts.items():
        splits[part.index] = name
    counts = {name: len(part.rows) for name, part in parts.items()}
    report.state("splits", counts, _listed(counts))
    report.facts["notes"] = notes
    return splits


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def _add_faults(report: Report, faults: Faults, samples: Samples | None = None) -> None:
    """Report what the source and single samples have faults of, each once."""
    places: dict[Fault, dict[str, str]] = {fault: {} for fault in faults.found}
    if samples is not None:
        for k, seen in samples.seen.items():
            for fault in seen.faults:  # one file may be of several stacks
                places.setdefault(fault, samples.item(k))
    items = [{**at, "id": each.culprit, "reason": each.message} for each, at in places.items()]
    report.add("unusable", items)


def _add_rules(
    report: Report, samples: Samples, about: Source | ImageData, *, grouped: bool, sound: bool
) -> None:
    """Report copies, groups in several splits, and what is odd about targets.

    Classes are compared where all could be read (`sound`): others may be of what is missing.
    """
    _add_copies(report, samples)
    if grouped and len(samples.groups):
        _add_groups(report, samples)
    if samples.target.described:
        counts = look_up(samples.target.described)(report, samples, about)
        if sound and not samples.faulty:
            _add_classes(report, samples, counts)


def _add_copies(report: Report, samples: Samples) -> None:
    """Group equal samples: in several splits, with several targets, or plain copies."""
    whole = samples.decoded
    whole[[k for k, seen in samples.seen.items() if ONE_COLOUR in seen.odd]] = False
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
    text = "{} has a single case: nothing shows how far scores vary from case to case"
    report.add("few", [text.format(name) for name in SPLITS if counts[name] == 1])


def describe_classes(
    report: Report, samples: Samples, about: Source | ImageData
) -> dict[str, IntArray]:
    """Report the inputs of each class, and imbalance; count them by the source's own splits."""
    del about
    names, known = samples.classes, samples.strata >= 0
    counts: dict[str, IntArray] = {
        split: np.bincount(samples.strata[known & (samples.origin == split)], minlength=len(names))
        for split in SPLITS
        if (samples.origin == split).any()
    }
    train = counts["train"]
    if not train.any():
        return counts  # no label could be read
    facts = {
        name: {split: int(number[c]) for split, number in counts.items()}
        for c, name in enumerate(names)
    }
    least, most = names[int(train.argmin())], names[int(train.argmax())]
    text = f"{len(names)}; smallest {least} ({train.min()}), largest {most} ({train.max()})"
    report.state("classes", facts, text)
    few = int(np.where(train > 0, train, train.max()).argmin())
    if train.max() >= UNEVEN * train[few]:
        line = f"{most} has {train.max()} training {samples.kind.nouns}, {names[few]} {train[few]}"
        report.add("few", [f"{line}: read the accuracy of each class, not the mean alone"])
    return counts


def _add_classes(report: Report, samples: Samples, counts: Mapping[str, IntArray]) -> None:
    """Name the classes that a split lacks, and those that train has once."""
    train = counts.get("train", np.zeros(0, dtype=np.int64))
    for split, number in counts.items():
        lacking = (number == 0) & ((train > 0) | (split == "train"))
        _add_few(report, samples, split, "no", lacking, _WITHOUT[split])
    _add_few(report, samples, "train", "one", train == 1, "it is never validated on")


def _add_few(
    report: Report, samples: Samples, split: str, number: str, which: NDArray[np.bool_], so: str
) -> None:
    for name in (samples.classes[c] for c in np.flatnonzero(which).tolist()):
        reason = f"{split} has {number} {samples.kind.noun} of {name}: {so}"
        report.add("few", [{"id": name, "split": split, "reason": reason}])


def _add_sequences(report: Report, found: Mapping[str, int], *, own_split: bool) -> None:
    """Name the sequences whose frames are taken for independent images.

    A split that is drawn frame by frame tests on what was learned from. The data set's own split
    stays as it is, since published scores are of it.
    """
    if found:
        report.facts["sequences"] = {"images": sum(found.values()), "sequences": found}
        items = [{"id": name, "reason": f"{n} images"} for name, n in found.items()]
        report.add("sequences", items, level=WARNING if own_split else FALSIFIES)


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
        (w, h), name = sizes[at].tolist(), samples.row(int(known[at])).id
        facts[which] = {"width": w, "height": h, "id": name}
        text += f"; {which} {w}x{h} ({name})" if len(counted) > 1 else ""
    report.state("sizes", facts, text)
    side = sizes.min(axis=1)
    tiny = side < max(_TINY, int(_TINY_SHARE * float(np.median(side))))
    rows = zip(known[tiny].tolist(), sizes[tiny].tolist(), strict=True)
    report.add("odd", [samples.item(k, f"very small, {w}x{h}") for k, (w, h) in rows])


SECONDS = 10.0
"""Time for images that are read one by one; of those in memory all are looked at."""
_TURN = 64  # images between two looks at the clock


def quick_check(
    data: ImageData, *, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
) -> Report:
    """Look for what would falsify a comparison on data, for some seconds.

    Copies are found by the pixels that a model sees, or by the content of files that are read
    while training.

    Returns the findings. Facts are ``looked_at`` (images, and of how many), ``not_looked_at``
    (sentences) and, where there are any, ``sequences``.
    """
    start = clock()

    def late() -> bool:
        return clock() - start > seconds

    starts = np.cumsum([0, *map(len, data.splits)])

    def place(k: int) -> tuple[Split, int]:
        number = int(np.searchsorted(starts, k, side="right")) - 1
        return data.splits[number], k - int(starts[number])

    def row(k: int) -> Row:
        split, i = place(k)
        return split.rows[i]

    sizes = [len(split) for split in data.splits]
    of_class = data.train.target_kind is CLASS
    strata = [split.labels.numpy() for split in data.splits] if of_class else []
    samples = Samples(
        row=row,
        origin=np.repeat([split.origin for split in data.splits], sizes),
        split=np.repeat([split.name for split in data.splits], sizes),
        strata=np.concatenate(strata) if of_class else np.zeros(sum(sizes), dtype=np.int64),
        groups=[group for split in data.splits for group in split.groups],
        classes=data.classes,
        kind=data.kind,
        target=data.train.target_kind,
    )
    report = Report(spec=data.spec, kind=data.kind, target=samples.target)
    missed = []
    grouped = data.facts.grouped is not False
    if not samples.groups or not grouped:
        try:
            found = sequences_of(row, samples.split.tolist(), late=late)
            _add_sequences(report, found, own_split=data.test.origin != "train")
        except TimeoutError:
            missed.append(f"whether {data.kind.nouns} are frames of sequences")
    quick = data.train.images is not None or data.kind is RECORDING
    tried = _look(data, samples, place, (lambda: False) if quick else late)
    report.add("odd", samples.odd)
    for kind, (level, items) in data.found.items():
        if level == FALSIFIES:
            report.add(kind, items, level=level)
    _add_rules(report, samples, data, grouped=grouped, sound=True)
    every = len(samples)
    if tried < every:
        missed.append(f"copies among {every - tried:,} of {every:,} {data.kind.nouns}")
    report.facts["looked_at"] = {"images": tried, "of": every}
    report.facts["not_looked_at"] = missed
    return report


def _look(
    data: ImageData,
    samples: Samples,
    place: Callable[[int], tuple[Split, int]],
    late: Callable[[], bool],
) -> int:
    """Hash images in an order that is always the same until it is late; say how many."""
    tried = np.zeros(len(samples), dtype=np.bool_)

    def see(k: int) -> None:
        tried[k] = not late()
        if tried[k]:
            with suppress(UserError, *DAMAGE):  # a broken image is no copy, and training names it
                samples.keep(k, _seen(*place(k)))

    with threads(_THREADS) as pool:
        for chunk in _turns(data):
            for _ in pool.imap(see, chunk):
                pass
            if late():
                break
    if data.train.images is None:  # files of one colour are no copies of each other
        _, group, times = np.unique(samples.hashes, return_inverse=True, return_counts=True)
        for k in np.flatnonzero((times[group] > 1) & samples.decoded).tolist():
            split, i = place(k)
            if blank(split.picture(i)):
                samples.seen[k] = Seen(odd=[ONE_COLOUR])
    samples.seen = dict(sorted(samples.seen.items()))
    return int(tried.sum())


def _seen(split: Split, i: int) -> Seen:
    """Hash what identifies image ``i``; a file that is read while training is not decoded."""
    image = split.rows[i].image
    if split.kind is RECORDING:
        return Seen(hash=hash_of(digest_of(image)))
    if split.images is None and isinstance(image, Encoded):
        return Seen(hash=hash_of(image.content()))
    pixels = split.picture(i)
    return Seen(hash=hash_of(pixels), odd=[ONE_COLOUR] if blank(pixels) else [])


def _turns(data: ImageData) -> Iterator[list[int]]:
    """Go through images to learn from and images to measure on by turns, so that copies meet."""
    random = np.random.default_rng(0)
    learned = random.permutation(len(data.train)).tolist()
    others = (len(data.train) + random.permutation(len(data.val) + len(data.test))).tolist()
    half = _TURN // 2
    for at in range(0, max(len(learned), len(others)), half):
        yield learned[at : at + half] + others[at : at + half]

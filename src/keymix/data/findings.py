# SPDX-License-Identifier: Apache-2.0
"""What a check of a data set found: findings by level, and what its inputs say about it.

Damage, copies, classes, sizes, kinds of file, sequences; `Report` has a verdict and an exit code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from keymix.data.decode import dim
from keymix.data.kinds import CLASS, IMAGE, InputKind, TargetKind
from keymix.data.sequences import Sequences
from keymix.data.sources.base import Source, Table
from keymix.data.streams import IntArray
from keymix.data.survey import TRAITS, Survey

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData, Split

STOPS, FALSIFIES, WARNING, NOTE = "stops", "falsifies", "warning", "note"
LONE_CASE = "splits of a single case"
SEVERITY = {
    STOPS: "stops training",
    FALSIFIES: "falsifies results",
    WARNING: "warning",
    NOTE: "note",
}
"""What each level means, from the worst: of a check, and of a comparison that has made it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing found, with all places where."""

    level: str  # ``stops`` training, ``falsifies`` results, ``warning``, or ``note``
    what: str  # what was found, in plural words
    where: Sequence[str]
    remedy: str  # what to do about it; empty where the place's own line says it
    details: Sequence[Any] = ()  # the same places as plain data

    @property
    def count(self) -> int:
        """How many places there are."""
        return len(self.where)


@dataclass(kw_only=True)
class Report:
    """All about a data set."""

    spec: str  # the data spec that was checked
    # images, classes, sizes and balance, as plain data
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)  # what was found, worst first
    # what a person reads of the facts about targets: a name and a text each
    lines: list[tuple[str, str]] = field(default_factory=list)

    def of(self, level: str) -> list[Finding]:
        """List the findings of one level."""
        return [finding for finding in self.findings if finding.level == level]

    def add(
        self,
        level: str,
        what: str,
        where: Sequence[str],
        remedy: str,
        details: Sequence[Any] = (),
    ) -> None:
        """Add a finding, if there is any place where; the list stays sorted, worst first."""
        if where:
            made = Finding(level=level, what=what, where=where, remedy=remedy, details=details)
            self.findings.append(made)
            self.findings.sort(key=lambda finding: [*SEVERITY].index(finding.level))

    @property
    def fit(self) -> bool:
        """Whether nothing stops training or falsifies its results."""
        return not self.of(STOPS) and not self.of(FALSIFIES)

    @property
    def verdict(self) -> str:
        """The verdict in one line."""
        lines = []
        for level in (STOPS, FALSIFIES):
            if found := self.of(level):
                listed = ", ".join(f"{f.what} ({f.count:,})" for f in found)
                lines.append(f"{SEVERITY[level]}: {listed}")
        if lines:
            return "; ".join(lines)
        warnings = len(self.of(WARNING))
        if not warnings:
            return "fit for training"
        return f"fit for training, with {warnings} warning{'s' if warnings > 1 else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON."""
        return {
            "spec": self.spec,
            "fit": self.fit,
            "verdict": self.verdict,
            **self.facts,
            "findings": [
                {
                    "level": f.level,
                    "what": f.what,
                    "count": f.count,
                    "remedy": f.remedy,
                    "where": list(f.details or f.where),
                }
                for f in self.findings
            ],
        }


# what a source reports as a fault: words for many, and the remedy, where {items} are the inputs
FAULTS: Mapping[str, tuple[str, str]] = {
    "one class": ("sets of one class only", "add a second class: there is nothing to distinguish"),
    "empty class": ("empty classes", "add {items}, or remove the folder"),
    "unknown class": ("classes that train does not have", "add training {items}, or remove them"),
    "bad label": ("bad labels", "correct or remove the rows"),
    "labels without recording": ("labels without recording", "restore the recordings"),
    "recording without labels": ("recordings without labels", "restore the labels"),
    "recordings listed twice": ("recordings listed twice", "remove them from one list"),
    "bad row": ("bad rows", "correct or remove them"),
    "missing": ("missing files", "restore them, or remove their rows"),
    "unreadable": ("unreadable files", "replace them; download again"),
}


_TIMES = 10

Name = TypeVar("Name")


@dataclass(frozen=True)
class Balance(Generic[Name]):
    """How many images each class has; classes without any do not count."""

    counts: Mapping[Name, int]  # images of each class, one image or more in all

    @property
    def largest(self) -> Name:
        """The class of most images, the first of several."""
        return max(self.counts, key=self.counts.__getitem__)

    @property
    def smallest(self) -> Name:
        """The class of fewest images, but some, the first of several."""
        return min((name for name, n in self.counts.items() if n), key=self.counts.__getitem__)

    @property
    def uneven(self) -> bool:
        """Whether the largest class has ten times the images of the smallest, or more."""
        return self.counts[self.largest] >= _TIMES * self.counts[self.smallest]

    def dominates(self, name: Name) -> bool:
        """Whether a class has ten times the images of all others together, or more."""
        own = self.counts.get(name, 0)
        return own >= _TIMES * (sum(self.counts.values()) - own)


_T = TypeVar("_T")

_TINY = 8  # pixels per side
_TINY_SHARE = 0.25  # of the median side
_WARNED = ("animated",)  # traits whose loss a person may not expect
IN_SEQUENCES = "sequences of frames taken for independent images"
_SHOWN = 3  # equal images named in a line
SPLITS = ("train", "val", "test")


class Images:
    """All inputs of a data set in one row, with what was seen of them."""

    def __init__(
        self,
        classes: Sequence[str],
        tables: Mapping[str, Table],
        surveys: Mapping[str, Survey],
        splits: Mapping[str, NDArray[np.str_]],
        kind: InputKind = IMAGE,
    ) -> None:
        self.classes, self.kind = classes, kind
        self.tables = tables
        self.target = next(iter(tables.values())).targets.kind
        seen = [surveys[name] for name in tables]
        self.surveys = seen
        self.labels = np.concatenate([table.targets.strata for table in tables.values()])
        self.splits = np.concatenate([splits[name] for name in tables])
        self.hashes = np.concatenate([each.hashes for each in seen])
        self.sizes = np.concatenate([each.sizes for each in seen])
        self.traits = np.concatenate([each.traits for each in seen])
        self.blank = np.concatenate([each.blank for each in seen])
        self.brightest = max(int(each.brightest.max(initial=0)) for each in seen)
        self._starts = np.cumsum([0, *map(len, tables.values())])
        self.remarks = self._joined([each.remarks for each in seen])
        self.broken = self._joined([each.broken for each in seen])
        groups = [table.targets.groups for table in tables.values()]
        self.groups = [name for each in groups for name in each or ()]

    def _joined(self, parts: Sequence[Mapping[int, _T]]) -> dict[int, _T]:
        """Number what was seen of the tables' rows in one row, ascending."""
        return {
            int(start) + i: part[i]
            for start, part in zip(self._starts, parts, strict=False)
            for i in sorted(part)
        }

    def _row(self, k: int) -> tuple[int, int]:
        """Return the number of the table of input ``k``, and its position there."""
        number = int(np.searchsorted(self._starts, k, side="right")) - 1
        return number, k - int(self._starts[number])

    def of_split(self, name: str) -> NDArray[np.bool_]:
        """Mark the inputs of a split."""
        marked: NDArray[np.bool_] = self.splits == name
        return marked

    def id(self, k: int) -> str:
        """Say where input ``k`` comes from."""
        number, i = self._row(k)
        return list(self.tables.values())[number].name(i)

    def target_of(self, k: int) -> bytes | None:
        """Return bytes that identify the target of input ``k``; None if it cannot be read."""
        number, i = self._row(k)
        hashes = self.surveys[number].targets
        if hashes is not None:
            found = hashes[i].tobytes()
            return found if any(found) else None
        return list(self.tables.values())[number].targets.content(i)

    def place(self, k: int) -> dict[str, Any]:
        """Return origin, split and class or case of input ``k``."""
        place: dict[str, Any] = {"id": self.id(k), "split": str(self.splits[k])}
        if self.classes and self.target is CLASS:
            label = int(self.labels[k])
            place["class"] = self.classes[label] if label >= 0 else None
        elif self.groups:
            place["case"] = self.groups[k]
        return place

    def sized(self, k: int) -> dict[str, Any]:
        """Return width, height and origin of input ``k``."""
        width, height = self.sizes[k].tolist()
        return {"width": width, "height": height, "id": self.id(k)}


class TargetFindings:
    """What a check reports of targets: nothing, where they are no classes and no masks."""

    def check(self, report: Report, images: Images, source: Source, known: Collection[str]) -> None:
        """Add what was found by reading all of them."""

    def quick_check(self, report: Report, images: Images, data: ImageData) -> None:
        """Add what can be said of data that are loaded, without reading them."""


class ClassFindings(TargetFindings):
    """What a check reports of class numbers."""

    def check(self, report: Report, images: Images, source: Source, known: Collection[str]) -> None:
        """Count the inputs of each class, and find imbalance."""
        del source
        if "unreadable" in known:  # its rows are of unknown classes
            return
        reported = "empty class" in known or "unknown class" in known
        add_classes(report, images, empty_reported=reported)

    def quick_check(self, report: Report, images: Images, data: ImageData) -> None:
        """Find classes that a split lacks, and imbalance."""

        def counts(*splits: Split) -> IntArray:
            labels = np.concatenate([split.targets.strata for split in splits])
            return np.bincount(labels, minlength=len(data.classes)).astype(np.int64)

        given = [split for split in data.splits if split.origin != "train"]
        learned = counts(*(split for split in data.splits if split.origin == "train"))
        by_split = {"train": learned, **{split.name: counts(split) for split in given}}
        add_unmeasured(report, data.classes, by_split, images.kind)
        add_uneven(report, data.classes, learned, images.kind)


def add_broken(report: Report, images: Images) -> None:
    """Name the inputs that cannot be decoded."""
    found = [{**images.place(k), "reason": why} for k, why in images.broken.items()]
    report.add(
        STOPS,
        f"broken {images.kind.nouns}",
        [f"{one['id']}: {one['reason']}" for one in found],
        "replace or remove them, or train with --data.skip_corrupt true",
        found,
    )


def add_remarks(report: Report, images: Images) -> None:
    """Name the inputs that can be used, but are odd."""
    for what, remedy in sorted({(each.what, each.remedy) for each in images.remarks.values()}):
        found = [
            {**images.place(k), "reason": each.reason}
            for k, each in images.remarks.items()
            if each.what == what
        ]
        report.add(WARNING, what, [f"{one['id']}: {one['reason']}" for one in found], remedy, found)


def add_copies(report: Report, images: Images) -> None:
    """Group equal inputs: in several splits, with several targets, or plain copies."""
    items, target = images.kind.nouns, images.target
    blank = [images.id(k) for k in np.flatnonzero(images.blank).tolist()]
    report.add(WARNING, f"{items} of one colour", blank, "look at them: they show nothing")
    whole = (images.sizes[:, 0] > 0) & ~images.blank
    _, group, times = np.unique(images.hashes, return_inverse=True, return_counts=True)
    groups: dict[int, list[int]] = {}
    for k in np.flatnonzero((times[group] > 1) & whole).tolist():
        groups.setdefault(int(group[k]), []).append(k)
    leaks, conflicts, copies = [], [], []
    for rows in groups.values():
        members = [images.place(k) for k in rows]
        leaking = len({one["split"] for one in members}) > 1
        conflicting = len({images.target_of(k) for k in rows} - {None}) > 1
        if leaking:
            leaks.append(members)
        if conflicting:
            conflicts.append(members)
        if not leaking and not conflicting:
            copies.append(members)
    for level, what, remedy, found in (
        (
            FALSIFIES,
            f"{items} in more than one split",
            "keep each in one split: a model is tested on what it learned from",
            leaks,
        ),
        (
            FALSIFIES,
            f"{items} with more than one {target.single}",
            f"find the right {target.noun} and remove the other copies",
            conflicts,
        ),
        (
            WARNING,
            f"{items} repeated {target.repeated}",
            "keep one of each, unless they should weigh more",
            copies,
        ),
    ):
        report.add(level, what, [_equal(members) for members in found], remedy, found)


def _equal(members: list[dict[str, Any]]) -> str:
    shown = [
        f"{one['id']} ({one['split']}{', ' + str(one['class']) if 'class' in one else ''})"
        for one in members[:_SHOWN]
    ]
    more = len(members) - _SHOWN
    return " = ".join([*shown, f"{more} more"] if more > 0 else shown)


def add_cases(report: Report, images: Images, *, grouped: bool) -> None:
    """Count the cases of each split; find those in several, and splits of a single one."""
    if not grouped or not images.groups:
        return
    of: dict[str, set[str]] = {}
    for group, split in zip(images.groups, images.splits.tolist(), strict=True):
        of.setdefault(group, set()).add(split)
    counts = Counter(split for splits in of.values() for split in splits)
    report.facts["cases"] = {name: counts[name] for name in SPLITS if counts[name]}
    shared = [
        {"case": case, "splits": sorted(of[case], key=SPLITS.index)}
        for case in sorted(of)
        if len(of[case]) > 1
    ]
    report.add(
        FALSIFIES,
        "cases in more than one split",
        [f"{one['case']} ({', '.join(one['splits'])})" for one in shared],
        "keep a case in one split (data.split_by=case): its slices resemble each other, and a "
        "model is tested on what it learned from",
        shared,
    )
    lone = [name for name in SPLITS if counts[name] == 1]
    report.add(
        WARNING,
        LONE_CASE,
        lone,
        "nothing shows how far scores vary from case to case: add cases, or take a larger share",
    )


def add_classes(report: Report, images: Images, *, empty_reported: bool) -> None:
    """Count the images of each class; find classes that a split lacks, and imbalance."""
    names, items = images.classes, images.kind.nouns
    counts = {
        name: np.bincount(labels[labels >= 0], minlength=len(names))
        for name, table in images.tables.items()
        for labels in [table.targets.strata]
    }
    train = counts["train"]
    if not train.any():
        return  # no label could be read
    report.facts["classes"] = {
        name: {split: int(counts[split][i]) for split in counts} for i, name in enumerate(names)
    }
    least, most = int(train.argmin()), int(train.argmax())
    report.lines.append(
        (
            "classes",
            f"{len(names)}; smallest {names[least]} ({train[least]}), largest {names[most]} "
            f"({train[most]})",
        )
    )
    if not empty_reported:
        remedy = f"no model can learn them: add {items}, or take their names out"
        _warn(report, names, train == 0, f"classes without training {items}", remedy)
    remedy = f"they are learned from, but never validated on: add {items}"
    _warn(report, names, train == 1, f"classes of one training {images.kind.noun}", remedy)
    add_unmeasured(report, names, counts, images.kind)
    add_uneven(report, names, train, images.kind)


def add_unmeasured(
    report: Report, names: Sequence[str], counts: Mapping[str, IntArray], kind: InputKind
) -> None:
    """Name the classes that are learned, but that a split to measure on lacks."""
    for split in ("val", "test"):
        if split in counts:
            lacking = (counts[split] == 0) & (counts["train"] > 0)
            remedy = f"what a model makes of them cannot be measured: add {kind.nouns}"
            _warn(report, names, lacking, f"classes that {split} lacks", remedy)


def _warn(
    report: Report, names: Sequence[str], which: NDArray[np.bool_], what: str, remedy: str
) -> None:
    report.add(WARNING, what, [names[i] for i in np.flatnonzero(which).tolist()], remedy)


def add_uneven(report: Report, names: Sequence[str], counts: IntArray, kind: InputKind) -> None:
    """Warn where the classes of the training images are uneven, as `Balance` defines it."""
    if not counts.any():
        return
    balance = Balance(dict(enumerate(counts.tolist())))
    most, least = balance.largest, balance.smallest
    if balance.uneven:
        line = f"{names[most]} has {counts[most]} training {kind.nouns}, {names[least]} "
        line += str(counts[least])
        remedy = "read the accuracy of each class, not the mean alone"
        report.add(WARNING, "large imbalances", [line], remedy)


def add_sizes(report: Report, images: Images) -> None:
    """Say which sizes there are, and very small images."""
    known = np.flatnonzero(images.sizes[:, 0])
    if not len(known):
        return
    sizes = images.sizes[known]
    area = sizes.prod(axis=1)
    counted = Counter(map(tuple, sizes.tolist()))
    (width, height), times = counted.most_common(1)[0]
    report.facts["sizes"] = {
        "different": len(counted),
        "common": {"width": width, "height": height, "images": times},
        "smallest": images.sized(int(known[area.argmin()])),
        "largest": images.sized(int(known[area.argmax()])),
    }
    side = sizes.min(axis=1)
    bound = max(_TINY, int(_TINY_SHARE * float(np.median(side))))
    tiny = [images.sized(k) for k in known[side < bound].tolist()]
    report.add(
        WARNING,
        f"{images.kind.nouns} with a side below {bound} pixels",
        [f"{one['id']}: {one['width']}x{one['height']}" for one in tiny],
        "look at them: enlarged, they show little",
        tiny,
    )


def add_traits(report: Report, images: Images) -> None:
    """Name the images that are not plain 8-bit colour, and what loading makes of them."""
    for place, (trait, answer) in enumerate(TRAITS.items()):
        found = np.flatnonzero(images.traits & (1 << place))
        level = WARNING if trait in _WARNED else NOTE
        report.add(
            level, f"{trait} {images.kind.nouns}", [images.id(int(k)) for k in found], answer
        )
    if text := dim(images.brightest):
        report.add(WARNING, "dark sets of 16-bit images", [text], "")


def add_sequences(
    report: Report, found: Sequences | None, target: TargetKind, *, own_split: bool
) -> None:
    """Name the sequences whose frames are taken for independent images.

    A split that is drawn frame by frame tests on what was learned from. The data set's own split
    stays as it is, since published scores are of it.
    """
    if found is None:
        return
    report.facts["sequences"] = {"images": found.count, "sequences": found.images}
    remedy = (
        f"{target.grouping}put each sequence into train, val or test as a whole: neighbours are "
        "nearly the same picture, so that a model is tested on what it learned from"
    )
    if own_split:
        remedy = (
            "the split is the data set's own and stays; intervals over test images are too narrow"
        )
    report.add(
        WARNING if own_split else FALSIFIES,
        IN_SEQUENCES,
        [f"{name}: {images} images" for name, images in found.images.items()],
        remedy,
        [{"sequence": name, "images": images} for name, images in found.images.items()],
    )

# SPDX-License-Identifier: Apache-2.0
"""What the images of a data set say about it: damage, copies, classes, sizes, kinds of file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keymix.data.balance import Balance
from keymix.data.findings import FALSIFIES, NOTE, STOPS, WARNING, Report
from keymix.data.sequences import Sequences
from keymix.data.sources.base import Table
from keymix.data.streams import IntArray
from keymix.data.survey import TRAITS, Survey

_TINY = 8  # pixels a side
_TINY_SHARE = 0.25  # of the median side
_WARNED = ("animated", "turned")  # traits whose loss a person may not expect
IN_SEQUENCES = "sequences of frames taken for independent images"
_SHOWN = 3  # equal images named in a line
_COPIES = {
    "leak": (
        FALSIFIES,
        "images in more than one split",
        "keep each in one split: a model is tested on what it learned from",
    ),
    "conflict": (
        FALSIFIES,
        "images with more than one label",
        "find the right class and remove the other copies",
    ),
    "copy": (
        WARNING,
        "images repeated within a class",
        "keep one of each, unless they should weigh more",
    ),
}


class Images:
    """All images of a data set in one row, with what was seen of them.

    Args:
        classes: Names of the classes.
        tables: The source's tables by name.
        surveys: What was seen of each table.
        splits: The split that each row of each table goes to.
    """

    def __init__(
        self,
        classes: Sequence[str],
        tables: Mapping[str, Table],
        surveys: Mapping[str, Survey],
        splits: Mapping[str, NDArray[np.str_]],
    ) -> None:
        self.classes = classes
        self.tables = tables
        seen = [surveys[name] for name in tables]
        self.labels = np.concatenate([table.labels for table in tables.values()])
        self.splits = np.concatenate([splits[name] for name in tables])
        self.hashes = np.concatenate([each.hashes for each in seen])
        self.sizes = np.concatenate([each.sizes for each in seen])
        self.traits = np.concatenate([each.traits for each in seen])
        self._starts = np.cumsum([0, *map(len, tables.values())])
        self.sparse = {
            int(start) + i: each.sparse[i]
            for start, each in zip(self._starts, seen, strict=False)
            for i in sorted(each.sparse)
        }
        self.broken = {
            int(start) + i: each.broken[i]
            for start, each in zip(self._starts, seen, strict=False)
            for i in sorted(each.broken)
        }

    def id(self, k: int) -> str:
        """Say where image ``k`` comes from."""
        number = int(np.searchsorted(self._starts, k, side="right")) - 1
        return list(self.tables.values())[number].name(k - int(self._starts[number]))

    def place(self, k: int) -> dict[str, Any]:
        """Tell origin, split and class of image ``k``."""
        label = int(self.labels[k])
        name = self.classes[label] if label >= 0 and self.classes else None
        return {"id": self.id(k), "split": str(self.splits[k]), "class": name}

    def sized(self, k: int) -> dict[str, Any]:
        """Tell width, height and origin of image ``k``."""
        width, height = self.sizes[k].tolist()
        return {"width": width, "height": height, "id": self.id(k)}


def add_broken(report: Report, images: Images) -> None:
    """Name the images that cannot be decoded."""
    found = [{**images.place(k), "reason": why} for k, why in images.broken.items()]
    report.add(
        STOPS,
        "broken images",
        [f"{one['id']}: {one['reason']}" for one in found],
        "replace or remove them, or train with --data.skip_corrupt true",
        found,
    )


def add_sparse(report: Report, images: Images, time_steps: int) -> None:
    """Name the recordings of events that do not fill their frames.

    Args:
        report: Where to.
        images: The recordings.
        time_steps: T, frames that would be made of each.
    """
    kinds = {
        "few": (
            f"recordings of fewer events than frames, at T = {time_steps}",
            "by number all events are in the last frame: look at them, or take fewer "
            "data.time_steps",
        ),
        "empty": (
            f"recordings with empty frames by time, at T = {time_steps}",
            "a frame without events tells a model nothing: take fewer data.time_steps, or leave "
            "data.frames_by at number",
        ),
    }
    for kind, (what, remedy) in kinds.items():
        of_kind = [(k, told) for k, (which, told) in images.sparse.items() if which == kind]
        found = [{**images.place(k), "reason": told} for k, told in of_kind]
        report.add(WARNING, what, [f"{one['id']}: {one['reason']}" for one in found], remedy, found)


def add_copies(report: Report, images: Images) -> None:
    """Group equal images: in several splits, of several classes, or plain copies."""
    whole = images.sizes[:, 0] > 0
    _, group, times = np.unique(images.hashes, return_inverse=True, return_counts=True)
    groups: dict[int, list[dict[str, Any]]] = {}
    for k in np.flatnonzero((times[group] > 1) & whole).tolist():
        groups.setdefault(int(group[k]), []).append(images.place(k))
    kinds: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in _COPIES}
    for members in groups.values():
        leaks = len({one["split"] for one in members}) > 1
        conflicts = len({one["class"] for one in members}) > 1
        if leaks:
            kinds["leak"].append(members)
        if conflicts:
            kinds["conflict"].append(members)
        if not leaks and not conflicts:
            kinds["copy"].append(members)
    for kind, (level, what, remedy) in _COPIES.items():
        lines = [_equal(members) for members in kinds[kind]]
        report.add(level, what, lines, remedy, kinds[kind])


def _equal(members: list[dict[str, Any]]) -> str:
    shown = [f"{one['id']} ({one['split']}, {one['class']})" for one in members[:_SHOWN]]
    more = len(members) - _SHOWN
    return " = ".join([*shown, f"{more} more"] if more > 0 else shown)


def add_classes(report: Report, images: Images, *, empty_told: bool) -> None:
    """Count the images of each class; find classes that a split lacks, and imbalance.

    Args:
        report: Where to.
        images: The images.
        empty_told: Whether classes without images are told of already.
    """
    names = images.classes
    counts = {
        name: np.bincount(table.labels[table.labels >= 0], minlength=len(names))
        for name, table in images.tables.items()
    }
    train = counts["train"]
    if not names or not train.any():
        return  # there are no labels, or none could be read
    report.facts["classes"] = {
        name: {split: int(counts[split][i]) for split in counts} for i, name in enumerate(names)
    }

    if not empty_told:
        remedy = "no model can learn them: add images, or take their names out"
        _warn(report, names, train == 0, "classes without training images", remedy)
    remedy = "they are learned from, but never validated on: add images"
    _warn(report, names, train == 1, "classes of one training image", remedy)
    add_unmeasured(report, names, counts)
    add_uneven(report, names, train)


def add_unmeasured(report: Report, names: Sequence[str], counts: Mapping[str, IntArray]) -> None:
    """Name the classes that are learned, but that a split to measure on lacks.

    Args:
        report: Where to.
        names: The classes.
        counts: Images of each class by split.
    """
    for split in ("val", "test"):
        if split in counts:
            lacking = (counts[split] == 0) & (counts["train"] > 0)
            remedy = "what a model makes of them cannot be measured: add images"
            _warn(report, names, lacking, f"classes that {split} lacks", remedy)


def _warn(
    report: Report, names: Sequence[str], which: NDArray[np.bool_], what: str, remedy: str
) -> None:
    report.add(WARNING, what, [names[i] for i in np.flatnonzero(which).tolist()], remedy)


def add_uneven(report: Report, names: Sequence[str], counts: IntArray) -> None:
    """Warn where the classes of the training images are uneven, as `Balance` defines it.

    Args:
        report: Where to.
        names: The classes.
        counts: Training images of each.
    """
    if not counts.any():
        return
    balance = Balance(dict(enumerate(counts.tolist())))
    most, least = balance.largest, balance.smallest
    if balance.uneven:
        line = f"{names[most]} has {counts[most]} training images, {names[least]} {counts[least]}"
        remedy = "read the accuracy of each class, not the mean alone"
        report.add(WARNING, "large imbalances", [line], remedy)


def add_sizes(report: Report, images: Images) -> None:
    """Tell which sizes there are, and very small images."""
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
        f"images with a side below {bound} pixels",
        [f"{one['id']}: {one['width']}x{one['height']}" for one in tiny],
        "look at them: enlarged, they show little",
        tiny,
    )


def add_traits(report: Report, images: Images) -> None:
    """Name the images that are not plain 8-bit colour, and what loading makes of them."""
    for place, (trait, answer) in enumerate(TRAITS.items()):
        found = np.flatnonzero(images.traits & (1 << place))
        level = WARNING if trait in _WARNED else NOTE
        report.add(level, f"{trait} images", [images.id(int(k)) for k in found], answer)


def add_sequences(report: Report, found: Sequences | None, *, masks: bool) -> None:
    """Name the sequences whose frames are taken for independent images.

    Args:
        report: Where to.
        found: The sequences.
        masks: Whether the images have masks, whose cases `groups.csv` can name.
    """
    if found is None:
        return
    report.facts["sequences"] = {"images": found.count, "sequences": found.images}
    how = "put each sequence into train, val or test as a whole"
    report.add(
        WARNING,
        IN_SEQUENCES,
        [f"{name}: {images} images" for name, images in found.images.items()],
        f"{'name the sequence of each in groups.csv, or ' * masks}{how}: neighbours are nearly the "
        "same picture, so that a model is tested on what it learned from, and intervals over test "
        "images are too narrow",
        [{"sequence": name, "images": images} for name, images in found.images.items()],
    )

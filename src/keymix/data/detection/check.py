# SPDX-License-Identifier: Apache-2.0
"""What a check finds of instances: how many of each class and size, and images without any."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keymix.data.detection.table import (
    LARGE,
    SMALL,
    InstanceTable,
    InstanceTargets,
)
from keymix.data.findings import (
    SPLITS,
    STOPS,
    WARNING,
    Images,
    Report,
    TargetFindings,
    add_unmeasured,
)
from keymix.data.kinds import InputKind
from keymix.data.sources.base import Faults, Source
from keymix.data.specs import Options
from keymix.data.streams import IntArray
from keymix.data.survey import Progress, Survey, survey_images

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData


def survey_source(
    source: Source, faults: Faults, options: Options, progress: Progress
) -> dict[str, Survey]:
    """Decode every image of a source, and list what is wrong with its entry and annotations."""
    found = survey_images(source, faults, options, progress)
    for name, table in source.tables.items():
        assert isinstance(table, InstanceTable)
        for i in range(len(table)):
            faults.found += table.unfit(i)
            if i not in found[name].broken:
                width, height = found[name].sizes[i].tolist()
                faults.found += table.unlike(i, (height, width))
    return found


@dataclass(frozen=True, eq=False, kw_only=True)
class _Instances:
    """All instances of a data set in one row, and the images that they are in."""

    splits: frozenset[str]  # those that there are
    split: NDArray[np.str_]  # of each instance
    image: IntArray  # of each instance, in the row of all images
    label: IntArray
    box: NDArray[np.float64]
    area: NDArray[np.float64]
    crowd: NDArray[np.bool_]
    count: IntArray  # of each image

    def by_class(self, names: Sequence[str]) -> dict[str, IntArray]:
        """Count the instances of each class that are no crowds, by split."""
        return {
            split: np.bincount(
                self.label[(self.split == split) & ~self.crowd], minlength=len(names)
            ).astype(np.int64)
            for split in SPLITS
            if split in self.splits
        }


def _joined(every: Sequence[InstanceTargets], splits: NDArray[np.str_]) -> _Instances:
    """Take the instances of several tables or splits, in their order."""
    found = [each.annotations for each in every]
    count = np.concatenate([each.counts for each in found])
    image = np.repeat(np.arange(len(count)), count)

    def column(name: str) -> NDArray[Any]:
        return np.concatenate([each.joined(name) for each in found])

    return _Instances(
        splits=frozenset(splits.tolist()),
        split=splits[image],
        image=image,
        label=column("labels"),
        box=column("boxes"),
        area=column("areas"),
        crowd=column("crowd"),
        count=count,
    )


class InstanceFindings(TargetFindings):
    """What a check reports of instances."""

    def check(self, report: Report, images: Images, source: Source, known: Collection[str]) -> None:
        """Count instances by class, size and split, and find what is odd about them."""
        del known
        every = [table.targets for table in source.tables.values()]
        found = _joined(
            [each for each in every if isinstance(each, InstanceTargets)], images.splits
        )
        by_class = found.by_class(images.classes)
        _add_counts(report, images, found, by_class)
        _add_unfit(report, source)
        _add_sizes(report, found)
        _add_lacking(report, images.classes, by_class, images.kind)
        _add_twice(report, images, found)

    def quick_check(self, report: Report, images: Images, data: ImageData) -> None:
        """Find classes that a split lacks."""
        targets = [split.targets for split in data.splits]
        every = [each for each in targets if isinstance(each, InstanceTargets)]
        splits = np.concatenate([np.full(len(split), split.name) for split in data.splits])
        by_class = _joined(every, splits).by_class(data.classes)
        _add_lacking(report, data.classes, by_class, images.kind)


def _add_counts(
    report: Report, images: Images, found: _Instances, by_class: Mapping[str, IntArray]
) -> None:
    """Count instances by class and split, crowds, and images without any."""
    names = [split for split in SPLITS if images.of_split(split).any()]
    report.facts["classes"] = {
        name: {split: int(by_class[split][c]) for split in names}
        for c, name in enumerate(images.classes)
    }
    instances = {split: int((found.split == split).sum()) for split in names}
    without = {split: int((found.count[images.of_split(split)] == 0).sum()) for split in names}
    crowds = int(found.crowd.sum())
    report.facts["instances"] = {**instances, "crowds": crowds, "images_without": without}
    report.lines.append(("instances", f"{_listed(instances)}; of these crowds {crowds:,}"))
    report.lines.append(("empty", f"{_listed(without)} {images.kind.nouns} without instances"))
    learned = report.facts["classes"]
    if "train" in names:
        least, most = (by(learned, key=lambda name: learned[name]["train"]) for by in (min, max))
        text = f"{len(learned)}; fewest instances {least} ({learned[least]['train']:,}), "
        text += f"most {most} ({learned[most]['train']:,})"
        report.lines.append(("classes", text))
    if not found.crowd.size or found.crowd[found.split == "train"].all():
        lacking = "no training image has an instance that is no crowd"
        report.add(STOPS, "splits with nothing to learn", [lacking], "annotate some")


def _add_unfit(report: Report, source: Source) -> None:
    """Count the annotations that are unfit, and say what training may do about them."""
    unfit = [
        len(annotations)
        for table in source.tables.values()
        if isinstance(table, InstanceTable)
        for i in range(len(table))
        if (annotations := table.unfit(i))
    ]
    report.facts["instances"]["unfit"] = sum(unfit)
    if unfit:
        text = f"{sum(unfit):,} annotations of {len(unfit):,} {source.items}; "
        text += "--data.skip_corrupt true leaves them out and keeps images that are fit"
        report.lines.append(("unfit", text))


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in numbers.items())


def _add_sizes(report: Report, found: _Instances) -> None:
    """Say how many instances are small, medium and large as COCO counts them."""
    areas = found.area[~found.crowd]
    if not areas.size:
        return
    shares = {
        "small": float((areas < SMALL).mean()),
        "medium": float(((areas >= SMALL) & (areas <= LARGE)).mean()),
        "large": float((areas > LARGE).mean()),
    }
    report.facts["instances"]["sizes"] = shares
    text = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    report.lines.append(("areas", f"{text} (small below 32x32 pixels, large above 96x96)"))


def _add_lacking(
    report: Report, names: Sequence[str], by_class: Mapping[str, IntArray], kind: InputKind
) -> None:
    """Name the classes that a split lacks."""
    report.add(
        WARNING,
        "classes without training instances",
        [names[c] for c in np.flatnonzero(by_class["train"] == 0).tolist()],
        f"no model can learn them: add {kind.nouns}, or take their names out",
    )
    add_unmeasured(report, names, by_class, kind)


def _add_twice(report: Report, images: Images, found: _Instances) -> None:
    """Name the images that have an instance twice: the same class in the same box."""
    rows = np.column_stack([found.image, found.label, found.box])
    _, first, times = np.unique(rows, axis=0, return_index=True, return_counts=True)
    twice = [
        (images.id(int(found.image[a])), images.classes[int(found.label[a])])
        for a in np.sort(first[times > 1]).tolist()
    ]
    report.add(
        WARNING,
        "instances that are annotated twice",
        [f"{name}: {label}" for name, label in twice],
        "remove one of each: a model is asked to find both",
        [{"id": name, "class": label} for name, label in twice],
    )

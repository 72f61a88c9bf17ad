# SPDX-License-Identifier: Apache-2.0
"""What detectors found on a split, matched with the truth; and how that is scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from keymix.analysis import statistics
from keymix.analysis.answers import (
    Answers,
    Arrays,
    FloatArray,
    IntArray,
    known,
    resamples,
    whole,
)
from keymix.data.record import DataRecord
from keymix.data.sample import Row
from keymix.report.formats import percent
from keymix.task import Task
from keymix.tasks.detection.facts import TASK, ClassPrecision, DetectionDetails
from keymix.tasks.detection.matching import (
    AREAS,
    MOST,
    SHAPES,
    Found,
    Instances,
    matched,
    unpacked,
)
from keymix.tasks.detection.predictions import (
    AT_ONCE,
    SURE,
    InstancePrediction,
    InstanceWriter,
    found_at,
)
from keymix.tasks.detection.reference import frequent_boxes
from keymix.tasks.detection.scoring import Ranked, averaged, averaged_without, of_each_image
from keymix.train.parts import (
    DetailsTable,
    Evaluated,
    Prediction,
    PredictionRows,
    Reference,
)
from keymix.train.predict_folder import FolderAnswers
from keymix.train.record import SplitScores
from keymix.train.scoring import Outputs

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData, Split

_AT = {"ap": slice(None), "ap50": slice(0, 1), "ap75": slice(5, 6)}
"""Which of the IoU thresholds a score of all areas is averaged over."""
Rows = list[list[str | int | float | None]]
_FIRST_LABEL = 1
"""Label of the first class: 0 is background."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DetectionAnswers(Answers):
    """A model's detections on a split, matched with the true instances.

    `true` has arrays of all true instances: ``image``, the position in the split, ``label``,
    ``area`` and ``crowd``, ``[G]``. `found` has those of the detections that count: ``image``,
    ``label``, ``score``, ``boxes`` ``[D, 4]`` in pixels of the images, and the bits of
    `keymix.tasks.detection.matching.matched`. `index` is ascending.
    """

    index: IntArray
    true: Arrays
    found: Arrays
    classes: tuple[str, ...]
    _ranked: dict[tuple[str, str], list[Ranked]] = field(default_factory=dict, init=False)

    @property
    def shapes(self) -> tuple[str, ...]:
        """Those of `SHAPES` that were matched: boxes, and masks where there are some."""
        return tuple(shape for shape in SHAPES if f"{shape}_matched" in self.found)

    @property
    def units(self) -> int:
        """Number of images."""
        return len(self.index)

    @cached_property
    def true_row(self) -> IntArray:
        """Row of the image of each true instance, ``[G]``."""
        return np.searchsorted(self.index, self.true["image"])

    def ranked(self, shape: str, area: str = "all") -> list[Ranked]:
        """Rank the detections of each class: by box or mask, of one of `AREAS`."""
        if (shape, area) not in self._ranked:
            self._ranked[shape, area] = [*self._rank(shape, area)]
        return self._ranked[shape, area]

    def _rank(self, shape: str, area: str) -> Iterator[Ranked]:
        found, true = self.found, self.true
        row = np.searchsorted(self.index, found["image"])
        order = np.lexsort((row, -found["score"]))
        low, high = AREAS[area]
        inside = (true["area"] >= low) & (true["area"] <= high) & ~true["crowd"]
        for k in range(len(self.classes)):
            mine = order[found["label"][order] == k + _FIRST_LABEL]
            hit = unpacked(found[f"{shape}_matched"][mine], area)
            ignored = unpacked(found[f"{shape}_ignored"][mine], area)
            theirs = self.true_row[inside & (true["label"] == k + _FIRST_LABEL)]
            yield Ranked(
                image=row[mine],
                right=hit & ~ignored,
                counted=~ignored,
                positives=np.bincount(theirs, minlength=self.units).astype(np.float64),
            )

    def by_threshold(self, shape: str, weights: FloatArray) -> FloatArray:
        """Average precision of all areas at each IoU threshold: ``[R, U]`` -> ``[R, T]``."""
        return averaged(self.ranked(shape), weights)

    def score(self, weights: FloatArray) -> FloatArray:
        """AP of the boxes of weighted images, ``[R, U]`` -> ``[R]``."""
        found: FloatArray = self.by_threshold("box", weights).mean(axis=1)
        return found

    @cached_property
    def values(self) -> FloatArray:
        """What `unit_values` returns."""
        if self.units < 2:
            return np.full(self.units, whole(self))
        left = averaged_without(self.ranked("box"))
        return self.units * whole(self) - (self.units - 1) * left

    def unit_values(self) -> FloatArray:
        """Pseudo-values of the delete-one jackknife, computed once.

        Without an image only the classes that it has are ranked again, which keeps it affordable
        for thousands of images.
        """
        return self.values

    @cached_property
    def draws(self) -> Mapping[str, FloatArray]:
        """Scores of all areas of resampled images, ``[RESAMPLES]`` each, by key."""
        weights = resamples(self.units)
        return {
            f"{shape}_{key}": found[:, chosen].mean(axis=1)
            for shape in self.shapes
            for found in (self.by_threshold(shape, weights),)
            for key, chosen in _AT.items()
        }

    @cached_property
    def resampled(self) -> FloatArray:
        """AP of the boxes of resampled images; see `keymix.analysis.answers.Answers`."""
        return self.draws["box_ap"]

    @cached_property
    def images(self) -> FloatArray:
        """AP of the boxes of each image alone at an IoU of 0.5, ``[U]``; NaN without instances."""
        return of_each_image(self.ranked("box"), 0)

    def scores(self) -> dict[str, float | None]:
        """All scores by key, None where no instance is of the size."""
        one = np.ones((1, self.units))
        found = {
            f"{shape}_{key}": float(of_shape[chosen].mean())
            for shape in self.shapes
            for of_shape in (self.by_threshold(shape, one)[0],)
            for key, chosen in _AT.items()
        }
        for shape in self.shapes:
            for area in list(AREAS)[1:]:
                of_area = averaged(self.ranked(shape, area), one)
                found[f"{shape}_ap_{area}"] = float(of_area.mean())
        return {each.key: known(found[each.key]) for each in TASK.scores if each.key in found}

    def by_class(self, shape: str) -> FloatArray:
        """AP of each class over all areas and thresholds, ``[K]``; NaN without true instances."""
        one = np.ones((1, self.units))
        return np.array([each.precision(one).mean() for each in self.ranked(shape)])

    def counts(self) -> tuple[IntArray, IntArray]:
        """True instances without crowds of each class, and the images that have one: ``[K]``."""
        positives = np.stack([each.positives for each in self.ranked("box")])
        return positives.sum(axis=1).astype(np.int64), (positives > 0).sum(axis=1)

    def shared(self) -> Arrays:
        """Positions and true instances."""
        return {"index": self.index, **{f"true_{name}": a for name, a in self.true.items()}}

    def arrays(self, which: str) -> Arrays:
        """Detections with their matches."""
        return {f"{which}_{name}": values for name, values in self.found.items()}

    def same_truth(self, other: Answers) -> bool:
        """Whether other answers are to the same images with the same instances."""
        if not isinstance(other, DetectionAnswers):
            return False
        ours, theirs = self.shared(), other.shared()
        return all(np.array_equal(ours[name], theirs[name]) for name in ours)

    def degenerate(self) -> tuple[str, ...]:
        """Say that nothing is detected, or that no detection is right."""
        number = len(self.found["image"])
        if not number:
            return (f"nothing was detected in the {self.units:,} {{inputs}}",)
        if self.unscorable() or any(each.right[0].any() for each in self.ranked("box")):
            return ()
        return (f"none of {number:,} detections in {self.units:,} {{inputs}} finds an instance",)

    def unscorable(self) -> str:
        """Say that no image has an instance."""
        if not self.true["crowd"].all():
            return ""
        return f"none of the {self.units:,} {{inputs}} has an instance, so there is no AP"

    def details(self) -> DetectionDetails:
        """AP of each class, and what was counted."""
        precision = {shape: self.by_class(shape) for shape in self.shapes}
        instances, images = self.counts()
        small, medium, large = (
            sum(int(each.positives.sum()) for each in self.ranked("box", area))
            for area in ("small", "medium", "large")
        )
        return DetectionDetails(
            detections=len(self.found["image"]),
            instances=int(instances.sum()),
            crowds=int(self.true["crowd"].sum()),
            empty=self.units - len(np.unique(self.true_row)),
            of_sizes=(small, medium, large),
            classes=tuple(
                ClassPrecision(
                    name=name,
                    box_ap=known(precision["box"][k]),
                    mask_ap=known(precision["mask"][k]) if "mask" in precision else None,
                    instances=int(instances[k]),
                    images=int(images[k]),
                )
                for k, name in enumerate(self.classes)
            ),
        )


def scored(
    images: Iterable[tuple[int, Instances, Found]], classes: tuple[str, ...]
) -> DetectionAnswers:
    """Match the detections of images, each with its position in the split."""
    places, true, found = [], [], []
    for place, truth, said in images:
        made, bits = matched(truth, said)
        places.append(place)
        true.append({"label": truth.labels, "area": truth.area, "crowd": truth.crowd})
        found.append(
            {
                "label": made.labels,
                "score": made.scores.astype(np.float32),
                "boxes": made.boxes.astype(np.float32),
                **bits,
            }
        )
    order = np.argsort(places)
    index = np.array(places, dtype=np.int64)[order]
    both = (_flat(index, [rows[i] for i in order]) for rows in (true, found))
    return DetectionAnswers(index=index, true=next(both), found=next(both), classes=classes)


def _flat(index: IntArray, images: Sequence[Arrays]) -> Arrays:
    """Join the arrays of images, with the image of each row."""
    joined = {name: np.concatenate([each[name] for each in images]) for name in images[0]}
    return {"image": np.repeat(index, [len(each["label"]) for each in images]), **joined}


def instances_of(row: Row) -> Instances:
    """Read the true instances of an image at its own size, crowds included."""
    truth = row.target.truth()
    return Instances(
        boxes=truth["boxes"].double().numpy(),
        labels=truth["labels"].numpy(),
        masks=row.target.encoded(),
        area=truth["area"].double().numpy(),
        crowd=truth["iscrowd"].numpy(),
    )


class DetectionAnswersPart(FolderAnswers[InstancePrediction]):
    """How detectors are evaluated, at the images' own sizes."""

    prediction = InstancePrediction
    folder_writer = InstanceWriter
    predict_options = FolderAnswers.predict_options | {"score_threshold"}
    writer = "predict_instances"
    at_once = AT_ONCE
    chance = "the boxes that are frequent in training, which are the same for every image"

    def evaluated(
        self, outputs: Outputs, split: Split, data: ImageData, device: torch.device
    ) -> Evaluated:
        """Match the instances that are found in every image."""
        del device
        images = (
            (i, instances_of(split.rows[i]), found_at(output, split.size(i)))
            for batch, found in outputs
            for i, output in zip(batch.index.tolist(), found, strict=True)
        )
        return _evaluated(self.joined(scored(images, data.classes), data))

    def read(
        self, stored: Arrays, which: Literal["last", "best"], data: DataRecord
    ) -> DetectionAnswers:
        """Read answers."""
        true, found = (
            {
                name.removeprefix(f"{kind}_"): a
                for name, a in stored.items()
                if name.startswith(kind)
            }
            for kind in ("true", which)
        )
        true, found = (
            {name: a[np.argsort(rows["image"], kind="stable")] for name, a in rows.items()}
            for rows in (true, found)  # ranks answer images in turns
        )
        return DetectionAnswers(
            index=np.sort(stored["index"]), true=true, found=found, classes=data.classes
        )

    def interval(
        self, task: Task, mixer: Mapping[int, Answers], baseline: Mapping[int, Answers]
    ) -> statistics.Interval | None:
        """Compare two mixers over resampled images (`keymix.analysis.statistics`)."""
        return statistics.over_resamples(mixer, baseline, score=task.score, unit=task.unit)

    def table(self, found: Sequence[Prediction], noun: str) -> PredictionRows:
        """Make a row per image, with how many instances of each class it shows."""
        several = self.known(found)
        counted = [Counter(each.labels[i] for i in each.surely()) for each in several]
        rows: Rows = [
            [each.path, own.total(), ", ".join(f"{name} {n}" for name, n in own.items()) or "–"]
            for each, own in zip(several, counted, strict=True)
        ]
        return PredictionRows(heads=[noun, _counted(several), "of each class"], rows=rows)

    def summary(self, found: Sequence[Prediction], noun: str) -> PredictionRows:
        """Make a row per class: the images where it was found, and how often."""
        several = self.known(found)
        sure = [[each.labels[i] for i in each.surely()] for each in several]
        instances = Counter(name for names in sure for name in names)
        images = Counter(name for names in sure for name in {*names})
        rows: Rows = [
            [name, f"{images[name]} of {len(several)}", number]
            for name, number in sorted(instances.items(), key=lambda pair: (-pair[1], pair[0]))
        ]
        heads = ["class", f"{noun}s with it", _counted(several)]
        return PredictionRows(heads=heads, rows=rows or [["nothing", f"0 of {len(several)}", 0]])

    def csv(self, found: Sequence[Prediction]) -> PredictionRows:
        """Make a row per detection, boxes in pixels of the image."""
        rows: Rows = [
            [each.path, name, round(float(score), 4), *(round(float(x), 2) for x in box)]
            for each in self.known(found)
            for name, score, box in zip(each.labels, each.scores, each.boxes, strict=True)
        ]
        heads = ["image", "class", "score", "left", "top", "right", "bottom"]
        return PredictionRows(heads=heads, rows=rows)

    def plain(self, found: Prediction) -> object:
        """Return the detections as COCO's results have them."""
        if not isinstance(found, InstancePrediction) or found.error is not None:
            return {"path": found.path, "error": found.error}
        return {"path": found.path, "size": found.size, "detections": found.results()}

    def details(self, test: SplitScores) -> Sequence[DetailsTable]:
        """Return the scores of each class that has instances."""
        own = test.own.read(DetectionDetails)
        shapes = [shape for shape in SHAPES if f"{shape}_ap" in test.scores]
        rows = [
            [
                each.name,
                *(percent(getattr(each, f"{shape}_ap"), 1) for shape in shapes),
                f"{each.instances:,}",
                f"{each.images:,}",
            ]
            for each in own.classes
            if each.instances
        ]
        overall = [percent(test.scores[f"{shape}_ap"], 1) for shape in shapes]
        table = DetailsTable(
            title="each class with instances",
            heads=("class", *(f"{shape} AP %" for shape in shapes), "instances", "images"),
            rows=[*rows, ["mean", *overall, f"{own.instances:,}", ""]],
            note=f"{own.detections:,} detections were scored, at most {MOST} of a class and image; "
            f"images without instances: {own.empty:,}; crowd regions, ignored: {own.crowds:,}.",
        )
        return [table]

    def references(self, data: ImageData) -> Iterable[Reference]:
        """Detect the same boxes in every image: those that are frequent in training."""
        found = frequent_boxes([row.target for row in data.train.rows], len(data.classes))

        def answered(split: Split) -> DetectionAnswers:
            said = (
                (i, instances_of(row), found.at(row.target.size))
                for i, row in enumerate(split.rows)
            )
            return scored(said, data.classes)

        yield Reference(
            name="frequent boxes",
            about="in every image the boxes that its classes most often have in training",
            evaluated=_evaluated(answered(data.test)),
            learned=False,
            validated=known(whole(answered(data.val))),
        )


def _counted(found: Sequence[InstancePrediction]) -> str:
    """Say in a head which detections are counted."""
    return f"found, score ≥ {found[0].score_threshold if found else SURE:g}"


def _evaluated(answers: DetectionAnswers) -> Evaluated:
    return Evaluated(scores=answers.scores(), answers=answers, own=answers.details())


ANSWERS = DetectionAnswersPart()

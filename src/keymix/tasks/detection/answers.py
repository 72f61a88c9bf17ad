# SPDX-License-Identifier: Apache-2.0
"""What detectors found on a split, matched with the truth; and how that is scored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

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
from keymix.data.detection.table import InstanceTargets
from keymix.data.record import DataRecord
from keymix.report.formats import percent
from keymix.task import Task
from keymix.tasks.detection.facts import TASK, ClassPrecision, DetectionDetails
from keymix.tasks.detection.matching import (
    AREAS,
    MOST,
    SHAPES,
    Bits,
    BoolArray,
    Found,
    Instances,
    Matched,
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
_TRUTH: dict[str, Any] = {"true_image": np.integer, "true_label": np.integer}
_TRUTH |= {"true_area": np.floating, "true_crowd": np.bool_}
_DETECTED: dict[str, Any] = {"image": np.integer, "label": np.integer, "score": np.floating}
_DETECTED |= {f"{shape}_{bits}": np.integer for shape in SHAPES for bits in ("matched", "ignored")}
_FIRST_LABEL = 1
"""Label of the first class: 0 is background."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Detections:
    """The detections of a split, in any order.

    Shape: ``[D]`` each, but boxes ``[D, 4]`` in pixels of the images. `image` is the position in
    the split, `matched` and `ignored` are by shape, as `keymix.tasks.detection.matching` packs
    them.
    """

    image: IntArray
    label: IntArray
    score: FloatArray
    boxes: FloatArray
    matched: Mapping[str, Bits]
    ignored: Mapping[str, Bits]

    def arrays(self) -> Arrays:
        """Return it as arrays to store."""
        return {
            "image": self.image.astype(np.int32),
            "label": self.label.astype(np.int32),
            "score": self.score.astype(np.float32),
            "boxes": self.boxes.astype(np.float32),
            **{f"{shape}_matched": self.matched[shape] for shape in SHAPES},
            **{f"{shape}_ignored": self.ignored[shape] for shape in SHAPES},
        }

    @classmethod
    def read(cls, stored: Arrays, which: str) -> Detections:
        """Read what `arrays` gave."""
        return cls(
            image=stored[f"{which}_image"].astype(np.int64),
            label=stored[f"{which}_label"].astype(np.int64),
            score=stored[f"{which}_score"].astype(np.float64),
            boxes=stored[f"{which}_boxes"].astype(np.float64),
            matched={shape: stored[f"{which}_{shape}_matched"] for shape in SHAPES},
            ignored={shape: stored[f"{which}_{shape}_ignored"] for shape in SHAPES},
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class DetectionAnswers(Answers):
    """A model's detections on a split, matched with the true instances.

    Shape: ``true_…`` are ``[G]``, of all true instances; `true_image` is the position in the split.
    `index` is ascending.
    """

    index: IntArray
    true_image: IntArray
    true_label: IntArray
    true_area: FloatArray
    true_crowd: BoolArray
    detections: Detections
    classes: tuple[str, ...]
    _ranked: dict[tuple[str, str], list[Ranked]] = field(default_factory=dict, init=False)

    @property
    def units(self) -> int:
        """Number of images."""
        return len(self.index)

    @cached_property
    def true_row(self) -> IntArray:
        """Row of the image of each true instance, ``[G]``."""
        return np.searchsorted(self.index, self.true_image)

    def ranked(self, shape: str, area: str = "all") -> list[Ranked]:
        """Rank the detections of each class: by box or mask, of one of `AREAS`."""
        if (shape, area) not in self._ranked:
            self._ranked[shape, area] = [*self._rank(shape, area)]
        return self._ranked[shape, area]

    def _rank(self, shape: str, area: str) -> Iterator[Ranked]:
        found = self.detections
        order = np.lexsort((np.searchsorted(self.index, found.image), -found.score))
        low, high = AREAS[area]
        inside = (self.true_area >= low) & (self.true_area <= high) & ~self.true_crowd
        for k in range(len(self.classes)):
            mine = order[found.label[order] == k + _FIRST_LABEL]
            hit = unpacked(found.matched[shape][mine], area)
            ignored = unpacked(found.ignored[shape][mine], area)
            theirs = self.true_row[inside & (self.true_label == k + _FIRST_LABEL)]
            yield Ranked(
                image=np.searchsorted(self.index, found.image[mine]),
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
            for shape in SHAPES
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
            for shape in SHAPES
            for of_shape in (self.by_threshold(shape, one)[0],)
            for key, chosen in _AT.items()
        }
        for shape in SHAPES:
            for area in list(AREAS)[1:]:
                of_area = averaged(self.ranked(shape, area), one)
                found[f"{shape}_ap_{area}"] = float(of_area.mean())
        return {each.key: known(found[each.key]) for each in TASK.scores}

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
        return {
            "index": self.index,
            "true_image": self.true_image.astype(np.int32),
            "true_label": self.true_label.astype(np.int32),
            "true_area": self.true_area.astype(np.float32),
            "true_crowd": self.true_crowd,
        }

    def arrays(self, which: str) -> Arrays:
        """Detections with their matches."""
        return {f"{which}_{name}": values for name, values in self.detections.arrays().items()}

    def same_truth(self, other: Answers) -> bool:
        """Whether other answers are to the same images with the same instances."""
        if not isinstance(other, DetectionAnswers):
            return False
        ours, theirs = self.shared(), other.shared()
        return all(np.array_equal(ours[name], theirs[name]) for name in ours)

    def degenerate(self) -> tuple[str, ...]:
        """Say that nothing is detected, or that no detection is right."""
        if not len(self.detections.image):
            return (f"nothing was detected in the {self.units:,} {{inputs}}",)
        if self.unscorable() or any(each.right[0].any() for each in self.ranked("box")):
            return ()
        number = len(self.detections.image)
        return (f"none of {number:,} detections in {self.units:,} {{inputs}} finds an instance",)

    def unscorable(self) -> str:
        """Say that no image has an instance."""
        if not self.true_crowd.all():
            return ""
        return f"none of the {self.units:,} {{inputs}} has an instance, so there is no AP"

    def details(self) -> DetectionDetails:
        """AP of each class, and what was counted."""
        boxes, masks = self.by_class("box"), self.by_class("mask")
        instances, images = self.counts()
        of_sizes = [
            sum(int(each.positives.sum()) for each in self.ranked("box", area))
            for area in ("small", "medium", "large")
        ]
        return DetectionDetails(
            detections=len(self.detections.image),
            instances=int(instances.sum()),
            crowds=int(self.true_crowd.sum()),
            empty=self.units - len(np.unique(self.true_row)),
            of_sizes=(of_sizes[0], of_sizes[1], of_sizes[2]),
            classes=tuple(
                ClassPrecision(
                    name=name,
                    box_ap=known(boxes[k]),
                    mask_ap=known(masks[k]),
                    instances=int(instances[k]),
                    images=int(images[k]),
                )
                for k, name in enumerate(self.classes)
            ),
        )


def scored(
    index: Sequence[int],
    truth: Sequence[Instances],
    found: Sequence[Found],
    classes: tuple[str, ...],
) -> DetectionAnswers:
    """Match detections image by image; `index` has the positions of the images in their split."""
    order = np.argsort(index)
    return _gathered([(index[i], truth[i], matched(truth[i], found[i])) for i in order], classes)


def _gathered(
    images: Sequence[tuple[int, Instances, Matched]], classes: tuple[str, ...]
) -> DetectionAnswers:
    """Put matched images into flat arrays, in the order of their positions."""
    images = sorted(images, key=lambda each: each[0])
    places = np.array([place for place, _, _ in images], dtype=np.int64)
    truth, made = [each for _, each, _ in images], [each for _, _, each in images]
    found = [each.found for each in made]
    return DetectionAnswers(
        index=places,
        true_image=np.repeat(places, [len(each.labels) for each in truth]),
        true_label=_joined([each.labels for each in truth], np.int64),
        true_area=_joined([each.area for each in truth], np.float64),
        true_crowd=_joined([each.crowd for each in truth], np.bool_),
        detections=Detections(
            image=np.repeat(places, [len(each.labels) for each in found]),
            label=_joined([each.labels for each in found], np.int64),
            score=_joined([each.scores for each in found], np.float64),
            boxes=np.concatenate([np.zeros((0, 4)), *(each.boxes for each in found)]),
            matched={s: _joined([each.matched[s] for each in made], np.uint64) for s in SHAPES},
            ignored={s: _joined([each.ignored[s] for each in made], np.uint64) for s in SHAPES},
        ),
        classes=classes,
    )


def _joined(parts: Sequence[NDArray[Any]], kind: type[Any]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype=kind), *parts]).astype(kind)


def instances_of(targets: InstanceTargets, i: int) -> Instances:
    """Read the true instances of an image at its own size, crowds included."""
    truth = targets.truth(i)
    return Instances(
        boxes=truth["boxes"].double().numpy(),
        labels=truth["labels"].numpy(),
        masks=targets.encoded(i),
        area=truth["area"].double().numpy(),
        crowd=truth["iscrowd"].numpy(),
    )


def instance_targets(split: Split) -> InstanceTargets:
    """Return the instances of a split."""
    if not isinstance(split.targets, InstanceTargets):
        raise ValueError(f"the split {split.name!r} has no instances")
    return split.targets


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
        targets = instance_targets(split)
        images = []
        for batch, found in outputs:
            for i, output in zip(batch.index.tolist(), found, strict=True):
                truth = instances_of(targets, i)
                images.append((i, truth, matched(truth, found_at(output, targets.size(i)))))
        return _evaluated(_gathered(images, data.classes))

    def read(
        self, stored: Arrays, which: Literal["last", "best"], data: DataRecord
    ) -> DetectionAnswers:
        """Read answers."""
        return DetectionAnswers(
            index=np.sort(stored["index"]),
            true_image=stored["true_image"].astype(np.int64),
            true_label=stored["true_label"].astype(np.int64),
            true_area=stored["true_area"].astype(np.float64),
            true_crowd=stored["true_crowd"],
            detections=Detections.read(stored, which),
            classes=data.classes,
        )

    def faults(self, stored: Arrays, data: DataRecord) -> Iterator[str]:
        """Say what is wrong with stored detections."""
        if "index" not in stored:
            yield "index is not in it"
            return
        index = stored["index"]
        images = len(np.unique(index))
        if images != data.sizes["test"]:
            yield f"index names {images:,} images, and the run was tested on {data.sizes['test']:,}"
        yield from _flat_faults(stored, _TRUTH, "true_", index, len(data.classes))
        for which in ("last", "best"):
            wanted = {f"{which}_{name}": kind for name, kind in _DETECTED.items()}
            yield from _flat_faults(stored, wanted, f"{which}_", index, len(data.classes))
            boxes, number = stored.get(f"{which}_boxes"), len(stored.get(f"{which}_image", ()))
            if boxes is None or boxes.shape != (number, 4):
                yield f"{which}_boxes has no four numbers for each of {number:,} detections"

    def interval(
        self, task: Task, mixer: Mapping[int, Answers], baseline: Mapping[int, Answers]
    ) -> statistics.Interval | None:
        """Compare two mixers over resampled images (`keymix.analysis.statistics`)."""
        return statistics.over_resamples(mixer, baseline, score=task.score, unit=task.unit)

    def table(self, found: Sequence[Prediction], noun: str) -> PredictionRows:
        """Make a row per image, with how many instances of each class it shows."""
        rows: list[list[str | int | float | None]] = []
        several = self.known(found)
        for each in several:
            sure = each.surely()
            names = list(dict.fromkeys(each.labels[i] for i in sure))
            counted = {name: sum(each.labels[i] == name for i in sure) for name in names}
            text = ", ".join(f"{name} {number}" for name, number in counted.items())
            rows.append([each.path, len(sure), text or "–"])
        heads = [noun, _counted(several), "of each class"]
        return PredictionRows(heads=heads, rows=rows)

    def summary(self, found: Sequence[Prediction], noun: str) -> PredictionRows:
        """Make a row per class: the images where it was found, and how often."""
        images: dict[str, int] = {}
        instances: dict[str, int] = {}
        several = self.known(found)
        for each in several:
            sure = [each.labels[i] for i in each.surely()]
            for name in sure:
                instances[name] = instances.get(name, 0) + 1
            for name in set(sure):
                images[name] = images.get(name, 0) + 1
        rows: list[list[str | int | float | None]] = [
            [name, f"{images[name]} of {len(several)}", number]
            for name, number in sorted(instances.items(), key=lambda pair: (-pair[1], pair[0]))
        ]
        heads = ["class", f"{noun}s with it", _counted(several)]
        return PredictionRows(heads=heads, rows=rows or [["nothing", f"0 of {len(several)}", 0]])

    def csv(self, found: Sequence[Prediction]) -> PredictionRows:
        """Make a row per detection, boxes in pixels of the image."""
        rows: list[list[str | int | float | None]] = [
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

    def details(self, test: SplitScores) -> DetailsTable:
        """Return the scores of each class that has instances."""
        own = test.own.read(DetectionDetails)
        rows = [
            [
                each.name,
                percent(each.box_ap, 1),
                percent(each.mask_ap, 1),
                f"{each.instances:,}",
                f"{each.images:,}",
            ]
            for each in own.classes
            if each.instances
        ]
        overall = [percent(test.scores[key], 1) for key in ("box_ap", "mask_ap")]
        return DetailsTable(
            title="each class with instances",
            heads=("class", "box AP %", "mask AP %", "instances", "images"),
            rows=[*rows, ["mean", *overall, f"{own.instances:,}", ""]],
            note=f"{own.detections:,} detections were scored, at most {MOST} of a class and image; "
            f"images without instances: {own.empty:,}; crowd regions, ignored: {own.crowds:,}.",
        )

    def references(self, data: ImageData) -> Iterable[Reference]:
        """Detect the same boxes in every image: those that are frequent in training."""
        found = frequent_boxes(instance_targets(data.train), len(data.classes))
        answers = {
            split.name: scored(
                range(len(split)),
                [instances_of(targets, i) for i in range(len(split))],
                [found.at(targets.size(i)) for i in range(len(split))],
                data.classes,
            )
            for split in (data.val, data.test)
            for targets in (instance_targets(split),)
        }
        yield Reference(
            name="frequent boxes",
            about="in every image the boxes that its classes most often have in training",
            evaluated=_evaluated(answers["test"]),
            learned=False,
            validated=answers["val"].scores()["box_ap"],
        )


def _counted(found: Sequence[InstancePrediction]) -> str:
    """Say in a head which detections are counted."""
    return f"found, score ≥ {found[0].score_threshold if found else SURE:g}"


def _evaluated(answers: DetectionAnswers) -> Evaluated:
    return Evaluated(scores=answers.scores(), answers=answers, own=answers.details())


def _flat_faults(
    stored: Arrays, wanted: Mapping[str, Any], prefix: str, index: IntArray, classes: int
) -> Iterator[str]:
    """Say what is wrong with flat arrays of one length: the first has each one's image."""
    for name, kind in wanted.items():
        if name not in stored:
            yield f"{name} is not in it"
            return
        if not np.issubdtype(stored[name].dtype, kind):
            yield f"{name} is {stored[name].dtype}, no {kind.__name__}"
            return
    images, labels = stored[f"{prefix}image"], stored[f"{prefix}label"]
    for name in wanted:
        if stored[name].shape != images.shape or images.ndim != 1:
            yield f"{name} is {stored[name].shape}, not {images.shape[:1]}"
            return
    if not np.isin(images, index).all():
        yield f"{prefix}image names images that index does not"
    if len(labels) and not 1 <= labels.min() <= labels.max() <= classes:
        yield f"{prefix}label holds numbers that are no class"


ANSWERS = DetectionAnswersPart()

# SPDX-License-Identifier: Apache-2.0
"""What segmenters answered: how well each class of each image overlaps; and how that is scored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from keymix.analysis import overlap, statistics
from keymix.analysis.answers import (
    Answers,
    Arrays,
    FloatArray,
    IntArray,
    known,
    whole,
)
from keymix.data.kinds import IGNORE
from keymix.data.record import DataRecord
from keymix.data.specs import MASKS, Setting, parse
from keymix.errors import UserError
from keymix.report.formats import distance, percent
from keymix.task import LOSS, Task
from keymix.tasks.segmentation.facts import CaseScores, ClassScores, MaskDetails
from keymix.tasks.segmentation.predict_masks import (
    ARRAYS,
    AT_ONCE,
    MaskPrediction,
    MaskWriter,
)
from keymix.tasks.segmentation.scoring import (
    BINS,
    MaskScores,
    calibration_error,
    confidence_bins,
    overlap_scores,
    predicted_masks,
)
from keymix.tasks.segmentation.windows import seen_whole
from keymix.train.parts import (
    Answered,
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

STORED = ("counts", "surfaces", "bins")
WORST = 10
"""Cases that are printed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskAnswers(Answers):
    """A model's masks on a split, counted; means are taken over the `scored` of the classes.

    Shape: `group` is the number of each image's case, ``[N]``; `counts` are common, predicted and
    true pixels of each image and class, ``[N, K, 3]``; `surfaces` are HD95 and surface Dice,
    ``[N, K, 2]``, NaN where there is none; `bins` are those of `confidence_bins`, ``[N, BINS, 3]``.
    """

    index: IntArray
    group: IntArray
    counts: IntArray
    surfaces: FloatArray
    bins: FloatArray
    classes: tuple[str, ...]
    scored: tuple[int, ...]

    @property
    def units(self) -> int:
        """Number of cases."""
        return len(self.cases)

    @cached_property
    def cases(self) -> IntArray:
        """Pixels of each case, ``[G, K, 3]``."""
        return statistics.by_case(self.counts, self.group)

    @property
    def truth(self) -> IntArray:
        """True pixels of the classes that count, ``[N, C]``."""
        true: IntArray = self.counts[:, list(self.scored), 2]
        return true

    def images(self) -> FloatArray:
        """Mean Jaccard index of each image, ``[N]``; 1 where nothing is and nothing is found."""
        return overlap.mean_jaccard(self.counts, self.scored)

    def score(self, weights: FloatArray) -> FloatArray:
        """Mean Jaccard index of the pooled pixels of weighted cases, ``[R, G]`` -> ``[R]``."""
        pooled = np.tensordot(weights, self.cases.astype(np.float64), axes=1)
        return overlap.mean_jaccard(pooled, self.scored)

    def shared(self) -> Arrays:
        """Positions and cases."""
        return {"index": self.index, "group": self.group}

    def arrays(self, which: str) -> Arrays:
        """Counted pixels, scores of outlines, and pixels by confidence."""
        return {f"{which}_{name}": getattr(self, name) for name in STORED}

    def same_truth(self, other: Answers) -> bool:
        """Whether other answers are to the same images, of the same cases, with the same masks."""
        return (
            isinstance(other, MaskAnswers)
            and np.array_equal(self.index, other.index)
            and np.array_equal(self.group, other.group)
            and np.array_equal(self.truth, other.truth)
        )

    def degenerate(self) -> tuple[str, ...]:
        """Say that all masks are empty, or that none shares a pixel with the true ones."""
        common, predicted, true = self.counts[:, list(self.scored)].sum(axis=(0, 1)).tolist()
        if common or not true:
            return ()
        what = "cover nothing of the true ones" if predicted else "are all empty"
        return (f"the masks predicted for the {len(self.index):,} {{inputs}} {what}",)

    def unscorable(self) -> str:
        """Say that no mask is true: whatever is predicted is too much then."""
        if self.truth.any() or not self.counts[:, list(self.scored), 1].any():
            return ""
        return (
            f"none of the {len(self.index):,} {{inputs}} has a class that counts: scores of 0 say "
            "only that something was predicted"
        )

    def details(self, unit: Literal["mm", "px"], names: Sequence[str]) -> MaskDetails:
        """Return the scores by class and by case, whose names are those of each number."""
        pooled, chosen = self.counts.sum(0), list(self.scored)
        jaccard, dice = overlap.jaccard(pooled), overlap.dice(pooled)
        one_empty = (self.counts[..., 1] > 0) != (self.counts[..., 2] > 0)
        hd95, surface_dice = self.surfaces[..., 0], self.surfaces[..., 1]
        numbers, images = np.unique(self.group, return_counts=True)
        means, of_cases = overlap.mean_jaccard(self.cases, chosen), overlap.dice(self.cases)
        cases = [
            CaseScores(
                name=names[number],
                images=int(images[at]),
                jaccard=float(means[at]),
                dice=tuple(known(of_cases[at, k]) for k in chosen),
            )
            for at, number in enumerate(numbers)
        ]
        return MaskDetails(
            **{f"hd95_{unit}": _mean(hd95[:, chosen])},
            surface_dice=_mean(surface_dice[:, chosen]),
            missed=int(one_empty[:, chosen].sum()),
            distance_unit=unit,
            calibration_error=known(calibration_error(self.bins.sum(0))),
            true_pixels=int(pooled[chosen, 2].sum()),
            classes=tuple(
                ClassScores(
                    name=self.classes[k],
                    jaccard=known(jaccard[k]),
                    dice=known(dice[k]),
                    hd95=_mean(hd95[:, k]),
                    surface_dice=_mean(surface_dice[:, k]),
                    missed=int(one_empty[:, k].sum()),
                )
                for k in chosen
            ),
            cases=tuple(sorted(cases, key=lambda case: case.jaccard)),
        )


def _mean(values: FloatArray) -> float | None:
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else None


class SegmentationAnswers(FolderAnswers[MaskPrediction]):
    """How segmenters are evaluated, at the size that the model sees, or in windows at their own."""

    prediction = MaskPrediction
    predict_options = FolderAnswers.predict_options | {"flips", "overlap", "window"}
    folder_writer = MaskWriter
    writer = "predict_masks"
    at_once = AT_ONCE
    chance = "a fixed mask, which is blind to the image"

    def evaluated(
        self, outputs: Outputs, split: Split, data: ImageData, device: torch.device
    ) -> Evaluated:
        """Count the pixels of every image."""
        scores = MaskScores(data).to(device)
        millimetres = all(row.spacing is not None for row in split.rows)
        index, counts, surfaces, bins = [], [], [], []
        for batch, output in outputs:
            counts.append(scores.update(output, batch.targets).cpu().numpy())
            places = batch.index.cpu().numpy()
            index.append(places)
            for i, each, wanted in zip(places.tolist(), output, batch.targets, strict=True):
                logits, multilabel = each.float(), scores.multilabel
                mine = predicted_masks(logits[None], multilabel=multilabel)[0]
                spacing = _spacing(split, i) if millimetres else (1.0, 1.0)
                both = mine.cpu().numpy(), wanted.cpu().numpy()
                surfaces.append(_surfaces(*both, scores, spacing))
                sure = confidence_bins(logits, wanted, multilabel=multilabel, classes=scores.scored)
                bins.append(sure.cpu().numpy())
        rows = np.concatenate(index)
        answers = MaskAnswers(
            index=rows,
            group=_groups(split)[rows],
            counts=np.concatenate(counts),
            surfaces=np.stack(surfaces),
            bins=np.stack(bins),
            classes=data.classes,
            scored=tuple(scores.scored),
        )
        answers = self.joined(answers, data)
        own = answers.details("mm" if millimetres else "px", sorted(set(split.groups)))
        return Evaluated(scores=scores.metrics(), answers=answers, own=own)

    def answering(self, model: nn.Module, seen: DataRecord, size: tuple[int, int]) -> nn.Module:
        """Return the model, or its sliding windows."""
        return seen_whole(model, seen, size)

    def read(self, stored: Arrays, which: Literal["last", "best"], data: DataRecord) -> MaskAnswers:
        """Read answers, images in the order of their index."""
        order = np.argsort(stored["index"], kind="stable")
        return MaskAnswers(
            index=stored["index"][order],
            group=stored["group"][order],
            **{name: stored[f"{which}_{name}"][order] for name in STORED},
            classes=data.classes,
            scored=data.scored_classes,
        )

    def interval(
        self, task: Task, mixer: Mapping[int, Answers], baseline: Mapping[int, Answers]
    ) -> statistics.Interval | None:
        """Compare two mixers over the test cases (`keymix.analysis.statistics.over_cases`)."""
        del task
        ours, theirs = (
            {seed: MaskAnswers.of(answers) for seed, answers in runs.items()}
            for runs in (mixer, baseline)
        )
        one = next(iter(theirs.values()), None)
        return statistics.over_cases(
            {seed: each.cases for seed, each in ours.items()},
            {seed: each.cases for seed, each in theirs.items()},
            () if one is None else one.scored,
            classes=() if one is None else one.classes,
        )

    def options_for(self, seen: DataRecord, spec: str) -> Mapping[str, Setting]:
        """Which masks the run was trained on, for run lengths, which can be read as either."""
        either = parse(spec)[0].name == "uwgi" and seen.multilabel is not None
        window = seen.intensity_window if parse(spec)[0].takes("intensity_window") else None
        options = {
            "masks": MASKS[bool(seen.multilabel)] if either else None,
            "intensity_window": window,
        }
        return {name: value for name, value in options.items() if value is not None}

    def check_data(self, data: ImageData, seen: DataRecord) -> None:
        """Refuse masks of another kind, and of other classes or in another order."""
        assert data.masks is not None
        if data.masks.multilabel != seen.multilabel:
            trained = MASKS[bool(seen.multilabel)]
            layout = "masks/<class>/<name>.png" if seen.multilabel else "masks/<name>.png"
            raise UserError(
                f"data {data.spec!r} has {MASKS[data.masks.multilabel]} masks; the run was trained "
                f"on {trained} ones. Arrange them as {layout}, or take a run on masks of their "
                "kind."
            )
        super().check_data(data, seen)

    def table(self, found: Sequence[Prediction], noun: str) -> PredictionRows:
        """Make a row per image, with the share of its pixels that each class has."""
        shares = [_shares(each) for each in self.known(found)]
        heads = [noun, *(f"{name} %" for name in (shares[0] if shares else ()))]
        rows = [
            [each.id, *(percent(share, 2) for share in own.values())]
            for each, own in zip(self.known(found), shares, strict=True)
        ]
        return PredictionRows(heads=heads, rows=rows)

    def summary(self, found: Sequence[Prediction], noun: str) -> PredictionRows:
        """Make a row per class: the images where it was found, and its mean share of all."""
        shares = [_shares(each) for each in self.known(found)]
        of_class = {name: [own[name] for own in shares] for name in (shares[0] if shares else ())}
        rows = [
            [
                name,
                f"{sum(share > 0 for share in own)} of {len(own)}",
                percent(float(np.mean(own)), 2),
            ]
            for name, own in of_class.items()
        ]
        return PredictionRows(heads=["class", f"{noun}s with it", "mean share %"], rows=rows)

    def csv(self, found: Sequence[Prediction]) -> PredictionRows:
        """Make a row per image and class."""
        rows = [
            [each.id, name, number, None if each.area is None else round(each.area[name], 2)]
            for each in self.known(found)
            for name, number in (each.pixels or {}).items()
        ]
        return PredictionRows(heads=["id", "class", "pixels", "area_mm2"], rows=rows)

    def predicted(
        self, outputs: Any, inputs: Sequence[Answered], seen: DataRecord, *, top: int
    ) -> Iterator[MaskPrediction]:
        """Say what a model gave; keep that, for probabilities and overlays."""
        found = super().predicted(outputs, inputs, seen, top=top)
        for each, output, given in zip(found, outputs, inputs, strict=True):
            yield replace(each, source=(output.float().cpu(), given.pixels, seen))

    def plain(self, found: Prediction) -> object:
        """Return all fields but arrays."""
        return {name: value for name, value in vars(found).items() if name not in ARRAYS}

    def details(self, test: SplitScores) -> Sequence[DetailsTable]:
        """Return the scores of each class and of each case, the worst first."""
        own = test.own.read(MaskDetails)
        unit = own.distance_unit
        shares = [
            (each.name, each.jaccard, each.dice, each.surface_dice) for each in own.classes
        ] + [("all", test.scores["jaccard"], test.scores["dice"], own.surface_dice)]
        hd95 = own.hd95_mm if unit == "mm" else own.hd95_px
        apart = [(each.hd95, each.missed) for each in own.classes] + [(hd95, own.missed)]
        of_classes = DetailsTable(
            title="each class",
            heads=("class", "IoU %", "Dice %", "surface Dice %", f"HD95 {unit}", "in one alone"),
            rows=[
                [name, *(percent(each, 2) for each in values), distance(far), f"{missed}"]
                for (name, *values), (far, missed) in zip(shares, apart, strict=True)
            ],
            note="HD95 is a mean over the images where truth and prediction both have the class, "
            f"surface Dice (within {overlap.TOLERANCE:g} {unit}) over those where either has; "
            "'in one alone' counts those where only one has it. Expected calibration error of the "
            f"pixels' probabilities: {percent(own.calibration_error, 2)} %.",
        )
        if len(own.cases) == 1:
            return [of_classes]
        names = [each.name for each in own.classes]
        of_cases = DetailsTable(
            title="each case",
            heads=("case", "images", "IoU %", *(f"Dice % {name}" for name in names)),
            rows=[
                [each.name, f"{each.images}", *(percent(v, 2) for v in (each.jaccard, *each.dice))]
                for each in own.cases[:WORST]
            ],
            note=f"The {WORST} worst of {len(own.cases):,}; --json has all."
            if len(own.cases) > WORST
            else "",
        )
        return [of_classes, of_cases]

    def references(self, data: ImageData) -> Iterable[Reference]:
        """Of each pixel the class that it has most often in training, for every test image."""
        scores = MaskScores(data)
        name, about = "per-pixel mode", "of each pixel the class that it has most often in training"
        if data.test.listed:
            shares = np.array(data.facts.class_shares)
            mode = shares[:, None, None] > 0.5 if scores.multilabel else np.asarray(shares.argmax())
            name, about = "most common class", "for all pixels the class most common in training"
        else:
            often = _often(data, scores)
            mode = often[1] * 2 > often.sum(axis=0) if scores.multilabel else often.argmax(axis=0)
        answers = _always(mode, data, data.test, scores)
        scored = {LOSS: None, **overlap_scores(answers.counts.sum(0), answers.scored)}
        yield Reference(
            name=name,
            about=about,
            evaluated=Evaluated(scores=scored, answers=answers),
            learned=False,
            validated=whole(_always(mode, data, data.val, scores)),
        )


def _always(mode: NDArray[Any], data: ImageData, split: Split, scores: MaskScores) -> MaskAnswers:
    """Answer every image of a split with one mask."""
    counts = []
    for i in range(len(split)):
        mask = split.rows[i].read_target() if split.listed else split.mask(i)
        true = mask.numpy()[None]
        found = np.broadcast_to(mode, true.shape)
        counts.append(
            overlap.overlap_counts(
                found, true, num_classes=scores.num_classes, multilabel=scores.multilabel
            )
        )
    return MaskAnswers(
        index=np.arange(len(split)),
        group=_groups(split),
        counts=np.concatenate(counts),
        surfaces=np.full((len(counts), scores.num_classes, 2), np.nan),
        bins=np.zeros((len(counts), BINS, 3)),
        classes=data.classes,
        scored=tuple(scores.scored),
    )


def _shares(found: MaskPrediction) -> dict[str, float]:
    """Return the share of an image's pixels that each class has."""
    height, width = found.size or (1, 1)
    return {name: number / (height * width) for name, number in (found.pixels or {}).items()}


def _often(data: ImageData, scores: MaskScores) -> IntArray:
    """Count how often each pixel of a training mask has each class.

    Shape: ``[K, H, W]``; without and with each class, ``[2, K, H, W]``, of multi-label masks.
    """
    values = range(2 if scores.multilabel else scores.num_classes)
    total = None
    for i in range(len(data.train)):
        mask = data.train.mask(i).numpy()
        planes = np.stack([mask == value for value in values]).astype(np.int64)
        total = planes if total is None else total + planes
    if total is None:
        raise ValueError(f"data {data.spec!r} has no training masks")
    return total


def _groups(split: Split) -> IntArray:
    """The number of the case of each image of a split."""
    codes = {name: code for code, name in enumerate(sorted(set(split.groups)))}
    return np.array([codes[name] for name in split.groups], dtype=np.int64)


def _surfaces(
    found: NDArray[np.int64],
    true: NDArray[np.int64],
    scores: MaskScores,
    spacing: tuple[float, float],
) -> NDArray[np.float64]:
    """HD95 and surface Dice of each class of an image, NaN of those that do not count."""
    measured = np.full((scores.num_classes, 2), np.nan)
    for k in scores.scored:
        if scores.multilabel:
            mine, wanted, out = found[k] == 1, true[k] == 1, true[k] == IGNORE
        else:
            mine, wanted, out = found == k, true == k, true == IGNORE
        measured[k] = overlap.surface_scores(mine & ~out, wanted, spacing)
    return measured


def _spacing(split: Split, i: int) -> tuple[float, float]:
    """Millimetres of a row and of a column of image ``i`` at the size at which it is scored."""
    spacing = split.rows[i].spacing
    assert spacing is not None
    if split.listed:
        return spacing
    (height, width), (wanted_height, wanted_width) = split.size(i), split.image_size
    return spacing[0] * height / wanted_height, spacing[1] * width / wanted_width


ANSWERS = SegmentationAnswers()

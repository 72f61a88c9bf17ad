# SPDX-License-Identifier: Apache-2.0
"""What a comparison keeps and reports of masks: overlap by class, and pictures of what is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keymix.analysis.answers import Answers
from keymix.data.record import DataRecord
from keymix.report.by_class import (
    Classes,
    ScriptComparison,
    ScriptRun,
    by_seed,
    mean,
)
from keymix.report.formats import distance
from keymix.report.gallery import Gallery, Pictures
from keymix.report.part import ClassScores, ImageOutputs, Page, RunAnswers, packed_shares
from keymix.report.record import DoneRun, Results, Sparse
from keymix.report.tables import Column
from keymix.task import Score
from keymix.tasks.segmentation import gallery

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.tasks.segmentation.answers import MaskAnswers

PICTURES = 6
"""Test images of which masks are drawn."""


# ---- what the record keeps -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MaskScore:
    """How well a run finds one class of masks: last epoch, test split."""

    jaccard: float | None
    dice: float | None
    hausdorff_mm: float | None
    missed: int


@dataclass(frozen=True, kw_only=True)
class OfRun(Sparse):
    """A finished run, last epoch, test split: scores of each class that counts, and `packed` ones.

    `hausdorff_unit` is ``mm`` or ``px``; `overlaps` is the mean Jaccard index of each image.
    """

    classes: tuple[MaskScore, ...] | None = None
    hausdorff_unit: str | None = None
    overlaps: str | None = None


@dataclass(frozen=True, kw_only=True)
class OfComparison(Sparse):
    """The number of test cases, None if no run is finished, and the classes that count."""

    test_cases: int | None = None
    classes: Classes
    hausdorff_unit: str | None = None


def spread_over_cases(answers: MaskAnswers, number: int) -> list[int]:
    """Choose images evenly over the cases that have something in them, of each its fullest.

    The choice is fixed by the data alone. It falls on the first images where no image has anything.
    """
    ranked = _fullest(answers, number)
    cases = sorted(i for i in ranked[0]) if ranked else []
    if len(cases) >= number:
        return [cases[i * len(cases) // number] for i in range(number)]
    chosen = [*cases, *(i for later in ranked[1:] for i in later)]
    spare = (i for i in range(len(answers.group)) if i not in chosen)
    return [*chosen, *spare][:number]


def most_informative(answers: MaskAnswers, number: int) -> list[int]:
    """Choose the images that show most: the fullest of different cases, and one that is empty."""
    area = answers.truth.sum(axis=1)
    empty = np.flatnonzero(area == 0)[:1].tolist()
    full = [i for later in _fullest(answers, number) for i in later]
    return [*full[: number - len(empty)], *empty]


def _fullest(answers: MaskAnswers, number: int) -> list[list[int]]:
    """Rank images that have something: of each case the fullest, then the farthest from it, ….

    A list for each round, the fullest first, and no more rounds than `number` images need.
    """
    area = answers.truth.sum(axis=1)
    left: dict[int, list[int]] = {}
    for i in np.flatnonzero(area > 0).tolist():
        left.setdefault(int(answers.group[i]), []).append(i)
    taken: dict[int, list[int]] = {case: [] for case in left}
    rounds: list[list[int]] = []
    while any(left.values()) and sum(map(len, rounds)) < number:
        found = []
        for case, images in left.items():
            if not images:
                continue
            best = max(images, key=lambda i: (_apart(i, taken[case]), int(area[i]), -i))
            images.remove(best)
            taken[case].append(best)
            found.append(best)
        rounds.append(sorted(found, key=lambda i: (-int(area[i]), i)))
    return rounds


def _apart(image: int, others: Sequence[int]) -> int:
    return min((abs(image - other) for other in others), default=0)


def _masks(answers: Answers) -> MaskAnswers:
    from keymix.tasks.segmentation.answers import MaskAnswers

    return MaskAnswers.of(answers)


# ---- the page --------------------------------------------------------------------------------


def _absent(record: Results) -> str:
    """Name the classes that no test image has, and those that no model has found."""
    own = record.own.read(OfComparison)
    images = own.classes.test_images or ()
    absent = [name for name, n in zip(own.classes.names, images, strict=False) if not n]
    runs = [run.own.read(OfRun).classes for run in record.runs if isinstance(run, DoneRun)]
    best = [
        max((each.jaccard or 0.0 for each in of_class), default=0.0)
        for of_class in zip(*runs, strict=True)
    ]
    never = [
        name
        for name, n, found in zip(own.classes.names, images, best, strict=False)
        if n and not found
    ]
    parts = [f"No test image has {' or '.join(absent)}."] if absent else []
    parts += [f"No model finds any {' or '.join(never)}."] if never else []
    return " ".join(parts)


class MaskPage(Page):
    """What a report shows of masks."""

    package = "keymix.tasks.segmentation"
    scripts = ("overlaps",)
    shared_scripts = ("shares",)
    run = OfRun
    comparison = OfComparison
    test_scores = (
        Score(
            key="hausdorff_mm",
            name="Hausdorff distance",
            short="Hausdorff",
            label="Hausdorff",
            better="less",
            high=None,
            unit="mm",
            unit_key="hausdorff_unit",
            places=1,
        ),
    )
    terminal = ("weighted_jaccard", "dice", "hausdorff_mm")
    test_numbers = ("hausdorff_missed",)

    def keep_run(self, tested: RunAnswers, data: DataRecord) -> OfRun:
        """Keep the scores of each class, and how well each image overlaps."""
        del data
        kept = tested.details.read(OfRun)
        return OfRun(
            classes=kept.classes,
            hausdorff_unit=kept.hausdorff_unit,
            overlaps=packed_shares(_masks(tested.answers).images()),
        )

    def keep_comparison(self, tested: Sequence[RunAnswers], data: DataRecord) -> OfComparison:
        """Keep the cases, the images that have each class, and the unit of distances."""
        answers = next((_masks(each.answers) for each in tested), None)
        units = (each.details.read(OfRun).hausdorff_unit for each in tested)
        images = None
        if answers is not None:
            images = tuple((answers.truth > 0).sum(axis=0).tolist())
        return OfComparison(
            test_cases=None if answers is None else answers.units,
            classes=Classes(
                names=tuple(data.classes[c] for c in data.scored_classes), test_images=images
            ),
            hausdorff_unit=next((unit for unit in units if unit), "mm"),
        )

    def chosen(self, answers: Answers, number: int) -> Sequence[int]:
        """Choose images evenly over the cases."""
        return spread_over_cases(_masks(answers), number)

    def label(self, data: ImageData, i: int) -> str:
        """Name a test image."""
        return gallery.scans_of(data).scan_id(i)

    def drawn(self, answers: Answers) -> Sequence[int]:
        """Choose the images that show most."""
        return most_informative(_masks(answers), PICTURES)

    def draw(self, data: ImageData, given: ImageOutputs) -> Mapping[str, Gallery]:
        """Draw what every mixer's model finds, next to the truth."""
        return {"masks": gallery.draw(data, given)}

    def about_data(self, data: DataRecord) -> str:
        """Count the classes that count."""
        number = len(data.scored_classes)
        return "1 class of masks" if number == 1 else f"{number:,} classes of masks"

    def about_table(self, record: Results) -> str:
        """Say of how many cases the scores are, and how they are means."""
        own = record.own.read(OfComparison)
        number, cases = len(own.classes.names), own.test_cases
        counted = ""
        if cases:
            several = "one case" if cases == 1 else f"{cases:,} cases"
            counted = f"{record.test_images:,} test images of {several}. "
        return (
            f"{counted}IoU and Dice coefficient are means over {number} "
            f"{'class' if number == 1 else 'classes'}, each of the pixels of all test images "
            "together; the Hausdorff distance is the mean over images and classes."
            + (f" {missing}" if (missing := self.missing(record)) else "")
        )

    def missing(self, record: Results) -> str:
        """Name the classes that are absent, or that were never found."""
        return _absent(record)

    def classes(self, record: Results) -> ClassScores | None:
        """Return the overlap of each class."""
        own = record.own.read(OfComparison)
        runs = by_seed(record, lambda run: run.own.read(OfRun).classes)
        images = own.classes.test_images
        if images is None or not any(runs.values()):
            return None

        def means(key: str) -> dict[str, list[float | None]]:
            return {
                label: [
                    mean(getattr(each, key) for each in found)
                    for found in zip(*of.values(), strict=True)
                ]
                for label, of in runs.items()
            }

        distances = f"Hausdorff, {own.hausdorff_unit or 'mm'}"
        missed = "missed or invented, images"
        return ClassScores(
            score="IoU",
            names=own.classes.names,
            scores={
                label: {seed: [each.jaccard for each in run] for seed, run in of.items()}
                for label, of in runs.items()
            },
            counts={"test images with it": images},
            further={
                Column("Dice, %", "dice", "percent", most_first=True): means("dice"),
                Column(distances, "hausdorff", "ratio", write=distance): means("hausdorff_mm"),
                Column(missed, "missed", "ratio", write=distance): means("missed"),
            },
        )

    def of_run(self, run: DoneRun) -> ScriptRun:
        """Give the script the overlaps."""
        own = run.own.read(OfRun)
        classes = tuple(row.jaccard for row in own.classes or ())
        return ScriptRun(shares=own.overlaps, classes=classes)

    def of_comparison(self, record: Results, pictures: Pictures) -> ScriptComparison:
        """Give the script the classes and the names of images."""
        drawn = pictures.galleries.get("masks")
        return ScriptComparison(
            classes=record.own.read(OfComparison).classes,
            names=None if drawn is None else drawn.names,
        )


PAGE = MaskPage()

# SPDX-License-Identifier: Apache-2.0
"""What a comparison keeps and reports of masks: overlap by class, and pictures of what is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keymix.analysis.answers import Answers
from keymix.data.record import DataRecord
from keymix.report.by_class import Classes, OfRun, class_scores
from keymix.report.formats import distance
from keymix.report.gallery import Gallery
from keymix.report.part import ClassScores, ImageOutputs, Page, RunAnswers, packed_shares
from keymix.report.record import DoneRun, Results, Sparse
from keymix.report.tables import Column
from keymix.task import Score
from keymix.tasks.segmentation import gallery
from keymix.tasks.segmentation.facts import MaskDetails

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.tasks.segmentation.answers import MaskAnswers

PICTURES = 6
"""Test images of which masks are drawn."""


# ---- what the record keeps -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OfComparison(Sparse):
    """The number of test cases, None if no run is finished, and the classes that count."""

    test_cases: int | None = None
    classes: Classes
    hausdorff_unit: str | None = None


def fullest(answers: MaskAnswers, number: int) -> list[int]:
    """Choose images by the truth alone: the fullest of each case, then the second of each, ….

    Images without anything come last.
    """
    area = answers.truth.sum(axis=1).tolist()
    seen: Counter[int] = Counter()
    ranked = []
    for i in sorted(range(len(area)), key=lambda i: -area[i]):
        case = int(answers.group[i])
        ranked.append((not area[i], seen[case], -area[i], i))
        seen[case] += 1
    return [i for *_, i in sorted(ranked)[:number]]


def _masks(answers: Answers) -> MaskAnswers:
    from keymix.tasks.segmentation.answers import MaskAnswers

    return MaskAnswers.of(answers)


# ---- the page --------------------------------------------------------------------------------


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
        rows = tested.details.read(MaskDetails).classes
        return OfRun(
            classes={
                "score": tuple(each.jaccard for each in rows),
                "dice": tuple(each.dice for each in rows),
                "hausdorff": tuple(each.hausdorff_mm for each in rows),
                "missed": tuple(each.missed for each in rows),
            },
            shares=packed_shares(_masks(tested.answers).images()),
        )

    def keep_comparison(self, tested: Sequence[RunAnswers], data: DataRecord) -> OfComparison:
        """Keep the cases, the images that have each class, and the unit of distances."""
        names = tuple(data.classes[c] for c in data.scored_classes)
        if not tested:
            return OfComparison(classes=Classes(names=names, test_images=None))
        answers = _masks(tested[0].answers)
        images = tuple((answers.truth > 0).sum(axis=0).tolist())
        return OfComparison(
            test_cases=answers.units,
            classes=Classes(names=names, test_images=images),
            hausdorff_unit=tested[0].details.read(MaskDetails).hausdorff_unit,
        )

    def chosen(self, answers: Answers, number: int) -> Sequence[int]:
        """Choose full images of different cases."""
        return fullest(_masks(answers), number)

    def label(self, data: ImageData, i: int) -> str:
        """Name a test image."""
        return data.test.rows[i].name

    def drawn(self, answers: Answers) -> Sequence[int]:
        """Choose full images of different cases, and one that is empty."""
        masks = _masks(answers)
        empty = np.flatnonzero(~masks.truth.any(axis=1))[:1].tolist()
        full = [i for i in fullest(masks, PICTURES - len(empty)) if masks.truth[i].any()]
        return [*full, *empty]

    def draw(self, data: ImageData, given: ImageOutputs) -> Mapping[str, Gallery]:
        """Draw what every mixer's model finds, next to the truth."""
        return {"masks": gallery.draw(data, given)}

    def about_data(self, data: DataRecord) -> str:
        """Count the classes that count."""
        number = len(data.scored_classes)
        return "1 class of masks" if number == 1 else f"{number:,} classes of masks"

    def missing(self, record: Results) -> str:
        """Name the classes that are absent, or that were never found."""
        own = record.own.read(OfComparison)
        images = own.classes.test_images or ()
        absent = [name for name, n in zip(own.classes.names, images, strict=False) if not n]
        runs = [run.own.read(OfRun) for run in record.runs if isinstance(run, DoneRun)]
        scores = [(run.classes or {})["score"] for run in runs]
        found = [any(of_class) for of_class in zip(*scores, strict=True)]
        never = [
            name
            for name, n, once in zip(own.classes.names, images, found, strict=False)
            if n and not once
        ]
        parts = [f"No test image has {' or '.join(absent)}."] if absent else []
        parts += [f"No model finds any {' or '.join(never)}."] if never else []
        return " ".join(parts)

    def classes(self, record: Results) -> ClassScores | None:
        """Return the overlap of each class."""
        own = record.own.read(OfComparison)
        further = [
            Column("Dice, %", "dice", "percent", most_first=True),
            Column(f"Hausdorff, {own.hausdorff_unit}", "hausdorff", "ratio", write=distance),
            Column("missed or invented, images", "missed", "ratio", write=distance),
        ]
        counts = {"test images with it": own.classes.test_images or ()}
        names = dict(enumerate(own.classes.names))
        return class_scores(record, "IoU", names, counts, further)


PAGE = MaskPage()

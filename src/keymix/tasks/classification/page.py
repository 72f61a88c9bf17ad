# SPDX-License-Identifier: Apache-2.0
"""What a comparison keeps and reports of classes: accuracy on each, and what is taken for what."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keymix.analysis.answers import Answers
from keymix.analysis.statistics import no_better_than_chance, wilson
from keymix.data.record import DataRecord
from keymix.report.by_class import (
    Classes,
    by_seed,
)
from keymix.report.charts import Look
from keymix.report.gallery import Gallery
from keymix.report.part import ClassScores, Page, RunAnswers, Section
from keymix.report.record import OutcomeRow, Results, Said, Sparse
from keymix.tasks.classification import gallery

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.tasks.classification.answers import BoolArray, ClassAnswers

CONFUSIONS = 10
"""Confusions of a mixer that are kept at most."""


# ---- what the record keeps -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """How often a class was taken for another over all seeds, and the share of its answers."""

    true: str
    predicted: str
    count: int
    share: float


@dataclass(frozen=True, kw_only=True)
class OfRun(Sparse):
    """A finished run, last epoch, test split: which images are right, and how many by class."""

    correct: str | None = None
    class_correct: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class OfComparison(Sparse):
    """The classes, and the most frequent confusions by mixer's label."""

    classes: Classes
    confusions: Mapping[str, tuple[Confusion, ...]] | None = None


def packed(correct: BoolArray) -> str:
    """Write right and wrong as base64 of one bit per image, the first in the highest bit."""
    return base64.b64encode(np.packbits(correct).tobytes()).decode("ascii")


def confusions(runs: Sequence[ClassAnswers]) -> tuple[Confusion, ...]:
    """Count the mix-ups over some runs, the commonest first."""
    names, (images, _) = runs[0].classes, runs[0].per_class()
    seen: Counter[tuple[int, int]] = Counter()
    for run in runs:
        true, said = (each[~run.correct].tolist() for each in (run.target, run.predicted))
        seen.update(zip(true, said, strict=True))
    ordered = sorted(seen.items(), key=lambda item: (-item[1], item[0]))[:CONFUSIONS]
    return tuple(
        Confusion(
            true=names[true],
            predicted=names[said],
            count=number,
            share=number / (images[true] * len(runs)),
        )
        for (true, said), number in ordered
    )


def spread_out(labels: Sequence[int], number: int) -> list[int]:
    """Choose images of different classes, while there are, evenly over the classes.

    The choice is fixed by the data alone.
    """
    classes = sorted(set(labels))
    step = max(1, len(classes) // number)
    chosen = [labels.index(c) for c in classes[::step][:number]]
    spare = (i for i in range(len(labels)) if i not in chosen)
    return [*chosen, *spare][:number]


def _by_mixer(tested: Sequence[RunAnswers]) -> dict[str, list[ClassAnswers]]:
    found: dict[str, list[ClassAnswers]] = {}
    for each in tested:
        found.setdefault(each.mixer, []).append(_classes(each.answers))
    return found


def _classes(answers: Answers) -> ClassAnswers:
    from keymix.tasks.classification.answers import ClassAnswers

    return ClassAnswers.of(answers)


def _about(images: Sequence[int], base: Sequence[float]) -> dict[str, float]:
    """Return how few test images a class has, and what Wilson's interval of a middle one is."""
    sizes = [number for number in images if number]
    about: dict[str, float] = {"least": min(sizes, default=0), "most": max(sizes, default=0)}
    if sizes and base:
        middle = sorted(base)[len(base) // 2]
        low, high = wilson(middle, min(sizes))
        about |= {"middle": middle, "low": low, "high": high}
    return about


# ---- the page --------------------------------------------------------------------------------


class ClassPage(Page):
    """What a report shows of classes."""

    package = "keymix.tasks.classification"
    scripts = ("answers",)
    run = OfRun
    comparison = OfComparison
    label_is = "class"

    def keep_run(self, tested: RunAnswers, data: DataRecord) -> OfRun:
        """Keep which images were right."""
        del data
        answers = _classes(tested.answers)
        _, right = answers.per_class()
        return OfRun(correct=packed(answers.correct), class_correct=right)

    def keep_comparison(self, tested: Sequence[RunAnswers], data: DataRecord) -> OfComparison:
        """Keep the images of each class, and the most frequent confusions of each mixer."""
        answers = _by_mixer(tested)
        first = next((found[0] for found in answers.values()), None)
        return OfComparison(
            classes=Classes(
                names=data.classes, test_images=None if first is None else first.per_class()[0]
            ),
            confusions={mixer: confusions(found) for mixer, found in answers.items()},
        )

    def chosen(self, answers: Answers, number: int) -> list[int]:
        """Choose images of different classes while there are, evenly over the classes."""
        return spread_out(_classes(answers).target.tolist(), number)

    def label(self, data: ImageData, i: int) -> str:
        """Name the class of a test image."""
        return data.classes[int(data.test.labels[i])]

    def said(self, answers: Answers, chosen: Sequence[int]) -> list[Said]:
        """Name the class that a model gave each image."""
        found = _classes(answers)
        return [
            Said(text=found.classes[found.predicted[i]], right=bool(found.correct[i]))
            for i in chosen
        ]

    def gallery(self, data: ImageData, tested: Sequence[RunAnswers]) -> Mapping[str, Gallery]:
        """Draw what mixers disagree on, and their most confident errors."""
        return gallery.draw(data, _by_mixer(tested))

    def about_data(self, data: DataRecord) -> str:
        """Count the classes."""
        return "1 class" if len(data.classes) == 1 else f"{len(data.classes):,} classes"

    def failing(self, record: Results, row: OutcomeRow) -> str:
        """Say that a mixer is no better than chance."""
        right, classes = row.scores["top1"].mean, record.own.read(OfComparison).classes
        if right is None or not no_better_than_chance(
            right, classes=len(classes.names), images=record.test_images
        ):
            return ""
        return "right no more often than by chance"

    def classes(self, record: Results) -> ClassScores | None:
        """Return the accuracy on each class."""
        classes = record.own.read(OfComparison).classes
        right = by_seed(record, lambda run: run.own.read(OfRun).class_correct)
        images = classes.test_images
        if images is None or not any(right.values()):
            return None
        scores = {
            label: {
                seed: [number / n if n else None for number, n in zip(run, images, strict=True)]
                for seed, run in runs.items()
            }
            for label, runs in right.items()
        }
        base = [
            each for run in scores[record.baseline].values() for each in run if each is not None
        ]
        return ClassScores(
            score="accuracy",
            names=classes.names,
            scores=scores,
            counts={"test images": images},
            about=_about(images, [each for each in base if each is not None]),
        )

    def sections(self, record: Results, looks: Mapping[str, Look]) -> Sequence[Section]:
        """Show the most frequent confusions."""
        del looks
        found = record.own.read(OfComparison).confusions
        if not found:
            return []
        return [Section(heading="Confusions", template="confusions.html.j2", view=found)]


PAGE = ClassPage()

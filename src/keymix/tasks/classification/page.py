# SPDX-License-Identifier: Apache-2.0
"""What a comparison keeps and reports of classes: accuracy on each, and what is taken for what."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from keymix.analysis.answers import Answers
from keymix.analysis.statistics import no_better_than_chance, wilson
from keymix.data.record import DataRecord
from keymix.report.by_class import (
    ByClass,
    Classes,
    by_class,
    by_seed,
    compared,
    mean,
    mixer_column,
)
from keymix.report.charts import Look
from keymix.report.formats import MISSING, percent
from keymix.report.gallery import Gallery
from keymix.report.part import Page, RunAnswers, Section
from keymix.report.record import ComparisonRecord, DoneRun, OutcomeRow, Said, Sparse
from keymix.report.tables import Cell, Column, Table
from keymix.task import Task
from keymix.tasks.classification import gallery

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.tasks.classification.answers import BoolArray, ClassAnswers

CONFUSIONS = 10
"""Confusions of a mixer that are kept at most."""


# ---- what the record keeps -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """How often a class was taken for another, by their numbers, over all seeds."""

    true: int
    predicted: int
    count: int


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


@dataclass(frozen=True, kw_only=True)
class ScriptComparison:
    """What the script reads of the comparison."""

    classes: Classes


def packed(correct: BoolArray) -> str:
    """Write right and wrong as base64 of one bit per image, the first in the highest bit."""
    return base64.b64encode(np.packbits(correct).tobytes()).decode("ascii")


def confusions(runs: Iterable[ClassAnswers]) -> tuple[Confusion, ...]:
    """Count the mix-ups over some runs, the commonest first."""
    seen: Counter[tuple[int, int]] = Counter()
    for run in runs:
        wrong = ~run.correct
        pairs = np.stack([run.target[wrong], run.predicted[wrong]], axis=1)
        kinds, times = np.unique(pairs, axis=0, return_counts=True)
        for (true, predicted), number in zip(kinds.tolist(), times.tolist(), strict=True):
            seen[true, predicted] += number
    ordered = sorted(seen.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Confusion(true=true, predicted=said, count=n) for (true, said), n in ordered)


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


# ---- the section of classes ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ConfusedPair:
    """A class taken for another: how often, and the share of the true class's answers."""

    true: str
    predicted: str
    count: int
    share: float


@dataclass(frozen=True, kw_only=True)
class ClassesView:
    """The section of classes, the largest difference first, and mix-ups by mixer."""

    by: ByClass
    table: Table
    note: str
    confusions: Mapping[str, list[ConfusedPair]]


def classes_view(record: ComparisonRecord, looks: Mapping[str, Look]) -> ClassesView | None:
    """Make the table of classes with its chart and confusions; None if no run finished.

    It has the baseline's accuracy with Wilson's interval, and of the others the difference from it.
    """
    own = record.own.read(OfComparison)
    names, images = own.classes.names, own.classes.test_images
    right = by_seed(record, lambda run: run.own.read(OfRun).class_correct)
    if images is None or not any(right.values()):
        return None
    by = by_class(right, names, looks, record.baseline, of=images)
    accuracy = {
        label: [mean((run[c] for run in right[label].values()), n) for c, n in enumerate(images)]
        for label in by.shown
    }
    base = accuracy.get(record.baseline)
    columns = [
        Column("class", "class"),
        Column("test images", "images", "whole", style="soft", most_first=True),
        *([mixer_column(looks[record.baseline], record.baseline)] if base else []),
        *(mixer_column(looks[label], label, most_first=True) for label in by.others),
    ]
    rows = [
        [
            *(names[c], images[c]),
            *([_with_interval(base[c], images[c])] if base else []),
            *(compared(by.differences[m][c], accuracy[m][c]) for m in by.others),
        ]
        for c in by.order
    ]
    return ClassesView(
        by=by,
        table=Table("classes", "Accuracy by class", columns, rows),
        note=_note(images, base or ()),
        confusions=_confused(record, own, by.shown, images),
    )


def _with_interval(accuracy: float | None, images: int) -> Cell:
    if accuracy is None:
        return Cell(None, MISSING)
    low, high = (percent(end, 0) for end in wilson(accuracy, images))
    text = Markup('<span>{} <span class="pm">{}–{}</span></span>')
    return Cell(accuracy, text.format(percent(accuracy), low, high))


def _note(images: Sequence[int], base: Sequence[float | None]) -> str:
    """Say how few test images a class has and what that leaves open."""
    sizes = [number for number in images if number]
    if not sizes:
        return ""
    low, high = min(sizes), max(sizes)
    text = (
        f"Each class has {low:,} test images."
        if low == high
        else f"A class has between {low:,} and {high:,} test images."
    )
    known = sorted(accuracy for accuracy in base if accuracy is not None)
    if known:
        middle = known[len(known) // 2]
        ends = wilson(middle, low)
        text += (
            f" On {low:,} images an accuracy of {percent(middle)} % is known to between "
            f"{percent(ends[0])} and {percent(ends[1])} % (Wilson's interval, 95 %)."
        )
    return (
        f"{text} Among many pairs of class and mixer some large differences come about by chance: "
        "they say where to look, not what holds."
    )


def _confused(
    record: ComparisonRecord, own: OfComparison, shown: Sequence[str], images: Sequence[int]
) -> dict[str, list[ConfusedPair]]:
    """Each mixer's most frequent confusions, as a share of the true class's answers."""
    names, known = own.classes.names, own.confusions or {}
    return {
        label: [
            ConfusedPair(
                true=names[pair.true],
                predicted=names[pair.predicted],
                count=pair.count,
                share=pair.count / (images[pair.true] * len(record.finished(label))),
            )
            for pair in known.get(label, ())
        ]
        for label in shown
    }


# ---- the page --------------------------------------------------------------------------------


class ClassPage(Page):
    """What a report shows of classes."""

    package = "keymix.tasks.classification"
    scripts = ("answers",)
    run = OfRun
    comparison = OfComparison
    heading = "Accuracy"
    phrase = "accuracy"
    reaches = "gets {score} of the test {inputs} right"
    reaches_key = "top1"
    label_is = "class"
    pair_note = (
        "McNemar's exact test asks whether these two models would differ on more images. It does "
        "not ask whether two trainings would: for that, see the seeds above."
    )

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
            confusions={mixer: confusions(found)[:CONFUSIONS] for mixer, found in answers.items()},
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

    def about_interval(self, task: Task, *, unit: str, inputs: str) -> str:
        """Say how the interval of accuracy is made."""
        del task
        return (
            f"The interval over test {unit}s: for each {unit} how often mixer minus baseline gets "
            "it right, averaged over seeds; the mean with a normal interval, 95 %, adjusted after "
            f"Bonett and Price (2012) so that it stays honest when few {inputs} are in dispute. It "
            f"covers other {inputs} of the same kind, for these trained models."
        )

    def failing(self, record: ComparisonRecord, row: OutcomeRow) -> str:
        """Say that a mixer is no better than chance."""
        right, classes = row.scores["top1"].mean, record.own.read(OfComparison).classes
        if right is None or not no_better_than_chance(
            right, classes=len(classes.names), images=record.test_images
        ):
            return ""
        return "right no more often than by chance"

    def sections(self, record: ComparisonRecord, looks: Mapping[str, Look]) -> Sequence[Section]:
        """Show the classes."""
        view = classes_view(record, looks)
        return (
            []
            if view is None
            else [Section(name="By class", template="classes.html.j2", view=view)]
        )

    def of_run(self, run: DoneRun) -> OfRun:
        """Give the script what is right."""
        return run.own.read(OfRun)

    def of_comparison(self, record: ComparisonRecord) -> ScriptComparison:
        """Give the script the classes."""
        return ScriptComparison(classes=record.own.read(OfComparison).classes)


PAGE = ClassPage()

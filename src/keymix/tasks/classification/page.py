# SPDX-License-Identifier: Apache-2.0
"""What a comparison's report shows of classes: accuracy on each, and what is taken for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keymix.analysis.answers import Answers
from keymix.analysis.statistics import no_better_than_chance
from keymix.data.record import DataRecord
from keymix.report.charts import Look
from keymix.report.part import Page, RunAnswers, Section
from keymix.report.record import ComparisonRecord, DoneRun, OutcomeRow
from keymix.task import Task
from keymix.tasks.classification import by_class
from keymix.tasks.classification.record import Classes, Confusion, OfComparison, OfRun

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.tasks.classification.answers import ClassAnswers

CONFUSIONS = 10
"""At most so many mix-ups of a mixer are kept."""


@dataclass(frozen=True, kw_only=True)
class ScriptClasses:
    """The classes, and how many test images have each."""

    names: tuple[str, ...]
    images: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class ScriptComparison:
    """What the script reads of the comparison."""

    classes: ScriptClasses


def _classes(answers: Answers) -> ClassAnswers:
    from keymix.tasks.classification.answers import ClassAnswers

    if not isinstance(answers, ClassAnswers):
        raise TypeError(f"{type(answers).__name__} are no answers of classes")
    return answers


def spread_out(labels: Sequence[int], number: int) -> list[int]:
    """Return indices of images of different classes, while there are, evenly over the classes.

    The choice is fixed by the data alone.
    """
    classes = sorted(set(labels))
    step = max(1, len(classes) // number)
    chosen = [labels.index(c) for c in classes[::step][:number]]
    spare = (i for i in range(len(labels)) if i not in chosen)
    while len(chosen) < min(number, len(labels)):
        chosen.append(next(spare))
    return chosen


class ClassPage(Page):
    """What a report shows of classes."""

    package = "keymix.tasks.classification"
    scripts = ("answers",)
    run = OfRun
    comparison = OfComparison
    heading = "Accuracy"
    phrase = "accuracy"
    reaches = "gets {score} of the test {inputs} right"
    label_is = "class"
    pair_note = (
        "McNemar's exact test asks whether these two models would differ on more images. It does "
        "not ask whether two trainings would: for that, see the seeds above."
    )

    def keep_run(self, tested: RunAnswers, data: DataRecord) -> OfRun:
        """Keep which images were right."""
        from keymix.tasks.classification.answers import packed

        answers = _classes(tested.answers)
        del data
        _, right = answers.per_class()
        return OfRun(correct=packed(answers.correct), class_correct=right)

    def keep_comparison(self, tested: Sequence[RunAnswers], data: DataRecord) -> OfComparison:
        """Keep the images of each class, and the most frequent confusions of each mixer."""
        from keymix.tasks.classification.answers import confusions

        answers: dict[str, list[ClassAnswers]] = {}
        for each in tested:
            answers.setdefault(each.mixer, []).append(_classes(each.answers))
        first = next((found[0] for found in answers.values()), None)
        return OfComparison(
            classes=Classes(
                names=data.classes, test_images=None if first is None else first.per_class()[0]
            ),
            confusions={
                mixer: tuple(
                    Confusion(true=true, predicted=said, count=number)
                    for true, said, number in confusions(found)[:CONFUSIONS]
                )
                for mixer, found in answers.items()
            },
        )

    def chosen(self, answers: Answers, number: int) -> list[int]:
        """Choose images of different classes while there are, evenly over the classes."""
        return spread_out(_classes(answers).target.tolist(), number)

    def label(self, data: ImageData, i: int) -> str:
        """Name the class of a test image."""
        return data.classes[int(data.test.labels[i])]

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
        view = by_class.by_class(record, looks)
        return () if view is None else (Section(template="classes.html.j2", view=view),)

    def of_run(self, run: DoneRun) -> OfRun:
        """Give the script what is right."""
        return run.own.read(OfRun)

    def of_comparison(self, record: ComparisonRecord) -> ScriptComparison:
        """Give the script the classes."""
        classes = record.own.read(OfComparison).classes
        return ScriptComparison(
            classes=ScriptClasses(names=classes.names, images=classes.test_images)
        )


PAGE = ClassPage()

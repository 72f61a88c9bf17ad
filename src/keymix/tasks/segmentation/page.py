# SPDX-License-Identifier: Apache-2.0
"""What a comparison's report shows of masks: overlap by class, and pictures of what is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keymix.analysis.answers import Answers
from keymix.analysis.statistics import FEW_CASES
from keymix.data.record import DataRecord
from keymix.report.charts import Look
from keymix.report.part import Output, Page, RunAnswers, Section
from keymix.report.record import ComparisonRecord, DoneRun
from keymix.task import Score, Task
from keymix.tasks.segmentation import by_class, gallery
from keymix.tasks.segmentation.record import (
    SHARES,
    Classes,
    OfComparison,
    OfPictures,
    OfRun,
)

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.tasks.segmentation.answers import MaskAnswers

PICTURES = 6
"""Test images of which masks are drawn."""


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """What the script reads of a run: overlap by image, packed, and Jaccard index by class."""

    overlaps: str | None
    classes: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class ScriptClasses:
    """The classes that count, and how many test images have each."""

    names: tuple[str, ...]
    images: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class ScriptComparison:
    """What the script reads of the comparison.

    Args:
        classes: The classes that count.
        levels: The number of a stored overlap that is 1.
        names: Names of all test images, in order.
    """

    classes: ScriptClasses
    levels: int = SHARES
    names: tuple[str, ...] | None


def _masks(answers: Answers) -> MaskAnswers:
    from keymix.tasks.segmentation.answers import MaskAnswers

    if not isinstance(answers, MaskAnswers):
        raise TypeError(f"{type(answers).__name__} are no answers of masks")
    return answers


class MaskPage(Page):
    """What a report shows of masks."""

    package = "keymix.tasks.segmentation"
    scripts = ("overlaps",)
    run = OfRun
    comparison = OfComparison
    pictures = OfPictures
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
    heading = "Jaccard index"
    pair_note = (
        "The class index is of the pixels of all images together, that of an image the mean over "
        "the classes that truth or prediction have. What two trainings would do tells the interval "
        "over seeds above."
    )
    about_score = (
        "Images are stretched to the model's size, whatever their proportions, and masks follow by "
        "the nearest pixel; all scores are of that size. The Jaccard index of a class is the "
        "pixels that truth and prediction share over those that either has, the pixels of all test "
        "images counted together. The mean Jaccard index is the plain mean over the classes "
        "without the background; a class in neither truth nor prediction is left out. The weighted "
        "one weighs each class by its true pixels. The Hausdorff distance is that of the farthest "
        "pixel, the mean over the images where truth and prediction have the class; images where "
        "only one of them has it are counted beside it."
    )
    readout = "Every model reads out all of its patch tokens, to answer every pixel."

    def keep_run(self, tested: RunAnswers, data: DataRecord) -> OfRun:
        """Keep the scores of each class, and how well each image overlaps."""
        from keymix.tasks.segmentation.answers import packed

        del data
        kept = tested.details.read(OfRun)
        return OfRun(
            classes=kept.classes,
            hausdorff_unit=kept.hausdorff_unit,
            overlaps=packed(_masks(tested.answers).images()),
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
        from keymix.tasks.segmentation.answers import spread_over_cases

        return spread_over_cases(_masks(answers), number)

    def label(self, data: ImageData, i: int) -> str:
        """Name a test image."""
        return gallery.scans_of(data).scan_id(i)

    def drawn(self, answers: Answers) -> Sequence[int]:
        """Choose the images that show most."""
        from keymix.tasks.segmentation.answers import telling

        return telling(_masks(answers), PICTURES)

    def draw(
        self,
        data: ImageData,
        chosen: Sequence[int],
        outputs: Mapping[str, Output],
        missing: Mapping[str, str],
        *,
        seed: int,
    ) -> OfPictures:
        """Draw what every mixer's model finds, next to the truth."""
        return OfPictures(gallery=gallery.draw(data, chosen, outputs, missing, seed=seed))

    def about_data(self, data: DataRecord) -> str:
        """Count the classes that count."""
        number = len(data.scored_classes)
        return "1 class of masks" if number == 1 else f"{number:,} classes of masks"

    def about_splits(self, data: DataRecord) -> str:
        """Say whether images of a case are in one split."""
        if data.split_by == "slice":
            return (
                "Single images were split, not cases: images of one case lie in several splits, "
                "and scores are better than on new cases."
            )
        return "All images of a case are in one split, where the data names cases."

    def about_interval(self, task: Task, *, unit: str, inputs: str) -> str:
        """Say how the interval over cases is made."""
        del unit
        return (
            f"The interval over test cases: {inputs} of one case are alike, so the unit is the "
            f"case. The difference of the {task.score.name}, averaged over seeds, is taken again "
            "without each case in turn; the spread of these (delete-one jackknife) with Student's "
            "t, 95 %. It covers other cases of the same kind, for these trained models; below "
            f"{FEW_CASES} cases it is rough, and there is none where a class is in one case alone."
        )

    def about_table(self, record: ComparisonRecord) -> str:
        """Say of how many cases the scores are, and how they are means."""
        own = record.own.read(OfComparison)
        number, cases = len(own.classes.names), own.test_cases
        told = ""
        if cases:
            several = "one case" if cases == 1 else f"{cases:,} cases"
            told = f"{record.test_images:,} test images of {several}. "
        return (
            f"{told}Jaccard index and Dice coefficient are means over {number} "
            f"{'class' if number == 1 else 'classes'}, each of the pixels of all test images "
            "together; the Hausdorff distance is the mean over images and classes."
        )

    def sections(self, record: ComparisonRecord, looks: Mapping[str, Look]) -> Sequence[Section]:
        """Show the classes and the pictures."""
        classes, sheet = by_class.by_class(record, looks), gallery.sheet(record)
        found = [] if classes is None else [Section(template="classes.html.j2", view=classes)]
        if sheet is not None:
            styles = "gallery.css.j2"
            found.append(Section(template="gallery.html.j2", view=sheet, styles=styles))
        return found

    def of_run(self, run: DoneRun) -> ScriptRun:
        """Give the script the overlaps."""
        own = run.own.read(OfRun)
        classes = tuple(row.jaccard for row in own.classes or ())
        return ScriptRun(overlaps=own.overlaps, classes=classes)

    def of_comparison(self, record: ComparisonRecord) -> ScriptComparison:
        """Give the script the classes and the names of images."""
        classes = record.own.read(OfComparison).classes
        drawn = record.own.read(OfPictures).gallery
        return ScriptComparison(
            classes=ScriptClasses(names=classes.names, images=classes.test_images),
            names=None if drawn is None else drawn.names,
        )


PAGE = MaskPage()

# SPDX-License-Identifier: Apache-2.0
"""What a comparison keeps and reports of instances: AP by size and class, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keymix.analysis.answers import Answers, FloatArray
from keymix.analysis.statistics import percentiles
from keymix.data.record import DataRecord
from keymix.report.by_class import (
    Classes,
    ScriptComparison,
    ScriptRun,
    by_seed,
    mean,
)
from keymix.report.charts import Look
from keymix.report.formats import percent
from keymix.report.gallery import Gallery, Pictures
from keymix.report.part import ClassScores, ImageOutputs, Page, RunAnswers, Section, packed_shares
from keymix.report.record import DoneRun, Results, Sparse
from keymix.report.tables import Cell, Column, Table
from keymix.tasks.detection import gallery
from keymix.tasks.detection.facts import TASK, ClassPrecision, DetectionDetails

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.tasks.detection.answers import DetectionAnswers


# ---- what the record keeps -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OfRun(Sparse):
    """A finished run, last epoch, test split: AP of each class, and of each image, packed.

    `images` is the AP of boxes of the image alone at an IoU of 0.5, 0 of images without instances.
    """

    classes: tuple[ClassPrecision, ...] | None = None
    images: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Both ends of an interval over test images."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class OfComparison(Sparse):
    """What the test split has, and intervals of scores by mixer and key; None without runs.

    `full` are the test images with instances, and `of_sizes` the instances that are small, medium
    and large.
    """

    classes: Classes
    full: int | None = None
    instances: int | None = None
    crowds: int | None = None
    of_sizes: tuple[int, int, int] | None = None
    intervals: Mapping[str, Mapping[str, Ends]] | None = None


@dataclass(frozen=True, kw_only=True)
class OfScript(ScriptComparison):
    """What the script reads besides: the number of images with instances."""

    full: int


def _answers(answers: Answers) -> DetectionAnswers:
    from keymix.tasks.detection.answers import DetectionAnswers

    return DetectionAnswers.of(answers)


def intervals(runs: Sequence[DetectionAnswers]) -> dict[str, Ends]:
    """Resample the test images: intervals of the means over seeds, where most draws have one."""
    found = {}
    for key in runs[0].draws:
        draws: FloatArray = np.mean([run.draws[key] for run in runs], axis=0)
        known = draws[np.isfinite(draws)]
        if runs[0].units > 1 and len(known) * 2 >= len(draws):
            low, high = percentiles(known)
            found[key] = Ends(low=low, high=high)
    return found


# ---- tables ----------------------------------------------------------------------------------


def precision_tables(record: Results) -> list[Table]:
    """Make a table of boxes and one of masks: a row for each mixer, means over seeds."""
    own = record.own.read(OfComparison)
    return [_precision(record, own, shape) for shape in ("box", "mask")]


def _precision(record: Results, own: OfComparison, shape: str) -> Table:
    scores = [score for score in TASK.scores if score.key.startswith(f"{shape}_")]
    columns = [Column("mixer", "mixer", "name")]
    for score in scores:
        heading = f"{score.short.removeprefix(shape).strip()}, %"
        columns.append(Column(heading, score.key, "percent", most_first=True))
    rows = []
    for row in record.outcome.last:
        ends = (own.intervals or {}).get(row.mixer, {})
        cells: list[object] = [row.mixer]
        for score in scores:
            value = row.scores[score.key].mean
            found = ends.get(score.key)
            text = percent(value)
            if found is not None and value is not None:
                text = f"{text} ({percent(found.low)} to {percent(found.high)})"
            cells.append(Cell(value, text))
        rows.append(cells)
    title = "AP of boxes" if shape == "box" else "AP of masks"
    return Table(f"{shape}-precision", title, columns, rows)


# ---- the page --------------------------------------------------------------------------------


class DetectionPage(Page):
    """What a report shows of instances."""

    package = "keymix.tasks.detection"
    scripts = ("precision",)
    shared_scripts = ("shares",)
    run = OfRun
    comparison = OfComparison
    terminal = ("mask_ap", "box_ap50", "box_ap75")
    test_numbers = ("detections",)
    label_is = "number of instances"

    def keep_run(self, tested: RunAnswers, data: DataRecord) -> OfRun:
        """Keep AP of classes and of images."""
        del data
        own = tested.details.read(DetectionDetails)
        images = np.nan_to_num(_answers(tested.answers).images)
        return OfRun(classes=own.classes, images=packed_shares(images))

    def keep_comparison(self, tested: Sequence[RunAnswers], data: DataRecord) -> OfComparison:
        """Keep what there is to find, and intervals of each mixer's scores."""
        by_mixer: dict[str, list[DetectionAnswers]] = {}
        for each in tested:
            by_mixer.setdefault(each.mixer, []).append(_answers(each.answers))
        if not tested:
            return OfComparison(classes=Classes(names=data.classes, test_images=None))
        own = tested[0].details.read(DetectionDetails)
        first = _answers(tested[0].answers)
        return OfComparison(
            classes=Classes(
                names=data.classes, test_images=tuple(each.images for each in own.classes)
            ),
            full=int(np.isfinite(first.images).sum()),
            instances=own.instances,
            crowds=own.crowds,
            of_sizes=own.of_sizes,
            intervals={mixer: intervals(runs) for mixer, runs in by_mixer.items()},
        )

    def drawn(self, answers: Answers) -> Sequence[int]:
        """Choose images by the truth alone."""
        return gallery.representative(_answers(answers))

    def draw(self, data: ImageData, given: ImageOutputs) -> Mapping[str, Gallery]:
        """Draw what every mixer's model detects, next to the truth."""
        return {"detections": gallery.draw(data, given)}

    def gallery(self, data: ImageData, tested: Sequence[RunAnswers]) -> Mapping[str, Gallery]:
        """Draw the images on which two mixers differ most, the first model of each."""
        first: dict[str, DetectionAnswers] = {}
        for each in tested:
            first.setdefault(each.mixer, _answers(each.answers))
        found = gallery.differing(data, first)
        return {} if found is None else {"differences": found}

    def about_data(self, data: DataRecord) -> str:
        """Count the classes."""
        number = len(data.classes)
        return "1 class of instances" if number == 1 else f"{number:,} classes of instances"

    def about_table(self, record: Results) -> str:
        """Say what there is to find."""
        own = record.own.read(OfComparison)
        if own.instances is None:
            return ""
        ignored = f"; {own.crowds:,} crowd regions are ignored" if own.crowds else ""
        return (
            f"{own.instances:,} instances in {own.full:,} of {record.test_images:,} test "
            f"images{ignored}. {self.missing(record)}"
        ).rstrip()

    def missing(self, record: Results) -> str:
        """Count the classes without a test instance."""
        images = record.own.read(OfComparison).classes.test_images or ()
        absent = sum(not number for number in images)
        if not absent:
            return ""
        return f"{absent:,} of {len(images):,} classes have no test instance and do not count."

    def classes(self, record: Results) -> ClassScores | None:
        """Return the AP of the classes that have instances."""
        runs = by_seed(record, lambda run: run.own.read(OfRun).classes)
        known = next((classes for of in runs.values() for classes in of.values()), ())
        there = [k for k, each in enumerate(known) if each.instances]
        if not there:
            return None
        masks = {
            label: [mean(run[k].mask_ap for run in of.values()) for k in there]
            for label, of in runs.items()
        }
        return ClassScores(
            score="box AP",
            names=[known[k].name for k in there],
            scores={
                label: {seed: [run[k].box_ap for k in there] for seed, run in of.items()}
                for label, of in runs.items()
            },
            counts={
                "instances": [known[k].instances for k in there],
                "test images": [known[k].images for k in there],
            },
            further={Column("mask AP, %", "mask_ap", "percent", most_first=True): masks},
            about={"absent": len(known) - len(there)},
        )

    def sections(self, record: Results, looks: Mapping[str, Look]) -> Sequence[Section]:
        """Show AP by IoU and size."""
        del looks
        own = record.own.read(OfComparison)
        small, medium, large = own.of_sizes or (0, 0, 0)
        return [
            Section(
                name="Average precision",
                heading="Boxes and masks, by IoU and size",
                about="Means over seeds, in %; in brackets the interval over test images, 95 % "
                "(percentile bootstrap). AP is over IoU thresholds from 0.50 to 0.95. Of the test "
                f"instances {small:,} are small, {medium:,} medium and {large:,} large. The first "
                "table is of boxes, the second of masks.",
                layout="narrow",
                tables=precision_tables(record),
            )
        ]

    def of_run(self, run: DoneRun) -> ScriptRun:
        """Give the script the AP of images and classes."""
        own = run.own.read(OfRun)
        return ScriptRun(
            shares=own.images, classes=tuple(each.box_ap for each in own.classes or ())
        )

    def of_comparison(self, record: Results, pictures: Pictures) -> OfScript:
        """Give the script the classes."""
        own = record.own.read(OfComparison)
        drawn = pictures.galleries.get("detections")
        names = None if drawn is None else drawn.names
        return OfScript(classes=own.classes, full=own.full or 0, names=names)


PAGE = DetectionPage()

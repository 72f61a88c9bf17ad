# SPDX-License-Identifier: Apache-2.0
"""What a comparison keeps and reports of instances: AP by size and class, and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from keymix.analysis.answers import Answers, FloatArray
from keymix.analysis.statistics import percentiles
from keymix.data.record import DataRecord
from keymix.report.by_class import Classes, OfRun, class_scores
from keymix.report.charts import Look
from keymix.report.formats import percent
from keymix.report.gallery import Gallery
from keymix.report.part import ClassScores, ImageOutputs, Page, RunAnswers, Section, packed_shares
from keymix.report.record import Results, Sparse
from keymix.report.tables import Cell, Column, Table
from keymix.tasks.detection import gallery
from keymix.tasks.detection.facts import DetectionDetails

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.tasks.detection.answers import DetectionAnswers


# ---- what the record keeps -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OfComparison(Sparse):
    """What the test split has, and intervals of scores by mixer and key; None without runs.

    `instances` are those of each class, `full` the test images that have some, and `of_sizes` the
    instances that are small, medium and large.
    """

    classes: Classes
    full: int | None = None
    instances: tuple[int, ...] | None = None
    crowds: int | None = None
    of_sizes: tuple[int, int, int] | None = None
    intervals: Mapping[str, Mapping[str, tuple[float, float]]] | None = None


def _answers(answers: Answers) -> DetectionAnswers:
    from keymix.tasks.detection.answers import DetectionAnswers

    return DetectionAnswers.of(answers)


def intervals(runs: Sequence[DetectionAnswers]) -> dict[str, tuple[float, float]]:
    """Resample the test images: intervals of the means over seeds, where most draws have one."""
    found = {}
    for key in runs[0].draws:
        draws: FloatArray = np.mean([run.draws[key] for run in runs], axis=0)
        known = draws[np.isfinite(draws)]
        if runs[0].units > 1 and len(known) * 2 >= len(draws):
            found[key] = percentiles(known)
    return found


# ---- tables ----------------------------------------------------------------------------------


def precision_tables(record: Results) -> list[Table]:
    """Make a table of boxes and one of masks, if any: a row for each mixer, means over seeds."""
    intervals = record.own.read(OfComparison).intervals or {}
    tables = []
    for shape, title in (("box", "AP of boxes"), ("mask", "AP of masks")):
        scores = [s for s in record.task_kind.scores if s.key.startswith(f"{shape}_")]
        if not scores:
            continue
        columns = [
            Column("mixer", "mixer", "name"),
            *(Column(f"{s.short}, %", s.key, "percent", most_first=True) for s in scores),
        ]
        rows = []
        for row in record.outcome.last:
            cells: list[object] = [row.mixer]
            for score in scores:
                value, text = row.scores[score.key].mean, percent(row.scores[score.key].mean)
                ends = intervals.get(row.mixer, {}).get(score.key)
                if ends is not None:
                    text += f" ({percent(ends[0])} to {percent(ends[1])})"
                cells.append(Cell(value, text))
            rows.append(cells)
        tables.append(Table(f"{shape}-precision", title, columns, rows))
    return tables


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
        """Keep AP of classes, and of each image alone, 0 of those without instances."""
        del data
        own = tested.details.read(DetectionDetails)
        return OfRun(
            classes={
                "score": tuple(each.box_ap for each in own.classes),
                "mask_ap": tuple(each.mask_ap for each in own.classes),
            },
            shares=packed_shares(np.nan_to_num(_answers(tested.answers).images)),
        )

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
            instances=tuple(each.instances for each in own.classes),
            crowds=own.crowds,
            of_sizes=own.of_sizes,
            intervals={mixer: intervals(runs) for mixer, runs in by_mixer.items()},
        )

    def drawn(self, tested: Sequence[RunAnswers]) -> Mapping[int, str]:
        """Choose images by the truth alone."""
        return dict.fromkeys(gallery.representative(_answers(tested[0].answers)), "")

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

    def missing(self, record: Results) -> str:
        """Count the classes without a test instance."""
        images = record.own.read(OfComparison).classes.test_images or ()
        absent = sum(not number for number in images)
        if not absent:
            return ""
        return f"{absent:,} of {len(images):,} classes have no test instance and do not count."

    def classes(self, record: Results) -> ClassScores | None:
        """Return the AP of the classes that have instances."""
        own = record.own.read(OfComparison)
        instances, images = own.instances or (), own.classes.test_images or ()
        names = {k: name for k, name in enumerate(own.classes.names) if any(instances[k : k + 1])}
        mask_ap = Column("mask AP, %", "mask_ap", "percent", most_first=True)
        counts = {"instances": instances, "test images": images}
        further = [mask_ap] if record.data.outlines is not False else []
        found = class_scores(record, "box AP", names, counts, further)
        absent = len(own.classes.names) - len(names)
        return replace(found, about={"absent": absent}) if found and names else None

    def sections(self, record: Results, looks: Mapping[str, Look]) -> Sequence[Section]:
        """Show AP by IoU and size."""
        del looks
        own = record.own.read(OfComparison)
        small, medium, large = own.of_sizes or (0, 0, 0)
        return [
            Section(
                name="Average precision",
                heading="By IoU and size",
                about="Means over seeds, in %; in brackets the interval over test images, 95 % "
                "(percentile bootstrap). AP is over IoU thresholds from 0.50 to 0.95. Of the test "
                f"instances {small:,} are small, {medium:,} medium and {large:,} large.",
                layout="narrow",
                tables=precision_tables(record),
            )
        ]


PAGE = DetectionPage()

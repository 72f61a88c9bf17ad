# SPDX-License-Identifier: Apache-2.0
"""What a comparison keeps and reports of masks: overlap by class, and pictures of what is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from keymix.analysis.answers import Answers
from keymix.analysis.overlap import dice
from keymix.data.record import DataRecord
from keymix.report.by_class import Classes, OfRun, by_seed, class_scores
from keymix.report.charts import Chart, Line, Look, curves
from keymix.report.formats import distance
from keymix.report.gallery import Gallery
from keymix.report.part import (
    ClassScores,
    ImageOutputs,
    Page,
    RunAnswers,
    Section,
    packed_shares,
)
from keymix.report.record import DoneRun, Results, Sparse
from keymix.report.tables import Column, Table
from keymix.task import Score
from keymix.tasks.segmentation import gallery
from keymix.tasks.segmentation.facts import MaskDetails

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.tasks.segmentation.answers import MaskAnswers

FEWEST = 1e-3
"""Share of the pixels below which a bin is not drawn."""
REFERENCE = Look("ref", "s", "")


# ---- what the record keeps -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The structures of a test split, each a class in an image, in up to three parts by their size.

    `pixels` are the least and the most true pixels of each part, `structures` their number, and
    `dice` the Dice coefficient of their pixels together, by mixer the mean over seeds.
    """

    pixels: tuple[tuple[int, int], ...]
    structures: tuple[int, ...]
    dice: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class OfComparison(Sparse):
    """The number of test cases, None if no run is finished, and the classes that count."""

    test_cases: int | None = None
    classes: Classes
    distance_unit: str | None = None
    sizes: Sizes | None = None


@dataclass(frozen=True, kw_only=True)
class OfMasks(OfRun):
    """What it keeps of a run: figures of classes and images, and the test's `confidence_bins`."""

    reliability: tuple[tuple[float, float, float], ...] | None = None


def by_size(runs: Mapping[str, Sequence[MaskAnswers]]) -> Sizes | None:
    """Part the structures into thirds by their true pixels, and score each; None without any."""
    true = next(iter(runs.values()))[0].truth
    there = true > 0
    if not there.any():
        return None
    ends = np.quantile(true[there], (1 / 3, 2 / 3), method="inverted_cdf")
    part = np.searchsorted(ends, true)  # those of one size are in one part
    chosen = [each for k in range(3) if (each := there & (part == k)).any()]
    return Sizes(
        pixels=tuple((int(true[each].min()), int(true[each].max())) for each in chosen),
        structures=tuple(int(each.sum()) for each in chosen),
        dice={
            mixer: tuple(
                float(np.mean([dice(run.counts[:, list(run.scored)][each].sum(0)) for run in of]))
                for each in chosen
            )
            for mixer, of in runs.items()
        },
    )


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


def size_section(record: Results) -> list[Section]:
    """Show the Dice coefficient by the size of structures; nothing where none is known."""
    sizes = record.own.read(OfComparison).sizes
    if sizes is None or len(sizes.structures) < 2:
        return []
    columns = [Column("mixer", "mixer", "name")]
    for (low, high), number in zip(sizes.pixels, sizes.structures, strict=True):
        heading = f"{low:,} to {high:,} pixels ({number:,}), %"
        columns.append(Column(heading, f"pixels_{low}_{high}", "percent", most_first=True))
    rows = [(mixer, *sizes.dice[mixer]) for mixer in record.labels if mixer in sizes.dice]
    return [
        Section(
            heading="Dice by size",
            about="A structure is a class in a test image; in thirds by its true pixels, at the "
            "size at which images are scored, and in brackets how many there are. Dice "
            "coefficient of the pixels of a third together, mean over seeds; what is found in "
            "images without the class counts in none.",
            layout="narrow",
            tables=[Table("size-dice", "Dice coefficient by size", columns, rows)],
        )
    ]


def calibration_section(record: Results, looks: Mapping[str, Look]) -> list[Section]:
    """Show how often pixels are right, by how sure the models are of them."""
    ideal = Line("as sure as right", REFERENCE, [0, 100], [0, 1])
    lines = [ideal]
    for mixer, runs in by_seed(record, lambda run: run.own.read(OfMasks).reliability).items():
        if runs:
            pixels, sure, right = np.sum([*runs.values()], axis=0).T
            shown = pixels > FEWEST * pixels.sum()
            ys = (right[shown] / pixels[shown]).tolist()
            xs = (100 * sure[shown] / pixels[shown]).tolist()
            lines.append(Line(mixer, looks[mixer], xs, ys))
    if len(lines) < 2:
        return []
    draw = partial(
        curves,
        lines=lines,
        x_label="probability of the predicted class, %",
        y_label="right, %",
        percent=True,
    )
    return [
        Section(
            name="Calibration",
            heading="How sure they are, and how often right",
            about="Pixels of the test images in 15 bins of the probability that a model gives "
            "to the class it predicts, all seeds together; bins with fewer than one pixel in a "
            "thousand are left out. Below the diagonal a model is too sure of itself. The "
            "calibration error in the table is the mean distance from the diagonal over "
            "pixels.",
            legend=[label for label in looks if label in {line.label for line in lines}],
            charts=[Chart("reliability", "share of right pixels by probability", draw).svg],
            layout="narrow",
        )
    ]


# ---- the page --------------------------------------------------------------------------------


class MaskPage(Page):
    """What a report shows of masks."""

    package = "keymix.tasks.segmentation"
    scripts = ("overlaps", "slider")
    shared_scripts = ("shares",)
    run = OfMasks
    comparison = OfComparison
    test_scores = (
        Score(key="surface_dice", name="surface Dice", short="surface", label="surface Dice"),
        *(
            Score(
                key=f"hd95_{unit}",
                name="95th percentile of the Hausdorff distance",
                short="HD95",
                label="HD95",
                better="less",
                high=None,
                unit=unit,
                places=1,
            )
            for unit in ("mm", "px")
        ),
        Score(
            key="calibration_error",
            name="expected calibration error",
            short="ECE",
            label="calibration error",
            better="less",
        ),
    )
    terminal = ("weighted_jaccard", "dice", "hd95_mm", "hd95_px")
    test_numbers = ("missed",)

    def keep_run(self, tested: RunAnswers, data: DataRecord) -> OfMasks:
        """Keep the scores of each class, how well each image overlaps, and how sure pixels are."""
        del data
        rows = tested.details.read(MaskDetails).classes
        answers = _masks(tested.answers)
        return OfMasks(
            classes={
                "score": tuple(each.jaccard for each in rows),
                "dice": tuple(each.dice for each in rows),
                "surface_dice": tuple(each.surface_dice for each in rows),
                "hd95": tuple(each.hd95 for each in rows),
                "missed": tuple(each.missed for each in rows),
            },
            shares=packed_shares(answers.images()),
            reliability=tuple(
                (float(pixels), float(sure), float(right))
                for pixels, sure, right in answers.bins.sum(0)
            ),
        )

    def keep_comparison(self, tested: Sequence[RunAnswers], data: DataRecord) -> OfComparison:
        """Keep the cases, the images that have each class, and the unit of distances."""
        names = tuple(data.classes[c] for c in data.scored_classes)
        if not tested:
            return OfComparison(classes=Classes(names=names, test_images=None))
        by_mixer: dict[str, list[MaskAnswers]] = {}
        for each in tested:
            by_mixer.setdefault(each.mixer, []).append(_masks(each.answers))
        answers = _masks(tested[0].answers)
        images = tuple((answers.truth > 0).sum(axis=0).tolist())
        return OfComparison(
            test_cases=answers.units,
            classes=Classes(names=names, test_images=images),
            distance_unit=tested[0].details.read(MaskDetails).distance_unit,
            sizes=by_size(by_mixer),
        )

    def chosen(self, answers: Answers, number: int) -> Sequence[int]:
        """Choose full images of different cases."""
        return fullest(_masks(answers), number)

    def label(self, data: ImageData, i: int) -> str:
        """Name a test image."""
        return data.test.rows[i].name

    def drawn(self, tested: Sequence[RunAnswers]) -> Mapping[int, str]:
        """Choose the worst, median and best images, and one that is empty."""
        return gallery.telling([_masks(each.answers) for each in tested])

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
            Column("surface Dice, %", "surface_dice", "percent", most_first=True),
            Column(f"HD95, {own.distance_unit}", "hd95", "ratio", write=distance),
            Column("missed or invented, images", "missed", "ratio", write=distance),
        ]
        counts = {"test images with it": own.classes.test_images or ()}
        names = dict(enumerate(own.classes.names))
        return class_scores(record, "IoU", names, counts, further)

    def sections(self, record: Results, looks: Mapping[str, Look]) -> Sequence[Section]:
        """Show how well structures of each size are found, and how sure the models are."""
        return [*size_section(record), *calibration_section(record, looks)]


PAGE = MaskPage()

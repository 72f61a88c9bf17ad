# SPDX-License-Identifier: Apache-2.0
"""What a check tells of masks: classes, areas, overlaps, slices without rows, spacing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keymix.data.contents import SPLITS, Images, TargetFindings
from keymix.data.findings import FALSIFIES, NOTE, STOPS, WARNING, Report
from keymix.data.kinds import MaskKind
from keymix.data.segmentation.survey import ScanSurvey, joined
from keymix.data.segmentation.table import ScanSource, ScanTable, Unlisted, unfit
from keymix.data.sources.base import Source
from keymix.data.streams import IntArray

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

_LACKING = {
    "train": "no model can learn them: add images, or split by another data.split_seed",
    "val": "they are never validated on: add cases, or take another data.split_seed",
    "test": "what a model makes of them cannot be measured: add cases, or take a larger "
    "data.test_fraction",
}


class MaskFindings(TargetFindings):
    """What a check tells of masks."""

    def check(self, report: Report, images: Images, source: Source, known: Collection[str]) -> None:
        """Count images and pixels of each class, and find what is odd about masks."""
        assert isinstance(source, ScanSource)
        survey = joined([each.own for each in images.surveys if isinstance(each.own, ScanSurvey)])
        add_unlisted(report, source.unlisted)
        if survey.broken or "bad row" in known:
            told_of = "classes are not counted, since not all images and masks could be read"
            report.facts["notes"] = [*report.facts["notes"], told_of]
        else:
            _add_classes(report, images, survey)
            _add_unfit(report, images, survey, source.masks)
        _add_masks(report, images, survey, source)
        _add_spacing(report, images)

    def glance(self, report: Report, images: Images, data: ImageData) -> None:
        """Find slices without rows, and classes that a split lacks."""
        del images
        add_unlisted(report, data.unlisted)
        counts = {name: np.array(count) for name, count in (data.facts.class_images or {}).items()}
        add_lacking(report, data.classes, counts)


def add_unlisted(report: Report, unlisted: Sequence[Unlisted]) -> None:
    """Name the slices for which rows of the table of masks are missing."""
    report.add(
        FALSIFIES if any(each.certain for each in unlisted) else WARNING,
        "slices without a row for an organ",
        [str(each) for each in unlisted],
        "restore the rows, or add rows without run lengths where the organ is absent: without a "
        "row the slice counts as one without the organ",
        [{"id": each.id, "classes": list(each.classes)} for each in unlisted],
    )


def _add_classes(report: Report, images: Images, survey: ScanSurvey) -> None:
    """Count images and pixels of each class; find classes that a split lacks."""
    names = images.classes
    counted = int(survey.area.sum() - survey.ignored.sum())
    there = survey.pixels > 0
    facts = {}
    for c, name in enumerate(names):
        having = {split: int(there[images.of_split(split), c].sum()) for split in SPLITS}
        share = float(survey.pixels[:, c].sum() / counted) if counted else 0.0
        facts[name] = {**having, "share_of_pixels": share}
    report.facts["classes"] = facts
    counts = {
        split: np.array([facts[name][split] for name in names])
        for split in SPLITS
        if images.of_split(split).any()
    }
    add_lacking(report, names, counts)


def add_lacking(report: Report, names: Sequence[str], counts: Mapping[str, IntArray]) -> None:
    """Name the classes that no mask of a split has."""
    for split, number in counts.items():
        lacking = (number == 0) & ((split == "train") | (counts["train"] > 0))
        missing = [names[c] for c in np.flatnonzero(lacking).tolist()]
        report.add(WARNING, f"classes that {split} lacks", missing, _LACKING[split])


def _add_unfit(report: Report, images: Images, survey: ScanSurvey, masks: MaskKind) -> None:
    """Tell of masks that hold nothing to learn or to measure, which training refuses."""
    seen = {
        name: [survey.seen[k] for k in np.flatnonzero(images.of_split(name)).tolist()]
        for name in SPLITS
        if images.of_split(name).any()
    }
    why = unfit(seen, masks, images.classes)
    report.add(STOPS, "splits with nothing to learn or to measure", why, "")


def _add_masks(report: Report, images: Images, survey: ScanSurvey, source: ScanSource) -> None:
    """Tell of masks that are empty, ignored or overlap, and of stacks with gaps."""
    area = int(survey.area.sum())
    overlaps = [(k, seen.overlap) for k, seen in enumerate(survey.seen) if seen.overlap]
    report.facts["masks"] = {
        "kind": "multilabel" if source.masks.multilabel else "exclusive",
        "empty": sum(seen.empty and not seen.faults for seen in survey.seen),
        "ignored": int(survey.ignored.sum()) / area if area else 0.0,
    }
    report.add(
        WARNING,
        "masks in which classes overlap",
        [f"{images.id(k)}: {_pixels(number)}" for k, number in overlaps],
        "exclusive masks keep one class a pixel; task.options.masks=multilabel keeps all",
        [{**images.place(k), "pixels": number} for k, number in overlaps],
    )
    lost = np.flatnonzero((survey.area > 0) & (survey.ignored == survey.area)).tolist()
    report.add(
        WARNING,
        "masks that are ignored altogether",
        [images.id(k) for k in lost],
        "nothing is learned from them: remove them, or draw them",
    )
    gaps = [(k, seen.replaced) for k, seen in enumerate(survey.seen) if seen.replaced]
    report.add(
        NOTE,
        "stacks with missing neighbours",
        [f"{images.id(k)}: {number} of {source.in_chans}" for k, number in gaps],
        "the nearest slice of the scan stands in for each",
        [{**images.place(k), "missing": number} for k, number in gaps],
    )


def _pixels(number: int) -> str:
    return f"{number} pixel{'' if number == 1 else 's'}"


def _add_spacing(report: Report, images: Images) -> None:
    """Tell which spacings there are, and which images have another than most."""
    tables = [table for table in images.tables.values() if isinstance(table, ScanTable)]
    found = [table.spacing(i) for table in tables for i in range(len(table))]
    counted = Counter(each for each in found if each is not None)
    if not counted:
        return
    (down, across), times = counted.most_common(1)[0]
    report.facts["spacing"] = {
        "different": len(counted),
        "common": {"row_mm": down, "column_mm": across, "images": times},
        "unknown": sum(each is None for each in found),
    }
    others = [
        (k, each) for k, each in enumerate(found) if each is not None and each != (down, across)
    ]
    report.add(
        NOTE,
        f"images of another spacing than {_mm(down, across)}",
        [f"{images.id(k)}: {_mm(*each)}" for k, each in others],
        "millimetres are reckoned with each image's own; all are resized to as many pixels",
    )


def _mm(down: float, across: float) -> str:
    return f"{across:g}x{down:g} mm"

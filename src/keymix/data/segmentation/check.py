# SPDX-License-Identifier: Apache-2.0
"""What a check finds of masks: classes, areas, overlaps, slices without rows, spacing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keymix.data.files import ranges
from keymix.data.findings import (
    FALSIFIES,
    NOTE,
    SPLITS,
    STOPS,
    WARNING,
    Images,
    Report,
    TargetFindings,
)
from keymix.data.kinds import IGNORE, MaskKind
from keymix.data.segmentation.table import Pixels, ScanSource, ScanTable, Seen, Unlisted, unfit
from keymix.data.sources.base import Fault, Faults, Source
from keymix.data.specs import Options
from keymix.data.streams import IntArray
from keymix.data.survey import Progress, Survey, hash_of, looking
from keymix.errors import UserError

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

_CHUNK = 16  # images per task


class ScanSurvey:
    """What was seen of a table's masks, by position; zero where one is broken."""

    def __init__(self, count: int, classes: int) -> None:
        self.pixels = np.zeros((count, classes), dtype=np.int64)  # of each class
        self.ignored = np.zeros(count, dtype=np.int64)  # pixels of the value 255, in any plane
        self.area = np.zeros(count, dtype=np.int64)  # pixels of the mask
        self.seen = [Seen()] * count
        self.faults: dict[int, list[Fault]] = {}  # what makes an image or a mask unreadable


def survey_source(
    source: Source, faults: Faults, options: Options, progress: Progress
) -> dict[str, Survey]:
    """Read every image and mask of a source; a fault of several stacks is reported once."""
    found: dict[str, Survey] = {}
    seen = set()
    for name, table in source.tables.items():
        assert isinstance(table, ScanTable)
        found[name], own = survey_scans(table, len(source.classes), progress, stack=options.stack)
        for fault in (fault for k in sorted(own.faults) for fault in own.faults[k]):
            if (fault.kind, fault.message) not in seen:
                seen.add((fault.kind, fault.message))
                faults.found.append(fault)
    return found


def survey_scans(
    table: ScanTable, classes: int, progress: Progress, *, stack: int | None = None
) -> tuple[Survey, ScanSurvey]:
    """Read every image and mask of a table; of a stack, the slice in the middle is the image."""
    count = len(table)
    own = ScanSurvey(count, classes)
    survey = Survey(count, targets=True, own=own)

    def look(rows: range) -> int:
        for i in rows:
            own.seen[i] = table.inspect(i)
            faults = list(own.seen[i].faults)
            try:
                pixels = table.pixels(i)
                if stack is not None:
                    pixels = pixels[len(pixels) // 2][None]
                survey.sizes[i] = pixels.shape[:0:-1]
                survey.hashes[i] = _hash(pixels)
                survey.blank[i] = pixels.min() == pixels.max()
                mask = table.mask(i)
                _count(own, i, mask)
                if survey.targets is not None:
                    survey.targets[i] = _hash(mask)
            except UserError as error:
                if not faults:  # else its kind was reported
                    faults.append(Fault("unreadable", str(error), table.name(i)))
            if faults:
                own.faults[i] = faults
        return len(rows)

    with looking() as pool:
        for done in pool.imap(look, ranges(count, _CHUNK)):
            progress(done)
    return survey, own


def _joined(surveys: Sequence[ScanSurvey]) -> ScanSurvey:
    """Make one survey of those of several tables, in their order; faults keep no position."""
    every = ScanSurvey(0, 0)
    for name in ("pixels", "ignored", "area"):
        setattr(every, name, np.concatenate([getattr(each, name) for each in surveys]))
    every.seen = [seen for each in surveys for seen in each.seen]
    faults = [found for each in surveys for found in each.faults.values()]
    every.faults = dict(enumerate(faults))
    return every


def _count(found: ScanSurvey, i: int, mask: Pixels) -> None:
    """Count the pixels of a mask by class."""
    classes = found.pixels.shape[1]
    if mask.ndim == 2:
        counts = np.bincount(mask.ravel(), minlength=IGNORE + 1)
        found.pixels[i], found.ignored[i] = counts[:classes], counts[IGNORE]
    else:
        found.pixels[i] = (mask == 1).sum(axis=(1, 2))
        found.ignored[i] = (mask == IGNORE).any(axis=0).sum()
    found.area[i] = mask.shape[-2] * mask.shape[-1]


def _hash(array: Pixels) -> np.void:
    return hash_of(array.tobytes(), f"{array.shape}")


_LACKING = {
    "train": "no model can learn them: add images, or split by another data.split_seed",
    "val": "they are never validated on: add cases, or take another data.split_seed",
    "test": "what a model makes of them cannot be measured: add cases, or take a larger "
    "data.test_fraction",
}


class MaskFindings(TargetFindings):
    """What a check reports of masks."""

    def check(self, report: Report, images: Images, source: Source, known: Collection[str]) -> None:
        """Count images and pixels of each class, and find what is odd about masks."""
        assert isinstance(source, ScanSource)
        survey = _joined([each.own for each in images.surveys if isinstance(each.own, ScanSurvey)])
        add_unlisted(report, source.unlisted)
        if survey.faults or "bad row" in known:
            note = "classes are not counted, since not all images and masks could be read"
            report.facts["notes"] = [*report.facts["notes"], note]
        else:
            _add_classes(report, images, survey)
            _add_unfit(report, images, survey, source.masks)
        _add_masks(report, images, survey, source)
        _add_lines(report)
        _add_spacing(report, images)

    def quick_check(self, report: Report, images: Images, data: ImageData) -> None:
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
    """Report masks that hold nothing to learn or to measure, which training refuses."""
    seen = {
        name: [survey.seen[k] for k in np.flatnonzero(images.of_split(name)).tolist()]
        for name in SPLITS
        if images.of_split(name).any()
    }
    why = unfit(seen, masks, images.classes)
    report.add(STOPS, "splits with nothing to learn or to measure", why, "")


def _add_masks(report: Report, images: Images, survey: ScanSurvey, source: ScanSource) -> None:
    """Report masks that are empty, ignored or overlap, and of stacks with gaps."""
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
        "exclusive masks keep one class per pixel; task.options.masks=multilabel keeps all",
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


def _add_lines(report: Report) -> None:
    """Say what the masks are, and for each class in how many images and pixels it is."""
    masks = report.facts["masks"]
    text = f"{masks['kind']}; {masks['empty']} without any class"
    if masks["ignored"]:
        text += f"; {masks['ignored']:.2%} of pixels ignored"
    report.lines.append(("masks", text))
    names = report.facts.get("splits", report.facts["images"])
    for name, of in report.facts.get("classes", {}).items():
        splits = ", ".join(f"{split} {of[split]}" for split in names)
        text = f"{name}: {of['share_of_pixels']:.2%} of pixels, in images of {splits}"
        report.lines.append(("class", text))


def _pixels(number: int) -> str:
    return f"{number} pixel{'' if number == 1 else 's'}"


def _add_spacing(report: Report, images: Images) -> None:
    """Say which spacings there are, and which images have another than most."""
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

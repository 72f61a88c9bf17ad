# SPDX-License-Identifier: Apache-2.0
"""Checks a set of images with masks: faults, copies, splits, classes, sizes and spacing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keymix.data import contents
from keymix.data.carve import carve
from keymix.data.contents import add_sequences
from keymix.data.findings import FALSIFIES, NOTE, STOPS, WARNING, Report
from keymix.data.segmentation.survey import ScanSurvey, joined, survey_scans
from keymix.data.segmentation.table import ScanSource, ScanTable, Unlisted, unfit
from keymix.data.sequences import sequences_of
from keymix.data.sources.base import Faults, Source
from keymix.data.streams import IntArray
from keymix.data.survey import Survey
from keymix.data.tasks import MaskKind
from keymix.errors import UserError

VAL_FRACTION = 1 / 6
"""Share of the images left by test that becomes validation in recipes for masks: 80:16:4."""
SPLITS = ("train", "val", "test")
_SHOWN = 3  # equal images named in a line
_COPIES = {
    "leak": (
        FALSIFIES,
        "images in more than one split",
        "keep each in one split: a model is tested on what it learned from",
    ),
    "conflict": (
        FALSIFIES,
        "images with more than one mask",
        "find the right mask and remove the other copies",
    ),
    "copy": (
        WARNING,
        "images repeated with the same mask",
        "keep one of each, unless they should weigh more",
    ),
}
_LACKING = {
    "train": "no model can learn them: add images, or split by another data.split_seed",
    "val": "they are never validated on: add cases, or take another data.split_seed",
    "test": "what a model makes of them cannot be measured: add cases, or take a larger "
    "data.test_fraction",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What training would be told about the masks.

    Args:
        stack: Slices of an image; None for the image alone.
        split_by: ``case`` or ``slice``; None for ``case``.
        test_fraction: Share that becomes test; None for the source's own.
    """

    stack: int | None = None
    split_by: str | None = None
    test_fraction: float | None = None


def check_scans(
    report: Report,
    source: Source,
    faults: Faults,
    settings: Settings,
    count: Callable[[int], None],
) -> None:
    """Read every image with its mask and tell all that is wrong.

    Args:
        report: Where to.
        source: The images.
        faults: Takes what is wrong with single images.
        settings: What training would be told.
        count: Called with the number of images done since the last call.

    Raises:
        UserError: If a share is asked for that the data have fixed.
    """
    assert isinstance(source, ScanSource)
    tables = scan_tables(source)
    splits = _split(report, source, settings)
    surveys = {
        name: survey_scans(table, len(source.classes), count, stack=settings.stack)
        for name, table in tables.items()
    }
    scans = _scans(source, surveys, splits)
    told = set()
    for fault in (each for k in sorted(scans.survey.broken) for each in scans.survey.broken[k]):
        if (fault.kind, fault.message) not in told:  # a file may be in several stacks
            told.add((fault.kind, fault.message))
            faults.found.append(fault)
    add_copies(report, scans)
    add_cases(report, scans)
    add_unlisted(report, source.unlisted)
    if scans.survey.broken or any(fault.kind == "bad row" for fault in faults.found):
        told_of = "classes are not counted, since not all images and masks could be read"
        report.facts["notes"] = [*report.facts["notes"], told_of]
    else:
        _add_classes(report, scans)
        _add_unfit(report, scans)
    _add_masks(report, scans)
    if not source.grouped:
        add_sequences(report, sequences_of(tables), masks=True)
    contents.add_sizes(report, scans.images)
    _add_spacing(report, scans)


@dataclass(frozen=True, eq=False, kw_only=True)
class Scans:
    """All images with masks of a set in one row.

    Args:
        classes: Names of the classes.
        masks: What the masks are.
        channels: Channels of an image.
        grouped: Whether the data say which images are of one case.
        images: Their origins, splits, hashes and sizes.
        survey: What was seen of all of them.
        groups: The case of each.
        spacing: Millimetres of a row and of a column of each; None where unknown.
    """

    classes: Sequence[str]
    masks: MaskKind
    channels: int
    grouped: bool
    images: contents.Images
    survey: ScanSurvey
    groups: Sequence[str]
    spacing: Sequence[tuple[float, float] | None] = ()

    def of_split(self, name: str) -> NDArray[np.bool_]:
        """Mark the images of a split."""
        marked: NDArray[np.bool_] = self.images.splits == name
        return marked

    def place(self, k: int) -> dict[str, Any]:
        """Tell origin, split and case of image ``k``."""
        return {
            "id": self.images.id(k),
            "split": str(self.images.splits[k]),
            "case": self.groups[k],
        }


def scan_tables(source: ScanSource) -> dict[str, ScanTable]:
    """List the tables of images with masks, by name."""
    tables = source.tables.items()
    return {name: table for name, table in tables if isinstance(table, ScanTable)}


def _scans(
    source: ScanSource, surveys: Mapping[str, ScanSurvey], splits: Mapping[str, NDArray[np.str_]]
) -> Scans:
    tables = scan_tables(source)
    plain = {
        name: Survey(each.hashes, each.sizes, np.zeros(len(each.seen), dtype=np.int64), {})
        for name, each in surveys.items()
    }
    rows = [(table, i) for table in tables.values() for i in range(len(table))]
    return Scans(
        classes=source.classes,
        masks=source.masks,
        channels=source.in_chans,
        grouped=source.grouped,
        images=contents.Images(source.classes, tables, plain, splits),
        survey=joined([surveys[name] for name in tables]),
        groups=[table.groups[i] for table, i in rows],
        spacing=[table.spacing(i) for table, i in rows],
    )


def _split(report: Report, source: ScanSource, settings: Settings) -> dict[str, NDArray[np.str_]]:
    """Tell the split of every row: as training takes it, or the table's name where it cannot."""
    splits = {name: np.full(len(table), name, dtype="<U5") for name, table in source.tables.items()}
    try:
        parts, notes = carve(
            source,
            report.spec,
            None,
            VAL_FRACTION,
            0,
            split_by=settings.split_by,
            test_fraction=settings.test_fraction,
        )
    except UserError as error:
        if settings.test_fraction is not None and len(source.tables) > 1:
            raise  # the option is at fault, not the data
        report.add(STOPS, "splits left empty", [str(error)], "")
        return splits
    for name, part in parts.items():
        splits[part.origin][part.rows] = name
    report.facts["splits"] = {name: len(part.rows) for name, part in parts.items()}
    report.facts["notes"] = notes
    return splits


def add_copies(report: Report, scans: Scans) -> None:
    """Group equal images: in several splits, with several masks, or plain copies."""
    whole = (scans.survey.sizes[:, 0] > 0) & ~scans.survey.blank
    blank = [scans.images.id(k) for k in np.flatnonzero(scans.survey.blank).tolist()]
    report.add(WARNING, "images of one colour", blank, "look at them: they show nothing")
    _, group, times = np.unique(scans.survey.hashes, return_inverse=True, return_counts=True)
    groups: dict[int, list[int]] = {}
    for k in np.flatnonzero((times[group] > 1) & whole).tolist():
        groups.setdefault(int(group[k]), []).append(k)
    kinds: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in _COPIES}
    for rows in groups.values():
        members = [scans.place(k) for k in rows]
        leaks = len({one["split"] for one in members}) > 1
        conflicts = (
            len({scans.survey.mask_hashes[k].tobytes() for k in rows if scans.survey.area[k]}) > 1
        )
        if leaks:
            kinds["leak"].append(members)
        if conflicts:
            kinds["conflict"].append(members)
        if not leaks and not conflicts:
            kinds["copy"].append(members)
    for kind, (level, what, remedy) in _COPIES.items():
        report.add(level, what, [_equal(members) for members in kinds[kind]], remedy, kinds[kind])


def _equal(members: list[dict[str, Any]]) -> str:
    shown = [f"{one['id']} ({one['split']})" for one in members[:_SHOWN]]
    more = len(members) - _SHOWN
    return " = ".join([*shown, f"{more} more"] if more > 0 else shown)


def add_cases(report: Report, scans: Scans) -> None:
    """Count the cases of each split; find those in several, and splits of a single one."""
    if not scans.grouped:
        return
    of: dict[str, set[str]] = {}
    for group, split in zip(scans.groups, scans.images.splits.tolist(), strict=True):
        of.setdefault(group, set()).add(split)
    counts = Counter(split for splits in of.values() for split in splits)
    report.facts["cases"] = {name: counts[name] for name in SPLITS if counts[name]}
    shared = [
        {"case": case, "splits": sorted(of[case], key=SPLITS.index)}
        for case in sorted(of)
        if len(of[case]) > 1
    ]
    report.add(
        FALSIFIES,
        "cases in more than one split",
        [f"{one['case']} ({', '.join(one['splits'])})" for one in shared],
        "keep a case in one split (data.split_by=case): its slices resemble each other, and a "
        "model is tested on what it learned from",
        shared,
    )
    lone = [name for name in SPLITS if counts[name] == 1]
    report.add(
        WARNING,
        "splits of a single case",
        lone,
        "nothing tells how far scores vary from case to case: add cases, or take a larger share",
    )


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


def _add_classes(report: Report, scans: Scans) -> None:
    """Count images and pixels of each class; find classes that a split lacks."""
    names, survey = scans.classes, scans.survey
    counted = int(survey.area.sum() - survey.ignored.sum())
    there = survey.pixels > 0
    facts = {}
    for c, name in enumerate(names):
        images = {split: int(there[scans.of_split(split), c].sum()) for split in SPLITS}
        share = float(survey.pixels[:, c].sum() / counted) if counted else 0.0
        facts[name] = {**images, "share_of_pixels": share}
    report.facts["classes"] = facts
    counts = {
        split: np.array([facts[name][split] for name in names])
        for split in SPLITS
        if scans.of_split(split).any()
    }
    add_lacking(report, names, counts)


def add_lacking(report: Report, names: Sequence[str], counts: Mapping[str, IntArray]) -> None:
    """Name the classes that no mask of a split has.

    Args:
        report: Where to.
        names: The classes.
        counts: Images that have each class, by split.
    """
    for split, number in counts.items():
        lacking = (number == 0) & ((split == "train") | (counts["train"] > 0))
        missing = [names[c] for c in np.flatnonzero(lacking).tolist()]
        report.add(WARNING, f"classes that {split} lacks", missing, _LACKING[split])


def _add_unfit(report: Report, scans: Scans) -> None:
    """Tell of masks that hold nothing to learn or to measure, which training refuses."""
    seen = {
        name: [scans.survey.seen[k] for k in np.flatnonzero(scans.of_split(name)).tolist()]
        for name in SPLITS
        if scans.of_split(name).any()
    }
    why = unfit(seen, scans.masks, scans.classes)
    report.add(STOPS, "splits with nothing to learn or to measure", why, "")


def _add_masks(report: Report, scans: Scans) -> None:
    """Tell of masks that are empty, ignored or overlap, and of stacks with gaps."""
    survey, kind = scans.survey, scans.masks
    area = int(survey.area.sum())
    overlaps = [(k, seen.overlap) for k, seen in enumerate(survey.seen) if seen.overlap]
    report.facts["masks"] = {
        "kind": "multilabel" if kind.multilabel else "exclusive",
        "empty": sum(seen.empty and not seen.faults for seen in survey.seen),
        "ignored": int(survey.ignored.sum()) / area if area else 0.0,
    }
    report.add(
        WARNING,
        "masks in which classes overlap",
        [f"{scans.images.id(k)}: {_pixels(number)}" for k, number in overlaps],
        "exclusive masks keep one class a pixel; data.masks=multilabel keeps all",
        [{**scans.place(k), "pixels": number} for k, number in overlaps],
    )
    lost = np.flatnonzero((survey.area > 0) & (survey.ignored == survey.area)).tolist()
    report.add(
        WARNING,
        "masks that are ignored altogether",
        [scans.images.id(k) for k in lost],
        "nothing is learned from them: remove them, or draw them",
    )
    gaps = [(k, seen.replaced) for k, seen in enumerate(survey.seen) if seen.replaced]
    report.add(
        NOTE,
        "stacks with missing neighbours",
        [f"{scans.images.id(k)}: {number} of {scans.channels}" for k, number in gaps],
        "the nearest slice of the scan stands in for each",
        [{**scans.place(k), "missing": number} for k, number in gaps],
    )


def _pixels(number: int) -> str:
    return f"{number} pixel{'' if number == 1 else 's'}"


def _add_spacing(report: Report, scans: Scans) -> None:
    """Tell which spacings there are, and which images have another than most."""
    counted = Counter(each for each in scans.spacing if each is not None)
    if not counted:
        return
    (down, across), times = counted.most_common(1)[0]
    report.facts["spacing"] = {
        "different": len(counted),
        "common": {"row_mm": down, "column_mm": across, "images": times},
        "unknown": sum(each is None for each in scans.spacing),
    }
    others = [
        (k, each)
        for k, each in enumerate(scans.spacing)
        if each is not None and each != (down, across)
    ]
    report.add(
        NOTE,
        f"images of another spacing than {_mm(down, across)}",
        [f"{scans.images.id(k)}: {_mm(*each)}" for k, each in others],
        "millimetres are reckoned with each image's own; all are resized to as many pixels",
    )


def _mm(down: float, across: float) -> str:
    return f"{across:g}x{down:g} mm"

# SPDX-License-Identifier: Apache-2.0
"""What a check sees of images with masks, and what their classes and areas are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from keymix.data.dataset import ImageData
from keymix.data.findings import FALSIFIES, WARNING, Report
from keymix.data.kinds import IGNORE
from keymix.data.looks import SPLITS, Look, Samples, hash_of
from keymix.data.segmentation.table import Pixels, ScanSource, ScanTable, Seen, unfit
from keymix.data.sources.base import Fault, Source, Table
from keymix.data.specs import Options
from keymix.data.streams import IntArray
from keymix.errors import UserError


@dataclass(frozen=True)
class _Mask:
    """What is counted of a mask."""

    seen: Seen
    pixels: IntArray  # of each class
    ignored: int  # pixels of the value 255, in any plane
    area: int  # pixels


def look_at_scans(table: Table, rows: range, source: Source, options: Options) -> Iterator[Look]:
    """Read some images and masks; of a stack, the slice in the middle is the image."""
    del options
    assert isinstance(table, ScanTable)
    for i in rows:
        seen = table.inspect(i)
        look = Look(faults=list(seen.faults))
        try:
            pixels = table.pixels(i)
            if table.stacked:
                pixels = pixels[len(pixels) // 2][None]
            look.size = (pixels.shape[2], pixels.shape[1])
            look.hash = hash_of(pixels.tobytes(), pixels.shape)
            look.own = _counted(table.mask(i), len(source.classes), seen)
        except UserError as error:
            if not look.faults:  # else it was said why
                look.faults = [Fault("unreadable", str(error), table.name(i))]
            yield look
            continue
        if pixels.min() == pixels.max():
            look.remarks["blank"] = ""
        if seen.overlap:
            look.remarks["overlap"] = f"{seen.overlap} pixel{'s' * (seen.overlap > 1)}"
        if look.own.ignored == look.own.area:
            look.remarks["ignored"] = ""
        yield look


def _counted(mask: Pixels, classes: int, seen: Seen) -> _Mask:
    area = mask.shape[-2] * mask.shape[-1]
    if mask.ndim == 2:
        counts = np.bincount(mask.ravel(), minlength=IGNORE + 1)
        return _Mask(seen, counts[:classes], int(counts[IGNORE]), area)
    ignored = int((mask == IGNORE).any(axis=0).sum())
    return _Mask(seen, (mask == 1).sum(axis=(1, 2)), ignored, area)


def describe(report: Report, samples: Samples, about: Source | ImageData) -> dict[str, IntArray]:
    """Report slices without rows, and pixels of each class; count the images that have it.

    Of loaded data what loading counted is taken.
    """
    unlisted = about.unlisted if isinstance(about, ScanSource | ImageData) else ()
    items = [{"id": each.id, "reason": str(each)} for each in unlisted]
    certain = any(each.certain for each in unlisted)
    report.add("no row", items, level=FALSIFIES if certain else WARNING)
    if isinstance(about, ImageData):
        return {name: np.array(n) for name, n in (about.facts.class_images or {}).items()}
    assert isinstance(about, ScanSource)
    found: dict[str, list[_Mask]] = {name: [] for name in SPLITS if name in samples.split}
    for k in sorted(samples.own):
        found[str(samples.split[k])].append(samples.own[k])
    if samples.faults:
        report.facts["notes"].append("classes are not counted: not all images and masks were read")
        return {}
    seen = {name: [mask.seen for mask in masks] for name, masks in found.items()}
    report.add("nothing", unfit(seen, about.masks, about.classes))
    every = [mask for masks in found.values() for mask in masks]
    area, ignored = sum(mask.area for mask in every), sum(mask.ignored for mask in every)
    kind = "multilabel" if about.masks.multilabel else "exclusive"
    empty = sum(mask.seen.empty for mask in every)
    share = ignored / area if area else 0.0
    text = f"{kind}; {empty} without any class"
    text += f"; {share:.2%} of pixels ignored" if ignored else ""
    report.state("masks", {"kind": kind, "empty": empty, "ignored": share}, text)
    none = np.zeros(len(about.classes), dtype=np.int64)
    counts = {
        name: sum(((mask.pixels > 0).astype(np.int64) for mask in masks), none)
        for name, masks in found.items()
    }
    pixels = sum((mask.pixels for mask in every), none) / max(1, area - ignored)
    report.facts["classes"] = {}
    for c, name in enumerate(about.classes):
        images = {split: int(number[c]) for split, number in counts.items()}
        report.facts["classes"][name] = {**images, "share_of_pixels": float(pixels[c])}
        listed = ", ".join(f"{split} {number}" for split, number in images.items())
        report.lines.append(("class", f"{name}: {pixels[c]:.2%} of pixels, in images of {listed}"))
    return counts

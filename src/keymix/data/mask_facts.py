# SPDX-License-Identifier: Apache-2.0
"""What is counted of masks: for the record of a data set, and for a check of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from keymix.data.findings import Report
from keymix.data.kinds import BACKGROUND, IGNORE, MaskKind
from keymix.data.sample import Faults, Row, Source
from keymix.data.specs import MASKS, SPLIT_BY
from keymix.data.streams import IntArray

_CALLED = {"train": "training", "val": "validation", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was seen of a mask."""

    pixels: Mapping[int, int]  # of each class that it has, the background included
    ignored: int  # pixels of the value 255, in any plane
    area: int  # pixels
    empty: bool  # whether no pixel has a class but the background


def mask_kind(masks: str, classes: Sequence[str]) -> MaskKind:
    """Return what masks are, by the word for it of `keymix.data.specs.MASKS` and the classes."""
    multilabel = masks == MASKS[True]
    there = not multilabel and BACKGROUND in classes
    background = classes.index(BACKGROUND) if there else None
    return MaskKind(multilabel=multilabel, background=background)


def seen_of(mask: Tensor, kind: MaskKind) -> Seen:
    """Count the pixels of a mask.

    Shape: uint8 ``[H, W]`` of class numbers, or ``[K, H, W]`` of 0 and 1.
    """
    values = mask.numpy()
    if kind.multilabel:
        counts, ignored = (values == 1).sum((1, 2)), int((values == IGNORE).any(0).sum())
    else:
        counts = np.bincount(values.ravel(), minlength=IGNORE + 1)
        counts, ignored = counts[:IGNORE], int(counts[IGNORE])
    pixels = {c: int(counts[c]) for c in np.flatnonzero(counts).tolist()}
    area = values.shape[-2] * values.shape[-1]
    return Seen(pixels=pixels, ignored=ignored, area=area, empty=pixels.keys() <= {kind.background})


def mask_facts(
    seen: Mapping[str, Sequence[Seen]],
    groups: Mapping[str, Sequence[str]],
    source: Source,
    *,
    split_by: str | None = None,
    test_fraction: float | None = None,
) -> dict[str, Any]:
    """Count cases and classes of each split: fields of `keymix.data.record.DataFacts`.

    Args:
        seen: What was seen of the masks of each split.
        groups: The case of each image of each split.
        source: Where they are from.
        split_by: As asked for.
        test_fraction: As asked for.
    """
    undivided = {row.split for row in source.rows} <= {"", "train"}
    why = unfit(seen, mask_kind(source.facts["masks"], source.classes), source.classes)
    return {
        "test_fraction": (test_fraction or source.test_fraction) if undivided else None,
        "split_by": split_by or SPLIT_BY[0],
        "cases": {name: len(set(of)) for name, of in groups.items()},
        "empty": {name: sum(each.empty for each in found) for name, found in seen.items()},
        "unfit": why[0] if why else None,
        "grouped": source.grouped,
        "class_images": {
            name: tuple(int(n) for n in _images(found, len(source.classes)))
            for name, found in seen.items()
        },
    }


def _images(seen: Sequence[Seen], classes: int) -> IntArray:
    """Count the images that have each class."""
    numbers = [sum(c in each.pixels for each in seen) for c in range(classes)]
    return np.array(numbers, dtype=np.int64)


def unfit(
    seen: Mapping[str, Sequence[Seen]], kind: MaskKind, classes: Sequence[str]
) -> tuple[str, ...]:
    """Say why no model can learn from masks, or be measured by them; both refuse such data.

    Learning needs classes to distinguish: in training, multilabel masks have a pixel of any class
    and exclusive ones pixels of two classes. Measuring needs a pixel that is not ignored.

    Returns each reason with the remedy, two sentences; none where the masks are fit.
    """
    return tuple(why for name, found in seen.items() if (why := _unfit(name, found, kind, classes)))


def _unfit(name: str, seen: Sequence[Seen], kind: MaskKind, classes: Sequence[str]) -> str:
    found = {c for each in seen for c in each.pixels}
    images = f"the {len(seen)} {_CALLED[name]} images"
    nothing = "learned" if name == "train" else "measured"
    if not kind.multilabel and not found:
        why = f"all pixels of the masks of {images} are ignored"
    elif name != "train" or len(found) >= (1 if kind.multilabel else 2):
        return ""
    elif kind.multilabel or found == {kind.background}:
        why = f"none of {images} has a pixel of a class that counts"
    else:
        why = f"all pixels of {images} that are not ignored are of the class "
        why += repr(classes[min(found)])
    remedy = "Name other data."
    if not kind.multilabel and any(each.ignored for each in seen):
        remedy = "In masks of 0 and 255 write 1 for the class, since 255 is ignored."
    return f"{why}, so nothing can be {nothing}. {remedy}"


def describe(
    report: Report, seen: Mapping[str, Sequence[Seen]], kind: MaskKind, classes: Sequence[str]
) -> dict[str, IntArray]:
    """Report what is unfit, and the pixels of each class; count the images that have it.

    Args:
        report: The report to add to.
        seen: What was seen of all masks of each split.
        kind: What they are.
        classes: Names of the classes.

    Returns:
        Images of each class, by split.
    """
    report.add("nothing", unfit(seen, kind, classes))
    every = [mask for masks in seen.values() for mask in masks]
    area, ignored = sum(mask.area for mask in every), sum(mask.ignored for mask in every)
    word, empty = MASKS[kind.multilabel], sum(mask.empty for mask in every)
    share = ignored / area if area else 0.0
    text = f"{word}; {empty} without any class"
    text += f"; {share:.2%} of pixels ignored" if ignored else ""
    report.state("masks", {"kind": word, "empty": empty, "ignored": share}, text)
    counts = {name: _images(masks, len(classes)) for name, masks in seen.items()}
    report.facts["classes"] = {}
    for c, name in enumerate(classes):
        pixels = sum(mask.pixels.get(c, 0) for mask in every) / max(1, area - ignored)
        images = {split: int(number[c]) for split, number in counts.items()}
        report.facts["classes"][name] = {**images, "share_of_pixels": pixels}
        listed = ", ".join(f"{split} {number}" for split, number in images.items())
        report.lines.append(("class", f"{name}: {pixels:.2%} of pixels, in images of {listed}"))
    return counts


def report_shared_cases(rows: Sequence[Row], faults: Faults) -> None:
    """Report each case that is in several of the splits that a data set brings."""
    first: dict[str, Row] = {}
    seen = set()
    for row in rows:
        before = first.setdefault(row.group, row)
        if before.split != row.split and row.group not in seen:
            seen.add(row.group)
            faults.report(
                "bad row",
                row.group,
                f"case {row.group!r} is in {before.split} ({before.id}) and in {row.split} "
                f"({row.id}): what is learned of it would be tested on it. Keep it in one split, "
                "or split by slice: data.split_by=slice.",
            )

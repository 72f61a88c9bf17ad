# SPDX-License-Identifier: Apache-2.0
"""What is counted of masks: for the record of a data set, and for a check of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from keymix.data.findings import Report
from keymix.data.kinds import IGNORE, MaskKind, mask_kind
from keymix.data.record import DataFacts
from keymix.data.sample import SPLITS, Faults, Row, Source
from keymix.data.specs import MASKS, SPLIT_BY, Options
from keymix.data.streams import IntArray

if TYPE_CHECKING:
    from keymix.data.check import Samples
    from keymix.data.dataset import ImageData
    from keymix.data.looks import Seen

_CALLED = {"train": "training", "val": "validation", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What is counted of a mask."""

    pixels: Mapping[int, int]  # of each class that it has, the background included
    ignored: int  # pixels of the value 255, in any plane
    area: int  # pixels


def seen_of(mask: Tensor) -> Counted:
    """Count the pixels of a mask.

    Shape: uint8 ``[H, W]`` of class numbers, or ``[K, H, W]`` of 0 and 1.
    """
    values = mask.numpy()
    if values.ndim == 3:
        counts, ignored = (values == 1).sum((1, 2)), int((values == IGNORE).any(0).sum())
    else:
        counts = np.bincount(values.ravel(), minlength=IGNORE + 1)
        counts, ignored = counts[:IGNORE], int(counts[IGNORE])
    pixels = {c: int(counts[c]) for c in np.flatnonzero(counts).tolist()}
    return Counted(pixels=pixels, ignored=ignored, area=values.shape[-2] * values.shape[-1])


BySplit = Mapping[str, Sequence[Counted]]
"""What is counted of the masks of each split."""


def facts(
    rows: Mapping[str, Sequence[Row]],
    seen: Mapping[str, Sequence[Seen]],
    source: Source,
    options: Options,
) -> tuple[DataFacts, list[str]]:
    """Count cases and classes of each split: what the record says, and no notes."""
    found = {name: [one.own for one in some] for name, some in seen.items()}
    kind = _kind(source)
    undivided = {row.split for row in source.rows} <= {"", "train"}
    why = unfit(found, kind, source.classes)
    return replace(
        source.facts,
        test_fraction=(options.test_fraction or source.test_fraction) if undivided else None,
        split_by=options.split_by or SPLIT_BY[0],
        cases={name: len({row.group for row in of}) for name, of in rows.items()},
        empty={name: _empty(masks, kind) for name, masks in found.items()},
        unfit=why[0] if why else None,
        grouped=source.grouped,
        class_images={
            name: tuple(_images(masks, len(source.classes)).tolist())
            for name, masks in found.items()
        },
        class_shares=_shares(found["train"], len(source.classes)),
    ), []


def _kind(source: Source) -> MaskKind:
    kind = mask_kind(source.facts.masks, source.classes)
    assert kind is not None
    return kind


def _shares(masks: Sequence[Counted], classes: int) -> tuple[float, ...]:
    """Return the share that each class has of all pixels that are not ignored."""
    counted = max(1, sum(mask.area - mask.ignored for mask in masks))
    return tuple(sum(mask.pixels.get(c, 0) for mask in masks) / counted for c in range(classes))


def _images(masks: Sequence[Counted], classes: int) -> IntArray:
    """Count the images that have each class."""
    numbers = [sum(c in each.pixels for each in masks) for c in range(classes)]
    return np.array(numbers, dtype=np.int64)


def _empty(masks: Sequence[Counted], kind: MaskKind) -> int:
    """Count the masks of which no pixel has a class but the background."""
    return sum(each.pixels.keys() <= {kind.background} for each in masks)


def unfit(found: BySplit, kind: MaskKind, classes: Sequence[str]) -> tuple[str, ...]:
    """Say why no model can learn from masks, or be measured by them; both refuse such data.

    Learning needs classes to distinguish: in training, multilabel masks have a pixel of any class
    and exclusive ones pixels of two classes. Measuring needs a pixel that is not ignored.

    Returns each reason with the remedy, two sentences; none where the masks are fit.
    """
    return tuple(
        why for name, masks in found.items() if (why := _unfit(name, masks, kind, classes))
    )


def _unfit(name: str, masks: Sequence[Counted], kind: MaskKind, classes: Sequence[str]) -> str:
    found = {c for each in masks for c in each.pixels}
    images = f"the {len(masks)} {_CALLED[name]} images"
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
    if not kind.multilabel and any(each.ignored for each in masks):
        remedy = "In masks of 0 and 255 write 1 for the class, since 255 is ignored."
    return f"{why}, so nothing can be {nothing}. {remedy}"


def describe(report: Report, samples: Samples, about: Source | ImageData) -> dict[str, IntArray]:
    """Report what is unfit, and the pixels of each class; count the images that have it.

    Of loaded data what loading counted is taken.
    """
    if not isinstance(about, Source):
        return {name: np.array(n) for name, n in (about.facts.class_images or {}).items()}
    if samples.faulty:
        report.facts["notes"].append("classes are not counted: not all images and masks were read")
        return {}
    kind, classes = _kind(about), about.classes
    found: dict[str, list[Counted]] = {name: [] for name in SPLITS if name in samples.split}
    ignored = []
    for k, seen in samples.seen.items():
        found[str(samples.split[k])].append(seen.own)
        if seen.own.ignored == seen.own.area:
            ignored.append(samples.item(k, "all of its mask is ignored: nothing is learned of it"))
    report.add("unfit", unfit(found, kind, classes))
    report.add("odd", ignored)
    every = [mask for masks in found.values() for mask in masks]
    area, out = sum(mask.area for mask in every), sum(mask.ignored for mask in every)
    shares = _shares(every, len(classes))
    word, empty = MASKS[kind.multilabel], _empty(every, kind)
    share = out / area if area else 0.0
    text = f"{word}; {empty} without any class"
    text += f"; {share:.2%} of pixels ignored" if out else ""
    report.state("masks", {"kind": word, "empty": empty, "ignored": share}, text)
    counts = {name: _images(masks, len(classes)) for name, masks in found.items()}
    report.facts["classes"] = {}
    for c, name in enumerate(classes):
        images = {split: int(number[c]) for split, number in counts.items()}
        report.facts["classes"][name] = {**images, "share_of_pixels": shares[c]}
        listed = ", ".join(f"{split} {number}" for split, number in images.items())
        report.lines.append(("class", f"{name}: {shares[c]:.2%} of pixels, in images of {listed}"))
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
                f"case {row.group!r}",
                f"it is in {before.split} ({before.id}) and in {row.split} ({row.id}), so that "
                "what is learned of it would be tested on it. Keep it in one split, or split by "
                "slice: data.split_by=slice.",
            )

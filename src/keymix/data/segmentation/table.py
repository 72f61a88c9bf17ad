# SPDX-License-Identifier: Apache-2.0
"""What a set of images with masks is: a table opened by number, like any other, that has masks."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from keymix.data.decode import Size, resized_image
from keymix.data.kinds import MASK, MaskKind
from keymix.data.sources.base import Fault, Faults, Source, Table
from keymix.data.specs import MASKS, SPLIT_BY
from keymix.data.streams import IntArray
from keymix.data.targets import Digest, Targets
from keymix.errors import unknown

Pixels = NDArray[np.uint8]

_CALLED = {"train": "training", "val": "validation", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was seen of an image and its mask.

    Args:
        faults: What is wrong with them.
        empty: Whether no pixel of the mask has a class but the background.
        overlap: Pixels that had several classes and kept one.
        replaced: Neighbours of a stack that others stand in for.
        classes: Numbers of the classes that any pixel of the mask has, the background included.
        ignored: Whether any pixel of the mask is ignored.
    """

    faults: Sequence[Fault] = ()
    empty: bool = False
    overlap: int = 0
    replaced: int = 0
    classes: frozenset[int] = frozenset()
    ignored: bool = False


@dataclass(frozen=True, kw_only=True)
class Unlisted:
    """A slice for which the table of masks lacks rows that it has for others."""

    id: str
    classes: tuple[str, ...]
    # whether the table writes a row without run lengths for an organ that is absent, so that a
    # missing row means nothing
    certain: bool

    def __str__(self) -> str:
        return f"{self.id}: no row for {' and '.join(self.classes)}"


class ScanTable(Table):
    """Images with masks, opened by number; ``labels`` are all 0.

    Args of the concrete classes are their own; every table has these.

    ``groups``: of each image the case that it is of, which no two splits may share.
    ``channels``: Channels of an image: 1, 3, or the slices of a stack.
    ``stacked``: Whether channels are slices of a stack.
    """

    groups: tuple[str, ...]
    channels: int
    stacked: bool = False

    @property
    def targets(self) -> MaskTargets:
        """The masks, at their own sizes."""
        return MaskTargets(self)

    def __len__(self) -> int:
        return len(self.labels)

    def key(self, i: int) -> str:
        """Name image ``i`` by its case and its id."""
        return f"{self.groups[i]}/{self.scan_id(i)}"

    @abstractmethod
    def pixels(self, i: int) -> Pixels:
        """Decode image ``i`` at its own size, ``[C, h, w]``.

        Raises:
            UserError: If it is damaged or missing; it is named.
        """

    @abstractmethod
    def mask(self, i: int) -> Pixels:
        """Decode the mask of image ``i`` at its own size.

        Class numbers ``[h, w]`` of exclusive masks, 0 and 1 ``[K, h, w]`` of others; 255 is
        ignored.

        Raises:
            UserError: If it is damaged, missing, of another size or has an unknown class; it is
                named.
        """

    @abstractmethod
    def size(self, i: int) -> Size:
        """Return height and width of image ``i`` without decoding it, pixels."""

    def spacing(self, i: int) -> tuple[float, float] | None:
        """Return the millimetres of a row and of a column of image ``i``; None where unknown."""
        del i
        return None

    @abstractmethod
    def scan_id(self, i: int) -> str:
        """Name image ``i`` as predictions of it are named: its id in a CSV, or its file's stem."""

    @abstractmethod
    def inspect(self, i: int, *, decode: bool = True) -> Seen:
        """Find all that is wrong with image ``i`` and its mask, and continue after each fault.

        Args:
            i: The image.
            decode: Decode the image; otherwise its header and its checksums are read.
        """

    @abstractmethod
    def select(self, rows: IntArray) -> ScanTable:
        """Make the table of ``rows`` (ascending)."""

    def read(self, i: int, size: Size) -> tuple[Tensor, Tensor]:
        """Read image ``i`` and its mask as a model of a given size sees them.

        The image is resized to height and width (bilinear, antialiased) without regard to its
        proportions, so that all of it is seen; the mask takes the nearest pixel.

        Returns:
            uint8 ``[C, H, W]``, and uint8 ``[H, W]`` or ``[K, H, W]``.
        """
        return self.image_at(i, size), self.mask_at(i, size)

    def image_at(self, i: int, size: Size) -> Tensor:
        """Read image ``i`` resized, uint8 ``[C, H, W]``."""
        return resized_image(self.pixels(i), size)

    def mask_at(self, i: int, size: Size) -> Tensor:
        """Read the mask of image ``i`` resized, uint8 ``[H, W]`` or ``[K, H, W]``."""
        return resized_mask(self.mask(i), size)


class MaskTargets(Targets):
    """The masks of a table."""

    kind = MASK
    described = "keymix.data.segmentation.check:describe"

    masks: MaskKind | None = None
    unlisted: tuple[Unlisted, ...] = ()
    in_memory: Tensor | None = None
    """All masks at one size, where they are."""

    def __init__(self, table: ScanTable) -> None:
        self.table, self.groups = table, table.groups

    def __len__(self) -> int:
        return len(self.table)

    def read(self, i: int) -> Tensor:
        """Read the mask of image ``i`` at its own size, uint8."""
        return torch.from_numpy(self.table.mask(i).copy())

    def update_digest(self, digest: Digest) -> None:
        """Enter a class number 0 for each; `sealed` enters masks."""
        digest.update(self.strata.astype("<i8").tobytes())

    def sealed(self, digest: str, targets: Sequence[Targets]) -> str:
        """Enter the masks of sets in memory; of others, digests of the images have them."""
        whole = hashlib.sha256(digest.encode())
        for each in targets:
            if isinstance(each, MaskTargets) and each.in_memory is not None:
                whole.update(np.ascontiguousarray(each.in_memory.numpy()).data)
        return whole.hexdigest()

    def select(self, rows: IntArray) -> MaskTargets:
        """Keep the masks of ``rows``."""
        return MaskTargets(self.table.select(rows))


@dataclass(frozen=True, kw_only=True)
class ScanSource(Source):
    """A source whose tables are `ScanTable`."""

    preparation: ClassVar[str] = "keymix.data.segmentation.inputs:ScanPreparation"
    looked: ClassVar[str] = "keymix.data.segmentation.check:look_at_scans"
    checked_fraction: ClassVar[float] = 1 / 6  # 80:16:4 with the test split

    train: ScanTable
    val: ScanTable | None = None
    test: ScanTable | None = None
    test_fraction: float = 0.04
    masks: MaskKind
    unlisted: tuple[Unlisted, ...] = ()  # slices for which rows of the table of masks are missing


def check_choices(masks: str | None, split_by: str | None) -> None:
    """Refuse kinds of masks, and ways to split, that there are not; None is the data's own."""
    if masks not in (None, *MASKS):
        raise unknown("task.options.masks", str(masks), MASKS)
    if split_by not in (None, *SPLIT_BY):
        raise unknown("data.split_by", str(split_by), SPLIT_BY)


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
    found: frozenset[int] = frozenset().union(*(each.classes for each in seen))
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
    if any(each.ignored for each in seen):
        remedy = "In masks of 0 and 255 write 1 for the class, since 255 is ignored."
    return f"{why}, so nothing can be {nothing}. {remedy}"


def report_shared_cases(tables: Mapping[str, ScanTable], faults: Faults) -> None:
    """Report each case that is in several of the splits that a data set brings."""
    first: dict[str, tuple[str, str]] = {}
    seen = set()
    for name, table in tables.items():
        for i, group in enumerate(table.groups):
            split, where = first.setdefault(group, (name, table.name(i)))
            if split != name and group not in seen:
                seen.add(group)
                faults.report(
                    "bad row",
                    group,
                    f"case {group!r} is in {split} ({where}) and in {name} ({table.name(i)}): what "
                    "is learned of it would be tested on it. Keep it in one split, or split by "
                    "slice: data.split_by=slice.",
                )


def resized_mask(mask: Pixels, size: Size) -> Tensor:
    """Resize a mask (nearest) to height and width.

    Shape: uint8 ``[h, w]`` or ``[K, h, w]`` -> the same at ``size``.
    """
    labels = torch.from_numpy(mask.copy())
    if labels.shape[-2:] != size:
        planes = labels[None] if labels.ndim == 2 else labels
        planes = F.interpolate(planes[None].float(), size, mode="nearest-exact")[0]
        labels = (planes[0] if labels.ndim == 2 else planes).to(torch.uint8)
    return labels

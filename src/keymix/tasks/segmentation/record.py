# SPDX-License-Identifier: Apache-2.0
"""What the record of a comparison keeps of masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keymix.report.record import Sparse

SHARES = 65535
"""A stored Jaccard index of this many is 1."""


@dataclass(frozen=True, kw_only=True)
class MaskScore:
    """How well a run finds one class of masks: last epoch, test split."""

    jaccard: float | None
    dice: float | None
    hausdorff_mm: float | None
    missed: int


@dataclass(frozen=True, kw_only=True)
class OfRun(Sparse):
    """What is kept of a finished run, last epoch, test split.

    Args:
        classes: Scores of each class that counts.
        hausdorff_unit: Unit of distances, ``mm`` or ``px``.
        overlaps: The mean Jaccard index by image: base64 of little-endian uint16, `SHARES` is 1.
    """

    classes: tuple[MaskScore, ...] | None = None
    hausdorff_unit: str | None = None
    overlaps: str | None = None


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The classes that count, and how many test images have each; None if no run is finished."""

    names: tuple[str, ...]
    test_images: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class OfComparison(Sparse):
    """What is kept of a comparison.

    Args:
        test_cases: Number of test cases; None if no run is finished.
        classes: The classes that count.
        hausdorff_unit: Unit of distances, ``mm`` or ``px``.
    """

    test_cases: int | None = None
    classes: Classes
    hausdorff_unit: str | None = None


@dataclass(frozen=True, kw_only=True)
class LegendEntry:
    """A class of masks and its colour, ``#rrggbb``."""

    name: str
    colour: str


@dataclass(frozen=True, kw_only=True)
class GallerySlice:
    """A test image with its true mask, both PNG data URIs; ``area`` counts true pixels."""

    id: str
    case: str
    png: str
    truth: str
    area: int


@dataclass(frozen=True, kw_only=True)
class PredictedMask:
    """A predicted mask, a PNG data URI, its Jaccard index on the image, and its pixels."""

    png: str
    jaccard: float
    found: int


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """What the trained models find on the same few test images.

    Args:
        seed: Whose weights they are.
        size: Height and width in pixels.
        legend: The classes.
        ignored: Whether there are pixels that count nowhere.
        slices: The images.
        predictions: Masks on each of them, by mixer's label.
        missing: Why there are none, by label.
        names: Names of all test images, in order.
    """

    seed: int
    size: tuple[int, int]
    legend: tuple[LegendEntry, ...]
    ignored: bool
    slices: tuple[GallerySlice, ...]
    predictions: Mapping[str, tuple[PredictedMask, ...]]
    missing: Mapping[str, str]
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OfPictures(Sparse):
    """What is kept of the models' answers in pictures."""

    gallery: Gallery | None = None

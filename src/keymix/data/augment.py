# SPDX-License-Identifier: Apache-2.0
"""What may happen to a training image: a plain, checked record.

`keymix.data.loaders` does it to sets in memory, `keymix.data.transforms` to those read one by one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from keymix.data.bounds import check_numbers
from keymix.data.kinds import (
    CLASS,
    IMAGE,
    KINDS,
    MASK,
    RECORDING,
    TARGETS,
    InputKind,
    TargetKind,
)
from keymix.errors import UserError, unknown

_TIMM = re.compile(r"rand(-(m|n|mmax)\d+|-(p|mstd)\d*\.?\d+|-mstdinf|-inc[01]|-t(weights|3aw?))*")
FILLS = ("mean", "noise")
_OF_IMAGES: tuple[str, ...] = (
    "crop_padding",
    "rand_augment",
    "rand_augment_first",
    "auto_augment",
    "erasing",
)
"""What changes images whose targets have no place in them, besides ``flip``."""
_OFF = {"False": "false", "None": "none", "''": "''", "(0, 0)": "0,0"}
"""How the value that does nothing is typed, where that is not 0."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Augmentation of training images, in this order: crop, flip, RandAugment (or timm's), erasing.

    Mixup, cutmix and label smoothing mix labels too, so they belong to training, not here.

    Args:
        crop_padding: Zero pixels added on every side before a random crop of the image's size; 0 is
            no crop. For sets small enough for memory.
        random_resized_crop: Smallest and largest share of the image's area that a random crop keeps
            before it is resized. For larger sets, in place of ``crop_padding``.
        flip: Mirror left and right; with probability 0.5.
        rand_augment: RandAugment's operations and magnitude; operations per image, magnitude 0..30
            (https://arxiv.org/abs/1909.13719), ``(0, 0)`` is off.
        rand_augment_first: RandAugment before crop and flip, as the small-data papers' code has it.
            For sets small enough for memory: larger images are cropped to one size first.
        auto_augment: timm's RandAugment in timm's words, e.g. ``rand-m9-mstd0.5-inc1``, in place of
            ``rand_augment``: what ImageNet recipes mean by that name. For sets read one by one.
        erasing: Probability that a rectangle (2 to 33 % of the area) is erased
            (https://arxiv.org/abs/1708.04896).
        snn_wide: One of shear, translation, rotation and cutout, alike for all frames of a
            recording (`keymix.data.frame_augment`). For frames of events, which take ``flip``
            as well and nothing else of these.
        vertical_flip: Mirror upside down with probability 0.5. Like the next three, for images with
            masks, which take ``flip`` as well and nothing else of these
            (`keymix.data.mask_augment`).
        shift_scale_rotate: Shift, scale and rotate with probability 0.5.
        coarse_dropout: Blank rectangles of the image, not of the mask, with probability 0.5.
        brightness_contrast: Change brightness and contrast with probability 0.5.
        multi_scale: Least and largest short side that an image is resized to, pixels; one of
            eleven sizes from the one to the other. The long side of ``data.image_size`` still
            holds. For images with instances, which take ``flip`` as well and nothing else of these.
        erasing_fill: What an erased rectangle shows: ``mean`` colour, or ``noise``, N(0, 1) for
            every normalised pixel (timm's "pixel").

    Raises:
        UserError: If a value is outside its range.
    """

    crop_padding: int = 0
    random_resized_crop: tuple[float, float] = (0.08, 1.0)
    flip: bool = False
    rand_augment: tuple[int, int] = (0, 0)
    rand_augment_first: bool = False
    auto_augment: str = ""
    erasing: float = 0.0
    erasing_fill: str = "mean"
    snn_wide: bool = False
    vertical_flip: bool = False
    shift_scale_rotate: bool = False
    coarse_dropout: bool = False
    brightness_contrast: bool = False
    multi_scale: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for field in ("flip", "rand_augment_first", *RECORDING.augment, *MASK.augment):
            if not isinstance(getattr(self, field), bool):
                raise _bad(field, getattr(self, field), "true or false")
        check_numbers(self, "augment.")
        area = self.random_resized_crop
        if area[0] > area[1]:
            wanted = "two shares of the area, the smallest first"
            raise _bad("random_resized_crop", area, wanted)
        if self.multi_scale is not None and self.multi_scale[0] > self.multi_scale[1]:
            raise _bad("multi_scale", self.multi_scale, "two short sides, the smallest first")
        if self.auto_augment and not _TIMM.fullmatch(self.auto_augment):
            raise _bad("auto_augment", self.auto_augment, "timm's form rand-m9-mstd0.5-inc1")
        if self.auto_augment and self.rand_augment[0]:
            wanted = "given together with rand_augment; set one of them"
            raise UserError(f"augment.auto_augment={self.auto_augment!r} is {wanted}.")
        if self.erasing_fill not in FILLS:
            raise unknown("augment.erasing_fill", str(self.erasing_fill), FILLS)


def check_augment(
    augment: Augment,
    kind: InputKind = IMAGE,
    target: TargetKind = CLASS,
    *,
    moves: bool = True,
    whole: bool = False,
) -> None:
    """Refuse augmentation that does not fit the inputs, or would not move targets along."""
    holds, of, recipe = kind.shown, _OF_IMAGES, kind.recipe
    if kind.augment:
        of = kind.augment
    elif target.placed:
        holds, of, recipe = f"images with {target.nouns}", target.augment, target.recipe
    elif whole:
        holds, of = "images of several sizes", ()
    takes = ("flip", *of) if moves or not target.placed else of
    kinds: tuple[InputKind | TargetKind, ...] = (*KINDS.values(), *TARGETS.values())
    every = {*_OF_IMAGES, "flip"}.union(*(each.augment for each in kinds))
    for field in fields(augment):
        value = getattr(augment, field.name)
        if value == field.default or field.name in takes or field.name not in every:
            continue
        listed = ", ".join(f"augment.{name}" for name in takes) or "none of these"
        off = _OFF.get(repr(field.default), "0")
        raise UserError(
            f"augment.{field.name}={value!r} does not fit {holds}, which take {listed}. Set it to "
            f"{off}, or take a recipe for {holds}{recipe and f', such as {recipe}'}."
        )


def _bad(field: str, value: object, wanted: str) -> UserError:
    return UserError(f"augment.{field} = {value!r}: must be {wanted}.")

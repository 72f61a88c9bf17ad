# SPDX-License-Identifier: Apache-2.0
"""What may happen to a training image: a plain, checked record.

`keymix.data.held` does it to sets held in memory, `keymix.data.lazy` to those read one by one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from keymix.data.bounds import check_numbers
from keymix.errors import UserError, unknown

_TIMM = re.compile(r"rand(-(m|n|mmax)\d+|-(p|mstd)\d*\.?\d+|-mstdinf|-inc[01]|-t(weights|3aw?))*")
FILLS = ("mean", "noise")
_OFF = {  # as they are typed
    "crop_padding": "0",
    "rand_augment_first": "false",
    "auto_augment": "''",
    "erasing": "0",
    "rand_augment": "0,0",
}
"""Augmentations of images alone, and the value of each that does nothing."""
_OF_MASKS = ("vertical_flip", "shift_scale_rotate", "coarse_dropout", "brightness_contrast")
"""Augmentations of images with masks, which take ``flip`` besides."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Augmentation of training images, in this order: crop, flip, RandAugment (or timm's), erasing.

    Mixup, cutmix and label smoothing mix labels too, so they belong to training, not here.

    Args:
        crop_padding: Zero pixels added on every side before a random crop of the image's size; 0 is
            no crop. For sets small enough to be held in memory.
        random_resized_crop: Smallest and largest share of the image's area that a random crop keeps
            before it is resized. For larger sets, in place of ``crop_padding``.
        flip: Mirror left and right with probability 0.5.
        rand_augment: Operations an image and their magnitude 0..30 (RandAugment,
            https://arxiv.org/abs/1909.13719); ``(0, 0)`` is off.
        rand_augment_first: RandAugment before crop and flip, as the small-data papers' code has it.
            For sets small enough to be held in memory: larger images are cropped to one size first.
        auto_augment: timm's RandAugment in timm's words, e.g. ``rand-m9-mstd0.5-inc1``, in place of
            ``rand_augment``: what ImageNet recipes mean by that name. For sets read one by one.
        erasing: Probability that a rectangle (2 to 33 % of the area) is erased
            (https://arxiv.org/abs/1708.04896).
        snn_wide: One of shear, translation, rotation and cutout, alike for all frames of a
            recording (`keymix.data.events.wide`). For frames of events, which take ``flip`` besides
            and nothing else of these.
        vertical_flip: Mirror upside down with probability 0.5. Like the next three, for images with
            masks, which take ``flip`` besides and nothing else of these
            (`keymix.data.segmentation.augment`).
        shift_scale_rotate: Shift, scale and rotate with probability 0.5.
        coarse_dropout: Blank rectangles of the image, not of the mask, with probability 0.5.
        brightness_contrast: Change brightness and contrast with probability 0.5.
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

    def __post_init__(self) -> None:
        for field in ("flip", "rand_augment_first", "snn_wide", *_OF_MASKS):
            if not isinstance(getattr(self, field), bool):
                raise _bad(field, getattr(self, field), "true or false")
        check_numbers(self, "augment.")
        area = self.random_resized_crop
        if area[0] > area[1]:
            wanted = "two shares of the area, the smallest first"
            raise _bad("random_resized_crop", area, wanted)
        if self.auto_augment and not _TIMM.fullmatch(self.auto_augment):
            raise _bad("auto_augment", self.auto_augment, "timm's form rand-m9-mstd0.5-inc1")
        if self.auto_augment and self.rand_augment[0]:
            wanted = "given together with rand_augment; set one of them"
            raise UserError(f"augment.auto_augment={self.auto_augment!r} is {wanted}.")
        if self.erasing_fill not in FILLS:
            raise unknown("augment.erasing_fill", str(self.erasing_fill), FILLS)


def check_augment(augment: Augment, *, events: bool = False, masks: bool = False) -> None:
    """Refuse the augmentation of images for frames of events or masks, and the other way round.

    Args:
        augment: What may happen to a training image or recording.
        events: Whether the data are recordings of events.
        masks: Whether the images have masks.

    Raises:
        UserError: Naming the field.
    """
    if augment.snn_wide and not events:
        raise UserError(
            "augment.snn_wide=True is for frames of events, and this data has images. Set it "
            "to false, or take a recipe for images, such as digits_vit or small_images_vit."
        )
    for name in _OF_MASKS:
        if getattr(augment, name) and not masks:
            raise UserError(
                f"augment.{name}=True is for images with masks, and this data has none. Set it to "
                "false, or take data for segmentation, such as masks:PATH."
            )
    if not (events or masks):
        return
    has, instead = _INSTEAD["events" if events else "masks"]
    for name, off in _OFF.items():
        value = getattr(augment, name)
        if not (value[0] if name == "rand_augment" else value):
            continue
        raise UserError(
            f"augment.{name}={value!r} changes images, and this data has {has}. Set it to {off}, "
            f"or take {instead}."
        )


_INSTEAD = {
    "events": (
        "frames of events",
        "a recipe for events, such as moving_digits_qkformer; augment.flip and augment.snn_wide "
        "are for frames",
    ),
    "masks": (
        "masks, which it would not move along",
        "a recipe for segmentation, such as small_masks_setr; augment.flip, "
        f"{', '.join(f'augment.{name}' for name in _OF_MASKS)} are for images with masks",
    ),
}


def _bad(field: str, value: object, wanted: str) -> UserError:
    return UserError(f"augment.{field} = {value!r}: must be {wanted}.")

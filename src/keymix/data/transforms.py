# SPDX-License-Identifier: Apache-2.0
"""Samples and batches for training: what moves an image moves its target.

A sample is a function of (seed, epoch, position), whatever was read before and by which worker.
Sets in memory whose targets have no place in the image are augmented as batches instead
(`keymix.data.loaders`), to the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from keymix.data.augment import Augment, check_augment
from keymix.data.dataset import Split
from keymix.data.decode import by_pillow, resize, resized_image
from keymix.data.frame_augment import augmented_frames
from keymix.data.kinds import MASK
from keymix.data.mask_augment import augmented
from keymix.data.rand_augment import AutoAugment, RandAugment, plans
from keymix.data.random_parameters import flips, resized_crop, short_side
from keymix.data.view import moved, moves, resized
from keymix.errors import UserError

CPU = torch.device("cpu")


def check_split(augment: Augment, split: Split) -> None:
    """Refuse augmentation that the images of a split do not take, or their targets."""
    placed = split.target_kind.placed
    movable = not placed or moves(split.rows[0].read_target())
    check_augment(augment, split.kind, split.target_kind, moves=movable, whole=split.listed)
    view = split.view
    if augment.multi_scale is not None:
        why = (
            f"no side may be longer than {view.size[1]} pixels (data.image_size). Make the short "
            "sides smaller, or set it to none."
        )
        if view.mode != "fit":
            why = (
                "it is for images that are resized with their proportions (Task.fits), and these "
                "are not. Set it to none."
            )
        if view.mode != "fit" or augment.multi_scale[1] > view.size[1]:
            raise UserError(f"augment.multi_scale={augment.multi_scale!r}: {why}")
    if view.mode != "crop":
        return
    height, width = view.size
    for name in ("rand_augment", "auto_augment"):
        asked = getattr(augment, name)
        if asked not in ("", (0, 0)) and split.read(0).is_floating_point():
            raise UserError(
                f"augment.{name}={asked!r} changes images of 8 bits, and these are float32. Leave "
                "it out."
            )
    if augment.auto_augment and split.images is not None:
        raise UserError(
            f"augment.auto_augment={augment.auto_augment!r} changes images one by one, and at "
            f"{height}x{width} pixels (data.image_size) this set is kept in memory. Use "
            "augment.rand_augment, operations and magnitude such as 2,9."
        )
    if split.images is None and augment.rand_augment[0] and augment.rand_augment_first:
        raise UserError(
            "augment.rand_augment_first=True needs images that are in memory (128 pixels a side or "
            "less); this set is read one by one and cropped first. Leave it out."
        )
    if augment.auto_augment:
        _auto_augment(augment.auto_augment, view.channels, height, width)


def sample(
    split: Split, i: int, augment: Augment | None, *, seed: int, epoch: int
) -> tuple[Tensor, Any]:
    """Read image ``i`` and its target, augmented as an epoch wants it; shown as they are for None.

    Shape: -> ``[C, H, W]`` of 0..255, or frames ``[T, C, H, W]``, and the target; None in place of
    targets that `Split.values` has.
    """
    if augment is None:
        return split.read(i), split.target(i) if split.values is None else None
    index = np.array([i], dtype=np.int64)
    if split.view.mode == "crop":
        return _cropped(split, i, augment, seed=seed, epoch=epoch), None
    if split.view.mode == "frames":
        frames = augmented_frames(
            split.read(i)[None],
            index,
            flip=augment.flip,
            wide=augment.snn_wide,
            seed=seed,
            epoch=epoch,
        )
        return frames[0], None
    image, target = _at_size(split, i, augment, seed=seed, epoch=epoch)
    if isinstance(target, tv_tensors.Mask):
        return augmented(image, target, i, augment, fill=split.outside, seed=seed, epoch=epoch)
    if augment.flip and flips(index, seed=seed, epoch=epoch)[0]:
        image, target = image.flip(-1), moved(target, F.horizontal_flip)
    return image, target if split.values is None else None


def _at_size(
    split: Split, i: int, augment: Augment, *, seed: int, epoch: int
) -> tuple[Tensor, Any]:
    """Read an image and its target at the size that they have in an epoch."""
    if augment.multi_scale is None:
        return split.read(i), split.target(i)
    short = short_side(i, *augment.multi_scale, seed=seed, epoch=epoch)
    own = split.own(i)
    before = own.shape[-2], own.shape[-1]
    after = split.view.within((short, split.view.size[1])).size_of(before)
    return resized_image(own, after), resized(split.rows[i].read_target(), before, after)


def _cropped(split: Split, i: int, augment: Augment, *, seed: int, epoch: int) -> Tensor:
    """Cut a box out of an image, resize it, and change it."""
    own, size = split.own(i), split.view.size
    top, left, h, w = resized_crop(
        i,
        own.shape[-2],
        own.shape[-1],
        augment.random_resized_crop,
        shape=size[1] / size[0],
        seed=seed,
        epoch=epoch,
    )
    box = (left, top, left + w, top + h)
    image = by_pillow(own, lambda image: resize(image, size, box))
    index = np.array([i], dtype=np.int64)
    if augment.flip and flips(index, seed=seed, epoch=epoch)[0]:
        image = image.flip(-1)
    if augment.auto_augment:
        change = _auto_augment(augment.auto_augment, *image.shape)
        image = torch.from_numpy(change(image[None].numpy(), index, seed=seed, epoch=epoch))[0]
    count, bin_ = augment.rand_augment
    if count:
        (plan,) = plans(index, count, 1, seed=seed, epoch=epoch, device=CPU)
        image = _rand_augment(bin_, *size)(image[None], plan)[0]
    return image


@functools.lru_cache(maxsize=4)
def _rand_augment(bin_: int, height: int, width: int) -> RandAugment:
    """Make the operations once a process."""
    return RandAugment(bin_, height, width, CPU)


@functools.lru_cache(maxsize=4)
def _auto_augment(config: str, channels: int, height: int, width: int) -> AutoAugment:
    """Make timm's operations once a process."""
    return AutoAugment(config, channels, height, width)


def collate(samples: Sequence[tuple[Tensor, Any]], split: Split) -> tuple[Any, Any]:
    """Make a batch of samples: images and targets, or no targets where they are by position.

    Masks of one size are a tensor, other targets with a place in their image a list.
    """
    images = [image.as_subclass(Tensor) for image, _ in samples]
    pixels: Any = images
    if not split.listed:
        pixels = torch.stack(images)
        if pixels.ndim == 4:  # which convolutions prefer
            pixels = pixels.contiguous(memory_format=torch.channels_last)
    if samples[0][1] is None:
        return pixels, None
    targets = [_plain(target) for _, target in samples]
    stacked = split.target_kind is MASK and not split.listed
    return pixels, torch.stack(targets) if stacked else targets


def _plain(target: Any) -> Any:
    """Take tv_tensors as plain tensors."""
    if isinstance(target, dict):
        return {name: _plain(each) for name, each in target.items()}
    return target.as_subclass(Tensor)


def each_tensor(change: Callable[[Tensor], Tensor], found: Any) -> Any:
    """Change every tensor of a target or of a batch of them."""
    if isinstance(found, list):
        return [each_tensor(change, one) for one in found]
    if isinstance(found, dict):
        return {name: change(each) for name, each in found.items()}
    return change(found)

# SPDX-License-Identifier: Apache-2.0
"""Samples and batches for training: what moves an image moves its target.

A sample is a function of (seed, epoch, position), whatever was read before and by which worker.
Sets in memory whose targets have no place in the image are augmented as batches instead
(`keymix.data.loaders`), to the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
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
from keymix.data.mask_augment import augmented, window_corner
from keymix.data.rand_augment import AutoAugment, RandAugment, plans
from keymix.data.random_parameters import flips, resized_crop, short_side
from keymix.data.streams import IntArray
from keymix.data.view import cut, moved, moves, resized
from keymix.errors import UserError

CPU = torch.device("cpu")


def check_split(augment: Augment, split: Split) -> None:
    """Refuse augmentation that the images of a split do not take, or their targets."""
    placed = split.target_kind.placed
    movable = not placed or moves(split.rows[0].read_target())
    check_augment(augment, split.kind, split.target_kind, moves=movable, whole=split.listed)
    view = split.view
    if (scales := augment.multi_scale) is not None and scales[1] > view.size[1]:
        raise UserError(
            f"augment.multi_scale={scales!r}: no side may be longer than {view.size[1]} pixels "
            "(data.image_size). Make the short sides smaller, or set it to none."
        )
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


def batch(
    split: Split, index: IntArray, augment: Augment | None, *, seed: int, epoch: int
) -> tuple[Any, Any]:
    """Read images and their targets, augmented as an epoch wants it; shown as they are for None.

    Each is a function of (seed, epoch, position) alone. Masks of one size are a tensor, other
    targets with a place in their image a list.

    Shape: ``[n]`` -> ``[n, C, H, W]`` of 0..255, frames ``[n, T, C, H, W]``, or a list of images;
    and the targets, None in place of those that `Split.values` has.
    """
    positions = index.tolist()
    if split.values is None:
        pairs = [_pair(split, i, augment, seed=seed, epoch=epoch) for i in positions]
        images = [image.as_subclass(Tensor).contiguous() for image, _ in pairs]
        targets: Any = [_plain(target) for _, target in pairs]
        listed = split.listed and (augment is None or split.view.mode != "window")
        if split.target_kind is MASK and not listed:
            targets = torch.stack(targets)
        return (images if listed else channels_last(torch.stack(images))), targets
    if augment is not None and split.view.mode == "crop":
        return _cropped(split, index, augment, seed=seed, epoch=epoch), None
    shown = [split.read(i) for i in positions]
    if split.view.mode == "frames":
        frames = torch.stack(shown)
        if augment is not None:
            flip, wide = augment.flip, augment.snn_wide
            frames = augmented_frames(frames, index, flip=flip, wide=wide, seed=seed, epoch=epoch)
        return frames, None
    if augment is not None and augment.flip:  # images of which all is seen, of no fixed place
        turned = flips(index, seed=seed, epoch=epoch).tolist()
        shown = [
            image.flip(-1) if turn else image for image, turn in zip(shown, turned, strict=True)
        ]
    if split.listed:
        return [image.contiguous() for image in shown], None
    return channels_last(torch.stack(shown)), None


def channels_last(images: Tensor) -> Tensor:
    """Arrange a batch ``[B, C, H, W]`` with its channels last, which convolutions prefer."""
    return images.contiguous(memory_format=torch.channels_last)


def _pair(
    split: Split, i: int, augment: Augment | None, *, seed: int, epoch: int
) -> tuple[Tensor, Any]:
    """Read an image and its target, and move them together."""
    if split.view.mode == "window":
        image, target = split.own(i), split.rows[i].read_target()
        if augment is not None:
            size, fill = split.view.size, split.outside
            corner = window_corner(i, target, size, fill, seed=seed, epoch=epoch)
            image, target = cut(image, corner, size), cut(target, corner, size, fill)
            target = tv_tensors.Mask(target)
    elif augment is None:
        image, target = split.read(i), split.target(i)
    else:
        image, target = _at_size(split, i, augment, seed=seed, epoch=epoch)
    if augment is None:
        return image, target
    if isinstance(target, tv_tensors.Mask):
        return augmented(image, target, i, augment, fill=split.outside, seed=seed, epoch=epoch)
    index = np.array([i], dtype=np.int64)
    if augment.flip and flips(index, seed=seed, epoch=epoch)[0]:
        image, target = image.flip(-1), moved(target, F.horizontal_flip)
    return image, target


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


def _cropped(split: Split, index: IntArray, augment: Augment, *, seed: int, epoch: int) -> Tensor:
    """Cut a box out of each image, resize it, and change the batch."""
    size = split.view.size
    cut = []
    for i in index.tolist():
        own = split.own(i)
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
        cut.append(by_pillow(own, partial(resize, size=size, box=box)))
    images = torch.stack(cut).contiguous()
    if augment.flip:
        turned = torch.from_numpy(flips(index, seed=seed, epoch=epoch))
        images[turned] = images[turned].flip(-1)
    if augment.auto_augment:
        change = _auto_augment(augment.auto_augment, *images.shape[1:])
        images = torch.from_numpy(change(images.numpy(), index, seed=seed, epoch=epoch))
    count, bin_ = augment.rand_augment
    if count:
        (plan,) = plans(index, count, len(index), seed=seed, epoch=epoch, device=CPU)
        images = _rand_augment(bin_, *size)(images, plan)
    return channels_last(images)


@functools.lru_cache(maxsize=4)
def _rand_augment(bin_: int, height: int, width: int) -> RandAugment:
    """Make the operations once a process."""
    return RandAugment(bin_, height, width, CPU)


@functools.lru_cache(maxsize=4)
def _auto_augment(config: str, channels: int, height: int, width: int) -> AutoAugment:
    """Make timm's operations once a process."""
    return AutoAugment(config, channels, height, width)


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

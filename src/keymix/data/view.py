# SPDX-License-Identifier: Apache-2.0
"""How a model sees an image: its channels, its size, and what of it is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as TF

from keymix.data.decode import fit, fitted_size, in_channels, resized_image
from keymix.data.instances import Instances
from keymix.data.sample import Size

if TYPE_CHECKING:
    from keymix.data.record import DataRecord

Mode: TypeAlias = Literal["crop", "stretch", "fit", "own", "window", "frames"]


@dataclass(frozen=True, kw_only=True)
class View:
    """How a model sees an image.

    Args:
        mode: ``crop`` resizes with proportions and crops the centre, ``stretch`` resizes without
            proportions, ``fit`` with proportions within a short and a long side, ``own`` keeps the
            image's own size; ``window`` cuts at the image's own size, the centre where one of the
            size is wanted; ``frames`` are counts of events, which stay as they are.
        size: Height and width; the largest of each where images keep their own.
        channels: Channels.
        crop_pct: Share of the resized image's side that the crop keeps.
        white_level: The 16-bit grey value that becomes white; None for 65,535.
    """

    mode: Mode
    size: Size
    channels: int
    crop_pct: float = 1.0
    white_level: int | None = None

    def values(self, pixels: Tensor) -> Tensor:
        """Bring an image as it was read to 0..255 and to the channels of the data."""
        if self.mode == "frames":
            return pixels
        return in_channels(pixels, self.channels, self.white_level)

    def size_of(self, own: Size) -> Size:
        """Return height and width of an image, by those that it has itself."""
        if self.mode == "own":
            return own
        return fitted_size(own, self.size) if self.mode == "fit" else self.size

    def shown(self, pixels: Tensor) -> Tensor:
        """Resize and crop an image as evaluation does; its values stay.

        Shape: ``[C, h, w]`` -> ``[C, H, W]``.
        """
        if self.mode == "crop":
            return fit(pixels, self.size, self.crop_pct)
        if self.mode == "frames":
            return pixels
        if self.mode == "window":
            return self.centre(pixels)
        return resized_image(pixels, self.size_of((pixels.shape[-2], pixels.shape[-1])))

    def centre(self, each: Tensor, fill: int = 0) -> Tensor:
        """Cut out the centre of an image or a mask; `fill` is what lies around it."""
        height, width = each.shape[-2:]
        corner = (height - self.size[0]) // 2, (width - self.size[1]) // 2
        return cut(each, corner, self.size, fill)

    def within(self, size: Size) -> View:
        """Return the same view at another size."""
        return replace(self, size=size)


def view_of(record: DataRecord, size: Size) -> View:
    """Return how the data of a record are seen, at a size."""
    task = record.task_kind
    mode: Mode = "crop"
    if record.events:
        mode = "frames"
    elif task.fits:
        mode = "fit"
    elif task.whole_images:
        mode = "own"
    elif record.window_overlap is not None:
        mode = "window"
    elif record.multilabel is not None:
        mode = "stretch"
    return View(
        mode=mode,
        size=size,
        channels=record.in_chans,
        crop_pct=record.crop_pct,
        white_level=record.white_level,
    )


def cut(each: Tensor, corner: tuple[int, int], size: Size, fill: int = 0) -> Tensor:
    """Cut a box of a size out of an image or a mask, perhaps reaching over its edges.

    Shape: ``[*, h, w]`` -> ``[*, H, W]``.
    """
    height, width = each.shape[-2:]
    (top, left), bottom, right = corner, corner[0] + size[0], corner[1] + size[1]
    inside = each[..., max(top, 0) : bottom, max(left, 0) : right]
    over = [max(-left, 0), max(right - width, 0), max(-top, 0), max(bottom - height, 0)]
    return F.pad(inside, over, value=fill) if any(over) else inside


def moves(target: Any) -> bool:
    """Return whether a target can be moved with its image."""
    parts = target.values() if isinstance(target, dict) else (target,)
    return isinstance(target, Instances) or any(
        isinstance(each, tv_tensors.TVTensor) for each in parts
    )


def moved(target: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Move a target with its image; of a mapping, the tv_tensors in it."""
    if isinstance(target, dict):
        return {name: moved(each, change) for name, each in target.items()}
    return change(target) if isinstance(target, tv_tensors.TVTensor) else target


def resized(target: Any, before: Size, after: Size) -> Any:
    """Resize a target with its image; masks take the nearest pixel."""
    if isinstance(target, Instances):
        return target.at(after)

    def change(each: Tensor) -> Tensor:
        if isinstance(each, tv_tensors.Mask):
            return resized_mask(each, after)
        grown: Tensor = TF.resize(each, [*after])
        return grown

    return target if before == after else moved(target, change)


def resized_mask(mask: Tensor, size: Size) -> Tensor:
    """Resize a mask (nearest) to height and width.

    Shape: uint8 ``[h, w]`` or ``[K, h, w]`` -> the same at ``size``.
    """
    if mask.shape[-2:] == size:
        return mask
    planes = mask.as_subclass(Tensor)
    planes = planes[None] if mask.ndim == 2 else planes
    planes = F.interpolate(planes[None].float(), size, mode="nearest-exact")[0].to(torch.uint8)
    small: Tensor = tv_tensors.Mask(planes[0] if mask.ndim == 2 else planes)
    return small

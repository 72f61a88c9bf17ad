# SPDX-License-Identifier: Apache-2.0
"""Inputs of every kind outside training: files and images in memory as a run's model reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from keymix.data.decode import SIXTEEN_BIT, Pixels, in_channels, open_image, pixels_of, reading
from keymix.data.events.recordings import is_recording, read_frames
from keymix.data.files import is_image
from keymix.data.kinds import RECORDING
from keymix.data.sample import Size
from keymix.data.slices import id_and_spacing, read_stack, scaled
from keymix.data.view import view_of
from keymix.data.volumes import is_volume
from keymix.errors import UserError

if TYPE_CHECKING:
    from keymix.data.record import DataRecord

Picture: TypeAlias = str | Path | Image.Image | NDArray[Any] | Tensor
"""A file, or an image in memory."""
PICTURES = (str, Path, Image.Image, np.ndarray, Tensor)


def read_file(path: Path, record: DataRecord, size: Size) -> Tensor:
    """Read a file as the data of a record reads its own.

    Shape: -> uint8 ``[C, H, W]``, or counts ``[T, C, H, W]`` of recordings.
    """
    if record.kind is RECORDING:
        return read_frames(path, record, size)
    return fitted(file_pixels(path, record), record, size)


def file_pixels(path: Path, record: DataRecord) -> Pixels:
    """Decode an image file at its own size, as the data of a record does: uint8 ``[C, h, w]``."""
    if is_volume(path) and (of_scans(record) or not is_image(path.name)):
        raise UserError(
            f"{path} is a volume: `keymix predict` and keymix.predict_masks take it for a run on "
            "slices whose masks have one class per pixel; in memory, give its slices as arrays."
        )
    if path.suffix.lower() == ".dcm":
        raise UserError(f"{path} is a slice of a DICOM series: give the folder of the series.")
    if of_scans(record):
        return read_stack(path, record.in_chans, record.intensity_window)
    return picture_pixels(path, record.in_chans, record.white_level)


def picture_pixels(picture: Picture, channels: int, white_level: int | None = None) -> Pixels:
    """Decode a picture, a file or one in memory, at its own size: uint8 ``[C, h, w]``."""
    if not isinstance(picture, str | Path):
        return memory_pixels(picture, channels, white_level)
    with reading(str(picture)), open_image(picture) as image:
        return in_channels(pixels_of(image), channels, white_level).numpy()


def named(path: Path, record: DataRecord) -> tuple[str, tuple[float, float] | None]:
    """Name a file as the data of a record would, with the millimetres between its pixels."""
    return id_and_spacing(path) if of_scans(record) else (path.stem, None)


def memory_pixels(
    image: Image.Image | NDArray[Any] | Tensor,
    channels: int,
    white_level: int | None = None,
    *,
    scans: bool = False,
    window: tuple[float, float] | None = None,
) -> Pixels:
    """Take an image in memory as `picture_pixels` takes a file of the same pixels.

    Scans may have any values, and are scaled from those of a window, or their own.

    Shape: bytes ``[h, w]``, ``[h, w, C]`` or ``[C, h, w]``, or values 0..1 -> uint8 ``[C, h, w]``.
    """
    wanted = _wanted(channels, scans=scans)
    if isinstance(image, Tensor):
        image = (image.permute(1, 2, 0) if image.ndim == 3 else image).cpu().numpy()
    if isinstance(image, Image.Image):
        if not scans and channels in (1, 3):
            with reading("in memory", "Give another."):
                return in_channels(pixels_of(image), channels, white_level).numpy()
        if image.mode not in ("L", *SIXTEEN_BIT):
            raise UserError(f"an image of mode {image.mode}: {wanted}")
        image = np.asarray(image)
    if not scans or image.dtype.kind not in "iuf":
        image = _bytes(image)
    if not np.isfinite(image).all():
        raise UserError(f"an array of shape {image.shape} has values that are not finite.")
    array = image[..., None] if image.ndim == 2 else image
    given = array.shape[-1] if array.ndim == 3 and array.size else 0
    if given == channels:
        planes = array.transpose(2, 0, 1)
        return np.stack([scaled(each, window) for each in planes]) if scans else planes
    if scans or channels not in (1, 3) or given not in (1, 2, 3, 4):
        raise UserError(f"an array of shape {image.shape}: {wanted}")
    image = Image.fromarray(array[..., 0] if given == 1 else array)
    return in_channels(pixels_of(image), channels).numpy()


def _bytes(array: NDArray[Any]) -> NDArray[Any]:
    """Bring pixels to bytes, and channels to the last axis."""
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[-1] not in (1, 2, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.dtype.kind == "f" and array.size and array.min() >= 0 and array.max() <= 1:
        array = (255 * array).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise UserError(
            f"an array of {array.dtype}: give pixels as uint8, 0 to 255, or values from 0 to 1."
        )
    return array


def fitted(pixels: Pixels, record: DataRecord, size: Size) -> Tensor:
    """Bring pixels to the size that a model sees, as the data of a record does its own.

    Shape: uint8 ``[C, h, w]`` -> the same at ``size``, with its proportions within it, or as it is
    where images keep their sizes; what the task says.
    """
    view, own = view_of(record, size), torch.from_numpy(pixels.copy())
    return own if view.mode == "window" else view.shown(own)


def of_scans(record: DataRecord) -> bool:
    """Whether images are slices, scaled from their least and largest value."""
    kind = record.spec.partition(":")[0]
    return record.multilabel is not None and kind in ("uwgi", "volumes")


def takes_volumes(record: DataRecord) -> bool:
    """Whether a model of slices answers whole volumes: those of one class for each voxel."""
    return of_scans(record) and not record.multilabel


def _wanted(channels: int, *, scans: bool) -> str:
    """Say which arrays images are."""
    if scans and channels > 1:
        return (
            f"the run was trained on stacks of {channels} slices: give an array "
            f"[h, w, {channels}], or a file next to its neighbours."
        )
    return "give an image as [h, w] (grey), [h, w, 3] (RGB) or [h, w, 4] (RGBA)."


def image_files(
    paths: Iterable[str | Path], *, events: bool = False, volumes: bool = False
) -> list[Path]:
    """The image files that paths mean: files as they are, folders searched with all below.

    Hidden files in folders are left out, as in training. ``events`` looks for recordings of events,
    ``volumes`` for volumes too.
    """
    fits, what = (is_recording, "recording") if events else (is_image, "image")
    found: list[Path] = []
    for given in paths:
        if not str(given):
            raise UserError(f"a path is empty: name {what}s or folders of them, '.' for this one.")
        path = Path(given)
        if path.is_dir():
            inside = sorted(
                p
                for p in (path, *path.rglob("*"))
                if (fits(p.name) and not p.is_dir()) or (volumes and is_volume(p))
            )
            if not inside and (events or not is_volume(path)):
                raise UserError(f"the folder {str(path)!r} holds no {what}s.")
            found += inside or [path]
        elif path.exists():
            found.append(path)
        else:
            raise UserError(f"there is no {what} or folder {str(path)!r}.")
    return found

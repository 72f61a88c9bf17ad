# SPDX-License-Identifier: Apache-2.0
"""Inputs of every kind outside training: files and images in memory as a run's model reads them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from keymix.data.decode import SIXTEEN_BIT, Pixels, in_channels, open_image, pixels_of, reading
from keymix.data.events.recordings import read_frames
from keymix.data.kinds import RECORDING
from keymix.data.sample import Size
from keymix.data.slices import id_and_spacing, read_stack, scaled
from keymix.data.specs import parse
from keymix.data.view import view_of
from keymix.errors import UserError

if TYPE_CHECKING:
    from keymix.data.record import DataRecord


def read_file(path: Path, record: DataRecord, size: Size) -> Tensor:
    """Read a file as the data of a record reads its own.

    Shape: -> uint8 ``[C, H, W]``, or counts ``[T, C, H, W]`` of recordings.
    """
    if record.kind is RECORDING:
        return read_frames(path, record, size)
    return fitted(file_pixels(path, record), record, size)


def file_pixels(path: Path, record: DataRecord) -> Pixels:
    """Decode an image file at its own size, as the data of a record does: uint8 ``[C, h, w]``."""
    if _of_scans(record):
        return read_stack(path, record.in_chans)
    with reading(str(path)), open_image(path) as image:
        return in_channels(pixels_of(image), record.in_chans, record.white_level).numpy()


def named(path: Path, record: DataRecord) -> tuple[str, tuple[float, float] | None]:
    """Name a file as the data of a record would, with the millimetres between its pixels."""
    return id_and_spacing(path) if _of_scans(record) else (path.stem, None)


def memory_pixels(image: Image.Image | NDArray[Any], record: DataRecord) -> Pixels:
    """Take an image in memory as `file_pixels` takes a file of the same pixels.

    Shape: ``[h, w]`` or ``[h, w, C]`` of 8 bits, of scans also of 16 -> uint8 ``[C, h, w]``.
    """
    scans, wanted = _of_scans(record), record.in_chans
    if isinstance(image, Image.Image):
        if not scans and wanted in (1, 3):
            with reading("in memory", "Give another."):
                return in_channels(pixels_of(image), wanted, record.white_level).numpy()
        if image.mode not in ("L", *SIXTEEN_BIT):
            raise UserError(f"an image of mode {image.mode}: {_wanted(record)}")
        image = np.asarray(image)
    if image.dtype != np.uint8 and not (scans and np.issubdtype(image.dtype, np.integer)):
        raise UserError(
            f"an array of {image.dtype}: give pixels as uint8, 0 to 255, such as "
            "(255 * x).round().astype('uint8') of values from 0 to 1."
        )
    array = image[..., None] if image.ndim == 2 else image
    channels = array.shape[-1] if array.ndim == 3 and array.size else 0
    if channels == wanted:
        planes = array.transpose(2, 0, 1)
        return np.stack([scaled(each) for each in planes]) if scans else planes
    if scans or wanted not in (1, 3) or channels not in (1, 2, 3, 4):
        raise UserError(f"an array of shape {image.shape}: {_wanted(record)}")
    image = Image.fromarray(array[..., 0] if channels == 1 else array)
    return in_channels(pixels_of(image), wanted).numpy()


def fitted(pixels: Pixels, record: DataRecord, size: Size) -> Tensor:
    """Bring pixels to the size that a model sees, as the data of a record does its own.

    Shape: uint8 ``[C, h, w]`` -> the same at ``size``, with its proportions within it, or as it is
    where images keep their sizes; what the task says.
    """
    return view_of(record, size).shown(torch.from_numpy(pixels.copy()))


def _of_scans(record: DataRecord) -> bool:
    """Whether images are slices, scaled from their least and largest value."""
    return record.multilabel is not None and parse(record.spec)[0].name == "uwgi"


def _wanted(record: DataRecord) -> str:
    """Say which arrays the images of a record are."""
    if _of_scans(record) and record.in_chans > 1:
        return (
            f"the run was trained on stacks of {record.in_chans} slices: give an array "
            f"[h, w, {record.in_chans}], or a file next to its neighbours."
        )
    return "give an image as [h, w] (grey), [h, w, 3] (RGB) or [h, w, 4] (RGBA)."

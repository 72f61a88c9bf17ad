# SPDX-License-Identifier: Apache-2.0
"""Inputs of every kind outside training: a file as a run's model reads it, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keymix.data.decode import read_image, resized_image
from keymix.data.events.files import read_frames
from keymix.data.kinds import RECORDING, SLICES, InputKind
from keymix.data.pixels import picture_of
from keymix.data.segmentation.slices import ScanFile
from keymix.data.specs import parse

if TYPE_CHECKING:
    from keymix.data.record import DataRecord


def read_file(path: Path, record: DataRecord, size: tuple[int, int]) -> Tensor:
    """Read a file as the data of a record reads its own.

    Shape: -> uint8 ``[C, H, W]``, or counts ``[T, C, H, W]`` of recordings.
    """
    if record.kind is RECORDING:
        return read_frames(path, record, size)
    if record.multilabel is None:
        return read_image(path, size, record.in_chans, crop_pct=record.crop_pct)
    slices = parse(record.spec)[0].name == "uwgi"
    return resized_image(
        ScanFile(path=path, slices=slices, channels=record.in_chans).pixels(), size
    )


def prepared(
    pixels: Tensor, kind: InputKind, *, mean: Sequence[float], std: Sequence[float]
) -> Tensor:
    """Turn what was read, ``[*, C, H, W]``, into what a model takes, float32.

    Recordings are the counts that they are; images are normalised.
    """
    if kind is RECORDING:
        return pixels.float()
    normalised: Tensor = (pixels.float() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(
        std
    )[:, None, None]
    return normalised


def picture(pixels: Tensor, kind: InputKind) -> Tensor:
    """Make of what was read what a person looks at, uint8 ``[C, H, W]``.

    Of frames, where it became darker and brighter; of a stack of slices, the middle one.
    """
    if kind is RECORDING:
        return picture_of(pixels)
    return pixels[len(pixels) // 2][None] if kind is SLICES else pixels

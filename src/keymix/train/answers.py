# SPDX-License-Identifier: Apache-2.0
"""Files as a run's model is shown them, and what it says of a batch: classes and probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from keymix.data.decode import read_image
from keymix.data.events.files import is_recording, read_frames
from keymix.data.record import DataRecord
from keymix.data.sources.folder import is_image
from keymix.errors import UserError
from keymix.train.model import device_of_this_machine
from keymix.train.scoring import autocast


def read(path: Path, seen: DataRecord, size: tuple[int, int]) -> Tensor | str:
    """Read an image, or a recording's frames; the error's text if it cannot be read.

    Args:
        path: The file.
        seen: The record of the data that the run was trained on.
        size: Height and width, pixels.
    """
    frames = seen.events
    if frames and is_image(path.name):
        return f"{path}: is an image; the run was trained on recordings of events (.npz, .aedat)."
    if not frames and is_recording(path.name):
        return f"{path}: is a recording of events; the run was trained on images."
    try:
        if frames:
            return read_frames(path, seen, size)
        return read_image(path, size, seen.in_chans, crop_pct=seen.crop_pct)
    except UserError as error:
        return str(error)


@torch.inference_mode()
def told(
    model: nn.Module, pixels: Tensor, seen: DataRecord, top: int, precision: str
) -> Iterator[tuple[tuple[str, ...], tuple[float, ...]]]:
    """Classify a batch: of each image the most likely classes and their probabilities.

    Args:
        model: The run's model.
        pixels: What `read` gave of each, stacked.
        seen: The record of the data that the run was trained on.
        top: How many classes to name.
        precision: The recipe's.
    """
    mean = torch.tensor(seen.mean).view(-1, 1, 1)
    std = torch.tensor(seen.std).view(-1, 1, 1)
    device = device_of_this_machine()
    frames = seen.events  # counts of events, as they are
    images = (pixels.float() if frames else (pixels.float() / 255 - mean) / std).to(device)
    with autocast(device, precision):
        logits = model(images)
    best = logits.float().softmax(1).topk(min(top, len(seen.classes)), dim=1)
    names = [tuple(seen.classes[i] for i in row) for row in best.indices.tolist()]
    return iter(list(zip(names, map(tuple, best.values.tolist()), strict=True)))

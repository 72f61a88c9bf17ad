# SPDX-License-Identifier: Apache-2.0
"""Files as a run's model is shown them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from keymix.data.decode import convert, open_image, read_image, reading, to_array
from keymix.data.events.files import is_recording, read_frames
from keymix.data.files import is_image
from keymix.data.record import DataRecord
from keymix.errors import UserError
from keymix.train.model import device_of_this_machine
from keymix.train.scoring import Inputs


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
        if seen.task_kind.whole_images:
            with reading(str(path)), open_image(path) as image:
                return torch.from_numpy(to_array(convert(image, seen.in_chans)).copy())
        return read_image(path, size, seen.in_chans, crop_pct=seen.crop_pct)
    except UserError as error:
        return str(error)


def inputs_of(read: Sequence[Tensor], seen: DataRecord) -> Inputs:
    """Make a batch of what `read` gave of some files: a list where images keep their own size."""
    device = device_of_this_machine()
    if seen.events:  # counts of events, as they are
        return torch.stack(list(read)).float().to(device)
    mean = torch.tensor(seen.mean).view(-1, 1, 1)
    std = torch.tensor(seen.std).view(-1, 1, 1)
    if seen.task_kind.whole_images:
        return [((pixels.float() / 255 - mean) / std).to(device) for pixels in read]
    return ((torch.stack(list(read)).float() / 255 - mean) / std).to(device)

# SPDX-License-Identifier: Apache-2.0
"""The run that teaches, and whether it can teach a student of some data."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keymix.errors import UserError
from keymix.train import files
from keymix.train.recipe import LossConfig
from keymix.train.runs import Run, load_run
from keymix.train.teacher import Teacher

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.data.record import DataRecord

_FEW = 3  # classes named in a message


def find_teacher(config: LossConfig) -> Run | None:
    """Open the folder of a recipe's teacher; None where nobody teaches.

    Raises:
        UserError: If there is no such folder, or it holds no weights.
    """
    if config.distill_teacher is None:
        return None
    try:
        run = load_run(config.distill_teacher)
        path = run.folder / files.weights_file("last")
        if not path.exists():
            raise UserError(f"it holds no {path.name}: finish that run first.")
    except UserError as error:
        raise _refusal(config, str(error)) from None
    return run


def make_teacher(config: LossConfig, data: ImageData, device: torch.device) -> Teacher | None:
    """Build a recipe's teacher for a student of some data; None where nobody teaches.

    Args:
        config: Which teacher, and the temperature.
        data: The student's images.
        device: Where they are.

    Raises:
        UserError: If its weights are unfit, or its classes, image size or channels are others.
    """
    run = find_teacher(config)
    if run is None:
        return None
    try:
        model, seen = run.model_and_data()
    except UserError as error:
        raise _refusal(config, str(error)) from None
    here = {
        "image_size": data.image_size,
        "in_chans": data.in_chans,
        "time_steps": data.time_steps,
    }
    words = {
        "image_size": "images of {0[0]}x{0[1]} pixels",
        "in_chans": "images of {0} channels",
        "time_steps": "{0} frames a recording",
    }
    for key, now in here.items():
        told = words[key]
        if (then := getattr(seen, key)) != now:
            what = f"it takes {told.format(then)}, and the data has {told.format(now)}"
            raise _refusal(config, f"{what}.")
    weights = run.folder / files.weights_file("last")
    return Teacher(
        model.to(device),
        config.distill_temperature,
        order=_order(config, list(seen.classes), list(data.classes), device),
        rescale=_rescale(seen, data, device),
        digest=hashlib.sha256(weights.read_bytes()).hexdigest(),
    )


def _order(
    config: LossConfig, theirs: list[str], ours: list[str], device: torch.device
) -> Tensor | None:
    """The teacher's class of each of the student's, by name."""
    for whose, lacking in (
        ("it lacks classes of the data", [name for name in ours if name not in theirs]),
        ("the data lacks classes of it", [name for name in theirs if name not in ours]),
    ):
        if lacking:
            more = " …" if len(lacking) > _FEW else ""
            raise _refusal(config, f"{whose}: {', '.join(lacking[:_FEW])}{more}.")
    if theirs == ours:
        return None
    return torch.tensor([theirs.index(name) for name in ours], device=device)


def _rescale(
    seen: DataRecord, data: ImageData, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """From (pixel - mean) / std of the student's to the teacher's: a factor and an offset."""
    theirs = list(seen.mean), list(seen.std)
    ours = list(data.mean), list(data.std)
    if theirs == ours:
        return None
    (their_mean, their_std), (our_mean, our_std) = (
        [torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in pair]
        for pair in (theirs, ours)
    )
    factor, offset = our_std / their_std, (our_mean - their_mean) / their_std
    return factor.float().to(device), offset.float().to(device)


def _refusal(config: LossConfig, why: str) -> UserError:
    return UserError(f"loss.distill_teacher = {config.distill_teacher!r} cannot teach: {why}")

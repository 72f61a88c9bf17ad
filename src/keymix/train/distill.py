# SPDX-License-Identifier: Apache-2.0
"""A teacher's answers as a term of the loss (Hinton et al. 2015)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.train import files
from keymix.train.recipe import LossConfig
from keymix.train.runs import Run, load_run

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData
    from keymix.data.record import DataRecord

_FEW = 3  # classes named in a message


class Teacher:
    r"""A trained model whose answers a student learns, in eval mode and without gradients.

    :math:`T^2 \, \mathrm{KL}(\mathrm{softmax}(v / T) \,\|\, \mathrm{softmax}(z / T))` of the
    teacher's logits v and the student's z, the mean over images: the soft targets of Hinton et al.
    2015 (https://arxiv.org/abs/1503.02531, Eq. 1) with the factor of their Sec. 2 that keeps the
    size of the gradients. Their cross entropy with soft targets differs from KL by the entropy of
    the targets, which the student cannot change.

    It is no module, so that a task that holds one neither trains, saves nor moves it.

    Args:
        model: The teacher, on the device of the images.
        temperature: T, above 0.
        order: The teacher's class of each of the student's ``[classes]``; None if they are alike.
        rescale: Factor and offset ``[C, 1, 1]`` that bring images normalised for the student to
            the teacher's normalisation; None if they are alike.
        digest: SHA-256 of the teacher's weights file; a resumed run compares.
    """

    def __init__(
        self,
        model: nn.Module,
        temperature: float,
        *,
        order: Tensor | None = None,
        rescale: tuple[Tensor, Tensor] | None = None,
        digest: str = "",
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self.temperature, self.digest = temperature, digest
        self._order, self._rescale = order, rescale

    @torch.no_grad()
    def answers(self, images: Tensor) -> Tensor:
        """Return logits ``[B, classes]`` of the student's images, in the order of its classes."""
        if self._rescale is not None:
            factor, offset = self._rescale
            images = images * factor + offset
        logits: Tensor = self._model(images)
        return logits if self._order is None else logits[:, self._order]

    def term(self, images: Tensor, logits: Tensor) -> Tensor:
        """Return the term for the student's logits ``[B, classes]`` on images ``[B, C, H, W]``."""
        soft = (self.answers(images).to(logits.dtype) / self.temperature).log_softmax(1)
        own = (logits / self.temperature).log_softmax(1)
        divergence = F.kl_div(own, soft, reduction="batchmean", log_target=True)
        return self.temperature**2 * divergence


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

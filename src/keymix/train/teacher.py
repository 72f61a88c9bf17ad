# SPDX-License-Identifier: Apache-2.0
"""A teacher's answers as a term of the loss (Hinton et al. 2015)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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

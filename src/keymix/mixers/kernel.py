# SPDX-License-Identifier: Apache-2.0
"""Attention whose map is a product of features, and so is never formed."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from keymix.mixers.base import Grid, Traits, take_rows
from keymix.mixers.head_mixer import HeadMixer, Roles


class KernelMixer(HeadMixer):
    r"""A mixer whose map is :math:`A = D^{-1} \varphi(Q)\, \psi(K)^\top`, D its rows' sums.

    :math:`A V = D^{-1} \varphi(Q) (\psi(K)^\top V)`: with F features a head it takes 2 N F d
    multiply-adds a head in place of 2 N^2 d. A subclass writes ``features(inputs)``. Without logits
    there is nothing that a host's bias or mask could be added to.
    """

    family = "kernels"
    traits = Traits(maskable=False, named_only=True)
    divides = True  # by the sums of rows; False where they are one

    def features(self, inputs: Roles) -> tuple[Tensor, Tensor]:
        """Return the features of queries ``[*, h, N, F]`` and of keys ``[*, h, M, F]``."""
        raise TypeError(f"{type(self).__name__} must define features(inputs)")

    def attend(self, inputs: Roles, grid: Grid | None) -> Float[Tensor, "*batch h N d"]:
        """Sum keys and values up first, then ask."""
        q, k = self.features(inputs)
        y = q @ (k.mT @ inputs["v"])
        return y / _not_zero(q @ k.sum(-2)[..., None]) if self.divides else y

    def form_map(
        self, inputs: Roles, grid: Grid | None, rows: Tensor | None = None
    ) -> Float[Tensor, "*batch h Q M"]:
        """Form the map all the same, for analysis."""
        q, k = self.features(inputs)
        made = take_rows(q, rows) @ k.mT
        return made / _not_zero(made.sum(-1, keepdim=True)) if self.divides else made


def _not_zero(total: Tensor) -> Tensor:
    """Sums of features that all were rounded to zero, kept from dividing by it."""
    return total.clamp(min=torch.finfo(total.dtype).tiny)

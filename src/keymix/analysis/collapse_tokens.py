# SPDX-License-Identifier: Apache-2.0
"""What becomes of the tokens along the blocks: their effective rank, and how they still change."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout


def block_of(model: nn.Module, path: str) -> str:
    """Return the path of the block in which a layer of attention sits.

    The nearest module above it that stands in a list or a sequence of modules; what holds the
    layer itself where there is none.
    """
    above = path.rpartition(".")[0]
    while above:
        holder = above.rpartition(".")[0]
        if isinstance(model.get_submodule(holder), (nn.ModuleList, nn.Sequential)):
            return above
        above = holder
    return path.rpartition(".")[0]


def tokens_of(output: Any, width: int, layout: Layout | None) -> Float[Tensor, "B N C"]:
    """Lay a block's output out as tokens, be it that or an image with channels first or last.

    Args:
        output: What the block returned; of several things the first.
        width: Channels of a token.
        layout: Where its tokens lie, if that is known.

    Raises:
        UserError: If it is neither.
    """
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if isinstance(output, Tensor) and output.ndim == 3 and output.shape[-1] == width:
        return output
    if isinstance(output, Tensor) and output.ndim == 4:
        first = output.shape[1] == width
        if first and output.shape[-1] == width:  # both axes could be the channels'
            first = layout is None or tuple(output.shape[2:]) == layout.grid
        if first:
            return output.flatten(2).mT
        if output.shape[-1] == width:
            return output.flatten(1, 2)
    raise UserError(f"a block's output of {shape} is no tokens of width {width}")


def effective_rank(tokens: Float[Tensor, "B N C"]) -> Float[Tensor, " B"]:
    r"""Compute the effective rank of each image's tokens, between 1 and min(N, C).

    :math:`\exp(-\sum_i p_i \ln p_i)` with :math:`p_i = \sigma_i / \sum_j \sigma_j`, the normalised
    singular values of the N x C matrix as it is (no mean taken off): O. Roy and M. Vetterli, The
    effective rank: a measure of effective dimensionality, EUSIPCO 2007, Definition 1. In float64,
    from the eigenvalues of the smaller Gram matrix; NaN where all tokens are zero.
    """
    matrix = tokens.double()
    matrix = matrix / matrix.abs().amax((-2, -1), keepdim=True)  # so that squares do not overflow
    gram = matrix @ matrix.mT if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT @ matrix
    finite = gram.isfinite().all(-1).all(-1)
    eigenvalues = torch.linalg.eigvalsh(gram.nan_to_num(0.0, 0.0, 0.0))
    rounding = eigenvalues[..., -1:] * gram.shape[-1] * torch.finfo(torch.float64).eps
    singular = torch.where(eigenvalues > rounding, eigenvalues, 0.0).sqrt()
    shares = singular / singular.sum(-1, keepdim=True)
    rank: Tensor = torch.special.entr(shares).sum(-1).exp()
    return rank.masked_fill(~finite, math.nan)


def token_cosines(
    tokens: Float[Tensor, "B N C"], last: Float[Tensor, "B N C"]
) -> Float[Tensor, "B N"]:
    """Compute the cosine of each token's features with those of the last block (Fig. 4, 8b).

    In float64; NaN where a token is zero.
    """
    a, b = tokens.double(), last.double()
    lengths = a.norm(dim=-1) * b.norm(dim=-1)
    cosines: Tensor = (a * b).sum(-1) / lengths.masked_fill(lengths == 0, math.nan)
    return cosines

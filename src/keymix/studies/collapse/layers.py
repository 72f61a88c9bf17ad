# SPDX-License-Identifier: Apache-2.0
"""What collapse measures of one layer: running sums over batches, and what they come to."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.analysis.capture import Call, Seat
from keymix.analysis.similarity import by_image, cosines_among, over, some_images
from keymix.errors import NoAttentionMap, UserError
from keymix.hosts.attention_inputs import Layout
from keymix.mixers.map_mixer import MapMixer
from keymix.records import or_none
from keymix.studies.collapse.readings import LayerReading

_SUM = 1e-3
"""How far a row of weights may be from the sum 1."""


class HeadTally:
    """Running sums of Eq. 2 between every two heads of one layer's map (Fig. 3c)."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.sum, self.count, self.similar = 0.0, 0, 0
        self.heads: int | None = None

    def add(self, maps: Float[Tensor, "B *windows h N M"]) -> None:
        """Add a batch of maps that multiply V."""
        columns = by_image(maps)
        batch, heads, count, rows = columns.shape
        self.heads = heads
        first, second = torch.triu_indices(heads, heads, offset=1, device=maps.device)
        for some in some_images(batch, heads * count * rows):
            cosines = cosines_among(columns[some].transpose(1, 2))[..., first, second]
            self.sum += float(cosines.nan_to_num().sum())
            self.count += int((~cosines.isnan()).sum())
            self.similar += int((cosines > self.threshold).sum())

    @property
    def mean(self) -> float:
        """Mean cosine; NaN for a single head."""
        return over(self.sum, self.count)

    @property
    def similar_fraction(self) -> float:
        """Share of columns that are similar; NaN for a single head."""
        return over(self.similar, self.count)


class LayerTally:
    """Running sums of one layer; blocks are numbered from 1."""

    def __init__(self, seat: Seat, block: int, threshold: float) -> None:
        self.seat, self.block = seat, block
        self.missing: str | None = None
        self.uneven: str | None = None
        self.keys: int | None = None
        self.heads = HeadTally(threshold)
        self._entropy: Tensor | None = None
        self._rows = self._places = self._in_prefix = 0
        self._sink = 0.0
        self._rank = self._cosine = 0.0
        self._images = self._tokens = 0
        self._full_rank: int | None = None

    @property
    def prefix(self) -> int | None:
        """Prefix tokens among the keys; None if unknown."""
        if self.seat.layer is not None:
            place = self.seat.layer.place
            return place.site.num_prefix_tokens if place.prefix_known else None
        site: Any = self.seat.module.site
        return int(site.num_prefix_tokens)

    def read(self, call: Call) -> Tensor | None:
        """Add the maps of a call; return that which multiplies V, None if there is none."""
        if self.missing is not None:
            return None
        try:
            weights, final = _both_maps(self.seat, call)
        except NoAttentionMap as error:
            self.missing = str(error.__cause__ or error)
            return None
        self._add_weights(weights)
        self.heads.add(final)
        return final

    def _add_weights(self, weights: Float[Tensor, "*batch h N M"]) -> None:
        self.keys = weights.shape[-1]
        if self.uneven is None and not _is_distribution(weights):
            self.uneven = "its weights are no shares: they are negative, or do not sum to one"
        if self.uneven is not None:
            return
        entropy = torch.special.entr(weights).sum(-1, dtype=torch.float64)
        by_head = entropy.movedim(-2, 0).flatten(1).sum(1).cpu()
        self._entropy = by_head if self._entropy is None else self._entropy + by_head
        self._rows += entropy.numel() // len(by_head)
        most, where = weights.mean(-2, dtype=torch.float64).max(-1)
        self._sink += float(most.sum())
        self._places += most.numel()
        self._in_prefix += int((where < (self.prefix or 0)).sum())

    def add_tokens(self, tokens: Float[Tensor, "B N C"], last: Tensor | None) -> None:
        """Add what the block made of a batch, next to what the last one of its stage made.

        ``last`` is None where that has other tokens.
        """
        self._full_rank = min(tokens.shape[1:])
        self._rank += float(effective_rank(tokens).sum())
        self._images += len(tokens)
        if last is None:
            return
        cosines = token_cosines(tokens, last)
        self._cosine += float(cosines.nan_to_num().sum())
        self._tokens += int((~cosines.isnan()).sum())

    def result(self, group: int | None, nearest: float) -> LayerReading:
        """Return what was read, with the number of its group and its share of Fig. 3a."""
        by_head = None
        if self._entropy is not None and self.uneven is None:
            by_head = (self._entropy / self._rows).tolist()
        even = by_head is not None
        entropy = sum(by_head) / len(by_head) if by_head else None
        most = math.log(self.keys) if self.keys else 0.0
        seat, theta = self.seat, getattr(self.seat.module, "theta", None)
        return LayerReading(
            path=seat.path,
            block=self.block,
            stage=self.seat.stage,
            attention=getattr(seat.module, "mixer_name", "") or type(seat.module).__name__,
            group=group,
            missing=self.missing,
            heads=self.heads.heads,
            keys=self.keys,
            entropy=entropy,
            entropy_by_head=tuple(by_head) if by_head else None,
            entropy_normalised=entropy / most if entropy is not None and most else None,
            sink=self._sink / self._places if even else None,
            sink_in_prefix=(
                self._in_prefix / self._places if even and self.prefix is not None else None
            ),
            uneven=self.uneven,
            head_similarity=or_none(self.heads.mean),
            heads_similar=or_none(self.heads.similar_fraction),
            nearest=or_none(nearest),
            feature_similarity=self._cosine / self._tokens if self._tokens else None,
            effective_rank=or_none(self._rank / self._images) if self._images else None,
            full_rank=self._full_rank,
            theta=_rows_of(theta) if isinstance(theta, Tensor) and theta.ndim == 2 else None,
        )


def _rows_of(matrix: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix.detach().double().cpu().tolist())


def _both_maps(seat: Seat, call: Call) -> tuple[Tensor, Tensor]:
    """Return the map after the softmax and that which multiplies V, formed once if they are one."""
    layer, mixer = seat.layer, seat.module
    if layer is not None and layer.mixer is None:
        read = layer.reading(*call)
        weights = read.map(stage="softmax")
        one = read.post is None
        return weights, weights if one else read.map(stage="final")
    weights = seat.map(call, None, "softmax")
    one = isinstance(mixer, MapMixer) and type(mixer).mix_after is MapMixer.mix_after
    if one and getattr(mixer, "talking_post", None) is None:
        return weights, weights
    return weights, seat.map(call, None, "final")


def _is_distribution(weights: Tensor) -> bool:
    sums = weights.sum(-1)
    return bool((weights.min() >= 0) & ((sums - 1).abs().max() <= _SUM))


def block_of(model: nn.Module, path: str) -> str:
    """Return the path of the block in which a layer of attention sits.

    The nearest module above it that is an item of a list or a sequence of modules; what holds
    the layer itself where there is none.
    """
    above = path.rpartition(".")[0]
    while above:
        holder = above.rpartition(".")[0]
        if isinstance(model.get_submodule(holder), (nn.ModuleList, nn.Sequential)):
            return above
        above = holder
    return path.rpartition(".")[0]


def tokens_of(output: Any, width: int, layout: Layout | None) -> Float[Tensor, "B N C"]:
    """Return a block's output, the first of several, as tokens of ``width`` channels.

    It is tokens already, or an image with channels first or last.
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

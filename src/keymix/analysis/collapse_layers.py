# SPDX-License-Identifier: Apache-2.0
"""What one layer's maps and one block's tokens are like, in running sums over batches."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keymix.analysis.capture import Call, Seat
from keymix.analysis.collapse_pairs import HeadTally
from keymix.analysis.collapse_record import LayerReading, or_none
from keymix.analysis.collapse_tokens import effective_rank, token_cosines
from keymix.errors import NoAttentionMap
from keymix.mixers.map_mixer import MapMixer

_SUM = 1e-3
"""How far a row of weights may be from the sum 1."""


class LayerTally:
    """Running sums of one layer.

    Args:
        seat: The layer.
        block: Its number in the model, from 1.
        threshold: Cosine above which columns count as similar.
    """

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
    def stage(self) -> int:
        """Stage of a hierarchical model."""
        return 0 if self.seat.layer is None else self.seat.layer.place.stage

    @property
    def prefix(self) -> int | None:
        """Prefix tokens among the keys; None if nobody knows."""
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
        """Add what the block made of a batch, beside what the last one of its stage made.

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
        """Return what was read.

        Args:
            group: Number of the layers that this one can be compared with.
            nearest: Its share of columns like those of the nearest blocks.
        """
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
            stage=self.stage,
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

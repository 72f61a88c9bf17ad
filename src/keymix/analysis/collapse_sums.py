# SPDX-License-Identifier: Apache-2.0
"""Running sums over batches: how alike maps are, and what one layer's maps and tokens are like.

DeepViT, https://arxiv.org/abs/2103.11886, Eq. 2 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from keymix.analysis.capture import Call, Seat
from keymix.analysis.collapse_record import LayerReading, PairSimilarity, or_none
from keymix.errors import NoAttentionMap, UserError
from keymix.hosts.attention_inputs import Layout
from keymix.mixers.map_mixer import MapMixer

_BUDGET = 2**22
"""Numbers kept in float64 at a time, unless one image has more."""


_ROUNDING = 1e-6
"""Share of a column's length below which its deviations from the mean are float32's rounding."""


def column_cosines(
    a: Float[Tensor, "*batch h N M"], b: Float[Tensor, "*batch h N M"]
) -> Float[Tensor, "*batch h M"]:
    r"""Compute DeepViT's Eq. 2 for two maps of the same images.

    :math:`M_{h,t} = A_{h,:,t}^\top B_{h,:,t} / (\|A_{h,:,t}\| \|B_{h,:,t}\|)`: how token t's
    contribution to all outputs changes from one layer to the other. In float64; NaN where a
    column is zero throughout.

    Args:
        a: Map of layer p that multiplies V.
        b: Map of layer q, of the same shape.
    """
    a, b = a.double(), b.double()
    lengths = a.norm(dim=-2) * b.norm(dim=-2)
    cosines: Tensor = (a * b).sum(-2) / lengths.masked_fill(lengths == 0, math.nan)
    return cosines


def _cosines_among(
    vectors: Float[Tensor, "*batch vectors length"], *, centred: bool = False
) -> Float[Tensor, "*batch vectors vectors"]:
    """Return the cosines of every two vectors, in float64; NaN where one is zero throughout.

    Centred, each vector loses its mean first; what is left of a constant one by rounding is zero.
    """
    vectors = vectors.double()
    lengths = vectors.norm(dim=-1, keepdim=True)
    least = torch.zeros_like(lengths)
    if centred:
        least = _ROUNDING * lengths
        vectors = vectors - vectors.mean(-1, keepdim=True)
        lengths = vectors.norm(dim=-1, keepdim=True)
    unit = vectors / lengths.masked_fill(lengths <= least, math.nan)
    cosines: Tensor = unit @ unit.mT
    return cosines


def by_image(maps: Float[Tensor, "B *windows h N M"]) -> Float[Tensor, "B h columns N"]:
    """Return the columns of maps as vectors, those of all windows of an image together."""
    batch, heads, rows = maps.shape[0], maps.shape[-3], maps.shape[-2]
    apart = maps.reshape(batch, -1, heads, rows, maps.shape[-1])
    return apart.permute(0, 2, 1, 4, 3).reshape(batch, heads, -1, rows)


def _some_images(count: int, numbers: int) -> Iterator[slice]:
    """Cut a batch into as many images at a time as the budget holds."""
    step = max(1, _BUDGET // max(1, numbers))
    for start in range(0, count, step):
        yield slice(start, start + step)


def nearest_blocks(count: int, k: int) -> Int[Tensor, "count k"]:
    """Return, for each of some blocks in order, the k nearest others; of two as near, the earlier.

    All others where there are fewer than k.
    """
    near = [
        sorted((q for q in range(count) if q != p), key=lambda q: (abs(p - q), q))[:k]
        for p in range(count)
    ]
    return torch.tensor(near, dtype=torch.long).reshape(count, -1)


class PairTally:
    """Running sums over batches of Eq. 2 between every two of some layers.

    Nothing of a batch is kept; memory does not grow with the number of images. The maps of `paths`
    have one shape; a block is compared with the `nearest` blocks for Fig. 3a.
    """

    def __init__(self, paths: Sequence[str], *, threshold: float, nearest: int) -> None:
        self.paths, self.threshold = tuple(paths), threshold
        self._near = nearest_blocks(len(paths), nearest)
        self._heads: list[_HeadSums] = []
        self._near_similar = torch.zeros(len(paths), dtype=torch.long)
        self._near_columns = torch.zeros(len(paths), dtype=torch.long)

    def add(self, maps: Sequence[Float[Tensor, "B *windows h N M"]]) -> None:
        """Add a batch: the map of each layer that multiplies V."""
        columns = [by_image(m) for m in maps]  # views where memory lets them
        batch, heads, count, rows = columns[0].shape
        if not self._heads:
            self._heads = [_HeadSums(len(maps)) for _ in range(heads)]
        for head, sums in enumerate(self._heads):
            for some in _some_images(batch, len(maps) * count * rows):
                vectors = torch.stack([m[some, head] for m in columns], dim=-2)  # [b, M, L, N]
                self._tally(_cosines_among(vectors).flatten(0, 1), sums)
                sums.add_centred(_cosines_among(vectors, centred=True).flatten(0, 1))

    def _tally(self, cosines: Float[Tensor, "columns L L"], sums: _HeadSums) -> None:
        sums.add(cosines, self.threshold)
        if not self._near.numel():
            return
        near = self._near.to(cosines.device)
        average = cosines.gather(-1, near.expand(len(cosines), *near.shape)).mean(-1)
        self._near_similar += (average > self.threshold).sum(0).cpu()
        self._near_columns += (~average.isnan()).sum(0).cpu()

    def pairs(self) -> list[PairSimilarity]:
        """Return every two layers, p before q."""
        sums = torch.stack([head.sums for head in self._heads])
        counts = torch.stack([head.counts for head in self._heads])
        similar = torch.stack([head.similar for head in self._heads]).sum(0)
        left_out = torch.stack([head.left_out for head in self._heads]).sum(0)
        centred = torch.stack([head.centred for head in self._heads]).sum(0)
        with_centred = torch.stack([head.with_centred for head in self._heads]).sum(0)
        total, columns = sums.sum(0), counts.sum(0)
        return [
            PairSimilarity(
                first=self.paths[p],
                second=self.paths[q],
                mean=_over(float(total[p, q]), int(columns[p, q])),
                centred=_over(float(centred[p, q]), int(with_centred[p, q])),
                by_head=tuple((sums[:, p, q] / counts[:, p, q]).tolist()),
                similar_fraction=_over(int(similar[p, q]), int(columns[p, q])),
                columns=int(columns[p, q]),
                left_out=int(left_out[p, q]),
            )
            for p in range(len(self.paths))
            for q in range(p + 1, len(self.paths))
        ]

    def nearest(self) -> dict[str, float]:
        """Return, by layer, the share of columns like those of the nearest blocks (Fig. 3a)."""
        return {
            path: _over(int(self._near_similar[i]), int(self._near_columns[i]))
            for i, path in enumerate(self.paths)
        }


class _HeadSums:
    """Sums of one head over columns, ``[L, L]``."""

    def __init__(self, count: int) -> None:
        self.sums, self.centred = torch.zeros(2, count, count, dtype=torch.float64)
        self.counts, self.similar, self.left_out, self.with_centred = torch.zeros(
            4, count, count, dtype=torch.long
        )

    def add(self, cosines: Float[Tensor, "columns L L"], threshold: float) -> None:
        lacking = cosines.isnan()
        self.sums += cosines.nan_to_num().sum(0).cpu()
        self.counts += (~lacking).sum(0).cpu()
        self.similar += (cosines > threshold).sum(0).cpu()
        self.left_out += lacking.sum(0).cpu()

    def add_centred(self, cosines: Float[Tensor, "columns L L"]) -> None:
        self.centred += cosines.nan_to_num().sum(0).cpu()
        self.with_centred += (~cosines.isnan()).sum(0).cpu()


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
        for some in _some_images(batch, heads * count * rows):
            cosines = _cosines_among(columns[some].transpose(1, 2))[..., first, second]
            self.sum += float(cosines.nan_to_num().sum())
            self.count += int((~cosines.isnan()).sum())
            self.similar += int((cosines > self.threshold).sum())

    @property
    def mean(self) -> float:
        """Mean cosine; NaN for a single head."""
        return _over(self.sum, self.count)

    @property
    def similar_fraction(self) -> float:
        """Share of columns that are similar; NaN for a single head."""
        return _over(self.similar, self.count)


def _over(part: int | float, whole: int) -> float:
    return part / whole if whole else math.nan


_SUM = 1e-3
"""How far a row of weights may be from the sum 1."""


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

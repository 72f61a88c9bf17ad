# SPDX-License-Identifier: Apache-2.0
"""How alike attention maps are, column by column (DeepViT, Eq. 2 and 7), in running sums."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keymix.analysis.collapse_record import PairSimilarity

_BUDGET = 2**22
"""Numbers that are held in float64 at a time, unless one image has more."""


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
    """Lay out the columns of maps as vectors, those of all windows of an image together."""
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

    Nothing of a batch is kept; memory does not grow with the number of images.

    Args:
        paths: The layers, in the model's order; their maps have one shape.
        threshold: Cosine tau above which columns count as similar.
        nearest: How many nearest blocks a block is held against (Fig. 3a).
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
    """Running sums of Eq. 2 between every two heads of one layer's map (Fig. 3c).

    Args:
        threshold: Cosine above which columns count as similar.
    """

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

# SPDX-License-Identifier: Apache-2.0
"""How alike attention maps of different layers are: DeepViT's Eq. 2 and 7, batch after batch.

DeepViT, https://arxiv.org/abs/2103.11886.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keymix.analysis.capture import Call, Layers, Seat, run_once, select_layers
from keymix.analysis.images import Images, Model, batches_of
from keymix.analysis.study_record import PairSimilarity
from keymix.arguments import checked, module_of, opened
from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout

Pairs = Literal["adjacent", "all"]

_BUDGET = 2**22
"""Numbers kept in float64 at a time, unless one image has more."""

_ROUNDING = 1e-6
"""Share of a column's length below which its deviations from the mean are float32's rounding."""


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """How alike the maps of chosen layers are.

    Attributes:
        layers: Paths of the layers, in the model's order.
        pairs: One entry a pair of layers.
        threshold: Cosine above which two columns count as similar.
        images: Images that were read.
    """

    layers: tuple[str, ...]
    pairs: tuple[PairSimilarity, ...]
    threshold: float
    images: int

    @property
    def adjacent(self) -> tuple[PairSimilarity, ...]:
        """The pairs of neighbouring layers, in order."""
        at = {path: i for i, path in enumerate(self.layers)}
        return tuple(p for p in self.pairs if at[p.second] == at[p.first] + 1)

    @property
    def similar_blocks(self) -> float:
        """Share of layers whose map is similar to the next one's in over 80 % of its columns.

        DeepViT, appendix D, over the pairs of neighbours.
        """
        neighbours = self.adjacent
        return sum(p.similar_fraction > 0.8 for p in neighbours) / len(neighbours)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON takes it: NaN becomes None."""
        return {
            "layers": list(self.layers),
            "threshold": self.threshold,
            "images": self.images,
            "similar_blocks": self.similar_blocks,
            "pairs": [pair.to_dict() for pair in self.pairs],
        }


@checked
def map_similarity(
    model: Model,
    images: Images,
    *,
    layers: Layers | None = None,
    pairs: Pairs = "adjacent",
    threshold: float = 0.5,
    batch_size: int = 16,
) -> Likeness:
    r"""Measure DeepViT's cross-layer similarity alone, between layers that must be comparable.

    Eq. 2 on the map that multiplies V, column by column, averaged over images, heads and tokens;
    batch after batch, so that only one batch's maps are ever in memory. :func:`collapse` measures
    this and more, and leaves out what cannot be compared instead of refusing it.

    Args:
        model: A model whose chosen layers have maps of one shape.
        images: Normalised images ``[B, C, H, W]``, or batches of them one after another, each
            alone or first in a tuple ``(images, labels)``.
        layers: Which, as in :func:`keymix.attention_maps`; all if None.
        pairs: ``"adjacent"`` compares each chosen layer with the next, ``"all"`` every two.
        threshold: Cosine above which columns count as similar; the paper takes 0.5.
        batch_size: Images at a time where ``images`` is one tensor.

    Raises:
        NoAttentionMap: If a chosen layer has no map.
        UserError: If fewer than two layers are chosen, their maps differ in shape or are of windows
            that lie elsewhere, or there are no images.
    """
    trained = opened(model)
    network = module_of(trained)
    seats = select_layers(network, layers)
    paths = tuple(seats)
    if len(paths) < 2:
        raise UserError(f"similarity across layers needs two layers, got {list(paths)}")
    tally = PairTally(paths, threshold=threshold, nearest=1)
    seen = 0
    for batch in batches_of(images, trained, batch_size):
        maps: dict[str, Tensor] = {}
        cuts: dict[str, object] = {}
        run_once(network, batch, seats, partial(_keep, maps, cuts))
        _check_comparable(maps, cuts)
        tally.add([maps[path] for path in paths])
        seen += len(batch)
    if not seen:
        raise UserError("similarity across layers needs at least one image, got none")
    found = Likeness(layers=paths, pairs=tuple(tally.pairs()), threshold=threshold, images=seen)
    return found if pairs == "all" else replace(found, pairs=found.adjacent)


def _keep(
    maps: dict[str, Tensor],
    cuts: dict[str, object],
    seat: Seat,
    call: Call,
    layout: Layout | None,
) -> None:
    maps[seat.path] = seat.map(call, None, "final")
    cuts[seat.path] = cut_of(layout)


def _check_comparable(maps: Mapping[str, Tensor], cuts: Mapping[str, object]) -> None:
    first = next(iter(maps))
    for path in maps:
        if maps[path].shape != maps[first].shape:
            raise UserError(
                f"the maps of {first} {tuple(maps[first].shape)} and {path} "
                f"{tuple(maps[path].shape)} differ in shape and cannot be compared; choose layers= "
                "of one stage"
            )
        if cuts[path] != cuts[first]:
            raise UserError(
                f"{first} and {path} cut the image into other windows, so that columns of their "
                "maps belong to other tokens; only layers of one shift can be compared"
            )


def cut_of(layout: Layout | None) -> tuple[object, ...] | None:
    """Return what says how an image is cut into windows."""
    return None if layout is None else (layout.window, layout.windows, layout.shift)


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


def cosines_among(
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


def some_images(count: int, numbers: int) -> Iterator[slice]:
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
            for some in some_images(batch, len(maps) * count * rows):
                vectors = torch.stack([m[some, head] for m in columns], dim=-2)  # [b, M, L, N]
                self._tally(cosines_among(vectors).flatten(0, 1), sums)
                sums.add_centred(cosines_among(vectors, centred=True).flatten(0, 1))

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
                mean=over(float(total[p, q]), int(columns[p, q])),
                centred=over(float(centred[p, q]), int(with_centred[p, q])),
                by_head=tuple((sums[:, p, q] / counts[:, p, q]).tolist()),
                similar_fraction=over(int(similar[p, q]), int(columns[p, q])),
                columns=int(columns[p, q]),
                left_out=int(left_out[p, q]),
            )
            for p in range(len(self.paths))
            for q in range(p + 1, len(self.paths))
        ]

    def nearest(self) -> dict[str, float]:
        """Return, by layer, the share of columns like those of the nearest blocks (Fig. 3a)."""
        return {
            path: over(int(self._near_similar[i]), int(self._near_columns[i]))
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


def over(part: int | float, whole: int) -> float:
    """Return a quotient; NaN of nothing."""
    return part / whole if whole else math.nan

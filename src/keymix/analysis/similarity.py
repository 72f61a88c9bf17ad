# SPDX-License-Identifier: Apache-2.0
"""How alike attention maps of different layers are: DeepViT's Eq. 2 and 7, batch after batch.

DeepViT, https://arxiv.org/abs/2103.11886.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keymix.analysis.capture import Call, Layers, Seat, run_once, select_layers
from keymix.analysis.images import Images, Model, batches_of
from keymix.arguments import checked, module_of, opened
from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout

_BUDGET = 2**22
"""Numbers kept in float64 at a time, unless one image has more."""

_ROUNDING = 1e-6
"""Share of a column's length below which its deviations from the mean are float32's rounding."""


@dataclass(frozen=True, kw_only=True)
class PairSimilarity:
    """How alike the maps of two layers are, over images, heads and tokens.

    Attributes:
        first: Path of layer p.
        second: Path of layer q.
        mean: Mean of Eq. 2, the cosine of two columns; between -1 and 1.
        by_head: The same mean per head.
        centred: Mean cosine after each column's mean was taken off: what they share beyond even
            attention, for which Eq. 2 is near 1 whatever the rest. Not the paper's.
        similar_fraction: Share of columns whose cosine exceeds the threshold (appendix D, Eq. 7).
        columns: Columns that entered: images x windows x heads x tokens.
        left_out: Columns of zero length in either map, which have no cosine.
    """

    first: str
    second: str
    mean: float
    centred: float
    by_head: tuple[float, ...]
    similar_fraction: float
    columns: int
    left_out: int


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """How alike the maps of chosen layers are.

    Attributes:
        layers: Paths of the layers, in the model's order.
        pairs: One entry for every two layers, the earlier first.
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


@checked
def map_similarity(
    model: Model,
    images: Images,
    *,
    layers: Layers | None = None,
    threshold: float = 0.5,
    batch_size: int = 16,
) -> Likeness:
    r"""Measure DeepViT's cross-layer similarity alone, between layers that must be comparable.

    Eq. 2 on the map that multiplies V, column by column, averaged over images, heads and tokens;
    batch after batch, so that only one batch's maps are ever in memory. :func:`keymix.collapse`
    measures this and more, and leaves out what cannot be compared instead of refusing it; there
    the arguments are explained.

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
    maps: dict[str, Tensor] = {}
    cuts: dict[str, object] = {}

    def on_call(seat: Seat, call: Call, layout: Layout | None) -> None:
        maps[seat.path] = seat.map(call, None, "final")
        cuts[seat.path] = cut_of(layout)

    for batch in batches_of(images, trained, batch_size):
        run_once(network, batch, seats, on_call)
        _check_comparable(maps, cuts)
        tally.add([maps[path] for path in paths])
        seen += len(batch)
    if not seen:
        raise UserError("similarity across layers needs at least one image, got none")
    return Likeness(layers=paths, pairs=tuple(tally.pairs()), threshold=threshold, images=seen)


def _check_comparable(maps: Mapping[str, Tensor], cuts: Mapping[str, object]) -> None:
    first, *others = maps
    for path in others:
        if (maps[path].shape, cuts[path]) != (maps[first].shape, cuts[first]):
            raise UserError(
                f"the maps of {first} {tuple(maps[first].shape)} and {path} "
                f"{tuple(maps[path].shape)} differ in shape or in the windows that they cut the "
                "image into, and cannot be compared; choose layers= of one stage and one shift"
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
        self._near_sums = torch.zeros(2, len(paths), dtype=torch.float64)
        # by head: cosines, how many and how many above tau; centred ones, how many
        self._sums = torch.zeros(0, 5, len(paths), len(paths), dtype=torch.float64)
        self._columns = 0

    def add(self, maps: Sequence[Float[Tensor, "B *windows h N M"]]) -> None:
        """Add a batch: the map of each layer that multiplies V."""
        columns = [by_image(m) for m in maps]  # views where memory lets them
        batch, heads, count, rows = columns[0].shape
        if not len(self._sums):
            self._sums = self._sums.new_zeros(heads, *self._sums.shape[1:])
        self._columns += batch * heads * count
        for head, sums in enumerate(self._sums):
            for some in some_images(batch, len(maps) * count * rows):
                vectors = torch.stack([m[some, head] for m in columns], dim=-2)  # [b, M, L, N]
                cosines = cosines_among(vectors).flatten(0, 1)
                sums[2] += (cosines > self.threshold).sum(0).cpu()
                sums[:2] += _sum_and_count(cosines)
                sums[3:] += _sum_and_count(cosines_among(vectors, centred=True).flatten(0, 1))
                if self._near.numel():
                    near = self._near.to(cosines.device)
                    mean = cosines.gather(-1, near.expand(len(cosines), *near.shape)).mean(-1)
                    above = (mean > self.threshold).double()
                    self._near_sums += _sum_and_count(above.masked_fill(mean.isnan(), math.nan))

    def pairs(self) -> list[PairSimilarity]:
        """Return every two layers, p before q."""
        total, counts, similar, centred, with_centred = self._sums.sum(0)
        by_head = self._sums[:, 0] / self._sums[:, 1]
        return [
            PairSimilarity(
                first=self.paths[p],
                second=self.paths[q],
                mean=float(total[p, q] / counts[p, q]),
                centred=float(centred[p, q] / with_centred[p, q]),
                by_head=tuple(by_head[:, p, q].tolist()),
                similar_fraction=float(similar[p, q] / counts[p, q]),
                columns=int(counts[p, q]),
                left_out=self._columns - int(counts[p, q]),
            )
            for p, q in itertools.combinations(range(len(self.paths)), 2)
        ]

    def nearest(self) -> dict[str, float]:
        """Return, by layer, the share of columns like those of the nearest blocks (Fig. 3a)."""
        shares = self._near_sums[0] / self._near_sums[1]
        return dict(zip(self.paths, shares.tolist(), strict=True))


def _sum_and_count(values: Tensor) -> Tensor:
    """Add up values [n, *] that are not NaN, and count them: [2, *]."""
    return torch.stack([values.nan_to_num().sum(0), (~values.isnan()).sum(0).double()]).cpu()

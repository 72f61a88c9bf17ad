# SPDX-License-Identifier: Apache-2.0
"""Attention collapse: how alike the attention maps of different layers are (DeepViT, Eq. 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from keymix.analysis.attention import Layers, attention_maps, select_mixers
from keymix.errors import UserError

Pairs = Literal["adjacent", "all"]


@dataclass(frozen=True, kw_only=True)
class PairSimilarity:
    """How alike the maps of two layers are, over images, heads and tokens.

    Attributes:
        first: Path of layer p.
        second: Path of layer q.
        mean: Mean of Eq. 2, the cosine of two columns; between -1 and 1.
        by_head: The same mean a head.
        similar_fraction: Share of columns whose cosine exceeds the threshold (appendix D, Eq. 7).
        columns: Columns that entered: images x windows x heads x tokens.
        left_out: Columns of zero length in either map, which have no cosine.
    """

    first: str
    second: str
    mean: float
    by_head: tuple[float, ...]
    similar_fraction: float
    columns: int
    left_out: int


@dataclass(frozen=True, kw_only=True)
class Collapse:
    """The similarity of a model's attention maps across its layers.

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
            "pairs": [
                {
                    "first": p.first,
                    "second": p.second,
                    "mean": _or_none(p.mean),
                    "by_head": [_or_none(v) for v in p.by_head],
                    "similar_fraction": _or_none(p.similar_fraction),
                    "columns": p.columns,
                    "left_out": p.left_out,
                }
                for p in self.pairs
            ],
        }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


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


class _Tally:
    """Running sums of one pair of layers over batches."""

    def __init__(self, first: str, second: str) -> None:
        self.first, self.second = first, second
        self.sums: Tensor | float = 0.0
        self.counts: Tensor | float = 0.0
        self.similar = 0
        self.left_out = 0

    def add(self, cosines: Float[Tensor, "*batch h M"], threshold: float) -> None:
        defined = ~cosines.isnan()
        by_head = cosines.nan_to_num().movedim(-2, 0).flatten(1).sum(1).cpu()
        self.sums = self.sums + by_head
        self.counts = self.counts + defined.movedim(-2, 0).flatten(1).sum(1).cpu()
        self.similar += int((cosines > threshold).sum())
        self.left_out += int((~defined).sum())

    def result(self) -> PairSimilarity:
        sums, counts = torch.as_tensor(self.sums), torch.as_tensor(self.counts)
        columns = int(counts.sum())
        return PairSimilarity(
            first=self.first,
            second=self.second,
            mean=float(sums.sum()) / columns if columns else math.nan,
            by_head=tuple((sums / counts).tolist()),
            similar_fraction=self.similar / columns if columns else math.nan,
            columns=columns,
            left_out=self.left_out,
        )


def map_similarity(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    *,
    layers: Layers | None = None,
    pairs: Pairs = "adjacent",
    threshold: float = 0.5,
    batch_size: int = 16,
) -> Collapse:
    r"""Measure attention collapse: DeepViT's cross-layer similarity of attention maps.

    Eq. 2 on the map that multiplies V, column by column, averaged over images, heads and tokens;
    batch after batch, so that only one batch's maps are ever held.

    Args:
        model: A model that hosts keymix mixers with maps of one shape in the chosen layers.
        images: Normalised images ``[B, C, H, W]``, or batches of them one after another.
        layers: Which mixers, as in :func:`keymix.attention_maps`; all if None.
        pairs: ``"adjacent"`` compares each chosen layer with the next, ``"all"`` every two.
        threshold: Cosine above which columns count as similar; the paper takes 0.5.
        batch_size: Images at a time where ``images`` is one tensor.

    Raises:
        NoAttentionMap: If a chosen layer has no map.
        UserError: If fewer than two layers are chosen, their maps differ in shape or are of windows
            that lie elsewhere, or there are no images.
    """
    if pairs not in ("adjacent", "all"):
        raise UserError(f"{pairs=} must be 'adjacent' or 'all'")
    paths = tuple(select_mixers(model, layers))
    if len(paths) < 2:
        raise UserError(f"similarity across layers needs two layers, got {list(paths)}")
    tallies = [
        _Tally(paths[i], paths[j])
        for i in range(len(paths))
        for j in range(i + 1, len(paths) if pairs == "all" else min(i + 2, len(paths)))
    ]
    # what holds a mixer knows where its windows lie
    shifts = {p: getattr(model.get_submodule(p.rpartition(".")[0]), "shift", None) for p in paths}
    seen = 0
    for batch in torch.split(images, batch_size) if isinstance(images, Tensor) else images:
        maps = attention_maps(model, batch, layers=list(paths), stage="final")
        for tally in tallies:
            a, b = maps[tally.first], maps[tally.second]
            if a.shape != b.shape:
                raise UserError(
                    f"the maps of {tally.first} {tuple(a.shape)} and {tally.second} "
                    f"{tuple(b.shape)} differ in shape and cannot be compared; choose layers= of "
                    "one stage"
                )
            if shifts[tally.first] != shifts[tally.second]:
                raise UserError(
                    f"{tally.first} and {tally.second} cut the image into other windows, so that "
                    "columns of their maps belong to other tokens; only layers of one shift can be "
                    "compared"
                )
            tally.add(column_cosines(a, b), threshold)
        seen += len(batch)
    if not seen:
        raise UserError("similarity across layers needs at least one image, got none")
    return Collapse(
        layers=paths, pairs=tuple(t.result() for t in tallies), threshold=threshold, images=seen
    )

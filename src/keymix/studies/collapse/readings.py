# SPDX-License-Identifier: Apache-2.0
"""What a study of attention collapse reads off one model, and what follows from it. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from keymix.analysis.study_record import UNNAMED, ModelOnImages, PairSimilarity


@dataclass(frozen=True, kw_only=True)
class LayerReading:
    """What was read of one layer of attention and of the block that it sits in.

    Attributes:
        path: Of the layer.
        block: Number of the layer in the model, from 1.
        stage: Stage of a hierarchical model, from 0.
        attention: Name of the mixer, or of the class of the host's own attention.
        group: Number of the layers with which this one's columns can be compared; None without a
            map.
        missing: Why there is no map, None if there is one.
        heads: Heads of the map.
        keys: Keys M that a query sees.
        entropy: Mean entropy of the rows after the softmax, nats.
        entropy_by_head: The same, per head.
        entropy_normalised: Entropy over ln M: 1 for even attention.
        sink: Share of all attention that the token gets which receives most; mean over heads and
            images (windows, where there are).
        sink_in_prefix: Of those tokens the share that are prefix tokens; None too where nobody
            knows how many there are.
        uneven: Why there is neither entropy nor sink, None if there are.
        head_similarity: Mean Eq. 2 between every two heads.
        heads_similar: Share of their columns above the threshold.
        nearest: Share of columns whose mean cosine with those of the nearest blocks is above the
            threshold (Fig. 3a).
        feature_similarity: Mean cosine of the block's tokens with those of the last block of its
            stage.
        effective_rank: Mean effective rank of the tokens after the block.
        full_rank: The most that it could be, min(N, C).
        theta: Re-attention's matrix ``[h][h]``: row h feeds head h' of column h'.
    """

    path: str
    block: int
    stage: int
    attention: str
    group: int | None
    missing: str | None
    heads: int | None
    keys: int | None
    entropy: float | None
    entropy_by_head: tuple[float, ...] | None
    entropy_normalised: float | None
    sink: float | None
    sink_in_prefix: float | None
    uneven: str | None
    head_similarity: float | None
    heads_similar: float | None
    nearest: float | None
    feature_similarity: float | None
    effective_rank: float | None
    full_rank: int | None
    theta: tuple[tuple[float, ...], ...] | None


@dataclass(frozen=True, kw_only=True)
class Unique:
    """The last "unique" block of layers that can be compared (DeepViT Sec. 5.2).

    Attributes:
        block: Its number in the model, from 1.
        path: Its layer.
        sharing: Numbers of the blocks after it, which could take its map.
        least: The least share of similar columns (Eq. 7) between its map and any of theirs; None
            where there are none.
    """

    block: int
    path: str
    sharing: tuple[int, ...]
    least: float | None


@dataclass(kw_only=True, repr=False)
class Readings:
    """What was read of a model's attention maps and tokens, and what follows from it.

    Attributes:
        layers: One entry per layer that was chosen, in the model's order, also without a map.
        pairs: Every two layers that can be compared, the earlier first.
        groups: Paths of the layers among which columns can be compared.
        apart: What cannot be compared within a stage, and why, in words.
        threshold: Cosine tau above which two columns count as similar.
        similar: Share of similar columns above which a block is like the one before.
        unique: Share below which a block is "unique".
        nearest: How many nearest blocks a block was compared with.
        images: Images that were read.
        takes_shared_from: Whether the model is of a class that takes ``shared_from=``.
        of: The model and its images.
        remedies: What the mixer of a layer has against maps that are alike, by path.
    """

    layers: tuple[LayerReading, ...]
    pairs: tuple[PairSimilarity, ...]
    groups: tuple[tuple[str, ...], ...]
    apart: tuple[str, ...]
    threshold: float
    similar: float
    unique: float
    nearest: int
    images: int
    takes_shared_from: bool
    of: ModelOnImages = UNNAMED
    remedies: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _by_ends(self) -> Mapping[tuple[str, str], PairSimilarity]:
        return {(pair.first, pair.second): pair for pair in self.pairs}

    @cached_property
    def blocks(self) -> Mapping[str, int]:
        """Number of each layer in the model, from 1."""
        return {layer.path: layer.block for layer in self.layers}

    def pair(self, first: str, second: str) -> PairSimilarity:
        """Return the similarity of two layers of one group, the earlier first."""
        return self._by_ends[first, second]

    @property
    def neighbours(self) -> tuple[PairSimilarity, ...]:
        """The pairs of each layer and the next of its group, in the order of the later one."""
        found = [
            self.pair(first, second)
            for group in self.groups
            for first, second in itertools.pairwise(group)
        ]
        return tuple(sorted(found, key=lambda pair: self.blocks[pair.second]))

    @property
    def with_maps(self) -> tuple[LayerReading, ...]:
        """The layers that have a map."""
        return tuple(layer for layer in self.layers if layer.group is not None)

    @property
    def similar_blocks(self) -> tuple[int, ...]:
        """Numbers of the blocks like the one before: Eq. 7 above `similar` (appendix D)."""
        return tuple(
            self.blocks[pair.second]
            for pair in self.neighbours
            if pair.similar_fraction > self.similar
        )

    @property
    def blocks_like_nearest(self) -> tuple[int, ...]:
        """Numbers of the blocks whose ratio with the nearest ones is above `unique` (Fig. 3a)."""
        return tuple(
            layer.block
            for layer in self.layers
            if layer.nearest is not None and layer.nearest > self.unique
        )

    @property
    def unique_blocks(self) -> tuple[Unique, ...]:
        """The last unique block of each group, and the blocks that could take its map.

        A block is unique whose similarity (Eq. 7) with the one before is below `unique`; the first
        of a group always is.
        """
        found = []
        for group in self.groups:
            at = 0
            for i in range(1, len(group)):
                if not self.pair(group[i - 1], group[i]).similar_fraction > self.unique:
                    at = i
            later = group[at + 1 :]
            shares = [self.pair(group[at], path).similar_fraction for path in later]
            found.append(
                Unique(
                    block=self.blocks[group[at]],
                    path=group[at],
                    sharing=tuple(self.blocks[path] for path in later),
                    least=min(shares) if shares else None,
                )
            )
        return tuple(found)

    @property
    def shared_from(self) -> int | None:
        """What ``shared_from=`` of keymix's DeepViT family would be by the rule; None for nothing.

        The number, from 0, of the first block that takes the map of the one before. Only where all
        layers of the model can be compared with one another.
        """
        if len(self.groups) != 1 or len(self.groups[0]) != len(self.layers):
            return None
        (last,) = self.unique_blocks
        return last.block if last.sharing and self.blocks[self.groups[0][0]] == 1 else None

    @property
    def share(self) -> float | None:
        """Share of the blocks with a map that are like the one before; None of none."""
        with_maps = len(self.with_maps)
        return len(self.similar_blocks) / with_maps if with_maps else None

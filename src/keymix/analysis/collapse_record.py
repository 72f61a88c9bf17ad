# SPDX-License-Identifier: Apache-2.0
"""What a study of attention collapse leaves: of layers, of pairs of layers, and as a record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from keymix.analysis.study_record import ModelOnImages, StudyRecord, joined
from keymix.records import to_json


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
class PairReading:
    """`PairSimilarity` as a record has it: None in place of NaN."""

    first: str
    second: str
    mean: float | None
    centred: float | None
    by_head: tuple[float | None, ...]
    similar_fraction: float | None
    columns: int
    left_out: int


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

    def reading(self) -> PairReading:
        """Return it as a record has it: None in place of NaN."""
        return joined(
            PairReading,
            self,
            mean=or_none(self.mean),
            centred=or_none(self.centred),
            by_head=tuple(or_none(v) for v in self.by_head),
            similar_fraction=or_none(self.similar_fraction),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON takes it: NaN becomes None."""
        return dict(to_json(self.reading()))


def or_none(value: float) -> float | None:
    """Return a number as JSON takes it: NaN becomes None."""
    return None if math.isnan(value) else value


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


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found, in words.

    Attributes:
        collapsed: Whether neighbouring blocks are alike both by Eq. 7 and, from
            :data:`PATTERN` on, in their centred cosine; None where that cannot be said.
        headline: The finding.
        evidence: What it rests on, a sentence each.
        caveats: What it does not say.
    """

    collapsed: bool | None
    headline: str
    evidence: tuple[str, ...]
    caveats: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BlockCount:
    """Blocks for which something holds."""

    blocks: tuple[int, ...]  # their numbers, from 1
    count: int
    of: int
    share: float | None  # the quotient; None of none

    @classmethod
    def among(cls, blocks: tuple[int, ...], of: int) -> BlockCount:
        """Count blocks."""
        share = len(blocks) / of if of else None
        return cls(blocks=blocks, count=len(blocks), of=of, share=share)


@dataclass(frozen=True, kw_only=True)
class CollapseReading:
    """What `keymix.collapse` found, with all that follows from it."""

    images: int
    threshold: float  # cosine tau above which two columns count as similar
    similar: float  # share of similar columns above which a block is like the one before
    unique: float  # share below which a block is "unique"
    nearest: int  # how many nearest blocks a block was compared with
    verdict: Verdict  # what was found, in words
    similar_blocks: BlockCount  # blocks like the one before
    blocks_like_nearest: BlockCount  # blocks like the nearest ones
    unique_blocks: tuple[Unique, ...]  # the last unique block of each group
    shared_from: int | None  # what ``shared_from=`` would be by the rule; None for nothing
    groups: tuple[tuple[str, ...], ...]  # paths of the layers among which columns can be compared
    apart: tuple[str, ...]  # what cannot be compared within a stage, and why, in words
    layers: tuple[LayerReading, ...]
    pairs: tuple[PairReading, ...]  # every two layers that can be compared


@dataclass(frozen=True, kw_only=True)
class CollapseStudy(CollapseReading, ModelOnImages):
    """What was found of one model of a record."""


@dataclass(frozen=True, kw_only=True)
class CollapseRecord(StudyRecord):
    """The content of ``collapse.json``."""

    studies: tuple[CollapseStudy, ...]

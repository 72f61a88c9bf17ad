# SPDX-License-Identifier: Apache-2.0
"""Attention collapse of a model, or of several: what was read, what follows, table and figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from keymix.analysis.study_record import UNNAMED, ModelOnImages
from keymix.records import finite, or_none, to_json
from keymix.report import charts
from keymix.report.charts import Chart, Line, Look
from keymix.report.result import Result
from keymix.report.tables import Column, Table
from keymix.studies.study import file_words

if TYPE_CHECKING:
    from keymix.analysis.similarity import PairSimilarity

EVEN = 0.95
"""Entropy over ln M from which maps are called nearly even."""

SINK = 0.3
"""Share of attention on one token from which it is called a sink."""

PATTERN = 0.5
"""Centred cosine from which blocks are said to share a map: DeepViT's tau, as of whole columns."""

COLUMNS = (
    Column("block", "block", "whole"),
    Column("like the block before, %", "before", "percent"),
    Column("cosine with the block before", "before_mean", "ratio"),
    Column("centred cosine with it", "before_centred", "ratio"),
    Column("like the nearest, %", "nearest", "percent"),
    Column("cosine of heads", "head_similarity", "ratio"),
    Column("cosine of tokens with the last", "feature_similarity", "ratio"),
    Column("effective rank", "effective_rank", "ratio"),
    Column("rank, % of the most", "rank_share", "percent"),
    Column("entropy / ln M", "entropy_normalised", "ratio"),
    Column("most attended token, %", "sink", "percent"),
    Column("… a prefix token, %", "sink_in_prefix", "percent"),
)
"""Columns of the table of blocks, between the model and the layer."""

CURVES = {
    "adjacent-cosine": "before_mean",
    "centred": "before_centred",
    "adjacent": "before",
    "nearest": "nearest",
    "heads": "head_similarity",
    "features": "feature_similarity",
    "rank": "rank_share",
    "entropy": "entropy_normalised",
    "sink": "sink",
}
"""Columns that are drawn over the blocks, by the key of the figure."""

SQUARE = (410.0, 352.0)

Kind = Literal["same", "even", "drifting", "spread"]


@dataclass(frozen=True, kw_only=True)
class LayerReading:
    """What was read of one layer of attention and of the block that it sits in.

    Attributes:
        path: Of the layer.
        block: Number of the layer in the model, from 1.
        stage: Stage of a hierarchical model, from 0.
        attention: Name of the mixer, or of the class of the host's own attention.
        remedy: What that mixer has against maps that are alike; empty for nothing.
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
    remedy: str
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


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Blocks that follow one another, each similar to the one before.

    Attributes:
        kind: ``same`` if every two are similar and share a pattern, ``even`` if they also attend
            nearly evenly (:data:`EVEN`), ``drifting`` if only neighbours are similar and share a
            pattern, and ``spread`` if what they share is no pattern (:data:`PATTERN`).
        blocks: Their numbers in the model, from 1.
        least: Share of similar columns (Eq. 7) of the two that are least alike.
        mean: The same of every two, on average.
        cosine: Mean cosine (Eq. 2) of every two; of neighbours where not every two are similar.
        centred: Mean cosine of the same, each column's mean taken off; None where nothing is left.
        entropy: Mean entropy over ln M; None where none of them has one.
    """

    kind: Kind
    blocks: tuple[int, ...]
    least: float
    mean: float
    cosine: float
    centred: float | None
    entropy: float | None


class Collapses(Result):
    """Attention collapse of several models, overlaid."""

    name = "collapse"
    templates = "keymix.studies.collapse"

    def __init__(self, studies: Sequence[Collapse]) -> None:
        self._studies = tuple(studies)

    @property
    def studies(self) -> tuple[Collapse, ...]:
        """The models."""
        return self._studies

    @property
    def sentences(self) -> dict[str, list[str]]:
        """What was found of each model."""
        return {label: said for each in self.studies for label, said in each.sentences.items()}

    @property
    def left_out(self) -> list[str]:
        """Which images could not be read."""
        return [why for study in self.studies for why in study.of.left_out.values()]

    @property
    def data(self) -> dict[str, object]:
        """The models, as ``studies``."""
        return {"studies": [study.data for study in self.studies]}

    @property
    def tables(self) -> dict[str, Table]:
        """A row for each block; people see the models where there are several, else the layers."""
        several = len(self.studies) > 1
        model = Column("model", "model", "name", where="both" if several else "csv")
        layer = Column("layer", "path", where="csv" if several else "both")
        columns = (model, *COLUMNS, layer)
        rows = [[row[c.key] for c in columns] for study in self.studies for row in study.rows]
        note = " ".join(self.words("blocks"))
        return {"blocks": Table("blocks", "Block by block", columns, rows, note=note)}

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Models in the colours of their mixers where no two have the same."""
        return charts.looks_of_models(
            {s.of.label: {layer.attention for layer in s.layers} for s in self.studies}
        )

    @cached_property
    def figures(self) -> dict[str, Chart]:
        """Measures along the blocks, models overlaid; every two blocks of each; mixed heads."""
        made = {}
        for key, lines, axes in [*self._over_blocks(), *self._by_depth()]:
            holds = (0.0,) if key == "sink" else (0.0, 1.0)
            draw = partial(charts.curves, lines=lines, holds=holds, **axes)
            made[key] = Chart(key, " ".join(self.words("caption", key)), draw)
        words = file_words(study.of.label for study in self.studies)
        own = {f"{c.key}-{words[s.of.label]}": c for s in self.studies for c in self._squares(s)}
        return made | own

    def _over_blocks(self) -> Iterator[tuple[str, list[Line], dict[str, Any]]]:
        """Yield each measure that some model has of two blocks; a curve for what is comparable."""
        columns = {column.key: column for column in COLUMNS}
        for key, field in CURVES.items():
            part, lines = "group" if field.startswith("before") else "stage", []
            for study in self.studies:
                parts: dict[int, list[tuple[int, float]]] = {}
                for row in study.rows:
                    if row[field] is not None:
                        parts.setdefault(row[part], []).append((row["block"], row[field]))
                label = study.of.label
                points = (zip(*each, strict=True) for each in parts.values())
                lines += [Line(label, self.looks[label], *each) for each in points]
            percent = columns[field].kind == "percent"
            axes = {"x_label": "block", "y_label": columns[field].heading, "percent": percent}
            if any(len(line.xs) > 1 for line in lines):
                yield key, lines, axes

    def _by_depth(self) -> Iterator[tuple[str, list[Line], dict[str, Any]]]:
        """Yield the share of similar blocks by the depth of models, where there are several."""
        lines = []
        for s in (study for study in self.studies if study.pairs):
            share = len(s.similar_blocks) / len(s.with_maps)
            lines.append(Line(s.of.label, self.looks[s.of.label], [len(s.layers)], [share]))
        axes = {"x_label": "blocks of the model", "y_label": "similar blocks, %", "percent": True}
        if len(lines) > 1:
            yield "depth", lines, axes

    def _squares(self, study: Collapse) -> Iterator[Chart]:
        """Draw the mean cosine of every two layers, as it is and centred, and the last Theta."""
        paths, drawn = [*study.blocks], dict[str, dict[str, Any]]()
        blocks = {"names": [*map(str, study.blocks.values())], "label": "block"}
        for key, field in {"pairs": "mean", "pairs-centred": "centred"}.items():
            found = {(layer.path, layer.path): 1.0 for layer in study.with_maps}
            for pair in study.pairs:
                for ends in ((pair.first, pair.second), (pair.second, pair.first)):
                    found[ends] = getattr(pair, field)
            if study.pairs:
                values = [[found.get((p, q)) for q in paths] for p in paths]
                drawn[key] = {**blocks, "values": values, "signed": field == "centred"}
        for theta in [layer.theta for layer in study.layers if layer.theta is not None][-1:]:
            heads = {"names": [str(i + 1) for i in range(len(theta))], "label": "head"}
            high = max(abs(value) for row in theta for value in row) or 1.0
            drawn["theta"] = {**heads, "values": theta, "high": high, "signed": True}
        for key, options in drawn.items():
            draw = partial(charts.heat_map, **options, numbers=key == "theta")
            yield Chart(key, " ".join(self.words("caption", key, study)), draw, SQUARE)


@dataclass(kw_only=True, repr=False)
class Collapse(Collapses):
    """How alike a model's attention maps are, what its tokens become, and what follows from it.

    The table is ``"blocks"``, a row for each block; figures are measures along the blocks.

    Attributes:
        layers: One entry per layer that was chosen, in the model's order, also without a map.
        pairs: Every two layers that can be compared, the earlier first.
        groups: Paths of the layers among which columns can be compared.
        threshold: Cosine tau above which two columns count as similar.
        similar: Share of similar columns above which a block is like the one before.
        unique: Share below which a block is "unique".
        nearest: How many nearest blocks a block was compared with.
        images: Images that were read.
        of: The model and its images.
    """

    layers: tuple[LayerReading, ...]
    pairs: tuple[PairSimilarity, ...]
    groups: tuple[tuple[str, ...], ...]
    threshold: float
    similar: float
    unique: float
    nearest: int
    images: int
    of: ModelOnImages = UNNAMED

    @property
    def studies(self) -> tuple[Collapse, ...]:
        """This model alone."""
        return (self,)

    @cached_property
    def blocks(self) -> Mapping[str, int]:
        """Number of each layer in the model, from 1."""
        return {layer.path: layer.block for layer in self.layers}

    @cached_property
    def _by_ends(self) -> Mapping[tuple[str, str], PairSimilarity]:
        return {(pair.first, pair.second): pair for pair in self.pairs}

    def pair(self, first: str, second: str) -> PairSimilarity:
        """Return the similarity of two layers of one group, the earlier first."""
        return self._by_ends[first, second]

    @property
    def neighbours(self) -> tuple[PairSimilarity, ...]:
        """The pairs of each layer and the next of its group, in the order of the later one."""
        found = itertools.chain(*map(self._along, self.groups))
        return tuple(sorted(found, key=lambda pair: self.blocks[pair.second]))

    def _along(self, paths: Sequence[str]) -> list[PairSimilarity]:
        return [self.pair(first, second) for first, second in itertools.pairwise(paths)]

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
        return tuple(layer.block for layer in self.layers if (layer.nearest or 0.0) > self.unique)

    @property
    def unique_blocks(self) -> tuple[Unique, ...]:
        """The last unique block of each group, and the blocks that could take its map.

        A block is unique whose similarity (Eq. 7) with the one before is below `unique`; the first
        of a group always is.
        """
        found = []
        for group in self.groups:
            like = [pair.similar_fraction > self.unique for pair in self._along(group)]
            at = next((i for i in range(len(like), 0, -1) if not like[i - 1]), 0)
            later = group[at + 1 :]
            shares = [self.pair(group[at], path).similar_fraction for path in later]
            found.append(
                Unique(
                    block=self.blocks[group[at]],
                    path=group[at],
                    sharing=tuple(self.blocks[path] for path in later),
                    least=min(shares, default=None),
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

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The longest stretches of blocks each of which is similar to the one before."""
        found = []
        for group in self.groups:
            start = 0
            for end, pair in enumerate([*self._along(group), None], start=1):
                if pair is None or not pair.similar_fraction > self.similar:
                    found += [self._stretch(group[start:end])] if end - start > 1 else []
                    start = end
        return tuple(sorted(found, key=lambda each: (-len(each.blocks), each.blocks)))

    def _stretch(self, paths: Sequence[str]) -> Stretch:
        pairs = [self.pair(p, q) for p, q in itertools.combinations(paths, 2)]
        shares = [pair.similar_fraction for pair in pairs]
        alike = min(shares) > self.similar
        pairs = pairs if alike else self._along(paths)
        centred = _mean([pair.centred for pair in pairs if not math.isnan(pair.centred)])
        own = [layer.entropy_normalised for layer in self.layers if layer.path in paths]
        entropy = _mean([each for each in own if each is not None])
        pattern = centred is None or centred >= PATTERN
        one: Kind = "even" if (entropy or 0.0) >= EVEN else "same"
        return Stretch(
            kind="spread" if not pattern else one if alike else "drifting",
            blocks=tuple(self.blocks[path] for path in paths),
            least=min(shares),
            mean=sum(shares) / len(shares),
            cosine=sum(pair.mean for pair in pairs) / len(pairs),
            centred=centred,
            entropy=entropy,
        )

    @property
    def repeating(self) -> tuple[int, ...]:
        """Numbers of the blocks that are similar to the one before and share its pattern."""
        same = [each for each in self.stretches if each.kind != "spread"]
        return tuple(sorted(block for each in same for block in each.blocks[1:]))

    @property
    def collapsed(self) -> bool | None:
        """Whether blocks repeat the attention of the one before; None where that is unknown."""
        return bool(self.repeating) if self.pairs else None

    @property
    def sinks(self) -> tuple[LayerReading, ...]:
        """The layers in which one token gets much of the attention, the most attended first."""
        found = [e for e in self.with_maps if e.sink and e.sink > max(SINK, 2 / (e.keys or 1))]
        return tuple(sorted(found, key=lambda layer: -(layer.sink or 0.0)))

    @property
    def sentences(self) -> dict[str, list[str]]:
        """What was found, what could be done, and what was left out."""
        return {self.of.label: self.words("verdict")}

    @property
    def data(self) -> dict[str, object]:
        """Everything with all that follows from it; NaN is None."""
        read = ("images", "threshold", "similar", "unique", "nearest", "groups", "layers")
        followed = ("collapsed", "stretches", "unique_blocks", "shared_from", "pairs")
        own = {key: to_json(getattr(self, key)) for key in (*read, *followed)}
        own["sentences"] = self.words("verdict")
        of = len(self.with_maps)
        for key in ("similar_blocks", "blocks_like_nearest"):
            blocks = list(getattr(self, key))
            share = len(blocks) / of if of else None
            own[key] = {"blocks": blocks, "count": len(blocks), "of": of, "share": share}
        return dict(finite({**to_json(self.of), **own}))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """What was read of each layer and of its pair with the one before, by column."""
        before = {pair.second: pair for pair in self.neighbours}
        fields = {"before": "similar_fraction", "before_mean": "mean", "before_centred": "centred"}
        rows = []
        for layer in self.layers:
            pair, rank = before.get(layer.path), layer.effective_rank
            row = {key: pair and or_none(getattr(pair, field)) for key, field in fields.items()}
            row["rank_share"] = rank and rank / (layer.full_rank or 1)
            rows.append({"model": self.of.label, **vars(layer), **row})
        return rows


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

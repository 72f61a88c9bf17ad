# SPDX-License-Identifier: Apache-2.0
"""The charts of a study of collapse: DeepViT's figures 3, 4, 5 and 8, and what goes with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from keymix.records import or_none
from keymix.report import charts
from keymix.report.charts import Chart, Line, Look, heat_map
from keymix.studies.collapse.readings import LayerReading, Readings

Parts = Sequence[Sequence[tuple[int, float]]]
"""Number of a block and a value, a sequence for each part of a model that can be compared."""

SQUARE = (410.0, 352.0)


@dataclass(frozen=True)
class Measure:
    """A measure over the blocks: part of its file's name, how it is read, its axis, its caption."""

    key: str
    read: Callable[[Readings], Parts]
    axis: str
    caption: str
    percent: bool = False
    holds: Sequence[float] = (0.0, 1.0)


def _of_pairs(field: str) -> Callable[[Readings], Parts]:
    """Read what pairs of neighbouring blocks have, at the later block, a part for each group."""

    def read(study: Readings) -> Parts:
        blocks = study.blocks
        values = {(p.first, p.second): or_none(getattr(p, field)) for p in study.pairs}
        return [
            [
                (blocks[second], value)
                for first, second in itertools.pairwise(group)
                if (value := values[first, second]) is not None
            ]
            for group in study.groups
        ]

    return read


def _of_layers(
    value_of: Callable[[LayerReading], float | None],
) -> Callable[[Readings], Parts]:
    """Read what single blocks have, a part for each stage."""

    def read(study: Readings) -> Parts:
        stages: dict[int, list[tuple[int, float]]] = {}
        for layer in study.layers:
            if (value := value_of(layer)) is not None:
                stages.setdefault(layer.stage, []).append((layer.block, value))
        return list(stages.values())

    return read


def _rank_share(layer: LayerReading) -> float | None:
    """Return a block's effective rank over the most that it can be."""
    if layer.effective_rank is None or layer.full_rank is None:
        return None
    return float(layer.effective_rank / layer.full_rank)


def measures(studies: Mapping[str, Readings]) -> list[Measure]:
    """List the measures, with the thresholds of the studies in their captions."""
    first = next(iter(studies.values()))
    tau, k = f"{first.threshold:g}", first.nearest
    return [
        Measure(
            "adjacent",
            _of_pairs("similar_fraction"),
            "similar columns, %",
            f"Columns like those of the block before: share with a cosine above {tau} (Eq. 7; "
            "Fig. 4, 5 and 8a).",
            percent=True,
        ),
        Measure(
            "adjacent-cosine",
            _of_pairs("mean"),
            "similarity with the block before",
            "How alike the attention of each block and of the one before is: 1 is the same (mean "
            "cosine of columns, DeepViT’s Eq. 2).",
        ),
        Measure(
            "centred",
            _of_pairs("centred"),
            "similarity without the even part",
            "The same after each column's mean was taken off, since even attention alone is alike: "
            "near 0, the patterns have nothing in common (not the paper's).",
        ),
        Measure(
            "nearest",
            _of_layers(lambda layer: layer.nearest),
            "similar columns, %",
            f"Columns like those of the {k} nearest blocks: share whose mean cosine with them is "
            f"above {tau} (Fig. 3a).",
            percent=True,
        ),
        Measure(
            "heads",
            _of_layers(lambda layer: layer.head_similarity),
            "mean cosine",
            "Heads of one block against one another: mean cosine of columns (Fig. 3c).",
        ),
        Measure(
            "features",
            _of_layers(lambda layer: layer.feature_similarity),
            "mean cosine",
            "Tokens after each block against those after the last of its stage: mean cosine "
            "(Fig. 4 and 8b).",
        ),
        Measure(
            "rank",
            _of_layers(_rank_share),
            "effective rank, % of the most",
            "Effective rank of the tokens after each block, as a share of the most that it can be, "
            f"min(N, C): {_most(studies)}.",
            percent=True,
        ),
        Measure(
            "entropy",
            _of_layers(lambda layer: layer.entropy_normalised),
            "entropy / ln M",
            "Entropy of attention after the softmax, over ln M: 1 is even attention.",
        ),
        Measure(
            "sink",
            _of_layers(lambda layer: layer.sink),
            "share of attention, %",
            "Attention on the token that receives most, mean over heads and images.",
            percent=True,
            holds=(0.0,),
        ),
    ]


def _most(studies: Mapping[str, Readings]) -> str:
    """Name the most that the rank can be, a model; in stages it differs."""
    found = []
    for label, study in studies.items():
        of = dict.fromkeys(layer.full_rank for layer in study.layers if layer.full_rank)
        found += [f"{' / '.join(map(str, of))} in {label}"] if of else []
    return ", ".join(found)


def curves(studies: Mapping[str, Readings], looks: Mapping[str, Look]) -> list[Chart]:
    """Draw every measure over the blocks, models overlaid; not what no model has of two blocks."""
    drawn = []
    for measure in measures(studies):
        lines = [
            Line(label, looks[label], *zip(*points, strict=True))
            for label, study in studies.items()
            for points in measure.read(study)
            if points
        ]
        if any(len(line.xs) > 1 for line in lines):
            draw = partial(
                charts.curves,
                lines=lines,
                x_label="block",
                y_label=measure.axis,
                percent=measure.percent,
                holds=measure.holds,
            )
            drawn.append(Chart(measure.key, measure.caption, draw))
    return drawn + _by_depth(studies, looks)


def _by_depth(studies: Mapping[str, Readings], looks: Mapping[str, Look]) -> list[Chart]:
    """Draw the share of similar blocks by the depth of the models, where there are several."""
    lines = [
        Line(label, looks[label], [float(len(study.layers))], [study.share])
        for label, study in studies.items()
        if study.share is not None and study.pairs
    ]
    if len(lines) < 2:
        return []
    caption = (
        "Blocks similar to the one before, share of all blocks, by the depth of the model "
        "(Fig. 3b)."
    )
    draw = partial(
        charts.curves,
        lines=lines,
        x_label="blocks of the model",
        y_label="similar blocks, %",
        percent=True,
        holds=(0.0, 1.0),
    )
    return [Chart("depth", caption, draw)]


def pairs_maps(study: Readings) -> list[Chart]:
    """Draw the mean cosine of every two layers of a model, as it is and centred."""
    if not study.pairs:
        return []
    at = {layer.path: i for i, layer in enumerate(study.layers)}
    names = [str(layer.block) for layer in study.layers]
    drawn = []
    for key, field, caption in (
        ("pairs", "mean", "Mean cosine of the columns of every two maps (Eq. 2)."),
        ("pairs-centred", "centred", "The same, each column's mean taken off."),
    ):
        values: list[list[float | None]] = [[None] * len(at) for _ in at]
        for path in itertools.chain(*study.groups):
            values[at[path]][at[path]] = 1.0
        for pair in study.pairs:
            i, j = at[pair.first], at[pair.second]
            values[i][j] = values[j][i] = or_none(getattr(pair, field))
        signed = field == "centred"
        draw = partial(heat_map, values=values, names=names, label="block", signed=signed)
        drawn.append(Chart(key, caption, draw, SQUARE))
    return drawn


def theta_map(study: Readings) -> Chart | None:
    """Draw Theta of the last block that has one, rows the heads that it takes."""
    found = [(layer.block, layer.theta) for layer in study.layers if layer.theta is not None]
    if not found:
        return None
    block, rows = found[-1]
    high = max(abs(value) for row in rows for value in row) or 1.0
    caption = (
        f"Θ of block {block} (Fig. 8c): how much of each head (row) goes into each new one "
        "(column)."
    )
    names = [str(i + 1) for i in range(len(rows))]
    draw = partial(
        heat_map, values=rows, names=names, label="head", high=high, signed=True, numbers=True
    )
    return Chart("theta", caption, draw, SQUARE)

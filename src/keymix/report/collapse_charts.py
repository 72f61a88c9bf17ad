# SPDX-License-Identifier: Apache-2.0
"""The charts of a study of collapse: DeepViT's figures 3, 4, 5 and 8, and what goes beside them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from keymix.analysis.collapse_record import CollapseStudy, LayerReading
from keymix.report import charts
from keymix.report.charts import Chart, Line, Look, heat_map


def curves(studies: Mapping[str, CollapseStudy], looks: Mapping[str, Look]) -> list[Chart]:
    """Draw every measure over the blocks, models overlaid, leaving out what nobody has."""
    first = next(iter(studies.values()))
    tau, k = f"{first.threshold:g}", first.nearest
    drawn = [
        _over_blocks(
            "adjacent",
            studies,
            looks,
            {label: _neighbours(study, "similar_fraction") for label, study in studies.items()},
            "similar columns, %",
            f"Columns like those of the block before: share with a cosine above {tau} (Eq. 7; "
            "Fig. 4, 5 and 8a).",
            percent=True,
        ),
        _over_blocks(
            "adjacent-cosine",
            studies,
            looks,
            {label: _neighbours(study, "mean") for label, study in studies.items()},
            "mean cosine",
            "Columns like those of the block before: mean cosine (Eq. 2).",
        ),
        _over_blocks(
            "centred",
            studies,
            looks,
            {label: _neighbours(study, "centred") for label, study in studies.items()},
            "mean cosine",
            "The same after each column's mean was taken off: what is alike beyond even attention "
            "(not the paper's).",
        ),
        _of_layers(
            "nearest",
            studies,
            looks,
            "nearest",
            "similar columns, %",
            f"Columns like those of the {k} nearest blocks: share whose mean cosine with them is "
            f"above {tau} (Fig. 3a).",
            percent=True,
        ),
        _of_layers(
            "heads",
            studies,
            looks,
            "head_similarity",
            "mean cosine",
            "Heads of one block against one another: mean cosine of columns (Fig. 3c).",
        ),
        _of_layers(
            "features",
            studies,
            looks,
            "feature_similarity",
            "mean cosine",
            "Tokens after each block against those after the last of its stage: mean cosine "
            "(Fig. 4 and 8b).",
        ),
        _of_layers(
            "rank",
            studies,
            looks,
            "rank_share",
            "effective rank, % of the most",
            "Effective rank of the tokens after each block, as a share of the most that it can be, "
            f"min(N, C): {_most(studies)}.",
            percent=True,
        ),
        _of_layers(
            "entropy",
            studies,
            looks,
            "entropy_normalised",
            "entropy / ln M",
            "Entropy of attention after the softmax, over ln M: 1 is even attention.",
        ),
        _of_layers(
            "sink",
            studies,
            looks,
            "sink",
            "share of attention, %",
            "Attention on the token that receives most, mean over heads and images.",
            percent=True,
            holds=(0.0,),
        ),
        _by_depth(studies, looks),
    ]
    return [chart for chart in drawn if chart is not None]


def _neighbours(study: CollapseStudy, key: str) -> list[list[tuple[int, float]]]:
    """Return number of the later block and value, a list a group."""
    blocks = {layer.path: layer.block for layer in study.layers}
    values = {(pair.first, pair.second): getattr(pair, key) for pair in study.pairs}
    return [
        [
            (blocks[second], values[first, second])
            for first, second in itertools.pairwise(group)
            if values[first, second] is not None
        ]
        for group in study.groups
    ]


def _rank_share(layer: LayerReading) -> float | None:
    """Return a block's effective rank over the most that it can be."""
    if layer.effective_rank is None or layer.full_rank is None:
        return None
    return float(layer.effective_rank / layer.full_rank)


def _most(studies: Mapping[str, CollapseStudy]) -> str:
    """Name the most that the rank can be, a model; in stages it differs."""
    told = []
    for label, study in studies.items():
        of = dict.fromkeys(layer.full_rank for layer in study.layers if layer.full_rank)
        told += [f"{' / '.join(map(str, of))} in {label}"] if of else []
    return ", ".join(told)


def _of_layers(
    key: str,
    studies: Mapping[str, CollapseStudy],
    looks: Mapping[str, Look],
    field: str,
    y_label: str,
    caption: str,
    *,
    percent: bool = False,
    holds: Sequence[float] = (0.0, 1.0),
) -> Chart | None:
    found = {}
    for label, study in studies.items():
        stages: dict[int, list[tuple[int, float]]] = {}
        for layer in study.layers:
            value = _rank_share(layer) if field == "rank_share" else getattr(layer, field)
            if value is not None:
                stages.setdefault(layer.stage, []).append((layer.block, value))
        found[label] = list(stages.values())
    return _over_blocks(key, studies, looks, found, y_label, caption, percent=percent, holds=holds)


def _over_blocks(
    key: str,
    studies: Mapping[str, CollapseStudy],
    looks: Mapping[str, Look],
    found: Mapping[str, Sequence[Sequence[tuple[int, float]]]],
    y_label: str,
    caption: str,
    *,
    percent: bool = False,
    holds: Sequence[float] = (0.0, 1.0),
) -> Chart | None:
    lines = [
        Line(label, looks[label], *zip(*points, strict=True))
        for label, parts in found.items()
        for points in parts
        if points
    ]
    if not lines:
        return None
    deepest = max(layer.block for study in studies.values() for layer in study.layers)
    svg = charts.curves(
        lines,
        x_label="block",
        y_label=y_label,
        name=caption,
        percent=percent,
        markers=deepest <= 16,
        holds=holds,
    )
    return Chart(key, svg, caption)


def _by_depth(studies: Mapping[str, CollapseStudy], looks: Mapping[str, Look]) -> Chart | None:
    """Draw the share of similar blocks by the depth of the models, where there are several."""
    lines = [
        Line(label, looks[label], [float(len(study.layers))], [study.similar_blocks.share])
        for label, study in studies.items()
        if study.similar_blocks.share is not None and study.pairs
    ]
    if len(lines) < 2:
        return None
    depths = sorted({line.xs[0] for line in lines})
    caption = "Blocks similar to the one before, share of all blocks, by the depth of the model "
    caption += "(Fig. 3b)."
    svg = charts.curves(
        lines,
        x_label="blocks of the model",
        y_label="similar blocks, %",
        name=caption,
        percent=True,
        x_ticks=[(depth, f"{depth:.0f}") for depth in depths],
        markers=True,
        holds=(0.0, 1.0),
    )
    return Chart("depth", svg, caption)


def pairs_maps(study: CollapseStudy) -> list[Chart]:
    """Draw the mean cosine of every two layers of a model, as it is and centred."""
    if not study.pairs:
        return []
    return [
        _pairs_map(study, "pairs", "mean", "Mean cosine of the columns of every two maps (Eq. 2)."),
        _pairs_map(study, "pairs-centred", "centred", "The same, each column's mean taken off."),
    ]


def _pairs_map(study: CollapseStudy, key: str, field: str, caption: str) -> Chart:
    at = {layer.path: i for i, layer in enumerate(study.layers)}
    values: list[list[float | None]] = [[None] * len(at) for _ in at]
    for group in study.groups:
        for path in group:
            values[at[path]][at[path]] = 1.0
    for pair in study.pairs:
        i, j = at[pair.first], at[pair.second]
        values[i][j] = values[j][i] = getattr(pair, field)
    names = [str(layer.block) for layer in study.layers]
    svg = heat_map(values, names=names, label="block", name=caption, signed=field == "centred")
    return Chart(key, svg, caption)


def theta_map(study: CollapseStudy) -> Chart | None:
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
    svg = heat_map(
        rows, names=names, label="head", name=caption, high=high, signed=True, numbers=True
    )
    return Chart("theta", svg, caption)

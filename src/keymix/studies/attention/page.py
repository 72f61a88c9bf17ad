# SPDX-License-Identifier: Apache-2.0
"""A look at attention as PNG figures and one offline HTML page: from its record, no torch."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from keymix.analysis.attention_record import (
    AttentionLayer,
    AttentionModel,
    AttentionRecord,
    RolledOut,
)
from keymix.report import tables
from keymix.report.labels import short_labels
from keymix.report.page import render_page
from keymix.report.tables import Column, Table
from keymix.studies.attention.overlays import Cell, Row, draw, number

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One figure: the name of its file, what it shows, and the picture."""

    file: str
    title: str
    png: bytes


def figures(record: AttentionRecord, arrays: Arrays) -> Iterator[Drawn]:
    """Draw a figure for each image and query, and for each model where heads are drawn one by one.

    Models (or heads) are rows, layers are columns; the arrays are the content of ``maps.npz``.
    """
    models = record.models
    groups = [[m] for m in models] if record.heads == "each" else [models]
    queries = ["all"] if record.view == "matrix" else record.queries
    for i, image in enumerate(record.images):
        for q, query in enumerate(queries):
            for group in groups:
                words = [f"{i + 1:02d}", PurePath(image).stem]
                words += [] if record.view == "matrix" else [query.replace(",", "x")]
                words += [group[0].label] if record.heads == "each" else []
                yield _figure(record, arrays, group, i, q, query, _slug(words))


def _slug(words: list[str]) -> str:
    return "-".join(re.sub(r"[^\w.=+]+", "-", word).strip("-")[:60] for word in words) + ".png"


def _figure(
    record: AttentionRecord,
    arrays: Arrays,
    models: Sequence[AttentionModel],
    image: int,
    query: int,
    name: str,
    file: str,
) -> Drawn:
    numbers = sorted({layer.number for m in models for layer in m.layers})
    rolled = record.rollout and record.view == "image"
    columns = [f"layer {n}" for n in numbers] + ([_rollout_label(models)] if rolled else [])
    apart = record.heads == "each"
    short = short_labels([m.label for m in models])
    rows = []
    for model in models:
        layers = {layer.number: layer for layer in model.layers}
        photo = arrays[model.photos][image] if record.view == "image" else None
        most = max((layer.heads for layer in layers.values()), default=1)
        for head in range(most):
            cells = [_cell(layers.get(n), arrays, image, head, query, record) for n in numbers]
            if rolled:
                cells.append(_rolled(model, arrays, image, query, head))
            label = f"head {head}" if apart else short[model.label]
            rows.append(Row(label=label, cells=tuple(cells), photo=photo))
    title = PurePath(record.images[image]).name
    if apart:
        title = f"{models[0].label}: {title}"
    return Drawn(
        file=file,
        title=title,
        png=draw(
            rows, columns, title=title, note=caption(record, models, name), scale=record.scale
        ),
    )


def _cell(
    layer: AttentionLayer | None,
    arrays: Arrays,
    image: int,
    head: int,
    query: int,
    record: AttentionRecord,
) -> Cell:
    if layer is None or head >= layer.heads:
        return Cell(values=None)
    weights = arrays[layer.array][image, head].astype(np.float64)
    if record.view == "matrix":
        return Cell(values=weights * layer.even[0])
    return Cell(values=weights[query] * layer.even[query], mark=_mark(layer, query))


def _rolled(model: AttentionModel, arrays: Arrays, image: int, query: int, head: int) -> Cell:
    if model.rollout is None:
        return Cell(values=None)
    if head > 0:
        return Cell(values=None, why="of all heads: above")
    weights = arrays[model.rollout.array][image, query].astype(np.float64)
    mark = _mark(model.layers[0], query)
    return Cell(values=weights * model.rollout.tokens, mark=mark, apart=True)


def _rollout_label(models: Sequence[AttentionModel]) -> str:
    """Name rollout with the layers that it multiplies, where all models agree."""
    of = {_rollout_layers(m.rollout) for m in models if m.rollout is not None}
    return f"rollout, {of.pop()}" if len(of) == 1 else "rollout"


def _rollout_layers(rollout: RolledOut) -> str:
    count = len(rollout.layers)
    return f"all {count} layers" if count == rollout.of else f"{count} of {rollout.of} layers"


def rollout_range(models: Sequence[AttentionModel]) -> str:
    """Say over which layers rollout goes, where it does not go over all of them."""
    ranges = []
    for m in models:
        if m.rollout is not None and len(m.rollout.layers) < m.rollout.of:
            layers = ", ".join(map(str, m.rollout.layers))
            whose = f" of {m.label}" if len(models) > 1 else ""
            ranges.append(f"layers {layers} only{whose}, {_rollout_layers(m.rollout)}")
    return "; ".join(ranges)


def _mark(layer: AttentionLayer, query: int) -> tuple[float, float] | None:
    place = None if layer.places is None else layer.places[query]
    if place is None or layer.grid is None:
        return None
    return (place[0] + 0.5) / layer.grid[0], (place[1] + 0.5) / layer.grid[1]


def caption(record: AttentionRecord, models: Sequence[AttentionModel], query: str) -> str:
    """Say whose rows a figure shows, at which stage, and which weights."""
    whose = {
        "cls": "Attention of the class token",
        "mean": "Attention that positions receive, the mean over all patch queries",
        "all": "Whole maps, queries down and keys across",
    }.get(query, f"Attention of the query at {query} (framed)")
    parts = [whose, "mean over heads" if record.heads == "mean" else "head by head"]
    parts.append("after the softmax" if record.stage == "softmax" else "as it multiplies V")
    random = [m.label for m in models if m.random]
    if random:
        which = "" if len(random) == len(models) else f" ({', '.join(random)})"
        parts.append(f"RANDOM WEIGHTS, not trained{which}")
    text = "; ".join(parts) + ". 1× is even attention, the same for every key."
    if any(m.rollout is not None for m in models):
        only = rollout_range(models)
        over = f" (over {only})" if only else ""
        text += f" Rollout{over}: maps averaged with the identity, multiplied."
        if query not in ("cls", "mean"):
            text += " Its peak on the query itself is that identity, the residual path."
    return text


def layer_table(record: AttentionRecord) -> Table:
    """Make the table of the layers that were read; whole maps have nothing in the last columns."""
    columns = [
        Column("model", "model", "name"),
        Column("layer", "layer", "whole"),
        Column("path", "path"),
        Column("heads read", "heads_read", "whole", where="people"),
        Column("keys", "keys", "whole", where="people"),
        Column("grid of keys", "key_grid", where="people", sort="none"),
        Column("strongest, × even", "strongest, x even", "ratio", write=number),
        Column("on prefix tokens, %", "on prefix tokens, %", "ratio", write="{:.1f}".format),
    ]
    of_heads = " (mean)" if record.heads == "mean" else ""
    rows = [
        (
            model.label,
            layer.number,
            layer.path,
            tables.Cell(layer.heads_read, f"{layer.heads_read}{of_heads}"),
            tables.Cell(layer.even[0], ", ".join(map(str, dict.fromkeys(layer.even)))),
            " × ".join(map(str, layer.key_grid or ())),
            layer.peak,
            None if layer.prefix_share is None else 100 * layer.prefix_share,
        )
        for model in record.models
        for layer in model.layers
    ]
    return Table("", "Layers that were read", columns, rows)


def render(record: AttentionRecord, drawn: Sequence[Drawn]) -> str:
    """Render the page."""
    view = {
        "r": record,
        "figures": [
            {
                "title": each.title,
                "file": each.file,
                "uri": "data:image/png;base64," + base64.b64encode(each.png).decode("ascii"),
            }
            for each in drawn
        ],
        "random": [m.label for m in record.models if m.random],
        "layers": layer_table(record),
        "rolled": any(m.rollout is not None for m in record.models),
        "rolled_only": rollout_range(record.models),
    }
    return render_page("own/page.html.j2", view, package=__package__ or "")

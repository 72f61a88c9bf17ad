# SPDX-License-Identifier: Apache-2.0
"""A look at attention in pictures, a table and an answer: from its record, no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from keymix.analysis.attention_record import (
    AttentionLayer,
    AttentionModel,
    AttentionRecord,
    RolledOut,
)
from keymix.report import charts, tables
from keymix.report.charts import Chart, Line, Look, short_labels
from keymix.report.pictures import jpeg_uri, picture, png_uri
from keymix.report.tables import Column, Table
from keymix.studies.attention.overlays import (
    Cell,
    Range,
    Row,
    Scale,
    draw,
    number,
    shaded,
    shared_ranges,
    span,
    strip,
)
from keymix.studies.study import listed, untrained

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One figure: the name of its file, what it shows, the picture, and what is in it."""

    file: str
    title: str
    png: bytes
    note: str
    columns: Sequence[str]
    rows: Sequence[Row]


def figures(record: AttentionRecord, arrays: Arrays) -> Iterator[Drawn]:
    """Draw a figure for each image and query, and for each model where heads are drawn one by one.

    Models (or heads) are rows, layers are columns; the arrays are those of
    ``attention-maps.npz``.
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
    parts = (re.sub(r"[^\w.=+]+", "-", word).strip("-")[:60] for word in words)
    return f"attention-{'-'.join(parts)}.png"


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
    columns = [f"block {n + 1}" for n in numbers] + ([_rollout_label(models)] if rolled else [])
    apart = record.heads == "each"
    short = short_labels([m.label for m in models])
    rows = []
    for model in models:
        layers = {layer.number: layer for layer in model.layers}
        photo = arrays[model.photos][image] if record.view == "image" else None
        most = max((layer.heads for layer in layers.values()), default=1)
        for head in range(most):
            cells = [
                _cell(model, layers.get(n), arrays, image, head, query, record) for n in numbers
            ]
            if rolled:
                cells.append(_rolled(model, arrays, image, query, head))
            label = f"head {head}" if apart else short[model.label]
            rows.append(Row(label=label, cells=tuple(cells), photo=photo))
    title = PurePath(record.images[image]).name
    if apart:
        title = f"{models[0].label}: {title}"
    note = caption(record, models, name)
    return Drawn(
        file=file,
        title=title,
        png=draw(rows, columns, title=title, note=note, scale=record.scale),
        note=note,
        columns=columns,
        rows=rows,
    )


def _cell(
    model: AttentionModel,
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
    return Cell(
        values=weights[query] * layer.even[query],
        image=model.image,
        mark=_mark(layer, query, model.image),
    )


def _rolled(model: AttentionModel, arrays: Arrays, image: int, query: int, head: int) -> Cell:
    if model.rollout is None:
        return Cell(values=None)
    if head > 0:
        return Cell(values=None, why="of all heads: above")
    weights = arrays[model.rollout.array][image, query].astype(np.float64)
    mark = _mark(model.layers[0], query, model.image)
    values = weights * model.rollout.tokens
    return Cell(values=values, image=model.image, mark=mark, apart=True)


def _rollout_label(models: Sequence[AttentionModel]) -> str:
    """Name rollout with the layers that it multiplies, where all models agree."""
    of = {_rollout_layers(m.rollout) for m in models if m.rollout is not None}
    return f"rollout, {of.pop()}" if len(of) == 1 else "rollout"


def _rollout_layers(rollout: RolledOut) -> str:
    count = len(rollout.layers)
    return f"all {count} blocks" if count == rollout.of else f"{count} of {rollout.of} blocks"


def rollout_range(models: Sequence[AttentionModel]) -> str:
    """Say over which layers rollout goes, where it does not go over all of them."""
    ranges = []
    for m in models:
        if m.rollout is not None and len(m.rollout.layers) < m.rollout.of:
            layers = ", ".join(str(n + 1) for n in m.rollout.layers)
            whose = f" of {m.label}" if len(models) > 1 else ""
            ranges.append(f"blocks {layers} only{whose}, {_rollout_layers(m.rollout)}")
    return "; ".join(ranges)


def _mark(
    layer: AttentionLayer, query: int, image: tuple[float, float]
) -> tuple[float, float] | None:
    """Say where a query's patch has its middle on the image, as shares; None for one outside."""
    place = None if layer.places is None else layer.places[query]
    if place is None or layer.grid is None:
        return None
    down, across = (
        (at + 0.5) / side / share for at, side, share in zip(place, layer.grid, image, strict=True)
    )
    return (down, across) if down < 1 and across < 1 else None


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
        Column("block", "block", "whole", where="people"),
        Column("", "layer", "whole", where="csv"),
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
            layer.number + 1,
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
    return Table("layers", "Layers that were read", columns, rows)


EVEN = 1.5
"""Times even attention below which nothing stands out."""

PREFIX = 0.5
"""Share of attention on prefix tokens from which the answer names it."""


def answer(record: AttentionRecord) -> str:
    """Say where attention is sharpest, or why the maps say nothing."""
    trained = [model for model in record.models if not model.random]
    if not trained:
        return untrained("the attention maps", [model.label for model in record.models])
    labels = [model.label for model in trained]
    if record.view == "matrix":
        return f"Whole attention maps of {listed(labels)}: blocks with equal cells attend alike"
    sharpest = {model.label: _sharpest(model) for model in trained}
    found = {label: at for label, at in sharpest.items() if at is not None}
    one = ", on one image" if len(record.images) == 1 else ""
    if not found:
        return f"No block of {listed(labels)} has a map over the image"
    top = sorted(found.items(), key=lambda pair: -pair[1][1])
    label, (block, peak) = top[0]
    if peak < EVEN:
        return (
            f"{listed(labels)} look{'s' if len(labels) == 1 else ''} everywhere alike: no position "
            f"gets more than {peak:.1f} times even attention{one}"
        )
    if len(top) > 1:
        last, (at, least) = top[-1]
        return (
            f"{label} looks most sharply, {number(peak)} times even attention in block {block}; "
            f"{last} least, {number(least)} times in block {at}{one}"
        )
    return (
        f"{label} looks most sharply in block {block}: its strongest position gets {number(peak)} "
        f"times even attention{_on_prefix(trained[0])}{one}"
    )


def _sharpest(model: AttentionModel) -> tuple[int, float] | None:
    """Return the block, counted from 1, with the largest weight, and that as times even."""
    found = [(layer.number + 1, layer.peak) for layer in model.layers if layer.peak is not None]
    return max(found, key=lambda pair: pair[1], default=None)


def _on_prefix(model: AttentionModel) -> str:
    shares = [(layer.prefix_share or 0.0, layer.number + 1) for layer in model.layers]
    share, block = max(shares)
    if share < PREFIX:
        return ""
    return f", and in block {block} prefix tokens get {100 * share:.0f} % of all"


def peaks(record: AttentionRecord, looks: Mapping[str, Look]) -> Chart | None:
    """Draw the largest weight on one position along the blocks; None of single blocks."""
    lines = []
    for model in record.models:
        at = [(n.number + 1.0, n.peak) for n in model.layers if n.peak is not None]
        if len(at) > 1:
            lines.append(Line(model.label, looks[model.label], *zip(*at, strict=True)))
    if not lines:
        return None
    caption = (
        "How sharply each block attends: the largest weight on one position, as a multiple of even "
        "attention, mean over images, heads and queries."
    )
    draw = partial(
        charts.curves,
        lines=lines,
        x_label="block",
        y_label="strongest position, × even attention",
        holds=(0.0,),
    )
    return Chart("peaks", caption, draw)


SIDE = 200
"""Pixels of a picture's longer side on the page."""


def sheet(drawn: Drawn, scale: Scale) -> dict[str, Any]:
    """Make the pictures of a figure one by one, so that the page can place them."""
    ranges = shared_ranges(drawn.rows)
    rows = []
    for row in drawn.rows:
        cells = []
        for heading, cell in zip(drawn.columns, row.cells, strict=True):
            if cell.values is None:
                cells.append({"heading": heading, "uri": None, "why": cell.why})
                continue
            over = ranges[cell.apart] if scale == "shared" else Range.own(cell.shown)
            uri = _uri(shaded(cell, row.photo, over))
            shown: dict[str, Any] = {"heading": heading, "uri": uri, "mark": cell.mark}
            cells.append({**shown, "span": span(cell.shown)})
        photo = None if row.photo is None else _uri(np.asarray(picture(row.photo)) / 255)
        rows.append({"label": row.label, "photo": photo, "cells": cells})
    bars = [
        {
            "uri": _uri(np.rot90(strip(over), -1)),
            "low": "0×" if over.low == 0 else f"{number(over.low)}×",
            "high": f"≥ {number(over.high)}×",
            "even": 100 * (1 - over.low) / (over.high - over.low),
            "of": "rollout" if apart else "blocks",
        }
        for apart, over in ranges.items()
        if scale == "shared"
    ]
    pixels = min((min(r.photo.shape[1:]) for r in drawn.rows if r.photo is not None), default=0)
    return {**vars(drawn), "rows": rows, "bars": bars, "coarse": pixels < SIDE // 2}


def _uri(pixels: npt.NDArray[np.float64]) -> str:
    made = Image.fromarray(np.round(255 * np.clip(pixels, 0, 1)).astype(np.uint8))
    if max(made.size) > SIDE:
        made.thumbnail((SIDE, SIDE))
    return jpeg_uri(made) if min(made.size) > SIDE // 2 else png_uri(made)

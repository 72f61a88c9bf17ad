# SPDX-License-Identifier: Apache-2.0
"""Where models look, as a result: pictures, the table of layers, an answer. No torch."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from keymix.analysis.study_record import StudiedModel
from keymix.records import to_json
from keymix.report import charts, tables
from keymix.report.charts import Chart, Line, Look, short_labels
from keymix.report.result import Result
from keymix.report.tables import Column, Table
from keymix.studies.attention.overlays import Cell, Drawn, Row, Scale

Arrays = Mapping[str, npt.NDArray[Any]]
Shares = tuple[float, float]
WHOLE: Shares = (1.0, 1.0)
"""Share of what maps cover that images without padding are."""


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """The maps of one layer."""

    number: int  # of the layer in the model's order, from 0
    path: str
    array: str  # name of its weights in ``attention-maps.npz``
    heads: int
    heads_read: int  # heads that were read
    keys: int  # keys that a row runs over
    even: tuple[int, ...]  # one over the even weight of each query's row
    # rows and columns of the queries; None of whole maps, as is all that follows
    grid: tuple[int, int] | None = None
    key_grid: tuple[int, int] | None = None  # rows and columns of the keys
    # row and column of each query on the grid; None for one that is no patch
    places: tuple[tuple[int, int] | None, ...] | None = None
    peak: float | None = None  # largest weight on one position, as a multiple of even attention
    # share of a row on prefix tokens; None too where there are none
    prefix_share: float | None = None

    def mark(self, query: int, image: Shares) -> Shares | None:
        """Say where a query's patch has its middle on the image; None for one outside."""
        place = None if self.places is None else self.places[query]
        if place is None or self.grid is None:
            return None
        down, across = (
            (at + 0.5) / side / share
            for at, side, share in zip(place, self.grid, image, strict=True)
        )
        return (down, across) if down < 1 and across < 1 else None


@dataclass(frozen=True, kw_only=True)
class RolledOut:
    """Attention rollout of a model."""

    array: str  # its name in ``attention-maps.npz``
    tokens: int  # tokens of the maps, prefix tokens among them
    layers: tuple[int, ...]
    of: int

    @property
    def blocks(self) -> list[int]:
        """The layers, counted from 1."""
        return [n + 1 for n in self.layers]


@dataclass(frozen=True, kw_only=True)
class AttentionModel(StudiedModel):
    """What one model looks at."""

    photos: str  # name of the images in ``attention-maps.npz``
    layers: tuple[AttentionLayer, ...]
    missing: Mapping[str, str]  # path to reason of those without
    rollout: RolledOut | None  # none if it was not asked for or cannot be
    no_rollout: str | None  # why it cannot be
    # height and width of the images as shares of what the maps cover; the rest is padding
    image: Shares = WHOLE

    def omitted(self) -> tuple[str, ...]:
        """The field that is not written: the share of images without padding."""
        return ("image",) if self.image == WHOLE else ()


@dataclass(frozen=True, kw_only=True)
class AttentionRecord:
    """The content of ``attention.json``."""

    stage: Literal["softmax", "final"]  # right after the softmax, or the map that multiplies V
    heads: Literal["mean", "each"]
    view: Literal["image", "matrix"]  # over the image, or whole maps
    scale: Scale  # one scale of colours for a figure, or one per cell
    rollout: bool  # whether rollout was asked for
    queries: tuple[str, ...]
    origin: str  # where the images come from, in words
    images: tuple[str, ...]
    left_out: Mapping[str, str]  # name and reason of each that could not be read
    models: tuple[AttentionModel, ...]


class Attention(Result):
    """Where models look: pictures over the images, or whole maps.

    The table is ``"layers"``, the figure ``"peaks"``. ``attention-maps.npz`` among its files has
    all weights, and each picture is a PNG.
    """

    name = "attention"
    templates = "keymix.studies.attention"

    def __init__(self, record: AttentionRecord, arrays: Arrays) -> None:
        self.record, self.arrays = record, arrays

    @cached_property
    def drawn(self) -> tuple[Drawn, ...]:
        """A picture for each image and query, and for each model where heads are drawn apart."""
        record = self.record
        groups = [[m] for m in record.models] if record.heads == "each" else [record.models]
        queries = ["all"] if record.view == "matrix" else record.queries
        return tuple(
            self._picture(i, q, query, group)
            for i in range(len(record.images))
            for q, query in enumerate(queries)
            for group in groups
        )

    def _picture(
        self, image: int, query: int, name: str, models: Sequence[AttentionModel]
    ) -> Drawn:
        """Draw models (or heads) as rows and blocks as columns."""
        record, title = self.record, PurePath(self.record.images[image]).name
        apart, whole = record.heads == "each", record.view == "matrix"
        numbers = sorted({layer.number for m in models for layer in m.layers})
        short = short_labels([m.label for m in models])
        rows = []
        for model in models:
            layers = {layer.number: layer for layer in model.layers}
            photo = None if whole else self.arrays[model.photos][image]
            for head in range(max(layer.heads for layer in model.layers)):
                at = (image, head, query)
                cells = [self._cell(model, layers.get(n), *at) for n in numbers]
                cells += [self._rolled(model, *at)] if record.rollout else []
                label = f"head {head + 1}" if apart else short[model.label]
                rows.append(Row(label=label, cells=tuple(cells), photo=photo))
        words = [f"{image + 1:02d}", PurePath(title).stem]
        words += [] if whole else [name.replace(",", "x")]
        words += [models[0].label] if apart else []
        parts = (re.sub(r"[^\w.=+]+", "-", word).strip("-")[:60] for word in words)
        return Drawn(
            file=f"attention-{'-'.join(parts)}.png",
            title=f"{models[0].label}: {title}" if apart else title,
            note=" ".join(self.words("caption", models, name)),
            columns=[f"block {n + 1}" for n in numbers] + ["rollout"] * record.rollout,
            rows=rows,
            scale=record.scale,
        )

    def _cell(
        self, model: AttentionModel, layer: AttentionLayer | None, image: int, head: int, query: int
    ) -> Cell:
        if layer is None or head >= layer.heads:
            return Cell(values=None)
        weights = self.arrays[layer.array][image, head].astype(np.float64)
        if self.record.view == "matrix":
            return Cell(values=weights * layer.even[0])
        mark = layer.mark(query, model.image)
        return Cell(values=weights[query] * layer.even[query], image=model.image, mark=mark)

    def _rolled(self, model: AttentionModel, image: int, head: int, query: int) -> Cell:
        if model.rollout is None or head > 0:
            return Cell(values=None, why="of all heads: above" if head else "no map")
        weights = self.arrays[model.rollout.array][image, query].astype(np.float64)
        return Cell(
            values=weights * model.rollout.tokens,
            image=model.image,
            mark=model.layers[0].mark(query, model.image),
            apart=True,
        )

    @property
    def data(self) -> dict[str, object]:
        """The record, with the names of the pictures."""
        return {**to_json(self.record), "figures": [each.file for each in self.drawn]}

    @property
    def random(self) -> list[str]:
        """The models that are not trained."""
        return [model.label for model in self.record.models if model.random]

    @property
    def sharpest(self) -> list[tuple[float, int, AttentionModel]]:
        """Of each trained model its strongest weight and in which block; the largest first."""
        trained = [model for model in self.record.models if not model.random]
        top = ((*max((layer.peak or 0.0, -layer.number) for layer in m.layers), m) for m in trained)
        return sorted(((peak, 1 - n, m) for peak, n, m in top), key=lambda each: -each[0])

    @property
    def tables(self) -> dict[str, Table]:
        """A row for each layer that was read; whole maps have nothing in the last columns."""
        columns = [
            Column("model", "model", "name"),
            Column("block", "block", "whole"),
            Column("path", "path"),
            Column("heads read", "heads_read", "whole", where="people"),
            Column("keys", "keys", "whole", where="people"),
            Column("grid of keys", "key_grid", where="people", sort="none"),
            Column("strongest, × even", "strongest, x even", "ratio"),
            Column("on prefix tokens, %", "on prefix tokens, %", "ratio", write="{:.1f}".format),
        ]
        of_heads = " (mean)" if self.record.heads == "mean" else ""
        rows = [
            (
                model.label,
                layer.number + 1,
                layer.path,
                tables.Cell(layer.heads_read, f"{layer.heads_read}{of_heads}"),
                tables.Cell(layer.even[0], ", ".join(map(str, dict.fromkeys(layer.even)))),
                " × ".join(map(str, layer.key_grid or ())),
                layer.peak,
                None if layer.prefix_share is None else 100 * layer.prefix_share,
            )
            for model in self.record.models
            for layer in model.layers
        ]
        note = " ".join([*self.words("columns"), *self.notes])
        return {"layers": Table("layers", "Layers that were read", columns, rows, note=note)}

    @property
    def looks(self) -> dict[str, Look]:
        """The models."""
        return charts.looks([model.label for model in self.record.models])

    @property
    def figures(self) -> dict[str, Chart]:
        """How sharply each block attends, where several were read."""
        lines = []
        for model in self.record.models:
            at = [(n.number + 1.0, n.peak) for n in model.layers if n.peak is not None]
            if len(at) > 1:
                lines.append(Line(model.label, self.looks[model.label], *zip(*at, strict=True)))
        if not lines:
            return {}
        caption = (
            "How sharply each block attends: the largest weight on one position, as a multiple of "
            "even attention, mean over images, heads and queries."
        )
        y_label = "strongest position, × even attention"
        drawn = partial(charts.curves, lines=lines, x_label="block", y_label=y_label, holds=(0.0,))
        return {"peaks": Chart("peaks", caption, drawn)}

    @property
    def notes(self) -> list[str]:
        """Which layers have no map, and why there is no rollout."""
        return self.words("notes")

    @property
    def left_out(self) -> list[str]:
        """Which images could not be read."""
        return list(self.record.left_out.values())

    def files(self) -> dict[str, str | bytes]:
        """Add the pictures, and all weights."""
        stream = io.BytesIO()
        arrays: dict[str, Any] = dict(self.arrays)
        np.savez_compressed(stream, **arrays)
        pictures = {each.file: each.png() for each in self.drawn}
        return {**super().files(), **pictures, "attention-maps.npz": stream.getvalue()}

    def view(self) -> dict[str, object]:
        """Return the pictures for its page."""
        return {"sheets": self.drawn}

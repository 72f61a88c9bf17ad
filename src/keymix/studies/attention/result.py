# SPDX-License-Identifier: Apache-2.0
"""Where models look, as a result: pictures, the table of layers, an answer. No torch."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from keymix.analysis.attention_record import AttentionRecord
from keymix.records import to_json
from keymix.report import charts
from keymix.report.charts import Chart, Look
from keymix.report.tables import Table
from keymix.studies.attention.pictures import (
    Arrays,
    Drawn,
    answer,
    figures,
    layer_table,
    peaks,
    rollout_range,
    sheet,
)
from keymix.studies.study import Found


class Attention(Found):
    """Where models look: pictures over the images, or whole maps.

    The table is ``"layers"``, the figure ``"peaks"``. ``attention-maps.npz`` among its files has
    all weights, and each picture is a PNG.
    """

    name = "attention"

    def __init__(self, record: AttentionRecord, arrays: Arrays) -> None:
        self.record, self.arrays = record, arrays

    @cached_property
    def drawn(self) -> tuple[Drawn, ...]:
        """The pictures."""
        return tuple(figures(self.record, self.arrays))

    @property
    def data(self) -> dict[str, object]:
        """The record, with the names of the pictures."""
        return dict(to_json(replace(self.record, figures=tuple(each.file for each in self.drawn))))

    @property
    def answer(self) -> str:
        """Where attention is sharpest, or why the maps say nothing."""
        return answer(self.record)

    @property
    def tables(self) -> dict[str, Table]:
        """A row for each layer that was read."""
        return {"layers": layer_table(self.record)}

    @property
    def looks(self) -> dict[str, Look]:
        """The models."""
        return charts.looks([model.label for model in self.record.models])

    @property
    def figures(self) -> dict[str, Chart]:
        """How sharply each block attends, where several were read."""
        drawn = peaks(self.record, self.looks)
        return {} if drawn is None else {"peaks": drawn}

    @property
    def notes(self) -> list[str]:
        """Which layers have no map, and why there is no rollout."""
        found = []
        for model in self.record.models:
            if model.no_rollout is not None:
                found.append(f"{model.label}: no rollout: {model.no_rollout}")
            found += [f"{model.label}: {at} has no map: {w}" for at, w in model.missing.items()]
        return found

    @property
    def left_out(self) -> list[str]:
        """Which images could not be read."""
        return list(self.record.left_out.values())

    def files(self) -> dict[str, str | bytes]:
        """Add the pictures, and all weights."""
        stream = io.BytesIO()
        arrays: dict[str, Any] = dict(self.arrays)
        np.savez_compressed(stream, **arrays)
        pictures = {each.file: each.png for each in self.drawn}
        return {**super().files(), **pictures, "attention-maps.npz": stream.getvalue()}

    def view(self) -> dict[str, object]:
        """Return what else its page shows."""
        models = self.record.models
        return {
            "r": self.record,
            "sheets": [sheet(each, self.record.scale) for each in self.drawn],
            "random": [model.label for model in models if model.random],
            "trained": any(not model.random for model in models),
            "layers": layer_table(self.record),
            "rolled": any(model.rollout is not None for model in models),
            "rolled_only": rollout_range(models),
        }

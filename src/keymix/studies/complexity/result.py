# SPDX-License-Identifier: Apache-2.0
"""What token mixers cost, as a result: answer, tables and figures. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from keymix.analysis.complexity_record import BASELINE, MixerCosts
from keymix.report import charts
from keymix.report.charts import Chart, Look
from keymix.report.tables import Table
from keymix.studies.complexity.charts import lost, ratio_charts, scaling_charts, without_parameters
from keymix.studies.complexity.tables import answer, tables
from keymix.studies.study import Found, machine_of


@dataclass(kw_only=True, repr=False)
class Complexity(MixerCosts, Found):
    """What token mixers cost, so far or in all: `MixerCosts` as a result.

    Tables are ``"multiples"`` and ``"scaling"`` where something was measured,
    ``"ratio_by_tokens"``, ``"ratio_by_dim"``, ``"ratios"``, ``"weights"``, and ``"missing"`` where
    it has rows; figures are ``"macs"``, ``"latency_ms"``, ``"by-tokens"``, ``"by-dim"`` and two of
    memory.
    """

    name = "complexity"
    baseline = BASELINE

    @property
    def data(self) -> Complexity:
        """The record itself."""
        return self

    @property
    def answer(self) -> str:
        """What the mixers need next to softmax attention, controls aside."""
        return answer(self)

    @cached_property
    def tables(self) -> dict[str, Table]:
        """Tables, by name."""
        return {table.key: table for table in tables(self)}

    @property
    def looks(self) -> dict[str, Look]:
        """The mixers, controls in grey."""
        return charts.looks(
            [entry.label for entry in self.mixers],
            baseline=BASELINE,
            controls=[entry.label for entry in self.mixers if entry.control],
        )

    @cached_property
    def figures(self) -> dict[str, Chart]:
        """Multiply-adds and latency against tokens, then what else was counted and measured."""
        counted, ratios = ratio_charts(self, self.looks)
        latency, memory = scaling_charts(self, self.looks)
        return {chart.key: chart for chart in (*counted, *latency, *ratios, *memory)}

    def machine(self, lines: Mapping[str, str]) -> dict[str, str]:
        """Leave a GPU out that was idle, and say how many threads there were."""
        threads = str(self.setting.threads)
        return {**machine_of(lines, self.setting.device), "threads": threads}

    def view(self) -> dict[str, object]:
        """Return what else its page shows."""
        first = [*self.figures][:2]
        rest = [chart for key, chart in self.figures.items() if key not in first]
        return {
            "lost": lost(self.tables),
            "ratios": [chart for chart in rest if chart.key.startswith("by-")],
            "memory": [chart for chart in rest if chart.key.startswith("peak")],
            "spiking": any(entry.domain == "spiking" for entry in self.mixers),
            "without": without_parameters(self),
            "peak_notes": sorted({row.peak_note for row in self.scaling if row.peak_note}),
        }

# SPDX-License-Identifier: Apache-2.0
"""Spikes and energy of a model, or of several, as a result: answer, tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from keymix.analysis.spikes_record import SpikesStudy
from keymix.records import to_json
from keymix.report import charts
from keymix.report.charts import Chart, Look
from keymix.report.tables import Table
from keymix.studies.spikes.charts import (
    along_blocks,
    along_steps,
    energy_by_part,
    of_tokens,
    on_image,
)
from keymix.studies.spikes.tables import answer, headline, neurons, operations, tables
from keymix.studies.study import RANDOM_NOTE, Found, file_words


class SpikeStudies(Found):
    """Spikes and energy of several models, side by side.

    Tables are ``"total"``, ``"rates"``, ``"steps"``, ``"neurons"`` and ``"operations"``, and
    ``"rates_by_stage-LABEL"`` of each model; figures are ``"energy"``, rates along the blocks and
    steps, and rasters.
    """

    name = "spikes"

    def __init__(self, studies: Sequence[SpikesStudy]) -> None:
        self.studies = tuple(studies)

    @cached_property
    def labelled(self) -> Mapping[str, SpikesStudy]:
        """The models, by label."""
        return {study.label: study for study in self.studies}

    @property
    def data(self) -> dict[str, object]:
        """The models, as ``studies``."""
        return {"studies": to_json(self.studies)}

    @property
    def answer(self) -> str:
        """What an image costs next to the same network without spikes."""
        return answer(self.studies)

    @property
    def sentences(self) -> dict[str, list[str]]:
        """What each model fires and takes, and what to keep in mind."""
        return {
            study.label: [headline(study), *study.notes, *([RANDOM_NOTE] if study.random else [])]
            for study in self.studies
        }

    @property
    def left_out(self) -> list[str]:
        """Which images could not be read."""
        return [why for study in self.studies for why in study.left_out.values()]

    @cached_property
    def tables(self) -> dict[str, Table]:
        """Tables, by name."""
        return tables(self.studies)

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Models in the colours of their mixers where no two have the same."""
        return charts.looks_of_models(
            {label: {f.mixer for f in s.firings if f.mixer} for label, s in self.labelled.items()}
        )

    @cached_property
    def figures(self) -> dict[str, Chart]:
        """Energy by part, rates over the steps and along the blocks, and each model's rasters."""
        first, *steps = [
            energy_by_part(self.labelled, self.looks),
            *along_steps(self.labelled, self.looks),
        ]
        every = [first, *steps, *along_blocks(self.labelled, self.looks)]
        made = {chart.key: chart for chart in every}
        for label, word in file_words(self.labelled).items():
            for i, (_, *drawn) in enumerate(self._rasters(label), start=1):
                made |= {f"{chart.key}-{word}-{i}": chart for chart in drawn}
        return made

    def _rasters(self, label: str) -> list[tuple[str, Chart, Chart]]:
        """Draw each raster twice, spikes as dots and A_t on the image; with its mixer's path."""
        study = self.labelled[label]
        return [(each.path, of_tokens(each), on_image(each, study.photo)) for each in study.rasters]

    def view(self) -> dict[str, object]:
        """Return what else its page shows."""
        lead = {chart.key for chart in [*self.figures.values()][:2]}
        steps = along_steps(self.labelled, self.looks)
        rates = [table for key, table in self.tables.items() if key.startswith("rates_by_stage")]
        return {
            "trained": any(not study.random for study in self.studies),
            "studies": self.labelled,
            "headlines": {label: headline(study) for label, study in self.labelled.items()},
            "first": self.studies[0],
            "totals": self.tables["total"],
            "rates": rates,
            "in_paper": any(c.key.startswith("paper_") for table in rates for c in table.columns),
            "blocks": along_blocks(self.labelled, self.looks),
            "steps": [chart for chart in steps if chart.key not in lead],
            "operations": {label: operations([each]) for label, each in self.labelled.items()},
            "neurons": {label: neurons([each]) for label, each in self.labelled.items()},
            "drawn": {label: self._rasters(label) for label in self.labelled},
        }

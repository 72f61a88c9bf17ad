# SPDX-License-Identifier: Apache-2.0
"""A study of spikes as one offline HTML page, SVG and CSV files: from its record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from keymix.analysis.spikes_record import SpikesRecord, SpikesStudy
from keymix.report import charts, spikes_charts
from keymix.report.charts import Look, as_file
from keymix.report.page import render_page
from keymix.report.spikes_charts import along_blocks, along_steps, energy_by_part
from keymix.report.spikes_tables import headline, neurons, operations, tables


def render(record: SpikesRecord) -> str:
    """Render a study's record.

    Args:
        record: The content of ``spikes.json``.

    Returns:
        The HTML document.
    """
    studies = {study.label: study for study in record.studies}
    looks = _looks(studies)
    made = tables(record)
    view = {
        "r": record,
        "looks": looks,
        "studies": studies,
        "headlines": {label: headline(study) for label, study in studies.items()},
        "first": record.studies[0],
        "totals": made[0],
        "rates": [table for table in made if table.key == "rates_by_stage"],
        "beside_paper": any(
            column.key.startswith("paper_")
            for table in made
            if table.key == "rates_by_stage"
            for column in table.columns
        ),
        "blocks": along_blocks(studies, looks),
        "steps": along_steps(studies, looks),
        "energy": energy_by_part(studies, looks),
        "operations": {label: operations([study]) for label, study in studies.items()},
        "neurons": {label: neurons([study]) for label, study in studies.items()},
        "drawn": {label: _drawn(study) for label, study in studies.items()},
    }
    return render_page("spikes.html.j2", view)


def files(record: SpikesRecord) -> dict[str, str]:
    """Return every chart and every table as a file of its own, by its name."""
    studies = {study.label: study for study in record.studies}
    looks = _looks(studies)
    every = [*along_blocks(studies, looks), *along_steps(studies, looks)]
    every.append(energy_by_part(studies, looks))
    made = {f"spikes-{chart.key}.svg": as_file(chart.svg, looks) for chart in every}
    for i, (label, study) in enumerate(studies.items(), start=1):
        word = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "model"
        name = word if len(studies) == 1 else f"{i}-{word}"
        for j, drawn in enumerate(_drawn(study), start=1):
            for key in ("raster", "image"):
                svg = as_file(getattr(drawn, key))
                made[f"spikes-{key}-{name}-{j}.svg"] = svg
    for table in tables(record):
        if table.saved:
            made[f"spikes-{table.key}.csv"] = table.csv()
    return made


@dataclass(frozen=True)
class DrawnRaster:
    """A raster, drawn twice.

    Attributes:
        title: Which head of which block at which step.
        path: Of the mixer.
        raster: Spikes as dots.
        image: A_t on the image.
    """

    title: str
    path: str
    raster: Markup
    image: Markup


def _drawn(study: SpikesStudy) -> list[DrawnRaster]:
    return [
        DrawnRaster(
            title=spikes_charts.title(found),
            path=found.path,
            raster=spikes_charts.of_tokens(found),
            image=spikes_charts.on_image(found, study.photo),
        )
        for found in study.rasters
    ]


def _looks(studies: Mapping[str, SpikesStudy]) -> dict[str, Look]:
    return charts.looks(list(studies), baseline="")

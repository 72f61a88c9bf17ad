# SPDX-License-Identifier: Apache-2.0
"""A study of spikes as one offline HTML page, SVG and CSV files: from its plain record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from keymix.report import plots, spikes_rasters
from keymix.report.heat import as_file
from keymix.report.page import render_page
from keymix.report.plots import Look
from keymix.report.spikes_charts import along_blocks, along_steps, energy_by_part
from keymix.report.spikes_tables import headline, neurons, operations, tables
from keymix.report.views.payload import as_element_text

Record = Mapping[str, Any]

SCRIPTS = ("core", "tables")


def render(record: Record) -> str:
    """Render a study's record.

    Args:
        record: ``studies``, one a model: ``label``, ``name``, ``weights``, ``random``, ``origin``
            and ``left_out`` of its images, what ``keymix.spike_study(...).to_dict()`` returns,
            ``rasters``, the ``photo`` that they are of (a data URI, or None) and its name
            ``raster_image``; beside them ``command``, ``created`` and ``environment`` (lines by
            name).

    Returns:
        The HTML document.
    """
    studies = {s["label"]: {**s, "headline": headline(s)} for s in record["studies"]}
    looks = _looks(studies)
    made = tables(record)
    view = {
        "r": {**record, "baseline": None},
        "looks": looks,
        "studies": studies,
        "first": record["studies"][0],
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
        "raster_style": Markup(spikes_rasters.STYLE),
    }
    entries = [{"label": label, "colour": look.colour} for label, look in looks.items()]
    payload = as_element_text({"mixers": entries})
    return render_page("spikes.html.j2", view, payload=payload, scripts=SCRIPTS)


def files(record: Record) -> dict[str, str]:
    """Return every chart and every table as a file of its own, by its name."""
    studies = {study["label"]: study for study in record["studies"]}
    looks = _looks(studies)
    charts = [*along_blocks(studies, looks), *along_steps(studies, looks)]
    charts.append(energy_by_part(studies, looks))
    made = {f"spikes-{chart.key}.svg": as_file(chart.svg, looks) for chart in charts}
    for i, (label, study) in enumerate(studies.items(), start=1):
        word = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "model"
        name = word if len(studies) == 1 else f"{i}-{word}"
        for j, drawn in enumerate(_drawn(study), start=1):
            for key in ("raster", "image"):
                svg = as_file(drawn[key], style=spikes_rasters.STYLE)
                made[f"spikes-{key}-{name}-{j}.svg"] = svg
    for table in tables(record):
        if table.saved:
            made[f"spikes-{table.key}.csv"] = table.csv()
    return made


def _drawn(study: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "title": spikes_rasters.title(found),
            "path": found["path"],
            "raster": spikes_rasters.raster(found),
            "image": spikes_rasters.on_image(found, study["photo"]),
        }
        for found in study["rasters"]
    ]


def _looks(studies: Mapping[str, Any]) -> dict[str, Look]:
    return plots.looks(list(studies), baseline="")

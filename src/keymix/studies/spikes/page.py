# SPDX-License-Identifier: Apache-2.0
"""A study of spikes as one offline HTML page, SVG and CSV files: from its record."""

from __future__ import annotations

from collections.abc import Mapping

from keymix.analysis.spikes_record import SpikesRecord, SpikesStudy
from keymix.report import charts
from keymix.report.charts import Chart, Look
from keymix.report.page import render_page
from keymix.studies.spikes.charts import (
    along_blocks,
    along_steps,
    energy_by_part,
    of_tokens,
    on_image,
)
from keymix.studies.spikes.tables import answer, headline, neurons, operations, tables
from keymix.studies.study import file_words, saved_tables


def render(record: SpikesRecord) -> str:
    """Render the page."""
    studies = {study.label: study for study in record.studies}
    looks = _looks(studies)
    made = tables(record)
    steps, blocks = along_steps(studies, looks), along_blocks(studies, looks)
    energy = energy_by_part(studies, looks)
    view = {
        "r": record,
        "answer": answer(record),
        "looks": looks,
        "legend": studies,
        "charts": [energy, *steps[:1]],
        "trained": any(not study.random for study in record.studies),
        "studies": studies,
        "headlines": {label: headline(study) for label, study in studies.items()},
        "first": record.studies[0],
        "totals": made[0],
        "rates": [table for table in made if table.key == "rates_by_stage"],
        "in_paper": any(
            column.key.startswith("paper_")
            for table in made
            if table.key == "rates_by_stage"
            for column in table.columns
        ),
        "blocks": blocks,
        "steps": steps[1:],
        "operations": {label: operations([study]) for label, study in studies.items()},
        "neurons": {label: neurons([study]) for label, study in studies.items()},
        "drawn": {label: _rasters(study) for label, study in studies.items()},
    }
    return render_page("own/page.html.j2", view, package=__package__ or "")


def _looks(studies: Mapping[str, SpikesStudy]) -> dict[str, Look]:
    """Give models the colours of their mixers where no two have the same."""
    mixers = {label: {f.mixer for f in s.firings if f.mixer} for label, s in studies.items()}
    single = {label: found.pop() for label, found in mixers.items() if len(found) == 1}
    distinct = len(set(single.values())) == len(studies)
    return charts.looks(list(studies), mixers=single if distinct else None)


def files(record: SpikesRecord) -> dict[str, str]:
    """Return every chart and every table as a file of its own, by its name."""
    studies = {study.label: study for study in record.studies}
    looks = _looks(studies)
    every = [*along_blocks(studies, looks), *along_steps(studies, looks)]
    every.append(energy_by_part(studies, looks))
    made = {f"spikes-{chart.key}.svg": chart.file for chart in every}
    for i, (label, word) in enumerate(file_words(studies).items(), start=1):
        name = word if len(studies) == 1 else f"{i}-{word}"
        for j, (_, *drawn) in enumerate(_rasters(studies[label]), start=1):
            made |= {f"spikes-{chart.key}-{name}-{j}.svg": chart.file for chart in drawn}
    return {**made, **saved_tables("spikes", tables(record))}


def _rasters(study: SpikesStudy) -> list[tuple[str, Chart, Chart]]:
    """Draw each raster twice, spikes as dots and A_t on the image; with its mixer's path."""
    return [(found.path, of_tokens(found), on_image(found, study.photo)) for found in study.rasters]

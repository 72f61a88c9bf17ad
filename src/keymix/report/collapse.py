# SPDX-License-Identifier: Apache-2.0
"""A study of attention collapse as one offline HTML page and SVG files: from its record."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from keymix.analysis.collapse_record import CollapseRecord, CollapseStudy, PairReading
from keymix.report import charts
from keymix.report.charts import Look, as_file
from keymix.report.collapse_charts import curves, pairs_maps, theta_map
from keymix.report.page import render_page

COLUMNS = (
    ("block", "block", "{:.0f}", 1.0),
    ("before", "like the block before, %", "{:.1f}", 100.0),
    ("before_mean", "its mean cosine", "{:.3f}", 1.0),
    ("before_centred", "… centred", "{:.3f}", 1.0),
    ("nearest", "like the nearest, %", "{:.1f}", 100.0),
    ("head_similarity", "cosine of heads", "{:.3f}", 1.0),
    ("feature_similarity", "cosine of tokens with the last", "{:.3f}", 1.0),
    ("effective_rank", "effective rank", "{:.1f}", 1.0),
    ("entropy_normalised", "entropy / ln M", "{:.3f}", 1.0),
    ("sink", "most attended token, %", "{:.1f}", 100.0),
    ("sink_in_prefix", "… is a prefix token, %", "{:.0f}", 100.0),
)
"""Columns of the table of blocks: key, heading, how it is written, factor."""


def render(record: CollapseRecord) -> str:
    """Render a study's record.

    Args:
        record: The content of ``collapse.json``.

    Returns:
        The HTML document.
    """
    studies = {study.label: study for study in record.studies}
    looks = _looks(studies)
    view = {
        "r": record,
        "looks": looks,
        "studies": studies,
        "charts": curves(studies, looks),
        "pairs": {label: pairs_maps(study) for label, study in studies.items()},
        "thetas": {label: theta_map(study) for label, study in studies.items()},
        "columns": COLUMNS,
        "rows": {label: rows_of(study) for label, study in studies.items()},
        "first": record.studies[0],
    }
    return render_page("collapse.html.j2", view)


def files(record: CollapseRecord) -> dict[str, str]:
    """Return every chart as a file of its own, by its name."""
    studies = {study.label: study for study in record.studies}
    looks = _looks(studies)
    made = {f"collapse-{c.key}.svg": as_file(c.svg, looks) for c in curves(studies, looks)}
    used: set[str] = set()
    for label, study in studies.items():
        word = _word(label, used)
        for chart in (*pairs_maps(study), theta_map(study)):
            if chart is not None:
                made[f"collapse-{chart.key}-{word}.svg"] = as_file(chart.svg)
    return made


def _looks(studies: Mapping[str, CollapseStudy]) -> dict[str, Look]:
    return charts.looks(list(studies), baseline="")


def _word(label: str, used: set[str]) -> str:
    """Make a label fit for a file's name, unlike those before."""
    word = plain = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "model"
    number = 1
    while word in used:
        number += 1
        word = f"{plain}-{number}"
    used.add(word)
    return word


@dataclass(frozen=True)
class BlockRow:
    """What the table says of a block.

    Attributes:
        path: Of its layer.
        cells: Raw value and text, one a column.
    """

    path: str
    cells: tuple[tuple[float | None, str], ...]


def rows_of(study: CollapseStudy) -> list[BlockRow]:
    """Return what the table says of each block."""
    before: dict[str, PairReading] = {}
    pairs = {(pair.first, pair.second): pair for pair in study.pairs}
    for group in study.groups:
        for first, second in itertools.pairwise(group):
            before[second] = pairs[first, second]
    rows = []
    for layer in study.layers:
        pair = before.get(layer.path)
        own = {
            "before": None if pair is None else pair.similar_fraction,
            "before_mean": None if pair is None else pair.mean,
            "before_centred": None if pair is None else pair.centred,
        }
        values = [own[key] if key in own else getattr(layer, key) for key, *_ in COLUMNS]
        cells = tuple(
            (value, "–" if value is None else form.format(factor * value))
            for value, (_, _, form, factor) in zip(values, COLUMNS, strict=True)
        )
        rows.append(BlockRow(layer.path, cells))
    return rows

# SPDX-License-Identifier: Apache-2.0
"""A study of attention collapse as one offline HTML page, a table and SVG files: no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from keymix.analysis.collapse_record import CollapseRecord, CollapseStudy, PairReading
from keymix.report import charts, formats
from keymix.report.charts import as_file
from keymix.report.page import render_page
from keymix.report.tables import Column, Table
from keymix.studies.collapse.charts import curves, pairs_maps, theta_map
from keymix.studies.study import file_words

_COSINE: Callable[[Any], str] = "{:.3f}".format

COLUMNS = (
    Column("model", "model", where="csv"),
    Column("layer", "path", where="csv"),
    Column("block", "block", "whole"),
    Column("like the block before, %", "before", "percent"),
    Column("its mean cosine", "before_mean", "ratio", write=_COSINE),
    Column("… centred", "before_centred", "ratio", write=_COSINE),
    Column("like the nearest, %", "nearest", "percent"),
    Column("cosine of heads", "head_similarity", "ratio", write=_COSINE),
    Column("cosine of tokens with the last", "feature_similarity", "ratio", write=_COSINE),
    Column("effective rank", "effective_rank", "ratio", write="{:.1f}".format),
    Column("entropy / ln M", "entropy_normalised", "ratio", write=_COSINE),
    Column("most attended token, %", "sink", "percent"),
    Column(
        "… is a prefix token, %",
        "sink_in_prefix",
        "percent",
        write=partial(formats.percent, digits=0),
    ),
    Column("layer", "", where="people"),
)
"""Columns of the table of blocks."""


def render(record: CollapseRecord) -> str:
    """Render the page."""
    studies = {study.label: study for study in record.studies}
    looks = charts.looks(list(studies), baseline="")
    view = {
        "r": record,
        "looks": looks,
        "studies": studies,
        "charts": curves(studies, looks),
        "pairs": {label: pairs_maps(study) for label, study in studies.items()},
        "thetas": {label: theta_map(study) for label, study in studies.items()},
        "blocks": {label: table([study]) for label, study in studies.items()},
        "first": record.studies[0],
    }
    return render_page("own/page.html.j2", view, package=__package__ or "")


def files(record: CollapseRecord) -> dict[str, str]:
    """Return every chart as a file of its own, by its name."""
    studies = {study.label: study for study in record.studies}
    looks = charts.looks(list(studies), baseline="")
    made = {f"collapse-{c.key}.svg": as_file(c.svg, looks) for c in curves(studies, looks)}
    for label, word in file_words(studies).items():
        for chart in (*pairs_maps(studies[label]), theta_map(studies[label])):
            if chart is not None:
                made[f"collapse-{chart.key}-{word}.svg"] = as_file(chart.svg)
    return made


def table(studies: Sequence[CollapseStudy]) -> Table:
    """Make the table of the blocks of some models, a row per block."""
    return Table("", "", COLUMNS, [row for study in studies for row in _rows(study)])


def _rows(study: CollapseStudy) -> list[list[Any]]:
    before: dict[str, PairReading] = {}
    pairs = {(pair.first, pair.second): pair for pair in study.pairs}
    for group in study.groups:
        for first, second in itertools.pairwise(group):
            before[second] = pairs[first, second]
    rows = []
    for layer in study.layers:
        pair = before.get(layer.path)
        own = {
            "model": study.label,
            "before": None if pair is None else pair.similar_fraction,
            "before_mean": None if pair is None else pair.mean,
            "before_centred": None if pair is None else pair.centred,
            "": layer.path,
        }
        rows.append([own[c.key] if c.key in own else getattr(layer, c.key) for c in COLUMNS])
    return rows

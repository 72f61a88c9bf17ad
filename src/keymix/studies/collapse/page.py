# SPDX-License-Identifier: Apache-2.0
"""A study of attention collapse as one offline HTML page, a table and SVG files: no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from keymix.analysis.collapse_record import CollapseRecord, CollapseStudy, PairReading
from keymix.analysis.collapse_verdict import FEW
from keymix.report import charts, formats
from keymix.report.charts import Look
from keymix.report.page import render_page
from keymix.report.tables import Column, Table
from keymix.studies.collapse.charts import curves, pairs_maps, theta_map
from keymix.studies.study import file_words, listed, untrained

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


LEAD = ("adjacent-cosine", "centred")
"""Charts that are shown first: how alike neighbours are, as they are and beyond even attention."""


def answer(record: CollapseRecord) -> str:
    """Say whether blocks repeat their attention, or why that cannot be said."""
    trained = [study for study in record.studies if not study.random]
    if not trained:
        return untrained("the attention maps", [study.label for study in record.studies])
    labels = [study.label for study in trained]
    fewest = min(study.images for study in trained)
    if fewest == 1:
        return f"One image is too few to say whether attention repeats in {listed(labels)}"
    few = f", on {fewest} images only" if fewest < FEW else ""
    if len(trained) == 1:
        who = f"{labels[0]}: " if len(record.studies) > 1 else ""
        return f"{who}{trained[0].verdict.headline.removesuffix('.')}{few}"
    if not any(study.verdict.collapsed for study in trained):
        most = max((mean for study in trained for mean in _neighbours(study)), default=None)
        if most is None:
            return f"No two blocks can be compared in {listed(labels)}"
        return (
            f"No block repeats the attention of the one before in {listed(labels)}: similarity at "
            f"most {most:.2f}{few}"
        )
    counts = [(study.similar_blocks, study) for study in trained if study.verdict.collapsed]
    counts.sort(key=lambda pair: -(pair[0].share or 0))
    found = [f"{study.label} in {of.count} of {of.of} blocks" for of, study in counts]
    none = [study.label for study in trained if not study.verdict.collapsed]
    text = f"Attention repeats that of the block before in {listed(found)}"
    return f"{text}{f', not in {listed(none)}' if none else ''}{few}"


def _neighbours(study: CollapseStudy) -> list[float]:
    """List the mean cosines of neighbouring blocks."""
    after = {pair for group in study.groups for pair in itertools.pairwise(group)}
    found = [pair.mean for pair in study.pairs if (pair.first, pair.second) in after]
    return [mean for mean in found if mean is not None]


def _looks(studies: Mapping[str, CollapseStudy]) -> dict[str, Look]:
    """Give models the colours of their mixers where no two have the same."""
    mixers = {label: {layer.attention for layer in s.layers} for label, s in studies.items()}
    single = {label: found.pop() for label, found in mixers.items() if len(found) == 1}
    distinct = len(set(single.values())) == len(studies)
    softmax = [label for label, mixer in single.items() if mixer == "softmax" and distinct]
    return charts.looks(
        list(studies), baseline="".join(softmax), mixers=single if distinct else None
    )


def render(record: CollapseRecord) -> str:
    """Render the page."""
    studies = {study.label: study for study in record.studies}
    looks = _looks(studies)
    drawn = curves(studies, looks)
    lead = [chart for chart in drawn if chart.key in LEAD] or drawn[:2]
    view = {
        "r": record,
        "answer": answer(record),
        "looks": looks,
        "legend": studies,
        "studies": studies,
        "trained": any(not study.random for study in record.studies),
        "charts": lead,
        "more": [chart for chart in drawn if chart not in lead],
        "pairs": {label: pairs_maps(study) for label, study in studies.items()},
        "thetas": {label: theta_map(study) for label, study in studies.items()},
        "blocks": {label: table([study]) for label, study in studies.items()},
        "first": record.studies[0],
    }
    return render_page("own/page.html.j2", view, package=__package__ or "")


def files(record: CollapseRecord) -> dict[str, str]:
    """Return every chart as a file of its own, by its name."""
    studies = {study.label: study for study in record.studies}
    looks = _looks(studies)
    made = {f"collapse-{c.key}.svg": c.file for c in curves(studies, looks)}
    for label, word in file_words(studies).items():
        for chart in (*pairs_maps(studies[label]), theta_map(studies[label])):
            if chart is not None:
                made[f"collapse-{chart.key}-{word}.svg"] = chart.file
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

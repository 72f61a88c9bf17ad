# SPDX-License-Identifier: Apache-2.0
"""Attention collapse of a model, or of several, as a result: answer, table and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from keymix.records import finite, or_none, to_json
from keymix.report import charts, formats
from keymix.report.charts import Chart, Look
from keymix.report.tables import Column, Table
from keymix.studies.collapse.charts import curves, pairs_maps, theta_map
from keymix.studies.collapse.readings import Readings
from keymix.studies.collapse.verdict import FEW, Verdict, verdict_of
from keymix.studies.study import RANDOM_NOTE, Found, OfModel, file_words, listed, untrained

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


class Collapse(Readings, OfModel):
    """How alike a model's attention maps are, and what its tokens become: `Readings` as a result.

    The table is ``"blocks"``, a row for each block; figures are measures along the blocks.
    """

    name = "collapse"

    @cached_property
    def verdict(self) -> Verdict:
        """What was found, in words."""
        return verdict_of(self)

    @cached_property
    def alone(self) -> Collapses:
        """This model as a study of its own."""
        return Collapses((self,))

    @property
    def data(self) -> dict[str, object]:
        """Everything with all that follows from it; NaN is None."""
        read = ("images", "threshold", "similar", "unique", "nearest", "groups", "apart", "layers")
        followed = ("verdict", "unique_blocks", "shared_from", "pairs")
        counted = {key: self._counted(key) for key in ("similar_blocks", "blocks_like_nearest")}
        own = {key: to_json(getattr(self, key)) for key in (*read, *followed)}
        return dict(finite({**to_json(self.of), **own, **counted}))

    def _counted(self, key: str) -> dict[str, Any]:
        """Count the blocks for which something holds."""
        blocks, of = getattr(self, key), len(self.with_maps)
        share = len(blocks) / of if of else None
        return {"blocks": list(blocks), "count": len(blocks), "of": of, "share": share}


class Collapses(Found):
    """Attention collapse of several models, overlaid."""

    name = "collapse"

    def __init__(self, studies: Sequence[Collapse]) -> None:
        self.studies = tuple(studies)

    @cached_property
    def labelled(self) -> Mapping[str, Collapse]:
        """The models, by label."""
        return {study.of.label: study for study in self.studies}

    @property
    def answer(self) -> str:
        """Say whether blocks repeat their attention, or why that cannot be said."""
        trained = [study for study in self.studies if not study.of.random]
        if not trained:
            return untrained("the attention maps", [study.of.label for study in self.studies])
        labels = [study.of.label for study in trained]
        fewest = min(study.images for study in trained)
        if fewest == 1:
            return f"One image is too few to say whether attention repeats in {listed(labels)}"
        few = f", on {fewest} images only" if fewest < FEW else ""
        if len(trained) == 1:
            who = f"{labels[0]}: " if len(self.studies) > 1 else ""
            return f"{who}{trained[0].verdict.headline}{few}"
        if not any(study.verdict.collapsed for study in trained):
            most = max((mean for study in trained for mean in _means(study)), default=None)
            if most is None:
                return f"No two blocks can be compared in {listed(labels)}"
            return (
                f"No block repeats the attention of the one before in {listed(labels)}: similarity "
                f"at most {most:.2f}{few}"
            )
        counts = [(study.share or 0.0, study) for study in trained if study.verdict.collapsed]
        counts.sort(key=lambda pair: -(pair[0]))
        found = [
            f"{study.of.label} in {len(study.similar_blocks)} of {len(study.with_maps)} blocks"
            for _, study in counts
        ]
        none = [study.of.label for study in trained if not study.verdict.collapsed]
        text = f"Attention repeats that of the block before in {listed(found)}"
        return f"{text}{f', not in {listed(none)}' if none else ''}{few}"

    @property
    def sentences(self) -> dict[str, list[str]]:
        """The verdict of each model."""
        return {
            label: [
                study.verdict.headline,
                *study.verdict.evidence,
                *study.verdict.caveats,
                *([RANDOM_NOTE] if study.of.random else []),
            ]
            for label, study in self.labelled.items()
        }

    @property
    def left_out(self) -> list[str]:
        """Which images could not be read."""
        return [why for study in self.studies for why in study.of.left_out.values()]

    @property
    def data(self) -> dict[str, object]:
        """The models, as ``studies``."""
        return {"studies": [study.data for study in self.studies]}

    @property
    def tables(self) -> dict[str, Table]:
        """A row for each block."""
        return {"blocks": table(self.studies)}

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Models in the colours of their mixers where no two have the same."""
        return charts.looks_of_models(
            {label: {e.attention for e in s.layers} for label, s in self.labelled.items()}
        )

    @cached_property
    def figures(self) -> dict[str, Chart]:
        """Measures along the blocks, models overlaid; every two blocks of each; mixed heads."""
        drawn = {chart.key: chart for chart in curves(self.labelled, self.looks)}
        made = {key: drawn[key] for key in LEAD if key in drawn} | drawn
        for label, word in file_words(self.labelled).items():
            made |= {f"{c.key}-{word}": c for c in self._own(label)}
        return made

    def _own(self, label: str) -> list[Chart]:
        """Draw what is of one model alone."""
        study = self.labelled[label]
        return [*pairs_maps(study), *filter(None, [theta_map(study)])]

    def view(self) -> dict[str, object]:
        """Return what else its page shows."""
        along = [*curves(self.labelled, self.looks)]
        lead = [*self.figures.values()][:2]
        return {
            "studies": self.labelled,
            "trained": any(not study.of.random for study in self.studies),
            "more": [chart for chart in along if chart.key not in {c.key for c in lead}],
            "own": {label: self._own(label) for label in self.labelled},
            "blocks": {label: table([study]) for label, study in self.labelled.items()},
            "first": self.studies[0],
        }


def table(studies: Sequence[Readings]) -> Table:
    """Make the table of the blocks of some models, a row per block."""
    return Table("blocks", "", COLUMNS, [row for study in studies for row in _rows(study)])


def _rows(study: Readings) -> list[list[Any]]:
    before = {pair.second: pair for pair in study.neighbours}
    rows = []
    for layer in study.layers:
        pair = before.get(layer.path)
        own = {
            "model": study.of.label,
            "before": None if pair is None else or_none(pair.similar_fraction),
            "before_mean": None if pair is None else or_none(pair.mean),
            "before_centred": None if pair is None else or_none(pair.centred),
            "": layer.path,
        }
        rows.append([own[c.key] if c.key in own else getattr(layer, c.key) for c in COLUMNS])
    return rows


def _means(study: Readings) -> list[float]:
    """List the mean cosines of neighbouring blocks that have one."""
    return [pair.mean for pair in study.neighbours if not math.isnan(pair.mean)]

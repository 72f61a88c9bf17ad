# SPDX-License-Identifier: Apache-2.0
"""Classes of masks on the page: how well each mixer finds each, and differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from keymix.report import class_plots
from keymix.report.class_plots import Spread
from keymix.report.plots import Look
from keymix.report.views.classes import FEW
from keymix.report.views.runs import finished

Record = Mapping[str, Any]
Runs = Sequence[Mapping[str, Any]]

FIGURES = ("jaccard", "dice", "hausdorff_mm", "missed")


def by_class(record: Record, looks: Mapping[str, Look]) -> dict[str, Any] | None:
    """Make the table of classes, a row a class and mixer, with its chart.

    Returns:
        ``None`` if no run finished; else ``rows`` (class, images, mixer, difference and `FIGURES`,
        means over seeds, None where there are none), ``ranking`` and ``others`` (mixers in the
        chart, and beside the baseline), ``chart``, ``total`` classes, ``few``.
    """
    runs = {m["label"]: finished(record, m["label"]) for m in record["mixers"]}
    shown = [label for label, found in runs.items() if found]
    if not shown:
        return None
    baseline = record["baseline"]
    names, images = record["classes"]["names"], record["classes"]["test_images"]
    others = [label for label in shown if label != baseline]
    differences = {
        label: [_difference(runs[label], runs[baseline], c) for c in range(len(names))]
        for label in others
    }
    ranking = [m for m in others if looks[m].colour != "ctl"] or others
    order = sorted(
        range(len(names)),
        key=lambda c: -max((abs(differences[m][c] or 0.0) for m in ranking), default=0.0),
    )
    rows = [
        {
            "name": names[c],
            "images": images[c],
            "mixer": label,
            "difference": differences[label][c] if label in differences else None,
            **{key: _mean([run["classes"][c][key] for run in runs[label]]) for key in FIGURES},
        }
        for c in (order if len(names) > FEW else range(len(names)))
        for label in shown
    ]
    return {
        "rows": rows,
        "others": others,
        "ranking": ranking,
        "chart": _chart(differences, ranking, [names[c] for c in order], order, looks, baseline),
        "total": len(names),
        "few": FEW,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _difference(runs: Runs, base: Runs, c: int) -> float | None:
    """Return mixer minus baseline in Jaccard of a class, over the seeds that both finished."""
    of_base = {run["seed"]: run["classes"][c]["jaccard"] for run in base}
    pairs = [(run["classes"][c]["jaccard"], of_base.get(run["seed"])) for run in runs]
    return _mean([None if a is None or b is None else a - b for a, b in pairs])


def _chart(
    differences: Mapping[str, Sequence[float | None]],
    ranking: Sequence[str],
    names: Sequence[str],
    order: Sequence[int],
    looks: Mapping[str, Look],
    baseline: str,
) -> Markup | None:
    spreads = [
        Spread(
            label=m,
            look=looks[m],
            values=[(name, differences[m][c]) for name, c in zip(names, order, strict=True)],
        )
        for m in ranking
    ]
    spreads = [spread for spread in spreads if spread.known()]
    if not spreads:
        return None
    draw = class_plots.dots if len(names) <= FEW else class_plots.histograms
    return draw(spreads, baseline=baseline)

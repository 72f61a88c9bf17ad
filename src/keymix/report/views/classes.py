# SPDX-License-Identifier: Apache-2.0
"""Classes on the page: each mixer's accuracy on each, differences, and what is confused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from keymix.analysis.statistics import wilson
from keymix.report import class_plots
from keymix.report.class_plots import Spread
from keymix.report.formats import percent
from keymix.report.plots import Look
from keymix.report.views.runs import finished

Record = Mapping[str, Any]

FEW = 20
"""Up to so many classes each has a row in the chart, and the table shows all at first."""


def by_class(record: Record, looks: Mapping[str, Look]) -> dict[str, Any] | None:
    """Make the table of classes, largest differences first, with its chart and confusions.

    Returns:
        ``None`` if no run finished; else ``rows`` (name, number, images, baseline, interval,
        cells, largest), ``others`` (mixers beside the baseline), ``chart``, ``note``,
        ``confusions``, ``total``.
    """
    runs = {m["label"]: finished(record, m["label"]) for m in record["mixers"]}
    shown = [label for label, found in runs.items() if found]
    if not shown:
        return None
    baseline = record["baseline"]
    names, images = record["classes"]["names"], record["classes"]["test_images"]
    accuracy = {label: _accuracy(runs[label], images) for label in shown}
    others = [label for label in shown if label != baseline]
    differences = {label: _differences(runs[label], runs[baseline], images) for label in others}
    ranking = [m for m in others if looks[m].colour != "ctl"] or others
    rows = []
    for number, (name, n) in enumerate(zip(names, images, strict=True)):
        base = accuracy[baseline][number] if baseline in accuracy else None
        told = [d for m in ranking if (d := differences[m][number]) is not None]
        rows.append(
            {
                "name": name,
                "number": number,
                "images": n,
                "baseline": base,
                "interval": wilson(base, n) if base is not None else None,
                "cells": [
                    {
                        "mixer": m,
                        "accuracy": accuracy[m][number],
                        "difference": differences[m][number],
                    }
                    for m in others
                ],
                "largest": max(map(abs, told), default=0.0),
            }
        )
    rows.sort(key=lambda row: (-row["largest"], row["number"]))
    return {
        "rows": rows,
        "others": others,
        "ranking": ranking,
        "chart": _chart(rows, differences, ranking, names, looks, baseline),
        "note": _note(rows),
        "confusions": _confusions(record, shown),
        "total": len(rows),
        "few": FEW,
    }


def _accuracy(runs: Sequence[Mapping[str, Any]], images: Sequence[int]) -> list[float | None]:
    """Return the accuracy on every class, mean over runs; ``None`` where no image is."""
    return [
        sum(run["class_correct"][c] for run in runs) / (n * len(runs)) if n else None
        for c, n in enumerate(images)
    ]


def _differences(
    runs: Sequence[Mapping[str, Any]],
    base: Sequence[Mapping[str, Any]],
    images: Sequence[int],
) -> list[float | None]:
    """Return mixer minus baseline on every class, over the seeds that both finished."""
    of_base = {run["seed"]: run for run in base}
    pairs = [(run, of_base[run["seed"]]) for run in runs if run["seed"] in of_base]
    return [
        sum(a["class_correct"][c] - b["class_correct"][c] for a, b in pairs) / (n * len(pairs))
        if n and pairs
        else None
        for c, n in enumerate(images)
    ]


def _chart(
    rows: Sequence[Mapping[str, Any]],
    differences: Mapping[str, Sequence[float | None]],
    ranking: Sequence[str],
    names: Sequence[str],
    looks: Mapping[str, Look],
    baseline: str,
) -> Markup | None:
    order = [row["number"] for row in rows]
    spreads = [
        Spread(
            label=m,
            look=looks[m],
            values=[(names[c], differences[m][c]) for c in order],
        )
        for m in ranking
    ]
    spreads = [spread for spread in spreads if spread.known()]
    if not spreads:
        return None
    if len(rows) <= FEW:
        return class_plots.dots(spreads, baseline=baseline)
    return class_plots.histograms(spreads, baseline=baseline)


def _note(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say how few test images a class has and what that leaves open."""
    sizes = [row["images"] for row in rows if row["images"]]
    if not sizes:
        return ""
    low, high = min(sizes), max(sizes)
    text = (
        f"Each class has {low:,} test images."
        if low == high
        else f"A class has between {low:,} and {high:,} test images."
    )
    known = sorted(row["baseline"] for row in rows if row["baseline"] is not None)
    if known:
        middle = known[len(known) // 2]
        ends = wilson(middle, low)
        text += (
            f" On {low:,} images an accuracy of {percent(middle)} % is known to between "
            f"{percent(ends[0])} and {percent(ends[1])} % (Wilson's interval, 95 %)."
        )
    return (
        f"{text} Among so many pairs of class and mixer some large differences come about by "
        "chance: they say where to look, not what holds."
    )


def _confusions(record: Record, shown: Sequence[str]) -> list[dict[str, Any]]:
    """Return each mixer's most frequent confusions, as a share of the true class's answers."""
    names, images = record["classes"]["names"], record["classes"]["test_images"]
    table = []
    for label in shown:
        seeds = len(finished(record, label))
        table.append(
            {
                "mixer": label,
                "pairs": [
                    {
                        "true": names[pair["true"]],
                        "predicted": names[pair["predicted"]],
                        "count": pair["count"],
                        "share": pair["count"] / (images[pair["true"]] * seeds),
                    }
                    for pair in record["confusions"].get(label, ())
                ],
            }
        )
    return table

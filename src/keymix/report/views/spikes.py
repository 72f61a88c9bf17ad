# SPDX-License-Identifier: Apache-2.0
"""What spikes cost, on the page and at the terminal: one row a mixer of a spiking model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keymix.analysis.statistics import no_better_than_chance
from keymix.report import formats

Record = Mapping[str, Any]

DEAD = 0.9
"""Share of silent neurons above which a network is not held against one without spikes."""
AT_CHANCE = (
    "Right no more often than by chance: these rates and energies say nothing of models that work."
)


def sheet(record: Record) -> dict[str, Any] | None:
    """Make the table of spikes; ``None`` where the model has none, and for records of before."""
    told = record.get("spikes")
    if not told:
        return None
    classes, images = len(record["classes"]["names"]), record["test_images"]
    top1 = {row["mixer"]: row["top1"]["mean"] for row in record["outcome"]["last"]}
    rows = []
    for label, row in told["mixers"].items():
        right = top1[label]
        guesses = right is not None and no_better_than_chance(right, classes=classes, images=images)
        own = [*row["notes"], *([AT_CHANCE] if guesses else [])]
        rows.append({"mixer": label, **row, "notes": own, **_words(row, works=not guesses)})
    notes = {
        note: [row["mixer"] for row in rows if note in row["notes"]]
        for row in rows
        for note in row["notes"]
    }
    return {"text": told["text"], "rows": rows, "notes": notes}


def steps_of(record: Record) -> dict[str, int]:
    """Tell the time steps T of each spiking model, all of which its multiply-adds count.

    Args:
        record: A comparison's; of one before costs told T, its spikes do.

    Returns:
        T by label; nothing where the model has no spikes.
    """
    spikes = record.get("spikes")
    if not spikes:
        return {}
    told = {label: row.get("time_steps") for label, row in record["costs"].items()}
    read = {label: row["time_steps"] for label, row in spikes["mixers"].items()}
    both = {label: told.get(label) or steps for label, steps in read.items()}
    return {label: int(steps) for label, steps in both.items() if steps}


def dense_over(record: Record) -> tuple[str, dict[str, str]]:
    """Say over how many steps multiply-adds are counted, for the head of their column.

    Args:
        record: A comparison's.

    Returns:
        "dense, T=4", empty where the model has no spikes; and by label what to say in the cells of
        those with another T, such as the twin.
    """
    steps = steps_of(record)
    if not record.get("spikes"):
        return "", {}
    most = steps.get(record["baseline"]) or next(iter(steps.values()), None)
    others = {label: f"T={number}" for label, number in steps.items() if number != most}
    return ("dense, all T" if most is None else f"dense, T={most}"), others


def _words(row: Mapping[str, Any], *, works: bool) -> dict[str, Any]:
    """Write the quantities of a row, each with its spread over seeds."""
    low, high = row["energy_low_uj"]["mean"], row["energy_high_uj"]["mean"]
    energy, dense = row["energy_uj"], row["dense_energy_uj"]["mean"]
    silent = row["silent"]["mean"] or 0.0
    fires = row["firing_rate"]["mean"] is not None and silent <= DEAD and energy["mean"] and works
    times = dense / energy["mean"] if fires and dense else None
    return {
        "times": times,
        "rate_told": _spread(row["firing_rate"], 4),
        "silent_told": formats.percent(row["silent"]["mean"], 0),
        "sops_told": formats.count(row["sops"]["mean"]),
        "macs_told": formats.count(row["macs"]["mean"]),
        "energy_told": _spread(energy, _decimals(energy["mean"] or 0.0)),
        "bounds_told": (
            formats.MISSING
            if low is None or low == high
            else f"{microjoules(low)} to {microjoules(high)}"
        ),
        "dense_told": formats.MISSING if dense is None else microjoules(dense),
        "times_told": formats.MISSING if times is None else f"{times:.1f}",
    }


def microjoules(value: float) -> str:
    """Write µJ with three digits."""
    return f"{value:.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    return 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0


def _spread(summary: Mapping[str, Any], decimals: int) -> str:
    if summary["mean"] is None:
        return formats.MISSING
    spread = "" if summary["sd"] is None else f" ± {summary['sd']:.{decimals}f}"
    return f"{summary['mean']:.{decimals}f}{spread}"

# SPDX-License-Identifier: Apache-2.0
"""Costs are measured once: ``costs.json`` keeps them with the machine and versions they hold for.

Mixers that join later are measured alone, with the batches of those before. On another machine, or
with other versions or threads, all are measured again, so that one table never mixes two settings.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from keymix.compare import environments
from keymix.compare.costs import BATCH_SIZE, UNKNOWN, Effort, costs, counted
from keymix.compare.folder import COSTS
from keymix.compare.plan import Plan
from keymix.errors import KeymixWarning, UserError

Table = dict[str, dict[str, Any]]
_COLUMNS = {"params", *UNKNOWN}
_TEXTS = ("note", "measured")


def settled(
    plan: Plan, data: Mapping[str, Any], *, threads: int, say: Callable[[str], None]
) -> tuple[Table, dict[str, Any]]:
    """Return every mixer's cost: as kept in the folder, or counted and measured now, and kept.

    Args:
        plan: The comparison.
        data: The record of the images.
        threads: CPU threads of the measurement.
        say: Called with what is measured, before it is.

    Returns:
        Costs by label, and the record of how they were measured.
    """
    from keymix.train.files import write_json

    setting, kept = _setting(threads), _read(plan.out / COSTS)
    changed = environments.changes(kept["setting"], setting) if kept else ""
    rows: Table = {} if kept is None or changed else dict(kept["costs"])
    left = tuple(e for e in plan.entrants if e.label not in rows)
    if left:
        names = ", ".join(entrant.label for entrant in left)
        again = f"measuring cost again, since it was measured with other {changed}"
        say(again if changed else f"measuring cost: {names}")
        effort = Effort(**kept["effort"]) if kept and not changed else None
        made, effort = costs(replace(plan, entrants=left), data, threads=threads, effort=effort)
        now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        rows |= {label: row | {"measured": now} for label, row in made.items()}
        whole = {k: row for k, row in rows.items() if row["latency_ms"] is not None}
        kept = {
            "setting": setting,
            "effort": {"batch_size": effort.batch_size, "repeats": effort.repeats},
            "costs": whole,
        }
        write_json(plan.out / COSTS, kept)
    assert kept is not None
    table = {label: rows[label] for label in plan.labels}
    return table, _how(kept, table)


def unmeasured(plan: Plan, *, threads: int) -> list[str]:
    """Return the labels of the mixers that `settled` would measure."""
    kept = _read(plan.out / COSTS)
    if kept is None or kept["setting"] != _setting(threads):
        return list(plan.labels)
    return [label for label in plan.labels if label not in kept["costs"]]


def _setting(threads: int) -> dict[str, str]:
    from keymix.train.environment import environment

    return environments.lines(environment()) | {"threads": str(threads)}


def known(
    plan: Plan, data: Mapping[str, Any], record: Mapping[str, Any]
) -> tuple[Table, dict[str, Any]]:
    """Return every mixer's cost as far as it is known, and measure nothing.

    Args:
        plan: The comparison.
        data: The record of the images.
        record: An earlier ``results.json``, or nothing: its costs stand in where the folder keeps
            none.

    Returns:
        Costs by label, and the record of how they were measured.
    """
    kept = _read(plan.out / COSTS)
    there = kept["costs"] if kept else record.get("costs")
    rows: Table = {
        label: row
        for label, row in (there.items() if isinstance(there, dict) else ())
        if _is_row(row)
    }
    left = tuple(e for e in plan.entrants if e.label not in rows)
    if left:
        for label, row in counted(replace(plan, entrants=left), data).items():
            note = "not measured yet: `keymix compare` does it when it ends"
            rows[label] = row | {"note": f"{row['note']}; {note}" if row["note"] else note}
    table = {label: rows[label] for label in plan.labels}
    if kept:
        return table, _how(kept, table)
    measured = record.get("measured")
    if isinstance(measured, dict) and all(
        isinstance(measured.get(key), str) for key in ("device", "text")
    ):
        return table, dict(measured)
    return table, {
        "device": "cpu",
        "batch_size": BATCH_SIZE,
        "repeats": 0,
        "threads": 0,
        "when": [],
        "text": "Parameters and multiply-adds are counted. Times and memory were not measured yet.",
    }


def _read(path: Path) -> dict[str, Any] | None:
    """Return what is kept; a file that is missing or damaged keeps nothing."""
    from keymix.train.files import read_json

    if not path.exists():
        return None
    try:
        kept = read_json(path)
        if _is_whole(kept):
            return kept
        wrong = "it lacks what was measured, and how"
    except UserError as error:
        wrong = str(error).rstrip(".")
    text = f"{str(path)!r} is damaged and not used ({wrong}); `keymix compare` measures again"
    warnings.warn(text, KeymixWarning, stacklevel=3)
    return None


def _is_whole(kept: Mapping[str, Any]) -> bool:
    """Whether a store has all that is read of it, as this version writes it."""
    if not all(isinstance(kept.get(part), dict) for part in ("setting", "effort", "costs")):
        return False
    setting, effort, rows = kept["setting"], kept["effort"], kept["costs"].values()
    return (
        all(isinstance(line, str) for line in setting.values())
        and setting.get("threads", "").isdecimal()
        and effort.keys() == {field.name for field in fields(Effort)}
        and all(type(number) is int and number > 0 for number in effort.values())
        and all(_is_row(row) for row in rows)
    )


def _is_row(row: object) -> bool:
    """Whether a mixer's costs are numbers, or not known."""
    return (
        isinstance(row, dict)
        and row.keys() >= _COLUMNS
        and all(
            value is None or (type(value) in (int, float) and math.isfinite(value))
            for key, value in row.items()
            if key not in _TEXTS
        )
        and all(isinstance(row.get(key, ""), str) for key in _TEXTS)
    )


def _how(kept: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """Tell how and when the costs of a table were measured."""
    setting, effort = kept["setting"], kept["effort"]
    threads = int(setting["threads"])
    where = "one thread" if threads == 1 else f"{threads} threads"
    where = "on the GPU" if "device" in setting else f"on the CPU with {where}"
    times: dict[str, list[str]] = {}
    for label, row in table.items():
        if row.get("measured"):
            times.setdefault(row["measured"], []).append(label)
    text = (
        f"Parameters and multiply-adds are counted. Times were measured {where} after all "
        "training had ended, all mixers in turns: the median of "
        f"{effort['repeats']} rounds and the range of their middle half. Peak memory is what one "
        f"forward and backward pass of a batch of {effort['batch_size']} adds to weights and input."
    )
    if len(times) > 1:
        told = "; ".join(f"{', '.join(labels)} on {when}" for when, labels in sorted(times.items()))
        text += (
            f" Not all were measured together: {told}. Small differences between those may be the "
            "machine's. Delete costs.json and run the command again to measure all in turns."
        )
    elif times:
        text += f" Measured on {next(iter(times))}."
    return {
        "device": "cuda" if "device" in setting else "cpu",
        "batch_size": effort["batch_size"],
        "repeats": effort["repeats"],
        "threads": threads,
        "setting": dict(setting),
        "when": [{"measured": when, "mixers": labels} for when, labels in sorted(times.items())],
        "text": text,
    }

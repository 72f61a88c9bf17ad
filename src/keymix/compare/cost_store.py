# SPDX-License-Identifier: Apache-2.0
"""Costs are measured once: ``costs.json`` keeps them with the machine and versions they hold for.

Mixers that join later are measured alone, with the batches of those before. On another machine, or
with other versions or threads, all are measured again, so that one table never mixes two settings.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from keymix.compare import environments
from keymix.compare.costs import BATCH_SIZE, Effort, costs, counted
from keymix.compare.folder import COSTS
from keymix.compare.plan import Plan
from keymix.data.record import DataRecord
from keymix.errors import KeymixWarning, UserError
from keymix.records import from_json
from keymix.report.record import ComparisonRecord, CostRow, Lines, Measured, MeasuredAt

Table = Mapping[str, CostRow]


@dataclass(frozen=True, kw_only=True)
class Store:
    """The content of ``costs.json``.

    Args:
        setting: Machine, versions and threads of the measurement.
        effort: Batch size and rounds.
        costs: By mixer's label.
    """

    setting: Lines
    effort: Effort
    costs: Table

    def __post_init__(self) -> None:
        if not self.setting.get("threads", "").isdecimal():
            raise UserError("setting.threads is no number")


def settled(
    plan: Plan, data: DataRecord, *, threads: int, say: Callable[[str], None]
) -> tuple[Table, Measured]:
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
    changed = environments.changes(kept.setting, setting) if kept else ""
    rows: dict[str, CostRow] = {}
    if kept is not None and not changed:
        rows |= kept.costs
    left = tuple(e for e in plan.entrants if e.label not in rows)
    if left or kept is None:
        names = ", ".join(entrant.label for entrant in left)
        again = f"measuring cost again, since it was measured with other {changed}"
        say(again if changed else f"measuring cost: {names}")
        effort = kept.effort if kept and not changed else None
        made, effort = costs(replace(plan, entrants=left), data, threads=threads, effort=effort)
        now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        rows |= {label: replace(row, measured=now) for label, row in made.items()}
        whole = {label: row for label, row in rows.items() if row.latency_ms is not None}
        kept = Store(setting=setting, effort=effort, costs=whole)
        write_json(plan.out / COSTS, kept)
    table = {label: rows[label] for label in plan.labels}
    return table, _how(kept, table)


def unmeasured(plan: Plan, *, threads: int) -> list[str]:
    """Return the labels of the mixers that `settled` would measure."""
    kept = _read(plan.out / COSTS)
    if kept is None or kept.setting != _setting(threads):
        return list(plan.labels)
    return [label for label in plan.labels if label not in kept.costs]


def _setting(threads: int) -> Lines:
    from keymix.train.environment import environment

    return {**environments.lines(environment()), "threads": str(threads)}


def known(plan: Plan, data: DataRecord, before: ComparisonRecord | None) -> tuple[Table, Measured]:
    """Return every mixer's cost as far as it is known, and measure nothing.

    Args:
        plan: The comparison.
        data: The record of the images.
        before: An earlier record: its costs stand in where the folder keeps none.

    Returns:
        Costs by label, and the record of how they were measured.
    """
    kept = _read(plan.out / COSTS)
    rows: dict[str, CostRow] = {}
    if (there := kept or before) is not None:
        rows |= there.costs
    left = tuple(e for e in plan.entrants if e.label not in rows)
    if left:
        for label, row in counted(replace(plan, entrants=left), data).items():
            note = "not measured yet: `keymix compare` does it when it ends"
            rows[label] = replace(row, note=f"{row.note}; {note}" if row.note else note)
    table = {label: rows[label] for label in plan.labels}
    if kept:
        return table, _how(kept, table)
    if before:
        return table, before.measured
    text = "Parameters and multiply-adds are counted. Times and memory were not measured yet."
    return table, Measured(
        device="cpu", batch_size=BATCH_SIZE, repeats=0, threads=0, when=(), text=text
    )


def _read(path: Path) -> Store | None:
    """Return what is kept; a file that is missing or damaged keeps nothing."""
    from keymix.train.files import read_json

    if not path.exists():
        return None
    try:
        return from_json(Store, read_json(path), where=repr(str(path)))
    except UserError as error:
        wrong = str(error).rstrip(".")
    text = f"{wrong}; it is not used, and `keymix compare` measures again"
    warnings.warn(text, KeymixWarning, stacklevel=3)
    return None


def _how(kept: Store, table: Table) -> Measured:
    """Tell how and when the costs of a table were measured."""
    setting, effort = kept.setting, kept.effort
    threads = int(setting["threads"])
    where = "one thread" if threads == 1 else f"{threads} threads"
    where = "on the GPU" if "device" in setting else f"on the CPU with {where}"
    times: dict[str, list[str]] = {}
    for label, row in table.items():
        if row.measured:
            times.setdefault(row.measured, []).append(label)
    text = (
        f"Parameters and multiply-adds are counted. Times were measured {where} after all "
        "training had ended, all mixers in turns: the median of "
        f"{effort.repeats} rounds and the range of their middle half. Peak memory is what one "
        f"forward and backward pass of a batch of {effort.batch_size} adds to weights and input."
    )
    if len(times) > 1:
        told = "; ".join(f"{', '.join(labels)} on {when}" for when, labels in sorted(times.items()))
        text += (
            f" Not all were measured together: {told}. Small differences between those may be the "
            "machine's. Delete costs.json and run the command again to measure all in turns."
        )
    elif times:
        text += f" Measured on {next(iter(times))}."
    return Measured(
        device="cuda" if "device" in setting else "cpu",
        batch_size=effort.batch_size,
        repeats=effort.repeats,
        threads=threads,
        setting=setting,
        when=tuple(
            MeasuredAt(measured=when, mixers=tuple(labels))
            for when, labels in sorted(times.items())
        ),
        text=text,
    )

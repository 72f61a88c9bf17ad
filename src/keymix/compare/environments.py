# SPDX-License-Identifier: Apache-2.0
"""What the runs were trained with: the distinct environments, and a warning where they differ."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keymix.report.formats import listing
from keymix.report.record import Lines, TrainedWith
from keymix.report.sections.runs import differing
from keymix.train.record import Environment, Machine

NOT_RECORDED = "not recorded"
_SHOWN = 60


def lines(found: Environment) -> Lines:
    """Write an environment's record as short lines; what it lacks is called not recorded."""
    written = _of_machine(found)
    parts = [changes(_of_machine(part), written) for part in found.earlier]
    if any(parts):
        written["resumed"] = f"earlier parts of the run differ in {'; '.join(filter(None, parts))}"
    return written


def _of_machine(found: Machine) -> dict[str, str]:
    packages, commit = found.packages, found.commit or "not a checkout"
    written = {
        "keymix": _text(found.keymix),
        "commit": commit if found.known else NOT_RECORDED,
        "python": _text(found.python),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items())
        if packages is not None
        else NOT_RECORDED,
        "machine": f"{found.cpu}, {found.cores} cores" if found.cpu else NOT_RECORDED,
        "system": _text(found.platform),
        "threads": _text(found.threads),
    }
    if found.device not in (None, "cpu"):
        written["device"] = f"{found.device}, CUDA {found.cuda}"
    return written


def _text(value: str | int | None) -> str:
    return NOT_RECORDED if value is None else str(value)


def distinct(runs: Sequence[Lines]) -> tuple[tuple[TrainedWith, ...], list[int]]:
    """Find the different environments among the runs', and for every run the position of its own.

    Each comes with the number of its runs, the one of the first run first.
    """
    found: list[Lines] = []
    places = []
    for run in runs:
        if run not in found:
            found.append(run)
        places.append(found.index(run))
    groups = (TrainedWith(lines=each, runs=places.count(i)) for i, each in enumerate(found))
    return tuple(groups), places


def warning(trained_with: Sequence[TrainedWith], here: Lines) -> str | None:
    """Say what it means where environments differ, the runs' or this one, and then in what.

    `here` is the environment that makes the record; its threads do not matter.
    """
    if len(trained_with) > 1:
        parts = [
            f"{key} ({_shares(trained_with, key)})"
            for key in differing([env.lines for env in trained_with])
        ]
        return (
            "The runs were trained in different environments: differences between mixers may be "
            f"differences between environments. They differ in {listing(parts)}."
        )
    if not trained_with:
        return None
    there = trained_with[0].lines
    changed = changes(
        {key: line for key, line in there.items() if key != "threads"},
        {key: line for key, line in here.items() if key != "threads"},
    )
    if not changed:
        return None
    return (
        "All runs were trained in one environment, and this record was made in another: the "
        f"comparison is fair. They differ in {changed}."
    )


def changes(then: Lines, now: Lines) -> str:
    """Say in words which lines of an environment have changed; empty if none."""
    parts = []
    for key in differing([then, now]):
        a, b = _values([then, now], key)
        parts.append(f"{key} ({a} then, {b} now)")
    return listing(parts) if parts else ""


def _shares(trained_with: Sequence[TrainedWith], key: str) -> str:
    runs: dict[str, int] = {}
    values = _values([env.lines for env in trained_with], key)
    for value, env in zip(values, trained_with, strict=True):
        runs[value] = runs.get(value, 0) + env.runs
    return "; ".join(
        f"{value}: {number} run{'' if number == 1 else 's'}" for value, number in runs.items()
    )


def _values(environments: Sequence[Lines], key: str) -> list[str]:
    """Return each environment's line, of packages only those that are not the same in all."""
    values = [env.get(key, "none") for env in environments]
    if key == "packages":
        apart = [value.split(", ") for value in values]
        shared = set(apart[0]).intersection(*apart)
        values = [", ".join(p for p in parts if p not in shared) or "none" for parts in apart]
    if key == "commit":
        values = [re.sub(r"\b([0-9a-f]{10})[0-9a-f]+", r"\1", value) for value in values]
    return [text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…" for text in values]

# SPDX-License-Identifier: Apache-2.0
"""What the runs were trained with: the distinct environments, and a warning where they differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Lines = dict[str, str]
NOT_RECORDED = "not recorded"
_SHOWN = 60


def lines(found: Mapping[str, Any]) -> Lines:
    """Write an environment's record as short lines.

    Args:
        found: What `keymix.train.environment.environment` returned, or a run's
            ``environment.json``; what it lacks is told as not recorded.
    """
    packages = found.get("packages")
    cpu, cores = found.get("cpu"), found.get("cores")
    told = {
        "keymix": _text(found.get("keymix")),
        "commit": str(found["commit"] or "not a checkout") if "commit" in found else NOT_RECORDED,
        "python": _text(found.get("python")),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items())
        if isinstance(packages, Mapping)
        else NOT_RECORDED,
        "machine": f"{cpu}, {cores} cores" if cpu else NOT_RECORDED,
        "system": _text(found.get("platform")),
        "threads": _text(found.get("threads")),
    }
    if found.get("device", "cpu") != "cpu":
        told["device"] = f"{found['device']}, CUDA {found.get('cuda')}"
    earlier = [
        {k: v for k, v in part.items() if k != "earlier"} for part in found.get("earlier", ())
    ]
    parts = [changes(lines(part), told) for part in earlier]
    if any(parts):
        told["resumed"] = f"earlier parts of the run differ in {'; '.join(filter(None, parts))}"
    return told


def _text(value: Any) -> str:
    return NOT_RECORDED if value is None else str(value)


def distinct(runs: Sequence[Lines]) -> tuple[list[dict[str, Any]], list[int]]:
    """Find the different environments among the runs'.

    Returns:
        ``{"lines", "runs"}`` of each, the one of the first run first, and for every run the
        position of its own.
    """
    found: list[Lines] = []
    places = []
    for run in runs:
        if run not in found:
            found.append(run)
        places.append(found.index(run))
    return [{"lines": env, "runs": places.count(i)} for i, env in enumerate(found)], places


def warning(trained_with: Sequence[Mapping[str, Any]], here: Lines) -> str | None:
    """Say in words where the runs' environments differ, from each other or from this one.

    Args:
        trained_with: What `distinct` found.
        here: The environment that makes the record; its threads do not matter.
    """
    if len(trained_with) > 1:
        parts = [
            f"{key} ({_shares(trained_with, key)})"
            for key in _keys([env["lines"] for env in trained_with])
        ]
        return (
            f"The runs were not all trained in one environment; they differ in {_listing(parts)}. "
            "Differences between mixers may be differences between environments."
        )
    if not trained_with:
        return None
    there = trained_with[0]["lines"]
    told = changes(
        {key: line for key, line in there.items() if key != "threads"},
        {key: line for key, line in here.items() if key != "threads"},
    )
    if not told:
        return None
    return (
        "The runs were trained in another environment than the one that made this record; they "
        f"differ in {told}."
    )


def changes(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Say in words which lines of an environment have changed; empty if none."""
    parts = []
    for key in _keys([then, now]):
        a, b = _values([then, now], key)
        parts.append(f"{key} ({a} then, {b} now)")
    return _listing(parts) if parts else ""


def _keys(environments: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys whose lines are not the same in all environments."""
    known = {key: None for env in environments for key in env}
    return [key for key in known if len({env.get(key) for env in environments}) > 1]


def _shares(trained_with: Sequence[Mapping[str, Any]], key: str) -> str:
    runs: dict[str, int] = {}
    values = _values([env["lines"] for env in trained_with], key)
    for value, env in zip(values, trained_with, strict=True):
        runs[value] = runs.get(value, 0) + env["runs"]
    return "; ".join(
        f"{value}: {number} run{'' if number == 1 else 's'}" for value, number in runs.items()
    )


def _values(environments: Sequence[Mapping[str, str]], key: str) -> list[str]:
    """Return each environment's line, of packages only those that are not the same in all."""
    values = [env.get(key, "none") for env in environments]
    if key == "packages":
        apart = [value.split(", ") for value in values]
        shared = set(apart[0]).intersection(*apart)
        values = [", ".join(p for p in parts if p not in shared) or "none" for parts in apart]
    if key == "commit":
        values = [re.sub(r"\b([0-9a-f]{10})[0-9a-f]+", r"\1", value) for value in values]
    return [text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…" for text in values]


def _listing(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]

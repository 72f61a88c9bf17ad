# SPDX-License-Identifier: Apache-2.0
"""Runs on the page: which finished, which did not and why, and what each was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

STATUS = {"done": "finished", "failed": "failed", "missing": "not finished"}
"""A run's state in words."""


def finished(record: Record, mixer: str) -> list[Mapping[str, Any]]:
    """Return a mixer's finished runs."""
    return [r for r in record["runs"] if r["mixer"] == mixer and r["status"] == "done"]


def ratio(record: Record, mixer: str) -> str:
    """Say how many of a mixer's runs finished: ``3``, or ``2 of 3``."""
    planned, done = len(record["seeds"]), len(finished(record, mixer))
    return str(done) if done == planned else f"{done} of {planned}"


def unfinished(record: Record, status: str) -> list[Mapping[str, Any]]:
    """Return the runs of a status."""
    return [run for run in record["runs"] if run["status"] == status]


def noted(record: Record) -> list[dict[str, Any]]:
    """Return the finished runs whose record lacks something, with what as their reason."""
    return [
        {**run, "reason": "; ".join(run["notes"])} for run in record["runs"] if run.get("notes")
    ]


def without_runs(record: Record) -> list[str]:
    """Return the labels of mixers of which no run finished; no chart can show them."""
    return [m["label"] for m in record["mixers"] if not finished(record, m["label"])]


def environments(record: Record) -> list[dict[str, Any]]:
    """Return what the runs were trained with: name, lines, which lines differ, which runs."""
    groups = record["trained_with"]
    return [
        {
            "name": f"Environment {position + 1}",
            "lines": group["lines"],
            "differs": _differing([g["lines"] for g in groups]),
            "runs": group["runs"],
            "who": _who(record, position),
        }
        for position, group in enumerate(groups)
    ]


def _differing(all_lines: Sequence[Mapping[str, str]]) -> set[str]:
    keys = {key for lines in all_lines for key in lines}
    return {key for key in keys if len({lines.get(key) for lines in all_lines}) > 1}


def _who(record: Record, position: int) -> list[dict[str, Any]]:
    """Return the mixers and seeds trained with an environment."""
    who = []
    for mixer in record["mixers"]:
        seeds = [
            run["seed"]
            for run in finished(record, mixer["label"])
            if run["trained_with"] == position
        ]
        if seeds:
            word = "seed" if len(seeds) == 1 else "seeds"
            who.append({"mixer": mixer["label"], "seeds": f"{word} {', '.join(map(str, seeds))}"})
    return who

# SPDX-License-Identifier: Apache-2.0
"""Runs on the page: which finished, which did not and why, and what each was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keymix.report.record import ComparisonRecord, DoneRun, Lines, OpenRun

STATUS = {"done": "finished", "failed": "failed", "missing": "not finished"}
"""A run's state in words."""


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A finished run whose record lacks something, with what as its reason."""

    mixer: str
    seed: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SomeSeeds:
    """Some seeds of a mixer, in words."""

    mixer: str
    seeds: str


@dataclass(frozen=True, kw_only=True)
class EnvironmentGroup:
    """What some runs were trained with.

    Args:
        name: A name for it.
        lines: The environment.
        differs: Keys of the lines that are not the same in all groups.
        runs: Number of runs.
        who: Which they are.
    """

    name: str
    lines: Lines
    differs: set[str]
    runs: int
    who: list[SomeSeeds]


def finished(record: ComparisonRecord, mixer: str) -> list[DoneRun]:
    """Return a mixer's finished runs."""
    return [run for run in record.runs if isinstance(run, DoneRun) and run.mixer == mixer]


def ratio(record: ComparisonRecord, mixer: str) -> str:
    """Say how many of a mixer's runs finished: ``3``, or ``2 of 3``."""
    planned, done = len(record.seeds), len(finished(record, mixer))
    return str(done) if done == planned else f"{done} of {planned}"


def unfinished(record: ComparisonRecord, status: str) -> list[OpenRun]:
    """Return the runs of a status."""
    return [run for run in record.runs if isinstance(run, OpenRun) and run.status == status]


def noted(record: ComparisonRecord) -> list[Noted]:
    """Return the finished runs whose record lacks something."""
    return [
        Noted(mixer=run.mixer, seed=run.seed, reason="; ".join(run.notes))
        for run in record.runs
        if isinstance(run, DoneRun) and run.notes
    ]


def without_runs(record: ComparisonRecord) -> list[str]:
    """Return the labels of mixers of which no run finished; no chart can show them."""
    return [label for label in record.labels if not finished(record, label)]


def environments(record: ComparisonRecord) -> list[EnvironmentGroup]:
    """Return what the runs were trained with."""
    groups = record.trained_with
    differs = _differing([group.lines for group in groups])
    return [
        EnvironmentGroup(
            name=f"Environment {position + 1}",
            lines=group.lines,
            differs=differs,
            runs=group.runs,
            who=_who(record, position),
        )
        for position, group in enumerate(groups)
    ]


def _differing(all_lines: Sequence[Lines]) -> set[str]:
    keys = {key for lines in all_lines for key in lines}
    return {key for key in keys if len({lines.get(key) for lines in all_lines}) > 1}


def _who(record: ComparisonRecord, position: int) -> list[SomeSeeds]:
    """Return the mixers and seeds trained with an environment."""
    who = []
    for label in record.labels:
        seeds = [run.seed for run in finished(record, label) if run.trained_with == position]
        if seeds:
            word = "seed" if len(seeds) == 1 else "seeds"
            who.append(SomeSeeds(mixer=label, seeds=f"{word} {', '.join(map(str, seeds))}"))
    return who

# SPDX-License-Identifier: Apache-2.0
"""Two runs next to each other, every run, and what it takes to repeat them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from keymix.report.part import Section, Shown
from keymix.report.record import ComparisonRecord, Lines
from keymix.report.wording import STATUS

PLACE = 80


@dataclass(frozen=True, kw_only=True)
class SomeSeeds:
    """Some seeds of a mixer, in words."""

    mixer: str
    seeds: str


@dataclass(frozen=True, kw_only=True)
class EnvironmentGroup:
    """What some runs were trained with; lines that are not the same in all groups differ."""

    name: str
    lines: Lines
    differs: set[str]
    runs: int
    who: list[SomeSeeds]


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """The environments of the runs, their states in words, and the seconds of all."""

    environments: list[EnvironmentGroup]
    status: Mapping[str, str]
    seconds: float


def sections(shown: Shown) -> Iterator[Section]:
    """Offer two finished runs to the script; show the method, the runs, and what repeats them."""
    record = shown.record
    if sum(len(record.finished(label)) for label in record.labels) > 1:
        yield Section(template="sections/pair.html.j2", view=shown.page.pair_note)
    view = Repeat(
        environments=environments(record),
        seconds=sum(run.seconds for label in record.labels for run in record.finished(label)),
        status=STATUS,
    )
    yield Section(template="sections/runs.html.j2", view=view)


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
        seeds = [run.seed for run in record.finished(label) if run.trained_with == position]
        if seeds:
            word = "seed" if len(seeds) == 1 else "seeds"
            who.append(SomeSeeds(mixer=label, seeds=f"{word} {', '.join(map(str, seeds))}"))
    return who

# SPDX-License-Identifier: Apache-2.0
"""From a plan and its runs, as they were read, to the results of a comparison: numbers only.

The page, the terminal, tables and Python are made from them; what is said stands in templates.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from keymix.analysis import statistics
from keymix.analysis.answers import Answers
from keymix.analysis.certainty import (
    MARGIN,
    Evidence,
    alpha_of_look,
    judge,
    smallest_margin,
)
from keymix.analysis.energy import ENERGIES
from keymix.analysis.statistics import LEVEL, Interval, Summary, crossed_difference
from keymix.compare.costs import Costs
from keymix.compare.findings import Found, decide, findings
from keymix.compare.question import Plan
from keymix.compare.references import References
from keymix.compare.runs import Finished, Reading, Scores
from keymix.data.check import quick_check
from keymix.data.dataset import ImageData
from keymix.data.findings import IN_SEQUENCES, NOTE
from keymix.data.record import DataRecord
from keymix.mixers.registry import get_mixer_class
from keymix.mixers.spec import parse_mixer
from keymix.records import Own
from keymix.report.checked import Checked, DataFinding
from keymix.report.part import page_of
from keymix.report.record import (
    DoneRun,
    Outcome,
    OutcomeRow,
    Results,
    RunSpikes,
    Which,
    look_number,
)
from keymix.task import Task
from keymix.train.environment import environment, lines
from keymix.train.parts import answers_of

_NAMED = 3  # places of a finding of the data check that are kept


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a comparison's folder has next to its runs."""

    costs: Costs
    spikes: Mapping[str, RunSpikes]  # by the run's folder
    checked: Checked | None = None
    references: References
    looks: tuple[int, ...] = ()


def results(plan: Plan, data: DataRecord, readings: Sequence[Reading], known: Known) -> Results:
    """Compute the content of ``results.json``."""
    done = [reading for reading in readings if isinstance(reading, Finished)]
    rules = Rules(
        alpha=alpha_of_look(look_number(known.looks, plan.seeds)),
        margin=plan.margin,
        narrow=known.checked is not None and known.checked.too_narrow,
        controls=[each.label for each in plan.mixers if each.control],
        references=[each.label for each in plan.mixers if each.reference],
    )
    last = _outcome_at("last", plan, done, data.task_kind, rules)
    best = _outcome_at("best", plan, done, data.task_kind, rules)
    found = Found(
        plan=plan,
        data=data,
        done=done,
        references=known.references,
        costs=known.costs.rows,
        checked=known.checked,
    )
    found_out = findings(found)
    every = [reading.environment for reading in done]
    environments = [each for i, each in enumerate(every) if each not in every[:i]]
    tested = [reading.tested for reading in done]
    own = Own.of(page_of(data.task_kind).keep_comparison(tested, data))
    return Results(
        created=time.strftime("%Y-%m-%d %H:%M %Z"),
        command=plan.command,
        environment={k: line for k, line in lines(environment()).items() if k != "threads"},
        trained_with=tuple(environments),
        data=data,
        data_check=known.checked,
        recipe=plan.recipe,
        match=plan.match,
        pooling=plan.pooling,
        pooled_for=plan.pooled_for,
        cannot_sit=plan.cannot_sit,
        baseline=plan.baseline,
        seeds=plan.seeds,
        processes=plan.processes,
        threads=plan.threads,
        mixers=tuple(each.compared for each in plan.mixers),
        mechanisms=_mechanisms(plan),
        findings=found_out,
        outcome=Outcome(last=last, best=best),
        references=known.references.rows,
        recommendation=decide(
            found, {each.kind for each in found_out}, {row.mixer: row.interval for row in last}
        ),
        tuning=plan.tuning,
        start=plan.start,
        margin=plan.margin,
        recognised=None if plan.margin is None else _recognised(found, rules.alpha),
        looks=known.looks,
        alpha=rules.alpha,
        test_images=data.sizes["test"],
        costs=known.costs.rows,
        measured=known.costs.measured,
        runs=tuple(
            replace(
                r.run,
                trained_with=environments.index(r.environment),
                spikes=_spikes(plan, r.run, known),
            )
            if isinstance(r, Finished)
            else r
            for r in readings
        ),
        images=bool(plan.question.images),
        own=own,
    )


def _mechanisms(plan: Plan) -> dict[str, str]:
    """Say what each mixer does, once where several rows have it."""
    labels = [each.label for each in plan.mixed if not each.ann_of]
    names = dict.fromkeys(name for label in labels for name in parse_mixer(label).names)
    about = {name: get_mixer_class(name).about for name in names}
    return {name: text for name, text in about.items() if text}


def _spikes(plan: Plan, run: DoneRun, known: Known) -> RunSpikes | None:
    """Return what a run's spikes cost; of the ANN counterpart, all of its multiply-adds."""
    (mixer,) = (each for each in plan.mixers if each.label == run.mixer)
    if not plan.spiking or mixer.reference:
        return None
    if not mixer.ann_of:
        return known.spikes.get(run.folder, RunSpikes())
    macs = known.costs.rows[run.mixer].macs
    energy = None if macs is None else macs * ENERGIES["fp32"].mac * 1e-6  # µJ
    return RunSpikes(
        macs=macs,
        energy_uj=energy,
        energy_low_uj=energy,
        energy_high_uj=energy,
        dense_energy_uj=energy,
    )


def _outcome_at(
    which: Which, plan: Plan, done: Sequence[Finished], task: Task, rules: Rules
) -> tuple[OutcomeRow, ...]:
    scores: dict[str, dict[int, Scores]] = {label: {} for label in plan.labels}
    for reading in done:
        scores[reading.run.mixer][reading.run.seed] = reading.scores(which)
    return outcome(plan.labels, baseline=plan.baseline, scores=scores, task=task, rules=rules)


def _recognised(found: Found, alpha: float) -> float | None:
    """Return the margin within which these seeds and units recognise half of true ties."""
    base = found.answers(found.plan.baseline)
    others = [label for label in found.mixers if label != found.plan.baseline]
    made = [crossed_difference(found.answers(label), base) for label in others]
    return smallest_margin([each for each in made if each is not None], alpha)


# ---- every mixer against the baseline --------------------------------------------------------

Runs = Mapping[int, Scores]
"""Scores by seed."""
Table = Mapping[str, Runs]
"""Mixer's label to seed to scores; failed runs are absent."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What decides how certain a difference is."""

    alpha: float = 1 - LEVEL  # significance level of this look at the comparison
    margin: float | None = MARGIN  # differences up to this are equal; None where none is
    narrow: bool = False  # whether test units belong together, so that intervals are too narrow
    controls: Collection[str] = ()  # labels of the mixers that are tested by themselves
    references: Collection[str] = ()  # ... of the models that are outside every test


def outcome(
    labels: Sequence[str],
    *,
    baseline: str,
    scores: Table,
    task: Task,
    rules: Rules = Rules(),  # frozen
) -> tuple[OutcomeRow, ...]:
    """Compute the rows of the result, one per mixer, in the order given.

    The rows have the task's scores on the test split, and that on validation.
    """
    score = task.score
    evidence = _evidence(labels, baseline, scores, task, rules)
    tested = {label: each for label, each in evidence.items() if label not in rules.references}
    certain = judge(
        tested, alpha=rules.alpha, margin=rules.margin, score=score, narrow=rules.narrow
    )
    keys = [each.key for each in (*task.scores, *page_of(task).test_scores)]
    rows = []
    for label in labels:
        runs, found, judged = scores.get(label, {}), evidence.get(label), certain.get(label)
        row = OutcomeRow(
            mixer=label,
            scores={
                **{key: _summary([run.test.get(key) for run in runs.values()]) for key in keys},
                f"val_{score.key}": _summary([run.val for run in runs.values()]),
            },
            seeds=None if found is None else found.seeds,
            images=None if found is None else found.units,
        )
        if judged is not None:
            row = replace(
                row,
                interval=judged.interval,
                degree=judged.degree,
                direction=judged.direction,
                settle=judged.settle,
            )
        rows.append(row)
    return tuple(rows)


def _evidence(
    labels: Sequence[str], baseline: str, scores: Table, task: Task, rules: Rules
) -> dict[str, Evidence]:
    """Compare every mixer with the baseline; Holm's correction is over the named ones."""
    others = [label for label in labels if label != baseline]
    part, base = answers_of(task), scores.get(baseline, {})
    seeds = {
        label: statistics.over_seeds(
            *(_by_seed(runs, task.score.key) for runs in (scores.get(label, {}), base)),
            score=task.score,
        )
        for label in others
    }
    units = {
        label: part.interval(task, _answers(scores.get(label, {})), _answers(base))
        for label in others
    }
    named = [m for m in others if m not in rules.controls and m not in rules.references]
    for table in (seeds, units):
        corrected = statistics.correct_over_mixers([table[label] for label in named])
        table.update(zip(named, corrected, strict=True))
    return {
        label: Evidence(
            crossed=_crossed(scores.get(label, {}), base, units[label]),
            by_seed=_differences(scores.get(label, {}), base, task.score.key),
            seeds=seeds[label],
            units=units[label],
            control=label in rules.controls,
        )
        for label in others
    }


def _crossed(runs: Runs, base: Runs, units: Interval | None) -> statistics.Crossed | None:
    """The crossed difference; None where an interval over units alone is not defined either."""
    if units is None or units.low is None:
        return None
    return statistics.crossed_difference(_answers(runs), _answers(base))


def _differences(runs: Runs, base: Runs, key: str) -> tuple[float, ...]:
    ours, theirs = _by_seed(runs, key), _by_seed(base, key)
    return tuple(ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys()))


def _by_seed(runs: Runs, key: str) -> dict[int, float]:
    found = {seed: run.test[key] for seed, run in runs.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _answers(runs: Runs) -> dict[int, Answers]:
    return {seed: run.answers for seed, run in runs.items()}


def _summary(values: Sequence[float | None]) -> Summary:
    return statistics.summarize([value for value in values if value is not None])


# ---- the check of the data ------------------------------------------------------------------


def checked_data(data: ImageData) -> Checked:
    """Run the cheap part of the data check and return what it found."""
    report = quick_check(data)
    found = tuple(
        DataFinding(
            level=cast(Any, each.level),
            what=each.what,
            count=each.count,
            where=tuple(each.where[:_NAMED]),
            remedy=each.remedy,
        )
        for each in report.findings
        if each.level != NOTE
    )
    return Checked(
        findings=found,
        too_narrow=any(each.what == IN_SEQUENCES for each in report.findings),
        looked_at=report.facts["looked_at"],
        not_looked_at=tuple(report.facts["not_looked_at"]),
    )

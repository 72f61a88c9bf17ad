# SPDX-License-Identifier: Apache-2.0
"""Fit a comparison into a number of minutes (``--minutes``), and say what gave way.

From four times the default's time on, large images get more pixels (`has_room`). Else updates are
scaled first, down to 800 or up to ten times the default; then mixers that nobody named
are left out, the last first; then seeds. What was named stays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from keymix.compare import eta
from keymix.compare.defaults import FLOOR, WARMUP, updates
from keymix.compare.eta import Trial
from keymix.compare.plan import Plan, Planned
from keymix.errors import UserError
from keymix.train.callbacks import roughly
from keymix.train.recipe import replace_path

MOST = 10
"""Times the default updates, at most, where the budget allows more."""

ROOM = 4
"""Times the default's time from which on large images get 224 pixels, which cost as many."""

Trials = Mapping[str, Trial | None]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The time that a comparison may take, and what was named and stays.

    `named` may hold ``mixers``, ``seeds`` and ``epochs``.
    """

    minutes: float
    named: Collection[str] = ()

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise UserError(f"minutes = {self.minutes!r}: give a positive number of minutes.")


def has_room(plan: Plan, trials: Trials, budget: Budget, *, sizes: Mapping[str, int]) -> bool:
    """Whether the budget is `ROOM` times the plan's time, so that images may have more pixels."""
    return ROOM * _seconds(plan, trials, sizes) <= 60 * budget.minutes


def fit_to_budget(
    plan: Plan, trials: Trials, budget: Budget, *, sizes: Mapping[str, int]
) -> tuple[Plan, str]:
    """Return the plan that fits, and a line that says what gave way; empty if nothing did."""
    wanted, fitted = 60 * budget.minutes, plan
    steps = updates(plan.recipe, sizes["train"]) // plan.recipe.schedule.epochs
    least = min(plan.recipe.schedule.epochs, math.ceil(FLOOR / steps))
    while True:
        if "epochs" not in budget.named:
            most = MOST * plan.recipe.schedule.epochs
            fitted = _scaled(fitted, trials, wanted, sizes, least=least, most=most)
        if _seconds(fitted, trials, sizes) <= wanted:
            break
        smaller = _smaller(fitted, budget.named)
        if smaller is None:
            break
        fitted = smaller
    return fitted, _gave_way(plan, fitted, budget, _seconds(fitted, trials, sizes), sizes)


def _seconds(plan: Plan, trials: Trials, sizes: Mapping[str, int]) -> float:
    """Return about how long a whole plan takes."""
    jobs = [plan.job(mixer, seed) for mixer, seed in plan.pairs]
    kept = {label: trial for label, trial in trials.items() if label in plan.labels}
    found = eta.estimated(plan, jobs, kept, sizes=sizes, unmeasured=list(kept))
    return 0.0 if found is None else found.seconds


def _scaled(
    plan: Plan,
    trials: Trials,
    wanted: float,
    sizes: Mapping[str, int],
    *,
    least: int,
    most: int,
) -> Plan:
    """Return the plan with the most epochs that fit, within bounds."""
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = _seconds(_with_epochs(plan, middle), trials, sizes) <= wanted
        low, high = (middle, high) if fits else (low, middle - 1)
    return _with_epochs(plan, low)


def _with_epochs(plan: Plan, epochs: int) -> Plan:
    changes: dict[str, float] = {"schedule.epochs": epochs}
    if plan.recipe.schedule.warmup_epochs:
        changes["schedule.warmup_epochs"] = round(WARMUP * epochs, 3)
    return replace(plan, recipe=replace_path(plan.recipe, changes))


def _smaller(plan: Plan, named: Collection[str]) -> Plan | None:
    """Leave out the last mixer that nobody named, else a seed; None where all must stay."""
    may_go = [
        each
        for each in plan.mixed
        if not each.control and not each.ann_of and each.label != plan.baseline
    ]
    if "mixers" not in named and len(may_go) > 1:
        return replace(plan, mixers=tuple(e for e in plan.mixers if e is not may_go[-1]))
    if "seeds" not in named and len(plan.seeds) > 1:
        return replace(plan, seeds=plan.seeds[:-1])
    return None


def _gave_way(
    before: Plan, after: Plan, budget: Budget, seconds: float, sizes: Mapping[str, int]
) -> str:
    """Say what changed, and if it does not fit all the same."""
    train = sizes["train"]
    was, now = updates(before.recipe, train), updates(after.recipe, train)
    parts = [] if was == now else [f"{now:,} updates instead of {was:,}"]
    gone = [label for label in before.labels if label not in after.labels]
    if gone:
        parts.append(f"without {', '.join(gone)}")
    if len(after.seeds) < len(before.seeds):
        parts.append(f"{len(after.seeds)} of {len(before.seeds)} seeds")
    text = f"to fit into {budget.minutes:g} minutes: {', '.join(parts)}" if parts else ""
    if seconds <= 60 * budget.minutes:
        return text
    more = (
        f"it will still take about {roughly(seconds)}: name fewer mixers or seeds, or give --epochs"
    )
    return f"{text}; {more}" if text else f"{budget.minutes:g} minutes are too few: {more}"


def as_before(plan: Plan, before: Planned, named: Collection[str]) -> Plan:
    """Return the plan with the mixers and seeds that the folder's last call fitted."""
    kept = plan
    if "mixers" not in named:
        chosen = tuple(each for each in plan.mixers if each.label in before.labels)
        kept = replace(kept, mixers=chosen)
    return kept if "seeds" in named else replace(kept, seeds=before.seeds)

# SPDX-License-Identifier: Apache-2.0
"""Choose the learning rate of a comparison on validation, at a seed of its own (``--tune lr``).

Every mixer is trained at three rates. The recipe's stays unless another is better by more than one
standard error of the mean difference over mixers: one rate for all, so that none is favoured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from keymix.compare.events import Event, Watcher
from keymix.compare.execute import train_runs
from keymix.compare.folder import TUNING
from keymix.compare.question import Plan
from keymix.compare.runs import Finished, read_runs
from keymix.data.dataset import ImageData
from keymix.data.record import SameImages
from keymix.errors import UserError
from keymix.report.record import Tuning, TuningRow
from keymix.report.words import say
from keymix.task import Score
from keymix.train.recipe import replace_path

FACTORS = (0.5, 1.0, 2.0)
"""Of the recipe's learning rate."""
SEED = 1_000
"""The seed of the tuning, which no comparison has unless it is asked for."""


def tuned(plan: Plan, images: ImageData, *, watch: Watcher) -> Plan:
    """Return the plan with the learning rate that is chosen, and how; a choice of before stays."""
    tuning = plan.tuning
    if tuning is None:
        lr = plan.recipe.optim.lr
        found = {rate: _validated(plan, images, rate, watch) for rate in (lr * f for f in FACTORS)}
        tuning = choose(found, default=lr, score=images.task.score)
    watch(Event(kind="note", text=say("tuning", tuning, images.task.score)))
    recipe = replace_path(plan.recipe, {"optim.lr": tuning.chosen})
    return replace(plan, recipe=recipe, tuning=tuning)


def _validated(plan: Plan, images: ImageData, rate: float, watch: Watcher) -> dict[str, float]:
    """Train every mixer but controls and references at a rate; return their validation scores."""
    watch(Event(kind="note", text=f"tuning: learning rate {rate:g}"))
    trial = replace(
        plan,
        recipe=replace_path(plan.recipe, {"optim.lr": rate}),
        mixers=tuple(each for each in plan.mixed if not each.control),
        seeds=(SEED if SEED not in plan.seeds else max(plan.seeds) + 1,),
        out=plan.out / TUNING / f"lr{rate:g}",
    )
    train_runs(trial, images, watch=watch)
    same = SameImages.of(images.record())
    return {
        each.run.mixer: value
        for each in read_runs(trial, images=same)
        if isinstance(each, Finished) and (value := each.scores("last").val) is not None
    }


def choose(found: Mapping[float, Mapping[str, float]], *, default: float, score: Score) -> Tuning:
    """Choose a rate by the mixers' validation scores; `default` is the recipe's."""
    shared = [m for m in found[default] if all(m in scores for scores in found.values())]
    if not shared:
        raise UserError("--tune lr: no mixer could be trained at every rate; leave --tune out.")
    chosen, best = default, 0.0
    for rate, scores in found.items():
        gains = np.array([score.rank(scores[m]) - score.rank(found[default][m]) for m in shared])
        error = float(gains.std(ddof=1)) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
        if rate != default and gains.mean() > max(error, best):
            chosen, best = rate, float(gains.mean())
    means = {rate: float(np.mean([scores[m] for m in shared])) for rate, scores in found.items()}
    return Tuning(
        rows=tuple(
            TuningRow(rate=rate, mean=means[rate], scores=dict(scores))
            for rate, scores in found.items()
        ),
        default=default,
        chosen=chosen,
    )

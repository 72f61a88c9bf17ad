# SPDX-License-Identifier: Apache-2.0
"""What a comparison finds out about itself, before any difference is read: did anything learn?

The gravest first: nothing learned, problems of the data, constant predictions, a training that was
too short, a control that is level with every mixer, a point of reference that is better than all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from keymix.analysis.answers import Answers, whole
from keymix.analysis.statistics import (
    EVERY_SEED,
    LEVEL,
    Crossed,
    crossed,
    crossed_difference,
    summarize,
)
from keymix.compare.defaults import AIM, FLOOR, updates
from keymix.compare.plan import Plan, margin_of
from keymix.compare.references import References
from keymix.compare.runs import Finished
from keymix.data.record import DataRecord
from keymix.report.formats import listing
from keymix.report.record import Checked, CostRow, Diagnosis, HistoryLine
from keymix.report.wording import unit_of
from keymix.task import Score
from keymix.train.parts import answers_of

END = 0.2
"""Share of the epochs, three at least, whose slope says whether training was still learning."""
RISING = 0.005
"""Gain of a fraction, in a further tenth of the training, from which on it was."""

Slope = tuple[float, float]
"""Change of the validation score per epoch at the end of training, and its standard error."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the diagnoses are made from; `checked` is what the check of the data found."""

    plan: Plan
    data: DataRecord
    done: Sequence[Finished]
    references: References
    costs: Mapping[str, CostRow]
    checked: Checked | None

    @property
    def score(self) -> Score:
        """The score that models are compared by."""
        return self.data.task_kind.score

    @property
    def margin(self) -> float | None:
        """Differences up to this one count as equal; None of scores that have no margin."""
        return margin_of(self.plan, self.score)

    def answers(self, label: str) -> dict[int, Answers]:
        """Return a mixer's answers on the test split by seed."""
        return {r.run.seed: r.answers["last"] for r in self.done if r.run.mixer == label}

    @property
    def mixers(self) -> list[str]:
        """Labels of the mixers, controls and references left out, that finished a run."""
        return self.labels("mixer")

    def labels(self, what: Literal["mixer", "control", "reference"]) -> list[str]:
        """Return the labels of the mixers, the controls or the trained references that finished."""
        ended = {reading.run.mixer for reading in self.done}
        kinds = {
            each.label: "reference" if each.reference else "control" if each.control else "mixer"
            for each in self.plan.mixers
        }
        return [label for label, kind in kinds.items() if kind == what and label in ended]

    def best(self, labels: Sequence[str]) -> str:
        """Return the mixer that is best on validation."""
        means = {label: self.validation(label) or 0.0 for label in labels}
        return max(labels, key=lambda label: self.score.rank(means[label]))

    def validation(self, label: str) -> float | None:
        """Return a mixer's mean score on validation; None where it is not known."""
        found = (r.scores("last").val for r in self.done if r.run.mixer == label)
        return summarize([value for value in found if value is not None]).mean


def diagnose(found: Found) -> tuple[Diagnosis, ...]:
    """Return what the comparison found out about itself, the gravest first."""
    if not found.mixers:
        return ()
    nothing = nothing_learned(found)
    made = [
        nothing,
        data_problems(found),
        constant_predictions(found),
        still_learning(found),
        None if nothing else control_level(found),
        None if nothing else reference_ahead(found),
    ]
    return tuple(each for each in made if each is not None)


# ---- did anything learn? --------------------------------------------------------------------


def nothing_learned(found: Found) -> Diagnosis | None:
    """Say that no model is better than answers that need no learning.

    Of classes, that no model's balanced accuracy has an interval above 1/K; of other tasks, that
    none is above the best reference that learned nothing. The intervals hold together: 95 % for all
    models, by Bonferroni.
    """
    part, score = answers_of(found.data.task_kind), found.score
    unlearned = found.references.of(learned=False)
    labels = [*found.mixers, *found.labels("control"), *found.labels("reference")]
    level = 1 - (1 - LEVEL) / len(labels)
    skills: dict[str, Crossed] = {}
    for label in labels:
        each = [part.skill(a, unlearned, score) for a in found.answers(label).values()]
        known = [skill for skill in each if skill is not None]
        if len(known) < len(each):
            return None
        estimate = crossed([mean for mean, _ in known], [values for _, values in known])
        if estimate is None or estimate.ends(level)[0] > 0:
            return None
        skills[label] = estimate
    best = max(skills, key=lambda label: skills[label].mean)
    low, high = skills[best].ends()
    done = updates(found.plan.recipe, found.data.sizes["train"])
    gain = f"{score.changed(skills[best].mean)} ({score.change(low)} to {score.change(high)})"
    chance = part.chance or "the best answer that needs no learning"
    if done < FLOOR:
        epochs = -(-AIM * found.plan.recipe.schedule.epochs // max(1, done))
        remedy = (
            f"Train longer: {done:,} updates are few, and {AIM:,} are recommended "
            f"(`--epochs {epochs}`)."
        )
    else:
        remedy = (
            "Check the labels with `keymix data check`, try other learning rates (`--tune lr`), "
            "more images, or larger ones."
        )
    text = f"No model learned this data: {best}, the best, differs from {chance} by {gain}"
    learned = {name: whole(a) for name, a in found.references.of(learned=True).items()}
    if learned:
        name = max(learned, key=lambda each: score.rank(learned[each]))
        text += f"; {name} reaches {score.text(learned[name])}"
    return Diagnosis(kind="nothing_learned", text=f"{text}.", remedy=remedy)


def data_problems(found: Found) -> Diagnosis | None:
    """Say what of the data falsifies results: leaks, duplicates, frames of one video, one case."""
    checked, unit = found.checked, unit_of(found.data)
    if any(reading.answers["last"].units < 2 for reading in found.done):
        return Diagnosis(
            kind="data_problem",
            text=f"The test split is a single {unit}: nothing can be said of other {unit}s, and no "
            "difference here means anything.",
            remedy=f"Get more {unit}s{_how_to_test_more(found)}.",
        )
    if checked is None:
        return None
    wrong = [each for each in checked.findings if each.level == "falsifies"]
    parts = [f"{each.what} ({each.count:,})" for each in wrong]
    if checked.too_narrow:
        parts.append(f"{found.data.kind.nouns} that belong together, such as frames of one video")
    if not parts:
        return None
    remedies = [each.remedy for each in wrong if each.remedy]
    remedy = remedies[0] if remedies else "Split by what belongs together"
    remedy = f"{remedy[0].upper()}{remedy[1:].rstrip('.')}."
    return Diagnosis(
        kind="data_problem",
        text=f"The data falsify the comparison: {'; '.join(parts)}.",
        remedy=remedy,
    )


def _how_to_test_more(found: Found) -> str:
    """Name the option by which the test split grows, if there is one."""
    option = "--limit" if found.data.limit is not None else "--data.test_fraction"
    drawn = found.data.limit is not None or found.data.test_fraction is not None
    return f" (`{option}`)" if drawn else ""


def constant_predictions(found: Found) -> Diagnosis | None:
    """Say which runs give one answer, or nearly one, to all inputs."""
    constant: dict[str, int] = {}
    of: dict[str, int] = {}
    for reading in found.done:
        label = reading.run.mixer
        of[label] = of.get(label, 0) + 1
        if reading.answers["last"].degenerate():
            constant[label] = constant.get(label, 0) + 1
    if not constant:
        return None
    who = listing([f"{label} ({count} of {of[label]} runs)" for label, count in constant.items()])
    text = f"One answer for (nearly) all test {found.data.kind.nouns}: {who}."
    return Diagnosis(
        kind="constant_predictions",
        text=text,
        remedy="These runs have learned nothing: train longer, or with another learning rate.",
    )


# ---- was it trained long enough? ------------------------------------------------------------


def slope_at_end(histories: Sequence[Sequence[HistoryLine]], key: str) -> Slope | None:
    """Fit the mean change per epoch of a score, by its key, over the last epochs of several runs.

    Returns the mean over runs and its standard error; None with fewer than three epochs.
    """
    slopes = []
    for history in histories:
        count = max(3, round(END * len(history)))
        values = [line.values.get(key) for line in history[-count:]]
        known = [value for value in values if value is not None]
        if len(history) < 3 or len(known) < len(values):
            continue
        slopes.append(float(np.polyfit(np.arange(count), known, 1)[0]))
    if not slopes:
        return None
    error = float(np.std(slopes, ddof=1)) / len(slopes) ** 0.5 if len(slopes) > 1 else 0.0
    return float(np.mean(slopes)), error


def still_learning(found: Found) -> Diagnosis | None:
    """Say that validation was rising at the end of training, and by how much per epoch."""
    score, epochs = found.score, found.plan.recipe.schedule.epochs
    runs = [r.run.history for r in found.done if r.run.mixer in found.mixers]
    slope = slope_at_end(runs, f"val_{score.key}")
    if slope is None:
        return None
    rise, error = score.rank(slope[0]), slope[1]
    more = max(1, round(epochs / 10))
    gain = rise * more
    least = RISING if score.unit == "%" else 0.01 * _scale(found)
    sure = error == 0 or rise / error > stats.t.ppf(LEVEL, max(1, len(runs) - 1))
    if gain < least or not sure:
        return None
    return Diagnosis(
        kind="still_learning",
        text=f"Training was too short: validation {score.name} still changes by "
        f"{score.changed(slope[0] * more)} per {'epoch' if more == 1 else f'{more} epochs'} at the "
        "end. A ranking now is a ranking of how fast mixers learn.",
        remedy=f"Train longer: `--epochs {2 * epochs}` or more.",
    )


def _scale(found: Found) -> float:
    """Return the size of a score that is no fraction: its mean on the test split."""
    values = [abs(whole(r.answers["last"])) for r in found.done]
    return float(np.mean(values)) if values else 1.0


# ---- is it the mixing? ----------------------------------------------------------------------


def control_level(found: Found) -> Diagnosis | None:
    """Say that no mixer is shown to be better than the best control.

    Where the intervals leave room for more than the margin of equality, mixing tokens may still
    help: then it is not shown, and else it is shown to buy nothing.
    """
    controls, score = found.labels("control"), found.score
    if not controls:
        return None
    control = found.best(controls)
    margin, possible = found.margin or 0.0, False
    for label in found.mixers:
        difference = crossed_difference(found.answers(label), found.answers(control))
        if difference is None:
            return None
        gains = [score.rank(end) for end in difference.ends()]
        if min(gains) > 0:
            return None
        possible = possible or max(gains) > margin
    best = found.best(found.mixers)
    difference = crossed_difference(found.answers(best), found.answers(control))
    assert difference is not None
    low, high = difference.ends()
    numbers = (
        f"{best}: {score.changed(difference.mean)}, {score.change(low)} to {score.change(high)}"
    )
    if not possible:
        return Diagnosis(
            kind="control_level",
            text=f"Mixing tokens buys nothing here: no mixer is better than the control {control}, "
            f"which mixes none ({numbers}).",
            remedy="Try larger images or smaller patches, a longer training, or a task that needs "
            "to relate distant parts of an image.",
        )
    unit = f"test {unit_of(found.data)}s"
    count = max(each.units for each in found.answers(best).values())
    return Diagnosis(
        kind="control_unbeaten",
        text=f"No mixer is shown to be better than the control {control}, which mixes no tokens "
        f"({numbers}). {count:,} {unit} and {difference.seeds} seeds leave open whether mixing "
        "tokens helps here.",
        remedy=f"More seeds and more {unit}{_how_to_test_more(found)} show "
        "smaller differences; larger images, smaller patches or a longer training may make them "
        "larger.",
    )


def reference_ahead(found: Found) -> Diagnosis | None:
    """Say that a linear model or the plain network is better than the best mixer, and its cost."""
    score, best = found.score, found.best(found.mixers)
    ours = found.answers(best)
    others: dict[str, Mapping[int, Answers]] = {
        label: found.answers(label) for label in found.labels("reference")
    }
    for name, answers in found.references.of(learned=True).items():
        others[name] = {EVERY_SEED: answers}
    ahead = []
    for name, theirs in others.items():
        difference = crossed_difference(ours, theirs)
        if difference is None:
            continue
        low, high = difference.ends()
        if (high if score.better == "more" else -low) < 0:
            ahead.append((score.rank(difference.mean), name, difference))
    if not ahead:
        return None
    _, name, difference = min(ahead)
    low, high = difference.ends()
    size = score.changed(difference.mean, sign=False)
    ends = sorted((abs(low), abs(high)))
    within = " to ".join(score.change(each, sign=False) for each in ends)
    return Diagnosis(
        kind="reference_ahead",
        text=f"The {name} is better than the best mixer, {best}, by {size} ({within})"
        f"{_at_cost(found, name, best)}.",
        remedy="On this data and at this size attention does not pay yet: train longer, on more "
        "images, or start from pretrained weights (keymix swap).",
    )


def _at_cost(found: Found, name: str, best: str) -> str:
    """Say what the reference costs against the best mixer, where both are known."""
    for row in found.references.rows:
        if row.name == name:
            return f", fitted in {row.seconds:.3g} s"
    ours, theirs = found.costs.get(best), found.costs.get(name)
    if ours is None or theirs is None or not ours.step_ms or not theirs.step_ms:
        return ""
    return f" at {theirs.step_ms / ours.step_ms:.2f} of its time per training step"

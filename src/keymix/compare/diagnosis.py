# SPDX-License-Identifier: Apache-2.0
"""What a comparison finds out about itself, before any difference is read: did anything learn?

The most serious first: nothing learned, problems of the data, too few test units, constant
predictions, a training that was too short, a task that is too easy, a control that is level with
every mixer, a point of reference that is better than all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from keymix.analysis.answers import Answers, bounded, whole
from keymix.analysis.certainty import needed
from keymix.analysis.statistics import (
    EVERY_SEED,
    FEW_CASES,
    LEVEL,
    Crossed,
    crossed,
    crossed_difference,
    quoted,
    summarize,
)
from keymix.compare.defaults import AIM, FLOOR, updates
from keymix.compare.question import Plan
from keymix.compare.references import References
from keymix.compare.runs import Finished
from keymix.data.record import DataRecord
from keymix.report.checked import Checked
from keymix.report.formats import listing, share, span
from keymix.report.formats import seeds as in_words
from keymix.report.record import CostRow, Diagnosis, HistoryLine
from keymix.report.wording import none_beats, unit_of
from keymix.task import LOSS, Score
from keymix.train.parts import answers_of

END, LEAST_SLOPE = 0.2, 3
"""Share of the epochs whose slope says whether training was still learning; how many at least."""
RISING = 0.005
"""Gain of a fraction, in a further tenth of the training, from which on it was."""

FLAT = 0.01
"""Share by which a loss falls at least, in a tenth of the training, where anything is learned."""
NEAR = 0.05
"""Share of the range of a score from its best value up to which a task is too easy."""

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
        return self.plan.margin

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
    """Return what the comparison found out about itself, the most serious first."""
    if not found.mixers:
        return ()
    nothing = nothing_learned(found)
    made = [
        nothing,
        data_problems(found),
        few_units(found),
        constant_predictions(found),
        still_learning(found),
        None if nothing else ceiling(found),
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
    chance = part.chance or "the best answer that needs no learning"
    if len({score.change(each.mean) for each in skills.values()}) == 1:
        apart = score.change(skills[best].mean)
        differs = float(apart.replace("\u2212", "-")) != 0
        text = f"Every model differs from {chance} by {apart}"
        if not differs:
            text = f"Every model equals {chance}"
    else:
        gain = f"{score.changed(skills[best].mean)} ({_ends(found, skills[best])})"
        text = f"The best, {best}, differs from {chance} by {gain}"
    learned = {name: whole(a) for name, a in found.references.of(learned=True).items()}
    if learned:
        name = max(learned, key=lambda each: score.rank(learned[each]))
        text += f"; {name} reaches {score.text(learned[name])}"
    remedy, epochs = _what_to_learn(found, unlearned, level)
    return Diagnosis(
        kind="nothing_learned",
        heading="No model learned this data",
        text=f"{text}.",
        remedy=remedy,
        epochs=epochs,
    )


def _what_to_learn(
    found: Found, unlearned: Mapping[str, Answers], level: float
) -> tuple[str, int | None]:
    """Say what to do where nothing was learned, and the epochs of a longer training, if that is it.

    A model that learns nothing in too few updates asks for more of them; where a linear model
    learns nothing either and the validation loss does not fall, the labels come first.
    """
    done, epochs = _updates(found)
    few = f"{done:,} updates are few, and {AIM:,} are recommended (`--epochs {epochs}`)."
    learned = found.references.of(learned=True)
    skills = [
        skill
        for answers in learned.values()
        if (skill := answers_of(found.data.task_kind).skill(answers, unlearned, found.score))
    ]
    estimates = [crossed([mean], [values]) for mean, values in skills]
    blind = bool(estimates) and all(e is None or e.ends(level)[0] <= 0 for e in estimates)
    if blind and _loss_is_flat(found):
        labels = (
            "Check the labels with `keymix data check`. They may not depend on the "
            f"{found.data.kind.nouns}, since {listing(list(learned))} learns nothing either and "
            "the validation loss does not fall."
        )
        return f"{labels} If they are right, train longer: {few}" if done < FLOOR else labels, None
    if done < FLOOR:
        return f"Train longer: {few}", epochs
    return (
        "Check the labels with `keymix data check`. Then try other learning rates (`--tune lr`), "
        f"more {found.data.kind.nouns}, or larger ones."
    ), None


def _updates(found: Found) -> tuple[int, int]:
    """Return the updates of a run, and the epochs that make as many as are recommended."""
    done = updates(found.plan.recipe, found.data.sizes["train"])
    return done, -(-AIM * found.plan.recipe.schedule.epochs // max(1, done))


def _loss_is_flat(found: Found) -> bool:
    """Whether the validation loss is known, and does not fall at the end of training."""
    histories = [reading.run.history for reading in found.done]
    slope = slope_at_end(histories, f"val_{LOSS}")
    last = [history[-1].values.get(f"val_{LOSS}") for history in histories if history]
    known = [value for value in last if value is not None]
    if slope is None or not known:
        return False
    gain = -slope[0] * max(1, round(found.plan.recipe.schedule.epochs / 10))
    return gain < FLAT * float(np.mean(known))


def _ends(found: Found, estimate: Crossed) -> str:
    """Write the interval of a difference, as every interval of the page is written."""
    low, high = quoted(found.score, *estimate.ends(), seeds=estimate.seeds)
    if low is None:
        return f"{estimate.seeds} seeds: no interval"
    return span(low, high, found.score)


def data_problems(found: Found) -> Diagnosis | None:
    """Say what of the data falsifies results: leaks, duplicates, frames of one video, one case."""
    checked, unit = found.checked, unit_of(found.data)
    if any(reading.answers["last"].units < 2 for reading in found.done):
        return Diagnosis(
            kind="data_problem",
            heading=f"The test split is a single {unit}",
            text=f"Nothing can be said of other {unit}s, and no difference here means anything.",
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
        heading="The data falsify the comparison",
        text=f"Found: {'; '.join(parts)}.",
        remedy=remedy,
    )


def _how_to_test_more(found: Found) -> str:
    """Name the option by which the test split grows, if there is one."""
    option = "--limit" if found.data.limit is not None else "--data.test_fraction"
    drawn = found.data.limit is not None or found.data.test_fraction is not None
    return f" (`{option}`)" if drawn else ""


def few_units(found: Found) -> Diagnosis | None:
    """Say that there are too few test units for any mixer to be shown better."""
    unit = unit_of(found.data)
    count = max((reading.answers["last"].units for reading in found.done), default=0)
    if not 1 < count < FEW_CASES:
        return None
    return Diagnosis(
        kind="few_units",
        heading=f"There are only {count} test {unit}s",
        text=f"Intervals over so few {unit}s are rough, and no mixer is likely to be shown better.",
        remedy=f"Get more test {unit}s{_how_to_test_more(found)}.",
    )


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
    runs = "All" if constant == of else "Some"
    return Diagnosis(
        kind="constant_predictions",
        heading=f"{runs} runs give one answer to (nearly) all test {found.data.kind.nouns}",
        text=f"These are {who}.",
        remedy="Such a run has learned nothing; another learning rate or a longer training may "
        "help it.",
    )


# ---- was it trained long enough? ------------------------------------------------------------


def slope_at_end(histories: Sequence[Sequence[HistoryLine]], key: str) -> Slope | None:
    """Fit the mean change per epoch of a score, by its key, over the last epochs of several runs.

    Returns the mean over runs and its standard error; None with fewer than three epochs.
    """
    slopes = []
    for history in histories:
        count = max(LEAST_SLOPE, round(END * len(history)))
        values = [line.values.get(key) for line in history[-count:]]
        known = [value for value in values if value is not None]
        if len(history) < LEAST_SLOPE or len(known) < len(values):
            continue
        slopes.append(float(np.polyfit(np.arange(count), known, 1)[0]))
    if not slopes:
        return None
    error = float(np.std(slopes, ddof=1)) / len(slopes) ** 0.5 if len(slopes) > 1 else 0.0
    return float(np.mean(slopes)), error


def still_learning(found: Found) -> Diagnosis | None:
    """Say that validation was rising at the end of training, and by how much per epoch.

    Of less than three epochs there is no slope; of those a training of few updates was too short.
    """
    score, epochs = found.score, found.plan.recipe.schedule.epochs
    if epochs < LEAST_SLOPE:
        return _few_updates(found)
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
        heading="Training was too short",
        text=f"Validation {score.name} still changes by "
        f"{score.changed(slope[0] * more)} per {'epoch' if more == 1 else f'{more} epochs'} at the "
        "end. A ranking now is a ranking of how fast mixers learn.",
        remedy=f"Train longer, until validation stops rising: `--epochs {2 * epochs}` or more.",
        epochs=2 * epochs,
    )


def _few_updates(found: Found) -> Diagnosis | None:
    """Say that a training had fewer updates than are recommended."""
    (done, enough), epochs = _updates(found), found.plan.recipe.schedule.epochs
    if done >= FLOOR:
        return None
    return Diagnosis(
        kind="still_learning",
        heading="Training was too short",
        text=f"{done:,} updates in {epochs} epoch{'' if epochs == 1 else 's'} are few, and {AIM:,} "
        "are recommended. A ranking now is a ranking of how fast mixers learn.",
        remedy=f"Train longer: `--epochs {enough}`.",
        epochs=enough,
    )


def _scale(found: Found) -> float:
    """Return the size of a score that is no fraction: its mean on the test split."""
    values = [abs(whole(r.answers["last"])) for r in found.done]
    return float(np.mean(values)) if values else 1.0


def ceiling(found: Found) -> Diagnosis | None:
    """Say that the task is too easy: all mixers and a linear model are near its best score.

    Only where no number of seeds is likely to make a difference from the best clear, or equal.
    """
    score, linear = found.score, found.references.of(learned=True)
    most = score.high if score.better == "more" else score.low
    if most is None or score.low is None or score.high is None or not linear:
        return None
    room = NEAR * (score.high - score.low)
    means = {
        label: float(np.mean([whole(each) for each in found.answers(label).values()]))
        for label in found.mixers
    }
    reached = [*means.values(), *map(whole, linear.values())]
    if any(abs(most - each) > room for each in reached):
        return None
    best = max(means, key=lambda label: score.rank(means[label]))
    others = [label for label in found.mixers if label != best]
    alpha = (1 - LEVEL) / max(1, len(others))
    for label in others:
        difference = crossed_difference(found.answers(label), found.answers(best))
        if difference is None or needed(difference, margin=found.margin, alpha=alpha).seeds:
            return None
    least = min(reached, key=score.rank)
    word = "or more" if score.better == "more" else "or less"
    return Diagnosis(
        kind="ceiling",
        heading="The task is too easy to separate the mixers",
        text=f"All mixers, and {listing(list(linear))} too, reach {score.text(least)} {word} of a "
        f"possible {score.text(most)}.",
        remedy=f"Take harder {found.data.kind.nouns}, or more test {unit_of(found.data)}s"
        f"{_how_to_test_more(found)}: more seeds will not separate these mixers.",
    )


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
    numbers = (
        f"{best}, the best mixer on validation, against {control}: "
        f"{score.changed(difference.mean)} ({_ends(found, difference)})."
    )
    if not possible:
        return Diagnosis(
            kind="control_level",
            heading=none_beats([control], shown=True),
            text=numbers,
            remedy="Try larger images or smaller patches, a longer training, or a task that needs "
            "to relate distant parts of an image.",
        )
    unit = f"test {unit_of(found.data)}s"
    count = max(each.units for each in found.answers(best).values())
    return Diagnosis(
        kind="control_unbeaten",
        heading=none_beats([control], shown=False),
        text=f"{numbers} {count:,} {unit} and {in_words(difference.seeds)} leave open whether "
        "mixing tokens helps here.",
        remedy=f"More {unit}{_how_to_test_more(found)} show smaller differences; "
        "larger images, smaller patches or a longer training may make them "
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
    low, high = bounded(score, *difference.ends())
    size = score.changed(difference.mean, sign=False)
    within = " to ".join(score.change(-end) for end in sorted((low, high), reverse=True))
    return Diagnosis(
        kind="reference_ahead",
        heading=f"{name[0].upper()}{name[1:]} is better than the best mixer",
        text=f"It is {size} better than {best}, the best mixer on validation ({within})"
        f"{_at_cost(found, name, best)}.",
        remedy="On this data and at this size attention does not pay yet; a longer training, more "
        f"{found.data.kind.nouns} or pretrained weights (`keymix swap`) may change that.",
    )


def _at_cost(found: Found, name: str, best: str) -> str:
    """Say what the reference costs against the best mixer, where both are known."""
    for row in found.references.rows:
        if row.name == name:
            return f", fitted in {row.seconds:.3g} s"
    ours, theirs = found.costs.get(best), found.costs.get(name)
    if ours is None or theirs is None:
        return ""
    costs = (
        (share(theirs.macs, ours.macs), "multiply-adds"),
        (share(theirs.step_ms, ours.step_ms), "time per training step"),
    )
    known = [f"{text} {what}" for text, what in costs if text]
    return f", at {' and '.join(known)}" if known else ""

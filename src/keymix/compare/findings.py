# SPDX-License-Identifier: Apache-2.0
"""What a comparison finds out about itself, before any difference is read, and which mixer to take.

A rule reads what was found and returns a kind and its numbers, or None. What each kind says, and
what to do about it, stands in ``report/templates/findings.txt.j2``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from keymix.analysis.answers import Answers, bounded, whole
from keymix.analysis.certainty import (
    CLEAR_SEEDS,
    PROVISIONAL_SEEDS,
    Candidate,
    Decision,
    TrainingCost,
    needed,
    recommend,
)
from keymix.analysis.statistics import (
    EVERY_SEED,
    FEW_CASES,
    LEVEL,
    Crossed,
    Interval,
    crossed,
    crossed_difference,
    quoted,
    summarize,
)
from keymix.compare.defaults import AIM, FLOOR, updates
from keymix.compare.question import Plan
from keymix.compare.references import References
from keymix.compare.runs import Finished
from keymix.data.findings import FALSIFIES, IN_SEQUENCES
from keymix.data.record import DataRecord
from keymix.report.checked import Checked
from keymix.report.record import CostRow, Finding, HistoryLine
from keymix.task import LOSS, Score
from keymix.train.parts import answers_of

FEW_UPDATES = FLOOR
"""Updates below which a training is short: fewer than any default makes, time limit or not."""
END, LEAST_SLOPE = 0.2, 3
"""Share of the epochs that give the slope at the end, and the fewest: two points have no error."""
RISING = 0.005
"""Gain of a fraction in a further tenth of the training from which on it is too short: a quarter
of the margin of equality."""
RISING_SHARE = 0.01
"""The same for a score that is no fraction, as a share of its size."""
HARDLY = 0.1
"""Share of the best model's gain over chance below which the baseline did not learn: nearly one
answer for all has a small gain of small error, which its interval does not show to be none."""
FLAT = 0.01
"""Share by which a loss falls, in a tenth of the training, where anything is learned at all."""
FEW_UNITS = FEW_CASES
"""Test units below which an interval over them is called rough: the jackknife's own limit."""
NEAR = 0.05
"""Share of a score's range from its best value that is a ceiling: differences there are as small as
the margin of equality."""
FINISHED_SEEDS = PROVISIONAL_SEEDS
"""Seeds that it takes to say that mixing tokens buys nothing: below it no difference is said."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the rules read; `checked` is what the check of the data found."""

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
    def margin(self) -> float:
        """Differences up to this count as equal; 0 of scores that have no margin."""
        return self.plan.margin or 0.0

    @property
    def mixers(self) -> list[str]:
        """Labels of the mixers, controls and references left out, that finished a run."""
        return self.labels("mixer")

    @property
    def epochs(self) -> int:
        """Epochs of a run."""
        return self.plan.recipe.schedule.epochs

    @property
    def updates(self) -> int:
        """Updates of a run."""
        return updates(self.plan.recipe, self.data.sizes["train"])

    @property
    def enough_epochs(self) -> int:
        """Epochs that make as many updates as a default training."""
        return -(-AIM * self.epochs // max(1, self.updates))

    def answers(self, label: str) -> dict[int, Answers]:
        """Return a mixer's answers on the test split by seed."""
        return {r.run.seed: r.answers["last"] for r in self.done if r.run.mixer == label}

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

    def against(self, label: str, other: str) -> Crossed | None:
        """Return how a mixer differs from another on the test split."""
        return crossed_difference(self.answers(label), self.answers(other))

    def gains(self, difference: Crossed, *, these_models: bool = False) -> tuple[float, float]:
        """Return an interval of gains, over seeds and test units, or over test units alone."""
        ends = _on_these_units(difference) if these_models else difference.ends()
        low, high = sorted(map(self.score.rank, ends))
        return low, high


Rule = Callable[[Found], Finding | None]


def findings(found: Found) -> tuple[Finding, ...]:
    """Return what the comparison found out about itself, the most serious first."""
    if not found.mixers:
        return ()
    first = nothing_learned(found)
    rules: tuple[Rule, ...] = ALWAYS if first else (baseline_at_chance, *ALWAYS, *OF_DIFFERENCES)
    made = [first, *(rule(found) for rule in rules)]
    return tuple(each for each in made if each is not None)


# ---- did anything learn? --------------------------------------------------------------------


def nothing_learned(found: Found) -> Finding | None:
    """No model is shown to be above chance on other test units, at 95 % for all together."""
    labels = [*found.mixers, *found.labels("control"), *found.labels("reference")]
    level = 1 - (1 - LEVEL) / len(labels)
    skills = {label: _above_chance(found, found.answers(label)) for label in labels}
    known = {label: skill for label, skill in skills.items() if skill is not None}
    if len(known) < len(labels) or any(each.ends(level)[0] > 0 for each in known.values()):
        return None
    best = max(known, key=lambda label: known[label].mean)
    linear = {name: whole(each) for name, each in found.references.of(learned=True).items()}
    name = max(linear, key=lambda each: found.score.rank(linear[each]), default="")
    few = found.updates < FEW_UPDATES
    labels_first = _blind(found, level) and _loss_is_flat(found)
    return Finding(
        kind="nothing_learned",
        numbers={
            **_chance(found, best, known[best]),
            "linear": name,
            "linear_score": linear.get(name),
            "check_labels": labels_first,
            "updates": found.updates if few else None,
            "enough": AIM,
            "epochs": found.enough_epochs if few and not labels_first else None,
        },
    )


def baseline_at_chance(found: Found) -> Finding | None:
    """The baseline is not shown to be above chance, or hardly is, though some other model is."""
    base = found.plan.baseline
    labels = [*found.mixers, *found.labels("control"), *found.labels("reference")]
    skills = {label: _above_chance(found, found.answers(label)) for label in labels}
    known = {label: skill for label, skill in skills.items() if skill is not None}
    best = max(known, key=lambda label: known[label].mean, default=base)
    if base not in known or best == base:
        return None
    skill, most = known[base], known[best].mean
    if skill.ends()[0] > 0 and skill.mean >= HARDLY * most:
        return None
    return Finding(
        kind="baseline_at_chance",
        numbers={
            **_chance(found, base, skill),
            "best": best,
            "best_gain": most,
            "epochs": found.enough_epochs if found.updates < FEW_UPDATES else None,
        },
    )


def _above_chance(found: Found, answers: Mapping[int, Answers]) -> Crossed | None:
    """Return how far trained models are above chance: on average, over test units alone."""
    part, unlearned = answers_of(found.data.task_kind), found.references.of(learned=False)
    each = [part.skill(a, unlearned, found.score) for a in answers.values()]
    known = [skill for skill in each if skill is not None]
    if not known or len(known) < len(each):
        return None
    means, values = zip(*known, strict=True)
    return crossed([float(np.mean(means))], [np.mean(values, axis=0)])


def _chance(found: Found, label: str, skill: Crossed) -> dict[str, object]:
    low, high = skill.ends()
    chance = answers_of(found.data.task_kind).chance
    return {"mixer": label, "gain": skill.mean, "low": low, "high": high, "chance": chance}


def _blind(found: Found, level: float) -> bool:
    """Whether models that are fitted, not trained, are at chance as well."""
    fitted = found.references.of(learned=True).values()
    skills = [_above_chance(found, {EVERY_SEED: answers}) for answers in fitted]
    return bool(skills) and all(each is None or each.ends(level)[0] <= 0 for each in skills)


def _loss_is_flat(found: Found) -> bool:
    """Whether the validation loss is known, and does not fall at the end of training."""
    histories = [reading.run.history for reading in found.done]
    slope = slope_at_end(histories, f"val_{LOSS}")
    last = [history[-1].values.get(f"val_{LOSS}") for history in histories if history]
    known = [value for value in last if value is not None]
    if slope is None or not known:
        return False
    gain = -slope[0] * max(1, round(found.epochs / 10))
    return gain < FLAT * float(np.mean(known))


# ---- are the data, and their test split, fit? -----------------------------------------------


def one_unit(found: Found) -> Finding | None:
    """The test split is a single unit."""
    alone = any(reading.answers["last"].units < 2 for reading in found.done)
    return Finding(kind="one_unit") if alone else None


def data_problem(found: Found) -> Finding | None:
    """The check of the data found what falsifies results."""
    checked = found.checked.findings if found.checked else ()
    wrong = [each for each in checked if each.level == FALSIFIES]
    if not wrong:
        return None
    remedy = next((each.remedy for each in wrong if each.remedy), "")
    what = [[each.what, each.count] for each in wrong]
    return Finding(kind="data_problem", numbers={"what": what, "remedy": remedy})


def narrow_intervals(found: Found) -> Finding | None:
    """Test units belong together, in a split that is the data set's own."""
    if found.checked is None or not found.checked.too_narrow:
        return None
    falsified = {each.what for each in found.checked.findings if each.level == FALSIFIES}
    return None if IN_SEQUENCES in falsified else Finding(kind="narrow_intervals")


def few_units(found: Found) -> Finding | None:
    """There are too few test units for any mixer to be shown better."""
    count = max((reading.answers["last"].units for reading in found.done), default=0)
    return Finding(kind="few_units", numbers={"units": count}) if 1 < count < FEW_UNITS else None


def constant_predictions(found: Found) -> Finding | None:
    """Some runs give one answer, or nearly one, to all inputs."""
    made = {
        label: [bool(each.degenerate()) for each in found.answers(label).values()]
        for label in dict.fromkeys(reading.run.mixer for reading in found.done)
    }
    runs = {label: [sum(each), len(each)] for label, each in made.items() if any(each)}
    if not runs:
        return None
    every = all(all(each) for each in made.values())
    return Finding(kind="constant_predictions", numbers={"runs": runs, "every": every})


# ---- was it trained long enough? ------------------------------------------------------------


def few_updates(found: Found) -> Finding | None:
    """A run made few updates, whatever its validation score did at the end, none before it."""
    if found.updates >= FEW_UPDATES or found.plan.start is not None:
        return None
    numbers = {"updates": found.updates, "enough": AIM, "epochs": found.enough_epochs}
    return Finding(kind="few_updates", numbers=numbers)


def still_learning(found: Found) -> Finding | None:
    """Validation was still getting better at the end of training."""
    score = found.score
    runs = [r.run.history for r in found.done if r.run.mixer in found.mixers]
    slope = slope_at_end(runs, f"val_{score.key}")
    if slope is None:
        return None
    rise, error = score.rank(slope[0]), slope[1]
    more = max(1, round(found.epochs / 10))
    size = float(np.mean([abs(whole(r.answers["last"])) for r in found.done]))
    least = RISING if score.unit == "%" else RISING_SHARE * size
    sure = error == 0 or rise / error > stats.t.ppf(LEVEL, max(1, len(runs) - 1))
    if rise * more < least or not sure:
        return None
    numbers = {"change": slope[0] * more, "per": more, "epochs": 2 * found.epochs}
    return Finding(kind="still_learning", numbers=numbers)


def slope_at_end(
    histories: Sequence[Sequence[HistoryLine]], key: str
) -> tuple[float, float] | None:
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


# ---- can differences be read? ---------------------------------------------------------------


def few_seeds(found: Found) -> Finding | None:
    """These models differ by more than the margin, and too few seeds say that others would."""
    base, large = found.plan.baseline, {}
    for label in found.mixers:
        difference = found.against(label, base) if label != base else None
        if difference is None or difference.seeds >= CLEAR_SEEDS:
            continue
        settled = difference.seeds >= PROVISIONAL_SEEDS and np.prod(difference.ends()) > 0
        here = _on_these_units(difference)
        if not settled and min(abs(end) for end in here) > found.margin and np.prod(here) > 0:
            large[label] = difference
    if not large:
        return None
    most = max(large, key=lambda label: abs(large[label].mean))
    low, high = bounded(found.score, *_on_these_units(large[most]))
    return Finding(
        kind="few_seeds",
        numbers={
            "mixer": most,
            "difference": large[most].mean,
            "low": low,
            "high": high,
            "seeds": large[most].seeds,
            "more": CLEAR_SEEDS - large[most].seeds,
        },
    )


def _on_these_units(difference: Crossed) -> tuple[float, float]:
    """Return the interval over test units alone, of these trained models."""
    error = difference.var_units**0.5 * float(stats.t.ppf(0.5 + LEVEL / 2, difference.units - 1))
    return difference.mean - error, difference.mean + error


def ceiling(found: Found) -> Finding | None:
    """All mixers and a linear model are near the best score, and no seeds will separate them."""
    score, linear = found.score, found.references.of(learned=True)
    most = score.high if score.better == "more" else score.low
    if most is None or score.low is None or score.high is None or not linear:
        return None
    means = {
        label: float(np.mean([whole(each) for each in found.answers(label).values()]))
        for label in found.mixers
    }
    reached = [*means.values(), *map(whole, linear.values())]
    if any(abs(most - each) > NEAR * (score.high - score.low) for each in reached):
        return None
    best = max(means, key=lambda label: score.rank(means[label]))
    others = [label for label in found.mixers if label != best]
    alpha = (1 - LEVEL) / max(1, len(others))
    for label in others:
        difference = found.against(label, best)
        if difference is None:
            return None
        if needed(difference, margin=found.plan.margin, alpha=alpha).seeds:
            return None
    least = min(reached, key=score.rank)
    return Finding(kind="ceiling", numbers={"linear": [*linear], "least": least, "most": most})


def control_level(found: Found) -> Finding | None:
    """No mixer is shown to be better than the best control.

    That mixing tokens buys nothing is said of finished trainings alone, and where no interval
    leaves room for more than the margin. Else it is open. Of fewer seeds, which hardly show
    anything, these trained models alone are compared.
    """
    controls = found.labels("control")
    if not controls:
        return None
    control = found.best(controls)
    against = {label: found.against(label, control) for label in found.mixers}
    known = {label: each for label, each in against.items() if each is not None}
    best = found.best(found.mixers)
    if best not in known or len(known) < len(against):
        return None
    difference = known[best]
    few = difference.seeds < FINISHED_SEEDS
    gains = [found.gains(each, these_models=few) for each in known.values()]
    if any(low > 0 for low, _ in gains):
        return None
    short = few_updates(found) or still_learning(found)
    shown = not few and not short and all(high <= found.margin for _, high in gains)
    low, high = quoted(found.score, *difference.ends(), seeds=difference.seeds)
    return Finding(
        kind="control_level" if shown else "control_open",
        numbers={
            "mixer": best,
            "control": control,
            "difference": difference.mean,
            "low": low,
            "high": high,
            "seeds": difference.seeds,
            "units": difference.units,
            "short": short is not None,
        },
    )


def reference_ahead(found: Found) -> Finding | None:
    """A fitted model, or the plain network, is better than the best mixer."""
    score, best = found.score, found.best(found.mixers)
    others: dict[str, Mapping[int, Answers]] = {
        label: found.answers(label) for label in found.labels("reference")
    }
    for name, answers in found.references.of(learned=True).items():
        others[name] = {EVERY_SEED: answers}
    against = {
        name: crossed_difference(found.answers(best), theirs) for name, theirs in others.items()
    }
    ahead = {name: each for name, each in against.items() if each and found.gains(each)[1] < 0}
    if not ahead:
        return None
    name = min(ahead, key=lambda each: score.rank(ahead[each].mean))
    low, high = bounded(score, *ahead[name].ends())
    costs = [found.costs[label] for label in (name, best) if label in found.costs]
    return Finding(
        kind="reference_ahead",
        numbers={
            "reference": name,
            "mixer": best,
            "difference": -ahead[name].mean,
            "low": -high,
            "high": -low,
            "seconds": {row.name: row.seconds for row in found.references.rows}.get(name),
            "macs": [row.macs for row in costs],
            "step_ms": [row.step_ms for row in costs],
        },
    )


ALWAYS: tuple[Rule, ...] = (
    one_unit,
    data_problem,
    narrow_intervals,
    few_units,
    constant_predictions,
    few_updates,
    still_learning,
)
"""Rules that hold whether anything was learned or not, the most serious first."""
OF_DIFFERENCES: tuple[Rule, ...] = (few_seeds, ceiling, control_level, reference_ahead)
"""Rules on differences, which mean nothing where nothing was learned."""


# ---- which mixer to take --------------------------------------------------------------------

UNDECIDED = (
    *("nothing_learned", "one_unit", "baseline_at_chance"),
    *("few_updates", "control_level", "control_open"),
)
"""Kinds of findings that leave nothing to decide, the most serious first."""


def decide(
    found: Found, kinds: Collection[str], intervals: Mapping[str, Interval | None]
) -> Decision:
    """Recommend a mixer.

    `kinds` are those of what the comparison found out about itself, `intervals` each mixer's
    difference from the baseline, as it is quoted.
    """
    missing = next((kind for kind in UNDECIDED if kind in kinds), "")
    if not missing and found.labels("control") and not found.mixers:
        missing = "only_controls"
    return recommend(
        {
            label: Candidate(
                validation=found.validation(label),
                answers=found.answers(label),
                cost=_cost(found.costs.get(label)),
                interval=intervals.get(label),
            )
            for label in found.mixers
        },
        baseline=found.plan.baseline,
        margin=found.plan.margin,
        score=found.score,
        missing=missing,
    )


def _cost(row: CostRow | None) -> TrainingCost | None:
    if row is None or (row.step_low_ms is None and row.macs is None):
        return None
    return TrainingCost(low=row.step_low_ms, high=row.step_high_ms, macs=row.macs)

# SPDX-License-Identifier: Apache-2.0
"""The answer of a comparison: its title, how certain it is, what it costs, what to do next.

One mixer is the *subject*. What makes the title is the first of these that holds:

1. nothing was learned, or the test split is a single case: the title says so, and that is all;
2. no mixer is better, or none is shown to be better, than the control, which is the subject;
3. the recommended mixer (docs/compare.md) is not the baseline: how it compares with the baseline,
   and its multiply-adds or training step;
4. some mixer is better, or some are worse, the most certain and then the largest first;
5. no mixer is distinguishable from the baseline.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from keymix.analysis.certainty import CLEAR_SEEDS, PROVISIONAL_SEEDS
from keymix.analysis.statistics import Interval
from keymix.report.formats import listing
from keymix.report.record import ComparisonRecord, OutcomeRow
from keymix.report.wording import unit_of

_SAME = 0.02
"""Costs that differ by less than this share are called the same."""
_MUCH = 0.05
"""Share by which a measured time must differ to be in the title."""
_COSTS = (("params", "parameters"), ("step_ms", "training step"), ("peak_mib", "training memory"))


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A number that the reader looks for, and what it is."""

    value: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Next:
    """What to do next: in words, and as a command where there is one."""

    text: str
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the first screen says.

    The `degree` is ``clear``, ``provisional``, ``equal`` or ``unclear``, and ``none`` where nothing
    can be said; `certainty` is it in words. Where the scores themselves mean nothing, neither does
    any sentence about two mixers. The `subject` is the mixer that the title and the tiles
    speak of, empty where they speak of none.
    """

    title: str
    degree: str
    certainty: str
    means_nothing: bool = False
    subject: str = ""
    tiles: tuple[Tile, ...] = ()
    next: Next | None = None


def answer(record: ComparisonRecord) -> Answer:
    """Read the answer off a comparison's record."""
    rows = {row.mixer: row for row in record.outcome.last}
    base = rows[record.baseline]
    kinds = [found.kind for found in record.diagnoses]
    score = record.task_kind.score
    if base.scores[score.key].mean is None:
        title = f"No run of the baseline {record.baseline} has finished"
        return Answer(title=title, degree="none", certainty="Nothing can be said yet")
    if "nothing_learned" in kinds:
        return Answer(
            title="No model learned this data",
            degree="none",
            certainty="No difference between the mixers means anything",
            means_nothing=True,
        )
    if _one_unit(record):
        return Answer(
            title=f"The test split is a single {unit_of(record.data)}: nothing can be said",
            degree="none",
            certainty="No difference between the mixers means anything",
            means_nothing=True,
        )
    if _without_certainty(record):
        return Answer(
            title=f"How certain the differences from {record.baseline} are is not in this record",
            degree="none",
            certainty="It is of an earlier version of keymix; `keymix report` makes it again",
        )
    level = bool({"control_level", "control_unbeaten"} & {*kinds})
    controls = [each.label for each in record.mixers if each.control and each.label in rows]
    subject = _best(record, rows, controls) if level else _subject(record, rows)
    shown = replace(
        _compared(record, rows[subject]), tiles=_tiles(record, rows, subject), next=_next(record)
    )
    if level:
        nothing = "Mixing tokens buys nothing here: no mixer beats"
        open_still = "No mixer is shown to beat the control"
        start = nothing if "control_level" in kinds else open_still
        title = f"{start} {listing(controls)}"
        return replace(shown, title=title, subject="")
    return shown


def _best(record: ComparisonRecord, rows: dict[str, OutcomeRow], labels: Sequence[str]) -> str:
    """Return the label whose mean score is best."""
    score = record.task_kind.score

    def rank(label: str) -> float:
        mean = rows[label].scores[score.key].mean
        return -math.inf if mean is None else score.rank(mean)

    return max(labels, key=rank)


def _without_certainty(record: ComparisonRecord) -> bool:
    """Whether the record is of before differences had degrees of certainty."""
    compared = [row for row in record.outcome.last if row.seeds is not None]
    return bool(compared) and all(row.interval is None for row in compared)


def _one_unit(record: ComparisonRecord) -> bool:
    """Whether no interval over test units is defined, for want of a second."""
    found = [row.images for row in record.outcome.last if row.images is not None]
    return bool(found) and all(each.n < 2 for each in found)


def _subject(record: ComparisonRecord, rows: dict[str, OutcomeRow]) -> str:
    """Choose the mixer that the title speaks of."""
    picked = record.recommendation.pick if record.recommendation else None
    if picked is not None and picked != record.baseline:
        return picked
    named = {each.label for each in record.mixers if not each.control and not each.reference}
    others = [row for row in rows.values() if row.mixer in named and row.mixer != record.baseline]
    known = [row for row in others if row.degree is not None and row.interval is not None]
    certain = {"clear": 2, "provisional": 1}

    def weight(row: OutcomeRow) -> tuple[bool, int, float]:
        assert row.interval is not None
        degree = certain.get(row.degree or "", 0)
        better, size = row.direction == "better", row.interval.difference
        return better, degree, abs(size) if degree else record.task_kind.score.rank(size)

    return max(known, key=weight).mixer if known else record.baseline


def _compared(record: ComparisonRecord, row: OutcomeRow) -> Answer:
    """Say how a mixer compares with the baseline."""
    base, score, found = record.baseline, record.task_kind.score, row.interval
    if row.mixer == base or found is None:
        best = record.task_kind.score.name
        return Answer(
            title=f"{base} has nothing to be compared with: {best} alone is known",
            degree="none",
            certainty="No pair of runs has finished",
            subject=base,
        )
    picked = record.recommendation is not None and record.recommendation.pick == row.mixer
    size = score.changed(found.difference, sign=False)
    cost = _cost(record, row.mixer)
    degree = row.degree or "unclear"
    if row.direction is not None:
        where = {"more": ("above", "below"), "less": ("below", "above")}[score.better]
        side = where[0] if row.direction == "better" else where[1]
        title = f"{row.mixer}: {size} {side} {base}"
        title += f", {cost}" if cost else ""
        if row.direction == "worse" and not picked:
            title = f"No mixer beats {base}; {row.mixer} is {size} {side} it"
    elif degree == "equal":
        margin = score.changed(record.margin or 0.0, sign=False)
        title = f"{row.mixer} equals {base} within {margin}" + (f", {cost}" if cost else "")
    elif picked and record.margin is not None and record.recommendation is not None:
        margin = score.changed(record.margin, sign=False)
        title = f"No mixer is distinguishable from {base}"
        if not _all_unclear(record) and row.mixer == record.recommendation.best:
            title = f"{row.mixer} is not distinguishable from {base}"
            title += f", {cost}" if _saves(record, row.mixer) else ""
        elif not _all_unclear(record):
            title = f"{row.mixer} keeps up with {record.recommendation.best} within {margin}"
            title += f", {cost}" if cost else ""
        elif _saves(record, row.mixer):
            title += f"; {row.mixer} keeps up, {cost}"
    else:
        title = f"No mixer is distinguishable from {base}"
    return Answer(
        title=title, degree=degree, certainty=_certainty(record, row, found), subject=row.mixer
    )


def _all_unclear(record: ComparisonRecord) -> bool:
    named = {each.label for each in record.mixers if not each.control and not each.reference}
    rows = [row for row in record.outcome.last if row.mixer in named]
    return all(row.degree in (None, "unclear") for row in rows)


def _certainty(record: ComparisonRecord, row: OutcomeRow, found: Interval) -> str:
    """Say how certain it is, and what a higher degree takes."""
    seeds = "1 seed" if found.n == 1 else f"{found.n} seeds"
    if row.degree == "clear":
        return f"Clear: {seeds}, corrected for all mixers"
    if row.degree == "provisional":
        return f"Provisional: all of {seeds} agree; clear takes {CLEAR_SEEDS}"
    if row.degree == "equal":
        return f"Equal within the margin: {seeds}, two one-sided tests"
    few = f"; {PROVISIONAL_SEEDS} are the least" if found.n < PROVISIONAL_SEEDS else ""
    return f"Unclear: {seeds}{few}"


# ---- cost -----------------------------------------------------------------------------------


def _share(record: ComparisonRecord, mixer: str, key: str) -> float | None:
    """By what share a cost of a mixer differs from the baseline's; None where one is not known."""
    costs = record.costs
    ours, theirs = (
        getattr(costs[m], key) if m in costs else None for m in (mixer, record.baseline)
    )
    return None if not theirs or ours is None else float(ours / theirs - 1)


def _cost(record: ComparisonRecord, mixer: str) -> str:
    """Say in the title what a mixer costs against the baseline: with fewer, for more."""
    macs, step = (_share(record, mixer, key) for key in ("macs", "step_ms"))
    if macs is not None and abs(macs) >= _SAME:
        share = f"{100 * abs(macs):.0f}\u00a0%"
        few, many = f"with {share} fewer multiply-adds", f"for {share} more multiply-adds"
        return few if macs < 0 else many
    if step is not None and abs(step) >= _MUCH:
        share = f"{100 * abs(step):.0f}\u00a0%"
        return f"with training steps {share} {'shorter' if step < 0 else 'longer'}"
    return "at the same multiply-adds" if macs is not None else ""


def _saves(record: ComparisonRecord, mixer: str) -> bool:
    """Whether what the title says of a mixer's cost is less than the baseline's."""
    macs, step = (_share(record, mixer, key) or 0.0 for key in ("macs", "step_ms"))
    return macs <= -_SAME or (abs(macs) < _SAME and step <= -_MUCH)


def relative(record: ComparisonRecord, mixer: str, key: str) -> str:
    """Write by what share a cost differs from the baseline's: ``−11 %``; empty if not known."""
    found = _share(record, mixer, key)
    if found is None:
        return ""
    body = f"{100 * abs(found):.0f}"
    return f"{'' if body == '0' else '−' if found < 0 else '+'}{body}\u00a0%"


# ---- tiles ----------------------------------------------------------------------------------


def _tiles(record: ComparisonRecord, rows: dict[str, OutcomeRow], subject: str) -> tuple[Tile, ...]:
    """Make the numbers of the first screen."""
    score, base, row = record.task_kind.score, record.baseline, rows[subject]
    tiles = []
    mean = row.scores[score.key].mean
    of_base = rows[base].scores[score.key].mean
    if mean is not None and of_base is not None:
        pair = [(subject, mean), (base, of_base)]
        (best, most), (other, least) = pair[::-1] if row.direction == "worse" else pair
        text = f"{best}, test {score.name} ({other} {score.text(least)})"
        tiles.append(Tile(value=score.text(most), text=text))
    unit = f"{unit_of(record.data)}s"
    seeds = record.seeds
    over = (
        (row.images, f"over the {row.images.n:,} test {unit}" if row.images else ""),
        (row.seeds, f"over {row.seeds.n} retrainings" if row.seeds else ""),
    )
    for found, what in over:
        if found is not None and found.low is not None and found.high is not None:
            value = f"{score.change(found.low)} to {score.change(found.high)}"
            rough = " (rough)" if found is row.seeds and len(seeds) < CLEAR_SEEDS else ""
            text = f"{score.difference_unit}, {100 * found.level:.4g}\u00a0% {what}{rough}"
            tiles.append(Tile(value=value, text=text.removeprefix(", ")))
    if subject != base and (macs := relative(record, subject, "macs")):
        further = [
            f"{name} {share}" for key, name in _COSTS if (share := relative(record, subject, key))
        ]
        text = "; ".join(["multiply-adds per image", ", ".join(further)])
        tiles.append(Tile(value=macs, text=text.removesuffix("; ")))
    tiles += _above_control(record, rows)
    return tuple(tiles)


def _above_control(record: ComparisonRecord, rows: dict[str, OutcomeRow]) -> list[Tile]:
    """Say how far the baseline is above the control: whether mixing tokens matters at all."""
    score = record.task_kind.score
    controls = [each.label for each in record.mixers if each.control and each.label in rows]
    found = [rows[label].interval for label in controls]
    known = [each for each in found if each is not None]
    if not known:
        return []
    least = min(known, key=lambda each: abs(each.difference))
    text = f"{record.baseline} against the control, which mixes no tokens"
    return [Tile(value=score.changed(-least.difference), text=text)]


# ---- what to do next ------------------------------------------------------------------------


def _next(record: ComparisonRecord) -> Next | None:
    """Say what to do next: what is the matter first, then more seeds."""
    epochs = record.recipe.schedule.epochs
    if any(found.kind == "still_learning" for found in record.diagnoses):
        return Next(
            text="train longer, until validation stops rising; this starts again",
            command=_with(record.command, {"--epochs": str(2 * epochs)}, ["--overwrite"]),
        )
    seeds, runs = len(record.seeds), len(record.mixers)
    if seeds < CLEAR_SEEDS and record.seeds == tuple(range(seeds)):
        more = (CLEAR_SEEDS - seeds) * runs
        return Next(
            text=f"train {CLEAR_SEEDS} seeds, from which on a difference can be clear ({more} more "
            "runs; finished ones are kept)",
            command=_with(record.command, {"--seeds": str(CLEAR_SEEDS)}),
        )
    return None


def _with(command: str, options: dict[str, str], flags: Sequence[str] = ()) -> str:
    """Return the command with options set; empty for one of Python."""
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    if words[:2] != ["keymix", "compare"]:
        return ""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in options:
            if not equals:
                next(rest, None)
            continue
        kept.append(word)
    kept += [word for pair in options.items() for word in pair]
    return shlex.join([*kept, *(flag for flag in flags if flag not in kept)])

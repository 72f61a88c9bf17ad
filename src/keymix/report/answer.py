# SPDX-License-Identifier: Apache-2.0
"""The answer of a comparison: its title, how certain it is, which mixer to take, what to do next.

One mixer is the *subject*. What makes the title is the first of these that holds:

1. nothing was learned, or the test split is a single case: the title says so, and that is all;
2. no mixer is better, or none is shown to be better, than the control: the numbers are those of the
   baseline against it;
3. the recommended mixer (docs/compare.md) is not the baseline: how it compares with the baseline,
   and its multiply-adds or training step;
4. some mixer is better, the most certain and then the largest first; or none is shown to beat the
   baseline, and the subject is the best of the others;
5. no mixer is distinguishable from the baseline.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from keymix.analysis.certainty import CLEAR_SEEDS, PROVISIONAL_SEEDS
from keymix.analysis.statistics import Interval
from keymix.errors import UserError
from keymix.report.formats import interval, share, span
from keymix.report.record import ComparisonRecord, OutcomeRow
from keymix.report.wording import control_name, none_beats, unit_of
from keymix.task import Score

_SAME = 0.02
"""Costs that differ by less than this share are called the same."""
_MUCH = 0.05
"""Share by which a measured time must differ to be in the title."""
_COSTS = (("params", "parameters"), ("step_ms", "training step"), ("peak_mib", "training memory"))
ENERGY = "energy_uj"
"""Key of the energy that spikes were estimated to take."""


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
    can be said; `certainty` is it in words, `decision` which mixer to take and why. Where the
    scores themselves mean nothing, neither does any sentence about two mixers. The `subject` is the
    mixer that the title and the tiles speak of, empty where they speak of none.
    """

    title: str
    degree: str
    certainty: str
    decision: str = ""
    means_nothing: bool = False
    subject: str = ""
    tiles: tuple[Tile, ...] = ()
    next: Next | None = None


def answer(record: ComparisonRecord) -> Answer:
    """Read the answer off a comparison's record."""
    rows = {row.mixer: row for row in record.outcome.last}
    score, following = record.task_kind.score, _next(record, "")
    if rows[record.baseline].scores[score.key].mean is None:
        title = f"No run of the baseline {record.baseline} has finished"
        certainty = "Nothing can be said yet"
        return Answer(title=title, degree="none", certainty=certainty, next=following)
    nothing = Answer(
        title="No model learned this data",
        degree="none",
        certainty="No difference between the mixers means anything",
        decision=_undecided(record),
        means_nothing=True,
        next=following,
    )
    if not record.learned:
        return nothing
    if _one_unit(record):
        title = f"The test split is a single {unit_of(record.data)}: nothing can be said"
        return replace(nothing, title=title)
    level = {"control_level", "control_unbeaten"} & {*record.found}
    controls = [label for label in record.controls if label in rows]
    subject = _unbeaten(record, rows, controls) if level else _subject(record, rows)
    shown = replace(
        _compared(record, rows[subject]),
        decision=_decision(record, rows),
        tiles=_tiles(record, rows, subject),
        next=_next(record, subject),
    )
    if level:
        title = none_beats([subject], shown="control_level" in level)
        return replace(shown, title=title, subject="")
    return shown


def _unbeaten(
    record: ComparisonRecord, rows: Mapping[str, OutcomeRow], controls: Sequence[str]
) -> str:
    """Return the control that the finding names, the best on validation; others may be beaten."""
    found = record.found
    said = found.get("control_level") or found["control_unbeaten"]
    named = [each for each in controls if said.heading.endswith(control_name(each))]
    return named[0] if named else _best(record, rows, controls)


def _best(record: ComparisonRecord, rows: Mapping[str, OutcomeRow], labels: Sequence[str]) -> str:
    """Return the label whose mean score is best."""
    score = record.task_kind.score

    def rank(label: str) -> float:
        mean = rows[label].scores[score.key].mean
        return -math.inf if mean is None else score.rank(mean)

    return max(labels, key=rank)


def _one_unit(record: ComparisonRecord) -> bool:
    """Whether no interval over test units is defined, for want of a second."""
    found = [row.images for row in record.outcome.last if row.images is not None]
    return bool(found) and all(each.n < 2 for each in found)


def _subject(record: ComparisonRecord, rows: Mapping[str, OutcomeRow]) -> str:
    """Choose the mixer that the title speaks of."""
    picked = record.recommendation.pick if record.recommendation else None
    if picked is not None and picked != record.baseline:
        return picked
    certain = {"clear": 2, "provisional": 1}

    def weight(row: OutcomeRow) -> tuple[bool, int, float]:
        assert row.interval is not None
        better = row.direction == "better"
        degree = certain.get(row.degree or "", 0) if better else 0
        return better, degree, record.task_kind.score.rank(row.interval.difference)

    known = _others(record, rows)
    return max(known, key=weight).mixer if known else record.baseline


def _others(record: ComparisonRecord, rows: Mapping[str, OutcomeRow]) -> list[OutcomeRow]:
    """Return the rows of the named mixers that are compared with the baseline.

    Where there are only controls, those are what is compared.
    """
    labels = record.named or record.controls
    named = (rows[label] for label in labels if label != record.baseline and label in rows)
    return [row for row in named if row.degree is not None and row.interval is not None]


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
            # it is the best of the others, so that all of them are worse
            one = len(_others(record, {each.mixer: each for each in record.outcome.last})) == 1
            which = row.mixer if one else f"the best, {row.mixer},"
            title = f"No mixer is shown to beat {base}; {which} is {size} {side} it"
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
    elif _all_unclear(record):
        title = f"No mixer is distinguishable from {base}"
    else:
        title = f"No mixer is shown to beat {base}"
    return Answer(
        title=title, degree=degree, certainty=_certainty(record, row, found), subject=row.mixer
    )


def _all_unclear(record: ComparisonRecord) -> bool:
    labels = record.named or record.controls
    rows = [row for row in record.outcome.last if row.mixer in labels]
    return all(row.degree in (None, "unclear") for row in rows)


def _certainty(record: ComparisonRecord, row: OutcomeRow, found: Interval) -> str:
    """Say how certain it is, and what a higher degree takes."""
    seeds = "1 seed" if found.n == 1 else f"{found.n} seeds"
    if row.degree == "clear":
        return f"Clear: {seeds}, corrected for all mixers"
    if row.degree == "provisional":
        return f"Provisional: all {seeds} agree; clear takes {CLEAR_SEEDS}"
    if row.degree == "equal":
        return f"Equal within the margin: {seeds}, two one-sided tests"
    few = f"; at least {PROVISIONAL_SEEDS} are needed" if found.n < PROVISIONAL_SEEDS else ""
    return f"Unclear after {seeds}{few}"


# ---- which mixer to take --------------------------------------------------------------------


def _undecided(record: ComparisonRecord) -> str:
    """Say that no mixer is recommended, and why."""
    found = record.recommendation
    if found is None or found.margin is None:
        why = "`--margin` says which difference counts as equal, and there is none"
    else:
        why = found.reason
    return "No decision yet: keep the mixer you have" + (f", since {why}." if why else ".")


def _decision(record: ComparisonRecord, rows: Mapping[str, OutcomeRow]) -> str:
    """Say which mixer to take by the rule of the recommendation, and the interval behind it."""
    found, base, score = record.recommendation, record.baseline, record.task_kind.score
    others = _others(record, rows)
    nearest = max(others, key=lambda row: score.rank(_difference(row)), default=None)
    closest = nearest.mixer if nearest else ""
    if found is None or found.pick is None or found.margin is None:
        if not closest:
            return _undecided(record)
        ahead = score.ahead(_difference(rows[closest]))
        lead = closest if ahead else f"{base}; closest to it {closest}"
        return f"{_undecided(record)} Best so far: {lead}, {_against(record, rows[closest])}."
    pick, best = found.pick, found.best
    margin = score.changed(found.margin, sign=False)
    verb = "keep" if pick == base else "take"
    short = "still_learning" in record.found
    start = f"For so short a training, {verb}" if short else verb.capitalize()
    if found.pick_interval is None or best is None:
        text = (
            f"{start} {pick}: the best on validation, and no cheaper mixer is shown to keep up "
            f"with it within {margin}."
        )
    else:
        text = (
            f"{start} {pick}: the cheapest per training step that keeps up within {margin} with "
            f"the best on validation, {best}"
        )
        degree = rows[best].degree if pick == base else None
        text += f", which {_behind(record, found.pick_interval, (pick, best), degree)}."
    if base not in (pick, best):
        return f"{text} {pick}: {_against(record, rows[pick])}."
    if pick == base and closest and closest != best:
        return f"{text} Closest: {closest}, {_against(record, rows[closest])}."
    return text


def _difference(row: OutcomeRow) -> float:
    assert row.interval is not None
    return row.interval.difference


def _against(record: ComparisonRecord, row: OutcomeRow) -> str:
    """Write a mixer's difference from the baseline with the interval that decides."""
    score, found = record.task_kind.score, row.interval
    if found is None:
        return "no pair of runs"
    ends = interval(found, score)
    size = score.changed(found.difference)
    return f"{size} against {record.baseline} ({ends}), {row.degree or 'unclear'}"


def _behind(
    record: ComparisonRecord, found: Interval, pair: tuple[str, str], degree: str | None
) -> str:
    """Say how the best on validation, the second, compares with a cheaper mixer on test.

    `found` is the cheaper one's difference from the best.
    """
    pick, best = pair
    score = record.task_kind.score
    size = score.changed(found.difference, sign=False)
    word = "worse" if score.ahead(found.difference) else "better"
    ends = span(-(found.high or 0.0), -(found.low or 0.0), score)
    ends = f"{ends}, {degree}" if degree else ends
    text = f"is {size} {word} on test ({ends})"
    steps = [
        record.costs[label].step_ms if label in record.costs else None for label in (best, pick)
    ]
    more = share(*steps)
    return f"{text} at {more} time per training step" if more else text


# ---- cost -----------------------------------------------------------------------------------


def _share(record: ComparisonRecord, mixer: str, key: str) -> float | None:
    """By what share a cost of a mixer differs from the baseline's; None where one is not known."""
    ours, theirs = (cost_of(record, label, key) for label in (mixer, record.baseline))
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
    ours, theirs = (cost_of(record, label, key) for label in (mixer, record.baseline))
    return share(ours, theirs)


def cost_of(record: ComparisonRecord, mixer: str, key: str) -> float | None:
    """Return a cost of a mixer by its key, `ENERGY` included; None where it is not known."""
    if key == ENERGY:
        found = record.spikes.mixers.get(mixer) if record.spikes else None
        return None if found is None else found.energy_uj.mean
    row = record.costs.get(mixer)
    return None if row is None else getattr(row, key)


# ---- tiles ----------------------------------------------------------------------------------


def _tiles(
    record: ComparisonRecord, rows: Mapping[str, OutcomeRow], subject: str
) -> tuple[Tile, ...]:
    """Make the numbers of the first screen; every difference is of one pair, named in each.

    The pair is the subject and the baseline; of a control it is the baseline and the control, as
    everywhere on the page.
    """
    score, base, row = record.task_kind.score, record.baseline, rows[subject]
    control = subject in record.controls
    pair = (base, subject) if control else (subject, base)
    tiles = []
    means = {label: rows[label].scores[score.key].mean for label in pair}
    known = {label: mean for label, mean in means.items() if mean is not None}
    if len(known) == 2:
        best, other = sorted(known, key=lambda label: -score.rank(known[label]))
        text = f"{best}, test {score.name} ({other} {score.text(known[other])})"
        tiles.append(Tile(value=score.text(known[best]), text=text))
    unit = f"{unit_of(record.data)}s"
    points = f"{score.difference_unit}, " if score.difference_unit else ""
    named = f"{points}{pair[0]} − {pair[1]}"
    rough = ", rough" if len(record.seeds) < CLEAR_SEEDS else ""
    if row.images is not None:
        what = (
            f"{named}: these models on other {unit} ({{level}} interval, {row.images.n:,} {unit})"
        )
        tiles.append(_interval_tile(row.images, what, score, turned=control))
    if row.seeds is not None:
        seeds = "1 seed" if row.seeds.n == 1 else f"{row.seeds.n} seeds"
        what = f"{named}: trained again, on these {unit} ({{level}} interval, {seeds}{rough})"
        if row.seeds.low is None:
            what = f"{named}: trained again, on these {unit} ({seeds})"
        tiles.append(_interval_tile(row.seeds, what, score, turned=control))
    if not control:
        tiles += _cost_tile(record, subject)
        tiles += _above_control(record, rows)
    return tuple(tiles)


def _interval_tile(found: Interval, what: str, score: Score, *, turned: bool) -> Tile:
    """Show an interval of a difference, from the other side if it is turned."""
    text = what.format(level=f"{100 * found.level:.4g}\u00a0%")
    if found.low is None or found.high is None:
        return Tile(value="no interval", text=text)
    low, high = (-found.high, -found.low) if turned else (found.low, found.high)
    return Tile(value=span(low, high, score), text=text)


def _cost_tile(record: ComparisonRecord, subject: str) -> list[Tile]:
    """Say what the subject costs against the baseline, of spikes the energy first."""
    if subject == record.baseline:
        return []
    kind = record.data.kind
    names = {
        ENERGY: f"energy per {kind.noun}",
        "macs": f"multiply-adds per {kind.noun}",
        **dict(_COSTS),
    }
    known = [
        (text, name) for key, name in names.items() if (text := relative(record, subject, key))
    ]
    if not known:
        return []
    (value, name), *further = known
    more = ", ".join(f"{each} {text}" for text, each in further)
    text = f"{name}, {subject} against {record.baseline}" + (f"; {more}" if more else "")
    return [Tile(value=value, text=text)]


def _above_control(record: ComparisonRecord, rows: Mapping[str, OutcomeRow]) -> list[Tile]:
    """Say how far the baseline is above the control: whether mixing tokens matters at all."""
    score = record.task_kind.score
    found = {label: rows[label].interval for label in record.controls if label in rows}
    known = {label: each.difference for label, each in found.items() if each is not None}
    if not known:
        return []
    least = min(known, key=lambda label: abs(known[label]))
    text = f"{record.baseline} − {control_name(least)}"
    return [Tile(value=score.changed(-known[least]), text=text)]


# ---- what to do next ------------------------------------------------------------------------


def _next(record: ComparisonRecord, subject: str) -> Next | None:
    """Say what to do next, one thing: the most serious first, with all that one command can do."""
    open_runs = len(record.unfinished("missing")) + len(record.unfinished("failed"))
    if open_runs:
        return Next(
            text=f"run the same command again: {_runs(open_runs)} did not finish, and finished "
            "ones are kept",
            command=_with(record.command),
        )
    found = record.found
    for kind in ("nothing_learned", "data_problem"):
        if (first := found.get(kind)) is not None and first.remedy:
            return Next(text=_instruction(first.remedy), command=_longer(record, first.epochs))
    few, short = found.get("few_units"), found.get("still_learning")
    if short is not None:
        epochs = short.epochs or 2 * record.recipe.schedule.epochs
        seeds = f" with {CLEAR_SEEDS} seeds" if _more_seeds(record) else ""
        text = f"train longer, until validation stops rising: {epochs} epochs{seeds}"
        if few is not None:
            text = f"{_instruction(few.remedy)}; then train {epochs} epochs{seeds}"
        text += ". The finished runs are deleted and all is trained again"
        return Next(text=text, command=_longer(record, epochs))
    for kind in ("few_units", "ceiling", "control_level"):
        if (first := found.get(kind)) is not None and first.remedy:
            return Next(text=_instruction(first.remedy))
    if _more_seeds(record):
        more = (CLEAR_SEEDS - len(record.seeds)) * len(record.mixers)
        return Next(
            text=f"train {CLEAR_SEEDS} seeds, the fewest for a clear difference "
            f"({_runs(more, 'more ')}; finished ones are kept)",
            command=_with(record.command, {"--seeds": str(CLEAR_SEEDS)}),
        )
    (row,) = (row for row in record.outcome.last if row.mixer == subject) if subject else (None,)
    return None if row is None else _settled(record, row)


def _settled(record: ComparisonRecord, row: OutcomeRow) -> Next:
    """Say what would settle a difference that is unclear, or that nothing is left to do."""
    if row.degree in ("clear", "equal", "provisional"):
        return Next(text="nothing more to do, the result is clear")
    settle, unit, seeds = row.settle, unit_of(record.data), len(record.seeds)
    if settle is not None and settle.seeds is not None and _in_order(record):
        least = max(settle.seeds[0], seeds + 1)
        return Next(
            text=f"train {least} seeds, the fewest that may settle it (finished runs are kept)",
            command=_with(record.command, {"--seeds": str(least)}),
        )
    if settle is not None and settle.units is not None:
        return Next(text=f"test on {settle.units[0]:,} {unit}s or more, which may settle it")
    return Next(
        text=f"nothing more to do, neither more seeds nor more test {unit}s are likely to settle it"
    )


def _in_order(record: ComparisonRecord) -> bool:
    return record.seeds == tuple(range(len(record.seeds)))


def _more_seeds(record: ComparisonRecord) -> bool:
    """Whether there are too few seeds for a difference to be clear, and more can be asked for."""
    return len(record.seeds) < CLEAR_SEEDS and _in_order(record)


def _longer(record: ComparisonRecord, epochs: int | None) -> str:
    """Return the command that trains all again for ``epochs``; empty if that is None."""
    if epochs is None:
        return ""
    options = {"--epochs": str(epochs)}
    if _more_seeds(record):
        options["--seeds"] = str(CLEAR_SEEDS)
    return _with(record.command, options, ["--overwrite"])


def _instruction(remedy: str) -> str:
    """Write the first sentence of a remedy as what is done next."""
    first = remedy.partition(". ")[0]
    return f"{first[:1].lower()}{first[1:]}".rstrip(".")


def _runs(count: int, word: str = "") -> str:
    return f"{count} {word}run{'' if count == 1 else 's'}"


def _with(command: str, options: Mapping[str, str] | None = None, flags: Sequence[str] = ()) -> str:
    """Return the command with options set; empty for one of Python.

    It throws no run away, unless `flags` say so.
    """
    options = options or {}
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
        if name in options and not equals:
            next(rest, None)
        if name in options or name == "--overwrite":
            continue
        kept.append(word)
    kept = [
        _canonical(word) if before == "--mixers" else word
        for before, word in zip(["", *kept], kept, strict=False)
    ]
    kept += [word for pair in options.items() for word in pair]
    return shlex.join([*kept, *flags])


def _canonical(mixers: str) -> str:
    """Write mixers by their canonical names, as the page does; as they were where one is unknown.

    Reading them loads torch.
    """
    from keymix.mixers.spec import parse_mixers

    try:
        return ",".join(each.label for each in parse_mixers(mixers))
    except UserError:
        return mixers

# SPDX-License-Identifier: Apache-2.0
"""The answer of a comparison: its title, how certain it is, which mixer to take, what to do next.

One mixer is the *subject*, of which title and tiles speak. The title is the first of these that
holds, and ``templates/answer.txt.j2`` has its words:

1. nothing was learned, or the test split is a single unit: that is all;
2. no mixer beats the control, or none is shown to: the subject is the control;
3. the subject is better than the baseline, or the best of the others is worse;
4. the subject equals the baseline, or keeps up with it within the margin and costs less;
5. undecided: how the subject is so far, where few seeds say it of a large difference; else no
   mixer is shown to differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keymix.analysis.certainty import CLEAR_SEEDS
from keymix.report import formats
from keymix.report.record import OutcomeRow, Results
from keymix.report.words import FindingText, finding_text, sentence

ENERGY = "energy_uj"
"""Key of the energy that spikes were estimated to take."""
_COSTS = (ENERGY, "macs", "params", "step_ms", "peak_mib")
_SAVING = 0.02
"""Share by which a model costs less, where that is an answer: a second count of the same model
differs by less."""
_FIRST = ("nothing_learned", "one_unit")
_LEVEL = ("control_level", "control_open")
_REMEDIES = (*_FIRST, "baseline_at_chance", "data_problem", "few_units", "ceiling", "control_level")
"""Findings whose remedy is what to do next, where it is no longer training."""

Rows = Mapping[str, OutcomeRow]


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


def answer(record: Results) -> Answer:
    """Read the answer off a comparison's record."""
    rows = {row.mixer: row for row in record.outcome.last}
    known = {each.kind: finding_text(record, each) for each in record.findings}
    if rows[record.baseline].scores[record.task_kind.score.key].mean is None:
        title, certainty = (sentence(record, x) for x in ("title_no_baseline", "certainty_none"))
        following = _next(record, known, None)
        return Answer(title=title, degree="none", certainty=certainty, next=following)
    first = next((kind for kind in _FIRST if kind in known), None)
    if first is not None:
        return Answer(
            title=known[first].heading,
            degree="none",
            certainty=sentence(record, "certainty_nothing"),
            decision=_decision(record),
            means_nothing=True,
            next=_next(record, known, None),
        )
    level = next((record.found[kind] for kind in _LEVEL if kind in known), None)
    row = rows[level.numbers["control"] if level else _subject(record, rows)]
    return Answer(
        title=known[level.kind].heading if level else _title(record, rows, row),
        degree="none" if row.interval is None else row.degree or "unclear",
        certainty=sentence(record, "certainty", row),
        decision=_decision(record),
        subject="" if level else row.mixer,
        tiles=_tiles(record, rows, row),
        next=_next(record, known, row),
    )


def _subject(record: Results, rows: Rows) -> str:
    """Choose the mixer that the title speaks of; of controls alone the best."""
    decided, base = record.recommendation, record.baseline
    compared = [row for row in rows.values() if row.interval is not None and row.degree is not None]
    better = [row for row in compared if row.direction == "better" and row.mixer in record.named]
    best = _best(record, better)
    if decided.pick not in (None, base):
        return str(decided.pick)
    if best and decided.subject not in [row.mixer for row in better]:
        return best
    if not better and "few_seeds" in record.found:
        return str(record.found["few_seeds"].numbers["mixer"])
    controls = [row for row in compared if row.mixer in record.controls]
    return decided.subject or _best(record, controls) or base


def _best(record: Results, rows: Sequence[OutcomeRow]) -> str:
    """Return the mixer with the largest gain over the baseline; empty of none."""
    score = record.task_kind.score
    gains = {row.mixer: score.rank(row.interval.difference) for row in rows if row.interval}
    return max(gains, key=lambda label: gains[label], default="")


def _title(record: Results, rows: Rows, row: OutcomeRow) -> str:
    """Say how the subject compares with the baseline: the first title that holds."""
    found, score = row.interval, record.task_kind.score
    if found is None:
        return sentence(record, "title_alone")
    others = [rows[label] for label in record.named or record.controls if label in rows]
    others = [each for each in others if each.mixer != record.baseline]
    better, worse = ([x for x in others if x.direction == to] for to in ("better", "worse"))
    ends = [] if found.low is None or found.high is None else [found.low, found.high]
    inside = min(map(score.rank, ends), default=-float("inf")) > -(record.margin or 0.0)
    so_far = "few_seeds" in record.found and score.ahead(found.difference)
    picked = record.recommendation.pick == row.mixer
    cost = _cost(record, row.mixer)
    titles: tuple[tuple[bool, str, tuple[object, ...]], ...] = (
        (row.direction == "better", "title_better", (row, cost)),
        (bool(worse) and len(worse) == len(others), "title_worse", (row, len(others) > 1)),
        (row.degree == "equal", "title_equal", (row, cost)),
        (so_far, "title_so_far", (row,)),
        (picked and inside and _saves(record, row.mixer), "title_keeps_up", (row, cost)),
        (True, "title_open", (row.mixer if better else "", bool(worse))),
    )
    return next(sentence(record, name, *values) for holds, name, values in titles if holds)


def _decision(record: Results) -> str:
    found = record.recommendation
    return sentence(record, "decision", found, _cost(record, found.pick) if found.pick else "")


# ---- cost -----------------------------------------------------------------------------------


def _share(record: Results, mixer: str, key: str) -> float | None:
    """By what share a cost of a mixer differs from the baseline's; None where one is not known."""
    ours, theirs = (record.cost(label, key) for label in (mixer, record.baseline))
    return None if not theirs or ours is None else float(ours / theirs - 1)


def _cost(record: Results, mixer: str) -> str:
    """Say what a mixer costs against the baseline; empty where that is not known."""
    return sentence(record, "cost", *(_share(record, mixer, key) for key in ("macs", "step_ms")))


def _saves(record: Results, mixer: str) -> bool:
    """Whether a mixer makes fewer multiply-adds than the baseline, or as many in a shorter step."""
    macs, step = (_share(record, mixer, key) or 0.0 for key in ("macs", "step_ms"))
    return macs <= -_SAVING or (abs(macs) < _SAVING and step <= -_SAVING)


def relative(record: Results, mixer: str, key: str) -> str:
    """Write by what share a cost differs from the baseline's: ``−11 %``; empty if not known."""
    ours, theirs = (record.cost(label, key) for label in (mixer, record.baseline))
    return formats.share(ours, theirs)


# ---- tiles ----------------------------------------------------------------------------------


def _tiles(record: Results, rows: Rows, row: OutcomeRow) -> tuple[Tile, ...]:
    """Make the numbers of the first screen; every difference is of one pair, named in each."""
    score, pair = record.task_kind.score, (row.mixer, record.baseline)
    means = {label: rows[label].scores[score.key].mean for label in pair}
    known = {label: mean for label, mean in means.items() if mean is not None}
    found: list[tuple[str, str, tuple[object, ...]]] = []
    if len(known) == 2:
        best, other = sorted(known, key=lambda label: -score.rank(known[label]))
        found.append((score.text(known[best]), "tile_score", (best, other, known[other])))
    rough = len(record.seeds) < CLEAR_SEEDS
    for name, interval, more in (
        ("tile_units", row.images, ()),
        ("tile_seeds", row.seeds, (rough,)),
    ):
        if interval is not None:
            span = formats.span(interval.low, interval.high, score)
            found.append((span, name, (*pair, interval, *more)))
    shares = {key: relative(record, row.mixer, key) for key in _COSTS}
    shares = {key: text for key, text in shares.items() if text}
    if shares and row.mixer not in (record.baseline, *record.controls):
        found.append((next(iter(shares.values())), "tile_cost", (row.mixer, shares)))
    controls = {label: rows[label].interval for label in record.controls if label in rows}
    away = {label: each.difference for label, each in controls.items() if each is not None}
    if away and row.mixer not in controls:
        least = min(away, key=lambda label: abs(away[label]))
        found.append((score.changed(-away[least]), "tile_control", (least,)))
    return tuple(Tile(value=value, text=sentence(record, name, *of)) for value, name, of in found)


# ---- what to do next ------------------------------------------------------------------------


def _next(record: Results, known: Mapping[str, FindingText], row: OutcomeRow | None) -> Next | None:
    """Say what to do next, one thing: the most serious first, with all that one command can do."""
    open_runs = len(record.unfinished("missing")) + len(record.unfinished("failed"))
    if open_runs:
        text = sentence(record, "next_resume", open_runs)
        return Next(text=text, command=_with(record.command))
    found = _remedy(record, known)
    if found is None and _more_seeds(record):
        return _seeds(record, CLEAR_SEEDS)
    return found or (None if row is None else _settled(record, row))


def _remedy(record: Results, known: Mapping[str, FindingText]) -> Next | None:
    """Return the remedy of the most serious finding that has one: a longer training, or words."""
    epochs = [each.numbers.get("epochs") or 0 for each in record.findings]
    for kind, longer in zip(known, epochs, strict=True):
        if longer:
            more_seeds = _more_seeds(record)
            options = {"epochs": max(epochs)} | ({"seeds": CLEAR_SEEDS} if more_seeds else {})
            text = sentence(record, "next_longer", max(epochs), more_seeds)
            again = _with(record.command, **options)
            return Next(text=text, command=again and f"{again} --overwrite")
        if kind in _REMEDIES:
            return Next(text=_instruction(known[kind].remedy))
    return None


def _settled(record: Results, row: OutcomeRow) -> Next:
    """Say what would settle an unclear difference, or which to take, or that nothing is left."""
    settle = row.settle or record.recommendation.settle
    seeds, units = (settle.seeds, settle.units) if settle else (None, None)
    if seeds is not None and _in_order(record):
        return _seeds(record, max(seeds[0], len(record.seeds) + 1))
    if units is not None:
        return Next(text=sentence(record, "next_units", units[0]))
    decided = record.recommendation.verdict != "undecided"
    settled = decided and row.degree in ("clear", "equal", "provisional")
    return Next(text=sentence(record, "next_nothing", settled))


def _more_seeds(record: Results) -> bool:
    """Whether there are too few seeds for a clear difference, and more can be asked for."""
    return len(record.seeds) < CLEAR_SEEDS and _in_order(record)


def _in_order(record: Results) -> bool:
    return record.seeds == tuple(range(len(record.seeds)))


def _seeds(record: Results, number: int) -> Next:
    """Ask for a number of seeds."""
    more = (number - len(record.seeds)) * len(record.mixers)
    text = sentence(record, "next_seeds", number, more)
    return Next(text=text, command=_with(record.command, seeds=number))


def _instruction(remedy: str) -> str:
    """Write the first sentence of a remedy as what is done next."""
    first = remedy.partition(". ")[0]
    return f"{first[:1].lower()}{first[1:]}".rstrip(".")


def _with(command: str, **options: int) -> str:
    """Return the command with options set; empty for one of Python. It throws no run away."""
    if not command.startswith("keymix compare"):
        return ""
    kept = re.sub(rf" --(({'|'.join(options) or '-'})[ =]\S+|overwrite\b)", "", command)
    return " ".join([kept, *(f"--{name} {value}" for name, value in options.items())])

# SPDX-License-Identifier: Apache-2.0
"""What a swap costs, measured, and a search for one that pays, as a result with its curve."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from keymix.analysis.study_record import StudyRecord
from keymix.analysis.timing import WORDS, Verdict
from keymix.records import to_json
from keymix.report.charts import Chart, Line, Look, curves, looks
from keymix.report.formats import MISSING, percent, points
from keymix.report.result import Result
from keymix.report.tables import Cell, Column, Table
from keymix.swap.report import SwapReport

Nothing = Literal["", "random", "unvarying", "one answer"]
"""Why nobody can tell what a swap costs, such as a model that answers all images alike."""

Answer = Literal["pays", "may pay", "nothing pays", "unclear"]

_CLOSE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The model with one mixer in one layer."""

    layer: int  # its number
    mixer: str  # with its options
    rise: float  # of the mean cross entropy on the images that choose
    score: float  # accuracy on them, a fraction
    saved_ms: float  # of the median time of the layer's attention alone on a batch, milliseconds
    share: float  # of that time


@dataclass(frozen=True, kw_only=True)
class Step:
    """The model with the layers of a step swapped."""

    layers: tuple[int, ...]  # their numbers
    mixers: tuple[str, ...]  # what was put into each
    loss: float  # mean cross entropy on the held-out images
    score: float  # accuracy on them, a fraction; balanced where the search says so
    # lower end of the 95 % interval of the change of the accuracy, a fraction: of the paired
    # differences on the held-out images. 0 for the original itself.
    change_low: float
    change_high: float  # upper end
    params: int  # trainable parameters of the whole model
    macs: int  # its multiply-adds on one image
    latency_ms: float  # median time of a batch, milliseconds
    original_ms: float  # the same of the original model, measured in turns with it
    latency_ratio: float  # median of the rounds' ratios of its time to the original's
    latency_ratio_q1: float  # first quartile of these ratios
    latency_ratio_q3: float  # third quartile
    # p-value of the test for a difference; None for the original itself
    latency_p: float | None = None
    # what `keymix.analysis.timing.compare` says, at one level for all steps of a search; None
    # where nothing was tested, but ``"busy"`` for the original itself where the machine was too
    # busy for its times
    latency_verdict: Verdict | None = None

    @property
    def latency_change(self) -> float:
        """What the swap adds to the latency, as a fraction of the original's."""
        return self.latency_ratio - 1

    @property
    def chosen(self) -> dict[int, str]:
        """The mixer of each layer."""
        return dict(zip(self.layers, self.mixers, strict=True))

    @property
    def blocks(self) -> tuple[int, ...]:
        """The numbers of its layers as people count, from 1."""
        return tuple(sorted(number + 1 for number in self.layers))

    @property
    def timed(self) -> bool:
        """Whether its times and the original's were measured well enough to be shown."""
        return self.latency_verdict != "busy"

    @property
    def latency_text(self) -> str:
        """How much longer or shorter it takes than the original, with the quartiles."""
        if self.latency_verdict != "different":
            return WORDS[self.latency_verdict]
        change, low, high = (
            points(ratio - 1)
            for ratio in (self.latency_ratio, self.latency_ratio_q1, self.latency_ratio_q3)
        )
        return f"{change} % (quartiles of the rounds {low} to {high} %)"


@dataclass(frozen=True, kw_only=True, repr=False)
class Search(Result):
    """Which mixers in which layers make a model faster, and what that costs.

    Its tables are ``"steps"`` and ``"trials"``, its figure is the accuracy against the time saved.
    """

    name = "search"
    templates = "keymix.swap"

    mixers: tuple[str, ...]  # that were tried, with their options
    paths: tuple[str, ...]  # of every layer of the model, in order
    max_drop: float | None  # most accuracy to lose, a fraction
    speed_up: float | None  # how many times as fast the model shall be
    batch_size: int  # images at once whose latency is measured
    scored: str  # ``"accuracy"`` or ``"balanced accuracy"``
    refused: tuple[str, ...]  # which mixers cannot sit where, a sentence each
    trials: tuple[Trial, ...]  # each mixer in each layer alone
    # the original, then one more change a step, on the images that choose
    steps: tuple[Step, ...]
    original: Step  # on the images that judge
    judged: Step  # the last step, on the images that judge
    images: tuple[int, int]  # held-out images that choose, and that judge
    # the model of the last step, and what became of its weights; None of a record that was read
    report: SwapReport | None = field(default=None, compare=False)
    made_by: StudyRecord | None = field(default=None, compare=False)

    def omitted(self) -> tuple[str, ...]:
        """What became of weights stands elsewhere, and a file has no model."""
        return ("report", "made_by")

    @property
    def change(self) -> float:
        """What the plan adds to the accuracy on the images that judge, a fraction."""
        return self.judged.score - self.original.score

    @property
    def faster(self) -> bool:
        """Whether the plan is faster, as far as was asked for."""
        shown = self.judged.latency_verdict == "different" and self.judged.latency_change < 0
        return shown and self.judged.latency_ratio <= 1 / (self.speed_up or 1) + _CLOSE

    @property
    def verdict(self) -> Answer:
        """Whether the plan pays: faster, and its loss, interval and all, within the limit.

        Unclear where times could not be compared.
        """
        if self.judged.layers and self.judged.latency_verdict in ("busy", "too few rounds"):
            return "unclear"
        most = math.inf if self.max_drop is None else self.max_drop + _CLOSE
        if not (self.judged.layers and self.faster) or -self.change > most:
            return "nothing pays"
        return "pays" if -self.judged.change_low <= most else "may pay"

    @property
    def enough(self) -> int | None:
        """How many images would have to judge so that the interval of this loss is in the limit."""
        if self.max_drop is None or self.verdict != "may pay":
            return None
        room, wide = self.max_drop + self.change, self.change - self.judged.change_low
        return math.ceil(self.images[1] * (wide / room) ** 2) if room > 0 else None

    @property
    def plan(self) -> list[tuple[str, tuple[int, ...]]]:
        """The plan's mixers, each with its blocks as people count, from 1."""
        chosen = self.judged.chosen
        return [
            (mixer, tuple(layer + 1 for layer in chosen if chosen[layer] == mixer))
            for mixer in dict.fromkeys(chosen.values())
        ]

    @property
    def answer(self) -> str:
        """Whether a plan pays, which, and what it costs."""
        return " ".join(self.words("advice"))

    @property
    def data(self) -> dict[str, Any]:
        """Everything, with what follows from it; `keymix.records.from_json` is the inverse."""
        return {**to_json(self), "verdict": self.verdict, "answer": self.answer}

    @property
    def tables(self) -> dict[str, Table]:
        """Every step, and each change alone."""
        return {"steps": _steps_table(self), "trials": _trials_table(self)}

    @property
    def figures(self) -> dict[str, Chart]:
        """Accuracy against the time that is saved."""
        return {"accuracy": _chart(self)} if sum(step.timed for step in self.steps) > 1 else {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Which mixers cannot sit where."""
        return self.refused


def block(number: int, path: str) -> Cell:
    """Name a block as people count, from 1, with its path."""
    return Cell(path, f"{number + 1} ({path})")


def _steps_table(search: Search) -> Table:
    """Make the table of steps; changes are from the original, on the images that choose.

    Times are of a batch, empty where the machine was too busy; their change and quartiles are of
    the rounds' ratios, less 1.
    """
    columns = (
        Column("step", "step", "whole"),
        Column("mixer added", "mixer", sort="none"),
        Column("in block", "layer"),
        Column("loss", "loss", "rate"),
        Column(f"{search.scored}, %", "score", "percent"),
        Column("change, points", "change", "percent", write=points),
        Column("", "change_low", where="csv"),
        Column("", "change_high", where="csv"),
        Column("95 % interval", "interval", "percent", where="people"),
        Column("parameters", "params", "whole"),
        Column("MACs", "macs", "count"),
        Column("latency, ms", "latency_ms", "ms"),
        Column("original, ms", "original_ms", "ms"),
        Column("latency change, %", "latency_change", "percent", write=points),
        Column("", "latency_q1", where="csv"),
        Column("", "latency_q3", where="csv"),
        Column("quartiles", "quartiles", "percent", where="people"),
        Column("", "latency_p", where="csv"),
        Column("", "latency_verdict", where="csv"),
    )
    rows: list[list[Any]] = []
    before: dict[int, str] = {}
    for number, step in enumerate(search.steps):
        change, slower = step.score - search.steps[0].score, _latency_change(step)
        times = (step.latency_ms, step.original_ms) if step.timed else (None, None)
        quartiles = _quartiles(step) if step.timed else (None, None)
        new = [layer for layer, mixer in step.chosen.items() if before.get(layer) != mixer]
        before = step.chosen
        rows.append(
            [
                number,
                *([before[new[0]], block(new[0], search.paths[new[0]])] if new else [None, None]),
                *(step.loss, step.score),
                change if step.layers else Cell(change, MISSING),
                *(step.change_low, step.change_high),
                span(step.change_low, step.change_high) if step.layers else None,
                *(step.params, step.macs, *times),
                _slower(step, slower),
                *(*quartiles, span(*quartiles) if step.layers else None),
                *(step.latency_p, step.latency_verdict),
            ]
        )
    unsorted = [replace(column, sort="none") for column in columns]
    last = frozenset({len(rows) - 1})
    return Table("steps", "Every step of the search", unsorted, rows, marked=last)


def _slower(step: Step, change: float | None) -> Cell | float | None:
    if not step.layers:
        return Cell(change, MISSING)
    different = step.latency_verdict == "different"
    return change if different else Cell(change, WORDS[step.latency_verdict], "words")


def _latency_change(step: Step) -> float | None:
    return step.latency_change if step.timed else None


def _quartiles(step: Step) -> tuple[float, float]:
    return step.latency_ratio_q1 - 1, step.latency_ratio_q3 - 1


def _trials_table(search: Search) -> Table:
    columns = [
        Column("block", "layer"),
        Column("mixer", "mixer"),
        Column("rise of the loss", "rise", "rate"),
        Column(f"{search.scored}, %", "score", "percent"),
        Column("saved, ms", "saved_ms", "ms"),
        Column("of the attention's time", "share", "percent", write=percent_sign),
    ]
    rows: list[list[Any]] = [
        [
            Cell(trial.layer, block(trial.layer, search.paths[trial.layer]).text),
            trial.mixer,
            Cell(trial.rise, f"{trial.rise:+.4f}".replace("-", "−")),
            *(trial.score, trial.saved_ms, trial.share),
        ]
        for trial in search.trials
    ]
    return Table("trials", "Each change alone", columns, rows)


def percent_sign(value: float) -> str:
    """Write a fraction in percent, with its sign."""
    return f"{percent(value)} %"


def span(low: float | None, high: float | None) -> str | None:
    """Write the ends of an interval in points; None of none."""
    return None if low is None else f"{points(low)} to {points(high)}"


def _chart(search: Search) -> Chart:
    """Draw accuracy on the images that choose against the time saved, and what was judged."""
    start = search.steps[0].score
    look = looks([search.mixers[0]])[search.mixers[0]]
    steps = [step for step in search.steps if step.timed]
    saved = [-100 * step.latency_change if step.layers else 0.0 for step in steps]
    low, high = ([start + getattr(s, f"change_{end}") for s in steps] for end in ("low", "high"))
    lines = [Line("every step", look, saved, [step.score for step in steps], low=low, high=high)]
    if search.judged.timed:
        judged = [-100 * search.judged.latency_change], [search.judged.score]
        lines.append(Line("judged", Look("ink", "D", "judged"), *judged))
    draw = partial(
        curves,
        lines=lines,
        x_label="time saved, %",
        y_label=f"{search.scored} on held-out images, %",
        percent=True,
    )
    caption = (
        "After each change, on the images that choose, with the 95 % interval of the change. "
        "Diamond: the last step on the images that judge."
    )
    return Chart("accuracy", caption, draw)

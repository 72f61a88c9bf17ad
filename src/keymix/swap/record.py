# SPDX-License-Identifier: Apache-2.0
"""A search for the layers to swap, as a result: costs, trials, and the curve of all steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from keymix.analysis.timing import WORDS, Verdict
from keymix.records import to_json
from keymix.report.charts import Chart, Line, Look, curves, looks
from keymix.report.formats import MISSING, percent, points, three_digits
from keymix.report.result import Result
from keymix.report.tables import Cell, Column, Table

Cost = Literal["params", "macs", "latency"]
Nothing = Literal["", "random", "unvarying", "one answer"]
"""Why nobody can tell what a swap costs, such as a model that answers all images alike."""

COSTS: tuple[Cost, ...] = ("params", "macs", "latency")

_CLOSE = 1e-9  # shares are sums of quotients
_Value = Callable[["Step"], Any]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What one layer's attention costs in the original model."""

    path: str  # of its place
    params: int  # its parameters
    macs: int  # its multiply-adds on one image
    # median time of it alone on the tokens of one image, milliseconds; None unless the budget
    # counts latency
    latency_ms: float | None
    latency_q1_ms: float | None  # first quartile of that time: how far to trust the share
    latency_q3_ms: float | None  # third quartile
    share: float  # of the budget's cost of all layers' attention


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The model with one layer swapped."""

    layer: int  # its number
    loss: float  # mean cross entropy on the held-out images
    top1: float  # accuracy on them, a fraction


@dataclass(frozen=True, kw_only=True)
class Step:
    """The model with the layers of a step swapped."""

    layers: tuple[int, ...]  # their numbers, in the order they were picked
    share: float  # of the attention's cost that they hold in the original model
    loss: float  # mean cross entropy on the held-out images
    top1: float  # accuracy on them, a fraction
    # lower end of the 95 % interval of the change of the accuracy, a fraction: of the paired
    # differences on the held-out images. 0 for the original itself.
    change_low: float
    change_high: float  # upper end
    params: int  # trainable parameters of the whole model
    macs: int  # its multiply-adds on one image
    latency_ms: float  # median time of one image alone, milliseconds
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
        """What the swap adds to the latency of one image, as a fraction of the original's."""
        return self.latency_ratio - 1

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
        """How much longer or shorter one image takes than in the original, with the quartiles."""
        if self.latency_verdict != "different":
            return WORDS[self.latency_verdict]
        change, low, high = (
            points(ratio - 1)
            for ratio in (self.latency_ratio, self.latency_ratio_q1, self.latency_ratio_q3)
        )
        return f"{change} % (quartiles of the rounds {low} to {high} %)"


@dataclass(frozen=True, kw_only=True, repr=False)
class Search(Result):
    """Which layers a budget swaps, and what each further one costs.

    Its tables are ``"steps"`` and ``"trials"``, its figures curves over the steps.
    """

    name = "search"
    templates = "keymix.swap"

    mixer: str  # the mixer with its options
    estimate: str  # how learned keys are estimated, ``"mean"`` or ``"least_squares"``
    cost: Cost  # what the budget counts
    budget: float  # share of the original attention's cost that the swapped layers make up
    images: int  # held-out images behind every loss and accuracy
    attention: tuple[Attention, ...] = ()  # every layer of the model, in order
    candidates: tuple[int, ...] = ()  # numbers of the layers that may be swapped
    trials: tuple[Trial, ...] = ()  # each candidate swapped alone, in the order of the model
    # the original model, then one more layer per step until all candidates are swapped
    steps: tuple[Step, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every step was measured."""
        return len(self.steps) == len(self.candidates) + 1

    @property
    def order(self) -> tuple[int, ...]:
        """Candidates by the rise of the loss that swapping one alone brings, per unit of cost."""
        before = self.steps[0].loss
        share = {i: self.attention[i].share for i in self.candidates}

        def key(trial: Trial) -> tuple[bool, float, int]:
            rise, cost = trial.loss - before, share[trial.layer]
            return (cost == 0, rise / (cost or 1.0), trial.layer)  # free ones bring no budget near

        return tuple(trial.layer for trial in sorted(self.trials, key=key))

    @property
    def met(self) -> int | None:
        """Number of the first step whose layers reach the budget; None before it was measured."""
        met = (i for i, step in enumerate(self.steps) if step.share >= self.budget - _CLOSE)
        return next(met, None)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that the budget swaps, ascending; empty before they are known."""
        return () if self.met is None else tuple(sorted(self.steps[self.met].layers))

    @property
    def answer(self) -> str:
        """What the step costs that meets the budget."""
        return self.says()

    def says(self, step: int | None = None) -> str:
        """Say what a step swaps and costs: the one of a number, or that meets the budget."""
        at = self.met if step is None else step
        if at is None:
            return " ".join(self.words("unmet"))
        of = {"layers": len(self.attention), "mixer": self.mixer, "images": self.images}
        return " ".join(self.words("cost", self.steps[0], self.steps[at], of))

    @property
    def basis(self) -> str:
        """What the share of the budget is a share of."""
        return " ".join(self.words("basis"))

    @property
    def data(self) -> dict[str, Any]:
        """Everything, with what follows from it; `keymix.records.from_json` is the inverse."""
        derived = {"complete": self.complete, "met": self.met, "layers": list(self.layers)}
        return {**to_json(self), **derived}

    @property
    def tables(self) -> dict[str, Table]:
        """Every step, and each layer alone."""
        return {"steps": _steps_table(self), "trials": _trials_table(self)}

    @property
    def figures(self) -> dict[str, Chart]:
        """Accuracy, loss and latency against the share that is swapped."""
        return {chart.key: chart for chart in _charts(self)} if self.steps else {}


def block(number: int, path: str) -> Cell:
    """Name a block as people count, from 1, with its path."""
    return Cell(path, f"{number + 1} ({path})")


def _steps_table(search: Search) -> Table:
    """Make the table of steps: `layer` is the one that a step adds, changes are from the original.

    Times are of one image, empty where the machine was too busy; their change and quartiles are of
    the rounds' ratios, less 1.
    """
    columns = (
        Column("step", "step", "whole"),
        Column("block added", "layer"),
        Column("share of the cost", "share", "percent", write=percent_sign),
        Column("loss", "loss", "rate"),
        Column("top-1, %", "top1", "percent"),
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
    for number, step in enumerate(search.steps):
        change, slower = step.top1 - search.steps[0].top1, _latency_change(step)
        times = (step.latency_ms, step.original_ms) if step.timed else (None, None)
        quartiles = _quartiles(step) if step.timed else (None, None)
        rows.append(
            [
                number,
                block(step.layers[-1], search.attention[step.layers[-1]].path)
                if step.layers
                else None,
                *(step.share, step.loss, step.top1),
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
    met = frozenset() if search.met is None else frozenset({search.met})
    return Table("steps", "Every step of the search", unsorted, rows, marked=met)


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
        Column("share of the cost", "share", "percent", write=percent_sign),
        Column("loss", "loss", "rate"),
        Column("rise of the loss", "rise", "rate"),
        Column("top-1", "top1", "percent", write=percent_sign),
    ]
    if search.cost == "latency":
        columns += [
            Column("attention alone, ms", "latency_ms", "ms"),
            Column("quartiles, ms", "quartiles", "ms", sort="none"),
        ]
    rows: list[list[Any]] = []
    for trial in search.trials:
        attention, rise = search.attention[trial.layer], trial.loss - search.steps[0].loss
        text = f"{rise:+.4f}".replace("-", "−")
        name = Cell(trial.layer, block(trial.layer, attention.path).text)
        row = [name, attention.share, trial.loss, Cell(rise, text), trial.top1]
        if search.cost == "latency":
            quartiles = (attention.latency_q1_ms, attention.latency_q3_ms)
            row += [attention.latency_ms, "–".join(map(three_digits, quartiles))]
        rows.append(row)
    return Table("trials", "Each layer alone", columns, rows)


def percent_sign(value: float) -> str:
    """Write a fraction in percent, with its sign."""
    return f"{percent(value)} %"


def span(low: float | None, high: float | None) -> str | None:
    """Write the ends of an interval in points; None of none."""
    return None if low is None else f"{points(low)} to {points(high)}"


def _charts(search: Search) -> list[Chart]:
    start, met = search.steps[0].top1, search.met
    drawn = []
    look = looks([search.mixer])[search.mixer]
    curves_of: tuple[tuple[str, str, bool, _Value, _Value | None], ...] = (
        (
            "top1",
            "top-1 on held-out images, %",
            True,
            lambda step: step.top1,
            lambda step: (start + step.change_low, start + step.change_high),
        ),
        ("loss", "loss on held-out images", False, lambda step: step.loss, None),
        ("latency_change", "latency change, %", True, _latency_change, _quartiles),
    )
    for name, label, fraction, value, ends in curves_of:
        known = [step for step in search.steps if value(step) is not None]
        if not known:
            continue
        lines = [_line("every step", look, known, value)]
        if ends is not None:
            low, high = zip(*map(ends, known), strict=True)
            lines[0] = replace(lines[0], low=low, high=high)
        if met is not None and value(search.steps[met]) is not None:
            chosen = Look("ink", "D", "the budget")
            lines.append(_line("the budget", chosen, [search.steps[met]], value))
        draw = partial(
            curves,
            lines=lines,
            x_label="share of the attention’s cost that is swapped, %",
            y_label=label,
            percent=fraction,
            holds=(0.0,) if name == "latency_change" else (),
        )
        caption = f"{label[0].upper()}{label[1:]}, after each step. {_BANDS.get(name, '')}"
        drawn.append(Chart(name, caption.strip(), draw))
    return drawn


_BANDS = {
    "top1": "Diamond: the swap that was written. Band: the first step’s accuracy with the 95 % "
    "interval of the change.",
    "latency_change": "Band: quartiles of the rounds. Steps that were measured while the machine "
    "was busy are left out.",
}


def _line(label: str, look: Look, steps: Sequence[Step], value: _Value) -> Line:
    xs = [100 * step.share for step in steps]
    return Line(label, look, xs, [value(step) for step in steps])

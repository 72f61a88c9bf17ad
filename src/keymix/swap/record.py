# SPDX-License-Identifier: Apache-2.0
"""What a search for layers found: costs, trials, the curve of all steps, one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from keymix.analysis.study_record import StudyRecord
from keymix.analysis.timing import WORDS, Verdict
from keymix.records import to_json
from keymix.swap.report import SwapReport

Cost = Literal["params", "macs", "latency"]
COSTS: tuple[Cost, ...] = ("params", "macs", "latency")

FORMAT = 2
"""Version of `Search`: 1 has Agresti and Min's intervals, 2 Bonett and Price's."""

_CLOSE = 1e-9  # shares are sums of quotients
_WORDS = {"params": "parameters", "macs": "multiply-adds", "latency": "measured latency"}


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What one layer's attention costs in the original model.

    Attributes:
        path: Of its place.
        params: Its parameters.
        macs: Its multiply-adds on one image.
        latency_ms: Median time of it alone on the tokens of one image, milliseconds; None unless
            the budget counts latency.
        latency_q1_ms: First quartile of that time: how far to trust the share.
        latency_q3_ms: Third quartile.
        share: Of the budget's cost of all layers' attention.
    """

    path: str
    params: int
    macs: int
    latency_ms: float | None
    latency_q1_ms: float | None
    latency_q3_ms: float | None
    share: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The model with one layer swapped.

    Attributes:
        layer: Its number.
        loss: Mean cross entropy on the held-out images.
        top1: Accuracy on them, a fraction.
    """

    layer: int
    loss: float
    top1: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """The model with the layers of a step swapped.

    Attributes:
        layers: Their numbers, in the order they were picked.
        share: Of the attention's cost that they hold in the original model.
        loss: Mean cross entropy on the held-out images.
        top1: Accuracy on them, a fraction.
        change_low: Lower end of the 95 % interval of the change of the accuracy, a fraction: of
            the paired differences on the held-out images. 0 for the original itself.
        change_high: Upper end.
        params: Trainable parameters of the whole model.
        macs: Its multiply-adds on one image.
        latency_ms: Median time of one image alone, milliseconds.
        original_ms: The same of the original model, measured in turns with it.
        latency_ratio: Median of the rounds' ratios of its time to the original's.
        latency_ratio_q1: First quartile of these ratios.
        latency_ratio_q3: Third quartile.
        latency_p: P-value of the test for a difference; None for the original itself, and from a
            version without the test.
        latency_verdict: What `keymix.analysis.timing.compare` says, at one level for all steps of
            a search; None where nothing was tested, but ``"busy"`` for the original itself where
            the machine was too busy for its times.
    """

    layers: tuple[int, ...]
    share: float
    loss: float
    top1: float
    change_low: float
    change_high: float
    params: int
    macs: int
    latency_ms: float
    original_ms: float
    latency_ratio: float
    latency_ratio_q1: float
    latency_ratio_q3: float
    latency_p: float | None = None
    latency_verdict: Verdict | None = None

    @property
    def latency_change(self) -> float:
        """What the swap adds to the latency of one image, as a fraction of the original's."""
        return self.latency_ratio - 1


@dataclass(frozen=True, kw_only=True)
class Search:
    """Which layers a budget swaps, and what each further one costs.

    Attributes:
        mixer: The mixer with its options.
        estimate: How learned keys are estimated, ``"mean"`` or ``"least_squares"``.
        cost: What the budget counts.
        budget: Share of the original attention's cost that the swapped layers are to hold.
        images: Held-out images behind every loss and accuracy.
        attention: Every layer of the model, in order.
        candidates: Numbers of the layers that may be swapped.
        trials: Each candidate swapped alone, in the order of the model.
        steps: The original model, then one more layer a step until all candidates are swapped.
        format: `FORMAT` of the version that measured it; 1 of a file that does not say.
    """

    mixer: str
    estimate: str
    cost: Cost
    budget: float
    images: int
    attention: tuple[Attention, ...] = ()
    candidates: tuple[int, ...] = ()
    trials: tuple[Trial, ...] = ()
    steps: tuple[Step, ...] = ()
    format: int = 1

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
        """Number of the first step whose layers hold the budget; None before it was measured."""
        held = (i for i, step in enumerate(self.steps) if step.share >= self.budget - _CLOSE)
        return next(held, None)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that the budget swaps, ascending; empty before they are known."""
        return () if self.met is None else tuple(sorted(self.steps[self.met].layers))

    def sentence(self, step: int | None = None) -> str:
        """Say what a step swaps and costs, as `sentence` of this module does.

        Args:
            step: Its number; the one that meets the budget if None.
        """
        at = self.met if step is None else step
        if at is None:
            return "not enough steps were measured to meet the budget"
        return sentence(self.steps[0], self.steps[at], len(self.attention))

    def basis(self) -> str:
        """Say what the share of the budget is a share of."""
        return f"the {_WORDS[self.cost]} of the original model's attention"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with what follows from it; `keymix.records.from_json` is the inverse."""
        derived = {
            "complete": self.complete,
            "met": self.met,
            "layers": list(self.layers),
            "sentence": self.sentence() if self.met is not None else None,
        }
        return {**to_json(self), **derived}


def sentence(before: Step, after: Step, layers: int) -> str:
    """Say what a swap costs, against the original model, all of it measured.

    "5 of 12 layers, −0.3 points of held-out top-1 (−1.1 to +0.5), −18 % latency": the brackets
    hold the 95 % interval over the held-out images; latency is of one image, with a figure where
    `keymix.analysis.timing.compare` calls it different.

    Args:
        before: The original model.
        after: The swapped one, measured in turns with it.
        layers: How many layers the model has.
    """
    points = _signed(100 * (after.top1 - before.top1), 1)
    low, high = (_signed(100 * end, 1) for end in (after.change_low, after.change_high))
    if after.latency_verdict == "different":
        latency = f"{_signed(100 * after.latency_change, 0)} % latency"
    else:
        latency = f"latency {WORDS[after.latency_verdict]}"
    return (
        f"{len(after.layers)} of {layers} layers, {points} points of held-out top-1 "
        f"({low} to {high}), {latency}"
    )


def _signed(value: float, digits: int) -> str:
    body = f"{abs(value):.{digits}f}"
    if float(body) == 0:
        return body
    return ("−" if value < 0 else "+") + body


def undefined(after: Step, layers: int, why: str) -> str:
    """Say what a swap did to a model that answers all images alike, which nothing can make worse.

    Args:
        after: The swapped model.
        layers: How many layers the model has.
        why: In what it does.
    """
    return f"{len(after.layers)} of {layers} layers; what it costs is undefined: {why}"


@dataclass(frozen=True, kw_only=True)
class SwapSetting:
    """What a search that is resumed must have in common with its beginning.

    Attributes:
        model: As it was given.
        mixer: What to put in, with its options.
        weights: Which weights, in words.
        data: The data's specification.
        image_size: Height and width, pixels.
        mean: Of each channel.
        std: Of each channel.
        layers: Which layers; None for all. This and the rest as on the command line.
        init: ``"transfer"`` or ``"fresh"``.
        estimate: ``"least_squares"`` or ``"mean"``.
        images: Calibration images.
        held_out: Held-out images.
        search: Whether layers are searched for.
        budget: Share of the attention's cost to swap.
        cost: What the budget counts.
    """

    model: str
    mixer: str
    weights: str
    data: str
    image_size: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layers: str | None
    init: str
    estimate: str
    images: int | None
    held_out: int | None
    search: bool
    budget: float | None
    cost: str | None


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """The content of ``search.json``.

    Attributes:
        setting: What the search is of.
        search: What is known so far.
    """

    setting: SwapSetting
    search: Search

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON takes it, with what follows from the search."""
        return {"setting": to_json(self.setting), "search": self.search.to_dict()}


@dataclass(frozen=True, kw_only=True)
class TestScores:
    """Scores on the test split.

    Attributes:
        loss: Mean cross entropy.
        top1: Accuracy, a fraction.
        top5: Top-5 accuracy; None with few classes.
        images: How many were scored.
    """

    loss: float
    top1: float
    top5: float | None
    images: int


@dataclass(frozen=True, kw_only=True)
class BothScores:
    """Scores on the test split before and after a swap."""

    before: TestScores
    after: TestScores


@dataclass(frozen=True, kw_only=True)
class LayerTable:
    """What became of each layer, as text.

    Attributes:
        heads: Heads of the columns.
        rows: A row a layer.
        notes: What else there is to say.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, report: SwapReport) -> LayerTable:
        """Make the table of what a swap did."""
        heads, rows = report.table()
        notes = [f"{row.path}: {note}" for row in report.rows for note in row.notes]
        return cls(heads=tuple(heads), rows=tuple(map(tuple, rows)), notes=(*notes, *report.notes))


@dataclass(frozen=True, kw_only=True)
class SwapRecord(StudyRecord):
    """The content of ``swap.json``.

    Attributes:
        sentence: What the swap costs.
        model: The model's name.
        mixer: What was put in.
        weights: Which weights the model had, in words.
        calibration: Calibration images.
        held_out: Held-out images.
        before: The original model, measured.
        after: The swapped one, measured in turns with it.
        before_ms: Latency of the original in these turns, milliseconds.
        test: Scores on the test split; None if they were not asked for.
        next: Commands to run next.
        search: What a search found; None without one.
        basis: What the share of the budget is a share of; None without a search.
        report: What became of every weight.
        layers: The same as a table of text.
        setting: What was asked for.
    """

    sentence: str
    model: str
    mixer: str
    weights: str
    calibration: int
    held_out: int
    before: Step
    after: Step
    before_ms: float
    test: BothScores | None
    next: tuple[str, ...]
    search: Search | None
    basis: str | None
    report: SwapReport
    layers: LayerTable
    setting: SwapSetting

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON takes it, with what follows from the search."""
        search = None if self.search is None else self.search.to_dict()
        return {**to_json(self), "search": search}

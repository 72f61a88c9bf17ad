# SPDX-License-Identifier: Apache-2.0
"""What a search for layers found: costs, trials, the curve of all steps, one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from keymix.analysis.study_record import StudyRecord, numbers
from keymix.analysis.timing import Verdict
from keymix.records import to_json
from keymix.swap.report import SwapReport

Cost = Literal["params", "macs", "latency"]
COSTS: tuple[Cost, ...] = ("params", "macs", "latency")

FORMAT = 3
"""Of a swap's folder: ``search.json`` and ``swap.json``."""

_CLOSE = 1e-9  # shares are sums of quotients
_WORDS = {"params": "parameters", "macs": "multiply-adds", "latency": "measured latency"}


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


@dataclass(frozen=True, kw_only=True)
class Search:
    """Which layers a budget swaps, and what each further one costs."""

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

    def sentence(self, step: int | None = None) -> str:
        """Say what a step swaps and costs: the one of a number, or that meets the budget."""
        at = self.met if step is None else step
        if at is None:
            return "not enough steps were measured to meet the budget"
        return sentence(
            self.steps[0],
            self.steps[at],
            len(self.attention),
            mixer=self.mixer,
            images=self.images,
        )

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


def sentence(before: Step, after: Step, layers: int, *, mixer: str, images: int) -> str:
    """Say what a swap costs, against the original model, all of it measured.

    "Replacing attention in blocks 7 to 12 with static_key costs 2.3 points of accuracy (95 %: 1.1
    to 3.5) and saves 18 % of the time": the brackets have the interval over the held-out images;
    time is that of one image, with a figure where `keymix.analysis.timing.compare` calls it
    different. The model has ``layers`` blocks with attention, counted from 1.
    """
    if not after.layers:
        return "This is the original model, with nothing replaced"
    replacing = _replacing(after, layers, mixer)
    if images == 1:
        return f"One held-out image is too few to say what {replacing} costs"
    change, low, high = (
        100 * end for end in (after.top1 - before.top1, after.change_low, after.change_high)
    )
    text = _capital(replacing)
    if low > 0 or high < 0:
        word, ends = ("costs", (-high, -low)) if high < 0 else ("gains", (low, high))
        span = " to ".join(f"{end:.1f}" for end in ends)
        text += f" {word} {abs(change):.1f} points of accuracy (95 %: {span})"
    else:
        span = " to ".join(_signed(end, 1) for end in (low, high))
        text += (
            f" changes accuracy by {_signed(change, 1)} points, which may be chance (95 %: {span})"
        )
    return text + _time(after)


def _time(after: Step) -> str:
    """Say what became of the time of one image."""
    percent = round(100 * abs(after.latency_change))
    if after.latency_verdict == "different" and percent:
        if after.latency_change < 0:
            return f" and saves {percent} % of the time"
        return f" and takes {percent} % more time"
    return {
        "busy": "; the machine was too busy to compare times",
        "too few rounds": "; too few rounds were timed to compare times",
        None: "; times were not compared",
    }.get(after.latency_verdict, "; no difference in time can be measured")


def _replacing(after: Step, layers: int, mixer: str) -> str:
    where = numbers("block", [number + 1 for number in after.layers]).replace("–", " to ")
    every = f"all {layers} blocks" if len(after.layers) == layers > 1 else where
    return f"replacing attention in {every} with {mixer}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _signed(value: float, digits: int) -> str:
    body = f"{abs(value):.{digits}f}"
    if float(body) == 0:
        return body
    return ("−" if value < 0 else "+") + body


def undefined(after: Step, layers: int, why: str, *, mixer: str) -> str:
    """Say why nobody can tell what a swap costs, such as a model that answers all images alike."""
    return f"What {_replacing(after, layers, mixer)} costs is undefined: {why}"


@dataclass(frozen=True, kw_only=True)
class SwapSetting:
    """What a search that is resumed must have in common with its beginning."""

    model: str  # as it was given
    mixer: str  # what to put in, with its options
    weights: str  # which weights, in words
    data: str  # the data's specification
    image_size: tuple[int, ...]  # height and width, pixels
    mean: tuple[float, ...]  # of each channel
    std: tuple[float, ...]  # of each channel
    layers: str | None  # which layers; None for all. This and the rest as on the command line.
    init: str  # ``"transfer"`` or ``"fresh"``
    estimate: str  # ``"least_squares"`` or ``"mean"``
    images: int | None  # calibration images
    held_out: int | None  # held-out images
    search: bool  # whether layers are searched for
    budget: float | None  # share of the attention's cost to swap
    cost: str | None  # what the budget counts


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """The content of ``search.json``."""

    format: int = FORMAT
    setting: SwapSetting  # what the search is of
    search: Search  # what is known so far

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON takes it, with what follows from the search."""
        return {**to_json(self), "search": self.search.to_dict()}


@dataclass(frozen=True, kw_only=True)
class TestScores:
    """Scores on the test split."""

    loss: float  # mean cross entropy
    top1: float  # accuracy, a fraction
    balanced: float  # balanced accuracy
    top5: float | None  # top-5 accuracy; None with few classes
    images: int  # how many were scored


@dataclass(frozen=True, kw_only=True)
class BothScores:
    """Scores on the test split before and after a swap."""

    key: str  # of the score by which models of these data are compared
    name: str  # of that score, in words
    before: TestScores
    after: TestScores

    @property
    def decisive(self) -> tuple[float, float]:
        """That score before and after, fractions."""
        return getattr(self.before, self.key), getattr(self.after, self.key)


@dataclass(frozen=True, kw_only=True)
class LayerTable:
    """What became of each layer, as text."""

    heads: tuple[str, ...]  # heads of the columns
    rows: tuple[tuple[str, ...], ...]  # one row per layer
    notes: tuple[str, ...]  # what else there is to say

    @classmethod
    def of(cls, report: SwapReport) -> LayerTable:
        """Make the table of what a swap did."""
        heads, rows = report.table()
        notes = [f"{row.path}: {note}" for row in report.rows for note in row.notes]
        return cls(heads=tuple(heads), rows=tuple(map(tuple, rows)), notes=(*notes, *report.notes))


@dataclass(frozen=True, kw_only=True)
class SwapRecord(StudyRecord):
    """The content of ``swap.json``."""

    format: int = FORMAT
    sentence: str  # what the swap costs
    model: str  # the model's name
    mixer: str  # what was put in
    weights: str  # which weights the model had, in words
    calibration: int  # calibration images
    held_out: int  # held-out images
    before: Step  # the original model, measured
    after: Step  # the swapped one, measured in turns with it
    before_ms: float  # latency of the original in these turns, milliseconds
    test: BothScores | None  # scores on the test split; None if they were not asked for
    next: tuple[str, ...]  # commands to run next
    search: Search | None  # what a search found; None without one
    basis: str | None  # what the share of the budget is a share of; None without a search
    report: SwapReport  # what became of every weight
    layers: LayerTable  # the same as a table of text
    setting: SwapSetting  # what was asked for

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON takes it, with what follows from the search."""
        search = None if self.search is None else self.search.to_dict()
        return {**to_json(self), "search": search}

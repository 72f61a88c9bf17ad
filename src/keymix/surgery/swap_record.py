# SPDX-License-Identifier: Apache-2.0
"""What ``keymix swap`` leaves: the records of ``swap.json`` and ``search.json``. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keymix.analysis.study_record import StudyRecord
from keymix.records import to_json
from keymix.surgery.report import SwapReport
from keymix.surgery.search_record import Search, Step


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

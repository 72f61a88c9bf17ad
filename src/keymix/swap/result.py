# SPDX-License-Identifier: Apache-2.0
"""What ``keymix swap`` leaves: its record, which is a result with a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keymix.analysis.study_record import StudyRecord
from keymix.records import to_json
from keymix.report.answer import Tile
from keymix.report.charts import Chart
from keymix.report.formats import percent, points
from keymix.report.page import render_page
from keymix.report.result import Result
from keymix.report.tables import Table
from keymix.swap.record import Nothing, Search, Step, percent_sign, span
from keymix.swap.report import SwapReport

FORMAT = 7
"""Of ``swap.json``."""

LEAST_MIB = 1.0
"""Of memory that is quoted: of less, what the system hands out at once decides."""

LEAD = ("accuracy", "output", "map")
"""Charts that are shown first: those of a search, or of the blocks of a swap without one."""


@dataclass(frozen=True, kw_only=True)
class SwapSetting:
    """What was asked for: a folder answers the same again."""

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
    max_drop: float | None  # most accuracy that a search may lose, points
    speed_up: float | None  # how many times as fast a search makes the model
    batch_size: int  # images at once whose latency is measured


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
    before: TestScores
    after: TestScores

    @property
    def decisive(self) -> tuple[float, float]:
        """That score before and after, fractions."""
        return getattr(self.before, self.key), getattr(self.after, self.key)


@dataclass(frozen=True, kw_only=True, repr=False)
class Swapped(StudyRecord, Result):
    """The content of ``swap.json``."""

    format: int = FORMAT
    model: str  # the model's name
    mixer: str  # what was put in
    weights: str  # which weights the model had, in words
    layers: int  # how many layers with attention it has
    scored: str  # by what models of these data are compared, such as ``"accuracy"``
    nothing: Nothing  # why the cost is undefined; empty if it is defined
    calibration: int  # calibration images
    held_out: int  # held-out images
    before: Step  # the original model, measured
    after: Step  # the swapped one, measured in turns with it
    before_ms: float  # latency of the original in these turns, milliseconds
    # memory that a forward pass of a batch adds to weights and input, MiB, of the original and the
    # swapped model; None where it could not be measured, or is less than a MiB
    peaks_mib: tuple[float, float] | None
    test: BothScores | None  # scores on the test split; None if they were not asked for
    next: tuple[str, ...]  # commands to run next
    search: Search | None  # what a search found; None without one
    report: SwapReport  # what became of every weight
    setting: SwapSetting  # what was asked for

    name = "swap"
    templates = "keymix.swap"

    @property
    def answer(self) -> str:
        """What the swap costs."""
        if self.search is not None:
            return self.search.answer
        return " ".join(self.words("cost", self.before, self.after, self, self.nothing))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the table does not say."""
        return self.report.notes

    @property
    def data(self) -> dict[str, Any]:
        """Everything, with what follows from the search."""
        return {**to_json(self), "search": None if self.search is None else self.search.data}

    @property
    def tables(self) -> dict[str, Table]:
        """What became of layers, and of a search its steps and trials."""
        return {**self.report.tables, **({} if self.search is None else self.search.tables)}

    @property
    def figures(self) -> dict[str, Chart]:
        """The curves of a search, or how far blocks moved."""
        return {**({} if self.search is None else self.search.figures), **self.report.figures}

    def html(self) -> str:
        """Return its HTML page."""
        drawn = self.figures
        view = {
            "r": self,
            "answer": self.answer.replace(" %", "\u00a0%"),
            "tables": self.tables,
            "tiles": self._tiles(),
            "legend": (),
            "charts": [chart for key, chart in drawn.items() if key in LEAD],
            "more": [chart for key, chart in drawn.items() if key not in LEAD],
        }
        return render_page("own/page.html.j2", view, package=self.templates)

    def _tiles(self) -> list[Tile]:
        """Make the numbers of the first screen; no change is quoted of a single image."""
        before, after, output = self.before, self.after, self.report.output
        scored = (
            f"{self.scored}, {self.held_out} held-out images ({percent(before.score)} % before)"
        )
        tiles = [Tile(value=percent_sign(after.score), text=scored)]
        if self.held_out > 1:
            ends = span(after.change_low, after.change_high)
            tiles.append(Tile(value=f"{ends}", text="points of change, 95\u00a0% interval"))
        if output is not None and output.top1_agreement is not None:
            text = f"of {output.images} calibration images keep their predicted class"
            tiles.append(Tile(value=percent_sign(output.top1_agreement), text=text))
        tiles += [
            Tile(value=f"{points(new / old - 1)} %", text=what)
            for old, new, what in (
                (before.params, after.params, "parameters"),
                (before.macs, after.macs, "multiply-adds per image"),
                (*(self.peaks_mib or (0.0, 0.0)), "memory of a forward pass"),
            )
            if old
        ]
        return tiles

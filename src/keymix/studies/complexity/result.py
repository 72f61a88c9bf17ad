# SPDX-License-Identifier: Apache-2.0
"""What token mixers cost, as a result: answer, tables and figures. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

from keymix.analysis.timing import SHORT, WORDS, Verdict
from keymix.report import charts, formats
from keymix.report.charts import Chart, Line, Look
from keymix.report.result import Result
from keymix.report.tables import Column, Table
from keymix.studies.study import machine_of

BASELINE = "softmax"
"""What the others' latency and memory are given in multiples of."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """At which sizes mixers are looked at, and how they are measured.

    `dim` is the width D, `num_heads` the heads, `at` the tokens N of the tables. Latency and memory
    are measured at `tokens`, in `repeats` rounds, in batches of `batch_size` images, on `device`
    with `threads` CPU threads within an operation; spiking mixers run `time_steps` steps.
    `sweep_tokens` and `sweep_dims` are the numbers of tokens and the widths of the figures.
    """

    dim: int
    num_heads: int
    at: int
    tokens: tuple[int, ...]
    repeats: int
    batch_size: int
    device: str
    time_steps: int
    threads: int = 0
    sweep_tokens: tuple[int, ...] = ()
    sweep_dims: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MixerRow:
    """A mixer: its `label`, its canonical `name`, and why it could not be counted, if so."""

    label: str
    name: str
    domain: str  # "dense" or "spiking"
    control: bool
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class RatioPoint:
    """SKA Fig. 4: multiply-adds of a mixer without biases, in all and per parameter (`ratio`).

    `params` are the trainable parameters, with biases that no option switches off. Numbers are None
    where they are unknown, and the ratio also without parameters; `reason` says why.
    """

    mixer: str
    tokens: int
    dim: int
    params: int | None = None
    macs: int | None = None
    ratio: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class WeightRow:
    """SKA Table 7 for a mixer, read off its operations.

    `sharing` is ``"spatially global"`` where a learned kernel slides over the grid, else ``"no"``;
    `kernels` are the sizes of such kernels, `dynamic` counts matrix products both of whose factors
    the tokens give, and `params_a_token` is how many parameters one more token adds, rounded, on
    average from the fewest to the most tokens of the figure. `reason` says why nothing was read.
    """

    mixer: str
    sharing: str | None = None
    kernels: tuple[str, ...] = ()
    dynamic: int | None = None
    params_a_token: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """What a mixer took at a number of `tokens`, on a `grid` of rows and columns.

    `params`, `macs` and `activation_bytes` are counted, of one image. `latency_ms` is the median
    time of its forward pass with the quartiles; `latency_ratio` the median of the rounds' multiples
    of softmax attention's time, `latency_p` and `latency_verdict` what
    `keymix.analysis.timing.compare` says of the two, at one level for all mixers at these tokens.
    `images_per_s` is in batches. `peak_inference_mib` and `peak_training_mib` are what a pass of a
    batch adds to memory, MiB, `peak_ratio` is that of training as a multiple of softmax
    attention's, `peak_note` says how it was measured. What is unknown is None; `reason` says why
    nothing was measured.
    """

    mixer: str
    tokens: int
    grid: tuple[int, int]
    params: int | None = None
    macs: int | None = None
    activation_bytes: int | None = None
    latency_ms: float | None = None
    latency_q1_ms: float | None = None
    latency_q3_ms: float | None = None
    latency_ratio: float | None = None
    latency_p: float | None = None
    latency_verdict: Verdict | None = None
    images_per_s: float | None = None
    peak_inference_mib: float | None = None
    peak_training_mib: float | None = None
    peak_ratio: float | None = None
    peak_note: str | None = None
    reason: str | None = None

    @property
    def times_softmax(self) -> float | str | None:
        """The latency as a multiple of softmax attention's, or a word on why none is given."""
        return SHORT.get(self.latency_verdict, self.latency_ratio)

    @property
    def quartiles(self) -> str | None:
        """The quartiles of the latency."""
        ends = (self.latency_q1_ms, self.latency_q3_ms)
        return None if None in ends else "–".join(map(formats.three_digits, ends))


Rows = Sequence[RatioPoint] | Sequence[ScalingRow]
Point = tuple[str, int, float | None]  # of a curve: the mixer, and where


@dataclass(kw_only=True, repr=False)
class Complexity(Result):
    """What token mixers cost, so far or in all.

    Tables are ``"multiples"`` and ``"scaling"`` where something was measured,
    ``"ratio_by_tokens"``, ``"ratio_by_dim"``, ``"ratios"``, ``"weights"``, and ``"missing"`` where
    it has rows; figures are ``"macs"``, ``"latency_ms"``, ``"by-tokens"``, ``"by-dim"`` and two of
    memory.

    Attributes:
        setting: Sizes and conditions.
        mixers: Which mixers, and the reason of those that could not be counted.
        by_tokens: SKA Fig. 4, left: multiply-adds per parameter against N.
        by_dim: SKA Fig. 4, right: the same against D.
        weights: SKA Table 7 for every mixer.
        scaling: Latency and peak memory against N.
        complete: Whether all tokens asked for have been measured.
    """

    name = "complexity"
    templates = "keymix.studies.complexity"
    baseline = BASELINE
    verdicts = WORDS

    setting: Setting
    mixers: tuple[MixerRow, ...]
    by_tokens: tuple[RatioPoint, ...]
    by_dim: tuple[RatioPoint, ...]
    weights: tuple[WeightRow, ...]
    scaling: tuple[ScalingRow, ...] = ()
    complete: bool = False

    @property
    def data(self) -> Complexity:
        """The record itself."""
        return self

    @property
    def notes(self) -> Sequence[str]:
        """What the numbers are of, and what words stand in place of some."""
        return self.words("notes")

    @cached_property
    def spiking(self) -> frozenset[str]:
        """The spiking mixers, which run all time steps."""
        return frozenset(each.label for each in self.mixers if each.domain == "spiking")

    @property
    def unclear(self) -> dict[Verdict | None, str]:
        """Which words stand in place of multiples in its tables, by verdict."""
        found = {row.latency_verdict for row in self.scaling}
        return {verdict: word for verdict, word in SHORT.items() if verdict in found}

    @property
    def lost(self) -> dict[str, list[str]]:
        """Where mixers could not be counted or measured."""
        found: dict[str, list[str]] = {}
        for label, where, _ in self._missing().rows:
            found.setdefault(label, []).append(where)
        return found

    @property
    def counted(self) -> dict[str, RatioPoint | ScalingRow]:
        """Mixers at the most tokens where they were counted, the fewest multiply-adds first.

        Controls are left out, and spiking mixers where there are dense ones.
        """
        dense = any(each.domain == "dense" and not each.control for each in self.mixers)
        shown = {
            each.label
            for each in self.mixers
            if not each.control and (each.domain == "dense") == dense
        }
        at = [point for point in self.by_tokens if point.tokens == self.setting.at]
        kinds: tuple[Rows, ...] = (self.scaling, at, self.by_tokens)
        rows = next(([*kind] for kind in kinds if any(row.macs for row in kind)), [])
        mine = [row for row in rows if row.macs and row.mixer in shown]
        most = max((row.tokens for row in mine), default=0)
        found = sorted(
            (row for row in mine if row.tokens == most), key=lambda row: (row.macs, row.mixer)
        )
        return {row.mixer: row for row in found}

    @cached_property
    def tables(self) -> dict[str, Table]:
        """Tables, by name."""
        made = [self._multiples(), self._scaling()] if self.scaling else []
        fig_4 = "SKA Fig. 4: multiply-adds per parameter against"
        for axis, rows, fixed in (
            ("tokens", self.by_tokens, f"N, at D = {self.setting.dim}"),
            ("dim", self.by_dim, f"D, at N = {self.setting.at}"),
        ):
            ratio = {"": attrgetter("ratio")}
            made.append(_pivot(f"ratio_by_{axis}", f"{fig_4} {fixed}", rows, axis, ratio))
        made += [self._ratios(), self._weights()]
        missing = self._missing()
        return {table.key: table for table in (*made, *([missing] if missing.rows else []))}

    def _steps(self, mixer: str) -> int:
        return self.setting.time_steps if mixer in self.spiking else 1

    def _ratios(self) -> Table:
        keys = ("mixer", "tokens", "dim", "params", "macs", "ratio", "reason")
        columns = [Column("", key) for key in ("axis", *keys, "time_steps")]
        rows = [
            (axis, *(getattr(point, key) for key in keys), self._steps(point.mixer))
            for axis, points in (("tokens", self.by_tokens), ("dim", self.by_dim))
            for point in points
        ]
        return Table("ratios", "", columns, rows, shown=False)

    def _weights(self) -> Table:
        columns = (
            Column("mixer", "mixer", "name"),
            Column("weights shared over the image", "sharing"),
            Column("learned kernels", "kernels"),
            Column("dynamic weights", "dynamic", "whole"),
            Column("parameters per token more", "params_a_token", "whole"),
            Column("", "reason", where="csv"),
        )
        rows = [
            (r.mixer, r.sharing, ", ".join(r.kernels), r.dynamic, r.params_a_token, r.reason)
            for r in self.weights
        ]
        return Table("weights", "SKA Table 7, read off the operations", columns, rows)

    def _scaling(self) -> Table:
        batch = self.setting.batch_size
        files = (
            *("latency_ratio", "latency_p", "latency_verdict", "latency_q1_ms", "latency_q3_ms"),
            *("images_per_s", "params", "activation_bytes", "peak_note", "reason", "time_steps"),
        )
        columns = (
            Column("mixer", "mixer", "name"),
            Column("tokens", "tokens", "whole"),
            Column("grid", "grid"),
            Column("multiply-adds", "macs", "whole"),
            Column("latency, ms", "latency_ms", "ms"),
            Column("quartiles", "quartiles", where="people"),
            Column("× softmax", "times_softmax", "ratio", where="people"),
            Column(f"peak of inference, MiB, batch {batch}", "peak_inference_mib", "mib"),
            Column("of training", "peak_training_mib", "mib"),
            Column("× softmax", "peak_ratio", "ratio"),
            *(Column("", key, where="csv") for key in files),
        )
        rows = []
        for row in self.scaling:
            made = {"grid": "x".join(map(str, row.grid)), "time_steps": self._steps(row.mixer)}
            rows.append([made.get(c.key) or getattr(row, c.key) for c in columns])
        return Table("scaling", "Latency of one image and peak memory", columns, rows)

    def _multiples(self) -> Table:
        """Make latency and memory a column a number of tokens, as multiples of softmax's."""
        base = [row for row in self.scaling if row.mixer == BASELINE]
        ms = ", ".join(formats.three_digits(row.latency_ms) for row in base)
        mib = ", ".join(formats.mib(row.peak_training_mib) for row in base)
        title = f"Latency and memory of training as multiples of softmax's ({ms} ms; {mib} MiB)"
        measures = {"latency": attrgetter("times_softmax"), "memory": attrgetter("peak_ratio")}
        return _pivot("multiples", title, self.scaling, "tokens", measures)

    def _missing(self) -> Table:
        """List who is not counted or not measured, where, and why."""
        found = [(e.label, "counts", e.reason) for e in self.mixers if e.reason]
        found += [(r.mixer, "weights", r.reason) for r in self.weights if r.reason]
        found += [(r.mixer, f"{r.tokens:,} tokens", r.reason) for r in self.scaling if r.reason]
        columns = (
            Column("mixer", "mixer", "name"),
            Column("where", "where"),
            Column("why not", "reason"),
        )
        return Table("missing", "Could not be built, counted or run", columns, found)

    @property
    def looks(self) -> dict[str, Look]:
        """The mixers, controls in grey."""
        return charts.looks(
            [entry.label for entry in self.mixers],
            baseline=BASELINE,
            controls=[entry.label for entry in self.mixers if entry.control],
        )

    @cached_property
    def figures(self) -> dict[str, Chart]:
        """Multiply-adds and latency against tokens, then what else was counted and measured."""
        batch = self.setting.batch_size
        images = "one image" if batch == 1 else f"a batch of {batch}"
        tokens, dim = f"tokens N, at D = {self.setting.dim}", f"width D, at N = {self.setting.at}"
        base = {p.tokens: p.macs for p in self.by_tokens if p.mixer == BASELINE and p.macs}
        alone = not base or all(p.mixer == BASELINE for p in self.by_tokens if p.macs)
        if alone:
            base = {p.tokens: 1 for p in self.by_tokens}
        shares = [
            (p.mixer, p.tokens, p.macs / base[p.tokens] if p.macs and p.tokens in base else None)
            for p in self.by_tokens
        ]
        per, training = "multiply-adds per parameter", f"peak memory of training {images}, MiB"
        inference = f"peak memory of inference on {images}, MiB"
        drawn = (
            ("macs", tokens, "multiply-adds" + ("" if alone else f", × {BASELINE}"), shares),
            self._measured("latency_ms", "latency of one image, ms"),
            ("by-tokens", tokens, per, [(p.mixer, p.tokens, p.ratio) for p in self.by_tokens]),
            ("by-dim", dim, per, [(p.mixer, p.dim, p.ratio) for p in self.by_dim]),
            self._measured("peak_training_mib", training),
            self._measured("peak_inference_mib", inference),
        )
        made = (self._chart(*each) for each in drawn if any(y for *_, y in each[-1]))
        return {chart.key: chart for chart in made}

    def _measured(self, key: str, y_label: str) -> tuple[str, str, str, list[Point]]:
        """Return the key, labels and points of a chart of what was measured."""
        points = [(row.mixer, row.tokens, getattr(row, key)) for row in self.scaling]
        return key, "tokens N", y_label, points

    def _chart(self, key: str, x_label: str, y_label: str, points: Sequence[Point]) -> Chart:
        """Draw a curve for each mixer that has points."""
        lines = []
        for label, look in self.looks.items():
            if mine := sorted((x, y) for mixer, x, y in points if mixer == label and y):
                lines.append(Line(label, look, *zip(*mine, strict=True)))
        draw = partial(charts.curves, lines=lines, x_label=x_label, y_label=y_label, log=True)
        name = f"{y_label}{',' if ', ' in y_label else ''} against {x_label}"
        about = "both axes logarithmic, without controls that are far below"
        return Chart(key, f"{name[0].upper()}{name[1:]}; {about}.", draw)

    def machine(self, lines: Mapping[str, str]) -> dict[str, str]:
        """Leave a GPU out that was idle, and say how many threads there were."""
        threads = str(self.setting.threads)
        return {**machine_of(lines, self.setting.device), "threads": threads}


def _pivot(
    key: str, title: str, rows: Rows, axis: str, measures: Mapping[str, Callable[[Any], Any]]
) -> Table:
    """Make a column for each measure and size; mixers without any value are left out."""
    sizes = list(dict.fromkeys(getattr(row, axis) for row in rows))
    letter = "N" if axis == "tokens" else "D"
    columns = [Column("mixer", "mixer", "name")]
    for name in measures:
        heading, word = (f"{name}, ", name) if name else ("", axis)
        columns += [Column(f"{heading}{letter} = {n}", f"{word}_{n}", "ratio") for n in sizes]
    found = {(row.mixer, getattr(row, axis)): row for row in rows}
    cells = [
        (mixer, *(value(found[mixer, size]) for value in measures.values() for size in sizes))
        for mixer in dict.fromkeys(row.mixer for row in rows)
    ]
    kept = [row for row in cells if any(value is not None for value in row[1:])]
    return Table(key, title, columns, kept, shown=bool(kept), saved=False)

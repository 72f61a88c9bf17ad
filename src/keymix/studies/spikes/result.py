# SPDX-License-Identifier: Apache-2.0
"""Spikes and energy of a model, or of several, as a result: tables and figures. No torch."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from keymix.analysis.energy import Bounds
from keymix.analysis.spikes_record import Firing, Raster, SpikeReadings
from keymix.analysis.study_record import UNNAMED, ModelOnImages
from keymix.records import to_json
from keymix.report import charts, formats
from keymix.report.charts import Chart, Dots, Line, Look, blank, raster
from keymix.report.result import Result
from keymix.report.svg import SIZE, colours
from keymix.report.tables import Column, Table
from keymix.studies.study import file_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = {"binary": "0 and 1", "counts": "above 1", "real": "real numbers"}
WHATS = {
    "conv": "convolution",
    "linear": "linear",
    "product": "product of spikes",
    "sum": "sum of spikes",
    "norm": "batch norm",
    "other": "other",
}
ONES = 4
"""Values that the table of inputs has a column of their own for; larger ones share the next."""

_TOTAL = (
    Column("images", "images", "whole", "csv"),
    Column("T", "time_steps", "whole"),
    Column("rate", "rate", "rate"),
    Column("silent, %", "silent", "percent"),
    Column("SOPs", "sops", "count"),
    Column("MACs", "macs", "count"),
    Column("energy", "energy_pj", "energy"),
    Column("at least", "energy_low_pj", "energy"),
    Column("at most", "energy_high_pj", "energy"),
    Column("ANN", "ann_macs", "count", "csv"),
    Column("ANN", "ann_energy_pj", "energy"),
    Column("ratio", "ann_ratio", "ratio"),
)
_STEPS = (Column("layer", "path"), Column("step", "step", "whole"), Column("rate", "rate", "rate"))
_NEURONS = (
    Column("layer", "path"),
    Column("spikes", "role"),
    Column("stage", "stage", "whole"),
    Column("block", "block", "whole"),
    Column("neurons", "neurons", "whole"),
    Column("rate", "rate", "rate"),
    Column("silent, %", "silent", "percent"),
    Column("largest value", "largest", "ratio", "csv"),
)
_OPERATIONS = (
    Column("layer", "path"),
    Column("operation", "operation"),
    Column("input", "input"),
    *(Column(f"{v}, %", f"share_{v}", "percent", gives_way=v) for v in range(ONES)),
    Column(f"{ONES} or more, %", f"share_{ONES}_or_more", "percent", gives_way=ONES),
    Column("mean input", "mean_input", "rate", gives_way=1),
    Column("dense MACs", "dense_macs", "count", gives_way=1),
    Column("MACs", "macs", "count"),
    Column("SOPs", "sops", "count"),
    Column("SOPs at least", "sops_low", "count", "csv"),
    Column("energy", "energy_pj", "energy"),
    Column("at least", "energy_low_pj", "energy", "csv"),
    Column("at most", "energy_high_pj", "energy"),
)


class SpikeStudies(Result):
    """Spikes and energy of several models, side by side.

    Tables are ``"total"``, ``"rates"``, ``"steps"``, ``"neurons"`` and ``"operations"``; figures
    are ``"energy"``, rates along the steps and blocks, and rasters.
    """

    name = "spikes"
    templates = "keymix.studies.spikes"

    def __init__(self, studies: Sequence[Spikes]) -> None:
        self._labelled = {study.of.label: study for study in studies}

    @property
    def labelled(self) -> dict[str, Spikes]:
        """The models, by label."""
        return self._labelled

    @property
    def data(self) -> dict[str, object]:
        """The models, as ``studies``."""
        return {
            "studies": [
                to_json(study.of)
                | study.record()
                | {"at_chance": study.chance is not None}
                | {"raster_image": study.raster_image, "photo": study.photo}
                | {"rasters": [each.to_dict() for each in study.rasters]}
                for study in self.labelled.values()
            ]
        }

    @cached_property
    def useless(self) -> dict[str, str]:
        """Which models' energy says nothing of one that works, and why, by label."""
        found: dict[str, str] = {}
        for label, study in self.labelled.items():
            why = "random" if study.of.random else study.failure
            if why or study.chance is not None:
                found[label] = why or "chance"
        return found

    @property
    def known(self) -> list[Spikes]:
        """The other models, by energy."""
        found = [study for label, study in self.labelled.items() if label not in self.useless]
        return sorted(found, key=lambda study: study.energy.middle)

    @property
    def sentences(self) -> dict[str, list[str]]:
        """What was read of each model, and what to keep in mind."""
        said = {label: self.words("notes", study) for label, study in self.labelled.items()}
        return {label: lines for label, lines in said.items() if lines}

    @property
    def left_out(self) -> list[str]:
        """Which images could not be read."""
        return [why for study in self.labelled.values() for why in study.of.left_out.values()]

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Models in the colours of their mixers where no two have the same."""
        return charts.looks_of_models(
            {label: {f.mixer for f in s.firings if f.mixer} for label, s in self.labelled.items()}
        )

    # ---- tables -----------------------------------------------------------------------------

    @cached_property
    def tables(self) -> dict[str, Table]:
        """Tables, by name."""
        return {
            key: self._table(key, title, columns, rows, shown=shown)
            for key, title, columns, rows, shown in (
                ("total", "Spikes, operations and energy per image", _TOTAL, _total, True),
                ("rates", "Firing rates by stage", self._stages(), self._by_stage, True),
                ("operations", "Inputs and cost of every layer", _OPERATIONS, _operations, True),
                ("neurons", "Layers of neurons", _NEURONS, _neurons, False),
                ("steps", "Firing rates by time step", _STEPS, _steps, False),
            )
        }

    def _table(
        self,
        key: str,
        title: str,
        columns: Sequence[Column],
        rows: Callable[[Spikes], Iterable[list[Any]]],
        *,
        shown: bool,
    ) -> Table:
        """Make a table of rows of each model; its name is for files where there is but one."""
        found = [[label, *row] for label, study in self.labelled.items() for row in rows(study)]
        seen = len(self.labelled) > 1 or key == "total"
        model = Column("model", "model", "name", "both" if seen else "csv")
        note = "".join(self.words(f"{key}_note"))
        return Table(key, title, (model, *columns), found, shown and bool(found), note=note)

    def _stages(self) -> list[Column]:
        """Make the columns of firing rates."""
        columns = [Column(f"stage {n}", f"stage_{n}", "rate") for n in self._stage_numbers]
        return [Column("mixer", "mixer"), Column("spikes", "role"), *columns]

    @cached_property
    def _stage_numbers(self) -> list[int]:
        return sorted({stage for s in self.labelled.values() for _, stage in s.by_stage})

    def _by_stage(self, study: Spikes) -> Iterator[list[Any]]:
        """Yield a row for each mixer and part."""
        found: dict[tuple[str | None, str], dict[int, float]] = {}
        for (mixer, stage), rates in study.by_stage.items():
            for role, rate in rates.items():
                found.setdefault((mixer, role), {})[stage] = rate
        for (mixer, role), at in found.items():
            yield [mixer, role, *(at.get(stage) for stage in self._stage_numbers)]

    # ---- figures ----------------------------------------------------------------------------

    @cached_property
    def figures(self) -> dict[str, Chart]:
        """Energy by part, rates along the steps and the blocks, and each model's rasters."""
        roles = dict.fromkeys(f.role for s in self.labelled.values() for f in s.firings if f.role)
        parts = sorted(roles, key=lambda role: role.startswith("MLP"))
        made: list[Chart | None] = [self._energy()]
        made += [self._rates("step", role, "time step", _by_step) for role in ("", *parts)]
        made += [self._rates("block", role, "block", _by_block) for role in parts]
        found = {chart.key: chart for chart in made if chart is not None}
        for label, word in file_words(self.labelled).items():
            study = self.labelled[label]
            for i, each in enumerate(study.rasters, start=1):
                about = f"{label}, {_where(each)}"
                found[f"raster-{word}-{i}"] = of_tokens(each, about)
                found[f"image-{word}-{i}"] = on_image(each, about, study.photo)
        return found

    def _energy(self) -> Chart:
        """Draw the energy of each part of the models: a dot, and a line from least to most."""
        every = {label: energy_by_part(study) for label, study in self.labelled.items()}
        names = list(dict.fromkeys(name for parts in every.values() for name in parts))
        most = max((part.high for parts in every.values() for part in parts.values()), default=0.0)
        unit, size = formats.energy_unit(most or 1.0)
        series = []
        for label, parts in every.items():
            known = [parts.get(name) for name in names]
            middle = [None if part is None else part.middle / size for part in known]
            ends = [None if part is None else (part.low / size, part.high / size) for part in known]
            series.append(Dots(label, self.looks[label], middle, ends))
        x_label = f"energy of one image, {unit}"
        draw = partial(charts.dots, names=names, series=series, x_label=x_label)
        height = (13.0 * len(every) + 8) * len(names) + 48
        caption = "Energy by part of the model; a bar runs between its bounds."
        return Chart("energy", caption, draw, (SIZE[0], height))

    def _rates(
        self, key: str, role: str, x_label: str, points: Callable[[Sequence[Firing]], Any]
    ) -> Chart | None:
        """Draw the rate of a part, or of all neurons, along something; None of single points."""
        lines = []
        for label, study in self.labelled.items():
            mine = [f for f in study.firings if (f.role == role if role else not f.inward)]
            if at := points(mine):
                lines.append(Line(label, self.looks[label], *zip(*at, strict=True)))
        if all(len(line.xs) == 1 for line in lines):
            return None
        word = role.replace("''", "-second").replace("'", "-masked").replace(" ", "-").lower()
        y_label = "spikes per neuron and step"
        draw = partial(charts.curves, lines=lines, x_label=x_label, y_label=y_label, holds=(0.0,))
        caption = f"{role or 'All neurons'}: rate at each {x_label}."
        return Chart(f"{key}-{word}" if word else key, caption, draw)


class Spikes(SpikeReadings, SpikeStudies):
    """Firing rates, operations and energy of a network: `SpikeReadings` as a result.

    Tables are ``"total"``, ``"rates"``, ``"steps"``, ``"neurons"`` and ``"operations"``; figures
    are ``"energy"`` and rates along steps and blocks.
    """

    of: ModelOnImages = UNNAMED  # which model and images
    chance: float | None = None  # the run's test accuracy where it is no better than chance
    rasters: Sequence[Raster] = ()  # spikes of Q-K token attention on one image
    raster_image: str | None = None  # the name of that image
    photo: str | None = None  # that image, as a data URI

    @property
    def labelled(self) -> dict[str, Spikes]:
        """This network alone."""
        return {self.of.label: self}

    @property
    def notes(self) -> list[str]:
        """What to keep in mind when reading the numbers, in words."""
        return self.words("notes", self)

    @property
    def data(self) -> dict[str, object]:
        """Everything with all that follows from it."""
        return self.record()


# ---- rows -----------------------------------------------------------------------------------


def _total(study: Spikes) -> list[list[Any]]:
    low, middle, high = study.energy
    return [
        [
            *(study.images, study.time_steps, study.rate, study.silent, study.sops, study.macs),
            *(middle, low, high, study.ann_macs, study.ann_energy, study.ann_ratio),
        ]
    ]


def _steps(study: Spikes) -> Iterator[list[Any]]:
    for firing in study.firings:
        for step, rate in enumerate(firing.by_step, start=1):
            yield [firing.path, step, rate]


def _neurons(study: Spikes) -> Iterator[list[Any]]:
    for firing in study.firings:
        yield [getattr(firing, column.key) for column in _NEURONS]


def _operations(study: Spikes) -> Iterator[list[Any]]:
    for op in study.operations:
        shares = None if op.values is None else op.values.shares
        shown: list[float | None] = [None] * (ONES + 1)
        if shares is not None:
            shown = [*[*shares, *[0.0] * ONES][:ONES], sum(shares[ONES:], 0.0)]
        low, middle, high = op.energy(study.cost)
        yield [
            *(op.path, WHATS[op.what], KINDS[op.input], *shown),
            None if op.values is None else op.values.mean,
            *(op.dense, op.macs, op.acs, op.acs_low, middle, low, high),
        ]


# ---- points, and energy ---------------------------------------------------------------------


def _by_block(firings: Sequence[Firing]) -> list[tuple[float, float]]:
    return [(float(f.block), f.rate) for f in firings if f.block is not None]


def _by_step(firings: Sequence[Firing]) -> list[tuple[float, float]]:
    """Average over neurons, at each step that all layers have."""
    neurons = sum(firing.neurons for firing in firings)
    weighted = ([rate * f.neurons for rate in f.by_step] for f in firings)
    return [(i, sum(at) / neurons) for i, at in enumerate(zip(*weighted, strict=False), start=1)]


def energy_by_part(study: Spikes) -> dict[str, Bounds]:
    """Add operations up by the part of the model they are in: stages, and what is outside them."""
    found: dict[str, list[Bounds]] = {}
    for op in study.operations:
        stage = re.match(r"stages\.(\d+)\.(patch_embed)?", op.path)
        name = op.path.partition(".")[0]
        if stage is not None:
            name = f"stage {int(stage[1]) + 1}, {'embedding' if stage[2] else 'blocks'}"
        found.setdefault(name, []).append(op.energy(study.cost))
    return {name: Bounds.total(each) for name, each in found.items()}


# ---- rasters --------------------------------------------------------------------------------

WIDTH, LEFT = 430.0, 34.0


def _where(found: Raster) -> str:
    """Say which head of which block at which step a raster shows."""
    stage = f"stage {found.stage}, " if found.stage else ""
    block = f"block {found.block}" if found.block else found.path
    return (
        f"{stage}{block}, head {found.head + 1} of {found.heads}, "
        f"step {found.step + 1} of {len(found.attention)}"
    )


def of_tokens(found: Raster, about: str) -> Chart:
    """Draw A_t, K and X' of a segment of tokens, a column per token, a row per channel."""
    (channels, count), start = found.keys.shape, found.start
    cell = (WIDTH - LEFT - 4) / count
    segment = found.attention[found.step, start : start + count][None]
    height = min(cell, 180 / channels)
    panels = (("A_t", segment, 10.0), ("K", found.keys, height), ("X'", found.masked, height))
    foot = sum(row * len(rows) + 12.0 for _, rows, row in panels)

    def draw(ax: Axes) -> None:
        blank(ax, WIDTH, foot + 36)
        top, soft = 6.0, {"color": colours()["soft"]}
        for name, rows, row in panels:
            high = row * len(rows)
            raster(ax, rows, (LEFT, top, cell * count, high))
            ax.text(LEFT - 8, top + high / 2, name, ha="right", va="center", **soft)
            top += high + 12.0
        for i in sorted({0, count // 2, count - 1}):
            ax.text(LEFT + (i + 0.5) * cell, foot + 6, str(start + i), ha="center", **soft)
        ax.text(LEFT + (WIDTH - LEFT) / 2, foot + 24, "token", ha="center", **soft)

    caption = f"{about}: which tokens A_t keeps, their keys K, and X', what stays of K."
    return Chart("raster", caption, draw, (WIDTH, foot + 36))


def on_image(found: Raster, about: str, photo: str | None) -> Chart:
    """Draw A_t over the image (a data URI, or None for spikes alone), one picture per step."""
    rows, columns = found.grid
    most, side, apart = 4, 100.0, 8.0
    across = min(most, len(found.attention))
    high = side * rows / columns
    size = most * (side + apart) - apart, 6.0 + -(-len(found.attention) // across) * (high + 26)

    def draw(ax: Axes) -> None:
        from keymix.data.decode import open_image  # which loads torch

        blank(ax, *size)
        picture = None if photo is None else open_image(b64decode(photo.partition(",")[2]))
        for step, bits in enumerate(found.attention):
            left, top = (step % across) * (side + apart), 6.0 + (step // across) * (high + 26)
            if picture is not None:
                ends = (left, left + side, top + high, top)
                ax.imshow(picture.convert("RGB"), extent=ends, interpolation="none", aspect="auto")
            shown = bits.reshape(rows, columns)
            raster(ax, shown, (left, top, side, high), colour="c1", opacity=0.62)
            text = f"step {step + 1}: {100 * float(bits.double().mean()):.0f} %"
            ax.text(left + side / 2, top + high + 14, text, ha="center", color=colours()["soft"])
        ax.set(xlim=(0, size[0]), ylim=(size[1], 0))

    return Chart("image", f"{about}: A_t on the image, coloured where it fires.", draw, size)

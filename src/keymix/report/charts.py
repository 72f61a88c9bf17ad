# SPDX-License-Identifier: Apache-2.0
"""Charts, each a function that draws onto axes of matplotlib: of a notebook, a page or a file.

`keymix.report.svg` makes SVG of them. Colours are those of `Look`, the same in every chart.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from keymix.report.svg import HINT, SIZE, Draw, colours, file, svg
from keymix.task import FRACTION, Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import ArrayLike

HUES = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7")
MARKERS = dict(zip(HUES, "PD^v*XH<", strict=True)) | {"ink": "o", "ref": "s"}
HOLLOW = "osD^"
"""Markers of colours, and of controls, which are hollow and all grey."""
DASHES: Mapping[str, tuple[float, ...]] = {
    "ctl": (5, 4),
    "ref": (2, 3),
    "c0": (14, 3),
    "c2": (8, 3),
    "c3": (9, 3, 2, 3),
    "c4": (14, 3, 2, 3),
    "c5": (5, 2),
    "c6": (9, 3, 2, 3, 2, 3),
    "c7": (20, 4),
}
FEW = 16
"""Points of a curve up to which each has its marker."""
DEPTH = 10.0
"""A control's curve may go this factor below all others before it leaves a logarithmic chart."""


# ---- how mixers look ------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """How a mixer is drawn in every chart: its colour's name, its marker, its name there."""

    colour: str
    marker: str
    short: str

    @property
    def key(self) -> Markup:
        """Its line and marker, for a legend."""
        return _key(self.colour, self.marker)

    @property
    def neutral(self) -> bool:
        """Whether it is a control's or a reference's, which may be far from the mixers."""
        return self.colour in ("ctl", "ref")

    @property
    def ink(self) -> str:
        """Its colour as matplotlib writes it."""
        return colours()[self.colour]


@functools.cache
def _key(colour: str, marker: str) -> Markup:
    def draw(ax: Axes) -> None:
        blank(ax, 28, 12)
        _line(ax, Look(colour, marker, ""), [0, 28], [6, 6])
        _dots(ax, Look(colour, marker, ""), [14], [6])

    return svg(draw, name="", size=(28, 12))


def looks(
    labels: Sequence[str],
    *,
    baseline: str = "",
    controls: Sequence[str] = (),
    references: Sequence[str] = (),
    mixers: Mapping[str, str] | None = None,
) -> dict[str, Look]:
    """Give every mixer its colour and marker: the baseline in ink, controls in grey.

    Trained references are in brown.

    A name has its colour wherever it is drawn, unless another of the labels took it before. Labels
    of models have the colours of their `mixers`, where those are known.
    """
    table: dict[str, Look] = {}
    short = short_labels(labels)
    taken: set[int] = set()
    for label in labels:
        if label == baseline:
            colour = "ink"
        elif label in controls:
            colour = "ctl"
        elif label in references:
            colour = "ref"
        else:
            own = (mixers or {}).get(label, label).partition("(")[0]
            first = zlib.crc32(own.encode()) % len(HUES)
            free = ((first + i) % len(HUES) for i in range(len(HUES)))
            hue = next((hue for hue in free if hue not in taken), first)
            taken.add(hue)
            colour = HUES[hue]
        marker = HOLLOW[list(controls).index(label) % 4] if colour == "ctl" else MARKERS[colour]
        table[label] = Look(colour, marker, short[label])
    return table


def looks_of_models(mixers: Mapping[str, Collection[str]]) -> dict[str, Look]:
    """Give models, by label, the colours of their mixers where no two have the same."""
    single = {label: next(iter(found)) for label, found in mixers.items() if len(found) == 1}
    distinct = len(set(single.values())) == len(mixers)
    softmax = [label for label, mixer in single.items() if mixer == "softmax" and distinct]
    return looks(list(mixers), baseline="".join(softmax), mixers=single if distinct else None)


# ---- names ----------------------------------------------------------------------------------


ROOM = 27
"""Characters up to which names stay whole."""


def shorten(content: str, room: int) -> str:
    """Cut a label's middle out so that it has `room` characters; its ends identify it best."""
    cut = room // 2
    return content if len(content) <= room else f"{content[: room - cut - 1]}…{content[-cut:]}"


def short_labels(labels: Sequence[str], room: int = ROOM) -> dict[str, str]:
    """Shorten labels, all shown together, that have more than `room` characters.

    Options and stages that the long ones have in common go: ``static_key(…,pos_dim=3)`` next to
    ``static_key(…,pos_dim=4)``, and ``…/b/…`` next to ``…/a/…``. What is still too long loses its
    middle.
    """
    long = {label: re.split(r"(?<=[(,/])", label) for label in labels if len(label) > room}
    table = {}
    for label in labels:
        own = long.get(label, [])
        alike = [row for row in long.values() if len(row) == len(own)]
        columns = zip(own, *alike, strict=True) if len(alike) > 1 else ()
        brief = "".join(
            each if each[-1] == "(" or len({each, *others}) > 1 else f"…{each[-1]}"
            for each, *others in columns
        )
        brief = re.sub(r"(…[,/])+(?=…)", "", re.sub(r"…[^,/)]", "…", brief))
        table[label] = shorten(brief or label, room)
    return table


# ---- a chart --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chart:
    """A chart with part of its file's name, and what it shows in a sentence."""

    key: str
    caption: str
    draw: Draw
    size: tuple[float, float] = SIZE

    @property
    def svg(self) -> Markup:
        """The chart for a page."""
        return svg(self.draw, name=self.caption, size=self.size)

    @property
    def file(self) -> str:
        """The chart as an SVG file of its own."""
        return file(self.draw, name=self.caption, size=self.size)


# ---- axes and marks -------------------------------------------------------------------------


def frame(ax: Axes, x_label: str, y_label: str = "", *, grid: str = "y") -> None:
    """Leave of the axes what a reader needs: grid lines, the lower line, titles."""
    known = colours()
    ax.patch.set_visible(False)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(known["line"])
    ax.tick_params(left=False, color=known["line"], labelcolor=known["soft"])
    ax.ticklabel_format(useOffset=False, style="plain")
    ax.grid(axis=grid, color=known["grid"])
    ax.set_axisbelow(True)
    ax.set_xlabel(x_label, color=known["soft"])
    ax.set_ylabel(y_label, color=known["soft"])


def blank(ax: Axes, wide: float, high: float) -> None:
    """Make the axes a canvas of so many pixels, from its top left."""
    ax.figure.set_layout_engine("none")
    ax.set_position((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set(xlim=(0, wide), ylim=(high, 0))


def _line(ax: Axes, look: Look, xs: Sequence[float], ys: Sequence[float], label: str = "") -> None:
    dashes = (0, [each / 1.8 for each in DASHES.get(look.colour, ())])
    style = {"color": look.ink, "lw": 1.8, "ls": dashes if dashes[1] else "-"}
    ax.plot(xs, ys, dash_capstyle="butt", gid=HINT + label, label=label, **style)


def _dots(
    ax: Axes, look: Look, xs: Sequence[float], ys: Sequence[float], hint: str = "", size: float = 9
) -> Any:
    """Draw markers over a rim of paper; those of controls are hollow."""
    rim, hollow = colours()["paper"], look.colour == "ctl"
    fill, edge = (rim, look.ink) if hollow else (look.ink, rim)
    style: dict[str, Any] = {"mfc": fill, "mec": edge, "mew": 2 if hollow else 1.2, "ms": size}
    (made,) = ax.plot(xs, ys, look.marker, gid=HINT + hint, zorder=3, clip_on=False, **style)
    return made


def _arrow(ax: Axes, at: tuple[float, float], to: str, colour: str) -> None:
    """Draw an arrow at the edge of the axes: ``<``, ``>``, ``v`` or ``^``."""
    ax.plot(*at, to, color=colour, ms=7, mew=0, zorder=3, clip_on=False)


def _within(ax: Axes, ends: tuple[float | None, float | None], scale: float) -> None:
    """End the y axis at the bounds of what values can be, so that a spread beyond them is cut."""
    low, high = ax.get_ylim()
    least, most = (None if end is None else end * scale for end in ends)
    ax.set_ylim(
        low if least is None else max(low, least), high if most is None else min(high, most)
    )


def _levels(ax: Axes, levels: Mapping[str, float], side: str) -> None:
    """Draw lines across a chart, each with what it is; close ones are named together."""
    apart = 0.06 * (ax.get_ylim()[1] - ax.get_ylim()[0])
    named: dict[float, list[str]] = {}
    for what, value in sorted(levels.items(), key=lambda each: -each[1]):
        ax.axhline(value, color=colours()["ctl"], lw=0.8, alpha=0.6)
        at = next((height for height in named if height - value < apart), value)
        named.setdefault(at, []).append(what)
    for value, names in named.items():
        at, style = {"left": 0.01, "right": 0.99}[side], {"ha": side, "va": "bottom"}
        where = ax.get_yaxis_transform()
        ax.text(at, value, ", ".join(names), color=colours()["soft"], transform=where, **style)


# ---- score and cost -------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One mixer in a chart of score and cost; `spread` is the standard deviation of y."""

    label: str
    look: Look
    x: float
    y: float
    spread: float | None = None


def front(points: Sequence[Point], *, score: Score = FRACTION) -> list[Point]:
    """Return the points that no other beats in both cost (lower) and score (better)."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, -score.rank(p.y))):
        if not found or score.ahead(point.y - found[-1].y):
            found.append(point)
    return found


def _far(values: Sequence[float], own: Sequence[Look], score: Score) -> list[bool]:
    """Say which controls and references are so much worse that they would squash the axis."""
    kept = [score.rank(v) for v, look in zip(values, own, strict=True) if not look.neutral]
    if not kept:
        return [False] * len(values)
    small = 0.01 if score.unit == "%" else 0.01 * max(map(abs, kept))
    low = min(kept) - 2 * max(max(kept) - min(kept), small)
    return [look.neutral and score.rank(v) < low for v, look in zip(values, own, strict=True)]


def pareto(
    ax: Axes,
    points: Sequence[Point],
    *,
    x_label: str,
    y_label: str,
    score: Score = FRACTION,
    levels: Mapping[str, float] | None = None,
    baseline: str = "",
) -> None:
    """Draw a score against a cost, with the Pareto front and every point named.

    What is better and cheaper than the `baseline` is shaded.

    A control far worse than the rest would squash the axis: it is drawn as an arrow at the edge of
    the chart with its value next to its name, and of the `levels`, lines across the chart by what
    they are, those far off are left out.
    """
    known, scale = colours(), score.scale
    far = _far([p.y for p in points], [p.look for p in points], score)
    frame(ax, x_label, y_label)
    ax.margins(0.12, 0.3 if any(far) else 0.12)
    for p in (p for p, gone in zip(points, far, strict=True) if not gone):
        bar = [p.y * scale + sign * scale * (p.spread or 0.0) for sign in (1, -1)]
        ax.plot([p.x, p.x], bar, color=p.look.ink, lw=1.4, alpha=0.85)
        _dots(ax, p.look, [p.x], [p.y * scale], f"{p.label}: {score.text(p.y)}")
    ax.update_datalim([(p.x, 0.0) for p in points], updatey=False)
    ax.autoscale_view()
    low, high = ax.get_ylim()
    near = {what: value * scale for what, value in (levels or {}).items()}
    reach = 1.5 * low - 0.5 * high, 1.5 * high - 0.5 * low
    _levels(ax, {what: v for what, v in near.items() if reach[0] <= v <= reach[1]}, "left")
    _within(ax, (score.low, score.high), scale)
    worst, best, arrow = (0, 1, "v") if score.better == "more" else (1, 0, "^")
    ends = ax.get_ylim()
    edge = ends[worst] + 0.03 * (ends[best] - ends[worst])
    marks = [(p.x, edge if gone else p.y * scale) for p, gone in zip(points, far, strict=True)]
    names = []
    for p, mark, gone in zip(points, marks, far, strict=True):
        name = shorten(p.look.short, 21)
        names.append(f"{name} ({score.text(p.y)})" if gone else name)
        if gone:
            _arrow(ax, mark, arrow, p.look.ink)
        elif p.label == baseline:
            ax.autoscale(False)
            area = {"color": known["good"], "alpha": 0.1, "lw": 0, "gid": f"{HINT}better, cheaper"}
            ax.fill_between([ax.get_xlim()[0], p.x], mark[1], ends[best], **area)
    steps = [marks[points.index(p)] for p in front(points, score=score)]
    ax.plot(*zip(*steps, strict=True), color=known["soft"], lw=1.2, ls=(0, (3, 3)))
    _names(ax, names, marks, [p.look for p in points])


def _names(
    ax: Axes, names: Sequence[str], marks: Sequence[tuple[float, float]], own: Sequence[Look]
) -> None:
    """Write names next to their points; where one has no room it is moved, with a line."""
    size = ax.figure.get_size_inches() * 72 * (0.84, 0.8)  # of the axes, about, in points
    at = (ax.transData + ax.transAxes.inverted()).transform(marks) * size
    taken = [(x - 6, x + 6, y, 5.0) for x, y in at]
    steps = [sign * step for step in range(0, int(size[1]), 3) for sign in (-1, 1)]
    order = sorted(zip(names, marks, at, own, strict=True), key=lambda each: -each[2][1])
    for name, mark, (x, y), look in order:
        wide = 7.0 * len(name)
        side = 1 if x + 9 + wide < size[0] else -1
        left, right = sorted((x + 9 * side, x + (9 + wide) * side))
        near = [(up, 7 + half) for start, end, up, half in taken if left < end and start < right]
        free = (d for d in steps if all(abs(y + d - up) >= apart for up, apart in near))
        dy = next((d for d in free if 0 <= y + d <= size[1]), 0)
        taken.append((left, right, y + dy, 6.0))
        text = {"color": look.ink, "weight": "bold", "va": "center"}
        text["ha"] = "left" if side == 1 else "right"
        line = {"arrowstyle": "-", "color": look.ink, "lw": 0.8, "alpha": 0.6, "shrinkB": 4}
        line["relpos"] = ((1 - side) / 2, 0.5)
        place = ((x + 9 * side) / size[0], (y + dy) / size[1])
        shown = line if abs(dy) > 8 else None
        ax.annotate(name, mark, place, textcoords="axes fraction", arrowprops=shown, **text)


# ---- curves ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One mixer's curve with a band from low to high, where there is one."""

    label: str
    look: Look
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def curves(
    ax: Axes,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    percent: bool = False,
    log: bool = False,
    holds: Sequence[float] = (),
    levels: Mapping[str, float] | None = None,
    within: tuple[float | None, float | None] = (None, None),
) -> None:
    """Draw one curve per mixer, each with its band, and `levels`: lines across by what they are.

    With `percent`, values are fractions, shown in percent; with `log` both axes are logarithmic,
    and a control leaves the chart where it is below a tenth of all others.
    The y axis reaches the values that it `holds`, whatever the curves do, and none beyond the
    bounds `within` which values can be; at 0 it begins where no value is below.
    """
    scale = 100.0 if percent else 1.0
    frame(ax, x_label, y_label)
    ax.margins(0.04, 0.06)
    for line in lines:
        if line.low is not None and line.high is not None:
            ends = (np.multiply(part, scale) for part in (line.low, line.high))
            ax.fill_between(line.xs, *ends, color=line.look.ink, alpha=0.13, lw=0)
    kept = [y for line in lines if not line.look.neutral for y in line.ys if y > 0]
    least = min(kept, default=0.0) / DEPTH if log else -np.inf
    for line in lines:
        ys = [y * scale if y >= least else np.nan for y in line.ys]
        if np.isnan(ys).all():
            continue
        _line(ax, line.look, line.xs, ys, line.label)
        if len(ys) <= FEW:
            _dots(ax, line.look, line.xs, ys, line.label, 7)
    if log:
        _logarithmic(ax)
        return
    ax.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    ax.update_datalim([(lines[0].xs[0], value * scale) for value in holds])
    ax.autoscale_view()
    _levels(ax, {what: value * scale for what, value in (levels or {}).items()}, "right")
    _within(ax, within, scale)
    if 0.0 in holds and min(y for line in lines for y in (*line.ys, *(line.low or ()))) >= 0:
        ax.set_ylim(bottom=0)


def _logarithmic(ax: Axes) -> None:
    """Make both axes logarithmic, their ticks in words as short as ``20 k``."""
    from matplotlib.ticker import LogLocator, NullLocator

    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        low, high = axis.get_view_interval()
        subs = (1, 2, 5) if high < 50 * low else (1, 3) if high < 2000 * low else (1,)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter(_brief)
        axis.set_minor_locator(NullLocator())


def _brief(value: float, _: object) -> str:
    for unit, size in ((" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= size:
            return f"{value / size:,.4g}{unit}"
    return f"{value:,.4g}"


# ---- intervals ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One mixer's difference from the baseline; the ends are (low, high) or ``None``."""

    label: str
    look: Look
    difference: float
    both: tuple[float, float] | None  # over seeds and test units
    images: tuple[float, float] | None
    by_seed: Sequence[float] = ()


def axis_of(rows: Sequence[Row], score: Score = FRACTION) -> tuple[float, float]:
    """Return the ends of the axis that all differences share.

    Beyond it may lie intervals over few seeds, and a control that would squash the rest.
    """
    far = _far([row.difference for row in rows], [row.look for row in rows], score)
    inside = [row for row, gone in zip(rows, far, strict=True) if not gone]
    reach = [0.0]
    for row in inside:
        reach += [row.difference, *row.by_seed, *(row.images or ())]
    most = 3 * max(map(abs, reach)) or 0.02
    reach += [max(-most, min(most, end)) for row in inside for end in row.both or ()]
    reach += [-most, most] if min(reach) == max(reach) else []
    room = 0.06 * (max(reach) - min(reach))
    return min(reach) - room, max(reach) + room


def strip(ax: Axes, row: Row, ends: tuple[float, float], y: float = 0.0) -> None:
    """Draw a difference from the baseline: both intervals, a dot for each seed.

    The broad line is over the units of the test split, the thin one over seeds and units. What lies
    beyond the axis, from end to end, gets an arrow.
    """
    ink, (low, high) = row.look.ink, ends
    intervals = ((row.images, {"lw": 5, "alpha": 0.38}), (row.both, {"lw": 2}))
    for interval, style in intervals:
        if interval is not None:
            ax.plot(np.clip(interval, *ends), [y, y], color=ink, solid_capstyle="butt", **style)
    reached = (row.difference, *(row.both or ()), *(row.images or ()))
    for edge, to, beyond in ((low, "<", min(reached) < low), (high, ">", max(reached) > high)):
        if beyond:
            _arrow(ax, (edge, y), to, ink)
    seeds = [value for value in row.by_seed if low <= value <= high]
    ax.plot(seeds, [y] * len(seeds), "o", ms=5, mfc=colours()["paper"], mec=ink, mew=1.2)
    if low <= row.difference <= high:
        ax.plot(row.difference, y, "|", color=ink, ms=14, mew=2)


def strips(rows: Sequence[Row], *, score: Score = FRACTION) -> dict[str, Markup]:
    """Draw every difference from the baseline on one axis, a strip for each mixer.

    They are hidden from those who hear a page: the table next to them has the numbers.
    """
    ends = axis_of(rows, score)

    def draw(ax: Axes, row: Row) -> None:
        room = 0.03 * (ends[1] - ends[0])
        blank(ax, 180, 22)
        ax.set(xlim=(ends[0] - room, ends[1] + room), ylim=(1, -1))
        ax.axvline(0, color=colours()["ink"], lw=1)
        strip(ax, row, ends)

    drawn = {row.label: functools.partial(draw, row=row) for row in rows}
    return {label: svg(each, name="", size=(180, 22)) for label, each in drawn.items()}


def differences(
    ax: Axes, rows: Sequence[Row], *, baseline: str = "", score: Score = FRACTION
) -> None:
    """Draw every difference from the baseline in one chart, a row for each mixer."""
    ends = axis_of(rows, score)
    _rows(ax, [row.look.short for row in rows], f"{score.name}, difference from {baseline}")
    ax.axvline(0, color=colours()["ink"], lw=1)
    ax.set_xlim(ends)
    for i, row in enumerate(rows):
        strip(ax, row, ends, i)
    ax.xaxis.set_major_formatter(lambda value, _: score.change(value))


# ---- rows -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dots:
    """One mixer's values, one for each row of a chart or None, and the interval of each."""

    label: str
    look: Look
    values: Sequence[float | None]
    ends: Sequence[tuple[float, float] | None] = ()


def _rows(ax: Axes, names: Sequence[str], x_label: str) -> None:
    """Make axes of one row per name, from the top."""
    frame(ax, x_label, grid="both")
    ax.set_yticks(range(len(names)), [shorten(name, 18) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)


def dots(ax: Axes, names: Sequence[str], series: Sequence[Dots], *, x_label: str) -> None:
    """Draw one row per name with a dot of each mixer, apart from one another."""
    _rows(ax, names, x_label)
    ax.axvline(0, color=colours()["ink"], lw=1)
    for j, each in enumerate(series):
        moved = 0.8 * ((j + 0.5) / len(series) - 0.5)
        for i, value in enumerate(each.values):
            if value is None:
                continue
            if each.ends and (ends := each.ends[i]) is not None:
                ax.plot(ends, [i + moved] * 2, color=each.look.ink, lw=5, alpha=0.38)
            hint = f"{each.label}, {names[i]}: {value:.3g}"
            _dots(ax, each.look, [value], [i + moved], hint).set_label(each.label)


# ---- squares --------------------------------------------------------------------------------

Matrix = Sequence[Sequence[float | None]]


def heat_map(
    ax: Axes,
    values: Matrix,
    *,
    names: Sequence[str],
    label: str,
    high: float = 1.0,
    signed: bool = False,
    numbers: bool = False,
) -> None:
    """Draw a square matrix, the more opaque the larger the number; None is a hole.

    `names` are those of rows and columns alike, `label` what these are. The number `high` is
    opaque; if `signed`, its negative is too, in another colour, else what is below 0 is drawn as 0.
    `numbers` are written into the cells, unless there are too many.
    """
    from matplotlib.colors import ListedColormap, to_rgb

    known, count, low = colours(), len(values), -high if signed else 0.0
    levels = np.linspace(low / high, 1, 41)
    shades = ListedColormap([(*to_rgb(known["c1" if v > 0 else "c0"]), abs(v)) for v in levels])
    shades = shades.with_extremes(bad=known["grid"])
    table = np.array(values, dtype=float)
    made = ax.pcolormesh(np.ma.masked_invalid(table), cmap=shades, vmin=low, vmax=high)
    every = [i + 0.5 for i in range(0, count, -(-count // 8))]
    ax.set_xticks(every, [names[int(i)] for i in every])
    ax.set_yticks(every, [names[int(i)] for i in every])
    ax.set(ylim=(count, 0), aspect="equal")
    ends = [low, (low + high) / 2, high]
    bar = ax.figure.colorbar(made, ax=ax, ticks=ends, format=lambda v, _: f"{v:.3g}")
    for each in (ax, bar.ax):
        each.patch.set_visible(False)
        each.tick_params(length=0, labelcolor=known["soft"])
        each.spines[:].set_color(known["line"])
    ax.set_xlabel(label, color=known["soft"])
    ax.set_ylabel(label, color=known["soft"])
    if numbers and count <= 8:
        for (i, j), value in np.ndenumerate(table):
            place = {"ha": "center", "va": "center", "fontsize": 9.5}
            ax.text(j + 0.5, i + 0.5, f"{value:.2f}".replace("-", "−"), **place)


def raster(
    ax: Axes,
    rows: ArrayLike,
    at: tuple[float, float, float, float],
    *,
    colour: str = "ink",
    opacity: float = 1.0,
) -> None:
    """Draw rows of 0 and 1 into left, top, width and height: ones as boxes.

    Neighbours in a row become one box.
    """
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path

    left, top, wide, high = at
    bits = np.asarray(rows, dtype=int)
    edges = np.diff(np.pad(bits, ((0, 0), (1, 1))), axis=1)
    (line, start), (_, stop) = np.nonzero(edges == 1), np.nonzero(edges == -1)
    cell = wide / bits.shape[1], high / len(bits)
    x, y = left + cell[0] * np.stack((start, stop)), top + cell[1] * line
    foot = y + cell[1]
    corners = np.array([(x[0], y), (x[1], y), (x[1], foot), (x[0], foot), (x[0], y)])
    boxes = Path.make_compound_path_from_polys(np.moveaxis(corners, 2, 0))
    ax.add_patch(PathPatch(boxes, color=colours()[colour], alpha=opacity, lw=0))
    ax.add_patch(Rectangle((left, top), wide, high, fill=False, ec=colours()["line"], lw=1))

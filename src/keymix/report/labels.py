# SPDX-License-Identifier: Apache-2.0
"""Labels in charts: how wide they are, how long names are shortened, where they are placed."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

CHAR_WIDTH = 7.0
"""Mean width of a character of 11.5 px label text, px; a little generous."""


def text_width(content: str) -> float:
    """Estimate the width of label text, px; wide characters (CJK, emoji) count double."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in content)
    return CHAR_WIDTH * (len(content) + wide)


def shorten(content: str, room: float) -> str:
    """Cut a label's middle out so that it fits into ``room`` px; its ends identify it best."""
    if text_width(content) <= room:
        return content
    head, tail = content[: len(content) // 2], content[len(content) // 2 :]
    while (head or tail) and text_width(f"{head}…{tail}") > room:
        if len(head) > len(tail):
            head = head[:-1]
        else:
            tail = tail[1:]
    return f"{head}…{tail}"


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

_OPTIONS = re.compile(r"\([^()]*\)")

ROOM = 190.0
"""Labels of at most this width, px, stay whole."""


def short_labels(labels: Sequence[str], room: float = ROOM) -> dict[str, str]:
    """Shorten labels, all shown together, that need more room than ``room`` px.

    ``static_key(activation=relu,pos_dim=3)`` next to ``static_key(activation=relu,...)`` becomes
    ``static_key(…,pos_dim=3)``; of mixers per stage, ``a/b/c/c`` next to ``a/a/c/c``, what all
    begin and end with goes: ``…/b/…``. If that is too long, the stages' options go where the names
    alone identify the labels, and mixers take their short names: ``qkta/qkta/ssa``. What is still
    too long loses its middle.
    """
    several = [label for label in labels if "/" in label]
    staged = _stages_apart(several)
    if all(text_width(label) <= room for label in staged):
        staged = {}
    whole = {label: staged.get(label, label) for label in several}
    names = {label: _OPTIONS.sub("", text) for label, text in whole.items()}
    if len(set(names.values())) == len(names):
        staged |= {label: names[label] for label in several if text_width(whole[label]) > room}
    full = {label: staged.get(label, label) for label in several}
    if any(text_width(text) > room for text in full.values()):
        staged |= {label: _brief(text) for label, text in full.items()}
    parts = {label: _parts(label) for label in labels}
    table = {}
    for label, (name, options) in parts.items():
        if label in staged:
            table[label] = shorten(staged[label], room)
            continue
        if text_width(label) <= room:
            table[label] = label
            continue
        siblings = [set(other) for base, other in parts.values() if base == name]
        shared = set.intersection(*siblings) if len(siblings) > 1 else set()
        kept = [option for option in options if option not in shared]
        brief = f"{name}(…{''.join(',' + option for option in kept)})" if shared else label
        table[label] = shorten(brief, room)
    return table


def _stages_apart(labels: Sequence[str]) -> dict[str, str]:
    """Leave out the stages that all labels of mixers per stage begin or end with."""
    rows = [label.split("/") for label in labels]
    if len(rows) < 2 or len({len(row) for row in rows}) > 1:
        return {}
    apart = [i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]
    first, last = apart[0], apart[-1] + 1
    before, after = "…/" if first else "", "/…" if last < len(rows[0]) else ""
    return {
        label: f"{before}{'/'.join(row[first:last])}{after}"
        for label, row in zip(labels, rows, strict=True)
    }


def _brief(label: str) -> str:
    """Put short names in the place of mixers' names."""
    from keymix.mixers.registry import short_name  # late: few labels need it, and it loads torch

    return re.sub(r"\w+", lambda found: short_name(found[0]), label)


def _parts(label: str) -> tuple[str, list[str]]:
    """Split ``name(a=1,b=2)`` into its name and options."""
    name, bracket, rest = label.partition("(")
    return name, rest.removesuffix(")").split(",") if bracket else []


def _overlap(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0


@dataclass(frozen=True)
class Placed:
    """Where a label went: its baseline, its anchor, and whether it needs a line to its point."""

    x: float
    y: float
    anchor: str
    leader: bool


def place_labels(
    points: Sequence[tuple[float, float]],
    labels: Sequence[str],
    frame: Box,
    obstacles: Sequence[Box] = (),
) -> list[Placed]:
    """Put each label next to its point so that labels cover neither each other nor the points.

    Every label tries places around its point, the near ones first, and takes the first with the
    least overlap; the most crowded points choose first. Labels stay inside the frame, and keep
    clear of obstacles such as error bars.
    """
    blocked = [(x - 6, y - 6, x + 6, y + 6) for x, y in points] + list(obstacles)
    placed: dict[int, Placed] = {}

    def crowd(i: int) -> float:
        return sum(math.dist(points[i], p) < 60 for p in points)

    for i in sorted(range(len(points)), key=crowd, reverse=True):
        (x, y), width = points[i], text_width(labels[i])
        best: tuple[float, Placed, Box] | None = None
        for rank, (dx, dy, anchor) in enumerate(_places()):
            left = {"start": x + dx, "middle": x + dx - width / 2, "end": x + dx - width}[anchor]
            box = (left, y + dy - 9, left + width, y + dy + 3)
            outside = (width * 12) - _overlap(box, frame)
            cost = sum(_overlap(box, other) for other in blocked) + 4 * outside + rank * 0.5
            if best is None or cost < best[0] - 1e-9:
                leader = math.hypot(dx, dy - 3) > 20
                best = (cost, Placed(x + dx, y + dy, anchor, leader), box)
        assert best is not None  # _places is never empty
        placed[i] = best[1]
        blocked.append(best[2])
    return [placed[i] for i in range(len(points))]


def _places() -> list[tuple[float, float, str]]:
    near: list[tuple[float, float, str]] = [
        (10, 4, "start"),
        (-10, 4, "end"),
        (0, -11, "middle"),
        (0, 19, "middle"),
        (9, -7, "start"),
        (9, 15, "start"),
        (-9, -7, "end"),
        (-9, 15, "end"),
    ]
    far: list[tuple[float, float, str]] = []
    for reach in (22, 34, 46, 60, 76):
        for dy in (-reach, reach):
            far += [(14, dy + 4, "start"), (-14, dy + 4, "end"), (0, dy + 4, "middle")]
        far += [(reach, 4, "start"), (-reach, 4, "end")]
    return near + far


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move places along an axis at least a gap apart, each as little as its neighbours let it.

    None is before `low`, unless there is no room, and none behind `high`.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    groups: list[list[int]] = []
    for i in order:
        groups.append([i])
        # a group is placed around the mean of what its members want
        while len(groups) > 1:
            above, below = (_start(group, wanted, gap, low, high) for group in groups[-2:])
            if above + gap * len(groups[-2]) <= below + 1e-9:
                break
            last = groups.pop()
            groups[-1] += last
    for group in groups:
        start = _start(group, wanted, gap, low, high)
        for rank, i in enumerate(group):
            placed[i] = start + rank * gap
    return placed


def _start(
    group: Sequence[int], wanted: Sequence[float], gap: float, low: float, high: float
) -> float:
    length = gap * (len(group) - 1)
    middle = sum(wanted[i] for i in group) / len(group)
    return max(low, min(high - length, middle - length / 2))

# SPDX-License-Identifier: Apache-2.0
"""Draw the rooms and the way of a comparison: ``python docs/figures/rooms.py`` writes the SVG.

A row for each floor, a column for each step of ``keymix compare``; a dashed line goes down from a
step to the packages that do its work. ``tests/docs/test_design.py`` compares both with the code.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FLOORS = (
    ("cli", "one thin file for each command"),
    ("compare, studies, export", "comparisons; the analyses of keymix analyze; models as files"),
    ("swap", "mixers into trained models"),
    ("tasks", "facts, training, answers and page of each task"),
    ("report, recipes", "tables, charts, pages; the papers’ runs"),
    ("train", "recipe, loop, checkpoints, run folders"),
    ("analysis", "counts, measurements, maps, statistics"),
    ("data", "sources, splits, decoding, loaders"),
    ("models, decoders", "the papers’ models; heads for dense answers"),
    ("hosts", "where attention sits in other libraries’ models"),
    ("mixers", "the mechanisms, one file each, and their interface"),
    ("ops, layers", "equations and kernels; parts of models"),
    ("records, task, errors", "what every package may use"),
)
STEPS = (  # the room of each step, then the rooms below that do its work
    ("cli",),
    ("compare",),
    ("compare", "recipes", "data", "models", "mixers"),
    ("compare", "train", "data", "mixers"),
    ("compare", "train"),
    ("compare", "analysis"),
    ("compare", "analysis"),
    ("compare", "tasks", "analysis"),
    ("compare", "report"),
)
ROW, TOP, LEFT, FIRST, COLUMN = 40, 46, 16, 400, 62
WIDTH = FIRST + COLUMN * len(STEPS) - 4
HEIGHT = TOP + ROW * len(FLOORS) + 14
LIGHT = "--ink:#1b2430;--soft:#566270;--box:#f3f5f8;--edge:#c3cad3;--way:#0a6b8a;--page:#fff"
DARK = "--ink:#e8ecf1;--soft:#a7b1bd;--box:#242b34;--edge:#46505c;--way:#58c1e0;--page:#171c22"


def middle(room: str) -> int:
    """The height of a room's row."""
    floor = next(i for i, (rooms, _) in enumerate(FLOORS) if room in rooms.split(", "))
    return TOP + floor * ROW + (ROW - 6) // 2


def text(x: int, y: float, words: str, size: float, colour: str = "ink", bold: bool = True) -> str:
    """One line of text."""
    weight = ' font-weight="600"' if bold else ""
    style = f'font-size="{size}"{weight} fill="var(--{colour})"'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def rows() -> list[str]:
    """A box for each floor, with its rooms and what they hold."""
    made = []
    for i, (rooms, what) in enumerate(FLOORS):
        y = TOP + i * ROW
        made += [
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - 2 * LEFT}" height="{ROW - 6}" rx="5" '
            'fill="var(--box)" stroke="var(--edge)"/>',
            text(LEFT + 10, y + 14, rooms, 12.5),
            text(LEFT + 10, y + 28, what, 11, "soft", bold=False),
        ]
    return made


def way() -> list[str]:
    """The steps, the line between them, and the lines down."""
    lines, marks = [], []
    for i, rooms in enumerate(STEPS):
        x, y = FIRST + i * COLUMN, middle(rooms[0])
        if i:
            before = f"M{x - COLUMN} {middle(STEPS[i - 1][0])}"
            lines.append(f'<path d="{before} L{x} {y}" stroke="var(--way)" stroke-width="2"/>')
        below = [middle(room) for room in rooms[1:]]
        if below:
            lines.append(
                f'<path d="M{x} {y} V{max(below)}" stroke="var(--way)" stroke-width="1.5" '
                'stroke-dasharray="3 3"/>'
            )
        marks += [f'<circle cx="{x}" cy="{each}" r="5" fill="var(--way)"/>' for each in below]
        marks.append(f'<circle cx="{x}" cy="{y}" r="12" fill="var(--way)"/>')
        number = text(x, y + 4.5, str(i + 1), 12.5, "page")
        marks.append(number.replace("<text", '<text text-anchor="middle"'))
    return [*lines, *marks]


def figure() -> str:
    """The whole drawing as SVG."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-labelledby="title what" '
            'font-family="system-ui, sans-serif">',
            '<title id="title">The packages of keymix and the steps of a comparison</title>',
            '<desc id="what">A row for each floor, from the command line at the top to the modules '
            "that every package may use; imports run downward only. Nine numbered columns are the "
            "steps of keymix compare; a line in each goes down to the packages that do its work."
            "</desc>",
            f"<style>svg{{{LIGHT}}}@media(prefers-color-scheme:dark){{svg{{{DARK}}}}}</style>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="var(--page)"/>',
            text(LEFT, 24, "Rooms (imports run downward only)", 14),
            text(FIRST - 14, 24, "keymix compare, step by step", 14),
            *rows(),
            *way(),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(figure(), encoding="utf-8")

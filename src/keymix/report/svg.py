# SPDX-License-Identifier: Apache-2.0
"""A chart of matplotlib as inline SVG that follows the page's colours, or as a file of its own.

A chart is a function that draws onto axes, so notebooks call it too. It draws in the light colours
of the style sheet; inline, each becomes the sheet's variable, so that it is dark on a dark page.
"""

from __future__ import annotations

import functools
import hashlib
import io
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from keymix.report.page import environment

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes"], object]

SIZE = (380.0, 270.0)
"""Width and height of most charts, px; a chart scales with its column."""

HINT = "hint:"
"""What an artist's ``gid`` begins with if the rest is shown where the pointer rests on it."""

_TIDY = (
    (r"<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>", ""),
    (r'<g id="QuadMesh[^"]*">', '<g shape-rendering="crispEdges">'),
    (r'<g id="(?!hint:)[^"]*">', "<g>"),
    (r'<g id="hint:([^"]*)">', r"<g><title>\1</title>"),
    (r' transform="rotate\(-0 [^"]*"|font-family: [^;"]*;?', ""),
    (r' (d|x|y|transform)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0])),
    (r"\s*\n\s*", "\n"),
)


@functools.cache
def colours() -> dict[str, str]:
    """Return the light colours of the style sheet by the names of their variables."""
    sheet = environment().get_template("style.css").render()
    light = sheet.partition(":root {")[2].partition("}")[0]
    return dict(re.findall(r"--([\w-]+): (#\w+);", light))


def svg(draw: Draw, *, name: str, size: tuple[float, float] = SIZE) -> Markup:
    """Draw a chart as SVG for a page; `name` is read to those who cannot see it, "" hides it."""
    told = f'role="img" aria-label="{escape(name)}"' if name else 'aria-hidden="true"'
    names = {colour: f"var(--{key})" for key, colour in reversed(colours().items())}
    text = _drawn(draw, size, told)
    return Markup(re.sub(r"#[0-9a-f]{6}\b", lambda hit: names.get(hit[0], hit[0]), text))


def file(draw: Draw, *, name: str, size: tuple[float, float] = SIZE) -> str:
    """Draw a chart as an SVG file: in light colours on paper, its labels in a legend below."""

    def on_paper(ax: Axes) -> None:
        with_legend(ax, draw)
        ax.figure.set_facecolor(colours()["paper"])

    told = f'role="img" aria-label="{escape(name)}" width="{2 * size[0]:g}"'
    return _drawn(on_paper, size, told) + "\n"


def with_legend(ax: Axes, draw: Draw) -> None:
    """Draw a chart, and below it the legend of several labels."""
    draw(ax)
    shown = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    if len(shown) > 1:
        place = {"loc": "upper left", "bbox_to_anchor": (0, -0.17), "frameon": False}
        ax.legend(shown.values(), shown, **place)


def _drawn(draw: Draw, size: tuple[float, float], attributes: str) -> str:
    """Draw a chart; the same whatever the user's settings of matplotlib are."""
    from matplotlib import style
    from matplotlib.figure import Figure

    known, stream = colours(), io.StringIO()
    ours = {
        "svg.fonttype": "none",  # text stays text, in the font of the page
        "svg.hashsalt": "keymix",
        "text.parse_math": False,
        "text.color": known["ink"],
        "font.size": 11.0,
        "xtick.labelsize": 11.0,
        "ytick.labelsize": 11.0,
    }
    with style.context(["default", ours]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the page's font may have it
        figure = Figure((size[0] / 72, size[1] / 72), 72, facecolor="none", layout="constrained")
        draw(figure.subplots())
        figure.get_layout_engine().execute(figure)
        figure.set_layout_engine("none")  # once is enough: while it is there, all is drawn twice
        figure.savefig(stream, format="svg", metadata={"Date": None}, dpi="figure")
    text = stream.getvalue().partition("<svg ")[2].partition(">")[2]
    for pattern, written in _TIDY:
        text = re.sub(pattern, written, text, flags=re.DOTALL)
    # ids of one chart are not those of another on its page
    own = hashlib.sha256(f"{attributes}{text}".encode()).hexdigest()[:8]
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>k{own}-", text)
    halo = f"paint-order: stroke; stroke: {known['paper']}; stroke-width: 3px"
    text = text.replace('<text style="', f'<text style="{halo}; ')
    return (
        f'<svg {attributes} viewBox="0 0 {size[0]:g} {size[1]:g}" stroke-linejoin="round" '
        'font-family="sans-serif" xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink">{text}'
    )

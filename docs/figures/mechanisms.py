# SPDX-License-Identifier: Apache-2.0
"""Draw the mechanisms side by side: ``python docs/figures/mechanisms.py`` writes the SVG.

One grammar for all panels: tokens enter above, three lanes (query, key, value) go down, one box an
operation. What a mechanism changes against self-attention is drawn in colour.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH, HEIGHT = 1000, 536
PANEL, GAP, MARGIN = 184, 12, 16
TOP, BOTTOM = 12, 496
LANES = (38, 92, 146)  # centres of the query, key and value lanes in a panel
BOX = 48  # width of a box in one lane
ROWS = {"x": 76, "w": 130, "dot": 196, "softmax": 250, "mix": 304, "av": 358, "wo": 410, "out": 462}

CARD, PAPER, EDGE, INK, QUIET = "#f1f3f6", "#ffffff", "#5b6472", "#1d2430", "#5b6472"
NEW, NEW_EDGE = "#ffe2c4", "#b4540a"  # what the mechanism changes
LEARNED = "#ffc98f"  # a weight that stands where a computed key stood


def text(x: float, y: float, words: str, size: float = 15, **style: str) -> str:
    """One line of text, centred; ``_q`` makes a subscript and ``^T`` a superscript."""
    out, i = "", 0
    if "font_family" in style:  # a name in code, with underscores of its own
        out, i = escape(words), len(words)
    while i < len(words):
        if words[i] in "_^":
            shift = size * (0.25 if words[i] == "_" else -0.35)
            out += f'<tspan dy="{shift:.1f}" font-size="{size * 0.72:.1f}">{words[i + 1]}</tspan>'
            out += f'<tspan dy="{-shift:.1f}">&#8203;</tspan>'
            i += 2
        else:
            out += escape(words[i])
            i += 1
    given = {"fill": INK, **{k.replace("_", "-"): v for k, v in style.items()}}
    message = "".join(f' {k}="{v}"' for k, v in given.items())
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="middle"{message}>{out}</text>'
    )


def box(x: float, row: str, words: str, width: float = BOX, kind: str = "plain") -> str:
    """One operation, centred at ``x`` in a row; ``kind`` is plain, new or learned."""
    y, h = ROWS[row], 30
    fill, edge = {
        "plain": (PAPER, EDGE),
        "new": (NEW, NEW_EDGE),
        "learned": (LEARNED, NEW_EDGE),
    }[kind]
    corner = 15 if kind == "learned" else 4
    shape = (
        f'<rect x="{x - width / 2:g}" y="{y:g}" width="{width:g}" height="{h}" rx="{corner}" '
        f'fill="{fill}" stroke="{edge}" stroke-width="1.4"/>'
    )
    return shape + text(x, y + h / 2 + 5, words)


def arrow(x: float, start: str, end: str, colour: str = EDGE) -> str:
    """A straight arrow down from the box of one row to that of another."""
    y1, y2 = ROWS[start] + 30, ROWS[end]
    mark = "new" if colour == NEW_EDGE else "old"
    return (
        f'<line x1="{x:g}" y1="{y1}" x2="{x:g}" y2="{y2 - 1}" stroke="{colour}" '
        f'stroke-width="1.4" marker-end="url(#{mark})"/>'
    )


def bent(x1: float, start: str, x2: float, end: str) -> str:
    """An arrow in the colour of change from one lane's box to another lane's."""
    y1, y2 = ROWS[start] + 30, ROWS[end]
    middle = (y1 + y2) / 2 - 2
    return (
        f'<path d="M{x1:g} {y1} V{middle:g} H{x2:g} V{y2 - 1}" fill="none" stroke="{NEW_EDGE}" '
        'stroke-width="1.4" marker-end="url(#new)"/>'
    )


def panel(left: float, title: str, name: str, equation: str, parts: list[str]) -> str:
    """A mechanism: title, registered name, its own parts, and what all share."""
    q, _, v = (left + lane for lane in LANES)
    centre, span = left + PANEL / 2, LANES[2] - LANES[0] + BOX
    score = (q + left + LANES[1]) / 2  # between the query and the key lane
    shared = [
        text(centre, TOP + 26, title, 17, font_weight="600"),
        text(centre, TOP + 46, name, 13.5, fill=QUIET, font_family="ui-monospace, monospace"),
        box(centre, "x", "tokens x", span),
        arrow(v, "x", "w"),
        box(v, "w", "W_v"),
        arrow(v, "w", "av"),
        text(v + 11, 270, "V", 14, fill=QUIET),
        text(score - 13, 351, "A", 14, fill=QUIET),
        arrow(score, "dot", "softmax"),
        box(score, "softmax", "softmax", 102),
        box(centre, "av", "A V", span),
        arrow(centre, "av", "wo"),
        box(centre, "wo", "W_o", span),
        arrow(centre, "wo", "out"),
        text(centre, BOTTOM - 14, equation, 14 if len(equation) < 22 else 12.5),
    ]
    card = (
        f'<rect x="{left:g}" y="{TOP}" width="{PANEL}" height="{BOTTOM - TOP}" rx="8" '
        f'fill="{CARD}" stroke="#d5d9df"/>'
    )
    return f"<g>{card}{''.join(shared + parts)}</g>"


def lanes(left: float) -> tuple[float, float, float]:
    """Centres of query lane, key lane, and the place between them."""
    q, k = left + LANES[0], left + LANES[1]
    return q, k, (q + k) / 2


def query(q: float) -> list[str]:
    """The query lane of self-attention."""
    return [arrow(q, "x", "w"), box(q, "w", "W_q"), arrow(q, "w", "dot")]


def key(k: float) -> list[str]:
    """The key lane of self-attention."""
    return [arrow(k, "x", "w"), box(k, "w", "W_k"), arrow(k, "w", "dot")]


def softmax(left: float) -> str:
    """Self-attention: query and key are both computed."""
    q, k, s = lanes(left)
    parts = [*query(q), *key(k), box(s, "dot", "Q K^T", 102), arrow(s, "softmax", "av")]
    return panel(left, "Self-attention", "softmax", "softmax(Q K^T) V", parts)


def static_key(left: float) -> str:
    """Static keys: the key is a weight."""
    q, k, s = lanes(left)
    parts = [
        *query(q),
        box(k, "w", "key", BOX + 2, "learned"),
        arrow(k, "w", "dot", NEW_EDGE),
        box(s, "dot", "Q key^T", 102),
        arrow(s, "softmax", "av"),
    ]
    return panel(left, "Static key", "static_key", "softmax(Q key^T) V", parts)


def conv_static_key(left: float) -> str:
    """Convolutional static keys: a convolution of the query image gives the logits."""
    q, _, s = lanes(left)
    parts = [
        *query(q),
        box(s, "dot", "conv_h 3×3", 102, "learned"),
        arrow(s, "softmax", "av"),
    ]
    return panel(left, "Conv. static key", "conv_static_key", "softmax(conv_h(Q)) V", parts)


def re_attention(left: float) -> str:
    """Re-attention: the heads' maps are mixed after the softmax."""
    q, k, s = lanes(left)
    parts = [
        *query(q),
        *key(k),
        box(s, "dot", "Q K^T", 102),
        arrow(s, "softmax", "mix", NEW_EDGE),
        box(s, "mix", "Θ, Norm", 102, "learned"),
        arrow(s, "mix", "av", NEW_EDGE),
    ]
    return panel(left, "Re-attention", "re_attention", "Norm(Θ^T softmax(Q K^T)) V", parts)


def key_value(left: float) -> str:
    """Key-value attention: there is no query."""
    q, k, s = lanes(left)
    parts = [
        arrow(k, "x", "w"),
        box(k, "w", "W_k"),
        arrow(k, "w", "dot"),
        bent(k, "w", q, "dot"),
        box(s, "dot", "K K^T", 102, "new"),
        arrow(s, "softmax", "av"),
    ]
    return panel(left, "Key-value", "key_value", "softmax(K K^T) V", parts)


def figure() -> str:
    """The whole drawing as SVG."""
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
        for name, colour in (("old", EDGE), ("new", NEW_EDGE))
    )
    drawn = (softmax, static_key, conv_static_key, re_attention, key_value)
    panels = "".join(draw(MARGIN + i * (PANEL + GAP)) for i, draw in enumerate(drawn))
    legend = "Colour: what differs from self-attention. Rounded: weights of its own. "
    legend += "Every head h has its own map A; the scale of the logits is left out."
    note = text(WIDTH / 2, HEIGHT - 14, legend, 13.5, fill=QUIET)
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{PAPER}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif" '
        'role="img" aria-labelledby="title desc">'
        '<title id="title">Five attention mechanisms side by side</title>'
        '<desc id="desc">Self-attention computes queries, keys and values. A static key is a '
        "weight instead of a projection. A convolutional static key turns the query image into "
        "logits. Re-attention mixes the heads' maps after the softmax and normalises them. "
        "Key-value attention has no query.</desc>"
        f"<defs>{heads}</defs>{ground}{panels}{note}</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(figure(), encoding="utf-8")

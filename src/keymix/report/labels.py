# SPDX-License-Identifier: Apache-2.0
"""Names in charts: how wide they are, and how long ones are shortened."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_OPTIONS = re.compile(r"\([^()]*\)")

ROOM = 27
"""Characters up to which names stay whole."""


def width(content: str) -> int:
    """Count the characters of a text; wide ones (CJK, emoji) count double."""
    return len(content) + sum(unicodedata.east_asian_width(c) in "WF" for c in content)


def shorten(content: str, room: int) -> str:
    """Cut a label's middle out so that it has `room` characters; its ends identify it best."""
    if width(content) <= room:
        return content
    head, tail = content[: len(content) // 2], content[len(content) // 2 :]
    while (head or tail) and width(f"{head}…{tail}") > room:
        if len(head) > len(tail):
            head = head[:-1]
        else:
            tail = tail[1:]
    return f"{head}…{tail}"


def short_labels(labels: Sequence[str], room: int = ROOM) -> dict[str, str]:
    """Shorten labels, all shown together, that have more than `room` characters.

    ``static_key(activation=relu,pos_dim=3)`` next to ``static_key(activation=relu,...)`` becomes
    ``static_key(…,pos_dim=3)``; of mixers per stage, ``a/b/c/c`` next to ``a/a/c/c``, what all
    begin and end with goes: ``…/b/…``. If that is too long, the stages' options go where the names
    alone identify the labels, and mixers take their short names: ``qkta/qkta/ssa``. What is still
    too long loses its middle.
    """
    several = [label for label in labels if "/" in label]
    staged = _stages_apart(several)
    if all(width(label) <= room for label in staged):
        staged = {}
    whole = {label: staged.get(label, label) for label in several}
    names = {label: _OPTIONS.sub("", text) for label, text in whole.items()}
    if len(set(names.values())) == len(names):
        staged |= {label: names[label] for label in several if width(whole[label]) > room}
    full = {label: staged.get(label, label) for label in several}
    if any(width(text) > room for text in full.values()):
        staged |= {label: _brief(text) for label, text in full.items()}
    parts = {label: _parts(label) for label in labels}
    table = {}
    for label, (name, options) in parts.items():
        if label in staged or width(label) <= room:
            table[label] = shorten(staged.get(label, label), room)
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

# SPDX-License-Identifier: Apache-2.0
"""Names in charts: how wide they are, and how long ones are shortened."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

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

    Options and stages that the long ones have in common go: ``static_key(…,pos_dim=3)`` next to
    ``static_key(…,pos_dim=4)``, and ``…/b/…`` next to ``…/a/…``. What is still too long loses its
    middle.
    """
    long = {label: re.split(r"(?<=[(,/])", label) for label in labels if width(label) > room}
    table = {}
    for label in labels:
        own = long.get(label, [])
        alike = [row for row in long.values() if len(row) == len(own)]
        columns = zip(own, *alike, strict=True) if len(alike) > 1 else ()
        brief = "".join(
            each if each[-1] == "(" or len({each, *others}) > 1 else f"…{each[-1]}"
            for each, *others in columns
        )
        brief = re.sub(r"(…[,/])+", r"\1", re.sub(r"…[^,/)]", "…", brief))
        table[label] = shorten(brief or label, room)
    return table

# SPDX-License-Identifier: Apache-2.0
"""How names that are too long for a chart are shortened."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
        brief = re.sub(r"(…[,/])+", r"\1", re.sub(r"…[^,/)]", "…", brief))
        table[label] = shorten(brief or label, room)
    return table

# SPDX-License-Identifier: Apache-2.0
"""Mixers' labels where room is short: what sets a label apart stays, what all share goes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keymix.report.svg import shorten, text_width

_OPTIONS = re.compile(r"\([^()]*\)")

ALIASES = {
    "qk_token": "qkta",
    "qk_channel": "qkca",
    "spiking_self": "ssa",
    "spike_driven": "sdsa",
    "static_key": "ska",
    "conv_static_key": "cska",
    "softmax": "mhsa",
}
"""Short names of mixers, as `keymix list mixers` tells them, for labels of one a stage."""

ROOM = 190.0
"""Labels of at most this width, px, stay whole."""


def short_labels(labels: Sequence[str], room: float = ROOM) -> dict[str, str]:
    """Shorten labels that need more room.

    ``static_key(activation=relu,pos_dim=3)`` beside others of ``static_key(activation=relu,...)``
    becomes ``static_key(…,pos_dim=3)``; of mixers a stage, ``a/b/c/c`` beside ``a/a/c/c``, what
    all begin and end with goes: ``…/b/…``. If that is too long, the stages' options go where the
    names alone tell the labels apart, and mixers take their short names: ``qkta/qkta/ssa``. What is
    still too long loses its middle.

    Args:
        labels: All labels shown together.
        room: Width that a label may take, px of 11.5 px label text.
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
        told = f"{name}(…{''.join(',' + option for option in kept)})" if shared else label
        table[label] = shorten(told, room)
    return table


def _stages_apart(labels: Sequence[str]) -> dict[str, str]:
    """Leave out the stages that all labels of mixers a stage begin or end with."""
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
    return re.sub(r"\b[a-z_]+\b", lambda found: ALIASES.get(found[0], found[0]), label)


def _parts(label: str) -> tuple[str, list[str]]:
    """Split ``name(a=1,b=2)`` into its name and options."""
    name, bracket, rest = label.partition("(")
    return name, rest.removesuffix(")").split(",") if bracket else []

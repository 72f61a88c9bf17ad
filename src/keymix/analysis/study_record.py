# SPDX-License-Identifier: Apache-2.0
"""What the records of all analyses and of a swap share: which command, when, on what, which model.

The record of each adds fields of its own; `keymix.records` writes and reads all of them. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """The frame of a record."""

    command: str
    created: str
    environment: Mapping[str, str]  # versions and machine, in lines by name


@dataclass(frozen=True, kw_only=True)
class StudiedModel:
    """A model that was studied."""

    label: str
    name: str
    weights: str  # where its weights come from, in words
    random: bool  # whether it is untrained


@dataclass(frozen=True, kw_only=True)
class ModelOnImages(StudiedModel):
    """A model that was studied on images of its own."""

    origin: str  # where the images come from, in words
    left_out: Mapping[str, str]  # name and reason of each that could not be read


UNNAMED = ModelOnImages(
    label="model", name="", weights="", random=False, origin="images", left_out={}
)
"""A model and images that nobody named."""


def numbers(noun: str, found: Sequence[int]) -> str:
    """Name numbers shortly: ``block 3``, ``blocks 2, 4–6``."""
    spans: list[list[int]] = []
    for number in sorted(found):
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    parts = [f"{s[0]}–{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans]
    return f"{noun}{'s' if len(found) > 1 else ''} {', '.join(parts)}"


def joined(cls: type[R], *parts: Any, **more: Any) -> R:
    """Make a record of the fields of its parts; later ones and `more` take precedence."""
    taken = {item.name: getattr(part, item.name) for part in parts for item in fields(part)}
    return cls(**{**taken, **more})

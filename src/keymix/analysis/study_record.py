# SPDX-License-Identifier: Apache-2.0
"""What the records of all analyses and of a swap share: which command, when, on what, which model.

The record of each adds fields of its own; `keymix.records` writes and reads all of them. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """The frame of a record.

    Attributes:
        command: The command line that made it.
        created: When.
        environment: Versions and machine, in lines by name.
        baseline: Whom the others are compared with, by label; None where there is none.
    """

    command: str
    created: str
    environment: Mapping[str, str]

    baseline: ClassVar[str | None] = None


@dataclass(frozen=True, kw_only=True)
class StudiedModel:
    """A model that was studied.

    Attributes:
        label: What charts call it.
        name: As it was given.
        weights: Where its weights come from, in words.
        random: Whether it is untrained.
    """

    label: str
    name: str
    weights: str
    random: bool


@dataclass(frozen=True, kw_only=True)
class ModelOnImages(StudiedModel):
    """A model that was studied on images of its own.

    Attributes:
        origin: Where the images come from, in words.
        left_out: Name and reason of each that could not be read.
    """

    origin: str
    left_out: Mapping[str, str]


def joined(cls: type[R], *parts: DataclassInstance, **more: Any) -> R:
    """Make a record of the fields of its parts.

    Args:
        cls: The record, which has all their fields.
        parts: Records whose fields it takes over.
        more: The rest of its fields, or others in place of those.
    """
    taken = {item.name: getattr(part, item.name) for part in parts for item in fields(part)}
    return cls(**{**taken, **more})

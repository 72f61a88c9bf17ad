# SPDX-License-Identifier: Apache-2.0
"""A row of the table of bad inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A bad input.

    Args:
        given: What is given, in words.
        spec: The data spec, relative to the folder it is made in.
        answer: The line that follows ``keymix: error: ``.
        make: Makes the data in the working folder.
        words: Further words of the command.
        recipe: What is trained.
    """

    given: str
    spec: str
    answer: str
    make: Callable[[], object] = lambda: None
    words: Sequence[str] = ()
    recipe: str = "digits_vit"

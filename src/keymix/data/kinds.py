# SPDX-License-Identifier: Apache-2.0
"""The kinds of input that data have, and how each is called. Reading this costs no heavy import."""

from __future__ import annotations

from dataclasses import dataclass

from keymix.errors import unknown


@dataclass(frozen=True, kw_only=True)
class InputKind:
    """A kind of input.

    Args:
        name: Its name, in data specs.
        noun: What one input is called in a sentence.
        holds: What data of it are called, such as ``recordings of events``.
        axes: Shape of a batch, such as ``[B, C, H, W]``.
    """

    name: str
    noun: str
    holds: str
    axes: str

    @property
    def nouns(self) -> str:
        """What several inputs are called."""
        return f"{self.noun}s"

    @property
    def one(self) -> str:
        """What one input is called with its article: ``an image``."""
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"

    def count(self, number: int) -> str:
        """Write a number of inputs: ``1 image``, ``1,200 images``."""
        return f"{number:,} {self.noun if number == 1 else self.nouns}"


IMAGE = InputKind(name="image", noun="image", holds="images", axes="[B, C, H, W]")
RECORDING = InputKind(
    name="recording", noun="recording", holds="recordings of events", axes="[B, T, C, H, W]"
)
SLICES = InputKind(name="slices", noun="image", holds="stacks of slices", axes="[B, C, H, W]")
KINDS = {kind.name: kind for kind in (IMAGE, RECORDING, SLICES)}


def get_kind(name: str) -> InputKind:
    """Return a kind of input by name.

    Raises:
        UserError: If there is none.
    """
    if name not in KINDS:
        raise unknown("kind of input", name, KINDS)
    return KINDS[name]

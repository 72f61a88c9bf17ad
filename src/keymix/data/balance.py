# SPDX-License-Identifier: Apache-2.0
"""When the classes of a set are uneven: one definition for the check, the comparison, the score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

_TIMES = 10

Name = TypeVar("Name")


@dataclass(frozen=True)
class Balance(Generic[Name]):
    """How many images each class has; classes without any do not count."""

    counts: Mapping[Name, int]  # images of each class, one image or more in all

    @property
    def largest(self) -> Name:
        """The class of most images, the first of several."""
        return max(self.counts, key=self.counts.__getitem__)

    @property
    def smallest(self) -> Name:
        """The class of fewest images, but some, the first of several."""
        return min((name for name, n in self.counts.items() if n), key=self.counts.__getitem__)

    @property
    def uneven(self) -> bool:
        """Whether the largest class has ten times the images of the smallest, or more."""
        return self.counts[self.largest] >= _TIMES * self.counts[self.smallest]

    def dominates(self, name: Name) -> bool:
        """Whether a class has ten times the images of all others together, or more."""
        own = self.counts.get(name, 0)
        return own >= _TIMES * (sum(self.counts.values()) - own)

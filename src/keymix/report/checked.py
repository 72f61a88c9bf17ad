# SPDX-License-Identifier: Apache-2.0
"""What the check of the data found, as the record of a comparison keeps it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataFinding:
    """Something that the check of the data found, how often, the first places, and the remedy."""

    level: Literal["stops", "falsifies", "warning"]
    what: str
    count: int
    where: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the check of the data found, and what there was no time for.

    `looked_at` are the numbers of images and of all; `too_narrow` says that intervals over test
    images are.
    """

    findings: tuple[DataFinding, ...]
    too_narrow: bool
    looked_at: Mapping[str, int]
    not_looked_at: tuple[str, ...]

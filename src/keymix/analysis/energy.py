# SPDX-License-Identifier: Apache-2.0
"""What an addition and a multiply-add cost: energies by name, with their sources."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from keymix.errors import UserError, unknown

HOROWITZ = (
    "M. Horowitz, Computing's energy problem (and what we can do about it), ISSCC 2014, "
    "45 nm, 0.9 V, https://doi.org/10.1109/ISSCC.2014.6757323"
)


@dataclass(frozen=True, kw_only=True)
class Energy:
    """What arithmetic costs; memory access is not in it.

    Attributes:
        name: What ``--energy`` calls it.
        mac: Energy of a multiply-add, pJ.
        ac: Energy of an addition (accumulate), pJ.
        numbers: The arithmetic, in words.
        source: Where the figures come from.
    """

    name: str
    mac: float
    ac: float
    numbers: str
    source: str


class Bounds(NamedTuple):
    """Energy in pJ: a lower bound, every spike one addition, an upper bound."""

    low: float
    middle: float
    high: float

    @classmethod
    def total(cls, energies: Iterable[Bounds]) -> Bounds:
        """Add energies up."""
        return cls(*map(sum, zip(*energies, strict=True)))


# A multiply-add is a multiplication and an addition of the source's table, pJ
_TABLE = (
    ("fp32", 3.7, 0.9, "32-bit floating point"),
    ("fp16", 1.1, 0.4, "16-bit floating point"),
    ("int32", 3.1, 0.1, "32-bit integer"),
    ("int8", 0.2, 0.03, "8-bit integer"),
)

ENERGIES = {
    name: Energy(name=name, mac=round(times + plus, 6), ac=plus, numbers=numbers, source=HOROWITZ)
    for name, times, plus, numbers in _TABLE
}
"""Energies by name. ``fp32`` (4.6 and 0.9 pJ) is what papers on spiking networks take."""


def energy_of(energy: str | Energy) -> Energy:
    """Return energies by name, or of two numbers.

    Args:
        energy: One of `ENERGIES`, or ``"MAC,AC"`` in pJ, such as ``"4.6,0.9"``.

    Raises:
        UserError: If it is neither.
    """
    if isinstance(energy, Energy):
        return energy
    if energy in ENERGIES:
        return ENERGIES[energy]
    if "," not in energy:
        raise unknown("energy", energy, ENERGIES)
    try:
        mac, ac = (float(part) for part in energy.split(","))
    except ValueError:
        mac = ac = math.nan
    if not (0 <= mac < math.inf and 0 <= ac < math.inf):
        raise UserError(f"energy {energy!r}: give pJ of a multiply-add and of an addition: 4.6,0.9")
    name = f"{mac:g},{ac:g}"
    return Energy(name=name, mac=mac, ac=ac, numbers="as given", source="given on the command line")

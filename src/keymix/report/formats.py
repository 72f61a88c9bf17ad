# SPDX-License-Identifier: Apache-2.0
"""How quantities are written in tables, here and at the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keymix.task import Score

if TYPE_CHECKING:
    from keymix.analysis.statistics import Interval

MISSING = "–"


def percent(value: float | None, digits: int = 1) -> str:
    """Write a fraction in percent, without the sign."""
    return MISSING if value is None else f"{value * 100:.{digits}f}"


def points(value: float | None) -> str:
    """Write a difference of fractions in percentage points, with a true minus sign."""
    if value is None:
        return MISSING
    body = f"{abs(value) * 100:.1f}"
    return body if body == "0.0" else ("−" if value < 0 else "+") + body


def with_unit(text: str, score: Score) -> str:
    """Write a score's unit behind what it is called: ``accuracy, %``."""
    return f"{text}, {score.unit}" if score.unit else text


def scored(value: float | None, score: Score, places: int = 1) -> str:
    """Write a score without its unit."""
    return MISSING if value is None else score.digits(value, places)


def changed(difference: float | None, score: Score) -> str:
    """Write a difference of scores without its unit, with a true minus sign."""
    return MISSING if difference is None else score.change(difference)


def span(low: float | None, high: float | None, score: Score) -> str:
    """Write an interval of a difference of scores, without its unit."""
    return (
        MISSING if low is None or high is None else f"{score.change(low)} to {score.change(high)}"
    )


def interval(found: Interval | None, score: Score) -> str:
    """Write an interval over seeds of a difference, or that these seeds have none."""
    if found is None:
        return MISSING
    if found.low is None or found.high is None:
        return f"{seeds(found.n)}: no interval"
    return span(found.low, found.high, score)


def seeds(number: int) -> str:
    """Write how many seeds there are: ``1 seed``, ``3 seeds``."""
    return f"{number} seed{'' if number == 1 else 's'}"


def no_spread(interval: Interval) -> str:
    """Say why several seeds have no interval; empty where they have, and for one seed."""
    return interval.note if interval.low is None and interval.n > 1 else ""


def distance(value: float | None) -> str:
    """Write a distance with one decimal, without its unit."""
    return MISSING if value is None else f"{value:.1f}"


def places(value: float, most: int = 2) -> int:
    """Return how many decimals make three digits, at most ``most``."""
    return min(most, 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0)


def count(value: float | None) -> str:
    """Write a count with three digits and a unit: 5,384 · 53.8 k · 1.23 M · 4.60 G."""
    if value is None:
        return MISSING
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size * (10 if unit == "k" else 1):
            scaled = value / size
            return f"{scaled:.{places(scaled)}f} {unit}"
    return f"{value:,.0f}"


def three_digits(value: float | None) -> str:
    """Write a quantity with three digits, without its unit."""
    return MISSING if value is None else f"{value:.{places(value, 3)}f}"


def mib(value: float | None) -> str:
    """Write memory in MiB."""
    return MISSING if value is None else f"{value:.{places(value)}f}"


def energy_unit(picojoules: float) -> tuple[str, float]:
    """Return the unit that an energy is written in, and its size in pJ."""
    units = (("mJ", 1e9), ("µJ", 1e6), ("nJ", 1e3), ("pJ", 1.0))
    return next((each for each in units if picojoules >= each[1]), units[-1])


def energy(picojoules: float | None) -> str:
    """Write an energy with three digits and a unit: 3.20 nJ · 41.5 µJ · 1.23 mJ."""
    if picojoules is None:
        return MISSING
    unit, size = energy_unit(picojoules)
    scaled = picojoules / size
    return f"{scaled:.{places(scaled)}f} {unit}"


def share(value: float | None, of: float | None) -> str:
    """Write by what share a quantity differs from another: ``−11 %``; empty if not known."""
    if value is None or not of:
        return ""
    found = value / of - 1
    body = f"{100 * abs(found):.0f}"
    return f"{'' if body == '0' else '−' if found < 0 else '+'}{body} %"


def ratio(value: float) -> str:
    """Write a multiple with three digits: 1.25, 12.5, 1,250; nothing is minus zero."""
    digits = 2 if value < 10 else 1 if value < 1000 else 0
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")


def duration(seconds: float) -> str:
    """Write a duration: 8 s, 2 min 05 s, 1 h 12 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def listing(names: Sequence[str], most: int = 0) -> str:
    """Write names in a sentence: a, b and c; of more than `most`, how many more there are."""
    if 0 < most < len(names):
        names = [*names[: most - 1], f"{len(names) - most + 1} more"]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]

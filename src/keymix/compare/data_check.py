# SPDX-License-Identifier: Apache-2.0
"""What a comparison says of its data: judged once, before training, and kept in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from keymix.compare.words import of_data
from keymix.data.tasks import SEGMENTATION, task_of

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

NARROW = (
    "Intervals over test {units} are too narrow: images that belong together count as independent."
)
"""What frames of a sequence do to the second question."""
_NAMED = 3  # places of a finding that the record names
_SHOWN = 2  # ... and the terminal
_LEVELS = {"stops": "stops training", "falsifies": "falsifies results", "warning": "warning"}


def judged(data: ImageData) -> dict[str, Any]:
    """Run the cheap part of the data check and return what it found, ready for JSON.

    Args:
        data: The data of the comparison.
    """
    from keymix.data.contents import IN_SEQUENCES
    from keymix.data.glance import glance

    report = glance(data)
    findings = [
        {
            "level": found.level,
            "what": found.what,
            "count": found.count,
            "where": list(found.where[:_NAMED]),
            "remedy": found.remedy,
        }
        for found in report.findings
        if found.level in _LEVELS
    ]
    return {
        "findings": findings,
        "too_narrow": any(found.what == IN_SEQUENCES for found in report.findings),
        "looked_at": report.facts["looked_at"],
        "not_looked_at": report.facts["not_looked_at"],
    }


def is_whole(checked: object) -> bool:
    """Whether a value that was read has the parts and types of what `judged` returned.

    Args:
        checked: The value.
    """

    def texts(value: object) -> bool:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)

    if not isinstance(checked, dict) or not isinstance(checked.get("findings"), list):
        return False
    return (
        type(checked.get("too_narrow")) is bool
        and isinstance(checked.get("looked_at"), dict)
        and texts(checked.get("not_looked_at"))
        and all(
            isinstance(found, dict)
            and found.get("level") in _LEVELS
            and texts([found.get("what"), found.get("remedy")])
            and type(found.get("count")) is int
            and texts(found.get("where"))
            for found in checked["findings"]
        )
    )


def lines(checked: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    """Write what was found for the terminal: the findings, and what was not looked at.

    Args:
        checked: What `judged` returned.
        data: The data's record.
    """
    told = sheet(checked, data)
    assert told is not None
    findings = [
        f"data check, {found['grade']}: {found['what']} ({found['count']:,}): "
        + "; ".join(found["where"][:_SHOWN])
        + ("; …" if found["count"] > _SHOWN else ".")
        + f" {found['remedy']}".rstrip()
        for found in told["findings"]
    ]
    return [*findings, *filter(None, (told["narrow"], told["missed"]))]


def narrow(checked: Mapping[str, Any] | None, data: Mapping[str, Any]) -> str:
    """Say that intervals over test images, or cases, are too narrow; empty if they are not.

    Args:
        checked: What `judged` returned; None if nothing was checked.
        data: The data's record.
    """
    if checked is None or not checked["too_narrow"]:
        return ""
    return NARROW.format(units="cases" if task_of(data) is SEGMENTATION else "images")


def sheet(checked: Mapping[str, Any] | None, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the record keeps for all that show it; None where nothing was checked.

    Args:
        checked: What `judged` returned.
        data: The data's record.

    Returns:
        Beside what `judged` returned: ``headline``, each finding's ``grade`` in words and its
        remedy as a sentence, ``narrow``, and ``missed``: what there was no time for.
    """
    if checked is None:
        return None
    missed = " and ".join(checked["not_looked_at"])
    if missed:
        missed = f"Not looked at, since time was short: {missed}; `keymix data check` looks at all."
    falsified = any(found["level"] == "falsifies" for found in checked["findings"])
    return {
        **checked,
        "headline": "The data falsify results" if falsified else "A warning about the data",
        "findings": [_found(each, data) for each in checked["findings"]],
        "narrow": narrow(checked, data),
        "missed": of_data(missed, data),
    }


def _found(found: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    remedy = str(found["remedy"])
    return {
        **found,
        "grade": _LEVELS[found["level"]],
        "what": of_data(found["what"], data),
        "remedy": of_data(f"{remedy[0].upper()}{remedy[1:]}." if remedy else "", data),
    }

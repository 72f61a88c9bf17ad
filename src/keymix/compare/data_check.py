# SPDX-License-Identifier: Apache-2.0
"""What a comparison says of its data: judged once, before training, and kept in its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from keymix.data.record import DataRecord
from keymix.report.record import Checked, DataCheck, Finding, GradedFinding, Level
from keymix.report.wording import unit_of

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

NARROW = (
    "Intervals over test {units} are too narrow: {inputs} that belong together count as "
    "independent."
)
"""What frames of a sequence do to the second question."""
_NAMED = 3  # places of a finding that the record names
_SHOWN = 2  # ... and the terminal
_LEVELS = {"stops": "stops training", "falsifies": "falsifies results", "warning": "warning"}


def judged(data: ImageData) -> Checked:
    """Run the cheap part of the data check and return what it found.

    Args:
        data: The data of the comparison.
    """
    from keymix.data.contents import IN_SEQUENCES
    from keymix.data.glance import glance

    report = glance(data)
    findings = tuple(
        Finding(
            level=cast(Level, found.level),
            what=found.what,
            count=found.count,
            where=tuple(found.where[:_NAMED]),
            remedy=found.remedy,
        )
        for found in report.findings
        if found.level in _LEVELS
    )
    return Checked(
        findings=findings,
        too_narrow=any(found.what == IN_SEQUENCES for found in report.findings),
        looked_at=report.facts["looked_at"],
        not_looked_at=tuple(report.facts["not_looked_at"]),
    )


def lines(checked: Checked, data: DataRecord) -> list[str]:
    """Write what was found for the terminal: the findings, and what was not looked at.

    Args:
        checked: What `judged` returned.
        data: The data's record.
    """
    told = sheet(checked, data)
    findings = [
        f"data check, {found.grade}: {found.what} ({found.count:,}): "
        + "; ".join(found.where[:_SHOWN])
        + ("; …" if found.count > _SHOWN else ".")
        + f" {found.remedy}".rstrip()
        for found in told.findings
    ]
    return [*findings, *filter(None, (told.narrow, told.missed))]


def narrow(checked: Checked | None, data: DataRecord) -> str:
    """Say that intervals over test images, or cases, are too narrow; empty if they are not.

    Args:
        checked: What `judged` returned; None if nothing was checked.
        data: The data's record.
    """
    if checked is None or not checked.too_narrow:
        return ""
    return NARROW.format(units=f"{unit_of(data)}s", inputs=data.kind.nouns)


def sheet(checked: Checked, data: DataRecord) -> DataCheck:
    """Return what the record keeps for all that show it, in sentences.

    Args:
        checked: What `judged` returned.
        data: The data's record.
    """
    missed = " and ".join(checked.not_looked_at)
    if missed:
        missed = f"Not looked at, since time was short: {missed}; `keymix data check` looks at all."
    falsified = any(found.level == "falsifies" for found in checked.findings)
    return DataCheck(
        findings=tuple(_graded(each) for each in checked.findings),
        too_narrow=checked.too_narrow,
        looked_at=checked.looked_at,
        not_looked_at=checked.not_looked_at,
        headline="The data falsify results" if falsified else "A warning about the data",
        narrow=narrow(checked, data),
        missed=missed,
    )


def _graded(found: Finding) -> GradedFinding:
    remedy = found.remedy
    return GradedFinding(
        level=found.level,
        what=found.what,
        count=found.count,
        where=found.where,
        remedy=f"{remedy[0].upper()}{remedy[1:]}." if remedy else "",
        grade=_LEVELS[found.level],
    )

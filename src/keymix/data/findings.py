# SPDX-License-Identifier: Apache-2.0
"""What a check of a data set found: findings by level, facts, a verdict, an exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STOPS, FALSIFIES, WARNING, NOTE = "stops", "falsifies", "warning", "note"
LEVELS = (STOPS, FALSIFIES, WARNING, NOTE)  # from the worst


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing found, with all places where."""

    level: str  # ``stops`` training, ``falsifies`` results, ``warning``, or ``note``
    what: str  # what was found, in plural words
    where: Sequence[str]
    remedy: str  # what to do about it; empty where the place's own line says it
    details: Sequence[Any] = ()  # the same places as plain data

    @property
    def count(self) -> int:
        """How many places there are."""
        return len(self.where)


@dataclass(kw_only=True)
class Report:
    """All about a data set."""

    spec: str  # the data spec that was checked
    # images, classes, sizes and balance, as plain data
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)  # what was found, worst first

    def of(self, level: str) -> list[Finding]:
        """List the findings of one level."""
        return [finding for finding in self.findings if finding.level == level]

    def add(
        self,
        level: str,
        what: str,
        where: Sequence[str],
        remedy: str,
        details: Sequence[Any] = (),
    ) -> None:
        """Add a finding, if there is any place where; the list stays sorted, worst first."""
        if where:
            made = Finding(level=level, what=what, where=where, remedy=remedy, details=details)
            self.findings.append(made)
            self.findings.sort(key=lambda finding: LEVELS.index(finding.level))

    @property
    def fit(self) -> bool:
        """Whether nothing stops training or falsifies its results."""
        return not self.of(STOPS) and not self.of(FALSIFIES)

    @property
    def verdict(self) -> str:
        """The verdict in one line."""
        told = []
        for level, words in ((STOPS, "would stop training"), (FALSIFIES, "would falsify results")):
            if found := self.of(level):
                told.append(f"{words}: " + ", ".join(f"{f.what} ({f.count:,})" for f in found))
        if told:
            return "; ".join(told)
        warnings = len(self.of(WARNING))
        if not warnings:
            return "fit for training"
        return f"fit for training, with {warnings} warning{'s' if warnings > 1 else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Tell everything as plain data, ready for JSON."""
        return {
            "spec": self.spec,
            "fit": self.fit,
            "verdict": self.verdict,
            **self.facts,
            "findings": [
                {
                    "level": f.level,
                    "what": f.what,
                    "count": f.count,
                    "remedy": f.remedy,
                    "where": list(f.details or f.where),
                }
                for f in self.findings
            ],
        }


# what a source tells as a fault: words for many, and the remedy, where {items} are the inputs
FAULTS: Mapping[str, tuple[str, str]] = {
    "one class": ("sets of one class only", "add a second class: there is nothing to tell apart"),
    "empty class": ("empty classes", "add {items}, or remove the folder"),
    "unknown class": ("classes that train does not have", "add training {items}, or remove them"),
    "bad label": ("bad labels", "correct or remove the rows"),
    "labels without recording": ("labels without recording", "restore the recordings"),
    "recording without labels": ("recordings without labels", "restore the labels"),
    "recordings listed twice": ("recordings listed twice", "remove them from one list"),
    "unreadable file": ("unreadable files", "replace them; download again"),
}

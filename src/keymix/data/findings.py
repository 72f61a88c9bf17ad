# SPDX-License-Identifier: Apache-2.0
"""What a check of a data set found: facts, and findings by level, each with the items it is of.

`KINDS` has the words of every kind, for all data. `Report` has a verdict, and is text and JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keymix.data.kinds import CLASS, IMAGE, InputKind, TargetKind

STOPS, FALSIFIES, WARNING, NOTE = "stops", "falsifies", "warning", "note"
SEVERITY = {
    STOPS: "stops training",
    FALSIFIES: "falsifies results",
    WARNING: "warning",
    NOTE: "note",
}
"""What each level means, from the worst: of a check, and of a comparison that has made it."""
UNEVEN = 10
"""Times as many inputs of one class as of another that are a large imbalance."""
IN_SEQUENCES = "sequences of frames taken for independent images"

KINDS: Mapping[str, tuple[str, str, str]] = {
    "unusable": (
        STOPS,
        "{kind.nouns}, {target.nouns} or classes that cannot be used",
        "correct, replace or remove them; --data.skip_corrupt true leaves broken {kind.nouns} out",
    ),
    "unfit": (STOPS, "sets or splits that cannot be trained on", ""),
    "leak": (
        FALSIFIES,
        "{kind.nouns} in more than one split",
        "keep each in one split: a model is tested on what it learned from",
    ),
    "conflict": (
        FALSIFIES,
        "{kind.nouns} with more than one {target.noun}",
        "find the right {target.noun} and remove the other copies",
    ),
    "groups": (
        FALSIFIES,
        "cases in more than one split",
        "keep a case in one split (data.split_by=case): its slices resemble each other, and a "
        "model is tested on what it learned from",
    ),
    "rows": (
        FALSIFIES,
        "slices without a row for an organ",
        "restore the rows, or add rows without run lengths where the organ is absent: without a "
        "row the slice counts as one without the organ",
    ),
    "sequences": (
        FALSIFIES,
        IN_SEQUENCES,
        "{target.grouping}put each sequence into train, val or test as a whole: neighbours are "
        "nearly the same picture, so that a model is tested on what it learned from. A split of "
        "the data set's own may stay: then intervals over test {kind.nouns} are too narrow",
    ),
    "copies": (
        WARNING,
        "{kind.nouns} repeated with the same {target.noun}",
        "keep one of each, unless they should weigh more",
    ),
    "few": (WARNING, "classes or cases with too few {kind.nouns}", "add {kind.nouns}"),
    "odd": (WARNING, "odd {kind.nouns}", "look at them"),
    "stranger": (
        WARNING,
        "files that are no {kind.nouns} by their name",
        "they are not read: move them, or {kind.stored}",
    ),
    "converted": (
        NOTE,
        "converted {kind.nouns}",
        "they are read upright and as 8-bit colour, or grey where the model takes that; "
        "transparent ones on white",
    ),
}
"""Level, what was found in plural words, and what to do about it, by kind."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing found, with all items that it is of.

    An item is text; a mapping with an ``id``, and a ``reason`` where there is one; or a list of
    such, of samples that are equal.
    """

    level: str  # ``stops`` training, ``falsifies`` results, ``warning``, or ``note``
    what: str  # what was found, in plural words
    remedy: str  # what to do about it; empty where each item says it
    items: list[Any]

    @property
    def count(self) -> int:
        """How many items there are."""
        return len(self.items)

    @property
    def where(self) -> list[str]:
        """The items, a line each."""
        return [_line(item) for item in self.items]


_EQUAL = 3  # equal samples named in a line


def _line(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        shown = [
            f"{one['id']} ({', '.join(str(one[key]) for key in ('split', 'class') if key in one)})"
            for one in item[:_EQUAL]
        ]
        more = len(item) - _EQUAL
        return " = ".join([*shown, f"{more} more"] if more > 0 else shown)
    name, reason = str(item["id"]), str(item.get("reason", ""))
    named = name.rpartition("/")[2] in reason  # what a source says names the culprit
    return reason if named else f"{name}: {reason}" if reason else name


@dataclass(kw_only=True)
class Report:
    """All about a data set."""

    spec: str  # the data spec that was checked
    kind: InputKind = IMAGE
    target: TargetKind = CLASS
    # images, classes, sizes and balance, as plain data
    facts: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)  # the facts as text, by name
    findings: list[Finding] = field(default_factory=list)  # what was found, worst first

    def of(self, level: str) -> list[Finding]:
        """List the findings of one level."""
        return [finding for finding in self.findings if finding.level == level]

    def state(self, name: str, value: object, text: str) -> None:
        """Add a fact, as plain data and as text."""
        self.facts[name] = value
        self.lines.append((name, text))

    def add(self, kind: str, items: Sequence[Any], *, level: str = "") -> None:
        """Add items to the finding of a kind and level; the list stays sorted, worst first."""
        own, *texts = KINDS[kind]
        level = level or own
        what, remedy = (text.format(kind=self.kind, target=self.target) for text in texts)
        for finding in self.findings:
            if (finding.what, finding.level) == (what, level):
                finding.items.extend(items)
                return
        if items:
            found = Finding(level=level, what=what, remedy=remedy, items=[*items])
            self.findings.append(found)
            self.findings.sort(key=lambda finding: [*SEVERITY].index(finding.level))

    @property
    def fit(self) -> bool:
        """Whether nothing stops training or falsifies its results."""
        return not self.of(STOPS) and not self.of(FALSIFIES)

    @property
    def verdict(self) -> str:
        """The verdict in one line."""
        lines = []
        for level in (STOPS, FALSIFIES):
            if found := self.of(level):
                listed = ", ".join(f"{f.what} ({f.count:,})" for f in found)
                lines.append(f"{SEVERITY[level]}: {listed}")
        if lines:
            return "; ".join(lines)
        warnings = len(self.of(WARNING))
        if not warnings:
            return "fit for training"
        return f"fit for training, with {warnings} warning{'s' if warnings > 1 else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, ready for JSON."""
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
                    "where": list(f.items),
                }
                for f in self.findings
            ],
        }

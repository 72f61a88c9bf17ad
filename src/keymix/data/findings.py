# SPDX-License-Identifier: Apache-2.0
"""What a check of a data set found: facts, and findings by level, each with the items it is of.

`KINDS` has the words of every kind, for all data. `Report` has a verdict, and is text and JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from keymix.data.kinds import CLASS, IMAGE, InputKind, TargetKind

STOPS, FALSIFIES, WARNING, NOTE = "stops", "falsifies", "warning", "note"
SEVERITY = {
    STOPS: "stops training",
    FALSIFIES: "falsifies results",
    WARNING: "warning",
    NOTE: "note",
}
"""What each level means, from the worst: of a check, and of a comparison that has made it."""
IN_SEQUENCES = "sequences of frames taken for independent images"

KINDS: Mapping[str, tuple[str, str, str]] = {
    # what a source reports, and what is wrong with single samples
    "unreadable": (
        STOPS,
        "broken {kind.nouns}",
        "replace or remove them, or train with --data.skip_corrupt true",
    ),
    "missing": (
        STOPS,
        "{kind.nouns} or {target.nouns} that are missing",
        "restore or remove the other",
    ),
    "bad label": (STOPS, "bad labels", "correct or remove the rows"),
    "unknown class": (
        STOPS,
        "classes that train does not have",
        "add training {kind.nouns}, or remove them",
    ),
    "empty class": (STOPS, "empty classes", "add {kind.nouns}, or remove the folder"),
    "one class": (
        STOPS,
        "sets of one class only",
        "add a second class: there is nothing to distinguish",
    ),
    "bad row": (STOPS, "rows or entries that cannot be used", "correct or remove them"),
    "wrong size": (
        STOPS,
        "{kind.nouns} or {target.nouns} of another size than stated",
        "replace them",
    ),
    "bad value": (STOPS, "{target.nouns} with values that are no class", "correct them"),
    "bad annotation": (
        STOPS,
        "unfit annotations",
        "correct or remove them, or train with --data.skip_corrupt true",
    ),
    # what the check finds of a set
    "unopened": (STOPS, "sets that cannot be opened", ""),
    "unsplit": (STOPS, "splits left empty", ""),
    "nothing": (STOPS, "splits with nothing to learn or to measure", ""),
    "leak": (
        FALSIFIES,
        "{kind.nouns} in more than one split",
        "keep each in one split: a model is tested on what it learned from",
    ),
    "conflict": (
        FALSIFIES,
        "{kind.nouns} with more than one {target.single}",
        "find the right {target.noun} and remove the other copies",
    ),
    "copies": (
        WARNING,
        "{kind.nouns} repeated {target.repeated}",
        "keep one of each, unless they should weigh more",
    ),
    "groups": (
        FALSIFIES,
        "cases in more than one split",
        "keep a case in one split (data.split_by=case): its slices resemble each other, and a "
        "model is tested on what it learned from",
    ),
    "no row": (
        FALSIFIES,
        "slices without a row for an organ",
        "restore the rows, or add rows without run lengths where the organ is absent: without a "
        "row the slice counts as one without the organ",
    ),
    "unsure row": (
        WARNING,
        "slices without a row for an organ",
        "restore the rows, or add rows without run lengths where the organ is absent",
    ),
    "sequences": (
        FALSIFIES,
        IN_SEQUENCES,
        "{target.grouping}put each sequence into train, val or test as a whole: neighbours are "
        "nearly the same picture, so that a model is tested on what it learned from",
    ),
    "own sequences": (
        WARNING,
        IN_SEQUENCES,
        "the split is the data set's own and stays; intervals over test images are too narrow",
    ),
    "lone group": (
        WARNING,
        "splits of a single case",
        "nothing shows how far scores vary from case to case: add cases, or take a larger share",
    ),
    "train lacks": (
        WARNING,
        "classes that train lacks",
        "no model can learn them: add {kind.nouns}, or take their names out",
    ),
    "val lacks": (
        WARNING,
        "classes that val lacks",
        "what a model makes of them is not validated: add {kind.nouns}",
    ),
    "test lacks": (
        WARNING,
        "classes that test lacks",
        "what a model makes of them cannot be measured: add {kind.nouns}",
    ),
    "single": (
        WARNING,
        "classes that train has once",
        "they are learned from, but never validated on: add {kind.nouns}",
    ),
    "uneven": (
        WARNING,
        "large imbalances",
        "read the accuracy of each class, not the mean alone",
    ),
    "ignored": (
        WARNING,
        "masks that are ignored altogether",
        "nothing is learned from them: remove them, or draw them",
    ),
    "overlap": (
        WARNING,
        "masks in which classes overlap",
        "exclusive masks keep one class per pixel; task.options.masks=multilabel keeps all",
    ),
    "empty frames": (
        WARNING,
        "recordings with empty frames",
        "a frame without events shows a model nothing: look at them, or take fewer data.time_steps",
    ),
    "blank": (WARNING, "{kind.nouns} of one colour", "look at them: they show nothing"),
    "tiny": (WARNING, "very small {kind.nouns}", "look at them: enlarged, they show little"),
    "animated": (WARNING, "animated {kind.nouns}", "the first frame is used"),
    "dark": (WARNING, "sets of 16-bit images whose values end early", ""),
    "stranger": (
        WARNING,
        "files that are no {kind.nouns} by their name",
        "they are not read: move them, or {kind.stored}",
    ),
    "turned": (NOTE, "turned {kind.nouns}", "they are shown upright, as EXIF says"),
    "converted": (
        NOTE,
        "{kind.nouns} that are no plain 8-bit colour",
        "each is read as 8-bit colour, or grey where the model takes that; transparent ones on "
        "white",
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
    items: Sequence[Any]

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
        """Add a finding of a kind, if there is any item; the list stays sorted, worst first."""
        if not items:
            return
        own, what, remedy = KINDS.get(kind, (STOPS, kind, ""))
        what, remedy = (text.format(kind=self.kind, target=self.target) for text in (what, remedy))
        self.findings.append(Finding(level=level or own, what=what, remedy=remedy, items=items))
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

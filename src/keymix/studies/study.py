# SPDX-License-Identifier: Apache-2.0
"""What an analysis is: its options, its run, its record, its tables and its page. No torch.

``keymix analyze NAME`` parses the options, runs the study, and then prints or writes the record
that it leaves. A study is a folder of `keymix.studies` with a ``study.py`` that holds ``STUDY``.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from keymix import studies
from keymix.analysis.answers import Arrays
from keymix.analysis.study_record import StudyRecord
from keymix.errors import missing, unknown
from keymix.report.tables import Table

F = TypeVar("F")
R = TypeVar("R", bound=StudyRecord)

Content = str | bytes | Arrays
"""Of a file: text, bytes, or arrays by name."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a study asks of the command that runs it."""

    frame: Callable[[], StudyRecord]  # says by which command, when and on what the record is made
    note: Callable[[str], None]  # writes a line for the person
    # shows how many of all inputs were read, by label, number and noun
    reading: Callable[[str, int, str], AbstractContextManager[Callable[[int], None] | None]]
    # shows what is being done and which share of all is done
    working: Callable[[], AbstractContextManager[Callable[[str, float], None]]]
    # files that are made during the run, by name; they are written with the others
    made: dict[str, Content] = field(default_factory=dict)


class Study(ABC, Generic[F, R]):
    """One analysis: what its run finds, F, and the record that it leaves, R."""

    summary: str  # what it answers, in a line
    description: str  # what ``--help`` says of it
    examples: str  # command lines, and what else is shown below the options
    writes: str  # what ``--out`` writes, in words
    also_written: str  # what is written next to the page, in words
    needs_folder: bool = False  # whether ``--out`` must be given
    markdown: bool = False  # whether ``--markdown`` prints its tables

    @property
    def name(self) -> str:
        """Its name, that of its folder."""
        return type(self).__module__.split(".")[-2]

    @property
    def record_file(self) -> str:
        """The file of its record."""
        return f"{self.name}.json"

    @property
    def page_file(self) -> str:
        """The file of its page."""
        return f"{self.name}.html"

    @abstractmethod
    def add_options(self, add: Callable[..., Any]) -> None:
        """Add its options with a parser's ``add_argument``."""

    def check(self, given: argparse.Namespace) -> None:
        """Read and refuse options before any work."""

    @abstractmethod
    def run(self, given: argparse.Namespace, session: Session) -> Iterator[F]:
        """Do the work; yield what is known so far as often as there is something to keep."""

    @abstractmethod
    def record(self, found: F, session: Session) -> R:
        """Make the record of what was found."""

    @abstractmethod
    def answer(self, record: R) -> str:
        """Say what was found in one plain sentence without a full stop, of any record.

        It is the page's heading, the last line of the command and ``answer`` in the JSON.
        """

    def stopped(self, known: F | None, out: str | None) -> str:
        """Say what is kept when a signal ends the work."""
        del known
        return "nothing was written" if out is None else f"{out!r} is as it was"

    def words(self, record: R) -> Sequence[tuple[str, Sequence[str]]]:
        """Say what was found: sentences by label."""
        del record
        return ()

    def notes(self, record: R) -> Sequence[str]:
        """Say for the person what a pipe, which gets tables, leaves out."""
        return [f"{label}: {line}" for label, lines in self.words(record) for line in lines]

    def closing(self, record: R) -> str:
        """Return the text below the tables at a terminal."""
        del record
        return ""

    def tables(self, record: R) -> Sequence[Table]:
        """Make its tables; people see those that are shown."""
        del record
        return ()

    def piped(self, record: R) -> Sequence[Table]:
        """Return the tables that a pipe gets; the key of one, if any, leads its lines."""
        return [table for table in self.tables(record) if table.shown]

    @abstractmethod
    def files(self, record: R) -> Mapping[str, Content]:
        """Make what ``--out`` writes in addition to the record and `Session.made`."""

    def earlier_files(self, folder: Path) -> set[str]:
        """Name the files of an earlier analysis, which go unless they are written again."""
        del folder
        return set()

    def broken(self, record: R) -> Sequence[str]:
        """Say which inputs could not be read."""
        del record
        return ()


@cache
def list_studies() -> tuple[str, ...]:
    """Return the names of all studies, the folders of `keymix.studies`."""
    return tuple(sorted(each.name for each in pkgutil.iter_modules(studies.__path__) if each.ispkg))


def get_study(name: str) -> Study[Any, Any]:
    """Return a study by name."""
    if not name:
        raise missing("analysis", list_studies())
    if name not in list_studies():
        raise unknown("analysis", name, list_studies())
    found: Study[Any, Any] = importlib.import_module(f"keymix.studies.{name}.study").STUDY
    return found


def saved_tables(name: str, tables: Sequence[Table]) -> dict[str, str]:
    """Return the CSV file of every table that is saved, by its name."""
    return {f"{name}-{table.key}.csv": table.csv() for table in tables if table.saved}


def file_words(labels: Iterable[str]) -> dict[str, str]:
    """Return for each label a word that is fit for a file's name, no two alike."""
    words: dict[str, str] = {}
    for label in labels:
        word = plain = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "model"
        number = 1
        while word in words.values():
            number += 1
            word = f"{plain}-{number}"
        words[label] = word
    return words


def found_files(folder: Path, *patterns: str) -> set[str]:
    """Name the files of a folder that match any of some patterns."""
    return {path.name for pattern in patterns for path in folder.glob(pattern)}


def split_list(text: str | None) -> list[str] | None:
    """Read words with commas between them; None if none were given."""
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def listed(parts: Sequence[str], most: int = 4) -> str:
    """Write parts as a list within a sentence; of more than `most`, how many more there are."""
    shown = (
        [*parts] if len(parts) <= most else [*parts[: most - 1], f"{len(parts) - most + 1} more"]
    )
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def untrained(what: str, labels: Sequence[str]) -> str:
    """Say that what was read of models with random weights means nothing."""
    return f"Random weights: {what} of {listed(labels)} say nothing about a trained model"


def machine_lines(frame: StudyRecord, device: str) -> dict[str, str]:
    """Return the environment of what ran on a device; a GPU that was idle is left out."""
    lines = dict(frame.environment)
    if device == "cpu":
        lines.pop("device", None)
    return lines

# SPDX-License-Identifier: Apache-2.0
"""What an analysis is: options, a run that yields results, and what all results have. No torch.

``keymix analyze NAME`` parses the options, runs the study, and prints or writes the last result. A
study is a folder of `keymix.studies` with a ``study.py`` that holds ``STUDY``, or registered.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

from keymix import studies
from keymix.errors import UserError, missing, unknown
from keymix.report.result import Result

F = TypeVar("F", bound=Result)


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a study asks of the command that runs it."""

    note: Callable[[str], None]  # writes a line for the person
    # shows what is being done and which share of all is done
    working: Callable[[], AbstractContextManager[Callable[[str, float], None]]]


class Study(ABC, Generic[F]):
    """One analysis, which yields results of a kind, F."""

    summary: str  # what it answers, in a line
    description: str  # what ``--help`` says of it
    examples: str  # command lines, and what else is shown below the options

    @property
    def name(self) -> str:
        """Its name, that of its folder."""
        return type(self).__module__.split(".")[-2]

    @abstractmethod
    def add_options(self, add: Callable[..., Any]) -> None:
        """Add its options with a parser's ``add_argument``."""

    @abstractmethod
    def run(self, given: argparse.Namespace, session: Session) -> Iterator[F]:
        """Do the work; yield what is known so far as often as there is something to keep."""


_OWN: dict[str, Study[Any]] = {}


@cache
def built_in_studies() -> tuple[str, ...]:
    """Return the names of keymix's own studies, the folders of `keymix.studies`."""
    return tuple(sorted(each.name for each in pkgutil.iter_modules(studies.__path__) if each.ispkg))


def list_studies() -> tuple[str, ...]:
    """Return the names of all studies, built-in and registered."""
    return (*built_in_studies(), *_OWN)


def register_study(study: Study[Any]) -> Study[Any]:
    """Add an analysis of one's own to ``keymix analyze``; the same name again replaces it.

    Args:
        study: It, with a ``name``.

    Raises:
        UserError: If a built-in analysis has the name.
    """
    if study.name in built_in_studies():
        raise UserError(f"analysis {study.name!r} is keymix's own: choose another name")
    _OWN[study.name] = study
    return study


def get_study(name: str) -> Study[Any]:
    """Return a study by name."""
    if not name:
        raise missing("analysis", list_studies())
    if name in _OWN:
        return _OWN[name]
    if name not in built_in_studies():
        raise unknown("analysis", name, list_studies())
    found: Study[Any] = importlib.import_module(f"keymix.studies.{name}.study").STUDY
    return found


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


def words(text: str) -> list[str]:
    """Read words with commas between them."""
    return [part.strip() for part in text.split(",") if part.strip()]


def whole_numbers(text: str) -> tuple[int, ...]:
    """Read numbers with commas, ``10,50``, and ranges of them with a step, ``10-200:10``."""
    found: list[int] = []
    for part in words(text):
        span = re.fullmatch(r"(\d{1,9})(?:-(\d{1,4})(?::([1-9]\d{0,8}))?)?", part)
        if span is None:
            found = []
            break
        first, last, step = span.groups()
        found += range(int(first), int(last or first) + 1, int(step or 1))
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give numbers from 1 with commas, such as 10,50,100, or a range with its "
            "step, such as 10-200:10"
        )
    return tuple(found)


def machine_of(lines: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the environment of what ran on a device; a GPU that was idle is left out."""
    return {name: line for name, line in lines.items() if name != "device" or device != "cpu"}

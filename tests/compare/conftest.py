# SPDX-License-Identifier: Apache-2.0
"""Comparisons here measure cost quickly, on one thread, and try nothing out before a run."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from few_digits import FINISHED, small
from few_masks import few, made_masks

from costs import cheap_costs, no_trials
from keymix.compare.events import Event


@pytest.fixture
def drawn() -> None:
    """Let a test have its charts."""


@pytest.fixture(autouse=True)
def _undrawn_charts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave charts empty: half of a small comparison is their drawing, which tests/report sees."""
    if "drawn" not in request.fixturenames:
        empty = "<svg></svg>"
        monkeypatch.setattr("keymix.report.svg._drawn", lambda draw, size, attributes: empty)


@pytest.fixture(scope="module", autouse=True)
def _cheap_costs() -> Iterator[None]:
    """Measure cost quickly, in comparisons of a whole file, too."""
    with cheap_costs():
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_trials() -> Iterator[None]:
    """Estimate nothing before the first run. A file about estimates has a fixture of this name."""
    with no_trials():
        yield


@pytest.fixture(scope="session")
def finished(made_once: Callable[..., Path]) -> Path:
    """Folder of a finished comparison: softmax, static keys, identity; two seeds, two epochs.

    A test that changes it works on a copy.
    """

    def write(folder: Path) -> None:
        with cheap_costs(), no_trials():
            small(folder, **FINISHED)

    return made_once("comparison", write)


@pytest.fixture(scope="session")
def finished_masks(made_once: Callable[..., Path]) -> Path:
    """A finished comparison on masks: ``data``, ``out`` and ``events``, its pickled progress.

    Softmax and key-value attention; two seeds, two epochs. A test that changes it works on a copy.
    """

    def write(folder: Path) -> None:
        events: list[Event] = []
        with cheap_costs(), no_trials():
            data = made_masks(folder / "data")
            few(data, folder / "out", controls=False, progress=events.append)
        (folder / "events").write_bytes(pickle.dumps(events))

    return made_once("comparison_of_masks", write)

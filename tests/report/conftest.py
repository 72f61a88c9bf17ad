# SPDX-License-Identifier: Apache-2.0
"""One browser for all tests of pages, and the pages it looks at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import started
from synthetic import crowded_record, lose, make_record, render, with_answers

from keymix.report import charts


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    with started() as browser:
        yield browser


@pytest.fixture
def drawn() -> None:
    """Let a test of a file without charts have them."""


@pytest.fixture
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave charts empty, which take most of the time of a page, where a test reads its words."""
    if "drawn" not in request.fixturenames:
        empty = "<svg></svg>"
        monkeypatch.setattr("keymix.report.svg._drawn", lambda draw, size, attributes: empty)
    yield
    charts._key.cache_clear()  # of legends that were left empty


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write an ordinary page, one whose runs did not all finish, and a crowded one."""
    folder = tmp_path_factory.mktemp("pages")
    holes = make_record()
    lose(holes, "re_attention", 2, "failed", "RuntimeError: out of luck")
    for seed in range(3):
        lose(holes, "key_value", seed, "missing", "it was not started")
    plain, crowded = with_answers(make_record()), with_answers(crowded_record())
    records = {"plain": plain, "holes": holes, "crowded": crowded}
    written = {}
    for name, record in records.items():
        written[name] = folder / f"{name}.html"
        written[name].write_text(render(record), encoding="utf-8")
    return written

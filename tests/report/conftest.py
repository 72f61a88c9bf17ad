# SPDX-License-Identifier: Apache-2.0
"""One browser for all tests of pages, and the pages it looks at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import started
from synthetic import crowded_record, lose, make_record

from keymix.report.html import render


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    with started() as browser:
        yield browser


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write an ordinary page, one whose runs did not all finish, and a crowded one."""
    folder = tmp_path_factory.mktemp("pages")
    holes = make_record()
    lose(holes, "re_attention", 2, "failed", "RuntimeError: out of luck")
    for seed in range(3):
        lose(holes, "key_value", seed, "missing", "it was not started")
    records = {"plain": make_record(), "holes": holes, "crowded": crowded_record()}
    written = {}
    for name, record in records.items():
        written[name] = folder / f"{name}.html"
        written[name].write_text(render(record), encoding="utf-8")
    return written

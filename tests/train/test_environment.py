# SPDX-License-Identifier: Apache-2.0
"""A resumed run tells of all environments that it was trained in, and keeps its threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keymix.analysis.threads import use_threads
from keymix.train import engine, files
from keymix.train.engine import train
from keymix.train.environment import lines
from keymix.train.folder import read_environment
from keymix.train.recipe import Recipe


class _Stop(Exception):
    pass


def _stop(line: Mapping[str, Any]) -> None:
    raise _Stop


def test_a_resumed_run_records_where_its_earlier_parts_were_trained(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    here = engine.environment()
    commits = iter(["a" * 40, "a" * 40, "b" * 40])
    monkeypatch.setattr(engine, "environment", lambda: replace(here, commit=next(commits)))
    for _ in range(2):  # resumed with the commit it began with, and then with another
        with pytest.raises(_Stop):
            train(tiny, folder, progress=_stop)
    assert "earlier" not in files.read_json(folder / files.ENVIRONMENT)
    train(tiny, folder)
    record = files.read_json(folder / files.ENVIRONMENT)
    assert record["commit"] == "b" * 40
    assert [before["commit"] for before in record["earlier"]] == ["a" * 40]
    assert lines(read_environment(folder))["resumed"] == (
        "earlier parts of the run had other commit"
    )


def test_a_run_keeps_the_threads_that_it_began_with(tiny: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    used = []
    with use_threads(1):
        with pytest.raises(_Stop):
            train(tiny, folder, progress=_stop, threads=2)
        train(tiny, folder, progress=lambda line: used.append(torch.get_num_threads()))
        assert used == [2, 2]
        assert torch.get_num_threads() == 1
        assert read_environment(folder).threads == 2
        train(tiny, folder, overwrite=True)
        assert read_environment(folder).threads == 1

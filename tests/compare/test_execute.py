# SPDX-License-Identifier: Apache-2.0
"""Runs of a stored plan in this process: their events, their failures, and epochs as they end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from keymix.compare import folder, worker
from keymix.compare.events import Event
from keymix.compare.execute import train_runs
from keymix.compare.runs import ERROR, Finished, OpenRun, log_of, read_error, read_runs
from keymix.data import load
from keymix.errors import WriteError
from keymix.train.files import METRICS, SUMMARY


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A comparison of softmax, static keys and identity, two seeds, of which no run is done."""
    there = Path(shutil.copytree(finished, tmp_path / "out"))
    shutil.rmtree(there / "runs")
    return there


def trained(out: Path) -> list[Event]:
    events: list[Event] = []
    train_runs(folder.read(out).plan, load("digits", limit=100), watch=events.append)
    return events


def broken(monkeypatch: pytest.MonkeyPatch, slug: str, error: Exception) -> None:
    """Let runs of a mixer raise."""
    really = worker.train

    def train(recipe: Any, place: Path, **more: Any) -> Any:
        if place.parent.name == slug:
            raise error
        return really(recipe, place, **more)

    monkeypatch.setattr(worker, "train", train)


def test_a_run_that_fails_leaves_its_reason_until_it_is_tried_again(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = out / "runs/static_key/seed1"
    with monkeypatch.context() as patch:
        broken(patch, "static_key", KeyError("a bug\nof mine"))
        events = trained(out)
    failed = [event for event in events if event.kind == "failed"]
    assert [(event.mixer, event.seed) for event in failed] == [("static_key", 0), ("static_key", 1)]
    assert failed[0].text == read_error(place) == r"KeyError: 'a bug\nof mine'"
    assert "Traceback" in log_of(place).read_text()
    runs = read_runs(folder.read(out).plan, images=folder.read(out).data)
    assert [type(each) for each in runs] == [Finished] * 2 + [OpenRun] * 2 + [Finished] * 2
    assert {each.reason for each in runs if isinstance(each, OpenRun)} == {read_error(place)}
    again = trained(out)
    assert [event.mixer for event in again if event.kind == "done"] == ["static_key"] * 2
    assert not (place / ERROR).exists()
    assert (place / SUMMARY).exists()


def test_events_come_one_seed_after_the_other_with_the_score_that_decides(out: Path) -> None:
    events = trained(out)
    assert (events[0].kind, events[0].done, events[0].total) == ("plan", 0, 6)
    order = [(e.mixer, e.seed, e.kind, e.epoch) for e in events[1:]]
    assert order == [
        (mixer, seed, kind, epoch)
        for seed in (0, 1)
        for mixer in ("softmax", "static_key", "identity")
        for kind, epoch in (("start", 0), ("epoch", 1), ("epoch", 2), ("done", 0))
    ]
    epoch = next(event for event in events if event.kind == "epoch")
    lines = (out / "runs/softmax/seed0" / METRICS).read_text().splitlines()
    assert (epoch.text, epoch.value) == ("accuracy", json.loads(lines[0])["val_top1"])
    (only,) = trained(out)
    assert (only.kind, only.done) == ("plan", 6)


def test_a_full_disk_ends_the_comparison(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "softmax", WriteError("no space"))
    with pytest.raises(WriteError, match="no space"):
        trained(out)
    assert not (out / "runs/softmax/seed0" / ERROR).exists()
    assert not (out / "runs/static_key").exists()

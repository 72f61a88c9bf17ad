# SPDX-License-Identifier: Apache-2.0
"""A comparison that is killed while it runs, workers and all, ends as one that was not."""

from __future__ import annotations

import csv
import os
import random
import time
from pathlib import Path

import pytest

from commands import Command
from keymix.cli import main
from keymix.report.frames import MEASURED


@pytest.fixture(scope="module", autouse=True)
def _no_trials() -> None:
    """Here there are trials, as a user has them."""


RUNS, EPOCHS, KILLS = 4, 48, 2  # so many epochs that a kill never comes after the end
WORDS = (
    "--data digits --limit 200 --mixers mhsa,ska --no-controls --no-reference "
    f"--seeds 2 --epochs {EPOCHS}"
)


def words(out: Path, processes: int) -> list[str]:
    return ["compare", *WORDS.split(), "--processes", str(processes), "--out", str(out)]


def epochs_done(out: Path) -> int:
    files = out.glob("runs/*/seed*/metrics.jsonl")
    return sum(path.read_bytes().count(b"\n") for path in files)


def kill_after(out: Path, epochs: int, delay: float) -> None:
    """Kill a comparison and all its workers at once, some time after so many epochs are done."""
    command = Command(*words(out, 2), folder=out.with_suffix(".said"))
    try:
        command.until(lambda: epochs_done(out) >= epochs)
        time.sleep(delay)
        assert command.alive, "it ended by itself before it was killed"
    finally:
        command.kill()


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "results.csv").open(encoding="utf-8", newline="") as stream:
        found = list(csv.DictReader(stream))
    assert set(MEASURED) < set(found[0])
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in found]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="process groups")
@pytest.mark.timeout(1500)
def test_killed_twice_it_ends_with_the_same_results(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})  # a thread, as each worker has
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(words(whole, 1)) == 0
    moments = random.Random(time.time_ns())
    share = RUNS * EPOCHS // (KILLS + 3)  # most is left at the last: a busy machine looks late
    kills = []
    for kill in range(KILLS):
        epochs = kill * share + moments.randint(1, share)
        delay = moments.uniform(0.0, 0.2)
        kills.append((epochs, round(delay, 3)))
        kill_after(killed, epochs, delay)
        assert not (killed / "results.csv").exists()
        assert not (killed / "report.html").exists()
    assert main(words(killed, 1)) == 0
    assert rows(killed) == rows(whole), f"killed after (epochs, seconds) {kills}"
    assert len(rows(whole)) == RUNS * 2 * 2 * 4

# SPDX-License-Identifier: Apache-2.0
"""A comparison that is killed while it runs, workers and all, ends as one that was not."""

from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keymix.compare.folder import MEASURED_COLUMNS

RUNS, EPOCHS, KILLS = 4, 8, 2
WORDS = f"--data digits --limit 200 --mixers mhsa,ska --no-controls --seeds 2 --epochs {EPOCHS}"


def start(out: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "keymix", "compare", *WORDS.split(), "--processes", "2"]
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [*words, "--out", str(out)], stdout=log, stderr=log, start_new_session=True
        )


def epochs_done(out: Path) -> int:
    files = out.glob("runs/*/seed*/metrics.jsonl")
    return sum(path.read_bytes().count(b"\n") for path in files)


def finish(out: Path) -> None:
    code = start(out).wait(timeout=700)
    assert code == 0, out.with_suffix(".log").read_text(encoding="utf-8")


def kill_after(out: Path, epochs: int, delay: float) -> None:
    """Kill a comparison and all its workers at once, some time after so many epochs are done."""
    process = start(out)
    deadline = time.monotonic() + 300
    while epochs_done(out) < epochs and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended by itself before it was killed"


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "results.csv").open(encoding="utf-8", newline="") as stream:
        found = list(csv.DictReader(stream))
    assert set(MEASURED_COLUMNS) < set(found[0])
    return [{k: v for k, v in row.items() if k not in MEASURED_COLUMNS} for row in found]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="process groups")
@pytest.mark.timeout(1500)
def test_killed_twice_it_ends_with_the_same_results(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(whole)
    moments = random.Random(time.time_ns())
    share = RUNS * EPOCHS // (KILLS + 1)
    told = []
    for kill in range(KILLS):
        epochs = kill * share + moments.randint(1, share)
        delay = moments.uniform(0.0, 0.2)
        told.append((epochs, round(delay, 3)))
        kill_after(killed, epochs, delay)
        assert not (killed / "results.csv").exists()
        assert not (killed / "report.html").exists()
    finish(killed)
    assert rows(killed) == rows(whole), f"killed after (epochs, seconds) {told}"
    assert len(rows(whole)) == RUNS * 2 * 2 * 3

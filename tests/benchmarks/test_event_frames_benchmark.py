# SPDX-License-Identifier: Apache-2.0
"""The benchmark of frames runs, and its later starts read no recording."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "event_frames.py"


def test_the_benchmark_prints_each_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keymix.data.events import frame_cache

    made: list[object] = []
    counts = frame_cache._counts
    monkeypatch.setattr(frame_cache, "_counts", lambda *some: made.append(some) or counts(*some))
    monkeypatch.delenv("KEYMIX_CACHE", raising=False)
    bench = runpy.run_path(str(SCRIPT))
    words = ["--per-class", "10", "--events", "200", "--time-steps", "2"]
    assert bench["main"]([*words, "--folder", str(tmp_path / "set")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("100 recordings of 200 events")
    assert re.findall(r"^(first|second|third) start: [\d.]+ s$", text, re.M) == [
        "first",
        "second",
        "third",
    ]
    assert "an epoch of 81 recordings in batches of 16" in text
    assert len(made) == 100

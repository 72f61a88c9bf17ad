# SPDX-License-Identifier: Apache-2.0
"""The benchmark of QKFormer's training step takes steps of all three and compares them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from keymix.layers.spiking_block import why_plain

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "qkformer_step.py"


@pytest.mark.slow
def test_the_benchmark_prints_ratios_to_spikingjelly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("spikingjelly", reason="SpikingJelly is not installed")
    bench = runpy.run_path(str(SCRIPT))
    ways: list[str | None] = []
    from keymix.layers import spiking_block

    monkeypatch.setattr(
        spiking_block, "why_plain", lambda *parts: ways.append(why_plain(*parts)) or ways[-1]
    )
    peaks = {"SpikingJelly": 200.0, "keymix": 50.0, "keymix, one by one": 100.0}
    bench["main"].__globals__["peak"] = lambda name, setting: peaks[name]  # no fresh processes
    assert bench["main"](["--batch", "2", "--side", "32", "--rounds", "1", "--profile"]) == 0
    text = capsys.readouterr().out
    assert "batch 2, 32 pixels, 1 rounds" in text
    rows = {line[:20].strip(): line[20:].split() for line in text.splitlines() if "[" in line}
    rows.pop("step of")
    assert list(rows) == list(peaks)
    assert rows["SpikingJelly"][3] == "1.00"
    assert [row[4:] for row in rows.values()] == [["200", "1.00"], ["50", "0.25"], ["100", "0.50"]]
    assert {None, "plain_steps() asks for it"} == set(ways)
    profiled = [line.split() for line in text.splitlines() if "profiled step" in line]
    assert len(profiled) == 2
    for *_, part, _, total, _, _, _, _, _, _, _ in profiled:
        assert 0 < int(part) < int(total)


def test_a_fresh_process_reports_its_peak(capsys: pytest.CaptureFixture[str]) -> None:
    bench = runpy.run_path(str(SCRIPT))
    assert bench["main"](["--batch", "2", "--side", "32", "--peak-of", "keymix"]) == 0
    assert float(capsys.readouterr().out) >= 0

# SPDX-License-Identifier: Apache-2.0
"""The data path's benchmark runs, and next to a slow data path it would say so."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "data_path.py"


@pytest.mark.slow
def test_the_benchmark_prints_shares_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    bench = runpy.run_path(str(SCRIPT))
    words = "--model vit_micro_p4_32 --batch-size 8 --steps 2 --repeats 2 --workers 1 --device cpu"
    assert bench["main"](words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "vit_micro_p4_32, digits, 32x32, batch 8, 2 epochs of 2 steps each, in turns"
    rows = {line[:38].strip(): line[38:].split() for line in lines[2:]}
    names = ("keymix", "torchvision, 0 workers", "torchvision, 1 worker")
    for name in names:
        shares = [float(cell.rstrip("%")) for cell in rows[f"{name}: waiting"]]
        assert all(0 < share < 100 for share in shares)
        assert all(float(cell) > 0 for cell in rows[f"{name}: step, ms"])
    assert set(rows) >= {f"step, {name} / keymix" for name in names[1:]}
    ours, theirs = (float(rows[f"{n}, ms per image"][0]) for n in ("keymix", "torchvision"))
    assert float(rows["torchvision / keymix"][0]) > 1
    assert theirs > ours


def test_waiting_is_what_is_waited() -> None:
    bench = runpy.run_path(str(SCRIPT))
    now = [0.0]

    class Slow(bench["Trainer"]):  # type: ignore[misc]
        def __init__(self) -> None:
            self.device, self.epoch = torch.device("cpu"), self.served

        def served(self, number: int) -> Any:
            for _ in range(3):
                now[0] += 3.0
                yield torch.zeros(1), torch.zeros(1)

        def _step(self, images: torch.Tensor, targets: torch.Tensor) -> None:
            now[0] += 1.0

    bench["Trainer"].run.__globals__["time"] = SimpleNamespace(perf_counter=lambda: now[0])
    assert Slow().run(0, 3) == (9.0, 12.0)

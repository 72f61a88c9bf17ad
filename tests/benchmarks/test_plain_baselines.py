# SPDX-License-Identifier: Apache-2.0
"""The benchmark of models without attention learns on the images of a comparison."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

import keymix

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plain_baselines.py"


@pytest.mark.slow
def test_both_learn_the_digits(capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(SCRIPT))
    words = ["--data", "digits", "--limit", "500", "--epochs", "4", "--seeds", "1"]
    assert script["main"](words) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "450 training images, 449 test images"
    scores = [float(re.findall(r"([\d.]+)%", line)[0]) for line in rest]
    assert len(scores) == 2
    assert all(20 < score < 100 for score in scores)


def test_the_network_costs_what_its_head_says() -> None:
    network = runpy.run_path(str(SCRIPT))["network"]
    with torch.device("meta"):
        cost = keymix.count(network(3, 10), (3, 32, 32))
    assert round(cost.macs / 1e6, 1) == 39.5

# SPDX-License-Identifier: Apache-2.0
"""Benchmarks refuse a device that cannot be used in one line, before they measure."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("script", ["neurons.py", "qkformer_step.py", "data_path.py"])
@pytest.mark.parametrize("device", ["teapot", "cuda"])
def test_unusable_device_is_one_line(
    script: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    bench = runpy.run_path(str(BENCHMARKS / script))
    with pytest.raises(SystemExit) as ended:
        bench["main"](["--device", device])
    assert ended.value.code == 2
    text = capsys.readouterr()
    assert not text.out
    last = text.err.splitlines()[-1]
    assert f"error: argument --device: device '{device}' cannot be used here: " in last

# SPDX-License-Identifier: Apache-2.0
"""What commands say of recordings: not that they are images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from keymix.cli import main
from keymix.errors import UserError
from keymix.train.runs import evaluate

SMALL = ["--epochs", "1", "--limit", "40", "--schedule.warmup_epochs=0", "--data.batch_size", "16"]
EVENTS = ["train", "moving_digits_qkformer", "--data", "moving_digits:100", *SMALL]
EVENTS += ["--data.time_steps", "1", "--data.image_size", "8"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    assert main([*EVENTS, "--out", str(folder / "events")]) == 0
    assert main(["train", "digits_vit", *SMALL, "--out", str(folder / "images")]) == 0
    Image.new("L", (12, 12), 90).save(folder / "photo.png")
    events = {"t": np.arange(50), "x": np.arange(50) % 32, "y": np.arange(50) % 32}
    np.savez(folder / "recording.npz", **events, p=np.arange(50) % 2)
    return folder


@pytest.mark.slow
def test_training_counts_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EVENTS, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    assert " recordings/s\n" in said.err
    assert "image" not in said.out + said.err


@pytest.mark.slow
def test_evaluation_counts_recordings(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(runs / "events")]) == 0
    said = capsys.readouterr()
    heads, row = (line.split("\t") for line in said.out.splitlines())
    assert dict(zip(heads, row, strict=True))["recordings"] == "25"
    assert "image" not in said.out + said.err
    assert main(["eval", str(runs / "images")]) == 0
    assert "\timages\t" in capsys.readouterr().out


def test_a_run_on_images_is_not_scored_on_recordings(runs: Path) -> None:
    with pytest.raises(UserError, match="holds recordings of events; the run was trained on imag"):
        evaluate(runs / "images", "moving_digits:100")

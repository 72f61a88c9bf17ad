# SPDX-License-Identifier: Apache-2.0
"""A run on shards: stopped in mid-epoch, broken in mid-epoch, scored as on the data itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keymix import evaluate
from keymix.cli import main
from keymix.data import shards
from keymix.data.sharding import write_shards
from keymix.train import files
from keymix.train.checkpoints import checkpoints
from keymix.train.step import Training

STEPS = 19  # an epoch


@pytest.fixture(scope="module", autouse=True)
def _read_in_small_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BUFFER", 100)
        patch.setattr(shards, "SIDE_BY_SIDE", 2)
        yield


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as sixteen shards."""
    folder = tmp_path_factory.mktemp("shards") / "digits"
    write_shards("digits", folder, images=80)
    return folder


def trained(digits: Path, out: Path, workers: int = 2) -> int:
    words = f"train digits_vit --data stream:{digits} --data.workers {workers} --out {out} "
    return main((words + "--schedule.epochs 2 --schedule.warmup_epochs 0").split())


@pytest.fixture(scope="module")
def whole(digits: Path) -> Path:
    assert trained(digits, digits.with_name("whole")) == 0
    return digits.with_name("whole")


def weights(run: Path) -> list[bytes]:
    return [(run / files.weights_file(which)).read_bytes() for which in ("last", "best")]


def after(step: int, do: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something within a step of the next run."""
    original = Training.step

    def stepped(self: Training, batch: Any) -> None:
        original(self, batch)
        if self.done == step:
            do()

    monkeypatch.setattr(Training, "step", stepped)


def test_a_run_that_was_stopped_in_mid_epoch_ends_with_the_same_weights(
    digits: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after(STEPS + 7, lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch)
    assert trained(digits, tmp_path / "cut") == 143
    assert checkpoints(tmp_path / "cut")[0].path.name == "epochs_00001_step_000007.ckpt"
    monkeypatch.undo()
    assert trained(digits, tmp_path / "cut") == 0
    assert weights(tmp_path / "cut") == weights(whole)


def test_shards_that_vanish_in_mid_epoch_leave_the_checkpoint(
    digits: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    away = {file: file.with_suffix(".away") for file in digits.glob("train-*")}
    after(STEPS + 5, lambda: [*map(Path.rename, away, away.values())], monkeypatch)
    assert trained(digits, tmp_path / "cut") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"keymix: error: shard {digits / 'train-000'}")
    assert said.endswith("run the same command again: a run resumes from its last checkpoint.")
    assert checkpoints(tmp_path / "cut")[0].path.name == "epochs_00001.ckpt"
    monkeypatch.undo()
    for file, name in away.items():
        name.rename(file)
    assert trained(digits, tmp_path / "cut") == 0
    assert weights(tmp_path / "cut") == weights(whole)


def test_scores_on_shards_are_those_on_the_data(digits: Path, whole: Path) -> None:
    for split in ("val", "test"):
        on_shards, on_data = (
            evaluate(whole, spec, split=split) for spec in (f"stream:{digits}", "digits")
        )
        assert on_shards | {"data": "digits"} == on_data


def test_a_model_of_another_task_refuses_a_stream(digits: Path, tmp_path: Path, capsys) -> None:
    words = ["train", "small_masks_unet", "--data", f"stream:{digits}", "--out"]
    assert main([*words, str(tmp_path / "x")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "x").exists()

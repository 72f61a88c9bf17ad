# SPDX-License-Identifier: Apache-2.0
"""Loggers: what they are given, that they change nothing, and that a run outlives their faults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from keymix.errors import KeymixWarning, UserError
from keymix.train import files, loggers
from keymix.train.callbacks import Callback
from keymix.train.engine import train
from keymix.train.recipe import Recipe


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read TensorBoard's points of a run, by name."""
    pytest.importorskip("tensorboard", reason="the logger's package is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        name: [(point.step, point.value) for point in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


class StopAfter(Callback):
    def __init__(self, epochs: int) -> None:
        self.left = epochs

    def on_epoch_end(self, line: Mapping[str, float | None]) -> None:
        self.left -= 1

    def on_step_end(self, done: int, loss: float) -> None:
        if not self.left:
            raise KeyboardInterrupt


def test_tensorboard_has_the_metrics_and_the_run_is_the_same_to_the_bit(
    tiny: Recipe, tiny_run: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="the logger's package is not installed")
    run = train(tiny, tmp_path / "run", log="tensorboard")
    found = logged(run.folder)
    metrics = run.metrics()
    for name in ("train_loss", "val_top1", "lr"):
        expected = [(line["epoch"] + 1, pytest.approx(line[name])) for line in metrics]
        assert found[name] == expected
    test = run.summary.last.test.scores["top1"]
    assert found["test_top1_last"] == [(len(metrics), pytest.approx(test))]
    name = files.weights_file("last")
    ours, plain = (files.read_weights(folder / name)[0] for folder in (run.folder, tiny_run))
    assert all(ours[key].equal(plain[key]) for key in plain)
    recipes = [(folder / files.RECIPE).read_text() for folder in (run.folder, tiny_run)]
    assert recipes[0] == recipes[1]


def test_resumed_run_goes_on_in_the_same_log(tiny: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the logger's package is not installed")
    with pytest.raises(KeyboardInterrupt):
        train(tiny, tmp_path / "run", log="tensorboard", progress=StopAfter(1))
    run = train(tiny, tmp_path / "run", log="tensorboard")
    assert [step for step, _ in logged(run.folder)["val_loss"]] == [1, 2, 3]


def test_epochs_before_the_logger_came_are_logged_too(tiny: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the logger's package is not installed")
    with pytest.raises(KeyboardInterrupt):
        train(tiny, tmp_path / "run", progress=StopAfter(2))
    run = train(tiny, tmp_path / "run", log="tensorboard")
    assert [step for step, _ in logged(run.folder)["val_loss"]] == [1, 2, 3]


def test_overwritten_run_starts_a_log_of_its_own(tiny: Recipe, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the logger's package is not installed")
    folder = tmp_path / "run"
    train(tiny, folder, log="tensorboard")
    record = folder / files.LOGGERS
    values = json.loads(record.read_text())
    record.write_text(json.dumps({"tensorboard": {**values["tensorboard"], "epochs": 99}}))
    train(tiny, folder, log="tensorboard", overwrite=True)
    assert json.loads(record.read_text())["tensorboard"]["epochs"] == tiny.schedule.epochs


def test_logger_that_is_not_installed_is_refused_before_anything_is_written(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"keymix\[wandb\]"):
        train(tiny, tmp_path / "run", log="wandb")
    assert not (tmp_path / "run").exists()


def test_unknown_logger_is_refused_with_the_nearest(tiny: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tensorboard"):
        train(tiny, tmp_path / "run", log="tensorbord")  # type: ignore[arg-type]


class Failing:
    """A logger whose service goes away."""

    version = "1"

    def log_hyperparams(self, params: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        if step == 2:
            raise ConnectionError("no route to host")  # an OSError, as of any network


def test_run_outlives_a_logger_that_fails(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = loggers._Kind(lambda plan, known: Failing(), ())  # type: ignore[arg-type, return-value]
    monkeypatch.setitem(loggers._KINDS, "wandb", kind)
    with pytest.warns(KeymixWarning, match="no route to host") as warned:
        run = train(tiny, tmp_path / "run", log="wandb")
    assert run.done
    assert len([each for each in warned if "no route" in str(each.message)]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_logger_of_a_service_keeps_its_identifier(
    name: str, tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name, reason="the logger's package is not installed")
    pytest.importorskip("pytorch_lightning", reason="the logger's package is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)  # MLflow's store
    with pytest.raises(KeyboardInterrupt):
        train(tiny, tmp_path / "run", log=name, progress=StopAfter(1))  # type: ignore[arg-type]
    record = tmp_path / "run" / files.LOGGERS
    before = json.loads(record.read_text())[name]
    train(tiny, tmp_path / "run", log=name)  # type: ignore[arg-type]
    after = json.loads(record.read_text())[name]
    assert before["id"] == after["id"] != ""
    assert (before["epochs"], after["epochs"]) == (1, 3)

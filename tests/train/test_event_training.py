# SPDX-License-Identifier: Apache-2.0
"""Runs on recordings of events: trained, stopped and resumed, evaluated, asked."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import MOVING
from timm.data import resolve_model_data_config

from keymix.cli.swap import main as swap
from keymix.data import load
from keymix.data.sources.moving_digits import recordings_of
from keymix.errors import Interrupted, KeymixWarning, UserError
from keymix.tasks.classification.training import ClassificationTask
from keymix.train import files
from keymix.train.engine import train
from keymix.train.predict import predict
from keymix.train.recipe import (
    from_dict,
    replace_path,
)
from keymix.train.runs import evaluate, load_run


@pytest.fixture(scope="session")
def folder(events_run: Path) -> Path:
    return events_run


def traces(folder: Path) -> tuple[bytes, list[dict[str, Any]]]:
    lines = load_run(folder).metrics()
    for line in lines:
        del line["seconds"], line["images_per_s"]
    return (folder / files.weights_file("last")).read_bytes(), lines


@pytest.mark.slow
def test_the_model_gets_channels_and_steps_of_the_data(folder: Path) -> None:
    run = load_run(folder)
    model, seen = run.model_and_data()
    assert model.time_steps == 2
    assert (seen.time_steps, seen.frames_by, seen.image_size) == (2, "time", (16, 16))
    assert seen.sensor_size == (32, 32)
    assert model(torch.zeros(1, 2, 2, 16, 16)).shape == (1, 10)
    assert from_dict(files.read_json(folder / files.RECIPE)) == MOVING


@pytest.mark.slow
def test_a_run_that_is_stopped_within_an_epoch_ends_as_one_that_is_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = ClassificationTask.training_step

    def stopped(self: ClassificationTask, batch: Any, batch_idx: int) -> Any:
        if (self.current_epoch, batch_idx) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(ClassificationTask, "training_step", stopped)
        with pytest.raises(Interrupted):
            train(MOVING, tmp_path / "run")
    train(MOVING, tmp_path / "run")
    assert traces(tmp_path / "run") == traces(folder)


def test_a_loaded_model_describes_frames_as_they_are(folder: Path) -> None:
    model, seen = load_run(folder).model(), load_run(folder).summary.data
    config = resolve_model_data_config(model)
    assert config["input_size"] == (2, 16, 16)
    assert (config["mean"], config["std"]) == ((0.0, 0.0), (1.0, 1.0))
    assert model.pretrained_cfg["num_classes"] == len(seen.classes)


@pytest.mark.slow
def test_evaluation_leaves_nothing_behind(folder: Path) -> None:
    first = evaluate(folder)
    assert evaluate(folder) == first
    assert first["top1"] == load_run(folder).summary.last.test.scores["top1"]
    more = evaluate(folder, "moving_digits:160")
    assert more["images"] == 40
    with pytest.raises(UserError, match="'digits' holds images; the run was trained on recordings"):
        evaluate(folder, "digits")


def test_recordings_are_predicted_as_they_are_scored(folder: Path, tmp_path: Path) -> None:
    data = load("moving_digits:100", time_steps=2, frames_by="time", image_size=16)
    paths = []
    for i in range(4):
        (events,) = recordings_of(data.test.index[[i]])
        paths.append(tmp_path / f"{i}.npz")
        np.savez(paths[-1], **{name: events[name] for name in "txyp"})
    model = load_run(folder).model()
    with torch.inference_mode():
        logits = model(torch.stack([data.test.read(i) for i in range(4)]).float())
    answers = predict(folder, [tmp_path], top=1)
    assert [Path(a.path) for a in answers] == paths
    for answer, row in zip(answers, logits.softmax(1), strict=True):
        assert answer.classes == (str(int(row.argmax())),)
        assert answer.probabilities[0] == pytest.approx(float(row.max()), rel=1e-4)
    (tmp_path / "1.npz").write_bytes(b"")
    answers = predict(folder, [tmp_path])
    assert [a.error is None for a in answers] == [True, False, True, True]
    assert str(answers[1].error).startswith(f"{tmp_path}/1.npz: cannot be read")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no recordings"):
        predict(folder, [tmp_path / "empty"])


@pytest.mark.slow
def test_other_time_steps_are_other_frames_of_the_same_recordings(
    folder: Path, tmp_path: Path
) -> None:
    same, other = evaluate(folder, time_steps=2), evaluate(folder, time_steps=3)
    assert same == evaluate(folder)
    assert (same["time_steps"], other["time_steps"]) == (2, 3)
    data = load("moving_digits:100", time_steps=3, frames_by="time", image_size=16)
    model = load_run(folder).model()
    model.set_time_steps(3)
    frames = torch.stack([data.test.read(i) for i in range(len(data.test))])
    with torch.inference_mode():
        logits = model(frames.float())
    loss = torch.nn.functional.cross_entropy(logits, data.test.labels)
    assert other["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert other["loss"] != same["loss"]
    (events,) = recordings_of(data.test.index[[0]])
    np.savez(tmp_path / "0.npz", **{name: events[name] for name in "txyp"})
    (answer,) = predict(folder, [tmp_path], top=1, time_steps=3)
    assert answer.probabilities[0] == pytest.approx(float(logits[0].softmax(0).max()), rel=1e-4)
    with pytest.raises(UserError, match=r"^time_steps=0 must be a whole number of 1 or more"):
        evaluate(folder, time_steps=0)


def test_frames_of_another_number_are_not_taken_for_other_recordings(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", KeymixWarning)
        evaluate(folder, time_steps=3)


def test_a_model_of_images_refuses_frames(tmp_path: Path) -> None:
    for name in ("vit_nano_p4_12", "resnet18"):
        changed = {"model.name": name, "model.options": {}}
        with pytest.raises(UserError) as refused:
            train(replace_path(MOVING, changed), tmp_path / name)
        assert str(refused.value) == (
            f"model {name!r} takes images, and data 'moving_digits:100' has frames of events "
            "[B, T, C, H, W]: choose a spiking model, such as qkformer_micro_32 for frames of "
            "32x32 pixels or qkformer_hst_2_256 for 128x128, or data of images."
        )


def test_steps_are_what_the_data_says(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.options\.time_steps is what the data says; set"):
        train(replace_path(MOVING, {"model.options.time_steps": 3}), tmp_path / "run")
    for key, value in (("time_steps", 0), ("frames_by", "tim")):
        with pytest.raises(UserError, match=rf"data\.{key}"):
            replace_path(MOVING, {f"data.{key}": value})


@pytest.mark.slow
def test_a_run_on_frames_teaches_another(folder: Path, tmp_path: Path) -> None:
    taught = {"loss.distill": 0.5, "loss.distill_teacher": str(folder), "schedule.epochs": 1}
    train(replace_path(MOVING, taught), tmp_path / "taught")
    (line,) = load_run(tmp_path / "taught").metrics()
    assert line["train_distill"] > 0
    with pytest.raises(
        UserError, match="takes 2 frames per recording, and the data has 3 frames per recording"
    ):
        train(replace_path(MOVING, taught | {"data.time_steps": 3}), tmp_path / "other")


def test_a_run_on_frames_is_not_swapped(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes recordings of events, and a swap is"):
        swap([str(folder), "--mixer", "qk_channel", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["auto", "16"])
def test_a_run_on_cuda_resumes_and_is_evaluated(tmp_path: Path, precision: str) -> None:
    recipe = replace_path(MOVING, {"precision": precision})

    def stop(line: Any) -> None:
        raise RuntimeError("a crash")

    with pytest.raises(RuntimeError, match="a crash"):
        train(recipe, tmp_path / "run", progress=stop)
    run = train(recipe, tmp_path / "run")
    assert [line["epoch"] for line in run.metrics()] == [0, 1]
    assert all(np.isfinite(line["train_loss"]) for line in run.metrics())
    assert evaluate(run)["top1"] == run.summary.last.test.scores["top1"]

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
import shutil
import signal
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from settings import EVERYTHING

from keymix.errors import UserError
from keymix.train import engine, files
from keymix.train.checkpoints import checkpoints
from keymix.train.engine import train
from keymix.train.evaluation import score_split
from keymix.train.predict import predict
from keymix.train.recipe import Recipe, read_recipe
from keymix.train.runs import evaluate, load_run

Vary = Callable[[dict[str, Any]], Recipe]
FILES = {
    "recipe.json",
    "environment.json",
    "metrics.jsonl",
    "summary.json",
    "predictions_test.npz",
    "weights_last.safetensors",
    "weights_best.safetensors",
    "checkpoints",
}


class Stopped(RuntimeError):
    """Stands for a crash."""


def stop_after(epochs: int) -> Callable[[Mapping[str, Any]], None]:
    def report(line: Mapping[str, Any]) -> None:
        if line["epoch"] + 1 == epochs:
            raise Stopped

    return report


def look_at(seen: list[bool]) -> Callable[[Mapping[str, Any]], None]:
    return lambda line: seen.append(torch.are_deterministic_algorithms_enabled())


def same_weights(one: Path, other: Path, which: str = "last") -> bool:
    a, _ = files.read_weights(one / files.weights_file(which))
    b, _ = files.read_weights(other / files.weights_file(which))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def without_times(folder: Path) -> list[dict[str, Any]]:
    lines = load_run(folder).metrics()
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "images_per_s")} for line in lines
    ]


def test_run_leaves_the_whole_record(tiny: Recipe, tiny_run: Path) -> None:
    run = load_run(tiny_run)
    assert {p.name for p in run.folder.iterdir()} == FILES
    assert read_recipe(run.folder) == tiny
    lines = run.metrics()
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    assert {"train_loss", "val_loss", "val_top1", "val_top5", "lr"} <= set(lines[0])
    summary = run.summary
    assert summary.status == "done"
    assert summary.params == sum(p.numel() for p in run.model().parameters())
    assert summary.data.spec == "digits"
    best = max(lines, key=lambda line: (line["val_top1"], -line["val_loss"]))
    assert summary.best.epoch == best["epoch"]
    assert summary.best.val["top1"] == best["val_top1"]
    assert summary.last.epoch == 2
    answers = np.load(run.folder / "predictions_test.npz")
    for which in ("last", "best"):
        scores = getattr(summary, which).test.scores
        right = answers[f"{which}_pred"] == answers["target"]
        assert right.mean() == pytest.approx(scores["top1"])
        assert answers[f"{which}_top5"].mean() == pytest.approx(scores["top5"])
        assert answers[f"{which}_top5"][right].all()
    assert sorted(answers["index"].tolist()) == list(range(len(answers["target"])))


def test_record_of_the_environment_names_no_place(tiny_run: Path) -> None:
    text = (tiny_run / "environment.json").read_text()
    assert {"python", "packages", "cpu", "cores", "threads", "device"} <= set(json.loads(text))
    assert str(Path(files.__file__).parents[3]) not in text


def test_only_two_checkpoints_are_kept(tiny_run: Path) -> None:
    kept = checkpoints(tiny_run)
    assert [checkpoint.epochs for checkpoint in kept] == [3, 2]
    content = torch.load(kept[0].path, weights_only=True)
    assert content["optimizer"]["state"]


def test_done_run_returns_at_once(tiny: Recipe, tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run, tmp_path / "run")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run").iterdir()}
    train(tiny, tmp_path / "run", progress=stop_after(1))
    assert before == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run").iterdir()}


def test_same_seed_same_weights_other_seed_others(vary: Vary, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(vary({"seed": seed, "schedule.epochs": 1}), tmp_path / name)
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert not same_weights(tmp_path / "a", tmp_path / "c")


def test_a_crashed_run_resumes_to_the_same_weights(vary: Vary, tmp_path: Path) -> None:
    recipe = vary(EVERYTHING)
    train(recipe, tmp_path / "whole")
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "cut", progress=stop_after(1))
    assert not (tmp_path / "cut" / "summary.json").exists()
    train(recipe, tmp_path / "cut")
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    assert same_weights(tmp_path / "whole", tmp_path / "cut", "best")
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "cut")


def test_run_stopped_within_an_epoch_replays_it(
    tiny: Recipe, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keymix.tasks.classification.training import ClassificationTask

    step = ClassificationTask.training_step

    def breaking(self: ClassificationTask, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.current_epoch == 1 and batch_idx == 2:
            raise Stopped
        return step(self, batch, batch_idx)

    monkeypatch.setattr(ClassificationTask, "training_step", breaking)
    with pytest.raises(Stopped):
        train(tiny, tmp_path / "cut")
    monkeypatch.undo()
    train(tiny, tmp_path / "cut")
    assert same_weights(tiny_run, tmp_path / "cut")
    assert same_weights(tiny_run, tmp_path / "cut", "best")
    assert without_times(tiny_run) == without_times(tmp_path / "cut")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_damaged_checkpoint_falls_back_with_a_warning(
    tiny: Recipe, tiny_run: Path, tmp_path: Path, damage: str
) -> None:
    with pytest.raises(Stopped):
        train(tiny, tmp_path / "cut", progress=stop_after(2))
    newest = checkpoints(tmp_path / "cut")[0].path
    content = bytearray(newest.read_bytes())
    if damage == "flipped":  # within a tensor's data, where loading alone sees nothing
        with zipfile.ZipFile(newest) as archive:
            tensors = (entry for entry in archive.infolist() if "/data/" in entry.filename)
            largest = max(tensors, key=lambda entry: entry.file_size)
            data = archive.read(largest)
        content[content.index(data) + len(data) // 2] ^= 0xFF
    kept = {"truncated": len(content) // 2, "empty": 0}.get(damage, len(content))
    newest.write_bytes(content[:kept])
    with pytest.warns(RuntimeWarning, match=r"epochs_00002\.ckpt' is damaged"):
        train(tiny, tmp_path / "cut")
    assert same_weights(tiny_run, tmp_path / "cut")
    assert without_times(tiny_run) == without_times(tmp_path / "cut")


def test_folder_of_another_run_is_refused_by_key(
    vary: Vary, tiny_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_run, tmp_path / "run")
    with pytest.raises(UserError, match=r"optim\.lr is 0\.001 there, 0\.5 here") as refused:
        train(vary({"optim.lr": 0.5}), tmp_path / "run")
    assert "--overwrite" in str(refused.value)
    assert (tmp_path / "run" / "summary.json").exists()


def test_overwrite_replaces_the_run_and_nothing_else(
    vary: Vary, tiny_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_run, tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    run = train(vary({"schedule.epochs": 1, "seed": 4}), tmp_path / "run", overwrite=True)
    assert run.summary.seed == 4
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
def test_folder_of_other_files_is_left_alone(tiny: Recipe, tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match="holds no run"):
        train(tiny, tmp_path, overwrite=overwrite)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_bad_model_leaves_no_folder(vary: Vary, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vit_nano"):
        train(vary({"model.name": "vit_nano_p2_13"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_diverged_loss_names_step_rate_and_remedy(wild: Recipe, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"step \d+ of epoch 1, at learning rate \d+; .*optim\.lr"):
        train(wild, tmp_path / "run")
    assert not (tmp_path / "run" / "weights_best.safetensors").exists()


def test_schedule_warms_up_and_ends_low(vary: Vary, tmp_path: Path) -> None:
    recipe = vary({"schedule.epochs": 3, "schedule.warmup_epochs": 1})
    rates = [line["lr"] for line in train(recipe, tmp_path / "run").metrics()]
    steps = math.ceil(72 / 16)  # 80 images less a tenth for validation
    last_of_warmup = 1e-6 + (recipe.optim.lr - 1e-6) * (steps - 1) / steps
    assert rates[0] == pytest.approx(last_of_warmup)
    assert rates[2] < 0.05 * recipe.optim.lr < rates[1]


def test_training_leaves_the_callers_world_alone(vary: Vary, tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    handler = signal.getsignal(signal.SIGINT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(vary({"schedule.epochs": 1}), tmp_path / "run")
    assert torch.equal(torch.rand(2), expected)
    assert signal.getsignal(signal.SIGINT) is handler


def test_deterministic_run_is_so_to_its_end_and_no_longer(
    vary: Vary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def look(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return score_split(*args, **kwargs)

    monkeypatch.setattr(engine, "score_split", look)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    recipe, out = vary({"schedule.epochs": 1, "deterministic": True}), tmp_path / "run"
    train(recipe, out, progress=look_at(seen))
    (out / "summary.json").unlink()
    train(recipe, out)  # only tests again
    assert len(seen) >= 3
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark


def test_ctrl_c_stays_ctrl_c(tiny: Recipe, tmp_path: Path) -> None:
    def press(line: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny, tmp_path / "run", progress=press)
    assert checkpoints(tmp_path / "run")


def test_resume_on_changed_data_is_refused(vary: Vary, tmp_path: Path) -> None:
    for name in ("dark", "light"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(12):
            shade = i + (200 if name == "light" else 0)
            Image.new("L", (12, 12), shade).save(tmp_path / "data" / name / f"{i:02d}.png")
    recipe = vary(
        {
            "data.spec": f"folder:{tmp_path / 'data'}",
            "data.limit": None,
            "data.val_fraction": 0.2,
        }
    )
    recipe = replace(recipe, model=replace(recipe.model, options={"depth": 1}))
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "run", progress=stop_after(1))
    Image.new("L", (12, 12), 99).save(tmp_path / "data" / "dark" / "03.png")
    with pytest.raises(UserError, match="began with other images"):
        train(recipe, tmp_path / "run")


def test_bar_is_drawn_on_standard_error_only(
    vary: Vary, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(vary({"schedule.epochs": 1}), tmp_path / "run", progress="bar")
    assert capfd.readouterr().out == ""


def test_averaged_weights_are_what_is_kept(vary: Vary, tmp_path: Path) -> None:
    train(vary({"ema": 0.99, "schedule.epochs": 2}), tmp_path / "ema")
    train(vary({"schedule.epochs": 2}), tmp_path / "plain")
    averaged, _ = files.read_weights(tmp_path / "ema" / "weights_last.safetensors")
    plain, _ = files.read_weights(tmp_path / "plain" / "weights_last.safetensors")
    assert averaged.keys() == plain.keys()
    assert not torch.equal(averaged["head.weight"], plain["head.weight"])
    content = torch.load(checkpoints(tmp_path / "ema")[0].path)
    trained = content["model"]["head.weight"]
    assert torch.equal(trained, plain["head.weight"])  # averaging does not touch training


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["auto", "bf16", "16"])
def test_run_on_cuda_resumes_and_is_evaluated(vary: Vary, tmp_path: Path, precision: str) -> None:
    recipe = vary({"precision": precision, **EVERYTHING})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(recipe, whole)
    with pytest.raises(Stopped):
        train(recipe, cut, progress=stop_after(1))
    run = train(recipe, cut)
    assert run.summary.status == "done"
    # Whether CUDA repeats itself to the bit is asked elsewhere.
    for one, other in zip(without_times(cut), without_times(whole), strict=True):
        assert one["lr"] == other["lr"]
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=0.02)
    states = [torch.load(checkpoints(f)[0].path, weights_only=True) for f in (whole, cut)]
    scalers = [state["scaler"] for state in states]
    assert scalers[0] == scalers[1]
    assert bool(scalers[0]) == (precision == "16")
    scores = evaluate(run)
    assert scores["top1"] == run.summary.last.test.scores["top1"]
    picture = tmp_path / "picture.png"
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(picture)
    (answer,) = predict(run, [picture], top=3)
    assert answer.error is None
    assert len(answer.probabilities) == 3

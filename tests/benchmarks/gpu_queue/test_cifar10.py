# SPDX-License-Identifier: Apache-2.0
"""Job 5: its runs, how many share a GPU, and what its page says."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dry import context

from commands import forkserver
from costs import cost_of
from gpu_queue.cifar10_report import assemble
from gpu_queue.job import Context, Unfinished
from gpu_queue.jobs import cifar10
from gpu_queue.jobs.cifar10 import JOB, MIXERS, MODELS
from gpu_queue.training import PREDICTIONS, TEXTS
from keymix import recipes
from keymix.tasks.classification.training import ClassificationTask
from keymix.train import task as train_task
from keymix.train.model import build_model
from keymix.train.recipe import Recipe, replace_path
from keymix.train.runs import Run

pytestmark = pytest.mark.slow
Results = dict[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch, shapes_checked: bool) -> None:
    if shapes_checked:
        pytest.skip("compilers cannot see through the shape checks")
    monkeypatch.setattr(train_task, "_BACKEND", train_task._BACKEND)  # as it was, after the test


def within(root: Path, name: str, results: Results) -> Context:
    return context(root, work=root / "work" / name, keep=root / "keep" / name, results=results)


def rates(found: dict[tuple[bool, int], tuple[float, float]]) -> Results:
    """Results of runs at once: images per second in all, and seconds of an epoch, by kind."""
    return {
        cifar10._together_name(compiled, number): {
            "together": number,
            "compiled": compiled,
            "precision": "auto",
            "batch": 512,
            "images": 45_000,
            "images_per_s": rate,
            "epoch_s": epoch,
            "epoch_s_quartiles": [epoch, epoch],
            "epochs": 9,
            "first_epoch_s": 50.0,
            "gpu_gib": 6.0,
        }
        for (compiled, number), (rate, epoch) in found.items()
    }


EAGER = rates({(False, 1): (9e9, 1.0)})


def measure_all(root: Path) -> None:
    """Measure every step of the dry run, one after the other; what is compiled is so by name."""
    results: Results = {}
    for step in JOB.steps(True):
        result = step.measure(within(root, step.name, EAGER))
        results[step.name] = json.loads(json.dumps(result, allow_nan=False))
    (root / "results.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """The dry run, in a process that forks others to train: nothing was trained in it before."""
    root = tmp_path_factory.mktemp("dry")
    process = forkserver().Process(target=measure_all, args=(root,))
    process.start()
    process.join()
    assert process.exitcode == 0
    return root / "keep", json.loads((root / "results.json").read_text())


def test_the_dry_run_leaves_results_small_files_and_a_section(dry: tuple[Path, Results]) -> None:
    kept, results = dry
    assert set(results) == {step.name for step in JOB.steps(True)}
    for name, result in results.items():
        if name.startswith("together/"):
            assert result["compiled"] == ("compiled" in name)
            assert result["epochs"] == result["together"]  # each stopped after its second epoch
            assert result["images_per_s"] > 0
        else:
            assert {path.name for path in (kept / name).iterdir()} == {*TEXTS, PREDICTIONS}
            right = cifar10._unpacked(result, "last")
            assert right.mean() == pytest.approx(result["last"]["top1"])
            assert len(result["val_top1"]) == result["epochs"] == 2
    for done in range(1, len(results) + 1):  # however much of it is there
        some = dict([*results.items()][:done])
        assert "| --- |" in JOB.section(some)
        assert "| --- |" in JOB.section({name: results[name] for name in [*results][-done:]})


def test_keymix_reports_of_the_runs_itself(dry: tuple[Path, Results], tmp_path: Path) -> None:
    made = assemble(dry[0], tmp_path / "out")
    top1 = [dry[1][f"vit_small/{row['mixer']}/0"]["last"]["top1"] for row in made.rows]
    assert [row["top1"]["mean"] for row in made.rows] == pytest.approx(top1)
    assert [run.status for run in made.record.runs] == ["done", "done"]
    assert made.report.is_file()
    with pytest.raises(ValueError, match="no finished run of softmax"):
        assemble(dry[0], tmp_path / "none", "cvt_13")


def test_a_run_that_is_asked_to_stop_goes_on_as_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ClassificationTask.training_step

    def stopped(self: ClassificationTask, batch: Any, batch_idx: int) -> Any:
        if (self.current_epoch, batch_idx) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(ClassificationTask, "training_step", stopped)
    name = "vit_small/static_key/0"
    step = next(step for step in JOB.steps(True) if step.name == name)
    with pytest.raises(Unfinished) as said:
        step.measure(within(tmp_path, name, {}))
    assert said.value.progress == {"epochs": 1, "of": 2}
    monkeypatch.undo()
    later = rates({(True, 1): (9e9, 1.0)})  # now it would be compiled
    result = step.measure(within(tmp_path, name, later))
    assert not result["compiled"]
    assert result["epochs"] == 2


@pytest.mark.parametrize("compiled", [True, False])
def test_a_run_is_compiled_where_that_was_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    def begin(context: Context, recipe: Recipe) -> Run:
        assert recipe.compile is compiled
        raise Unfinished({})

    monkeypatch.setattr(cifar10, "train_in_time", begin)
    step = next(step for step in JOB.steps(True) if step.resumable)
    with pytest.raises(Unfinished):
        step.measure(within(tmp_path, step.name, rates({(compiled, 1): (9e9, 1.0)})))


@pytest.mark.parametrize("left", [100.0, -1.0])
def test_a_compiler_that_was_stopped_with_the_run_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: float
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a process of the compiler ended")

    monkeypatch.setattr(ClassificationTask, "training_step", fail)
    name = "vit_small/static_key/0"
    step = next(step for step in JOB.steps(True) if step.name == name)
    late = replace(within(tmp_path, name, {}), until=time.monotonic() + left)
    with pytest.raises(RuntimeError if left > 0 else Unfinished):
        step.measure(late)


def test_a_training_that_fails_fails_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cifar10.TINY, "model.options.depth", -1)
    step = next(step for step in JOB.steps(True) if step.name == "together/eager/2")
    with pytest.raises(RuntimeError, match="trainings ended with"):
        step.measure(within(tmp_path, step.name, {}))


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("name", MODELS)
def test_the_arithmetic_counts_the_multiply_adds_of_the_recipes(name: str, mixer: str) -> None:
    recipe = replace_path(recipes.get(MODELS[name].recipe), {"model.mixer": mixer})
    with torch.device("meta"):
        model = build_model(recipe, num_classes=10, in_chans=3, image_size=(32, 32))
    assert cost_of(model, (3, 32, 32)).macs == MODELS[name].macs[mixer]
    assert recipe.schedule.epochs == cifar10.EPOCHS
    assert recipe.data.batch_size == cifar10.BATCH


def test_the_arithmetic_adds_up() -> None:
    flops = 6 * 647_244_800
    rate = cifar10.SHARE * cifar10.PEAK / flops
    seconds = 200 * (45_000 / rate + 5_000 / (3 * rate) + cifar10.EPOCH_END) + cifar10.START
    assert cifar10.run_seconds("vit_small", "softmax") == pytest.approx(seconds)
    result = JOB.always()
    assert f"| ViT-S, softmax | 3.88 | 36.2 | {rate:,.0f} | {seconds / 60:.1f} | 3 |" in result
    steps = [step for step in JOB.steps(False) if step.resumable]
    assert f"{sum(step.seconds for step in steps) / 3600:.1f} hours for all" in result
    assert len(steps) == 36


def test_the_best_rate_with_which_a_run_can_end_is_chosen() -> None:
    assert cifar10.choice({}) == (1, False)
    found = {(False, 1): (9e3, 5.0), (True, 1): (15e3, 3.0), (True, 2): (18e3, 5.0)}
    assert cifar10.choice(rates(found)) == (2, True)
    assert JOB.side_by_side(rates(found)) == 2
    late = found | {(True, 3): (19e3, 7.1)}  # 200 epochs are 23.7 minutes, and the start is more
    assert cifar10.choice(rates(late)) == (2, True)
    assert cifar10.choice(rates({(False, 1): (5e3, 9.0), (True, 2): (8e3, 11.0)})) == (1, False)
    result = JOB.section(rates(found))
    assert result.startswith("Chosen for the runs: 2 runs share the GPU, compiled, 18,000 images/s")
    assert "+20% against one run at a time" in result
    assert "1.67 times as fast" in result


def test_estimates_follow_what_was_measured() -> None:
    step = next(step for step in JOB.steps(False) if step.name == "vit_small/softmax/1")
    assert JOB.estimate(step, {}) == step.seconds == cifar10.run_seconds("vit_small", "softmax")
    found = rates({(True, 2): (18e3, 5.0)})
    assert JOB.estimate(step, found) == cifar10.START + 200 * 5.0
    done = found | {"vit_small/softmax/0": {"seconds": 700.0}}
    assert JOB.estimate(step, done) == cifar10.START + 700
    together = JOB.steps(False)[0]
    assert JOB.estimate(together, done) == together.seconds


def run(mixer: str, seed: int, right: int, *, model: str = "vit_small", **more: Any) -> Results:
    """A made run that gets so many of 1,000 test images right, from the first on."""
    bits = base64.b64encode(np.packbits(np.arange(1000) < right).tobytes()).decode()
    mark = {"epoch": 200, "val_top1": 0.8, "top1": right / 1000, "loss": 1.0}
    result = {
        "model": model,
        "mixer": mixer,
        "seed": seed,
        "compiled": True,
        "together": 2,
        "precision": "auto",
        "batch": 512,
        "sizes": {"train": 45_000, "val": 5_000, "test": 1000},
        "params": 9_600_000,
        "epochs": 200,
        "seconds": 900.0,
        "images_per_s": 11_000.0,
        "images_per_s_quartiles": [10_000.0, 12_000.0],
        "gpu_gib": 6.0,
        "last": mark,
        "best": mark,
        "correct": {"last": bits, "best": bits},
    }
    return {f"{model}/{mixer}/{seed}": result | more}


def test_the_answer_follows_from_the_runs() -> None:
    one = run("softmax", 0, 800) | run("static_key", 0, 805) | run("conv_static_key", 0, 870)
    result = JOB.section(one)
    assert "static_key +0.5 points at one seed, no more than" in result
    assert "conv_static_key +7.0 points at one seed, more than" in result
    more = one | run("softmax", 1, 802) | run("static_key", 1, 801)
    more |= run("conv_static_key", 1, 873) | run("softmax", 2, 801)
    more |= run("static_key", 2, 806) | run("conv_static_key", 2, 871)
    result = JOB.section(more)
    assert "static_key +0.3 points (3 seeds): no clear difference" in result
    assert "conv_static_key +7.0 points (3 seeds; clear in both intervals)" in result
    assert "| ViT-S (compiled), softmax | 3 | 80.1 ± 0.1 | 80.1 ± 0.1 |  |  |  | 83.4 |" in result
    assert "bfloat16" in result


def test_runs_of_two_kinds_are_not_compared() -> None:
    result = JOB.section(run("softmax", 0, 800) | run("static_key", 0, 805, compiled=False))
    assert "points" not in result.partition("|")[0]
    assert "ViT-S: softmax is not measured yet" in result
    assert "ViT-S (compiled): no mixer has a run at a seed of softmax yet" in result

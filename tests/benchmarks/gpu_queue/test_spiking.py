# SPDX-License-Identifier: Apache-2.0
"""The job of spiking networks: its steps on a CPU, its run cut short, and what its page says."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from dry import apart

from gpu_queue.job import Step, Unfinished
from gpu_queue.jobs import spiking
from gpu_queue.jobs.spiking import EPOCHS, JOB, RUN_SECONDS, UNMEASURED
from gpu_queue.training import PREDICTIONS, TEXTS

pytestmark = pytest.mark.slow
NEEDS_JELLY = ("neurons/tokens", "step/float32", "step/bfloat16")


def step(name: str) -> Step:
    return {each.name: each for each in JOB.steps(True)}[name]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the dry run measures, as its file holds it."""
    found: dict[str, Any] = {}
    for each in JOB.steps(True):
        if each.name in NEEDS_JELLY:
            pytest.importorskip("spikingjelly", reason="SpikingJelly is not installed")
        measured = each.measure(apart(tmp_path_factory.mktemp("step"), results=found))
        found[each.name] = json.loads(json.dumps(measured))
    return found


def test_every_kind_of_step_is_in_the_dry_run(results: dict[str, Any]) -> None:
    kinds = {each.name.split("/")[0] for each in JOB.steps(False)}
    assert {name.split("/")[0] for name in results} == kinds
    assert kinds == {name.split("/")[0] for name in JOB.form}
    assert all(each.seconds <= 60 for each in JOB.steps(False) if not each.resumable)
    assert JOB.steps(False)[-1].name == "run"  # the short ones are not kept waiting


def test_neurons_of_the_dry_run_are_the_reference(results: dict[str, Any]) -> None:
    rows = results["correct"]["rows"]
    assert {row["dtype"] for row in rows} == {"float64", "float32", "bfloat16", "float16"}
    assert all(row["ran"] == "blocked" and row["flips"] == 0 for row in rows)
    assert all(0 < row["rate"] < 1 for row in rows)
    assert max(row["error"] for row in rows if row["dtype"] == "float32") < 1e-5
    assert results["wide"]["spikes_differ"] == 0


def test_a_spike_that_differs_is_counted_and_its_gradient_is_not() -> None:
    torch = pytest.importorskip("torch")
    import neurons

    spikes = torch.zeros(2, 4, dtype=torch.float64)
    gradients = torch.ones(2, 4, dtype=torch.float64)
    other, apart = spikes.clone(), gradients.clone()
    other[1, 2] = 1
    apart[:, 2] = 9
    apart[0, 1] = 1.5
    exact = [spikes, gradients, torch.tensor(2.0)]
    errors = neurons.errors([other, apart, torch.tensor(3.0)], exact, exact)
    assert errors == {"flips": 1 / 8, "flips64": 1 / 8, "error": 0.5, "learned": 0.5}


def test_the_run_is_the_published_one_shortened(tmp_path: Path) -> None:
    given = apart(tmp_path, tiny=False, data=tmp_path)
    recipe = spiking._recipe(given, batch=256, epochs=41)  # a tenth
    assert recipe.optim.lr == pytest.approx(2e-3)  # four times the batch, twice the rate
    assert recipe.schedule.warmup_epochs == 2
    assert recipe.schedule.cooldown_epochs == 1
    assert recipe.loss.mixup_off_epoch == 20
    assert recipe.model.name == "qkformer_hst_4_384"
    assert recipe.data.spec == f"parquet:{tmp_path / 'cifar10'}"
    assert not recipe.model.options


@pytest.mark.parametrize("speed", [300.0, 1500.0, 3000.0, 6000.0, 50_000.0])
def test_as_many_epochs_are_taken_as_fit(speed: float) -> None:
    epochs = spiking._epochs_that_fit(speed)
    seconds = 1.15 * (45_000 + 5_000 / 3) / speed + 2
    assert epochs in EPOCHS
    assert epochs * seconds <= RUN_SECONDS or epochs == EPOCHS[0]
    more = [each for each in EPOCHS if each > epochs]
    assert not more or more[0] * seconds > RUN_SECONDS
    assert spiking._epochs_that_fit(None) == UNMEASURED


def test_a_run_that_is_stopped_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keymix.train import engine

    train = engine.train

    def stopped(recipe: Any, folder: Path, **more: Any) -> Any:
        def end(line: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        return train(recipe, folder, progress=end, **more)

    given = apart(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "train", stopped)
        with pytest.raises(Unfinished) as caught:
            step("run").measure(given)
    assert caught.value.progress == {"epochs": 1, "of": 2}
    first = (given.work / "run" / "metrics.jsonl").read_text().splitlines()
    recipe = spiking._recipe  # another speed, measured meanwhile, asks for more epochs
    monkeypatch.setattr(spiking, "_recipe", lambda *a, **k: recipe(*a, **{**k, "epochs": 3}))
    result = step("run").measure(given)
    assert result["epochs"] == 2
    assert (given.keep / "metrics.jsonl").read_text().splitlines()[:1] == first
    assert sorted(path.name for path in given.keep.iterdir()) == sorted((*TEXTS, PREDICTIONS))


def test_the_page_is_made_of_what_is_there(results: dict[str, Any]) -> None:
    page = JOB.section(results)
    assert "not comparable" in page
    assert "96.18 %" in page
    assert "re-encoded as JPEG" in page
    assert "A_t" in page
    for name, result in results.items():
        alone = JOB.section({name: result})
        assert alone.count("|") > 10 or name == "wide"
        assert ("has not been made" in alone) == (name != "run")


def paired(ratio: float, verdict: str = "different") -> dict[str, Any]:
    times = {"ms": 2.0 * ratio, "ms_q1": 1.9 * ratio, "ms_q3": 2.1 * ratio, "rounds": 12}
    quartiles = {"ratio": ratio, "ratio_q1": 0.99 * ratio, "ratio_q3": 1.01 * ratio}
    return {**times, **quartiles, "verdict": verdict}


def neurons_at(ratio: float, verdict: str = "different") -> dict[str, Any]:
    theirs = {"ms": 2.0, "ms_q1": 1.9, "ms_q3": 2.1, "rounds": 12}
    common = {"flips": 0.0, "gap": 0.0}
    row = {"forward": paired(ratio, verdict), "both": paired(ratio, verdict)}
    return {
        "SpikingJelly": {"forward": theirs, "both": theirs, "peak_mib": 100.0, **common},
        "triton": {**row, "peak_mib": 25.0, "flips": 2e-6, "gap": 0.0},
    }


def test_the_answer_about_neurons_follows_from_the_ratios() -> None:
    result = {"shape": [4, 64, 64, 384], "numbers": 1}
    theirs = {"float32": "triton", "bfloat16": "torch-reference", "float16": "torch-reference"}
    result |= {"theirs": theirs, "float32": neurons_at(0.5), "bfloat16": neurons_at(1.5)}
    result |= {"float16": neurons_at(1.0, "not distinguishable")}
    page = JOB.section({"neurons/tokens": result})
    assert (
        "`triton` in float32 next to SpikingJelly 2's, which runs its implementation `triton`"
        in page
    )
    assert page.count("faster in 1 (ratio of times 0.50) of 1") == 2
    assert (
        "bfloat16 and float16 next to SpikingJelly 2's, which runs its implementation `torch-ref"
        in page
    )
    assert page.count("slower in 1 (1.50), not shown to differ in 1 of 2") == 2
    assert "0.25 times SpikingJelly's" in page
    assert "2.00 spikes in a million differ" in page
    assert "| not distinguishable |" in page


def test_the_answer_about_steps_follows_from_the_ratios() -> None:
    theirs = {"ms": 10.0, "ms_q1": 9.0, "ms_q3": 11.0, "rounds": 12, "peak_mib": 400.0}
    ours = {**paired(0.8), "peak_mib": 100.0}
    result = {"batch": 32, "side": 224, "depths": [1, 2, 7], "dtype": "float32"}
    page = JOB.section({"step/float32": {**result, "steps": {"SpikingJelly": theirs, "k": ours}}})
    assert "takes 0.80 [0.79, 0.81] times the time and 0.25 times the memory" in page
    ours = {**paired(0.8, "busy"), "peak_mib": 100.0}
    page = JOB.section({"step/float32": {**result, "steps": {"SpikingJelly": theirs, "k": ours}}})
    assert "the time of `k` in float32: busy and 0.25 times the memory" in page
    assert "0.80" not in page


def test_orders_of_growth_are_found_and_listed_with_the_papers(results: dict[str, Any]) -> None:
    memory = copy.deepcopy(results["memory"])
    rows = []
    for side in (8, 20, 50, 100):
        n = side * side
        for name, mib, paper in (("qk_token", n / 1e3, None), ("spiking_self", n * n / 1e6, 10.7)):
            rows.append({"mixer": name, "side": side, "tokens": n, "mib": mib, "reason": None})
            rows[-1] |= {"paper_mib": None, "paper_ratio": paper, "ratio": 9.5 if paper else None}
    rows[-1] |= {"mib": None, "ratio": None, "reason": "would need too much"}
    names = ("qk_token", "spiking_self")
    orders = {name: spiking._order_of_growth(rows, name) for name in names}
    assert orders["qk_token"] == pytest.approx(1)
    assert orders["spiking_self"] == pytest.approx(2)
    page = JOB.section({"memory": {**memory, "rows": rows, "orders": orders}})
    assert "`qk_token` by N^1.00, `spiking_self` by N^2.00" in page
    assert "sqrt(N) = 50 `spiking_self` takes 9.5 times" in page
    assert "prints 10.70" in page
    assert "| would need too much |" in page
    assert spiking._order_of_growth(rows[:1], "qk_token") is None


def test_speeds_of_the_batches_are_compared() -> None:
    row = {"ms_q1": 1.0, "ms_q3": 1.0, "ms": 1.0, "rounds": 15, "peak_mib": 1.0}
    batches = {"64": {**row, "images_per_s": 2000.0}, "256": {**row, "images_per_s": 3000.0}}
    result = {"dtype": "bfloat16 autocast", "side": 32, "mode": "eager", "batches": batches}
    page = JOB.section({"speed": result})
    assert "batches of 256 are the fastest, 3000 images/s, 1.50 times batches of 64" in page
    share = 100 * 6 * 6.06e9 * 3000 / 989e12
    assert f"{share:.1f} % of the peak" in page
    assert math.isclose(share, 11.03, rel_tol=1e-3)


def test_the_arithmetic_counts_the_model_that_is_trained() -> None:
    from costs import cost

    assert cost("qkformer_hst_4_384", (3, 32, 32), num_classes=10).macs == pytest.approx(
        spiking.MACS, rel=1e-3
    )

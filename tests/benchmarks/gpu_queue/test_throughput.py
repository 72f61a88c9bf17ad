# SPDX-License-Identifier: Apache-2.0
"""Images per second: what is timed, what is made of the times, and what is said of it."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dry import context
from torch._dynamo.utils import counters

from commands import forkserver
from gpu_queue.jobs import throughput
from gpu_queue.jobs.throughput import FAMILIES, JOB, MODES, SETTINGS, TRAINING, Runner
from keymix import recipes
from keymix.analysis.timing import Samples
from keymix.models import list_models

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
VIT = FAMILIES[0]
TINY, _ = throughput._tiny()[0]


def test_models_are_those_that_the_papers_page_names() -> None:
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    rows = [row for family in FAMILIES[:-1] for row in family.rows]
    assert len(rows) == 16
    for row in rows:
        assert f"| {row.label} | `{row.model}` |" in page
        assert row.published
    assert {row.model for family in FAMILIES for row in family.rows} <= {
        *list_models(),
        "caformer_s18",
    }


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_batches_are_the_recipes(family: throughput.Family) -> None:
    recipe = recipes.get(family.recipe)
    assert (family.batch, family.side) == (recipe.data.batch_size, recipe.data.image_size)
    if family is not FAMILIES[-1]:
        assert family.rows[0].model == recipe.model.name
        assert throughput._recipe(family, family.rows[0]).optim == recipe.optim
    else:  # LAMB has no fused step
        assert throughput._recipe(family, family.rows[0]).optim.name == "adamw"


def test_a_dry_step_holds_what_the_form_says(tmp_path: Path) -> None:
    step = JOB.steps(True)[0]
    result = step.measure(context(tmp_path))
    json.dumps(result, allow_nan=False)
    assert [*result["rows"]] == ["ViT-S", "CSKA-ViT-S"]
    for label, row in result["rows"].items():
        assert row["finite"] is True
        for name in MODES["eager"]:
            assert 0 < row[name]["q1"] <= row[name]["median"] <= row[name]["q3"]
            assert ("against_base" in row[name]) == (label == "CSKA-ViT-S")
            assert row[name]["peak_mib"] is None
    text = JOB.section({step.name: result})
    assert "1.44 times as many, **" in text
    assert f"{result['rows']['ViT-S']['parameters']:,}" in text


def measure_compiled(work: Path) -> None:
    """Measure the compiled step of the dry run; leave its result and what was said."""
    said = os.open(work / "stderr", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 2)
    torch.set_num_threads(1)  # forks cannot use others
    step = next(step for step in JOB.steps(True) if step.name.endswith("compiled"))
    found = {step.name: step.measure(context(work))}
    (work / "results.json").write_text(json.dumps(found, allow_nan=False))


def test_a_compiled_step_compiles_in_processes_of_their_own(tmp_path: Path) -> None:
    # in a process that forks others to train: nothing was trained in it before
    process = forkserver().Process(target=measure_compiled, args=(tmp_path,))
    process.start()
    process.join()
    said = (tmp_path / "stderr").read_text()
    assert process.exitcode == 0, said
    assert "Traceback" not in said
    found = json.loads((tmp_path / "results.json").read_text())
    row = found["cifar10/vit_small/compiled"]["rows"]["ViT-S"]
    there = json.loads((tmp_path / "compiled-0.json").read_text(encoding="utf-8"))
    assert row["first"] == there != row["again"]
    for name in MODES["compiled"]:
        assert (row["again"][name]["graphs"], row["again"][name]["breaks"]) == (1, 0)
        assert row[name]["against_eager"]["median"] > 0
    assert "without a graph break" in JOB.section(found)


def test_numbers_are_those_of_the_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def timed(runners: Any, setting: Any, rounds: int) -> dict[str, Samples]:
        asked.append(next(name for name, each in SETTINGS.items() if each is setting))
        seconds = {  # no two ratios are the same: the test of ties counts thousands of their orders
            "ViT-S": [0.02 * (1 + 1e-9 * i) for i in range(12)],
            "CSKA-ViT-S": [0.01] * 12,
        }
        return {name: Samples(seconds[name], seconds[name]) for name in runners}

    monkeypatch.setattr(throughput, "_timed", timed)
    result = throughput._measure(TINY, "eager", context(tmp_path))
    assert asked == [*MODES["eager"]]
    base, other = result["rows"]["ViT-S"], result["rows"]["CSKA-ViT-S"]
    assert base[TRAINING]["median"] == pytest.approx(TINY.batch / 0.02)
    assert base[TRAINING]["tflops"] == pytest.approx(6 * base["macs"] * TINY.batch / 0.02 / 1e12)
    assert base["inference"]["tflops"] == pytest.approx(base[TRAINING]["tflops"] / 3)
    assert other[TRAINING]["against_base"]["median"] == pytest.approx(2)
    assert other[TRAINING]["against_base"]["verdict"] == "different"


def test_a_training_step_trains_and_an_inference_does_not() -> None:
    row = TINY.rows[0]
    model = throughput._built(TINY, row)
    batch = throughput._batch(TINY, "cpu")
    runner = Runner(TINY, row, model, batch, device="cpu", compiled=False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.eval()
    small = throughput.Setting(batch=1)
    assert runner.once(small).shape == (1, TINY.classes)
    assert runner.once(SETTINGS["inference"]).dtype == torch.bfloat16
    assert runner.once(SETTINGS["inference, float32"]).dtype == torch.float32
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    model.train()
    runner.once(SETTINGS[TRAINING])
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert still == []


def test_a_model_that_is_not_compiled_is_not_timed_as_one() -> None:
    row = TINY.rows[0]
    batch = throughput._batch(TINY, "cpu")
    model = throughput._built(TINY, row)
    runner = Runner(TINY, row, model, batch, device="cpu", compiled=False)
    with pytest.raises(RuntimeError, match="no graph"):
        runner.first(SETTINGS[TRAINING])


def test_models_that_are_compiled_share_no_place_for_graphs() -> None:
    counters.clear()
    for number in range(9):  # eight at most in one place
        throughput._own_code(torch.nn.ReLU(), "eager")(torch.ones(number + 1))
    assert counters["stats"]["unique_graphs"] == 9


def test_what_fails_or_hangs_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(family: Any, row: Any, device: str, file: Path) -> None:
        if row.label == "SKA-ViT-S":
            os._exit(1)
        if row.label == "CSKA-ViT-S":
            time.sleep(600)
        file.write_text(json.dumps({"label": row.label}))

    monkeypatch.setattr(throughput, "_compile_one", one)
    (tmp_path / "compiled-1.json").write_text("{}")  # of a run that was cut short
    ticks = itertools.count(step=50.0)  # the time is up when it is waited for the fourth
    monkeypatch.setattr(throughput, "AHEAD", 175.0)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    found = throughput._compile_all(VIT, context(tmp_path))
    assert found == {name: {"label": name} for name in ("ViT-S", "SKA-ViT-S, wide")}


# ---- what is said ----------------------------------------------------------------------------


def pair(ratio: float, verdict: str = "different") -> dict[str, Any]:
    return {"q1": ratio, "median": ratio, "q3": ratio, "p": 0.0, "verdict": verdict}


def made(family: throughput.Family, mode: str, *ratios: Any) -> dict[str, Any]:
    """A result whose rows have these ratios (and verdicts) to the first, in every setting."""
    pairs = [r if isinstance(r, tuple) else (r, "different") for r in ratios]
    rows: dict[str, Any] = {}
    for row, (ratio, verdict) in zip(family.rows, [(1.0, ""), *pairs], strict=True):
        entry = {"q1": 990 * ratio, "median": 1000 * ratio, "q3": 1010 * ratio, "tflops": 12.34}
        entry |= {"peak_mib": 2048.0, "against_eager": pair(1.7)}
        if row is not family.rows[0]:
            entry["against_base"] = pair(ratio, verdict)
        compiled = {"seconds": 20.4, "graphs": 1, "breaks": 0, "cached": 0}
        rows[row.label] = {
            "model": row.model,
            "parameters": 9_622_512,
            "macs": 647_244_800,
            "finite": True,
            **{name: dict(entry) for name in MODES[mode]},
        }
        if mode == "compiled":
            rows[row.label] |= {"first": {TRAINING: compiled}, "again": {TRAINING: compiled}}
    sizes = {"batch": 512, "small_batch": 64, "side": family.side, "rounds": 16}
    return {f"{family.name}/{mode}": {"rows": rows, "mode": mode, **sizes}}


@pytest.mark.parametrize(
    ("ratio", "answer"),
    [
        (1.5, "**holds**"),
        (1.37, "**holds**"),  # 5 % below 1.4417
        (1.36, "**does not hold**"),
        (0.8, "**does not hold**"),
        ((1.6, "not distinguishable"), "**does not hold**"),
        ((1.6, "busy"), "**is not decided**"),
        ((1.6, "too few rounds"), "**is not decided**"),
    ],
)
def test_the_claim_is_answered_by_the_ratio_and_the_test(ratio: Any, answer: str) -> None:
    said = JOB.section(made(VIT, "eager", 1.0, 1.0, ratio)).splitlines()[0]
    assert '"CSKA-ViT-S 7,220 against ViT-S 5,008"' in said
    assert answer in said


def test_the_claim_may_hold_in_part() -> None:
    found = made(VIT, "eager", 1.0, 1.0, 1.5) | made(VIT, "compiled", 1.0, 1.0, 0.9)
    said = JOB.section(found).splitlines()[0]
    assert "**holds in part** in inference here (reached: eager 1.50, eager, float32 1.50" in said
    assert "missed: compiled 0.90)" in said
    assert "CSKA-ViT-S eager 1.50, compiled 0.90." in said  # training
    assert "Compiled models (4) train at 1.70 to 1.70 times the eager" in said


def test_tables_have_counts_published_figures_and_ours() -> None:
    text = JOB.section(made(VIT, "eager", 0.75, (1.01, "not distinguishable"), 1.5))
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    heads = [cell.strip() for cell in rows["inference"].split("|")]
    assert heads[1:8] == [
        "inference",
        "parameters",
        "MACs, M",
        "published",
        "ratio",
        "eager",
        "ratio",
    ]
    line = next(line for line in text.splitlines() if line.startswith("| SKA-ViT-S, wide |"))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[2:9] == ["9,622,512", "647.2", "5,010", "1.00", "1,010", "n.d.", "1,010"]
    training = [cell.strip() for cell in rows["SKA-ViT-S"].split("|")]
    assert training[1:] == ["SKA-ViT-S", "750", "0.75", "12.3", "2.00", *"–––––––", ""]
    assert "quartiles lie within 1.0 % of them" in text


def test_published_ratios_of_all_rows_are_compared() -> None:
    """Published: SKA 1.02, wide 1.00, CSKA 1.44."""
    found = made(VIT, "eager", (1.3, "not distinguishable"), 0.9, 1.1)
    assert "Of 3 published ratios to a family's first model, 1 are on the same side" in JOB.section(
        found
    )


def test_an_undecided_ratio_counts_on_no_side() -> None:
    found = made(VIT, "eager", (1.3, "busy"), (1.0, "too few rounds"), 1.1)
    assert "Of 1 published ratios to a family's first model, 1 are" in JOB.section(found)


def test_one_compiled_step_alone_makes_a_section() -> None:
    text = JOB.section(made(FAMILIES[-1], "compiled", 1.0, 0.8, (0.7, "busy")))
    assert text.startswith("Whether CSKA-ViT-S is faster than ViT-S was not measured yet.")
    assert "SKAFormer-S18 compiled 0.80; CSKAFormer-S18 compiled 0.70 (busy)." in text
    assert "published ratios" not in text.splitlines()[0]
    line = next(line for line in text.splitlines() if line.startswith("| SKAFormer-S18 | – "))
    assert line.endswith("| 800 | 0.80 | 12.3 | 2.00 | 1.70 | 20 | 0 |")


def test_breaks_caches_and_infinite_losses_are_reported() -> None:
    found = made(FAMILIES[-1], "compiled", 1.0, 0.8, 0.7)
    row = found["imagenet/caformer_s18/compiled"]["rows"]["SKAFormer-S18"]
    row["first"] = {TRAINING: {**row["first"][TRAINING], "cached": 2}}
    row["again"] = {TRAINING: {**row["again"][TRAINING], "breaks": 3}}
    row["finite"] = False
    text = JOB.section(found)
    assert "3 graph breaks" in text.splitlines()[0]
    assert "| 20 (cached) | 3 |" in text
    assert "The loss was not finite at the end: SKAFormer-S18 (compiled)." in text


def test_steps_are_named_and_bounded() -> None:
    steps = JOB.steps(False)
    assert len(steps) == 10
    assert max(step.seconds for step in steps) < 480
    assert sum(step.seconds for step in steps) < 13 * 60

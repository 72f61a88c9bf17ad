# SPDX-License-Identifier: Apache-2.0
"""Benchmarks print their tables at their smallest sizes, where these take seconds."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import certainty
import few_tokens
import measured
import plain_baselines
from keymix.analysis.counting import count
from keymix.analysis.timing import Paired, Samples
from made_masks import write_uwgi
from written_masks_run import written_masks_run

LOADERS = ["keymix", "DataLoader, 0 workers", "DataLoader, 2 workers"]
STEPS = ["waiting", "step, ms", "step / keymix"]
RUNS: dict[str, tuple[str, list[str]]] = {  # options, and the first cells of the rows
    "data_path": (
        "--model vit_micro_p4_32 --batch-size 8 --steps 2 --repeats 1",
        [
            *(f"{name}: {what}" for name in LOADERS for what in STEPS),
            *(f"{name}: RandAugment, ms per image" for name in ("keymix", "torchvision")),
            "torchvision / keymix",
        ],
    ),
    "event_frames": (
        "--per-class 10 --events 200",
        ["first start", "second start", "an epoch of 81 recordings in batches of 16"],
    ),
    "few_tokens": ("--rounds 1 --sides 2", ["to 49,152"]),
    "folding": ("--models re_attention plain* --rounds 1", ["re_attention", "plain_convnet"]),
    "plain_baselines": (
        "--data digits --limit 300 --epochs 1 --seeds 1",
        ["logistic regression", "convolutions"],
    ),
    "softmax": (
        "--side 2 --rounds 1",
        [width for width in ("ViT-Ti", "ViT-S", "ViT-B") for _ in range(2)],
    ),
}


def run(script: str, words: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of the rows that a script prints."""
    assert importlib.import_module(script).main([*words.split(), "--threads", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("keymix ")
    rows = text.partition("|---")[2].splitlines()[1:]
    return [[cell.strip() for cell in row[1:-1].split(" | ")] for row in rows if row[:1] == "|"]


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_it_prints_a_row_for_each_case(
    script: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words, names = RUNS[script]
    rows = run(script, words, capsys)
    assert [row[0] for row in rows] == names
    assert all(any(char.isdigit() for char in "".join(row[1:])) for row in rows)


@pytest.mark.slow
def test_windows_are_measured_against_the_whole_image(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = write_uwgi(tmp_path / "uwgi", cases=4, slices=2, side=24)
    trained = written_masks_run(tmp_path / "run", f"uwgi:{data}", test_fraction=0.3)
    rows = run("windows", f"{trained.folder} --window 24 --sides 32 40 --whole 32", capsys)
    assert [row[0] for row in rows] == ["32²", "40²"]
    assert rows[0][-1] != rows[1][-1] == "–"


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "code"), [({1}, 0), ({0, 7}, 1)])
def test_too_many_differences_from_itself_fail(
    wrong: set[int], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module("self_comparison")
    calls = 0

    def paired(base: Any, other: Any, size: Any, *, repeats: int) -> Paired:
        nonlocal calls
        number, kind = divmod(calls, 6)
        calls += 1
        numbers = dict.fromkeys(("base_ms", "other_ms", "ratio", "ratio_q1", "ratio_q3"), 1.0)
        called = len(other.blocks) > len(base.blocks) or (kind == 2 and number in wrong)
        verdict: Any = "different" if called else "not distinguishable"
        return Paired(**numbers, rounds=repeats, quiet_share=1.0, p=0.0, verdict=verdict)

    monkeypatch.setattr(script, "measure_paired", paired)
    assert script.main(["--count", "50"]) == code


def test_a_simulated_comparison_recommends_a_mixer() -> None:
    case = certainty.Case("one 3 points ahead", 10_000, 10, looks=False)
    found = certainty.tally(case, 2, seed=0)
    assert found["pick"] == 2
    assert not found["wrong pick"]


def test_a_choice_costs_what_the_faster_path_would_have_saved() -> None:
    found = [few_tokens.Measured("forward", 1, ratio, True, True) for ratio in (0.5, 2.0)]
    assert few_tokens.regret(found, lambda each: False) == "1.414 on average, above 1.1 at 1 of 2"
    assert few_tokens.regret(found, lambda each: each.ratio < 1).startswith("1.000 on average")


def test_the_network_costs_what_its_head_says() -> None:
    with torch.device("meta"):
        cost = count(plain_baselines.network(3, 10), (3, 32, 32))
    assert round(cost.macs / 1e6, 1) == 39.5


def test_a_device_that_cannot_be_used_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("neurons").main(["--device", "teapot"])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "argument --device: device 'teapot' cannot be used here" in last


@pytest.mark.parametrize("others", [0.0, 1e6])
@pytest.mark.parametrize("quiet", [True, False])
def test_a_busy_machine_is_named(
    others: float,
    quiet: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = iter([0.0, others])
    monkeypatch.setattr(measured, "_others", lambda: next(taken))
    monkeypatch.setattr(Samples, "quiet_share", lambda self: float(quiet))
    measured.in_turns({"call": lambda: None}, rounds=1, what="nothing")
    assert capsys.readouterr().out.startswith("BUSY (nothing)") == (bool(others) or not quiet)

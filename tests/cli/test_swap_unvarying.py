# SPDX-License-Identifier: Apache-2.0
"""Swapping into a model that answers all images alike: nothing is said to have cost nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from written_run import written_run

from keymix.analysis.passes import Varies
from keymix.cli.swap import main
from keymix.errors import UserError
from keymix.swap import swap
from keymix.swap.held_out import HeldOut
from keymix.train import files
from keymix.train.runs import load_run


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keymix.swap.held_out.ROUNDS", 2)


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = load_run(written_run(tmp_path_factory.mktemp("dead") / "run"))
    state, facts = run.weights()
    state["head.weight"] = torch.zeros_like(state["head.weight"])
    files.write_weights(run.folder / files.weights_file("last"), state, facts)
    return run.folder


def test_the_command_calls_drift_and_cost_undefined(
    dead: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(dead), "--mixer", "ska", "--images", "8", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    said = capsys.readouterr()
    nothing = "undefined: the model's outputs do not vary from image to image"
    assert (
        f"What replacing attention in all 2 blocks with static_key costs is {nothing}" in said.out
    )
    assert "points" not in said.out
    assert f"drift of the output is {nothing}" in said.err
    stored = json.loads((tmp_path / "out" / "swap.json").read_text(encoding="utf-8"))
    drift = stored["report"]["output"]
    assert (drift["relative"], drift["top1_agreement"], drift["varies"]) == (None, None, False)
    assert all(row["drift"]["output"] > 0 for row in stored["report"]["rows"])


def test_a_search_is_refused(dead: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keymix.swap.search.LEAST", 1)
    words = [
        str(dead),
        "--mixer",
        "ska",
        "--images",
        "8",
        "--max-drop",
        "1",
        "--out",
        str(tmp_path / "o"),
    ]
    with pytest.raises(UserError, match="do not vary from image to image: a search has nothing"):
        main(words)


def test_one_answer_for_all_images_costs_nothing_either(dead: Path) -> None:
    model, other = load_run(dead).model(), load_run(dead).model()
    with torch.no_grad():
        model.head.weight.normal_()
        model.head.bias[3] = 1e4
        other.head.weight.normal_(std=9)
    images, labels = torch.randn(8, 1, 12, 12), torch.arange(8)
    held_out = HeldOut(images, labels)
    assert held_out.varies(model)
    result = held_out.says_nothing(model)
    assert result == "one answer"
    assert not held_out.says_nothing(other)
    assert not HeldOut(images, torch.full((8,), 3)).says_nothing(model)
    assert not HeldOut(images[:7], labels[:7]).says_nothing(model)
    report = swap(model, "ska", calibration=images)
    assert report.output is not None
    assert (report.output.top1_agreement, report.output.varies) == (None, True)
    assert report.output.relative is not None


def test_a_layer_that_gives_nothing_has_no_drift(dead: Path) -> None:
    model = load_run(dead).model()
    with torch.no_grad():
        model.head.weight.normal_()
        for name in ("weight", "bias"):
            model.get_submodule("blocks.0.attn.mixer.proj").get_parameter(name).zero_()
    report = swap(model, "ska", calibration=torch.randn(8, 1, 12, 12))
    assert [row.drift is not None and row.drift.output is None for row in report.rows] == [
        True,
        False,
    ]
    assert report.output is not None
    assert report.output.relative is not None
    assert "output moved by" in str(report)


def test_outputs_vary_where_any_differs_by_more_than_rounding() -> None:
    result = Varies()
    result.see(torch.full((1, 3), 2.0))
    assert result.varied()
    result.see(torch.full((4, 3), 2.0 + 1e-6))
    assert not result.varied()
    result.see(torch.tensor([[2.0, 2.0, 2.1]]))
    result.see(torch.full((4, 3), 2.0))
    assert result.varied()
    lost = Varies()
    lost.see(torch.full((2, 3), torch.nan))
    assert not lost.varied()

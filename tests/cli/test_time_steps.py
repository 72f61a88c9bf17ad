# SPDX-License-Identifier: Apache-2.0
"""Time steps T of spiking models on the command line: at inference, in counts, and in training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from written_run import written_run

from keymix.analysis.counting import count
from keymix.cli import main
from keymix.models import create_model, qkformer
from keymix.train import files, runs

SMALL = {"embed_dim": 16, "num_heads": 2, "depths": [1, 1], "time_steps": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on still images whose neurons fire, though it is not trained."""
    folder = tmp_path_factory.mktemp("spiking") / "run"
    made = written_run(folder, name="qkformer_micro_32", mixer="ssa", options=SMALL)
    state, facts = runs.load_run(made).weights()
    for name in state:
        if name.endswith("bn.bias") or name.endswith("norm.bias"):
            state[name] += 1.0
    files.write_weights(made / files.weights_file("last"), state, facts)
    return made


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_run(tmp_path_factory.mktemp("dense") / "run")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main([*words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main([*words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_a_run_is_scored_at_another_number_of_steps(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = json.loads(printed(capsys, "eval", str(run), "--json"))
    scores = json.loads(printed(capsys, "eval", str(run), "--time-steps", "5", "--json"))
    assert (own["time_steps"], scores["time_steps"]) == (2, 5)
    from keymix import data

    opened = runs.load_run(run)
    model, record = opened.model(), opened.weights()[1].data
    model.set_time_steps(5)
    loaded = data.load("digits", limit=40)
    mean, std = (torch.tensor(getattr(record, k)).view(-1, 1, 1) for k in ("mean", "std"))
    with torch.inference_mode():
        logits = model((loaded.test.images[: len(loaded.test)].float() / 255 - mean) / std)
    loss = float(torch.nn.functional.cross_entropy(logits, loaded.test.labels))
    assert scores["loss"] == pytest.approx(loss, rel=1e-5)
    assert scores["loss"] != pytest.approx(own["loss"], rel=1e-4)


def test_the_table_says_the_steps_where_they_were_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads, row = printed(capsys, "eval", str(run), "--time-steps", "3").splitlines()
    assert dict(zip(heads.split("\t"), row.split("\t"), strict=True))["T"] == "3"
    assert "T" not in printed(capsys, "eval", str(run)).splitlines()[0].split("\t")


def test_predict_takes_what_eval_takes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (30, 20), 90).save(tmp_path / "grey.png")
    words = ("predict", str(run), str(tmp_path), "--format", "json")
    own = printed(capsys, *words)
    assert printed(capsys, *words, "--time-steps", "2") == own
    assert printed(capsys, *words, "--time-steps", "5") != own


def test_models_without_steps_and_no_steps_are_refused_in_one_line(
    run: Path, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (12, 12), 90).save(tmp_path / "grey.png")
    for verb in (["eval"], ["predict"], ["count"]):
        images = [str(tmp_path)] if verb == ["predict"] else []
        model = "vit_nano_p2_12" if verb == ["count"] else str(dense)
        line = refused(capsys, *verb, model, *images, "--time-steps", "2")
        assert "time_steps=2 is for spiking models" in line
        assert "VisionTransformer has no time steps. Leave --time-steps out." in line
        model = "qkformer_micro_32" if verb == ["count"] else str(run)
        line = refused(capsys, *verb, model, *images, "--time-steps", "0")
        assert "time_steps=0 must be a whole number of 1 or more" in line
        assert "'few' is no whole number" in refused(capsys, *verb, model, "--time-steps", "few")


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("--neuron", "are --model.options.neuron: lif, if, plif or relu."),
        ("--model.neuron", "are --model.options.neuron: lif, if, plif or relu."),
        ("--time-steps", "are --model.options.time_steps on images, --data.time_steps on record"),
        ("--model.time_steps", "are --model.options.time_steps on images, --data.time_steps on"),
    ],
)
def test_arguments_of_spiking_models_are_found_where_they_are(
    word: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "out"))
    for verb in (("train", "digits_vit"), ("compare",)):
        line = refused(capsys, *verb, word, "2", *out)
        assert f"unknown option {word!r}" in line
        assert remedy in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_counts_are_of_all_steps_and_say_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_stage = {"depths": (1,), "mixer": ("spiking_self",)}
    for key, value in one_stage.items():  # counting takes a second a stage and call
        monkeypatch.setitem(qkformer.VARIANTS["qkformer_micro_32"], key, value)
    wanted = {t: count(create_model("qkformer_micro_32", time_steps=t)).macs for t in (2, 4)}
    assert main(["count", "qkformer_micro_32"]) == 0
    said = capsys.readouterr()
    heads, *_, total = (line.split("\t") for line in said.out.splitlines())
    cells = dict(zip(heads, total, strict=True))
    assert int(cells["MACs, dense, T=4"]) == wanted[4]
    assert int(cells["FLOPs, dense, T=4"]) == 2 * wanted[4]
    assert "over all T=4 time steps" in said.err
    words = ("--time-steps", "2", "--json")
    record = json.loads(printed(capsys, "count", "qkformer_micro_32", *words))
    assert (record["time_steps"], record["macs"]) == (2, wanted[2])
    assert "over all T=2 time steps" in record["note"]


def test_counts_of_dense_models_say_nothing_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", "vit_nano_p2_12"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0].split("\t")[2:4] == ["params", "MACs"]
    assert said.err == ""
    record = json.loads(printed(capsys, "count", "vit_nano_p2_12", "--json"))
    assert record["time_steps"] is None
    assert "note" not in record

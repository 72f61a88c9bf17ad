# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze spikes``: words, files, JSON, and one line for every mistake."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from keymix.cli import analyze, console
from keymix.data import load
from keymix.data.dataset import Split
from keymix.data.sources.moving_digits import recordings_of
from keymix.errors import UserError
from keymix.recipes.small import digits_vit
from keymix.studies.inputs import load_images, load_models
from keymix.studies.spikes.measure import spike_study
from keymix.studies.spikes.study import prepare
from keymix.train import files
from keymix.train.model import build_model, load_data
from keymix.train.recipe import DataConfig, ModelConfig, Recipe
from keymix.train.record import RunRecord, SplitScores, Tested, WeightsFacts

DIGITS = ["--images", "digits", "--limit", "3"]


def frames_of(split: Split, rows: Iterable[int]) -> torch.Tensor:
    return torch.stack([split.read(i) for i in rows]).float()


def _spiking_run(folder: Path, steps: int) -> Path:
    """Write a run of a small QKFormer whose norms know the data, so that it fires."""
    one = digits_vit()
    options = {"embed_dim": 16, "depths": [1, 1], "num_heads": 2, "time_steps": steps}
    options["mixer"] = ["qk_token", "spiking_self"]
    one = replace(
        one,
        data=replace(one.data, limit=40),
        model=replace(one.model, name="qkformer_hst_4_384", mixer=None, options=options),
    )
    images = load_data(one.data)
    torch.manual_seed(0)
    model = build_model(one, num_classes=10, in_chans=images.in_chans, image_size=images.image_size)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.randn(8, 1, 12, 12))
    facts = WeightsFacts(recipe=one, data=images.record())
    files.make_folder(folder)
    files.write_json(folder / files.RECIPE, one.to_dict())
    files.write_weights(folder / files.weights_file("last"), model.state_dict(), facts)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _spiking_run(tmp_path_factory.mktemp("runs") / "qk", 3)


def test_json_is_the_python_record_of_each_model(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _spiking_run(tmp_path / "four", 4)
    words = [str(run), str(other), *DIGITS, "--batch-norm", "separate", "--energy", "int8"]
    assert analyze.main(["spikes", *words, "--time-steps", "2", "--batch-size", "2", "--json"]) == 0
    studies = json.loads(capsys.readouterr().out)["studies"]
    assert [(s["label"], s["time_steps"], s["images"]) for s in studies] == [
        ("qk", 2, 3),
        ("four", 2, 3),
    ]
    (one,) = load_models([str(run)])
    one.model.set_time_steps(2)
    images = torch.cat(list(load_images(one, ["digits"], limit=3).batches(8)))
    found = spike_study(one.model, images, energy="int8", batch_norm="separate").to_dict()
    assert found["rate"] > 0.01
    for key in ("rate", "sops", "macs", "energy"):
        assert studies[0][key] == pytest.approx(found[key], rel=1e-5)
    for key in ("macs", "energy"):
        assert studies[0]["ann"][key] == pytest.approx(found["ann"][key], rel=1e-5)
    assert studies[0]["cost"]["mac"] == 0.23
    assert {op["what"] for op in studies[0]["operations"]} >= {"norm", "sum", "product"}
    assert [r["path"] for r in studies[0]["rasters"]] == ["stages.0.blocks.0.attn.mixer"]


def test_a_pipe_gets_lines_led_by_the_name_of_their_table(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze.main(["spikes", str(run), "--limit", "4"]) == 0
    text = capsys.readouterr()
    rows = [line.split("\t") for line in text.out.splitlines()]
    kinds = list(dict.fromkeys(row[0] for row in rows))
    assert kinds == ["total", "rates", "operations"]
    for kind in kinds:
        heading, *rest = [row for row in rows if row[0] == kind]
        assert heading[1] == "model"
        assert {row[1] for row in rest} == {"qk"}
        assert {len(row) for row in rest} == {len(heading)}
    assert "reading 4 images with qk" in text.err
    assert "qk: Too few images, 4" in text.err


def test_a_dead_run_is_warned_of_and_not_compared_with_its_ann_counterpart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _spiking_run(tmp_path / "dead", 2)
    path = folder / files.weights_file("last")
    state, facts = files.read_weights(path)
    state = {k: torch.full_like(v, -9) if k.endswith("bn.bias") else v for k, v in state.items()}
    files.write_weights(path, state, facts)
    data = replace(facts.data, sizes=dict.fromkeys(("train", "val", "test"), 100))
    for top1, said in ((0.15, True), (0.17, False)):
        scores = {"loss": 2.3, "top1": top1, "top5": 0.5, "balanced": top1}
        mark = Tested(epoch=0, val=scores, test=SplitScores(scores=scores))
        summary = RunRecord(
            status="done", model="qkformer_hst_4_384", mixer=None, seed=0, params=1, epochs=1,
            seconds=1.0, last=mark, best=mark, data=data, task=data.task,
        )  # fmt: skip
        files.write_json(folder / files.SUMMARY, summary)
        assert analyze.main(["spikes", str(folder), *DIGITS]) == 0
        text = capsys.readouterr()
        heading, total = (r.split("\t") for r in text.out.splitlines() if r.startswith("total"))
        row = dict(zip(heading, total, strict=True))
        assert (row["rate"], row["ann_ratio"]) == ("0", "")
        assert float(row["ann_energy_pj"]) > 0
        assert "dead: 100.0 % of the neurons never fired" in text.err
        assert "dead: The network's outputs do not vary" in text.err
        assert ("test accuracy, 15.0 %" in text.err) == said


def test_a_terminal_gets_words_and_tables(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(console.out), "is_terminal", True)
    assert analyze.main(["spikes", str(run), *DIGITS]) == 0
    out = capsys.readouterr().out
    for expected in (
        "Too few images, 3",
        "above 1",
        "MLP layer 2",
        "SOPs",
        "a network that works",
    ):
        assert expected in out


@pytest.mark.slow
def test_a_folder_gets_the_page_the_record_tables_and_charts(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [str(run), *DIGITS, "--out", str(out)]
    raster = ["--raster-image", "1", "--head", "1", "--step", "0", "--tokens", "5,7"]
    assert analyze.main(["spikes", *words, *raster]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"spikes.html", "spikes.json", "spikes-operations.csv", "spikes-energy.svg"} <= names
    assert {"spikes-raster-qk-1.svg", "spikes-image-qk-1.svg"} <= names
    (study,) = json.loads((out / "spikes.json").read_text())["studies"]
    (drawn,) = study["rasters"]
    assert (drawn["head"], drawn["step"], drawn["start"], len(drawn["keys"][0])) == (1, 0, 5, 7)
    assert drawn["grid"] == [12, 12]
    assert study["photo"].startswith("data:image/png;base64,")
    assert "stage 1, block 1, head 2 of 2, step 1 of 3" in (out / "spikes.html").read_text()
    with pytest.raises(UserError, match="add --overwrite"):
        analyze.main(["spikes", *words])
    (out / "spikes-old.svg").write_text("")
    assert analyze.main(["spikes", *words, "--overwrite"]) == 0
    assert not (out / "spikes-old.svg").exists()


def test_a_model_of_fixed_steps_says_so() -> None:
    class Fixed(torch.nn.Module):
        v_threshold = 1.0

    (one,) = load_models(["vit_nano_p2_12"])
    with pytest.raises(UserError, match="Leave --time-steps out"):
        prepare(replace(one, model=Fixed()), 2)


@pytest.fixture(scope="module")
def run_on_events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on recordings, whose norms know them, so that it fires."""
    folder = tmp_path_factory.mktemp("runs") / "moving"
    one = Recipe(
        name="moving",
        data=DataConfig(spec="moving_digits:100", time_steps=3, frames_by="time", image_size=16),
        model=ModelConfig(name="qkformer_micro_32"),
    )
    data = load_data(one.data)
    model = build_model(one, num_classes=10, in_chans=2, image_size=(16, 16), time_steps=3)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(frames_of(data.train, range(16)))
    files.make_folder(folder)
    files.write_json(folder / files.RECIPE, one.to_dict())
    facts = WeightsFacts(recipe=one, data=data.record())
    files.write_weights(folder / files.weights_file("last"), model.state_dict(), facts)
    return folder


@pytest.mark.slow
def test_a_run_on_events_is_shown_frames_of_its_recordings(
    run_on_events: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def studied(*words: str) -> dict[str, Any]:
        assert analyze.main(["spikes", str(run_on_events), "--json", *words]) == 0
        (study,) = json.loads(capsys.readouterr().out)["studies"]
        assert isinstance(study, dict)
        return study

    (one,) = load_models([str(run_on_events)])
    for words, steps in (([], 3), (["--time-steps", "2"], 2)):
        data = load("moving_digits:100", time_steps=steps, frames_by="time", image_size=16)
        rows = [i * len(data.test) // 5 for i in range(5)]
        one.model.set_time_steps(steps)
        study = studied("--limit", "5", *words)
        found = spike_study(one.model, frames_of(data.test, rows)).to_dict()
        assert found["rate"] > 0.01
        for key in ("rate", "sops", "macs", "energy", "time_steps", "images"):
            assert study[key] == pytest.approx(found[key], rel=1e-5)
    assert study["origin"] == "test recordings of moving_digits:100"
    assert study["raster_image"] == Path(data.test.ids(0)).name
    assert study["photo"].startswith("data:image/png;base64,")
    (events,) = recordings_of(data.test.index[[3]])
    np.savez(tmp_path / "a.npz", **{name: events[name] for name in "txyp"})
    alone = spike_study(one.model, frames_of(data.test, [3]))
    study = studied("--images", str(tmp_path), "--time-steps", "2")
    assert study["sops"] == pytest.approx(alone.sops, rel=1e-5)
    assert study["origin"] == str(tmp_path)
    for images, said in (("digits", "digits.* holds images"), ("absent", "no recording or")):
        with pytest.raises(UserError, match=said):
            studied("--images", images)

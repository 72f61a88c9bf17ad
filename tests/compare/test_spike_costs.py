# SPDX-License-Identifier: Apache-2.0
"""Spiking comparisons on a few digits: rates, operations, energy, and the ANN counterpart."""

from __future__ import annotations

import csv
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from few_digits import small

import keymix
from keymix.compare import pictures
from keymix.compare.pictures import SPIKE_IMAGES
from keymix.compare.run import Comparison, rebuild
from keymix.data import load
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.records import to_json
from keymix.report.frames import RESULTS, SPIKES, STEPS
from keymix.train.runs import load_run

pytestmark = pytest.mark.slow
SMALL = {"embed_dim": 16, "num_heads": 2, "depths": [1]}
TINY = SMALL | {"time_steps": 2}
ANN = "ANN counterpart of spiking_self"


def spiking(out: Path, **more: Any) -> Comparison:
    settings: dict[str, Any] = {
        "model": "qkformer_micro_32",
        "mixers": "qkta,ssa",
        "overrides": {"model.options": TINY, "data.batch_size": 30},
        "controls": False,
    }
    return small(out, **(settings | more))


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "results.csv").open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def with_ann(tmp_path_factory) -> Comparison:
    return spiking(tmp_path_factory.mktemp("spikes") / "out", seeds=2, ann=True)


def spikes_of(found: Comparison) -> dict[str, Any]:
    """What spikes cost, by the run's folder."""
    return {run["folder"]: run["spikes"] for run in to_json(found.record)["runs"]}


@pytest.fixture
def copied(with_ann, tmp_path) -> Path:
    return Path(shutil.copytree(with_ann.out, tmp_path / "copy"))


def test_rates_and_energy_are_those_of_the_trained_weights_on_validation_images(with_ann):
    data = load("digits", limit=100)
    images = torch.stack(data.some(data.val, SPIKE_IMAGES))
    each = []
    for seed in (0, 1):
        folder = f"runs/qk_token/seed{seed}"
        study = keymix.spike_study(load_run(with_ann.out / folder).model("last"), images)
        run = spikes_of(with_ann)[folder]
        assert run["images"] == len(data.val)
        assert run["firing_rate"] == pytest.approx(study.rate)
        assert run["sops"] == pytest.approx(study.sops)
        low, middle, high = (value * 1e-6 for value in study.energy)
        assert run["energy_uj"] == pytest.approx(middle)
        assert (run["energy_low_uj"], run["energy_high_uj"]) == pytest.approx((low, high))
        assert run["dense_energy_uj"] == pytest.approx(study.ann_energy * 1e-6)
        each.append(middle)
    assert each[0] != each[1]
    mean = with_ann.record.spikes["qk_token"]["energy_uj"]
    assert (mean.n, mean.mean) == (2, pytest.approx(statistics.mean(each)))
    assert mean.sd == pytest.approx(statistics.stdev(each))


def test_results_csv_grows_by_columns_of_the_last_epoch(with_ann):
    rows = rows_of(with_ann.out)
    assert tuple(rows[0]) == (*RESULTS, STEPS, *SPIKES)
    for row in rows:
        assert row[STEPS] == ("1" if row["mixer"] == ANN else "2")
        slug = "ann-of-spiking_self" if row["mixer"] == ANN else row["mixer"]
        folder = f"runs/{slug}/seed{row['seed']}"
        run = spikes_of(with_ann)[folder]
        values = [row[name] for name in SPIKES]
        if row["epoch"] == "best":
            assert values == [""] * len(SPIKES)
        elif row["mixer"] == ANN:
            assert values[:2] == ["", ""]
            assert float(row["energy_uj"]) == pytest.approx(float(row["macs"]) * 4.6e-6)
        else:
            assert [float(word) for word in values] == [run[name] for name in SPIKES]


def test_the_ann_counterpart_is_the_baselines_network_with_relu_at_one_step_under_the_same_recipe(
    with_ann,
):
    mine, other = (load_run(with_ann.out / f"runs/{slug}/seed1") for slug in (
        "ann-of-spiking_self", "spiking_self",
    ))  # fmt: skip
    options = mine.recipe.model.options
    assert options == {**TINY, "neuron": "relu", "time_steps": 1}
    changed = {"name", "model"}
    same = [{k: v for k, v in run.recipe.to_dict().items() if k not in changed}
            for run in (mine, other)]  # fmt: skip
    assert same[0] == same[1]
    ann, spikes = mine.model(), other.model()
    assert [type(m) for m in find_mixers(ann).values()] == [
        type(m) for m in find_mixers(spikes).values()
    ]
    assert not [m for m in ann.modules() if hasattr(m, "v_threshold")]
    sizes = [sum(p.numel() for p in model.parameters()) for model in (ann, spikes)]
    assert sizes[0] == sizes[1]
    row = next(row for row in with_ann.record.outcome.last if row.mixer == ANN)
    assert row.seeds is not None
    assert row.seeds.n == 2  # paired with the baseline's runs
    mixers = with_ann.record.spikes
    dense = mixers["spiking_self"]["dense_energy_uj"].mean
    assert mixers[ANN]["energy_uj"].mean == pytest.approx(dense)


def test_page_and_terminal_show_what_spikes_cost(with_ann, capsys):
    from keymix.cli.comparison import plain, print_result

    page = with_ann.report.read_text(encoding="utf-8")
    assert "What spikes cost" in page
    assert "Test accuracy against energy per image, µJ" in page
    assert "with ReLU in place of every neuron, at one time step" in page
    print_result(with_ann)
    lines = capsys.readouterr().out.splitlines()
    (head,) = [
        i for i, line in enumerate(lines) if line.startswith("mixer\tspikes per neuron and step")
    ]
    assert [line.split("\t")[0] for line in lines[head + 1 : head + 4]] == [
        "qk_token",
        "spiking_self",
        ANN,
    ]
    energy = to_json(with_ann.record.spikes)["qk_token"]["energy_uj"]
    digits = 3 if energy["mean"] < 1 else 2
    mean, sd = (f"{energy[key]:.{digits}f}" for key in ("mean", "sd"))
    assert lines[head + 1].split("\t")[5] == f"{mean} ± {sd}"
    assert "docs/spikes.md" in lines[head + 4]
    row = plain(with_ann)["mixers"][0]
    assert row["spikes"]["energy_uj"] == energy


def test_multiply_adds_say_that_they_are_dense_and_of_how_many_steps(with_ann, capsys):
    from keymix.cli.comparison import plain, print_result

    print_result(with_ann)
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    first = next(i for i, cells in enumerate(lines) if cells[0] == "mixer")
    heads, *rows = lines[first : first + 4]
    assert "multiply-adds, dense, T=2" in heads
    assert {row[0] for row in rows} == {"qk_token", "spiking_self", ANN}
    page = with_ann.report.read_text(encoding="utf-8")
    assert ">multiply-adds per image, dense, T=2</th>" in page
    assert page.count('<span class="soft">T=1</span>') == 1
    assert "Test accuracy against multiply-adds per image, dense, all T" in page
    steps = {row["mixer"]: row["costs"]["time_steps"] for row in plain(with_ann)["mixers"]}
    assert steps == {"qk_token": 2, "spiking_self": 2, ANN: 1}


def test_spikes_are_read_once_and_again_for_other_weights(copied, monkeypatch):
    studied: list[str] = []
    really = pictures._spikes

    def watched(folder: Path, images: Any) -> Any:
        studied.append(folder.relative_to(copied).as_posix())
        return really(folder, images)

    monkeypatch.setattr(pictures, "_spikes", watched)
    again = spikes_of(spiking(copied, seeds=2, ann=True))
    assert studied == []
    weights = copied / "runs/qk_token/seed1/weights_last.safetensors"
    shutil.copy(copied / "runs/qk_token/seed0/weights_last.safetensors", weights)
    other = spikes_of(rebuild(copied))
    assert studied == ["runs/qk_token/seed1"]
    assert other["runs/qk_token/seed1"] == other["runs/qk_token/seed0"]
    assert again["runs/qk_token/seed1"] != other["runs/qk_token/seed1"]


def test_bounds_are_in_their_order(with_ann, monkeypatch):
    class Study:
        energy = (1e6, 2e6, 3e6)  # pJ
        ann_energy, rate, silent, sops, macs, images = 4e6, 0, 0, 0, 0, 1

    monkeypatch.setattr(pictures, "read_spikes", lambda *_, **__: Study)
    row = pictures._spikes(with_ann.out / "runs/qk_token/seed0", torch.zeros(1))
    energies = [row.energy_low_uj, row.energy_uj, row.dense_energy_uj, row.energy_high_uj]
    assert energies == pytest.approx([1, 2, 4, 3])


def test_dense_comparisons_and_ann_counterparts_alone_have_no_table_of_spikes(tmp_path):
    relu = spiking(tmp_path / "relu", overrides={"model.options": TINY | {"neuron": "relu"}})
    assert relu.record.spikes == {}
    assert "What spikes cost" not in relu.report.read_text(encoding="utf-8")
    assert tuple(rows_of(relu.out)[0]) == RESULTS
    with pytest.raises(UserError, match="--ann: vit_nano_p4_12 has no spikes"):
        small(tmp_path / "dense", ann=True)
    assert not (tmp_path / "dense").exists()


def test_recordings_of_events_are_compared_with_an_ann_counterpart_of_the_same_frames(tmp_path):
    found = spiking(
        tmp_path / "out",
        data="moving_digits:100",
        mixers="qkta,ssa",
        ann=True,
        overrides={
            "model.options": SMALL,
            "data.time_steps": 3,
            "data.image_size": 16,
            "data.batch_size": 20,
            "augment.crop_padding": 0,
        },
    )
    mixers = to_json(found.record.spikes)
    assert found.record.costs["qk_token"].time_steps == 3
    assert mixers["qk_token"]["energy_uj"]["mean"] > 0
    options = load_run(tmp_path / "out/runs/ann-of-spiking_self/seed0").recipe.model.options
    assert options == SMALL | {"neuron": "relu"}
    # every frame goes through the whole ANN counterpart
    ratio = mixers[ANN]["energy_uj"]["mean"] / mixers["spiking_self"]["dense_energy_uj"]["mean"]
    assert ratio == pytest.approx(3, rel=0.01)

# SPDX-License-Identifier: Apache-2.0
"""A whole comparison on a few masks: what it trains, reports, draws, and reads again."""

from __future__ import annotations

import base64
import csv
import io
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from few_masks import SIDE, few, recipe_of
from PIL import Image

from keymix.analysis.mask_pictures import GREY, rim
from keymix.analysis.overlap import mean_jaccard, overlap_counts
from keymix.cli.comparison import plain, print_result
from keymix.compare.models import choose_mixers, make_plan
from keymix.compare.question import Question
from keymix.compare.run import Comparison, rebuild
from keymix.data import load
from keymix.data.kinds import IGNORE
from keymix.errors import UserError
from keymix.records import to_json
from keymix.report.pictures import GROUND
from keymix.tasks.segmentation.gallery import ERRORS
from keymix.train.runs import load_run

TEST = 16  # images: 0.4 of ten cases of four


@pytest.fixture(scope="module")
def folder(finished_masks) -> Path:
    return finished_masks / "data"


@pytest.fixture(scope="module")
def done(finished_masks, folder, tmp_path_factory) -> Comparison:
    """The comparison, called once more: nothing is trained again."""
    out = tmp_path_factory.mktemp("comparison") / "out"
    shutil.copytree(finished_masks / "out", out)
    return few(folder, out, controls=False)


def pixels_of(panel: dict[str, Any], layer: str) -> np.ndarray:
    """Read a layer of a panel, ``[H, W, 4]``."""
    png = panel["layers"][layer].partition(",")[2]
    return np.array(Image.open(io.BytesIO(base64.b64decode(png))))


def answers_of(done: Comparison, run: dict[str, Any]) -> dict[str, np.ndarray]:
    with np.load(done.out / run["folder"] / "predictions_test.npz") as stored:
        order = np.argsort(stored["index"])
        return {name: stored[name][order] for name in stored}


@pytest.mark.slow
def test_scores_are_those_of_the_pixels_of_all_test_images(done):
    record = to_json(done.record)
    assert record["data"]["task"] == "segmentation"
    assert [m["label"] for m in record["mixers"]] == ["softmax", "key_value(pos_dim=5)"]
    assert (record["test_images"], record["test_cases"]) == (TEST, 4)
    assert record["classes"] == {"names": ["disc", "bar"], "test_images": [12, 12]}
    for run in record["runs"]:
        counts = answers_of(done, run)["last_counts"]
        shared, said, true = counts.sum(0)[1:].T
        each = shared / (said + true - shared)
        assert run["last"]["test"]["jaccard"] == pytest.approx(each.mean())
        assert run["classes"]["score"] == pytest.approx(each)
        packed = np.frombuffer(base64.b64decode(run["shares"]), "<u2") / 65535
        assert packed == pytest.approx(mean_jaccard(counts, (1, 2)), abs=1e-4)
        assert [set(line) for line in run["history"]] == [
            {"epoch", "train_loss", "val_loss", "val_jaccard"}
        ] * 2


def test_differences_are_paired_by_seed_and_over_cases(done):
    of = {
        (r["mixer"], r["seed"]): r["last"]["test"]["jaccard"] for r in to_json(done.record)["runs"]
    }
    row = to_json(done.record.outcome.last[1])
    label = "key_value(pos_dim=5)"
    expected = np.mean([of[label, s] - of["softmax", s] for s in (0, 1)])
    for question, n in (("seeds", 2), ("images", 4)):
        assert row[question]["n"] == n
        assert row[question]["difference"] == pytest.approx(expected, abs=1e-9)
    assert row["interval"]["n"] == 2


def test_results_csv_names_distances_by_their_unit(done):
    with (done.out / "results.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    metrics = {row["metric"] for row in rows if row["split"] == "test"}
    known = {"jaccard", "weighted_jaccard", "dice", "loss", "missed"}
    known |= {"surface_dice", "calibration_error"}
    assert known <= metrics <= known | {"hd95_px"}
    assert {row["metric"] for row in rows if row["split"] == "val"} == {
        "jaccard", "weighted_jaccard", "dice", "loss",
    }  # fmt: skip
    assert all(int(row["macs"]) > 0 and float(row["latency_ms"]) > 0 for row in rows)


def test_pictures_are_the_models_answers_on_images_chosen_by_all_of_them(done, folder):
    gallery = to_json(done.pictures)["galleries"]["masks"]
    data = load(f"masks:{folder}", image_size=SIDE, val_fraction=1 / 6, test_fraction=0.4)
    assert len(data.test) == TEST
    assert gallery["names"] == [row.name for row in data.test.rows]
    scenes = gallery["scenes"]
    chosen = [gallery["names"].index(scene["name"]) for scene in scenes]
    truth = torch.stack([data.test.mask(i) for i in chosen])
    ignored = truth == IGNORE
    assert gallery["about"] == {"seed": 0, "empty": True, "ignored": True}
    areas = ((truth > 0) & ~ignored).sum((1, 2)).tolist()
    assert areas[6] == 0 < min(areas[:6])
    answers = [answers_of(done, run)["last_counts"] for run in to_json(done.record)["runs"]]
    mean = np.mean([mean_jaccard(counts, (1, 2)) for counts in answers], axis=0)
    full = [i for i in range(TEST) if answers[0][i, 1:, 2].any()]
    assert chosen[0] == min(full, key=lambda i: mean[i])
    assert mean[chosen[5]] <= mean[chosen[4]] == max(mean[i] for i in full)
    kinds = [scene.get("why", "").partition(":")[0] for scene in scenes]
    assert kinds == ["worst", "worst", "median", "median", "best", "best", "empty"]
    model = load_run(done.out / "runs/softmax/seed0").model("last")
    with torch.inference_mode():
        said = model(data.prepared(torch.stack([data.test.read(i) for i in chosen]))).argmax(1)
    counts = overlap_counts(said.numpy(), truth.numpy(), num_classes=3, multilabel=False)
    panels = [
        next(p for p in scene["panels"] if "softmax" in p.get("mixers", ())) for scene in scenes
    ]
    shares = mean_jaccard(counts, (1, 2))
    assert [p["text"] for p in panels[:6]] == [f"IoU {100 * s:.1f}\u00a0%" for s in shares[:6]]
    found = ((said > 0) & ~ignored).sum((1, 2)).tolist()
    assert panels[6]["text"] == "rightly nothing" or panels[6]["text"].startswith(f"{found[6]:,} ")
    for true, mine, scene in zip(truth.numpy(), said.numpy(), scenes, strict=True):
        drawn = pixels_of(scene["panels"][0], "masks")
        assert ((drawn[..., 3] > 0) == (true > 0)).all()
        assert (drawn[true == IGNORE] == (*GREY, GROUND)).all()
        panel = next(p for p in scene["panels"] if "softmax" in p["mixers"])
        drawn = pixels_of(panel, "masks")
        for c in (1, 2):  # the rim of the truth lies over every prediction
            assert (drawn[rim(true == c)] == 255).all()
        drawn, known = pixels_of(panel, "errors"), true != IGNORE
        for colour, where in (
            (ERRORS["right"], (mine == true) & (true > 0)),
            (ERRORS["found too much"], (mine > 0) & (true == 0)),
            (ERRORS["missed"], (mine == 0) & (true > 0)),
            (ERRORS["of another class"], (mine != true) & (mine > 0) & (true > 0)),
        ):
            shown = (drawn[..., :3] == colour).all(-1) & (drawn[..., 3] > 0)
            assert (shown == (where & known)).all()


def test_attention_is_read_on_slices_of_different_cases(done):
    attention = to_json(done.pictures)["attention"]
    names = [image["label"] for image in attention["images"]]
    assert len({name.partition("_")[0] for name in names}) == 4
    assert not any(name.endswith("_00") for name in names)  # which have nothing in them
    assert attention["class_token"] is False
    assert set(attention["maps"]) == {"softmax", "key_value(pos_dim=5)"}


def test_terminal_and_page_speak_of_overlap(done, capsys):
    print_result(done)
    printed = capsys.readouterr().out
    for word in ("mean IoU, %", "difference, points"):
        assert word in printed
    assert "mean IoU" in printed
    assert "ccuracy" not in printed
    page = done.report.read_text(encoding="utf-8")
    for section in ("What they find", "Mean IoU against cost", "Where they look"):
        assert section in page
    assert "hd95_px" in plain(done)["mixers"][0]


def test_progress_shows_what_was_validated(done, finished_masks):
    events = pickle.loads((finished_masks / "events").read_bytes())
    epochs = [event for event in events if event.kind == "epoch"]
    assert len(epochs) == len(done.record.runs) * 2
    assert {event.text for event in epochs} == {"mean IoU"}
    lines = {r["mixer"] + str(r["seed"]): r["history"] for r in to_json(done.record)["runs"]}
    for event in epochs:
        line = lines[event.mixer + str(event.seed)][event.epoch - 1]
        assert event.value == pytest.approx(line["val_jaccard"])


@pytest.mark.slow
def test_a_rebuilt_page_is_the_same_and_without_images_keeps_its_pictures(
    done, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    shutil.copytree(done.out, out)
    same = to_json(rebuild(out).record)
    for key in ("outcome", "runs", "classes"):
        assert same[key] == to_json(done.record)[key]

    def gone(*args: Any) -> None:
        raise UserError("the images are elsewhere")

    monkeypatch.setattr("keymix.compare.pictures.load_data", gone)
    kept = rebuild(out)
    assert kept.pictures.galleries == done.pictures.galleries
    assert kept.notes == ()


def test_other_images_are_another_comparison(done, folder):
    with pytest.raises(UserError, match=r"data\.limit is None there and 8 here"):
        few(folder, done.out, limit=8)


def test_mixers_that_leave_out_prefix_tokens_change_no_readout_of_every_patch(folder, tmp_path):
    recipe = recipe_of(folder)
    data = load(recipe.data.spec, image_size=SIDE, val_fraction=1 / 6, test_fraction=0.4)
    specs = choose_mixers("mhsa,cska", controls=True, model="setr_micro")
    plan = make_plan(Question(match="params", out=tmp_path), recipe, data, specs)
    assert (plan.pooling, plan.pooled_for) == ("", ())
    assert plan.recipe.model.global_pool is None
    assert "parameters" in plan.mixers[1].note


def test_a_model_of_classes_is_refused_for_masks(folder, tmp_path):
    recipe = recipe_of(folder, name="vit_nano_p2_12", options={})
    with pytest.raises(UserError, match="vit_nano_p2_12"):
        few(folder, tmp_path / "out", recipe=recipe)
    assert not (tmp_path / "out").exists()

# SPDX-License-Identifier: Apache-2.0
"""Runs on masks: what they leave behind, how they resume, what they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import on_masks
from timm.data import create_transform, resolve_model_data_config

from keymix.analysis import overlap
from keymix.data.augment import Augment
from keymix.data.decode import resized_image
from keymix.errors import UserError
from keymix.tasks.segmentation.facts import MaskDetails
from keymix.tasks.segmentation.training import SegmentationTask
from keymix.train import files
from keymix.train.engine import train
from keymix.train.model import load_data
from keymix.train.runs import Run, evaluate, load_run
from made_masks import ORGANS, write_uwgi


@pytest.fixture(scope="session")
def scans(masks_run: Path) -> Path:
    return masks_run / "uwgi"


@pytest.fixture(scope="session")
def run(masks_run: Path) -> Run:
    return load_run(masks_run / "run")


def test_a_run_records_what_its_kept_counts_say(run: Run) -> None:
    test, data = run.summary.last.test, run.summary.data
    own = test.own.read(MaskDetails)
    assert run.summary.task == data.task == "segmentation"
    assert data.classes == ("background", *ORGANS)
    with np.load(run.folder / files.PREDICTIONS) as kept:
        counts, distances = kept["last_counts"], kept["last_surfaces"][..., 0]
        assert sorted(kept["index"]) == list(range(data.sizes["test"]))
        assert len(set(kept["group"].tolist())) == (data.cases or {})["test"]
    scored = list(data.scored_classes)
    assert scored == [1, 2, 3]
    pooled = counts.sum(0)
    assert test.scores["jaccard"] == overlap.mean_jaccard(pooled, scored)
    assert test.scores["weighted_jaccard"] == overlap.weighted_jaccard(pooled, scored)
    assert test.scores["dice"] == overlap.mean_dice(pooled, scored)
    pixels = 24 * 24 * data.sizes["test"]
    assert pooled[:, 1].sum() == pooled[:, 2].sum() == pixels
    one_alone = (counts[:, 1:, 1] > 0) != (counts[:, 1:, 2] > 0)
    assert own.missed == one_alone.sum() == sum(c.missed for c in own.classes)
    assert [each.name for each in own.classes] == list(ORGANS)
    assert own.distance_unit == "mm"
    both = (counts[..., 1] > 0) & (counts[..., 2] > 0)
    assert (np.isfinite(distances[:, 1:]) == both[:, 1:]).all()
    assert np.isnan(distances[:, 0]).all()


def test_an_epoch_records_the_losses_and_the_scores_of_validation(run: Run) -> None:
    lines = run.metrics()
    names = {"train_loss", "train_dice_loss", "val_loss", "val_jaccard", "val_dice"}
    assert all(names | {"val_weighted_jaccard"} <= line.keys() for line in lines)
    assert not any("val_top1" in line for line in lines)
    assert 0 < lines[0]["train_dice_loss"] < 1
    best = max(lines, key=lambda line: (line["val_jaccard"], -line["val_loss"]))
    assert run.summary.best.epoch == best["epoch"]


def test_distances_are_in_millimetres_of_the_scan_at_any_size_of_the_model(run: Run) -> None:
    near = evaluate(run, split="train")
    far = evaluate(run, split="train", image_size=48)
    assert near["hd95_mm"] < 24 * 1.5 * 2**0.5
    assert far["hd95_mm"] < 24 * 1.5 * 2**0.5  # 48 pixels of 0.75 mm
    assert far["image_size"] == [48, 48]


def test_timm_shows_a_loaded_model_and_its_encoder_the_images_of_its_training(run: Run) -> None:
    model, seen = load_run(run.folder).model(), run.summary.data
    data = load_data(run.recipe.data)
    wide = np.random.default_rng(0).integers(0, 255, (1, 30, 50), dtype=np.uint8)
    wanted = data.prepared(resized_image(torch.from_numpy(wide), (24, 24))[None])[0]
    a_level = 1 / 255 / min(seen.std)  # Pillow rounds after each axis
    for part in (model, model.encoder):
        config = resolve_model_data_config(part)
        assert (config["mean"], config["std"]) == (tuple(seen.mean), tuple(seen.std))
        transform = create_transform(**config, is_training=False)
        assert (transform(Image.fromarray(wide[0])) - wanted).abs().max() <= 1.5 * a_level
    assert model.pretrained_cfg["label_names"] == tuple(seen.classes)


def test_evaluation_repeats_the_test(run: Run) -> None:
    scores = evaluate(run)
    assert {key: scores[key] for key in ("jaccard", "dice", "loss")} == {
        key: run.summary.last.test.scores[key] for key in ("jaccard", "dice", "loss")
    }
    assert scores["classes"] == run.summary.last.test.own.values["classes"]


def test_a_run_that_was_broken_off_ends_with_the_same_weights(
    scans: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = SegmentationTask.training_step

    def breaking(self: SegmentationTask, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.current_epoch == 1:
            raise RuntimeError("power is gone")
        return step(self, batch, batch_idx)

    recipe = on_masks(scans, task__options__dice=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(SegmentationTask, "training_step", breaking)
        with pytest.raises(RuntimeError, match="power is gone"):
            train(recipe, tmp_path / "run")
    resumed = train(recipe, tmp_path / "run").weights()[0]
    whole = run.weights()[0]
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("changes", "classes", "channels"),
    [
        ({"task__options__masks": "multilabel", "task__options__dice": 0.5}, 3, 1),
        ({"data__stack": 3, "model__mixer": "key_value(pos_dim=6)"}, 4, 3),
    ],
)
def test_masks_of_several_classes_and_stacks_train(
    scans: Path, tmp_path: Path, changes: dict[str, Any], classes: int, channels: int
) -> None:
    done = train(on_masks(scans, schedule__epochs=1, **changes), tmp_path / "run")
    state, _ = done.weights()
    assert state["decoder.head.weight"].shape[0] == classes == len(done.summary.data.classes)
    assert state["encoder.patch_embed.proj.weight"].shape[1] == channels
    assert 0 <= done.summary.last.test.scores["jaccard"] <= 1
    assert evaluate(done)["jaccard"] == done.summary.last.test.scores["jaccard"]


def test_masks_that_are_learned_score_better_than_those_of_a_fresh_model(
    scans: Path, tmp_path: Path
) -> None:
    recipe = replace(on_masks(scans, schedule__epochs=20), augment=Augment())
    done = train(recipe, tmp_path / "run")
    first, last = done.metrics()[0], done.metrics()[-1]
    assert last["train_loss"] < 0.8 * first["train_loss"]
    assert evaluate(done, split="train")["jaccard"] > 0.2


def test_a_run_is_not_evaluated_on_data_of_another_task(run: Run) -> None:
    with pytest.raises(UserError, match="'digits' is for classification; the run was trained for"):
        evaluate(run, "digits")


def test_a_run_is_not_evaluated_on_other_organs(run: Run, scans: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    (renamed / "train").symlink_to(scans / "train")
    text = (scans / "train.csv").read_text().replace("stomach", "liver")
    (renamed / "train.csv").write_text(text)
    with pytest.raises(UserError, match="liver"):
        evaluate(run, f"uwgi:{renamed}")


def test_the_record_of_a_run_opens_again(run: Run) -> None:
    opened = load_run(run.folder)
    model, data = opened.model_and_data()
    assert data == opened.summary.data
    logits = model(torch.zeros(1, 1, 24, 24))
    assert logits.shape == (1, 4, 24, 24)


def test_data_without_any_class_is_refused(tmp_path: Path) -> None:
    empty = write_uwgi(tmp_path / "empty", slices=1)  # the last slice of each case has no organ
    with pytest.raises(UserError, match="training images has a pixel of a class that counts"):
        train(on_masks(empty), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["auto", "16"])
def test_a_run_on_cuda_is_evaluated(scans: Path, tmp_path: Path, precision: str) -> None:
    run = train(on_masks(scans, task__options__dice=0.5, precision=precision), tmp_path / "run")
    assert all(np.isfinite(line["train_loss"]) for line in run.metrics())
    test = run.summary.last.test
    assert evaluate(run)["jaccard"] == pytest.approx(test.scores["jaccard"], abs=1e-6)

# SPDX-License-Identifier: Apache-2.0
"""A trained run is scored on images of another size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from keymix.cli import main
from keymix.cli.console import parse_size
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.models import create_model
from keymix.models.image_size import set_image_size
from keymix.train.runs import evaluate

SMALL = ["--limit", "60", "--epochs", "1", "--data.batch_size", "32", "--schedule.warmup_epochs=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("size") / "run"
    words = ["train", "digits_vit", *SMALL, "--mixer", "ska", "--model.options.depth", "1"]
    assert main([*words, "--out", str(out)]) == 0
    return out


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert main(["eval", *words, "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    scores: dict = json.loads(said.out)
    return scores


@pytest.mark.slow
def test_another_size_is_scored_by_either_policy(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = printed([str(run)], capsys)
    assert (own["image_size"], own["resize"]) == ([12, 12], None)
    losses = {own["loss"]}
    for resize in ("interpolate", "pool_values"):
        same = printed([str(run), "--image-size", "12", "--resize", resize], capsys)
        assert same["loss"] == own["loss"]
        for size, pixels in (("16", [16, 16]), ("12,20", [12, 20]), ("8x8", [8, 8])):
            scores = printed([str(run), "--image-size", size, "--resize", resize], capsys)
            assert (scores["image_size"], scores["resize"]) == (pixels, resize)
            assert scores["images"] == own["images"]
            losses.add(scores["loss"])
    assert len(losses) == 7


def test_the_table_says_the_pixels(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(run), "--image-size", "16,20", "--resize", "interpolate"]
    assert main(words) == 0
    heads, row = (line.split() for line in capsys.readouterr().out.splitlines()[:2])
    assert row[heads.index("pixels")] == "16x20"


def test_the_scores_are_those_of_the_model_that_took_the_size(run: Path) -> None:
    from keymix import data
    from keymix.train.runs import load_run

    opened = load_run(run)
    model = opened.model()
    set_image_size(model, (16, 16), resize="interpolate")
    assert {m.site.grid for m in find_mixers(model).values()} == {(4, 4)}
    loaded = data.load("digits", image_size=16, limit=60)
    record = opened.weights()[1].data
    mean, std = (torch.tensor(getattr(record, k)).view(-1, 1, 1) for k in ("mean", "std"))
    images = (loaded.test.images[: len(loaded.test)].float() / 255 - mean) / std
    right = (model(images).argmax(1) == loaded.test.labels).float().mean()
    scores = evaluate(opened, image_size=(16, 16), resize="interpolate")
    assert scores["top1"] == pytest.approx(float(right))


def test_help_explains_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["eval", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for word in ("--image-size S|H,W", "interpolate", "pool_values", "set_input_size"):
        assert word in text


def test_sizes_are_read() -> None:
    assert parse_size("48") == (48, 48)
    assert parse_size("32,48") == parse_size("32x48") == (32, 48)


@pytest.mark.parametrize("mixer", ["ska", "sep_conv", "softmax"])
def test_timms_own_models_take_their_mixers_along(mixer: str) -> None:
    options = {"img_size": 32, "depth": 1, "num_classes": 3, "embed_dim": 12, "num_heads": 3}
    model = create_model("vit_tiny_patch16_224", mixer=mixer, **options).eval()
    set_image_size(model, (48, 64), resize="pool_values")
    assert model(torch.randn(1, 3, 48, 64)).shape == (1, 3)
    assert find_mixers(model)["blocks.0.attn.mixer"].site.grid == (3, 4)


def test_models_without_a_size_run_and_others_say_so() -> None:
    import timm

    set_image_size(timm.create_model("resnet10t"), (48, 64))
    with pytest.raises(UserError, match="no set_input_size"):
        set_image_size(timm.create_model("resmlp_12_224", img_size=32), (48, 64))
    with pytest.raises(UserError, match="'stretch' must be one of interpolate, pool_values"):
        set_image_size(timm.create_model("resnet10t"), (48, 64), resize="stretch")
    with pytest.raises(UserError, match="give image_size too"):
        evaluate("nowhere", resize="interpolate")


def test_larger_images_are_cropped_as_in_training(run: Path) -> None:
    """At this size images are no longer kept in memory, where the default crop is another."""
    from keymix import data
    from keymix.train.evaluation import data_for
    from keymix.train.runs import load_run

    size = (132, 132)
    assert data.load("digits", image_size=132, limit=60).crop_pct < 1.0
    opened = load_run(run)
    loaded = data_for(opened.recipe.data, opened.weights()[1].data, None, size)
    assert {split.view.crop_pct for split in loaded.splits} == {1.0}


@pytest.mark.parametrize("verb", ["eval", "predict"])
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--window", "8"], "window"),
        (["--overlap", "0.5"], "overlap"),
        (["--flips", "both"], "flips"),
        (["--window", "8", "--image-size", "8"], "--image-size"),
        (["--window", "0"], "--window"),
    ],
)
def test_windows_and_flips_are_for_masks(
    verb: str, words: list[str], named: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(run), *words]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert named in said.err

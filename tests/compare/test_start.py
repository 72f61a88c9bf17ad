# SPDX-License-Identifier: Apache-2.0
"""Comparisons from a trained model: what runs start from, what they are refused, what is shown."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from few_digits import small
from PIL import Image

import keymix
from keymix import recipes
from keymix.compare.folder import read
from keymix.compare.question import Question
from keymix.compare.start import FINE_TUNING, _seat, seated, with_model
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.mixers.spec import parse_mixer
from keymix.report.comparison import Comparison
from keymix.report.comparison_page import render
from keymix.train import files
from keymix.train.engine import train
from keymix.train.evaluation import eval_loader
from keymix.train.model import load_data
from keymix.train.recipe import replace_path
from keymix.train.runs import load_run

RECIPE: dict[str, Any] = {"data.limit": 100, "schedule.epochs": 2, "schedule.warmup_epochs": 0}
STILL = {"optim.lr": 1e-12, "schedule.warmup_epochs": 0}  # weights stay what they start from


def trained(folder: Path, **changes: Any) -> Path:
    recipe = replace_path(recipes.get("digits_vit"), RECIPE | changes)
    return train(recipe, folder).folder


@pytest.fixture(scope="module")
def run(made_once: Callable[..., Path]) -> Path:
    """Folder of a run on digits that a comparison starts from."""
    return made_once("start", trained)


def compared(run: Path, out: Path, **more: Any) -> Comparison:
    settings = {"data": None, "limit": None, "start": run, "mixers": "static_key"}
    return small(out, **settings | more)


@pytest.fixture(scope="module")
def done(run: Path, made_once: Callable[..., Path]) -> Path:
    """A comparison whose weights stay what they start from."""
    return made_once("from", lambda folder: compared(run, folder, overrides=STILL))


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return files.read_weights(folder / name)[0]


def test_the_baseline_starts_from_the_model_itself(run: Path, done: Path) -> None:
    own, start = (
        weights(run, "weights_last.safetensors"),
        weights(done, "start/softmax.safetensors"),
    )
    assert own.keys() == start.keys()
    assert all(torch.equal(own[name], start[name]) for name in own)
    plan = read(done).plan
    assert plan.baseline == "softmax"
    assert plan.start is not None
    before = load_run(run).summary.last.val["top1"]
    assert plan.start.scores["softmax"]["top1"] == before


def test_a_mixer_starts_from_what_a_swap_makes(run: Path, done: Path) -> None:
    own = weights(run, "weights_last.safetensors")
    start = weights(done, "start/static_key.safetensors")
    model = load_run(done / "runs" / "static_key" / "seed0").model()
    names = [name for name in start if name in own]
    assert names
    assert all(torch.equal(own[name], start[name]) for name in names)  # what is no attention
    width = own["blocks.0.attn.mixer.qkv.weight"].shape[1]
    first = start["blocks.0.attn.mixer.q.weight"]
    assert torch.equal(first, own["blocks.0.attn.mixer.qkv.weight"][:width])
    assert start["blocks.0.attn.mixer.key"].std() > 0
    ended = model.state_dict()
    for name, tensor in start.items():
        torch.testing.assert_close(ended[name], tensor, rtol=0, atol=1e-6)
    plan = read(done).plan
    data = load_data(plan.recipe.data)
    images = torch.cat([batch.images for batch in eval_loader(plan.recipe, data, "train")])
    assert plan.start is not None
    assert plan.start.images == len(images)
    swapped = keymix.swap(run, "static_key", calibration=images).swapped
    assert swapped is not None
    made = swapped.state_dict()
    assert all(torch.equal(made[name], start[name]) for name in start)


def test_the_same_call_goes_on_and_another_model_is_refused(
    run: Path, done: Path, tmp_path: Path
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(run, base)
    compared(base, out, overrides=STILL)
    place = out / "start" / "static_key.safetensors"
    written = place.stat().st_mtime_ns
    again = compared(base, out, overrides=STILL, mixers="static_key,key_value")
    assert place.stat().st_mtime_ns == written
    assert [mixer.label for mixer in again.record.mixers][:3] == [
        "softmax",
        "static_key",
        "key_value",
    ]
    assert "before training" in render(again.record)
    shutil.rmtree(base)
    trained(base, **{"seed": 1})
    with pytest.raises(UserError, match="another model than the comparison began with"):
        compared(base, out, overrides=STILL, seeds=2)


def test_other_classes_get_a_classifier_of_their_own(run: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in ("dark", "light"):
        for number in range(20):
            place = tmp_path / "photos" / name / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            low = 0 if name == "dark" else 128
            pixels = torch.randint(low, low + 128, (12, 12), generator=generator)
            Image.fromarray(pixels.byte().numpy()).save(place)
    out = tmp_path / "out"
    done = compared(run, out, data=f"folder:{tmp_path / 'photos'}", minutes=30, controls=False)
    start = done.record.start
    assert start is not None
    assert (start.same_classes, start.scores) == (False, {})
    assert not [n for n in weights(out, "start/softmax.safetensors") if n.startswith("head")]
    assert done.record.recipe.optim.lr == FINE_TUNING["optim.lr"]


def test_a_file_of_weights_and_what_was_pushed(run: Path, tmp_path: Path) -> None:
    file = run / "weights_last.safetensors"
    with pytest.raises(UserError, match="--model"):
        compared(file, tmp_path / "out", data="digits")
    with pytest.raises(UserError, match="--data"):
        compared(file, tmp_path / "out", model="vit_nano_p4_12")
    with pytest.raises(UserError, match="--model 'vit_nano_p4_12'"):
        compared(run, tmp_path / "out", model="vit_nano_p4_12")
    with pytest.raises(UserError, match="--ann"):
        compared(run, tmp_path / "out", ann=True)
    overrides = STILL | {"data.limit": 100}
    more: dict[str, Any] = {"data": "digits", "controls": False, "overrides": overrides}
    of_file = compared(file, tmp_path / "file", model="vit_nano_p4_12", **more)
    keymix.push(run, to=(folder := tmp_path / "pushed"))
    of_folder = compared(folder, tmp_path / "folder", **more)
    starts = [weights(tmp_path / each, "start/softmax.safetensors") for each in ("file", "folder")]
    own = weights(run, "weights_last.safetensors")
    for start in starts:
        assert all(torch.equal(own[name], start[name]) for name in own)
    assert of_file.record.start is not None
    assert of_folder.record.start is not None


def test_the_readout_stays_and_who_brings_it_nothing_is_left_out(tmp_path: Path) -> None:
    options = {"depth": 2, "embed_dim": 24, "num_heads": 2}
    changes = {"model.name": "vit_micro_p4_32", "model.options": options, "data.image_size": 16}
    run = trained(tmp_path / "run", **changes, **{"model.global_pool": "token"})
    done = compared(run, tmp_path / "out", overrides=STILL)
    assert done.record.pooling == "token"
    assert "identity" not in [mixer.label for mixer in done.record.mixers]
    assert "identity" in done.record.cannot_sit[0]


def test_the_models_own_mixer_is_the_baseline_and_no_plain_network_joins(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", **{"model.mixer": "static_key(activation=relu)"})
    done = compared(run, tmp_path / "out", mixers="softmax", reference=True, controls=False)
    assert done.record.baseline == "static_key(activation=relu)"
    labels = [mixer.label for mixer in done.record.mixers]
    assert labels == ["static_key(activation=relu)", "softmax"]


def test_mixers_sit_where_the_model_attends() -> None:
    own, here = parse_mixer("sep_conv/sep_conv/softmax/softmax"), [False, False, True, True]
    seated = _seat(parse_mixer("static_key"), own, here)
    assert seated.label == "sep_conv/sep_conv/static_key/static_key"
    named = parse_mixer("pooling/sep_conv/softmax/static_key")
    assert _seat(named, own, here) == named
    assert _seat(named, parse_mixer("softmax"), [True]) == named


def test_layers_that_are_not_named_keep_what_they_have(run: Path) -> None:
    question = Question(start=run, layers="1")
    recipe = with_model(recipes.get("digits_vit"), question)
    asked, specs = seated(question, recipe, [parse_mixer("static_key"), parse_mixer("softmax")])
    first, *middle = len(find_mixers(load_run(run).model())) * ["softmax"]
    label = "/".join([first, "static_key", *middle[1:]])
    assert [spec.label for spec in specs] == [label, "softmax"]
    assert asked.baseline == "softmax"
    with pytest.raises(UserError, match="layers"):
        Question(layers="1")
    with pytest.raises(UserError, match="layers"):
        seated(replace(question, layers="99"), recipe, [parse_mixer("static_key")])


def test_a_timm_model_of_a_folder_starts_a_comparison(tmp_path: Path) -> None:
    """A model in timm's layout that no keymix made."""
    options: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2}
    model = timm.create_model(
        "vit_tiny_patch16_224", **options, num_heads=3, num_classes=5, in_chans=1, global_pool="avg"
    )
    folder, args = tmp_path / "timm", {**options, "num_heads": 3}
    timm.models._hub.save_for_hf(model, folder, model_args=args, safe_serialization=True)
    done = compared(folder, tmp_path / "out", data="digits", overrides={"data.limit": 100})
    assert done.record.start is not None
    assert done.record.baseline == "softmax"

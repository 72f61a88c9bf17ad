# SPDX-License-Identifier: Apache-2.0
"""A swapped model in the form of a run: what is written is what was swapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.data import resolve_model_data_config
from torch import nn

from keymix.data.record import DataRecord
from keymix.errors import UserError
from keymix.swap.as_run import recipe_of, write
from keymix.swap.run import swap
from keymix.train import files
from keymix.train.engine import train
from keymix.train.model import build_model
from keymix.train.recipe import DataConfig, ModelConfig, Recipe
from keymix.train.record import WeightsFacts
from keymix.train.runs import load_run
from mixer_cases import stir
from tolerances import close, differs

TIMM: dict[str, Any] = {"patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}
TINY: dict[str, Any] = {"embed_dim": 24, "depth": 3, "num_heads": 3}
SWIN: dict[str, Any] = {"embed_dim": 12, "depths": (1, 2), "num_heads": (3, 3)}
LAST = {"last_mixer": "re_attention", "last_blocks": 1}
MODELS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "a ViT of ours": ("vit_micro_p4_32", None, TINY),
    "with options of the family": ("vit_small_spt_p4_32", None, TINY),
    "with mixers of the recipe": (
        "vit_micro_p4_32",
        "conv_static_key(kernel_size=1)/softmax/key_value",
        TINY,
    ),
    "a DeepViT": ("deepvit_micro_p4_32", None, {**TINY, **LAST}),
    "a CSKAFormer": ("cskaformer_s18", None, {"depths": (1, 1, 1, 1), "dims": (8, 8, 32, 32)}),
    "a Swin of ours": ("swin_tiny_p2_32", None, {**SWIN, "merging": (2,)}),
    "a widened CaiT of ours": ("ska_cait_small_p4_32_wide", None, {"depth": 2, "embed_dim": 24}),
    "timm's ViT": ("vit_tiny_patch16_224", None, {**TIMM, "reg_tokens": 2, "qk_norm": True}),
    "timm's Swin": ("swin_tiny_patch4_window7_224", None, {**SWIN, "window_size": 4}),
    "timm's CaiT": ("cait_xxs24_224", None, {**TIMM, "depth_token_only": 1}),
}


def data(size: int = 32) -> DataRecord:
    splits = ("train", "val", "test")
    return DataRecord(
        spec="none",
        classes=("a", "b", "c"),
        in_chans=3,
        image_size=(size, size),
        mean=(0.4,) * 3,
        std=(0.5,) * 3,
        crop_pct=1.0,
        cached=True,
        task="classification",
        sizes=dict.fromkeys(splits, 0),
        index_sha256=dict.fromkeys(splits, ""),
        fingerprint="",
    )


def made(case: str) -> tuple[Recipe, nn.Module, torch.Tensor]:
    name, mixer, options = MODELS[case]
    recipe = Recipe(
        name="small",
        data=DataConfig(spec="cifar10"),
        model=ModelConfig(name=name, mixer=mixer, options=options),
    )
    model = build_model(recipe, num_classes=3, in_chans=3, image_size=(32, 32)).eval()
    stir(model)
    return recipe, model, torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
def test_a_folder_holds_the_model_with_some_of_its_layers_swapped(
    case: str, tmp_path: Path
) -> None:
    recipe, model, images = made(case)
    put = "key_value" if "widened" in case else "static_key"  # that one has static keys already
    with torch.no_grad():
        before = model(images)
        swap(model, put, 1, calibration=images, drift=False)
        after = model(images)
    assert differs(before, after)
    write(tmp_path / "swapped", recipe_of(recipe, model), model, data(), images)
    run = load_run(tmp_path / "swapped")
    assert run.recipe.name == "small_swapped"
    assert run.recipe.model.mixer is not None
    names = [part.partition("(")[0] for part in run.recipe.model.mixer.split("/")]
    assert names[1] == put
    assert names.count(put) == 1
    loaded = run.model()
    with torch.no_grad():
        close(loaded(images), after)
    assert resolve_model_data_config(loaded)["mean"] == (0.4,) * 3
    assert resolve_model_data_config(loaded)["input_size"] == (3, 32, 32)
    facts = files.read_weights(run.folder / files.weights_file("last"))[1]
    assert facts == WeightsFacts(recipe=run.recipe, data=data())


def test_a_swap_of_a_swapped_run_is_one_too(tmp_path: Path) -> None:
    recipe, model, images = made("a ViT of ours")
    swap(model, "static_key", 1, mixer_options={"activation": "relu"})
    write(tmp_path / "once", recipe_of(recipe, model), model, data(), images)
    once = load_run(tmp_path / "once")
    again = once.model()
    swap(again, "key_value", 0)
    write(tmp_path / "twice", recipe_of(once.recipe, again), again, data(), images)
    twice = load_run(tmp_path / "twice")
    mixer = twice.recipe.model.mixer or ""
    assert mixer.startswith("key_value")
    assert "/static_key(activation=relu" in mixer
    with torch.no_grad():
        close(twice.model()(images), again(images))


def test_a_model_that_the_recipe_does_not_build_is_refused(tmp_path: Path) -> None:
    recipe, model, images = made("a ViT of ours")
    swap(model, "static_key", 1)
    model.get_submodule("blocks.0.norm1").register_forward_hook(lambda *call: 2 * call[-1])
    with pytest.raises(UserError, match=r"gives other answers.*save_swapped"):
        write(tmp_path / "swapped", recipe_of(recipe, model), model, data(), images)
    assert not (tmp_path / "swapped").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_training_never_lands_in_a_swapped_models_folder_unasked(
    tiny: Recipe, tmp_path: Path, overwrite: bool
) -> None:
    folder = tmp_path / "swapped"
    folder.mkdir()
    files.write_json(folder / files.RECIPE, tiny.to_dict())
    files.write_json(folder / files.SWAP, {"sentence": "1 of 1 layers"})
    if overwrite:
        train(tiny, folder, overwrite=True)
        assert not (folder / files.SWAP).exists()
        return
    with pytest.raises(UserError, match=r"holds a swapped model.*--model\.weights .* --out DIR"):
        train(tiny, folder)
    assert (folder / files.SWAP).exists()

# SPDX-License-Identifier: Apache-2.0
"""Weights that a recipe starts from: another model's are refused, what is left out is named."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from timm.models.metaformer import Attention, MetaFormer, SepConv
from torch import nn

import keymix
from keymix.errors import KeymixWarning, UserError
from keymix.models import create_model
from keymix.train.engine import train
from keymix.train.model import start_from
from keymix.train.recipe import Recipe, replace_path
from keymix.weights_file import packed

SMALL: dict[str, dict[str, Any]] = {
    "vit_micro_p4_32": {"embed_dim": 16, "depth": 2, "num_heads": 2},
    "vit_small_p4_32": {"embed_dim": 16, "depth": 2, "num_heads": 2},
    "cvt_micro_32": {"embed_dims": (16, 24, 48), "depths": (1, 1, 1)},
    "swin_micro_p2_32": {"embed_dim": 12, "depths": (1, 1, 1), "num_heads": (1, 1, 1)},
}


def made(name: str, **options: Any) -> nn.Module:
    return create_model(name, **{"img_size": 16, **SMALL[name], **options})


def saved(model: nn.Module, folder: Path, **facts: Any) -> Path:
    path = folder / "weights_last.safetensors"
    shown: dict[str, Any] = {
        "classes": ["a"],
        "in_chans": 3,
        "task": "classification",
        "crop_pct": 1.0,
    }
    shown |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    path.write_bytes(packed(model.state_dict(), {"data": {**shown, **facts}}))
    return path


def test_another_models_weights_are_refused(tmp_path: Path) -> None:
    path, mine = (
        saved(made("swin_micro_p2_32"), tmp_path, image_size=[16, 16]),
        made("cvt_micro_32"),
    )
    before = {k: v.clone() for k, v in mine.state_dict().items()}
    with pytest.raises(
        UserError, match=r"weights_last.*another model's: they give 96 of \d+ parameters"
    ):
        start_from(mine, path)
    assert all(torch.equal(before[k], v) for k, v in mine.state_dict().items())


def test_other_mixers_and_classes_are_no_other_model(tmp_path: Path) -> None:
    for name in ("vit_micro_p4_32", "vit_small_p4_32", "cvt_micro_32", "swin_micro_p2_32"):
        path = saved(made(name, mixer="softmax"), tmp_path, image_size=[16, 16])
        with pytest.warns(KeymixWarning) as warned:
            start_from(made(name, mixer="ska", num_classes=3), path)
        text = str(warned[0].message)
        assert re.search(r"\d+ parameters are not in '.*' and start afresh: .*key", text)
        assert re.search(r"\d+ of its tensors go unused: .*mixer\.", text)


def test_timms_caformer_is_no_other_model(tmp_path: Path) -> None:
    small: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (8, 16, 32, 64), "num_classes": 5}
    theirs = MetaFormer(token_mixers=[SepConv, SepConv, Attention, Attention], **small)
    torch.save(theirs.state_dict(), tmp_path / "timms.pth")
    mine = create_model("skaformer_s18", img_size=64, mixer="pooling", **small)
    with pytest.warns(KeymixWarning, match="go unused"):
        start_from(mine, tmp_path / "timms.pth")


def test_what_fits_whole_goes_without_a_word(tmp_path: Path) -> None:
    path = saved(made("vit_micro_p4_32"), tmp_path, image_size=[16, 16])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start_from(made("vit_micro_p4_32"), path)


def test_a_run_records_its_grid_of_positions_and_bad_numbers_are_refused(
    tmp_path: Path,
) -> None:
    theirs = made("vit_micro_p4_32", img_size=(8, 32), mixer="ska")
    path = saved(theirs, tmp_path, image_size=[8, 32])
    mine = made("vit_micro_p4_32", img_size=(32, 8), mixer="ska")
    start_from(mine, path)
    assert not torch.equal(mine.pos_embed, theirs.pos_embed)
    nn.init.constant_(theirs.norm.weight, torch.nan)
    with pytest.raises(UserError, match=r"weights_last.*norm\.weight.*not finite"):
        start_from(mine, saved(theirs, tmp_path, image_size=[8, 32]))


def test_a_run_that_started_from_another_describes_its_own_images(
    vary: Callable[..., Recipe], tmp_path: Path
) -> None:
    short = {"schedule.epochs": 1, "schedule.warmup_epochs": 0.0}
    first = train(vary(short), tmp_path / "first")
    own = {"model.weights": str(first.folder), "data.limit": 60, "model.drop_rate": 0.0}
    second = train(vary({**short, **own}), tmp_path / "second")
    shown = [resolve_model_data_config(run.model())["mean"] for run in (first, second)]
    assert shown == [tuple(run.summary.data.mean) for run in (first, second)]
    assert shown[0] != shown[1]


def test_a_run_of_pretrained_weights_needs_them_once(
    vary: Callable[..., Recipe], tmp_path: Path
) -> None:
    plain = {"model.name": "test_vit", "model.mixer": None, "model.options": {}}
    own = vary({**plain, "data.image_size": 32, "augment.crop_padding": 0})
    file = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_vit").state_dict(), file)
    overlay = {"file": str(file), "hf_hub_id": None}
    options = {**own.model.options, "pretrained": True, "pretrained_cfg_overlay": overlay}
    recipe = replace_path(own, {"model.options": options, "schedule.epochs": 2})
    train(recipe, tmp_path / "run")
    file.unlink()
    assert keymix.load(tmp_path / "run").predict(np.zeros((32, 32), np.uint8)).classes
    keymix.evaluate(tmp_path / "run", split="val")
    with pytest.raises(UserError, match=r"weights\.safetensors"):
        train(recipe, tmp_path / "afresh")

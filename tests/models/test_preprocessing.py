# SPDX-License-Identifier: Apache-2.0
"""``pretrained_cfg`` says how a run's weights want their images, whichever way they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from timm.models import PretrainedCfg, get_model_input_config, save_for_hf
from torch import nn

from each import together
from keymix.data.record import DataRecord
from keymix.hosts.base import encoder_of
from keymix.models import create_model, load_weights
from keymix.models.preprocessing import describe, described, preprocessing_of
from keymix.records import from_json
from keymix.weights_file import packed

DATA: dict[str, Any] = {
    "classes": ["cat", "dog"],
    "in_chans": 3,
    "task": "classification",
    "image_size": [64, 32],
    "mean": [0.1, 0.2, 0.3],
    "std": [0.4, 0.5, 0.6],
    "crop_pct": 0.75,
}
SHOWN = {
    "input_size": (3, 64, 32),
    "mean": (0.1, 0.2, 0.3),
    "std": (0.4, 0.5, 0.6),
    "crop_pct": 0.75,
    "crop_mode": "center",
    "interpolation": "bicubic",
}
VIT: dict[str, Any] = {"embed_dim": 24, "depth": 1, "num_heads": 3}
MODELS: dict[str, dict[str, Any]] = {
    "vit_micro_p4_32": VIT,
    "vit_tiny_patch16_224": VIT,
    "caformer_micro_32": {},
    "vit_base_patch16_clip_224": VIT,  # other mean and interpolation
    "test_resnet": {},
    "inception_v3": {},  # two-sided normalisation
    "setr_micro": {"depth": 1, "embed_dim": 24, "decoder_widths": (8, 8, 8)},
    "setr": {"backbone": "test_resnet", "decoder_widths": (8, 8)},
    "segformer": {"backbone": "test_resnet", "decoder_width": 8},
}


def trained_on(**changes: Any) -> DataRecord:
    splits = ("train", "val", "test")
    rest = {"sizes": dict.fromkeys(splits, 1), "index_sha256": dict.fromkeys(splits, "")}
    values = {"spec": "digits", "fingerprint": "", "cached": True, **rest, **DATA, **changes}
    return from_json(DataRecord, values, where="the record")


def made(name: str, **more: Any) -> nn.Module:
    sizes = {"img_size": (64, 32), "num_classes": 2, **more}
    return create_model(name, **{**MODELS[name], **sizes})


def saved(model: nn.Module, folder: Path, **facts: Any) -> Path:
    path = folder / "weights_last.safetensors"
    path.write_bytes(packed(model.state_dict(), {"data": {**DATA, **facts}}))
    return path


@pytest.mark.slow
@together
@pytest.mark.parametrize("name", MODELS)
def test_a_described_model_is_shown_the_runs_images(name: str) -> None:
    model = made(name)
    describe(model, preprocessing_of(trained_on()))
    assert resolve_model_data_config(model) == SHOWN
    assert resolve_model_data_config(model, use_test_size=True) == SHOWN
    cfg: Any = model.pretrained_cfg
    assert model.default_cfg is cfg
    assert (cfg["num_classes"], cfg["label_names"]) == (2, ("cat", "dog"))
    assert get_model_input_config(model)["input_size"] == (3, 64, 32)
    # it names no weights that are another's
    assert not PretrainedCfg(**cfg).has_weights
    if cfg.get("first_conv"):
        assert isinstance(model.get_submodule(cfg["first_conv"]), nn.Conv2d)


@pytest.mark.parametrize("name", ["setr_micro", "setr"])
def test_the_encoder_of_a_dense_model_sees_the_same_images(name: str) -> None:
    model = made(name)
    describe(model, preprocessing_of(trained_on(task="segmentation")))
    whole = {**SHOWN, "crop_mode": "squash", "interpolation": "bilinear"}
    encoder: Any = encoder_of(model)[0]
    for part in (model, encoder):
        assert resolve_model_data_config(part) == whole
    assert encoder.pretrained_cfg["num_classes"] == encoder.num_classes == 0
    assert "label_names" not in encoder.pretrained_cfg
    first = encoder.get_submodule(encoder.pretrained_cfg["first_conv"])
    assert isinstance(first, nn.Conv2d)
    infos: Any = model.feature_info
    assert model.get_submodule(infos[0]["module"]) is not None


def test_a_model_that_timm_did_not_build_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    describe(model, preprocessing_of(trained_on()))
    assert not hasattr(model, "pretrained_cfg")


def test_what_is_exported_to_the_hub_is_the_runs(tmp_path: Path) -> None:
    model = made("vit_micro_p4_32")
    describe(model, preprocessing_of(trained_on()))
    save_for_hf(model, str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    assert {key: config["pretrained_cfg"][key] for key in SHOWN} == {
        key: list(value) if isinstance(value, tuple) else value for key, value in SHOWN.items()
    }
    assert config["pretrained_cfg"]["label_names"] == DATA["classes"]


def test_a_runs_weights_bring_how_they_were_shown_images(tmp_path: Path) -> None:
    path = saved(made("vit_micro_p4_32"), tmp_path)
    model = made("vit_micro_p4_32", img_size=48)
    load_weights(model, path)
    assert resolve_model_data_config(model) == {**SHOWN, "input_size": (3, 48, 48)}
    assert model.pretrained_cfg["label_names"] == ("cat", "dog")
    other = made("vit_micro_p4_32", num_classes=7)  # its classifier stays its own
    load_weights(other, path)
    assert resolve_model_data_config(other) == SHOWN
    assert other.pretrained_cfg["num_classes"] == 7
    assert "label_names" not in other.pretrained_cfg
    bare = made("vit_micro_p4_32", num_classes=0)  # it has none to take over
    load_weights(bare, path)
    assert resolve_model_data_config(bare) == SHOWN
    assert bare.pretrained_cfg["num_classes"] == 0
    assert "label_names" not in bare.pretrained_cfg


def test_a_classifiers_weights_bring_it_into_an_encoder(tmp_path: Path) -> None:
    path = saved(made("test_resnet"), tmp_path)
    model = made("setr", num_classes=4)
    load_weights(model, path)
    for part in (model, encoder_of(model)[0]):
        assert resolve_model_data_config(part) == SHOWN
    assert model.pretrained_cfg["num_classes"] == 4


def test_weights_that_say_nothing_of_images_change_nothing(tmp_path: Path) -> None:
    theirs, mine = made("vit_micro_p4_32"), made("vit_micro_p4_32")
    before = described(mine)
    load_weights(mine, theirs.state_dict(), img_size=(64, 32))
    save_file(theirs.state_dict(), tmp_path / "plain.safetensors")
    load_weights(mine, tmp_path / "plain.safetensors", img_size=(64, 32))
    assert described(mine) == before

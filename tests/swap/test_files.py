# SPDX-License-Identifier: Apache-2.0
"""A swapped model saved and loaded: a fresh base model and the file are the swapped model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from tiny_models import MODELS, answer, images, tiny
from torch import nn

from keymix.errors import UserError, WriteError
from keymix.hosts import find_mixers
from keymix.models.preprocessing import describe, preprocessing_of
from keymix.swap import load_swapped, save_swapped, swap
from tolerances import close


def fresh(name: str) -> nn.Module:
    """The same architecture with other weights."""
    return MODELS[name][0]().double().eval()


@pytest.mark.parametrize(
    "name", ["timm_vit_registers_qk_norm", "timm_swin", "timm_metaformer", "torchvision_vit"]
)
def test_a_fresh_model_and_the_file_are_the_swapped_model(name: str, tmp_path: Path) -> None:
    model, x = tiny(name), images(MODELS[name][1])
    swap(model, ["conv_static_key", "softmax"], "0-1", calibration=x, drift=False)
    swap(model, "static_key", 1, mixer_options={"activation": "relu"}, calibration=x, drift=False)
    save_swapped(model, tmp_path / "swapped.safetensors")
    loaded = load_swapped(lambda: fresh(name), tmp_path / "swapped.safetensors")
    assert {p: m.mixer_name for p, m in find_mixers(loaded).items()} == {
        p: m.mixer_name for p, m in find_mixers(model).items()
    }
    assert torch.equal(answer(loaded, x), answer(model, x))
    assert [f.name for f in tmp_path.iterdir()] == ["swapped.safetensors"]


@pytest.mark.slow
def test_a_run_of_ours_keeps_the_mixers_that_were_not_swapped(tmp_path: Path) -> None:
    model, x = tiny("keymix_vit"), images((16, 16))
    swap(model, "key_value", -1)
    save_swapped(model, tmp_path / "swapped")
    base = fresh("keymix_vit")
    assert load_swapped(base, tmp_path / "swapped") is base
    close(answer(base, x), answer(model, x))


@pytest.mark.slow
def test_a_file_brings_how_its_weights_were_shown_images(tmp_path: Path) -> None:
    model = tiny("keymix_vit")
    record = SimpleNamespace(
        task="classification",
        classes=("a", "b"),
        in_chans=3,
        image_size=(16, 16),
        mean=(0.1,) * 3,
        std=(0.2,) * 3,
        crop_pct=0.9,
    )
    describe(model, preprocessing_of(record))
    swap(model, "key_value", -1)
    save_swapped(model, tmp_path / "swapped")
    loaded = load_swapped(fresh("keymix_vit"), tmp_path / "swapped")
    assert resolve_model_data_config(loaded) == resolve_model_data_config(model)
    assert loaded.pretrained_cfg["label_names"] == ("a", "b")
    assert loaded.default_cfg is loaded.pretrained_cfg


def test_weights_that_are_tied_are_saved(tmp_path: Path) -> None:
    model = tiny("timm_vit")
    swap(model, "softmax")
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    save_swapped(model, tmp_path / "tied")
    loaded = load_swapped(fresh("timm_vit"), tmp_path / "tied")
    assert torch.equal(loaded.blocks[1].mlp.fc1.weight, model.blocks[0].mlp.fc1.weight)


def test_what_does_not_fit_is_refused_in_one_line_and_changes_nothing(tmp_path: Path) -> None:
    swapped = tiny("timm_vit")
    swap(swapped, "softmax")
    file = tmp_path / "file"
    save_swapped(swapped, file)
    save_file({"weight": torch.ones(1)}, tmp_path / "other")
    (tmp_path / "broken").write_bytes(b"nothing")
    larger = tiny("timm_vit")
    larger.head = nn.Linear(12, 6).double()
    deeper = tiny("timm_vit")
    deeper.extra = nn.Linear(1, 1)
    cases = [
        (tiny("timm_cait"), file, r"holds a swapped .*VisionTransformer, not .*Cait"),
        (larger, file, r"head\.bias is \(5,\) there and \(6,\) in this model"),
        (deeper, file, r"does not hold extra\.bias of this model"),
        (tiny("timm_vit"), tmp_path / "none", "no such file"),
        (tiny("timm_vit"), tmp_path / "other", "says nothing of a swap"),
        (tiny("timm_vit"), tmp_path / "broken", "cannot be read"),
    ]
    for model, path, words in cases:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(UserError, match=words) as error:
            load_swapped(model, path)
        assert "\n" not in str(error.value)
        assert not find_mixers(model)
        assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())


def test_a_model_without_swaps_and_a_folder_that_is_not_there_are_refused(tmp_path: Path) -> None:
    model = tiny("timm_vit")
    with pytest.raises(UserError, match="nothing was swapped"):
        save_swapped(model, tmp_path / "file")
    swap(model, "softmax")
    with pytest.raises(WriteError, match="cannot be written"):
        save_swapped(model, tmp_path / "none" / "file")


def test_the_room_loads_lightly() -> None:
    code = "import sys, keymix.swap as s; s.__all__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

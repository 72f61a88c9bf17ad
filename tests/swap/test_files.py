# SPDX-License-Identifier: Apache-2.0
"""A swapped model saved and loaded: a fresh base model and the file are the swapped model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from timm.data import resolve_model_data_config
from tiny_models import MODELS, answer, images, ready, tiny
from torch import nn

import keymix
from keymix.errors import UserError, WriteError
from keymix.hosts import find_mixers
from keymix.models import create_model
from keymix.models.preprocessing import describe, preprocessing_of
from keymix.swap import load_swapped, save_swapped, swap
from mixer_cases import stir
from tolerances import close, differs


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
    loaded = load_swapped(tmp_path / "swapped.safetensors", lambda: fresh(name))
    assert {p: m.mixer_name for p, m in find_mixers(loaded).items()} == {
        p: m.mixer_name for p, m in find_mixers(model).items()
    }
    assert torch.equal(answer(loaded, x), answer(model, x))
    assert [f.name for f in tmp_path.iterdir()] == ["swapped.safetensors"]


SMALL: dict[str, Any] = {"embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
BUILT: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    # what a library builds by name, and the size of its images
    "timm": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, **SMALL), (32, 32)),
    "timm_with_mixers": (
        lambda: create_model("vit_tiny_patch16_224", mixer="key_value", img_size=32, **SMALL),
        (32, 32),
    ),
    "keymix": MODELS["keymix_vit"],
    "keymix_tau": MODELS["keymix_vit_tau"],
    "keymix_cvt": MODELS["keymix_cvt"],
    "transformers": MODELS["hugging_face_vit"],
    "transformers_registers": MODELS["hugging_face_dinov2_registers"],
}


def swapped(name: str, mixer: str = "static_key") -> nn.Module:
    """A model that a library builds, its last layer swapped."""
    torch.manual_seed(0)
    model = ready(BUILT[name][0]())
    swap(model, mixer, -1)
    return model


@pytest.mark.parametrize("name", BUILT)
def test_a_file_alone_rebuilds_the_swapped_model(name: str, tmp_path: Path) -> None:
    model, x = swapped(name), images(BUILT[name][1], 2)
    keymix.save_swapped(model, tmp_path / "one")
    before = torch.random.get_rng_state()
    again = keymix.load_swapped(tmp_path / "one")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(answer(again, x), answer(model, x))
    assert not again.training
    assert {p: m.mixer_name for p, m in find_mixers(again).items()} == {
        p: m.mixer_name for p, m in find_mixers(model).items()
    }
    keymix.save_swapped(again, tmp_path / "two")  # and it is a swapped model itself
    assert torch.equal(answer(keymix.load_swapped(tmp_path / "two"), x), answer(model, x))
    base = ready(BUILT[name][0]())
    assert keymix.load_swapped(tmp_path / "one", base) is base
    assert torch.equal(answer(base, x), answer(model, x))


@pytest.mark.parametrize("name", BUILT)
def test_a_state_of_a_swapped_model_loads_into_the_same_swap(name: str, tmp_path: Path) -> None:
    model, other, x = swapped(name), swapped(name), images(BUILT[name][1], 2)
    stir(other)
    assert differs(answer(other, x), answer(model, x))
    torch.save(model.state_dict(), tmp_path / "state.pth")
    state = torch.load(tmp_path / "state.pth", weights_only=True)
    other.load_state_dict(state, strict=True)
    assert torch.equal(answer(other, x), answer(model, x))


def test_transformers_models_whose_image_size_was_given_are_rebuilt(tmp_path: Path) -> None:
    model: Any = ready(BUILT["transformers_registers"][0]())
    model.image_size = (24, 16)
    swap(model, "static_key", -1)
    save_swapped(model, tmp_path / "file")
    again, x = load_swapped(tmp_path / "file"), images((24, 16), 2)
    assert torch.equal(answer(again, x), answer(model, x))


@pytest.mark.parametrize("name", ["torchvision_vit", "timm_vit"])
def test_a_model_that_no_library_builds_by_name_needs_its_base(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    swap(model, "softmax")
    save_swapped(model, tmp_path / "file")
    with pytest.raises(UserError, match=r"does not say how .* is built.*base=") as error:
        load_swapped(tmp_path / "file")
    assert "\n" not in str(error.value)


def test_a_class_of_a_users_own_is_not_taken_for_the_librarys(tmp_path: Path) -> None:
    model: Any = ready(BUILT["transformers"][0]())
    model.__class__ = type("ViTForImageClassification", (type(model),), {})
    swap(model, "softmax", -1)
    save_swapped(model, tmp_path / "file")
    with pytest.raises(UserError, match="does not say how"):
        load_swapped(tmp_path / "file")


STRANGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "a folder": ("timm", {"name": "local-dir:elsewhere"}, "unknown model"),
    "the Hub": ("timm", {"name": "hf-hub:some/model"}, "unknown model"),
    "a file": ("timm", {"arguments": {"checkpoint_path": "/x"}}, "asks for other weights"),
    "weights": ("timm", {"arguments": {"pretrained": True}}, "asks for other weights"),
    "a part's": (
        "timm",
        {"name": "setr", "arguments": {"backbone_options": {"pretrained": True}}},
        "asks for other weights",
    ),
    "an argument": ("timm", {"arguments": {"nonsense": 1}}, "nonsense"),
    "two names": ("timm", {"arguments": {"name": "x"}}, "TypeError"),
    "a list": ("timm", {"arguments": [1]}, "is damaged"),
    "a library": ("timm", {"library": "os"}, "is damaged"),
    "a mixer": (
        "timm",
        {"mixers": [{"path": "blocks.0.attn", "mixer": "os.system", "options": {}}]},
        "unknown mixer",
    ),
    "another family": ("transformers", {"name": "BertModel"}, "no such model"),
    "a function": ("transformers", {"name": "pipeline"}, "no such model"),
    "a module": ("transformers", {"name": "utils"}, "no such model"),
    "nothing": ("transformers", {"name": "Nothing"}, "no such model"),
    "a config": ("transformers", {"name": "ViTConfig"}, "no such model"),
    "a bad value": ("transformers", {"arguments": {"hidden_size": "wide"}}, "cannot build"),
    "another model": ("transformers", {"name": "ViTModel"}, "holds a swapped"),
    "other sizes": ("transformers", {"arguments": {"hidden_size": 24}}, "is .* there and"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_what_a_file_asks_for_is_checked(case: str, tmp_path: Path) -> None:
    library, asked, words = STRANGE[case]
    save_swapped(swapped(library), tmp_path / "file")
    with safe_open(tmp_path / "file", "pt") as file:
        record = json.loads(file.metadata()["keymix_swap"])
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # no mapping
    given, own = asked.get("arguments", {}), record["base"]["arguments"]
    record["base"] |= {**asked, "arguments": {**own, **given} if isinstance(given, dict) else given}
    save_file(state, tmp_path / "file", metadata={"keymix_swap": json.dumps(record)})
    with pytest.raises(UserError, match=words) as error:
        load_swapped(tmp_path / "file")
    assert "\n" not in str(error.value)
    assert "file" in str(error.value)


def test_no_path_of_the_users_is_in_a_file(tmp_path: Path) -> None:
    first: Any = BUILT["transformers"][0]()
    first.save_pretrained(tmp_path / "private-place")
    model = type(first).from_pretrained(tmp_path / "private-place").double().eval()
    swap(model, "static_key", -1)
    save_swapped(model, tmp_path / "file")
    assert b"private-place" not in (tmp_path / "file").read_bytes()
    x = images(BUILT["transformers"][1], 2)
    assert torch.equal(answer(load_swapped(tmp_path / "file"), x), answer(model, x))


def test_keymix_loads_a_swapped_classifier_as_it_loads_a_run(tmp_path: Path) -> None:
    file = tmp_path / "swapped.safetensors"
    model: Any = timm.create_model("vit_tiny_patch16_224", img_size=32, **SMALL).eval()
    names = ("ant", "bee", "cow", "dog", "eel")
    model.pretrained_cfg |= {"input_size": (3, 32, 32), "label_names": names, "crop_pct": 1.0}
    stir(model)
    swap(model, "static_key", -1)
    save_swapped(model, file)
    trained = keymix.load(file)
    assert trained.classes == names
    assert "model: vit_tiny_patch16_224" in repr(trained)
    pixels = numpy.random.default_rng(0).integers(0, 256, (3, 40, 48, 3), "uint8")
    pictures = [Image.fromarray(each) for each in pixels]
    shown = torch.stack([trained.transform(picture) for picture in pictures])
    assert shown.shape == (3, 3, 32, 32)
    wanted = answer(model, shown).softmax(1)
    for said, row in zip(trained.predict(pictures), wanted, strict=True):
        assert said.classes[0] == names[int(row.argmax())]
        assert said.probabilities[0] == pytest.approx(float(row.max()), abs=1e-5)
    with pytest.raises(UserError, match="needs the run"):
        assert trained.run
    with pytest.raises(UserError, match="one set of weights"):
        keymix.load(file, which="best")


def test_keymix_load_refuses_a_swapped_model_that_says_no_preprocessing(tmp_path: Path) -> None:
    save_swapped(swapped("transformers"), tmp_path / "file.safetensors")
    with pytest.raises(UserError, match=r"does not say its classes .*load_swapped") as error:
        keymix.load(tmp_path / "file.safetensors")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_run_of_ours_keeps_the_mixers_that_were_not_swapped(tmp_path: Path) -> None:
    model, x = tiny("keymix_vit"), images((16, 16))
    swap(model, "key_value", -1)
    save_swapped(model, tmp_path / "swapped")
    base = fresh("keymix_vit")
    assert load_swapped(tmp_path / "swapped", base) is base
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
    loaded = load_swapped(tmp_path / "swapped", fresh("keymix_vit"))
    assert resolve_model_data_config(loaded) == resolve_model_data_config(model)
    assert loaded.pretrained_cfg["label_names"] == ("a", "b")
    assert loaded.default_cfg is loaded.pretrained_cfg


def test_weights_that_are_tied_are_saved(tmp_path: Path) -> None:
    model = tiny("timm_vit")
    swap(model, "softmax")
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    save_swapped(model, tmp_path / "tied")
    loaded = load_swapped(tmp_path / "tied", fresh("timm_vit"))
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
            load_swapped(path, model)
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

# SPDX-License-Identifier: Apache-2.0
"""What other libraries save of a swapped model: no swap is lost in silence."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from timm.models import save_for_hf
from timm.models.vision_transformer import VisionTransformer
from tiny_models import MODELS, TIMM, answer, images, tiny
from torch import nn

import keymix
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.models.swapped import Refusing
from keymix.swap import load_swapped, save_swapped, swap
from mixer_cases import stir
from shrunk import FAMILIES, arguments
from shrunk import images as images_of


class OfTheHub(nn.Module, huggingface_hub.PyTorchModelHubMixin):
    """A model of a user's own that huggingface_hub saves."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = VisionTransformer(**TIMM)

    def forward(self, x: torch.Tensor) -> Any:
        return self.backbone(x)


def hugging_face() -> Any:
    return tiny("hugging_face_vit")


def tiny_of_transformers(name: str) -> Any:
    small = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 4}
    library, sizes = pytest.importorskip("transformers"), {"intermediate_size": 16, "mlp_ratio": 2}
    config = getattr(library, f"{name}Config")(**small, **sizes, image_size=12, num_labels=5)
    return getattr(library, f"{name}ForImageClassification")(config).eval()


def of_the_hub() -> Any:
    model = OfTheHub().double().eval()
    stir(model)
    return model


BUILDERS = pytest.mark.parametrize("build", [hugging_face, of_the_hub])


def is_refused(model: Any, folder: Path) -> None:
    """Refused by both methods before anything is written or asked of the network."""
    for method in (model.save_pretrained, model.push_to_hub):
        with pytest.raises(UserError, match="save_swapped") as caught:
            method(str(folder))
        assert "static_key" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not folder.exists()


@BUILDERS
def test_a_swapped_model_is_not_saved_without_its_mixers(build: Any, tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(str(tmp_path / "before"))
    swap(model, "static_key", -1)
    is_refused(model, tmp_path / "out")


def test_a_part_that_holds_the_mixers_refuses_and_another_does_not(tmp_path: Path) -> None:
    model = hugging_face()
    swap(model, "static_key", -1)
    is_refused(model.vit, tmp_path / "out")
    model.config.save_pretrained(str(tmp_path / "config"))


@pytest.mark.parametrize("name", ["ViT", "DeiT", "Dinov2", "Dinov2WithRegisters"])
def test_no_way_round_saves_a_swapped_model_without_its_mixers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.20")
    model: Any = tiny_of_transformers(name)
    swap(model, "static_key", -1)
    trainer = object.__new__(transformers.Trainer)  # it needs accelerate to be made
    trainer.model, trainer.args = model, SimpleNamespace(should_save=True, output_dir="")
    trainer.is_distributed_loading_by_transformers = False
    (tmp_path / "trained").mkdir()
    for part in (model, model.base_model, model.get_submodule(model.base_model_prefix)):
        for again in (part, copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
            is_refused(again, tmp_path / "out")
    is_refused(nn.ModuleDict({"inside": model})["inside"], tmp_path / "out")
    with pytest.raises(UserError, match="save_swapped"):
        trainer._save(str(tmp_path / "trained"))
    assert [*(tmp_path / "trained").iterdir()] == []
    model.float()
    with pytest.raises(UserError, match="save_swapped"):
        model.train().eval().save_pretrained(str(tmp_path / "out"))
    save_swapped(model, tmp_path / "file")  # what the refusal names keeps all
    again = load_swapped(tmp_path / "file")
    x = images((12, 12)).float()
    assert torch.equal(answer(again, x), answer(model, x))
    is_refused(again, tmp_path / "out")


def test_loading_a_swapped_file_refuses_too(tmp_path: Path) -> None:
    model = hugging_face()
    swap(model, "static_key")
    save_swapped(model, tmp_path / "file")
    again: Any = load_swapped(tmp_path / "file", hugging_face)
    x = images(MODELS["hugging_face_vit"][1])
    assert torch.equal(answer(again, x), answer(model, x))
    is_refused(again, tmp_path / "out")


@BUILDERS
def test_copies_pickles_and_states_work_as_before(build: Any, tmp_path: Path) -> None:
    model = build()
    swap(model, "static_key")
    torch.save(model, tmp_path / "model.pt")
    made = {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(tmp_path / "model.pt", weights_only=False),
    }
    for how, copied in made.items():
        assert copied.save_pretrained.model() is copied, how
        is_refused(copied, tmp_path / "out")
        copied.load_state_dict(model.state_dict())


def test_nothing_keeps_the_memory_of_a_swapped_model() -> None:
    model = of_the_hub()
    swap(model, "static_key")
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@BUILDERS
def test_a_swap_that_fails_or_is_undone_leaves_saving_as_it_was(build: Any, tmp_path: Path) -> None:
    model = build()
    with pytest.raises(UserError):
        swap(model, "static_key", calibration=torch.zeros(1, 3, 8, 8))
    assert "save_pretrained" not in vars(model)
    own = copy.deepcopy(model)
    swap(model, "static_key")
    for path, module in own.named_modules():
        if path in {p.rpartition(".mixer")[0] for p in find_mixers(model)}:
            model.set_submodule(path, module)
    assert not find_mixers(model)
    model.save_pretrained(str(tmp_path / "again"))
    assert (tmp_path / "again" / "model.safetensors").is_file()


def test_timm_refuses_to_load_what_it_saved_of_its_own_model_after_a_swap(tmp_path: Path) -> None:
    small = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", **small)
    swap(model, "identity")
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attn\.qkv"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)


NAMES = {
    "vit": "vit_micro_p4_32",
    "cait": "cait_micro_p4_32",
    "swin": "swin_micro_p2_32",
    "cvt": "cvt_micro_32",
    "metaformer": "caformer_micro_32",
    "deepvit": "deepvit_micro_p4_32",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_timm_saves_the_mixers_of_our_models_after_a_swap(family: str, tmp_path: Path) -> None:
    """Names and shapes are those of the mixer before, so that only the options differ."""
    name = NAMES[family]
    assert family in FAMILIES
    model = timm.create_model(name, **arguments(name, mixer="softmax")).eval()
    stir(model)
    swap(model, "softmax", -1, mixer_options={"scale": "dim"})
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = images_of(name)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_a_model_of_ours_around_attention_of_timm_is_swapped_in_part() -> None:
    small = {"backbone_options": {"embed_dim": 24, "depth": 2, "num_heads": 3}}
    model = keymix.create_model("setr", backbone="vit_tiny_patch16_224", img_size=32, **small)
    swap(model, "static_key", 0)
    assert len(find_mixers(model)) == 1


def test_a_method_whose_model_is_gone_says_so() -> None:
    lonely = Refusing(nn.Linear(1, 1), "save_pretrained")
    with pytest.raises(UserError, match="gone"):
        lonely()

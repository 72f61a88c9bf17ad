# SPDX-License-Identifier: Apache-2.0
"""What a swap, its images and its files do at the edges: odd loaders, broken files, odd models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from tiny_models import TIMM, answer, images, refused, tiny
from torch import Tensor, nn

from keymix.analysis.attention import attention_maps
from keymix.errors import UserError
from keymix.swap import gather, load_swapped, swap
from keymix.swap.images import of_hook, run
from keymix.swap.search import drawing

SIZE = (8, 12)  # of images of tiny("timm_vit")


class Endless:
    """A loader that never stops, and counts its batches."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(50):
            self.read += 1
            yield images(SIZE, 4)


def test_an_endless_loader_is_read_for_as_many_images_as_were_asked_for() -> None:
    loader = Endless()
    statistics = gather(tiny("timm_vit"), loader, number=8)
    assert loader.read == 2
    assert all(moments.images == 8 for moments in statistics.layers.values())


MODEL = "timm.models.vision_transformer.VisionTransformer"


@pytest.mark.parametrize(
    "expected",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"model": MODEL, "swaps": []}),
        json.dumps({"model": MODEL, "swaps": ["x"]}),
        json.dumps({"model": MODEL, "swaps": [{"path": "blocks.0.attn"}]}),
        json.dumps({"model": MODEL, "swaps": [{"path": "a", "mixer": "softmax", "options": [1]}]}),
        json.dumps({"swaps": [{"path": "a", "mixer": "softmax", "options": {}}]}),
    ],
)
def test_a_file_with_a_broken_record_of_its_swaps_is_refused(expected: str, tmp_path: Path) -> None:
    file = tmp_path / "broken"
    save_file({"weight": torch.ones(1)}, file, metadata={"keymix_swap": expected})
    with pytest.raises(UserError, match=r"swaps is damaged|broken cannot be read") as error:
        load_swapped(file, tiny("timm_vit"))
    assert "\n" not in str(error.value)


def test_one_module_at_two_places_is_refused() -> None:
    block: Any = tiny("timm_vit")
    block.blocks[1] = block.blocks[0]
    refused(block, r"blocks\.0\.attn and blocks\.1\.attn are one module")
    attention: Any = tiny("timm_vit")
    attention.blocks[1].attn = attention.blocks[0].attn
    refused(attention, "are one module", layers=0, mixer="static_key")


@pytest.mark.parametrize("drift", [True, False])
def test_a_layer_called_twice_in_a_pass_is_refused(drift: bool) -> None:
    model: Any = tiny("timm_vit")
    block = model.blocks[0]
    model.blocks[0] = Twice(block)
    model.blocks[0].attn = block.attn
    calibrated: dict[str, Any] = {"calibration": images(SIZE), "drift": drift}
    refused(model, r"blocks\.0\.attn is called more than once", "static_key", **calibrated)


class Twice(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm = block.norm1

    def forward(self, x: Tensor) -> Tensor:
        once: Tensor = self.attn(self.norm(x))
        twice: Tensor = x + self.attn(self.norm(once))
        return twice


def test_what_fails_in_a_hook_of_ours_is_not_reported_as_bad_images() -> None:
    def fails(*_: Any) -> None:
        raise KeyError("of ours")

    model = tiny("timm_vit")
    model.register_forward_hook(of_hook(fails))
    with pytest.raises(KeyError, match="of ours"):
        run(model, images(SIZE))


@pytest.mark.parametrize("name", ["timm_vit", "torchvision_vit", "timm_eva02"])
def test_biases_alone_train_on_where_they_alone_did(name: str) -> None:
    model = tiny(name)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in path)
    swap(model, "softmax")
    for path, parameter in model.named_parameters():
        assert parameter.requires_grad == ("bias" in path), path


class Merging(nn.Linear):
    """Writes its weight when its mode is set, as adapters of low rank do."""

    def train(self, mode: bool = True) -> Merging:
        self.weight.data += 1.0
        return super().train(mode)


def test_a_swap_calls_no_train_of_the_model() -> None:
    model: Any = tiny("timm_vit")
    model.blocks[1].mlp.fc1 = Merging(12, 48).double()
    refused(model, "nosuch", mixer="nosuch")
    before = model.blocks[1].mlp.fc1.weight.clone()
    swap(model, "static_key", calibration=images(SIZE))
    assert torch.equal(model.blocks[1].mlp.fc1.weight, before)


def test_a_tensor_that_cannot_be_copied_is_named() -> None:
    model: Any = tiny("timm_vit")
    model.blocks[1].kept = model.blocks[1](torch.ones(1, 25, 12, dtype=torch.float64))
    refused(model, r"blocks\.1\.kept holds a tensor of a backward graph")


def test_drawing_leaves_the_devices_of_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[Any] = []
    fork = torch.random.fork_rng
    monkeypatch.setattr(
        torch.random, "fork_rng", lambda devices: forked.append(devices) or fork(devices=[])
    )
    weight = SimpleNamespace(device=torch.device("cuda", 1))
    model: Any = SimpleNamespace(parameters=lambda: iter([weight, weight]))
    state = torch.random.get_rng_state()
    with drawing(model, 3):
        torch.rand(1)
    assert forked == [[torch.device("cuda", 1)]]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_statistics_of_another_model_are_refused() -> None:
    statistics = gather(tiny("timm_vit"), images(SIZE))
    other = tiny("timm_vit")
    with torch.no_grad():
        for weight in other.parameters():
            weight.copy_(weight.flatten().flip(0).reshape(weight.shape))
    refused(other, "the statistics are of another model", "static_key", calibration=statistics)
    same = tiny("timm_vit").bfloat16().double()
    for layer in (0, 1):
        swap(same, "static_key", layer, calibration=statistics, drift=False)


def test_a_model_that_takes_any_size_is_shown_images_of_any() -> None:
    model = VisionTransformer(**TIMM, dynamic_img_size=True).double().eval()
    larger = images((12, 16))
    before = answer(model, larger)
    refused(model, "give images of its size", "static_key", calibration=larger)
    refused(model, "give images of its size", "conv_static_key", calibration=larger)
    several = [larger, images(SIZE)]
    refused(model, "give images of its size", "static_key", calibration=several)
    with pytest.raises(UserError, match="several sizes"):
        gather(model, several)
    report = swap(model, "softmax", calibration=larger)
    assert report.output is not None
    assert report.output.relative is not None
    assert report.output.relative < 1e-12
    assert torch.allclose(answer(model, larger), before)


def test_attention_that_no_adapter_reads_is_reported() -> None:
    model = VisionTransformer(**TIMM, global_pool="map", class_token=False)
    assert model.attn_pool is not None
    before = {n: p.clone() for n, p in model.attn_pool.named_parameters()}
    report = swap(model, "static_key")
    assert [note for note in report.notes if note.startswith("attn_pool (AttentionPoolLatent)")]
    assert "attn_pool (AttentionPoolLatent) stays" in str(report.notes)
    assert len(report.rows) == 2
    for name, parameter in model.attn_pool.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.slow
def test_what_every_adapter_reads_is_no_news() -> None:
    for name in ("timm_vit", "timm_swin", "torchvision_swin"):
        report = swap(tiny(name), "identity", layers="0")
        assert not [note for note in report.notes if "no adapter" in note], name


class CutAttention(nn.Module):
    """Around attention among tokens that lie nowhere known."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention(12, num_heads=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_what_stands_around_attention_that_is_read_is_no_news() -> None:
    report = swap(nn.Sequential(CutAttention()), "key_value")
    assert [row.path for row in report.rows] == ["0.inner"]
    assert not [note for note in report.notes if "no adapter" in note], report.notes


def test_a_place_without_a_grid_is_named() -> None:
    model = nn.Sequential(CutAttention())
    weights = state_of(model)
    with pytest.raises(UserError, match=r"at 0\.inner is not known: choose other layers") as caught:
        swap(model, "static_key")
    assert "\n" not in str(caught.value)
    assert state_of(model) == weights
    with pytest.raises(UserError, match=r"unknown option .*'window'") as caught:
        swap(model, "static_key", mixer_options={"window": 3})
    assert "is not known" not in str(caught.value)


def state_of(model: nn.Module) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in model.state_dict().items()}


def test_memory_that_runs_out_is_not_the_fault_of_the_images() -> None:
    model = tiny("timm_vit")
    blocks: Any = model

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    blocks.blocks[1].register_forward_hook(full)
    for act in (swap, attention_of):
        with pytest.raises(torch.OutOfMemoryError, match=r"^out of memory$"):
            act(model, "softmax", calibration=images(SIZE))


def attention_of(model: nn.Module, _: str, *, calibration: Tensor) -> None:
    attention_maps(model, calibration)

# SPDX-License-Identifier: Apache-2.0
"""Swin V2 of timm, torchvision and Hugging Face, and the latter's Swin: each fact once a model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor, nn
from torchvision.models import swin_transformer as theirs

import keymix
from each import together
from keymix.errors import UserError
from keymix.hosts import find_host, find_mixers, put_mixers
from keymix.hosts.layers import find_layers
from keymix.mixers.contract import stir
from keymix.swap import swap
from tolerances import close

SMALL: dict[str, Any] = {"embed_dim": 12, "depths": (2, 1), "num_heads": (2, 3)}
NOISE = torch.Generator().manual_seed(1)


def hugging(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5.20")
    kind = getattr(transformers, name)
    sizes = {"image_size": 16, "patch_size": 2, "window_size": 4, "qkv_bias": True}
    return kind(kind.config_class(**SMALL, **sizes))  # type: ignore[no-any-return]


def timms(**options: Any) -> nn.Module:
    sizes: dict[str, Any] = {"img_size": 16, "patch_size": 2, "window_size": 4, "num_classes": 5}
    return SwinTransformerV2(**SMALL, **sizes, **options)


def torchvisions() -> nn.Module:
    return theirs.SwinTransformer(
        patch_size=[2, 2],
        embed_dim=12,
        depths=[2, 1],
        num_heads=[2, 3],
        window_size=[3, 4],
        num_classes=5,
        stochastic_depth_prob=0.0,
        block=theirs.SwinTransformerBlockV2,
        downsample_layer=theirs.PatchMergingV2,
    )


# model, sizes of images of which the first is its own, and paths of attention
PATHS = tuple(f"layers.{s}.blocks.{i}.attn" for s, i in ((0, 0), (0, 1), (1, 0)))
HF = tuple(f"encoder.{path.replace('attn', 'attention')}" for path in PATHS)
MODELS: dict[str, tuple[Any, list[tuple[int, int]], tuple[str, ...]]] = {
    "timm": (timms, [(16, 16)], PATHS),
    "timm, any size": (
        lambda: timms(strict_img_size=False, pretrained_window_sizes=(6, 3)),
        [(16, 16), (20, 26)],
        PATHS,
    ),
    "torchvision": (
        torchvisions,
        [(16, 16), (23, 14), (5, 40)],
        tuple(f"features.{s}.{i}.attn" for s, i in ((1, 0), (1, 1), (3, 0))),
    ),
    "Swin": (lambda: hugging("SwinModel"), [(16, 16), (23, 26)], HF),
    "Swinv2": (lambda: hugging("Swinv2Model"), [(16, 16), (23, 26)], HF),
}
CASES = [(kind, size) for kind, (_, sizes, _) in MODELS.items() for size in sizes]


def model_of(kind: str) -> Any:
    model = MODELS[kind][0]().double().eval()
    if kind == "torchvision":
        model.image_size = 16
    stir(model)
    return model


def images(*size: int, batch: int = 9) -> Tensor:
    return torch.randn(batch, 3, *size, generator=NOISE, dtype=torch.float64)


def answer(model: nn.Module, x: Tensor) -> Tensor:
    out: Any = model(x)
    return getattr(out, "last_hidden_state", out)  # type: ignore[no-any-return]


def scales(model: nn.Module, gradients: bool = False) -> list[Tensor]:
    """What each head learns as its scale, or the gradients, of which queries and keys have half."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if "logit_scale" in name:
            part = parameter.grad if gradients else parameter / (2 if "post" in name else 1)
            assert part is not None
            stem = name.partition(".mixer")[0].partition(".self")[0].partition(".logit")[0]
            found[stem] = found.get(stem, torch.zeros_like(part)) + part
    return list(found.values())


@together
@pytest.mark.parametrize(("kind", "size"), CASES)
def test_softmax_in_its_place_is_its_own_attention(kind: str, size: tuple[int, int]) -> None:
    """Outputs, and gradients of images, scales and positions; for two sizes of a batch."""
    model = model_of(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "logit_scale" in name:  # above the bound of log 100 where -100 masks nothing
                parameter[0] = 1.5
                parameter[1:] = 2.0 if MODELS[kind][2][1] in name else 5.0
    mine = copy.deepcopy(model)
    put = swap(mine, "softmax", drift=False)
    assert tuple(row.path for row in put.rows) == MODELS[kind][2]
    again = copy.deepcopy(mine)
    swap(again, "softmax", drift=False)
    x = [images(*size, batch=n).requires_grad_() for n in (1, 2)]
    outs = [[answer(each, t) for t in x] for each in (model, mine, again)]
    for other in outs[1:]:
        for one, two in zip(outs[0], other, strict=True):
            close(two, one)
    gradients = []
    for each, out in zip((model, mine), outs, strict=False):
        one = torch.autograd.grad(out[1].square().sum(), x[1], retain_graph=True)[0]
        out[1].square().sum().backward()
        learned = [
            p.grad
            for name, p in each.named_parameters()
            if "cpb_mlp" in name or "position_bias" in name
        ]
        gradients.append([one, *learned, *scales(each, gradients=True)])
    assert len(gradients[0]) >= 3 + 1
    for own, other in zip(*gradients, strict=True):
        assert own.abs().max() > 1e-9
        close(other, own)


def seen_maps(model: Any, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The maps that a model itself forms, windows in its batch."""
    if hasattr(model, "config"):
        model.set_attn_implementation("eager")
        given: list[Tensor] = []
        for path in HF:
            own = model.get_submodule(path)
            if hasattr(own, "self"):
                drop = own.self.dropout
                drop.register_forward_hook(lambda _, args, out: given.append(args[0]))
            else:
                own.register_forward_hook(lambda _, args, out: given.append(out[1]))
        model(x)
        return given
    found: list[Tensor] = []
    softmax = torch.nn.functional.softmax

    def caught(*args: Any, **named: Any) -> Tensor:
        found.append(softmax(*args, **named))
        return found[-1]

    monkeypatch.setattr(torch.nn.functional, "softmax", caught)
    model(x)
    monkeypatch.undo()
    return found


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_maps_and_layouts_are_its_own(
    kind: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, read = model_of(kind), images(*size, batch=2), []
    wanted = seen_maps(copy.deepcopy(model), x, monkeypatch)
    for layer in find_layers(model):
        layer.module.register_forward_hook(
            lambda _, args, kwargs, out, layer=layer: read.append(layer.map(args, kwargs)),
            with_kwargs=True,
        )
    model(x)
    assert len(read) == len(wanted) == 3
    exact = torch.float32 if kind == "Swin" else torch.float64  # some softmax in single precision
    for layer, own, seen in zip(find_layers(model), read, wanted, strict=True):
        close(own.flatten(0, 1), seen, exact)
        windows = layer.layout(model).windows
        assert windows is not None
        assert own.shape[1] == windows[0] * windows[1]


@together
@pytest.mark.parametrize("kind", MODELS)
def test_other_mixers_sit_there_and_no_map_crosses_a_shift(kind: str) -> None:
    model, x = model_of(kind), images(16, 16)
    before = answer(model, x)
    with pytest.raises(UserError, match=r"1\.att.*: its windows are shifted"):
        swap(model, "pooling")
    assert torch.equal(answer(model, x), before)
    report = swap(model, "static_key", calibration=x)
    assert all(row.drift is not None and row.drift.output < 1 for row in report.rows)
    shifted = find_layers(model)[1]
    calls: list[Any] = []
    shifted.module.register_forward_hook(
        lambda _, args, kwargs, out: calls.append(shifted.map(args, kwargs)), with_kwargs=True
    )
    answer(model, x)
    assert (calls[0] == 0).any()
    swap(model, "key_value")
    assert answer(model, x).isfinite().all()
    swap(model, "identity")
    assert (answer(model, x) - before).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["timm", "Swinv2"])
def test_a_file_rebuilds_one_of_them(kind: str, tmp_path: Path) -> None:
    if kind == "timm":
        model: Any = timm.create_model(
            "swinv2_tiny_window8_256",
            **{"img_size": 32, "num_classes": 5, "depths": (1, 1), "num_heads": (2, 2)},
            embed_dim=16,
        )
        model.double().eval()
        x = images(32, 32, batch=2)
    else:
        model, x = model_of(kind), images(16, 16, batch=2)
    stir(model)
    swap(model, "softmax", drift=False)
    keymix.save_swapped(model, tmp_path / "swapped.safetensors")
    again = keymix.load_swapped(tmp_path / "swapped.safetensors").eval()
    close(answer(again.double(), x), answer(model, x))


def test_another_image_size_changes_windows_as_timms() -> None:
    model = model_of("timm")
    mine = copy.deepcopy(model)
    swap(mine, "softmax", drift=False)
    for each in (model, mine):
        each.set_input_size((24, 20), window_size=(3, 5))
    x = images(24, 20, batch=2)
    close(mine(x), model(x))
    assert {m.site.grid for m in find_mixers(mine).values()} == {(3, 5)}


def test_its_own_weights_load_into_a_swapped_model() -> None:
    model = model_of("timm")
    mine = timms().double().eval()
    put_mixers(mine, "softmax")
    keymix.models.load_weights(mine, model.state_dict())
    x = images(16, 16, batch=2)
    close(mine(x), model(x))


def test_cosine_attention_needs_the_heads_that_it_is_of() -> None:
    with pytest.raises(UserError, match="has cosine attention for 2 heads of 6"):
        swap(model_of("torchvision"), "softmax", mixer_options={"num_heads": 3})


def test_weights_are_asked_of_the_host_alone() -> None:
    model = model_of("Swin")
    swap(model, "softmax", drift=False)
    with pytest.raises(UserError, match="returns no weights"):
        model(images(16, 16), output_attentions=True)


def test_keys_a_window_serve_one_size_of_images() -> None:
    model = model_of("Swin")
    model.image_size = (24, 40)
    swap(model, "static_key", drift=False)
    assert find_host(model).places(model)[0].site.window_grid == (3, 5)
    assert answer(model, images(24, 40)).isfinite().all()
    with pytest.raises(UserError, match=r"this image has 4 .*model\.image_size"):
        model(images(16, 16))

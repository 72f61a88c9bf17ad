# SPDX-License-Identifier: Apache-2.0
"""Maps placed on the image, of any model: windows, places, class tokens, means, reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models.metaformer import MetaFormer, Pooling
from torch import Tensor, nn
from torchvision.models import SwinTransformer, VisionTransformer

import keymix
from each import together
from keymix.analysis.attention import attention_maps, on_image
from keymix.analysis.capture import At, select_layers
from keymix.errors import NoAttentionMap, UserError
from keymix.hosts.attention_inputs import Layout
from keymix.hosts.base import put_mixers
from keymix.hosts.torchvision_swin import TorchvisionSwin
from keymix.models import create_model
from tolerances import close

WINDOWED = {
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 12,
    "depths": (2, 1),
    "num_heads": (2, 3),
    "num_classes": 3,
}


def vit(**options: Any) -> nn.Module:
    small = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", **{**small, **options}).double().eval()


def swin() -> nn.Module:
    """A grid of 10x14 in windows of 4: padded, and shifted in the second block."""
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=(40, 56), **WINDOWED)
    return model.double().eval()


def swin_with_mixers() -> nn.Module:
    options = {**WINDOWED, "patch_size": 2, "merging": (2,), "mixer": "ska"}
    return create_model("swin_micro_p2_32", img_size=(20, 28), **options).double().eval()


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *size, dtype=torch.float64)


class Weighs(nn.Module):
    """Stands where windows are mixed, and weighs their tokens by maps that are known."""

    def __init__(self, maps: Tensor) -> None:
        super().__init__()
        self.maps = maps

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.maps @ x


@pytest.mark.parametrize(("make", "size"), [(swin, (40, 56)), (swin_with_mixers, (20, 28))])
@pytest.mark.parametrize("block", [0, 1])
def test_windows_lie_where_the_block_cuts_them(
    make: Callable[[], nn.Module], size: tuple[int, int], block: int
) -> None:
    model: Any = make()
    x = images(*size)
    (apart,) = attention_maps(model, x, layers=block).values()
    whole = attention_maps(model, x, layers=block, windows="image")
    assert apart.shape == (2, 12, 2, 16, 16)
    (placed,) = whole.values()
    assert placed.shape == (2, 2, 140, 140)
    there = model.layers[0].blocks[block]
    assert any(there.shift_size) == (block == 1)
    for head in range(2):
        there.attn = Weighs(apart[:, :, head].flatten(0, 1))
        tokens = torch.randn(2, 10, 14, 5, dtype=torch.float64)
        close(placed[:, head] @ tokens.flatten(1, 2), cut(there, tokens).flatten(1, 2))
    (layout,) = whole.layouts.values()
    assert (layout.grid, layout.window) == ((10, 14), None)
    assert on_image(placed, layout).shape == (2, 2, 140, 10, 14)


def cut(block: Any, tokens: Tensor) -> Tensor:
    """Run timm's own shifting, padding, cutting and putting together around ``block.attn``."""
    from timm.models.swin_transformer import SwinTransformerBlock

    block.dynamic_mask = False
    return SwinTransformerBlock._attn(block, tokens)


@pytest.mark.parametrize("mixer", [None, "softmax"])
def test_windows_of_torchvision_lie_where_its_output_says(mixer: str | None) -> None:
    """torchvision pads before it shifts; its padding has no value here, for want of a bias."""
    model = SwinTransformer([4, 4], 12, [2], [2], [4, 4], num_classes=3).double().eval()
    if mixer is not None:
        put_mixers(model, mixer, host=TorchvisionSwin(shared_keys=True))
        model.double()
    seats = list(select_layers(model).values())
    x, calls = images(40, 56), []
    for seat in seats:
        own: Any = seat.module
        with torch.no_grad():
            own.qkv.bias[-12:].zero_()
        around: Any = own if mixer is None else model.get_submodule(seat.path[: -len(".mixer")])
        around.register_forward_hook(lambda m, args, out: calls.append((args[0], out)))
    maps = attention_maps(model, x, windows="image")
    for seat, (tokens, out), rows in zip(seats, calls, maps.values(), strict=True):
        own = seat.module
        v = (tokens.flatten(1, 2) @ own.qkv.weight[-12:].T).unflatten(-1, (2, 6)).transpose(1, 2)
        gathered = own.proj((rows @ v).transpose(1, 2).flatten(2))
        close(gathered, out.flatten(1, 2).detach())


@pytest.mark.parametrize("block", [0, 1])
def test_rows_and_means_on_the_image_are_those_of_the_whole(block: int) -> None:
    model, x = swin(), images(40, 56)
    (whole,) = attention_maps(model, x, layers=block, windows="image").values()
    for queries, wanted in (
        ([139, 0, 77], whole[:, :, [139, 0, 77]]),
        (At(9, 13), whole[:, :, [139]]),
        (At(0.5, 0.25), whole[:, :, [5 * 14 + 3]]),
        (At(np.float32(0.5), np.float64(0.25)), whole[:, :, [5 * 14 + 3]]),
        (At(np.int64(9), np.int8(13)), whole[:, :, [139]]),
        ("mean", whole.mean(2, keepdim=True)),
    ):
        (rows,) = attention_maps(model, x, layers=block, queries=queries, windows="image").values()
        close(rows, wanted)
    with pytest.raises(UserError, match="indices of the 140 tokens"):
        attention_maps(model, x, layers=block, queries=[140], windows="image")
    with pytest.raises(UserError, match="windows='image'"):
        attention_maps(model, x, layers=block, queries=At(0, 0))


def test_a_mean_is_taken_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keymix.analysis.capture._BUDGET", 1)
    model, x = vit(img_size=(40, 32), class_token=True), images(40, 32)
    whole, mean = (attention_maps(model, x, queries=queries) for queries in (None, "mean"))
    for path, rows in mean.items():
        close(rows, whole[path][:, :, 1:].mean(2, keepdim=True))
    placed, apart = (
        attention_maps(swin(), images(40, 56), layers=1, **how)
        for how in (
            {"queries": "mean", "windows": "image"},
            {"queries": "mean"},
        )
    )
    assert next(iter(placed.values())).shape == (2, 2, 1, 140)
    assert next(iter(apart.values())).shape == (2, 12, 2, 1, 16)


def test_heads_are_averaged_when_asked() -> None:
    model, x = vit(), images(16, 24)
    each, mean = (attention_maps(model, x, queries="cls", heads=how) for how in ("each", "mean"))
    for path, rows in mean.items():
        assert rows.shape == (2, 1, 1, 7)
        close(rows, each[path].mean(1, keepdim=True))
        close(each[path], attention_maps(model, x, layers=path, queries=[0])[path])


def test_places_lie_behind_the_prefix_and_pictures_leave_it_out() -> None:
    model, x = vit(reg_tokens=2), images(16, 24)
    at = attention_maps(model, x, layers=0, queries=At(1, 2))
    (rows,), (layout,) = at.values(), at.layouts.values()
    assert (layout.prefix, layout.grid) == (3, (2, 3))
    close(rows, attention_maps(model, x, layers=0, queries=[8])["blocks.0.attn"])
    close(on_image(rows, layout), rows[..., 3:].unflatten(-1, (2, 3)))


@together
@pytest.mark.parametrize("place", [At(2, 0), At(0, 3), At(-1, 0), At(1.0, 0.5), At(-0.1, 0.5)])
def test_a_place_outside_of_the_image_is_refused(place: At) -> None:
    with pytest.raises(UserError, match=r"lies outside.*2x3"):
        attention_maps(vit(), images(16, 24), queries=place)


@pytest.mark.parametrize(
    "make",
    [lambda: vit(class_token=False, global_pool="avg"), swin],
)
def test_a_class_token_that_is_not_there_is_not_asked(make: Callable[[], nn.Module]) -> None:
    model = make()
    size = (16, 24) if isinstance(model, timm.models.VisionTransformer) else (40, 56)
    with pytest.raises(UserError, match="no class token passes through"):
        attention_maps(model, images(*size), queries="cls")


def test_registers_alone_are_no_class_token() -> None:
    model = vit(class_token=False, reg_tokens=1, global_pool="avg")
    with pytest.raises(UserError, match=r"no class token passes through layer blocks\.0\.attn"):
        attention_maps(model, images(16, 24), queries="cls")


def test_layers_are_chosen_by_range_and_by_the_modules_above() -> None:
    model = swin()
    paths = list(select_layers(model))
    assert paths == ["layers.0.blocks.0.attn", "layers.0.blocks.1.attn", "layers.1.blocks.0.attn"]
    assert list(select_layers(model, "1-2")) == paths[1:]
    assert list(select_layers(model, "-1")) == paths[2:]
    assert list(select_layers(model, ["layers.0", "2"])) == paths
    assert list(select_layers(model, [-1, 0])) == [paths[0], paths[2]]
    assert list(select_layers(model, "layers.*.blocks.0.*")) == [paths[0], paths[2]]
    for layers, said in (
        ("2-1", "runs backwards"),
        ("1-3", "this model has 3"),
        (3, "this model has 3"),
        ("layer.0", "unknown"),
        ([], "names no layer"),
    ):
        with pytest.raises(UserError, match=said):
            select_layers(model, layers)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "reg_tokens": 1}])
def test_plain_models_give_the_maps_they_would_multiply_by(options: dict[str, Any]) -> None:
    """The map is caught on its way into dropout, which timm's attention passes unless it fuses."""
    model, caught = vit(**options), []
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
            module.attn_drop.register_forward_hook(lambda m, args, out: caught.append(args[0]))
    maps = attention_maps(model, images(16, 24))
    assert len(maps) == 2
    for got, wanted in zip(maps.values(), caught, strict=True):
        close(got, wanted)


def test_layers_without_a_map_are_named_or_reported_apart() -> None:
    model = create_model(
        "vit_nano_p2_12", mixer=["softmax", "pooling", "softmax", "identity"], in_chans=3
    )
    x = torch.randn(1, 3, 12, 12)
    missing: dict[str, str] = {}
    maps = attention_maps(model, x, queries=[0], missing=missing)
    assert list(maps) == ["blocks.0.attn.mixer", "blocks.2.attn.mixer"]
    assert list(missing) == ["blocks.1.attn.mixer", "blocks.3.attn.mixer"]
    assert "'pooling' forms no attention map" in missing["blocks.1.attn.mixer"]


def test_layers_of_plain_models_without_a_map_are_named() -> None:
    model = MetaFormer(depths=(1, 1), dims=(8, 8), token_mixers=Pooling)
    with pytest.raises(NoAttentionMap, match=r"layer stages\.0\.blocks\.0\.token_mixer: .*Pooling"):
        attention_maps(model, torch.randn(1, 3, 64, 64))


def test_unknown_models_are_named() -> None:
    with pytest.raises(UserError, match=r"no adapter knows timm\.models\.resnet\.ResNet"):
        attention_maps(timm.create_model("resnet18"), torch.randn(1, 3, 32, 32))
    with pytest.raises(UserError, match="no adapter knows"):
        attention_maps(nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 3, 32, 32))


def test_mixers_outside_of_any_host_are_read_too() -> None:
    mixer = keymix.create_mixer("softmax", dim=12, num_heads=3, grid=(2, 3), num_prefix_tokens=1)
    model = nn.Sequential(nn.LayerNorm(12), mixer)
    x = torch.randn(2, 7, 12)
    maps = attention_maps(model, x, queries="mean")
    close(maps["1"], mixer.attention_map(model[0](x))[:, :, 1:].mean(2, keepdim=True).detach())
    assert maps.layouts["1"] == Layout(grid=(2, 3), key_grid=(2, 3), prefix=1, class_token=True)


def torchvisions() -> nn.Module:
    return VisionTransformer(
        image_size=16, patch_size=8, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8
    )


@pytest.mark.parametrize("made", [vit, torchvisions])
def test_images_that_the_model_cannot_take_are_named(made: Callable[[], nn.Module]) -> None:
    model = made()
    before = [len(m._forward_hooks) for m in model.modules()]
    with pytest.raises(
        UserError, match=r"cannot take images of shape \(1, 3, 20, 20\): "
    ) as caught:
        attention_maps(model, torch.randn(1, 3, 20, 20))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="cannot take images"):
        keymix.collapse(model, torch.randn(1, 3, 20, 20))
    assert [len(m._forward_hooks) for m in model.modules()] == before

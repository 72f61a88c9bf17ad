# SPDX-License-Identifier: Apache-2.0
"""The stem of strided convolutions: its layers, what a token sees, its cost, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from keymix.analysis.counting import count
from keymix.layers.patches import EarlyConvs
from keymix.models import create_model, load_weights, set_image_size
from mixer_cases import refused, stir
from tolerances import close, differs

SMALL: dict[str, Any] = {"embed_dim": 16, "depth": 1, "num_heads": 2, "stem": "conv"}


def widths(embed: EarlyConvs) -> list[int]:
    return [m.out_channels for m in embed.convs if isinstance(m, nn.Conv2d)]


def vit(**options: Any) -> Any:
    return create_model("vit_micro_p4_32", **{**SMALL, **options})


@pytest.mark.parametrize(
    ("patch", "dim", "wanted"),
    [
        (16, 192, [24, 48, 96, 192]),  # the paper's ViT_C of 1 GF
        (16, 384, [48, 96, 192, 384]),  # and of 4 GF
        (4, 128, [64, 128]),
        (16, 64, [16, 16, 32, 64]),
        (2, 12, [16]),
    ],
)
def test_channels_double_up_to_the_tokens_width(patch: int, dim: int, wanted: list[int]) -> None:
    embed = EarlyConvs(64, patch, 3, dim, device="meta")
    assert widths(embed) == wanted
    assert [type(m) for m in embed.convs] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU] * len(wanted)
    assert (embed.proj.kernel_size, embed.proj.out_channels) == ((1, 1), dim)


@pytest.mark.parametrize("patch", [2, 4, 8, 16, (4, 8), (8, 2)])
def test_a_token_sees_its_patch_and_a_little_beyond(patch: int | tuple[int, int]) -> None:
    embed = EarlyConvs((48, 64), patch, 2, 8).double().eval()
    stir(embed)
    high, wide = embed.patch_size
    assert embed.grid_size == (48 // high, 64 // wide)
    x = torch.randn(1, 2, 48, 64, dtype=torch.float64, requires_grad=True)
    tokens = embed(x)
    assert tokens.shape == (1, embed.num_patches, 8)
    row, column = 1, 2
    tokens[0, row * embed.grid_size[1] + column].sum().backward()
    assert x.grad is not None
    seen = x.grad[0].abs().sum(0) > 0
    rows, columns = seen.any(1).nonzero(), seen.any(0).nonzero()
    if high == wide:  # 2p - 1 pixels from p - 1 before the patch on; ReLUs may hide the rim
        assert rows.min() >= row * high - high + 1
        assert rows.max() < (row + 1) * high
        assert columns.min() >= column * wide - wide + 1
        assert columns.max() < (column + 1) * wide
    assert rows.min() < row * high
    assert columns.min() < column * wide
    assert seen[row * high : (row + 1) * high, column * wide : (column + 1) * wide].any()


@pytest.mark.parametrize("patch", [4, 8, 16])
def test_it_costs_what_its_docstring_says(patch: int) -> None:
    model = create_model("vit_micro_p4_32", stem="conv", patch_size=patch, img_size=64)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10)
    before = [3, *widths(model.patch_embed)[:-1]]
    pairs = zip(before, widths(model.patch_embed), strict=True)
    per_pixel = sum(9 * a * b / 4**i for i, (a, b) in enumerate(pairs, 1)) + 128**2 / patch**2
    layers = count(model).layers
    found = sum(layer.macs for layer in layers if layer.path.startswith("patch_embed"))
    assert found == per_pixel * 64**2


def test_without_a_name_the_patches_are_timms() -> None:
    assert type(vit(stem=None).patch_embed) is not EarlyConvs
    assert (
        vit(stem=None).state_dict().keys()
        == create_model("vit_micro_p4_32", embed_dim=16, depth=1, num_heads=2).state_dict().keys()
    )


def test_its_weights_come_back_and_are_the_same_at_a_seed() -> None:
    torch.manual_seed(3)
    model = vit().double().eval()
    torch.manual_seed(3)
    same = vit().double().eval()
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(model(x), same(x))
    other = vit().double().eval()
    assert differs(other(x), model(x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    close(model(x[1:2]), model(x)[1:2])
    with torch.device("meta"):
        empty = vit()
    assert all(tensor.is_meta for tensor in empty.state_dict().values())
    assert empty.state_dict().keys() == model.state_dict().keys()


def test_another_image_size_keeps_the_convolutions() -> None:
    model = vit().eval()
    model.set_input_size((48, 64))
    assert model(torch.randn(1, 3, 48, 64)).shape == (1, 10)
    set_image_size(model, 40)
    assert model(torch.randn(1, 3, 40, 40)).shape == (1, 10)
    with refused("images of 42x42: .*take 40 or 44"):
        model.set_input_size(42)
    with refused("a stem of strided convolutions cannot change its patch size, 4x4"):
        model.set_input_size(patch_size=8)


def test_weights_of_another_stem_are_refused() -> None:
    with refused("patch_embed.proj.weight is .*build the model with the sizes of the weights"):
        load_weights(vit(), vit(stem=None).state_dict())


@pytest.mark.parametrize("name", ["jax", "moco", ""])
def test_the_start_of_weights_is_still_timms(name: str) -> None:
    torch.manual_seed(0)
    model = vit(weight_init=name, embed_dim=64)
    x = torch.randn(8, 3, 32, 32)
    model(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    spread = float(model.blocks[0].mlp.fc1.weight.detach().std())
    wanted = 0.02 if not name else (2 / (64 + 128)) ** 0.5
    assert spread == pytest.approx(wanted, rel=0.05)

# SPDX-License-Identifier: Apache-2.0
"""Swin's shifted windows on the seam: a leading axis for windows, one bias for positions and mask.

The adapter here stands for the one that a Swin host will be; it shows that the seam suffices.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from timm.models import swin_transformer as timm_swin
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.mixers.base import Site, TokenMixer
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import build, list_mixers, mixer_options
from mixer_cases import stir

HEADS = (3, 6, 12, 24)
GRIDS = ((16, 16), (8, 8), (4, 4), (4, 4))


class WindowMixer(nn.Module):
    """Stands where timm's WindowAttention stood and owns the table of relative positions."""

    def __init__(self, mixer: TokenMixer, windows: int, tables: int, shifted: bool) -> None:
        super().__init__()
        if shifted and not mixer.claims.maskable:
            raise UserError(f"mixer {mixer.mixer_name!r} cannot honour a shifted window's mask")
        assert mixer.site.grid is not None
        height, width = mixer.site.grid
        self.mixer, self.windows = mixer, windows
        self.table = None
        if isinstance(mixer, MapMixer):
            self.table = nn.Parameter(torch.zeros((2 * height - 1) * (2 * width - 1), tables))
        index = timm_swin.get_relative_position_index(height, width)
        self.register_buffer("index", index, persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x.unflatten(0, (-1, self.windows))  # timm keeps windows inside the batch
        bias = None
        if self.table is not None:
            bias = self.table[self.index].permute(2, 0, 1)
            if mask is not None:
                bias = bias + mask[:, None]
        return self.mixer(x, bias=bias).flatten(0, 1)


class Merge(nn.Module):
    """Patch merging of the paper's network: unfold and a linear map with bias."""

    def __init__(self, width: int, out: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.reduction = nn.Linear(width * factor**2, out)

    def forward(self, x: Tensor) -> Tensor:
        f = self.factor
        x = x.unflatten(1, (-1, f)).unflatten(3, (-1, f)).transpose(2, 3)
        return self.reduction(x.flatten(3))


def put(block: Any, mixer: str, options: dict[str, Any], windows: int, shared: bool) -> None:
    size = block.window_size
    site = Site(
        dim=block.dim,
        num_heads=block.attn.num_heads,
        grid=size,
        windows=1 if shared else windows,
    )
    known = {k: v for k, v in options.items() if k in mixer_options(mixer)}
    made = build(mixer, site, known)
    block.attn = WindowMixer(made, windows, 1, any(block.shift_size))


def paper_network(mixer: str, shared: bool = False, **options: Any) -> nn.Module:
    """SKA's Swin-T for 32x32 images: window 4, downscaling 2, 2, 2, 1, one table for all heads."""
    model = timm_swin.SwinTransformer(
        img_size=32,
        patch_size=2,
        embed_dim=96,
        depths=(2, 2, 6, 2),
        num_heads=HEADS,
        window_size=4,
        qkv_bias=False,
        num_classes=10,
        drop_path_rate=0.0,
    )
    model.patch_embed.norm = nn.Identity()
    for i, (stage, grid) in enumerate(zip(model.layers, GRIDS, strict=True)):
        if i:
            stage.downsample = Merge(48 * 2**i, 96 * 2**i, 2 if i < 3 else 1)
        windows = (grid[0] // 4) * (grid[1] // 4)
        for block in stage.blocks:
            block.input_resolution = grid
            block.window_size, block.shift_size = block._calc_window_shift(
                4, block.target_shift_size
            )
            block.window_area = 16
            put(block, mixer, {"qkv_bias": False, **options}, windows, shared)
    return model


def trainable(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("mixer", "options", "count"),
    [
        ("softmax", {}, 26_598_646),
        ("static_key", {}, 24_580_342 - 3_072),  # the published counts hold 3072 of the masks
        ("static_key", {"shared": True}, 24_515_830 - 3_072),
        ("static_key", {"head_dim": 42}, 26_644_342 - 3_072),
        ("conv_static_key", {}, 25_665_910 - 3_072),
        ("conv_static_key", {"shared": True}, 25_083_286 - 3_072),
    ],
)
def test_counts_are_the_published(mixer: str, options: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        assert trainable(paper_network(mixer, **options)) == count


@pytest.fixture
def small() -> nn.Module:
    """A Swin of 8x8 tokens in 4x4 windows, every second block shifted, tables filled."""
    model = timm_swin.SwinTransformer(
        img_size=16,
        patch_size=2,
        embed_dim=12,
        depths=(2, 2),
        num_heads=(2, 3),
        window_size=4,
        num_classes=5,
        drop_path_rate=0.0,
    )
    model = model.double().eval()
    stir(model)
    return model


def blocks(model: nn.Module) -> list[Any]:
    return [block for stage in model.layers for block in stage.blocks]


def windows_of(block: Any) -> int:
    (height, width), size = block.input_resolution, block.window_size
    return (height // size[0]) * (width // size[1])


def test_softmax_on_the_seam_is_timms_window_attention(small: nn.Module) -> None:
    mine = copy.deepcopy(small)
    assert [any(b.shift_size) for b in blocks(mine)] == [False, True, False, False]
    for block in blocks(mine):
        theirs = block.attn
        site = Site(dim=block.dim, num_heads=theirs.num_heads, grid=block.window_size)
        mixer = build("softmax", site, {}, dtype=torch.float64)
        weights = {k: v for k, v in theirs.state_dict().items() if k.startswith(("qkv", "proj"))}
        mixer.load_state_dict(weights, strict=True)
        hosted = WindowMixer(mixer, windows_of(block), theirs.num_heads, any(block.shift_size))
        hosted.table.data = theirs.relative_position_bias_table.data.clone()
        block.attn = hosted
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    y, wanted = mine(x), small(x)
    assert (y - wanted).abs().max() <= 1e-12
    weight = torch.randn_like(wanted)
    tables = {"mine": blocks(mine)[1].attn.table}
    tables["timm"] = blocks(small)[1].attn.relative_position_bias_table
    grads = [
        torch.autograd.grad((out * weight).sum(), tables[who])[0]
        for who, out in (("mine", y), ("timm", wanted))
    ]
    assert grads[1].abs().max() > 1e-6
    assert (grads[0] - grads[1]).abs().max() <= 1e-12


@pytest.mark.parametrize("mixer", list_mixers())
def test_every_mixer_runs_in_swin_or_is_refused_under_the_shift(small, mixer: str) -> None:
    site = Site(dim=12, num_heads=2, grid=(4, 4))
    if not build(mixer, site).claims.maskable:
        with pytest.raises(UserError, match=f"{mixer}.*mask"):
            put(blocks(small)[1], mixer, {}, 4, shared=False)
        return
    for block in blocks(small):
        put(block, mixer, {}, windows_of(block), shared=False)
    small.double()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    y = small(x)
    assert y.shape == (2, 5)
    y.sum().backward()
    left = [k for k, p in small.named_parameters() if p.grad is None]
    assert left == []


@pytest.mark.parametrize("mixer", ["re_attention", "static_key_re_attention", "pooling", "random"])
def test_mixers_that_undo_a_mask_are_refused_under_the_shift(small, mixer: str) -> None:
    unshifted, shifted = blocks(small)[:2]
    put(unshifted, mixer, {}, 4, shared=False)
    with pytest.raises(UserError, match="mask"):
        put(shifted, mixer, {}, 4, shared=False)


def regions(block: Any) -> Tensor:
    """Whether two tokens of a window lie in one region of the shifted image, [nW, N, N]."""
    return block.attn_mask == 0


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("mixer", ["softmax", "static_key", "key_value"])
def test_no_gradient_crosses_regions_of_a_shifted_window(small, mixer: str, shared: bool) -> None:
    """Timm's mask is -100, not minus infinity: what is left over is below e^-50."""
    block = blocks(small)[1]
    put(block, mixer, {}, 4, shared=shared)
    hosted = block.attn.double()
    same = regions(block)
    assert (~same).any(1).any(1).tolist() == [False, True, True, True]
    mask = torch.zeros_like(block.attn_mask, dtype=torch.float64).masked_fill(~same, -torch.inf)
    x = torch.randn(4, 16, 12, dtype=torch.float64, requires_grad=True)
    y = hosted(x, mask)
    soft = hosted(x, block.attn_mask.double())
    assert (y - soft).abs().max() < 1e-12
    for window in range(4):
        for token in (0, 5, 15):
            (grad,) = torch.autograd.grad(y[window, token].sum(), x, retain_graph=True)
            reached = (grad != 0).any(-1)
            expected = torch.zeros_like(reached)
            expected[window] = same[window, token]
            assert torch.equal(reached, expected)


def test_the_convolutional_map_is_zero_across_regions(small) -> None:
    """Its queries look over the seam, as documented, but no value crosses."""
    block = blocks(small)[1]
    put(block, "conv_static_key", {}, 4, shared=False)
    hosted = block.attn.double()
    same = regions(block)
    mask = torch.zeros_like(block.attn_mask, dtype=torch.float64).masked_fill(~same, -torch.inf)
    x = torch.randn(2, 4, 16, 12, dtype=torch.float64)
    maps = hosted.mixer.attention_map(x, stage="final", bias=mask[:, None])
    crossing = (~same)[None, :, None].expand_as(maps)
    assert (maps[crossing] == 0).all()
    assert (maps[~crossing] > 0).all()

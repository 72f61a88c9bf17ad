# SPDX-License-Identifier: Apache-2.0
"""Inside Swin's windows: nothing crosses a shift, whatever the logits; maps come by window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

import keymix
from each import together
from keymix.analysis.similarity import map_similarity
from keymix.errors import UserError
from keymix.hosts import put_mixers
from keymix.hosts.timm_swin import TimmSwin
from keymix.models import create_model
from mixer_cases import stir
from tolerances import close


def hosted(mixer: str, *, shared: bool = False, **options: Any) -> Any:
    """A shifted block of 8x8 tokens in 4x4 windows, tables and weights filled."""
    model = SwinTransformer(
        img_size=16,
        patch_size=2,
        embed_dim=12,
        depths=(2,),
        num_heads=(2,),
        window_size=4,
        num_classes=5,
        drop_path_rate=0.0,
    )
    stir(model)
    put_mixers(model, ["softmax", mixer], [{}, options], host=TimmSwin(shared_keys=shared))
    return model.double().eval().layers[0].blocks[1]


def same_region(block: Any) -> Tensor:
    """Whether two tokens of a window lie in one region of the shifted image, ``[nW, N, N]``.

    Read off the shift itself, not from the mask: in the last row and column of windows a side of
    4 falls into 2 tokens of one edge and 2 of the other.
    """
    assert block.shift_size == (2, 2)
    half = torch.arange(4) >= 2
    none = torch.zeros(4, dtype=torch.bool)
    found = []
    for row in range(2):
        for column in range(2):
            down, across = (half if last else none for last in (row, column))
            region = (down[:, None].long() * 2 + across[None].long()).flatten()
            found.append(region[:, None] == region[None])
    return torch.stack(found)


@together
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("mixer", ["softmax", "static_key", "key_value"])
@pytest.mark.parametrize("steep", [1.0, 1e4])
def test_no_gradient_crosses_regions_of_a_shifted_window(
    mixer: str, shared: bool, steep: float
) -> None:
    """Also where logits differ by thousands: timm's mask of -100 would leak there."""
    block = hosted(mixer, shared=shared)
    block.attn.mixer.scale *= steep
    same = same_region(block)
    x = torch.randn(4, 16, 12, dtype=torch.float64, requires_grad=True)
    y = block.attn(x, block.attn_mask)
    for window in range(4):
        for token in (0, 5, 15):
            (grad,) = torch.autograd.grad(y[window, token].sum(), x, retain_graph=True)
            reached = (grad != 0).any(-1)
            allowed = torch.zeros_like(reached)
            allowed[window] = same[window, token]
            assert not (reached & ~allowed).any()
            if steep == 1.0:
                assert torch.equal(reached, allowed)


@pytest.mark.parametrize("mixer", ["softmax", "static_key", "conv_static_key", "key_value"])
def test_a_map_is_zero_across_regions_and_nowhere_else(mixer: str) -> None:
    """The convolution's queries look over the seam, as documented, but no value crosses."""
    block = hosted(mixer)
    x = torch.randn(2, 4, 16, 12, dtype=torch.float64)
    bias = block.attn.bias(block.attn_mask)
    maps = block.attn.mixer.attention_map(x, stage="final", bias=bias)
    crossing = (~same_region(block))[None, :, None].expand_as(maps)
    assert crossing.any()
    assert (maps[crossing] == 0).all()
    assert (maps[~crossing] > 0).all()


def test_only_queries_next_to_the_seam_read_the_opposite_edge() -> None:
    """The 3x3 of the convolution looks one token over the seam of the rolled image."""
    block = hosted("conv_static_key")
    x = torch.randn(1, 4, 16, 12, dtype=torch.float64, requires_grad=True)
    maps = block.attn.mixer.attention_map(x, stage="final", bias=block.attn.bias(block.attn_mask))
    across = ~same_region(block)
    window = 1  # its columns 0, 1 are of one edge and 2, 3 of the other
    for token in range(16):
        row = maps[0, window, :, token] * torch.linspace(1, 2, 16, dtype=torch.float64)
        (grad,) = torch.autograd.grad(row.sum(), x, retain_graph=True)
        reached = (grad[0] != 0).any(-1)
        near = [abs(token // 4 - k // 4) <= 1 and abs(token % 4 - k % 4) <= 1 for k in range(16)]
        assert reached[window].tolist() == near
        assert not reached[[0, 2, 3]].any()
        assert bool((reached[window] & across[window, token]).any()) == (token % 4 in (1, 2))


def test_the_table_reaches_the_logits_by_relative_position() -> None:
    block = hosted("softmax")
    table = block.attn.relative_position_bias_table  # [7 * 7, heads]
    bias = block.attn.bias(None)
    for query, key in ((0, 0), (0, 5), (13, 2)):
        down, across = query // 4 - key // 4, query % 4 - key % 4
        close(bias[:, query, key], table[(down + 3) * 7 + across + 3])


@pytest.mark.parametrize("mixer", ["re_attention", "static_key_re_attention", "pooling", "random"])
def test_mixers_that_undo_a_mask_sit_only_where_nothing_is_shifted(mixer: str) -> None:
    with pytest.raises(UserError, match=r"layers\.0\.blocks\.1\.attn: its windows are shifted"):
        hosted(mixer)


@pytest.mark.parametrize("options", [{"talking_heads": True}, {"activation": "gelu"}])
def test_so_do_options_that_undo_it(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="windows are shifted"):
        hosted("static_key", **options)
    assert hosted("static_key", activation="relu")


def swin(**options: Any) -> nn.Module:
    small = {"embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3), "merging": (2,)}
    return create_model("swin_micro_p2_32", **small, **options).eval()


def test_attention_maps_come_by_window() -> None:
    model = swin(mixer="ska")
    x = torch.randn(2, 3, 32, 32)
    maps = keymix.attention_maps(model, x, queries=[0, 7, 15])
    assert [tuple(m.shape) for m in maps.values()] == [(2, 16, 2, 3, 16)] * 2 + [
        (2, 4, 3, 3, 16)
    ] * 2
    for each in maps.values():
        close(each.sum(-1), torch.ones(each.shape[:-1]))


def test_collapse_is_measured_among_blocks_of_one_stage_and_shift() -> None:
    model = create_model("swin_micro_p2_32", depths=(3, 2), num_heads=(1, 2), merging=(2,)).eval()
    x = torch.randn(2, 3, 32, 32)
    found = map_similarity(model, x, layers=["layers.0.blocks.0.*", "layers.0.blocks.2.*"])
    assert found.pairs[0].columns == 2 * 16 * 1 * 16  # images, windows, heads, tokens
    maps = keymix.attention_maps(model, x, layers=[0, 2], stage="final").values()
    a, b = (m.double() for m in maps)
    cosines = (a * b).sum(-2) / (a.norm(dim=-2) * b.norm(dim=-2))
    close(torch.tensor(found.pairs[0].mean, dtype=torch.float64), cosines.mean())
    with pytest.raises(UserError, match=r"layers\.0\.blocks\.0.*windows.*one shift"):
        map_similarity(model, x, layers=[0, 1])
    with pytest.raises(UserError, match="one stage"):
        map_similarity(model, x, layers=[0, 3])

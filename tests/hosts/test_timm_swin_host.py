# SPDX-License-Identifier: Apache-2.0
"""Putting mixers into timm's Swin: windows as an axis, one bias for positions and the mask."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_host, find_mixers, put_mixers
from keymix.hosts.timm_swin import TimmSwin
from keymix.mixers.registry import create_mixer, list_mixers
from mixer_cases import stir
from tolerances import close


def swin(**options: Any) -> SwinTransformer:
    """8x8 tokens in 4x4 windows; the second block is shifted, the next stage is one window."""
    defaults = {"img_size": 16, "patch_size": 2, "embed_dim": 12, "depths": (2, 2)}
    defaults |= {"num_heads": (2, 3), "window_size": 4, "num_classes": 5, "drop_path_rate": 0.0}
    model = SwinTransformer(**{**defaults, **options}).double().eval()
    stir(model)
    return model


def blocks(model: Any) -> list[Any]:
    return [block for stage in model.layers for block in stage.blocks]


def carried(theirs: nn.Module) -> dict[str, Tensor]:
    """timm's weights under the names that they have behind a mixer."""
    names = {f"attn.{k}.": f"attn.mixer.{k}." for k in ("qkv", "proj")}
    state = {}
    for key, value in theirs.state_dict().items():
        for old, new in names.items():
            key = key.replace(old, new)  # noqa: PLW2901
        state[key] = value
    return state


X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def maskable(mixer: str) -> bool:
    return create_mixer(mixer, dim=12, num_heads=2, grid=(4, 4)).claims.maskable


def mixers_by_block(mixer: str) -> list[str]:
    """The mixer wherever it can sit in :func:`swin`."""
    return [mixer, mixer if maskable(mixer) else "softmax", mixer, mixer]


def test_places_say_what_the_host_knows() -> None:
    model = swin(qkv_bias=False, attn_drop_rate=0.1, proj_drop_rate=0.2, head_dim=5)
    places = find_host(model).places(model)
    assert [p.path for p in places] == [
        f"layers.{s}.blocks.{i}.attn" for s in (0, 1) for i in (0, 1)
    ]
    assert [p.stage for p in places] == [0, 0, 1, 1]
    assert [p.needs_mask is not None for p in places] == [False, True, False, False]
    first, last = places[0].site, places[3].site
    assert (first.dim, first.num_heads, first.grid, first.num_prefix_tokens) == (12, 2, (4, 4), 0)
    assert (first.windows, first.window_grid) == (4, (2, 2))
    assert (last.dim, last.windows, last.window_grid) == (24, 1, (1, 1))
    assert put_mixers(model, "mhsa") == [f"{p.path}.mixer" for p in places]
    mixer: Any = find_mixers(model)["layers.0.blocks.1.attn.mixer"]
    assert (mixer.qkv.bias, mixer.head_dim, mixer.attn_drop_p) == (None, 5, 0.1)
    assert mixer.proj_drop.p == 0.2


def test_softmax_on_it_is_timms_window_attention() -> None:
    theirs = swin()
    mine = copy.deepcopy(theirs)
    put_mixers(mine, "softmax")
    mine.load_state_dict(carried(theirs), strict=True)
    y, wanted = mine(X), theirs(X)
    assert (y - wanted).abs().max() <= 1e-12
    weight = torch.randn_like(wanted)
    grads = [
        torch.autograd.grad(
            (out * weight).sum(), blocks(model)[1].attn.relative_position_bias_table
        )
        for out, model in ((y, mine), (wanted, theirs))
    ]
    assert grads[1][0].abs().max() > 1e-6
    assert (grads[0][0] - grads[1][0]).abs().max() <= 1e-12


@pytest.mark.parametrize("shape", [(16, 16), (24, 20), (18, 34)])
def test_so_it_is_on_any_image_where_timm_takes_any(shape: tuple[int, int]) -> None:
    """Also where windows are padded at the right and the bottom."""
    theirs = swin(dynamic_img_size=True)
    mine = copy.deepcopy(theirs)
    put_mixers(mine, "softmax")
    mine.load_state_dict(carried(theirs), strict=True)
    x = torch.randn(3, 3, *shape, dtype=torch.float64)
    assert (mine(x) - theirs(x)).abs().max() <= 1e-12


@pytest.mark.parametrize("size", [(16, 16), (32, 32), (24, 40)])
def test_so_it_is_after_another_input_size(size: tuple[int, int]) -> None:
    theirs = swin()
    mine = copy.deepcopy(theirs)
    put_mixers(mine, "softmax")
    mine.load_state_dict(carried(theirs), strict=True)
    for model in (mine, theirs):
        model.set_input_size(size)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    close(mine(x), theirs(x))
    assert [b.attn.shift for b in blocks(mine)] == [b.shift_size for b in blocks(theirs)]
    for model in (mine, theirs):
        model.set_input_size((20, 16), window_size=(2, 4))
    x = torch.randn(2, 3, 20, 16, dtype=torch.float64)
    close(mine(x), theirs(x))
    assert {m.site.grid for m in find_mixers(mine).values()} == {(2, 4)}


@together
@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
@pytest.mark.parametrize("shared", [True, False])
def test_every_mixer_runs_in_swin_or_is_refused_under_the_shift(mixer: str, shared: bool) -> None:
    model = swin()
    host = TimmSwin(shared_keys=shared)
    if not maskable(mixer):
        with pytest.raises(
            UserError, match=rf"{mixer}.*layers\.0\.blocks\.1\.attn.*mask.*one per blo"
        ):
            put_mixers(model, mixer, host=host)
    put_mixers(model, mixers_by_block(mixer), host=host)
    model.train()
    model.double()
    y = model(X)
    assert y.shape == (2, 5)
    y.sum().backward()
    assert [k for k, p in model.named_parameters() if p.grad is None] == []


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    model = swin()
    before, kinds = model(X), [(type(b), type(b.attn)) for b in blocks(model)]
    with pytest.raises(UserError, match="mask"):
        put_mixers(model, "pooling")
    assert [(type(b), type(b.attn)) for b in blocks(model)] == kinds
    assert torch.equal(model(X), before)


@together
@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
def test_a_mixer_can_be_put_over_another(mixer: str) -> None:
    model = swin()
    theirs = copy.deepcopy(model)
    put_mixers(model, "ska", {"num_heads": 5, "head_dim": 3}, host=TimmSwin(shared_keys=True))
    put_mixers(model, mixers_by_block(mixer))
    assert model.double()(X).shape == (2, 5)
    assert all(b.attn.shared_keys for b in blocks(model)), "the choice of keys stays"
    put_mixers(model, "softmax")
    heads = [(m.num_heads, m.head_dim) for m in find_mixers(model).values()]
    assert heads == [(2, 6), (2, 6), (3, 8), (3, 8)], "the host's heads, not the last mixer's"
    model.load_state_dict(carried(theirs), strict=True)
    close(model(X), theirs(X))


@pytest.mark.parametrize("training", [True, False])
def test_the_mixer_takes_the_hosts_mode_dtype_and_options(training: bool) -> None:
    model = swin(qkv_bias=False, head_dim=5, attn_drop_rate=0.1).train(training)
    for mixer in ("identity", "ska"):  # the second from what the first left of the host
        put_mixers(model, mixer)
    assert all(m.training == training for m in model.modules())
    for each in find_mixers(model).values():
        assert (each.q.bias, each.head_dim, each.attn_drop_p) == (None, 5, 0.1)
        assert all(p.dtype == torch.float64 for p in each.parameters())


def test_the_hosts_table_stays_and_follows_another_number_of_heads() -> None:
    model = swin()
    before = [b.attn.relative_position_bias_table for b in blocks(model)]
    put_mixers(model, "ska")
    kept = [b.attn.relative_position_bias_table for b in blocks(model)]
    assert all(now is then for now, then in zip(kept, before, strict=True))
    put_mixers(model, "ska", {"num_heads": 5, "head_dim": 2})
    assert {b.attn.relative_position_bias_table.shape for b in blocks(model)} == {(49, 5)}
    put_mixers(model, "identity")
    assert {b.attn.relative_position_bias_table for b in blocks(model)} == {None}


def test_keys_are_a_windows_own_or_shared() -> None:
    own, shared = swin(), swin()
    put_mixers(own, "ska")
    put_mixers(shared, "ska", host=TimmSwin(shared_keys=True))
    assert [b.attn.mixer.key.shape for b in blocks(own)][::2] == [(4, 2, 16, 6), (3, 16, 8)]
    assert [b.attn.mixer.key.shape for b in blocks(shared)][::2] == [(2, 16, 6), (3, 16, 8)]
    own.double().load_state_dict(
        {
            k: v.expand(4, *v.shape).clone() if k.endswith("key") and "layers.0" in k else v
            for k, v in shared.double().state_dict().items()
        },
        strict=True,
    )
    close(own(X), shared(X))


def test_keys_of_windows_refuse_an_image_with_other_windows() -> None:
    model = swin(dynamic_img_size=True)
    put_mixers(model, "ska")
    assert model.double()(X).shape == (2, 5)
    with pytest.raises(UserError, match=r"static_key.*in each of 4 windows.*9 windows \(3x3"):
        model(torch.randn(1, 3, 24, 24, dtype=torch.float64))
    with pytest.raises(UserError, match=r"4 windows \(1x4 of them\).*shared_keys=True.*set_image"):
        model(torch.randn(1, 3, 8, 32, dtype=torch.float64))  # as many, elsewhere
    put_mixers(model, "ska", host=TimmSwin(shared_keys=True))
    assert model.double()(torch.randn(1, 3, 24, 24, dtype=torch.float64)).shape == (1, 5)


def test_a_shift_that_comes_with_a_larger_image_is_refused_too() -> None:
    model = swin()
    put_mixers(model, ["softmax", "softmax", "softmax", "re_attention"])
    with pytest.raises(UserError, match=r"re_attention.*mask"):
        model.set_input_size((32, 32), window_size=4)


@pytest.mark.slow
@together
@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
def test_models_with_mixers_copy_and_pickle(mixer: str) -> None:
    model = swin()
    put_mixers(model, mixers_by_block(mixer))
    y = model.double()(X)
    assert torch.equal(copy.deepcopy(model)(X), y)
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), y)


def test_buffers_fill_when_a_meta_model_gets_memory() -> None:
    with torch.device("meta"):
        model = SwinTransformer(img_size=16, patch_size=2, window_size=4, embed_dim=12,
                                depths=(2, 2), num_heads=(2, 3), num_classes=5)  # fmt: skip
        put_mixers(model, "softmax")
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "init_non_persistent_buffers"):
            module.init_non_persistent_buffers()
    theirs = swin()
    model.double().eval().load_state_dict(carried(theirs), strict=True)
    close(model(X), theirs(X))


@pytest.mark.parametrize("mixer", ["ska", "cska", "kv"])
def test_timms_models_take_a_mixer_by_name(mixer: str) -> None:
    from keymix.models import create_model

    name = "swin_tiny_patch4_window7_224"
    small = {"img_size": 56, "depths": (2, 1), "embed_dim": 12, "num_heads": (2, 3)}
    model = create_model(name, mixer=mixer, num_classes=3, **small)
    assert type(model) is SwinTransformer
    assert len(find_mixers(model)) == 3
    assert model(torch.randn(1, 3, 56, 56)).shape == (1, 3)
    assert timm.is_model(name)

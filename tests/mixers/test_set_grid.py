# SPDX-License-Identifier: Apache-2.0
"""Taking another grid for good: parameters, state, checkpoints, windows, strided keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from each import together
from keymix.errors import UserError
from keymix.mixers.base import Site
from keymix.mixers.registry import build, list_mixers
from keymix.mixers.site import strided
from keymix.ops import resample
from mixer_cases import DIM, gradients, make, refused, stir, tokens
from tolerances import close, differs

KEYED = ["static_key", "conv_static_key", "static_key_re_attention"]
POLICIES = ["interpolate", "pool_values"]

every_keyed = pytest.mark.parametrize("name", KEYED)
every_policy = pytest.mark.parametrize("resize", POLICIES)


def on(mixer: Any, grid: tuple[int, int], *lead: int) -> Tensor:
    count = mixer.site.num_prefix_tokens + grid[0] * grid[1]
    return torch.randn(*(lead or (2,)), count, DIM, dtype=torch.float64)


@together
@every_keyed
@every_policy
def test_set_grid_computes_what_a_call_with_the_grid_does(name: str, resize: str) -> None:
    mixer = make(name, {"resize": resize}, num_prefix_tokens=1).eval()
    x = on(mixer, (5, 3))
    wanted = gradients(mixer, x, grid=(5, 3))
    for p in mixer.parameters():
        p.requires_grad_(p is not mixer.key)
    mixer.set_grid((5, 3))
    assert not mixer.key.requires_grad
    mixer.requires_grad_()
    assert mixer.site.grid == (5, 3)
    assert mixer.site.num_keys == (16 if resize == "interpolate" else 7)
    y, grads = gradients(mixer, x)
    close(y, wanted[0])
    close(grads["x"], wanted[1]["x"])
    assert torch.equal(mixer(x, grid=(5, 3)), y)
    mixer.reset_parameters()
    assert mixer(x).shape == x.shape


@every_keyed
def test_values_come_home_and_keys_stay_under_pooling(name: str) -> None:
    mixer = make(name, {"resize": "pool_values"}, num_prefix_tokens=1).eval()
    x = tokens(mixer)
    before, state, site = mixer(x), dict(mixer.state_dict()), mixer.site
    for grid in ((4, 6), (7, 1), (2, 3)):
        mixer.set_grid(grid)
        assert mixer(on(mixer, grid)).shape[1] == 1 + grid[0] * grid[1]
    assert mixer.site == site
    assert all(torch.equal(state[k], v) for k, v in mixer.state_dict().items())
    assert torch.equal(mixer(x), before)


@every_keyed
def test_interpolated_weights_are_those_of_a_mixer_of_that_grid(name: str) -> None:
    mixer = make(name, {"resize": "interpolate"}, num_prefix_tokens=2).eval()
    mixer.set_grid((4, 5))
    fresh = make(name, num_prefix_tokens=2, grid=(4, 5), seed=3).eval()
    fresh.load_state_dict(mixer.state_dict(), strict=True)
    x = on(mixer, (4, 5))
    assert torch.equal(fresh(x), mixer(x))
    if name == "conv_static_key":
        assert mixer.key_conv.out_channels == 3 * 22
        assert repr(mixer.key_conv) == repr(fresh.key_conv)


@every_keyed
def test_a_checkpoint_of_another_grid_is_made_to_fit(name: str) -> None:
    small = make(name, {"resize": "interpolate"}, num_prefix_tokens=1)
    large = make(name, num_prefix_tokens=1, grid=(4, 5), seed=5)
    kept = {k: v.clone() for k, v in small.state_dict().items()}
    adapted = large.adapt_state(kept, (2, 3))
    assert all(torch.equal(small.state_dict()[k], v) for k, v in kept.items())
    large.load_state_dict(adapted, strict=True)
    small.set_grid((4, 5))
    x = on(large, (4, 5))
    assert torch.equal(large.eval()(x), small.eval()(x))
    with pytest.raises(UserError, match=rf"key.*'{name}'.*grid of \(3, 3\)"):
        large.adapt_state(kept, (3, 3))


@together
@pytest.mark.parametrize("name", list_mixers())
def test_every_mixer_says_whether_it_takes_a_grid(name: str) -> None:
    mixer = make(name, num_prefix_tokens=1).eval()
    assert mixer.refuses_grid(mixer.site.grid) is None
    mixer.set_grid((2, 3))
    reason = mixer.refuses_grid((4, 5))
    before = {k: v.clone() for k, v in mixer.state_dict().items()}
    if reason is None:
        mixer.set_grid((4, 5))
        assert mixer(on(mixer, (4, 5))).shape == (2, 21, DIM)
    else:
        assert name in reason
        assert "(2, 3)" in reason
        assert "for the new image size" in reason
        with pytest.raises(UserError, match=name):
            mixer.set_grid((4, 5))
        assert mixer.site.grid == (2, 3)
    assert mixer.adapt_state(before, (2, 3)).keys() == before.keys()
    assert (reason is None) == (name not in (*KEYED, "random", "linformer", "gfnet"))


# ---- windows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["static_key", "conv_static_key"])
def test_keys_of_windows_are_resampled_as_one_map(name: str) -> None:
    options, site = {"resize": "interpolate"}, {"windows": 4, "window_grid": (2, 2)}
    mixer = make(name, options, **site).eval()
    weights = {k: v.clone() for k, v in mixer.state_dict().items()}
    mixer.set_grid((2, 3), window_grid=(3, 2))
    assert (mixer.site.windows, mixer.site.window_grid) == (6, (3, 2))
    x = on(mixer, (2, 3), 2, 6)
    one = make(name).eval()
    for window in range(6):
        state = {k: v for k, v in weights.items() if not k.startswith("key")}
        for key in ("key", "key_conv.weight", "key_conv.bias"):
            if key in weights:
                rows = weights[key].reshape(4, 3, 6, -1)
                moved = resample.interpolate_windows(rows, 0, (2, 3), (2, 3), (2, 2), (3, 2))
                state[key] = moved[window].reshape(one.state_dict()[key].shape)
        one.load_state_dict(state, strict=True)
        close(mixer(x)[:, window], one(x[:, window]))
    adapted = mixer.adapt_state(weights, (2, 3), window_grid=(2, 2))
    assert all(torch.equal(adapted[k], v) for k, v in mixer.state_dict().items())


@pytest.mark.parametrize("name", KEYED)
def test_windows_that_cannot_be_resampled_are_refused(name: str) -> None:
    pooled = make(name, {"resize": "pool_values"}, windows=4, window_grid=(2, 2)).eval()
    for windows in ((2, 3), (1, 4)):
        with refused(r"4 windows.*interpolate.*share keys"):
            pooled.set_grid((2, 3), window_grid=windows)
    with refused(r"in each of 4 windows.*got tokens \(2, 6, 6, 12\).*set_grid"):
        pooled(on(pooled, (2, 3), 2, 6))
    pooled.set_grid((4, 4), window_grid=(2, 2))
    assert pooled(on(pooled, (4, 4), 2, 4)).shape == (2, 4, 16, DIM)
    nowhere = make(name, {"resize": "interpolate"}, windows=4)
    with refused("window_grid="):
        nowhere.set_grid((3, 3))
    shared = make(name, {"resize": "pool_values"}, window_grid=(2, 2)).eval()
    shared.set_grid((2, 3), window_grid=(3, 3))
    assert shared(on(shared, (2, 3), 2, 9)).shape == (2, 9, 6, DIM)
    with refused(r"window_grid=\(2, 3\) makes 6 windows.*windows=4"):
        make(name, windows=4, window_grid=(2, 3))


# ---- strided keys -----------------------------------------------------------------------------


class Halved(nn.Module):
    """Every second token of every second row, as a strided convolution leaves; prefix passes."""

    def __init__(self, stride: int, prefix: int) -> None:
        super().__init__()
        self.stride, self.prefix = stride, prefix

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        first, patches = x[..., : self.prefix, :], x[..., self.prefix :, :]
        patches = patches.unflatten(-2, grid)[..., :: self.stride, :: self.stride, :].flatten(
            -3, -2
        )
        return torch.cat((first, patches), -2)


def halved(name: str, resize: str | None, grid: tuple[int, int], keys: tuple[int, int]) -> Any:
    options = {} if resize is None else {"resize": resize}
    site = Site(
        dim=DIM,
        num_heads=3,
        grid=grid,
        key_grid=keys,
        num_prefix_tokens=1,
        project=lambda role: Halved(1 if role == "q" else 2, 1),
    )
    torch.manual_seed(0)
    mixer = build(name, site, options).double().eval()
    stir(mixer)
    return mixer


@together
@every_keyed
@every_policy
@pytest.mark.parametrize("grid", [(5, 6), (7, 3), (2, 2)])
def test_strided_keys_follow_the_tokens(name: str, resize: str, grid: Any) -> None:
    mixer = halved(name, resize, (4, 3), (2, 2))
    state = {k: v.clone() for k, v in mixer.state_dict().items()}
    x = on(mixer, grid)
    y = mixer(x, grid=grid)
    there = (-(-grid[0] // 2), -(-grid[1] // 2))
    keys = 5 if resize == "pool_values" else 1 + there[0] * there[1]
    assert mixer.attention_map(x, grid=grid).shape == (2, 3, x.shape[1], keys)
    if resize == "interpolate":
        wanted = halved(name, None, grid, there)
        wanted.load_state_dict(wanted.adapt_state(state, (4, 3), key_grid=(2, 2)), strict=True)
        close(y, wanted(x))
    else:
        maps = mixer.attention_map(x, grid=grid, stage="final")
        v = mixer.v(mixer.project["v"](x, grid)).unflatten(-1, (3, 4)).transpose(1, 2)
        v = resample.pool(v, 1, there, (2, 2))
        close(y, mixer.proj((maps @ v).transpose(1, 2).flatten(-2)))
    mixer.set_grid(grid, key_grid=there)
    close(mixer(x), y)
    mixer.set_grid((4, 3))
    if resize == "pool_values":
        assert mixer.site.key_grid == (2, 2)
        assert all(torch.equal(state[k], v) for k, v in mixer.state_dict().items())


@pytest.mark.parametrize("name", ["softmax", "re_attention"])
def test_computed_strided_keys_take_any_grid(name: str) -> None:
    mixer = halved(name, None, (4, 3), (2, 2))
    x = on(mixer, (5, 6))
    assert mixer.attention_map(x, grid=(5, 6)).shape[-1] == 1 + 3 * 3
    mixer.set_grid((5, 6))
    assert mixer.site.key_grid == (3, 3)


@dataclass(frozen=True)
class Step:
    """Makes projections, and tells their stride."""

    stride: int

    def __call__(self, role: str) -> nn.Module:
        return Halved(1 if role == "q" else self.stride, 0)


def test_a_stride_that_is_reported_is_not_guessed() -> None:
    """On one token, one key says nothing of the stride."""
    site = Site(dim=DIM, num_heads=3, grid=(1, 1), key_grid=(1, 1), project=Step(2))
    assert site.on((4, 5)).key_grid == (2, 3)
    assert site.on((4, 5), key_grid=(3, 3)).key_grid == (3, 3)
    plain = replace(site, key_grid=None, project=Step(1))
    assert plain.on((4, 5)).key_grid is None
    mixer = build("softmax", site, {})
    mixer.set_grid((4, 5))
    x = torch.randn(2, 20, DIM)
    assert mixer.attention_map(x).shape[-1] == mixer.site.num_keys == 6


def test_strides_that_fit() -> None:
    assert strided((8, 8), (4, 4), (10, 7)) == (5, 4)
    assert strided((8, 8), (8, 8), (10, 7)) == (10, 7)
    assert strided((3, 5), (2, 3), (6, 6)) == (3, 3)
    assert strided((2, 2), (1, 1), (4, 6)) == (2, 3)
    assert strided((1, 1), (1, 1), (4, 6), count=6) == (2, 3)  # one token fits every stride
    assert strided((8, 8), (4, 8), (6, 6)) == (3, 6)
    with pytest.raises(UserError, match=r"no stride makes 7 keys of \(4, 4\); give key_grid="):
        strided((8, 8), (4, 4), (4, 4), count=7)
    with pytest.raises(UserError, match="no stride makes a grid"):
        strided((8, 8), (9, 9), (4, 4))


def test_the_smallest_tokens_report_the_stride_by_their_number() -> None:
    mixer = halved("static_key", "interpolate", (1, 1), (1, 1))
    assert mixer(on(mixer, (4, 6)), grid=(4, 6)).shape == (2, 25, DIM)
    assert differs(mixer.key, torch.zeros_like(mixer.key))

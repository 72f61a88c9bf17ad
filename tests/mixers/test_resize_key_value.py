# SPDX-License-Identifier: Apache-2.0
"""The position code of key-value attention on other grids: both readings, and its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from each import together
from keymix.mixers.key_value import sinusoidal_code
from keymix.ops import resample
from mixer_cases import DIM, gradients, make, refused, tokens
from tolerances import close, differs

POLICIES = ["interpolate", "pool_values"]
OTHERS = [(4, 5), (3, 2), (1, 2), (2, 6)]
POS = 6

every_policy = pytest.mark.parametrize("resize", POLICIES)


def coded(resize: str | None, **more: Any) -> Any:
    backend = more.pop("backend", "auto")
    options = {"pos_dim": POS, "resize": resize, "backend": backend}
    return make("key_value", options, num_prefix_tokens=1, **more)


def on(grid: tuple[int, int]) -> Tensor:
    return torch.randn(2, 1 + grid[0] * grid[1], DIM, dtype=torch.float64)


def plainly(mixer: Any, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """The output for tokens on ``grid``, with the N x M x m code of every pair built in full."""
    home, h, d = mixer.site.grid, mixer.num_heads, mixer.head_dim
    k, v = (t.unflatten(-1, (h, d)).transpose(1, 2) for t in mixer.kv(x).chunk(2, -1))
    code = sinusoidal_code(mixer.site.num_tokens, POS)
    of_query = resample.interpolate(code, 1, home, grid)
    keys, of_key = (k, of_query) if mixer.resize == "interpolate" else (None, code)
    if keys is None:
        keys, v = (resample.pool(t, 1, grid, home) for t in (k, v))
    n, m = len(of_query), len(of_key)
    pairs = torch.cat((of_query[:, None].expand(n, m, -1), of_key.expand(n, m, -1)), -1)[..., :POS]
    scores = (k @ keys.mT * mixer.scale)[..., None] + pairs  # [B, h, N, M, m]
    logits = scores @ mixer.pos_proj.weight[0] + mixer.pos_proj.bias
    y = logits.softmax(-1) @ v
    return mixer.proj(y.transpose(1, 2).flatten(-2))


@together
@every_policy
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("grid", OTHERS)
def test_another_grid_is_the_code_of_every_pair(resize, backend, grid) -> None:
    mixer = coded(resize, backend=backend).eval()
    x = on(grid)
    close(mixer(x, grid=grid), plainly(mixer, x, grid))
    maps = mixer.attention_map(x, grid=grid)
    assert maps.shape[-1] == (x.shape[1] if resize == "interpolate" else 7)
    rows = mixer.attention_map(x, grid=grid, queries=[1, 0])
    close(rows, maps[..., [1, 0], :])


@every_policy
def test_on_its_own_grid_a_policy_is_the_identity_bit_for_bit(resize: str) -> None:
    plain, mixer = coded(None), coded(resize)
    x = tokens(plain)
    wanted = gradients(plain, x)
    for call in ({}, {"grid": (2, 3)}):
        y, grads = gradients(mixer, x, **call)
        assert torch.equal(y, wanted[0])
        assert all(torch.equal(grads[k], v) for k, v in wanted[1].items())


def test_without_a_policy_another_grid_is_refused() -> None:
    mixer = coded(None)
    with refused(r"position code on a grid of \(2, 3\).*21 tokens.*resize='interpolate'"):
        mixer(on((4, 5)), grid=(4, 5))
    with refused(r"\(2, 3\).*got 7 tokens on a grid of \(3, 2\)"):
        mixer(on((3, 2)), grid=(3, 2))
    assert "resize=" in str(mixer.refuses_grid((4, 5)))


def test_without_a_code_any_number_of_tokens_is_served_whatever_the_policy() -> None:
    for resize in (None, *POLICIES):
        mixer = make("key_value", {"resize": resize}).eval()
        x = torch.randn(2, 20, DIM, dtype=torch.float64)
        assert torch.equal(mixer(x), make("key_value").eval()(x))
        assert mixer.refuses_grid((4, 5)) is None
        mixer.set_grid((4, 5))
        assert mixer.site.grid == (4, 5)


@every_policy
@pytest.mark.parametrize("grid", [(1, 3), (3, 2)])
def test_derivatives_meet_finite_differences(resize: str, grid: Any) -> None:
    mixer = coded(resize, backend="reference", dim=4, num_heads=2, grid=(2, 2)).eval()
    weight = mixer.pos_proj.weight
    x = torch.randn(2, 1 + grid[0] * grid[1], 4, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        given = {"pos_proj.weight": weight}
        return torch.func.functional_call(mixer, given, (x,), {"grid": grid})

    assert torch.autograd.gradcheck(call, (x, weight.detach().requires_grad_()))


@every_policy
def test_set_grid_computes_what_a_call_with_the_grid_does(resize: str) -> None:
    mixer = coded(resize).eval()
    x, home = on((4, 5)), tokens(coded(None))
    wanted, before = mixer(x, grid=(4, 5)), mixer(home)
    mixer.set_grid((4, 5))
    close(mixer(x), wanted)
    if resize == "pool_values":
        mixer.set_grid((2, 3))
        assert torch.equal(mixer(home), before)


def test_the_state_says_a_resampled_code() -> None:
    moved = coded("interpolate").eval()
    assert "pos_code" not in moved.state_dict()
    moved.set_grid((4, 5))
    fresh = coded(None, grid=(4, 5), seed=4).eval()
    x = on((4, 5))
    sinusoid = fresh.pos_code.clone()
    fresh.load_state_dict(moved.state_dict(), strict=True)
    assert differs(fresh.pos_code, sinusoid)
    assert torch.equal(fresh(x), moved(x))
    assert "pos_code" in fresh.state_dict()
    # a state without one means the sinusoid of the indices again
    other = coded(None, grid=(4, 5), seed=6).eval()
    moved.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(moved(x), other(x))
    assert "pos_code" not in moved.state_dict()
    moved.load_state_dict({}, strict=False)
    assert torch.equal(moved.pos_code, other.pos_code)


def test_a_mixer_built_on_meta_has_its_code_with_its_state() -> None:
    mixer = coded(None).eval()
    empty = coded(None).eval().to("meta").to_empty(device="cpu")
    empty.load_state_dict(mixer.state_dict())
    assert torch.equal(empty(tokens(mixer)), mixer(tokens(mixer)))
    empty.pos_code.fill_(torch.nan)
    empty.init_non_persistent_buffers()
    assert torch.equal(empty(tokens(mixer)), mixer(tokens(mixer)))
    moved = coded("interpolate")
    moved.set_grid((4, 5))
    code = moved.pos_code.clone()
    moved.init_non_persistent_buffers()  # which this one is no more
    assert torch.equal(moved.pos_code, code)


def test_a_resampled_code_fits_another_grid() -> None:
    moved = coded("interpolate").eval()
    moved.set_grid((4, 5))
    state = moved.state_dict()
    back = coded("interpolate", seed=4).eval()
    assert back.optional_state == {"pos_code"} == set(state) - set(back.state_dict())
    back.load_state_dict(back.adapt_state(state, (4, 5)), strict=True)
    moved.set_grid((2, 3))
    assert torch.equal(back(tokens(back)), moved(tokens(back)))
    with refused(r"pos_code \(21, 4\).*'key_value' does not hold the code of a grid of \(2, 5\)"):
        back.adapt_state(state, (2, 5))
    assert "pos_code" not in back.adapt_state(coded(None).state_dict(), (2, 3))
    large = coded("interpolate", grid=(4, 5))
    unsaid = large.state_dict()
    large.set_grid((2, 3))
    assert torch.equal(back.adapt_state(unsaid, (4, 5))["pos_code"], large.pos_code)
    assert make("key_value").optional_state == frozenset()


def test_the_state_says_a_code_that_stayed_where_tokens_no_more_lie() -> None:
    kept = coded("pool_values").eval()
    plain = kept.state_dict()
    kept.set_grid((4, 5))
    x = on((4, 5))
    wanted = kept(x)
    assert kept.state_dict().keys() - plain.keys() == {"pos_code"}
    with pytest.raises(RuntimeError, match="size mismatch for pos_code"):
        coded("pool_values", grid=(4, 5)).load_state_dict(kept.state_dict())
    kept.load_state_dict(plain, strict=True)
    assert "pos_code" in kept.state_dict()
    assert torch.equal(kept(x), wanted)
    kept.set_grid((2, 3))
    assert "pos_code" not in kept.state_dict()


def test_windows_share_the_code() -> None:
    mixer = make("key_value", {"pos_dim": POS, "resize": "interpolate"}, windows=4).eval()
    x = torch.randn(2, 6, 6, DIM, dtype=torch.float64)
    mixer.set_grid((2, 3), window_grid=(3, 2))
    assert mixer.site.windows == 6
    assert mixer(x).shape == x.shape
    assert mixer(x[:, :, :4], grid=(2, 2)).shape == (2, 6, 4, DIM)

# SPDX-License-Identifier: Apache-2.0
"""Learned keys on other grids: both policies against plain formulas, with every activation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from each import together
from keymix.mixers.map_mixer import MapMixer
from keymix.ops import resample
from mixer_cases import DIM, GRID, gradients, make, refused
from tolerances import close, differs

KEYED = ["static_key", "conv_static_key", "static_key_re_attention"]
POLICIES = ["interpolate", "pool_values"]
OTHERS = [(4, 5), (3, 3), (1, 2), (3, 2), (2, 5)]  # up, down, turned, one axis alone
SITES: list[dict[str, Any]] = [{}, {"num_prefix_tokens": 2}, {"grid": (3, 5), "num_heads": 1}]

every_keyed = pytest.mark.parametrize("name", KEYED)
every_policy = pytest.mark.parametrize("resize", POLICIES)


def tokens_on(mixer: MapMixer, grid: tuple[int, int], *lead: int, seed: int = 1) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    count = mixer.site.num_prefix_tokens + grid[0] * grid[1]
    return torch.randn(*(lead or (2,)), count, DIM, generator=noise, dtype=torch.float64)


def activated(mixer: MapMixer, logits: Tensor) -> Tensor:
    a = logits * mixer.scale
    kind = mixer.activation
    if kind == "star_relu":
        return mixer.act.scale * a.relu().square() + mixer.act.bias
    return {"softmax": lambda t: t.softmax(-1), "gelu": F.gelu, "relu": F.relu}[kind](a)


def plainly(mixer: MapMixer, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """The output for tokens [B, N, C] on ``grid``, from the parameters alone."""
    site, h, d = mixer.site, mixer.num_heads, mixer.head_dim
    prefix, home = site.num_prefix_tokens, site.grid
    q, v = (mixer.get_submodule(r)(x).unflatten(-1, (h, d)).transpose(1, 2) for r in "qv")
    keys, there = {**dict(mixer.named_parameters())}, home
    if mixer.resize == "interpolate":
        there = grid
        move = lambda t: resample.interpolate(t, prefix, home, grid)  # noqa: E731
    else:
        home = there = site.key_grid or home
        v = resample.pool(v, prefix, grid, home)
        move = lambda t: t  # noqa: E731
    count = prefix + there[0] * there[1]
    logits = []
    if "key_conv.weight" in keys:
        rows = prefix + home[0] * home[1]
        weight = move(keys["key_conv.weight"].reshape(h, rows, -1)).reshape(h, count, d, 3, 3)
        bias = move(keys["key_conv.bias"].reshape(h, rows, 1))[..., 0]
        image = q[:, :, prefix:].mT.unflatten(-1, grid)
        for head in range(h):
            out = F.conv2d(image[:, head], weight[head], bias[head], padding=1)
            logits.append(out.flatten(2).mT)
        a = torch.stack(logits, 1)
        if prefix:
            a = torch.cat((q[:, :, :prefix] @ move(keys["key"]).mT, a), 2)
    else:
        a = q @ move(keys["key"]).mT
    assert a.shape == (len(x), h, x.shape[1], count)
    maps = mixer.mix_after(activated(mixer, a), track=False)
    return mixer.proj((maps @ v).transpose(1, 2).flatten(-2))


@together
@every_keyed
@every_policy
@pytest.mark.parametrize("activation", ["softmax", "gelu", "relu", "star_relu"])
@pytest.mark.parametrize("site", SITES, ids=str)
def test_another_grid_is_the_plain_formula(name, resize, activation, site) -> None:
    mixer = make(name, {"resize": resize, "activation": activation}, **site).eval()
    for grid in OTHERS:
        x = tokens_on(mixer, grid)
        close(mixer(x, grid=grid), plainly(mixer, x, grid))


@together
@every_keyed
@every_policy
@pytest.mark.parametrize("site", [*SITES, {"windows": 3, "window_grid": (1, 3)}], ids=str)
def test_on_its_own_grid_a_policy_is_the_identity_bit_for_bit(name, resize, site) -> None:
    for training in (False, True):
        plain = make(name, **site).train(training)
        mixer = make(name, {"resize": resize}, **site).train(training)
        x = tokens_on(plain, plain.site.grid, 2, *([3] if "windows" in site else []))
        wanted = gradients(plain, x)
        for call in ({}, {"grid": plain.site.grid}):
            y, grads = gradients(mixer, x, **call)
            assert torch.equal(y, wanted[0])
            assert all(torch.equal(grads[k], v) for k, v in wanted[1].items())
        maps = [m.attention_map(x, stage="final") for m in (plain, mixer)]
        assert torch.equal(*maps)


@every_keyed
def test_the_policies_differ_and_none_refuses_with_the_option(name: str) -> None:
    made = {resize: make(name, {"resize": resize}).eval() for resize in (*POLICIES, None)}
    x = tokens_on(made[None], (4, 5))
    assert differs(*(made[resize](x, grid=(4, 5)) for resize in POLICIES))
    with refused(r"grid of \(2, 3\).*20 tokens on a grid of \(4, 5\).*resize='interpolate'"):
        made[None](x, grid=(4, 5))
    for resize in POLICIES:
        with refused(r"20 tokens; pass grid="):
            made[resize](x)
        with refused("20 tokens.*4x4"):
            made[resize](x, grid=(4, 4))


@together
@every_keyed
@every_policy
def test_maps_of_another_grid_are_its_forward_pass(name: str, resize: str) -> None:
    mixer = make(name, {"resize": resize}, num_prefix_tokens=1).eval()
    grid = (4, 5)
    x = tokens_on(mixer, grid)
    maps = mixer.attention_map(x, grid=grid, stage="final")
    keys = 21 if resize == "interpolate" else 7
    assert maps.shape == (2, 3, 21, keys)
    v = mixer.inputs(x, grid)["v"]
    close(mixer.proj((maps @ v).transpose(1, 2).flatten(-2)), mixer(x, grid=grid))
    rows = mixer.attention_map(x, grid=grid, stage="final", queries=[20, 0])
    close(rows, maps[..., [20, 0], :])


@together
@every_policy
@pytest.mark.parametrize("options", [{}, {"temperature": True}, {"mask_diagonal": True}], ids=str)
def test_the_fused_path_is_the_reference_on_another_grid(resize, options) -> None:
    if resize == "pool_values" and "mask_diagonal" in options:
        return
    both = [
        make("static_key", {**options, "resize": resize, "backend": b}, num_prefix_tokens=1)
        for b in ("sdpa", "reference")
    ]
    grid = (3, 5)
    x = tokens_on(both[0], grid)
    keys = 16 if resize == "interpolate" else 7
    for bias in (None, torch.randn(3, 16, keys, dtype=torch.float64)):
        fused, plain = (gradients(m, x, grid=grid, bias=bias) for m in both)
        close(fused[0], plain[0])
        for key, grad in fused[1].items():
            close(grad, plain[1][key])


@together
@every_keyed
@every_policy
def test_gradients_reach_what_is_resampled(name: str, resize: str) -> None:
    mixer = make(name, {"resize": resize}, num_prefix_tokens=1)
    x = tokens_on(mixer, (4, 3), 3)
    _, grads = gradients(mixer, x, grid=(4, 3))
    for key, grad in grads.items():
        zero = key in mixer.zero_gradients
        assert not grad.isnan().any(), key
        assert zero or differs(grad, torch.zeros_like(grad)), key


@pytest.mark.slow
@together
@every_keyed
@every_policy
@pytest.mark.parametrize("grid", [(1, 3), (3, 2)])
def test_derivatives_meet_finite_differences(name: str, resize: str, grid: Any) -> None:
    options = {"resize": resize, "backend": "reference"}
    mixer = make(name, options, dim=4, num_heads=2, grid=(2, 2), num_prefix_tokens=1).eval()
    x = torch.randn(1, 1 + grid[0] * grid[1], 4, dtype=torch.float64, requires_grad=True)
    names = [k for k in dict(mixer.named_parameters()) if k.startswith("key")]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(mixer, given, (x,), {"grid": grid})

    parameters = [mixer.get_parameter(k).detach().requires_grad_() for k in names]
    assert torch.autograd.gradcheck(call, (x, *parameters))


@pytest.mark.parametrize("name", KEYED)
def test_a_call_keeps_no_memory_of_its_grid(name: str) -> None:
    for resize in POLICIES:
        mixer = make(name, {"resize": resize}).eval()
        x = tokens_on(mixer, GRID)
        before, state = mixer(x), {k: v.clone() for k, v in mixer.state_dict().items()}
        mixer(tokens_on(mixer, (5, 4)), grid=(5, 4))
        assert torch.equal(mixer(x), before)
        assert all(torch.equal(state[k], v) for k, v in mixer.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["static_key"])
@every_policy
def test_a_resized_call_compiles_in_one_graph(name: str, resize: str, shapes_checked: bool) -> None:
    if shapes_checked:
        pytest.skip("compilers cannot see through the shape checks")
    mixer = make(name, {"resize": resize}, num_prefix_tokens=1).eval()
    x = tokens_on(mixer, (3, 4))
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    close(compiled(x, grid=(3, 4)), mixer(x, grid=(3, 4)))
    torch.compiler.reset()


@pytest.mark.parametrize("name", KEYED)
def test_a_bias_for_other_keys_is_refused_where_keys_stay(name: str) -> None:
    mixer = make(name, {"resize": "pool_values"}).eval()
    x, bias = tokens_on(mixer, (4, 5)), torch.zeros(20, 20, dtype=torch.float64)
    for call in (mixer, mixer.attention_map):
        with refused(r"6 keys on a grid of \(2, 3\).*bias for 20 keys.*interpolate"):
            call(x, grid=(4, 5), bias=bias)
    assert mixer(x, grid=(4, 5), bias=torch.zeros(20, 6).double()).shape == x.shape
    assert mixer(x, grid=(4, 5), bias=torch.zeros(20, 1).double()).shape == x.shape


@pytest.mark.parametrize("name", KEYED)
def test_a_masked_diagonal_needs_keys_where_tokens_are(name: str) -> None:
    options = {"mask_diagonal": True, "resize": "pool_values"}
    mixer = make(name, options, num_prefix_tokens=1)
    x = tokens_on(mixer, (4, 5))
    with refused(r"no key is a query's own on \(4, 5\).*interpolate.*mask_diagonal=False"):
        mixer(x, grid=(4, 5))
    moved = make(name, {**options, "resize": "interpolate"}, num_prefix_tokens=1).eval()
    rows = moved.attention_map(x, grid=(4, 5))
    assert (rows.diagonal(dim1=-2, dim2=-1) == 0).all()


@pytest.mark.parametrize("name", KEYED)
def test_keys_may_lie_on_a_coarser_grid_from_the_start(name: str) -> None:
    site = {"grid": (4, 6), "key_grid": (2, 3), "num_prefix_tokens": 1}
    mixer = make(name, {"resize": "pool_values"}, **site).eval()
    assert mixer.key.shape == (3, 7, 4)
    x = tokens_on(mixer, (4, 6))
    pooled = make(name, {"resize": "pool_values"}, grid=(2, 3), num_prefix_tokens=1).eval()
    pooled.load_state_dict(mixer.state_dict())
    assert torch.equal(mixer(x), pooled(x, grid=(4, 6)))
    for resize in (None, "interpolate"):
        with refused(r"\(2, 3\).*\(4, 6\).*resize='pool_values'"):
            make(name, {"resize": resize}, **site)
    with refused("mask_diagonal"):
        make(name, {"resize": "pool_values", "mask_diagonal": True}, **site)


GRIDS_OF_KEYS = {"7x9": (4, 6), "2x3": (2, 3), "1/4": (2, 3), "1/1": (4, 6), "1/24": (1, 1)}


@pytest.mark.parametrize(("text", "grid"), GRIDS_OF_KEYS.items())
def test_a_key_grid_is_two_sides_or_a_share_of_the_tokens(text: str, grid: Any) -> None:
    mixer = make("static_key", {"key_grid": text}, grid=(4, 6), num_prefix_tokens=1)
    assert mixer.key_grid == grid
    assert mixer.key.shape == (3, 1 + grid[0] * grid[1], 4)
    sides = make("static_key", {"key_grid": list(grid)}, grid=(4, 6), num_prefix_tokens=1)
    assert sides.key_grid == grid


def test_what_one_side_cannot_give_of_a_share_the_other_does() -> None:
    assert make("static_key", {"key_grid": "1/4"}, grid=(1, 16)).key_grid == (1, 4)
    assert make("static_key", {"key_grid": "1/4"}, grid=(16, 1)).key_grid == (4, 1)


@pytest.mark.parametrize(
    "bad", ["1/0", "5/4", "0/4", "0.25", "7", "0x3", "", (0, 2), (2,), (2, 2, 2)]
)
def test_a_bad_key_grid_is_refused_by_name(bad: Any) -> None:
    with refused("key_grid="):
        make("static_key", {"key_grid": bad})


@together
@every_keyed
@pytest.mark.parametrize("activation", ["softmax", "gelu", "relu", "star_relu"])
@pytest.mark.parametrize("site", [{}, {"num_prefix_tokens": 2}], ids=str)
def test_fewer_keys_are_the_plain_formula(name, activation, site) -> None:
    options = {"key_grid": (2, 3), "activation": activation}
    mixer = make(name, options, grid=(5, 7), **site).eval()
    for grid in [(5, 7), *OTHERS]:
        x = tokens_on(mixer, grid)
        close(mixer(x, grid=grid), plainly(mixer, x, grid))
        wanted = torch.autograd.grad(plainly(mixer, x, grid).sum(), [*mixer.parameters()])
        found = torch.autograd.grad(mixer(x, grid=grid).sum(), [*mixer.parameters()])
        for one, other in zip(found, wanted, strict=True):
            close(one, other)


@every_keyed
def test_a_key_grid_keeps_keys_where_they_are(name: str) -> None:
    mixer = make(name, {"key_grid": "1/4"}, grid=(4, 6)).eval()
    x = tokens_on(mixer, (8, 10))
    wanted = mixer(x, grid=(8, 10))
    mixer.set_grid((8, 10))
    assert torch.equal(mixer(x), wanted)
    assert (mixer.site.grid, mixer.key_grid) == ((8, 10), (2, 3))
    with refused("key_grid='1/4'.*resize='interpolate'"):
        make(name, {"key_grid": "1/4", "resize": "interpolate"}, grid=(4, 6))
    with refused("mask_diagonal"):
        make(name, {"key_grid": "1/4", "mask_diagonal": True}, grid=(4, 6))


@every_keyed
def test_windows_with_few_keys_have_their_own(name: str) -> None:
    options = {"key_grid": "1/4"}
    mixer = make(name, options, grid=(4, 4), windows=6, window_grid=(2, 3)).eval()
    one = make(name, options, grid=(4, 4)).eval()
    x = torch.randn(2, 6, 16, DIM, dtype=torch.float64)
    rows = {"key": mixer.key, **dict(mixer.named_parameters())}
    for window in range(6):
        state = {}
        for key, target in one.state_dict().items():
            each = rows[key].detach() if key in rows else mixer.state_dict()[key]
            apart = key in mixer.grid_parameters
            state[key] = each.reshape(6, *target.shape)[window] if apart else each
        one.load_state_dict(state)
        close(mixer(x)[:, window], one(x[:, window]))


@every_keyed
def test_windows_are_counted_where_they_are_refused(name: str) -> None:
    site = {"windows": 4, "window_grid": (2, 2)}
    here, there = r"4 windows \(2x2 of them\)", r"here are 6 windows \(2x3 of them\)"
    for resize in ("pool_values", None):
        mixer = make(name, {"resize": resize}, **site)
        with refused(rf"{here}, and {there}; give it resize='interpolate'"):
            mixer.set_grid(GRID, window_grid=(2, 3))

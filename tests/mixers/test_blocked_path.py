# SPDX-License-Identifier: Apache-2.0
"""Maps formed a block of rows at a time, against the reference: output and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from each import together
from keymix.errors import UserError
from keymix.mixers import map_mixer
from keymix.mixers.base import explain_backend
from keymix.mixers.registry import create_mixer, list_mixers, mixer_options
from keymix.ops.attention import blocked
from mixer_cases import gradients, make, tokens
from tolerances import close, differs

BLOCKED = [
    name
    for name in list_mixers()
    if "backend" in mixer_options(name) and make(name).whole_maps is None
]
LEARNED = ("static_key", "conv_static_key")
MIXING = ("re_attention", "static_key_re_attention")
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, options) for name in BLOCKED for options in ({}, {"temperature": True})),
    *(
        (name, {"head_dim": 7, "scale": "dim", "mask_diagonal": True})
        for name in BLOCKED
        if "mask_diagonal" in mixer_options(name)
    ),
    *((name, {"activation": a}) for name in LEARNED for a in ("gelu", "relu", "star_relu")),
    *((name, {"norm": "layer"}) for name in MIXING),
    *((name, {"norm": "layer", "theta_bias": False}) for name in MIXING),
    ("re_attention", {"theta_bias": False, "map_scale": True}),
    ("conv_static_key", {"kernel_size": 1}),
    ("conv_static_key", {"kernel_size": 5, "qkv_bias": False}),
    ("key_value", {"pos_dim": 5}),
]
SITES: list[dict[str, Any]] = [
    {"grid": (3, 5)},
    {"grid": (3, 3), "num_prefix_tokens": 2},
    {"grid": (1, 7), "num_heads": 1, "num_prefix_tokens": 1},
    {"grid": (1, 1)},
    {"grid": (2, 3), "windows": 3},
    {"grid": (2, 3), "windows": 2, "num_prefix_tokens": 1},
]


@pytest.fixture(autouse=True, params=[70, 2**21], ids=["blocks of a few rows", "one block"])
def _block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small maps into blocks too, the last one shorter."""
    monkeypatch.setattr(blocked, "BLOCK", request.param)


def both(name: str, options: dict[str, Any], **site: Any) -> tuple[Any, Any]:
    return tuple(
        make(name, {**options, "backend": backend}, **site) for backend in ("blocked", "reference")
    )


def test_every_map_of_a_row_by_itself_has_this_path() -> None:
    known = {"softmax", "gated", "spatial_reduction", "key_value", *LEARNED, *MIXING}
    assert known == set(BLOCKED)


@pytest.mark.slow
@together
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("site", SITES, ids=str)
def test_blocked_and_reference_agree_with_all_gradients(
    name, options, site, poisoned_memory
) -> None:
    fast, plain = both(name, options, **site)
    lead = (2, 3) if site.get("windows") == 3 else (2, 2) if "windows" in site else (2,)
    n, h, d = fast.site.num_tokens, fast.site.num_heads, torch.float64
    biases = [None]
    if fast.claims.maskable:
        biases += [torch.randn(n, n, dtype=d), torch.randn(h, 1, n, dtype=d)]
        if "windows" in site:
            w = site["windows"]
            biases += [torch.randn(w, h, n, n, dtype=d), torch.randn(w, 1, n, n, dtype=d)]
    for bias in biases:
        for training in (True, False) if name in MIXING else (True,):
            fast.train(training)
            plain.train(training)
            x = tokens(fast, *lead)
            y, grads = gradients(fast, x, bias=bias)
            wanted, expected = gradients(plain, x, bias=bias)
            close(y, wanted)
            assert grads.keys() == expected.keys()
            nothing = plain.zero_gradients  # here the reference has its rounding
            for key, grad in grads.items():
                close(grad, torch.zeros_like(grad) if key in nothing else expected[key])
    for mine, theirs in zip(fast.buffers(), plain.buffers(), strict=True):
        close(mine, theirs, d)  # running statistics, moved by every pass in training


@together
@pytest.mark.parametrize("name", [n for n in BLOCKED if n not in MIXING])
@pytest.mark.parametrize(
    "shape", [(), (6,), (6, 6), (1, 6), (6, 1), (3, 6, 6), (2, 3, 6, 6), (2, 1, 6, 6), (2, 1, 1, 6)]
)
def test_a_learned_bias_has_its_gradient(name, shape) -> None:
    grads = []
    for mixer in both(name, {}):
        x = tokens(mixer)
        torch.manual_seed(4)
        bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = mixer(x, bias=bias)
        (grad,) = torch.autograd.grad((y * torch.randn_like(y)).sum(), bias)
        grads.append(grad)
    close(grads[0], grads[1])
    assert differs(grads[0], torch.zeros(shape)) or shape in ((), (6, 1))


@pytest.mark.parametrize("name", BLOCKED)
def test_derivatives_meet_finite_differences_twice(name) -> None:
    mixer = make(name, {"backend": "blocked"}, dim=4, num_heads=2, grid=(1, 3))
    x = tokens(mixer, 1).requires_grad_()
    assert torch.autograd.gradcheck(mixer, (x,))
    assert torch.autograd.gradgradcheck(mixer, (x,))


@pytest.mark.parametrize("name", MIXING)
def test_running_statistics_are_those_of_pytorch_without_momentum_too(name) -> None:
    fast, plain = both(name, {})
    for mixer in (fast, plain):
        mixer.norm.momentum = None
        for seed in (1, 2, 3):
            mixer.train()(tokens(mixer, 3, seed=seed))
        assert mixer.norm.num_batches_tracked == 3
        mixer.norm.eval()  # frozen within a model that trains
    close(fast.norm.running_var, plain.norm.running_var)
    x = tokens(fast)
    close(fast(x), plain(x))
    assert fast.norm.num_batches_tracked == 3


def test_a_checkpoints_second_pass_moves_no_statistics() -> None:
    mixer = make("re_attention", {"backend": "blocked"}).train()
    x = tokens(mixer).requires_grad_()
    torch.utils.checkpoint.checkpoint(mixer, x, use_reentrant=False).sum().backward()
    assert mixer.norm.num_batches_tracked == 1


def test_no_image_is_no_error() -> None:
    for name in [n for n in BLOCKED if n != "conv_static_key"]:  # a convolution needs one
        mixer = make(name, {"backend": "blocked"}).eval()
        assert mixer(torch.zeros(0, 6, 12, dtype=torch.float64)).shape == (0, 6, 12)


def test_weights_that_do_not_train_get_no_gradient() -> None:
    mixer = make("conv_static_key", {"backend": "blocked"}, num_prefix_tokens=1)
    mixer.requires_grad_(False)
    x = tokens(mixer).requires_grad_()
    mixer(x).sum().backward()
    assert x.grad is not None
    mixer.key_conv.bias.requires_grad_(True)
    mixer(tokens(mixer)).sum().backward()
    assert mixer.key_conv.bias.grad is not None
    assert mixer.key_conv.weight.grad is None


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("softmax", {"talking_heads": True}, "talking_heads"),
        ("static_key_re_attention", {"activation": "relu"}, "sum to one"),
        ("conv_static_key", {"attn_drop": 0.5}, "dropout"),
    ],
)
def test_blocks_by_name_say_why_they_cannot_be(name, options, why) -> None:
    mixer = make(name, {**options, "backend": "blocked"}).train()
    with pytest.raises(UserError, match=why):
        mixer(tokens(mixer))


def test_auto_takes_blocks_where_maps_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_mixer, "FROM_ENTRIES", 3 * 6 * 6 * 10)
    for name in MIXING:
        mixer = make(name)
        assert explain_backend(mixer).name == "reference"
        large = explain_backend(mixer, shape=(10, 6, 12))
        assert large.name == "blocked"
        assert "1,080" in large.why
        assert explain_backend(mixer, "cuda", shape=(10, 6, 12)).name == "reference"
    convolved = make("conv_static_key", {"resize": "interpolate"})
    assert explain_backend(convolved, shape=(10, 6, 12)).name == "reference"  # image by image
    assert explain_backend(convolved, shape=(1, 20, 12)).name == "blocked"
    assert explain_backend(convolved, "cuda", shape=(1, 20, 12)).name == "reference"
    with torch.no_grad():
        assert explain_backend(convolved, shape=(13, 6, 12)).name == "reference"
        assert explain_backend(convolved, shape=(14, 6, 12)).name == "blocked"
    attention = make("softmax")
    assert explain_backend(attention, shape=(10, 6, 12)).name == "sdpa"
    coded = make("key_value", {"pos_dim": 4})
    assert explain_backend(coded, shape=(10, 6, 12)).name == "blocked"
    assert explain_backend(coded, "cuda", shape=(10, 6, 12)).name == "sdpa"
    with torch.no_grad():
        assert explain_backend(coded, shape=(10, 6, 12)).name == "sdpa"


def test_a_subclass_with_a_step_of_its_own_keeps_whole_maps() -> None:
    class Odd(type(make("conv_static_key"))):  # type: ignore[misc]
        def activate(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.sigmoid()

    mixer = Odd(make("conv_static_key").site, backend="blocked")
    with pytest.raises(UserError, match="activate"):
        mixer(torch.zeros(1, 6, 12))


@pytest.mark.slow
def test_what_is_kept_for_the_way_back_is_no_map() -> None:
    for name in ("conv_static_key", "re_attention"):
        mixer = create_mixer(name, dim=8, num_heads=2, grid=(20, 20), backend="blocked").train()
        kept: list[int] = []

        def keep(t: torch.Tensor) -> torch.Tensor:
            kept.append(t.numel())  # noqa: B023  of this turn
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            mixer(torch.randn(1, 400, 8))
        assert max(kept) < 2 * 400 * 400


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_near_the_wide_result(dtype) -> None:
    for name in BLOCKED:
        mixer = make(name, {"backend": "blocked"}).eval()
        x = tokens(mixer)
        narrow = copy.deepcopy(mixer).to(dtype)
        close(narrow(x.to(dtype)), mixer(x), dtype)
        assert narrow(x.to(dtype)).dtype == dtype

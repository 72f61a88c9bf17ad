# SPDX-License-Identifier: Apache-2.0
"""The path a mixer takes by itself against its reference path, with every option and bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from each import together
from keymix.errors import UserError
from keymix.mixers.base import TokenMixer, explain_backend
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import list_mixers, mixer_options
from mixer_cases import gradients, make, tokens
from tolerances import close, differs

FUSED = [
    name
    for name in list_mixers()
    if "backend" in mixer_options(name) and explain_backend(make(name)).name == "sdpa"
]
MASKED = [name for name in FUSED if "mask_diagonal" in mixer_options(name)]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"mask_diagonal": True},
    {"temperature": True},
    {"temperature": True, "mask_diagonal": True},
    {"head_dim": 7},
    {"scale": "dim"},
    {"scale": False},
    {"qkv_bias": False, "proj_bias": False},
]
SITES: list[dict[str, Any]] = [
    {"grid": (3, 5)},
    {"grid": (3, 3), "num_prefix_tokens": 2},
    {"grid": (1, 7), "num_heads": 1},
    {"grid": (1, 1)},
    {"grid": (2, 3), "windows": 3},
]


def test_the_three_product_mixers_are_fused() -> None:
    assert {"softmax", "static_key", "key_value"} <= set(FUSED)


@pytest.mark.slow
@together
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("site", SITES, ids=str)
def test_fused_and_reference_agree_with_all_gradients(name, options, site, poisoned_memory) -> None:
    if not options.keys() <= mixer_options(name).keys():
        return
    fused = make(name, {**options, "backend": "sdpa"}, **site)
    plain = make(name, {**options, "backend": "reference"}, **site)
    lead = (2, 3) if "windows" in site else (2,)
    n, h, d = fused.site.num_tokens, fused.site.num_heads, torch.float64
    biases = [None, torch.randn(n, n, dtype=d), torch.randn(h, n, n, dtype=d)]
    if "windows" in site:
        biases += [torch.randn(3, h, n, n, dtype=d), torch.randn(3, 1, n, n, dtype=d)]
    for bias in biases:
        x = tokens(fused, *lead)
        y, grads = gradients(fused, x, bias=bias)
        wanted, expected = gradients(plain, x, bias=bias)
        close(y, wanted)
        for key, grad in grads.items():
            close(grad, expected[key])


@together
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("shape", [(6, 6), (3, 6, 6), (2, 3, 6, 6), (2, 1, 6, 6), (1, 6)])
def test_a_learned_bias_has_its_gradient(name, shape) -> None:
    grads = []
    diagonal = {"mask_diagonal"} & mixer_options(name).keys()
    for backend in ("sdpa", "reference"):
        mixer = make(name, {"backend": backend, **dict.fromkeys(diagonal, True)})
        x = tokens(mixer)
        torch.manual_seed(4)
        bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = mixer(x, bias=bias)
        (grad,) = torch.autograd.grad((y * torch.randn_like(y)).sum(), bias)
        grads.append(grad)
    close(grads[0], grads[1])
    assert differs(grads[0], torch.zeros(shape))


@pytest.mark.parametrize("name", FUSED)
def test_derivatives_meet_finite_differences(name) -> None:
    for backend in ("sdpa", "reference"):
        options = {"backend": backend, "temperature": True}
        mixer = make(name, options, dim=4, num_heads=2, grid=(1, 3))
        x = tokens(mixer, 1).requires_grad_()
        assert torch.autograd.gradcheck(mixer, (x,))
    # PyTorch's fused kernels have no second derivative; the reference has
    assert torch.autograd.gradgradcheck(mixer, (x,))


@pytest.mark.parametrize("name", [name for name in FUSED if make(name).claims.maskable])
def test_shift_masks_hold_exactly_on_both_paths(name) -> None:
    for backend in ("sdpa", "reference"):
        mixer = make(name, {"backend": backend}, windows=2)
        bias = torch.zeros(2, 1, 6, 6, dtype=torch.float64)
        bias[1, :, :3, 3:] = -torch.inf
        x = tokens(mixer, 2, 2).requires_grad_()
        y = mixer(x, bias=bias)
        (grad,) = torch.autograd.grad(y[:, 1, :3].square().sum(), x)
        assert (grad[:, 1, 3:] == 0).all()
        assert (grad[:, 0] == 0).all()
        assert (grad[:, 1, :3] != 0).all()


@pytest.mark.parametrize("name", MASKED)
def test_a_single_token_attends_to_itself_under_a_masked_diagonal(name) -> None:
    for backend in ("sdpa", "reference"):
        mixer = make(name, {"backend": backend, "mask_diagonal": True}, grid=(1, 1))
        close(mixer(tokens(mixer)), make(name, grid=(1, 1))(tokens(mixer)))


@pytest.mark.parametrize("name", FUSED)
def test_auto_names_its_path_and_why(name) -> None:
    dropping = make(name, {"attn_drop": 0.5})
    assert explain_backend(dropping.train()).name == "reference"
    assert "dropout" in explain_backend(dropping).why
    assert explain_backend(dropping.eval()).name == "sdpa"
    assert explain_backend(make(name, {"talking_heads": True})).name == "reference"


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("re_attention", {}, "re-attention"),
        ("conv_static_key", {}, "convolution"),
        ("static_key", {"activation": "relu"}, "relu"),
        ("softmax", {"talking_heads": True}, "talking_heads"),
    ],
)
def test_sdpa_by_name_says_why_it_cannot_run(name, options, why) -> None:
    mixer = make(name, {**options, "backend": "sdpa"})
    with pytest.raises(UserError, match=why):
        mixer(tokens(mixer))


@pytest.mark.parametrize("name", FUSED)
def test_dropout_on_the_map_keeps_the_mean(name) -> None:
    mixer = make(name, {"attn_drop": 0.3, "backend": "sdpa"}).train()
    x = tokens(mixer, 1)
    torch.manual_seed(0)
    mean = torch.stack([mixer(x).detach() for _ in range(600)]).mean(0)
    assert (mean - mixer.eval()(x)).abs().max() < 0.3
    assert differs(mean, mixer(x))


SMALL_MAP, LARGE_MAP = (16, 64, 12), (128, 64, 12)  # three heads: 196,608 and 1,572,864 entries


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def path(mixer: TokenMixer, shape: tuple[int, ...] | None, device: str | None = None) -> str:
    return explain_backend(mixer, device, shape).name


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ["softmax", "static_key", "key_value"])
def test_auto_takes_whole_maps_only_where_they_are_small(name) -> None:
    mixer = make(name, grid=(8, 8)).float()
    with torch.no_grad():
        assert path(mixer, SMALL_MAP) == "reference"
        assert "196,608" in explain_backend(mixer, shape=SMALL_MAP).why
        assert path(mixer, (3, *SMALL_MAP)) == "reference"  # leading axes count
        assert path(mixer, LARGE_MAP) == "sdpa"
        assert path(mixer, (1, *SMALL_MAP[1:])) == "sdpa"  # so few that calls themselves count
        assert path(mixer, SMALL_MAP, "cuda") == "sdpa"
        torch.set_num_threads(1)
        assert path(mixer, SMALL_MAP) == "sdpa"


@pytest.mark.usefixtures("two_threads")
def test_without_a_shape_maps_are_those_of_an_image_on_the_grid() -> None:
    assert path(make("softmax", grid=(16, 16)), None) == "reference"
    assert path(make("softmax", grid=None), None) == "sdpa"


@pytest.mark.usefixtures("two_threads")
def test_whole_maps_of_few_keys_are_for_training() -> None:
    mixer = make("static_key", {"key_grid": (2, 2)}, grid=(8, 8)).float()
    assert path(mixer, (256, 64, 12)) == "reference"
    with torch.no_grad():
        assert path(mixer, (256, 64, 12)) == "sdpa"


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_are_formed_in_32(dtype: torch.dtype, autocast: bool) -> None:
    """As whole maps they would be rounded, and overflow in float16."""
    mixer = make("softmax", grid=(8, 8)).to(torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        assert path(mixer, SMALL_MAP) == "sdpa"


@pytest.mark.usefixtures("two_threads")
def test_another_output_projection_needs_no_weight() -> None:
    mixer = make("softmax", grid=(8, 8)).float()
    mixer.proj = torch.nn.Identity()
    assert mixer(torch.zeros(SMALL_MAP)).shape == SMALL_MAP


@pytest.mark.usefixtures("two_threads")
def test_a_pass_takes_the_path_that_auto_names(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, fused = make("softmax", grid=(8, 8)).float(), []
    monkeypatch.setattr(MapMixer, "_fused", lambda *_: fused.append(1) or torch.zeros(1, 3, 64, 4))
    mixer(torch.zeros(SMALL_MAP))
    assert not fused
    mixer(torch.zeros(1, *SMALL_MAP[1:]))
    assert fused


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ["softmax", "static_key", "key_value"])
def test_an_exported_mixer_stays_fused(name) -> None:
    mixer = make(name, grid=(8, 8)).float()
    made = torch.export.export(mixer.eval(), (torch.zeros(SMALL_MAP),))
    assert "scaled_dot_product_attention" in made.graph_module.code

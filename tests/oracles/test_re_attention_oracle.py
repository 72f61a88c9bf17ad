# SPDX-License-Identifier: Apache-2.0
"""Re-attention against DeepViT's Eq. 3, head by head, with both published norms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from each import together
from keymix.mixers.map_mixer import MapMixer
from mixer_cases import make, tokens
from tolerances import close


def maps_of(mixer: MapMixer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax maps [B, h, N, M] and values [B, h, M, d], head by head."""
    h, d = mixer.num_heads, mixer.head_dim
    if "key" in mixer.state_dict():
        q, v = mixer.get_submodule("q")(x), mixer.get_submodule("v")(x)
        keys = [mixer.key[i] for i in range(h)]
    else:
        q, k, v = mixer.get_submodule("qkv")(x).chunk(3, -1)
        keys = [k[..., i * d : (i + 1) * d] for i in range(h)]
    maps = [torch.softmax(q[..., i * d : (i + 1) * d] @ keys[i].mT / d**0.5, -1) for i in range(h)]
    return torch.stack(maps, 1), torch.stack([v[..., i * d : (i + 1) * d] for i in range(h)], 1)


def equation_3(
    mixer: MapMixer, x: Tensor, training: bool, gain: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, and the mean and unbiased variance of each mixed map; a gain on normalised maps."""
    a, v = maps_of(mixer, x)
    h = mixer.num_heads
    norm, theta = mixer.norm, mixer.theta
    mixed = []
    for g in range(h):
        total = sum(theta[i, g] * a[:, i] for i in range(h))
        mixed.append(total + (mixer.theta_bias[g] if mixer.theta_bias is not None else 0.0))
    means = torch.stack([m.mean() for m in mixed])
    variances = torch.stack([m.var() for m in mixed])
    out = []
    if isinstance(norm, torch.nn.BatchNorm2d):
        for g in range(h):
            mean = mixed[g].mean() if training else norm.running_mean[g]
            variance = ((mixed[g] - mean) ** 2).mean() if training else norm.running_var[g]
            out.append((mixed[g] - mean) / (variance + norm.eps) ** 0.5 * norm.weight[g])
            out[g] = out[g] + norm.bias[g]
    else:  # over the heads, at each entry of the maps
        mean = sum(mixed) / h
        variance = sum((m - mean) ** 2 for m in mixed) / h
        for g in range(h):
            out.append((mixed[g] - mean) / (variance + norm.eps) ** 0.5 * norm.weight[g])
            out[g] = out[g] + norm.bias[g]
    heads = torch.cat([gain * out[g] @ v[:, g] for g in range(h)], -1)
    return mixer.proj(heads), means, variances


@together
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("re_attention", {}),
        ("re_attention", {"theta_bias": False}),
        ("re_attention", {"map_scale": True}),
        ("static_key_re_attention", {}),
        ("static_key_re_attention", {"theta_bias": False}),
    ],
)
@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "site",
    [{}, {"grid": (3, 5), "num_prefix_tokens": 2}, {"num_heads": 1}, {"num_heads": 4}],
    ids=str,
)
def test_re_attention_is_equation_3(name, options, norm, training, site) -> None:
    mixer = make(name, {"norm": norm, **options}, **site).train(training)
    assert isinstance(mixer, MapMixer)
    x = tokens(mixer, 3).requires_grad_()
    before = {k: v.clone() for k, v in mixer.named_buffers()}
    gain = mixer.head_dim**-0.5 if "map_scale" in options else 1.0
    wanted, means, variances = equation_3(mixer, x, training, gain)
    weight = torch.randn_like(wanted)
    named = {"x": x, **dict(mixer.named_parameters())}
    expected = torch.autograd.grad((wanted * weight).sum(), list(named.values()))
    y = mixer(x)
    close(y, wanted)
    grads = torch.autograd.grad((y * weight).sum(), list(named.values()))
    # together: theta_bias's gradient is zero but for the rounding of the large ones it cancels
    close(torch.cat([g.flatten() for g in grads]), torch.cat([g.flatten() for g in expected]))
    if norm == "batch":
        moved = 0.1 if training else 0.0
        after = dict(mixer.named_buffers())
        for key, seen in (("norm.running_mean", means), ("norm.running_var", variances)):
            close(after[key], (1 - moved) * before[key] + moved * seen)


@pytest.mark.parametrize("name", ["re_attention", "static_key_re_attention"])
def test_float32_suffices_for_the_variance_of_maps_of_many_tokens(name: str) -> None:
    exact = make(name, grid=(24, 24), dim=24, stirred=False).train()
    single = make(name, grid=(24, 24), dim=24, stirred=False, dtype=torch.float32).train()
    single.load_state_dict(exact.state_dict())
    x = tokens(exact, 2)
    wanted = exact(x)
    # the bias of the mixing is some hundred times the spread of a map, so that the variance of
    # their sum loses as many of float32's digits twice
    assert (single(x.float()) - wanted).norm() < 1e-3 * wanted.norm()


def test_theta_is_drawn_as_the_published_convolution() -> None:
    mixer = make("re_attention", dim=64, num_heads=16, stirred=False)
    conv = torch.nn.Conv2d(16, 16, 1)
    bound = 16**-0.5
    for drawn in (mixer.theta, conv.weight):
        assert drawn.abs().max() <= bound
        assert float(drawn.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.15)
    assert mixer.theta_bias.abs().max() <= bound


def test_the_norm_counts_every_window_of_a_batch() -> None:
    mixer = make("re_attention").train()
    second = make("re_attention").train()
    x = tokens(mixer, 2, 3)
    close(mixer(x), second(x.flatten(0, 1)).unflatten(0, (2, 3)))
    close(mixer.norm.running_var, second.norm.running_var)

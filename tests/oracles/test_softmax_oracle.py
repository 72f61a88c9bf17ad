# SPDX-License-Identifier: Apache-2.0
"""Softmax attention and its options against timm's modules and loops over heads and tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from timm.layers import Attention
from timm.models.cait import TalkingHeadAttn

from each import together
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import create_mixer
from mixer_cases import make, stir, tokens
from tolerances import close


def by_hand(mixer: MapMixer, x: np.ndarray, scale: float, diagonal: bool = False) -> np.ndarray:
    """Eq. 1 of "Attention is all you need" with loops, for tokens [N, C]."""
    h, d = mixer.num_heads, mixer.head_dim
    weights = {k: v.detach().numpy() for k, v in mixer.state_dict().items()}
    both = x @ weights["qkv.weight"].T + weights["qkv.bias"]
    q, k, v = (both[:, i * h * d : (i + 1) * h * d] for i in range(3))
    out = np.zeros((len(x), h * d))
    for head in range(h):
        part = slice(head * d, (head + 1) * d)
        for n in range(len(x)):
            logits = [scale * float(np.dot(q[n, part], k[m, part])) for m in range(len(x))]
            if diagonal:
                logits[n] = -math.inf
            top = max(logits)
            row = [math.exp(value - top) for value in logits]
            for m in range(len(x)):
                out[n, part] += row[m] / sum(row) * v[m, part]
    return out @ weights["proj.weight"].T + weights["proj.bias"]


@together
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(
    ("site", "options", "scale"),
    [
        ({}, {}, 4**-0.5),
        ({"grid": (3, 5), "num_prefix_tokens": 2}, {}, 4**-0.5),
        ({"num_heads": 1}, {}, 12**-0.5),
        ({"grid": (1, 1)}, {}, 4**-0.5),
        ({}, {"scale": "dim"}, 12**-0.5),
        ({}, {"scale": False}, 1.0),
        ({"num_heads": 5}, {"head_dim": 7}, 7**-0.5),
    ],
)
def test_softmax_attention_is_the_papers_equation(backend, site, options, scale) -> None:
    mixer = make("softmax", {"backend": backend, **options}, **site)
    assert isinstance(mixer, MapMixer)
    x = tokens(mixer)
    for image, y in zip(x, mixer(x), strict=True):
        close(y, torch.from_numpy(by_hand(mixer, image.numpy(), scale)))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_locality_self_attention_is_a_temperature_and_no_diagonal(backend) -> None:
    """Vision Transformer for Small-Size Datasets, Sec. 4.2."""
    options = {"temperature": True, "mask_diagonal": True, "backend": backend}
    mixer = make("softmax", options, grid=(2, 3), stirred=False)
    assert isinstance(mixer, MapMixer)
    assert mixer.temperature is not None
    assert mixer.temperature.exp().item() == pytest.approx(4**-0.5), "it starts at the scale"
    stir(mixer)
    x = tokens(mixer)
    scale = math.exp(float(mixer.temperature))
    for image, y in zip(x, mixer(x), strict=True):
        close(y, torch.from_numpy(by_hand(mixer, image.numpy(), scale, diagonal=True)))


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_softmax_attention_is_timms(qkv_bias: bool, fused: bool) -> None:
    theirs = Attention(24, num_heads=4, qkv_bias=qkv_bias).double()
    theirs.fused_attn = fused
    mine = create_mixer("softmax", dim=24, num_heads=4, qkv_bias=qkv_bias, dtype=torch.float64)
    stir(theirs)
    assert mine.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(3, 7, 24, dtype=torch.float64)
    close(mine(x), theirs(x))
    mine(x).square().sum().backward()
    theirs(x).square().sum().backward()
    for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert p.grad is not None, name
        close(p.grad, q.grad)


def test_timms_additive_mask_is_the_bias() -> None:
    theirs = Attention(24, num_heads=4, qkv_bias=True).double()
    mine = create_mixer("softmax", dim=24, num_heads=4, dtype=torch.float64)
    stir(theirs)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 7, 24, dtype=torch.float64)
    mask = torch.randn(3, 4, 7, 7, dtype=torch.float64)
    close(mine(x, bias=mask), theirs(x, attn_mask=mask))


@pytest.mark.parametrize("biases", [True, False])
def test_talking_heads_are_caits(biases: bool) -> None:
    """Timm's mix with biases; the published counts have none, and one before a softmax is idle."""
    theirs = TalkingHeadAttn(24, num_heads=4, qkv_bias=True).double()
    option = "bias" if biases else True
    mine = create_mixer("softmax", dim=24, num_heads=4, talking_heads=option, dtype=torch.float64)
    stir(theirs)
    assert theirs.proj_l.bias.abs().min() > 0.01
    if not biases:
        with torch.no_grad():
            theirs.proj_w.bias.zero_()
    weights = {
        k.replace("proj_l", "talking_pre").replace("proj_w", "talking_post"): v
        for k, v in theirs.state_dict().items()
        if k != "proj_l.bias" and (biases or k != "proj_w.bias")
    }
    mine.load_state_dict(weights, strict=True)
    x = torch.randn(3, 7, 24, dtype=torch.float64)
    close(mine(x), theirs(x))


def test_talking_heads_start_as_no_mixing() -> None:
    plain = make("softmax", stirred=False)
    talking = make("softmax", {"talking_heads": True}, stirred=False)
    talking.load_state_dict(plain.state_dict(), strict=False)
    x = tokens(plain)
    close(talking(x), plain(x))

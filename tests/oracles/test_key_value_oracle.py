# SPDX-License-Identifier: Apache-2.0
"""Key-value attention against the papers' words: an n x n x m tensor, then a linear map m -> 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from each import together
from keymix.mixers.map_mixer import MapMixer
from mixer_cases import gradients, make, tokens
from tolerances import close, differs


def pair_code(count: int, channels: int) -> np.ndarray:
    """Code of every pair (i, j), ``[n, n, m]``: sin i, cos i, sin j, cos j; the first m."""
    half = math.ceil(channels / 4)
    code = np.zeros((count, count, 4 * half))
    for i in range(count):
        for j in range(count):
            for k in range(half):
                frequency = 1.0 / 10000 ** (2 * k / (2 * half))
                code[i, j, k] = math.sin(i * frequency)
                code[i, j, half + k] = math.cos(i * frequency)
                code[i, j, 2 * half + k] = math.sin(j * frequency)
                code[i, j, 3 * half + k] = math.cos(j * frequency)
    return code[..., :channels]


def by_hand(mixer: MapMixer, x: np.ndarray, scale: float, channels: int) -> torch.Tensor:
    h, d, n = mixer.num_heads, mixer.head_dim, len(x)
    w = {k: v.detach().numpy() for k, v in mixer.state_dict().items()}
    both = x @ w["kv.weight"].T + w["kv.bias"]
    k, v = both[:, : h * d], both[:, h * d :]
    out = np.zeros((n, h * d))
    for head in range(h):
        part = slice(head * d, (head + 1) * d)
        scores = scale * k[:, part] @ k[:, part].T
        if channels:
            deep = np.repeat(scores[..., None], channels, -1) + pair_code(n, channels)
            scores = deep @ w["pos_proj.weight"][0] + w["pos_proj.bias"][0]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, part] = weights / weights.sum(-1, keepdims=True) @ v[:, part]
    return torch.from_numpy(out @ w["proj.weight"].T + w["proj.bias"])


@together
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("channels", [0, 1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize(
    ("site", "scale"),
    [
        ({}, "head_dim"),
        ({"grid": (3, 5), "num_prefix_tokens": 2}, "dim"),
        ({"num_heads": 1}, False),
        ({"grid": (1, 1)}, "head_dim"),
    ],
    ids=str,
)
def test_key_value_is_the_papers_figure_1b(backend, channels, site, scale) -> None:
    options = {"pos_dim": channels, "scale": scale, "backend": backend}
    mixer = make("key_value", options, **site)
    assert isinstance(mixer, MapMixer)
    x = tokens(mixer)
    factor = {"head_dim": mixer.head_dim**-0.5, "dim": 12**-0.5, False: 1.0}[scale]
    for image, y in zip(x, mixer(x), strict=True):
        close(y, by_hand(mixer, image.numpy(), factor, channels))


def test_key_value_scores_are_symmetric() -> None:
    mixer = make("key_value", num_prefix_tokens=1)
    assert isinstance(mixer, MapMixer)
    scores = mixer.logits(mixer.inputs(tokens(mixer), None), None)
    close(scores, scores.mT)


@pytest.mark.parametrize("channels", [1, 2])
def test_fewer_than_three_channels_code_the_query_alone_and_only_scale(channels: int) -> None:
    code = pair_code(5, channels)
    assert (code == code[:, :1]).all(), "the code depends on j"
    mixer = make("key_value", {"pos_dim": channels})
    assert isinstance(mixer, MapMixer)
    x = tokens(mixer)
    scores = mixer.logits(mixer.inputs(x, None), None) * mixer.gain()
    close(mixer.attention_map(x), scores.softmax(-1))


def test_position_weights_start_at_plain_key_value_scores() -> None:
    mixer = make("key_value", {"pos_dim": 8}, stirred=False)
    assert isinstance(mixer, MapMixer)
    assert float(mixer.gain().detach()) == pytest.approx(mixer.head_dim**-0.5)
    assert torch.equal(mixer.pos_proj.weight, torch.full((1, 8), 1 / 8, dtype=torch.float64))
    assert "pos_code" not in mixer.state_dict(), "a fixed code has no place in a checkpoint"


def test_the_position_code_keeps_float64() -> None:
    code = pair_code(40, 8)
    mixer = make("key_value", {"pos_dim": 8}, grid=(5, 8))
    own = mixer.own_bias({"k": torch.zeros(40, 4, dtype=torch.float64)}, None, None)
    wanted = code @ mixer.pos_proj.weight[0].detach().numpy() + float(mixer.pos_proj.bias.detach())
    close(own, torch.from_numpy(wanted))


def test_fused_and_reference_agree_with_all_gradients_under_a_position_code() -> None:
    fused, plain = (
        make("key_value", {"pos_dim": 6, "backend": b}, grid=(3, 3)) for b in ("sdpa", "reference")
    )
    x = tokens(fused)
    y, grads = gradients(fused, x)
    wanted, expected = gradients(plain, x)
    close(y, wanted)
    for key, grad in grads.items():
        close(grad, expected[key])
    assert differs(grads["pos_proj.weight"], torch.zeros(1, 6))

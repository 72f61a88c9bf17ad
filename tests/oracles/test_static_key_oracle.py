# SPDX-License-Identifier: Apache-2.0
"""Static keys against SKA's Algorithm 1 and Sec. 4.2, written as loops over grid positions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from each import together
from keymix.mixers.map_mixer import MapMixer
from mixer_cases import gradients, make, refused, tokens
from tolerances import close

ERF = np.vectorize(math.erf)
ACTIVATIONS = {
    "softmax": lambda a: np.exp(a - a.max()) / np.exp(a - a.max()).sum(),
    "gelu": lambda a: a * 0.5 * (1 + ERF(a / math.sqrt(2))),
    "relu": lambda a: np.maximum(a, 0),
}


def weights_of(mixer: MapMixer) -> dict[str, np.ndarray]:
    return {k: v.detach().numpy() for k, v in mixer.state_dict().items()}


def queries_of(mixer: MapMixer, x: np.ndarray) -> np.ndarray:
    """Queries [N, h * d] of tokens [N, C], the tokens themselves without a projection."""
    w = weights_of(mixer)
    return x @ w["q.weight"].T + w["q.bias"] if "q.weight" in w else x


def finish(mixer: MapMixer, x: np.ndarray, logits: np.ndarray) -> torch.Tensor:
    """From unscaled logits [h, N, M] to the output, for tokens [N, C]."""
    w, h, d = weights_of(mixer), mixer.num_heads, mixer.head_dim
    v = x @ w["v.weight"].T + w["v.bias"]
    activation = getattr(mixer, "activation", "softmax")
    out = np.zeros((len(x), h * d))
    for head in range(h):
        part = slice(head * d, (head + 1) * d)
        for n in range(len(x)):
            row = d**-0.5 * logits[head, n]
            if activation == "star_relu":
                weights = w["act.scale"] * np.maximum(row, 0) ** 2 + w["act.bias"]
            else:
                weights = ACTIVATIONS[activation](row)
            out[n, part] = sum(weights[m] * v[m, part] for m in range(len(x)))
    return torch.from_numpy(out @ w["proj.weight"].T + w["proj.bias"])


def static_logits(mixer: MapMixer, x: np.ndarray, key: np.ndarray) -> np.ndarray:
    h, d = mixer.num_heads, mixer.head_dim
    q = queries_of(mixer, x)
    logits = np.zeros((h, len(x), key.shape[1]))
    for head in range(h):
        for n in range(len(x)):
            for m in range(key.shape[1]):
                logits[head, n, m] = np.dot(q[n, head * d : (head + 1) * d], key[head, m])
    return logits


SITES: list[dict[str, Any]] = [
    {"grid": (2, 3)},
    {"grid": (3, 5), "num_prefix_tokens": 2},
    {"grid": (3, 3), "num_heads": 1},
    {"grid": (1, 1)},
    {"grid": (1, 7), "num_heads": 4, "num_prefix_tokens": 1},
]


@together
@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize("activation", ["softmax", "gelu", "relu", "star_relu"])
@pytest.mark.parametrize("options", [{}, {"backend": "reference"}, {"query_proj": False}])
def test_static_key_is_algorithm_1(site, activation, options) -> None:
    mixer = make("static_key", {"activation": activation, **options}, **site)
    assert isinstance(mixer, MapMixer)
    x = tokens(mixer)
    key = weights_of(mixer)["key"]
    assert key.shape == (mixer.num_heads, mixer.site.num_tokens, mixer.head_dim)
    for image, y in zip(x.numpy(), mixer(x), strict=True):
        close(y, finish(mixer, image, static_logits(mixer, image, key)))


@together
@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked"])
def test_slices_of_a_token_are_its_queries_in_every_gradient(site, backend) -> None:
    mixer = make("static_key", {"query_proj": False, "backend": backend}, **site)
    assert isinstance(mixer, MapMixer)
    assert not [name for name in mixer.state_dict() if name.startswith("q.")]
    x, h, d = tokens(mixer), mixer.num_heads, mixer.head_dim

    class Written(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = []
            for head, v in enumerate((x @ self.v.weight.mT + self.v.bias).split(d, -1)):
                logits = x[..., head * d : (head + 1) * d] @ self.key[head].T
                heads.append((logits * d**-0.5).softmax(-1) @ v)
            return torch.cat(heads, -1) @ self.proj.weight.mT + self.proj.bias

    assert h * d == x.shape[-1]
    written = Written()
    written.key, written.v, written.proj = mixer.key, mixer.v, mixer.proj
    y, grads = gradients(mixer, x)
    wanted, expected = gradients(written, x)
    close(y, wanted)
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        close(grads[name], grad)


@pytest.mark.parametrize("name", ["static_key", "conv_static_key", "static_key_re_attention"])
def test_tokens_that_are_no_whole_heads_are_no_queries(name: str) -> None:
    with refused(r"query_proj.*num_heads=3.*head_dim=5.*dim=12"):
        make(name, {"query_proj": False, "head_dim": 5})


def test_keys_start_as_standard_normal_numbers() -> None:
    mixer = make("static_key", dim=64, num_heads=4, grid=(12, 12), stirred=False)
    key = mixer.key.detach()
    assert abs(float(key.mean())) < 0.05
    assert abs(float(key.std()) - 1.0) < 0.05
    small = make(
        "static_key", {"key_init_std": 0.02}, dim=64, num_heads=4, grid=(12, 12), stirred=False
    )
    assert abs(float(small.key.detach().std()) - 0.02) < 0.001


def test_each_window_has_its_own_keys() -> None:
    mixer = make("static_key", windows=3, grid=(2, 2))
    one = make("static_key", windows=1, grid=(2, 2))
    x = tokens(mixer, 2, 3)
    weights = mixer.state_dict()
    assert weights["key"].shape == (3, 3, 4, 4)
    y = mixer(x)
    for window in range(3):
        one.load_state_dict({**weights, "key": weights["key"][window]})
        close(y[:, window], one(x[:, window]))


def conv_logits(mixer: MapMixer, x: np.ndarray, kernel: int) -> np.ndarray:
    """Channel (h, m) of a grouped convolution at position n, by a loop over the window."""
    w, h, d = weights_of(mixer), mixer.num_heads, mixer.head_dim
    prefix, grid = mixer.site.num_prefix_tokens, mixer.site.grid
    assert grid is not None
    height, width = grid
    count = prefix + height * width
    q = queries_of(mixer, x)
    weight = w["key_conv.weight"].reshape(h, count, d, kernel, kernel)
    bias = w["key_conv.bias"].reshape(h, count)
    logits = np.zeros((h, count, count))
    if prefix:
        logits[:, :prefix] = static_logits(mixer, x, w["key"])[:, :prefix]
    reach = kernel // 2
    for head in range(h):
        for row in range(height):
            for column in range(width):
                n = prefix + row * width + column
                for m in range(count):
                    total = bias[head, m]
                    for dy in range(-reach, reach + 1):
                        for dx in range(-reach, reach + 1):
                            r, c = row + dy, column + dx
                            if 0 <= r < height and 0 <= c < width:
                                near = q[prefix + r * width + c, head * d : (head + 1) * d]
                                total += np.dot(near, weight[head, m, :, dy + reach, dx + reach])
                    logits[head, n, m] = total
    return logits


@together
@pytest.mark.parametrize("site", SITES, ids=str)
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("query_proj", [True, False])
def test_conv_static_key_is_a_loop_over_positions(site, kernel, query_proj) -> None:
    options = {"kernel_size": kernel, "query_proj": query_proj}
    mixer = make("conv_static_key", options, **site)
    assert isinstance(mixer, MapMixer)
    x = tokens(mixer, 1)
    close(mixer(x)[0], finish(mixer, x[0].numpy(), conv_logits(mixer, x[0].numpy(), kernel)))


@pytest.mark.parametrize("activation", ["gelu", "relu", "star_relu"])
def test_conv_static_key_activations_act_on_scaled_logits(activation) -> None:
    mixer = make("conv_static_key", {"activation": activation}, num_prefix_tokens=1)
    assert isinstance(mixer, MapMixer)
    x = tokens(mixer, 1)
    close(mixer(x)[0], finish(mixer, x[0].numpy(), conv_logits(mixer, x[0].numpy(), 3)))


@pytest.mark.parametrize("site", SITES[:3], ids=str)
def test_conv_static_key_is_a_static_key_for_the_unfolded_query(site) -> None:
    """Logits = unfold(Q) W^T + b: attention with keys 9 d wide."""
    mixer = make("conv_static_key", **site)
    assert isinstance(mixer, MapMixer)
    assert mixer.site.grid is not None
    x, (height, width), prefix = tokens(mixer), mixer.site.grid, mixer.site.num_prefix_tokens
    h, d, count = mixer.num_heads, mixer.head_dim, mixer.site.num_tokens
    q, v = (mixer.get_submodule(r)(x).unflatten(-1, (h, d)).transpose(1, 2) for r in "qv")
    image = q[:, :, prefix:].mT.reshape(-1, d, height, width)
    unfolded = torch.nn.functional.unfold(image, 3, padding=1).mT.unflatten(0, (-1, h))
    weight = mixer.key_conv.weight.reshape(h, count, d * 9)
    logits = unfolded @ weight.mT + mixer.key_conv.bias.reshape(h, 1, count)
    if prefix:
        logits = torch.cat((q[:, :, :prefix] @ mixer.key.mT, logits), 2)
    y = (logits * d**-0.5).softmax(-1) @ v
    close(mixer(x), mixer.proj(y.transpose(1, 2).flatten(-2)))


def test_each_window_has_its_own_convolution() -> None:
    mixer = make("conv_static_key", windows=3, num_prefix_tokens=1)
    one = make("conv_static_key", num_prefix_tokens=1)
    x = tokens(mixer, 2, 3)
    weights = mixer.state_dict()
    y = mixer(x)
    for window in range(3):
        parts = {
            "key": weights["key"][window],
            "key_conv.weight": weights["key_conv.weight"].chunk(3)[window],
            "key_conv.bias": weights["key_conv.bias"].chunk(3)[window],
        }
        one.load_state_dict({**weights, **parts})
        close(y[:, window], one(x[:, window]))

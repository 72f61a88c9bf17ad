# SPDX-License-Identifier: Apache-2.0
"""The stem of three convolutions: its sizes, its strides, other image sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keymix.layers.patches import ConvStem
from mixer_cases import refused, stir
from tolerances import close


def by_hand(stem: ConvStem, x: Tensor, training: bool) -> Tensor:
    """The three convolutions from the layer's weights, BatchNorm written out."""
    w = stem.state_dict()
    half = w["proj.weight"].shape[-1]
    for at, stride, padding in ((0, 2, 3), (3, 1, 1)):
        x = F.conv2d(x, w[f"conv.{at}.weight"], stride=stride, padding=padding)
        dims = (0, 2, 3)
        mean, variance = x.mean(dims), x.var(dims, correction=0)
        if not training:
            mean, variance = (w[f"conv.{at + 1}.running_{k}"] for k in ("mean", "var"))
        x = (x - mean[:, None, None]) / (variance[:, None, None] + 1e-5).sqrt()
        gain, shift = (w[f"conv.{at + 1}.{k}"] for k in ("weight", "bias"))
        x = (x * gain[:, None, None] + shift[:, None, None]).clamp(min=0)
    x = F.conv2d(x, w["proj.weight"], w["proj.bias"], stride=half)
    return torch.stack([x[:, :, i, j] for i in range(x.shape[2]) for j in range(x.shape[3])], 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("size", "patch"), [((32, 48), 16), ((12, 8), 4)])
def test_it_is_three_convolutions(size, patch, training) -> None:
    stem = ConvStem(size, patch, 3, 10, dtype=torch.float64).train(training)
    stir(stem)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    wanted = by_hand(stem, x, training)
    tokens = stem(x)
    assert tokens.shape == (2, (size[0] // patch) * (size[1] // patch), 10)
    close(tokens, wanted)


def test_the_inner_convolutions_have_no_bias_and_the_last_has() -> None:
    shapes = {k: tuple(p.shape) for k, p in ConvStem(224, 16, 3, 384).named_parameters()}
    assert shapes == {
        "conv.0.weight": (64, 3, 7, 7),
        "conv.1.weight": (64,),
        "conv.1.bias": (64,),
        "conv.3.weight": (64, 64, 3, 3),
        "conv.4.weight": (64,),
        "conv.4.bias": (64,),
        "proj.weight": (384, 64, 8, 8),
        "proj.bias": (384,),
    }


def test_a_token_sees_beyond_its_patch() -> None:
    stem = ConvStem(32, 16, 1, 4, dtype=torch.float64).eval()
    x = torch.randn(1, 1, 32, 32, dtype=torch.float64, requires_grad=True)
    stem(x)[0, 0].sum().backward()
    seen = x.grad[0, 0].abs() > 0
    assert seen[:16, :16].all()
    rows = seen.any(1).nonzero().max()
    assert 16 <= rows < 32


def test_another_image_size_is_taken() -> None:
    stem = ConvStem(32, 16, 3, 8)
    stem.set_input_size((48, 64))
    assert (stem.grid_size, stem.num_patches) == ((3, 4), 12)
    assert stem(torch.randn(1, 3, 48, 64)).shape == (1, 12, 8)
    with refused(r"\(32, 32\).*\(48, 64\)"):
        stem(torch.randn(1, 3, 32, 32))
    with refused(r"40x64.*16x16.*take 32 or 48"):
        stem.set_input_size((40, 64))
    assert stem.grid_size == (3, 4), "a refusal changes nothing"
    stem.set_input_size(patch_size=16)
    with refused("cannot change its patch size"):
        stem.set_input_size((48, 64), patch_size=8)

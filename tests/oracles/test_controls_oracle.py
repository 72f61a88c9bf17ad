# SPDX-License-Identifier: Apache-2.0
"""The controls against timm's MetaFormer modules."""

from __future__ import annotations

import pytest
import torch
from timm.models import metaformer
from torch import Tensor, nn

from each import together
from keymix.mixers.base import TokenMixer
from mixer_cases import make, refused, stir, tokens
from tolerances import close


def on_image(module: nn.Module, mixer: TokenMixer, x: Tensor) -> Tensor:
    """Apply an image module to the patch tokens; prefix tokens pass."""
    grid, prefix = mixer.site.grid, mixer.site.num_prefix_tokens
    assert grid is not None
    images = x[:, prefix:].unflatten(1, grid).permute(0, 3, 1, 2)
    return torch.cat((x[:, :prefix], module(images).flatten(2).transpose(1, 2)), 1)


@together
@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("prefix", [0, 2])
def test_pooling_is_timms(size: int, prefix: int) -> None:
    mixer = make("pooling", {"pool_size": size}, grid=(3, 5), num_prefix_tokens=prefix)
    x = tokens(mixer)
    close(mixer(x), on_image(metaformer.Pooling(size), mixer, x))


@pytest.mark.parametrize("prefix", [0, 2])
def test_pooling_onto_a_grid_averages_and_interpolates_back(prefix: int) -> None:
    mixer = make("pooling", {"key_grid": "1/4"}, grid=(4, 6), num_prefix_tokens=prefix)
    back = nn.Upsample(scale_factor=2, mode="bilinear")

    class Coarse(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return back(nn.functional.avg_pool2d(image, 2)) - image

    x = tokens(mixer)
    close(mixer(x), on_image(Coarse(), mixer, x))
    with refused("key_grid='1/4'.*pool_size=5"):
        make("pooling", {"key_grid": "1/4", "pool_size": 5})


@pytest.mark.parametrize("prefix", [0, 1])
def test_sep_conv_is_timms(prefix: int) -> None:
    options = {"kernel_size": 7, "expansion": 2.0, "act": "star_relu"}
    mixer = make("sep_conv", options, grid=(4, 5), num_prefix_tokens=prefix)
    theirs = metaformer.SepConv(12, expansion_ratio=2, kernel_size=7, padding=3).double()
    stir(theirs)
    mixer.load_state_dict(theirs.state_dict(), strict=True)
    x = tokens(mixer)
    close(mixer(x), on_image(theirs, mixer, x))


@pytest.mark.parametrize(
    ("act", "layer"), [("relu", nn.ReLU), ("gelu", nn.GELU), (None, nn.Identity)]
)
def test_sep_convs_other_activations_are_timms(act, layer) -> None:
    mixer = make("sep_conv", {"act": act, "conv_bias": True}, grid=(4, 5))
    theirs = metaformer.SepConv(
        12,
        expansion_ratio=1,
        kernel_size=3,
        padding=1,
        bias=True,
        act1_layer=layer,
    ).double()
    stir(theirs)
    mixer.load_state_dict(theirs.state_dict(), strict=True)
    x = tokens(mixer)
    close(mixer(x), on_image(theirs, mixer, x))


def test_default_sep_conv_has_the_weights_of_ska_table_6() -> None:
    mixer = make("sep_conv", dim=32)
    assert sum(p.numel() for p in mixer.parameters()) == 2 * 32**2 + 9 * 32


def test_random_mixing_is_a_fixed_average_of_tokens() -> None:
    mixer = make("random", grid=(2, 3), num_prefix_tokens=1)
    x = tokens(mixer)
    y = torch.zeros_like(x)
    for n in range(7):
        for m in range(7):
            y[:, n] += mixer.random_matrix[n, m] * x[:, m]
    close(mixer(x), y)
    assert not list(mixer.parameters()), "it never trains"
    assert torch.unique(mixer.random_matrix).numel() == 49
    # softmax of U(0, 1): no entry is more than e times another of its row
    assert mixer.random_matrix.amax(1).div(mixer.random_matrix.amin(1)).max() < 2.7183


def test_identity_returns_the_tokens() -> None:
    mixer = make("identity")
    x = tokens(mixer)
    assert torch.equal(mixer(x), x)

# SPDX-License-Identifier: Apache-2.0
"""Linear map or convolution, norm, neuron: in one function as one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from keymix.layers.neurons import LIF, ParametricLIF
from keymix.layers.spiking_block import spiking_conv, spiking_linear
from tolerances import close


def spikes(*shape: int) -> torch.Tensor:
    return (torch.rand(*shape, dtype=torch.float64) < 0.4).double()


@pytest.mark.parametrize("shape", [(3, 2, 5, 6), (2, 7, 6)])
def test_a_linear_step_is_linear_norm_neuron(shape) -> None:
    linear, norm = nn.Linear(6, 4, dtype=torch.float64), nn.BatchNorm1d(4, dtype=torch.float64)
    neuron, x = LIF(v_threshold=0.4), spikes(*shape)
    y = x @ linear.weight.T + linear.bias
    axes = tuple(range(x.ndim - 1))
    mean, variance = y.mean(axes), y.var(axes, correction=0)
    wanted = neuron((y - mean) / (variance + norm.eps).sqrt())
    out = spiking_linear(x, linear, norm, neuron)
    assert 0 < wanted.mean() < 1
    close(out, wanted)
    close(norm.running_mean, 0.1 * mean)


@pytest.mark.parametrize("pool", [None, nn.MaxPool2d(3, 2, 1)])
def test_a_convolutional_step_is_convolution_norm_pool_neuron(pool) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1, bias=False, dtype=torch.float64)
    norm, neuron = nn.BatchNorm2d(4, dtype=torch.float64), LIF(v_threshold=0.3)
    x = spikes(3, 2, 3, 5, 6)
    y = torch.stack([conv(each) for each in x])
    mean, variance = y.mean((0, 1, 3, 4)), y.var((0, 1, 3, 4), correction=0)
    y = (y - mean[:, None, None]) / (variance[:, None, None] + norm.eps).sqrt()
    wanted = neuron(y if pool is None else torch.stack([pool(each) for each in y]))
    assert 0 < wanted.mean() < 1
    close(spiking_conv(x, conv, norm, neuron, pool), wanted)


def test_images_channels_last_stay_so() -> None:
    conv, norm = nn.Conv2d(3, 4, 1, dtype=torch.float64), nn.BatchNorm2d(4, dtype=torch.float64)
    x = spikes(3, 2, 5, 6, 3).permute(0, 1, 4, 2, 3)
    out = spiking_conv(x, conv.to(memory_format=torch.channels_last), norm, LIF())
    assert out.permute(0, 1, 3, 4, 2).is_contiguous()


def test_hooks_on_the_parts_see_the_step() -> None:
    linear, norm, neuron = nn.Linear(6, 4), nn.BatchNorm1d(4), ParametricLIF()
    seen: list[str] = []
    for part in (linear, norm, neuron):
        part.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    spiking_linear(spikes(3, 2, 5, 6).float(), linear, norm, neuron)
    assert seen == ["Linear", "BatchNorm1d", "ParametricLIF"]

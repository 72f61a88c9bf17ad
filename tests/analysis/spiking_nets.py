# SPDX-License-Identifier: Apache-2.0
"""Small spiking networks made by hand, which fire without training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from keymix.layers.neurons import LIF
from keymix.layers.spiking_block import spiking_conv
from keymix.mixers.registry import create_mixer


class SmallNet(nn.Module):
    """Two convolutions, a spiking mixer with its shortcut, an MLP with its shortcut, a head."""

    def __init__(self, mixer: str = "qk_token", time_steps: int = 3) -> None:
        super().__init__()
        self.time_steps = time_steps
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1, self.sn1 = nn.BatchNorm2d(6), LIF(v_threshold=0.25)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False)
        self.bn2, self.sn2 = nn.BatchNorm2d(8), LIF(v_threshold=0.05)
        self.stages = nn.ModuleList([nn.Module()])
        block = self.stages[0].blocks = nn.ModuleList([nn.Module()])
        block[0].attn = nn.Module()
        block[0].attn.mixer = create_mixer(mixer, dim=8, num_heads=2, grid=(3, 4))
        block[0].mlp = nn.Sequential(
            nn.Linear(8, 16), LIF(v_threshold=0.05), nn.Linear(16, 8), LIF(v_threshold=0.05)
        )
        self.head = nn.Linear(8, 5)
        for module in block[0].attn.mixer.modules():
            if isinstance(module, nn.BatchNorm1d):
                nn.init.constant_(module.weight, 4.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None].expand(self.time_steps, *x.shape)
        x = spiking_conv(x, self.conv1, self.bn1, self.sn1)
        x = spiking_conv(x, self.conv2, self.bn2, self.sn2)
        tokens = x.flatten(3).mT
        block = self.stages[0].blocks[0]
        tokens = tokens + block.attn.mixer(tokens)
        tokens = tokens + block.mlp(tokens)
        return self.head(tokens.mean(2).mean(0))


def small_net(mixer: str = "qk_token", time_steps: int = 3) -> SmallNet:
    """Make it, the same one each time."""
    torch.manual_seed(1)
    return SmallNet(mixer, time_steps)


def images(number: int = 3) -> Tensor:
    """Images that it takes, 6 x 8 pixels."""
    return torch.randn(number, 3, 6, 8, generator=torch.Generator().manual_seed(2))

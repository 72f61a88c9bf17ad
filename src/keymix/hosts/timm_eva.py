# SPDX-License-Identifier: Apache-2.0
"""Adapter to timm's Eva: EVA, EVA-02, DINOv3 and the ViTs with rotary positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.layers import AttentionRope
from timm.models.eva import Eva, EvaAttention
from torch import nn

from keymix.hosts.base import Place
from keymix.hosts.blocks import BlockHost
from keymix.mixers.base import TokenMixer


class TimmEva(BlockHost):
    """timm's Eva. Rotary positions of a call turn queries and keys of the mixer.

    Learned keys are not turned: they live where turned queries do. EVA has no bias of keys beside
    those of queries and values; a mixer has all three or none. Where heads share keys and values
    in groups, a mixer's heads each have their own.
    """

    name = "timm Eva"
    model = Eva
    attention = (EvaAttention, AttentionRope)

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as timm's Eva draws its own."""
        assert isinstance(model, Eva)
        model._init_weights(linear, needs_reset=False)

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there; the output projection starts the smaller, the deeper the block."""
        super().put(model, place, mixer)
        depth = int(place.path.split(".")[1]) + 1
        for linear in mixer.projections[-1:]:
            with torch.no_grad():
                linear.weight.div_(math.sqrt(2.0 * depth))

    def prefix(self, model: Any, path: str) -> int:
        """Count class and register tokens."""
        return int(model.num_prefix_tokens)

    def rotary(self, model: Any, attention: nn.Module) -> str | None:
        """Name the rotary positions of models that have some."""
        return None if model.rope is None else "rotary positions"


HOST = TimmEva()

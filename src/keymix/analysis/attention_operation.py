# SPDX-License-Identifier: Apache-2.0
"""A mixer's attention alone: from queries, keys and values to what the heads gather."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from keymix.errors import UserError
from keymix.mixers.base import TokenMixer
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.spiking import SpikingMixer


@dataclass(frozen=True, kw_only=True)
class AttentionOperation:
    """What stands between the projections in and out of a mixer, for one image and one step.

    Attributes:
        shapes: Shape of what each role projects to.
        run: Takes such tensors by role and returns what the output projection is given.
    """

    shapes: dict[str, tuple[int, ...]]
    run: Callable[[dict[str, Tensor]], Tensor]

    def inputs(self, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Make inputs: ones and zeros, every fourth number a spike.

        Args:
            device: Where.
            dtype: Of which kind.
        """
        made = {}
        for role, shape in self.shapes.items():
            spikes = torch.zeros(shape, device=device, dtype=dtype)
            spikes.view(-1)[::4] = 1
            made[role] = spikes
        return made


def attention_operation(mixer: TokenMixer, tokens: int) -> AttentionOperation:
    """Take the attention out of a mixer.

    Args:
        mixer: One with queries, keys or values of its own.
        tokens: Tokens N of the image.

    Raises:
        UserError: If the mixer has no such operation.
    """
    if isinstance(mixer, SpikingMixer):
        shape = (1, 1, tokens, mixer.num_heads, mixer.head_dim)  # T, B, N, h, d
        return AttentionOperation(
            shapes=dict.fromkeys(mixer.roles, shape),
            run=lambda parts: mixer.gather(parts, lambda name, spikes: None),
        )
    if isinstance(mixer, MapMixer):
        grid = mixer.site.grid
        heads = (1, mixer.num_heads, tokens, mixer.head_dim)
        with torch.no_grad():
            made = mixer.inputs(mixer.proj.weight.new_zeros(1, tokens, mixer.site.dim), grid)
        learned = {name: part for name, part in made.items() if name not in mixer.roles}
        return AttentionOperation(
            shapes=dict.fromkeys(mixer.roles, heads),
            run=lambda parts: mixer.maps({**learned, **parts}, grid) @ parts["v"],
        )
    raise UserError(
        f"mixer {mixer.mixer_name!r} has no attention of its own: it has no queries and keys"
    )

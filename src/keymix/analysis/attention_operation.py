# SPDX-License-Identifier: Apache-2.0
"""A mixer's attention alone, between its projections, and the work it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from keymix.analysis.complexity_sites import near_square
from keymix.errors import UserError
from keymix.mixers.base import Site, TokenMixer
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import build
from keymix.mixers.spiking import SpikingMixer


@dataclass(frozen=True, kw_only=True)
class AttentionOperation:
    """What lies between the projections in and out of a mixer, for one image and one step.

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
        with torch.no_grad():
            made = mixer.inputs(mixer.proj.weight.new_zeros(1, tokens, mixer.site.dim), grid)
        learned = {name: part for name, part in made.items() if name not in mixer.roles}
        return AttentionOperation(
            shapes={role: tuple(made[role].shape) for role in mixer.roles},
            run=lambda parts: mixer.maps({**learned, **parts}, grid) @ parts["v"],
        )
    raise UserError(
        f"mixer {mixer.mixer_name!r} has no attention of its own: it has no queries and keys"
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an attention does for one image in one step, neurons and softmax left out.

    Attributes:
        macs: Multiply-adds of matrix products.
        entries: Numbers added up, masked or scaled entry by entry.
        formed: Numbers formed between the roles and the output of attention.
    """

    macs: int
    entries: int
    formed: int

    @property
    def operations(self) -> int:
        """All of them together."""
        return self.macs + self.entries


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the arithmetic of what runs under it; views and copies are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.macs = self.entries = 0
        self.formed: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            self.macs += out.numel() * args[0].shape[-1]
        elif name == "sum":
            self.entries += args[0].numel()
        elif name == "mul":
            self.entries += out.numel()
        if name in ("mm", "bmm", "sum", "mul", "_softmax"):
            self.formed.append(out.numel())
        return out


def work(name: str, options: dict[str, Any], tokens: int, dim: int, num_heads: int) -> Work:
    """Count the attention of a mixer alone.

    Args:
        name: The mixer.
        options: Its options.
        tokens: N.
        dim: D.
        num_heads: h.
    """
    grid = near_square(tokens)
    site = Site(dim=dim, num_heads=num_heads, grid=grid, neuron=lambda **factory: nn.Identity())
    with torch.device("meta"):
        operation = attention_operation(build(name, site, options), tokens)
        parts: dict[str, Tensor] = {r: torch.empty(s) for r, s in operation.shapes.items()}
    watch = _Watch()
    with torch.no_grad(), watch:
        operation.run(parts)
    return Work(macs=watch.macs, entries=watch.entries, formed=sum(watch.formed[:-1]))

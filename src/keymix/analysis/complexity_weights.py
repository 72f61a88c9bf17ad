# SPDX-License-Identifier: Apache-2.0
"""Which weights of a mixer are learned and shared over the image, and which the image computes.

SKA Table 7 sorts mixers by "weight sharing" and by the number of "dynamic weights" and gives no
definition. Here both are read off the operations of a forward pass, nothing is declared:

- Weights are *shared over the image* ("spatially global") where a learned kernel slides over the
  grid: a convolution, wider than one position, whose kernel does not depend on the tokens.
- A *dynamic weight* is a matrix that the tokens give and the tokens are multiplied with: a matrix
  product or convolution both of whose factors depend on the input. Queries times keys is one, the
  map times the values another. Elementwise products (gates) are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from keymix.analysis.complexity_sites import SizedMixer, make
from keymix.analysis.counting import by_equation, flop_counter
from keymix.analysis.passes import tensors_in

GLOBAL, NOT_SHARED = "spatially global", "no"
"""The paper's words."""

SIDES, HEAD_DIM = (6, 7), 32
"""The facts are read on a grid of these rows and columns, and in heads no wider than this: they
depend on no size."""


@dataclass(frozen=True, kw_only=True)
class WeightFacts:
    """What the operations of one forward pass show.

    Attributes:
        kernels: Sizes of the learned kernels that slide over the grid, e.g. ``("3x3",)``.
        dynamic: Products both of whose factors depend on the tokens.
    """

    kernels: tuple[str, ...]
    dynamic: int

    @property
    def sharing(self) -> str:
        """The paper's words for whether learned weights are shared over the image."""
        return GLOBAL if self.kernels else NOT_SHARED


def weight_facts(mixer: SizedMixer) -> WeightFacts:
    """Run a mixer once on a small grid and look at what its products multiply."""
    with torch.random.fork_rng(devices=()):
        dim = min(mixer.dim, mixer.num_heads * HEAD_DIM)
        model = make(**mixer.arguments(SIDES, dim=dim)).eval()
        x = torch.randn(1, prod(SIDES), dim)
    return trace(model, x)


def trace(model: nn.Module, x: Tensor) -> WeightFacts:
    """Follow through one inference pass which tensors depend on the input.

    Args:
        model: Takes ``x``. Mixers in it are set to compute by their equations.
        x: The input.
    """
    by_equation(model)
    follower = _Follower(x)
    with torch.no_grad(), follower:
        model(x)
    return WeightFacts(kernels=tuple(follower.kernels), dynamic=follower.dynamic)


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks the storage of everything computed from the input, and looks at products."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # kept alive, since an address that is free may be used again
        self._marked = {x.untyped_storage()._cdata: x.untyped_storage()}
        self._products = flop_counter().flop_registry
        self.kernels: list[str] = []
        self.dynamic = 0

    def _depends(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._marked

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)
        if packet in self._products:
            self._look(str(packet), args)
        reached = any(self._depends(t) for t in tensors_in((args, kwargs)))
        out = func(*args, **kwargs)
        if reached:
            for tensor in tensors_in(out):  # what is written in place is returned, too
                storage = tensor.untyped_storage()
                self._marked[storage._cdata] = storage
        return out

    def _look(self, name: str, args: tuple[Any, ...]) -> None:
        factors = [self._depends(t) for t in args if isinstance(t, Tensor)]
        if "scaled_dot_product" in name:
            q, k, v = factors[:3]
            self.dynamic += (q and k) + ((q or k) and v)
            return
        if "convolution" in name:
            size = args[1].shape[2:]
            if factors[0] and not factors[1] and prod(size) > 1:
                self.kernels.append("x".join(str(side) for side in size))
            factors = factors[:2]
        elif "add" in name:  # addmm, baddbmm: the first is added
            factors = factors[1:]
        self.dynamic += sum(factors) > 1

# SPDX-License-Identifier: Apache-2.0
"""What spiking mixers share: linear map, norm and neuron a role, and spikes to look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypedDict

from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.layers.folding import fold_norm
from keymix.layers.neurons import neuron_maker
from keymix.layers.spiking_block import spiking_linear
from keymix.mixers.base import Grid, Site, TokenMixer, Traits

Kind = Literal["lif", "if", "plif"]
Note = Callable[[str, Tensor], None]


class SpikingOptions(TypedDict, total=False):
    """The options of :class:`SpikingMixer`, for subclasses that hand them on."""

    head_dim: int | None
    qkv_bias: bool
    proj_bias: bool
    neuron: Kind | None
    attn_threshold: float
    device: Any
    dtype: Any


class SpikingMixer(TokenMixer):
    r"""A mixer of spikes whose output is :math:`SN(BN(X' W_o))` for some masked or weighted X'.

    A subclass names its ``roles`` and their published names, and writes ``gather(parts, note)``.
    This class owns the rest: each role is :math:`SN(BN(X W))` with a norm over all steps, images
    and tokens, and so is the output. Neurons start from rest in every call, so nothing is left
    over from one call to the next. Prefix tokens are tokens like the others.

    The first axis is time, whatever follows: ``[2, 64, 64]`` is two steps of one image's 64 tokens,
    not two images, which are ``[1, 2, 64, 64]`` at one step. Values are not checked. Spikes are 0
    and 1, but shortcuts that add them hand over 2 and more (QKFormer, Eq. 13, 14, 16), and any real
    numbers are projected as they are.

    Args:
        site: Where the mixer sits. Its windows are an axis as any other; its projections must be
            the mixer's own.
        head_dim: Width d of a head; ``dim / num_heads`` if None.
        qkv_bias: Biases in the input projections. The norm takes their mean out again in training.
        proj_bias: Bias in the output projection.
        neuron: Kind of all neurons; None for those of the site.
        attn_threshold: Potential from which on the neurons of the attention fire.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Raises:
        UserError: If a value is out of range, the heads do not divide the width, or the site
            makes queries and keys in its own way.
    """

    family = "spiking"
    traits = Traits(domain="spiking", maskable=False)
    roles: ClassVar[tuple[str, ...]] = ("q", "k")
    spiking_roles = MappingProxyType(
        {"q_sn": "Q", "k_sn": "K", "attn_sn": "A", "proj": "X'", "proj_sn": "X''"}
    )

    def __init__(
        self,
        site: Site,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        neuron: Kind | None = None,
        attn_threshold: float = 0.5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(site)
        factory = {"device": device, "dtype": dtype}
        if head_dim is None:
            if site.dim % site.num_heads:
                raise UserError(
                    f"dim={site.dim} does not divide into num_heads={site.num_heads} heads; "
                    f"choose a divisor of {site.dim}, or give head_dim="
                )
            head_dim = site.dim // site.num_heads
        if head_dim < 1:
            raise UserError(f"{head_dim=} must be at least 1")
        if not 0 < attn_threshold < math.inf:
            raise UserError(f"{attn_threshold=} must be a number above 0")
        if site.project is not None or site.post_projection is not None or site.has_own_key_grid:
            raise UserError(
                f"mixer {self.mixer_name!r} makes spikes of the tokens themselves, but this site "
                "has projections, norms or a grid of keys of its own; use it in a spiking model"
            )
        self.num_heads, self.head_dim = site.num_heads, head_dim
        maker = neuron_maker(neuron or site.neuron or "lif")
        inner = site.num_heads * head_dim
        for role in self.roles:
            self.add_module(role, nn.Linear(site.dim, inner, bias=qkv_bias, **factory))
            self.add_module(f"{role}_bn", nn.BatchNorm1d(inner, **factory))
            self.add_module(f"{role}_sn", maker(v_threshold=1.0, **factory))
        self.attn_sn = maker(v_threshold=attn_threshold, **factory)
        self.proj = nn.Linear(inner, site.dim, bias=proj_bias, **factory)
        self.proj_bn = nn.BatchNorm1d(site.dim, **factory)
        self.proj_sn = maker(v_threshold=1.0, **factory)

    # ---- what a subclass writes -------------------------------------------------------------

    @property
    def published(self) -> tuple[str, str]:
        """The papers' names of what is gathered, and of the output."""
        names = self.spiking_roles
        return names.get("proj", names["attn_sn"]), names["proj_sn"]

    def gather(
        self, parts: dict[str, Float[Tensor, "T *batch N h d"]], note: Note
    ) -> Float[Tensor, "T *batch N h d"]:
        """Return what goes into the output projection.

        Args:
            parts: Spikes of each role, heads apart.
            note: To be called with the published name of any further spikes.
        """
        raise TypeError(f"{type(self).__name__} must define gather(parts, note)")

    # ---- what this class does with it -------------------------------------------------------

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """The input projections and ``proj``."""
        linears = (self.get_submodule(name) for name in (*self.roles, "proj"))
        return tuple(m for m in linears if isinstance(m, nn.Linear))

    @property
    def zero_gradients(self) -> frozenset[str]:
        """Biases in front of a norm that takes the mean out, as it does in training."""
        return frozenset(
            f"{name}.bias"
            for name in (*self.roles, "proj")
            if self.get_submodule(name).bias is not None
            and self.get_submodule(f"{name}_bn").training
        )

    def fold(self) -> None:
        """Fold the norms into the linear maps."""
        super().fold()
        for name in (*self.roles, "proj"):
            fold_norm(self, name, f"{name}_bn")

    def _flow(self, x: Tensor, grid: Grid | None, note: Note) -> Tensor:
        """The forward pass; ``note`` is called with each spike tensor and its published name."""
        if x.ndim < 3:
            raise UserError(
                f"mixer {self.mixer_name!r} takes spikes [T, B, N, C], time steps first, but got "
                f"{list(x.shape)}; put the steps in front, x[None] for one step"
            )
        self.resolve_grid(x, grid)
        parts = {}
        for role in self.roles:
            spikes = self._spike(x, role)
            note(role.upper(), spikes)
            parts[role] = spikes.reshape(*spikes.shape[:-1], self.num_heads, self.head_dim)
        gathered = self.gather(parts, note).flatten(-2)
        del parts, spikes  # in evaluation the output projection takes their memory
        note(self.published[0], gathered)
        y = self._spike(gathered, "proj")
        note(self.published[1], y)
        return y

    def _spike(self, x: Tensor, name: str) -> Tensor:
        return spiking_linear(x, *map(self.get_submodule, (name, f"{name}_bn", f"{name}_sn")))

    def forward(
        self,
        x: Float[Tensor, "T *batch N C"],
        grid: Grid | None = None,
        bias: Tensor | None = None,
    ) -> Float[Tensor, "T *batch N C"]:
        """Mix the tokens of every step; see :class:`keymix.mixers.base.TokenMixer`."""
        return self._flow(x, grid, _ignore)

    def spikes(
        self, x: Float[Tensor, "T *batch N C"], grid: Grid | None = None
    ) -> dict[str, Tensor]:
        """Return the spikes of every step of the forward pass, under the names of the paper.

        Roles, what is gathered and the output are ``[T, *, N, C]``, vectors of the attention
        ``[T, *, h, N, 1]`` or ``[T, *, h, 1, d]``. Running statistics do not move.

        Args:
            x: Tokens as :meth:`forward` takes them.
            grid: Grid of these tokens, where it is not the site's.
        """
        seen: dict[str, Tensor] = {}
        with _statistics_kept(self):
            self._flow(x, grid, seen.__setitem__)
        return seen


class QKAttention(SpikingMixer):
    """Keys masked by what their queries sum to along ``sum_axis`` of ``[T, *, N, h, d]``."""

    sum_axis: ClassVar[int]

    def gather(
        self, parts: dict[str, Float[Tensor, "T *batch N h d"]], note: Note
    ) -> Float[Tensor, "T *batch N h d"]:
        """Mask the keys by the neurons of the sums."""
        attention = self.attn_sn(parts["q"].sum(self.sum_axis, keepdim=True))
        note(self.spiking_roles["attn_sn"], attention.transpose(-3, -2))
        masked: Tensor = attention * parts["k"]
        return masked


def _ignore(name: str, spikes: Tensor) -> None:
    """Note nothing."""


@contextmanager
def _statistics_kept(mixer: nn.Module) -> Iterator[None]:
    """Let norms in training move copies of their statistics, which are dropped afterwards."""
    norms = [m for m in mixer.modules() if isinstance(m, nn.BatchNorm1d) and m.training]
    kept = [dict(norm.named_buffers()) for norm in norms]
    for norm, buffers in zip(norms, kept, strict=True):
        for name, value in buffers.items():
            setattr(norm, name, value.clone())
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            for name, value in buffers.items():
                setattr(norm, name, value)

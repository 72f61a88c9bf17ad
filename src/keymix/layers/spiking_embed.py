# SPDX-License-Identifier: Apache-2.0
"""Patch embeddings of spiking models: with a deformed shortcut, and Spikformer's splitting."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal, get_args

from jaxtyping import Float
from torch import Tensor, nn

from keymix.errors import UserError, unknown
from keymix.layers.folding import Foldable, fold_norm
from keymix.layers.neurons import NeuronMaker
from keymix.layers.spiking_block import pooled, spiking_conv

Pooling = Literal["before", "after"]
Images = Literal["imagenet", "cifar", "dvs"]
Pool = Literal["first", "second"]
Shortcut = Literal["activation_before_addition", "pre_activation"]

Plan = Sequence[tuple[int, bool]]

# what a convolution's width is of the stage's (one over that), and whether it pools; then how many
# convolutions encode the input before the shortcut branches off
STEMS: dict[str, tuple[Plan, int]] = {
    "imagenet": (((2, True), (1, True), (1, False)), 1),
    "cifar": (((2, False), (1, False)), 1),
    "dvs": (((8, False), (4, True), (2, True), (1, True)), 2),
}
LATER: dict[str, tuple[Plan, int]] = {
    "first": (((1, True), (1, False)), 0),
    "second": (((1, False), (1, True)), 0),
}
SPLITTING: dict[str, Plan] = {
    "imagenet": ((8, True), (4, True), (2, True), (1, True)),
    "cifar": ((8, False), (4, False), (2, True), (1, True)),
    "dvs": ((8, True), (4, True), (2, True), (1, True)),
}


class SpikingConv(Foldable):
    """Convolution without bias, BatchNorm, neuron; max pooling before or behind the neuron.

    An image that does not change is handed in as one step: what stands before the neuron runs
    once, and its currents are the same at all T steps. The norm then counts n values where T
    copies would be nT: a batch adds n/(n - 1) times their variance to the running one, not
    nT/(nT - 1) times.

    ``pool`` says where a 3x3 maximum of stride 2 stands, ``"before"`` or ``"after"`` the neuron;
    None is none. The kernel is odd and padded to keep the size. Without a neuron the step ends at
    the norm. ``stride`` is that of what it reads, as a strided 1x1 convolution has it.

    Shape: ``[T, B, c, H, W]``, or one step ``[1, B, c, H, W]`` -> ``[T, B, D, h, w]``, with
    h = ceil(H / stride), and half of that, rounded up, with pooling.
    """

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        *,
        kernel_size: int = 3,
        stride: int = 1,
        pool: Pooling | None = None,
        neuron: NeuronMaker | None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.stride = stride
        self.conv = nn.Conv2d(
            in_chans, out_chans, kernel_size, padding=kernel_size // 2, bias=False, **factory
        )
        self.bn = nn.BatchNorm2d(out_chans, **factory)
        self.reduction = stride if pool is None else 2 * stride
        self.where = pool
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if pool is not None else None
        self.sn = neuron(**factory) if neuron is not None else None

    def fold(self) -> None:
        """Fold the norm into the convolution."""
        fold_norm(self, "conv", "bn")

    def forward(self, x: Float[Tensor, "S B c H W"], steps: int) -> Float[Tensor, "T B D h w"]:
        """Make ``steps`` steps T of spikes, or currents where there is no neuron, of T or one."""
        if self.stride > 1:  # a strided 1x1 convolution of few channels corrupts memory on AVX2
            x = x[..., :: self.stride, :: self.stride]
        first = self.pool if self.where == "before" else None
        if self.sn is not None:
            spikes = spiking_conv(x, self.conv, self.bn, self.sn, first, steps)
        else:
            spikes = pooled(first, x.shape[:2], self.bn(self.conv(x.flatten(0, 1))))
            spikes = spikes.expand(steps, -1, -1, -1, -1)
        if self.pool is None or self.where == "before":
            return spikes
        return pooled(self.pool, spikes.shape[:2], spikes.flatten(0, 1))


class SpikingPatchEmbed(nn.Module):
    r"""Patch embedding with deformed shortcut: convolutions next to a strided 1x1 convolution.

    .. math::
        Y = F(X) + SN(W_d X) \quad (16) \qquad Y = SN(G(X) + W_d X) \quad (17)

    F ends with a neuron, G with its norm; W_d is a 1x1 convolution whose stride is the pooling of
    F. A stem has convolutions before X that turn the image into spikes.
    Paper: QKFormer, https://arxiv.org/abs/2403.16552, Sec. 3.3, Eq. (16) and (17).
    Differs: W_d is followed by BatchNorm, which the parameter counts of the paper need.

    Args:
        in_chans: Channels of what it takes.
        dim: Width D of the tokens, a multiple of the dividers in ``plan``.
        plan: A convolution each: what divides D to its width, and whether it pools.
        encode: How many of the convolutions stand before X.
        shortcut: ``"activation_before_addition"`` (Eq. 16) gives 0, 1 or 2,
            ``"pre_activation"`` (Eq. 17) 0 or 1.
        neuron: Makes the neurons.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: ``[T, B, c, H, W]``, or one step for an image -> ``[T, B, D, H / r, W / r]``, rounded
    up; r is ``reduction``.

    Raises:
        UserError: If D is no such multiple, or there is no such shortcut.
    """

    def __init__(
        self,
        in_chans: int,
        dim: int,
        *,
        plan: Plan,
        encode: int = 0,
        shortcut: Shortcut = "activation_before_addition",
        neuron: NeuronMaker,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if shortcut not in get_args(Shortcut):
            raise unknown("shortcut", str(shortcut), get_args(Shortcut))
        factory = {"device": device, "dtype": dtype}
        early = shortcut == "pre_activation"
        widths = _widths(dim, plan)
        convs, taken = [], in_chans
        for i, (width, (_, pools)) in enumerate(zip(widths, plan, strict=True)):
            ends = early and i == len(plan) - 1
            pool: Pooling | None = "before" if pools else None
            made = None if ends else neuron
            convs.append(SpikingConv(taken, width, pool=pool, neuron=made, **factory))
            taken = width
        self.encode = nn.ModuleList(convs[:encode])
        self.convs = nn.ModuleList(convs[encode:])
        self.shortcut = SpikingConv(
            widths[encode - 1] if encode else in_chans,
            dim,
            kernel_size=1,
            stride=prod(conv.reduction for conv in convs[encode:]),
            neuron=None if early else neuron,
            **factory,
        )
        self.sn = neuron(**factory) if early else None
        self.reduction = prod(conv.reduction for conv in convs)

    def forward(self, x: Float[Tensor, "S B c H W"], steps: int) -> Float[Tensor, "T B D h w"]:
        """Embed spikes, or an image.

        Args:
            x: T steps, or one that stands for all.
            steps: How many steps T come out.
        """
        for conv in self.encode:
            x = conv(x, steps)
        y = x
        for conv in self.convs:
            y = conv(y, steps)
        y = y + self.shortcut(x, steps)
        out: Tensor = y if self.sn is None else self.sn(y)
        return out


class SpikingPatchSplitting(nn.Module):
    """Spikformer's splitting stem (SPS): four convolutions, then one that adds positions.

    Y = S + SN(BN(Conv(S))), where S comes from the four.
    Paper: Spikformer, https://arxiv.org/abs/2209.15425, Sec. 3.3. Pooling stands behind the
    neuron there; before it is what CML (https://arxiv.org/abs/2305.05954) puts in its place.

    Args:
        in_chans: Channels of the images.
        dim: Width D of the tokens, a multiple of 8.
        plan: A convolution each: what divides D to its width, and whether it pools.
        pool: Where the pooling stands, ``"before"`` or ``"after"`` the neuron.
        neuron: Makes the neurons.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: ``[T, B, c, H, W]``, or one step for an image -> ``[T, B, D, H / r, W / r]``, rounded
    up; r is ``reduction``.

    Raises:
        UserError: If D is no such multiple, or there is no such place.
    """

    def __init__(
        self,
        in_chans: int,
        dim: int,
        *,
        plan: Plan,
        pool: Pooling = "after",
        neuron: NeuronMaker,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if pool not in get_args(Pooling):
            raise unknown("pool", str(pool), get_args(Pooling))
        factory = {"device": device, "dtype": dtype}
        widths = _widths(dim, plan)
        self.convs = nn.ModuleList(
            SpikingConv(taken, width, pool=pool if pools else None, neuron=neuron, **factory)
            for taken, width, (_, pools) in zip((in_chans, *widths), widths, plan, strict=False)
        )
        self.pos = SpikingConv(dim, dim, neuron=neuron, **factory)
        self.reduction = prod(2 if pools else 1 for _, pools in plan)

    def forward(self, x: Float[Tensor, "S B c H W"], steps: int) -> Float[Tensor, "T B D h w"]:
        """Embed frames, or an image.

        Args:
            x: T steps, or one that stands for all.
            steps: How many steps T come out.
        """
        for conv in self.convs:
            x = conv(x, steps)
        out: Tensor = x + self.pos(x, steps)
        return out


class SpikingEmbeds(nn.ModuleList):
    """Patch embeddings one after the other, as one."""

    @property
    def reduction(self) -> int:
        """Pixels a token is wide."""
        return prod(embed.reduction for embed in self if isinstance(embed, SpikingPatchEmbed))

    def forward(self, x: Float[Tensor, "S B c H W"], steps: int) -> Float[Tensor, "T B D h w"]:
        """Embed frames, or an image."""
        for embed in self:
            x = embed(x, steps)
        return x


def _widths(dim: int, plan: Plan) -> list[int]:
    most = max(divider for divider, _ in plan)
    if dim % most:
        raise UserError(f"the first stage is {dim} wide; its embedding needs a multiple of {most}")
    return [dim // divider for divider, _ in plan]

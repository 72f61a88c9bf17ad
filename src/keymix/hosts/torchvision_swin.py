# SPDX-License-Identifier: Apache-2.0
"""Adapter to torchvision's Swin: attention sits at ``features.<s>.<i>.attn``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torchvision.models.swin_transformer import (
    ShiftedWindowAttention,
    ShiftedWindowAttentionV2,
    SwinTransformer,
)

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Reading
from keymix.hosts.base import UNKNOWN, Place, patched
from keymix.hosts.blocks import Facts
from keymix.hosts.call_grid import ConvGrid, attach_call_hook, call_hook_of, given_size, patches_of
from keymix.hosts.timm_heads import own_weights
from keymix.hosts.windows import Cut, HostedWindows, SwinHost, read_windows
from keymix.mixers.base import Grid, TokenMixer

PUBLISHED = (224, 224)  # what torchvision's weights of Swin-T, -S and -B are cropped to
ONE_SIZE = (
    "those a window one size, which is said as model.image_size = (height, width) before mixers "
    "are put, or followed by keymix.hosts.find_host(model).update_grids(model) where they have "
    "resize='interpolate'"
)


class MapCut(Cut):
    """A cut of a feature map as torchvision's ``shifted_window_attention`` makes it.

    The map is padded with zeros, then rolled up and left by the shift (nought on an axis that one
    window covers), then cut.
    """

    @classmethod
    def of(cls, grid: Grid, window: Grid, shift: Grid) -> MapCut:
        """Return the cut of a map; one window that covers the map cancels the block's shift."""
        down, across = (
            0 if side <= width else by for side, width, by in zip(grid, window, shift, strict=True)
        )
        return cls(grid, window, (down, across))

    @property
    def padded(self) -> Grid:
        """The map's size after padding."""
        rows, columns = self.windows
        return rows * self.window[0], columns * self.window[1]

    def apart(self, x: Tensor) -> Tensor:
        """Cut a map ``[B, H, W, C]`` into windows ``[B, windows, N, C]``."""
        down, across = (p - s for p, s in zip(self.padded, self.grid, strict=True))
        x = pad(x, (0, 0, 0, across, 0, down))
        if any(self.shift):
            x = x.roll((-self.shift[0], -self.shift[1]), (1, 2))
        (rows, columns), (high, wide) = self.windows, self.window
        x = x.reshape(x.shape[0], rows, high, columns, wide, x.shape[-1])
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def together(self, y: Tensor) -> Tensor:
        """Join windows ``[B, windows, N, C]`` to a map ``[B, H, W, C]``."""
        y = y.reshape(y.shape[0], *self.windows, *self.window, y.shape[-1])
        y = y.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if any(self.shift):
            y = y.roll(self.shift, (1, 2))
        return y[:, : self.grid[0], : self.grid[1]]

    def mask(self, like: Tensor, value: float = -torch.inf) -> Tensor | None:
        """Return what is added between tokens from opposite edges, ``[windows, N, N]``.

        None where nothing is shifted. torchvision's own value is -100.
        """
        if not any(self.shift):
            return None
        regions = like.new_zeros(1, *self.padded, 1)
        for axis, (side, width, by) in enumerate(
            zip(self.padded, self.window, self.shift, strict=True)
        ):
            if by:  # on an axis without a shift all lies as it did
                place = torch.arange(side, device=like.device)
                region = (place >= side - width).to(like) + (place >= side - by).to(like)
                shape = (1, side, 1, 1) if axis == 0 else (1, 1, side, 1)
                regions = regions + region.reshape(shape) * 3**axis
        marks = MapCut(self.padded, self.window, (0, 0)).apart(regions)[0, :, :, 0]
        across = marks[:, :, None] != marks[:, None, :]
        return like.new_zeros(across.shape).masked_fill(across, value)


class HostedShiftedWindows(HostedWindows):
    """Stands where torchvision's ShiftedWindowAttention stood, and takes its feature map.

    Shift, padding and windows are torchvision's; tokens of padding are mixed like others, as they
    are there. The mask is minus infinity where torchvision adds -100, so that nothing crosses the
    edges whatever the logits. Images may be of any size, as long as no key is bound to a window.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # a map, as torchvision calls
        """Mix the tokens of every window of a map ``[B, H, W, C]``."""
        cut = MapCut.of((x.shape[1], x.shape[2]), self.window_size, self.shift)
        shared = "put_mixers(…, host=TorchvisionSwin(shared_keys=True))"
        self.refuse_other(cut.windows, any(cut.shift), shared, ONE_SIZE)
        self.window_grid = cut.windows
        out: Tensor = self.mixer(cut.apart(x), bias=self.bias(cut.mask(x)))
        return cut.together(out).contiguous()


class TorchvisionSwin(SwinHost):
    """torchvision's SwinTransformer, versions 1 and 2.

    The model takes images of any size and stores none, but keys per window need the number of
    windows. It is that of ``model.image_size``, a side or (height, width) in pixels, if the model
    was given one; else that of its last call, if :meth:`follow_calls` recorded it; else of 224x224.
    After another ``image_size``, ``find_host(model).update_grids(model)`` resizes keys that were
    built with ``resize="interpolate"``.
    """

    name = "torchvision SwinTransformer"
    hosted = HostedShiftedWindows
    pads_first = True

    def serves(self, model: nn.Module) -> bool:
        """Whether it is torchvision's class."""
        return isinstance(model, SwinTransformer)

    def cuts(self, model: nn.Module, *, called: bool) -> Iterator[tuple[int, str, Any, Cut]]:
        """Yield every attention; its stage is that of the feature map."""
        if not isinstance(model, SwinTransformer):
            raise UserError(f"{type(model).__name__} is not torchvision's SwinTransformer")
        grids = _grids(model, given=not called)
        for s in range(1, len(model.features), 2):  # stages alternate with downsampling
            for i, block in enumerate(model.features[s]):
                path = f"features.{s}.{i}.attn"
                own = _checked(path, getattr(block, "attn", None))
                yield s // 2, path, own, MapCut.of(grids[s // 2], *_sides(own))

    def facts(self, attention: Any) -> Facts:
        """Describe the host's own attention."""
        options = {
            "qkv_bias": attention.qkv.bias is not None,
            "proj_bias": attention.proj.bias is not None,
            "attn_drop": attention.attention_dropout,
            "proj_drop": attention.dropout,
        }
        return Facts(dim=attention.qkv.in_features, num_heads=attention.num_heads, options=options)

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, and follow the model's calls."""
        super().put(model, place, mixer)
        self.follow_calls(model)

    def follow_calls(self, model: nn.Module) -> None:
        """Record the feature map of the model's calls, from now on."""
        assert isinstance(model, SwinTransformer)
        attach_call_hook(model.features[0][0], ConvGrid())

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return queries, keys and values of a call, ``[B, windows, h, N, d]``.

        The bias is relative positions and torchvision's mask, ``[(windows,) h, N, N]``.
        """
        own: Any = _checked("attn", attention)
        x: Tensor = args[0] if args else kwargs["x"]
        cut = MapCut.of((x.shape[1], x.shape[2]), *_sides(own))
        joint = linear(cut.apart(x), own.qkv.weight, _bias(own))
        q, k, v = (
            t.reshape(*t.shape[:-1], own.num_heads, -1).transpose(-3, -2)
            for t in joint.chunk(3, -1)
        )
        return read_windows(own, q, k, v, cut.mask(x, -100.0))

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the projections; ``qkv`` is split."""
        own: Any = _checked("attn", attention)
        found, bias = own_weights(own), _bias(own)
        return found if bias is None else found | {"k.bias": bias.detach().chunk(3)[1]}


def _bias(attention: Any) -> Tensor | None:
    """Return the bias of queries, keys and values; Swin V2 takes that of keys for nought."""
    bias: Tensor | None = attention.qkv.bias
    if bias is None or not isinstance(attention, ShiftedWindowAttentionV2):
        return bias
    q, k, v = bias.chunk(3)
    return torch.cat((q, torch.zeros_like(k), v))


def _checked(path: str, attention: Any) -> nn.Module:
    """Refuse what is not Swin's attention."""
    name = type(attention).__name__
    if type(attention) not in (
        ShiftedWindowAttention,
        ShiftedWindowAttentionV2,
        HostedShiftedWindows,
    ):
        raise UserError(
            f"{path} is {name}, not torchvision's ShiftedWindowAttention, so what a mixer in its "
            "place would lose is not known"
        )
    assert isinstance(attention, nn.Module)
    if patched(attention):
        raise UserError(f"the forward of {path} ({name}) was replaced: {UNKNOWN}")
    return attention


def _sides(attention: Any) -> tuple[Grid, Grid]:
    """Return window and shift of a block."""
    if isinstance(attention, HostedShiftedWindows):
        return attention.window_size, attention.shift
    window, shift = attention.window_size, attention.shift_size
    return (window[0], window[1]), (shift[0], shift[1])


def _grids(model: SwinTransformer, *, given: bool) -> list[Grid]:
    """Return the feature map of every stage, of the last call or, if ``given``, of image_size."""
    conv = model.features[0][0]
    call, size = call_hook_of(conv, ConvGrid), given_size(model)
    grid = None if call is None else call.grid
    if grid is None or (given and size is not None):
        grid = patches_of(conv, size or PUBLISHED)
    grids = [grid]
    for _ in range(3, len(model.features), 2):
        grids.append((-(-grids[-1][0] // 2), -(-grids[-1][1] // 2)))
    return grids


HOSTS = (TorchvisionSwin(),)

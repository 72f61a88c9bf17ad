# SPDX-License-Identifier: Apache-2.0
"""Adapter to torchvision's Swin: attention sits at ``features.<s>.<i>.attn``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torchvision.models.swin_transformer import (
    ShiftedWindowAttention,
    ShiftedWindowAttentionV2,
    SwinTransformer,
)

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout, Reading
from keymix.hosts.base import UNKNOWN, Place, patched
from keymix.hosts.call_grid import ConvGrid, attach_call_hook, call_hook_of, given_size, patches_of
from keymix.hosts.timm_heads import own_weights
from keymix.hosts.windows import MASKED, HostedWindows, SwinHost, window_grid
from keymix.mixers.base import Grid, Site, TokenMixer
from keymix.mixers.resize import GridBound, counted

PUBLISHED = (224, 224)  # what torchvision's weights of Swin-T, -S and -B are cropped to


@dataclass(frozen=True)
class Cut:
    """One way of cutting a feature map ``grid`` into windows of ``window`` tokens.

    The map is padded with zeros at the right and the bottom until windows fill it, rolled up and
    left by the shift (nought on an axis that one window covers), and cut, as torchvision's
    ``shifted_window_attention`` does.
    """

    grid: Grid
    window: Grid
    shift: Grid

    @classmethod
    def of(cls, grid: Grid, window: Grid, shift: Grid) -> Cut:
        """Return the cut of a map; one window that covers the map cancels the block's shift."""
        down, across = (
            0 if side <= width else by for side, width, by in zip(grid, window, shift, strict=True)
        )
        return cls(grid, window, (down, across))

    @property
    def windows(self) -> Grid:
        """Rows and columns of windows."""
        return window_grid(self.grid, self.window)

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
        marks = Cut(self.padded, self.window, (0, 0)).apart(regions)[0, :, :, 0]
        across = marks[:, :, None] != marks[:, None, :]
        return like.new_zeros(across.shape).masked_fill(across, value)


class HostedShiftedWindows(HostedWindows):
    """Stands where torchvision's ShiftedWindowAttention stood, and takes its feature map.

    Shift, padding and windows are torchvision's; tokens of padding are mixed like others, as they
    are there. The mask is minus infinity where torchvision adds -100, so that nothing crosses the
    edges whatever the logits. Images may be of any size, as long as no key is bound to a window.

    ``shift`` is the block's.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # a map, as torchvision calls
        """Mix the tokens of every window of a map ``[B, H, W, C]``."""
        cut = Cut.of((x.shape[1], x.shape[2]), self.window_size, self.shift)
        self._check(cut)
        self.window_grid = cut.windows
        out: Tensor = self.mixer(cut.apart(x), bias=self.bias(cut.mask(x)))
        return cut.together(out).contiguous()

    def _check(self, cut: Cut) -> None:
        mixer, windows = self.mixer, cut.windows
        if any(cut.shift) and not mixer.claims.maskable:
            raise UserError(f"mixer {mixer.mixer_name!r} cannot serve an image so large: {MASKED}")
        if not isinstance(mixer, GridBound) or not mixer.own_windows:
            return
        site, remedy = mixer.site, "before mixers are put"
        if mixer.resize == "interpolate":
            remedy = "and then keymix.hosts.find_host(model).update_grids(model)"
        if windows != site.window_grid:
            raise UserError(
                f"mixer {mixer.mixer_name!r} {mixer.holds} in each of "
                f"{counted(site.windows, site.window_grid)}, and this image has "
                f"{counted(math.prod(windows), windows)}; keys that all windows share serve any "
                "image (put_mixers(…, host=TorchvisionSwin(shared_keys=True))), and those a window "
                f"one size, which is said as model.image_size = (height, width) {remedy}"
            )


class TorchvisionSwin(SwinHost):
    """torchvision's SwinTransformer, version 1.

    The model takes images of any size and stores none, but keys per window need the number of
    windows. It is that of ``model.image_size``, a side or (height, width) in pixels, if the model
    was given one; else that of its last call, if :meth:`follow_calls` recorded it; else of 224x224.
    After another ``image_size``, ``find_host(model).update_grids(model)`` resizes keys that were
    built with ``resize="interpolate"``.

    Swin V2 is refused: its attention compares directions, by a scale that it learns.
    """

    name = "torchvision SwinTransformer"

    def serves(self, model: nn.Module) -> bool:
        """Whether it is torchvision's class."""
        return isinstance(model, SwinTransformer)

    def places(self, model: nn.Module) -> list[Place]:
        """One place per block; its stage is that of the feature map."""
        if not isinstance(model, SwinTransformer):
            raise UserError(f"{type(model).__name__} is not torchvision's SwinTransformer")
        grids = _grids(model, given=True)
        places = []
        for stage, path, attention in _attentions(model):
            cut = _cut(attention, grids[stage])
            if isinstance(attention, HostedShiftedWindows):
                place = attention.place
            else:
                place = _native_place(path, stage, attention, cut.window)
            places.append(self.in_windows(place, attention, cut.window, cut.windows, cut.shift))
        return places

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its projections initialised as torchvision's Swin draws its own."""
        for linear in mixer.projections:
            nn.init.trunc_normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        before: Any = model.get_submodule(place.path)
        hosted = HostedShiftedWindows(
            mixer,
            place,
            table=before.relative_position_bias_table,
            one_table=False,
            windows=_cut(before, _grids(model, given=True)[place.stage]).windows,
            shift=_sides(before)[1],
            shared_keys=self.shares(before),
        )
        model.set_submodule(place.path, hosted.train(before.training))
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
        cut = _cut(own, (x.shape[1], x.shape[2]))
        q, k, v = (
            t.reshape(*t.shape[:-1], own.num_heads, -1).transpose(-3, -2)
            for t in own.qkv(cut.apart(x)).chunk(3, -1)
        )
        bias, mask = own.get_relative_position_bias()[0], cut.mask(x, -100.0)
        return Reading(
            q=q,
            k=k,
            v=v,
            scale=q.shape[-1] ** -0.5,
            bias=bias if mask is None else bias + mask[:, None],
        )

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the projections; ``qkv`` is split."""
        own: Any = _checked("attn", attention)
        return own_weights(own)

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the tokens of a place were in the model's last call."""
        assert isinstance(model, SwinTransformer)
        cut = _cut(model.get_submodule(place.path), _grids(model, given=False)[place.stage])
        return Layout(
            grid=cut.grid,
            key_grid=cut.grid,
            window=cut.window,
            windows=cut.windows,
            shift=cut.shift,
            pads_first=True,
        )


def _native_place(path: str, stage: int, attention: Any, window: Grid) -> Place:
    """Describe the host's own attention."""
    site = Site(dim=attention.qkv.in_features, num_heads=attention.num_heads, grid=window)
    defaults = {
        "qkv_bias": attention.qkv.bias is not None,
        "proj_bias": attention.proj.bias is not None,
        "attn_drop": attention.attention_dropout,
        "proj_drop": attention.dropout,
    }
    return Place(path=path, stage=stage, site=site, defaults=defaults)


def _attentions(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield stage, path and module of every attention; stages alternate with downsampling."""
    features: Any = model.features
    for s in range(1, len(features), 2):
        for i, block in enumerate(features[s]):
            path = f"features.{s}.{i}.attn"
            yield s // 2, path, _checked(path, getattr(block, "attn", None))


def _checked(path: str, attention: Any) -> nn.Module:
    """Refuse what is not Swin V1's attention."""
    name = type(attention).__name__
    if type(attention) in (ShiftedWindowAttention, HostedShiftedWindows):
        assert isinstance(attention, nn.Module)
        if patched(attention):
            raise UserError(f"the forward of {path} ({name}) was replaced: {UNKNOWN}")
        return attention
    if isinstance(attention, ShiftedWindowAttentionV2):
        raise UserError(
            f"{path} is torchvision's {name}: Swin V2 compares queries and keys by their cosine, "
            "with a scale that it learns and positions from a network, and no mixer in its place "
            "would; take a Swin V1 (swin_t, swin_s, swin_b)"
        )
    raise UserError(
        f"{path} is {name}, not torchvision's ShiftedWindowAttention, so what a mixer in its place "
        "would lose is not known"
    )


def _sides(attention: Any) -> tuple[Grid, Grid]:
    """Return window and shift of a block."""
    if isinstance(attention, HostedShiftedWindows):
        return attention.window_size, attention.shift
    window, shift = attention.window_size, attention.shift_size
    return (window[0], window[1]), (shift[0], shift[1])


def _cut(attention: nn.Module, grid: Grid) -> Cut:
    return Cut.of(grid, *_sides(attention))


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

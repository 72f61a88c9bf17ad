# SPDX-License-Identifier: Apache-2.0
"""Adapter to timm's SwinTransformer: attention sits at ``layers.<s>.blocks.<i>.attn``."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import get_init_weights_vit
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.attention_inputs import Layout, Reading
from keymix.hosts.base import Place, patched
from keymix.hosts.call_grid import CallSize, attach_call_hook, size_of_last_call
from keymix.hosts.timm_heads import named_call, own_weights, project_heads, projections_of
from keymix.hosts.windows import MASKED, HostedWindows, SwinHost, window_grid
from keymix.mixers.base import Grid, Site, TokenMixer
from keymix.mixers.resize import GridBound, counted

_CALL_SIZE = "_call_size"  # attribute of an attention: the size of its block's last call


class MixerSwinBlock(SwinTransformerBlock):
    """timm's Swin block with a mixer: its windows are known to the mixer, its mask is exact.

    timm's mask adds -100 to logits across the regions of a shifted window, which leaves e^-100 of
    a weight where logits are alike, and more where they are not. Here it is minus infinity, so
    that nothing crosses whatever the logits. In double precision both give the same output to
    1e-12 as long as logits stay within some 70 of one another.
    """

    attn: HostedWindows
    dynamic_mask: bool

    def get_attn_mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return timm's mask with minus infinity where timm has -100; None without a shift."""
        mask: Tensor | None = super().get_attn_mask(*args, **kwargs)
        return None if mask is None else mask.masked_fill(mask != 0, -torch.inf)

    def _attn(self, x: Tensor) -> Tensor:
        if self.dynamic_mask:  # images of any size: these are the windows of this one
            windows = window_grid((x.shape[1], x.shape[2]), self.window_size)
            self._check_windows(windows)
            self.attn.window_grid = windows
        out: Tensor = super()._attn(x)
        return out

    def _check_windows(self, windows: Grid) -> None:
        """Refuse an image whose windows are not those that have keys of their own."""
        mixer = self.attn.mixer
        if not isinstance(mixer, GridBound) or not mixer.own_windows:
            return
        site = mixer.site
        if windows != site.window_grid:
            raise UserError(
                f"mixer {mixer.mixer_name!r} {mixer.holds} in each of "
                f"{counted(site.windows, site.window_grid)}, and this image has "
                f"{counted(math.prod(windows), windows)}; keys that all windows share serve any "
                "image (build with shared_keys=True), and one other size is taken for good by "
                "keymix.models.set_image_size(model, (height, width), resize='interpolate')"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens ``[B, H, W, C]`` of windows, then transform each, as timm's block."""
        x = x + self.drop_path1(self._attn(self.norm1(x)))
        tokens = x.flatten(1, 2)  # timm's way of it cannot take a batch of no images
        out: Tensor = tokens + self.drop_path2(self.mlp(self.norm2(tokens)))
        return out.reshape(x.shape)

    def refuses_input_size(
        self, feat_size: Grid, window_size: Grid, always_partition: bool | None = None
    ) -> str | None:
        """Say why the mixer cannot take another resolution or window, None if it can."""
        there = copy.copy(self)  # its sizes alone are changed
        there.input_resolution = feat_size
        if always_partition is not None:
            there.always_partition = always_partition
        window, shift = there._calc_window_shift(window_size)
        mixer = self.attn.mixer
        if any(shift) and not mixer.claims.maskable:
            return f"mixer {mixer.mixer_name!r} cannot stay: {MASKED}"
        windows = None if self.attn.shared_keys else window_grid(feat_size, window)
        reason = mixer.refuses_grid(window, window_grid=windows)
        if not isinstance(mixer, GridBound) or not mixer.bound or mixer.resize == "interpolate":
            return reason
        if reason is None and mixer.key_grid_for(window) == window:
            return None
        return self._remedy(mixer, window, window_grid(feat_size, window))

    def _remedy(self, mixer: GridBound, window: Grid, windows: Grid) -> str:
        """Say what serves other windows where keys are not resampled to them."""
        keep = f"set_input_size(…, window_size={self.window_size})"
        here, there = ("{}x{} tokens".format(*size) for size in (self.window_size, window))
        before, after = f"windows of {here}", f"windows of {there}"
        why = "relative positions and masks are of as many keys as tokens in a window"
        remedy = f"or let windows keep their size: {keep}"
        if mixer.own_windows:
            before = f"{counted(mixer.site.windows, mixer.site.window_grid)} of {here}"
            after = f"{counted(math.prod(windows), windows)} of {there}"
            why = why if here != there else "each window has keys of its own"
            remedy = (
                "without it only keys that all windows share serve (build with shared_keys=True, "
                f"train with --model.options.shared_keys true), in windows that keep their size: "
                f"{keep}"
            )
        return (
            f"mixer {mixer.mixer_name!r} {mixer.holds} for {before}, and this size has {after}, "
            f"which only resize='interpolate' serves (a model: mixer_options={{'resize': "
            f"'interpolate'}}), since {why}; {remedy}"
        )

    def set_input_size(
        self, feat_size: Grid, window_size: Grid, always_partition: bool | None = None
    ) -> None:
        """Take another resolution and window size, with the mixer; refuse both where it cannot."""
        reason = self.refuses_input_size(feat_size, window_size, always_partition)
        if reason is not None:
            raise UserError(reason)
        super().set_input_size(feat_size, window_size, always_partition)
        windows = window_grid(feat_size, self.window_size)
        self.attn.window_grid, self.attn.shift = windows, self.shift_size
        self.attn.mixer.set_grid(
            self.window_size, window_grid=None if self.attn.shared_keys else windows
        )


class TimmSwin(SwinHost):
    """timm's SwinTransformer.

    The table has one column per head in timm's models, one for all heads in the paper's.
    """

    name = "timm SwinTransformer"

    def serves(self, model: nn.Module) -> bool:
        """Whether it is timm's class and its blocks hold an attention this adapter knows."""
        return isinstance(model, SwinTransformer) and all(
            type(block) in (SwinTransformerBlock, MixerSwinBlock)
            and isinstance(block.attn, (WindowAttention, HostedWindows))
            and not patched(block.attn)
            for stage in model.layers
            for block in stage.blocks
        )

    def places(self, model: nn.Module) -> list[Place]:
        """One place per block; its stage is timm's layer."""
        if not isinstance(model, SwinTransformer):
            raise UserError(f"{type(model).__name__} is not timm's SwinTransformer")
        places = []
        for s, stage in enumerate(model.layers):
            for i, block in enumerate(stage.blocks):
                path, attention = f"layers.{s}.blocks.{i}.attn", block.attn
                window = (block.window_size[0], block.window_size[1])
                if isinstance(attention, HostedWindows):
                    place = attention.place
                else:
                    site = Site(dim=block.dim, num_heads=attention.num_heads, grid=window)
                    defaults = projections_of(attention)
                    place = Place(path=path, stage=s, site=site, defaults=defaults)
                places.append(
                    self.in_windows(place, attention, window, _windows(block), block.shift_size)
                )
        return places

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, its projections initialised as timm initialises attention's."""
        initialise = get_init_weights_vit(getattr(model, "weight_init_mode", ""), needs_reset=False)
        for linear in mixer.projections:
            initialise(linear, place.path)
        block: Any = model.get_submodule(place.path.rpartition(".")[0])
        before = block.attn
        one_table = (
            before.one_table
            if isinstance(before, HostedWindows)
            else before.relative_position_bias_table.shape[1] == 1
        )
        hosted = HostedWindows(
            mixer,
            place,
            table=before.relative_position_bias_table,
            one_table=one_table,
            windows=_windows(block),
            shift=block.shift_size,
            shared_keys=self.shares(before),
        )
        block.attn = hosted.train(before.training)
        block.__class__ = MixerSwinBlock  # the same block, which passes the windows to its mixer
        block.init_non_persistent_buffers()  # its mask is exact from now on

    def reading(self, attention: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reading:
        """Return what attention makes of a call, windows as an axis: ``q [B, nW, h, N, d]``.

        Relative positions and the shift's mask are its bias. It needs to know how many windows an
        image has, from the mask or the block's call.
        """
        call = named_call(attention, args, kwargs)
        x, mask = call["x"], call["mask"]
        call_size: CallSize | None = getattr(attention, _CALL_SIZE, None)
        if mask is not None:
            count = len(mask)
        elif call_size is not None and call_size.size is not None:
            rows, columns = window_grid(call_size.size, attention.window_size)
            count = rows * columns
        else:
            raise UserError(
                "the number of windows per image of Swin's attention is not known; find its layers "
                "by keymix.hosts.layers.find_layers before the model is called"
            )
        if len(x) % count:
            raise UserError(f"{len(x)} windows do not make images of {count} windows each")
        q, k, v = project_heads(attention, x.reshape(-1, count, *x.shape[1:]))
        bias = attention._get_rel_pos_bias()[0]
        if mask is not None:
            bias = bias + mask[:, None]
        return Reading(q=q, k=k, v=v, scale=attention.scale, bias=bias)

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return projections by their role in a mixer; the table of positions stays the host's."""
        return own_weights(attention)

    def follow_calls(self, model: nn.Module) -> None:
        """Record the grid of tokens at every block, from now on."""
        assert isinstance(model, SwinTransformer)
        for stage in model.layers:
            for block in stage.blocks:
                setattr(block.attn, _CALL_SIZE, attach_call_hook(block, CallSize(axis=-3)))

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say how the windows of the model's last call lie."""
        block: Any = model.get_submodule(place.path.rpartition(".")[0])
        grid = size_of_last_call(block) or (block.input_resolution[0], block.input_resolution[1])
        return Layout(
            grid=grid,
            key_grid=grid,
            window=(block.window_size[0], block.window_size[1]),
            windows=window_grid(grid, block.window_size),
            shift=(block.shift_size[0], block.shift_size[1]),
        )


def _windows(block: Any) -> Grid:
    return window_grid(block.input_resolution, block.window_size)


HOSTS = (TimmSwin(),)

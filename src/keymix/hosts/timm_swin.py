# SPDX-License-Identifier: Apache-2.0
"""Adapter to timm's Swin and Swin V2: attention sits at ``layers.<s>.blocks.<i>.attn``."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, WindowAttention
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Block
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from timm.models.vision_transformer import get_init_weights_vit
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.base import Place, patched
from keymix.hosts.call_grid import CALL_SIZE, CallSize, attach_call_hook, size_of_last_call
from keymix.hosts.timm_heads import joined_projections, own_weights
from keymix.hosts.windows import MASKED, Cut, HostedWindows, SwinHost, window_grid
from keymix.mixers.base import Grid, TokenMixer
from keymix.mixers.resize import GridBound, counted


class MixerBlock(nn.Module):
    """A mix-in for timm's blocks with a mixer: it knows its windows, and the mask is exact.

    timm's mask adds -100 to logits across the regions of a shifted window, which leaves e^-100 of
    a weight where logits are alike, and more where they are not. Here it is minus infinity, so
    that nothing crosses whatever the logits. In double precision both give the same output to
    1e-12 as long as logits stay within some 70 of one another.
    """

    attn: HostedWindows
    dynamic_mask: bool
    window_size: Grid
    shift_size: Grid

    def get_attn_mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return timm's mask with minus infinity where timm has -100; None without a shift."""
        block: Any = super()
        mask: Tensor | None = block.get_attn_mask(*args, **kwargs)
        return None if mask is None else mask.masked_fill(mask != 0, -torch.inf)

    def _attn(self, x: Tensor) -> Tensor:
        if self.dynamic_mask:  # images of any size: these are the windows of this one
            cut = _cut(self, (x.shape[1], x.shape[2]))
            self.attn.refuse_other(
                cut.windows,
                any(cut.shift),
                "build with shared_keys=True",
                "one other size is taken for good by keymix.models.set_image_size(model, (height, "
                "width), resize='interpolate')",
            )
            self.attn.window_grid = cut.windows
        block: Any = super()
        out: Tensor = block._attn(x)
        return out

    def refuses_input_size(
        self, feat_size: Grid, window_size: Grid, always_partition: bool | None = None
    ) -> str | None:
        """Say why the mixer cannot take another resolution or window, None if it can."""
        there: Any = copy.copy(self)  # its sizes alone are changed
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
        block: Any = super()
        block.set_input_size(feat_size, window_size, always_partition)
        windows = window_grid(feat_size, self.window_size)
        self.attn.window_grid, self.attn.shift = windows, self.shift_size
        self.attn.mixer.set_grid(
            self.window_size, window_grid=None if self.attn.shared_keys else windows
        )


class MixerSwinBlock(MixerBlock, SwinTransformerBlock):
    """timm's Swin block with a mixer."""

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens ``[B, H, W, C]`` of windows, then transform each, as timm's block."""
        block: Any = self
        x = x + block.drop_path1(self._attn(block.norm1(x)))
        tokens = x.flatten(1, 2)  # timm's way of it cannot take a batch of no images
        out: Tensor = tokens + block.drop_path2(block.mlp(block.norm2(tokens)))
        return out.reshape(x.shape)


class MixerSwinV2Block(MixerBlock, SwinTransformerV2Block):
    """timm's Swin V2 block with a mixer."""


KINDS = {SwinTransformerBlock: MixerSwinBlock, SwinTransformerV2Block: MixerSwinV2Block}


class TimmSwin(SwinHost):
    """timm's SwinTransformer and SwinTransformerV2.

    The table has one column per head in timm's models, one for all heads in the paper's.
    """

    name = "timm SwinTransformer"

    def serves(self, model: nn.Module) -> bool:
        """Whether it is timm's class and its blocks hold an attention this adapter knows."""
        return isinstance(model, SwinTransformer | SwinTransformerV2) and all(
            type(block) in (*KINDS, *KINDS.values())
            and isinstance(block.attn, (WindowAttention, WindowAttentionV2, HostedWindows))
            and not patched(block.attn)
            for stage in model.layers
            for block in stage.blocks
        )

    def cuts(self, model: nn.Module, *, called: bool) -> Iterator[tuple[int, str, Any, Cut]]:
        """Yield what blocks know; a stage is timm's layer."""
        if not isinstance(model, SwinTransformer | SwinTransformerV2):
            raise UserError(f"{type(model).__name__} is not timm's SwinTransformer")
        for s, stage in enumerate(model.layers):
            for i, block in enumerate(stage.blocks):
                cut = _cut(block, size_of_last_call(block) if called else None)
                yield s, f"layers.{s}.blocks.{i}.attn", block.attn, cut

    def initialise(self, model: nn.Module, linear: nn.Linear, path: str) -> None:
        """Draw a projection's weights as timm draws attention's."""
        mode = getattr(model, "weight_init_mode", "")
        get_init_weights_vit(mode, needs_reset=False)(linear, path)

    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put the mixer there, and let the block pass its windows on."""
        super().put(model, place, mixer)
        block: Any = model.get_submodule(place.path.rpartition(".")[0])
        block.__class__ = KINDS.get(type(block), type(block))
        block.init_non_persistent_buffers()  # its mask is exact from now on

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return projections by their role in a mixer; the table of positions stays the host's."""
        return own_weights(attention)

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Join Swin V2's biases as a mixer has them, and let queries and keys have its scale."""
        found = joined_projections(tensors)
        if "logit_scale" in found:
            scale = found.pop("logit_scale")
            found |= {f"post_projection.{role}.norm.logit_scale": scale for role in ("q", "k")}
        return found

    def follow_calls(self, model: nn.Module) -> None:
        """Record the grid of tokens at every block, from now on."""
        for _, path, attention, _ in self.cuts(model, called=False):
            block = model.get_submodule(path.rpartition(".")[0])
            setattr(attention, CALL_SIZE, attach_call_hook(block, CallSize(axis=-3)))


def _cut(block: Any, grid: Grid | None) -> Cut:
    (rows, columns), window, shift = block.input_resolution, block.window_size, block.shift_size
    return Cut(grid or (rows, columns), (window[0], window[1]), (shift[0], shift[1]))


HOSTS = (TimmSwin(),)

# SPDX-License-Identifier: Apache-2.0
"""Adapter to timm's SwinTransformer: attention sits at ``layers.<s>.blocks.<i>.attn``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import get_init_weights_vit
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.base import Host, Place
from keymix.hosts.call_grid import CallSize, call_size, heard_by
from keymix.hosts.plain import patched
from keymix.hosts.reading import Layout, Reading
from keymix.hosts.timm_heads import named_call, own_weights, project_heads, projections_of
from keymix.hosts.windows import MASKED, HostedWindows, MixerSwinBlock, window_grid
from keymix.mixers.base import Grid, Site, TokenMixer

_HEARD = "_grid_heard"  # attribute of an attention: what hears its block


class TimmSwin(Host):
    """timm's SwinTransformer. A mixer sees the tokens of one window; windows are an axis.

    The table of relative positions stays with the host, as it is: one column a head in timm's
    models, one for all heads in the paper's. Where windows are shifted the mixer is handed a mask.

    Args:
        shared_keys: Whether learned keys serve all windows of a block; False for keys a window,
            as published; None for what the model has (keys a window at first).
    """

    name = "timm SwinTransformer"

    def __init__(self, *, shared_keys: bool | None = None) -> None:
        self.shared_keys = shared_keys

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
        """One place a block; its stage is timm's layer."""
        if not isinstance(model, SwinTransformer):
            raise UserError(f"{type(model).__name__} is not timm's SwinTransformer")
        return [
            Place(
                path=f"layers.{s}.blocks.{i}.attn",
                stage=s,
                site=self._site(block),
                defaults=self._defaults(block.attn),
                needs_mask=MASKED if any(block.shift_size) else None,
            )
            for s, stage in enumerate(model.layers)
            for i, block in enumerate(stage.blocks)
        ]

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
            shared_keys=self._shares(before),
        )
        block.attn = hosted.train(before.training)
        block.__class__ = MixerSwinBlock  # the same block, which now tells its mixer the windows
        block.init_non_persistent_buffers()  # its mask is exact from now on

    def reading(self, attention: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Reading:
        """Return what attention makes of a call, windows as an axis: ``q [B, nW, h, N, d]``.

        Relative positions and the shift's mask are its bias.

        Raises:
            UserError: If nothing tells how many windows an image has.
        """
        call = named_call(attention, args, kwargs)
        x, mask = call["x"], call["mask"]
        heard: CallSize | None = getattr(attention, _HEARD, None)
        if mask is not None:
            count = len(mask)
        elif heard is not None and heard.size is not None:
            rows, columns = window_grid(heard.size, attention.window_size)
            count = rows * columns
        else:
            raise UserError(
                "nothing tells how many windows of Swin's attention make an image; find its layers "
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

    def listen(self, model: nn.Module) -> None:
        """Hear the grid of tokens at every block, from now on."""
        assert isinstance(model, SwinTransformer)
        for stage in model.layers:
            for block in stage.blocks:
                setattr(block.attn, _HEARD, call_size(block, axis=-3))

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say how the windows of the model's last call lie."""
        block: Any = model.get_submodule(place.path.rpartition(".")[0])
        heard = heard_by(block, CallSize)
        grid = heard.size if heard is not None else None
        grid = grid or (block.input_resolution[0], block.input_resolution[1])
        return Layout(
            grid=grid,
            key_grid=grid,
            window=(block.window_size[0], block.window_size[1]),
            windows=window_grid(grid, block.window_size),
            shift=(block.shift_size[0], block.shift_size[1]),
        )

    def _shares(self, attention: Any) -> bool:
        if self.shared_keys is not None:
            return self.shared_keys
        return isinstance(attention, HostedWindows) and attention.shared_keys

    def _site(self, block: Any) -> Site:
        windows = None if self._shares(block.attn) else _windows(block)
        number = 1 if windows is None else windows[0] * windows[1]
        grid = (block.window_size[0], block.window_size[1])
        if isinstance(block.attn, HostedWindows):
            site = block.attn.place.site
            return replace(site, grid=grid, windows=number, window_grid=windows)
        return Site(
            dim=block.dim,
            num_heads=block.attn.num_heads,
            grid=grid,
            windows=number,
            window_grid=windows,
        )

    @staticmethod
    def _defaults(attention: Any) -> Mapping[str, Any]:
        if isinstance(attention, HostedWindows):
            return attention.place.defaults
        return projections_of(attention)


def _windows(block: Any) -> Grid:
    return window_grid(block.input_resolution, block.window_size)


HOST = TimmSwin()

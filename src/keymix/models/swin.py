# SPDX-License-Identifier: Apache-2.0
"""Swin Transformers on timm's class, with a mixer in every block.

The paper's rows (SKA Tables 1, 8 and 9): widths 96, 192, 384, 768, depths 2, 2, 6, 2, heads of 32,
windows of 4x4, patch 2 on 32x32 images, so grids of 16, 8, 4 and 4 tokens per side; merging is a
linear map of 2x2, 2x2 and 1x1 tokens; no norm in the stem, no qkv bias, one table of relative
positions a block for all heads; every second block is shifted by 2, also where one window covers
the image. Learned keys are a window's own. Table 9's own column (three stages, patch 4) does not
give the published counts; this network does.
Differs: the code behind the rows averages the tokens before the last norm, ours and Swin's own
after it; docs/papers.md has the two lines that do as theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from timm.models._input import update_model_input_size
from timm.models.swin_transformer import (
    SwinTransformer,
    calc_stage_window_sizes,
    checkpoint_filter_fn,
    resolve_window_args,
)
from timm.models.vision_transformer import get_init_weights_vit
from torch import nn

from keymix.hosts.base import MixerNames, MixerOptions, put_mixers
from keymix.hosts.timm_swin import TimmSwin
from keymix.layers.patches import PatchMerge
from keymix.mixers.base import Grid
from keymix.models.family import (
    MixerModel,
    check_patches,
    grid_of,
    refuse_unfit,
    register_variants,
)


class MixerSwinTransformer(MixerModel, SwinTransformer):
    """timm's SwinTransformer as the paper has it, a mixer at ``layers.<s>.blocks.<i>.attn.mixer``.

    The backbone's weights are drawn before the mixers', so at one seed they are equal whatever
    the mixer.

    Args:
        mixer: One name, one per stage, or one per block.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.
        merging: Side of the tokens that become one before each stage but the first.
        shared_keys: Learn one set of keys per block for all its windows, not one per window.
        shifted: Shift the windows of every second block; mixers that cannot honour a mask need
            False.
        timm: Arguments of timm's SwinTransformer.

    Raises:
        UserError: If a mixer cannot sit in a block.
    """

    patch_embed: Any  # timm's, as these
    layers: Any
    feature_info: list[dict[str, Any]]
    _ref_window_sizes: tuple[Grid, ...]
    _ref_grid_size: Grid

    def __init__(
        self,
        *,
        mixer: MixerNames = "softmax",
        mixer_options: MixerOptions = None,
        merging: Sequence[int] = (2, 2, 1),
        shared_keys: bool = False,
        shifted: bool = True,
        **timm: Any,
    ) -> None:
        super().__init__(**timm)
        check_patches(self)
        self.patch_embed.norm = nn.Identity()
        self._merge_as(merging)
        grids = self._grids(tuple(self.patch_embed.grid_size))
        for stage, window, (before, after) in zip(
            self.layers, self._ref_window_sizes, grids, strict=True
        ):
            stage.input_resolution, stage.output_resolution = before, after
            for block in stage.blocks:
                if not shifted:
                    block.target_shift_size = (0, 0)
                block.set_input_size(feat_size=after, window_size=window)
                attention = block.attn  # one column of its table, as timm drew it, for all heads
                table = attention.relative_position_bias_table.detach()[:, :1].clone()
                attention.relative_position_bias_table = nn.Parameter(table)
        put_mixers(self, mixer, mixer_options, host=TimmSwin(shared_keys=shared_keys))

    def _merge_as(self, merging: Sequence[int]) -> None:
        """Replace timm's patch merging."""
        initialise = get_init_weights_vit(self.weight_init_mode, needs_reset=False)
        reduction = self.feature_info[0]["reduction"]
        for stage, info, factor in zip(
            self.layers[1:], self.feature_info[1:], merging, strict=True
        ):
            old = stage.downsample.reduction.weight
            merge = PatchMerge(
                stage.downsample.dim, old.shape[0], factor, device=old.device, dtype=old.dtype
            )
            initialise(merge.reduction, "")
            stage.downsample = merge
            reduction *= factor
            info["reduction"] = reduction

    def _grids(self, grid: Grid) -> list[tuple[Grid, Grid]]:
        """Return the grids that each stage takes and has, from the grid of patches."""
        found = []
        for stage in self.layers:
            factor = getattr(stage.downsample, "factor", 1)
            after = (math.ceil(grid[0] / factor), math.ceil(grid[1] / factor))
            found.append((grid, after))
            grid = after
        return found

    def set_input_size(
        self,
        img_size: Any = None,
        patch_size: Any = None,
        window_size: Any = None,
        window_ratio: Any = None,
        always_partition: bool | None = None,
    ) -> None:
        """Take another image size, as timm's: windows grow with the grid unless they are given.

        Args:
            img_size: Side, or height and width, in pixels; as it is if None.
            patch_size: Side of a patch in pixels; as it is if None.
            window_size: Side, or height and width, of the windows in tokens, or one per stage.
            window_ratio: What the grid of patches is divided by to give the windows' sides.
            always_partition: Whether a window may be larger than the grid, and is shifted even
                where one window covers it; as it is if None.

        Raises:
            UserError: If patches do not fill the image, or a mixer cannot take the new windows;
                nothing has changed then.
        """
        grid = grid_of(self.patch_embed, img_size, patch_size)
        given, ratio = resolve_window_args(window_size, window_ratio, len(self.layers))
        windows = calc_stage_window_sizes(
            grid,
            self._ref_window_sizes,
            self._ref_grid_size,
            window_size=given,
            window_ratio=ratio,
        )
        grids = self._grids(grid)
        changes = [
            (f"layers.{s}.blocks.{i}.attn.mixer", block, (after, window, always_partition))
            for s, (stage, window, (_, after)) in enumerate(
                zip(self.layers, windows, grids, strict=True)
            )
            for i, block in enumerate(stage.blocks)
        ]
        refuse_unfit({path: block.refuses_input_size(*to) for path, block, to in changes})
        factor = max(self.patch_embed.patch_size)
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        for info in self.feature_info:
            info["reduction"] = info["reduction"] // factor * max(self.patch_embed.patch_size)
        if given is not None or ratio is not None:
            self._ref_window_sizes, self._ref_grid_size = windows, grid
        for stage, (before, after) in zip(self.layers, grids, strict=True):
            stage.input_resolution, stage.output_resolution = before, after
        for _, block, to in changes:
            block.set_input_size(*to)
        update_model_input_size(
            self,
            self.patch_embed.img_size,
            patch_size=patch_size,
            window_size=windows,
            always_partition=always_partition,
        )


_TINY = {
    "img_size": 32,
    "patch_size": 2,
    "embed_dim": 96,
    "depths": (2, 2, 6, 2),
    "num_heads": (3, 6, 12, 24),
    "window_size": 4,
    "always_partition": True,
    "qkv_bias": False,
    "drop_path_rate": 0.0,
    "merging": (2, 2, 1),
}
_WIDE = {"head_dim": 42}  # SKA's parameter-matched row; heads 3, 6, 16, 32 of 32 fit it as well

VARIANTS: dict[str, dict[str, Any]] = {
    "swin_tiny_p2_32": _TINY,
    "ska_swin_tiny_p2_32": {**_TINY, "mixer": "static_key"},
    "cska_swin_tiny_p2_32": {**_TINY, "mixer": "conv_static_key"},
    "ska_swin_tiny_p2_32_wide": {**_TINY, "mixer": "static_key", "mixer_options": _WIDE},
    # not a paper's: small enough to compare on two cores
    "swin_micro_p2_32": {
        **_TINY,
        "embed_dim": 32,
        "depths": (2, 2, 2),
        "num_heads": (1, 2, 4),
        "merging": (2, 2),
    },
}


register_variants(
    __name__,
    MixerSwinTransformer,
    VARIANTS,
    cfg={"first_conv": "patch_embed.proj", "classifier": "head.fc", "reduction": 8},
    out_indices=None,  # all stages
    filter_fn=checkpoint_filter_fn,
)

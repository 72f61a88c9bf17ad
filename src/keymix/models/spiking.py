# SPDX-License-Identifier: Apache-2.0
"""What QKFormer and Spikformer share: time steps at the door, stages, rates read out by a mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import to_2tuple, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from keymix.errors import UserError, unknown
from keymix.hosts.base import MixerNames, MixerOptions, put_mixers
from keymix.hosts.stages import spiking_grids
from keymix.layers.spiking_stage import SpikingStage
from keymix.mixers.base import Grid
from keymix.models.arguments import check_value
from keymix.models.family import StageModel, Wanted, linear_head

POOLS = ("avg", "")

Images = Float[Tensor, "B c H W"] | Float[Tensor, "B T c H W"]


def with_steps(x: Tensor, steps: int | None, in_chans: int) -> Float[Tensor, "S B c H W"]:
    """Turn what a model is handed so that time comes first, and channels lie last in memory.

    An image ``[B, c, H, W]`` is one step that stands for all; frames ``[B, T, c, H, W]`` have the
    model's steps T and channels.
    """
    shape = list(x.shape)
    if x.ndim not in (4, 5):
        raise UserError(
            f"input of shape {shape}: the model takes images [B, C, H, W] or frames [B, T, C, H, W]"
        )
    if x.ndim == 5 and shape[1] != steps:
        swapped = "; it looks like [T, B, C, H, W], frames come as [B, T, C, H, W]"
        raise UserError(
            f"frames of shape {shape} have {shape[1]} time steps on axis 1, the model has "
            f"time_steps={steps}" + (swapped if shape[0] == steps else ", see set_time_steps")
        )
    if shape[-3] != in_chans:
        raise UserError(
            f"input of shape {shape} has {shape[-3]} channels on axis {x.ndim - 3}, the model "
            f"takes {in_chans}"
        )
    time_first = x.unsqueeze(0) if x.ndim == 4 else x.transpose(0, 1)
    images = time_first.flatten(0, 1).contiguous(memory_format=torch.channels_last)
    return images.view(time_first.shape)


class SpikingTransformer(StageModel):
    """Stages of spiking blocks, rates averaged over steps and places, and a linear classifier.

    Neurons start from rest in every call, so that no call depends on the one before. The backbone's
    weights are drawn before the mixers'.

    Args:
        stages: In order.
        taps: Stage and block behind which :meth:`forward_intermediates` takes features.
        img_size: Side, or height and width, of the images, pixels.
        in_chans: Channels of the images.
        num_classes: Outputs of the classifier; 0 for none.
        global_pool: ``"avg"``, or ``""`` for the features themselves, without a classifier.
        drop_rate: Probability of dropping a value before the classifier.
        time_steps: Steps T that a call takes.
        mixer: One name, or one per stage, or one per block.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.
    """

    def __init__(
        self,
        stages: Sequence[SpikingStage],
        taps: Sequence[tuple[int, int]],
        *,
        img_size: int | Grid,
        in_chans: int,
        num_classes: int,
        global_pool: str,
        drop_rate: float,
        time_steps: int,
        mixer: MixerNames,
        mixer_options: MixerOptions,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        self.check_pool(global_pool, num_classes)
        height, width = to_2tuple(img_size)
        self.img_size: Grid = (height, width)
        self.in_chans, self.num_classes, self.global_pool = in_chans, num_classes, global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = stages[-1].dim
        self.num_prefix_tokens = 0
        self.time_steps = 1
        self.set_time_steps(time_steps)
        self.grad_checkpointing = False
        self.taps = list(taps)
        self.stages = nn.ModuleList(stages)
        whole = [s for s, _ in taps] == list(range(len(stages)))
        self.feature_info = []
        for s, i in taps:
            reduction = 1
            for stage in stages[: s + 1]:
                reduction *= stage.reduction
            path = f"stages.{s}" if whole else f"stages.{s}.blocks.{i}"
            info = {"num_chs": stages[s].dim, "reduction": reduction, "module": path}
            self.feature_info.append(info)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = linear_head(self.num_features, num_classes, device=device, dtype=dtype)
        self.start(self.head)
        put_mixers(self, mixer, mixer_options)

    def set_time_steps(self, time_steps: int) -> None:
        """Take T time steps from the next call on; no weight depends on them.

        Args:
            time_steps: 1 or more.
        """
        check_value("time_steps", time_steps, int)
        self.time_steps = time_steps

    def grids(self, image: Grid) -> list[Grid]:
        """Grid of the tokens in every stage, for images of this height and width in pixels."""
        return spiking_grids(self, image)

    def check_pool(self, global_pool: str, num_classes: int) -> None:
        """Refuse an unknown read-out, and a classifier of features at every place."""
        if global_pool not in POOLS:
            raise unknown("global_pool", global_pool, POOLS)
        if not global_pool and num_classes > 0:
            raise UserError("global_pool='' leaves places as they are, for num_classes=0 alone")

    def start(self, module: nn.Module) -> None:
        """Start the classifier as Spikformer does: from N(0, 0.02), cut at 2, the bias at 0."""
        if isinstance(module, nn.Linear):
            trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def intermediates(self, x: Images, wanted: Wanted) -> Any:
        """Return features of blocks, means over the steps, and the final ones; none has a norm."""
        take, last = feature_take_indices(len(self.taps), wanted.indices)
        taken = [self.taps[i] for i in take]
        found: list[Tensor] = []
        x = with_steps(x, self.time_steps, self.in_chans)
        for s, stage in enumerate(self.stages):
            if wanted.stop_early and s > self.taps[last][0]:
                break
            x = stage.embed(x, self.time_steps)
            for i, block in enumerate(stage.blocks):
                if wanted.stop_early and (s, i) > self.taps[last]:
                    break
                x = stage.mix(x, block)
                if (s, i) in taken:
                    found.append(x.mean(0))
        return found if wanted.alone else (x.mean(0), found)

    @property
    def num_maps(self) -> int:
        """Blocks behind which features are taken."""
        return len(self.taps)

    def keep_maps(self, count: int) -> None:
        """Drop the blocks and stages after the first ``count`` maps."""
        stage, block = self.taps[count - 1]
        self.stages = self.stages[: stage + 1]
        self.stages[stage].blocks = self.stages[stage].blocks[: block + 1]

    def forward_features(self, x: Images) -> Float[Tensor, "B C h w"]:
        """Return the last stage's features, their mean over the steps."""
        x = with_steps(x, self.time_steps, self.in_chans)
        for stage in self.stages:
            x = stage(x, self.time_steps)
        return x.mean(0)

    def forward_head(self, x: Float[Tensor, "B C h w"], pre_logits: bool = False) -> Tensor:
        """Read the features out and classify.

        Args:
            x: What :meth:`forward_features` returned.
            pre_logits: Stop before the classifier.
        """
        if self.global_pool == "avg":
            x = x.mean((2, 3))
        x = self.head_drop(x)
        out: Tensor = x if pre_logits else self.head(x)
        return out

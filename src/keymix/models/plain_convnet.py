# SPDX-License-Identifier: Apache-2.0
"""A plain residual convolutional network on timm's class, to compare models with attention with.

Paper: Deep Residual Learning, https://arxiv.org/abs/1512.03385, Sec. 3.3 and 4.2: blocks of two 3x3
convolutions, y = ReLU(x + BN(conv(ReLU(BN(conv(x)))))), in stages that halve the image and double
the channels, after a 3x3 convolution for small images. Differs: four stages, where the paper has
three for images of 32 pixels; a shortcut that changes its shape is a 1x1 convolution with
BatchNorm (the paper's option B); the last BatchNorm of every block starts at 0, as timm's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from timm.layers import to_2tuple
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from timm.models.resnet import BasicBlock, ResNet
from torch import Tensor, nn

from keymix.arguments import whole_size
from keymix.errors import UserError
from keymix.layers.checkpoint import checkpointed
from keymix.layers.folding import Foldable, fold_norm
from keymix.mixers.base import Grid
from keymix.models.arguments import check_value
from keymix.models.family import FeatureModel, Wanted, register_variants
from keymix.models.spiking import Images, with_steps

STRIDES: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 4: (2, 2)}
"""Strides of the stem's convolutions, by the reduction of the whole stem."""
STAGES = 4


def stem_reduction(img_size: int | Grid) -> int:
    """Say by how much the stem reduces an image: 1 up to 40 pixels a side, 2 up to 80, else 4."""
    longer = max(to_2tuple(img_size))
    return 1 if longer <= 40 else 2 if longer <= 80 else 4


class PlainConvNet(Foldable, FeatureModel, ResNet):
    """timm's ResNet of basic blocks behind 3x3 convolutions; it hosts no mixer.

    A stem of one 3x3 convolution (two where it reduces by 4), four stages of ``depth`` blocks with
    w, 2w, 4w and 8w channels, of which each but the first halves the image (rounded up), the mean
    over all places, and a linear classifier. Frames of events go through it one by one; features
    and logits are means over them. It has no neurons and no state.

    Args:
        img_size: Side, or height and width, of the images, pixels. Only the stem's reduction
            depends on it.
        in_chans: Channels of the images.
        num_classes: Outputs of the classifier; 0 for none.
        width: Channels w of the stem and the first stage, an even number of 4 or more.
        depth: Blocks of every stage.
        stem_stride: Reduction of the stem, 1, 2 or 4; None for 1 up to 40 pixels a side, 2 up to
            80, and 4 above.
        global_pool: timm's name of the pooling before the classifier.
        drop_rate: Probability of dropping a value before the classifier.
        drop_path_rate: Probability of dropping the residual branch of the last block; rises from 0.
        time_steps: Frames T of a recording; None for images alone.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: images ``[B, in_chans, H, W]``, or frames ``[B, T, in_chans, H, W]``, ->
    ``[B, num_classes]``. An image is the same at all T steps.
    Cost: (72 depth - 12) w^2 / s^2 multiply-adds per pixel and frame, where s is the stem's stride,
    and in the stem 9 in_chans w / s^2 (9 in_chans w / 4 + 9 w^2 / 16 if s = 4).

    Raises:
        UserError: If a value is out of its range, or frames are not as many as ``time_steps``.
    """

    in_chans: int  # these but the last are timm's
    grad_checkpointing: bool
    bn1: nn.Module
    act1: nn.Module
    feature_info: list[dict[str, Any]]
    time_steps: int | None

    def __init__(
        self,
        *,
        img_size: int | Grid = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        width: int = 16,
        depth: int = 1,
        stem_stride: int | None = None,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        time_steps: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if width < 4 or width % 2:
            raise UserError(f"{width=} must be an even number of 4 or more")
        if stem_stride is not None and stem_stride not in STRIDES:
            raise UserError(f"{stem_stride=} must be 1, 2 or 4, or None to follow the image size")
        reduction = stem_reduction(img_size) if stem_stride is None else stem_stride
        super().__init__(
            BasicBlock,
            (depth,) * STAGES,
            num_classes=num_classes,
            in_chans=in_chans,
            global_pool=global_pool,
            stem_type="deep",
            stem_width=width // 2,  # timm's stem has twice as many channels at its end
            channels=tuple(width << stage for stage in range(STAGES)),
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            device=device,
            dtype=dtype,
        )
        self.conv1 = _stem(in_chans, width, STRIDES[reduction], device=device, dtype=dtype)
        self.maxpool = nn.Identity()
        for block in self.modules():
            if isinstance(block, BasicBlock) and block.downsample is not None:
                block.downsample = _subsampled(block.downsample)
        ResNet.init_weights(self)
        for stage, info in enumerate(self.feature_info):
            info["reduction"] = reduction << max(0, stage - 1)
        height, width = to_2tuple(img_size)
        self.img_size: Grid = (height, width)
        self.time_steps = None
        if time_steps is not None:
            self.set_time_steps(time_steps)

    def set_time_steps(self, time_steps: int) -> None:
        """Take recordings of T frames from the next call on; no weight depends on T.

        Args:
            time_steps: 1 or more.
        """
        check_value("time_steps", time_steps, int)
        self.time_steps = time_steps

    def set_input_size(self, img_size: int | Grid | None = None) -> None:
        """Change the image size; the stem keeps its stride.

        Args:
            img_size: Side, or height and width, pixels; as it is if None.
        """
        if img_size is not None:
            self.img_size = whole_size("img_size", img_size)
            update_model_input_size(self, self.img_size)

    def fold(self) -> None:
        """Fold the stem's last norm into its last convolution; timm's blocks are known by class."""
        fold_norm(self, "conv1", "bn1")

    def forward_features(self, x: Images) -> Tensor:
        """Return the last stage's features ``[B, 8w, h, w]``, their mean over the frames."""
        frames = self._frames(x)
        return _mean(self._maps(frames, STAGES)[-1], frames)

    def intermediates(self, x: Images, wanted: Wanted) -> Any:
        """Return maps of the stem and the stages, means over the frames, and the final features."""
        taken, last = feature_take_indices(1 + STAGES, wanted.indices)
        frames = self._frames(x)
        maps = self._maps(frames, last if wanted.stop_early else STAGES)
        found = [_mean(maps[i], frames) for i in taken]
        return found if wanted.alone else (_mean(maps[-1], frames), found)

    def _maps(self, frames: Tensor, stages: int) -> list[Tensor]:
        """Return the maps ``[T * B, …]`` of the stem and of the first stages."""
        out = self.act1(self.bn1(self.conv1(frames.flatten(0, 1))))
        maps = [out]
        for stage in range(stages):
            for block in getattr(self, f"layer{stage + 1}"):
                out = checkpointed(block, out, when=self.grad_checkpointing)
            maps.append(out)
        return maps

    def _frames(self, x: Images) -> Tensor:
        """Turn the input to ``[T, B, c, H, W]``; an image is repeated for the model's steps."""
        frames = with_steps(x, self.time_steps, self.in_chans)
        return frames.expand(self.time_steps or 1, -1, -1, -1, -1)


def _stem(in_chans: int, width: int, strides: tuple[int, ...], **factory: Any) -> nn.Sequential:
    """Make 3x3 convolutions of these strides, BatchNorm and ReLU between them."""
    layers: list[nn.Module] = []
    for stride in strides:
        if layers:
            layers += [nn.BatchNorm2d(width, **factory), nn.ReLU(inplace=True)]
        taken = width if layers else in_chans
        layers.append(nn.Conv2d(taken, width, 3, stride=stride, padding=1, bias=False, **factory))
    return nn.Sequential(*layers)


def _subsampled(downsample: nn.Sequential) -> nn.Sequential:
    """Take every stride-th pixel before a 1x1 convolution of few channels, not in it.

    On AVX2, PyTorch's gradient of a strided one of fewer than 8 channels corrupts memory.
    """
    conv = downsample[0]
    assert isinstance(conv, nn.Conv2d)  # as timm's ResNet builds it
    if conv.in_channels >= 8:
        return downsample
    pool = nn.AvgPool2d(1, stride=conv.stride[0])
    conv.stride = (1, 1)
    return nn.Sequential(OrderedDict([("pool", pool), *downsample.named_children()]))


def _mean(maps: Tensor, frames: Tensor) -> Tensor:
    """Average maps ``[T * B, …]`` over the frames ``[T, B, …]`` that they were made of."""
    return maps.view(*frames.shape[:2], *maps.shape[1:]).mean(0)


VARIANTS: dict[str, dict[str, Any]] = {"plain_convnet": {"img_size": 32}}


register_variants(
    __name__,
    PlainConvNet,
    VARIANTS,
    cfg={"first_conv": "conv1.0", "classifier": "fc", "reduction": 8},
)

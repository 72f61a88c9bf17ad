# SPDX-License-Identifier: Apache-2.0
"""Mask R-CNN and Cascade Mask R-CNN on any timm backbone: boxes and masks of instances.

Papers: Mask R-CNN, https://arxiv.org/abs/1703.06870; Cascade R-CNN,
https://arxiv.org/abs/1906.09756; with CAFormer and CSKAFormer as backbones, Static Key Attention in
Vision, https://arxiv.org/abs/2412.07049, Sec. 5.2 and Table 3. Where that paper is silent: static
keys stay on the grid of the training at 224x224 and values are averaged onto it, without which the
cost would not be linear in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import freeze_batch_norm_2d, to_2tuple
from timm.models._features import FeatureGetterNet
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from keymix.arguments import whole_size
from keymix.decoders.detection.cascade import CascadeDecoder
from keymix.decoders.detection.mask_rcnn import (
    InstanceDecoder,
    Instances,
    Losses,
    MaskRCNNDecoder,
    Sizes,
    has_numbers,
)
from keymix.decoders.detection.pyramid import LEVELS, FeaturePyramid, Maps, SimplePyramid
from keymix.errors import UserError
from keymix.hosts.base import MixerNames, MixerOptions, find_mixers
from keymix.mixers.base import Grid
from keymix.mixers.resize import GridBound
from keymix.models.arguments import arguments_of, check_value
from keymix.models.backbone import (
    OnBackbone,
    checked_options,
    draw_first_bias,
    in_a_row,
    shapes_of,
    with_maps,
)
from keymix.models.family import Row, refuse_whole_numbers, register_variants
from keymix.models.image_size import without_memory

CLASSES = 80  # COCO's
IMAGE = (800, 1333)  # pixels, the papers' most
MULTIPLE = 32  # padded batches are whole multiples of it, pixels
_TRIED = (96, 160)  # pixels, of images that a backbone is tried on
_ANY_SIZE: Mapping[str, bool] = {"dynamic_img_size": True, "strict_img_size": False}
"""What timm's families with an image size take so that any goes in."""


class Detector(OnBackbone):
    """A backbone with token mixers, a feature pyramid, and heads for instances.

    Images are a list, each of its own size, or a batch; they are normalised already. They are
    padded with zeros at the bottom and the right to one size in whole multiples of 32. In training
    the model takes the instances of each image too and returns its losses by name, in evaluation
    it returns the instances that it found; boxes are in pixels of the image as given. Without
    numbers (on the ``meta`` device, and while costs are counted) it runs at its most: with all
    proposals and detections.

    Mixers sit where the backbone has attention, if its family has an adapter, at
    ``encoder.model.…``. What they learn per position stays on the grid of ``backbone_size``, and
    values are averaged onto it (``resize="pool_values"``), unless their options say otherwise;
    what each window learns is resampled. The heads' weights are equal at one seed whatever the
    mixer.

    Args:
        backbone: Name of the backbone, timm's or keymix's.
        backbone_options: Its further arguments; ``pretrained=True`` for the model is
            ``{"pretrained": True}`` here.
        backbone_size: Side, or height and width, of the images that it is built for, pixels: that
            of its training, by which static keys and position embeddings lie.
        img_size: Side, or height and width, of the images, pixels; nothing learned depends on it.
        in_chans: Channels of the images.
        num_classes: Classes, without a background.
        masks: Whether it finds masks too; without a mask head it finds boxes alone.
        out_channels: Channels of every level of the pyramid.
        map_norm: Normalise the backbone's maps by a LayerNorm each before the pyramid, as in the
            detectors of Swin and MetaFormer; None to do so unless the backbone has BatchNorms.
        freeze_norm: Keep the BatchNorms of the backbone as they are loaded, scales and shifts too.
        proposals: Most proposals of an image in evaluation; twice as many in training.
        samples: Proposals of an image that train the heads, a quarter on instances at most.
        score_threshold: Least score of a detection, probability.
        nms_threshold: IoU from which on the lower of two detections of a class is dropped.
        detections: Most detections of an image.
        drop_path_rate: Stochastic depth of the backbone, probability; above 0 for those that have
            it.
        mixer: One name, put where the backbone attends, or one per stage, or one per block; None
            for the backbone's own attention.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.

    Raises:
        UserError: If there is no such backbone, it gives no maps that make a pyramid, it or a
            mixer takes one image size alone, or a mixer cannot sit in it.
    """

    task: ClassVar[str] = "detection"
    preprocessing: ClassVar[Mapping[str, str]] = {"interpolation": "bilinear"}
    decoding: ClassVar[type[InstanceDecoder]]
    decoder: Any

    def __init__(
        self,
        *,
        backbone: str = "resnet50",
        backbone_options: Mapping[str, Any] | None = None,
        backbone_size: int | Grid = 224,
        img_size: int | Grid = IMAGE,
        in_chans: int = 3,
        num_classes: int = CLASSES,
        masks: bool = True,
        out_channels: int = 256,
        map_norm: bool | None = None,
        freeze_norm: bool = True,
        proposals: int = 1000,
        samples: int = 512,
        score_threshold: float = 0.05,
        nms_threshold: float = 0.5,
        detections: int = 100,
        drop_path_rate: float = 0.0,
        mixer: MixerNames | None = None,
        mixer_options: MixerOptions = None,
    ) -> None:
        super().__init__()
        for name, value in {"score": score_threshold, "nms": nms_threshold}.items():
            if not 0 <= value <= 1:
                raise UserError(f"{name}_threshold={value!r} must be 0 to 1")
        options = checked_options(backbone, backbone_options, drop_path_rate, in_chans)
        options["img_size"] = whole_size("backbone_size", backbone_size)
        height, width = to_2tuple(img_size)
        self.img_size: Grid = (height, width)
        self.in_chans, self.num_features = in_chans, out_channels
        self.encoder, reductions = _encoder(backbone, options)
        draw_first_bias(self.encoder, in_chans)
        batch_norms = any(isinstance(m, nn.BatchNorm2d) for m in self.encoder.modules())
        if freeze_norm and batch_norms:
            self.encoder.model = freeze_batch_norm_2d(self.encoder.model)
        chans = self.encoder.feature_info.channels()
        if len(reductions) > 1:
            norm = not batch_norms if map_norm is None else map_norm
            pyramid: Any = FeaturePyramid(chans, reductions, out_channels, norm=norm)
        else:
            if map_norm is not None:
                raise UserError(
                    f"map_norm={map_norm} is of several maps, and {backbone!r} gives one; leave it "
                    "out"
                )
            pyramid = SimplePyramid(chans[0], reductions[0], out_channels)
        self.num_classes = _classes(num_classes)
        self.decoder = self.decoding(
            pyramid,
            out_channels,
            num_classes,
            masks=masks,
            proposals=proposals,
            samples=samples,
            score_threshold=score_threshold,
            nms_threshold=nms_threshold,
            detections=detections,
        )
        self.take_mixers(backbone, mixer, mixer_options)
        for each in find_mixers(self.body).values():
            if isinstance(each, GridBound) and each.resize is None:
                each.take_policy("interpolate" if each.own_windows else "pool_values")
        _try_other_size(self.encoder, backbone, in_chans)

    def __call__(self, images: Any, *more: Any) -> Any:
        """Run the model, hooks and all; refuse whole numbers, such as pixels of 8 bits."""
        for image in images:
            refuse_whole_numbers(image)
        return nn.Module.__call__(self, images, *more)

    def forward(
        self,
        images: Sequence[Tensor] | Tensor,
        targets: Sequence[Instances] | None = None,
    ) -> list[Instances] | Losses:
        """Return the losses by name in training, else the instances of each image.

        Args:
            images: ``[C, h, w]`` each, of any sizes.
            targets: In training, of each image: ``boxes`` [n, 4] (x1, y1, x2, y2), ``labels`` [n]
                from 1 to ``num_classes``, ``masks`` [n, h, w] if it has a mask head; n may be 0.

        Returns:
            In training ``loss_objectness``, ``loss_rpn_box_reg``, and ``loss_classifier``,
            ``loss_box_reg``, ``loss_mask`` (``…_1`` to ``…_3`` of a cascade). In evaluation of each
            image ``boxes`` [n, 4], ``labels`` [n], ``scores`` [n] in descending order, ``masks``
            [n, 28, 28], probabilities within the box, and ``size`` [2], its height and width;
            without a mask head no ``loss_mask`` and no ``masks``.
        """
        if torch.compiler.is_exporting():
            raise UserError("a detector cannot be exported: what it runs depends on what it finds")
        batch, sizes = padded(images)
        found: list[Instances] | Losses = self.forward_head(
            self.forward_features(batch), batch, sizes, targets
        )
        if isinstance(found, dict):
            return found
        return [
            {**each, "size": torch.tensor(size, device=batch.device)}
            for each, size in zip(found, sizes, strict=True)
        ]

    def read(self, maps: list[Tensor]) -> Maps:
        """Return the levels of the pyramid."""
        found: Maps = self.decoder.levels(maps)
        return found

    def forward_head(
        self,
        x: Maps,
        batch: Tensor,
        sizes: Sizes,
        targets: Sequence[Instances] | None = None,
    ) -> list[Instances] | Losses:
        """Decode; see `forward`.

        Args:
            x: What :meth:`forward_features` returned.
            batch: The padded batch.
            sizes: Height and width of each image, pixels.
            targets: The instances of each image, in training.
        """
        if self.training and has_numbers(batch):
            _check_targets(targets, len(batch), masks=self.decoder.stages[0].has_mask())
        found: list[Instances] | Losses = self.decoder(x, batch, sizes, targets)
        return found

    def get_classifier(self) -> tuple[nn.Module, ...]:
        """The layers whose outputs are classes."""
        return tuple(getattr(owner, name) for owner, name in self._last_layers())

    def _last_layers(self) -> list[tuple[nn.Module, str]]:
        return [layer for stage in self.decoder.stages for layer in stage.last_layers()]

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the layers whose outputs are classes.

        Args:
            num_classes: Classes, without a background.
        """
        before = self.num_classes + 1
        self.num_classes = _classes(num_classes)
        for owner, name in self._last_layers():
            old: Any = getattr(owner, name)
            like = {"device": old.weight.device, "dtype": old.weight.dtype}
            if isinstance(old, nn.Conv2d):
                new: Any = nn.Conv2d(old.in_channels, num_classes + 1, 1, **like)
                nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
            else:
                each = old.out_features // before
                new = nn.Linear(old.in_features, each * (num_classes + 1), **like)
            setattr(owner, name, new.train(self.training))

    def set_input_size(self, img_size: int | Grid | None = None) -> None:
        """Change the image size that the model names as its own; any goes in.

        Args:
            img_size: Side, or height and width, pixels; as it is if None.
        """
        if img_size is not None:
            self.img_size = whole_size("img_size", img_size)
            update_model_input_size(self, self.img_size)


class MaskRCNN(Detector):
    """Mask R-CNN; its arguments are those of `Detector`."""

    decoding = MaskRCNNDecoder


class CascadeMaskRCNN(Detector):
    """Cascade Mask R-CNN; its arguments are those of `Detector`."""

    decoding = CascadeDecoder


def padded(images: Sequence[Tensor] | Tensor) -> tuple[Tensor, Sizes]:
    """Batch images with zeros at the bottom and the right, in whole multiples of 32 pixels.

    Their own heights and widths are returned too.
    """
    sizes = [(int(each.shape[-2]), int(each.shape[-1])) for each in images]
    if not sizes:
        raise UserError("no images were given: a batch has one or more")
    height, width = (-(-max(side) // MULTIPLE) * MULTIPLE for side in zip(*sizes, strict=True))
    filled = [
        F.pad(each, (0, width - w, 0, height - h))
        for each, (h, w) in zip(images, sizes, strict=True)
    ]
    return torch.stack(filled), sizes


def _classes(number: int) -> int:
    check_value("num_classes", number, int)
    if number < 1:
        raise UserError(f"num_classes={number} must be 1 or more: a detector finds classes")
    return number


def _encoder(name: str, options: Mapping[str, Any]) -> tuple[Any, list[int]]:
    """Build what gives the maps for a pyramid, and say by how much each is reduced."""
    kind = type(shapes_of(name, options)[0])
    any_size = {key: value for key, value in _ANY_SIZE.items() if key in arguments_of(kind)}
    body, reductions = with_maps(name, {**any_size, **options})
    if len(set(reductions)) == 1:  # every block of a plain ViT has a map: the last is taken
        if reductions[0] not in LEVELS:
            raise UserError(
                f"backbone={name!r} has patches of {reductions[0]} pixels: a simple feature "
                f"pyramid halves or doubles those of {', '.join(map(str, LEVELS))}; take one of "
                "these"
            )
        taken = [len(reductions) - 1]
    else:
        taken = in_a_row(reductions, LEVELS)
        if len(taken) < 2:
            raise UserError(
                f"backbone={name!r} gives maps reduced by {', '.join(map(str, reductions))}: a "
                "feature pyramid needs several of 4, 8, 16 and 32 in a row; take another, such as "
                "'resnet50'"
            )
    reductions = [reductions[index] for index in taken]
    return FeatureGetterNet(body, out_indices=tuple(taken)), reductions


def _try_other_size(encoder: nn.Module, backbone: str, in_chans: int) -> None:
    """Refuse a backbone that takes one image size alone."""
    try:
        with torch.no_grad():
            without_memory(encoder).eval()(torch.zeros(1, in_chans, *_TRIED, device="meta"))
    except UserError as error:
        raise UserError(f"backbone={backbone!r}, images of many sizes: {error}") from error
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"backbone={backbone!r} cannot take images of many sizes, as a detector meets them "
            f"({why}); take another, such as 'resnet50'"
        ) from error


def _check_targets(targets: Sequence[Instances] | None, images: int, *, masks: bool) -> None:
    """Refuse to train without the instances of every image."""
    if targets is None or len(targets) != images:
        given = "none" if targets is None else len(targets)
        raise UserError(
            f"training needs the instances of each of {images} images and got {given}; call "
            "model(images, targets), or model.eval() to find them"
        )
    for target in targets:
        for name in ("boxes", "labels", *(["masks"] if masks else [])):
            if name not in target:
                raise UserError(f"instances have no {name!r}; give it, or build with masks=False")


VARIANTS: dict[str, dict[str, Any]] = {"mask_rcnn": {}}
CASCADES: dict[str, dict[str, Any]] = {"cascade_mask_rcnn": {}}


def _cfg(*last: str) -> Row:
    return {
        "first_conv": None,
        "classifier": tuple(f"decoder.roi_heads.{name}" for name in last),
        "num_classes": CLASSES,
        "input_size": (3, *IMAGE),
        "fixed_input_size": False,
        "interpolation": "bilinear",
    }


_OF_BOXES, _OF_MASKS = "box_predictor.cls_score", "mask_predictor.mask_fcn_logits"
_LAST = (_OF_BOXES, "box_predictor.bbox_pred", _OF_MASKS)
_OF_STAGES = [f"stages.{stage}.{name}" for stage in range(3) for name in (_OF_BOXES, _OF_MASKS)]
register_variants(__name__, MaskRCNN, VARIANTS, cfg=_cfg(*_LAST))
register_variants(__name__, CascadeMaskRCNN, CASCADES, cfg=_cfg(*_OF_STAGES))
VARIANTS |= CASCADES

# SPDX-License-Identifier: Apache-2.0
"""SETR's decoder behind any backbone that gives maps of features: ``features_only`` of timm's.

No paper's: the decoder of the KV paper (Hwa et al., https://doi.org/10.1007/978-3-658-47422-5_71,
Fig. 2) meets other encoders than its own, convolutional ones included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from timm.models._features import FeatureGetterNet, feature_take_indices
from torch import Tensor, nn

from keymix.decoders.segmentation.pup import WIDTHS
from keymix.errors import UserError
from keymix.hosts.base import MixerNames, MixerOptions, find_host, put_mixers
from keymix.layers.patches import whole_size
from keymix.mixers.base import Grid
from keymix.models.factory import create_model, task_of_model
from keymix.models.family import register_variants
from keymix.models.image_size import set_image_size
from keymix.models.input_size import check_patches, record_input_size
from keymix.models.setr import CLASSES, FEATURES, SETR, setr_cfg, within
from keymix.task import DEFAULT

DEEPEST = 16
"""Reduction that the decoder's four doublings undo: the deepest map of at most this is decoded."""
_SAID = ("img_size", "in_chans", "num_classes", "features_only", "out_indices", "mixer")


class SETRBackbone(SETR):
    """A timm backbone's map of features, decoded.

    Maps are those of ``features_only``: those of a ViT come without its final norm. Mixers sit
    where the backbone has attention, if its family has an adapter, at ``encoder.model.…``. All
    weights but the mixers' are equal at one seed.

    Args:
        backbone: Name of the backbone, timm's or keymix's.
        backbone_options: Its further arguments.
        out_index: Number of the map that is decoded, from 0; None for the deepest that is reduced
            by at most 16.
        img_size: Side, or height and width, of the images, pixels.
        in_chans: Channels of the images.
        num_classes: Outputs of a pixel.
        decoder_widths: Channels behind each convolution of the decoder, which doubles the size
            then; None for as many of the paper's as bring the map near to the image's size.
        drop_rate: Probability of dropping a channel before the classifier.
        drop_path_rate: Stochastic depth of the backbone, probability; above 0 for those that have
            it.
        mixer: One name, or one a stage, or one a block; None for the backbone's own attention.
        mixer_options: One dict for all, one a mixer name, or a list as long as ``mixer``.

    Shape: images ``[B, in_chans, H, W]`` -> logits ``[B, num_classes, H, W]``.

    Raises:
        UserError: If there is no such backbone or map, or a mixer cannot sit in it.
    """

    encoder_path = "encoder.model"  # what gathers the maps is around it

    def __init__(
        self,
        *,
        backbone: str = "resnet50",
        backbone_options: Mapping[str, Any] | None = None,
        out_index: int | None = None,
        img_size: int | Grid = 224,
        in_chans: int = 3,
        num_classes: int = CLASSES,
        decoder_widths: Sequence[int] | None = None,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        mixer: MixerNames | None = None,
        mixer_options: MixerOptions = None,
    ) -> None:
        options = _checked(backbone, backbone_options or {})
        if drop_path_rate:
            options["drop_path_rate"] = drop_path_rate
        options |= {"img_size": img_size, "in_chans": in_chans, "num_classes": 0}
        encoder, reduction = _encoder(backbone, out_index, options)
        if decoder_widths is None:
            doublings = max(1, min(len(WIDTHS), reduction.bit_length() - 1))
            decoder_widths = WIDTHS[:doublings]
        super().__init__(
            dim=encoder.feature_info.channels()[-1],
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
            decoder_widths=decoder_widths,
            drop_rate=drop_rate,
        )
        self.encoder = encoder
        if mixer is not None:
            find_host(self._body)  # its refusal names the backbone's class
            put_mixers(self, mixer, mixer_options)
        elif mixer_options:
            raise UserError(f"mixer_options were given for {backbone!r}, but no mixer")

    @property
    def _body(self) -> Any:
        """The backbone, without what gathers its maps."""
        return self.encoder.model

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """The maps up to the one that is decoded: channels, reduction and path."""
        known = self.encoder.feature_info
        own = [known.info[i] for i in known.out_indices]
        return [{**info, "module": f"{self.encoder_path}.{info['module']}"} for info in own]

    def no_weight_decay(self) -> set[str]:
        """Names that weight decay leaves alone: the backbone's, and what the mixers name."""
        names: set[str] = getattr(self._body, "no_weight_decay", set)()
        return super().no_weight_decay() | {f"{self.encoder_path}.{name}" for name in names}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Say which parameters make a layer: the backbone's own, then the decoder."""
        own: Any = getattr(self._body, "group_matcher", None)
        if own is None:
            return {"stem": r"^encoder", "blocks": r"^decoder\.blocks\.(\d+)"}
        return within(self.encoder_path, own(coarse=coarse))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the backbone's blocks instead of keeping them."""
        self._body.set_grad_checkpointing(enable)

    def set_input_size(self, img_size: int | Grid | None = None) -> None:
        """Change the image size; what is refused changes nothing.

        Args:
            img_size: Side, or height and width, pixels; as it is if None.

        Raises:
            UserError: If the backbone, or a mixer in it, cannot take it.
        """
        if img_size is None:
            return
        size = whole_size("img_size", img_size)
        set_image_size(self._body, size)
        self.img_size = size
        record_input_size(self, size)

    def forward_intermediates(
        self,
        x: Float[Tensor, "B c H W"],
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return maps of the backbone, and what the decoder gets.

        Args:
            x: Images.
            indices: The last so many, or these; all if None.
            norm: Not done: maps are as ``features_only`` gives them.
            stop_early: Not done: the last map is computed.
            output_fmt: ``"NCHW"``.
            intermediates_only: Leave the final features out.
        """
        if output_fmt != "NCHW" or norm:
            raise UserError(
                f"maps of a backbone come as NCHW without a norm, {output_fmt=} {norm=}"
            )
        maps = self.encoder(x)
        taken, _ = feature_take_indices(len(maps), indices)
        found = [maps[i] for i in taken]
        return found if intermediates_only else (maps[-1], found)

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drop the decoder; the backbone was cut behind the map that it decodes."""
        taken, _ = feature_take_indices(len(self.feature_info), indices)
        if prune_head:
            self.decoder, self.num_classes = nn.Identity(), 0
        return list(taken)

    def forward_features(self, x: Float[Tensor, "B c H W"]) -> Float[Tensor, "B D h w"]:
        """Return what the decoder gets: the map of the backbone."""
        found: Tensor = self.encoder(x)[-1]
        return found


def _checked(backbone: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse a backbone that decodes maps itself, and arguments that the model itself takes."""
    if task_of_model(backbone) != DEFAULT:
        raise UserError(f"{backbone=} has a decoder itself; name what encodes, such as 'resnet50'")
    for name in _SAID:
        if name in given:
            raise UserError(f"backbone_options has {name!r}, which the model says; leave it out")
    return dict(given)


def _encoder(name: str, index: int | None, options: Mapping[str, Any]) -> tuple[Any, int]:
    """Build what gives the maps up to the one wanted, and say by how much that one is reduced."""
    body: Any = create_model(name, **options)
    known = getattr(body, "feature_info", None)
    infos = list(getattr(known, "info", known) or ())
    if not infos or not hasattr(body, "forward_intermediates"):
        raise UserError(f"backbone={name!r} gives no maps of features; take another, as 'resnet50'")
    reductions = [int(info["reduction"]) for info in infos]
    if index is None:
        fitting = [i for i, reduction in enumerate(reductions) if reduction <= DEEPEST]
        index = fitting[-1] if fitting else 0
    if not 0 <= index < len(infos):
        raise UserError(
            f"out_index={index}: {name!r} gives maps 0 to {len(infos) - 1}, reduced by "
            f"{', '.join(map(str, reductions))}"
        )
    check_patches(body)
    return FeatureGetterNet(body, out_indices=tuple(range(index + 1))), reductions[index]


VARIANTS: dict[str, dict[str, Any]] = {"setr": {}}


def _cfg(name: str) -> dict[str, Any]:
    return setr_cfg(224, None)  # the backbone's, whichever it is


register_variants(__name__, SETRBackbone, VARIANTS, cfg=_cfg, feature_cfg=FEATURES)

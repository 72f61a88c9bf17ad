# SPDX-License-Identifier: Apache-2.0
"""What models share that stand on maps of features of any timm backbone, keymix's own included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from keymix.arguments import whole_size
from keymix.errors import UserError
from keymix.hosts.base import Encoded, MixerNames, MixerOptions, find_host, put_mixers
from keymix.mixers.base import Grid
from keymix.models.arguments import without_weights
from keymix.models.encoder_decoder import within
from keymix.models.factory import create_model, task_of_model
from keymix.models.family import FeatureModel, Wanted
from keymix.models.image_size import set_image_size
from keymix.task import DEFAULT

_OF_THE_MODEL = ("img_size", "in_chans", "num_classes", "features_only", "out_indices", "mixer")


class OnBackbone(FeatureModel, Encoded):
    """Mix-in for models whose encoder is a `timm.models._features.FeatureGetterNet`.

    ``encoder`` collects the maps, the backbone itself is ``encoder.model``.
    """

    encoder_path = "encoder.model"
    encoder: Any

    @property
    def body(self) -> Any:
        """The backbone, without what collects its maps."""
        return self.encoder.model

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """The maps that are decoded, or came before that: channels, reduction and path."""
        known = self.encoder.feature_info
        own = [known.info[i] for i in known.out_indices]
        return [{**info, "module": f"{self.encoder_path}.{info['module']}"} for info in own]

    def no_weight_decay(self) -> set[str]:
        """Names that weight decay leaves alone: the backbone's, and what the mixers name."""
        names: set[str] = getattr(self.body, "no_weight_decay", set)()
        return super().no_weight_decay() | {f"{self.encoder_path}.{name}" for name in names}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Say which parameters make a layer: the backbone's own, then the decoder."""
        own: Any = getattr(self.body, "group_matcher", None)
        if own is None:
            return {"stem": r"^encoder", "blocks": r"^decoder\.blocks\.(\d+)"}
        return within(self.encoder_path, own(coarse=coarse))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the backbone's blocks instead of keeping them."""
        self.body.set_grad_checkpointing(enable)

    def intermediates(self, x: Tensor, wanted: Wanted) -> Any:
        """Return maps of the backbone, all of which run and have no norm, and the last of all."""
        if wanted.norm:
            raise UserError("maps of a backbone come without a norm; leave norm=True out")
        maps = self.maps(x)
        taken, _ = feature_take_indices(len(maps), wanted.indices)
        found = [maps[i] for i in taken]
        return found if wanted.alone else (self.read(maps), found)

    def set_input_size(self, img_size: int | Grid | None = None) -> None:
        """Change the image size, pixels; what backbone or a mixer refuses changes nothing."""
        if img_size is None:
            return
        size = whole_size("img_size", img_size)
        set_image_size(self.body, self.padded_size(size))
        self.img_size = size
        update_model_input_size(self, size)

    def padded_size(self, size: Grid) -> Grid:
        """Height and width at which the backbone gets images of a size, pixels."""
        return size

    def maps(self, x: Tensor) -> list[Tensor]:
        """Return the backbone's maps."""
        found: list[Tensor] = self.encoder(x)
        return found

    def read(self, maps: list[Tensor]) -> Any:
        """Return what the decoder gets of the backbone's maps."""
        return maps[-1]

    def forward_features(self, x: Tensor) -> Any:
        """Return what the decoder gets."""
        return self.read(self.maps(x))

    def take_mixers(self, backbone: str, mixer: MixerNames | None, options: MixerOptions) -> None:
        """Put mixers into the backbone, if any are named; refuse options alone.

        One name is put where the backbone attends: convolutions of its early, large grids stay.
        """
        if mixer is not None:
            find_host(self.body)  # its refusal names the backbone's class
            put_mixers(self, mixer, options, keep_others=True)
        elif options:
            raise UserError(f"mixer_options were given for {backbone!r}, but no mixer")


def checked_options(
    backbone: str, given: Mapping[str, Any] | None, drop_path_rate: float, in_chans: int
) -> dict[str, Any]:
    """Return the arguments of a backbone, but for the image size.

    What decodes maps itself is refused, and so are arguments that the model itself takes.
    """
    if task_of_model(backbone) != DEFAULT:
        raise UserError(f"{backbone=} has a decoder itself; name what encodes, such as 'resnet50'")
    for name in _OF_THE_MODEL:
        if name in (given or {}):
            raise UserError(f"backbone_options has {name!r}, which the model says; leave it out")
    stochastic = {"drop_path_rate": drop_path_rate} if drop_path_rate else {}
    return {**(given or {}), **stochastic, "in_chans": in_chans, "num_classes": 0}


def with_maps(name: str, options: Mapping[str, Any]) -> tuple[Any, list[int]]:
    """Build a backbone that gives maps of features; say by how much each is reduced."""
    body: Any = create_model(name, **options)
    known = getattr(body, "feature_info", None)
    infos = list(getattr(known, "info", known) or ())
    if not infos or not hasattr(body, "forward_intermediates"):
        raise UserError(f"backbone={name!r} gives no maps of features; take another, as 'resnet50'")
    return body, [int(info["reduction"]) for info in infos]


def shapes_of(name: str, options: Mapping[str, Any]) -> tuple[Any, list[int]]:
    """Do as `with_maps` without memory, weights or a random number."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return with_maps(name, without_weights(options))


def in_a_row(reductions: Sequence[int], levels: Sequence[int]) -> list[int]:
    """Return the numbers of the maps at these levels, the last of each; none if one is missing."""
    last = {reduction: index for index, reduction in enumerate(reductions)}
    taken = [last[level] for level in levels if level in last]
    gap = any(2 * reductions[a] != reductions[b] for a, b in pairwise(taken))
    return [] if gap else taken


def draw_first_bias(encoder: nn.Module, in_chans: int) -> None:
    """Draw the bias of the convolution that reads the image, if it is 0, as PyTorch draws it.

    Where images are padded it alone is what the convolution returns. At 0 a norm behind it would
    multiply gradients by the inverse root of its epsilon, one in each of several norms.
    """
    for conv in encoder.modules():
        if isinstance(conv, nn.Conv2d) and conv.in_channels == in_chans:
            if conv.bias is not None and not conv.bias.is_meta and not conv.bias.any():
                bound = conv.weight[0].numel() ** -0.5
                nn.init.uniform_(conv.bias, -bound, bound)
            return

# SPDX-License-Identifier: Apache-2.0
"""What models share that stand on maps of features of any timm backbone, keymix's own included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timm.models._features import feature_take_indices
from torch import Tensor

from keymix.errors import UserError
from keymix.hosts.base import Encoded, MixerNames, MixerOptions, find_host, put_mixers
from keymix.models.encoder_decoder import within
from keymix.models.factory import create_model, task_of_model
from keymix.models.family import FeatureModel, Wanted
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
        maps = self.encoder(x)
        taken, _ = feature_take_indices(len(maps), wanted.indices)
        found = [maps[i] for i in taken]
        return found if wanted.alone else (self.read(maps), found)

    def read(self, maps: list[Tensor]) -> Any:
        """Return what the decoder gets of the backbone's maps."""
        return maps[-1]

    def forward_features(self, x: Tensor) -> Any:
        """Return what the decoder gets."""
        return self.read(self.encoder(x))

    def take_mixers(self, backbone: str, mixer: MixerNames | None, options: MixerOptions) -> None:
        """Put mixers into the backbone, if any are named; refuse options alone.

        One name is put where the backbone attends: convolutions of its early, large grids stay.
        """
        if mixer is not None:
            find_host(self.body)  # its refusal names the backbone's class
            put_mixers(self, mixer, options, keep_others=True)
        elif options:
            raise UserError(f"mixer_options were given for {backbone!r}, but no mixer")


def checked_options(backbone: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Refuse a backbone that decodes maps itself, and arguments that the model itself takes."""
    if task_of_model(backbone) != DEFAULT:
        raise UserError(f"{backbone=} has a decoder itself; name what encodes, such as 'resnet50'")
    for name in _OF_THE_MODEL:
        if name in (given or {}):
            raise UserError(f"backbone_options has {name!r}, which the model says; leave it out")
    return dict(given or {})


def with_maps(name: str, options: Mapping[str, Any]) -> tuple[Any, list[int]]:
    """Build a backbone that gives maps of features; say by how much each is reduced."""
    body: Any = create_model(name, **options)
    known = getattr(body, "feature_info", None)
    infos = list(getattr(known, "info", known) or ())
    if not infos or not hasattr(body, "forward_intermediates"):
        raise UserError(f"backbone={name!r} gives no maps of features; take another, as 'resnet50'")
    return body, [int(info["reduction"]) for info in infos]

# SPDX-License-Identifier: Apache-2.0
"""Families of models that do the same work: ours with each mixer, and another library's."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keymix.analysis.memory import Build
from keymix.mixers.spec import parse_mixer
from qkformer_step import OURS, THEIRS

Model = tuple[str, str]  # library and mixer


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that do the same work.

    Attributes:
        title: Its name in a table.
        batch: Images a batch.
        side: Pixels of an image's side.
        peer: Library and how it makes its model.
        package: Package that the library is, as it is installed.
        ours: What ours are called, and how they are made.
    """

    title: str
    batch: int
    side: int
    peer: tuple[str, Build]
    package: str
    ours: Mapping[str, Build]

    def builds(self) -> dict[Model, Build]:
        """All models that can be made here, the baseline first."""
        ours = {("keymix", name): made for name, made in self.ours.items()}
        return ours if self.missing() else {(self.peer[0], ""): self.peer[1], **ours}

    def missing(self) -> str:
        """Say why the peer is left out; empty if it is not."""
        if importlib.util.find_spec(self.package.replace("-", "_")) is not None:
            return ""
        return (
            f"{self.peer[0]} is left out: it is not installed (pip install {self.package}); the "
            f"baseline is {next(iter(self.ours))}"
        )


def _timm(name: str, **kwargs: Any) -> Build:
    return Build(factory="timm:create_model", kwargs={"model_name": name, **kwargs})


def _ours(name: str, mixers: Iterable[str], stages: int = 0, **kwargs: Any) -> dict[str, Build]:
    """Our model with each mixer; with stages, in the last two of these."""
    made = {}
    for text in mixers:
        spec = parse_mixer(text)
        chosen: dict[str, Any] = spec.model_kwargs()
        if stages:
            chosen["mixer"] = ["sep_conv", "sep_conv", *[chosen["mixer"]] * (stages - 2)]
            chosen["mixer_options"] = [{}, {}, *[chosen["mixer_options"]] * (stages - 2)]
        made[text] = Build(kwargs={"name": name, **chosen, **kwargs})
    return made


def families(mixers: Sequence[str], *, quick: bool) -> dict[str, Family]:
    """Name the families; quick ones are tiny."""
    every = ["softmax", *mixers, "identity"]
    few = ["softmax", *(m for m in mixers if m.startswith("static_key")), "identity"]
    vit = {"img_size": 32, "depth": 1} if quick else {}
    side, batch = (32, 2) if quick else (224, 4)
    large = {"img_size": 64, "depth": 1} if quick else {"img_size": 448}
    deep = {"dim": 384, "depth": 1 if quick else 12, "heads": 12, "mlp_dim": 1152, "dim_head": 32}
    deep |= {"image_size": side, "patch_size": 16, "num_classes": 1000}
    ours_deep = {"img_size": side, "depth": deep["depth"]}
    theta = ["re_attention(norm=layer)", "re_attention", "softmax"]
    spiking = {"side": side if quick else 128, "dim": 48 if quick else 384}
    spiking |= {"depths": [1, 1, 1] if quick else [1, 1, 2]}
    qkformer = functools.partial(Build, factory="qkformer_step:qkformer")
    return {
        **{
            name: Family(
                title=f"{title}, {pixels} pixels",
                batch=images,
                side=pixels,
                peer=("timm", _timm(model, **sizes)),
                package="timm",
                ours=_ours(model, these, **sizes),
            )
            for name, title, model, pixels, images, these, sizes in (
                ("vit_tiny", "ViT-Ti/16", "vit_tiny_patch16_224", side, batch, every, vit),
                ("vit_small", "ViT-S/16", "vit_small_patch16_224", side, batch, every, vit),
                ("vit_448", "ViT-S/16", "vit_small_patch16_224", 2 * side, 2, few, large),
            )
        },
        "caformer": Family(
            title=f"CAFormer-S18, {side} pixels, mixers in the last two stages",
            batch=batch,
            side=side,
            peer=("timm", _timm("caformer_s18")),
            package="timm",
            ours=_ours("caformer_s18", every, stages=4, img_size=side),
        ),
        "deepvit": Family(
            title=f"DeepViT, 12 blocks, width 384, {side} pixels",
            batch=2 * batch,
            side=side,
            peer=("vit-pytorch", Build(factory="vit_pytorch.deepvit:DeepViT", kwargs=deep)),
            package="vit-pytorch",
            ours=_ours("deepvit_12b", theta, **ours_deep),
        ),
        "qkformer": Family(
            title=f"QKFormer, T=4, {spiking['side']} pixels",
            batch=batch,
            side=spiking["side"],
            peer=("SpikingJelly", qkformer(kwargs={"name": THEIRS, **spiking})),
            package="spikingjelly",
            ours={"QKFormer": qkformer(kwargs={"name": OURS, **spiking})},
        ),
    }

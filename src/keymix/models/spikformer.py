# SPDX-License-Identifier: Apache-2.0
"""Spikformer: a spiking Transformer of one stage with a mixer in every block.

Paper: Spikformer, https://arxiv.org/abs/2209.15425; the rows have the parameter counts that
QKFormer (https://arxiv.org/abs/2403.16552) prints in Tables 2 and 3. ``stem="peds"`` is the row
"Spikformer + PEDS" of its Table 4. ``mixer="spike_driven", num_heads=8`` is the layout of
S-Transformer (https://arxiv.org/abs/2307.01694), with activation before addition in the blocks
where that family has pre-activation.
Differs: the authors' DVS network holds 16,896 weights that it never uses, a position table and a
norm; we hold none of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

from timm.layers import calculate_drop_path_rates

from keymix.errors import UserError, unknown
from keymix.hosts.base import MixerNames, MixerOptions
from keymix.layers.neurons import NeuronKind, NeuronMaker, neuron_maker
from keymix.layers.spiking_embed import (
    LATER,
    SPLITTING,
    STEMS,
    Images,
    Pooling,
    SpikingEmbeds,
    SpikingPatchEmbed,
    SpikingPatchSplitting,
)
from keymix.layers.spiking_stage import SpikingStage
from keymix.mixers.base import Grid
from keymix.models.family import (
    register_variants,
)
from keymix.models.spiking import SpikingTransformer

# how many of QKFormer's embeddings make tokens as large as those of the splitting stem, and where
# the later ones pool
EMBEDS = {"imagenet": (3, "first"), "cifar": (3, "second"), "dvs": (2, "second")}


class Spikformer(SpikingTransformer):
    """Spikformer with a token mixer in every block, at ``stages.0.blocks.<i>.attn.mixer``.

    Images of any size go in.

    Args:
        img_size: Side, or height and width, of the images, pixels.
        in_chans: Channels of the images.
        num_classes: Outputs of the classifier; 0 for none.
        global_pool: ``"avg"``, or ``""`` for the features themselves, without a classifier.
        embed_dim: Width of the tokens.
        depth: Blocks.
        num_heads: Heads of the mixers.
        mlp_ratio: Hidden width of the MLPs over that of the tokens.
        stem: ``"sps"``, Spikformer's splitting stem, or ``"peds"``, QKFormer's embeddings with
            deformed shortcuts one behind the other.
        images: What the stem is made for: tokens are 4 pixels per side for ``"cifar"``, 16 for
            ``"imagenet"`` and ``"dvs"``.
        stem_pool: Where ``"sps"`` pools, ``"after"`` or ``"before"`` the neuron (CML); None for
            after.
        qkv_bias: Biases of the mixers' input projections.
        drop_rate: Probability of dropping a value before the classifier.
        drop_path_rate: Probability of dropping a branch in the last block; rises from 0.
        time_steps: Steps T that a call takes; see :meth:`set_time_steps`.
        neuron: ``"lif"``, ``"if"``, ``"plif"``; ``"relu"`` for the ANN counterpart; or a maker,
            such as :class:`keymix.layers.neurons.Neurons`.
        mixer: One name, or one per block.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.
        device: As PyTorch's modules take it.
        dtype: As PyTorch's modules take it.

    Shape: images ``[B, in_chans, H, W]``, or frames ``[B, T, in_chans, H, W]`` -> logits
    ``[B, num_classes]``, the mean over the steps.

    Raises:
        UserError: If values do not fit one another, or a mixer cannot sit here.
    """

    def __init__(
        self,
        *,
        img_size: int | Grid = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dim: int = 384,
        depth: int = 8,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        stem: str = "sps",
        images: Images = "imagenet",
        stem_pool: Pooling | None = None,
        qkv_bias: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        time_steps: int = 4,
        neuron: NeuronKind | NeuronMaker = "lif",
        mixer: MixerNames = "spiking_self",
        mixer_options: MixerOptions = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if stem not in ("sps", "peds"):
            raise unknown("stem", str(stem), ("sps", "peds"))
        if images not in SPLITTING:
            raise unknown("images", str(images), get_args(Images))
        if stem == "peds" and stem_pool is not None:
            raise UserError(f"{stem_pool=} is an option of stem='sps'; leave it out with 'peds'")
        maker = neuron_maker(neuron)
        shared: dict[str, Any] = {"neuron": maker, "device": device, "dtype": dtype}
        embed: SpikingPatchSplitting | SpikingEmbeds
        if stem == "sps":
            embed = SpikingPatchSplitting(
                in_chans, embed_dim, plan=SPLITTING[images], pool=stem_pool or "after", **shared
            )
        else:
            embed = _peds(in_chans, embed_dim, images, **shared)
        stage = SpikingStage(
            embed,
            embed_dim,
            num_heads=num_heads,
            qkv_bias=qkv_bias,
            mlp_ratio=mlp_ratio,
            drop_path=calculate_drop_path_rates(drop_path_rate, depth),
            **shared,
        )
        super().__init__(
            [stage],
            [(0, i) for i in range(depth)],
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            drop_rate=drop_rate,
            time_steps=time_steps,
            mixer=mixer,
            mixer_options=mixer_options,
            device=device,
            dtype=dtype,
        )


def _peds(in_chans: int, embed_dim: int, images: str, **shared: Any) -> SpikingEmbeds:
    """QKFormer's embeddings, without the blocks between them."""
    count, pool = EMBEDS[images]
    if embed_dim % 2 ** (count - 1):
        raise UserError(f"{embed_dim=} must be a multiple of {2 ** (count - 1)} with stem='peds'")
    widths = [embed_dim // 2 ** (count - 1 - i) for i in range(count)]
    plan, encode = STEMS[images]
    embeds = [SpikingPatchEmbed(in_chans, widths[0], plan=plan, encode=encode, **shared)]
    later, _ = LATER[pool]
    for before, width in pairwise(widths):
        embeds.append(SpikingPatchEmbed(before, width, plan=later, **shared))
    return SpikingEmbeds(embeds)


VARIANTS: dict[str, dict[str, Any]] = {
    # the authors' CIFAR network has biases before the norms of q, k and v, their others have none
    "spikformer_4_384": {
        "img_size": 32,
        "depth": 4,
        "num_heads": 12,
        "images": "cifar",
        "qkv_bias": True,
    },
    "spikformer_8_384": {"embed_dim": 384, "num_heads": 12},
    "spikformer_8_512": {"embed_dim": 512, "num_heads": 8},
    "spikformer_8_768": {"embed_dim": 768, "num_heads": 12},
    "spikformer_2_256": {
        "img_size": 128,
        "in_chans": 2,
        "embed_dim": 256,
        "depth": 2,
        "num_heads": 16,
        "images": "dvs",
        "time_steps": 16,
    },
}


register_variants(
    __name__,
    Spikformer,
    VARIANTS,
    cfg=lambda row: {
        "first_conv": "stages.0.patch_embed.convs.0.conv",
        "classifier": "head",
        "reduction": 2 ** sum(pool for _, pool in SPLITTING[row.get("images", "imagenet")]),
    },
    maps="depth",
)

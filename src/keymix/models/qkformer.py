# SPDX-License-Identifier: Apache-2.0
"""QKFormer: a hierarchical spiking Transformer (HST) with a mixer in every block.

Paper: QKFormer, https://arxiv.org/abs/2403.16552. The rows have the paper's parameter counts,
Tables 2 and 3; its 6.74 M is the network of 100 classes. On CIFAR the stem has one convolution
less, as the counts need, and pools nowhere, so that the first stage runs on all 32x32 pixels,
though the text has a quarter of the side. Convolutions, linear maps and norms start as PyTorch's;
the paper is silent there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from timm.layers import calculate_drop_path_rates

from keymix.errors import UserError, unknown
from keymix.hosts.base import MixerNames, MixerOptions
from keymix.layers.neurons import NeuronKind, NeuronMaker, neuron_maker
from keymix.layers.spiking_embed import LATER, STEMS, Images, Pool, Shortcut, SpikingPatchEmbed
from keymix.layers.spiking_stage import SpikingStage
from keymix.mixers.base import Grid
from keymix.models.family import (
    Row,
    register_variants,
)
from keymix.models.spiking import SpikingTransformer


class QKFormer(SpikingTransformer):
    """QKFormer with a token mixer in every block, at ``stages.<s>.blocks.<i>.attn.mixer``.

    Every stage doubles the width of the one before and, but for the first, halves the grid.
    Images of any size go in.

    Args:
        img_size: Side, or height and width, of the images, pixels.
        in_chans: Channels of the images.
        num_classes: Outputs of the classifier; 0 for none.
        global_pool: ``"avg"``, or ``""`` for the features themselves, without a classifier.
        embed_dim: Width of the last stage.
        depths: Blocks of every stage.
        num_heads: Heads of all stages, or of every one.
        mlp_ratio: Hidden width of the MLPs over that of the tokens.
        stem: First embedding: ``"imagenet"`` makes a token of 4 pixels per side, ``"cifar"`` of 1,
            ``"dvs"`` of 8.
        pool: Behind which convolution of the later embeddings the pooling stands.
        shortcut: Of all embeddings: ``"activation_before_addition"`` or ``"pre_activation"``.
        qkv_bias: Biases of the mixers' input projections.
        drop_rate: Probability of dropping a value before the classifier.
        drop_path_rate: Probability of dropping a branch in the last block; rises from 0.
        time_steps: Steps T that a call takes; see :meth:`set_time_steps`.
        neuron: ``"lif"``, ``"if"``, ``"plif"``; ``"relu"`` for the ANN counterpart; or a maker,
            such as :class:`keymix.layers.neurons.Neurons`.
        mixer: One name, or one per stage, or one per block.
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
        depths: Sequence[int] = (1, 2, 7),
        num_heads: int | Sequence[int] = 6,
        mlp_ratio: float = 4.0,
        stem: Images = "imagenet",
        pool: Pool = "first",
        shortcut: Shortcut = "activation_before_addition",
        qkv_bias: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        time_steps: int = 4,
        neuron: NeuronKind | NeuronMaker = "lif",
        mixer: MixerNames = ("qk_token", "qk_token", "spiking_self"),
        mixer_options: MixerOptions = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if stem not in STEMS:
            raise unknown("stem", str(stem), get_args(Images))
        if pool not in LATER:
            raise unknown("pool", str(pool), get_args(Pool))
        count, maker = len(depths), neuron_maker(neuron)
        heads = [num_heads] * count if isinstance(num_heads, int) else list(num_heads)
        if embed_dim % 2 ** (count - 1):
            raise UserError(
                f"{embed_dim=} must be a multiple of {2 ** (count - 1)}: it is halved from stage "
                "to stage"
            )
        blocks = sum(depths)
        if not isinstance(mixer, str) and len(mixer) not in (1, count, blocks):
            raise UserError(
                f"{depths=} makes {count} stages of {blocks} blocks, for which {len(mixer)} mixers "
                f"were given, {', '.join(mixer)}; give one, one per stage, or one per block"
            )
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages: list[SpikingStage] = []
        for s in range(count):
            plan, encode = STEMS[stem] if s == 0 else LATER[pool]
            dim = embed_dim // 2 ** (count - 1 - s)
            shared: dict[str, Any] = {"neuron": maker, "device": device, "dtype": dtype}
            embed = SpikingPatchEmbed(
                stages[-1].dim if stages else in_chans,
                dim,
                plan=plan,
                encode=encode,
                shortcut=shortcut,
                **shared,
            )
            stages.append(
                SpikingStage(
                    embed,
                    dim,
                    num_heads=heads[s],
                    qkv_bias=qkv_bias,
                    mlp_ratio=mlp_ratio,
                    drop_path=rates[s],
                    **shared,
                )
            )
        super().__init__(
            stages,
            [(s, depth - 1) for s, depth in enumerate(depths)],
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


_IMAGENET = {"img_size": 224, "depths": (1, 2, 7), "stem": "imagenet", "pool": "first"}
_CIFAR = {"img_size": 32, "depths": (1, 1, 2), "stem": "cifar", "pool": "second"}

VARIANTS: dict[str, dict[str, Any]] = {
    "qkformer_hst_10_384": {**_IMAGENET, "embed_dim": 384, "num_heads": 6},
    "qkformer_hst_10_512": {**_IMAGENET, "embed_dim": 512, "num_heads": 8},
    "qkformer_hst_10_768": {**_IMAGENET, "embed_dim": 768, "num_heads": 12},
    "qkformer_hst_4_384": {**_CIFAR, "embed_dim": 384, "num_heads": 8},
    "qkformer_hst_2_256": {
        "img_size": 128,
        "in_chans": 2,
        "embed_dim": 256,
        "depths": (1, 1),
        "num_heads": 16,
        "mlp_ratio": 1.0,
        "stem": "dvs",
        "pool": "second",
        "time_steps": 16,
        "mixer": ("qk_token", "spiking_self"),
    },
    # not a paper's: small enough to compare on two cores, on grids of 8x8, 4x4 and 2x2
    "qkformer_micro_32": {
        "img_size": 32,
        "embed_dim": 128,
        "depths": (1, 1, 1),
        "num_heads": 4,
        "mlp_ratio": 2.0,
        "stem": "imagenet",
        "pool": "first",
    },
}


def _cfg(row: Row) -> Row:
    plan, encode = STEMS[row["stem"]]
    first = "encode" if encode else "convs"
    pools = sum(pool for _, pool in plan) + len(row["depths"]) - 1
    return {
        "first_conv": f"stages.0.patch_embed.{first}.0.conv",
        "classifier": "head",
        "reduction": 2**pools,
    }


register_variants(__name__, QKFormer, VARIANTS, cfg=_cfg, maps="depths")

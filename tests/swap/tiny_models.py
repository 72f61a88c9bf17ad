# SPDX-License-Identifier: Apache-2.0
"""Small models of every library that a host knows, in float64, weights away from their start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models import metaformer as timms
from timm.models.cait import Cait
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.models import SwinTransformer as TorchvisionSwin
from torchvision.models import VisionTransformer as TorchvisionViT

from keymix.errors import UserError
from keymix.models import create_model
from keymix.swap import swap
from mixer_cases import stir

TIMM: dict[str, Any] = {"img_size": (8, 12), "patch_size": 2, "embed_dim": 12, "depth": 2}
TIMM |= {"num_heads": 3, "num_classes": 5}
ROPE: dict[str, Any] = {"use_rot_pos_emb": True}


def _metaformer() -> nn.Module:
    model = timms.MetaFormer(
        token_mixers=[timms.SepConv, timms.Pooling, timms.Attention],
        norm_layers=[timms.LayerNorm2dNoBias] * 2 + [timms.LayerNormNoBias],
        head_dim=8,
        depths=(1, 1, 2),
        dims=(8, 16, 32),
        num_classes=5,
    )
    model.pretrained_cfg = {"input_size": (3, 48, 32)}
    return model


def _torchvision_vit() -> nn.Module:
    return TorchvisionViT(
        image_size=12,
        patch_size=4,
        num_layers=2,
        num_heads=3,
        hidden_dim=12,
        mlp_dim=16,
        num_classes=5,
    )


def _torchvision_swin() -> nn.Module:
    model = TorchvisionSwin(
        patch_size=[2, 2],
        embed_dim=12,
        depths=[2, 2],
        num_heads=[2, 3],
        window_size=[3, 4],
        num_classes=5,
        stochastic_depth_prob=0.0,
    )
    model.image_size = (18, 24)  # which it does not know of itself
    return model


def _swin() -> nn.Module:
    sizes: dict[str, Any] = {"img_size": (24, 16), "patch_size": 2, "embed_dim": 12}
    return SwinTransformer(**sizes, depths=(2, 2), num_heads=(2, 3), window_size=4, num_classes=5)


def _hugging_face(name: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5.20")
    small = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 4}
    config = getattr(transformers, f"{name}Config")(**small, image_size=12, num_labels=5, **options)
    model: nn.Module = getattr(transformers, f"{name}ForImageClassification")(config)
    return model


def our_vit(mixer: str = "softmax", **options: Any) -> nn.Module:
    """keymix's own ViT: 4x4 patches and a class token."""
    small: dict[str, Any] = {"img_size": 16, "embed_dim": 12, "depth": 3, "num_heads": 3}
    return create_model("vit_micro_p4_32", mixer=mixer, num_classes=5, **{**small, **options})


def paper_vit() -> nn.Module:
    """The paper's baseline: a learned temperature, and the diagonal is masked."""
    small: dict[str, Any] = {"img_size": 16, "embed_dim": 12, "depth": 2, "num_heads": 3}
    return create_model("vit_small_spt_p4_32", num_classes=5, **small)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    # what builds it, and the size of its images
    "timm_vit": (lambda: VisionTransformer(**TIMM), (8, 12)),
    "timm_vit_no_prefix": (
        lambda: VisionTransformer(**TIMM, class_token=False, global_pool="avg", qkv_bias=False),
        (8, 12),
    ),
    "timm_vit_registers_qk_norm": (
        lambda: VisionTransformer(**TIMM, reg_tokens=2, qk_norm=True, init_values=0.5),
        (8, 12),
    ),
    "timm_cait": (lambda: Cait(**TIMM), (8, 12)),
    "timm_swin": (_swin, (24, 16)),
    "timm_metaformer": (_metaformer, (48, 32)),
    "timm_eva02": (
        lambda: Eva(**{**TIMM, "embed_dim": 24}, **ROPE, swiglu_mlp=True, qkv_fused=False),
        (8, 12),
    ),
    "timm_dinov3": (
        lambda: Eva(
            **{**TIMM, "embed_dim": 24},
            **ROPE,
            rope_type="dinov3",
            rope_rotate_half=True,
            num_reg_tokens=4,
            use_abs_pos_emb=False,
        ),
        (8, 12),
    ),
    "torchvision_vit": (_torchvision_vit, (12, 12)),
    "torchvision_swin": (_torchvision_swin, (18, 24)),
    "hugging_face_vit": (lambda: _hugging_face("ViT", intermediate_size=16), (12, 12)),
    "hugging_face_dinov2_registers": (
        lambda: _hugging_face("Dinov2WithRegisters", mlp_ratio=2, num_register_tokens=3),
        (12, 12),
    ),
    "keymix_vit": (our_vit, (16, 16)),
    "keymix_vit_tau": (paper_vit, (16, 16)),
    "keymix_cvt": (
        lambda: create_model(
            "cvt_13_32", img_size=16, num_classes=5, depths=(1, 1, 1), embed_dims=(8, 12, 24)
        ),
        (16, 16),
    ),
}


def ready(model: nn.Module) -> nn.Module:
    stir(model)
    return model.double().eval()


def tiny(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ready(MODELS[name][0]())


def images(size: tuple[int, int], number: int = 9, seed: int = 1) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(number, 3, *size, generator=noise, dtype=torch.float64)


def answer(model: nn.Module, x: Tensor) -> Tensor:
    """Class logits."""
    with torch.no_grad():
        out = model(x)
    logits: Tensor = getattr(out, "logits", out)
    return logits


def refused(model: nn.Module, words: str, mixer: str = "softmax", **options: Any) -> None:
    """A swap is refused in one line that holds some words, and changes nothing."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=words) as error:
        swap(model, mixer, **options)
    assert "\n" not in str(error.value)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())

# SPDX-License-Identifier: Apache-2.0
"""One small model of every family of timm's is counted, and agrees with PyTorch's own counter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.models import model_entrypoint
from torch.utils.flop_counter import FlopCounterMode

from keymix.analysis.counting import count, default_input_size

SMALL = """
    beit_base_patch16_224 cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 cpubone_nano
    crossvit_tiny_240 cs3darknet_focus_s csatv2 cspnext_tiny davit_tiny deepseek_vit_412m
    deit_tiny_patch16_224 densenet121 dla34 dpn48b eca_halonext26ts edgenext_xx_small
    efficientformer_l1 efficientformerv2_s0 efficientvim_m1 efficientvit_b0 efficientvit_m0
    ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny gemma4_vit_167m
    ghostnet_050 gmlp_ti16_224 hardcorenas_b hgnetv2_b0 hiera_tiny_224 hrnet_w18_small iformer_t
    inception_next_atto inception_resnet_v2 inception_v3 inception_v4 lcnetv2_small
    legacy_seresnet18 legacy_xception levit_128s lowformer_b0 mobilenetv3_small_100
    mobilenetv5_base mobilevit_xxs mvitv2_tiny naflexvit_base_patch16_siglip nasnetalarge nest_tiny
    nextvit_small pit_ti_224 pnasnet5large poolformer_s12 pvt_v2_b0 qwen3_vit_88m rdnet_tiny
    regnetx_002 repghostnet_050 repvit_m1 res2net50_26w_4s resnest14d resnetv2_18 rexnet_100
    sam2_hiera_tiny samvit_base_patch16_224 selecsls42 sequencer2d_s shvit_s1 skresnet18
    starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_224
    swinv2_tiny_window8_256 test_byobnet test_coatnet test_convnext test_efficientnet
    test_mambaout test_nfnet test_resnet test_vit test_vit_relpos tiny_vit_5m_224
    tnt_s_legacy_patch16_224 tresnet_m twins_svt_small vgg11 visformer_tiny vit_tiny_patch16_dinov3
    vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xception41p xcit_nano_12_p8_224
"""
# hardswish in place and not, channels behind a stem, convolutions, attention
QUICK = {"mobilenetv3_small_100", "volo_d1_224", "lowformer_b0", "test_byobnet", "test_vit"}


def family(name: str) -> str:
    return str(model_entrypoint(name).__module__).rpartition(".")[2]


def models() -> list[Any]:
    """Return a model of each family of timm's, those that a later version brings included."""
    small = {family(name): name for name in SMALL.split() if timm.is_model(name)}
    names = [
        small.get(room) or timm.list_models(module=room)[0]
        for room in timm.list_modules()
        if f"timm.models.{room}" in sys.modules
    ]
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow, id=n) for n in names]


@pytest.fixture
def plain_attention() -> Iterator[None]:
    """Without kernels: before torch 2.14 its counter takes the CPU's fused one for nothing."""
    set_fused_attn(False)
    yield
    set_fused_attn(True)


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("name", models())
def test_a_family_is_counted_as_pytorch_counts_it(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name).requires_grad_(False).eval()
    size = default_input_size(model)
    counted = count(model, size)
    with (
        torch.device("meta"),
        torch.no_grad(),
        FlopCounterMode(display=False) as theirs,
    ):
        model(torch.zeros(1, *size))
    assert size == tuple(model.pretrained_cfg["input_size"])
    assert counted.flops == theirs.get_total_flops() > 0


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("volo_d1_224", {"in_chans": 1}, (1, 224, 224)),
        ("resnet18", {"in_chans": 5}, (5, 224, 224)),
        ("maxvit_pico_rw_256", {"img_size": 128, "in_chans": 1}, (1, 128, 128)),
        ("swin_tiny_patch4_window7_224", {"img_size": (112, 224)}, (3, 112, 224)),
        ("tresnet_m", {"in_chans": 1}, (1, 224, 224)),
    ],
)
def test_the_input_is_what_the_model_takes_now(
    name: str, options: dict[str, Any], size: tuple[int, int, int]
) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    assert default_input_size(model) == size
    assert count(model).input_size == size

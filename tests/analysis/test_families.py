# SPDX-License-Identifier: Apache-2.0
"""Models of timm's in which all its operations run are counted as PyTorch's own counter does."""

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

from keymix.analysis.counting import count, default_input_size, run_counting

# Between them they run every operation and every layer of PyTorch's own that any family of timm's
# does, and say in every way which input they take: a count is a sum over operations, so that the
# families below, whose operations are all among these, say nothing of it that is not said here. Of
# Sequencer's LSTM, which is slow to take apart, test_operations.py asks the closed form.
COUNTED = """
    convit_tiny cpubone_nano csatv2 davit_tiny eca_halonext26ts edgenext_xx_small
    gemma4_vit_167m ghostnet_050 lowformer_b0 mobilenetv3_small_100
    naflexvit_base_patch16_siglip nextvit_small sam2_hiera_tiny skresnet18
    starnet_s050 swinv2_cr_tiny_224 test_byobnet test_efficientnet test_mambaout test_vit
    tresnet_m vit_tiny_r_s16_p8_224 volo_d1_224 xcit_nano_12_p8_224
"""
ALIKE = """
    beit cait coat convmixer convnext crossvit cspnet cspnext deepseek_vit deit densenet dla dpn
    efficientformer efficientformer_v2 efficientvim efficientvit_mit efficientvit_msra eva
    fasternet fastvit focalnet gcvit hardcorenas hgnet hiera hrnet iformer inception_next
    inception_resnet_v2 inception_v3 inception_v4 lcnetv2 levit maxxvit metaformer mlp_mixer
    mobilenetv5 mobilevit mvitv2 nasnet nest nfnet pit pnasnet pvt_v2 qwen3_vit rdnet regnet
    repghost repvit res2net resnest resnet resnetv2 rexnet selecsls senet sequencer shvit
    swiftformer swin_transformer swin_transformer_v2 tiny_vit tnt twins vgg visformer
    vision_transformer_relpos vision_transformer_sam vitamin vovnet xception xception_aligned
"""
# hardswish in place and not, channels behind a stem, convolutions, attention
QUICK = {"mobilenetv3_small_100", "volo_d1_224", "lowformer_b0", "test_byobnet", "test_vit"}
# counted on copies too, which also run in training; the others' operations alone are counted
WHOLE = QUICK | {"naflexvit_base_patch16_siglip", "starnet_s050", "tresnet_m", "test_mambaout"}


def family(name: str) -> str:
    return str(model_entrypoint(name).__module__).rpartition(".")[2]


def models() -> list[Any]:
    """Return the models to count, and one of each family that a later version of timm brings."""
    names = [name for name in COUNTED.split() if timm.is_model(name)]
    known = {family(name) for name in names} | set(ALIKE.split())
    names += [
        timm.list_models(module=room)[0]
        for room in timm.list_modules()
        if f"timm.models.{room}" in sys.modules and room not in known
    ]
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow, id=n) for n in names]


@pytest.fixture
def plain_attention() -> Iterator[None]:
    """Without kernels: before torch 2.14 its counter takes the CPU's fused one for nothing."""
    set_fused_attn(False)
    yield
    set_fused_attn(True)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("name", models())
def test_a_family_is_counted_as_pytorch_counts_it(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name).requires_grad_(False).eval()
    size = default_input_size(model)
    flops = count(model, size).flops if name in WHOLE else None
    with (
        torch.device("meta"),
        torch.no_grad(),
        FlopCounterMode(display=False) as theirs,
    ):
        model(torch.zeros(1, *size))
    assert size == tuple(model.pretrained_cfg["input_size"])
    assert 2 * sum(run_counting(model, torch.zeros(1, *size, device="meta")).by_path.values()) == (
        theirs.get_total_flops()
    )
    assert theirs.get_total_flops() > 0
    assert flops in (None, theirs.get_total_flops())


@pytest.mark.slow
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
        assert model(torch.zeros(2, *size)).shape == (2, 1000)


def test_without_a_size_a_model_is_counted_on_its_own() -> None:
    with torch.device("meta"):
        model = timm.create_model("test_vit", in_chans=1, img_size=(64, 96))
    assert count(model).input_size == (1, 64, 96)

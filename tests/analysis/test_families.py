# SPDX-License-Identifier: Apache-2.0
"""Models of timm's in which all its operations run are counted as PyTorch's own counter does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from timm.layers import set_fused_attn
from torch.utils.flop_counter import FlopCounterMode

from keymix.analysis.counting import count, default_input_size, run_counting

# PyTorch's counter counts for both; ours sorts by layer and takes our mixers by their equations.
# hardswish in place and not, channels behind a stem, convolutions, attention, images of any shape,
# layers that PyTorch compiles or that have no name of their own
FAMILIES = """
    mobilenetv3_small_100 volo_d1_224 lowformer_b0 test_byobnet test_vit
    naflexvit_base_patch16_siglip starnet_s050 tresnet_m test_mambaout
"""


@pytest.fixture
def plain_attention() -> Iterator[None]:
    """Without kernels: before torch 2.14 its counter takes the CPU's fused one for nothing."""
    set_fused_attn(False)
    yield
    set_fused_attn(True)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("name", FAMILIES.split())
def test_a_family_is_counted_as_pytorch_counts_it(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name).requires_grad_(False).eval()
    size = default_input_size(model)
    flops = count(model, size).flops
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
    assert flops == theirs.get_total_flops()


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

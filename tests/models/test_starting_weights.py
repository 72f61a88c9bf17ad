# SPDX-License-Identifier: Apache-2.0
"""Where CvT and CAFormer start: linear maps and the class token from N(0, 0.02), biases at 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keymix.hosts import find_mixers
from keymix.layers.cvt_stage import CvTStage
from keymix.models import create_model

WIDTHS = (24, 36, 48)


def cvt(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    heads = {"num_heads": (1, 3, 6), "depths": (1, 1, 1)}
    return create_model("cvt_13_32", embed_dims=WIDTHS, num_classes=20, **heads, **options)


def starts(weight: Tensor, bias: Tensor | None = None) -> None:
    """Within 5 standard errors of the deviation, and as many of the mean."""
    count = weight.numel()
    assert weight.std().item() == pytest.approx(0.02, rel=5 / (2 * count) ** 0.5)
    assert abs(weight.mean().item()) < 5 * 0.02 / count**0.5
    assert bias is None or not bias.any()


def test_the_linear_maps_of_a_cvt() -> None:
    model = cvt()
    inside = {id(part) for mixer in find_mixers(model).values() for part in mixer.modules()}
    maps = [m for m in model.modules() if isinstance(m, nn.Linear) and id(m) not in inside]
    assert len(maps) == 2 * 3 + 1
    for linear in maps:
        starts(linear.weight, linear.bias)
    model.reset_classifier(30)
    starts(model.head.weight, model.head.bias)


def test_the_class_token_of_a_cvt() -> None:
    tokens = [s.cls_token for s in cvt().stages if isinstance(s, CvTStage)]
    assert [token is None for token in tokens] == [True, True, False]
    starts(tokens[2])


@pytest.mark.parametrize("mixer", ["softmax", "static_key", "key_value"])
def test_the_projections_of_mixers_in_a_cvt(mixer: str) -> None:
    for made in find_mixers(cvt(mixer=mixer)).values():
        assert made.projections
        for linear in made.projections:
            starts(linear.weight, linear.bias)


@pytest.mark.parametrize("mixer", ["softmax", "static_key"])
def test_the_projections_of_mixers_in_a_caformer(mixer: str) -> None:
    torch.manual_seed(0)
    model = create_model("caformer_micro_32", mixer=mixer, mixer_options={"proj_bias": True})
    for made in find_mixers(model).values():
        for linear in made.projections:
            starts(linear.weight, linear.bias)


@pytest.mark.parametrize("stem", [(7, 2, 3), (7, 4, 2)])
def test_the_stem_of_a_caformer(stem: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    conv = create_model("caformer_micro_32", stem=stem).stem.conv
    assert (conv.kernel_size[0], conv.stride[0], conv.padding[0]) == stem
    starts(conv.weight, conv.bias)

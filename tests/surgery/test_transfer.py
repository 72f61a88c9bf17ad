# SPDX-License-Identifier: Apache-2.0
"""What a swap copies: a swap to the same mechanism changes nothing, whatever the library."""

from __future__ import annotations

import pytest
from tiny_models import MODELS, answer, images, tiny
from torch import nn

from keymix.hosts import find_mixers
from keymix.hosts.layers import find_layers
from keymix.surgery import swap
from tolerances import close

ALL = pytest.mark.parametrize("name", MODELS)


def attending(model: nn.Module) -> list[str]:
    """Paths of the layers that really attend; MetaFormer's first ones do not."""
    return [
        layer.place.path
        for layer in find_layers(model)
        if type(layer.module).__name__ not in ("SepConv", "Pooling")
    ]


@ALL
def test_softmax_in_the_place_of_softmax_changes_nothing(name: str) -> None:
    model, x = tiny(name), images(MODELS[name][1], 3)
    before = answer(model, x)
    report = swap(model, "softmax", attending(model))
    close(answer(model, x), before)
    for row in report.rows:
        assert {"q", "k", "v", "proj"} <= set(row.copied), row
        assert row.fresh == row.dropped == row.estimated == ()
    assert len(find_mixers(model)) == len(report.rows)


@pytest.mark.parametrize(
    "name",
    [
        "timm_vit_no_prefix",
        "timm_vit_registers_qk_norm",
        "timm_cait",
        "timm_swin",
        "timm_metaformer",
        "timm_dinov3",
        "hugging_face_dinov2_registers",
        "keymix_cvt",
    ],
)
def test_re_attention_starts_at_the_original(name: str) -> None:
    model, x = tiny(name), images(MODELS[name][1])
    before = answer(model, x)
    places = find_layers(model)
    shifted = [layer.place.path for layer in places if layer.place.needs_mask]
    paths = [path for path in attending(model) if path not in shifted]
    report = swap(model, "re_attention", paths, calibration=x)
    close(answer(model, x), before)
    assert report.output is not None
    assert report.output.top1_agreement == 1.0
    for row in report.rows:
        assert set(row.estimated) == {"theta", "theta_bias", "norm"}
        assert not row.fresh

# SPDX-License-Identifier: Apache-2.0
"""What a swap copies: a swap to the same mechanism changes nothing, whatever the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import MODELS, answer, images, our_vit, ready, tiny
from torch import nn

from each import together
from keymix.hosts import find_mixers
from keymix.hosts.layers import find_layers
from keymix.swap import swap
from tolerances import close

ALL = pytest.mark.parametrize("name", MODELS)


def attending(model: nn.Module) -> list[str]:
    """Paths of the layers that really attend; MetaFormer's first ones do not."""
    return [
        layer.place.path
        for layer in find_layers(model)
        if type(layer.module).__name__ not in ("SepConv", "Pooling")
    ]


@pytest.mark.slow
@together
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


@together
@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("static_key", {"activation": "star_relu", "resize": "interpolate"}),
        ("static_key", {"query_proj": False, "scale": "dim"}),
        ("conv_static_key", {"kernel_size": 5, "qkv_bias": False, "talking_heads": True}),
        ("re_attention", {"map_scale": True, "theta_bias": False, "temperature": 2.0}),
        ("static_key_re_attention", {"norm": "layer", "num_heads": 2, "head_dim": 5}),
        ("key_value", {"pos_dim": 5, "scale": "dim", "mask_diagonal": True}),
        ("random", {}),
    ],
)
def test_a_mixer_in_its_own_place_changes_nothing(mixer: str, options: dict[str, Any]) -> None:
    # in float64 from the start: a position code keeps what it was rounded to
    built = our_vit(mixer, mixer_options=options, dtype=torch.float64)
    model, x = ready(built), images((16, 16), 3)
    before = answer(model, x)
    report = swap(model, mixer, "*")  # controls stand here too
    close(answer(model, x), before)
    assert all(row.fresh == row.dropped == row.estimated == () for row in report.rows)


@pytest.mark.parametrize("mixer", ["static_key", "conv_static_key"])
@pytest.mark.parametrize("host", ["timm's attention", "static keys"])
def test_a_projection_of_queries_is_left_out_where_tokens_are_the_queries(
    mixer: str, host: str
) -> None:
    model, x = tiny("timm_vit"), images((8, 12))
    if host == "static keys":
        swap(model, mixer, calibration=x, drift=False)
    report = swap(model, mixer, mixer_options={"query_proj": False}, calibration=x)
    row = report.rows[0]
    assert row.copied == ("proj", "v")
    assert "q" in row.dropped
    assert row.fresh == (("key",) if mixer == "static_key" else ("key", "key_conv"))
    assert any("query_proj=False" in note for note in row.notes)


@pytest.mark.parametrize("mixer", ["static_key", "conv_static_key"])
def test_a_projection_starts_at_the_identity_where_tokens_were_the_queries(mixer: str) -> None:
    model = ready(our_vit(mixer, mixer_options={"query_proj": False}))
    x = images((16, 16), 3)
    before = answer(model, x)
    row = swap(model, mixer, mixer_options={"query_proj": True, "scale": False}).rows[0]
    close(answer(model, x), before)
    assert row.fresh == row.dropped == ()


@pytest.mark.slow
@together
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
    # undefined where the fresh model's answers are all the same
    assert report.output.top1_agreement in (1.0, None)
    for row in report.rows:
        assert set(row.estimated) == {"theta", "theta_bias", "norm"}
        assert not row.fresh

# SPDX-License-Identifier: Apache-2.0
"""Published sizes: QKFormer's Tables 2, 3 and 6, and the spiking Transformers quoted there."""

from __future__ import annotations

from typing import Any

import pytest

from costs import cost, cost_of
from costs import on_meta as meta
from costs import params as trainable
from each import together

pytestmark = pytest.mark.slow  # all of them together

PETITE = {"depth": 2, "embed_dim": 512, "num_heads": 8, "qkv_bias": False}
SDSA = {
    "mixer": "spike_driven",
    "num_heads": 8,
    "mixer_options": {"talking_heads": True},
}
CHANNELS = {"mixer": ["qk_token", "qk_token", "qk_channel"]}
FIRST_CHANNELS = {"mixer": ["qk_channel", "qk_channel", "spiking_self"]}
CLASSES = {"num_classes": 100}

# trainable parameters; the paper prints them in M to two digits
ROWS: list[tuple[str, dict[str, Any], int]] = [
    ("qkformer_hst_10_384", {}, 16_473_688),
    ("qkformer_hst_10_512", {}, 29_079_336),
    ("qkformer_hst_10_768", {}, 64_962_760),
    ("qkformer_hst_4_384", {}, 6_706_234),
    ("qkformer_hst_4_384", CLASSES, 6_740_884),
    ("qkformer_hst_4_384", FIRST_CHANNELS, 6_706_234),
    ("qkformer_hst_4_384", CHANNELS, 6_409_786),
    ("qkformer_hst_4_384", {**CHANNELS, **CLASSES}, 6_444_436),
    ("qkformer_hst_2_256", {"num_classes": 11}, 1_504_395),
    ("qkformer_hst_2_256", {}, 1_504_138),
    ("qkformer_hst_2_256", {"num_classes": 11, "mlp_ratio": 4.0}, 1_999_371),
    ("spikformer_4_384", {}, 9_324_730),
    ("spikformer_4_384", {"qkv_bias": False}, 9_320_122),
    ("spikformer_8_384", {}, 16_816_024),
    ("spikformer_8_512", {}, 29_689_384),
    ("spikformer_8_768", {}, 66_338_632),
    ("spikformer_2_256", {}, 2_566_666),
    ("spikformer_8_384", SDSA, 16_816_536),
    ("spikformer_8_512", SDSA, 29_689_896),
    ("spikformer_8_768", SDSA, 66_339_144),
    ("spikformer_4_384", {**PETITE, **SDSA}, 10_233_546),
    ("spikformer_4_384", {**PETITE, **SDSA, **CLASSES}, 10_279_716),
]


@together
@pytest.mark.parametrize(("name", "options", "params"), ROWS)
def test_parameters_are_the_published(name: str, options: dict[str, Any], params: int) -> None:
    assert trainable(name, **options) == params


def test_the_authors_event_network_counts_weights_that_it_never_uses() -> None:
    # a table of 8x8 positions and a norm behind the last block, neither of them called
    unused = 64 * 256 + 2 * 256
    assert trainable("spikformer_2_256") + unused == 2_583_562


# multiply-adds at T = 4 and 16, in G to the digits that were worked out, every step through the
# first convolution; an image that does not change passes it once
MACS: list[tuple[str, dict[str, Any], str]] = [
    ("qkformer_hst_10_384", {}, "23.59"),
    ("qkformer_hst_4_384", {}, "6.06"),
    ("qkformer_hst_2_256", {}, "8.12"),
    ("spikformer_4_384", {"order": "quadratic"}, "3.74"),
    ("spikformer_8_384", {}, "18.80"),
    ("spikformer_2_256", {"order": "quadratic"}, "6.06"),
]


@pytest.mark.parametrize(("name", "order", "macs"), MACS)
def test_multiply_adds_are_the_published(name: str, order: dict[str, Any], macs: str) -> None:
    model = meta(name, mixer_options={"spiking_self": order} if order else None)
    channels, height, width = model.pretrained_cfg["input_size"]
    first = model.get_submodule(model.pretrained_cfg["first_conv"])
    once = first.weight.numel() * height * width
    image = cost_of(model, (channels, height, width))
    assert f"{(image.macs + (model.time_steps - 1) * once) / 1e9:.2f}" == macs


def test_frames_pass_the_first_convolution_at_every_step() -> None:
    name = "qkformer_hst_4_384"
    image, frames = cost(name, (3, 32, 32)), cost(name, (4, 3, 32, 32))
    assert frames.macs - image.macs == 3 * (3 * 48 * 9) * 32 * 32


def test_the_small_one_is_small() -> None:
    assert trainable("qkformer_micro_32") < 700_000

# SPDX-License-Identifier: Apache-2.0
"""Layers where attention sits: what a mixer's call reads as makes the mixer's own map."""

import pytest
import torch

import keymix
from each import together
from keymix.errors import NoAttentionMap, UserError
from keymix.hosts.layers import find_layers, read_mixer
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import create_mixer
from tolerances import close


@together
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax", {}),
        ("softmax", {"mask_diagonal": True, "temperature": True}),
        ("softmax", {"talking_heads": "bias", "scale": False}),
        ("static_key", {"mask_diagonal": True}),
        ("key_value", {"pos_dim": 6}),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_reading_of_a_mixer_makes_its_map_and_its_output(
    name: str, options: dict[str, object], biased: bool
) -> None:
    mixer = create_mixer(
        name, dim=12, num_heads=3, grid=(2, 3), num_prefix_tokens=1, dtype=torch.float64, **options
    )
    assert isinstance(mixer, MapMixer)
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    bias = torch.randn(3, 7, 7, dtype=torch.float64) if biased else None
    read = read_mixer(mixer, (x,), {"bias": bias})
    rows = torch.tensor([4, 0])
    close(read.map(), mixer.attention_map(x, bias=bias))
    close(read.map(rows, "final"), mixer.attention_map(x, queries=rows, stage="final", bias=bias))
    close(mixer.output(read.map(stage="final") @ read.v, x), mixer(x, bias=bias))


def test_mixers_without_queries_and_keys_say_so() -> None:
    x = torch.randn(1, 6, 12)
    for name, why in (("pooling", "no queries and keys"), ("conv_static_key", "no product")):
        mixer = create_mixer(name, dim=12, num_heads=3, grid=(2, 3))
        with pytest.raises(NoAttentionMap, match=why):
            read_mixer(mixer, (x,), {})


def test_layers_come_in_the_order_of_the_forward_pass() -> None:
    model = keymix.create_model("vit_nano_p4_12", mixer="ska")
    layers = find_layers(model)
    assert [layer.path for layer in layers] == [
        f"blocks.{i}.attn.mixer" for i in range(len(layers))
    ]
    assert all(layer.module is layer.mixer for layer in layers)
    assert layers[0].layout(model).grid == (3, 3)
    x = torch.randn(1, 9, layers[0].place.site.dim)
    assert layers[0].mixer is not None
    close(layers[0].map((x,), {}, [1]), layers[0].mixer.attention_map(x, queries=[1]))


def test_a_model_no_adapter_knows_is_named() -> None:
    with pytest.raises(UserError, match=r"Sequential"):
        find_layers(torch.nn.Sequential(torch.nn.Linear(2, 2)))

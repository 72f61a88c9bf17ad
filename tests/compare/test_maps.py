# SPDX-License-Identifier: Apache-2.0
"""Where a comparison's models look: the row that is drawn, and reasons where none can be."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from keymix import data
from keymix.analysis.attention import attention_maps
from keymix.compare.pictures import Trained, attention, collapse
from keymix.models import create_model
from keymix.report.record import Attention

FAMILIES: dict[str, dict[str, Any]] = {
    "vit_nano_p2_12": {"depth": 2, "class_token": True, "global_pool": "token"},
    "cait_micro_p4_32": {"depth": 2, "embed_dim": 8, "num_heads": 2},
    "swin_micro_p2_32": {"depths": (2, 1), "num_heads": (1, 2), "embed_dim": 8, "merging": (2,)},
}


@pytest.fixture(scope="module")
def digits() -> Any:
    return data.load("digits", limit=100)


CHOSEN = (0, 3, 5, 7)


def shown(models: Mapping[str, Any], images: Any, *, pooling: str) -> Attention:
    trained = Trained(models=models, data=images, seed=0)
    return attention(trained, CHOSEN, pooling=pooling, label=lambda data, i: str(i))


def looked(name: str, digits: Any) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(3)
    sizes = {"img_size": digits.image_size, "in_chans": digits.in_chans, "num_classes": 10}
    if name != "vit_nano_p2_12":
        sizes |= {"patch_size": 2} if "swin" in name else {"patch_size": 3}
    model = create_model(name, mixer="ska", **FAMILIES[name], **sizes)
    pooling = model.global_pool
    return shown({"ska": model}, digits, pooling=pooling), model


def drawn(attention: Attention) -> Any:
    packed = attention.maps["ska"]
    numbers = np.frombuffer(base64.b64decode(packed.weights), dtype="<u2") / 65535
    weights = numbers * packed.scale
    return weights.reshape(-1, 2, 1 + packed.heads, *packed.grid)


def test_the_class_token_is_asked_where_it_passes_through_the_mixers(digits: Any) -> None:
    attention, model = looked("vit_nano_p2_12", digits)
    assert attention.class_token
    images = digits.prepared(torch.stack([digits.test.read(i) for i in CHOSEN]))
    (rows,) = attention_maps(model, images, layers=1, queries=[0]).values()
    wanted = rows[:, :, 0, 1:].unflatten(-1, (6, 6)).numpy()
    assert np.abs(drawn(attention)[:, 1, 1:] - wanted).max() < 1e-4


def test_all_patches_are_asked_where_it_comes_later(digits: Any) -> None:
    """Query 0 of CaiT's patch blocks is the first patch, not the class token it reads out by."""
    attention, model = looked("cait_micro_p4_32", digits)
    assert model.global_pool == "token"
    assert not attention.class_token
    images = digits.prepared(torch.stack([digits.test.read(i) for i in CHOSEN]))
    (rows,) = attention_maps(model, images, layers=1).values()
    wanted = rows.mean(2).unflatten(-1, (4, 4)).numpy()
    assert np.abs(drawn(attention)[:, 1, 1:] - wanted).max() < 1e-4


def test_windows_are_put_back_on_the_image(digits: Any) -> None:
    """The finest stage is shown, whose second block is shifted."""
    attention, model = looked("swin_micro_p2_32", digits)
    assert attention.layers == ("Block 1 of 3", "Block 2 of 3")
    assert any(model.layers[0].blocks[1].shift_size)
    images = digits.prepared(torch.stack([digits.test.read(i) for i in CHOSEN]))
    maps = attention_maps(model, images, layers=[0, 1], windows="image")
    packed = attention.maps["ska"]
    side = images.shape[-1] // 2
    assert packed.grid == (side, side)
    seen = drawn(attention)
    for layer, rows in enumerate(maps.values()):
        wanted = rows.mean(2).unflatten(-1, (side, side)).numpy()
        assert np.abs(seen[:, layer, 1:] - wanted).max() < 1e-4


def test_shifted_windows_are_not_compared_with_unshifted(digits: Any) -> None:
    _, model = looked("swin_micro_p2_32", digits)
    alike = collapse(Trained(models={"ska": model}, data=digits, seed=0))
    assert alike.similarity == {}
    assert "windows" in alike.missing["ska"]


def test_of_a_model_in_stages_the_finest_with_most_maps_is_shown() -> None:
    """Softmax has maps in all stages, the other placement from the second on."""
    photos = replace(data.load("digits", limit=100, image_size=32), in_chans=1)
    options = {
        "depths": (1, 2, 3, 1),
        "dims": (8, 16, 24, 32),
        "head_dim": 8,
        "in_chans": 1,
    }
    models = {
        "softmax": create_model("caformer_micro_32", mixer="softmax", **options),
        "placed": create_model(
            "caformer_micro_32", mixer=["sep_conv", "ska", "softmax", "softmax"], **options
        ),
        "control": create_model("caformer_micro_32", mixer="identity", **options),
    }
    attention = shown(models, photos, pooling="avg")
    assert attention.layers == ("Block 2 of 7", "Block 3 of 7")
    assert [attention.maps[label].grid for label in ("softmax", "placed")] == [(8, 8)] * 2
    assert list(attention.missing) == ["control"]
    alike = collapse(Trained(models=models, data=photos, seed=0))
    assert alike.pairs == ("4–5", "5–6")
    assert {label: len(v) for label, v in alike.similarity.items()} == {
        "softmax": 2,
        "placed": 2,
    }

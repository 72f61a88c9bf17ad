# SPDX-License-Identifier: Apache-2.0
"""The U-Net with a transformer at its deepest map: what passes through it, sizes, weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from keymix.hosts.base import find_mixers
from keymix.mixers.base import to_image
from keymix.models import create_model
from mixer_cases import refused
from tolerances import close, differs

SMALL: dict[str, Any] = {"width": 6, "blocks": 2, "num_heads": 2, "img_size": (32, 48)}


def unet(**options: Any) -> Any:
    torch.manual_seed(0)
    return create_model("trans_unet_micro", **{**SMALL, **options}).double().eval()


def images(height: int = 32, width: int = 48) -> Tensor:
    return torch.randn(2, 3, height, width, dtype=torch.float64)


def test_the_deepest_map_alone_passes_through_the_transformer() -> None:
    model, x = unet(), images()
    *maps, deepest = model.encoder.forward_intermediates(x, intermediates_only=True)
    mixed = deepest + to_image(model.transformer.forward_features(deepest), (2, 3))
    assert differs(mixed, deepest)
    close(model.forward_features(x), model.decoder([*maps[1:], mixed]))
    found = model.forward_intermediates(x, intermediates_only=True)
    for one, other in zip(found, [*maps, mixed], strict=True):
        close(one, other)
    first = model.forward_intermediates(x, indices=[0, 2], intermediates_only=True)
    for one, other in zip(first, (maps[0], maps[2]), strict=True):
        close(one, other)


def test_what_is_far_away_reaches_every_pixel_by_attention_alone() -> None:
    x = images(96, 96)
    other = x.clone()
    other[..., :4, :4] += 10.0
    for mixer, reaches in (("softmax", True), ("identity", False)):
        model = unet(mixer=mixer, img_size=96, depth=1)
        here = (model(x) - model(other)).abs().amax((0, 1))
        assert bool(here[-1, -1] > 0) == reaches, mixer


def test_the_u_net_starts_as_the_plain_one_and_all_mixers_start_alike() -> None:
    torch.manual_seed(0)
    plain = create_model("plain_unet", width=6, img_size=(32, 48)).double()
    one, other = unet().state_dict(), unet(mixer="static_key").state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(one[name], value), name
    shared = {name for name in one if ".mixer." not in name}
    assert shared == {name for name in other if ".mixer." not in name}
    assert all(torch.equal(one[name], other[name]) for name in shared)


def test_another_size_is_taken_by_both_or_by_none() -> None:
    model = unet()
    model.set_input_size((40, 24))
    assert model.img_size == model.encoder.img_size == (40, 24)
    assert {mixer.site.grid for mixer in find_mixers(model).values()} == {(3, 2)}
    assert model(images(40, 24)).shape == (2, 4, 40, 24)
    bound = unet(mixer="static_key")
    with refused("'static_key' learned its keys on a grid of"):
        bound.set_input_size((64, 64))
    assert bound.img_size == bound.encoder.img_size == (32, 48)


def test_weight_decay_leaves_positions_alone_and_checkpoints_reach_the_transformer() -> None:
    model = unet()
    assert "transformer.pos_embed" in model.no_weight_decay()
    model.set_grad_checkpointing()
    assert model.transformer.grad_checkpointing
    assert model.encoder.grad_checkpointing


@pytest.mark.parametrize("mixer", ["key_value", "static_key", "identity"])
def test_a_step_reaches_every_weight(mixer: str) -> None:
    model = unet(mixer=mixer).train()
    model(images()).square().mean().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name

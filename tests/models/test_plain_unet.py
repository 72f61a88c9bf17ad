# SPDX-License-Identifier: Apache-2.0
"""The plain U-Net: its way up, sizes, outputs, and a run on masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keymix.analysis.counting import count
from keymix.models import create_model
from keymix.models.factory import domain_of, own_mixers, task_of_model
from mixer_cases import refused, stir
from tolerances import close, differs


def unet(**options: Any) -> Any:
    model = create_model("plain_unet", **{"width": 6, "img_size": 32, **options}).double()
    stir(model)
    return model.eval()


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_every_map_of_the_encoder_reaches_the_logits() -> None:
    model, x = unet(), images(2, 3, 32, 48)
    stem, *maps = model.encoder.forward_intermediates(x, intermediates_only=True)
    assert stem.shape == maps[0].shape == (2, 6, 16, 24)
    assert [m.shape[1:] for m in maps] == [(6, 16, 24), (12, 8, 12), (24, 4, 6), (48, 2, 3)]
    whole = model.decoder(maps)
    close(model.forward_features(x), whole)
    for i in range(len(maps)):
        other = [m + 1.0 if i == k else m for k, m in enumerate(maps)]
        assert differs(model.decoder(other), whole)


@pytest.mark.parametrize("size", [(32, 32), (33, 50), (7, 100), (1, 1), (96, 40)])
def test_logits_have_the_images_size(size: tuple[int, int]) -> None:
    model = unet(img_size=size, num_classes=3, in_chans=2)
    x = images(2, 2, *size)
    assert model(x).shape == (2, 3, *size)
    rows, columns = -size[0] % 16, -size[1] % 16
    close(model(x), model(F.pad(x, (0, columns, 0, rows)))[..., : size[0], : size[1]])
    final, maps = model.forward_intermediates(x)
    close(final, model.forward_features(x))
    assert len(maps) == len(model.feature_info) == 5


def test_another_size_is_taken() -> None:
    model = unet()
    model.set_input_size((40, 24))
    assert model.img_size == model.encoder.img_size == (40, 24)
    assert count(model).input_size == (3, 40, 24)
    assert model(images(1, 3, 40, 24)).shape == (1, 4, 40, 24)


def test_it_is_for_masks_and_hosts_nothing() -> None:
    assert task_of_model("plain_unet") == "segmentation"
    assert domain_of("plain_unet") == "dense"
    assert own_mixers("plain_unet", unet()) is None
    assert (unet().global_pool, unet().task) == (None, "segmentation")
    with torch.device("meta"), refused("width=5 must be an even number of 4 or more"):
        create_model("plain_unet", width=5)


def test_checkpointing_reaches_the_encoder_and_leaves_its_statistics() -> None:
    plain, other = unet(depth=2).train(), unet(depth=2).train()
    other.load_state_dict(plain.state_dict())
    other.set_grad_checkpointing()
    assert other.encoder.grad_checkpointing
    x = images(2, 3, 32, 32)
    for model in (plain, other):
        model(x).square().mean().backward()
    for (key, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        close(two.grad, one.grad)
        assert differs(one.grad, torch.zeros_like(one)), key
    for one, two in zip(plain.buffers(), other.buffers(), strict=True):
        assert torch.equal(one, two)

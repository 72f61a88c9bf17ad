# SPDX-License-Identifier: Apache-2.0
"""timm's BEiT: its relative positions stay, and are added to the logits of a mixer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from timm.models.beit import Beit
from torch import Tensor

from each import together
from keymix.errors import UserError
from keymix.hosts.layers import find_layers
from keymix.mixers.contract import stir
from keymix.swap import swap
from tolerances import close

X = torch.randn(9, 3, 8, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def beit(**options: Any) -> Any:
    sizes: dict[str, Any] = {"img_size": (8, 12), "patch_size": 4, "embed_dim": 12, "depth": 2}
    model = Beit(**sizes, num_heads=3, num_classes=5, **options).double().eval()
    stir(model)
    return model


@together
@pytest.mark.parametrize("kind", ["use_rel_pos_bias", "use_shared_rel_pos_bias"])
@torch.no_grad()
def test_softmax_in_its_place_changes_nothing_and_maps_are_its_own(kind: str) -> None:
    model = beit(**{kind: True}, qkv_bias=True)
    before, own, read = model(X), [], []
    hooks: list[Any] = []
    for layer in find_layers(model):
        layer.module.fused_attn = False
        drop = layer.module.attn_drop
        hooks.append(drop.register_forward_hook(lambda _, args, out: own.append(args[0])))
        hooks.append(
            layer.module.register_forward_hook(
                lambda _, args, kwargs, out, layer=layer: read.append(layer.map(args, kwargs)),
                with_kwargs=True,
            )
        )
    model(X)
    for hook in hooks:
        hook.remove()
    assert len(own) == 2
    for theirs, ours in zip(own, read, strict=True):
        close(ours, theirs)
    report = swap(model, "softmax", calibration=X)
    close(model(X), before)
    assert all(row.drift is not None and row.drift.map < 1e-12 for row in report.rows)
    swap(model, "static_key", calibration=X)
    bare = model(X)
    for name, parameter in model.named_parameters():
        if "relative_position_bias_table" in name:
            parameter.zero_()
    assert (model(X) - bare).abs().max() > 1e-6  # static keys have the positions, too
    swap(model, "identity")
    assert not any("attn.relative" in name for name in model.state_dict())
    assert model(X).shape == (9, 5)


@torch.no_grad()
def test_another_image_size_resamples_the_table() -> None:
    theirs = beit(use_rel_pos_bias=True)
    mine = copy.deepcopy(theirs)
    swap(mine, "softmax")
    x: Tensor = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    for model in (theirs, mine):
        model.set_input_size((16, 16))
    close(mine(x), theirs(x))


def test_its_positions_need_as_many_heads() -> None:
    with pytest.raises(UserError, match="has relative positions for 3 heads of 4"):
        swap(beit(use_rel_pos_bias=True), "softmax", mixer_options={"num_heads": 2})

# SPDX-License-Identifier: Apache-2.0
"""After ``set_input_size``, what timm writes about a model on export is the model's new size."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models import get_model_args, get_model_input_config

import keymix.models  # noqa: F401  registers them
from each import together
from shrunk import arguments

NAMES = ["deepvit_s", "vit_nano_p2_12", "cait_micro_p4_32", "swin_micro_p2_32", "cvt_micro_32"]


@together
@pytest.mark.parametrize("name", [*NAMES, "caformer_micro_32"])
def test_a_model_of_another_size_is_recorded_as_that(name: str) -> None:
    model = timm.create_model(name, **arguments(name, mixer="softmax"))
    size = (96, 128)
    model.set_input_size(size)
    assert get_model_input_config(model)["input_size"][1:] == size
    recorded = get_model_args(model)
    assert recorded["img_size"] == size
    with torch.device("meta"):
        again = timm.create_model(name, **recorded)
    shapes = {key: tensor.shape for key, tensor in again.state_dict().items()}
    assert shapes == {key: tensor.shape for key, tensor in model.state_dict().items()}


def test_swins_windows_are_recorded_with_what_they_may_do() -> None:
    name = "swin_micro_p2_32"
    model = timm.create_model(name, **arguments(name, mixer="softmax"))
    model.set_input_size(24, window_size=4, always_partition=False)
    again = timm.create_model(name, **get_model_args(model)).eval()
    again.load_state_dict(model.state_dict(), strict=True)
    x = torch.randn(1, 3, 24, 24)
    assert torch.equal(again(x), model.eval()(x))
    blocks = [[b for stage in m.layers for b in stage.blocks] for m in (model, again)]
    assert [b.shift_size for b in blocks[0]] == [b.shift_size for b in blocks[1]]

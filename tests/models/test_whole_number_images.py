# SPDX-License-Identifier: Apache-2.0
"""Models of every family refuse pixels that nobody normalised."""

from __future__ import annotations

import pytest
import torch

from each import together
from keymix.errors import UserError
from keymix.models import create_model

NAMES = (
    "vit_micro_p4_32",
    "deepvit_micro_p4_32",
    "cait_micro_p4_32",
    "cvt_micro_32",
    "swin_micro_p2_32",
    "caformer_micro_32",
    "qkformer_micro_32",
    "spikformer_4_384",
    "setr_micro",
    "setr_kv_cvt",
    "setr",
    "plain_convnet",
    "plain_unet",
    "unet",
)


@together
@pytest.mark.parametrize("name", NAMES)
def test_pixels_of_8_bits_are_one_line(name: str) -> None:
    with torch.device("meta"):
        model = create_model(name)
        images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    for call in (lambda: model(images), lambda: model(x=images)):
        with pytest.raises(UserError) as refused:
            call()
        message = str(refused.value)
        assert message.startswith(
            "images of torch.uint8: the model takes floating-point numbers; norm"
        )
        assert "\n" not in message


def test_frames_of_counts_are_refused_too() -> None:
    model = create_model("qkformer_micro_32", in_chans=2, time_steps=2)
    with pytest.raises(UserError, match=r"torch\.int16.*x\.float\(\)"):
        model(torch.zeros(1, 2, 2, 32, 32, dtype=torch.int16))

# SPDX-License-Identifier: Apache-2.0
"""A model built without memory, then given some: its weights come from a state dict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.models._manipulate import reinit_non_persistent_buffers
from torch import nn

from each import together
from shrunk import FAMILIES, family_of, images, of_tensors, shrunk

ONE_EACH = list({id(family_of(name)): name for name in of_tensors()}.values())


def _has_codes(name: str) -> bool:
    return family_of(name).blocks > 0 and not family_of(name).spiking


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """A model with a position code in every block, and one like it in memory that holds NaN.

    No spiking mixer has one, nor has a model without attention.
    """
    options: dict[str, Any] = {"mixer": "key_value", "mixer_options": {"pos_dim": 6}}
    if not _has_codes(name):
        options = {}
    model = shrunk(name, **options).eval()
    with torch.device("meta"):
        other = shrunk(name, **options).eval()
    other.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.zero_()
    return model, other


def test_every_family_is_tried() -> None:
    assert len(ONE_EACH) == len(FAMILIES)


@pytest.mark.slow
@together
@pytest.mark.parametrize("name", ONE_EACH)
def test_timm_fills_what_no_state_says(name: str) -> None:
    model, other = pair(name)
    filled = [path for path in reinit_non_persistent_buffers(other) if path.endswith(".mixer")]
    assert bool(filled) is _has_codes(name)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(images(name)), model(images(name)))
    for key, buffer in model.named_buffers():
        assert torch.equal(other.get_buffer(key), buffer)

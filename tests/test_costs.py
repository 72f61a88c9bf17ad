# SPDX-License-Identifier: Apache-2.0
"""What tests of published figures count is what ``keymix.count`` counts."""

from __future__ import annotations

import pytest
import torch

from costs import Cost, cost_of
from keymix import count
from shrunk import forms_of, images, shrunk


@pytest.mark.parametrize("family", ["vit", "metaformer", "spikformer", "setr"])
def test_costs_are_those_that_keymix_counts(family: str) -> None:
    name = next(iter(forms_of(family)))
    size = tuple(images(name).shape[1:])
    wanted = count(shrunk(name), size)
    with torch.device("meta"):
        model = shrunk(name)
    assert cost_of(model, size) == Cost(wanted.params, wanted.macs)

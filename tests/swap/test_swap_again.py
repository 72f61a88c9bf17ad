# SPDX-License-Identifier: Apache-2.0
"""A mixer in the place of one of its own kind: with its options and weights, nothing to say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import MODELS, answer, images, tiny

from keymix.hosts.base import find_mixers
from keymix.models import create_model
from keymix.swap import swap
from mixer_cases import stir
from tolerances import close


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "option"),
    [("pooling", {"pool_size": 5}), ("sep_conv", {"kernel_size": 5, "expansion": 1.5})],
)
def test_a_control_keeps_its_options(mixer: str, option: dict[str, Any]) -> None:
    model = create_model("vit_micro_p4_32", mixer=mixer, mixer_options=option, num_classes=3)
    stir(model)
    model = model.double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    before = answer(model, x)
    report = swap(model, mixer, "*")
    close(answer(model, x), before)
    for sitting in find_mixers(model).values():
        assert dict(sitting.built_with).items() >= option.items()
    assert not any(row.fresh for row in report.rows)


def test_a_named_path_stays_with_its_own_mixer_only() -> None:
    model = create_model("vit_micro_p4_32", mixer_options={"backend": "reference"})
    swap(model, "softmax", "0")
    swap(model, "static_key", "1")
    paths: list[Any] = [*find_mixers(model).values()]
    assert [mixer.backend for mixer in paths][:3] == ["reference", "auto", "reference"]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["static_key", "conv_static_key"])
@pytest.mark.parametrize("name", ["timm_vit", "timm_vit_no_prefix"])
def test_learned_keys_that_were_copied_are_not_said_to_start_afresh(name: str, mixer: str) -> None:
    model, x = tiny(name), images(MODELS[name][1])
    swap(model, mixer, calibration=x)
    before = answer(model, x)
    report = swap(model, mixer, calibration=x)
    close(answer(model, x), before)
    for row in report.rows:
        assert row.fresh == ()
        assert row.estimated == ()
        assert not [note for note in row.notes if "afresh" in note], row.notes

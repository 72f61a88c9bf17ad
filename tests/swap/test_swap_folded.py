# SPDX-License-Identifier: Apache-2.0
"""Every mixer in every family of hosts, folded for inference, answers as it did."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import MODELS, answer, images, ready, tiny

from each import each
from keymix import fold_for_inference
from keymix.errors import UserError
from keymix.hosts import put_mixers
from keymix.mixers.registry import list_mixers
from keymix.models.swapped import save_swapped
from keymix.swap import swap
from mixer_cases import refusal
from tolerances import close


@pytest.mark.parametrize("name", MODELS)
@each("mixer", {mixer: (mixer,) for mixer in list_mixers(domain="dense")})
def test_a_folded_model_answers_the_same(name: str, mixer: str) -> None:
    model, size = tiny(name), MODELS[name][1]
    if refusal(lambda: put_mixers(model, mixer)) is not None:
        return  # the mixer cannot sit there
    x = images(size, 4)
    if "hugging_face" in name:
        ready(model)
    else:
        ready(model).train()(x)  # statistics of norms move
    model.eval()
    close(answer(fold_for_inference(model), x), answer(model, x))


def test_a_folded_model_is_not_swapped_nor_saved(tmp_path: Path) -> None:
    model = tiny("timm_vit")
    swap(model, "re_attention", init="fresh")
    folded = fold_for_inference(model)
    with pytest.raises(UserError, match="save_swapped takes the model that it was folded from"):
        save_swapped(folded, tmp_path / "folded.safetensors")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="swap takes the model that it was folded from"):
        swap(folded, "softmax")
    save_swapped(model, tmp_path / "model.safetensors")

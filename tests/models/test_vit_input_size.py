# SPDX-License-Identifier: Apache-2.0
"""A ViT takes another image size as timm's does, whatever its mixers hold a position."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from timm.layers import resample_abs_pos_embed
from torch import nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.models import create_model
from mixer_cases import stir
from tolerances import close

SMALL: dict[str, Any] = {"embed_dim": 12, "num_heads": 3, "depth": 2}
CASES = [
    ("static_key", {}),
    ("conv_static_key", {}),
    ("static_key_re_attention", {}),
    ("key_value", {"pos_dim": 6}),
]
POLICIES = ["interpolate", "pool_values"]

every_case = pytest.mark.parametrize(("mixer", "options"), CASES)
every_policy = pytest.mark.parametrize("resize", POLICIES)


def vit(mixer: str, options: dict[str, Any], **more: Any) -> nn.Module:
    name = more.pop("name", "vit_nano_p2_12")
    torch.manual_seed(1)
    model = create_model(name, mixer=mixer, mixer_options=options, **{**SMALL, **more})
    model = model.double().eval()
    stir(model)
    return model


def image(height: int, width: int, channels: int = 1) -> torch.Tensor:
    return torch.randn(2, channels, height, width, dtype=torch.float64)


@pytest.mark.slow
@together
@every_case
@every_policy
@pytest.mark.parametrize("class_token", [True, False])
def test_sizes_up_and_down_and_not_square(mixer, options, resize, class_token) -> None:
    more = {"class_token": class_token, "global_pool": "token" if class_token else "avg"}
    model = vit(mixer, {**options, "resize": resize}, **more)
    before = model.pos_embed.detach().clone()
    for size in ((16, 20), (8, 6), (12, 24)):
        moved = copy.deepcopy(model)
        moved.set_input_size(size)
        grid = (size[0] // 2, size[1] // 2)
        assert moved(image(*size)).shape == (2, 10)
        assert {m.site.grid for m in find_mixers(moved).values()} == {grid}
        wanted = resample_abs_pos_embed(before, list(grid), [6, 6], int(class_token))
        assert torch.equal(moved.pos_embed, wanted)


@together
@every_case
@every_policy
def test_its_mixers_compute_what_they_would_on_the_fly(mixer, options, resize) -> None:
    model = vit(mixer, {**options, "resize": resize})
    plain = copy.deepcopy(model)
    model.set_input_size((16, 20))
    x = torch.randn(2, 80, 12, dtype=torch.float64)
    for path, fixed in find_mixers(plain).items():
        close(find_mixers(model)[path](x), fixed(x, grid=(8, 10)))


@together
@every_case
@every_policy
def test_the_same_size_changes_nothing(mixer, options, resize) -> None:
    model = vit(mixer, {**options, "resize": resize})
    x = image(12, 12)
    wanted, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
    model.set_input_size(12)
    assert torch.equal(model(x), wanted)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


@together
@every_case
@every_policy
def test_a_state_goes_into_a_model_that_took_the_same_way(mixer, options, resize) -> None:
    made = [vit(mixer, {**options, "resize": resize}) for _ in range(2)]
    with torch.no_grad():
        for p in made[1].parameters():
            p.zero_()
    for model in made:
        model.set_input_size((16, 20))
    made[1].load_state_dict(made[0].state_dict(), strict=True)
    x = image(16, 20)
    assert torch.equal(made[0](x), made[1](x))
    if resize == "interpolate":  # its weights are those of a model of that size
        fresh = vit(mixer, options, img_size=(16, 20))
        fresh.load_state_dict(made[0].state_dict(), strict=True)
        assert torch.equal(fresh(x), made[0](x))


@every_case
def test_pooling_goes_and_comes_back(mixer: str, options: dict[str, Any]) -> None:
    model = vit(mixer, {**options, "resize": "pool_values"}, pos_embed="none")
    x = image(12, 12)
    wanted = model(x)
    model.set_input_size((16, 20))
    assert model(image(16, 20)).shape == (2, 10)
    model.set_input_size((12, 12))
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("name", ["static_key", "conv_static_key", "softmax"])
def test_the_models_of_the_paper_take_another_size(name: str) -> None:
    options = {} if name == "softmax" else {"resize": "interpolate"}
    model = vit(name, options, name="vit_small_spt_p4_32", img_size=16)
    model.set_input_size((24, 20))
    assert model(image(24, 20, 3)).shape == (2, 10)
    for mixer in find_mixers(model).values():
        assert mixer.temperature is not None
        rows = mixer.attention_map(torch.randn(1, 31, 12, dtype=torch.float64))
        assert (rows.diagonal(dim1=-2, dim2=-1) == 0).all()
    if name == "softmax":
        return
    pooled = vit(name, {"resize": "pool_values"}, name="vit_small_spt_p4_32", img_size=16)
    state = {k: v.clone() for k, v in pooled.state_dict().items()}
    with pytest.raises(UserError, match=r"and 1 more.*own on \(6, 5\).*mask_diagonal=False"):
        pooled.set_input_size((24, 20))
    assert pooled.patch_embed.grid_size == (4, 4)
    assert all(torch.equal(state[k], v) for k, v in pooled.state_dict().items())
    plain = vit(
        name,
        {"resize": "pool_values", "mask_diagonal": False},
        name="vit_small_spt_p4_32",
        img_size=16,
    )
    plain.set_input_size((24, 20))
    assert plain(image(24, 20, 3)).shape == (2, 10)


def test_another_patch_size_is_another_grid() -> None:
    model = vit("static_key", {"resize": "interpolate"})
    model.set_input_size(patch_size=3)
    assert find_mixers(model)["blocks.0.attn.mixer"].site.grid == (4, 4)
    assert model(image(12, 12)).shape == (2, 10)


def test_resized_models_train_and_copy() -> None:
    for resize in POLICIES:
        model = vit("conv_static_key", {"resize": resize})
        model.set_input_size((16, 20))
        copied = copy.deepcopy(model)
        model.train()(image(16, 20)).square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        assert torch.equal(copied(image(16, 20)[:1] * 0), model.eval()(image(16, 20)[:1] * 0))

# SPDX-License-Identifier: Apache-2.0
"""Mixers in ViTs hear on which grid the tokens of a call lie, though blocks are handed none."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from each import together
from keymix.errors import UserError
from keymix.models import create_model, set_image_size
from mixer_cases import stir
from tolerances import close

NAMES = ["vit_micro_p4_32", "vit_tiny_patch16_224"]
SMALL: dict[str, Any] = {
    **{"embed_dim": 8, "depth": 2, "num_heads": 2, "num_classes": 3, "patch_size": 4},
    **{"class_token": False, "global_pool": "avg"},
}
PLACED = [
    ("sep_conv", {}),
    ("static_key", {"resize": "interpolate"}),
    ("conv_static_key", {"resize": "pool_values"}),
    ("key_value", {"pos_dim": 4, "resize": "interpolate"}),
]


def vit(name: str, mixer: str, options: dict[str, Any] | None = None, **more: Any) -> nn.Module:
    """A model for images of 16x64 pixels, 4x16 patches."""
    torch.manual_seed(0)
    given = {"img_size": (16, 64), **SMALL, **more}
    model = create_model(name, mixer=mixer, mixer_options=options, **given).double().eval()
    stir(model)
    return model


def image(height: int, width: int) -> Tensor:
    noise = torch.Generator().manual_seed(height)
    return torch.randn(2, 3, height, width, generator=noise, dtype=torch.float64)


@pytest.mark.slow
@together
@pytest.mark.parametrize(("mixer", "options"), PLACED)
@pytest.mark.parametrize("name", NAMES)
def test_images_of_any_size_go_where_they_would_in_a_model_of_their_size(
    name: str, mixer: str, options: dict[str, Any]
) -> None:
    """64x16 pixels make as many tokens as 16x64, with other neighbours."""
    model = vit(name, mixer, options, dynamic_img_size=True)
    own = model(image(16, 64))
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for size in ((64, 16), (24, 32)):
            fixed = copy.deepcopy(model)
            set_image_size(fixed, size)
            close(copied(image(*size)), fixed(image(*size)))
            final, between = copied.forward_intermediates(image(*size))
            close(final, fixed.forward_features(image(*size)))
            assert between[0].shape == (2, 8, size[0] // 4, size[1] // 4)
        close(copied(image(16, 64)), own)


def test_deepvit_hands_the_grid_to_the_map_that_it_shares() -> None:
    more = {"shared_from": 1, "last_mixer": None, "dynamic_img_size": True}
    model = vit("deepvit_micro_p4_32", "conv_static_key", {"resize": "interpolate"}, **more)
    fixed = copy.deepcopy(model)
    set_image_size(fixed, (64, 16))
    close(model(image(64, 16)), fixed(image(64, 16)))


@pytest.mark.parametrize("mixer", ["static_key", "random"])
@pytest.mark.parametrize("name", NAMES)
def test_a_mixer_that_cannot_take_the_grid_of_a_call_says_so(name: str, mixer: str) -> None:
    model = vit(name, mixer, dynamic_img_size=True)
    with pytest.raises(UserError, match=rf"{mixer}.*\(4, 16\).*build the model for the new image"):
        model(image(64, 16))
    if name == NAMES[1]:  # timm's set_input_size knows no mixers
        theirs = vit(name, mixer)
        theirs.set_input_size((64, 16))
        with pytest.raises(UserError, match=rf"{mixer}.*\(4, 16\)"):
            theirs(image(64, 16))


def test_timms_set_input_size_leaves_no_mixer_on_the_old_grid() -> None:
    model = vit(NAMES[1], "sep_conv")
    resized = copy.deepcopy(model)
    model.set_input_size((64, 16))
    set_image_size(resized, (64, 16))
    close(model(image(64, 16)), resized(image(64, 16)))


def test_tokens_handed_to_a_block_lie_on_the_models_grid_after_another_size() -> None:
    model = vit(NAMES[0], "sep_conv")
    model(image(16, 64))
    model.set_input_size((64, 16))
    x = torch.randn(2, 64, 8, dtype=torch.float64)
    hosted = model.blocks[0].attn
    close(hosted(x), hosted.mixer(x, grid=(16, 4)))


def test_where_patches_are_dropped_only_places_are_missed() -> None:
    softmax = vit(NAMES[0], "softmax", patch_drop_rate=0.5).train()
    assert softmax(image(16, 64)).shape == (2, 3)
    with pytest.raises(UserError, match="got 32 tokens"):
        vit(NAMES[0], "sep_conv", patch_drop_rate=0.5).train()(image(16, 64))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_run_again_in_the_backward_pass_are_on_their_own_calls_grid(name: str) -> None:
    model = vit(name, "static_key", {"resize": "interpolate"}, dynamic_img_size=True).train()
    found = []
    for saving in (False, True):
        model.set_grad_checkpointing(saving)
        model.zero_grad()
        (model(image(64, 16)).sum() + model(image(16, 64)).square().sum()).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        close(a, b)


@pytest.mark.slow
def test_it_compiles_into_one_graph_a_size(shapes_checked: bool) -> None:
    if shapes_checked:
        pytest.skip("compilers cannot see through the shape checks")
    model = vit(NAMES[0], "sep_conv", dynamic_img_size=True)
    graphs: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    for size in ((16, 64), (64, 16), (16, 64)):
        # timm resamples position embeddings in float32; compiled by PyTorch 2.7 to 2.11 also those
        # that have their size, where is_exporting() is always true
        close(compiled(image(*size)), model(image(*size)), torch.float32)
    assert len(graphs) == 2


def test_features_of_images_of_any_size() -> None:
    options = {**SMALL, "mixer": "sep_conv", "dynamic_img_size": True, "depth": 4}
    model = timm.create_model(NAMES[0], features_only=True, **options)
    assert {f.shape[-2:] for f in model(torch.randn(1, 3, 64, 16))} == {(16, 4)}

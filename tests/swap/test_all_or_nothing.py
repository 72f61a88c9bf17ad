# SPDX-License-Identifier: Apache-2.0
"""A swap that fails at its very end leaves modules, hooks, modes and random states as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import MODELS, answer, images, tiny
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.base import find_host
from keymix.swap import swap


def structure(model: nn.Module) -> dict[str, Any]:
    """Which objects a model is made of, and in which mode they are."""
    entries: dict[str, Any] = {}
    for path, module in model.named_modules():
        own = {**module._parameters, **module._buffers, **module._modules}
        entries[path] = (
            module,
            type(module),
            module.training,
            {name: id(value) for name, value in own.items()},
        )
        entries[f"{path} hooks"] = [
            *module._forward_hooks.values(),
            *module._backward_hooks.values(),
        ]
    return entries


def hooked(model: nn.Module) -> list[Tensor]:
    """Let every module hear its calls, and return where the calls end up."""
    heard: list[Tensor] = []
    for module in model.modules():
        module.register_forward_hook(lambda m, x, y: heard.append(torch.zeros(())))
    return heard


@pytest.mark.slow
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "name", ["timm_vit", "timm_swin", "timm_metaformer", "torchvision_swin", "hugging_face_vit"]
)
def test_what_fails_while_mixers_are_put_is_undone(
    name: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers" if name.startswith("hugging") else "torch")
    model, x = tiny(name), images(MODELS[name][1])
    model.train()
    hooked(model)
    host: Any = type(find_host(model))
    put, count = host.put, []

    def fails(self: Any, owner: nn.Module, place: Any, mixer: nn.Module) -> None:
        if owner is model:
            count.append(place.path)
            if len(count) == 2:
                raise error("at the second layer")
        put(self, owner, place, mixer)

    before, weights = structure(model), copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    drawn = torch.get_rng_state()
    monkeypatch.setattr(host, "put", fails)
    with pytest.raises(error, match="second layer"):
        swap(model, "static_key")
    assert len(count) == 2, "a mixer was put already"
    assert structure(model) == before
    assert torch.equal(torch.get_rng_state(), drawn)
    monkeypatch.undo()
    assert model.state_dict().keys() == weights.keys()
    fresh = tiny(name)
    fresh.load_state_dict(weights)
    assert torch.equal(answer(model.eval(), x), answer(fresh.eval(), x))


@pytest.mark.parametrize("bad", [torch.full((8, 3, 8, 12), float("nan")), torch.zeros(2, 3, 8, 12)])
def test_bad_images_leave_the_random_state(bad: Tensor) -> None:
    model = tiny("timm_vit")
    torch.manual_seed(3)
    drawn = torch.get_rng_state()
    with pytest.raises(UserError):
        swap(model, "static_key", calibration=bad.double())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_swap_that_succeeds_draws() -> None:
    one, other = tiny("timm_vit"), tiny("timm_vit")
    torch.manual_seed(3)
    for model in (one, other):
        swap(model, "static_key", init="fresh")
    keys = [dict(model.named_parameters())["blocks.0.attn.mixer.key"] for model in (one, other)]
    assert not torch.equal(*keys)

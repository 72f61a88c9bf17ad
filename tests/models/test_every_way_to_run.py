# SPDX-License-Identifier: Apache-2.0
"""Every registered model on every device, in every precision and batch it will meet."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

from each import each
from keymix.mixers.registry import list_mixers
from keymix.models import create_model
from mixer_cases import gradients, stir
from shrunk import FAMILIES, different, every_form, family_of, images, models_of, shrunk
from tolerances import close


def one_of_each(name: str) -> dict[str, Any]:
    """Options that leave a small model one block of each kind."""
    options = family_of(name).options
    if name in models_of("deepvit"):  # its last blocks are others than its first
        return {}
    if "depth" in options:
        return {"depth": 1}
    if "swin" in name:  # a block, a shifted one, and another stage
        return {"depths": [2, 1], "num_heads": [1, 2], "merging": [2]}
    if "depths" in options:
        return {"depths": [1] * len(options["depths"])}
    if "depth" in options.get("backbone_options", {}):
        return {"backbone_options": {**options["backbone_options"], "depth": 1}}
    return {}


@pytest.mark.slow
@every_form
def test_an_image_alone_gets_the_answer_it_gets_in_an_odd_batch(name: str) -> None:
    model = shrunk(name, **one_of_each(name)).double().eval()
    stir(model)
    x = images(name, count=3).double()
    y = model(x)
    for i in range(3):
        close(model(x[i : i + 1]), y[i : i + 1])


@pytest.mark.slow
@every_form
def test_it_trains_in_bfloat16(name: str) -> None:
    model = shrunk(name, **one_of_each(name)).bfloat16().train()
    y = model(images(name, count=3).bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.isfinite(y).all()
    y.float().square().sum().backward()
    bad = [k for k, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert bad == []


@every_form
def test_bfloat16_is_near_float32(name: str) -> None:
    model = shrunk(name).eval()
    stir(model)
    x = images(name, count=1)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(x).detach()
    wanted = model(x)
    assert not torch.equal(rounded.float(), wanted)
    wanted = wanted.detach()
    scale = max(1.0, float(wanted.abs().max()))
    assert float((rounded.float() - wanted).abs().max()) / scale < 0.2  # 4 blocks of 8 bits


def checkpointing_changes_nothing(model: torch.nn.Module, x: torch.Tensor) -> None:
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    y, grads = gradients(model, x)
    again, repeated = gradients(other, x)
    close(again, y)
    buffers = dict(other.named_buffers())
    for key, kept in model.named_buffers():  # running statistics see a batch once
        assert torch.equal(buffers[key], kept), key
    for key, grad in grads.items():
        if not grad.isnan().any():  # a blind class token leaves nothing to compare
            close(repeated[key], grad)


@pytest.mark.slow
@every_form
def test_checkpointing_changes_neither_output_nor_gradients(name: str) -> None:
    model = shrunk(name).double().train()
    stir(model)
    checkpointing_changes_nothing(model, images(name).double())


@pytest.mark.parametrize("mixer", list_mixers(domain="dense"))
def test_checkpointing_is_open_to_every_mixer(mixer: str) -> None:
    model = create_model("vit_nano_p2_12", mixer=mixer, embed_dim=8, num_heads=2).double()
    stir(model)
    checkpointing_changes_nothing(model, images("vit_nano_p2_12").double())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["cait_micro_p4_32", "swin_micro_p2_32", "cvt_micro_32", "caformer_micro_32"]
)
def test_checkpointing_counts_a_batch_once_in_every_host(name: str) -> None:
    unshifted = {"shifted": False} if "swin" in name else {}
    model = shrunk(name, mixer="re_attention", **unshifted).double().train()
    stir(model)
    checkpointing_changes_nothing(model, images(name).double())


def layers_of(name: str) -> set[str]:
    """The classes of ours that a small model is made of, and the module of its family."""
    modules = different()[name].modules()
    ours = {type(m).__name__ for m in modules if "keymix" in type(m).__module__}
    return ours | {line.split()[0] for line in FAMILIES if name in models_of(line)}


@cache
def of_all_layers() -> list[str]:
    """A few small models in which every layer of ours stands, one of each family at least."""
    layers = {name: layers_of(name) for name in different()}
    missing, chosen = set().union(*layers.values()), []
    while missing:
        chosen.append(
            max(layers, key=lambda name: (len(layers[name] & missing), -family_of(name).blocks))
        )
        missing -= layers[chosen[-1]]
    return chosen


def compiles_in_one_graph(name: str) -> None:
    fewer = one_of_each(name)
    if name in models_of("deepvit"):
        fewer = {"depth": 1}
    if "qkformer" in name:  # its neurons are those of Spikformer, which keeps its time steps
        fewer["time_steps"] = 1
    model = shrunk(name, **fewer).train()
    stir(model)
    x = images(name)
    with torch.no_grad():
        wanted = copy.deepcopy(model)(x)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    try:
        close(compiled(x), wanted)
    finally:
        torch.compiler.reset()


def to_train(line: str) -> dict[str, tuple[str]]:
    return {name: (name,) for name in of_all_layers() if name in models_of(line)}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@each("name", to_train, of="family")
def test_every_layer_compiles_in_training(name: str, shapes_checked: bool) -> None:
    if shapes_checked:
        pytest.skip("compilers cannot see through the shape checks")
    compiles_in_one_graph(name)

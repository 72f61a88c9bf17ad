# SPDX-License-Identifier: Apache-2.0
"""QKFormer against SpikingJelly's own, with weights mapped across: spike by spike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keymix.models import create_model
from mixer_cases import stir
from tolerances import close

neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
surrogate = pytest.importorskip("spikingjelly.activation_based.surrogate")
qkformer = pytest.importorskip("spikingjelly.activation_based.model.qkformer")

HEADS = (2, 4, 8)
OPTIONS: dict[str, Any] = {"embed_dim": 32, "depths": (1, 1, 1), "num_heads": HEADS}


def theirs(qka_type: str = "token") -> nn.Module:
    """Biases that our form has not are zero there."""
    torch.manual_seed(0)
    model: nn.Module = qkformer.QKFormer(
        T=3,
        num_classes=5,
        embed_dims=32,
        num_heads=HEADS,
        depths=(1, 1, 1),
        qka_type=qka_type,
        detach_reset=True,
    ).double()
    stir(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.weight.mul_(2.0)
                module.bias.add_(0.5)
            elif isinstance(module, nn.Conv2d) and module.bias is not None:
                module.bias.zero_()
    return model


def names(key: str) -> list[str]:
    """What a tensor of theirs is called here, several where they hold roles in one."""
    part, *rest = key.split(".")
    if part == "head":
        return [key]
    stage = f"stages.{int(part[-1]) - 1}"
    last = rest[-1]
    if part.startswith("patch_embed"):
        where = f"{stage}.patch_embed"
        if rest[0] == "shortcut":
            return [f"{where}.shortcut.{('conv', 'bn')[int(rest[1])]}.{last}"]
        kind, index = rest[0][:-1], int(rest[0][-1]) - 1
        stem = part == "patch_embed1"
        place = "encode.0" if stem and index == 0 else f"convs.{index - stem}"
        return [f"{where}.{place}.{kind}.{last}"]
    where = f"{stage}.blocks.{rest[0]}"
    if rest[1] == "mlp":
        return [f"{where}.mlp.{rest[2]}.{last}"]
    roles = {"qk": ("q", "k"), "qkv": ("q", "k", "v"), "proj": ("proj",)}[rest[2].split("_")[0]]
    norm = "_bn" if rest[3] == "1" else ""
    return [f"{where}.attn.mixer.{role}{norm}.{last}" for role in roles]


def mapped(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in state.items():
        found = names(key)
        if key.endswith("num_batches_tracked"):
            yield from ((name, tensor) for name in found)
        else:
            yield from zip(found, tensor.chunk(len(found)), strict=True)


def ours(model: nn.Module, *, mixer: str = "qk_token", **options: Any) -> nn.Module:
    made = create_model(
        "qkformer_hst_10_384",
        num_classes=5,
        time_steps=3,
        mixer=[mixer, mixer, "spiking_self"],
        **OPTIONS,
        **options,
    ).double()
    own = made.state_dict()
    state = {
        name: tensor.reshape(own[name].shape)
        for name, tensor in mapped(model.state_dict())
        if name in own
    }
    for name in own.keys() - state.keys():  # the bias of the output projection
        assert name.endswith("attn.mixer.proj.bias"), name
        state[name] = torch.zeros_like(own[name])
    made.load_state_dict(state, strict=True)
    return made


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("qka_type", "mixer"), [("token", "qk_token"), ("channel", "qk_channel")])
def test_logits_and_features_are_spikingjellys(qka_type: str, mixer: str, training: bool) -> None:
    other = theirs(qka_type).train(training)
    model = ours(other, mixer=mixer).train(training)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    features: list[Tensor] = []
    for stage in (other.stage1, other.stage2, other.stage3):
        stage[-1].register_forward_hook(lambda m, args, out: features.append(out))
    wanted = other(x)
    seen: list[Tensor] = []
    for stage in model.stages:
        stage.register_forward_hook(lambda m, args, out: seen.append(out))
    close(model(x), wanted)
    for found, expected in zip(seen, features, strict=True):
        assert torch.equal(found, expected.to(found))  # counts of spikes, whole numbers
        assert expected.unique().numel() > 3
    assert wanted.std() > 0.1


def test_frames_are_spikingjellys_too() -> None:
    other = theirs().eval()
    frames = torch.randn(2, 3, 3, 64, 64, dtype=torch.float64)
    close(ours(other).eval()(frames), other(frames.transpose(0, 1)))


def test_gradients_are_spikingjellys() -> None:
    other = theirs().train()
    model = ours(other).train()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    other(x).square().sum().backward()
    model(x).square().sum().backward()
    own = {name: p.grad for name, p in model.named_parameters()}
    entries = {name: p.grad for name, p in other.named_parameters()}
    seen = set()
    for name, grad in mapped(entries):
        if name in own:  # not the biases that a norm takes out again
            close(own[name], grad.reshape(own[name].shape))
            seen.add(name)
    assert {name for name in own if name not in seen} == {
        name for name in own if name.endswith("attn.mixer.proj.bias")
    }


def lif_node(v_threshold: float) -> nn.Module:
    node: nn.Module = neuron.LIFNode(
        v_threshold=v_threshold,
        surrogate_function=surrogate.Sigmoid(4.0),
        detach_reset=True,
        step_mode="m",
    )
    return node


def test_their_neurons_in_our_model_are_ours() -> None:
    other = theirs().train()
    plain, foreign = ours(other), ours(other, neuron=lif_node)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    wanted = plain(x)
    for _ in range(2):  # nothing is left of the call before
        result = foreign(x)
        close(result, wanted)
    wanted.square().sum().backward()
    result.square().sum().backward()
    outcome = dict(plain.named_parameters())
    for name, p in foreign.named_parameters():
        close(p.grad, outcome[name].grad)

# SPDX-License-Identifier: Apache-2.0
"""Our spiking mixers and SpikingJelly's, with the same weights: spike by spike, and the gradients.

Its layouts differ, ``[T, B, C, N]`` with one convolution for all roles, its output projections
have no bias but that of SDSA, and its SDSA holds a whole residual branch: a neuron in front, the
input added behind, and no neuron at the end.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from each import together
from keymix.mixers.registry import create_mixer
from keymix.mixers.spiking import SpikingMixer
from tolerances import close

functional = pytest.importorskip("spikingjelly.activation_based.functional")
layer = pytest.importorskip("spikingjelly.activation_based.layer")

THEIRS = {
    "qk_token": "TokenQKAttention",
    "qk_channel": "ChannelQKAttention",
    "spiking_self": "SpikingSelfAttention",
}
PARTS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def shift(norm: nn.Module) -> None:
    """Move a norm to where enough of the neurons behind it fire, and not all."""
    with torch.no_grad():
        norm.weight.add_(0.2 * torch.randn_like(norm.weight))
        norm.bias.normal_(1.6, 0.3)
        norm.running_mean.normal_(0.0, 0.1)
        norm.running_var.uniform_(0.1, 0.3)


def norms(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def copy_norm(ours: nn.Module, theirs: nn.Module, where: slice) -> None:
    for part in PARTS:
        value = getattr(theirs, part)
        getattr(ours, part).data.copy_(value[where] if value.ndim else value)


def pair(name: str, dim: int, heads: int, **options: Any) -> tuple[SpikingMixer, nn.Module]:
    """The same attention twice: ours, and SpikingJelly's."""
    torch.manual_seed(1)
    theirs = getattr(layer, THEIRS[name])(dim, heads).double()
    for norm in norms(theirs):
        shift(norm)
    ours = create_mixer(name, dim=dim, num_heads=heads, proj_bias=False, **options).double()
    assert isinstance(ours, SpikingMixer)
    joint = theirs.qkv_conv_bn if name == "spiking_self" else theirs.qk_conv_bn
    for i, role in enumerate(ours.roles):
        where = slice(i * dim, (i + 1) * dim)
        getattr(ours, role).weight.data.copy_(joint[0].weight[where, :, 0])
        copy_norm(getattr(ours, f"{role}_bn"), joint[1], where)
    ours.proj.weight.data.copy_(theirs.proj_conv_bn[0].weight[..., 0])
    copy_norm(ours.proj_bn, theirs.proj_conv_bn[1], slice(None))
    return ours, theirs


def spikes(t: int, b: int, n: int, c: int) -> Tensor:
    return (torch.rand(t, b, n, c, generator=torch.Generator().manual_seed(2)) < 0.5).double()


@together
@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 2, 49, 16, 2), (1, 3, 25, 12, 3), (3, 2, 9, 8, 1)])
def test_spikes_are_those_of_spikingjelly(
    name: str, training: bool, shape: tuple[int, int, int, int, int]
) -> None:
    t, b, n, c, h = shape
    ours, theirs = pair(name, c, h)
    ours.train(training)
    theirs.train(training)
    x = spikes(t, b, n, c)
    functional.reset_net(theirs)
    wanted = theirs(x.mT).mT
    y = ours(x)
    assert 0.02 < float(wanted.detach().mean()) < 0.98
    assert torch.equal(y, wanted)
    ours.eval()
    theirs.eval()
    functional.reset_net(theirs)
    assert torch.equal(ours(x), theirs(x.mT).mT), "running statistics went apart"


@pytest.mark.parametrize("name", THEIRS)
def test_what_is_gathered_is_what_spikingjelly_projects(name: str) -> None:
    ours, theirs = pair(name, 16, 2)
    ours.eval()
    theirs.eval()
    x = spikes(4, 2, 49, 16)
    projected: list[Tensor] = []
    theirs.proj_conv_bn.register_forward_pre_hook(lambda m, args: projected.append(args[0]))
    theirs(x.mT)
    gathered = ours.spikes(x)[ours.published[0]]
    assert 0.02 < float(gathered.detach().mean()) < 0.98
    assert torch.equal(gathered, projected[0].mT)


@together
@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_those_of_spikingjelly(name: str, training: bool) -> None:
    ours, theirs = pair(name, 16, 2)
    ours.train(training)
    theirs.train(training)
    x = spikes(4, 2, 25, 16)
    weight = torch.randn(x.shape, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    (ours(mine) * weight).sum().backward()
    (theirs(other.mT).mT * weight).sum().backward()
    assert mine.grad is not None
    assert other.grad is not None
    assert mine.grad.abs().max() > 1e-3
    close(mine.grad, other.grad)
    close(ours.proj.weight.grad, theirs.proj_conv_bn[0].weight.grad[..., 0])
    joint = theirs.qkv_conv_bn if name == "spiking_self" else theirs.qk_conv_bn
    close(
        torch.cat([getattr(ours, role).weight.grad for role in ours.roles]),
        joint[0].weight.grad[..., 0],
    )


@pytest.mark.parametrize("training", [True, False])
def test_spike_driven_attention_is_the_heart_of_spikingjellys_branch(training: bool) -> None:
    """Its keys and values are summed and mask its queries: our queries, keys and values."""
    torch.manual_seed(1)
    theirs = layer.SpikeDrivenSelfAttention(16, 2).double().train(training)
    for norm in norms(theirs):
        shift(norm)
    ours = create_mixer("spike_driven", dim=16, num_heads=2).double().train(training)
    for role, named in (("q", "k"), ("k", "v"), ("v", "q"), ("proj", "proj")):
        linear, conv = getattr(ours, role), getattr(theirs, f"{named}_conv")
        linear.weight.data.copy_(conv.weight[..., 0, 0])
        copy_norm(getattr(ours, f"{role}_bn"), getattr(theirs, f"{named}_bn"), slice(None))
    ours.proj.bias.data.copy_(theirs.proj_conv.bias)
    potentials = 2 * torch.randn(4, 3, 16, 5, 7, dtype=torch.float64)
    branch = theirs(potentials) - potentials
    functional.reset_net(theirs)
    x = theirs.shortcut_lif(potentials).flatten(3).mT
    currents: list[Tensor] = []
    ours.proj_sn.register_forward_pre_hook(lambda m, args: currents.append(args[0]))
    ours(x)
    seen = ours.spikes(x)
    assert 0.02 < float(seen["SDSA'"].detach().mean()) < 0.98
    close(currents[0], branch.flatten(3).mT)

# SPDX-License-Identifier: Apache-2.0
"""SpikingJelly's neurons and ours compute the same, and stand in each other's networks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from each import together
from keymix.errors import UserError
from keymix.layers.neurons import IF, LIF, Neurons, ParametricLIF, neuron_maker
from keymix.layers.stepping import stepping
from tolerances import close

pytest.importorskip("spikingjelly", reason="SpikingJelly is not installed")
from spikingjelly.activation_based import functional, neuron, surrogate

SURROGATES = {"sigmoid": surrogate.Sigmoid(4.0), "atan": surrogate.ATan(2.0)}
PAIRS = {
    "lif": (lambda **o: LIF(tau=3.0, **o), lambda **o: neuron.LIFNode(tau=3.0, **o)),
    "if": (IF, neuron.IFNode),
    "plif": (
        lambda **o: ParametricLIF(init_tau=3.0, **o),
        lambda **o: neuron.ParametricLIFNode(init_tau=3.0, **o),
    ),
}


def pair(kind: str, v_reset: float | None, detach: bool, slope: str) -> tuple[nn.Module, nn.Module]:
    ours, theirs = PAIRS[kind]
    shared = {"v_threshold": 0.7, "v_reset": v_reset, "detach_reset": detach}
    return (
        ours(**shared, surrogate=slope).double(),
        theirs(**shared, surrogate_function=SURROGATES[slope], step_mode="m").double(),
    )


@together
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("v_reset", [0.0, -0.2, None])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("slope", SURROGATES)
def test_spikes_and_gradients_are_theirs(kind, v_reset, detach, slope) -> None:
    ours, theirs = pair(kind, v_reset, detach, slope)
    x = 2 * torch.randn(5, 3, 7, dtype=torch.float64, requires_grad=True)
    weigh = torch.randn_like(x)
    spikes, wanted = ours(x), theirs(x)
    assert torch.equal(spikes, wanted)
    assert 0 < wanted.mean() < 1
    inputs = [(x, *module.parameters()) for module in (ours, theirs)]
    for one, other in zip(
        torch.autograd.grad((spikes * weigh).sum(), inputs[0]),
        torch.autograd.grad((wanted * weigh).sum(), inputs[1]),
        strict=True,
    ):
        close(one, other)


@pytest.mark.parametrize("kind", PAIRS)
def test_step_by_step_they_agree_too(kind) -> None:
    net = nn.Sequential(*pair(kind, 0.0, True, "sigmoid"))
    functional.set_step_mode(net, "s")
    ours, theirs = net
    assert ours.step_mode == theirs.step_mode == "s"
    x = 2 * torch.randn(5, 3, 7, dtype=torch.float64)
    for _ in range(2):
        for frame in x:
            assert torch.equal(ours(frame), theirs(frame))
            close(ours.v, theirs.v)
        functional.reset_net(net)
        assert ours.v is None
    functional.set_step_mode(net, "m")
    assert torch.equal(ours(x), theirs(x))
    with pytest.raises(UserError):
        functional.set_step_mode(net, "x")


def test_our_neurons_run_in_their_training_loop() -> None:
    net = nn.Sequential(nn.Linear(4, 6), LIF(), nn.Linear(6, 2), neuron.LIFNode(step_mode="m"))
    x = 2 * torch.randn(3, 5, 4)
    for _ in range(2):
        net(x).sum().backward()
        functional.reset_net(net)
    functional.detach_net(net)


@pytest.mark.parametrize(
    "maker",
    [
        neuron.LIFNode,
        lambda v_threshold, **_: neuron.LIFNode(v_threshold=v_threshold, detach_reset=True),
    ],
)
def test_their_neurons_through_our_maker_keep_no_state(maker) -> None:
    theirs = neuron_maker(maker)(v_threshold=0.7, dtype=torch.float64)
    ours = Neurons()(v_threshold=0.7)
    x = 2 * torch.randn(5, 3, 7, dtype=torch.float64)
    for _ in range(2):  # a second call is from rest
        assert torch.equal(theirs(x), ours(x))
    assert not isinstance(theirs.neuron.v, torch.Tensor)
    assert theirs.neuron.v_threshold == 0.7
    with stepping(theirs):
        assert torch.equal(torch.stack([theirs(frame) for frame in x]), ours(x))
    assert torch.equal(theirs(x), ours(x))


def test_a_learned_time_constant_goes_over_by_its_weight() -> None:
    theirs = neuron_maker(lambda v_threshold: neuron.ParametricLIFNode(3.0))()
    ours = ParametricLIF(init_tau=2.0)
    assert set(theirs.state_dict()) == {"neuron.w"}
    ours.load_state_dict({"w": theirs.state_dict()["neuron.w"]})
    assert math.isclose(ours.w.item(), -math.log(2.0), rel_tol=1e-6)

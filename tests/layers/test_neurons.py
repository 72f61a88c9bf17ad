# SPDX-License-Identifier: Apache-2.0
"""Neurons as modules: from rest each call, one step a call if asked, and what makes them."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import Tensor, nn

from each import together
from keymix.errors import KeymixWarning
from keymix.layers.neurons import IF, LIF, Neurons, ParametricLIF, StatelessNeuron, neuron_maker
from keymix.layers.stepping import stepping
from keymix.ops.neuron.surrogate import Surrogate
from mixer_cases import refused
from tolerances import close


class Counting(nn.Module):
    """A neuron of another library: it adds up its input until it is reset."""

    def __init__(self, v_threshold: float = 1.0, **_: object) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.step_mode, self.v_threshold, self.sum = "s", v_threshold, 0.0

    def reset(self) -> None:
        self.sum = 0.0

    def forward(self, x: Tensor) -> Tensor:
        steps = x if self.step_mode == "m" else x[None]
        out = []
        for each in steps:
            self.sum = self.sum + self.gain * each
            fired = (self.sum >= self.v_threshold).to(x.dtype)
            out.append(fired + self.sum - self.sum.detach())  # a straight way back
        return torch.stack(out) if self.step_mode == "m" else out[0]


def test_lif_charges_by_a_share_of_the_way_to_its_input() -> None:
    neuron = LIF(tau=4.0, v_threshold=1.0)
    x = torch.tensor([[2.0], [2.0], [2.0], [2.0]])
    # 0.5, 0.875, 1.15625 fires, 0.5
    assert neuron(x).flatten().tolist() == [0, 0, 1, 0]
    assert IF(v_threshold=3.0)(x).flatten().tolist() == [0, 1, 0, 1]
    assert IF(v_threshold=3.0, v_reset=None)(x).flatten().tolist() == [0, 1, 1, 0]


def test_plif_starts_as_lif_and_learns_its_time_constant() -> None:
    x = 2 * torch.randn(4, 3, 5, dtype=torch.float64)
    plif = ParametricLIF(init_tau=3.0, dtype=torch.float64)
    assert torch.equal(plif(x), LIF(tau=3.0)(x))
    plif(x).sum().backward()
    assert plif.w.grad.abs() > 0


@pytest.mark.parametrize("neuron", [LIF(), IF(v_reset=None), ParametricLIF()], ids=str)
def test_no_call_hangs_on_the_one_before(neuron) -> None:
    x = 2 * torch.randn(4, 3, 5)
    wanted = neuron(x)
    neuron(torch.randn(2, 7))
    assert torch.equal(neuron(x), wanted)
    assert neuron.v is None


def test_the_backend_is_chosen_by_name_and_explained() -> None:
    x = 2 * torch.randn(4, 3, 5)
    assert LIF().choose_backend(x).name == "blocked"
    assert LIF(backend="reference").choose_backend(x).name == "reference"
    assert torch.equal(LIF(backend="reference")(x), LIF()(x))
    with refused("'triton' cannot run here"):
        LIF(backend="triton")(x)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8),
        LIF(v_threshold=0.2),
        nn.Linear(8, 8),
        ParametricLIF(v_threshold=0.05, v_reset=None),
        nn.Linear(8, 4),
        StatelessNeuron(Counting(0.05)),
    ).double()


class Images(nn.Module):
    """Convolution, norm, neuron on ``[T, B, C, H, W]`` or on one step ``[B, C, H, W]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.neuron = IF(v_threshold=0.2)
        self.norm.running_mean.uniform_(-0.2, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x.flatten(0, -4) if x.ndim == 5 else x))
        return self.neuron(y.view(*x.shape[:-3], *y.shape[1:]))


@pytest.mark.parametrize(
    ("model", "shape"), [(network(), (5, 3, 6)), (Images().double().eval(), (5, 2, 2, 6, 7))]
)
def test_stepping_through_frames_equals_one_call(model, shape) -> None:
    x = 2 * torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    wanted = model(x)
    assert 0 < wanted.mean() < 1
    for _ in range(2):  # each block starts from rest
        with stepping(model):
            found = torch.stack([model(frame) for frame in x])
        assert torch.equal(found, wanted)
    assert torch.equal(model(x), wanted)
    inputs = (x, *model.parameters())
    weigh = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad((found * weigh).sum(), inputs, retain_graph=True, allow_unused=True),
        torch.autograd.grad((wanted * weigh).sum(), inputs, allow_unused=True),
        strict=True,
    ):
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other)


def test_stepping_begins_and_ends_at_rest() -> None:
    neuron = LIF()
    neuron.step_mode = "s"
    x = torch.full((4,), 1.5)
    neuron(x)
    with stepping(neuron):
        assert not neuron(x).any()  # half of 1.5, from rest
        assert neuron.v is not None
    assert neuron.v is None
    assert neuron.step_mode == "s"


def test_stepping_ends_when_an_exception_does() -> None:
    model = network()
    x = torch.randn(3, 6).double()
    with pytest.raises(RuntimeError), stepping(model):
        _ = model(x), model[1].v + torch.randn(7)  # a potential of [3, 8]
    assert model[1].v is None
    assert model[5].neuron.sum == 0
    assert {model[1].step_mode, model[5].step_mode, model[5].neuron.step_mode} == {"m"}


@pytest.mark.parametrize(
    "other", [torch.randn(2, 5), torch.randn(3, 5).double(), torch.empty(3, 5, device="meta")]
)
def test_a_neuron_says_when_its_input_changes_and_starts_from_rest(other) -> None:
    neuron = LIF()
    neuron.step_mode = "s"
    neuron(torch.ones(3, 5))
    with pytest.warns(KeymixWarning, match=r"LIF was given currents .* after \[3, 5\]"):
        neuron(other)
    fresh = LIF()
    fresh.step_mode = "s"
    fresh(other)
    assert neuron.v.device.type == "meta" or torch.equal(neuron.v, fresh.v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        neuron(other)


def test_turning_to_evaluation_or_another_mode_starts_from_rest() -> None:
    neuron = LIF()
    for turn in (
        neuron.eval,
        neuron.train,
        neuron.reset,
        lambda: setattr(neuron, "step_mode", "m"),
    ):
        neuron.step_mode = "s"
        neuron(torch.ones(3))
        assert neuron.v.tolist() == [0.5] * 3
        turn()
        assert neuron.v is None
    neuron.step_mode = "s"
    neuron(torch.ones(3))
    neuron.train()  # it is training already
    assert neuron.v is not None


def test_the_potential_is_in_no_state_and_in_no_copy() -> None:
    neuron = ParametricLIF()
    neuron.step_mode = "s"
    neuron(torch.ones(3))
    assert set(neuron.state_dict()) == {"w"}
    assert copy.deepcopy(neuron).v is None
    saved = io.BytesIO()
    torch.save(neuron, saved)
    saved.seek(0)
    assert torch.load(saved, weights_only=False).v is None
    assert neuron.v is not None


def test_detached_potentials_end_the_way_back() -> None:
    neuron = LIF()
    neuron.step_mode = "s"
    x = torch.full((3,), 0.5, requires_grad=True)
    neuron(x)
    neuron.detach()
    neuron(torch.ones(3)).sum()
    assert not neuron.v.requires_grad


@together
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v_threshold": 0.0}, "v_threshold=0.0 must be a number above v_reset=0.0"),
        ({"v_threshold": float("nan")}, "v_threshold=nan"),
        ({"v_threshold": float("inf")}, "v_threshold=inf"),
        ({"v_reset": float("-inf")}, "v_reset=-inf"),
        ({"v_threshold": -1.0, "v_reset": None}, "v_threshold=-1.0 must be above 0"),
        ({"surrogate": "relu"}, "unknown surrogate 'relu'"),
        ({"surrogate": "sigmoi"}, "Did you mean 'sigmoid'"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
        ({"tau": 1.0}, "tau=1.0 must be a number of steps above 1"),
    ],
)
def test_numbers_out_of_range_are_refused(change, words) -> None:
    with refused(words):
        LIF(**change)


@pytest.mark.parametrize(
    ("kind", "kinds"), [("lif", LIF), ("if", IF), ("plif", ParametricLIF), ("relu", nn.ReLU)]
)
def test_a_kind_makes_its_neurons(kind, kinds) -> None:
    made = neuron_maker(kind)(v_threshold=0.5)
    assert type(made) is kinds
    assert kind == "relu" or made.v_threshold == 0.5


@pytest.mark.parametrize("kind", [LIF, IF, ParametricLIF])
def test_a_class_of_ours_makes_neurons(kind) -> None:
    made = neuron_maker(kind)(v_threshold=0.5, dtype=torch.float64)
    assert type(made) is kind
    assert made.v_threshold == 0.5
    assert all(p.dtype == torch.float64 for p in made.parameters())


@pytest.mark.parametrize("kind", ["lif", "if", "plif"])
def test_every_kind_gets_all_options(kind) -> None:
    options = {"v_reset": None, "detach_reset": False, "backend": "reference"}
    made = Neurons(kind=kind, surrogate=Surrogate("atan", 3.0), **options)(v_threshold=0.7)
    found = {name: getattr(made, name) for name in options}
    assert found == options
    assert made.dynamics.surrogate == Surrogate("atan", 3.0)
    assert made.v_threshold == 0.7


def test_neurons_pass_their_options_on() -> None:
    options = {"v_reset": None, "detach_reset": False, "surrogate": "atan", "backend": "reference"}
    made = Neurons(kind="plif", tau=3.0, **options)(v_threshold=0.5, dtype=torch.float64)
    assert repr(made) == (
        "ParametricLIF(init_tau=3.0, v_threshold=0.5, v_reset=None, detach_reset=False, "
        "surrogate=atan(2.0), backend='reference')"
    )
    assert made.w.dtype == torch.float64
    assert "tau=2.0" in repr(LIF())


@pytest.mark.parametrize("maker", [Counting, lambda v_threshold: Counting(v_threshold).double()])
def test_what_keeps_state_is_reset_before_and_after_every_call(maker) -> None:
    made = neuron_maker(maker)(v_threshold=1.5, dtype=torch.float64)
    x = torch.ones(4, 2, dtype=torch.float64)
    for _ in range(2):
        assert made(x)[:, 0].tolist() == [0, 1, 1, 1]
        assert made.neuron.sum == 0
    assert made.neuron.gain.dtype == torch.float64
    made.neuron.step_mode = "m"
    made.neuron(x)  # past us
    assert (made.neuron.sum != 0).all()
    assert made(x)[:, 0].tolist() == [0, 1, 1, 1]
    other = neuron_maker(maker)(dtype=torch.float64)
    other.load_state_dict({name: 2 * value for name, value in made.state_dict().items()})
    assert other.neuron.gain == 2


def test_an_error_on_the_way_leaves_no_state() -> None:
    class Failing(Counting):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise RuntimeError("stop")

    made = StatelessNeuron(Failing())
    with pytest.raises(RuntimeError, match="stop"):
        made(torch.ones(3, 2))
    assert made.neuron.sum == 0


def test_what_has_no_step_mode_takes_no_single_steps() -> None:
    class Whole(nn.Module):
        def reset(self) -> None: ...

    made = neuron_maker(lambda v_threshold: Whole())()
    with refused("Whole has no step_mode"), stepping(made):
        made(torch.ones(2))


def test_our_neurons_and_stateless_modules_are_not_wrapped() -> None:
    assert type(neuron_maker(lambda v_threshold: LIF(v_threshold=v_threshold))()) is LIF
    assert type(neuron_maker(lambda v_threshold, **_: nn.GELU())()) is nn.GELU
    maker = neuron_maker(Counting)
    assert neuron_maker(maker) is maker

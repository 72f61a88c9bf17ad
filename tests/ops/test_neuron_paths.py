# SPDX-License-Identifier: Apache-2.0
"""Every path of the neurons computes what the reference computes, with every gradient."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from neuron_cases import Case, agrees, every_case, outcome
from torch import Tensor

import keymix
from each import together
from keymix.analysis.counting import count
from keymix.errors import UserError
from keymix.ops.neuron import blocked, multi_step
from keymix.ops.neuron.multi_step import choose, integrate_and_fire
from keymix.ops.neuron.reference import Dynamics
from keymix.ops.neuron.surrogate import Surrogate
from tolerances import close

LIF = {"keep": 0.5, "gain": 0.5}


def steps_by_hand(x: np.ndarray, v: float, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Eq. 1 to 3 neuron by neuron, with keep 0.7 and gain 0.3."""
    rest = 0.0 if case.v_reset is None else case.v_reset
    potential, spikes = np.full(x.shape[1:], v), np.zeros_like(x)
    for t, current in enumerate(x):
        h = rest + 0.7 * (potential - rest) + 0.3 * current
        spikes[t] = h >= 0.6
        fired = h - 0.6 if case.v_reset is None else case.v_reset
        potential = np.where(spikes[t] > 0, fired, h)
    return spikes, potential


@together
@pytest.mark.parametrize("v_reset", [0.0, -0.3, None])
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_neurons_follow_the_equations(v_reset, backend) -> None:
    case = Case(steps=5, v_reset=v_reset)
    x = case.inputs()[0]
    wanted = steps_by_hand(x.numpy(), case.how.rest, case)
    spikes, last = integrate_and_fire(x, keep=0.7, gain=0.3, how=case.how, backend=backend)
    assert np.array_equal(spikes.numpy(), wanted[0])
    assert 0 < wanted[0].mean() < 1
    close(last, torch.from_numpy(wanted[1]))


@together
@pytest.mark.parametrize("case", list(every_case()), ids=str)
def test_blocked_is_the_reference(case: Case) -> None:
    agrees(case, "blocked")


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.mT])
def test_spikes_may_be_changed_in_place(view) -> None:
    x = view(torch.randn(3, 4, 5, requires_grad=True))
    spikes, last = integrate_and_fire(x, how=Case().how, backend="blocked", **LIF)
    wanted = spikes + 1
    spikes += 1
    last.zero_()
    assert torch.equal(spikes, wanted)
    assert spikes.stride() == x.stride()
    spikes.sum().backward()


def test_blocked_reads_nothing_it_did_not_write(poisoned_memory: None) -> None:
    for case in (
        Case(),
        Case(v_reset=None, detach_reset=False, last=True),
        Case(learned="neuron", starts=True, v_reset=-0.3, last=True),
    ):
        agrees(case, "blocked")


@pytest.mark.parametrize("learned", ["", "layer", "neuron"])
def test_chunks_that_do_not_come_out_even_are_joined(monkeypatch, learned) -> None:
    monkeypatch.setattr(blocked, "CHUNK", 7)
    agrees(Case(learned=learned, starts=True, last=True), "blocked")


LAYOUTS = {
    "channels last": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "steps inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other": lambda x: x.repeat_interleave(2, 3)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_currents_may_lie_in_any_order(layout) -> None:
    agrees(Case(learned="neuron", starts=True, last=True), "blocked", LAYOUTS[layout])


def test_an_image_repeated_without_a_copy_is_taken() -> None:
    case = Case(steps=4)
    image = torch.randn(case.shape, dtype=torch.float64, requires_grad=True)
    found = []
    for backend in ("reference", "blocked"):
        x = image.expand(4, *case.shape)
        spikes, _ = integrate_and_fire(x, **LIF, how=case.how, backend=backend)
        found.append(torch.autograd.grad((spikes * torch.arange(5)).sum(), image)[0])
    close(*found)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_spikes_and_gradients_keep_the_memory_format(backend) -> None:
    x = torch.randn(3, 2, 5, 6, 4).permute(0, 1, 4, 2, 3).requires_grad_()  # [T, B, C, H, W]
    spikes, _ = integrate_and_fire(x, **LIF, how=Case().how, backend=backend)
    assert spikes.stride() == x.stride()
    assert torch.autograd.grad(spikes.sum(), x)[0].stride() == x.stride()


@pytest.mark.parametrize("gain", [0.5, 0.3])
def test_float32_spikes_are_the_reference_bit_for_bit(gain) -> None:
    x = 2 * torch.randn(4, 300_000)
    how = Dynamics(v_threshold=1.0, v_reset=0.0, detach_reset=True, surrogate=Surrogate())
    one, other = (
        integrate_and_fire(x, keep=1 - gain, gain=gain, how=how, backend=backend)
        for backend in ("reference", "blocked")
    )
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_bfloat16_currents_charge_potentials_in_float32(backend) -> None:
    case = Case(last=True, learned="layer")
    inputs = case.inputs(torch.bfloat16)
    found = outcome(case, inputs, backend)
    inputs = [each if each is None else each.double() for each in inputs]
    wanted = outcome(case, inputs, "reference")
    assert found[0].dtype == torch.bfloat16
    assert found[1].dtype == torch.float32
    assert torch.equal(found[0].double(), wanted[0])
    for one, other in zip(found[1:], wanted[1:], strict=True):
        close(one, other, torch.bfloat16)
    close(found[1], wanted[1], torch.float32)


def test_gradients_of_gradients_are_those_of_the_reference() -> None:
    case = Case(learned="layer", detach_reset=False)
    found = []
    inputs = case.inputs()
    for backend in ("reference", "blocked"):
        x, _, keep, gain = (each if each is None else each.requires_grad_() for each in inputs)
        spikes, _ = integrate_and_fire(x, keep=keep, gain=gain, how=case.how, backend=backend)
        (first,) = torch.autograd.grad(spikes.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (x, keep, gain)))
    for one, other in zip(*found, strict=True):
        assert other.any()
        close(one, other)


@together
@pytest.mark.parametrize("surrogate", [Surrogate(), Surrogate("atan"), Surrogate("atan", 3.0)])
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_a_surrogate_gradient_is_the_finite_difference_of_the_smooth_step(
    surrogate, backend
) -> None:
    x = torch.randn(1, 50, dtype=torch.float64)
    how = Dynamics(v_threshold=0.4, v_reset=0.0, detach_reset=True, surrogate=surrogate)

    def smooth(x: Tensor) -> Tensor:
        return surrogate.primitive(0.8 * x - 0.4)

    leaf = x.clone().requires_grad_()
    spikes, _ = integrate_and_fire(leaf, keep=0.2, gain=0.8, how=how, backend=backend)
    (found,) = torch.autograd.grad(spikes.sum(), leaf)
    assert (found - (smooth(x + 1e-6) - smooth(x - 1e-6)) / 2e-6).abs().max() < 1e-8
    assert surrogate.primitive(torch.tensor(0.0)) == 0.5


@pytest.mark.parametrize("v_reset", [0.0, -0.3, None])
def test_the_smoothed_network_has_its_finite_differences_as_gradient(monkeypatch, v_reset) -> None:
    """With the smooth step in the step's place, all of the recursion is differentiable."""
    from keymix.ops.neuron import reference

    class Smooth:
        apply = staticmethod(lambda x, surrogate: surrogate.primitive(x))

    monkeypatch.setattr(reference, "_StepAhead", Smooth)  # what is taken outside a compiler
    case = Case(v_reset=v_reset, detach_reset=False, starts=True, learned="layer", shape=(4,))

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        x, v, keep, gain = inputs
        return integrate_and_fire(x, v, keep=keep, gain=gain, how=case.how, backend="reference")

    assert torch.autograd.gradcheck(run, [each.requires_grad_() for each in case.inputs()])


class Plif(torch.nn.Module):
    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        gain = self.w.sigmoid()
        return integrate_and_fire(
            x, keep=1 - gain, gain=gain, how=Case().how, backend=self.backend, last=False
        )[0]


@pytest.mark.slow
def test_neurons_are_part_of_a_compiled_graph_and_export(shapes_checked: bool) -> None:
    if shapes_checked:
        pytest.skip("compilers cannot see through the shape checks")
    module, x = Plif("blocked"), Case().inputs()[0].requires_grad_()
    wanted = module(x)
    gradients = torch.autograd.grad(wanted.square().sum(), (x, module.w))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(compiled, wanted)
    found = torch.autograd.grad(compiled.square().sum(), (x, module.w))
    for one, other in zip(found, gradients, strict=True):
        close(one, other)
    exported = torch.export.export(module, (x.detach(),)).module()
    assert torch.equal(exported(x), wanted)
    torch.compiler.reset()


def test_neurons_under_vmap_are_neurons() -> None:
    x = Case().inputs()[0]
    assert torch.equal(torch.func.vmap(Plif(), in_dims=1, out_dims=1)(x), Plif()(x))


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_neurons_cost_no_multiply_adds(backend) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), Plif(backend))
    assert count(module, (3, 4)).macs == 3 * 4 * 4


def test_currents_without_numbers_give_spikes_without_numbers() -> None:
    x = torch.empty(3, 2, 5, device="meta")
    assert integrate_and_fire(x, **LIF, how=Case().how)[0].shape == (3, 2, 5)


def test_no_neurons_at_all_give_no_spikes() -> None:
    x = torch.empty(3, 0, 5, requires_grad=True)
    spikes, _ = integrate_and_fire(x, **LIF, how=Case().how)
    spikes.sum().backward()
    assert spikes.shape == x.grad.shape == (3, 0, 5)


@together
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(0, 3)}, "at least one step"),
        ({"x": torch.zeros(2, 3, dtype=torch.int64)}, "floating-point"),
        ({"x": torch.tensor(1.0)}, "at least one step"),
        ({"v": torch.zeros(4)}, r"v \(4,\) does not fit .* \(3,\)"),
        ({"keep": torch.zeros(2, 3)}, r"keep \(2, 3\) does not fit"),
        ({"gain": torch.zeros(2)}, r"gain \(2,\) does not fit"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
        ({"backend": "inductor"}, "unknown backend 'inductor'"),
        ({"backend": "triton"}, "backend='triton' cannot run here: .*(CUDA|not installed)"),
    ],
)
def test_what_does_not_fit_is_refused(change, words) -> None:
    given = {"x": torch.zeros(2, 3), **LIF, "how": Case().how, **change}
    with pytest.raises(UserError, match=words):
        integrate_and_fire(**given)


def test_auto_is_blocked_on_cpu_and_says_why() -> None:
    choice = choose("auto", torch.zeros(2, 3))
    assert choice.name == "blocked"
    assert "cache" in choice.why
    assert choose("auto", torch.zeros(2, 3, device="meta")).name == "reference"
    assert choose("reference").name == "reference"


def test_auto_on_cuda_is_triton_where_it_can_launch(monkeypatch) -> None:
    pytest.importorskip("triton")
    gpu = torch.device("cuda", 0)
    for compiler, path in (("/usr/bin/gcc", "triton"), (None, "reference")):
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(multi_step.shutil, "which", lambda name, found=compiler: found)
        multi_step.finds_c_compiler.cache_clear()
        assert choose("auto", device=gpu).name == path
    assert "C compiler" in choose("auto", device=gpu).why
    with pytest.raises(UserError, match=r"'triton' cannot run here: .*gcc"):
        choose("triton", device=gpu)
    multi_step.finds_c_compiler.cache_clear()


@pytest.mark.slow
def test_triton_is_the_reference_in_its_interpreter() -> None:
    triton = pytest.importorskip("triton")
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version <= (3, 6) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton 3.6 breaks with NumPy from 2.4 on")
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(Path(keymix.__file__).parents[1]), str(tests)])
    done = subprocess.run(  # Triton is imported once a process, as kernels or as Python
        [sys.executable, str(tests / "ops" / "neuron_cases.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "blocked", "triton"])
def test_neurons_on_cuda_are_the_reference(backend: str) -> None:
    for case in every_case():
        agrees(case, backend, device="cuda")
    for view in LAYOUTS.values():
        agrees(Case(learned="neuron", starts=True, last=True), backend, view, "cuda")
    agrees(Case(shape=(700,)), backend, device="cuda")  # more neurons than a block has


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_currents_on_cuda_charge_potentials_in_float32(backend: str, dtype: Any) -> None:
    case = Case(steps=4, last=True, detach_reset=False)
    x = 2 * torch.randn(4, 50, dtype=dtype)
    wanted = outcome(case, [x.float(), None, 0.7, 0.3], "reference")
    found = outcome(case, [x.cuda(), None, 0.7, 0.3], backend)
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.float32
    assert torch.equal(found[0].cpu().float(), wanted[0])
    close(found[1].cpu(), wanted[1])
    close(found[2].cpu(), wanted[2], dtype)


def test_float32_gradients_are_within_rounding() -> None:
    case = Case(detach_reset=False, learned="layer", starts=True, last=True)
    inputs = case.inputs(torch.float32)
    wanted = outcome(case, [each.double() for each in inputs], "reference")
    for one, other in zip(outcome(case, inputs, "blocked"), wanted, strict=True):
        close(one, other, torch.float32)

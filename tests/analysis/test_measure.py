# SPDX-License-Identifier: Apache-2.0
"""Measured cost: what is stated is what was done, and peak memory is what a pass takes."""

from __future__ import annotations

import io
import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keymix.analysis import memory, timing
from keymix.analysis.measure import (
    Cost,
    measure_interleaved,
    measure_paired,
)
from keymix.analysis.memory import Build, Phase, peak_memory
from keymix.analysis.passes import Inputs, Passes


def measure(net: nn.Module, size: tuple[int, ...], **how: int) -> Cost:
    return measure_interleaved({"net": net}, size, **how)["net"]


needs_proc = pytest.mark.skipif(
    memory.cpu_peak_unknown() is not None, reason="peaks of CPU passes need Linux's /proc"
)


class Recorder(nn.Module):
    """Writes down who ran, in which mode, on how many images."""

    def __init__(self, name: str, log: list[tuple[str, int]]) -> None:
        super().__init__()
        self.name, self.log = name, log
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.log.append((self.name, len(x)))
        return self.fc(x)


def one_sample_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count passes by clocks that never move."""
    monkeypatch.setattr(timing, "_SHORTEST", 0.0)
    monkeypatch.setattr(timing, "_ROUND", 0.0)


def test_models_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    one_sample_a_round(monkeypatch)
    log: list[tuple[str, int]] = []
    models = {name: Recorder(name, log).train() for name in "ab"}
    costs = measure_interleaved(models, (4,), batch_size=3, repeats=20, warmup=1)
    alone, batch = [("a", 1), ("b", 1)], [("a", 3), ("b", 3)]
    assert log[:12] == [*alone, *alone, *alone, *batch, *batch, *batch]  # warm-up, three at least
    rounds = [tuple(log[i : i + 2]) for i in range(12, len(log), 2)]
    assert set(rounds) == {(*alone,), (*alone[::-1],), (*batch,), (*batch[::-1],)}
    assert len(rounds) == 40
    assert all(m.training for m in models.values())
    assert set(costs) == {"a", "b"}
    assert all(cost.against is None for cost in costs.values())


def test_a_batch_of_one_is_timed_once_and_rounds_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_sample_a_round(monkeypatch)
    log: list[tuple[str, int]] = []
    lines: list[int] = []
    models = {"a": Recorder("a", log)}
    costs = measure_interleaved(
        models, (4,), batch_size=1, repeats=3, warmup=1, on_round=lines.append
    )
    assert log == [("a", 1)] * 6
    assert lines == [1, 2, 3]
    assert costs["a"].images_per_s == pytest.approx(1000 / costs["a"].latency_ms)


def test_a_cost_states_its_conditions_and_is_ordered() -> None:
    threads, net = torch.get_num_threads(), nn.Linear(8, 8)
    state = torch.get_rng_state()
    cost = measure(net, (8,), batch_size=4, repeats=5, threads=1)
    assert (cost.batch_size, cost.repeats, cost.threads) == (4, 5, 1)
    assert (cost.device, cost.dtype, cost.input_size) == ("cpu", "float32", (8,))
    assert 0 < cost.latency_q1_ms <= cost.latency_ms <= cost.latency_q3_ms
    assert 0 < cost.images_per_s_q1 <= cost.images_per_s <= cost.images_per_s_q3
    assert cost.latency_iqr_ms == cost.latency_q3_ms - cost.latency_q1_ms
    assert cost.peak_mib is None
    assert "fresh process" in cost.peak_note
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert json.loads(json.dumps(cost.to_dict()))["latency_ms"] == cost.latency_ms


def test_quartiles_are_those_of_the_samples() -> None:
    assert timing.quartiles([5.0, 1.0, 4.0, 2.0, 3.0]) == (2.0, 3.0, 4.0)
    assert timing.quartiles([7.0]) == (7.0, 7.0, 7.0)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure without a fresh process, which takes seconds: passes run, and their growth is given.

    The fresh process and real growth are those of the test below.
    """

    def growth(model: nn.Module, x: Inputs, phase: Phase, *, passes: Passes) -> float:
        memory.run_pass(model, x, phase, passes=passes)
        return {"inference": 1.0, "training": 2.0}[phase]

    def run(command: list[str], *, input: str, env: dict[str, str], **_: Any) -> Any:
        said, threads = io.StringIO(), torch.get_num_threads()
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO(input))
            patch.setattr("sys.stdout", said)
            status = memory.main()
        torch.set_num_threads(threads)
        return subprocess.CompletedProcess(command, status, said.getvalue(), "")

    monkeypatch.setattr(memory, "cpu_growth", growth)
    monkeypatch.setattr(memory, "subprocess", SimpleNamespace(run=run))


@pytest.mark.slow
@needs_proc
def test_peak_memory_is_what_the_passes_hold_and_a_process_that_dies_leaves_the_reason() -> None:
    """The only fresh process of these tests; the model after the one that is measured ends it."""
    # a wide, shallow stack: at inference two activations live, in training all of them
    width, batch, depth = 1024, 2048, 4
    mib = width * batch * 4 / 2**20  # one activation
    build = Build(
        factory="torchvision.ops:MLP",
        kwargs={"in_channels": width, "hidden_channels": [width] * depth, "inplace": False},
    )
    builds = {"mlp": build, "fatal": Build(factory="os:abort")}
    peaks = peak_memory(builds, (width,), batch_size=batch, threads=1)
    peak = peaks["mlp"]
    weights = depth * width * width * 4 / 2**20
    assert peak.inference_mib == pytest.approx(2 * mib, rel=0.25)
    assert peak.training_mib is not None
    # each hidden layer keeps its result before ReLU or after it, and dropout's input
    assert 0.9 * (2 * depth - 2) * mib < peak.training_mib < (3 * depth + 2) * mib + weights
    assert peak.training_mib > 2 * peak.inference_mib
    assert "with 1 thread, at batch 2048" in peak.note
    assert peaks["fatal"].training_mib is None
    assert "ended with -6" in peaks["fatal"].note


@needs_proc
@pytest.mark.usefixtures("in_this_process")
def test_a_model_that_cannot_be_made_has_none_and_the_reason() -> None:
    build = Build(kwargs={"name": "vit_nano_p2_12", "mixer": "sofmax"})
    peak = peak_memory({"bad": build}, (3, 12, 12))["bad"]
    assert peak.training_mib is None
    assert "Did you mean 'softmax'" in peak.note


@needs_proc
@pytest.mark.usefixtures("in_this_process")
def test_a_model_that_fails_has_none_and_the_reason_and_harms_no_other() -> None:
    three = Build(factory="torch.nn:Linear", kwargs={"in_features": 3, "out_features": 3})
    four = Build(factory="torch.nn:Identity")
    peaks = peak_memory({"wrong width": three, "identity": four}, (4,), batch_size=2)
    assert peaks["wrong width"].inference_mib is None
    assert "shapes cannot be multiplied" in peaks["wrong width"].note
    assert peaks["identity"].inference_mib is not None
    assert "unknown" not in peaks["identity"].note


@pytest.mark.gpu
def test_on_cuda_the_allocator_reports_the_peak() -> None:
    net = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).cuda()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    cost = measure(net, (512,), batch_size=1024, repeats=3)
    assert cost.device.startswith("cuda")
    assert cost.peak_training_mib is not None
    assert cost.peak_inference_mib is not None
    assert cost.peak_training_mib > cost.peak_inference_mib >= 2
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


class Working(nn.Module):
    """Takes simulated time: seconds by seconds, and more as the machine slows down."""

    wall = cpu = 0.0

    def __init__(self, seconds: float, taken: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.taken = seconds, taken

    def forward(self, x: Tensor) -> Tensor:
        spell = 3.0 if Working.wall > 0.3 else 1.0
        Working.wall += spell * (1 + self.taken) * self.seconds
        Working.cpu += spell * self.seconds
        return x


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Working, "wall", 0.0)
    monkeypatch.setattr(Working, "cpu", 0.0)
    clock = timing.Clock(lambda: Working.wall, lambda: Working.cpu, lambda seconds: None)
    monkeypatch.setattr(timing, "CLOCK", clock)


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_a_slow_spell_of_the_machine_leaves_the_ratio() -> None:
    result = measure_paired(Working(0.01), Working(0.02), (2,), repeats=12)
    assert (result.ratio_q1, result.ratio, result.ratio_q3) == pytest.approx((2, 2, 2))
    assert result.other_ms / result.base_ms == pytest.approx(2)
    assert result.base_ms in (pytest.approx(10), pytest.approx(30))
    assert result.verdict == "different"
    assert measure_paired(Working(0.01), Working(0.02), (2,), repeats=9).verdict == "too few rounds"


@pytest.mark.usefixtures("simulated")
def test_latencies_are_compared_with_the_baseline_at_one_level_for_all() -> None:
    models = {"base": Working(0.002), "same": Working(0.002), "slow": Working(0.003)}
    costs = measure_interleaved(models, (2,), batch_size=1, repeats=20, baseline="base")
    assert costs["base"].against is None
    same, slow = costs["same"].against, costs["slow"].against
    assert same is not None
    assert slow is not None
    assert (same.verdict, slow.verdict) == ("not distinguishable", "different")
    assert slow.ratio_text() == "1.50"
    assert not costs["base"].busy
    assert json.loads(json.dumps(costs["slow"].to_dict()))["against"]["verdict"] == "different"


@pytest.mark.usefixtures("simulated")
def test_a_busy_machine_shows_in_the_cost() -> None:
    costs = measure_interleaved({"a": Working(0.01, taken=1.0)}, (2,), batch_size=1, repeats=3)
    assert (costs["a"].busy, costs["a"].quiet_share) == (True, 0.0)
    assert costs["a"].latency_ms == pytest.approx(20)

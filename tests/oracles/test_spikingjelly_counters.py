# SPDX-License-Identifier: Apache-2.0
"""Synaptic operations and energy against SpikingJelly's own counters, on a network of its parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from keymix.studies.spikes.measure import spike_study
from keymix.studies.spikes.result import Spikes

pytest.importorskip("spikingjelly", reason="SpikingJelly is not installed")

from spikingjelly.activation_based import functional, layer, neuron, op_counter

T = 4


class Net(nn.Module):
    """Convolutions, a product of spikes, a linear layer; with SpikingJelly's LIF between."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.adds = adds
        self.conv1 = layer.Conv2d(3, 6, 3, padding=1, bias=False)
        self.conv2 = layer.Conv2d(6, 6, 3, stride=2, padding=1, groups=2, bias=False)
        self.bn = layer.BatchNorm2d(6)
        self.q, self.kv = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.up = layer.ConvTranspose2d(6, 4, 3, stride=2, padding=1, bias=False)
        self.fc = nn.Linear(4, 5, bias=False)  # it counts some biases as additions
        for i in range(6):
            self.add_module(f"sn{i}", neuron.LIFNode(v_threshold=0.1, step_mode="m"))
        functional.set_step_mode(self, "m")

    def forward(self, x: Tensor) -> Tensor:
        x = self.sn0(self.conv1(x.expand(T, *x.shape)))
        x = self.sn1(self.bn(self.conv2(x)))
        tokens = x.flatten(3).mT
        q, kv = self.sn2(self.q(tokens)), self.sn3(self.kv(tokens))
        mixed = self.sn4(q @ (kv.mT @ kv))
        mixed = mixed + tokens if self.adds else mixed
        image = mixed.mT.unflatten(-1, x.shape[-2:])
        image = self.sn5(self.up(image))
        return self.fc(image.flatten(3).mT)


def _made(*, adds: bool = False) -> tuple[Net, Tensor, Spikes]:
    torch.manual_seed(0)
    model, x = Net(adds=adds).eval(), torch.randn(2, 3, 8, 6)
    study = spike_study(model, x)
    functional.reset_net(model)
    return model, x, study


def test_additions_and_multiply_adds_are_those_of_its_counters() -> None:
    model, x, study = _made()
    synops, macs = op_counter.SynOpCounter(), op_counter.MACCounter([], [layer.BatchNorm2d])
    acs = op_counter.ACCounter(extra_ignore_modules=[layer.BatchNorm2d, neuron.LIFNode])
    with torch.no_grad(), op_counter.DispatchCounterMode([synops, macs, acs]):
        model(x)
    assert study.time_steps == T
    assert {op.input for op in study.operations} == {"binary", "real"}
    assert 2 * study.sops == pytest.approx(synops.get_total(), abs=0.5)
    assert 2 * study.macs == macs.get_total()
    assert study.sops > 1000
    # its ACCounter has batch norm, neurons and shortcuts besides, of which nothing is here
    assert acs.get_total() == synops.get_total()


def test_energy_is_that_of_its_profiler_memory_apart() -> None:
    model, x, study = _made()
    ignored = [layer.BatchNorm2d, neuron.LIFNode]
    config = op_counter.SimpleEnergyConfig(extra_ignore_modules=ignored)
    profiler = op_counter.SimpleEnergyProfiler(config=config)
    profiler.bind_model(model)
    with torch.no_grad(), profiler:
        model(x)
    report = profiler.get_report()
    assert len(set(study.energy)) == 1
    counts, cost = report.counts, config.cost_config
    assert (cost.e_mac_pj, cost.e_ac_pj) == (study.cost.mac, study.cost.ac)
    synaptic = report.energy_mac_pj + counts["synop"] * cost.e_ac_pj
    assert 2 * study.energy[1] == pytest.approx(synaptic, rel=1e-9)
    # other additions (here its own bookkeeping's) are in its total, and memory
    assert report.energy_compute_pj == pytest.approx(synaptic, rel=1e-3)
    assert report.energy_total_pj > 2 * report.energy_compute_pj


def test_inputs_above_one_are_multiply_adds_to_it_and_have_bounds_here() -> None:
    model, x, study = _made(adds=True)
    macs = op_counter.MACCounter([], [layer.BatchNorm2d])
    with torch.no_grad(), op_counter.DispatchCounterMode([macs]):
        model(x)
    (counted,) = [op for op in study.operations if op.input == "counts"]
    assert counted.path == "up"
    low, middle, high = study.energy
    assert low < middle < high
    assert macs.get_total() == pytest.approx(2 * (study.macs + counted.dense))

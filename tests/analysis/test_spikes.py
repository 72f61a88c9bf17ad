# SPDX-License-Identifier: Apache-2.0
"""Firing rates, synaptic operations and energy against sums written out, on networks by hand."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from spiking_nets import images, small_net
from torch import Tensor, nn
from torch.nn import functional as F

from keymix.analysis.counting import count
from keymix.analysis.energy import ENERGIES, Energy, energy_of
from keymix.analysis.spikes_operations import LARGEST, Values
from keymix.analysis.spikes_record import Operation
from keymix.studies.spikes.measure import spike_study
from keymix.studies.spikes.result import Spikes

BLOCK = "stages.0.blocks.0"


def _inputs_of(model: nn.Module, x: Tensor, *paths: str) -> dict[str, Tensor]:
    """What goes into modules, in float64."""
    seen: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(path).register_forward_pre_hook(
            lambda _m, args, path=path: seen.__setitem__(path, args[0].double())
        )
        for path in paths
    ]
    with torch.no_grad():
        model.eval()(x)
    for handle in handles:
        handle.remove()
    return seen


def _of(study: Spikes, path: str) -> Operation:
    (found,) = [op for op in study.operations if op.path == path]
    return found


@pytest.fixture(scope="module")
def study() -> Spikes:
    return spike_study(small_net(), images(), batch_size=2)


def test_rates_are_spikes_per_neuron_per_step(study: Spikes) -> None:
    mixer = small_net().eval().stages[0].blocks[0].attn.mixer
    x = _inputs_of(small_net(), images(), f"{BLOCK}.attn.mixer")[f"{BLOCK}.attn.mixer"].float()
    with torch.no_grad():
        spikes = mixer.spikes(x)
    assert set(spikes) == {"Q", "K", "A_t", "X'", "X''"}
    found = {f.role: f for f in study.firings if f.mixer == "qk_token"}
    assert all(0.02 < float(each.mean()) < 0.98 for each in spikes.values())
    for role, each in spikes.items():
        assert found[role].rate == pytest.approx(float(each.double().mean()), abs=1e-12)
        steps = each.double().flatten(1).mean(1).tolist()
        assert found[role].by_step == pytest.approx(steps, abs=1e-12)
        assert found[role].neurons == each[0, 0].numel()
        silent = 1 - float((each != 0).flatten(0, 1).any(0).double().mean())
        assert found[role].silent == pytest.approx(silent)
        assert (found[role].stage, found[role].block) == (1, 1)


def test_parts_have_the_names_of_table_7(study: Spikes) -> None:
    named = [(f.path.removeprefix(f"{BLOCK}."), f.role) for f in study.firings if f.role]
    assert named == [
        ("attn.mixer.q_sn", "Q"),
        ("attn.mixer.k_sn", "K"),
        ("attn.mixer.attn_sn", "A_t"),
        ("attn.mixer.proj", "X'"),
        ("attn.mixer.proj_sn", "X''"),
        ("mlp.1", "MLP layer 1"),
        ("mlp.3", "MLP layer 2"),
    ]
    (row,) = study.to_dict()["table"]
    assert (row["mixer"], row["stage"]) == ("qk_token", 1)
    assert list(row["rates"]) == ["Q", "K", "A_t", "X'", "X''", "MLP layer 1", "MLP layer 2"]
    own = [f for f in study.firings if not f.inward]
    assert study.rate == pytest.approx(
        sum(f.rate * f.neurons for f in own) / sum(f.neurons for f in own)
    )
    assert len(own) == len(study.firings) - 1


def test_a_spike_costs_one_addition_for_every_weight_that_it_meets(study: Spikes) -> None:
    model, x = small_net(), images()
    seen = _inputs_of(model, x, "conv2", f"{BLOCK}.mlp.0", f"{BLOCK}.mlp.2")
    ones = torch.ones(8, 6, 3, 3, dtype=torch.float64)
    wanted = float(F.conv2d(seen["conv2"], ones, stride=2, padding=1).sum()) / 3
    conv = _of(study, "conv2")
    assert (conv.what, conv.input, conv.macs) == ("conv", "binary", 0)
    assert conv.acs == conv.acs_low == pytest.approx(wanted)
    assert conv.dense == 3 * 3 * 4 * 8 * 6 * 9  # steps, places, channels, weights of one
    assert conv.acs < conv.dense * conv.values.mean  # which knows nothing of the border
    second = _of(study, f"{BLOCK}.mlp.2")
    assert second.acs == pytest.approx(float(seen[f"{BLOCK}.mlp.2"].sum()) * 8 / 3)


def test_inputs_above_one_have_bounds(study: Spikes) -> None:
    x = _inputs_of(small_net(), images(), f"{BLOCK}.mlp.0")[f"{BLOCK}.mlp.0"]
    assert x.max() == 2
    linear = _of(study, f"{BLOCK}.mlp.0")
    shares = [float((x == v).double().mean()) for v in (0, 1, 2)]
    assert (linear.input, linear.values.shares) == ("counts", pytest.approx(shares))
    assert linear.acs == pytest.approx(float(x.sum()) * 16 / 3)
    assert linear.acs_low == pytest.approx(float((x > 0).sum()) * 16 / 3)
    low, middle, high = linear.energy(ENERGIES["fp32"])
    assert (low, middle) == pytest.approx((0.9 * linear.acs_low, 0.9 * linear.acs))
    assert high == pytest.approx(4.6 * linear.acs_low)
    assert linear.energy(Energy(name="", mac=0.1, ac=1.0, numbers="", source=""))[2] == linear.acs


def test_real_inputs_cost_every_multiply_add(study: Spikes) -> None:
    first, head = _of(study, "conv1"), _of(study, "head")
    assert (first.input, first.acs, first.macs) == ("real", 0, 3 * 48 * 6 * 27)
    assert first.values.shares is None
    assert (head.input, head.macs) == ("real", 40)
    assert study.macs == first.macs + head.macs
    assert (study.repeated, study.once) == (("conv1",), ("head",))
    assert study.saved_once == pytest.approx(first.macs * 2 / 3 * 4.6)


def test_the_sum_over_q_adds_each_spike_once(study: Spikes) -> None:
    summed = _of(study, f"{BLOCK}.attn.mixer")
    rate = {f.role: f.rate for f in study.firings}["Q"]
    assert (summed.what, summed.dense, summed.macs) == ("sum", 0, 0)
    assert summed.acs == pytest.approx(rate * 3 * 12 * 8)
    assert len(set(summed.energy(study.cost))) == 1
    counts = replace(summed, input="counts", acs=30.0, acs_low=20.0)
    assert counts.energy(Energy(name="", mac=9.0, ac=1.0, numbers="", source="")) == (20, 30, 30)


def test_products_of_spikes_cost_what_meets() -> None:
    model, x = small_net("spiking_self"), images()
    study = spike_study(model, x)
    name = f"{BLOCK}.attn.mixer"
    with torch.no_grad():
        mixer = model.eval().stages[0].blocks[0].attn.mixer
        spikes = mixer.spikes(_inputs_of(model, x, name)[name].float())
    q, k, v = (spikes[r].double().unflatten(-1, (2, 4)).transpose(-3, -2) for r in "QKV")
    first, second = [op for op in study.operations if op.path == name]
    assert mixer.order_for(12) == "linear"
    assert (first.what, first.input) == (second.what, second.input) == ("product", "binary")
    assert first.acs == pytest.approx(float((k.mT @ v).sum()) / 3)
    assert second.acs == pytest.approx(float(q.sum()) * 4 / 3)  # a row of d = 4 numbers a spike
    assert 0 < first.acs < first.dense == second.dense == 3 * 12 * 8 * 4
    assert "V" in study.to_dict()["table"][0]["rates"]


def test_the_ann_counterpart_is_the_same_network_counted_dense_at_one_step() -> None:
    model = small_net("spiking_self")
    study = spike_study(model, images(1))
    lone = count(small_net("spiking_self", time_steps=1), (3, 6, 8))
    assert study.ann_macs == pytest.approx(lone.macs)
    assert _of(study, "head").ann == _of(study, "head").dense  # after the mean over steps
    assert study.ann_energy == pytest.approx(4.6 * study.ann_macs)


def test_notes_say_what_to_keep_in_mind(study: Spikes) -> None:
    few, repeated = study.notes
    assert "3" in few
    assert "conv1" in repeated
    quiet = small_net()
    for parameter in quiet.parameters():
        nn.init.zeros_(parameter)
    assert spike_study(quiet, images(16)).notes[0].startswith("100.0 %")


def test_a_network_that_says_nothing_is_not_compared_with_its_ann_counterpart(
    study: Spikes,
) -> None:
    assert study.varies
    assert not study.dead
    assert study.to_dict()["ann"]["ratio"] == pytest.approx(study.ann_energy / study.energy[1])
    mute = small_net()
    nn.init.zeros_(mute.head.weight)
    result = spike_study(mute, images(), batch_size=2)
    assert (result.varies, result.rate) == (False, study.rate)
    assert result.to_dict()["ann"]["ratio"] is None
    assert "vary" in result.notes[0]
    assert spike_study(mute, images(1)).varies  # unknown for one image


def test_layers_that_give_no_spike_are_named() -> None:
    net = small_net()
    mixer = net.stages[0].blocks[0].attn.mixer
    for neuron in (net.sn2, mixer.q_sn, mixer.k_sn, mixer.attn_sn):
        neuron.v_threshold = 1e9
    result = spike_study(net, images())
    assert result.unspiking == ("sn2", *(f"{BLOCK}.attn.mixer.{n}_sn" for n in ("q", "k", "attn")))
    assert [note for note in result.notes if "4 of 8" in note and "`sn2`" in note]


def test_batch_norm_is_folded_or_one_multiply_add_an_element(study: Spikes) -> None:
    apart = spike_study(small_net(), images(), batch_norm="separate", batch_size=2)
    norms = [op for op in apart.operations if op.what == "norm"]
    # two of images, three of tokens
    assert sum(op.macs for op in norms) == 3 * (48 * 6 + 12 * 8 + 3 * 12 * 8)
    assert apart.energy[0] == pytest.approx(study.energy[0] + 4.6 * sum(op.macs for op in norms))
    assert not [op for op in study.operations if op.what == "norm"]


def test_nothing_depends_on_how_images_are_batched(study: Spikes) -> None:
    whole = spike_study(small_net(), [(images(), torch.zeros(3))])
    one, two = study.to_dict(), whole.to_dict()
    assert one["images"] == two["images"] == 3
    for key in ("rate", "silent", "sops", "macs", "energy", "ann"):
        assert one[key] == pytest.approx(two[key]), key
    assert [f.silent for f in study.firings] == [f.silent for f in whole.firings]


def test_the_model_is_left_as_it_was() -> None:
    model = small_net().train()
    before = copy.deepcopy(model.state_dict())
    spike_study(model, images())
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_network_that_is_called_step_by_step_has_the_same_rates() -> None:
    class OneByOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.neuron = nn.Linear(4, 6), Once()

        def forward(self, x: Tensor) -> Tensor:
            return sum(self.neuron(self.linear(x.flatten(1))) for _ in range(3))

    class Once(nn.Module):
        v_threshold = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.v = torch.tensor(0.0)

        def reset(self) -> None:
            self.v = torch.tensor(0.0)

        def forward(self, x: Tensor) -> Tensor:
            self.v = self.v + x
            spikes = (self.v >= self.v_threshold).to(x)
            self.v = self.v * (1 - spikes)
            return spikes

    torch.manual_seed(0)
    model, x = OneByOne(), 3 * torch.randn(5, 1, 2, 2)
    study = spike_study(model, x)
    (firing,) = study.firings
    model.neuron.reset()
    total = model(x)
    assert study.time_steps == len(firing.by_step) == 3
    assert firing.rate == pytest.approx(float(total.mean()) / 3)
    assert firing.silent == pytest.approx(float((total == 0).all(0).double().mean()))
    assert spike_study(model, x).rate == study.rate  # reset between


def test_values_count_what_is_above_the_largest_cell_in_it() -> None:
    values = Values()
    values.add(torch.tensor([0.0, 1.0, 1.0]))
    assert (values.kind, values.reading().shares) == ("binary", (1 / 3, 2 / 3))
    values.add(torch.tensor([0.0, 3.0, 20.0]))
    record = values.reading()
    assert (record.kind, record.mean, len(record.shares)) == (
        "counts",
        25 / 6,
        LARGEST + 1,
    )
    assert record.shares[3] == record.shares[LARGEST] == 1 / 6
    values.add(torch.tensor([-1.0]))
    assert (values.kind, values.reading().shares) == ("real", None)


def test_energies_are_those_of_the_source() -> None:
    pairs = {name: (e.mac, e.ac) for name, e in ENERGIES.items()}
    assert pairs == {
        "fp32": (4.6, 0.9),
        "fp16": (1.5, 0.4),
        "int32": (3.2, 0.1),
        "int8": (0.23, 0.03),
    }
    assert (energy_of("2,0.5").mac, energy_of("2,0.5").ac) == (2, 0.5)
    study = spike_study(small_net(), images(1), energy="int8")
    macs, acs = study.macs, sum(op.acs for op in study.operations)
    assert study.energy[1] == pytest.approx(0.23 * macs + 0.03 * acs)

# SPDX-License-Identifier: Apache-2.0
"""The spiking mixers against their papers' equations, written as loops in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from each import together
from keymix.errors import NoAttentionMap, UserError
from keymix.layers.neurons import Neurons
from keymix.mixers.base import Site
from keymix.mixers.registry import build, create_mixer, list_mixers
from keymix.mixers.spiking import SpikingMixer
from mixer_cases import gradients, refused, stir
from tolerances import CHANGE, close

SPIKING = ["qk_channel", "qk_token", "spike_driven", "spiking_self"]
every_mixer = pytest.mark.parametrize("name", SPIKING)
SHAPES = {
    "heads": {"T": 3, "B": 2, "N": 7, "C": 12, "h": 3},
    "one head": {"T": 4, "B": 2, "N": 5, "C": 6, "h": 1},
    "one step": {"T": 1, "B": 3, "N": 9, "C": 8, "h": 2},
    "one token": {"T": 2, "B": 5, "N": 1, "C": 8, "h": 4},
}


def spikes_like(t: int, b: int, n: int, c: int, seed: int = 0) -> Tensor:
    noise = torch.rand(t, b, n, c, generator=torch.Generator().manual_seed(seed))
    return (noise < 0.4).double()


def small(name: str, c: int = 12, h: int = 3, **options: Any) -> SpikingMixer:
    torch.manual_seed(0)
    mixer = create_mixer(name, dim=c, num_heads=h, **options).double()
    stir(mixer)
    for key, norm in mixer.named_modules():
        if key.endswith("_bn"):  # so that enough neurons fire and enough do not
            torch.nn.init.constant_(norm.bias, 1.8 if name == "spiking_self" else 0.9)
    assert isinstance(mixer, SpikingMixer)
    return mixer


def lif(current: Tensor, threshold: float) -> Tensor:
    """Eq. 1 to 3 with tau 2 and a reset to 0, neuron by neuron."""
    flat = current.detach().reshape(len(current), -1)
    fired = torch.zeros_like(flat)
    for i in range(flat.shape[1]):
        v = 0.0
        for t in range(len(current)):
            h = v + (float(flat[t, i]) - v) / 2
            fired[t, i] = float(h >= threshold)
            v = 0.0 if h >= threshold else h
    return fired.view(current.shape)


def linear_norm_spikes(mixer: SpikingMixer, x: Tensor, role: str) -> Tensor:
    """SN(BN(X W)), Eq. 6 and 9, the statistics over steps, images and tokens in training."""
    linear, norm = mixer.get_submodule(role), mixer.get_submodule(f"{role}_bn")
    y = x @ linear.weight.T
    if linear.bias is not None:
        y = y + linear.bias
    rows = y.reshape(-1, y.shape[-1])
    if mixer.training:
        mean, variance = rows.mean(0), rows.var(0, unbiased=False)
    else:
        mean, variance = norm.running_mean, norm.running_var
    y = (y - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias
    return lif(y, 1.0)


def reference(name: str, mixer: SpikingMixer, x: Tensor) -> dict[str, Tensor]:
    """What the papers' equations make of ``x``, one step, image and head after the other."""
    with torch.no_grad():
        parts = {r: linear_norm_spikes(mixer, x, r) for r in mixer.roles}
        steps, batch, count, _ = x.shape
        h, d = mixer.num_heads, mixer.head_dim
        current = torch.zeros(steps, batch, count, h * d, dtype=torch.float64)
        attention = torch.zeros_like(current)
        for t in range(steps):
            for b in range(batch):
                for head in range(h):
                    where = slice(head * d, (head + 1) * d)
                    q, k = parts["q"][t, b, :, where], parts["k"][t, b, :, where]
                    for n in range(count):
                        for i in range(d):
                            if name == "qk_token":
                                value = sum(q[n, j] for j in range(d))
                            elif name == "qk_channel":
                                value = sum(q[m, i] for m in range(count))
                            elif name == "spike_driven":
                                value = sum(q[m, i] * k[m, i] for m in range(count))
                            else:
                                v = parts["v"][t, b, :, where]
                                value = sum((q[n] * k[m]).sum() * v[m, i] for m in range(count))
                                value = value * 0.125
                            current[t, b, n, head * d + i] = value
        attention = lif(current, 0.5)
        if name == "spiking_self":
            gathered = attention
        else:
            gathered = attention * parts["v" if name == "spike_driven" else "k"]
        out = linear_norm_spikes(mixer, gathered, "proj")
        return {**parts, "attention": attention, "gathered": gathered, "out": out}


@pytest.mark.slow
@together
@every_mixer
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("training", [True, False])
def test_spikes_are_those_of_the_equations(name: str, shape: str, training: bool) -> None:
    t, b, n, c, h = SHAPES[shape].values()
    mixer = small(name, c, h).train(training)
    x = spikes_like(t, b, n, c)
    wanted = reference(name, mixer, x)
    seen = mixer.spikes(x)
    gathered, out = mixer.published
    for role in mixer.roles:
        assert torch.equal(seen[role.upper()], wanted[role])
    assert torch.equal(seen[gathered], wanted["gathered"])
    assert torch.equal(seen[out], wanted["out"])
    assert torch.equal(mixer(x), wanted["out"])
    if shape == "heads":
        for key, spikes in seen.items():
            assert 0 < float(spikes.detach().mean()) < 1, f"{key} says nothing"
    heads = wanted["attention"].unflatten(-1, (h, c // h)).transpose(-3, -2)
    if name == "qk_token":
        assert torch.equal(seen["A_t"], heads[..., :1])
    elif name != "spiking_self":
        assert torch.equal(seen["A_c"], heads[..., :1, :])


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("qk_token", ["Q", "K", "A_t", "X'", "X''"]),
        ("qk_channel", ["Q", "K", "A_c", "X'", "X''"]),
        ("spiking_self", ["Q", "K", "V", "SSA'", "SSA"]),
        ("spike_driven", ["Q", "K", "V", "A_c", "SDSA'", "SDSA"]),
    ],
)
def test_spikes_have_the_names_of_the_paper(name: str, names: list[str]) -> None:
    assert list(small(name).spikes(spikes_like(2, 1, 4, 12))) == names


@every_mixer
def test_looking_at_spikes_moves_no_statistics(name: str) -> None:
    mixer = small(name).train()
    x = spikes_like(2, 2, 5, 12)
    before = {k: v.clone() for k, v in mixer.state_dict().items()}
    buffers = {k: id(v) for k, v in mixer.named_buffers()}
    mixer.spikes(x)
    assert all(torch.equal(before[k], v) for k, v in mixer.state_dict().items())
    assert buffers == {k: id(v) for k, v in mixer.named_buffers()}
    mixer(x)
    assert not torch.equal(before["q_bn.running_mean"], mixer.q_bn.running_mean)


@pytest.mark.parametrize(
    ("name", "weights"),
    [("qk_token", 3), ("qk_channel", 3), ("spiking_self", 4), ("spike_driven", 4)],
)
def test_parameters_are_those_of_the_published_counts(name: str, weights: int) -> None:
    d = 96
    count = sum(p.numel() for p in create_mixer(name, dim=d, num_heads=8).parameters())
    assert count == weights * d * d + {3: 7, 4: 9}[weights] * d
    assert sum(p.numel() for p in create_mixer(name, dim=d, neuron="plif").parameters()) == (
        count + weights + 1
    )


def test_eight_mixed_heads_are_what_the_s_transformer_has_more() -> None:
    """S-Transformer-8-384 has 16,816,536 parameters, Spikformer-8-384 16,816,024."""
    plain, mixed = (
        create_mixer("spike_driven", dim=384, num_heads=8, talking_heads=on) for on in (False, True)
    )
    more = sum(p.numel() for p in mixed.parameters()) - sum(p.numel() for p in plain.parameters())
    assert 8 * more == 16_816_536 - 16_816_024
    mixed.load_state_dict(plain.state_dict(), strict=False)
    x = spikes_like(2, 1, 9, 384).float()
    assert torch.equal(plain(x), mixed(x)), "it starts at the identity"


def test_talking_heads_mix_the_sums_of_the_heads() -> None:
    mixer = small("spike_driven", talking_heads=True).eval()
    x = spikes_like(3, 2, 7, 12)
    seen = mixer.spikes(x)
    sums = (seen["Q"] * seen["K"]).sum(-2).unflatten(-1, (3, 4))
    mixed = torch.einsum("gh,tbhd->tbgd", mixer.talking_heads.weight, sums)
    assert torch.equal(seen["A_c"][..., 0, :], lif(mixed, 0.5))


@pytest.mark.parametrize(("n", "order"), [(3, "quadratic"), (4, "quadratic"), (5, "linear")])
def test_auto_takes_the_order_with_fewer_multiply_adds(n: int, order: str) -> None:
    mixer = small("spiking_self")  # 4 channels a head
    assert mixer.order_for(n) == order
    for named in ("quadratic", "linear"):
        assert small("spiking_self", order=named).order_for(n) == named


def test_both_orders_of_the_product_are_equal_to_the_last_bit() -> None:
    x = spikes_like(2, 2, 31, 12).float()
    outputs = []
    for order in ("quadratic", "linear", "auto"):
        mixer = small("spiking_self", order=order, scale=0.1).float().eval()
        potentials = []
        mixer.attn_sn.register_forward_pre_hook(
            lambda module, args, kept=potentials: kept.append(args[0])
        )
        outputs.append((potentials, mixer(x)))
    first = outputs[0]
    assert first[0][0].max() > 1
    for potentials, y in outputs[1:]:
        assert torch.equal(potentials[0], first[0][0])
        assert torch.equal(y, first[1])


@together
@every_mixer
@pytest.mark.parametrize("neuron", ["lif", "if", "plif"])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_reach_every_parameter(name: str, neuron: str, training: bool) -> None:
    options = {"talking_heads": True} if name == "spike_driven" else {}
    mixer = small(name, neuron=neuron, qkv_bias=True, **options).train(training)
    _, grads = gradients(mixer, spikes_like(3, 4, 7, 12))
    assert ("attn_sn.w" in grads) == (neuron == "plif")
    size = max(float(grad.abs().max()) for grad in grads.values())
    for key, grad in grads.items():
        if key in mixer.zero_gradients:
            assert grad.abs().max() < 1e-12 * size
        else:
            assert grad.abs().max() > CHANGE, key


def smooth(name: str, **options: Any) -> SpikingMixer:
    """The mixer with neurons that pass their currents through a smooth step: differentiable."""
    site = Site(dim=6, num_heads=2, neuron=lambda **factory: torch.nn.Sigmoid())
    mixer = build(name, site, options).double().train()
    stir(mixer)
    assert isinstance(mixer, SpikingMixer)
    return mixer


@every_mixer
def test_gradients_meet_finite_differences_where_neurons_are_smooth(name: str) -> None:
    mixer = smooth(name)
    x = torch.randn(2, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    names = [k for k, _ in mixer.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(mixer, dict(zip(names, values, strict=True)), (x,))

    for norm in mixer.modules():
        if isinstance(norm, torch.nn.BatchNorm1d):
            norm.track_running_stats = False
    torch.autograd.gradcheck(run, (x, *mixer.parameters()), fast_mode=True)


@every_mixer
def test_nothing_is_left_over_from_one_call_to_the_next(name: str) -> None:
    mixer = small(name).eval()
    x = spikes_like(3, 2, 7, 12)
    first = mixer(x)
    mixer(spikes_like(2, 5, 4, 12, seed=1))
    assert torch.equal(mixer(x), first)


@every_mixer
def test_later_steps_do_not_change_earlier_ones(name: str) -> None:
    mixer = small(name).eval()
    x = spikes_like(4, 2, 7, 12)
    assert torch.equal(mixer(x)[:2], mixer(x[:2]))
    with_other_start = torch.cat((1 - x[:1], x[1:]))
    assert not torch.equal(mixer(with_other_start)[1:], mixer(x)[1:]), "neurons have no memory"


def test_a_token_is_kept_where_its_queries_are_not_silent() -> None:
    """With tau 2 and a threshold of 0.5, one spike is enough: a property of the defaults."""
    seen = small("qk_token").spikes(spikes_like(4, 2, 7, 12))
    any_query = seen["Q"].unflatten(-1, (3, 4)).amax(-1, keepdim=True).transpose(-3, -2)
    assert torch.equal(seen["A_t"], any_query)
    stricter = small("qk_token", attn_threshold=1.0).spikes(spikes_like(4, 2, 7, 12))
    assert stricter["A_t"].sum() < seen["A_t"].sum()


@every_mixer
def test_the_neurons_of_the_site_are_used_unless_named(name: str) -> None:
    relu = build(name, Site(dim=8, num_heads=2, neuron=Neurons(kind="relu"))).eval()
    y = relu(spikes_like(2, 3, 5, 8).float() * 40)
    assert ((y != 0) & (y != 1)).any(), "the ANN counterpart gives graded values"
    named = build(name, Site(dim=8, neuron=Neurons(kind="relu")), {"neuron": "plif"})
    assert sum(key.endswith("_sn.w") for key, _ in named.named_parameters()) == (
        len(named.roles) + 2
    )


@every_mixer
def test_three_axes_are_steps_tokens_channels(name: str) -> None:
    mixer = small(name).eval()
    x = spikes_like(3, 1, 7, 12)
    assert torch.equal(mixer(x[:, 0]), mixer(x)[:, 0])


@every_mixer
def test_tokens_without_steps_are_refused_in_one_line(name: str) -> None:
    mixer = small(name)
    with refused(rf"{name}.*\[T, B, N, C\].*steps first.*\[7, 12\].*x\[None\]"):
        mixer(torch.ones(7, 12, dtype=torch.float64))


@every_mixer
def test_what_cannot_be_served_is_refused_at_construction(name: str) -> None:
    for more in (
        {"project": lambda role: torch.nn.Identity()},
        {"post_projection": lambda role: None},
        {"grid": (4, 4), "key_grid": (2, 2)},
    ):
        with pytest.raises(UserError, match=f"{name}.*spiking model"):
            build(name, Site(dim=8, **more))
    for value in (0.0, -1.0):
        with pytest.raises(UserError, match="attn_threshold"):
            create_mixer(name, dim=8, attn_threshold=value)
    with pytest.raises(UserError, match="neuron='relux'"):
        create_mixer(name, dim=8, neuron="relux")


@every_mixer
def test_there_is_no_map_and_the_reason_says_what_there_is(name: str) -> None:
    with pytest.raises(NoAttentionMap, match=rf"{name}.*mixer\.spikes\(x\)"):
        small(name).attention_map(spikes_like(1, 1, 4, 12))


def test_these_are_the_spiking_mixers() -> None:
    assert set(list_mixers(domain="spiking")) - set(list_mixers(domain="dense")) == set(SPIKING)


@every_mixer
def test_a_padded_head_changes_nothing(name: str) -> None:
    """Heads wider than ``dim / num_heads`` whose extra channels are silent."""
    plain, wide = small(name, 6, 2).eval(), small(name, 6, 2, head_dim=5).eval()
    keep = torch.tensor([i for i in range(10) if i % 5 < 3])
    with torch.no_grad():
        for role in plain.roles:
            for key in (role, f"{role}_bn"):
                for part, value in plain.get_submodule(key).state_dict().items():
                    target = wide.get_submodule(key).state_dict()[part]
                    if value.ndim:
                        target.zero_()[keep] = value
        wide.proj.weight.zero_()[:, keep] = plain.proj.weight
        wide.load_state_dict(
            {k: v for k, v in plain.state_dict().items() if k[:5] == "proj_" or k == "proj.bias"},
            strict=False,
        )
    x = spikes_like(3, 2, 5, 6)
    close(wide(x), plain(x))

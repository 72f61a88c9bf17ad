# SPDX-License-Identifier: Apache-2.0
"""Time in spiking models: images and frames, other T, no state, other neurons, other sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_host, find_mixers
from keymix.layers.neurons import IF, LIF, Neurons, ParametricLIF
from keymix.mixers.registry import list_mixers
from keymix.models import create_model, set_image_size
from mixer_cases import refused
from shrunk import images, shrunk, wake
from tolerances import close, differs

MICRO = "qkformer_micro_32"
NAMES = ["qkformer_hst_4_384", "qkformer_hst_2_256", "spikformer_4_384"]
every_one = pytest.mark.parametrize("name", NAMES)


def awake(name: str = MICRO, **options: Any) -> Any:
    """A small model in float64 and evaluation mode in which neurons fire."""
    model = shrunk(name, **options).double()
    wake(model, images(name, count=4).double())
    return model.eval()


def batch(name: str = MICRO, count: int = 2, seed: int = 1) -> Tensor:
    return images(name, count, seed).double()


def repeated(x: Tensor, steps: int) -> Tensor:
    return x[:, None].repeat(1, steps, 1, 1, 1)


@every_one
def test_two_evaluations_of_one_batch_are_equal_bit_for_bit(name: str) -> None:
    model, x = awake(name), batch(name)
    first = model(x)
    model(batch(name, count=3, seed=2))
    assert torch.equal(model(x), first)


@every_one
def test_a_training_step_leaves_nothing_behind_but_statistics(name: str) -> None:
    model = awake(name)
    before = {k for k, _ in model.named_buffers()}
    model.train()
    model(batch(name)).square().sum().backward()
    assert {k for k, _ in model.named_buffers()} == before
    other = copy.deepcopy(model)  # takes leaves of the graph alone: no spikes are kept
    assert other.state_dict().keys() == model.state_dict().keys()
    model.eval()
    x = batch(name, seed=3)
    assert torch.equal(model(x), other.eval()(x))


@every_one
def test_an_image_is_the_frames_that_repeat_it(name: str) -> None:
    model, x = awake(name), batch(name)
    close(model(repeated(x, 2)), model(x))
    changing = repeated(x, 2)
    changing[:, 1] = batch(name, seed=5)
    assert differs(model(changing), model(x))


@pytest.mark.slow
@every_one
def test_time_steps_are_free_at_inference(name: str) -> None:
    model, x = awake(name), batch(name)
    two = model(x)
    model.set_time_steps(5)
    assert differs(model(x), two)
    close(model(repeated(x, 5)), model(x))
    five = awake(name, time_steps=5)
    five.load_state_dict(model.state_dict())
    assert torch.equal(five(x), model(x))
    with refused("time_steps=0"):
        model.set_time_steps(0)


def test_logits_are_the_mean_over_the_steps() -> None:
    model, x = awake(), batch()
    seen: list[Tensor] = []
    hook = model.stages[-1].register_forward_hook(lambda m, args, out: seen.append(out))
    logits = model(x)
    hook.remove()
    steps = torch.stack([model.head(rates.mean((2, 3))) for rates in seen[0]])
    assert len(steps) == model.time_steps
    close(logits, steps.mean(0))


@together
@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((1, 3, 3, 8, 8), r"3 time steps on axis 1, the model has time_steps=4, see set_time"),
        ((4, 2, 3, 8, 8), r"2 time steps on axis 1.*looks like \[T, B, C, H, W\]"),
        ((2, 1, 8, 8), r"1 channels on axis 1, the model takes 3"),
        ((2, 4, 1, 8, 8), r"1 channels on axis 2, the model takes 3"),
        ((3, 8, 8), r"shape \[3, 8, 8\]: the model takes images \[B, C, H, W\] or frames"),
    ],
)
def test_input_of_other_axes_is_refused_by_name(shape: tuple[int, ...], says: str) -> None:
    model = create_model(MICRO)
    for call in (model, model.forward_features, model.forward_intermediates):
        with refused(says):
            call(torch.zeros(shape))


def test_images_of_other_sizes_go_in_without_rebuilding() -> None:
    model = awake()
    for size in ((32, 32), (48, 40), (33, 50)):
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        rows, columns = (-(-side // 16) for side in size)
        assert model.forward_features(x).shape == (2, 32, rows, columns)
        taken = copy.deepcopy(model)
        set_image_size(taken, size)
        assert torch.equal(taken(x), model(x))
        assert find_mixers(taken)["stages.2.blocks.0.attn.mixer"].site.grid == (rows, columns)


def test_the_layout_is_that_of_the_last_call() -> None:
    model = awake()
    host = find_host(model)
    host.follow_calls(model)
    place = host.places(model)[-1]
    assert host.layout(model, place).grid == (2, 3)
    model(torch.zeros(1, 3, 64, 32, dtype=torch.float64))
    assert host.layout(model, place).grid == (4, 2)


@pytest.mark.slow
@together
@pytest.mark.parametrize("mixer", list_mixers(domain="spiking"))
@every_one
def test_every_spiking_mixer_sits_in_every_block(name: str, mixer: str) -> None:
    model = shrunk(name, mixer=mixer)
    found = find_mixers(model)
    assert {m.mixer_name for m in found.values()} == {mixer}
    model.train()(images(name)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_dense_mixers_are_refused_and_one_a_stage_is_taken() -> None:
    with pytest.raises(UserError, match=r"'softmax' takes dense tokens.*stages\.0.*are spiking"):
        create_model(MICRO, mixer="softmax")
    model = create_model(MICRO, mixer=["qkca", "qkta", "sdsa"])
    names = [m.mixer_name for m in find_mixers(model).values()]
    assert names == ["qk_channel", "qk_token", "spike_driven"]
    with pytest.raises(UserError, match=r"3 stages of 3 blocks, for which 2 mixers were given"):
        create_model(MICRO, mixer=["qkca", "qkta"])


def kinds(model: nn.Module, *classes: type[nn.Module]) -> int:
    return sum(isinstance(m, classes) for m in model.modules())


@pytest.mark.parametrize(
    ("neuron", "made"),
    [("lif", LIF), ("if", IF), ("plif", ParametricLIF), (Neurons(kind="if", v_reset=None), IF)],
)
def test_one_kind_of_neuron_is_in_all_places(neuron: Any, made: type[nn.Module]) -> None:
    model = shrunk(MICRO, neuron=neuron)
    # a stem of 4, two embeddings of 3; two of 6 in a token and an MLP, and a block of SSA
    blocks = 4
    assert kinds(model, made) == 4 + 2 * 3 + blocks * (4 + 2) + 2
    assert kinds(model, LIF, IF, ParametricLIF) == kinds(model, made)
    model.train()(images(MICRO)).sum().backward()
    if neuron == "plif":
        free = [k for k, p in model.named_parameters() if k.endswith("sn.w") and p.grad is None]
        assert free == []


def test_the_attentions_neurons_have_a_threshold_of_their_own() -> None:
    found = find_mixers(shrunk(MICRO, mixer_options={"attn_threshold": 0.25}))
    for mixer in found.values():
        assert mixer.attn_sn.v_threshold == 0.25
        assert mixer.q_sn.v_threshold == mixer.proj_sn.v_threshold == 1.0


def fits(model: nn.Module, steps: int) -> float:
    """The loss on four images after some steps, over that before the first."""
    x, y = images(MICRO, count=4), torch.arange(4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[-1] / losses[0]


def test_the_ann_counterpart_learns() -> None:
    model = shrunk(MICRO, neuron="relu", num_classes=4, time_steps=1).train()
    assert kinds(model, LIF, IF, ParametricLIF) == 0
    assert fits(model, 20) < 0.1


@pytest.mark.slow
def test_a_spiking_model_learns() -> None:
    assert fits(shrunk(MICRO, num_classes=4, time_steps=4).train(), 25) < 0.6


def test_the_deformed_shortcut_stem_makes_tokens_of_the_same_grid() -> None:
    for name, options in [
        ("spikformer_4_384", {}),
        ("spikformer_8_384", {}),
        ("spikformer_2_256", {"time_steps": 4}),
    ]:
        with torch.device("meta"):
            models = [create_model(name, stem=stem, **options) for stem in ("sps", "peds")]
        grids = [m.site.grid for model in models for m in find_mixers(model).values()]
        assert len(set(grids)) == 1
        assert models[0].feature_info == models[1].feature_info


def test_the_shortcut_before_activation_is_another_model_of_as_many_parameters() -> None:
    with torch.device("meta"):
        model = create_model("qkformer_hst_10_384", shortcut="pre_activation")
    assert sum(p.numel() for p in model.parameters()) == 16_473_688
    x, most = batch(), []
    models = [awake(shortcut=s) for s in ("activation_before_addition", "pre_activation")]
    models[1].load_state_dict(models[0].state_dict(), strict=True)
    for each in models:
        wake(each, batch(count=4))
        outputs: list[Tensor] = []
        for stage in each.eval().stages:
            stage.patch_embed.register_forward_hook(lambda m, args, out, to=outputs: to.append(out))
        each(x)
        most.append([float(out.max()) for out in outputs])
    assert max(most[0]) == 2.0
    assert most[1] == [1.0] * 3
    assert differs(models[0](x), models[1](x))
    models[1].train()(x).square().sum().backward()
    assert all(p.grad is not None for p in models[1].parameters())
    embeds = [p for k, p in models[1].named_parameters() if "patch_embed" in k]
    assert all(p.grad.any() for p in embeds)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["drop_rate", "drop_path_rate"])
@every_one
def test_dropping_acts_in_training_alone(name: str, option: str) -> None:
    plain, dropping = awake(name), awake(name, **{option: 0.5})
    dropping.load_state_dict(plain.state_dict(), strict=True)
    x = batch(name, count=4)
    assert torch.equal(dropping(x), plain(x))
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(dropping.train()(x))
    assert torch.equal(found[0], found[1])
    assert differs(found[0], found[2])
    assert differs(found[0], plain.train()(x))


def test_features_without_a_classifier_keep_their_places() -> None:
    model = awake(num_classes=0, global_pool="")
    assert model(batch()).shape == (2, 32, 2, 3)
    with refused("global_pool='' leaves places"):
        model.reset_classifier(5)
    model.reset_classifier(5, "avg")
    assert model.double()(batch()).shape == (2, 5)


def test_what_stands_behind_the_features_asked_for_is_dropped() -> None:
    model = awake("spikformer_4_384")
    x = batch("spikformer_4_384")
    wanted = model.forward_intermediates(x, indices=[0], intermediates_only=True)[0]
    early = model.forward_intermediates(x, indices=[0], stop_early=True, intermediates_only=True)
    assert torch.equal(early[0], wanted)
    assert model.prune_intermediate_layers([0]) == [0]
    assert len(find_mixers(model)) == 1
    assert torch.equal(model(x), wanted)

# SPDX-License-Identifier: Apache-2.0
"""What every registered mixer keeps: shapes, claims, options, state, refusals."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from keymix.layers.neurons import Neurons
from keymix.mixers.base import TokenMixer, explain_backend
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import list_mixers, mixer_options
from mixer_cases import (
    BESIDE,
    DIM,
    SAME_RESULT,
    alternatives,
    gradients,
    images,
    make,
    mixer_cases,
    option_cases,
    refusal,
    stir,
    tokens,
)
from tolerances import CHANGE, close, differs

OTHER_NEURONS = Neurons(v_reset=None)  # of a site, so that each kind by name is another

every_mixer = pytest.mark.parametrize("name", list_mixers())
every_case = pytest.mark.parametrize(("name", "options"), mixer_cases())


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


# ---- shapes -----------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("prefix", [0, 2])
def test_output_has_the_shape_of_the_tokens(
    name: str, options: dict[str, Any], prefix: int
) -> None:
    mixer = make(name, options, num_prefix_tokens=prefix)
    for lead in ((3,), (2, 4)):
        x = tokens(mixer, *lead)
        y = mixer(x)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        assert torch.isfinite(y).all()


@every_mixer
def test_two_leading_axes_are_one_folded(name: str) -> None:
    mixer = make(name, num_prefix_tokens=1).eval()
    x = tokens(mixer, 2, 3)
    axis = images(mixer)
    close(mixer(x), mixer(x.flatten(axis, axis + 1)).unflatten(axis, (2, 3)))


@every_mixer
def test_windows_are_a_leading_axis(name: str) -> None:
    mixer = make(name, windows=3).eval()
    x = tokens(mixer, 2, 3)
    y = mixer(x)
    assert y.shape == x.shape
    moved = x.clone()
    moved[..., 1, :, :] = tokens(mixer, 2, seed=8)
    other = mixer(moved)
    close(other[..., [0, 2], :, :], y[..., [0, 2], :, :])
    assert differs(other[..., 1, :, :], y[..., 1, :, :])


# ---- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "option", "value"), option_cases(backend=False))
def test_every_option_value_does_something(name: str, option: str, value: Any) -> None:
    if value == "?":
        alternatives(name, option)  # fails and says what is missing
    site = {"grid": (3, 4), "num_prefix_tokens": 1, "site_neuron": OTHER_NEURONS}
    if (name, option) in SAME_RESULT:
        pytest.skip("chooses a way of computing; see the test of such options")
    beside = BESIDE.get((name, option), {})
    chosen = (beside, {**beside, option: value})
    at_start = [make(name, o, stirred=False, seed=3, **site) for o in chosen]
    before, after = (weights_of(m) for m in at_start)
    for key in before.keys() & after.keys():
        alike = before.keys() == after.keys() and before[key].shape == after[key].shape
        if alike and differs(before[key], after[key]):
            return  # the same draws, other weights: the option acts where a model starts
    plain, other = (make(name, o, **site) for o in chosen)
    shared = plain.state_dict()
    fits = {
        k: v for k, v in other.state_dict().items() if k in shared and shared[k].shape == v.shape
    }
    other.load_state_dict({k: shared[k] for k in fits}, strict=False)
    x = tokens(plain, 3)
    for training in (True, False):
        results = []
        for mixer in (plain, other):
            mixer.train(training)
            torch.manual_seed(11)
            y, grads = gradients(mixer, x)
            results.append({"output": y, **{k: grads[k] for k in ["x", *fits] if k in grads}})
        if any(differs(results[0][k], results[1][k]) for k in results[0]):
            return
    elsewhere = torch.randn(3, 11, DIM, dtype=torch.float64)  # what acts on another grid alone
    refused_there = [
        refusal(partial(m, elsewhere, grid=(2, 5))) is not None for m in (plain, other)
    ]
    if refused_there[0] != refused_there[1]:
        return
    if not any(refused_there) and differs(*(m(elsewhere, grid=(2, 5)) for m in (plain, other))):
        return
    pytest.fail(f"{option}={value!r} changes neither the output nor a gradient of {name!r}")


@pytest.mark.parametrize(("name", "option"), sorted(SAME_RESULT))
def test_options_of_how_to_compute_leave_spikes_as_they_are(name: str, option: str) -> None:
    plain = make(name, grid=(3, 4))
    x = tokens(plain, 3)
    wanted = gradients(plain, x)
    assert wanted[0].any()
    for value in alternatives(name, option):
        y, grads = gradients(make(name, {option: value}, grid=(3, 4)), x)
        assert torch.equal(y, wanted[0])
        for key, grad in grads.items():
            close(grad, wanted[1][key])


@every_mixer
def test_backend_by_name_runs_or_says_why_not(name: str) -> None:
    if "backend" not in mixer_options(name):
        pytest.skip("one path only")
    auto = make(name).eval()
    x = tokens(auto)
    wanted = auto(x)
    assert explain_backend(auto).why
    for backend in alternatives(name, "backend"):
        mixer = make(name, {"backend": backend}).eval()
        reason = refusal(partial(mixer, x))
        if reason is not None:
            assert backend in reason
            continue
        assert explain_backend(mixer).name == backend
        close(mixer(x), wanted)


# ---- gradients --------------------------------------------------------------------------------


@pytest.mark.every_path
@every_case
@pytest.mark.parametrize("training", [True, False])
def test_gradients_reach_every_parameter_but_the_declared(
    name: str, options: dict[str, Any], training: bool
) -> None:
    mixer = make(name, options, num_prefix_tokens=1, grid=(3, 4)).train(training)
    zero = mixer.zero_gradients
    assert zero <= dict(mixer.named_parameters()).keys()
    _, grads = gradients(mixer, tokens(mixer, 4))
    assert not torch.isnan(grads["x"]).any(), "no gradient reaches the tokens"
    size = max(1.0, *(float(g.abs().max()) for g in grads.values()))
    for key, grad in grads.items():
        assert not torch.isnan(grad).any(), f"no gradient reaches {key}"
        if key in zero:
            assert grad.abs().max() < 1e-12 * size, f"{key} was declared zero and is not"
        else:
            assert grad.abs().max() > CHANGE, f"the gradient of {key} is zero"


# ---- claims -----------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("training", [True, False])
def test_permutation_is_as_claimed(name: str, options: dict[str, Any], training: bool) -> None:
    if any("drop" in option for option in options) and training:
        pytest.skip("dropout draws by place")
    mixer = make(name, options, grid=(3, 4)).train(training)
    x = tokens(mixer)
    order = torch.randperm(x.shape[-2], generator=torch.Generator().manual_seed(5))
    moved = copy.deepcopy(mixer)(x[..., order, :])
    claimed = mixer.claims.permutation
    wanted = mixer(x)[..., order, :]
    if claimed == "equivariant":
        close(moved, wanted)
    elif options not in ({"kernel_size": 1}, {"pool_size": 1}) or isinstance(mixer, MapMixer):
        # a 1x1 window sees no place; the claim is of what the mixer may do
        assert differs(moved, wanted)


@every_case
def test_prefix_mixing_is_as_claimed(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, options, num_prefix_tokens=2).eval()
    x = tokens(mixer, 16)  # enough of them that some spikes hang on one token
    moved = x.clone()
    moved[..., 2:, :] = tokens(mixer, 16, seed=9)[..., 2:, :]
    seen = differs(mixer(x)[..., :2, :], mixer(moved)[..., :2, :])
    assert seen == mixer.claims.mixes_prefix


def masked_value(mixer: TokenMixer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of the queries that may not see token 1, at two values of token 1, and unmasked."""
    n = mixer.site.num_tokens
    others = [i for i in range(n) if i != 1]
    bias = torch.zeros(n, n, dtype=torch.float64)
    bias[others, 1] = -torch.inf
    x = tokens(mixer)
    if isinstance(mixer, MapMixer):
        inputs = mixer.inputs(x, mixer.site.grid)
        other = {**inputs, "v": inputs["v"].clone()}
        other["v"][..., 1, :] += 3.0
        outputs = []
        for given in (inputs, other):
            mixer.inputs = lambda x, grid, given=given: given  # type: ignore[method-assign]
            outputs.append(mixer(x, bias=bias)[:, others])
        unmasked = mixer(x)[:, others]
        del mixer.inputs
        return outputs[0], outputs[1], unmasked
    moved = x.clone()
    moved[..., 1, :] += 3.0
    one, other, unmasked = mixer(x, bias=bias), mixer(moved, bias=bias), mixer(x)
    return one[..., others, :], other[..., others, :], unmasked[..., others, :]


@every_case
@pytest.mark.parametrize("training", [True, False])
def test_masking_is_as_claimed(name: str, options: dict[str, Any], training: bool) -> None:
    mixer = make(name, options).train(training)
    torch.manual_seed(2)
    if any("drop" in option for option in options):
        mixer.eval()
    one, other, unmasked = masked_value(mixer)
    if mixer.claims.maskable:
        assert torch.isfinite(one).all()
        assert torch.equal(one, other), "a masked token's value reaches a query"
    else:
        leaks = not torch.isfinite(one).all() or differs(one, other)
        ignored = bool(torch.equal(one, unmasked))
        assert leaks or ignored, "claims not to be maskable, but the mask held"


@every_case
def test_images_do_not_see_each_other_in_eval_mode(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, options, num_prefix_tokens=1).eval()
    x = tokens(mixer, 3)
    y, axis = mixer(x), images(mixer)
    for i in range(3):
        close(mixer(x.narrow(axis, i, 1)), y.narrow(axis, i, 1))


@every_case
def test_the_gradient_of_one_image_is_that_in_a_batch(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, options, num_prefix_tokens=1).eval()
    x, axis = tokens(mixer, 2).requires_grad_(), images(mixer)
    weight = torch.randn_like(x.narrow(axis, 0, 1))
    (wanted,) = torch.autograd.grad((mixer(x).narrow(axis, 0, 1) * weight).sum(), x)
    one = x.detach().narrow(axis, 0, 1).requires_grad_()
    (grad,) = torch.autograd.grad((mixer(one) * weight).sum(), one)
    close(grad, wanted.narrow(axis, 0, 1))


@every_mixer
def test_tokens_are_not_written_to(name: str) -> None:
    mixer = make(name, num_prefix_tokens=1)
    x = tokens(mixer)
    kept = x.clone()
    mixer(x)
    assert torch.equal(x, kept)


# ---- state ------------------------------------------------------------------------------------


@every_case
def test_state_dict_holds_all_there_is(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, options, num_prefix_tokens=1, seed=0).eval()
    mixer.train()
    mixer(tokens(mixer))  # running statistics move
    mixer.eval()
    fresh = make(name, options, num_prefix_tokens=1, seed=1, stirred=False).eval()
    fresh.load_state_dict(weights_of(mixer), strict=True)
    x = tokens(mixer)
    assert torch.equal(fresh(x), mixer(x))


@every_mixer
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_compute_the_same(name: str, how: str) -> None:
    mixer = make(name, num_prefix_tokens=1).eval()
    twin = copy.deepcopy(mixer) if how == "deepcopy" else pickle.loads(pickle.dumps(mixer))
    x = tokens(mixer)
    assert torch.equal(twin(x), mixer(x))
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert all(p.abs().sum() > 0 for p in mixer.parameters()), "the copy shares weights"


@every_mixer
def test_non_contiguous_tokens_are_the_same_tokens(name: str) -> None:
    mixer = make(name, num_prefix_tokens=1).eval()
    x = tokens(mixer, 4)
    wanted = mixer(x)
    layouts = {
        "tokens first": x.transpose(0, 1).contiguous().transpose(0, 1),
        "channels first": x.mT.contiguous().mT,
        "strided": torch.stack((x, x + 1), -1).flatten(-2)[..., ::2],
    }
    for layout, same in layouts.items():
        assert not same.is_contiguous(), layout
        close(mixer(same), wanted)
    axis = images(mixer)
    first, again = x.narrow(axis, 0, 1).expand_as(x), wanted.narrow(axis, 0, 1).expand_as(wanted)
    close(mixer(first), again)


# ---- what hosts and optimisers ask for --------------------------------------------------------


@every_case
def test_no_weight_decay_names_parameters(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, options)
    assert mixer.no_weight_decay() <= dict(mixer.named_parameters()).keys()


@every_mixer
def test_projections_are_the_linear_maps_of_the_mixer(name: str) -> None:
    mixer = make(name, num_prefix_tokens=1)
    inside = {id(m) for m in mixer.modules() if isinstance(m, nn.Linear)}
    assert {id(m) for m in mixer.projections} <= inside
    if isinstance(mixer, MapMixer):
        assert {id(m) for m in mixer.projections} == inside


def test_stirring_moves_every_parameter() -> None:
    mixer = make("softmax", {"temperature": True, "talking_heads": True}, stirred=False)
    before = weights_of(mixer)
    stir(mixer)
    assert all(differs(before[k], v) for k, v in mixer.named_parameters())

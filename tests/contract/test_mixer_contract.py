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

from each import each
from keymix.errors import UserError
from keymix.layers.neurons import Neurons
from keymix.mixers import contract
from keymix.mixers.base import Site, TokenMixer, explain_backend
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import get_mixer_class, list_mixers, mixer_options
from mixer_cases import (
    ACCURACY,
    DIM,
    NEEDED_WITH,
    SAME_RESULT,
    alternatives,
    close,
    each_options,
    gradients,
    images,
    in_64_bits,
    make,
    refusal,
    stir,
    tokens,
    values_of,
)
from tolerances import differs

OTHER_NEURONS = Neurons(v_reset=None)  # of a site, so that each kind by name is another

every_mixer = pytest.mark.parametrize("name", list_mixers())


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


# ---- shapes -----------------------------------------------------------------------------------


@every_mixer
def test_a_mixer_keeps_its_site_and_takes_what_hosts_hand_it(name: str) -> None:
    kind, site = get_mixer_class(name), Site(dim=DIM, num_heads=3, grid=(2, 3))
    assert contract.breaks_constructor(kind(site), site) is None
    assert contract.breaks_signature(kind) is None


@every_mixer
@pytest.mark.parametrize("prefix", [0, 2])
@each_options
def test_output_has_the_shape_of_the_tokens(
    name: str, options: dict[str, Any], prefix: int
) -> None:
    mixer = make(name, options, num_prefix_tokens=prefix)
    assert contract.breaks_shape(mixer, ACCURACY) is None
    x = tokens(mixer, 2, 4)
    assert mixer(x).shape == x.shape


@every_mixer
def test_two_leading_axes_are_one_folded(name: str) -> None:
    mixer = make(name, num_prefix_tokens=1).eval()
    assert contract.breaks_leading_axes(mixer, ACCURACY) is None
    assert contract.breaks_repetition(mixer, ACCURACY) is None


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


@in_64_bits
@every_mixer
@each("option, value", values_of)
def test_every_option_value_does_something(name: str, option: str, value: Any) -> None:
    site = {"grid": (3, 4), "num_prefix_tokens": 1, "site_neuron": OTHER_NEURONS}
    if (name, option) in SAME_RESULT:
        pytest.skip("chooses a way of computing; see the test of such options")
    needed = NEEDED_WITH.get((name, option), {})
    chosen = (needed, {**needed, option: value})

    def made(given: dict[str, Any], *, stirred: bool = True) -> TokenMixer:
        return make(name, given, stirred=stirred, seed=0 if stirred else 3, **site)

    if not contract.option_acts(made, *chosen, ACCURACY):
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
@every_mixer
@pytest.mark.parametrize("training", [True, False])
@each_options
def test_gradients_reach_every_parameter_but_the_declared(
    name: str, options: dict[str, Any], training: bool
) -> None:
    mixer = make(name, options, num_prefix_tokens=1, grid=(3, 4)).train(training)
    assert contract.breaks_gradients(mixer, ACCURACY) is None


# ---- claims -----------------------------------------------------------------------------------


@in_64_bits
@every_mixer
@pytest.mark.parametrize("training", [True, False])
@each_options
def test_permutation_is_as_claimed(name: str, options: dict[str, Any], training: bool) -> None:
    if any("drop" in option for option in options) and training:
        pytest.skip("dropout draws by place")
    mixer = make(name, options, grid=(3, 4)).train(training)
    if mixer.claims.permutation == "equivariant":
        assert contract.breaks_permutation(mixer, ACCURACY) is None
    elif (name == "nystrom" and not {"landmarks", "conv_size"} & set(options)) or (
        name == "agent" and options == {"dwc": False}
    ):  # 64 landmarks of 12 tokens are these tokens, and so are 7x7 agents
        assert contract.permutes(mixer, ACCURACY)
    elif options not in ({"kernel_size": 1}, {"pool_size": 1}) or isinstance(mixer, MapMixer):
        # a 1x1 window sees no place; the claim is of what the mixer may do
        assert not contract.permutes(mixer, ACCURACY)


@in_64_bits
@every_mixer
@each_options
def test_prefix_mixing_is_as_claimed(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, options, num_prefix_tokens=2).eval()
    assert contract.breaks_prefix(mixer, ACCURACY) is None


@every_mixer
@pytest.mark.parametrize("training", [True, False])
@each_options
def test_masking_is_as_claimed(name: str, options: dict[str, Any], training: bool) -> None:
    mixer = make(name, options).train(training)
    torch.manual_seed(2)
    if any("drop" in option for option in options):
        mixer.eval()
    if mixer.claims.maskable:
        assert contract.breaks_mask(mixer, ACCURACY) is None
        return
    x, (bias, others) = tokens(mixer), contract.example_mask(mixer, ACCURACY)
    if mixer.site.has_own_key_grid:  # a mask of tokens says nothing of keys that stand for several
        with pytest.raises(UserError, match="bias for"):
            mixer(x, bias=bias)
        return
    ignored = torch.equal(mixer(x, bias=bias)[..., others, :], mixer(x)[..., others, :])
    assert ignored or not contract.mask_holds(mixer, ACCURACY), (
        "not maskable, but the mask was kept"
    )


@in_64_bits
@every_mixer
@each_options
def test_every_role_does_something(name: str, options: dict[str, Any]) -> None:
    assert contract.breaks_roles(make(name, options).eval(), ACCURACY) is None


@every_mixer
@each_options
def test_images_do_not_see_each_other_in_eval_mode(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, options, num_prefix_tokens=1).eval()
    assert contract.breaks_images(mixer, ACCURACY) is None


@every_mixer
@each_options
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
    assert contract.breaks_input(make(name, num_prefix_tokens=1), ACCURACY) is None


# ---- state ------------------------------------------------------------------------------------


@every_mixer
@each_options
def test_state_dict_holds_all_there_is(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, options, num_prefix_tokens=1, seed=0).eval()
    mixer.train()
    mixer(tokens(mixer))  # running statistics move
    mixer.eval()
    fresh = make(name, options, num_prefix_tokens=1, seed=1, stirred=False).eval()
    assert contract.breaks_state(mixer, fresh, ACCURACY) is None


@every_mixer
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_compute_the_same(name: str, how: str) -> None:
    mixer = make(name, num_prefix_tokens=1).eval()
    copied = copy.deepcopy(mixer) if how == "deepcopy" else pickle.loads(pickle.dumps(mixer))
    x = tokens(mixer)
    assert torch.equal(copied(x), mixer(x))
    with torch.no_grad():
        for p in copied.parameters():
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


@every_mixer
@each_options
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


@every_mixer
def test_it_says_what_it_does_in_plain_words_for_reports(name: str) -> None:
    about = get_mixer_class(name).about
    assert about.endswith(".")
    assert not set(about) & set("`\\$")  # read by people, on pages and in terminals

# SPDX-License-Identifier: Apache-2.0
"""Every model folds for inference: the same answers without BatchNorm, on all of its sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import keymix
from keymix import fold_for_inference
from keymix.analysis.spikes import read_spikes
from keymix.errors import UserError
from keymix.layers.folding import fold_norm, is_folded
from keymix.models import set_image_size
from keymix.models.weights import load_weights
from mixer_cases import stir
from shrunk import every_form, family_of, images, shrunk
from tolerances import close


def norms(model: nn.Module) -> list[str]:
    return [path for path, m in model.named_modules() if isinstance(m, _BatchNorm)]


def trained(name: str, **options: Any) -> nn.Module:
    """A small model in float64 whose norms have the statistics of a batch."""
    model = shrunk(name, **options).double()
    if not family_of(name).spiking:
        stir(model)
        model.train()(images(name, 4).double())
    return model.eval()


@torch.no_grad()
def answer(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


@every_form
def test_a_folded_model_answers_the_same_without_batch_norm(name: str) -> None:
    model = trained(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    folded, x = fold_for_inference(model), images(name).double()
    assert not norms(folded)
    close(answer(folded, x), answer(model, x))
    assert all(torch.equal(before[key], t) for key, t in model.state_dict().items())
    assert len(model.state_dict()) == len(before)
    assert not is_folded(model)
    with pytest.raises(UserError, match="cannot train"):
        folded.train()


MIXED = [
    ("deepvit_micro_p4_32", {"mixer": "re_attention", "stem": "conv"}),
    ("deepvit_micro_p4_32", {"mixer": "re_attention", "shared_from": 1}),
    ("cvt_micro_32", {"mixer": "re_attention"}),
    ("cvt_micro_32", {"mixer": "conv_static_key"}),
    ("qkformer_micro_32", {"mixer": "spiking_self", "neuron": "plif"}),
    ("spikformer_2_256", {"mixer": "spike_driven", "neuron": "relu"}),
]


@pytest.mark.parametrize(("name", "options"), MIXED)
def test_mixers_and_layers_fold_together(name: str, options: dict[str, Any]) -> None:
    model = trained(name, **options)
    assert norms(model)
    folded, x = fold_for_inference(model), images(name, 3).double()
    assert not norms(folded)
    close(answer(folded, x), answer(model, x))


@pytest.mark.parametrize("resize", ["interpolate", "pool_values"])
def test_a_folded_model_takes_another_image_size(resize: str) -> None:
    options = {"mixer": "static_key", "mixer_options": {"resize": resize}}
    model = trained("vit_micro_p4_32", **options)
    folded = fold_for_inference(model)
    for each in (model, folded):
        set_image_size(each, (48, 40))
    x = torch.randn(2, 3, 48, 40).double()
    close(answer(folded, x), answer(model, x))


def test_a_folded_model_shows_its_maps() -> None:
    model = trained("deepvit_micro_p4_32", mixer="re_attention")
    folded, x = fold_for_inference(model), images("deepvit_micro_p4_32").double()
    for stage in ("softmax", "final"):
        found, wanted = (keymix.attention_maps(m, x, stage=stage) for m in (folded, model))
        assert found.keys() == wanted.keys()
        for path, maps in found.items():
            close(maps, wanted[path])


def test_spikes_of_a_folded_model_are_counted() -> None:
    model = trained("qkformer_micro_32")
    x = images("qkformer_micro_32").double()
    theirs, ours = (read_spikes(each, [x]) for each in (model, fold_for_inference(model)))
    assert ours.firings == theirs.firings
    assert ours.rate > 0


def test_a_folded_model_refuses_weights() -> None:
    model = trained("vit_micro_p4_32", mixer="re_attention")
    with pytest.raises(UserError, match="load_weights takes the model that it was folded from"):
        load_weights(fold_for_inference(model), model.state_dict())


def test_a_model_without_memory_is_refused() -> None:
    with torch.device("meta"):
        model = shrunk("vit_micro_p4_32")
    with pytest.raises(UserError, match="meta device"):
        fold_for_inference(model)


def test_a_compiled_model_is_folded_as_what_it_wraps() -> None:
    model = trained("vit_micro_p4_32")
    assert type(fold_for_inference(torch.compile(model))) is type(model)


# ---- other libraries' modules -------------------------------------------------------------------


def block(*parts: nn.Module) -> nn.Module:
    model = nn.Sequential(*parts).double()
    for norm in model.modules():
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return model.eval()


def test_a_sequence_folds_what_follows_a_convolution() -> None:
    model = block(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1))
    folded, x = fold_for_inference(model), torch.randn(2, 3, 7, 5).double()
    assert isinstance(folded[1], nn.Identity)
    assert folded[0].bias is not None
    close(answer(folded, x), answer(model, x))


@pytest.mark.parametrize(
    "parts",
    [
        (nn.Linear(4, 4), nn.BatchNorm1d(4)),  # over tokens as well as over channels
        (nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)),
        (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
        (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False)),
        (nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)),
    ],
)
def test_a_sequence_keeps_the_others(parts: tuple[nn.Module, ...]) -> None:
    model = block(*copy.deepcopy(parts))
    folded = fold_for_inference(model)
    assert [type(m) for m in folded] == [type(m) for m in model]


def test_modules_that_stand_twice_in_a_sequence_keep_their_places() -> None:
    conv, norm, act = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Tanh()
    x = torch.randn(2, 4, 3, 3).double()
    for parts, left in [
        ((act, conv, act, norm), 1),  # the activation stands between both
        ((conv, conv, norm), 0),
        ((conv, norm, act, conv, norm), 0),
    ]:
        model = block(*parts)
        folded = fold_for_inference(model)
        assert sum(isinstance(m, nn.BatchNorm2d) for m in folded) == left
        close(answer(folded, x), answer(model, x))


def test_a_convolution_whose_output_is_returned_as_well_keeps_its_norm() -> None:
    model = timm.create_model("ghostnet_050", features_only=True)
    assert "conv_stem" in model.return_layers
    block(*model.children())  # gives the norms statistics
    folded, x = fold_for_inference(model), torch.randn(1, 3, 32, 32).double()
    with torch.no_grad():
        for ours, theirs in zip(folded(x), model(x), strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("part", ["conv", "norm"])
def test_what_somebody_listens_to_stays(part: str) -> None:
    conv, norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
    seen: list[Tensor] = []
    listened = conv if part == "conv" else norm
    listened.register_forward_hook(lambda module, args, out: seen.append(out))
    folded = fold_for_inference(block(conv, norm))
    answer(folded, torch.randn(1, 3, 2, 2).double())
    assert len(seen) == 1
    assert isinstance(folded[1], nn.BatchNorm2d)


def test_a_norm_in_training_is_not_folded() -> None:
    model = block(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).train()
    fold_norm(model, "0", "1")
    assert norms(model) == ["1"]


def test_a_convolution_before_two_norms_is_folded_into_each() -> None:
    conv = nn.Conv2d(3, 4, 1)
    model = nn.ModuleList([block(conv, nn.BatchNorm2d(4)), block(conv, nn.BatchNorm2d(4))])
    x = torch.randn(2, 3, 2, 2).double()
    for folded, own in zip(fold_for_inference(model.eval()), model, strict=True):
        close(answer(folded, x), answer(own, x))

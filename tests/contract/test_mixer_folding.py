# SPDX-License-Identifier: Apache-2.0
"""Folded for inference, every mixer computes what it did, on its grid and on others."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from keymix import fold_for_inference
from keymix.errors import UserError
from keymix.mixers.contract import image_axis
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import list_mixers
from mixer_cases import close, each_options, in_64_bits, make, refusal, stir, tokens

every_mixer = pytest.mark.parametrize("name", list_mixers())


def trained(name: str, options: dict[str, Any], **site: Any) -> Any:
    """A mixer whose norms have seen tokens, so that their statistics are not those of the start."""
    mixer = make(name, options, grid=(3, 5), num_prefix_tokens=1, **site).train()
    for seed in range(3):
        mixer(tokens(mixer, 3, seed=seed))
    return mixer.eval()


@in_64_bits  # a spike may fall otherwise where potentials are rounded
@every_mixer
@each_options
def test_a_folded_mixer_computes_the_same(name: str, options: dict[str, Any]) -> None:
    mixer = trained(name, options)
    before = {k: v.clone() for k, v in mixer.state_dict().items()}
    folded = fold_for_inference(mixer)
    x = tokens(mixer, 3, seed=9)
    with torch.no_grad():
        close(folded(x), mixer(x))
    after = mixer.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert mixer.train().training


@pytest.mark.parametrize("name", list_mixers(domain="dense"))
@each_options
def test_a_folded_mixer_has_the_same_map(name: str, options: dict[str, Any]) -> None:
    mixer = trained(name, options)
    if not isinstance(mixer, MapMixer):
        return
    folded, x = fold_for_inference(mixer), tokens(mixer, 2)
    close(folded(x), mixer(x))
    for stage in ("softmax", "final"):
        maps = [m.attention_map(x, queries=[4, 0], stage=stage) for m in (folded, mixer)]
        close(*maps)


@pytest.mark.parametrize("name", list_mixers(domain="dense"))
@each_options
def test_a_folded_mixer_takes_a_bias_and_leading_axes(name: str, options: dict[str, Any]) -> None:
    mixer = trained(name, options)
    if not isinstance(mixer, MapMixer):
        return
    folded, x = fold_for_inference(mixer), tokens(mixer, 2, 3)
    bias = torch.randn(3, 1, mixer.site.num_keys, dtype=torch.float64).to(x)
    close(folded(x, bias=bias), mixer(x, bias=bias))


@in_64_bits
@every_mixer
@each_options
def test_a_folded_mixer_takes_the_grids_that_it_took(name: str, options: dict[str, Any]) -> None:
    mixer = trained(name, options)
    if name == "key_value":
        options = {"pos_dim": 6, **options}
        mixer = trained(name, options)
    folded, here = fold_for_inference(mixer), mixer.site
    x = torch.cat([tokens(mixer, 2)] * 2, -2)[..., : 1 + 4 * 6, :]
    said = [refusal(lambda m=m: m(x, grid=(4, 6))) for m in (mixer, folded)]
    assert said[0] == said[1]
    if said[0] is None:
        close(folded(x, grid=(4, 6)), mixer(x, grid=(4, 6)))
    said = [refusal(lambda m=m: m.set_grid((4, 6))) for m in (mixer, folded)]
    assert said[0] == said[1]
    if said[0] is None:
        assert here.grid != folded.site.grid
        close(folded(x), mixer(x))


@every_mixer
def test_a_folded_mixer_refuses_to_train(name: str) -> None:
    folded = fold_for_inference(make(name))
    assert not folded.training
    for module in folded.modules():
        with pytest.raises(UserError, match="folded for inference and cannot train"):
            module.train()
        assert not module.training
    assert folded.eval() is folded
    with pytest.raises(UserError, match="folding takes the model that it was folded from"):
        fold_for_inference(folded)


@in_64_bits
@every_mixer
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_a_folded_mixer_are_folded(name: str, how: str) -> None:
    folded = fold_for_inference(trained(name, {}))
    copied = copy.deepcopy(folded) if how == "deepcopy" else pickle.loads(pickle.dumps(folded))
    x = tokens(folded)
    assert torch.equal(copied(x), folded(x))
    with pytest.raises(UserError, match="cannot train"):
        copied.train()


@in_64_bits
@every_mixer
def test_images_are_alone_in_a_folded_mixer(name: str) -> None:
    folded = fold_for_inference(trained(name, {}))
    x, axis = tokens(folded, 3), image_axis(folded)
    close(folded(x.narrow(axis, 1, 1)), folded(x).narrow(axis, 1, 1))


@in_64_bits
@every_mixer
def test_parts_that_others_share_are_not_written_to(name: str) -> None:
    """Two mixers with the same modules: each is folded once, not twice."""
    one, two = trained(name, {}), trained(name, {})
    for child, module in one.named_children():
        setattr(two, child, module)
    pair = torch.nn.ModuleList([one, two])
    x = tokens(one, 2)
    wanted = [one(x), two(x)]
    for mixer, y in zip(fold_for_inference(pair), wanted, strict=True):
        close(mixer(x), y)


def test_stirred_again_folding_follows() -> None:
    """Folding is of the weights that a model has then."""
    mixer = trained("re_attention", {})
    stir(mixer)
    x = tokens(mixer)
    close(fold_for_inference(mixer)(x), mixer(x))

# SPDX-License-Identifier: Apache-2.0
"""What every registered mixer keeps about its attention map, or says why it has none."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch

from keymix.errors import NoAttentionMap
from keymix.mixers.base import TokenMixer
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import get_mixer_class, list_mixers, mixer_options
from mixer_cases import DIM, close, each_options, make, numbers, refused, tokens
from tolerances import CHANGE, differs

MAPPED = [name for name in list_mixers() if issubclass(get_mixer_class(name), MapMixer)]
every_mixer = pytest.mark.parametrize("name", list_mixers())
every_map = pytest.mark.parametrize("name", MAPPED)


def is_softmax(mixer: TokenMixer) -> bool:
    return getattr(mixer, "activation", "softmax") == "softmax"


@every_mixer
def test_a_mixer_has_a_map_or_says_why_not(name: str) -> None:
    mixer = make(name)
    if mixer.forms_map():
        assert mixer.attention_map(tokens(mixer)).ndim == 4
        return
    why = re.escape(f"{name!r} forms no attention map: {mixer.why_no_map}")
    with pytest.raises(NoAttentionMap, match=why):
        mixer.attention_map(tokens(mixer))


@every_map
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stage", ["softmax", "final"])
@each_options
def test_rows_asked_for_are_the_rows_of_the_full_map(
    name: str, options: dict[str, Any], training: bool, stage: Any
) -> None:
    mixer = make(name, options, num_prefix_tokens=1, grid=(3, 4)).train(training)
    x = tokens(mixer, 2)
    keys = 1 + math.prod(mixer.key_grid_for((3, 4)) or (3, 4))  # fewer where the options say so
    bias = numbers(3, 13, keys)
    full = mixer.attention_map(x, stage=stage, bias=bias)
    assert full.shape == (2, 3, 13, keys)
    for queries in ([0], [12, 3, 3], torch.tensor([5, 1])):
        rows = mixer.attention_map(x, queries=queries, stage=stage, bias=bias)
        close(rows, full[..., torch.as_tensor(queries), :])
    for shape in ((keys,), (1, keys)):  # one bias a key, whatever the query
        shared = numbers(*shape).float()
        one = mixer.attention_map(x, queries=[4], stage=stage, bias=shared)
        close(one, mixer.attention_map(x, stage=stage, bias=shared)[..., [4], :])


@pytest.mark.every_path
@every_map
@each_options
def test_softmax_rows_sum_to_one(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, options, num_prefix_tokens=1)
    rows = mixer.attention_map(tokens(mixer), stage="softmax")
    if is_softmax(mixer):
        assert (rows >= 0).all()
        close(rows.sum(-1), torch.ones_like(rows[..., 0]))
    else:
        assert differs(rows.sum(-1), torch.ones_like(rows[..., 0]))


@every_map
@pytest.mark.parametrize("training", [True, False])
@each_options
def test_the_final_map_times_v_is_the_output(
    name: str, options: dict[str, Any], training: bool
) -> None:
    if any("drop" in option for option in options):
        training = False
    mixer = make(name, options, num_prefix_tokens=1).train(training)
    assert isinstance(mixer, MapMixer)
    x = tokens(mixer, 2, 3)
    final = mixer.attention_map(x, stage="final")
    v = mixer.inputs(x, mixer.site.grid)["v"]
    close(mixer.output(final @ v, x), mixer(x))


@every_map
@pytest.mark.parametrize("stage", ["softmax", "final"])
def test_maps_are_differentiable(name: str, stage: Any) -> None:
    mixer = make(name)
    x = tokens(mixer).requires_grad_()
    rows = mixer.attention_map(x, queries=[0, 4], stage=stage)
    (rows * torch.randn_like(rows)).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() > CHANGE


@every_map
@pytest.mark.parametrize("frozen", [True, False], ids=["norm in eval", "norm in training"])
@each_options
def test_capturing_in_training_changes_nothing(
    name: str, options: dict[str, Any], frozen: bool
) -> None:
    mixer = make(name, options, num_prefix_tokens=1).train()
    norms = [m for m in mixer.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms if frozen else []:
        norm.eval()
    before = copy.deepcopy(mixer.state_dict())
    x = tokens(mixer)
    torch.manual_seed(3)
    maps = mixer.attention_map(x, stage="final")
    rows = mixer.attention_map(x, stage="final", queries=[1])
    close(rows, maps[..., [1], :])
    for key, value in mixer.state_dict().items():
        assert torch.equal(before[key], value), f"capturing moved {key}"
    if not any("drop" in option for option in options):
        assert isinstance(mixer, MapMixer)
        v = mixer.inputs(x, mixer.site.grid)["v"]
        close(mixer.output(maps @ v, x), mixer(x))
        moved = any(not torch.equal(before[k], v) for k, v in mixer.state_dict().items())
        assert moved == (bool(norms) and not frozen), "the forward pass itself moves them"


@every_map
def test_maps_leave_dropout_out(name: str) -> None:
    dropping = make(name, {"attn_drop": 0.5}).train()
    plain = make(name).train()
    x = tokens(plain)
    close(
        dropping.attention_map(x, stage="final"),
        plain.attention_map(x, stage="final"),
    )


@pytest.mark.parametrize(
    "name",
    [n for n in list_mixers() if get_mixer_class(n).forms_map()],
)
@pytest.mark.parametrize("queries", [[], [6], [-1], torch.tensor([0, 99])])
def test_queries_that_are_no_tokens_are_refused(name: str, queries: Any) -> None:
    mixer = make(name)
    with refused("indices of the 6 tokens"):
        mixer.attention_map(tokens(mixer), queries=queries)
    with refused("'softmax' or 'final'"):
        mixer.attention_map(tokens(mixer), stage="nonsense")  # type: ignore[arg-type]


def test_the_random_map_is_the_map_that_mixes() -> None:
    mixer = make("random", num_prefix_tokens=2)
    x = tokens(mixer, 3)
    maps = mixer.attention_map(x)
    assert maps.shape == (3, 1, 8, 8)
    close(maps[:, 0] @ x, mixer(x))
    close(maps.sum(-1), torch.ones_like(maps[..., 0]))
    close(mixer.attention_map(x, queries=[7, 0]), maps[:, :, [7, 0]])


def test_masked_diagonals_are_zero_on_the_map() -> None:
    for name in (each for each in MAPPED if "mask_diagonal" in mixer_options(each)):
        mixer = make(name, {"mask_diagonal": True}, num_prefix_tokens=1)
        rows = mixer.attention_map(tokens(mixer))
        assert (rows.diagonal(dim1=-2, dim2=-1) == 0).all()
        own = mixer.attention_map(tokens(mixer), queries=[3])
        assert (own[..., 0, 3] == 0).all()
        assert rows.shape[-1] == 7
        assert mixer.site.dim == DIM

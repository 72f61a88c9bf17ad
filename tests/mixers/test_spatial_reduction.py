# SPDX-License-Identifier: Apache-2.0
"""Spatial reduction against its equation in NumPy, and what it keeps of softmax attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from each import each
from keymix.errors import UserError
from keymix.mixers.base import Site, TokenMixer
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import create_mixer
from mixer_cases import close, gradients, in_64_bits, make, numbers
from tolerances import differs

pytestmark = in_64_bits


def cells(old: int, new: int) -> list[list[int]]:
    """The tokens of each cell of one axis."""
    return [
        [i for i in range(old) if i < (j + 1) * old / new and i + 1 > j * old / new]
        for j in range(new)
    ]


def expected(mixer: MapMixer, x: Tensor, grid: tuple[int, int], keys: tuple[int, int]) -> Any:
    """The equation of the docstring, a head and a query at a time; biases are of size zero."""
    prefix, d = mixer.site.num_prefix_tokens, mixer.head_dim
    weights = {n: p.detach().numpy() for n, p in mixer.named_parameters()}
    out = []
    for tokens in x.numpy():
        rows, counts = [*tokens[:prefix]], [1.0] * prefix
        down, across = cells(grid[0], keys[0]), cells(grid[1], keys[1])
        in_row = {i: sum(i in cell for cell in down) for i in range(grid[0])}
        in_column = {i: sum(i in cell for cell in across) for i in range(grid[1])}
        for cell in down:
            for other in across:
                members = [(i, j) for i in cell for j in other]
                rows.append(np.mean([tokens[prefix + i * grid[1] + j] for i, j in members], axis=0))
                counts.append(sum(1 / (in_row[i] * in_column[j]) for i, j in members))
        few = np.stack(rows)
        q = tokens @ weights["q.weight"].T + weights["q.bias"]
        k, v = (few @ weights[f"{r}.weight"].T + weights[f"{r}.bias"] for r in "kv")
        heads = []
        for head in range(mixer.num_heads):
            part = slice(head * d, (head + 1) * d)
            logits = q[:, part] @ k[:, part].T / np.sqrt(d) + np.log(counts)
            a = np.exp(logits - logits.max(1, keepdims=True))
            heads.append(a / a.sum(1, keepdims=True) @ v[:, part])
        y = np.concatenate(heads, 1) @ weights["proj.weight"].T + weights["proj.bias"]
        out.append(y)
    return torch.from_numpy(np.stack(out))


GRIDS = {
    "even": ((4, 6), (2, 3), 0),
    "a class token": ((4, 6), (2, 3), 1),
    "uneven, two registers": ((5, 7), (2, 4), 2),
    "one key": ((3, 2), (1, 1), 1),
}


@each("grid,keys,prefix", GRIDS)
def test_it_is_its_equation(grid: Any, keys: Any, prefix: int) -> None:
    mixer = make("spatial_reduction", {"key_grid": keys}, grid=grid, num_prefix_tokens=prefix)
    assert isinstance(mixer, MapMixer)
    x = numbers(2, prefix + grid[0] * grid[1], 12)
    close(mixer(x), expected(mixer, x, grid, keys))


def softmax_of(mixer: TokenMixer) -> TokenMixer:
    """Softmax attention with a mixer's weights."""
    soft = create_mixer("softmax", mixer.site, dtype=torch.float64)
    state = dict(mixer.state_dict())
    for leaf in ("weight", "bias"):
        state[f"qkv.{leaf}"] = torch.cat([state.pop(f"{role}.{leaf}") for role in "qkv"])
    soft.load_state_dict(state)
    return soft


@pytest.mark.parametrize("with_bias", [False, True])
def test_on_the_full_grid_it_is_softmax_attention(with_bias: bool) -> None:
    mixer = make("spatial_reduction", {"key_grid": (4, 3)}, grid=(4, 3), num_prefix_tokens=1)
    x = numbers(2, 13, 12)
    bias = numbers(3, 13, 13) if with_bias else None
    close(mixer(x, bias=bias), softmax_of(mixer)(x, bias=bias))


@pytest.mark.parametrize("prefix", [0, 1])
def test_tokens_that_are_alike_in_a_cell_give_what_softmax_gives(prefix: int) -> None:
    """Then nothing is lost: the count of a cell stands for the keys that are left out."""
    mixer = make("spatial_reduction", {"key_grid": (2, 3)}, grid=(4, 6), num_prefix_tokens=prefix)
    coarse = numbers(2, 2, 3, 12)
    x = coarse.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1, 2)
    x = torch.cat((numbers(2, prefix, 12), x), 1)
    bias = numbers(3, 24 + prefix, 24 + prefix)  # of the tokens, as a host's table
    close(mixer(x), softmax_of(mixer)(x))
    close(mixer(x, bias=bias), softmax_of(mixer)(x, bias=bias))
    assert differs(mixer(x, bias=bias), mixer(x))


def test_its_grid_follows_the_tokens() -> None:
    mixer = make("spatial_reduction", grid=(4, 4))
    assert mixer.key_grid_for((4, 4)) == (2, 2)
    assert mixer.key_grid_for((8, 6)) == (4, 3)
    x = numbers(2, 48, 12)
    assert isinstance(mixer, MapMixer)
    close(mixer(x, grid=(8, 6)), expected(mixer, x, (8, 6), (4, 3)))
    mixer.set_grid((8, 6))
    close(mixer(x), expected(mixer, x, (8, 6), (4, 3)))


def test_all_paths_are_one_function() -> None:
    outs = []
    for backend in ("reference", "sdpa", "blocked"):
        options = {"backend": backend, "key_grid": (2, 2)}
        mixer = make("spatial_reduction", options, grid=(5, 4), num_prefix_tokens=1)
        outs.append(gradients(mixer, numbers(2, 21, 12)))
    for y, grads in outs[1:]:
        close(y, outs[0][0])
        for name, grad in grads.items():
            close(grad, outs[0][1][name])


def test_it_says_what_cannot_be() -> None:
    with pytest.raises(UserError, match="grid"):
        create_mixer("spatial_reduction", Site(dim=12, num_heads=3))
    with pytest.raises(UserError, match="key_grid"):
        make("spatial_reduction", {"key_grid": "a quarter"})
    assert not make("spatial_reduction").claims.maskable
    assert make("spatial_reduction", {"key_grid": "1/1"}).claims.maskable

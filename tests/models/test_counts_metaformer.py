# SPDX-License-Identifier: Apache-2.0
"""Sizes of every placement of (C)SKA in CAFormer, 224x224 images, 1000 classes (SKA Table 5)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from costs import cost, on_meta
from costs import params as trainable
from keymix.analysis.counting import run_counting
from placements import CSKA, PLACEMENTS, SKA, WITHOUT_QUERIES, A, C

pytestmark = pytest.mark.slow  # all of them together


def flops(name: str, **options: Any) -> str:
    return f"{cost(name, (3, 224, 224), **options).flops / 1e9:.3f}"


TOKENS = {SKA: {"query_proj": False}}


@cache
def by_stage(name: str, mixer: str, queries: bool = True) -> dict[str, tuple[int, int]]:
    """Parameters and multiply-adds of every stage, and of the rest, with one mixer throughout."""
    options = None if queries or mixer != SKA else TOKENS
    model = on_meta(name, mixer=mixer, mixer_options=options).eval()
    sizes = {path: p.numel() for path, p in model.named_parameters() if p.requires_grad}
    macs = run_counting(model, torch.zeros(1, 3, 224, 224, device="meta")).by_path
    found = {"rest": (0, 0), **{f"stages.{s}": (0, 0) for s in range(4)}}
    for path in {**sizes, **macs}:
        part = path[:8] if path.startswith("stages.") else "rest"
        params, multiplied = found[part]
        found[part] = (params + sizes.get(path, 0), multiplied + macs.get(path, 0))
    return found


def summed(name: str, placement: tuple[str, ...], queries: bool = True) -> tuple[int, str]:
    """Cost of a placement: that of each stage where its mixer stands, and of the rest."""
    parts = [by_stage(name, mixer, queries)[f"stages.{s}"] for s, mixer in enumerate(placement)]
    parts.append(by_stage(name, C)["rest"])
    return sum(p for p, _ in parts), f"{2 * sum(m for _, m in parts) / 1e9:.3f}"


@pytest.mark.parametrize("placement", PLACEMENTS, ids="/".join)
def test_costs_of_a_placement(placement: tuple[str, ...]) -> None:
    params, cost, more_params, more_cost = PLACEMENTS[placement]
    assert trainable("skaformer_s18", mixer=placement) == params
    assert summed("skaformer_s18", placement) == (params, cost)
    assert summed("cskaformer_b36", placement) == (more_params, more_cost)


@pytest.mark.parametrize("placement", WITHOUT_QUERIES, ids="/".join)
def test_costs_of_a_placement_without_queries(placement: tuple[str, ...]) -> None:
    params, cost, more_params, more_cost = WITHOUT_QUERIES[placement]
    assert trainable("skaformer_s18", mixer=placement, mixer_options=TOKENS) == params
    assert summed("skaformer_s18", placement, False) == (params, cost)
    assert summed("skaformer_b36", placement, False) == (more_params, more_cost)


def test_the_authors_model_has_23_565_336_parameters() -> None:
    assert trainable("skaformer_s18_noq") == 23_565_336
    assert flops("skaformer_s18_noq") == "7.337"
    assert WITHOUT_QUERIES[(C, C, SKA, SKA)][:2] == (23_565_336, "7.337")


@pytest.mark.parametrize(
    ("name", "placement"),
    [("skaformer", (C, SKA, A, A)), ("cskaformer", (C, CSKA, A, A))],
)
def test_a_name_is_the_placement_in_the_second_stage(name: str, placement: tuple[str, ...]) -> None:
    params, cost, more_params, _ = PLACEMENTS[placement]
    assert trainable(f"{name}_s18") == params
    assert flops(f"{name}_s18") == cost
    assert trainable(f"{name}_b36") == more_params


def test_the_authors_heads_of_16_add_biases_alone() -> None:
    assert trainable("cskaformer_s18", head_dim=16) == 28_983_186
    assert flops("cskaformer_s18", head_dim=16) == "12.798"
    assert trainable("cskaformer_b36", head_dim=16) == 119_492_662


@pytest.mark.parametrize(
    ("name", "heads", "params", "cost"),
    [("skaformer_s18", 11, 25_606_296, "7.928"), ("skaformer_b36", 19, 97_177_678, "45.604")],
)
def test_heads_widened_to_the_baselines_parameters(
    name: str, heads: int, params: int, cost: str
) -> None:
    widened = {"mixer": (C, C, SKA, SKA), "mixer_options": [{}, {}, {"num_heads": heads}, {}]}
    assert trainable(name, **widened) == params
    assert flops(name, **widened) == cost


def test_the_small_one_is_small() -> None:
    assert trainable("caformer_micro_32") < 700_000

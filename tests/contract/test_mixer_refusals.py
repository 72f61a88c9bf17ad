# SPDX-License-Identifier: Apache-2.0
"""What every registered mixer refuses, and that it says what to do instead."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from keymix.mixers.registry import create_mixer, list_mixers, mixer_options
from mixer_cases import (
    DEVICE,
    DIM,
    GRID,
    each_options,
    hints,
    make,
    numbers,
    refusal,
    refused,
    tokens,
)

every_mixer = pytest.mark.parametrize("name", list_mixers())


@every_mixer
def test_heads_that_do_not_divide_are_refused(name: str) -> None:
    if "head_dim" not in mixer_options(name):
        pytest.skip("has no heads")
    with refused(r"12.*num_heads=5"):
        create_mixer(name, dim=12, num_heads=5, grid=GRID)
    assert create_mixer(name, dim=12, num_heads=5, grid=GRID, head_dim=4) is not None


@every_mixer
def test_unknown_options_are_answered_with_the_nearest(name: str) -> None:
    for option in mixer_options(name):
        with refused(rf"{option}[a-z]*x'.*Did you mean.*'{option}'"):
            create_mixer(name, dim=12, num_heads=3, grid=GRID, **{f"{option}x": 1})
    with refused(name):
        create_mixer(name, dim=12, num_heads=3, grid=GRID, wholly_unheard_of=1)


@every_mixer
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, float("nan"), "much", None])
def test_bad_probabilities_are_refused(name: str, value: Any) -> None:
    rates = [option for option in mixer_options(name) if "drop" in option]
    if not rates:
        pytest.skip("has no dropout")
    for option in rates:
        with refused(option):
            create_mixer(name, dim=12, num_heads=3, grid=GRID, **{option: value})


@every_mixer
def test_values_of_another_kind_are_refused(name: str) -> None:
    wrong: dict[Any, tuple[Any, ...]] = {bool: ("yes", "no", 1), int: ("3", 1.5, True)}
    for option, hint in hints(name).items():
        bad = wrong.get(hint, ("nonsense",))
        for value in bad:
            with refused(option):
                create_mixer(name, dim=12, num_heads=3, grid=GRID, **{option: value})


@every_mixer
def test_numbers_out_of_range_are_refused(name: str) -> None:
    bad = {
        "kernel_size": (0, 2, -1),
        "pool_size": (0, 2, -3),
        "key_grid": ("1/0", "5/4", "7", (0, 1)),
        "head_dim": (0, -4),
        "key_init_std": (0.0, -1.0, float("nan"), float("inf")),
        "expansion": (0.0, -1.0, float("inf")),
        "pos_dim": (-1,),
        "attn_threshold": (0.0, -1.0, float("nan"), float("inf")),
        "scale": (0.0, -1.0, float("nan"), float("inf")),
        "temperature": (0.0, -1.0, float("nan"), float("inf")),
    }
    for option in mixer_options(name):
        for value in bad.get(option, ()):
            with refused(option):
                create_mixer(name, dim=12, num_heads=3, grid=GRID, **{option: value})


@every_mixer
@each_options
def test_tokens_of_another_width_are_refused(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, options)
    with refused(r"13 wide.*dim=12"):
        mixer(numbers(2, 6, 13))


@every_mixer
@each_options
def test_another_number_of_tokens_is_served_or_refused(name: str, options: dict[str, Any]) -> None:
    mixer = make(name, options, num_prefix_tokens=1).eval()
    x = numbers(2, 9, DIM)
    if mixer.claims.permutation == "equivariant":
        assert mixer(x).shape == x.shape
    else:
        with refused("9 tokens|got 9"):
            mixer(x)
    with refused("9 tokens"):
        mixer(x, grid=(2, 3))


@every_mixer
@each_options
def test_another_grid_is_served_or_refused_with_a_remedy(
    name: str, options: dict[str, Any]
) -> None:
    mixer = make(name, options, num_prefix_tokens=1).eval()
    x = numbers(2, 9, DIM)
    reason = refusal(partial(mixer, x, grid=(2, 4)))
    if reason is None:
        assert mixer(x, grid=(2, 4)).shape == x.shape
    else:
        assert "9" in reason
        assert "(2, 3)" in reason or "7" in reason


@every_mixer
def test_what_is_kept_per_position_refuses_a_turned_grid_of_as_many_tokens(name: str) -> None:
    """Six tokens of 3x2 are not the six of 2x3, though their number fits."""
    mixer = make(name).eval()
    x = tokens(mixer)
    if "key_init_std" in mixer_options(name) or mixer.tied_to_grid:
        with refused(r"\(2, 3\)"):
            mixer(x, grid=(3, 2))
    else:
        assert mixer(x, grid=(3, 2)).shape == x.shape


@every_mixer
@each_options
def test_a_grid_is_asked_for_where_one_is_needed(name: str, options: dict[str, Any]) -> None:
    gridless = partial(create_mixer, name, dim=DIM, num_heads=3, **options)
    reason = refusal(gridless)
    if reason is not None:
        assert "grid=(H, W)" in reason
        assert make(name, options).claims.permutation == "positional"
    else:
        mixer = gridless().to(DEVICE)
        assert mixer.claims.permutation == "equivariant"
        assert mixer(numbers(2, 5, DIM).float()).shape == (2, 5, DIM)

# SPDX-License-Identifier: Apache-2.0
"""Every registered mixer on other devices, in other dtypes, and on memory nobody has written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from keymix.mixers.registry import create_mixer, get_mixer_class, list_mixers
from mixer_cases import ARITHMETIC, DEVICE, DIM, GRID, each_options, gradients, make, tokens
from tolerances import FLIPPED, close

every_mixer = pytest.mark.parametrize("name", list_mixers())

NARROW = torch.bfloat16 if torch.float64 == ARITHMETIC else ARITHMETIC


def test_the_run_computes_as_its_options_say(pytestconfig: pytest.Config) -> None:
    mixer = make("softmax")
    x = tokens(mixer)
    device = pytestconfig.getoption("--device")
    assert mixer.proj.weight.device.type == x.device.type == device
    wanted = {"64": "float64", "32": "float32", "bf16": "bfloat16", "16": "float16"}
    assert mixer(x).dtype == getattr(torch, wanted[pytestconfig.getoption("--precision")])


@every_mixer
def test_device_and_dtype_are_honoured(name: str) -> None:
    where = {"dim": DIM, "num_heads": 3, "grid": GRID, "num_prefix_tokens": 1}
    made = create_mixer(name, **where, dtype=torch.float64)
    floats = [t for t in made.state_dict().values() if t.is_floating_point()]
    assert all(t.dtype == torch.float64 for t in floats)
    for device in (torch.device("meta"), DEVICE):
        far = create_mixer(name, **where, device=device)
        with device:
            also = create_mixer(name, **where)
        for mixer in (far, also):
            assert all(t.device.type == device.type for t in mixer.state_dict().values())
            assert mixer(torch.randn(2, 7, DIM).to(device)).shape == (2, 7, DIM)


@every_mixer
@each_options
def test_reset_parameters_fills_all_memory(
    name: str, options: dict[str, Any], poisoned_memory: None
) -> None:
    mixer = create_mixer(
        name, dim=DIM, num_heads=3, grid=GRID, num_prefix_tokens=1, device="meta", **options
    ).to("meta")
    mixer.to_empty(device=DEVICE)
    for module in mixer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for key, value in [*mixer.named_parameters(), *mixer.named_buffers()]:
        assert not value.isnan().any(), f"{key} was never set"


@every_mixer
@each_options
def test_no_result_reads_unwritten_memory(
    name: str, options: dict[str, Any], poisoned_memory: None
) -> None:
    mixer = make(name, options, num_prefix_tokens=1, grid=(3, 5))
    y, grads = gradients(mixer, tokens(mixer, 2))
    assert not y.isnan().any()
    assert not any(g.isnan().any() for g in grads.values())


@every_mixer
@pytest.mark.parametrize("how", ["cast", "autocast"])
@each_options
def test_narrow_numbers_stay_near_wide_ones(name: str, options: dict[str, Any], how: str) -> None:
    if how == "autocast" and torch.float32 == NARROW:
        pytest.skip("autocast narrows float32 itself")
    firing = get_mixer_class(name).traits.domain == "spiking"
    exact = make(name, options, dtype=torch.float64, num_prefix_tokens=1, stirred=firing).eval()
    x = tokens(exact, 16 if firing else 2).double()
    wanted = exact(x)
    with torch.autocast(DEVICE.type, NARROW, enabled=how == "autocast"):
        if how == "cast":
            y = copy.deepcopy(exact).to(NARROW)(x.to(NARROW))
            assert y.dtype == NARROW
        else:
            y = copy.deepcopy(exact).float()(x.float())
    if firing:  # rounding moves a potential across the threshold here and there
        assert ((y == 0) | (y == 1)).all()
        assert 0.05 < wanted.mean() < 0.95
        assert (y.double() != wanted).double().mean() < FLIPPED
        return
    close(y, wanted, NARROW)


@every_mixer
def test_autocast_trains(name: str) -> None:
    mixer = make(name, dtype=torch.float32, num_prefix_tokens=1)
    with torch.autocast(DEVICE.type, NARROW, enabled=torch.float32 != NARROW):
        _, grads = gradients(mixer, tokens(mixer).float())
    assert all(torch.isfinite(g).all() for g in grads.values())


@pytest.mark.parametrize("name", ["static_key", "conv_static_key"])
def test_tokens_as_queries_are_as_narrow_as_the_values_that_are_projected(name: str) -> None:
    mixer = make(name, {"query_proj": False}, num_prefix_tokens=1)
    with torch.autocast(DEVICE.type, dtype=NARROW):
        made = mixer.float().inputs(tokens(mixer).float(), GRID)
    assert {t.dtype for t in made.values()} == {NARROW}

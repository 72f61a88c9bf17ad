# SPDX-License-Identifier: Apache-2.0
"""The benchmark of whole maps against fused attention says what each choice costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import few_tokens
from few_tokens import Measured, regret


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("option", ["--op", "--autocast"])
def test_both_phases_of_every_shape_have_a_line(option, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "--rounds", "1", "--threads", "1", option]
    assert few_tokens.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    shapes = few_tokens.shapes(quick=True)
    assert sum(line.startswith("training ") for line in lines) == len(shapes) > 0
    assert sum(line.startswith("inference ") for line in lines) == len(shapes)
    assert not any(line.endswith("reference") for line in lines)  # by one thread
    assert lines[-1].startswith("auto: ")


def test_a_choice_costs_what_the_faster_path_would_have_saved() -> None:
    found = [Measured(0.5, steady=True, whole=True), Measured(2.0, steady=True, whole=True)]
    assert regret(found, lambda each: False) == "1.414 on average, above 1.1 at 1 of 2"
    assert regret(found, lambda each: each.ratio < 1) == "1.000 on average, above 1.1 at 0 of 2"


def test_maps_are_bounded() -> None:
    for mixer, shape in few_tokens.shapes(quick=False):
        share = 1 if "/" not in mixer else int(mixer.rstrip(")").split("/")[1])
        assert shape.batch * shape.heads * shape.tokens**2 / share <= few_tokens.LARGEST_MAP

# SPDX-License-Identifier: Apache-2.0
"""Every mixer is counted, and those that cannot be are listed with the reason."""

from __future__ import annotations

import json

import pytest
from extra_mixers import registered

import keymix
from each import together
from keymix.analysis.mixer_alone import SIDES, counted, near_square, sized_mixers
from keymix.errors import UserError
from keymix.mixers.registry import list_mixers
from keymix.studies.complexity import measure as studying
from keymix.studies.complexity.measure import complexity
from keymix.studies.complexity.result import Complexity


@pytest.fixture(scope="module")
def study() -> Complexity:
    """Every registered mixer, counted at few sizes: each number of tokens and width next to 12, 24.

    Table 6 is counted at sizes of its own, and the page's at all of the figure's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(studying, "SWEEP", (16, 1024))
        patch.setattr(studying, "HEAD_DIMS", (4,))
        return complexity(dim=24, num_heads=3, at=12, tokens=())


@pytest.fixture
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studying, "SWEEP", (4, 16))
    monkeypatch.setattr(studying, "HEAD_DIMS", (4,))


few_sizes = pytest.mark.usefixtures("_few_sizes")


@pytest.mark.slow
def test_what_a_further_token_costs_is_counted(study: Complexity) -> None:
    grown = {row.mixer: row.params_a_token for row in study.weights}
    assert grown["static_key"] == 24
    assert grown["conv_static_key"] == 9 * 24 + 3  # nine times the width, and a bias a head
    assert {grown[name] for name in ("softmax", "key_value", "re_attention", "sep_conv")} == {0}


@pytest.mark.slow
@few_sizes
def test_a_mixer_that_cannot_be_built_is_listed_with_the_reason() -> None:
    mixer = registered("square_only")
    study = complexity(f"{mixer},identity", dim=8, num_heads=2, at=6, tokens=())
    (entry, other) = study.mixers
    assert entry.reason == "only squares here, not (2, 3)"
    assert other.reason is None
    weights = {row.mixer: row for row in study.weights}
    assert weights[mixer].reason == f"only squares here, not {SIDES}"
    assert weights[mixer].dynamic is None
    # where the sweep's grids are squares, it is counted
    assert [p.ratio for p in study.by_tokens if p.mixer == mixer] == list(
        study.setting.sweep_tokens
    )


@few_sizes
def test_an_operation_nobody_counted_is_a_reason() -> None:
    mixer = registered("uncounted")
    study = complexity(mixer, dim=8, num_heads=2, at=4, tokens=())
    assert "aten.linalg_inv_ex" in str(study.mixers[0].reason)


def test_a_mixer_that_needs_numbers_is_made_where_it_is_small_and_only_there() -> None:
    mixer = registered("needs_numbers")
    sized = sized_mixers(mixer, dim=8, num_heads=2)[0]
    assert counted(sized.arguments((4, 4))).macs == 16 * 64
    with pytest.raises(RuntimeError, match="meta"):
        counted(sized.arguments((128, 128)))


@few_sizes
def test_a_spiking_mixer_gets_its_time_steps() -> None:
    mixer = registered("spiking_linear")
    study = complexity(mixer, dim=8, num_heads=2, at=4, tokens=(), time_steps=3)
    assert study.mixers[0].domain == "spiking"
    point = next(p for p in study.by_tokens if p.tokens == 16)
    assert point.macs == 3 * 16 * 8 * 8
    assert study.weights[0].dynamic == 0


@pytest.mark.slow
def test_the_record_is_plain_data(study: Complexity) -> None:
    record = json.loads(json.dumps(study.to_dict()))
    assert record["answer"] == study.answer
    assert record["complete"]
    assert record["setting"]["dim"] == 24
    assert {row["mixer"] for row in record["weights"]} == set(list_mixers())


def test_it_is_public() -> None:
    assert keymix.complexity is complexity


@together
@pytest.mark.parametrize(
    ("tokens", "grid"), [(1, (1, 1)), (49, (7, 7)), (50, (5, 10)), (12, (3, 4)), (13, (1, 13))]
)
def test_tokens_lie_on_the_grid_nearest_to_a_square(tokens: int, grid: tuple[int, int]) -> None:
    assert near_square(tokens) == grid


@together
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dim": 10, "num_heads": 3}, "dim=10 does not divide into num_heads=3"),
        ({"dim": 0}, "dim=0 must be at least 1"),
        ({"dim": 10**12}, "dim=1000000000000 must be at most 16,384"),
        ({"time_steps": 10**9}, "time_steps=1000000000 must be at most 1,024"),
        ({"dim": 2**20}, "dim=1048576 must be at most 16,384"),
        ({"tokens": (2**30,)}, "tokens=1073741824 must be at least 1 and at most 1,048,576"),
        ({"at": 0}, "at=0 must be at least 1"),
        ({"tokens": (4, -4)}, "tokens=-4 must be at least 1"),
        ({"repeats": 0}, "repeats=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"device": "teapot"}, "device 'teapot' cannot be used here"),
        ({"device": "hpu"}, "device 'hpu' cannot be used here"),
        ({"device": "meta"}, "'meta' holds no numbers"),
        ({"mixers": "sofmax"}, "Did you mean 'softmax'"),
        ({"mixers": "ska/softmax"}, "names one per stage"),
        ({"imports": ["gone.py"]}, "no such file"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_counted(given, message: str) -> None:
    with pytest.raises(UserError, match=message):
        complexity(**{"dim": 8, "num_heads": 2, "tokens": (), **given})

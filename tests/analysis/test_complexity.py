# SPDX-License-Identifier: Apache-2.0
"""The papers' formulas are what is counted, at several sizes, and every mixer is in the tables."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from extra_mixers import registered

import keymix
from each import together
from keymix.analysis import complexity as studying
from keymix.analysis import complexity_formulas, complexity_tables
from keymix.analysis.complexity import Complexity, complexity
from keymix.analysis.complexity_formulas import KEY_VALUE_TABLE_1, TABLE_6
from keymix.analysis.complexity_sites import candidates, counted, near_square
from keymix.errors import UserError
from keymix.mixers.registry import list_mixers


@pytest.fixture(scope="module")
def study() -> Complexity:
    """Every registered mixer, counted at few sizes: each number of tokens and width beside 12, 24.

    Table 6 is counted at sizes of its own, and the page's at all of the figure's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(studying, "SWEEP", (16, 1024))
        patch.setattr(studying, "HEAD_DIMS", (4,))
        return complexity(dim=24, num_heads=3, at=12, pos_dim=6, tokens=())


@pytest.fixture
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studying, "SWEEP", (4, 16))
    monkeypatch.setattr(studying, "HEAD_DIMS", (4,))


few_sizes = pytest.mark.usefixtures("_few_sizes")


@pytest.mark.parametrize("formula", TABLE_6, ids=lambda f: f.mixer)
def test_printed_ratios_are_quotients_of_the_printed_formulas(formula) -> None:
    for n, d in ((1, 8), (49, 256), (256, 256), (1000, 30)):
        assert Fraction(formula.macs(n, d), formula.params(n, d)) == formula.ratio(n, d)


@pytest.mark.slow
@together
@pytest.mark.parametrize(("tokens", "dim", "heads"), [(12, 24, 3), (256, 256, 8), (49, 64, 4)])
@pytest.mark.parametrize("formula", TABLE_6, ids=lambda f: f.mixer)
def test_table_6_is_counted_exactly(formula, tokens: int, dim: int, heads: int) -> None:
    candidate = candidates(formula.mixer, dim=dim, num_heads=heads)[0]
    found = counted(candidate.arguments(near_square(tokens), biases=False))
    assert found.macs == formula.macs(tokens, dim)
    left = {"key_conv.bias": heads * tokens} if formula.mixer == "conv_static_key" else {}
    assert found.biases == left
    assert found.params == formula.params(tokens, dim) + sum(left.values())


def test_the_figures_of_the_paper_at_256() -> None:
    """What was built at N = D = 256 beforehand: 262,144 and 786,432 weights."""
    ska, cska = (f for f in TABLE_6 if f.mixer.endswith("static_key"))
    assert (ska.params(256, 256), ska.macs(256, 256)) == (262_144, 83_886_080)
    assert (cska.params(256, 256), cska.macs(256, 256)) == (786_432, 218_103_808)


@pytest.mark.slow
def test_formulas_are_compared_at_every_site_of_the_figure(study: Complexity) -> None:
    assert [row.printed for row in study.formulas] == ["SepConv", "Self-Attn", "SKA", "CSKA"]
    sizes = len(study.setting.sweep_tokens) + len(study.setting.sweep_dims)
    for row in study.formulas:
        assert row.agrees
        assert row.sites == sizes + 1
        assert row.macs == row.macs_counted
        assert row.params == row.params_counted
        assert row.ratio == pytest.approx(row.macs / row.params)
    assert study.formulas[3].biases == {"key_conv.bias": 3 * 12}


def test_a_wrong_formula_is_told_with_its_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = next(f for f in TABLE_6 if f.mixer == "softmax")
    wrong = replace(softmax, macs=lambda n, d: softmax.macs(n, d) + (n == 64))
    monkeypatch.setattr(complexity_tables, "TABLE_6", (wrong,))
    monkeypatch.setattr(studying, "SWEEP", (16, 64))
    monkeypatch.setattr(studying, "HEAD_DIMS", (8,))
    (row,) = complexity("identity", dim=8, num_heads=2, at=4, tokens=()).formulas
    assert not row.agrees
    assert row.disagree == ((64, 8),)


@pytest.mark.slow
def test_every_registered_mixer_is_in_every_table(study: Complexity) -> None:
    names = list_mixers()
    assert [entry.label for entry in study.mixers] == names
    assert [row.mixer for row in study.weights] == names
    for points, wanted in (
        (study.by_tokens, len(study.setting.sweep_tokens)),
        (study.by_dim, len(study.setting.sweep_dims)),
    ):
        assert {p.mixer for p in points} == set(names)
        for name in names:
            assert len([p for p in points if p.mixer == name]) == wanted


@pytest.mark.slow
def test_ratios_are_counted_and_stand_beside_the_formula(study: Complexity) -> None:
    printed = {formula.mixer: formula for formula in TABLE_6}
    for p in (*study.by_tokens, *study.by_dim):
        if p.mixer in printed:
            exact = printed[p.mixer].ratio(p.tokens, p.dim)
            assert p.formula == pytest.approx(float(exact))
            # of the conv's bias, which the formula leaves out, h N of 9 N D
            assert p.ratio == pytest.approx(float(exact), rel=0.25 if "conv_" in p.mixer else 1e-12)
        elif p.ratio is None:
            assert p.params == 0
            assert p.reason == "it has no parameters"
        else:
            assert p.formula is None
            assert p.ratio == p.macs / p.params
    assert {p.tokens for p in study.by_dim} == {12}
    assert {p.dim for p in study.by_tokens} == {24}


@pytest.mark.slow
def test_the_order_of_the_curves_is_the_papers(study: Complexity) -> None:
    """Fig. 4: static keys lie between separable convolution and self-attention."""
    for points, sizes in ((study.by_tokens, "tokens"), (study.by_dim, "dim")):
        for size in {getattr(p, sizes) for p in points}:
            at = {p.mixer: p.formula for p in points if getattr(p, sizes) == size}
            assert at["sep_conv"] < at["conv_static_key"] < at["static_key"] < at["softmax"]


@pytest.mark.slow
def test_what_a_further_token_costs_is_counted(study: Complexity) -> None:
    grown = {row.mixer: row.params_a_token for row in study.weights}
    assert grown["static_key"] == 24
    assert grown["conv_static_key"] == 9 * 24 + 3  # nine times the width, and a bias a head
    assert {grown[name] for name in ("softmax", "key_value", "re_attention", "sep_conv")} == {0}


@pytest.mark.slow
def test_key_value_table_by_the_papers_convention(study: Complexity) -> None:
    n, d, m = 12, 24, 6
    qkv, kv, pos = study.key_value
    assert [row.printed for row in study.key_value] == ["QKV", "KV", "KV+pos"]
    assert (qkv.macs, qkv.params) == (qkv.macs_counted, qkv.params_counted)
    assert (qkv.macs, qkv.params) == (2 * n * d * d, 2 * d * d)
    assert (kv.macs, kv.params) == (kv.macs_counted, kv.params_counted) == (n * d * d, d * d)
    assert (pos.macs, pos.params) == (n * d * d + n * n * m, d * d + m)
    assert pos.params_counted == pos.params
    assert pos.biases == {"pos_proj.bias": 1}
    # no n x n x m tensor: sines and cosines of i and of j, c = 2 ceil(m / 4) numbers each
    assert pos.macs_counted == n * d * d + 2 * n * 4
    products = 2 * n * n * d
    assert qkv.macs_total == 4 * n * d * d + products
    assert kv.macs_total == 3 * n * d * d + products
    assert (qkv.params_total, kv.params_total) == (4 * d * d, 3 * d * d)


def test_key_value_formulas_are_those_of_table_1() -> None:
    assert [(f.macs_text, f.params_text) for f in KEY_VALUE_TABLE_1] == [
        ("2nd²", "2d²"),
        ("nd²", "d²"),
        ("nd² + n²m", "d² + m"),
    ]
    n, d, m = 197, 768, 50
    assert [f.macs(n, d, m) for f in KEY_VALUE_TABLE_1] == [232_390_656, 116_195_328, 118_135_778]
    assert [f.params(d, m) for f in KEY_VALUE_TABLE_1] == [1_179_648, 589_824, 589_874]
    assert complexity_formulas.GLOBAL == "spatially global"


@pytest.mark.slow
@few_sizes
def test_a_mixer_that_cannot_be_built_is_listed_with_the_reason() -> None:
    mixer = registered("square_only")
    study = complexity(f"{mixer},identity", dim=8, num_heads=2, at=6, tokens=())
    (entry, other) = study.mixers
    assert entry.reason == "only squares here, not (2, 3)"
    assert other.reason is None
    weights = {row.mixer: row for row in study.weights}
    assert weights[mixer].reason == "only squares here, not (6, 7)"
    assert weights[mixer].dynamic is None
    # where the sweep's grids are squares, it is counted
    assert [p.ratio for p in study.by_tokens if p.mixer == mixer] == list(
        study.setting.sweep_tokens
    )


@few_sizes
def test_an_operation_nobody_counted_is_a_reason() -> None:
    mixer = registered("uncounted")
    study = complexity(mixer, dim=8, num_heads=2, at=4, tokens=())
    assert "cannot count operation" in str(study.mixers[0].reason)


def test_a_mixer_that_needs_numbers_is_made_where_it_is_small_and_only_there() -> None:
    mixer = registered("needs_numbers")
    candidate = candidates(mixer, dim=8, num_heads=2)[0]
    assert counted(candidate.arguments((4, 4))).macs == 16 * 64
    with pytest.raises(RuntimeError, match="meta"):
        counted(candidate.arguments((128, 128)))


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
    assert record["format"] == 1
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
        ({"pos_dim": 2}, "pos_dim=2 must be at least 3"),
        ({"device": "teapot"}, "device 'teapot' cannot be used here"),
        ({"device": "hpu"}, "device 'hpu' cannot be used here"),
        ({"device": "meta"}, "'meta' holds no numbers"),
        ({"mixers": "sofmax"}, "Did you mean 'softmax'"),
        ({"mixers": "ska/softmax"}, "names one a stage"),
        ({"imports": ["gone.py"]}, "no such file"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_counted(given, message: str) -> None:
    with pytest.raises(UserError, match=message):
        complexity(**{"dim": 8, "num_heads": 2, "tokens": (), **given})

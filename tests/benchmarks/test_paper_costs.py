# SPDX-License-Identifier: Apache-2.0
"""The papers' formulas of cost are what is counted of the mixers, and are printed as they are."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

import paper_costs as papers
from each import together
from keymix.analysis import complexity as studying
from keymix.analysis.attention_operation import Work, work
from keymix.analysis.complexity import complexity
from keymix.analysis.complexity_record import Complexity
from keymix.analysis.complexity_sites import counted, near_square, sized_mixers
from keymix.analysis.complexity_weights import weight_facts

TABLE_6, KEY_VALUE_TABLE_1, TABLE_1 = papers.TABLE_6, papers.KEY_VALUE_TABLE_1, papers.TABLE_1
SIZES = [(12, 24, 3), (49, 64, 4), (7, 8, 1), (1, 16, 2)]


@pytest.fixture(scope="module")
def study() -> Complexity:
    """The mixers of Table 6, counted at few sizes: N and D next to 12 and 24."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(studying, "SWEEP", (16, 1024))
        patch.setattr(studying, "HEAD_DIMS", (4,))
        mixers = [formula.mixer for formula in TABLE_6]
        found = complexity(mixers, dim=24, num_heads=3, at=12, tokens=())
        return papers.with_papers(found, pos_dim=6)


@pytest.mark.parametrize("formula", TABLE_6, ids=lambda f: f.mixer)
def test_printed_ratios_are_quotients_of_the_printed_formulas(formula) -> None:
    for n, d in ((1, 8), (49, 256), (256, 256), (1000, 30)):
        assert Fraction(formula.macs(n, d), formula.params(n, d)) == formula.ratio(n, d)


@pytest.mark.slow
@together
@pytest.mark.parametrize(("tokens", "dim", "heads"), [(12, 24, 3), (256, 256, 8), (49, 64, 4)])
@pytest.mark.parametrize("formula", TABLE_6, ids=lambda f: f.mixer)
def test_table_6_is_counted_exactly(formula, tokens: int, dim: int, heads: int) -> None:
    sized = sized_mixers(formula.mixer, dim=dim, num_heads=heads)[0]
    found = counted(sized.arguments(near_square(tokens), biases=False))
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


def test_a_wrong_formula_is_reported_with_its_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = next(f for f in TABLE_6 if f.mixer == "softmax")
    wrong = replace(softmax, macs=lambda n, d: softmax.macs(n, d) + (n == 64))
    monkeypatch.setattr(papers, "TABLE_6", (wrong,))
    monkeypatch.setattr(studying, "SWEEP", (16, 64))
    monkeypatch.setattr(studying, "HEAD_DIMS", (8,))
    study = complexity("identity", dim=8, num_heads=2, at=4, tokens=())
    (row,) = papers.with_papers(study).formulas
    assert not row.agrees
    assert row.disagree == ((64, 8),)


@pytest.mark.slow
def test_ratios_are_counted_and_listed_with_the_formula(study: Complexity) -> None:
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


@together
@pytest.mark.parametrize(("n", "d", "h"), SIZES)
@pytest.mark.parametrize("formula", TABLE_1, ids=lambda f: f.mixer)
def test_formulas_are_what_is_counted(formula, n: int, d: int, h: int) -> None:
    found = work(formula.name, formula.options, n, d, h)
    assert found == Work(
        macs=formula.macs(n, d, h), entries=formula.entries(n, d, h), formed=formula.formed(n, d, h)
    )


def test_the_orders_are_those_that_the_paper_prints() -> None:
    assert [(f.printed, f.time, f.space) for f in TABLE_1] == [
        ("VSA", "O(N²D)", "O(N² + ND)"),
        ("SSA", "O(N²D)", "O(N² + ND)"),
        ("SSA, Sec. 3.2", "O(ND²)", ""),
        ("SDSA", "O(ND)", "O(ND)"),
        ("QKTA", "O(D)", "O(N)"),
        ("QKCA", "O(N)", "O(D)"),
    ]


def test_exponents_are_those_of_the_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far out, where the leading terms are all; a token's or channel's sum, times their number."""
    monkeypatch.setattr(studying, "SWEEP", (16, 4096))
    monkeypatch.setattr(studying, "HEAD_DIMS", (4, 128))
    study = complexity("identity", dim=64, at=4096, tokens=())
    rows = {r.mixer: r for r in papers.order_rows(study.setting)}
    time = {m: (round(r.time_by_tokens), round(r.time_by_dim)) for m, r in rows.items()}
    space = {m: (round(r.space_by_tokens), round(r.space_by_dim)) for m, r in rows.items()}
    names = ["softmax", "spiking_self(order=quadratic)", "spiking_self(order=linear)"]
    assert [time[n] for n in names] == [(2, 1), (2, 1), (1, 2)]
    assert {time[n] for n in ("spike_driven", "qk_token", "qk_channel")} == {(1, 1)}
    assert [space[n] for n in names[:2]] == [(2, 0), (2, 0)]
    assert (space["spike_driven"], space["qk_token"], space["qk_channel"]) == (
        (1, 1),
        (1, 0),
        (0, 1),
    )
    assert all(not row.disagree for row in rows.values())


def test_a_formula_that_does_not_hold_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(TABLE_1[4], formed=lambda n, d, h: h * n + (n == 64))
    monkeypatch.setattr(papers, "TABLE_1", (wrong,))
    monkeypatch.setattr(studying, "SWEEP", (16, 64))
    monkeypatch.setattr(studying, "HEAD_DIMS", (4,))
    study = complexity("identity", dim=8, num_heads=2, at=4, tokens=())
    (row,) = papers.order_rows(study.setting)
    assert row.disagree == ((64, 8),)


@pytest.mark.parametrize("formula", TABLE_6, ids=lambda f: f.mixer)
def test_table_7_is_read_off_the_papers_four(formula) -> None:
    found = weight_facts(sized_mixers(formula.mixer, dim=12, num_heads=3)[0])
    assert (found.sharing, found.dynamic) == (formula.sharing, formula.dynamic)


def test_it_prints_every_table_and_a_formula_that_is_wrong_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(studying, "SWEEP", (4, 9))
    monkeypatch.setattr(studying, "HEAD_DIMS", (4,))
    monkeypatch.setattr(papers, "complexity", lambda **how: complexity("mhsa,ska", **how))
    words = ["--dim", "8", "--heads", "2", "--at", "4", "--pos-dim", "6"]
    assert papers.main(words) == 0
    printed = capsys.readouterr().out
    for title in ("SKA Table 6", "SKA Table 7", "Table 1 of key-value", "QKFormer Table 1"):
        assert title in printed
    softmax = next(f for f in TABLE_6 if f.mixer == "softmax")
    monkeypatch.setattr(papers, "TABLE_6", (replace(softmax, macs=lambda n, d: 0),))
    assert papers.main(words) == 1

# SPDX-License-Identifier: Apache-2.0
"""The papers' formulas of cost are what is counted of the mixers, and are printed as they are."""

from __future__ import annotations

import pytest

import paper_costs as papers
from each import together
from keymix.analysis.mixer_alone import Work, sized_mixers, weight_facts, work
from keymix.mixers.spec import parse_mixer
from keymix.studies.complexity import measure as studying


@pytest.fixture(autouse=True)
def few_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studying, "SWEEP", (4, 9))
    monkeypatch.setattr(studying, "HEAD_DIMS", (4,))
    counted = studying.complexity
    monkeypatch.setattr(papers, "complexity", lambda **how: counted("mhsa,ska", **how))


def test_a_printed_formula_is_computed() -> None:
    assert papers.value("N(10ND + 3D²)", N=2, D=3) == 2 * (10 * 2 * 3 + 3 * 9)
    assert papers.gives("N + N²/(N + 3D)", N=256, D=256) == "N + N²/(N + 3D) = 320"
    assert papers.gives("2ND²/h", N=256, D=256, h=8) == "2ND²/h = 4,194,304"


@pytest.mark.parametrize("formula", papers.TABLE_6, ids=lambda f: f.mixer)
def test_printed_ratios_are_quotients_and_table_7_is_read_off(formula: papers.Formula) -> None:
    for n, d in ((1, 8), (49, 256), (1000, 30)):
        quotient = papers.value(formula.macs, N=n, D=d) / papers.value(formula.params, N=n, D=d)
        assert quotient == papers.value(formula.ratio, N=n, D=d)
    found = weight_facts(sized_mixers(formula.mixer, dim=12, num_heads=3)[0])
    assert (found.sharing, found.dynamic) == (formula.sharing, formula.dynamic)


@together
@pytest.mark.parametrize(("n", "d", "h"), [(12, 24, 3), (49, 64, 4), (7, 8, 1), (1, 16, 2)])
@pytest.mark.parametrize("order", papers.TABLE_1, ids=lambda f: f.mixer)
def test_orders_are_what_is_counted(order: papers.Order, n: int, d: int, h: int) -> None:
    spec = parse_mixer(order.mixer)
    texts = {"macs": order.macs, "entries": order.entries, "formed": order.formed}
    wanted = {key: int(papers.value(text, N=n, D=d, h=h)) for key, text in texts.items()}
    assert work(spec.names[0], dict(spec.options[0]), n, d, h) == Work(**wanted)


def test_table_8_agrees_with_itself() -> None:
    assert sorted(papers.TABLE_8) == list(range(10, 201, 10))
    for side, (token, ssa, ratio) in papers.TABLE_8.items():
        low, high = (ssa - 0.005) / (token + 0.005), (ssa + 0.005) / (token - 0.005)
        assert low - 0.005 <= ratio <= high + 0.005, side


@pytest.mark.parametrize("name", ["TABLE_6", "TABLE_1"])
def test_it_prints_every_table_and_a_formula_that_is_wrong_is_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dim", "8", "--heads", "2", "--at", "4", "--sides", "10"]
    assert papers.main(words) == 0
    printed = capsys.readouterr().out
    assert "| 0.10 | 0.14 | 1.37 |" in printed
    for title in (
        "SKA Table 6",
        "SKA Table 7",
        "Table 1 of key-value",
        "QKFormer Table 1",
        "QKFormer Table 8",
    ):
        assert title in printed
    first = getattr(papers, name)[0]
    monkeypatch.setattr(papers, name, (first._replace(macs=f"{first.macs} + 1"),))
    assert papers.main(words) == 1

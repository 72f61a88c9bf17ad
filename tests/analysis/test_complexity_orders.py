# SPDX-License-Identifier: Apache-2.0
"""QKFormer's Table 1: printed orders beside what the attention of our mixers takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from each import together
from keymix.analysis import complexity as studying
from keymix.analysis import complexity_orders
from keymix.analysis.attention_operation import attention_operation
from keymix.analysis.complexity import complexity
from keymix.analysis.complexity_orders import TABLE_1, Work, work
from keymix.errors import UserError
from keymix.mixers.registry import create_mixer
from tolerances import close

SIZES = [(12, 24, 3), (49, 64, 4), (7, 8, 1), (1, 16, 2)]


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
    monkeypatch.setattr(studying, "formula_rows", lambda ledger, setting: ())
    rows = {r.mixer: r for r in complexity("identity", dim=64, at=4096, tokens=()).orders}
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


def test_a_formula_that_does_not_hold_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(TABLE_1[4], formed=lambda n, d, h: h * n + (n == 64))
    monkeypatch.setattr(complexity_orders, "TABLE_1", (wrong,))
    monkeypatch.setattr(studying, "SWEEP", (16, 64))
    monkeypatch.setattr(studying, "HEAD_DIMS", (4,))
    monkeypatch.setattr(studying, "formula_rows", lambda ledger, setting: ())
    (row,) = complexity("identity", dim=8, num_heads=2, at=4, tokens=()).orders
    assert row.disagree == ((64, 8),)


@pytest.mark.parametrize("name", ["softmax", "spiking_self", "spike_driven", "qk_token"])
def test_the_operation_is_that_of_the_forward_pass(name: str) -> None:
    mixer = create_mixer(name, dim=12, num_heads=3, grid=(3, 5)).double().eval()
    operation = attention_operation(mixer, 15)
    spiking = mixer.claims.domain == "spiking"
    x = torch.rand((1, 1, 15, 12) if spiking else (1, 15, 12), dtype=torch.float64)
    seen: list[torch.Tensor] = []
    mixer.proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    if spiking:
        for role in mixer.roles:
            torch.nn.init.constant_(getattr(mixer, f"{role}_bn").bias, 1.9)
        parts = {r: mixer.spikes(x)[r.upper()].unflatten(-1, (3, 4)) for r in mixer.roles}
        seen.clear()
    else:
        parts = mixer.inputs(x, (3, 5))
    mixer(x)
    assert {r: tuple(p.shape) for r, p in parts.items()} == operation.shapes
    gathered = operation.run(parts)
    close(gathered.flatten(-2) if spiking else gathered.transpose(-3, -2).flatten(-2), seen[0])


def test_mixers_without_queries_have_no_such_operation() -> None:
    with pytest.raises(UserError, match="'pooling' has no attention of its own"):
        attention_operation(create_mixer("pooling", dim=8, grid=(2, 2)), 4)

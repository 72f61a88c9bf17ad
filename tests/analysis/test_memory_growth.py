# SPDX-License-Identifier: Apache-2.0
"""Peak memory of attention alone: what is read is what is allocated."""

from __future__ import annotations

import pytest
import torch

from keymix.analysis.mixer_alone import AttentionOperation
from keymix.studies.memory import measure
from keymix.studies.memory.measure import memory_growth, peak_bytes

MIB = 2**20


def test_a_peak_is_what_is_allocated_at_once() -> None:
    x = torch.zeros(1000)

    def run() -> torch.Tensor:
        first = x + 1
        second = x * 2
        third = first * second
        del first, second
        return third.sum()

    assert 3 * 4000 <= peak_bytes(run, x.device) < 3 * 4000 + 200


def test_inputs_are_spikes() -> None:
    operation = AttentionOperation(shapes={"q": (4, 8)}, run=lambda parts: parts["q"])
    q = operation.inputs("cpu", torch.float32)["q"]
    assert set(q.unique().tolist()) == {0.0, 1.0}


def test_token_attention_takes_one_matrix_and_ssa_a_map() -> None:
    *_, study = memory_growth(sides=(20, 50))
    token, ssa = (
        {r.side: r for r in study.rows if r.mixer == name} for name in ("qk_token", "spiking_self")
    )
    for side in (20, 50):
        n, c = side * side, 256
        matrix, per_map = 4 * n * c / MIB, 4 * n * n / MIB
        assert matrix <= token[side].mib < matrix * 1.02
        assert per_map + matrix <= ssa[side].mib + 1e-6
        assert ssa[side].ratio == ssa[side].mib / token[side].mib
        assert token[side].ratio is None
    # what QKFormer's Table 8 prints
    assert token[50].mib == pytest.approx(2.47, rel=0.02)
    assert ssa[50].mib == pytest.approx(26.44, rel=0.02)
    assert study.complete


def test_the_linear_order_forms_no_map() -> None:
    quadratic, linear = (
        next(memory_growth("ssa", sides=(60,), order=order)).rows[0]
        for order in ("quadratic", "linear")
    )
    assert quadratic.mib > 4 * 60**4 / MIB
    assert linear.mib < quadratic.mib / 4
    named = next(memory_growth("ssa(order=linear)", sides=(60,), order="quadratic")).rows[0]
    assert named.mib == linear.mib


def test_any_mixer_with_attention_is_measured() -> None:
    *_, study = memory_growth("mhsa,ska,qkca,sdsa", dim=16, num_heads=2, sides=(4,))
    assert [r.mixer for r in study.rows] == ["softmax", "static_key", "qk_channel", "spike_driven"]
    for row in study.rows:
        assert row.mib > 0
        assert row.reason is None


def test_what_does_not_fit_is_reported_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "available_bytes", lambda device: 20 * MIB)
    *_, study = memory_growth(sides=(10, 50))
    reasons = {(r.side, r.mixer): r.reason for r in study.rows}
    assert "GiB are free" in reasons.pop((50, "spiking_self"))
    assert set(reasons.values()) == {None}
    assert study.rows[-1].mib is None


def test_parts_come_one_a_side_and_progress_grows() -> None:
    lines: list[tuple[str, float]] = []
    parts = list(
        memory_growth("qkta", dim=8, sides=(3, 1, 3), progress=lambda *step: lines.append(step))
    )
    assert [len(part.rows) for part in parts] == [1, 2]
    assert [part.complete for part in parts] == [False, True]
    assert parts[-1].sides == (1, 3)
    shares = [share for _, share in lines]
    assert shares == sorted(shares)
    assert lines[0][0] == "sqrt(N) = 1: qk_token"


def test_a_cpu_measures_less_of_the_table_unless_asked() -> None:
    first = next(memory_growth(dim=8))
    assert first.sides == measure.CPU_SIDES
    assert max(first.sides) ** 4 * 4 < 0.2 * 2**30  # bytes of the largest map

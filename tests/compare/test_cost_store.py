# SPDX-License-Identifier: Apache-2.0
"""Costs are measured once, and again where they would not hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from few_digits import small

from keymix.compare.events import Event

pytestmark = pytest.mark.slow


@pytest.fixture
def measured(monkeypatch) -> list[list[str]]:
    """What was measured, call by call."""
    from keymix.compare import costs

    calls: list[list[str]] = []
    really = costs.measure_interleaved

    def watched(models: Any, *args: Any, **options: Any) -> Any:
        if options["batch_size"] > 1 or options["repeats"] > 3:  # not the choice of the effort
            calls.append(list(models))
        return really(models, *args, **options)

    monkeypatch.setattr(costs, "measure_interleaved", watched)
    return calls


def test_costs_are_measured_once_and_all_again_with_a_mixer_more(tmp_path, measured):
    said: list[str] = []

    def watch(event: Event) -> None:
        if event.kind == "stage":
            said.append(event.text)

    first = small(tmp_path / "out", controls=False)
    assert measured == [["softmax", "static_key"]]
    again = small(tmp_path / "out", controls=False, progress=watch)
    assert len(measured) == 1
    assert not any("cost" in text for text in said)
    assert again.record.costs == first.record.costs
    assert again.record.measured == first.record.measured

    grown = small(tmp_path / "out", mixers="mhsa,ska,kv", controls=False, progress=watch)
    assert measured[1:] == [["softmax", "static_key", "key_value"]]
    assert "measuring costs" in said
    assert grown.record.costs["softmax"].macs == first.record.costs["softmax"].macs
    assert all(cost.step_ms and cost.latency_ms for cost in grown.record.costs.values())


def test_on_another_machine_all_are_measured_again(tmp_path, measured):
    small(tmp_path / "out", controls=False)
    path = tmp_path / "out" / "costs.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["measured"]["setting"]["threads"] == "1"
    kept["measured"]["setting"]["machine"] = "a pocket calculator, 1 cores"
    path.write_text(json.dumps(kept), encoding="utf-8")
    small(tmp_path / "out", controls=False)
    assert measured[1:] == [["softmax", "static_key"]]


def test_costs_that_cannot_be_measured_cost_no_result(tmp_path, monkeypatch):
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("keymix.compare.costs.training_quartiles_ms", fails)
    said: list[str] = []
    found = small(tmp_path / "out", controls=False, progress=lambda event: said.append(event.text))
    assert any("no room" in text for text in said)
    assert len(found.scores) > 0
    assert found.record.costs["static_key"].step_ms is None
    assert found.record.costs["static_key"].macs

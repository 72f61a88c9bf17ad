# SPDX-License-Identifier: Apache-2.0
"""Costs are measured once, and again where they would not hold."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from few_digits import brittle, small

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


def test_a_mixer_of_which_no_run_finished_has_no_costs(tmp_path, measured):
    path = brittle(tmp_path, "of_costs", "raise RuntimeError('it breaks')")
    found = small(tmp_path / "out", mixers="mhsa,brittle_of_costs", imports=[path])
    assert measured == [["softmax", "identity"]]
    assert found.record.costs["brittle_of_costs"].macs is None
    assert found.record.costs["brittle_of_costs"].params > 0
    small(tmp_path / "out", mixers="mhsa,brittle_of_costs", imports=[path])
    assert len(measured) == 1


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


def test_a_damaged_store_is_measured_again_and_overwrite_forgets_it(tmp_path, measured):
    small(tmp_path / "out", controls=False)
    path = tmp_path / "out" / "costs.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    no_row = kept | {"rows": {"static_key": kept["rows"]["static_key"]}}
    for number, content in enumerate([{"rows": []}, no_row], 2):
        path.write_text(json.dumps(content), encoding="utf-8")
        small(tmp_path / "out", controls=False)
        assert len(measured) == number
    small(tmp_path / "out", controls=False)
    assert len(measured) == 3  # a whole one serves
    small(tmp_path / "out", controls=False, overwrite=True)
    assert len(measured) == 4


def test_a_machine_that_is_busy_while_times_are_measured_is_noted(tmp_path, monkeypatch):
    from keymix.compare import costs

    really = costs.measure_interleaved

    def disturbed(models: Any, *args: Any, **options: Any) -> Any:
        shares = {"softmax": 1.0, "static_key": 0.4}
        found = really(models, *args, **options)
        return {
            name: replace(cost, quiet_share=shares.get(name, 1.0)) for name, cost in found.items()
        }

    monkeypatch.setattr(costs, "measure_interleaved", disturbed)
    rows = small(tmp_path / "out", controls=False).record.costs
    assert {label: row.busy for label, row in rows.items()} == {
        "softmax": False,
        "static_key": True,
    }
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "the machine was busy" in page

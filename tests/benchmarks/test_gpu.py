# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark: its decision, its budget, its page, and a dry run of every slice on a CPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import gpu
import gpu_slices
from gpu_slices import FULL, KERNEL, Setting

RUN = {"start": "now", "commit": "c0ffee", "command": ""}
TINY = Setting(device="cpu", tiny=True)


def record_of(rows: dict[str, Any], left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """A slice's record of made times, each unit in training alone."""
    made = {
        unit: {"modes": {"training": {path: _times(ms) for path, ms in paths.items()}}}
        for unit, paths in rows.items()
    }
    return {"b": {"rows": made, "left_out": list(left_out)}}


def _times(ms: Any) -> dict[str, Any]:
    return {"error": ms} if isinstance(ms, str) else {"ms": ms}


def measured(folder: Path, letter: str, setting: Setting = TINY, **run: str) -> dict[str, Any]:
    """Measure a slice in this process and read its record."""
    assert gpu.measure(letter, setting, folder, [], **{**RUN, **run}) in (0, gpu.BROKEN)
    return json.loads((folder / f"{letter}.json").read_text())


def slices(monkeypatch: pytest.MonkeyPatch, units: dict[str, Any]) -> None:
    monkeypatch.setattr(gpu, "SLICES", {"b": ("Made", lambda setting: units)})


@pytest.mark.parametrize(
    ("sizes", "verdict"),
    [
        ([{KERNEL: 1.0, "reference": 1.2}, {KERNEL: 1.0, "reference": 1.31}], "stays"),
        ([{KERNEL: 1.0, "reference": 1.2}, {KERNEL: 1.0, "reference": 1.29}], "goes"),
        ([{KERNEL: 1.0, "reference": 9.0, "compiled": 1.1}], "goes"),  # the best of the others
        ([{KERNEL: 1.0, "reference": 2.0, "flash attention": 0.1}], "stays"),  # another function
        ([{KERNEL: 5.0, "reference": FULL, "compiled": FULL}], "stays"),
        ([{KERNEL: 5.0, "reference": FULL, "blocked": 1.0}], "goes"),
        ([{KERNEL: 5.0, "reference": FULL, "blocked": "a fault"}], "open"),
        ([{KERNEL: 1.0, "reference": 2.0}, {KERNEL: "no registers", "reference": 2.0}], "is wrong"),
    ],
)
def test_a_kernel_stays_where_it_is_ahead_or_alone_fits(sizes: list[Any], verdict: str) -> None:
    rows = {f"some_mixer, {n} tokens": paths for n, paths in enumerate(sizes)}
    assert gpu.decide(record_of(rows))["some_mixer"].verdict == verdict


def test_a_kernel_goes_only_when_all_its_sizes_are_measured() -> None:
    slow = {"m, 1 tokens": {KERNEL: 1.0, "reference": 1.0}}
    assert gpu.decide(record_of(slow, ("m, 2 tokens",)))["m"].verdict == "open"
    assert gpu.decide(record_of(slow, ("other, 2 tokens",)))["m"].verdict == "goes"
    assert gpu.decide(record_of({"m, 1 tokens": {"reference": 1.0}})) == {}


def test_a_kernel_whose_output_is_off_is_wrong_however_fast() -> None:
    record = record_of({"m, 1 tokens": {KERNEL: 1.0, "reference": 9.0}})
    record["b"]["rows"]["m, 1 tokens"]["modes"]["training"][KERNEL]["off"] = 0.2
    assert gpu.decide(record)["m"].verdict == "is wrong"


def test_what_fails_is_recorded_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(setting: Setting) -> dict[str, Any]:
        raise RuntimeError("a fault")

    def lacks(setting: Setting) -> dict[str, Any]:
        import no_such_package  # noqa: F401

        return {}

    units = {"bad": fails, "lacking": lacks, "good": lambda setting: {"modes": {}}}
    slices(monkeypatch, units)
    rows = measured(tmp_path, "b")["rows"]
    assert "a fault" in rows["bad"]["error"]
    assert "no_such_package" in rows["lacking"]["skipped"]
    assert gpu.measured(rows["good"])
    units["bad"] = units["good"]
    again = measured(tmp_path, "b", start="later")["rows"]
    assert (again["bad"]["start"], again["good"]["start"]) == ("later", "now")
    assert gpu.measured(again["bad"])
    other = measured(tmp_path, "b", start="last", commit="decade")["rows"]
    assert {row["start"] for row in other.values()} == {"last"}


def test_a_slice_stops_when_its_time_is_up_and_names_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LEAST", 1.0)

    def slow(setting: Setting) -> dict[str, Any]:
        time.sleep(0.3)
        return {}

    slices(monkeypatch, {"first": slow, "second": slow, "third": slow})
    record = measured(tmp_path, "b", Setting(device="cpu", until=time.time() + 1.2))
    assert list(record["rows"]) == ["first"]
    assert record["left_out"] == ["second", "third"]
    assert "second" in gpu.summary(tmp_path)


@pytest.mark.slow
def test_a_slice_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LEAST", 0.2)
    monkeypatch.setattr(gpu, "GRACE", 0.3)
    start = time.time()
    gpu.run_slice([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start + 0.5)
    assert 0.7 < time.time() - start < 20


def test_a_gpu_that_does_not_answer_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(setting: Setting) -> dict[str, Any]:
        raise gpu_slices.BrokenError("an illegal access")

    slices(monkeypatch, {"breaks": breaks, "good": lambda setting: {}})
    assert gpu.measure("b", TINY, tmp_path, [], **RUN) == gpu.BROKEN
    assert gpu.measure("b", TINY, tmp_path, [], **RUN) == 0  # the next process of the run
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert "an illegal access" in rows["breaks"]["error"]
    assert gpu.measured(rows["good"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spiking_self"])
def test_float32_holds_the_gradients_of_the_example_of_spikes(name: str) -> None:
    row = gpu_slices.errors_of(name, Setting(device="cpu"))
    assert not row["wrong"]
    assert {*row["paths"]} >= {"reference", "blocked"}
    assert all(dtypes["float32"]["gradient"] < 1e-4 for dtypes in row["paths"].values())


def test_the_page_is_what_the_results_say() -> None:
    assert gpu.PAGE.read_text(encoding="utf-8") == gpu.page(gpu.OUT)


@pytest.mark.slow
@pytest.mark.parametrize("letter", "abcde")
def test_a_dry_run_measures_every_unit(letter: str, tmp_path: Path) -> None:
    if letter == "d":
        pytest.importorskip("spikingjelly", reason="SpikingJelly is not installed")
    record = measured(tmp_path, letter)
    assert record["left_out"] == []
    rows = record["rows"]
    assert [row for row in rows.values() if not gpu.measured(row)] == []
    times = [t for row in rows.values() for m in row.get("modes", {}).values() for t in m.values()]
    assert [each for each in times if "error" in each] == []
    assert [row["wrong"] for row in rows.values() if row.get("wrong")] == []
    assert all(each["off"] < 0.05 for each in times if "off" in each)
    page = gpu.page(tmp_path)
    assert all(unit in page or unit == "tests" for unit in rows)

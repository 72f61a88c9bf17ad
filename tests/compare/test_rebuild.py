# SPDX-License-Identifier: Apache-2.0
"""A comparison gathered again from its folder: by `keymix report`, elsewhere, half finished."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from few_digits import brittle, small

from keymix.cli import main
from keymix.compare.folder import write_json
from keymix.compare.rebuild import rebuild
from keymix.compare.run import Comparison
from keymix.errors import UserError

TIMELY = ("created",)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Comparison:
    return small(tmp_path_factory.mktemp("rebuild") / "out", seeds=2, epochs=2)


@pytest.fixture
def done(original, tmp_path) -> Path:
    return Path(shutil.copytree(original.out, tmp_path / "copy"))


def record_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


def but(record: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


@pytest.mark.parametrize("lost", [(), ("results.json",), ("results.json", "costs.json")])
def test_it_is_the_same_but_for_the_time_and_costs_that_were_lost(done, lost):
    first, table = record_of(done), (done / "results.csv").read_bytes()
    stamps = {p: p.stat().st_mtime_ns for p in (done / "runs").rglob("*") if p.is_file()}
    for name in ("report.html", "results.csv", *lost):
        (done / name).unlink()
    again = rebuild(done)
    assert again.notes == ()
    assert stamps == {p: p.stat().st_mtime_ns for p in stamps}
    assert (done / "report.html").is_file()
    if "costs.json" not in lost:
        assert but(record_of(done), *TIMELY) == but(first, *TIMELY)
        assert (done / "results.csv").read_bytes() == table
        return
    found = record_of(done)
    known = ("costs", "measured", "method", *TIMELY)
    assert but(found, *known) == but(first, *known)
    for label, cost in found["costs"].items():
        assert cost["macs"] == first["costs"][label]["macs"]
        assert cost["latency_ms"] is None
        assert "not measured yet" in cost["note"]


def test_a_folder_of_before_is_gathered_afresh(done):
    first = record_of(done)
    path = done / "comparison.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    del manifest["planned"], manifest["identity"]["recipe"]["augment"]["rand_augment"]
    path.write_text(json.dumps(manifest), encoding="utf-8")
    old = but(first, "trained_with", "confusions", "classes") | {"format": 1}
    (done / "results.json").write_text(json.dumps(old), encoding="utf-8")
    (done / "costs.json").unlink()
    rebuild(done)
    assert but(record_of(done), *TIMELY) == but(first, *TIMELY)


def test_without_plan_and_record_it_says_what_to_do(done):
    path = done / "comparison.json"
    manifest = but(json.loads(path.read_text(encoding="utf-8")), "planned")
    path.write_text(json.dumps(manifest), encoding="utf-8")
    (done / "results.json").unlink()
    with pytest.raises(UserError, match="Run the same `keymix compare` command again"):
        rebuild(done)


def test_missing_runs_are_told_apart_and_read_when_they_are_there(done, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(done / "runs/static_key/seed1", elsewhere)
    (done / "runs/identity/seed0/summary.json").unlink()
    result = rebuild(done)
    told = {(run["mixer"], run["seed"]): run for run in result.missing}
    assert told["static_key", 1]["reason"] == "it has not started"
    assert told["identity", 0]["reason"] == "it is not finished: 2 of 2 epochs are done"
    assert len(told) == 2
    assert result.failed == []
    assert {row["mixer"]: row["top1"]["n"] for row in result.rows} == {
        "softmax": 2, "static_key": 1, "identity": 1,
    }  # fmt: skip
    with (done / "results.csv").open(encoding="utf-8", newline="") as stream:
        assert {(r["mixer"], r["seed"]) for r in csv.DictReader(stream)} == {
            ("softmax", "0"), ("softmax", "1"), ("static_key", "0"), ("identity", "1"),
        }  # fmt: skip
    shutil.move(elsewhere, done / "runs/static_key/seed1")
    assert len(rebuild(done).missing) == 1


def test_one_finished_run_is_enough_and_none_is_told(done):
    runs = sorted((done / "runs").glob("*/seed*"))
    for folder in runs[1:]:
        shutil.rmtree(folder)
    result = rebuild(done)
    assert len(result.missing) == 5
    assert sum(row["top1"]["n"] for row in result.rows) == 1
    assert (done / "report.html").is_file()
    shutil.rmtree(runs[0])
    with pytest.raises(UserError, match=r"no run .* is finished yet\. Go on with: keymix"):
        rebuild(done)


def test_runs_that_cannot_be_trusted_count_as_failed(done):
    (done / "runs/softmax/seed1/predictions_test.npz").write_bytes(b"PK\x03\x04 torn")
    summary = done / "runs/static_key/seed0/summary.json"
    other = json.loads(summary.read_text(encoding="utf-8"))
    other["data"]["fingerprint"] = "0" * 64
    summary.write_text(json.dumps(other), encoding="utf-8")
    (done / "runs/static_key/seed1/summary.json").write_text("{", encoding="utf-8")
    recipe = done / "runs/identity/seed0/recipe.json"
    recipe.write_text(recipe.read_text("utf-8").replace('"epochs": 2', '"epochs": 9'), "utf-8")
    reasons = {(run["mixer"], run["seed"]): run["reason"] for run in rebuild(done).failed}
    assert "predictions_test.npz" in reasons["softmax", 1]
    assert "other images (fingerprint differ" in reasons["static_key", 0]
    assert "summary.json" in reasons["static_key", 1]
    assert "schedule.epochs is 9 there and 2 here" in reasons["identity", 0]
    assert len(reasons) == 4


def test_a_run_trained_where_the_images_lie_elsewhere_is_read(done):
    recipe = done / "runs/identity/seed0/recipe.json"
    moved = recipe.read_text("utf-8").replace('"spec": "digits"', '"spec": "folder:/other"')
    assert "/other" in moved
    recipe.write_text(moved, "utf-8")
    assert rebuild(done).failed == []


def test_a_failure_keeps_its_reason(tmp_path):
    path = brittle(tmp_path, "kept", 'raise KeyError("a bug of mine")')
    small(tmp_path / "out", mixers="mhsa,brittle_kept", controls=False, imports=[path])
    (failed,) = rebuild(tmp_path / "out").failed
    assert "a bug of mine" in failed["reason"]


def test_other_environments_are_told(done):
    for seed, commit in ((0, "a" * 40), (1, "b" * 40)):
        path = done / f"runs/softmax/seed{seed}/environment.json"
        told = json.loads(path.read_text(encoding="utf-8")) | {"commit": commit}
        path.write_text(json.dumps(told), encoding="utf-8")
    (done / "runs/identity/seed0/environment.json").unlink()
    record = rebuild(done).record
    assert [env["runs"] for env in record["trained_with"]] == [1, 1, 3, 1]
    warning = record["environment_warning"]
    assert "not all trained in one environment" in warning
    assert "commit (aaaaaaaaaa: 1 run; bbbbbbbbbb: 1 run;" in warning
    places = {(run["mixer"], run["seed"]): run["trained_with"] for run in record["runs"]}
    assert record["trained_with"][places["softmax", 1]]["lines"]["commit"] == "b" * 40


def test_without_its_images_the_earlier_maps_stay(done, monkeypatch):
    first = record_of(done)

    def gone(config: Any) -> None:
        raise UserError(f"data {config.spec!r}: the disk is not there")

    monkeypatch.setattr("keymix.train.model.load_data", gone)
    result = rebuild(done)
    assert result.notes == (
        "attention maps are kept as they were: data 'digits': the disk is not there",
    )
    assert result.record["attention"] == first["attention"]
    (done / "results.json").unlink()
    result = rebuild(done)
    assert "left out" in result.notes[0]
    assert result.record["attention"] is None
    assert (done / "report.html").is_file()


def test_a_result_that_was_written_meanwhile_stays(done, monkeypatch):
    newer = record_of(done) | {"title": "newer"}

    def meanwhile(*args: Any, **more: Any) -> Any:
        (done / "results.json").write_text(json.dumps(newer), encoding="utf-8")
        raise UserError("no maps")

    monkeypatch.setattr("keymix.compare.gather.trained_models", meanwhile)
    assert rebuild(done).record["title"] == "newer"
    assert record_of(done)["title"] == "newer"


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("nowhere", "there is no folder"),
        ("runs/softmax/seed0", "single run"),
        ("runs", "holds no comparison"),
        ("results.csv", "holds no comparison"),
    ],
)
def test_what_is_no_comparison_is_told_in_one_line(original, place, told, capsys):
    assert main(["report", str(original.out / place)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("keymix: error: ")
    assert told in line


def test_the_command_tells_table_and_missing_runs(done, capsys, monkeypatch):
    shutil.rmtree(done / "runs/identity/seed0")
    assert main(["report", str(done)]) == 0
    captured = capsys.readouterr()
    assert [line.split("\t")[0] for line in captured.out.splitlines()[:3]] == [
        "mixer", "softmax", "static_key",
    ]  # fmt: skip
    assert "missing: identity, seed 0: it has not started" in captured.err
    shutil.rmtree(done / "runs/softmax/seed1")
    shutil.rmtree(done / "runs/static_key")
    monkeypatch.setattr("keymix.cli.compare_result.MOST_MISSING", 3)
    assert main(["report", str(done)]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "missing" in line]
    assert len(told) == 3
    assert told[-1] == "missing: 2 more runs"
    shutil.rmtree(done / "runs/identity/seed1")
    assert main(["report", str(done), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["missing"]) == 5
    assert {"mixer": "identity", "seed": 0, "reason": "it has not started"} in told["missing"]


def test_a_name_that_is_no_utf8_is_written_and_read_again(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    write_json(tmp_path / "results.json", {"classes": [name]})
    assert json.loads((tmp_path / "results.json").read_text("utf-8")) == {"classes": [name]}

# SPDX-License-Identifier: Apache-2.0
"""A comparison gathered again from its folder: by `keymix report`, elsewhere, half finished."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from few_digits import small

from keymix.cli import main
from keymix.compare import folder
from keymix.compare.folder import write_record
from keymix.compare.run import rebuild
from keymix.compare.runs import DAMAGED
from keymix.compare.worker import move_away
from keymix.errors import KeymixWarning, UserError
from keymix.records import to_json
from keymix.train.checkpoints import DamagedRun

TIMELY = ("created",)


@pytest.fixture
def done(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def _table(printed: str) -> list[str]:
    """The lines of the table, from its heads on."""
    lines = printed.splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("mixer\t")) :]


def record_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


def but(record: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


@pytest.mark.slow
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
    known = ("costs", "measured", *TIMELY)
    assert but(found, *known) == but(first, *known)
    for label, cost in found["costs"].items():
        assert cost["macs"] == first["costs"][label]["macs"]
        assert "latency_ms" not in cost


def test_missing_runs_have_their_reasons_and_read_when_they_are_there(done, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(done / "runs/static_key/seed1", elsewhere)
    (done / "runs/identity/seed0/summary.json").unlink()
    result = rebuild(done)
    missing = {(run.mixer, run.seed): run for run in result.missing}
    assert missing["static_key", 1].reason == "it has not started"
    assert missing["identity", 0].reason == "it is not finished: 2 of 2 epochs are done"
    assert len(missing) == 2
    assert result.failed == []
    assert {row.mixer: row.scores["top1"].n for row in result.record.outcome.last} == {
        "softmax": 2, "static_key": 1, "identity": 1,
    }  # fmt: skip
    with (done / "results.csv").open(encoding="utf-8", newline="") as stream:
        assert {(r["mixer"], r["seed"]) for r in csv.DictReader(stream)} == {
            ("softmax", "0"), ("softmax", "1"), ("static_key", "0"), ("identity", "1"),
        }  # fmt: skip
    shutil.move(elsewhere, done / "runs/static_key/seed1")
    assert len(rebuild(done).missing) == 1


def test_one_finished_run_is_enough_and_none_is_refused(done):
    runs = sorted((done / "runs").glob("*/seed*"))
    for place in runs[1:]:
        shutil.rmtree(place)
    result = rebuild(done)
    assert len(result.missing) == 5
    assert sum(row.scores["top1"].n for row in result.record.outcome.last) == 1
    assert (done / "report.html").is_file()
    shutil.rmtree(runs[0])
    with pytest.raises(UserError, match=r"no run .* is finished yet\. Resume it with: keymix"):
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
    reasons = {(run.mixer, run.seed): run.reason for run in rebuild(done).failed}
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


def test_other_environments_are_reported(done):
    commits = {"softmax/seed0": "a" * 40, "softmax/seed1": "b" * 40}
    for path in (done / "runs").glob("*/seed*/environment.json"):
        commit = commits.get(path.parent.relative_to(done / "runs").as_posix(), "c" * 40)
        environment = json.loads(path.read_text(encoding="utf-8")) | {"commit": commit}
        path.write_text(json.dumps(environment), encoding="utf-8")
    (done / "runs/identity/seed0/environment.json").unlink()
    again = rebuild(done).record
    record = to_json(again)
    assert len(record["trained_with"]) == 4
    assert "commit" in again.differing
    places = {(run["mixer"], run["seed"]): run["trained_with"] for run in record["runs"]}
    assert record["trained_with"][places["softmax", 1]]["commit"] == "b" * 40


@pytest.mark.parametrize("place", ["nowhere", "runs/softmax/seed0", "results.csv"])
def test_what_is_no_comparison_is_refused_in_one_line(finished, place, capsys):
    assert main(["report", str(finished / place)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("keymix: error: ")
    assert f"{place}' holds no comparison" in line


@pytest.mark.slow
def test_the_command_prints_table_and_missing_runs(done, capsys, monkeypatch):
    shutil.rmtree(done / "runs/identity/seed0")
    assert main(["report", str(done)]) == 0
    captured = capsys.readouterr()
    head, *rows = [line.split("\t")[0] for line in _table(captured.out)]
    assert head == "mixer"
    assert {"softmax", "static_key", "identity"} <= {*rows}
    assert "missing: identity, seed 0: it has not started" in captured.err
    shutil.rmtree(done / "runs/softmax/seed1")
    shutil.rmtree(done / "runs/static_key")
    monkeypatch.setattr("keymix.cli.comparison.MOST_MISSING", 3)
    assert main(["report", str(done)]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "missing" in line]
    assert len(lines) == 3
    assert lines[-1] == "missing: 2 more runs"
    shutil.rmtree(done / "runs/identity/seed1")
    assert main(["report", str(done), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["missing"]) == 5
    assert {"mixer": "identity", "seed": 0, "reason": "it has not started"} in printed["missing"]


def test_a_name_that_is_no_utf8_is_written_and_read_again(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    write_record(tmp_path / "results.json", {"classes": [name]})
    assert json.loads((tmp_path / "results.json").read_text("utf-8")) == {"classes": [name]}


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.slow
def test_files_that_a_folder_names_are_never_run_but_those_that_are_given(
    done, tmp_path, monkeypatch, capsys
):
    """In the report and in a resumed comparison, which names them and the option to give."""
    ran = tmp_path / "ran"
    files = {name: tmp_path / f"{name}.py" for name in ("recorded", "given")}
    for name, file in files.items():
        file.write_text(f"open({str(ran)!r}, 'a').write({name!r})\n", encoding="utf-8")
    named = [str(files["recorded"]), "/no/where/\x1b[31m.py"]
    changed(done / "plan.json", lambda v: v["plan"]["question"].update(imports=named))
    kept = (done / "plan.json").read_bytes()
    again = ["compare", "--data", "digits", "--mixers", "mhsa,ska", "--seeds", "2", "--limit"]
    again += ["100", "--epochs", "2", "--processes", "1", "--out", str(done)]
    for words in (["report", str(done)], again):
        (done / "plan.json").write_bytes(kept)
        assert main(words) == 0
        printed = capsys.readouterr().err
        assert not ran.exists()
        assert f"--import {files['recorded']}" in printed.replace("\n", " ")
        assert "\x1b" not in printed
    (done / "plan.json").write_bytes(kept)
    assert rebuild(done, imports=[files["given"]]).notes[0].count("--import") == 2
    assert ran.read_text() == "given"
    assert folder.imports_note(folder.read(done).plan, named) == ""


def test_a_report_runs_nothing_that_a_damaged_folder_names(done, tmp_path):
    ran = tmp_path / "ran.py"
    ran.write_text("raise SystemExit(5)", encoding="utf-8")
    changed(done / "plan.json", lambda v: v["plan"]["question"].update(imports=[str(ran)]))
    spoil(done / "plan.json")
    with pytest.raises(UserError, match=r"plan\.json"):
        rebuild(done)


RECORDED: dict[str, Callable[[dict[str, Any]], object]] = {
    "slug": lambda plan: plan["mixers"][0].update(slug="../../elsewhere"),
    "params": lambda plan: plan["mixers"][1].update(params="many"),
    "seeds": lambda plan: plan.update(seeds=["0/../../../elsewhere"]),
    "baseline": lambda plan: plan.update(baseline="other"),
}


@pytest.mark.parametrize("what", RECORDED)
def test_a_plan_that_was_tampered_with_is_refused_by_what_is_wrong(done, what):
    changed(done / "plan.json", lambda v: RECORDED[what](v["plan"]))
    with pytest.raises(UserError, match=r"plan\.json"):
        rebuild(done)


def spoil(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


RUN = "runs/static_key/seed0"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["results.json", "costs.json", "pictures.json"])
def test_a_damaged_file_of_the_results_is_written_again(done, name):
    first = record_of(done)
    spoil(done / name)
    again = small(done, seeds=2, epochs=2)
    assert to_json(again.record.outcome) == first["outcome"]
    assert again.pictures.attention is not None
    json.loads((done / name).read_text("utf-8"))


FILES = ("summary.json", "predictions_test.npz", "environment.json", "metrics.jsonl", "recipe.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_run_with_a_damaged_file_is_left_out_and_named_with_the_remedy(done, name):
    spoil(done / RUN / name)
    (failed,) = rebuild(done).failed
    assert (failed.mixer, failed.seed) == ("static_key", 0)
    assert name in failed.reason
    assert "keymix compare" in failed.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["predictions_test.npz", "weights_last.safetensors"])
def test_a_resumed_comparison_writes_damaged_files_again(done, name):
    first = record_of(done)
    before = (done / RUN / name).read_bytes()
    (done / RUN / name).write_bytes(before[:-100])
    with pytest.warns(KeymixWarning, match=name):
        again = small(done, seeds=2, epochs=2)
    assert again.failed == []
    assert to_json(again.record)["outcome"] == first["outcome"]
    assert (done / RUN / name).read_bytes() == before
    assert not (done / f"{RUN}.damaged").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weights_best.safetensors", "recipe.json"])
def test_a_run_that_cannot_be_written_again_is_moved_away_and_done_again(done, name):
    first = record_of(done)
    before = (done / RUN / name).read_bytes()
    spoil(done / RUN / name)
    with pytest.warns(KeymixWarning, match=r"static_key/seed0\.damaged") as said:
        again = small(done, seeds=2, epochs=2)
    assert len([each for each in said if "damaged" in str(each.message)]) == 1
    assert again.failed == []
    assert to_json(again.record)["outcome"] == first["outcome"]
    assert (done / RUN / name).read_bytes() == before
    assert (done / f"{RUN}.damaged" / name).read_bytes() != before
    small(done, seeds=1, epochs=1, controls=False, overwrite=True)
    assert not (done / f"{RUN}.damaged").exists()


def test_a_damaged_run_that_was_moved_away_before_is_not_thrown_away(tmp_path):
    for name in ("seed0", f"seed0{DAMAGED}"):
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=r"seed0\.damaged.*torn"):
        move_away(tmp_path / "seed0", DamagedRun("it is torn"))
    assert (tmp_path / "seed0").exists()


def test_scores_stand_where_weights_were_taken_away(done):
    first = record_of(done)
    for weights in (done / RUN).glob("weights_*"):
        weights.unlink()
    again = small(done, seeds=2, epochs=2)
    assert to_json(again.record)["outcome"] == first["outcome"]
    assert "weights_last.safetensors" in again.notes[0]

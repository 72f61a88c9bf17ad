# SPDX-License-Identifier: Apache-2.0
"""Whole comparisons on a few digits: what they write, how they resume, and failures."""

from __future__ import annotations

import base64
import csv
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from few_digits import FINISHED, brittle, small

from keymix.analysis.attention import attention_maps
from keymix.analysis.threads import use_threads
from keymix.compare.events import Event
from keymix.compare.models import share_out
from keymix.compare.run import Comparison
from keymix.data import load
from keymix.errors import UserError, reason
from keymix.hosts import find_mixers
from keymix.records import to_json
from keymix.tasks.classification.page import spread_out
from keymix.train.runs import load_run


@pytest.fixture(scope="module")
def done(finished, tmp_path_factory) -> Comparison:
    out = shutil.copytree(finished, tmp_path_factory.mktemp("comparison") / "out")
    return small(Path(out), **FINISHED)


def test_it_writes_report_results_and_runs(done):
    for name in ("report.html", "results.csv", "results.json", "plan.json"):
        assert (done.out / name).is_file()
    for slug in ("softmax", "static_key", "identity"):
        for seed in (0, 1):
            assert (done.out / "runs" / slug / f"seed{seed}" / "summary.json").is_file()
    assert not (done.out / ".lock").exists()


def test_the_page_says_what_each_mixer_computes_without_a_link(done):
    assert done.record.mechanisms.keys() == {"softmax", "static_key", "identity"}
    page = done.report.read_text(encoding="utf-8")
    assert page.count(done.record.mechanisms["static_key"].split("'")[0]) == 1
    assert "https://" not in page.partition("<main>")[2].partition("<script")[0]


def test_results_csv_has_the_columns_of_the_design_and_the_runs_numbers(done):
    with (done.out / "results.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == (
        "mixer", "seed", "epoch", "split", "metric", "value",
        "params", "macs", "latency_ms", "images_per_s", "peak_mib",
    )  # fmt: skip
    assert {row["epoch"] for row in rows} == {"last", "best"}
    assert {row["split"] for row in rows} == {"val", "test"}
    for row in rows:
        if (row["epoch"], row["split"], row["metric"]) == ("last", "test", "top1"):
            folder = done.out / "runs" / row["mixer"] / f"seed{row['seed']}"
            with np.load(folder / "predictions_test.npz") as stored:
                right = float((stored["last_pred"] == stored["target"]).mean())
            assert float(row["value"]) == pytest.approx(right)
            assert int(row["params"]) > 0
            assert float(row["latency_ms"]) > 0


def pictures_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "pictures.json").read_text(encoding="utf-8"))["pictures"]


def test_results_json_is_strict_and_holds_what_the_report_needs(done):
    text = (done.out / "results.json").read_text(encoding="utf-8")
    record = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert record["data"]["fingerprint"]
    assert record["environment"]["keymix"]
    assert record["recipe"]["data"]["limit"] == 100
    assert record["command"].startswith("keymix.compare(")
    assert record["baseline"] == "softmax"
    assert "attention" not in record
    attention = pictures_of(done.out)["attention"]
    assert set(attention["maps"]) == {"softmax", "static_key"}
    assert "identity" in attention["missing"]


def unpacked(packed: dict[str, Any], layers: int, images: int = 4) -> np.ndarray:
    """Read packed weights back, [image, layer, 1 + heads, H, W]."""
    numbers = np.frombuffer(base64.b64decode(packed["weights"]), "<u2")
    shape = (images, layers, 1 + packed["heads"], *packed["grid"])
    return numbers.reshape(shape) / 65535 * packed["scale"]


def test_attention_maps_of_all_layers_and_heads_are_whole(done):
    stored = pictures_of(done.out)["attention"]
    model = load_run(done.out / "runs/softmax/seed0").model("last")
    mixers = find_mixers(model)
    assert len(stored["layers"]) == len(mixers) == 2
    for packed in stored["maps"].values():
        weights = unpacked(packed, len(stored["layers"]))
        assert packed["heads"] == next(iter(mixers.values())).num_heads
        assert weights.sum(axis=(-1, -2)) == pytest.approx(np.ones(weights.shape[:3]), abs=1e-3)
        assert weights[:, :, 0] == pytest.approx(weights[:, :, 1:].mean(2), abs=1e-4)


def test_the_stored_weights_are_those_of_the_model(done):
    stored = pictures_of(done.out)["attention"]
    data = load("digits", limit=100)
    images = data.prepared(
        torch.stack([data.test.read(i) for i in spread_out(data.test.labels.tolist(), 4)])
    )
    model = load_run(done.out / "runs/static_key/seed0").model("last")
    (rows,) = attention_maps(model, images, layers=1).values()
    first = model.num_prefix_tokens
    expected = rows[:, :, first:, first:].double().mean(2).reshape(4, -1, 3, 3).numpy()
    weights = unpacked(stored["maps"]["static_key"], 2)
    assert weights[:, 1, 1:] == pytest.approx(expected, abs=2e-5)


def test_right_answers_are_listed_by_image_and_by_class(done):
    record = to_json(done.record)
    names, sizes = record["classes"]["names"], record["classes"]["test_images"]
    assert names == [str(i) for i in range(10)]
    assert sum(sizes) == record["test_images"] == record["data"]["sizes"]["test"]
    for run in record["runs"]:
        with np.load(done.out / run["folder"] / "predictions_test.npz") as stored:
            order = np.argsort(stored["index"])
            target, said = stored["target"][order], stored["last_pred"][order]
        bits = np.unpackbits(np.frombuffer(base64.b64decode(run["correct"]), np.uint8))
        assert (bits[: len(target)] == (said == target)).all()
        assert run["class_correct"] == [int((said[target == c] == c).sum()) for c in range(10)]
        assert sum(run["class_correct"]) / len(target) == pytest.approx(run["last"]["test"]["top1"])


def test_mix_ups_are_counted_over_seeds_the_commonest_first(done):
    names = done.record.data.classes
    for label, rows in to_json(done.record)["confusions"].items():
        found: Counter[tuple[int, int]] = Counter()
        for folder in (done.out / "runs" / label).iterdir():
            with np.load(folder / "predictions_test.npz") as stored:
                found.update(
                    zip(stored["target"].tolist(), stored["last_pred"].tolist(), strict=True)
                )
        for (true, said), _ in list(found.items()):
            if true == said:
                del found[true, said]
        assert len(rows) == 10
        counts = [row["count"] for row in rows]
        assert counts == sorted(found.values(), reverse=True)[:10]
        for row in rows:
            assert found[names.index(row["true"]), names.index(row["predicted"])] == row["count"]


def test_it_says_what_the_runs_were_trained_with(done):
    (env,) = to_json(done.record)["trained_with"]
    environment = json.loads((done.out / "runs/softmax/seed0/environment.json").read_text("utf-8"))
    assert env["threads"] == str(environment["threads"])
    assert environment["packages"]["torch"] in env["packages"]
    assert done.record.differing == done.record.differing_here == []
    assert {run.trained_with for run in done.record.runs} == {0}


def test_differences_are_paired_by_seed(done):
    top1 = {
        (run["mixer"], run["seed"]): run["last"]["test"]["top1"]
        for run in to_json(done.record)["runs"]
    }
    (row,) = (to_json(row) for row in done.record.outcome.last if row.mixer == "static_key")
    by_hand = np.mean([top1["static_key", s] - top1["softmax", s] for s in (0, 1)])
    assert row["seeds"]["difference"] == pytest.approx(by_hand)
    assert row["images"]["difference"] == pytest.approx(by_hand)
    assert row["degree"] == "unclear"
    assert row["interval"]["difference"] == pytest.approx(by_hand)


@pytest.mark.slow
def test_a_second_call_trains_nothing_and_new_mixers_and_seeds_join(tmp_path):
    first = small(tmp_path / "out", controls=False)
    stamp = (first.out / "runs/softmax/seed0/summary.json").stat().st_mtime_ns
    started: list[tuple[str, int]] = []

    def watch(event: Event) -> None:
        if event.kind == "start":
            started.append((event.mixer, event.seed))

    again = small(first.out, controls=False, progress=watch)
    assert started == []
    assert again.scores.equals(first.scores)
    grown = small(first.out, mixers="mhsa,ska,kv", seeds=2, controls=False, progress=watch)
    assert sorted(started) == [
        ("key_value", 0), ("key_value", 1), ("softmax", 1), ("static_key", 1),
    ]  # fmt: skip
    assert (first.out / "runs/softmax/seed0/summary.json").stat().st_mtime_ns == stamp
    assert len(grown.record.runs) == 6


@pytest.mark.slow
def test_another_comparison_is_refused_and_overwrite_deletes_only_its_own_files(finished, tmp_path):
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    note = out / "runs" / "softmax" / "note.txt"
    note.write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=r"optim\.lr .* --overwrite"):
        small(out, **FINISHED, overrides={"optim.lr": 0.01})
    assert (out / "runs/static_key/seed0/summary.json").exists()
    changed = small(
        out, mixers="mhsa,kv", controls=False, overrides={"optim.lr": 0.01}, overwrite=True
    )
    assert note.read_text(encoding="utf-8") == "mine"
    assert not (out / "runs/static_key").exists()
    assert changed.record.recipe.optim.lr == 0.01


def test_a_folder_with_other_files_is_refused_even_with_overwrite(tmp_path):
    (tmp_path / "thesis.tex").write_text("important", encoding="utf-8")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds no comparison"):
            small(tmp_path, overwrite=overwrite)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_a_failing_run_is_recorded_and_the_others_go_on(tmp_path):
    path = brittle(tmp_path, "raises", 'raise KeyError("a bug of mine")')
    result = small(
        tmp_path / "out", mixers="brittle_raises,mhsa,ska", controls=False, imports=[path]
    )
    (failed,) = result.failed
    assert failed.mixer == "brittle_raises"
    assert "a bug of mine" in failed.reason
    assert "\n" not in failed.reason
    assert [row.scores["top1"].n for row in result.record.outcome.last] == [0, 1, 1]
    page = result.report.read_text(encoding="utf-8")
    assert "did not finish" in page
    assert "a bug of mine" in page


def test_no_run_finished_is_an_error_with_the_reason(tmp_path):
    path = brittle(tmp_path, "always", 'raise RuntimeError("no luck")')
    second = brittle(tmp_path, "second", 'raise RuntimeError("no luck")')
    with pytest.raises(UserError, match="no luck"):
        small(
            tmp_path / "out",
            mixers="brittle_always,brittle_second",
            imports=[path, second],
            controls=False,
        )


def test_processes_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(8)}, raising=False)
    with use_threads(8):
        assert share_out(18, None, cuda=False) == (8, 1)
        assert share_out(2, None, cuda=False) == (2, 4)
        assert share_out(18, None, cuda=True) == (1, 8)
        assert share_out(18, 4, cuda=False) == (4, 2)
    with use_threads(1):
        assert share_out(18, 1, cuda=False) == (1, 1)


@pytest.mark.slow
def test_a_comparison_keeps_the_threads_that_it_began_with(finished, tmp_path):
    out = Path(shutil.copytree(finished, tmp_path / "out"))
    path = out / "plan.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["plan"]["threads"] = 3
    path.write_text(json.dumps(manifest), encoding="utf-8")
    shutil.rmtree(out / "runs" / "identity" / "seed1")
    small(out, **FINISHED, mixers="mhsa,ska,identity", processes=1)
    run = json.loads((out / "runs" / "identity" / "seed1" / "environment.json").read_text())
    assert run["threads"] == 3
    assert json.loads(path.read_text(encoding="utf-8"))["plan"]["threads"] == 3


def test_reason_is_one_short_line():
    assert reason(RuntimeError("two\nlines")) == "RuntimeError: two lines"
    assert reason(UserError("plain words")) == "plain words"
    assert len(reason(RuntimeError("x" * 1000))) == 300

# SPDX-License-Identifier: Apache-2.0
"""Folders that earlier versions wrote open, resume and render: each archive that `make.py` made.

Numbers are compared loosely: the archives were made on another machine.
"""

from __future__ import annotations

import csv
import html
import json
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape

from keymix import cli
from keymix.analysis.attention_record import AttentionRecord
from keymix.analysis.collapse_record import CollapseRecord
from keymix.analysis.complexity_record import ComplexityRecord
from keymix.analysis.memory import Peak
from keymix.analysis.memory_record import MemoryRecord
from keymix.analysis.spikes_record import SpikesRecord
from keymix.compare.run import compare
from keymix.records import from_json, to_json
from keymix.studies.attention.page import figures, render
from keymix.studies.study import get_study
from keymix.train import checkpoints
from keymix.train.engine import train
from keymix.train.files import read_metrics
from keymix.train.runs import evaluate, load_run

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "compare")]

import few_digits  # noqa: E402
import few_masks  # noqa: E402

KINDS = {"images": "top1", "masks": "jaccard", "events": "top1"}
PEAK = Peak(inference_mib=1.0, training_mib=2.0, note="not measured")
ANALYSES = {
    "attention": AttentionRecord,
    "collapse": CollapseRecord,
    "complexity": ComplexityRecord,
    "memory": MemoryRecord,
    "spikes": SpikesRecord,
}
MEASURED = {"latency_ms", "images_per_s", "peak_mib"}


@pytest.fixture(scope="session", params=sorted(HERE.glob("*.tar.xz")), ids=lambda path: path.stem)
def archive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with ``stored``, and with the masks that its runs were trained on."""
    folder = tmp_path_factory.mktemp("archive")
    with tarfile.open(request.param) as packed:
        packed.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    few_masks.made_masks(folder / "masks_data")
    return folder


@pytest.fixture
def stored(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all folders, which the test may change, in the working directory."""
    shutil.copytree(archive, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("stored")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run_opens_and_scores_as_it_did(stored: Path, kind: str) -> None:
    run = load_run(stored / kind / "run")
    there = json.loads((run.folder / "summary.json").read_text())
    score = KINDS[kind]
    assert evaluate(run)[score] == pytest.approx(there["last"]["test"][score], abs=0.05)
    assert [line.epoch for line in read_metrics(run.folder / "metrics.jsonl")] == [0, 1, 2]
    before = (run.folder / "summary.json").read_bytes()
    assert train(run.recipe, run.folder).done
    assert (run.folder / "summary.json").read_bytes() == before  # nothing was trained again


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_within_an_epoch_goes_on(stored: Path, kind: str) -> None:
    folder = stored / kind / "stopped"
    begun = (folder / "metrics.jsonl").read_text().splitlines()
    assert begun  # at least an epoch, which must not be trained again
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert "_step_" in checkpoint.name
    train(load_run(folder).recipe, folder)
    ended = (folder / "metrics.jsonl").read_text().splitlines()
    assert ended[: len(begun)] == begun
    whole = [json.loads(line) for line in _lines(stored / kind / "run")]
    for line, wanted in zip(map(json.loads, ended), whole, strict=True):
        for key in ("train_loss", "val_loss", "lr"):
            assert line[key] == pytest.approx(wanted[key], rel=0.02)


@pytest.mark.parametrize(
    ("kind", "ended", "stopped"),
    [
        ("images", (3, 0, 9), (1, 4, 5)),  # two batches an update
        ("masks", (3, 0, 9), (2, 2, 8)),
        ("events", (3, 0, 15), (1, 3, 8)),
    ],
)
def test_a_checkpoint_says_where_its_run_was(
    archive: Path, kind: str, ended: tuple[int, ...], stopped: tuple[int, ...]
) -> None:
    for name, wanted in (("run", ended), ("stopped", stopped)):
        (path,) = (archive / "stored" / kind / name / "checkpoints").iterdir()
        content = checkpoints.read(path)
        assert (content["epoch"], content["batch"], content["updates"]) == wanted
        assert len(content["record"]["lines"]) == content["epoch"]
        state = content["optimizer"]["state"]
        assert {int(of["step"]) for of in state.values()} == {content["updates"]}


def _lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_comparison_renders_from_its_folder(stored: Path, kind: str) -> None:
    folder = stored / kind / "comparison"
    before = _table(folder)
    for name in ("report.html", "results.json", "results.csv"):
        (folder / name).unlink()
    assert cli.main(["report", str(folder)]) == 0
    assert _table(folder) == before
    page = (folder / "report.html").read_text()
    assert all(row["mixer"] in page for row in before)


def _table(folder: Path) -> list[dict[str, str]]:
    """The rows of results.csv, without what was measured."""
    with (folder / "results.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    return [{key: row[key] for key in row if key not in MEASURED} for row in rows]


@pytest.mark.slow
def test_a_comparison_reads_finished_runs_and_trains_a_missing_one(stored: Path) -> None:
    folder = stored / "images" / "comparison"
    there = json.loads((folder / "comparison.json").read_text())
    *others, missing = there["runs"]
    shutil.rmtree(folder / missing)
    made: dict[str, bytes] = {n: (folder / n / "summary.json").read_bytes() for n in others}
    planned = there["planned"]
    with few_digits.cheap_costs(), few_digits.no_trials():
        compare(
            recipe=load_run(stored / "images" / "run").recipe,
            epochs=2,
            mixers=[mixer["label"] for mixer in planned["mixers"]],
            seeds=planned["seeds"],
            baseline=planned["baseline"],
            controls=False,
            processes=1,
            out=folder,
        )
    assert (folder / missing / "summary.json").exists()
    assert {n: (folder / n / "summary.json").read_bytes() for n in others} == made


def test_a_swapped_model_opens_and_is_not_made_again(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swap = stored / "swap"
    record: dict[str, Any] = json.loads((swap / "swap.json").read_text())
    assert evaluate(swap)["top1"] == pytest.approx(record["test"]["after"]["top1"], abs=0.05)
    weights = (swap / "weights_last.safetensors").read_bytes()
    words = ["--mixer", "ska", "--search", "--images", "16", "--held-out", "8", "--test"]
    assert cli.main(["swap", str(stored / "images" / "run"), "--out", str(swap), *words]) == 0
    assert record["sentence"] in capsys.readouterr().out
    assert (swap / "weights_last.safetensors").read_bytes() == weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_opens_and_renders(stored: Path, name: str) -> None:
    folder = stored / "analyses" / name
    there = json.loads((folder / f"{name}.json").read_text())
    record: Any = from_json(ANALYSES[name], there, where=name)
    assert _known(json.loads(json.dumps(to_json(record)))) == _known(there)
    study = get_study(name)
    files = dict(study.files(record))
    if name == "attention":  # its page shows pictures, which are drawn of the maps
        with np.load(folder / "maps.npz") as maps:
            files[study.page_file] = render(record, list(figures(record, dict(maps))))
    page = files[study.page_file]
    assert f"<h1>{escape(study.answer(record))}</h1>" in page.replace("<wbr>", "")
    assert html.escape(record.command) in page
    assert {*files, study.record_file} <= {path.name for path in folder.iterdir()}
    for file, text in files.items():
        if file.endswith(".csv"):
            assert text.encode() == (folder / file).read_bytes()


def _known(values: Any) -> Any:
    """The values without those that are None."""
    if isinstance(values, dict):
        return {key: _known(each) for key, each in values.items() if each is not None}
    return [_known(each) for each in values] if isinstance(values, list) else values


@pytest.mark.slow
def test_a_search_that_was_stopped_goes_on(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keymix.swap.search.ROUNDS", 2)
    folder = stored / "swap"
    whole = json.loads((folder / "search.json").read_text())
    begun = {**whole["search"], "steps": whole["search"]["steps"][:2]}
    (folder / "search.json").write_text(json.dumps({**whole, "search": begun}))
    (folder / "swap.json").unlink()
    words = ["--mixer", "ska", "--search", "--images", "16", "--held-out", "8"]
    assert cli.main(["swap", str(stored / "images" / "run"), "--out", str(folder), *words]) == 0
    ended = json.loads((folder / "search.json").read_text())
    assert ended["setting"] == whole["setting"]
    assert ended["search"]["trials"] == whole["search"]["trials"]
    intervals = {"change_low", "change_high"}
    for kept, before in zip(ended["search"]["steps"], begun["steps"], strict=False):
        assert {key for key in before if kept[key] != before[key]} <= intervals
    for kept, before in zip(ended["search"]["steps"], whole["search"]["steps"], strict=True):
        assert kept["layers"] == before["layers"]
        if kept["layers"]:  # Bonett and Price's are wider than Agresti and Min's
            assert kept["change_low"] < before["change_low"]

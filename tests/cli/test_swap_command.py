# SPDX-License-Identifier: Apache-2.0
"""``keymix swap`` on a run of a hundred digits."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from keymix.cli import main as keymix
from keymix.cli.swap import _peaks as MEASURED
from keymix.cli.swap import main
from keymix.cli.swap_folder import Folder
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.swap.record import Search
from keymix.swap.run import swap
from keymix.train.evaluation import data_for
from keymix.train.runs import evaluate, load_run

TRAIN = ["digits_vit", "--limit", "120", "--epochs", "1", "--data.batch_size", "32"]
SIZE = ["--model.options.depth", "3", "--model.options.embed_dim", "16"]
SWAP = ["--mixer", "ska", "--images", "16"]


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keymix.swap.held_out.ROUNDS", 2)
    monkeypatch.setattr("keymix.swap.search.LEAST", 5)
    monkeypatch.setattr("keymix.cli.swap._peaks", lambda *_: None)  # `swapped` measures it


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("swap") / "run")
    words = [*TRAIN, *SIZE, "--schedule.warmup_epochs=0.5", "--optim.lr", "1e-2", "--out", out]
    assert keymix(["train", *words]) == 0
    return out


@pytest.fixture(scope="module")
def swapped(trained: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("swapped") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keymix.swap.held_out.ROUNDS", 2)
        patch.setattr("keymix.swap.result.LEAST_MIB", 0.0)
        assert main([trained, *SWAP, "--layers", "1-2", "--test", "--out", str(out)]) == 0
    return out


def record(folder: Path) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads((folder / "swap.json").read_text(encoding="utf-8"))
    return stored


@pytest.mark.slow
def test_the_folder_holds_what_swap_gives(trained: str, swapped: Path) -> None:
    run = load_run(trained)
    model, seen = run.model_and_data()
    data = data_for(run.recipe.data, seen, None, (12, 12))
    rows = [i * len(data.train) // 16 for i in range(16)]
    pixels = torch.stack([data.train.read(i) for i in rows])
    images = (pixels.float() / 255 - data.mean[0]) / data.std[0]
    swap(model, "static_key", "1-2", calibration=images)
    there = load_run(swapped).model()
    assert [m.mixer_name for m in find_mixers(there).values()] == [
        "softmax",
        "static_key",
        "static_key",
    ]
    with torch.no_grad():
        assert torch.allclose(there(images), model(images), atol=1e-5)


@pytest.mark.slow
def test_of_uneven_classes_the_score_is_balanced_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for name, count in (("many", 80), ("few", 20)):
        (tmp_path / "uneven" / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 256, (12, 12), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "uneven" / name / f"{i}.png")
    out, data = str(tmp_path / "run"), f"folder:{tmp_path / 'uneven'}"
    assert keymix(["train", *TRAIN, *SIZE, "--data", data, "--out", out]) == 0
    place = tmp_path / "out"
    assert main([out, *SWAP, "--layers", "1", "--test", "--out", str(place)]) == 0
    found = evaluate(out)
    assert found["balanced"] != found["top1"]
    said = f"test balanced accuracy {100 * found['balanced']:.2f} % before"
    assert said in capsys.readouterr().out
    before = record(place)["before"]["score"]
    assert before == pytest.approx(evaluate(out, split="val")["balanced"])
    assert "The balanced accuracy on the held-out images" in (place / "report.html").read_text()


def test_the_record_reports_measured_numbers(trained: str, swapped: Path) -> None:
    result = record(swapped)
    before, after = evaluate(trained, split="val"), evaluate(swapped, split="val")
    assert result["held_out"] == before["images"]
    assert result["before"]["score"] == pytest.approx(before["top1"])
    assert result["after"]["score"] == pytest.approx(after["top1"])
    assert result["after"]["loss"] == pytest.approx(after["loss"], rel=1e-4)
    assert result["answer"].startswith("Replacing attention in blocks 2 to 3 with")
    assert result["after"]["mixers"] == ["static_key"] * 2
    assert result["test"]["before"]["top1"] == evaluate(trained)["top1"]
    assert result["test"]["after"]["top1"] == evaluate(swapped)["top1"]
    assert [row["path"] for row in result["report"]["rows"]] == ["blocks.1.attn", "blocks.2.attn"]
    page = (swapped / "report.html").read_text(encoding="utf-8")
    answer = result["answer"].replace(" %", "\u00a0%")
    assert f"<h1>{answer}</h1>" in page
    assert "3 (blocks.2.attn)" in page
    first, *folded = page.partition("</header>")[2].split('<details class="part">')
    assert "<table" not in first
    numbers = [text.replace("−", "-") for text in re.findall(r"<li><b>(.*?)</b>", first)]
    assert numbers[0] == f"{100 * after['top1']:.1f} %"
    saved = result["after"]["macs"] / result["before"]["macs"] - 1
    assert numbers[-2] == f"{100 * saved:.1f} %"
    before, after = result["peaks_mib"]
    assert numbers[-1] == f"{100 * (after / before - 1):+.1f} %"
    assert 0 < before < 50
    assert first.count("<svg") == 2
    assert {"2", "3"} <= {*re.findall(r"<text[^>]*>(\d)</text>", first)}
    assert "<dt>machine</dt>" in folded[-1]


def test_the_command_it_names_recovers_with_the_original_as_teacher(
    trained: str, swapped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = record(swapped)
    assert [line.split()[1] for line in result["next"]] == ["eval", "train", "train"]
    assert keymix(shlex.split(result["next"][0])[1:]) == 0
    capsys.readouterr()
    words = [trained, *SWAP, "--layers", "1-2", "--test", "--out", str(swapped)]
    assert main([*words, "--recover", "2"]) == 0  # the swap is done
    recovered, control = (load_run(Path(f"{swapped}-{end}")) for end in ("recovered", "control"))
    said = capsys.readouterr().out.splitlines()[-1]
    for run in (recovered, control):
        assert run.recipe.schedule.epochs == 2
        assert run.summary.last.val is not None
        assert f"{100 * run.summary.last.val['top1']:.1f} %" in said
    assert "train_distill" not in control.metrics()[0]
    assert control.recipe.model.mixer == load_run(trained).recipe.model.mixer
    assert "train_distill" in recovered.metrics()[0]
    assert recovered.recipe.model.weights == str(swapped)
    assert recovered.recipe.model.mixer == load_run(swapped).recipe.model.mixer


@pytest.mark.slow
def test_the_terminal_gets_the_layers_and_the_sentence(
    trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    words = [trained, *SWAP, "--layers", "0", "--init", "fresh", "--held-out", "8", "--out", out]
    assert main(words) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith("block\twas\tis\t")
    assert lines[1].startswith("1 (blocks.0.attn)\tsoftmax\tstatic_key")
    assert lines[-2] == record(tmp_path / "out")["answer"]
    assert lines[-1].split()[0] == "report"
    assert "In brackets: 95 % interval over 8 held-out images" in said.err
    assert f"keymix eval {out}" in said.err
    assert main(words) == 0
    again = capsys.readouterr()
    assert again.out == said.out
    assert f"'{out}' is done" in again.err
    for more in (["--layers", "1"], ["--test"]):
        with pytest.raises(UserError, match="holds a swap: name another or add --overwrite"):
            main([*words, *more])
    assert main([*words, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["held_out"] == 8


def test_a_search_writes_its_plan_if_it_pays_and_its_report_anyway(
    trained: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("keymix.swap.search.ROUNDS", 2)
    monkeypatch.setattr(Search, "verdict", property(lambda search: search_says))
    search_says = "pays"
    words = [trained, "--mixer", "identity", "--max-drop", "99", "--images", "16"]
    assert main([*words, "--out", str(tmp_path / "pays")]) == 0
    result = record(tmp_path / "pays")
    assert result["answer"] == result["search"]["answer"]
    assert result["after"] == result["search"]["judged"]
    names = [m.mixer_name for m in find_mixers(load_run(tmp_path / "pays").model()).values()]
    chosen = [i for i, name in enumerate(names) if name == "identity"]
    assert chosen == result["after"]["layers"]
    assert chosen
    with (tmp_path / "pays" / "search-steps.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["loss"]) for row in rows] == [s["loss"] for s in result["search"]["steps"]]
    assert "Every step of the search" in (tmp_path / "pays" / "report.html").read_text("utf-8")
    search_says = "nothing pays"
    capsys.readouterr()
    assert main([*words, "--out", str(tmp_path / "nothing")]) == 0
    said = capsys.readouterr().out
    assert "Nothing here pays" in said
    there = {each.name for each in (tmp_path / "nothing").iterdir()} - {".lock"}
    assert {"search.json", "search-steps.csv", "search.html"} <= there
    assert not [name for name in there if not name.startswith("search")]
    assert f"keymix swap {trained}" in (tmp_path / "nothing" / "search.html").read_text("utf-8")
    assert main([*words, "--out", str(tmp_path / "nothing"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "nothing pays"


@pytest.mark.slow
def test_a_model_by_name_brings_weights_and_teaches_itself(trained: str, tmp_path: Path) -> None:
    weights = tmp_path / "own.safetensors"
    assert (
        keymix(["train", *TRAIN, "--model", "vit_nano_p4_12", "--out", str(tmp_path / "run")]) == 0
    )
    weights.write_bytes((tmp_path / "run" / "weights_last.safetensors").read_bytes())
    out = tmp_path / "out"
    words = ["vit_nano_p4_12", "--data", "digits", "--weights", str(weights), *SWAP]
    assert main([*words, "--layers", "0", "--held-out", "16", "--out", str(out)]) == 0
    own, here = load_run(tmp_path / "run").model(), load_run(out / "original").model()
    images = torch.randn(4, 1, 12, 12)
    with torch.no_grad():
        assert torch.allclose(own(images), here(images), atol=1e-5)
    assert f"--loss.distill_teacher {out / 'original'}" in record(out)["next"][1]
    with pytest.raises(UserError, match="holds a swap: name another or add --overwrite"):
        main([*words, "--layers", "0", "--held-out", "16", "--image-size", "16", "--out", str(out)])


@pytest.mark.slow
def test_memory_of_a_tiny_model_is_not_quoted(
    trained: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("keymix.cli.swap._peaks", MEASURED)
    out = tmp_path / "out"
    assert main([trained, *SWAP, "--layers", "0", "--held-out", "8", "--out", str(out)]) == 0
    assert record(out)["peaks_mib"] is None
    assert "memory" not in (out / "report.html").read_text("utf-8").partition("</header>")[2][:5000]
    assert "Memory" not in capsys.readouterr().err


@pytest.mark.slow
def test_what_was_pushed_is_swapped_as_its_run_is(trained: str, tmp_path: Path) -> None:
    pushed, out = str(tmp_path / "pushed"), tmp_path / "out"
    assert keymix(["push", trained, "--to", pushed]) == 0
    with pytest.raises(UserError, match=r"'.*pushed' brings no images: give --data"):
        main([pushed, *SWAP, "--out", str(out)])
    words = [*SWAP, "--layers", "1", "--data", "digits", "--out", str(out)]
    assert main([pushed, *words]) == 0
    before = evaluate(out / "original", split="val")
    assert record(out)["before"]["score"] == pytest.approx(before["top1"])
    there, own = load_run(out).model(), load_run(out / "original").model()
    assert [m.mixer_name for m in find_mixers(there).values()] == [
        "softmax",
        "static_key",
        "softmax",
    ]
    images = torch.randn(4, 1, 12, 12)
    with torch.no_grad():
        assert torch.allclose(own(images), load_run(trained).model()(images), atol=1e-5)
    assert f"--loss.distill_teacher {out / 'original'}" in record(out)["next"][1]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--max-drop", "1", "--init", "fresh"], "--init fresh draws new keys"),
        (["--max-drop", "100"], "--max-drop 100"),
        (["--speed-up", "1"], r"speed_up=1\.0"),
        (["--max-drop", "1", "--mixer", "ska/ska/mhsa"], "one mixer each"),
        (["--max-drop", "1", "--held-out", "9"], "9 held-out images are too few"),
        (["--images", "5000"], "--images 5000: take 1 to .* images, as many as the train"),
        (["--images", "0"], "--images 0"),
        (["--images", "4"], "4 calibration images were given and 8 are the least"),
        (["--held-out", "5000"], "--held-out 5000: take 1 to .* as the validation split of dig"),
        (["--layers", "9"], "3 layers with attention"),
        (["--mixer", "skaa"], "skaa.*ska"),
        (["--mixer", "ska(activaton=relu)"], "activation"),
        (["--weights", "w.pth"], "--weights is of models given by name"),
        (["--estimate", "median"], "median"),
        (["--sped-up", "2"], "--speed-up"),
        (["--data", "fashion_mnistt"], "fashion_mnist"),
    ],
)
def test_a_mistake_is_one_line(trained: str, tmp_path: Path, words: list[str], match: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match=match) as refusal:
        main([trained, *SWAP, *words, "--out", str(out)])
    assert "\n" not in str(refusal.value)
    assert not (out / "swap.json").exists()


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["vit_nano_p4_12"], "brings no images: give --data"),
        (["vit_nano_p4_13"], "unknown run folder or model 'vit_nano_p4_13'.*vit_nano_p4_12"),
        (["nosuch"], "unknown run folder or model 'nosuch'"),
        (["resnet18x"], "resnet18"),
        (["nowhere/run"], "there is no .*'nowhere/run'"),
        (["vit_b_16"], "unknown run folder or model 'vit_b_16'"),
        (["vit_nano_p4_12", "--data", "digits", "--weights", "nowhere.pth"], "no such file"),
        (["vit_nano_p4_12", "--data", "digits", "--pretrained"], "no weights of its own"),
        (["vit_nano_p4_12", "--data", "digits"], "give --weights FILE, --pretrained, or the fol"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(
    tmp_path: Path, words: list[str], match: str
) -> None:
    with pytest.raises(UserError, match=match) as refusal:
        main([*words, *SWAP, "--out", str(tmp_path / "out")])
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_anything_loads(
    trained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="cannot write '/proc/"):
        main([trained, *SWAP, "--out", "/proc/nowhere/x"])
    assert "loading" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_swap_killed_while_it_writes_is_done_again(
    trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """No handler takes it."""

    def kill(self: Folder, record: dict[str, Any]) -> None:
        raise Killed

    words = [trained, *SWAP, "--layers", "1", "--held-out", "8", "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "finish", kill)
        with pytest.raises(Killed):
            main(words)
    assert (tmp_path / "out" / "weights_last.safetensors").exists()
    assert main(words) == 0
    assert "in block 2 with" in record(tmp_path / "out")["answer"]


def test_a_folder_of_other_things_is_refused(trained: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    for out, match in ((tmp_path, "holds no swap"), (tmp_path / "notes.txt", "is a file")):
        with pytest.raises(UserError, match=match):
            main([trained, *SWAP, "--overwrite", "--out", str(out)])
    with pytest.raises(UserError, match="holds no swap"):
        main([trained, *SWAP, "--overwrite", "--out", trained])
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"

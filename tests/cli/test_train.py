# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from keymix.cli import main
from keymix.train.recipe import paths

SMALL = ["--limit", "80", "--epochs", "1", "--data.batch_size", "32", "--schedule.warmup_epochs=0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "digits_vit", *SMALL, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(3):
        Image.new("L", (12, 12), 60 * i).save(folder / f"{i}.png")
    return folder


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--optim.lrr", "1"], ["--optim.lr"]),
        (["--optim.lr"], ["--optim.lr", "needs a value"]),
        (["--optim.lr", "fast"], ["--optim.lr", "fast"]),
        (["--optim.lr", "nan"], ["--optim.lr", "'nan'", "a finite number"]),
        (["--data.image_size", "32,"], ["--data.image_size = '32,': expected a whole number or 2"]),
        (["--data.image_size", "a"], ["--data.image_size = 'a': expected a whole number or 2"]),
        (["--data.image_size", "3,4,5"], ["--data.image_size = '3,4,5'", "a comma between"]),
        (["--data.image_size", "0"], ["data.image_size = 0", "height,width"]),
        (["--model.options.depth", "[2"], ["--model.options.depth = '[2'", "YAML"]),
        (["--epochs", "0"], ["schedule.epochs"]),
        (["--mixer", "skaa"], ["skaa", "ska"]),
        (["--model", "vit_nano_p4_13"], ["vit_nano_p4_12"]),
        (["--model.options.num_heads", "5"], ["num_heads"]),
        (["--model.options.dept", "5"], ["dept"]),
        (["--data", "digit"], ["digits"]),
        (["--schedule.name", "cosin"], ["cosine"]),
        (["--optim.name", "adamww"], ["adamw"]),
        (["--augment.rand_augment", "2"], ["rand_augment"]),
        (["--precision", "16"], ["precision", "bf16"]),
        (["--overwrite=yes"], ["--overwrite"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
        (["--import", "nowhere.py"], ["nowhere.py"]),
        (["another"], ["another"]),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(
    words: list[str], names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", "digits_vit", "--out", str(out), *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("keymix: error: ")
    assert said.err.count("\n") == 1
    assert all(name in said.err for name in names), said.err
    assert not out.exists()


def test_recipe_is_asked_for_and_near_ones_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert "digits_vit" in capsys.readouterr().err
    assert main(["train", "digit_vit"]) == 2
    assert "digits_vit" in capsys.readouterr().err


def test_data_without_a_path_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "small_images_vit", "--out", str(tmp_path / "run")]) == 2
    assert "parquet:PATH" in capsys.readouterr().err


def test_help_shows_every_field_and_the_recipes_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "small_images_vit", "--help-all"]) == 0
    text = capsys.readouterr().out
    for option in (*(f"--{path}" for path in paths()), "--mixer", "--out DIR"):
        assert option in text
    assert "[vit_micro_conv_p4_32]" in text
    assert main(["train", "-h"]) == 0
    text = capsys.readouterr().out
    assert "--augment.erasing" not in text
    assert "[vit_nano_p4_12]" in text  # of the recipe that is taken where none is named


def test_printed_config_is_the_recipe_and_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--optim.betas", "0.9,0.95", "--model.options.depth", "2", "--mixer", "ska"]
    words += ["--data.image_size", "12,16"]
    assert main(["train", "digits_vit", *words, "--print-config"]) == 0
    printed = capsys.readouterr().out
    values = yaml.safe_load(printed)
    assert values["optim"]["betas"] == [0.9, 0.95]
    assert values["model"]["options"]["depth"] == 2
    assert values["data"]["image_size"] == [12, 16]
    (tmp_path / "mine.yaml").write_text(printed)
    assert main(["train", str(tmp_path / "mine.yaml"), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


def test_config_overrides_the_recipe_and_options_override_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("optim:\n  lr: 1e-2\n  weight_decay: 0.3\n")
    words = ["--config", str(tmp_path / "c.yaml"), "--optim.weight_decay", "0.2"]
    assert main(["train", "digits_vit", *words, "--print-config"]) == 0
    optim = yaml.safe_load(capsys.readouterr().out)["optim"]
    assert (optim["lr"], optim["weight_decay"]) == (0.01, 0.2)
    (tmp_path / "c.yaml").write_text("optim:\n  lrr: 1e-2\n")
    assert main(["train", "digits_vit", *words, "--print-config"]) == 2
    assert "optim.lr" in capsys.readouterr().err


def test_training_reports_epochs_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", "digits_vit", *SMALL, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "epoch 1/1" in said.err
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[0][:4] == ["weights", "epoch", "val", "loss"]
    assert [line[0] for line in lines[1:]] == ["last", "best"]


def test_done_run_is_printed_again_as_json(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(trained), "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert stored["status"] == "done"
    assert stored["folder"] == str(trained)


def test_a_runs_recipe_file_runs_again(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(trained / "recipe.json"), "--out", str(tmp_path / "again"), "--json"]
    assert main(words) == 0
    again = json.loads(capsys.readouterr().out)
    first = json.loads((trained / "summary.json").read_text())
    assert again["last"] == first["last"]


@pytest.mark.parametrize("way", ["option", "yaml", "recipe.json"])
def test_a_recipes_name_leaves_no_folder(
    way: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    words = ["digits_vit", "--name", "../../../x"]
    if way != "option":
        values = json.loads((trained / "recipe.json").read_text("utf-8")) | {"name": "../../../x"}
        file = place / ("mine.yaml" if way == "yaml" else "recipe.json")
        file.write_text(json.dumps(values), "utf-8")
        words = [str(file)]
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", *words, *SMALL]) == 2
    assert "name = '../../../x'" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_folder_of_another_run_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "digits_vit", *SMALL, "--seed", "5", "--out", str(trained)]) == 2
    assert "seed is 0 there, 5 here" in capsys.readouterr().err


def test_eval_repeats_the_runs_test(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(trained), "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    summary = json.loads((trained / "summary.json").read_text())
    assert stored["top1"] == summary["last"]["test"]["top1"]
    assert main(["eval", str(trained), "--weights", "best"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["digits", "test", "best"]


def test_eval_warns_of_images_that_changed_since(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for k, name in enumerate(("cat", "dog")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(12):
            image = Image.new("RGB", (8, 8), (100 * k, 10 * i, 50))
            image.save(tmp_path / "photos" / name / f"{i:02d}.png")
    data, out = f"folder:{tmp_path / 'photos'}", str(tmp_path / "run")
    small = ["--data.image_size", "8", "--model.options.depth", "1", "--epochs", "1"]
    assert main(["train", "small_images_vit", "--data", data, *small, "--out", out]) == 0
    assert main(["eval", out]) == 0
    assert "are not those" not in capsys.readouterr().err
    Image.new("RGB", (8, 8), "white").save(tmp_path / "photos" / "cat" / "new.png")
    assert main(["eval", out]) == 0
    assert "the images of data folder:" in (said := capsys.readouterr().err)
    assert said.count("\n") == 1
    assert main(["eval", out, "--split", "train", "--data", data]) == 0
    assert "may have been trained on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["eval", "nowhere"], "nowhere"),
        (["eval"], "RUN"),
        (["eval", "RUN", "--weihgts", "best"], "--weights"),
        (["eval", "RUN", "--weights", "worst"], "best"),
        (["eval", "RUN", "--data", "digitz"], "digits"),
        (["predict", "RUN"], "IMAGE"),
        (["predict", "RUN", "gone.png"], "gone.png"),
        (["predict", "RUN", ""], "path is empty"),
        (["predict", "RUN", "IMAGES", "--top", "0"], "top"),
    ],
)
def test_eval_and_predict_answer_mistakes_in_one_line(
    words: list[str],
    name: str,
    trained: Path,
    pictures: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"RUN": str(trained), "IMAGES": str(pictures)}
    assert main([given.get(word, word) for word in words]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert name in said.err


def test_predict_writes_csv_and_json(
    trained: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", str(trained), str(pictures), "--top", "2"]
    assert main([*words, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["rank"] for row in rows] == ["1", "2"] * 3
    target = tmp_path / "p.json"
    assert main([*words, "--format", "json", "--out", str(target)]) == 0
    assert len(json.loads(target.read_text())) == 3


def test_predict_names_the_broken_image_and_answers_the_others(
    trained: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not an image")
    assert main(["predict", str(trained), str(broken), str(pictures)]) == 2
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 1 + 3
    assert "broken.png" in said.err
    assert said.err.count("\n") == 1


def test_users_own_mixer_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from torch import Tensor\n"
        "from keymix.mixers.base import TokenMixer, Traits\n"
        "from keymix.mixers.registry import register_mixer\n\n\n"
        '@register_mixer("halving_for_a_test")\n'
        "class Halving(TokenMixer):\n"
        '    """x / 2."""\n\n'
        '    traits = Traits(domain="dense", mixes_prefix=False)\n\n'
        "    def forward(self, x: Tensor, grid=None, bias=None) -> Tensor:\n"
        "        return x / 2\n"
    )
    out = tmp_path / "run"
    words = ["train", "digits_vit", *SMALL, "--mixer", "halving_for_a_test", "--out", str(out)]
    assert main([*words, "--import", str(mine), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mixer"] == "halving_for_a_test"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP displays its settings")
def test_pytorch_begins_with_threads_that_wait_without_spinning() -> None:
    """OpenMP reads its settings once, when PyTorch loads it."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-m", "keymix", "count", "vit_nano_p2_12"],
        env=environment | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '0'" in done.stderr

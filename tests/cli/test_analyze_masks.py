# SPDX-License-Identifier: Apache-2.0
"""Analyses of runs on masks: images stretched as in training, slices scaled, stacks shown."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from keymix.cli import main
from keymix.data.augment import Augment
from keymix.data.pixels import picture
from keymix.studies.inputs import load_images, load_models
from keymix.train.engine import train
from keymix.train.recipe import DataConfig, ModelConfig, Recipe, ScheduleConfig
from keymix.train.runs import Run
from made_masks import write_uwgi


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of an epoch on stacks of three slices."""
    scans = write_uwgi(tmp_path_factory.mktemp("uwgi"))
    recipe = Recipe(
        name="masks",
        data=DataConfig(
            spec=f"uwgi:{scans}", image_size=16, stack=3, val_fraction=0.2, test_fraction=0.3
        ),
        augment=Augment(),
        model=ModelConfig(
            name="setr_micro", options={"depth": 2, "embed_dim": 24, "decoder_widths": (16, 8, 8)}
        ),
        schedule=ScheduleConfig(epochs=1),
    )
    return train(recipe, tmp_path_factory.mktemp("runs") / "run")


def test_a_run_is_shown_the_images_of_its_test_split_as_it_was_tested_on(run: Run) -> None:
    from keymix.train.model import load_data

    (loaded,) = load_models([str(run.folder)])
    images = load_images(loaded, None, limit=None)
    test = load_data(run.recipe.data).test
    assert len(images) == len(test)
    assert images.names == tuple(test.ids(i) for i in range(len(test)))
    assert all(torch.equal(images.pixels(i), test.read(i)) for i in range(len(test)))
    shown = picture(images.pixels(0), images.kind)
    assert torch.equal(shown, test.read(0)[1:2])  # the middle slice, in grey
    assert torch.equal(shown, test.picture(0))


def test_a_file_is_read_with_its_neighbours_as_the_data_reads_it(run: Run) -> None:
    from keymix.train.model import load_data

    test = load_data(run.recipe.data).test
    name = test.rows[0].name
    case, day, _, number = name.split("_")
    folder = Path(run.recipe.data.spec.partition(":")[2]) / "train" / case / f"{case}_{day}"
    (file,) = folder.glob(f"scans/slice_{number}_*.png")
    (loaded,) = load_models([str(run.folder)])
    images = load_images(loaded, [str(file)], limit=None)
    assert torch.equal(images.pixels(0), test.read(0))


@pytest.mark.parametrize("verb", ["attention", "collapse"])
def test_attention_and_collapse_look_at_a_run_on_masks(
    verb: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = ["--limit", "2"] if verb == "attention" else ["--batch-size", "2"]
    assert main(["analyze", verb, str(run.folder), "--out", str(tmp_path / "out"), *limit]) == 0
    assert (tmp_path / "out" / f"{verb}.html").exists()
    if verb == "attention":
        with np.load(tmp_path / "out" / "attention-maps.npz") as arrays:
            assert any(array.shape[0] == 2 for array in arrays.values())
    else:
        record = json.loads((tmp_path / "out" / "collapse.json").read_text())
        assert record["studies"][0]["origin"].startswith("test images of uwgi:")


def test_a_run_on_masks_is_not_swapped_on_the_command_line(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "swapped"
    assert main(["swap", str(run.folder), "--mixer", "ska", "--out", str(out)]) == 2
    assert "predicts masks, and a swap is calibrated and judged on classes" in (
        capsys.readouterr().err
    )
    assert not out.exists()


def test_eval_reports_each_class(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run.folder), "--split", "train"]) == 0
    text = capsys.readouterr()
    for word in ("IoU %", "HD95 mm", "in one alone", "large_bowel", "stomach", "all"):
        assert word in text.out
    assert main(["eval", str(run.folder), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["jaccard"] == run.summary.last.test.scores["jaccard"]

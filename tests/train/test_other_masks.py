# SPDX-License-Identifier: Apache-2.0
"""A run on masks, asked about other data than its own: what is taken over, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from keymix.errors import UserError
from keymix.studies.inputs import load_images, load_models
from keymix.tasks.segmentation.predict_masks import predict_masks
from keymix.train.evaluation import data_for
from keymix.train.runs import Run, evaluate
from made_masks import ORGANS, write_uwgi
from written_masks_run import written_masks_run

LEAVES = ("leaf", "root")


def write_masks(
    folder: Path, *, several: bool, classes: Sequence[str] = LEAVES, splits: Sequence[str] = ("",)
) -> str:
    """Write ``masks:PATH``, five images per split, a class per pixel or each class for itself."""
    rng = np.random.default_rng(0)
    for split in splits:
        (folder / split / "images").mkdir(parents=True)
        for k in range(5):
            image = rng.integers(0, 256, (24, 24), dtype=np.uint8)
            Image.fromarray(image).save(folder / split / "images" / f"p{k}.png")
            for name in classes if several else ("",):
                (folder / split / "masks" / name).mkdir(parents=True, exist_ok=True)
                mask = rng.integers(0, 2, (24, 24), dtype=np.uint8)
                Image.fromarray(mask).save(folder / split / "masks" / name / f"p{k}.png")
    (folder / "classes.txt").write_text("\n".join(classes))
    return f"masks:{folder}"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Run]:
    """Runs of the same classes: on exclusive masks, and on masks of several classes a pixel."""
    folder = tmp_path_factory.mktemp("kinds")
    return {
        several: written_masks_run(
            folder / f"run-{several}",
            write_masks(folder / f"set-{several}", several=several),
            test_fraction=0.4,
        )
        for several in (False, True)
    }


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on stacks of three slices, half of whose cases are test."""
    folder = tmp_path_factory.mktemp("stacked")
    spec = f"uwgi:{write_uwgi(folder / 'uwgi')}"
    return written_masks_run(folder / "run", spec, stack=3, test_fraction=0.5, masks="multilabel")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "has", "was", "layout"),
    [
        (False, "multilabel", "exclusive", "masks/<name>.png"),
        (True, "exclusive", "multilabel", "masks/<class>/<name>.png"),
    ],
)
def test_masks_of_another_kind_are_refused_though_the_classes_are_the_same(
    trained: bool, has: str, was: str, layout: str, kinds: dict[bool, Run], tmp_path: Path
) -> None:
    run, other = kinds[trained], kinds[not trained].recipe.data.spec
    wanted = f"has {has} masks; the run was trained on {was} ones. Arrange them as {layout}, or"
    with pytest.raises(UserError, match=wanted):
        evaluate(run, other)
    with pytest.raises(UserError, match=wanted):
        predict_masks(run, data=other, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_classes_in_another_order_are_refused(kinds: dict[bool, Run], tmp_path: Path) -> None:
    for several, run in kinds.items():
        turned = write_masks(tmp_path / str(several), several=several, classes=LEAVES[::-1])
        with pytest.raises(UserError, match=r"classes root, leaf; .* leaf, root, in this order"):
            evaluate(run, turned)


@pytest.mark.slow
def test_the_share_of_test_is_the_own_datas_alone(kinds: dict[bool, Run], tmp_path: Path) -> None:
    splits = ("train", "val", "test")
    for several, run in kinds.items():
        other = write_masks(tmp_path / str(several), several=several, splits=splits)
        assert evaluate(run, other)["images"] == 5
        assert evaluate(run)["images"] == 2
        (loaded,) = load_models([str(run.folder)])
        assert len(load_images(loaded, [other], limit=None)) == 5
        assert len(load_images(loaded, [run.recipe.data.spec], limit=None)) == 2


def test_other_scans_are_read_as_the_runs(stacked: Run, tmp_path: Path) -> None:
    other = f"uwgi:{write_uwgi(tmp_path, cases=4)}"
    seen = stacked.model_and_data()[1]
    data = data_for(stacked.recipe.data, seen, other, (24, 24))
    assert (data.classes, data.in_chans) == (ORGANS, 3)
    assert len(data.test) == 3  # one case of four, not two
    (loaded,) = load_models([str(stacked.folder)])
    images = load_images(loaded, [other], limit=None)
    assert len(images) == 3
    assert torch.equal(images.pixels(0), data.test.read(0))

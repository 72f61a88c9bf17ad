# SPDX-License-Identifier: Apache-2.0
"""Images with masks as analyses read them: by name of a model, other data, stacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keymix.analysis.images import View
from keymix.data import load
from keymix.data.pixels import picture
from keymix.studies.inputs import Loaded, load_images, load_models
from keymix.train.recipe import DataConfig, ModelConfig, Recipe
from keymix.train.runs import Run
from made_masks import write_uwgi


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_uwgi(tmp_path_factory.mktemp("uwgi"), cases=6, slices=4)


def loaded_run(data: DataConfig, channels: int) -> Loaded:
    """Return a model and the run that it would be of; no weights are looked at."""
    view = View(
        size=(24, 24),
        in_chans=channels,
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
        crop_pct=1.0,
    )
    recipe = Recipe(name="masks", data=data, model=ModelConfig(name="setr_micro"))
    return Loaded(
        label="run",
        name="run",
        model=torch.nn.Identity(),
        weights="none",
        view=view,
        run=Run(Path("run"), recipe),
    )


def test_a_model_by_name_is_shown_grey_slices_in_its_three_channels(scans: Path) -> None:
    (loaded,) = load_models(["setr_micro"])
    images = load_images(loaded, [f"uwgi:{scans}"], limit=1)
    pixels = images.pixels(0)
    assert pixels.shape == (3, 96, 96)
    assert all(torch.equal(plane, pixels[0]) for plane in pixels)


def test_other_channels_than_a_models_are_refused(scans: Path) -> None:
    from keymix.errors import UserError

    one = loaded_run(DataConfig(spec=f"uwgi:{scans}", stack=3), channels=5)
    images = load_images(one, None, limit=None)
    with pytest.raises(UserError, match="3 channels; the model takes 5"):
        images.pixels(0)


def test_of_a_stack_the_middle_slice_is_looked_at(scans: Path) -> None:
    one = loaded_run(DataConfig(spec=f"uwgi:{scans}", stack=3, image_size=24), channels=3)
    images = load_images(one, None, limit=None)
    second = next(i for i, name in enumerate(images.names) if "slice_0002" in name)
    pixels = images.pixels(second)
    assert not torch.equal(pixels[0], pixels[1])  # its neighbour is another picture
    assert torch.equal(picture(pixels, images.kind), pixels[1:2])


def test_other_data_is_not_cut_to_the_runs_limit(scans: Path, tmp_path: Path) -> None:
    other = write_uwgi(tmp_path / "other", cases=5)
    data = DataConfig(spec=f"uwgi:{scans}", limit=2, image_size=24)
    one = loaded_run(data, channels=1)
    own = load_images(one, None, limit=None)
    theirs = load_images(one, [f"uwgi:{other}"], limit=None)
    cut = load(f"uwgi:{scans}", image_size=24, limit=2)
    whole = load(f"uwgi:{other}", image_size=24)
    assert len(own) == len(cut.test) == 2
    assert len(theirs) == len(whole.test) > 2

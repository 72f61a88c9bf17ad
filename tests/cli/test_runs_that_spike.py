# SPDX-License-Identifier: Apache-2.0
"""Analyses of attention maps, given spiking networks: they name the analysis of spikes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from keymix.analysis.counting import default_input_size
from keymix.cli import analyze
from keymix.errors import UserError
from keymix.models import create_model
from keymix.recipes.small import digits_vit
from keymix.swap.images import input_size
from keymix.train import files
from keymix.train.model import build_model, load_data
from keymix.train.recipe import DataConfig, ModelConfig, Recipe
from keymix.train.record import WeightsFacts

SMALL = {"embed_dim": 16, "depths": [1, 1], "num_heads": 2, "time_steps": 2, "mixer": "qk_token"}


def written(folder: Path, recipe: Recipe) -> str:
    data = load_data(recipe.data)
    torch.manual_seed(0)
    model = build_model(
        recipe,
        num_classes=10,
        in_chans=data.in_chans,
        image_size=data.image_size,
        time_steps=data.time_steps,
    )
    files.make_folder(folder)
    files.write_json(folder / files.RECIPE, recipe.to_dict())
    facts = WeightsFacts(recipe=recipe, data=data.record())
    files.write_weights(folder / files.weights_file("last"), model.state_dict(), facts)
    return str(folder)


@pytest.fixture(scope="module")
def on_images(tmp_path_factory: pytest.TempPathFactory) -> str:
    one = digits_vit()
    model = replace(one.model, name="qkformer_hst_4_384", mixer=None, options=SMALL)
    one = replace(one, data=replace(one.data, limit=40), model=model)
    return written(tmp_path_factory.mktemp("runs") / "images", one)


@pytest.fixture(scope="module")
def on_frames(tmp_path_factory: pytest.TempPathFactory) -> str:
    data = DataConfig(spec="moving_digits:100", time_steps=2, frames_by="time", image_size=16)
    one = Recipe(name="moving", data=data, model=ModelConfig(name="qkformer_micro_32"))
    return written(tmp_path_factory.mktemp("runs") / "frames", one)


def test_attention_names_the_analysis_of_spikes(on_images: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        analyze.main(["attention", on_images, "--out", str(tmp_path / "out")])
    message = str(raised.value)
    assert "forms no attention map" in message
    assert message.endswith(f"`keymix analyze spikes {on_images}` shows its spikes")
    assert "\n" not in message
    assert not (tmp_path / "out").exists()


def test_a_run_on_frames_is_refused_by_name(on_frames: str, tmp_path: Path) -> None:
    for name, more in (("attention", ["--out", str(tmp_path / "out")]), ("collapse", [])):
        with pytest.raises(UserError) as raised:
            analyze.main([name, on_frames, *more])
        assert str(raised.value) == (
            f"{on_frames!r} is a run on recordings of events, and this works on images alone; "
            f"`keymix analyze spikes {on_frames}` shows its spikes"
        )


def test_collapse_ends_in_the_analysis_of_spikes(
    on_images: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze.main(["collapse", on_images, "--limit", "2"]) == 0
    text = capsys.readouterr().err
    assert f"images: spikes form no attention map; `keymix analyze spikes {on_images}`" in text


@pytest.mark.parametrize("name", ["qkformer_micro_32", "cvt_micro_32"])
def test_models_that_embed_in_stages_report_their_channels(name: str) -> None:
    model = create_model(name, in_chans=2)
    assert default_input_size(model) == input_size(model) == (2, 32, 32)

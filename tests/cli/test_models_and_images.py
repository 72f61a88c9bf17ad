# SPDX-License-Identifier: Apache-2.0
"""Models and images of the analyses: runs and names, files, folders and data specs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from written_run import written_run

from keymix import data
from keymix.analysis.images import View
from keymix.errors import UserError
from keymix.models import create_model
from keymix.studies.inputs import (
    RANDOM,
    load_images,
    load_models,
    one_size,
    warn_of_random,
)

NAME = "vit_nano_p2_12"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_run(tmp_path_factory.mktemp("runs") / "little")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(6):
        pixels = rng.integers(0, 256, (17, 23, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


def test_a_run_is_shown_its_own_test_images_as_in_evaluation(run: Path) -> None:
    (one,) = load_models([str(run)])
    assert (one.label, one.view.size, one.run is None) == ("little", (12, 12), False)
    images = load_images(one, None, limit=None)
    own = data.load("digits", image_size=12, limit=40)
    loader = data.Loader(own.test, own, batch_size=64, train=False, workers=0, device="cpu")
    wanted = torch.cat([batch.images for batch in loader])
    shown = torch.cat(list(images.batches(7)))
    assert len(shown) == len(images) == len(own.test)
    torch.testing.assert_close(shown, wanted)
    assert images.names[3] == own.test.ids(3)
    assert one.model(shown[:2]).shape == (2, 10)
    assert not one.model.training


def test_images_are_taken_evenly(run: Path, photos: Path) -> None:
    (one,) = load_models([str(run)])
    images = load_images(one, [str(photos)], limit=3)
    assert [Path(name).name for name in images.names] == ["0.png", "2.png", "4.png"]
    assert len(load_images(one, ["digits"], limit=5)) == 5
    assert len(load_images(one, [str(photos), str(photos / "1.png")], limit=None)) == 7
    with pytest.raises(UserError, match="path is empty"):
        load_images(one, [""], limit=None)


@pytest.mark.parametrize(("name", "value"), [("crop_pct", 1.5), ("mean", (0.5, 0.5))])
def test_a_model_whose_images_cannot_be_shown_is_refused(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create_model("vit_micro_p4_32")
    made.pretrained_cfg = {**made.pretrained_cfg, name: value}
    monkeypatch.setattr("keymix.models.factory.create_model", lambda *_, **__: made)
    with pytest.raises(UserError, match=name):
        load_models(["vit_micro_p4_32"])


def test_pictures_are_resized_cropped_and_normalised_for_the_model(photos: Path) -> None:
    (one,) = load_models(["vit_micro_p4_32"])
    images = load_images(one, [str(photos / "1.png")], limit=4)
    pixels = images.pixels(0)
    assert pixels.dtype == torch.uint8
    assert torch.equal(pixels, data.read_image(photos / "1.png", 32, 3, crop_pct=one.view.crop_pct))
    view = View(size=(32, 32), in_chans=3, mean=(0.5, 0.25, 0.0), std=(0.5, 1, 2), crop_pct=1.0)
    shown = view.normalised(pixels)
    torch.testing.assert_close(shown[1], pixels[1].float() / 255 - 0.25)
    torch.testing.assert_close(shown[2], pixels[2].float() / 510)


def test_a_damaged_image_is_named_and_left_out(photos: Path) -> None:
    (one,) = load_models([NAME])
    (photos / "2.png").write_bytes(b"not a png")
    images = load_images(one, [str(photos)], limit=None)
    assert [len(batch) for batch in images.batches(4)] == [4, 1]
    assert [Path(name).name for name in images.left_out] == ["2.png"]
    assert "2.png" in next(iter(images.left_out.values()))
    with pytest.raises(UserError, match=r"2\.png"):
        images.pixels(2)
    alone = load_images(one, [str(photos / "2.png")], limit=None)
    with pytest.raises(UserError, match=r"no image of .* can be read: .*2\.png"):
        list(alone.batches(4))


@pytest.mark.slow
def test_random_weights_are_reported_and_the_same_each_time(run: Path) -> None:
    said: list[str] = []
    models = load_models([NAME, str(run)])
    warn_of_random(models, said.append)
    assert [one.weights == RANDOM for one in models] == [True, False]
    assert len(said) == 1
    assert f"{NAME} has random weights" in said[0]
    again = load_models([NAME])[0].model.state_dict()
    assert all(torch.equal(t, again[name]) for name, t in models[0].model.state_dict().items())


def test_labels_distinguish_models(run: Path) -> None:
    other = run.parent / "deeper"
    other.mkdir(exist_ok=True)
    link = other / "little"
    if not link.exists():
        link.symlink_to(run)
    models = load_models([str(run), NAME, f"{run}/"])
    assert models[1].label == NAME
    assert models[0].label != models[2].label


def test_images_of_unequal_sizes_are_filled_up_with_their_mean() -> None:
    images = [torch.full((3, 2, 4), 9, dtype=torch.uint8), torch.full((3, 3, 2), 7).byte()]
    found = one_size(images, (0.2, 0.4, 0.6))
    assert found.shape == (2, 3, 3, 4)
    assert found.dtype == torch.uint8
    assert found[0, :, :2].eq(9).all()
    assert found[1, :, :, :2].eq(7).all()
    assert found[0, :, 2, 0].tolist() == found[1, :, 0, 3].tolist() == [51, 102, 153]
    assert one_size([torch.ones(3, 2, 2), torch.ones(3, 2, 3)])[0, :, :, 2].eq(0).all()

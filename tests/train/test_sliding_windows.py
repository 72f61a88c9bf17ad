# SPDX-License-Identifier: Apache-2.0
"""Images at their own size: random crops in training, sliding windows in evaluation."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import keymix
from keymix.analysis import overlap
from keymix.data import load
from keymix.data.augment import Augment
from keymix.data.loaders import Loader
from keymix.data.mask_augment import RARE, window_corner
from keymix.errors import KeymixWarning, UserError
from keymix.tasks.segmentation.windows import SlidingWindows
from keymix.train.engine import train
from keymix.train.recipe import Recipe, replace_path
from keymix.train.scoring import Flips, Mirrored

BLACK = (-0.5, -1.0, -2.0)


def windows(model: nn.Module, size: tuple[int, int] = (16, 24)) -> SlidingWindows:
    return SlidingWindows(model.eval(), size=size, overlap=0.5, black=BLACK)


@pytest.mark.parametrize("own", [(16, 24), (40, 61), (17, 24), (90, 25)])
def test_windows_of_a_model_of_single_pixels_are_the_whole_image(own: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 1).double()
    image = torch.randn(3, *own, dtype=torch.float64)
    (found,) = windows(model)([image])
    torch.testing.assert_close(found, model(image[None])[0], rtol=0, atol=1e-6)


def test_an_image_of_one_window_is_answered_by_the_model_itself() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3, padding=1)
    image = torch.randn(3, 16, 24)
    assert torch.equal(windows(model)([image])[0], model(image[None])[0])


def test_small_images_are_padded_with_black() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 5, padding=2).double()
    image = torch.randn(3, 11, 20, dtype=torch.float64)
    whole = torch.tensor(BLACK, dtype=torch.float64)[:, None, None].repeat(1, 16, 24)
    whole[:, :11, :20] = image
    with pytest.warns(KeymixWarning, match="smaller than a window of 16x24 pixels"):
        (found,) = windows(model)([image])
    assert found.shape == (4, 11, 20)
    torch.testing.assert_close(found, model(whole[None])[0, :, :11, :20], rtol=0, atol=1e-12)


class Middle(nn.Module):
    """Answers a window's middle with 1 and its border with 0."""

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.ones(len(x), 1, x.shape[-2] - 8, x.shape[-1] - 8)
        return F.pad(inside, (4, 4, 4, 4))


def test_where_windows_overlap_their_middle_weighs_most() -> None:
    (found,) = SlidingWindows(Middle(), size=(16, 16), overlap=0.5, black=(0,))(
        [torch.zeros(1, 16, 24)]
    )
    assert found[0, 8, 8] > 0.99  # in the middle of the first window, on the edge of the second
    assert 0.9 < found[0, 8, 13] < 0.99  # near the middle of the second
    assert found[0, 0].max() == 0


def test_without_monai_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "monai.inferers.utils", None)
    with pytest.raises(UserError, match=r"keymix\[medical\]"):
        windows(nn.Identity())


@pytest.mark.parametrize(("flips", "axes"), [("horizontal", (-1,)), ("both", (-2, -1))])
def test_mirror_images_have_mirrored_logits(flips: Flips, axes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, image = nn.Conv2d(3, 4, 3, padding=1).double(), torch.randn(2, 3, 9, 7).double()
    mirrored = Mirrored(model, flips)
    found = mirrored(image)
    for axis in axes:
        torch.testing.assert_close(mirrored(image.flip(axis)).flip(axis), found)
    assert (mirrored(image.flip(-2)).flip(-2) - found).abs().max() > 0.01 or flips == "both"
    with torch.no_grad():
        for axis in axes:
            model.weight += model.weight.flip(axis).clone()
    torch.testing.assert_close(mirrored(image), model(image))


@pytest.mark.parametrize("planes", [False, True])
def test_a_third_of_the_crops_holds_a_class_drawn_at_random(planes: bool) -> None:
    mask = np.zeros((60, 90), dtype=np.uint8)
    mask[:30], mask[50, 80], mask[0, 0] = 1, 2, 255
    given = torch.from_numpy(np.stack([mask == 1, mask == 2]).astype(np.uint8) if planes else mask)
    corners = [window_corner(i, given, (10, 12), 0, seed=1, epoch=2) for i in range(2000)]
    rare = sum(41 <= y <= 50 and 69 <= x <= 80 for y, x in corners) / 2000
    by_chance = 10 * 10 / (51 * 79)  # of the corners that are inside
    assert RARE / 2 < rare < RARE / 2 + by_chance + 0.03
    assert all(0 <= y <= 50 and 0 <= x <= 78 for y, x in corners)
    assert corners == [window_corner(i, given, (10, 12), 0, seed=1, epoch=2) for i in range(2000)]
    assert corners != [window_corner(i, given, (10, 12), 0, seed=1, epoch=3) for i in range(2000)]


def test_a_crop_larger_than_an_image_holds_all_of_it() -> None:
    mask = torch.zeros(10, 90, dtype=torch.uint8)
    corners = [window_corner(i, mask, (16, 12), 0, seed=0, epoch=0) for i in range(200)]
    assert {y for y, _ in corners} == set(range(-6, 1))
    assert all(0 <= x <= 78 for _, x in corners)


def street(folder: Path) -> str:
    """Write images of several sizes whose masks are what is bright in them."""
    random = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for i in range(12):
        height, width = 30 + 7 * (i % 4), 44 + 5 * (i % 3)
        mask = np.zeros((height, width), dtype=np.uint8)
        top, left = random.integers(0, 20), random.integers(0, 30)
        mask[top : top + 9, left : left + 12] = 1
        mask[top : top + 4, left : left + 12] = 2
        pixels = (90 * mask[..., None] + random.integers(0, 30, (height, width, 3))).clip(0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{i:02d}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{i:02d}.png")
    (folder / "classes.txt").write_text("background\ncar\nbus\n")
    return f"masks:{folder}"


def test_image_and_mask_are_cut_alike_and_seen_whole_in_evaluation(tmp_path: Path) -> None:
    data = load(street(tmp_path), image_size=(16, 24), window_overlap=0.5, test_fraction=0.25)
    augment = Augment(flip=True)
    loader = Loader(data.train, data, batch_size=3, train=True, augment=augment, seed=0)
    for batch in loader:
        assert batch.images.shape[1:] == (3, 16, 24)
        bright = (batch.images * data.std[0] + data.mean[0])[:, 0] * 255
        assert torch.equal(bright.round().long() >= 90, batch.targets > 0)
    for batch in Loader(data.test, data, batch_size=2, train=False):
        for i, image, mask in zip(batch.index.tolist(), batch.images, batch.targets, strict=True):
            assert image.shape[-2:] == mask.shape == data.test.size(i)
    assert data.test.read(0).shape[-2:] == data.test.mask(0).shape == (16, 24)


def test_windows_need_a_size_and_masks(tmp_path: Path) -> None:
    spec = street(tmp_path)
    with pytest.raises(UserError, match=r"data\.image_size"):
        load(spec, window_overlap=0.5)
    with pytest.raises(UserError, match="window_overlap"):
        load("digits", image_size=8, window_overlap=0.5)


@pytest.mark.slow
def test_scores_and_predictions_are_at_the_images_own_size(
    vary: Callable[[dict[str, Any]], Recipe], tmp_path: Path
) -> None:
    recipe = vary(
        {
            "data.spec": street(tmp_path / "street"),
            "data.image_size": (16, 24),
            "data.limit": None,
            "data.test_fraction": 0.25,
            "data.val_fraction": 0.3,
            "data.batch_size": 3,
            "augment.crop_padding": 0,
            "model.name": "setr_micro",
            "model.global_pool": None,
            "model.options": {"embed_dim": 12, "depth": 1},
            "task.options.window_overlap": 0.25,
            "schedule.epochs": 2,
        }
    )
    run = train(recipe, tmp_path / "run")
    trained = keymix.load(tmp_path / "run")
    data = load(recipe.data.spec, test_fraction=0.25, val_fraction=0.3)
    counts = []
    for row in data.test.rows:
        true = row.read_target().numpy()
        mask = trained.predict(row.id).mask
        assert mask.shape == true.shape
        counts += [*overlap.overlap_counts(mask[None], true[None], num_classes=3, multilabel=False)]
    pooled = np.sum(counts, axis=0)
    assert pooled[1:, 2].all()
    test = run.summary.last.test.scores
    assert test["jaccard"] == pytest.approx(float(overlap.mean_jaccard(pooled, [1, 2])), rel=1e-12)
    again = keymix.evaluate(tmp_path / "run", split="test")
    assert again["jaccard"] == test["jaccard"]
    other = replace_path(recipe, {"task.options.window_overlap": None})
    assert train(other, tmp_path / "resized").summary.last.test.scores != test
    result = keymix.compare(
        data=recipe.data.spec,
        start=tmp_path / "run",
        mixers=["mhsa", "ska"],
        seeds=1,
        epochs=1,
        controls=False,
        reference=False,
        overrides={"task.options.window_overlap": 0.25, "data.test_fraction": 0.25},
        out=tmp_path / "from",
    )
    assert {*result.scores.mixer} == {"softmax", "static_key"}
    gallery = result.pictures.galleries["masks"]
    with np.load(tmp_path / "from/runs/static_key/seed0/predictions_test.npz") as stored:
        found = dict(zip(stored["index"].tolist(), stored["last_counts"], strict=True))
    for scene in gallery.scenes:  # whole, and as it is scored
        i = (gallery.names or ()).index(scene.name)
        assert tuple(scene.size) == data.test.size(i)
        (panel,) = (each for each in scene.panels if "static_key" in each.mixers)
        share = 100 * float(overlap.mean_jaccard(found[i], [1, 2]))
        assert panel.text == f"IoU {share:.1f}\u00a0%"
        encoded = panel.layers["errors"].partition(",")[2]
        drawn = Image.open(io.BytesIO(base64.b64decode(encoded)))
        assert drawn.size == scene.size[::-1]

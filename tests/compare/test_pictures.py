# SPDX-License-Identifier: Apache-2.0
"""The pictures of a comparison: what is under them, how to leave them out, and how large a page is.

`test_maps` has what the maps themselves are.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from few_digits import small
from PIL import Image

from keymix import data
from keymix.cli import main
from keymix.compare.pictures import MOST_BYTES, Trained, attention, packed, without_heads
from keymix.compare.question import Question
from keymix.compare.run import compare, rebuild
from keymix.errors import UserError
from keymix.models import create_model

PICTURE = "data:image/"


@pytest.fixture(autouse=True)
def _learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page has no pictures where no model has learned anything, as after these few steps."""
    monkeypatch.setattr("keymix.compare.findings.nothing_learned", lambda found: None)


@pytest.fixture
def done(finished: Path, tmp_path: Path) -> Path:
    out = Path(shutil.copytree(finished, tmp_path / "copy"))
    rebuild(out)
    return out


@pytest.fixture
def done_masks(finished_masks: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_masks / "out", tmp_path / "copy"))


def kept_in(out: Path) -> dict[str, Any]:
    return json.loads((out / "pictures.json").read_text(encoding="utf-8"))["pictures"]


def page_of(out: Path) -> str:
    return (out / "report.html").read_text(encoding="utf-8")


def has_pictures(out: Path) -> bool:
    """Whether page or folder have any; they agree."""
    stored, shown = PICTURE in (out / "pictures.json").read_text("utf-8"), PICTURE in page_of(out)
    assert stored == shown
    return shown


def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(config: Any) -> None:
        raise UserError("the images are elsewhere")

    monkeypatch.setattr("keymix.compare.pictures.load_data", gone)


def test_under_the_maps_stand_the_answers_of_the_runs_that_were_read(done: Path) -> None:
    seen = kept_in(done)["attention"]
    assert set(seen["said"]) == {"softmax", "static_key", "identity"}
    with np.load(done / "runs/static_key/seed0/predictions_test.npz") as stored:
        answers = dict(zip(stored["index"].tolist(), stored["last_pred"].tolist(), strict=True))
    truth = [image["label"] for image in seen["images"]]
    for said, label, image in zip(seen["said"]["static_key"], truth, seen["images"], strict=True):
        assert said["right"] == (said["text"] == label)
        place = next(i for i in answers if data_ids()[i] == image["id"])
        assert said["text"] == str(answers[place])


def data_ids() -> list[str]:
    images = data.load("digits", limit=100)
    return [images.test.ids(i) for i in range(len(images.test))]


def test_the_gallery_is_of_the_mixers_without_the_control(done: Path) -> None:
    galleries = kept_in(done)["galleries"]
    for gallery in galleries.values():
        assert gallery["about"]["mixers"] == gallery["about"]["seeds"] == 2
        for scene in gallery["scenes"]:
            answered = [mixer for panel in scene["panels"][1:] for mixer in panel["mixers"]]
            assert sorted(answered) == ["softmax", "static_key"]
    assert 0 < len(galleries["disagreements"]["scenes"]) <= 12
    for scene in galleries["disagreements"]["scenes"]:
        assert len({panel["text"] for panel in scene["panels"][1:]}) == 2
    for scene in galleries["errors"]["scenes"]:
        assert not all(panel["right"] for panel in scene["panels"][1:])


def test_pictures_are_left_out_for_good_until_they_are_asked_for(done: Path) -> None:
    assert has_pictures(done)
    before = kept_in(done)
    assert rebuild(done, images=False).record.images is False
    assert not has_pictures(done)
    assert kept_in(done)["collapse"] == before["collapse"]
    rebuild(done)
    assert not has_pictures(done)


def test_a_comparison_that_resumes_does_not_bring_them_back(done: Path) -> None:
    settings: dict[str, Any] = {"mixers": "mhsa,ska", "seeds": 2, "epochs": 2}
    small(done, **settings, images=False)
    assert not has_pictures(done)
    small(done, **settings)
    assert not has_pictures(done)
    assert "images=False" in small(done, **settings, images=False).record.command
    small(done, **settings, images=True)
    assert has_pictures(done)


def test_the_command_says_it_both_ways(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, shown in (["--no-images"], False), ([], False), (["--images"], True), ([], True):
        assert main(["report", str(done), *words]) == 0
        assert has_pictures(done) is shown
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "asked"), [([], None), (["--images"], True), (["--no-images"], False)]
)
def test_a_comparison_is_asked_by_its_command(
    words: list[str], asked: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[bool | None] = []

    def stop(question: Question, **more: Any) -> None:
        asked_for.append(question.images)
        raise UserError("far enough")

    monkeypatch.setattr("keymix.compare.run.answer", stop)
    assert main(["compare", *words, "--out", str(tmp_path / "out")]) == 2
    assert asked_for == [asked]


def test_where_the_data_are_gone_the_earlier_pictures_stay_or_go(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kept_in(done)
    no_data(monkeypatch)
    rebuild(done)
    assert kept_in(done)["galleries"] == before["galleries"]
    assert kept_in(done)["attention"] == before["attention"]
    rebuild(done, images=False)
    assert not has_pictures(done)
    rebuild(done, images=True)  # they cannot be had again
    assert not has_pictures(done)
    assert "It holds no picture of the data." in page_of(done)


def test_masks_leave_their_gallery_out_too(done_masks: Path) -> None:
    assert has_pictures(done_masks)
    rebuild(done_masks, images=False)
    assert not has_pictures(done_masks)
    assert not kept_in(done_masks)["galleries"]
    assert kept_in(done_masks)["collapse"]


def test_an_image_of_two_sections_is_counted_once(done_masks: Path) -> None:
    rebuild(done_masks)
    record = kept_in(done_masks)
    names = {image["label"] for image in record["attention"]["images"]}
    names |= {scene["name"] for scene in record["galleries"]["masks"]["scenes"]}
    assert f"It holds pictures of {len(names)} test images." in page_of(done_masks)


# ---- what cannot be read ---------------------------------------------------------------------


# ---- spiking mixers --------------------------------------------------------------------------


def test_tokens_that_spiking_mixers_let_through_are_shown_as_maps_are() -> None:
    torch.manual_seed(0)
    images = data.load("digits", limit=100, image_size=32)
    options = {"in_chans": 1, "num_classes": 10}
    models = {
        name: create_model("qkformer_micro_32", mixer=name, **options)
        for name in ("qk_token", "qk_channel", "spiking_self")
    }
    for model in models.values():
        for norm in model.modules():
            if isinstance(norm, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
                torch.nn.init.constant_(norm.weight, 4.0)  # so that neurons fire untrained
    trained = Trained(models=models, data=images, seed=0)
    found = attention(trained, (0, 3), pooling="avg", label=lambda data, i: str(i))
    assert set(found.maps) == {"qk_token"}
    assert found.maps["qk_token"].kind == "mask"
    assert 0 < found.maps["qk_token"].scale <= 1
    assert set(found.missing) == {"qk_channel", "spiking_self"}
    assert found.missing["qk_channel"].endswith("its attention is one spike per channel")


# ---- how large a page is ---------------------------------------------------------------------


def test_single_heads_of_maps_that_would_be_too_large_are_left_out() -> None:
    few = {m: np.ones((4, 12, 4, 14, 14)) for m in "ab"}
    assert without_heads(few) == few
    many = {str(m): np.ones((4, 12, 7, 14, 14)) for m in range(12)}
    less = without_heads(many)
    assert less["0"].shape == (4, 12, 1, 14, 14)
    assert sum(len(packed(each).weights) for each in less.values()) <= MOST_BYTES


@pytest.mark.slow
def test_the_page_of_large_photographs_stays_below_3_mb(tmp_path: Path) -> None:
    """Noise is the worst that can be encoded."""
    rng = np.random.default_rng(0)
    for name in ("left", "right"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(60):
            pixels = rng.integers(0, 256, (420, 560, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.jpg")
    result = compare(
        data=f"folder:{tmp_path / 'photos'}",
        mixers="mhsa,ska",
        seeds=1,
        epochs=1,
        processes=1,
        reference=False,
        overrides={"data.image_size": 224, "model.options.depth": 1},
        out=tmp_path / "out",
    )
    assert len(result.pictures.attention.images) == 4
    page = page_of(tmp_path / "out")
    assert page.count(f"{PICTURE}jpeg") >= 4 + 12
    assert len(page.encode()) < 3e6

# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze attention``: pictures, page and numbers, and refusals in one line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from keymix.analysis.attention import attention_maps
from keymix.analysis.capture import At
from keymix.analysis.rollout import attention_rollout
from keymix.cli import analyze
from keymix.errors import UserError
from keymix.records import from_json
from keymix.studies.attention.overlays import Cell, Drawn, Range, Row, shaded
from keymix.studies.attention.result import Attention, AttentionRecord
from keymix.studies.inputs import load_images, load_models

NAME = "vit_nano_p2_12"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("jay", "ferret"):
        pixels = rng.integers(0, 256, (17, 23, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return folder


def heads_of(model: torch.nn.Module) -> int:
    return next(m.shape[-3] for m in attention_maps(model, torch.randn(1, 1, 12, 12)).values())


def run(*words: object) -> None:
    assert analyze.main(["attention", *map(str, words)]) == 0


def read(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    record = json.loads((out / "attention.json").read_text())
    return record, dict(np.load(out / "attention-maps.npz"))


@pytest.mark.slow
def test_numbers_are_those_of_the_maps_and_every_picture_opens(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "looks"
    words = ["--layers", "0,-1", "--queries", "mean", "1,2", "0.5,0.0", "--rollout"]
    run(NAME, "--images", photos, *words, "--out", out)
    record, arrays = read(out)
    assert record["queries"] == ["mean", "1,2", "0.5,0.0"]
    assert [Path(name).name for name in record["images"]] == ["ferret.png", "jay.png"]
    (model,) = record["models"]
    assert [layer["number"] for layer in model["layers"]] == [0, 3]
    assert model["layers"][0]["places"] == [None, [1, 2], [3, 0]]
    assert model["random"]

    (one,) = load_models([NAME])
    batch = next(load_images(one, [str(photos)], limit=2).batches(2))
    maps = attention_maps(one.model, batch, layers=-1, queries=[8, 18], heads="mean")
    (rows,) = maps.values()
    stored = arrays[model["layers"][1]["array"]]
    assert stored.shape == (2, 1, 3, 6, 6)
    np.testing.assert_allclose(stored[:, :, 1:], rows.unflatten(-1, (6, 6)).numpy(), rtol=1e-5)
    rolled = attention_rollout(one.model, batch, layers=[0, -1], query="mean").picture
    np.testing.assert_allclose(arrays[model["rollout"]["array"]][:, 0], rolled.numpy(), rtol=1e-5)

    assert (model["rollout"]["layers"], model["rollout"]["of"]) == ([0, 3], 4)
    assert [layer["heads_read"] for layer in model["layers"]] == [heads_of(one.model)] * 2

    assert record["figures"] == [
        f"attention-{i:02d}-{image}-{query}.png"
        for i, image in ((1, "ferret"), (2, "jay"))
        for query in ("mean", "1x2", "0.5x0.0")
    ]
    for name in record["figures"]:
        with Image.open(out / name) as picture:
            assert min(picture.size) > 150
    page = (out / "attention.html").read_text()
    assert "<h1>Random weights" in page
    first, *folded = page.partition("</header>")[2].split('<details class="part">')
    assert (first.count("<figure"), "<table" in first) == (2, False)
    headings = ("the image", "block 1", "block 4", "rollout")
    assert [first.count(f">{each}</span>") for each in headings] == [1] * 4
    assert "only blocks 1, 4" in first
    assert sum(part.count('class="looks"') for part in folded) == 5
    assert page.count('<th scope="row"') == 2
    assert "6 × 6" in page
    text = capsys.readouterr()
    assert f"{NAME} has random weights" in text.err
    lines = [line.split("\t") for line in text.out.splitlines()]
    assert lines[0][:3] == ["model", "block", "path"]
    assert [line[1:3] for line in lines[1:]] == [
        ["1", "blocks.0.attn.mixer"],
        ["4", "blocks.3.attn.mixer"],
    ]
    assert float(lines[1][3]) == pytest.approx(model["layers"][0]["peak"], rel=1e-2)


def test_rollout_covers_all_layers_where_only_some_are_shown(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keymix.analysis.capture.MOST_LAYERS", 2)
    out = tmp_path / "looks"
    run(NAME, "--images", photos / "jay.png", "--queries", "1,2", "--rollout", "--out", out)
    record, arrays = read(out)
    (model,) = record["models"]
    assert [layer["number"] for layer in model["layers"]] == [0, 3]
    assert (model["rollout"]["layers"], model["rollout"]["of"]) == ([0, 1, 2, 3], 4)
    (one,) = load_models([NAME])
    batch = next(load_images(one, [str(photos / "jay.png")], limit=1).batches(1))
    rolled = attention_rollout(one.model, batch, query=At(1, 2)).picture
    np.testing.assert_allclose(arrays[model["rollout"]["array"]][:, 0], rolled.numpy(), rtol=1e-5)


def test_mixers_stand_below_one_another_and_those_without_maps_say_why(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "looks"
    mixers = "softmax/ska/ska/ska,sep_conv/cska/softmax/softmax"
    run("caformer_micro_32", "--mixers", mixers, "--images", photos / "jay.png", "--out", out)
    record, _ = read(out)
    first, second = record["models"]
    assert first["label"] == "softmax/static_key*3"
    assert first["layers"][0]["number"] == 0
    assert second["layers"][0]["number"] > 0
    assert all("'sep_conv'" in why for why in second["missing"].values())
    assert record["queries"] == ["mean"]
    assert len(record["figures"]) == 1
    assert "has no map: mixer 'sep_conv'" in capsys.readouterr().err
    assert "sep_conv" in (out / "attention.html").read_text()


def test_heads_are_drawn_one_by_one_and_class_tokens_asked_where_they_are(
    photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "looks"
    run("vit_micro_p4_32", "--images", photos / "jay.png", "--heads", "each", "--out", out)
    record, arrays = read(out)
    assert record["queries"] == ["cls"]
    assert record["figures"] == ["attention-01-jay-cls-vit_micro_p4_32.png"]
    layer = record["models"][0]["layers"][0]
    assert (layer["heads"], layer["keys"], layer["key_grid"]) == (4, 65, [8, 8])
    kept = 1 - arrays[layer["array"]].sum((-2, -1))
    assert layer["prefix_share"] == pytest.approx(kept.mean(), abs=1e-5)


@pytest.mark.slow
def test_even_attention_in_windows_is_one_over_the_keys_of_a_window(
    photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "looks"
    words = ["--queries", "0.5,0.5", "mean", "--layers", "0,1"]
    run("swin_micro_p2_32", "--images", photos / "jay.png", *words, "--out", out)
    record, arrays = read(out)
    for layer in record["models"][0]["layers"]:
        (weights,) = arrays[layer["array"]][0]  # one head, [queries, H, W]
        window = int((weights[0] > 0).sum())
        assert window < layer["keys"] == weights[1].size
        assert layer["even"] == [window, layer["keys"]]
        text = weights * np.array(layer["even"])[:, None, None]
        assert text[0].sum() == pytest.approx(window, rel=1e-4)
        assert layer["peak"] == pytest.approx(text.max((-2, -1)).mean(), rel=1e-4)
        assert layer["peak"] < 3, "random weights attend nearly evenly"


def drawn_of(rows: list[Row], columns: list[str]) -> Drawn:
    return Drawn(file="f.png", title="t", note="n", columns=columns, rows=rows)


def test_rollout_has_a_scale_of_its_own() -> None:
    strong, faint = np.full((2, 2), 40.0), np.full((2, 2), 0.5)
    cells = (Cell(values=strong), Cell(values=faint, apart=True), Cell(values=None))
    drawn = drawn_of([Row(label="", cells=cells, photo=None)], ["1", "rollout", "2"])
    assert {of: scale.high for of, scale in drawn.bars} == {"blocks": 40.0, "rollout": 3.0}


def test_matrices_are_whole_maps(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "looks"
    words = ["--view", "matrix", "--stage", "final", "--layers", "1"]
    run(NAME, "--mixers", "re_attention,mhsa", "--images", photos / "jay.png", *words, "--out", out)
    record, arrays = read(out)
    assert [m["label"] for m in record["models"]] == ["re_attention", "softmax"]
    assert arrays["m0.layer1"].shape == (1, 1, 36, 36)
    assert not np.allclose(arrays["m0.layer1"].sum(-1), 1)  # mixed over heads
    np.testing.assert_allclose(arrays["m1.layer1"].sum(-1), 1, rtol=1e-5)
    assert record["figures"] == ["attention-01-jay.png"]


def test_windows_lie_on_the_image(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "looks"
    words = ["--layers", "layers.0", "--queries", "15,15", "--scale", "each"]
    run("swin_micro_p2_32", "--images", photos / "jay.png", *words, "--out", out)
    record, arrays = read(out)
    first, second = (arrays[layer["array"]] for layer in record["models"][0]["layers"][:2])
    assert first.shape[-2:] == (16, 16)
    assert np.allclose(first.sum((-2, -1)), 1)
    assert (first[..., :8, :] == 0).all()
    assert not np.array_equal(first > 0, second > 0)  # shifted


def test_a_look_is_replaced_only_when_asked_and_takes_its_pictures_along(
    photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "looks"
    some = [NAME, "--layers", "0", "--out", out]
    run(*some, "--images", photos)
    (out / "mine.png").write_bytes(b"mine")
    with pytest.raises(UserError, match="add --overwrite"):
        run(*some, "--images", photos)
    run(*some, "--images", photos / "jay.png", "--overwrite")
    assert sorted(p.name for p in out.glob("*.png")) == ["attention-01-jay-mean.png", "mine.png"]


def test_a_picture_shows_more_where_more_is() -> None:
    values = np.zeros((4, 4))
    values[0, 0] = 16
    grey = np.full((3, 32, 32), 128, dtype=np.uint8)
    pixels = shaded(Cell(values=values), grey, Range.shared([values]))
    assert pixels[:6, :6].mean() > 1.5 * pixels[16:, 16:].mean()
    assert np.allclose(pixels[16:, 16:], 0.62 * 128 / 255, atol=0.01)  # the photo alone
    cells = (Cell(values=None), Cell(values=values, mark=(0.5, 0.5)))
    row = Row(label="a $label_with^marks", cells=cells * 6, photo=grey)
    one, many = (
        Image.open(io.BytesIO(drawn_of([row], [f"block {i}" for i in range(n)]).png()))
        for n in (2, 12)
    )
    assert one.size[0] > 300
    assert many.size[1] > 1.5 * one.size[1]  # in two bands


def test_scales_hold_even_attention_faint_or_stretch_each_map() -> None:
    even = np.array([[0.9, 1.0], [1.1, 1.0]])
    shared, own = Range.shared([even]), Range.own(even)
    assert (shared.low, shared.high) == (0.0, 3.0)
    assert (own.low, own.high) == (0.9, 1.1)
    assert own.share(even).max() == 1
    signed = Range.own(np.array([[-2.0, 1.0]]))
    assert signed.signed
    assert signed.share(np.array([0.0])) == 0
    below = Range.own(np.array([[-2.0, -1.0]]))  # of one sign: all of the scale is used
    assert (below.signed, below.low, below.high) == (False, -2.0, -1.0)
    assert torch.isfinite(torch.tensor(Range.own(np.ones((2, 2))).share(np.ones((2, 2))))).all()


def found(
    peaks: dict[str, list[float]], *, random: bool = False, prefix: float | None = None, **more: Any
) -> Attention:
    """What is found of models whose blocks have these largest weights, as multiples of even."""
    layer = {"array": "a", "heads": 1, "heads_read": 1, "keys": 9, "even": [9]}
    model = {"name": "m", "weights": "w", "random": random, "photos": "p", "missing": {}}
    models = [
        {**model, "label": label, "rollout": None, "no_rollout": None}
        | {
            "layers": [
                {**layer, "number": i, "path": str(i), "peak": peak, "prefix_share": prefix}
                for i, peak in enumerate(own)
            ]
        }
        for label, own in peaks.items()
    ]
    shown = {"stage": "softmax", "heads": "mean", "view": "image", "scale": "shared"}
    frame = {"rollout": False, "queries": ["mean"], "origin": "photos", "images": ["a", "b"]}
    record = {**shown, **frame, "left_out": {}, "models": models, **more}
    return Attention(from_json(AttentionRecord, record, where="the record"), {})


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (found({"vit": [1.2, 4.25]}), ("vit", "block 2", "4.25 times")),
        (found({"vit": [2.0]}, images=["a"]), ("block 1", "on one image")),
        (found({"vit": [1.2, 4.0], "deit": [6.0, 3.0]}), ("deit looks", "6.00", "vit least")),
        (found({"vit": [1.2, 1.4]}), ("nearly even", "1.40 times")),
        (found({"vit": [2.0, 3.0]}, prefix=0.62), ("in block 2", "62 % of all")),
        (found({"vit": [1.2]}, view="matrix"), ("Whole attention maps of vit",)),
        (found({"vit": [9.0]}, random=True), ("Random weights", "vit")),
    ],
)
def test_the_answer_has_the_block_and_its_number(result: Attention, said: tuple[str, ...]) -> None:
    assert all(part in result.answer for part in said), result.answer
    assert not result.warnings

# SPDX-License-Identifier: Apache-2.0
"""``keymix export`` of runs: the file predicts as the run does, and says nothing private."""

from __future__ import annotations

import dataclasses
import json
import shutil
import typing
import zipfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from ward import NAME, PLACE, refuse_secrets, write_ward

import keymix
from keymix import UserError
from keymix.cli import main
from keymix.data.record import DataRecord, LeftOutImage
from keymix.train.exported import public_model, public_record
from keymix.train.recipe import ModelConfig
from made_masks import write_uwgi
from tolerances import close
from written_masks_run import written_masks_run


@pytest.fixture(autouse=True)
def _without_hook(shapes_checked: bool) -> None:
    if shapes_checked:
        pytest.skip("exporters cannot see through the shape checks")
    pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def ward(made_once: Callable[..., Path]) -> Path:
    """A folder with ``photos`` and a ``run`` trained on them by its command."""

    return made_once("ward", write_ward) / PLACE


@pytest.fixture(scope="module")
def file(ward: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "model.onnx"
    assert main(["export", str(ward / "run"), "--out", str(path)]) == 0
    return path


def predicted(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["predict", *words, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_predictions_of_a_file_are_those_of_its_run(
    ward: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = str(ward / "photos")
    own, other = (predicted(capsys, str(place), photos) for place in (ward / "run", file))
    assert len(own) == 40
    for a, b in zip(own, other, strict=True):
        assert a["image"] == b["image"]
        assert [each["class"] for each in a["top"]] == [each["class"] for each in b["top"]]
        shares = [each["probability"] for each in b["top"]]
        assert [each["probability"] for each in a["top"]] == pytest.approx(shares, rel=1e-4)


@pytest.mark.slow
def test_the_command_shows_its_checks_and_refuses_what_is_there(
    ward: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(ward / "run"), str(tmp_path / "model.pt2")
    words = ["export", run, "--format", "torch", "--out", out]
    assert main([*words, "--images", str(ward / "photos"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [check["batch"] for check in found["checks"]] == [1, 3]
    assert "given" in found["images"]
    assert main(words) == 2
    assert "model.pt2" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    shown = capsys.readouterr().out
    assert "validation" in shown
    assert "difference" in shown
    assert main(["predict", str(file), str(ward / "photos"), "--weights", "best"]) == 2
    assert "model.onnx" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "ending", "int8"), [("onnx", ".onnx", True), ("torch", ".pt2", False)]
)
def test_a_file_holds_no_path_and_no_name(
    ward: Path, tmp_path: Path, format: Any, ending: str, int8: bool
) -> None:
    path = tmp_path / f"model{ending}"
    keymix.export(ward / "run", path, format=format, int8=int8)
    content = b"".join(each.read_bytes() for each in tmp_path.iterdir())
    if format == "torch":
        with zipfile.ZipFile(path) as archive:
            content += b"".join(archive.read(name) for name in archive.namelist())
    assert b"dark" in content  # a class
    refuse_secrets(content, tmp_path)


def alone(check: Callable[..., None], *given: Any) -> None:
    """Run a check in a process of its own: one that loaded OpenVINO died of it minutes later."""
    process = get_context("spawn").Process(target=check, args=given)
    process.start()
    process.join()
    assert process.exitcode == 0


def openvino_files(ward: Path, folder: Path) -> None:
    path, photos = folder / "model.xml", sorted((ward / "photos").rglob("*.png"))[:5]
    found = keymix.export(ward / "run", path, format="openvino")
    content = [each.read_bytes() for each in folder.iterdir()]
    assert found.bytes == sum(map(len, content))
    assert b"dark" in b"".join(content)  # a class
    refuse_secrets(b"".join(content), folder)
    run, file = keymix.load(ward / "run"), keymix.load(path)
    own, other = (each.outputs([*map(each.transform, photos)]) for each in (run, file))
    close(other, own)
    keymix.export(ward / "run", path, format="openvino", int8=True, overwrite=True)
    assert len(keymix.load(path).predict(photos)) == 5
    path.with_suffix(".bin").unlink()
    with pytest.raises(UserError, match=r"model\.bin"):
        keymix.load(path)


@pytest.mark.slow
def test_files_for_openvino_answer_as_their_run_and_hold_no_name(
    ward: Path, tmp_path: Path
) -> None:
    pytest.importorskip("openvino")
    alone(openvino_files, ward, tmp_path)


def test_no_field_of_a_public_record_can_name_a_file() -> None:
    """Each field of text is known; who adds one decides whether it is public."""
    words = {"spec", "unfit", "notes", "left_out", "classes", "task"}
    words |= {"frames_by", "split_by", "masks", "event_split", "compared_by"}  # names of ours
    words |= {"mean_std_of", "fingerprint_of", "fingerprint"}  # sentences of ours, a hash
    words |= {"sizes", "index_sha256", "cases", "empty", "class_images"}  # by splits
    hints = typing.get_type_hints(DataRecord)
    assert {name for name, hint in hints.items() if "str" in str(hint)} | {"left_out"} == words
    secret = f"/home/{PLACE}/{NAME}"
    record = DataRecord(
        spec=f"folder:{secret}",
        classes=("a", "b"),
        image_size=(8, 8),
        in_chans=3,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        crop_pct=1.0,
        cached=True,
        sizes={"train": 1, "val": 1, "test": 1},
        index_sha256={"train": "", "val": "", "test": ""},
        task="classification",
        unfit=secret,
        notes=(secret,),
        left_out=(LeftOutImage(id=secret, reason=secret),),
        left_out_count=1,
    )
    public = public_record(record)
    assert PLACE not in str(public)
    assert public == dataclasses.replace(record, spec="folder", unfit=None, notes=(), left_out=())


def test_options_of_a_model_that_are_paths_stay_out() -> None:
    options = {"depth": 2, "weights": f"/{PLACE}/x", "overlay": {"file": f"{PLACE}/{NAME}"}}
    public = public_model(
        ModelConfig(name=f"local-dir:/{PLACE}/vit", options=options, weights=f"/{PLACE}")
    )
    assert public.options == {"depth": 2}
    assert PLACE not in str(public)


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["exclusive", "multilabel"])
def test_masks_of_a_file_are_those_of_its_run(masks: str, tmp_path: Path) -> None:
    scans = write_uwgi(tmp_path / "uwgi", cases=5, slices=4, side=31)
    run = written_masks_run(tmp_path / "run", f"uwgi:{scans}", masks=masks)
    file = tmp_path / "model.onnx"
    found = keymix.export(run, file)
    assert found.same
    assert found.checks[0].answers == 24 * 24 * (1 if masks == "exclusive" else 3)
    paths = sorted(scans.rglob("*.png"))[:4]
    for place, name in ((tmp_path / "run", "own"), (file, "other")):
        words = ["predict", str(place), *map(str, paths), "--out", str(tmp_path / name)]
        assert main(words) == 0
    own, other = (sorted((tmp_path / name).rglob("*.png")) for name in ("own", "other"))
    assert len(own) == len(other) >= 8
    for a, b in zip(own, other, strict=True):
        assert a.relative_to(tmp_path / "own") == b.relative_to(tmp_path / "other")
        assert np.array_equal(np.asarray(Image.open(a)), np.asarray(Image.open(b)))
    with pytest.raises(UserError, match=r"model\.onnx"):  # a split is the run's
        keymix.predict_masks(file, out=tmp_path / "split")


@pytest.mark.slow
def test_data_that_are_gone_are_named_with_the_remedy(ward: Path, tmp_path: Path) -> None:
    shutil.copytree(ward / "run", tmp_path / "run")
    recipe = tmp_path / "run" / "recipe.json"
    recipe.write_text(recipe.read_text("utf-8").replace(f"{PLACE}/photos", "gone"), "utf-8")
    with pytest.raises(UserError, match=r"gone.*--images"):
        keymix.export(tmp_path / "run", tmp_path / "model.onnx")

# SPDX-License-Identifier: Apache-2.0
"""NIfTI volumes: slices alike in any order of axes, faults named, masks back in place."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

import keymix
from keymix.data import load
from keymix.data.check import check
from keymix.data.sample import Faults
from keymix.data.slices import scaled
from keymix.data.sources.nifti import open_nifti
from keymix.data.specs import Options
from keymix.data.volumes import VolumeSlices, head_of, plane, volume_of
from keymix.errors import UserError
from keymix.recipes import get
from keymix.train.engine import train
from keymix.train.recipe import replace_path

AXES = ("RAS", "LPS", "PSL", "IAR", "SRP")
AFFINE = np.array([[1.5, 0, 0, 10], [0, 1.25, 0, -20], [0, 0, 5, 30], [0, 0, 0, 1]])


def body(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return values and labels ``[x, y, z]`` without symmetry; class 2 is rare."""
    random = np.random.default_rng(seed)
    values, labels = random.normal(0, 20, (24, 30, 5)), np.zeros((24, 30, 5), dtype=np.uint8)
    labels[3:15, 5:20, 1:4], labels[4:9, 6:10, 2] = 1, 2
    return (values + 100 * labels).astype(np.int16), labels


def saved(path: Path, values: np.ndarray, axes: str = "RAS", affine: np.ndarray = AFFINE) -> Path:
    """Save values that lie as RAS with other axes."""
    image = nib.Nifti1Image(values, affine)
    image.header["descrip"] = b"Jane Roe"
    ways = nib.orientations
    turn = ways.ornt_transform(ways.io_orientation(affine), ways.axcodes2ornt(axes))
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(image.as_reoriented(turn), path)
    return path


def decathlon(root: Path, cases: int = 6, values: tuple[int, ...] = (0, 1, 2)) -> str:
    """Write cases whose axes differ, named as nnU-Net does."""
    for i in range(cases):
        pixels, labels = body(i)
        labels = np.array(values, dtype=np.uint8)[labels]
        saved(root / f"imagesTr/c{i}_0000.nii.gz", pixels, AXES[i % len(AXES)])
        saved(root / f"labelsTr/c{i}.nii.gz", labels, AXES[i % len(AXES)])
    named = dict(zip(("background", "liver", "tumour"), values, strict=True))
    (root / "dataset.json").write_text(json.dumps({"labels": named}))
    return f"nifti:{root}"


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("axes", AXES)
def test_a_slice_lies_alike_however_the_axes_of_its_file_do(
    axes: str, suffix: str, tmp_path: Path
) -> None:
    values, labels = body()
    path = saved(tmp_path / f"c{suffix}", values, axes)
    head = head_of(path)
    assert (head.size, head.depth) == ((30, 24), 5)
    assert head.spacing == (1.25, 1.5)
    for z in range(5):
        front_first = values[:, ::-1, z].T  # rows from the front, columns from the left
        np.testing.assert_array_equal(plane(path, z), front_first)
    stack = VolumeSlices(path, 4, 3, (-50.0, 150.0))()
    wanted = [scaled(plane(path, z), (-50.0, 150.0)) for z in (3, 4, 4)]
    np.testing.assert_array_equal(stack.numpy(), np.stack(wanted))
    labelled = saved(tmp_path / f"l{suffix}", labels, axes)
    again = tmp_path / "again.nii.gz"
    again.write_bytes(volume_of([plane(labelled, z) for z in range(5)], path))
    made, own = nib.load(again), nib.load(labelled)
    np.testing.assert_array_equal(made.affine, nib.load(path).affine)
    np.testing.assert_array_equal(np.asarray(made.dataobj), np.asarray(own.dataobj))
    assert b"Roe" not in gzip.decompress(again.read_bytes())


def test_a_window_cuts_what_lies_outside() -> None:
    values = np.array([[-1000, -100, 20, 100, 3000]])
    assert scaled(values, (-100, 100)).tolist() == [[0, 0, 153, 255, 255]]
    assert scaled(values).tolist() == [[0, 57, 65, 70, 255]]


def test_volumes_are_cases_and_slices_samples(tmp_path: Path) -> None:
    spec = decathlon(tmp_path)
    data = load(spec, image_size=(30, 24), test_fraction=0.3, intensity_window=(-50, 250), stack=3)
    assert data.classes == ("background", "liver", "tumour")
    assert sum(map(len, data.splits)) == 30
    groups = [{*split.groups} for split in data.splits]
    assert sum(map(len, groups)) == 6
    assert all(len(split) == 5 * len(of) for split, of in zip(data.splits, groups, strict=True))
    for i in range(5):
        wanted = torch.from_numpy(body(int(data.train.groups[i][1:]))[1][:, ::-1, i % 5].T.copy())
        assert torch.equal(data.train.mask(i), wanted)
    assert data.train.rows[0].spacing == (1.25, 1.5)
    assert data.record().intensity_window == (-50, 250)


def test_names_of_classes_are_read_in_every_form(tmp_path: Path) -> None:
    decathlon(tmp_path)
    labels: dict[str, Any] = {"0": "background", "1": "liver", "2": "tumour"}
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels}))
    classes = ("background", "liver", "tumour")
    assert open_nifti(str(tmp_path), Faults()).classes == classes
    (tmp_path / "dataset.json").unlink()
    (tmp_path / "classes.txt").write_text("0 background\n2 tumour\n1 liver\n")
    source = open_nifti(str(tmp_path), Faults())
    assert source.classes == ("background", "tumour", "liver")
    assert np.asarray(source.rows[2].read_target()).max() == 2
    named = {"background": 0, "liver": 1, "ignore": 2}
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": named}))
    source = open_nifti(str(tmp_path), Faults())
    assert source.classes == classes[:2]
    assert np.unique(source.rows[2].read_target()).tolist() == [0, 1, 255]
    (tmp_path / "dataset.json").unlink()
    (tmp_path / "classes.txt").write_text("0 background\n1 liver\n")
    with pytest.raises(UserError, match=r"c0\.nii\.gz.*: 2"):
        load(f"nifti:{tmp_path}", image_size=16)
    for text in ('{"labels": [1]}', '{"labels": {}}', '{"labels": {"a": 1, "b": 1}}', "{"):
        (tmp_path / "dataset.json").write_text(text)
        with pytest.raises(UserError, match=r"dataset\.json"):
            open_nifti(str(tmp_path), Faults())
    (tmp_path / "dataset.json").unlink()
    (tmp_path / "classes.txt").write_text("0 0 0 background\n1 1 1 liver\n")
    with pytest.raises(UserError, match=r"classes\.txt.*colours"):
        open_nifti(str(tmp_path), Faults())


def test_splits_may_be_folders(tmp_path: Path) -> None:
    for split, count in (("train", 4), ("test", 2)):
        for i in range(count):
            values, labels = body(i)
            saved(tmp_path / f"{split}/images/{split}{i}.nii", values)
            saved(tmp_path / f"{split}/labels/{split}{i}.nii", labels)
    (tmp_path / "classes.txt").write_text("background\nliver\ntumour\n")
    data = load(f"nifti:{tmp_path}", image_size=16)
    assert {*data.test.groups} == {"test0", "test1"}
    (tmp_path / "testing").mkdir()
    for name in ("images", "labels"):
        (tmp_path / "testing" / name).mkdir()
    with pytest.raises(UserError, match="several folders of test"):
        open_nifti(str(tmp_path), Faults())


def test_scaled_values_are_read_with_their_scale(tmp_path: Path) -> None:
    values = np.arange(24 * 30 * 5).reshape(24, 30, 5)
    image = nib.Nifti1Image(values.astype(np.int16), AFFINE)
    image.header.set_slope_inter(0.5, -1024)
    for name in ("c.nii", "c.nii.gz"):
        nib.save(image, tmp_path / name)
        wanted = np.asarray(nib.load(tmp_path / name).dataobj)[:, ::-1, 2].T
        np.testing.assert_array_equal(plane(tmp_path / name, 2), wanted)


def flipped(content: bytes) -> bytes:
    """Damage the middle of a file."""
    half = len(content) // 2
    return (
        content[:half]
        + bytes(255 - each for each in content[half : half + 20])
        + content[half + 20 :]
    )


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda path, labels: saved(path, labels[..., :4]), "30x24x4 voxels"),
        (lambda path, labels: saved(path, labels, affine=AFFINE * [2, 1, 1, 1]), "mm"),
        (lambda path, labels: saved(path, labels, affine=AFFINE + 3 * np.eye(4, k=3)), "affine"),
        (lambda path, labels: saved(path, labels, "LPS"), "affine"),
        (lambda path, labels: path.unlink(), "cannot read volume"),
        (lambda path, labels: path.write_bytes(path.read_bytes()[:90]), "cannot read volume"),
        (lambda path, labels: saved(path, np.stack([labels, labels], -1)), "24x30x5x2"),
        (lambda path, labels: path.write_bytes(flipped(path.read_bytes())), "cannot read volume"),
        (lambda path, labels: saved(path, np.where(labels, np.nan, 0.0)), "not finite"),
        (lambda path, labels: saved(path, labels.astype(np.complex64)), "complex64"),
    ],
)
def test_faulty_labels_are_named(
    wrong: Callable[[Path, np.ndarray], Any], named: str, tmp_path: Path
) -> None:
    spec = decathlon(tmp_path)
    label = tmp_path / "labelsTr/c0.nii.gz"
    wrong(label, body()[1])
    with pytest.raises(UserError, match=r"c0\.nii\.gz") as refused:
        load(spec, image_size=16)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)
    report = check(spec, Options())
    assert not report.fit


@pytest.mark.slow
def test_a_run_answers_volumes_with_volumes(tmp_path: Path) -> None:
    recipe = get("small_masks_trans_unet")
    changes = {
        "data.spec": decathlon(tmp_path / "set", values=(0, 5, 7)),
        "data.image_size": (16, 16),
        "data.test_fraction": 0.3,
        "data.val_fraction": 0.3,
        "model.options": {"width": 4, "blocks": 1, "num_heads": 1},
        "task.options.window_overlap": 0.25,
        "task.options.intensity_window": (-100, 300),
        "schedule.epochs": 1,
        "schedule.warmup_epochs": 0,
    }
    train(replace_path(recipe, changes), tmp_path / "run")
    files = [tmp_path / f"set/imagesTr/c{i}_0000.nii.gz" for i in (2, 3)]
    broken = tmp_path / "broken.nii.gz"
    broken.write_bytes(b"nothing")
    *found, last = keymix.predict_masks(tmp_path / "run", [*files, broken], out=tmp_path / "own")
    assert last.error is not None
    assert "broken.nii.gz" in last.error
    listed = json.loads((tmp_path / "own/predictions.json").read_text())["volumes"]
    assert listed == ["c2.nii.gz", "c3.nii.gz"]
    assert [each.id for each in found[:2]] == ["c2_slice_0000", "c2_slice_0001"]
    assert found[0].spacing == (1.25, 1.5)
    keymix.predict_masks(tmp_path / "run", out=tmp_path / "own split", split="train")
    for case, path in zip(("c2", "c3"), files, strict=True):
        made, image = nib.load(tmp_path / f"own/volumes/{case}.nii.gz"), nib.load(path)
        np.testing.assert_array_equal(made.affine, image.affine)
        assert made.shape == image.shape
        pixels = [each.pixels for each in found if each.id.startswith(case)]
        for number, name in ((5, "liver"), (7, "tumour")):
            count = int((np.asarray(made.dataobj) == number).sum())
            assert count == sum(each[name] for each in pixels if each)
    volumes = {path.name for path in (tmp_path / "own split/volumes").iterdir()}
    keymix.predict_masks(tmp_path / "run", out=tmp_path / "own split", overwrite=True)
    assert not volumes & {path.name for path in (tmp_path / "own split/volumes").iterdir()}
    with pytest.raises(UserError, match="is a volume"):
        keymix.load(tmp_path / "run").predict(files[0])

# SPDX-License-Identifier: Apache-2.0
"""Volumes: slices alike in any format and order of axes, faults named, masks back in place."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
import pytest
import torch
from PIL import Image
from pydicom.encaps import encapsulate
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, JPEGLSLossless, generate_uid
from pydicom.valuerep import DSfloat

import keymix
from keymix.data import load
from keymix.data.check import check
from keymix.data.sample import Faults
from keymix.data.slices import scaled
from keymix.data.sources.volumes import open_volumes
from keymix.data.specs import Options
from keymix.data.volumes import VolumeSlices, open_volume
from keymix.errors import UserError
from keymix.recipes import get
from keymix.train.engine import train
from keymix.train.recipe import replace_path

AXES = ("RAS", "LPS", "PSL", "IAR", "SRP")
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
AFFINE = np.array([[1.5, 0, 0, 10], [0, 1.25, 0, -20], [0, 0, 5, 30], [0, 0, 0, 1]])
TURN = nib.eulerangles.euler2mat(x=0.2, z=-0.1)
TILTED = nib.affines.from_matvec(TURN @ AFFINE[:3, :3], AFFINE[:3, 3])


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
    if path.suffix:
        nib.save(image.as_reoriented(turn), path)
    else:
        series(path, image.as_reoriented(turn))
    return path


def series(folder: Path, image: nib.Nifti1Image) -> None:
    """Write columns, rows and slices as DICOM files in a random order, as a scanner does."""
    values, (x, y, z, start) = np.asarray(image.dataobj), (LPS @ image.affine)[:3].T
    folder.mkdir()
    uid, names = generate_uid(), np.random.default_rng(0).permutation(values.shape[2])
    for k, name in enumerate(names):
        one = pydicom.Dataset()
        one.file_meta = pydicom.dataset.FileMetaDataset()
        one.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        one.SOPClassUID, one.SOPInstanceUID, one.SeriesInstanceUID = (
            CTImageStorage,
            generate_uid(),
            uid,
        )
        one.PatientName, one.PatientID, one.Modality = "Roe^Jane", "MRN4711", "CT"
        one.PixelSpacing = [float(np.linalg.norm(each)) for each in (y, x)]
        across = [*x / np.linalg.norm(x), *y / np.linalg.norm(y)]
        one.ImageOrientationPatient = [DSfloat(float(each), auto_format=True) for each in across]
        one.ImagePositionPatient = [DSfloat(float(e), auto_format=True) for e in start + k * z]
        one.Columns, one.Rows = values.shape[:2]
        one.SamplesPerPixel, one.PhotometricInterpretation = 1, "MONOCHROME2"
        one.BitsAllocated = one.BitsStored = 16
        one.HighBit, one.PixelRepresentation = 15, 0
        one.RescaleSlope, one.RescaleIntercept = 1, -1024
        one.PixelData = (values[..., k].T + 1024.0).astype("<u2").tobytes()
        one.save_as(folder / f"IM{name:04d}", enforce_file_format=True)


def placed(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read values and affine of a DICOM series that is in order, each file by itself."""
    files = [pydicom.dcmread(path) for path in sorted(folder.iterdir())]
    values = np.stack([each.pixel_array.T for each in files], axis=-1)
    x, y = np.reshape(files[0].ImageOrientationPatient, (2, 3)).astype(float)
    starts = np.array([each.ImagePositionPatient for each in files], dtype=float)
    rows, columns = files[0].PixelSpacing
    affine = np.eye(4)
    affine[:3] = np.stack([x * columns, y * rows, starts[1] - starts[0], starts[0]], axis=1)
    return values, LPS @ affine


def paged(path: Path, values: np.ndarray, unit: str = "mm", more: str = "") -> Path:
    """Save slices as the pages of a TIFF file, rows from the front, as ImageJ does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *rest = (
        Image.fromarray(np.ascontiguousarray(values[:, ::-1, z].T)) for z in range(values.shape[2])
    )
    about = f"ImageJ=1.53t\nimages=5\nslices=5\nunit={unit}\nspacing=5.0\n{more}Info=Jane Roe\n"
    tags = {270: about, 282: 1 / 1.5, 283: 1 / 1.25, 296: 1}
    first.save(path, save_all=True, append_images=rest, tiffinfo=tags)
    return path


def decathlon(
    root: Path, cases: int = 6, values: tuple[int, ...] = (0, 1, 2), end: str = ".nii.gz"
) -> str:
    """Write cases whose axes differ, named as nnU-Net does; DICOM series have NIfTI labels."""
    for i in range(cases):
        pixels, labels = body(i)
        labels, axes = np.array(values, dtype=np.uint8)[labels], AXES[i % len(AXES)]
        if end == ".tif":
            paged(root / f"imagesTr/c{i}_0000.tif", (pixels + 200).astype(np.uint16))
            paged(root / f"labelsTr/c{i}.tif", labels)
        else:
            saved(root / f"imagesTr/c{i}_0000{end}", pixels, axes)
            saved(root / f"labelsTr/c{i}.nii.gz", labels, axes if end else "RAS")
    named = dict(zip(("background", "liver", "tumour"), values, strict=True))
    (root / "dataset.json").write_text(json.dumps({"labels": named}))
    return f"volumes:{root}"


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz", ""])
@pytest.mark.parametrize("affine", [AFFINE, TILTED])
@pytest.mark.parametrize("axes", AXES)
def test_a_slice_lies_alike_however_the_axes_of_its_file_do(
    axes: str, suffix: str, affine: np.ndarray, tmp_path: Path
) -> None:
    values, labels = body()
    path = saved(tmp_path / f"c{suffix}", values, axes, affine)
    volume = open_volume(path)
    assert (volume.size, volume.depth) == ((30, 24), 5)
    assert volume.voxel == (1.25, 1.5, 5)
    for z in range(5):
        front_first = values[::-1, ::-1, z].T  # rows from the front, columns from the right
        np.testing.assert_array_equal(volume.plane(z), front_first)
    stack = VolumeSlices(path, 4, 3, (-50.0, 150.0))()
    wanted = [scaled(volume.plane(z), (-50.0, 150.0)) for z in (3, 4, 4)]
    np.testing.assert_array_equal(stack.numpy(), np.stack(wanted))
    np.testing.assert_allclose(volume.upright, affine, atol=1e-5)
    made = volume.like([labels[::-1, ::-1, z].T for z in range(5)])
    for end, content in made.items():
        again = tmp_path / f"again{end}"
        again.parent.mkdir(exist_ok=True)
        again.write_bytes(content)
        plain = gzip.decompress(content) if suffix else content
        assert b"Roe" not in plain
        assert b"MRN" not in plain
    if suffix:
        back = nib.load(again)
        np.testing.assert_array_equal(back.affine, nib.load(path).affine)
        found = np.asarray(back.dataobj), back.affine
    else:
        assert len(made) == len([*path.iterdir()])
        found, own = placed(again.parent), open_volume(again.parent)
        assert all((own.plane(z) == labels[::-1, ::-1, z].T).all() for z in range(5))
    upright = nib.as_closest_canonical(nib.Nifti1Image(*found))
    np.testing.assert_allclose(upright.affine, affine, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(upright.dataobj), labels)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int16, np.float32])
def test_a_page_of_a_tiff_file_is_a_slice(kind: type, tmp_path: Path) -> None:
    values, labels = body()
    values = (values.clip(0) if kind is np.uint16 else values.clip(0, 255)).astype(kind)
    if kind is np.int16:
        values[0, 0, 0] = -7
    volume = open_volume(paged(tmp_path / "c.tif", values))
    assert (volume.size, volume.depth, volume.upright) == ((30, 24), 5, None)
    assert volume.voxel == pytest.approx((1.25, 1.5, 5))
    for z in range(5):
        np.testing.assert_array_equal(volume.plane(z), values[:, ::-1, z].T)
    large = [labels[:, ::-1, z].T * np.int64(1000) for z in range(5)]
    ((end, content),) = volume.like(large).items()
    again = tmp_path / f"again{end}"
    again.write_bytes(content)
    assert b"Roe" not in content
    assert open_volume(again).voxel == pytest.approx(volume.voxel)
    with Image.open(again) as image:
        for z in range(5):
            image.seek(z)
            np.testing.assert_array_equal(np.asarray(image), large[z])


def test_labels_of_two_values_may_be_bits(tmp_path: Path) -> None:
    inside = body()[1] > 0
    volume = open_volume(paged(tmp_path / "c.tif", inside))
    for z in range(5):
        np.testing.assert_array_equal(volume.plane(z), inside[:, ::-1, z].T.astype(np.uint8))


def test_millimetres_of_a_tiff_file_need_a_unit(tmp_path: Path) -> None:
    values = body()[1]
    assert open_volume(paged(tmp_path / "a.tif", values, "micron")).spacing == (1.25e-3, 1.5e-3)
    assert open_volume(paged(tmp_path / "b.tif", values, "pixel")).spacing is None
    pages = [Image.fromarray(values[..., z]) for z in range(5)]
    for name, given, unit in (("cm", (2.5, 2.5), 3), ("inch", None, 2)):
        path = tmp_path / f"{name}.tiff"
        tags = {282: 4.0, 283: 4.0, 296: unit}
        pages[0].save(path, save_all=True, append_images=pages[1:], tiffinfo=tags)
        assert open_volume(path).spacing == given


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
        wanted = torch.from_numpy(
            body(int(data.train.groups[i][1:]))[1][::-1, ::-1, i % 5].T.copy()
        )
        assert torch.equal(data.train.mask(i), wanted)
    assert data.train.rows[0].spacing == (1.25, 1.5)
    assert data.record().intensity_window == (-50, 250)


def test_names_of_classes_are_read_in_every_form(tmp_path: Path) -> None:
    decathlon(tmp_path)
    labels: dict[str, Any] = {"0": "background", "1": "liver", "2": "tumour"}
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels}))
    classes = ("background", "liver", "tumour")
    assert open_volumes(str(tmp_path), Faults()).classes == classes
    (tmp_path / "dataset.json").unlink()
    (tmp_path / "classes.txt").write_text("0 background\n2 tumour\n1 liver\n")
    source = open_volumes(str(tmp_path), Faults())
    assert source.classes == ("background", "tumour", "liver")
    assert np.asarray(source.rows[2].read_target()).max() == 2
    named = {"background": 0, "liver": 1, "ignore": 2}
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": named}))
    source = open_volumes(str(tmp_path), Faults())
    assert source.classes == classes[:2]
    assert np.unique(source.rows[2].read_target()).tolist() == [0, 1, 255]
    (tmp_path / "dataset.json").unlink()
    (tmp_path / "classes.txt").write_text("0 background\n1 liver\n")
    with pytest.raises(UserError, match=r"c0\.nii\.gz.*: 2"):
        load(f"volumes:{tmp_path}", image_size=16)
    for text in ('{"labels": [1]}', '{"labels": {}}', '{"labels": {"a": 1, "b": 1}}', "{"):
        (tmp_path / "dataset.json").write_text(text)
        with pytest.raises(UserError, match=r"dataset\.json"):
            open_volumes(str(tmp_path), Faults())
    (tmp_path / "dataset.json").unlink()
    (tmp_path / "classes.txt").write_text("0 0 0 background\n1 1 1 liver\n")
    with pytest.raises(UserError, match=r"classes\.txt.*colours"):
        open_volumes(str(tmp_path), Faults())


def test_splits_may_be_folders(tmp_path: Path) -> None:
    for split, count in (("train", 4), ("test", 2)):
        for i in range(count):
            values, labels = body(i)
            saved(tmp_path / f"{split}/images/{split}{i}.nii", values)
            saved(tmp_path / f"{split}/labels/{split}{i}.nii", labels)
    (tmp_path / "classes.txt").write_text("background\nliver\ntumour\n")
    data = load(f"volumes:{tmp_path}", image_size=16)
    assert {*data.test.groups} == {"test0", "test1"}
    (tmp_path / "testing").mkdir()
    for name in ("images", "labels"):
        (tmp_path / "testing" / name).mkdir()
    with pytest.raises(UserError, match="several folders of test"):
        open_volumes(str(tmp_path), Faults())


def test_scaled_values_are_read_with_their_scale(tmp_path: Path) -> None:
    values = np.arange(24 * 30 * 5).reshape(24, 30, 5)
    image = nib.Nifti1Image(values.astype(np.int16), AFFINE)
    image.header.set_slope_inter(0.5, -1024)
    for name in ("c.nii", "c.nii.gz"):
        nib.save(image, tmp_path / name)
        wanted = np.asarray(nib.load(tmp_path / name).dataobj)[::-1, ::-1, 2].T
        np.testing.assert_array_equal(open_volume(tmp_path / name).plane(2), wanted)


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
        (lambda path, labels: saved(path, 3 * labels), "values that no class has: 3"),
        (lambda path, labels: path.unlink(), "has no labels in"),
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
    with pytest.raises(UserError, match=r"c0(_0000)?\.nii\.gz") as refused:
        load(spec, image_size=16)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)
    report = check(spec, Options())
    assert not report.fit


def changed(number: int, **tags: Any) -> Callable[[Path], None]:
    """Write other tags into a file of a series."""

    def change(folder: Path) -> None:
        path = folder / f"IM{number:04d}"
        one = pydicom.dcmread(path)
        for name, value in tags.items():
            setattr(one.file_meta if name == "TransferSyntaxUID" else one, name, value)
        one.save_as(path)

    return change


def at_height(folder: Path, z: float) -> Path:
    """Find the file of a series at a height."""
    return next(p for p in folder.iterdir() if pydicom.dcmread(p).ImagePositionPatient[2] == z)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (
            lambda at: at_height(at, 40).unlink(),
            "are 10 mm apart, and others 5 mm: a slice",
        ),
        (lambda at: shutil.copy(at_height(at, 40), at / "twice.dcm"), r" lie at the same place"),
        (changed(3, SeriesInstanceUID="1.2.3"), r"2 series \(IM0000 and 3 more; IM0003 and 0 more"),
        (changed(2, PixelSpacing=[1.25, 2]), r"IM000[02].* PixelSpacing differs"),
        (changed(1, NumberOfFrames=3), "IM0001: it has several frames"),
        (changed(1, PhotometricInterpretation="MONOCHROME1"), "IM0001.* MONOCHROME1"),
        (changed(1, RescaleSlope=None), "IM0001: its RescaleSlope is empty"),
        (changed(1, ImagePositionPatient=None), "IM0001.* no slice of a volume: ImagePos"),
        (changed(1, PixelData=b"12"), "IM0001: .*pixel data"),
        (
            changed(1, TransferSyntaxUID=JPEGLSLossless, PixelData=encapsulate([b"12"])),
            "IM0001: .*JPEG-LS.* decompress it",
        ),
        (lambda at: (at / "IM0004.dcm").write_bytes(b"nothing"), r"IM0004\.dcm: "),
        (lambda at: [p.unlink() for p in at.iterdir()], "has no volume in"),
    ],
)
def test_faulty_series_are_named(wrong: Callable[[Path], Any], named: str, tmp_path: Path) -> None:
    spec = decathlon(tmp_path, end="")
    wrong(tmp_path / "imagesTr/c0_0000")
    with pytest.raises(UserError, match=r"\bc0[_.]") as refused:
        load(spec, image_size=16)
    assert re.search(named, str(refused.value))
    assert "\n" not in str(refused.value)
    report = check(spec, Options())
    assert not report.fit


def test_faulty_pages_are_named(tmp_path: Path) -> None:
    spec = decathlon(tmp_path, end=".tif")
    image, label = tmp_path / "imagesTr/c0_0000.tif", tmp_path / "labelsTr/c0.tif"
    whole = image.read_bytes()
    for wrong, named in (
        (lambda: paged(label, body()[1], "cm"), "voxels of 12.5x15x50 mm"),
        (lambda: paged(label, body()[1][..., :3]), "30x24x3 voxels"),
        (lambda: image.write_bytes(whole[:5000]), "c0_0000.tif"),
        (lambda: image.write_bytes(b"nothing"), "c0_0000.tif: not an image"),
        (lambda: Image.new("RGB", (24, 30)).save(image), "24x30 RGB.* must be grey"),
        (lambda: paged(image, body()[1], more="channels=5\n"), "its pages are channels"),
    ):
        paged(label, body()[1])
        image.write_bytes(whole)
        wrong()
        with pytest.raises(UserError, match=named):
            load(spec, image_size=16)


def returned(made: Path, given: Path) -> tuple[np.ndarray, Any, Any]:
    """Read the values that were written, and how they and the given ones lie."""
    if made.suffix == ".gz":
        back, image = nib.load(made), nib.load(given)
        assert back.shape == image.shape
        return np.asarray(back.dataobj), back.affine, image.affine
    if made.suffix == ".tif":
        ours, theirs = open_volume(made), open_volume(given)
        return np.stack([ours.plane(z) for z in range(5)]), ours.voxel, theirs.voxel
    values, affine = placed(made)
    sides = [
        {(*map(float, e.ImagePositionPatient), *map(float, e.ImageOrientationPatient)) for e in of}
        for of in ([pydicom.dcmread(p) for p in folder.iterdir()] for folder in (made, given))
    ]
    assert sides[0] == sides[1]
    return values, affine[:3, :3] @ [1, 1, 1], affine[:3, :3] @ [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("end", [".nii.gz", "", ".tif"])
def test_a_run_answers_volumes_with_volumes(end: str, tmp_path: Path) -> None:
    recipe = get("small_masks_unet")
    changes = {
        "data.spec": decathlon(tmp_path / "set", values=(0, 5, 7), end=end),
        "data.image_size": (16, 16),
        "data.test_fraction": 0.3,
        "data.val_fraction": 0.3,
        "model.name": "setr_micro",
        "model.options": {"embed_dim": 12, "depth": 1},
        "task.options.window_overlap": 0.25,
        "task.options.intensity_window": (-100, 300),
        "schedule.epochs": 1,
        "schedule.warmup_epochs": 0,
    }
    train(replace_path(recipe, changes), tmp_path / "run")
    files = [tmp_path / f"set/imagesTr/c{i}_0000{end}" for i in (2, 3)]
    broken = tmp_path / "broken.nii.gz"
    broken.write_bytes(b"nothing")
    *found, last = keymix.predict_masks(tmp_path / "run", [*files, broken], out=tmp_path / "own")
    assert last.error is not None
    assert "broken.nii.gz" in last.error
    listed = json.loads((tmp_path / "own/predictions.json").read_text())["volumes"]
    assert listed == [f"c2{end}", f"c3{end}"]
    everything = (path for path in tmp_path.glob("[!s]*/**/*") if path.is_file())
    assert not [path for path in everything if re.search(b"Jane|MRN4711", path.read_bytes())]
    assert [each.id for each in found[:2]] == ["c2_slice_0000", "c2_slice_0001"]
    assert found[0].spacing == pytest.approx((1.25, 1.5))
    keymix.predict_masks(tmp_path / "run", out=tmp_path / "own split", split="train")
    for case, path in zip(("c2", "c3"), files, strict=True):
        values, ours, theirs = returned(tmp_path / f"own/volumes/{case}{end}", path)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6 if end == ".tif" else 0)
        pixels = [each.pixels for each in found if each.id.startswith(case)]
        for number, name in ((5, "liver"), (7, "tumour")):
            count = int((values == number).sum())
            assert count == sum(each[name] for each in pixels if each)
    volumes = {path.name for path in (tmp_path / "own split/volumes").iterdir()}
    keymix.predict_masks(tmp_path / "run", out=tmp_path / "own split", overwrite=True)
    assert not volumes & {path.name for path in (tmp_path / "own split/volumes").iterdir()}
    trained = keymix.load(tmp_path / "run")
    if not end:  # a series that an anonymiser left with little
        for path in files[0].iterdir():
            one = pydicom.dcmread(path)
            del one.SOPClassUID
            one.save_as(path)
        keymix.predict_masks(tmp_path / "run", files[:1], out=tmp_path / "bare")
        written = [*(tmp_path / "bare/volumes/c2").iterdir()]
        assert len(written) == len([*files[0].iterdir()])
    if end:
        with pytest.raises(UserError, match="is a volume"):
            trained.predict(files[0])
    else:  # as a folder of images, whose errors are answers
        assert "is a volume" in str(trained.predict(files[0])[0].error)

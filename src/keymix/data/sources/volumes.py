# SPDX-License-Identifier: Apache-2.0
"""Volumes with labels: slices with masks, in the layouts of nnU-Net and the Decathlon.

``imagesTr/<case>.nii.gz`` (or nnU-Net's ``<case>_0000.nii.gz``) and ``labelsTr/<case>.nii.gz``,
with ``imagesTs/`` and ``labelsTs/`` for the test; or ``images/`` and ``labels/`` or ``masks/``,
perhaps below ``train/``, ``val/`` and ``test/``. Each may be a NIfTI file, a TIFF file or a folder
of DICOM files. ``dataset.json`` (either form) or ``classes.txt`` names the labels' values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torchvision import tv_tensors

from keymix.data.class_names import ClassNames, check_classes, read_class_names
from keymix.data.files import (
    IMAGE_FOLDERS,
    MASK_FOLDERS,
    existing_path,
    folder_named,
    folders,
    split_named,
)
from keymix.data.kinds import IGNORE, IMAGE, SLICES
from keymix.data.mask_facts import report_shared_cases
from keymix.data.record import DataFacts
from keymix.data.sample import BadSampleError, Fault, Faults, Row, Source, refuse, some
from keymix.data.specs import MASKS, source
from keymix.data.volumes import VolumeSlices, case_of, format_of, open_volume
from keymix.errors import UserError

_TRAIN, _TEST = ((("imagestr",), ("labelstr",)), (("imagests",), ("labelsts",)))
_NEAR = 0.01  # of a voxel: label and image lie at one place
_LAYOUT = (
    "Arrange them as imagesTr/ and labelsTr/, or images/ and labels/, with <case>.nii.gz, "
    "<case>.tif or a folder <case> of DICOM files in each, and dataset.json or classes.txt above"
)


@source(
    "volumes",
    argument="PATH",
    summary="volumes and labels (NIfTI, folders of DICOM files, TIFF of several pages): "
    "PATH/imagesTr/ and PATH/labelsTr/ (nnU-Net, Medical Segmentation Decathlon) or PATH/images/ "
    "and PATH/labels/; slices of a volume stay together",
    kind="slices",
    task="segmentation",
    target="mask",
    settings=("intensity_window",),
    on_disk=True,
)
def open_volumes(
    argument: str,
    faults: Faults,
    *,
    masks: str | None = None,
    stack: int = 1,
    intensity_window: tuple[float, float] | None = None,
) -> Source:
    """Open the volumes of a folder; each slice of one that has labels is a sample."""
    if masks == MASKS[True]:
        raise UserError("task.options.masks = 'multilabel': a voxel of volumes:PATH has one class.")
    root = existing_path("volumes", argument)
    places = _places(root)
    if "train" not in places:
        raise UserError(f"data volumes:{argument}: {root} has no volumes with labels. {_LAYOUT}.")
    names = _classes(root)
    values = names.values or tuple(range(len(names.names)))
    rows = []
    for split, (images, labels) in places.items():
        for case, (path, label) in _pairs(images, labels, faults).items():
            found = _fault(path, label)
            given = split if len(places) > 1 else ""
            volume = None if found else open_volume(path)
            for z in range(volume.depth if volume else 1):
                row = Row(
                    id=f"{path} slice {z}",
                    image=VolumeSlices(path, z, stack, intensity_window),
                    target=partial(_mask, label, z, values, names.ignored),
                    split=given,
                    group=case,
                    name=f"{case}_slice_{z:04d}",
                    spacing=volume.spacing if volume else None,
                    faults=found,
                )
                rows.append(row)
    report_shared_cases(rows, faults)
    return Source(
        rows=rows,
        classes=names.names,
        kind=SLICES if stack > 1 else IMAGE,
        in_chans=stack,
        test_fraction=0.2,
        facts=DataFacts(masks=MASKS[False], stack=stack, class_ids=values),
    )


def _places(root: Path) -> dict[str, tuple[Path, Path]]:
    """Find the folders of images and labels of each split."""
    found: dict[str, list[tuple[Path, Path]]] = {}
    places: list[tuple[str, Path, Sequence[str], Sequence[str]]] = [
        ("train", root, *_TRAIN),
        ("test", root, *_TEST),
        ("train", root, IMAGE_FOLDERS, MASK_FOLDERS),
    ]
    places += [
        (split_named(name), root / name, IMAGE_FOLDERS, MASK_FOLDERS) for name in folders(root)
    ]
    for split, at, *names in places:
        images, labels = (folder_named(at, each) for each in names)
        if split and images and labels:
            found.setdefault(split, []).append((images, labels))
    if twice := [split for split, several in found.items() if len(several) > 1]:
        raise UserError(f"{root} has several folders of {twice[0]}. Keep one of them.")
    return {split: several[0] for split, several in found.items()}


def _classes(root: Path) -> ClassNames:
    """Read names and values of the classes."""
    path = root / "dataset.json"
    if not path.exists():
        path = root / "classes.txt"
        found = read_class_names(path)
    else:
        try:
            pairs = [
                (name, int(value)) if isinstance(value, int) else (str(value), int(name))
                for name, value in json.loads(path.read_text("utf-8"))["labels"].items()
            ]
        except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path}: its 'labels' are no names with a value each. Correct it, or write "
                "classes.txt in its place."
            ) from error
        values = tuple(value for _, value in pairs)
        found = ClassNames(tuple(name for name, _ in pairs), values, None)
        if len(set(values)) < len(values):
            raise UserError(f"{path}: two classes have one value. Correct it.")
    found = found.without_ignored()
    if found.colours is not None:
        raise UserError(f"{path}: labels are values, no colours. Write 'value name' in each line.")
    check_classes(path, found.names, multilabel=False)
    return found


def _pairs(images: Path, labels: Path, faults: Faults) -> dict[str, tuple[Path, Path]]:
    """Match volumes and labels by the names of cases."""
    found: dict[str, dict[str, Path]] = {"image": {}, "label": {}}
    for what, folder in (("image", images), ("label", labels)):
        for path in sorted(folder.iterdir()):
            if format_of(path) is None:
                if not path.name.startswith("."):
                    faults.stranger(path)
                continue
            if (case := case_of(path)) in found[what]:
                faults.report(path, f"{found[what][case].name} is of the same case. Keep one.")
            found[what][case] = path
    cases = sorted({*found["image"], *found["label"]})
    return {
        case: (
            found["image"].get(case, images / case),
            found["label"].get(case, labels / case),
        )
        for case in cases
    }


def _fault(path: Path, label: Path) -> tuple[Fault, ...]:
    """Say what is wrong with a volume or its labels."""
    for there, wanted, what in ((path, label, "labels"), (label, path, "volume")):
        if not wanted.exists():
            return (Fault(str(there), f"{there} has no {what} in {wanted.parent}"),)
    try:
        own, other = open_volume(path), open_volume(label)
    except BadSampleError as error:
        return error.faults
    why = ""
    ours, theirs = ("x".join(map(str, (*each.size, each.depth))) for each in (own, other))
    sizes = [pair for pair in zip(own.voxel, other.voxel, strict=True) if min(pair) > 0]
    if ours != theirs:
        why = f"{label} has {theirs} voxels, and {path} has {ours}"
    elif not all(np.isclose(a, b, rtol=_NEAR) for a, b in sizes):
        ours, theirs = ("x".join(f"{mm:.4g}" for mm in each.voxel) for each in (own, other))
        why = f"{label} has voxels of {theirs} mm, and {path} of {ours} mm"
    elif own.upright is None or other.upright is None:
        pass  # nobody says how one of them lies
    elif not np.allclose(own.upright, other.upright, atol=_NEAR * min(own.voxel)):
        why = f"{label} and {path} do not lie at the same place: their affine matrices differ"
    return (Fault(str(label), why),) if why else ()


def _mask(label: Path, z: int, values: Sequence[int], ignored: int | None) -> tv_tensors.Mask:
    """Read the labels of a slice as class numbers."""
    given = open_volume(label).plane(z)
    mask = np.full(given.shape, IGNORE, dtype=np.uint8)
    for number, value in enumerate(values):
        mask[given == value] = number
    out = (given == IGNORE) | (given == (IGNORE if ignored is None else ignored))
    unknown = np.unique(given[(mask == IGNORE) & ~out]).tolist()
    if unknown:
        listed = some([f"{value:g}" for value in unknown], 3)
        refuse([Fault(str(label), f"{label} has values that no class has: {listed}")])
    return tv_tensors.Mask(torch.from_numpy(mask))

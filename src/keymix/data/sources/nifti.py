# SPDX-License-Identifier: Apache-2.0
"""NIfTI volumes with labels: slices with masks, in the layouts of nnU-Net and the Decathlon.

``imagesTr/<case>.nii.gz`` (or nnU-Net's ``<case>_0000.nii.gz``) and ``labelsTr/<case>.nii.gz``,
with ``imagesTs/`` and ``labelsTs/`` for the test; or ``images/`` and ``labels/`` or ``masks/``,
perhaps below ``train/``, ``val/`` and ``test/``. ``dataset.json`` (either form) or ``classes.txt``
names the classes of the labels' values.
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
from keymix.data.volumes import VolumeSlices, case_of, head_of, plane, volume_stem
from keymix.errors import UserError

_TRAIN, _TEST = ((("imagestr",), ("labelstr",)), (("imagests",), ("labelsts",)))
_NEAR = 1e-3  # millimetres: label and image lie at one place
_LAYOUT = (
    "Arrange them as imagesTr/<case>.nii.gz and labelsTr/<case>.nii.gz, or images/ and labels/, "
    "with dataset.json or classes.txt above"
)


@source(
    "nifti",
    argument="PATH",
    summary="NIfTI volumes and labels: PATH/imagesTr/ and PATH/labelsTr/ (nnU-Net, Medical "
    "Segmentation Decathlon) or PATH/images/ and PATH/labels/; slices of a volume stay together",
    kind="slices",
    task="segmentation",
    target="mask",
    settings=("intensity_window",),
    on_disk=True,
)
def open_nifti(
    argument: str,
    faults: Faults,
    *,
    masks: str | None = None,
    stack: int = 1,
    intensity_window: tuple[float, float] | None = None,
) -> Source:
    """Open the volumes of a folder; each slice of one that has labels is a sample."""
    if masks == MASKS[True]:
        raise UserError("task.options.masks = 'multilabel': a voxel of nifti:PATH has one class.")
    root = existing_path("nifti", argument)
    places = _places(root)
    if "train" not in places:
        raise UserError(f"data nifti:{argument}: {root} has no volumes with labels. {_LAYOUT}.")
    names = _classes(root)
    values = names.values or tuple(range(len(names.names)))
    rows = []
    for split, (images, labels) in places.items():
        for case, (path, label) in _pairs(images, labels, faults).items():
            found = _fault(path, label)
            given = split if len(places) > 1 else ""
            depth = 1 if found else head_of(path).depth
            for z in range(depth):
                row = Row(
                    id=f"{path} slice {z}",
                    image=VolumeSlices(path, z, stack, intensity_window),
                    target=partial(_mask, label, z, values, names.ignored),
                    split=given,
                    group=case,
                    name=f"{case}_slice_{z:04d}",
                    spacing=None if found else head_of(path).spacing,
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
            if (stem := volume_stem(path.name)) is None:
                if not path.name.startswith("."):
                    faults.stranger(path)
                continue
            case = case_of(path.name) if what == "image" else stem
            if case in found[what]:
                faults.report(path, f"{found[what][case].name} is of the same case. Keep one.")
            found[what][case] = path
    cases = sorted({*found["image"], *found["label"]})
    return {
        case: (
            found["image"].get(case, images / f"{case}.nii.gz"),
            found["label"].get(case, labels / f"{case}.nii.gz"),
        )
        for case in cases
    }


def _fault(path: Path, label: Path) -> tuple[Fault, ...]:
    """Say what is wrong with a volume or its labels."""
    try:
        own, other = head_of(path), head_of(label)
    except BadSampleError as error:
        return error.faults
    why = ""
    if (own.size, own.depth) != (other.size, other.depth):
        ours, theirs = ("x".join(map(str, (*h.size, h.depth))) for h in (own, other))
        why = f"{label} has {theirs} voxels, and {path} has {ours}"
    elif not np.allclose(own.spacing, other.spacing, atol=_NEAR):
        why = f"{label} has voxels of {other.spacing} mm, and {path} of {own.spacing} mm"
    elif not np.allclose(own.affine, other.affine, atol=_NEAR):
        why = f"{label} and {path} do not lie at the same place: their affine matrices differ"
    return (Fault(str(label), why),) if why else ()


def _mask(label: Path, z: int, values: Sequence[int], ignored: int | None) -> tv_tensors.Mask:
    """Read the labels of a slice as class numbers."""
    given = plane(label, z)
    mask = np.full(given.shape, IGNORE, dtype=np.uint8)
    for number, value in enumerate(values):
        mask[given == value] = number
    out = (given == IGNORE) | (given == (IGNORE if ignored is None else ignored))
    unknown = np.unique(given[(mask == IGNORE) & ~out]).tolist()
    if unknown:
        listed = some([f"{value:g}" for value in unknown], 3)
        refuse([Fault(str(label), f"{label} has values that no class has: {listed}")])
    return tv_tensors.Mask(torch.from_numpy(mask))

# SPDX-License-Identifier: Apache-2.0
"""ImageNet (ILSVRC 2012) in folders named by WordNet id, or as Kaggle's download unpacks.

Test is its validation split; validation is split off from train.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from keymix.data.files import existing_folder, folders, read_rows
from keymix.data.sample import Faults, Source
from keymix.data.sources.folder import file_rows, image_classes, images_below, labelled
from keymix.data.specs import source
from keymix.errors import UserError

_KAGGLE = Path("ILSVRC", "Data", "CLS-LOC")
_WORDS, _SOLUTION = "LOC_synset_mapping.txt", "LOC_val_solution.csv"
_SIZE = (224, 224)


@source(
    "imagenet",
    argument="PATH",
    summary="PATH/{train,val}/<WordNet id>/, or the folder of Kaggle's download; test is val",
    settings=("white_level",),
    on_disk=True,
)
def open_imagenet(argument: str, faults: Faults) -> Source:
    """Open ``PATH/{train,val}/<WordNet id>/``, or the folder that holds Kaggle's ``ILSVRC``."""
    root = existing_folder("imagenet", argument)
    base = root / _KAGGLE if (root / _KAGGLE).is_dir() else root
    missing = [name for name in ("train", "val") if not (base / name).is_dir()]
    if missing:
        raise UserError(
            f"data imagenet:{argument}: {base} has no folder {' and no '.join(missing)}. "
            "Arrange the images as train/<WordNet id>/ and val/<WordNet id>/, or give the folder "
            "of ILSVRC."
        )
    ids, notes = image_classes(base / "train", faults)
    found = {"train": labelled(root, base / "train", ids, faults)}
    if folders(base / "val"):
        found["val"] = labelled(root, base / "val", ids, faults)
    else:
        found["val"] = _flat(root, base, ids, faults)
    words = _found(root, base, _WORDS)
    return Source(
        rows=file_rows(root, found),
        classes=tuple(ids) if words is None else _named(ids, words),
        image_size=_SIZE,
        notes=notes,
    )


def _found(root: Path, base: Path, name: str) -> Path | None:
    """Find a file of Kaggle's: next to the images or a few folders above."""
    for folder in dict.fromkeys((root, base, *base.absolute().parents[:3])):
        if (folder / name).is_file():
            return folder / name
    return None


def _flat(
    root: Path, base: Path, ids: Sequence[str], faults: Faults
) -> tuple[list[str], list[int]]:
    """List validation images that lie in one folder, with their classes from Kaggle's answers."""
    solution = _found(root, base, _SOLUTION)
    if solution is None:
        raise UserError(
            f"{base / 'val'} has no class folders, and there is no {_SOLUTION} with its answers. "
            "Sort the images into val/<WordNet id>/, or put that file next to ILSVRC."
        )
    answers = {
        image: answer.split(" ")[0]
        for _, (image, answer) in read_rows(
            solution, ("ImageId", "PredictionString"), faults.report
        )
    }
    number = {wnid: i for i, wnid in enumerate(ids)}
    files, labels = [], []
    for file in images_below(base / "val", faults):
        answer = answers.get(Path(file).stem)
        if answer not in number:
            why = f"it is {answer!r}, which train does not have"
            why = "it has no answer" if answer is None else why
            faults.report(file, f"{why} ({solution}). Correct or remove it.")
        files.append(os.path.relpath(file, root))
        labels.append(number.get(answer or "", -1))
    if not files:
        raise UserError(f"{base / 'val'} has no images. Add them.")
    return files, labels


def _named(ids: Sequence[str], words: Path) -> tuple[str, ...]:
    """Name classes by the first word of each; those that share it get their ids too."""
    pairs = (line.split(" ", 1) for line in words.read_text(encoding="utf-8").splitlines() if line)
    first = {pair[0]: pair[-1].split(",")[0].strip() for pair in pairs}
    names = [first.get(wnid, wnid) for wnid in ids]
    shared = {name for name, count in Counter(names).items() if count > 1}
    return tuple(
        f"{name} ({wnid})" if name in shared else name
        for name, wnid in zip(names, ids, strict=True)
    )

# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10, CIFAR-100, SVHN and Fashion-MNIST as torchvision downloads and unpacks them.

The files lie where torchvision puts them below ROOT, so a ROOT that torchvision filled serves as it
is. Their checksums are torchvision's.
"""

from __future__ import annotations

import os
import pickle
import tarfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from torchvision import datasets

from keymix.data.sample import Faults, Row, Source, array_rows, some
from keymix.data.specs import source
from keymix.errors import UserError

# What torchvision raises: RuntimeError on a wrong checksum, the others on damage and no network.
_TROUBLE = (
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    AssertionError,
    pickle.UnpicklingError,
    tarfile.TarError,
    zlib.error,
)


@source(
    "cifar10",
    argument="[ROOT]",
    summary="60,000 colour images of 32x32 pixels in 10 classes, 170 MB",
    downloads=True,
)
def open_cifar10(argument: str, faults: Faults) -> Source:
    """Open CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html)."""
    return _cifar("cifar10", datasets.CIFAR10, argument)


@source(
    "cifar100",
    argument="[ROOT]",
    summary="60,000 colour images of 32x32 pixels in 100 classes, 169 MB",
    downloads=True,
)
def open_cifar100(argument: str, faults: Faults) -> Source:
    """Open CIFAR-100 with its 100 fine classes."""
    return _cifar("cifar100", datasets.CIFAR100, argument)


@source(
    "svhn",
    argument="[ROOT]",
    summary="99,289 house-number digits of 32x32 pixels, without the extra set, 246 MB",
    downloads=True,
)
def open_svhn(argument: str, faults: Faults) -> Source:
    """Open the cropped digits of SVHN (http://ufldl.stanford.edu/housenumbers/)."""
    kind = datasets.SVHN
    urls = [kind.split_list[split][0] for split in ("train", "test")]
    made = _made("svhn", kind, argument, urls, [{"split": "train"}, {"split": "test"}])
    return Source(
        rows=_rows("svhn", [(each.data, each.labels) for each in made]),
        classes=tuple("0123456789"),
        notes=("the extra training images of SVHN are not used",),
    )


@source(
    "fashion_mnist",
    argument="[ROOT]",
    summary="70,000 grey images of 28x28 pixels, resized to 32x32 and three channels, 31 MB",
    downloads=True,
)
def open_fashion_mnist(argument: str, faults: Faults) -> Source:
    """Open Fashion-MNIST (https://github.com/zalandoresearch/fashion-mnist)."""
    kind = datasets.FashionMNIST
    urls = [kind.mirrors[0] + name for name, _ in kind.resources]
    made = _made("fashion_mnist", kind, argument, urls, below="FashionMNIST/raw")
    return Source(
        rows=_rows("fashion_mnist", [(each.data[:, None], each.targets) for each in made]),
        classes=tuple(made[0].classes),
        image_size=(32, 32),
        notes=("grey images, repeated to three channels",),
    )


def _cifar(name: str, kind: Any, argument: str) -> Source:
    made = _made(name, kind, argument, [kind.url])
    return Source(
        rows=_rows(name, [(each.data.transpose(0, 3, 1, 2), each.targets) for each in made]),
        classes=tuple(made[0].classes),
    )


def _rows(name: str, sets: Sequence[tuple[Any, Any]]) -> list[Row]:
    """Make rows of train and test, of the pixels ``[N, C, H, W]`` and labels of each."""
    return [
        row
        for split, (pixels, labels) in zip(("train", "test"), sets, strict=True)
        for row in array_rows(
            f"{name} {split}", np.ascontiguousarray(pixels), np.asarray(labels), split
        )
    ]


def cache_folder() -> Path:
    """Where data sets are kept that name no ROOT: ``keymix`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "keymix"


def _made(
    name: str,
    kind: Any,
    argument: str,
    urls: list[str],
    splits: Sequence[dict[str, Any]] = ({"train": True}, {"train": False}),
    below: str = "",
) -> list[Any]:
    """Make torchvision's sets of train and test, and download what is missing.

    Its files, at ``urls``, lie in the folder ``below`` the root.
    """
    root = Path(argument).expanduser() if argument else cache_folder()
    with suppress(*_TROUBLE):
        return [kind(root, **split) for split in splits]
    try:
        root.mkdir(parents=True, exist_ok=True)
        # processes that start together must not write the same file at once
        with FileLock(root / f".{name}.lock"):
            return [kind(root, download=True, **split) for split in splits]
    except _TROUBLE as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[-1].rstrip(".")
        place = root / below
        there = [str(place / file) for url in urls if (place / (file := Path(url).name)).exists()]
        instead = f" instead of {some(there)}, where damaged" if there else ""
        raise UserError(
            f"data {name}: it is not whole in {root}, and downloading it failed ({why}). Put "
            f"{', '.join(urls)} into {place}{instead}, or use hf:OWNER/NAME or parquet:PATH."
        ) from error

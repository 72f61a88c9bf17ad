# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10, CIFAR-100, SVHN and Fashion-MNIST as torchvision downloads and unpacks them.

The files lie where torchvision puts them below ROOT, so a ROOT that torchvision filled serves as it
is. Their checksums are torchvision's.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from torchvision import datasets
from torchvision.datasets.utils import check_integrity

from keymix.data.sources.base import Arrays, Faults, Source
from keymix.data.specs import DataSpec
from keymix.errors import UserError

SPECS = (
    DataSpec(
        name="cifar10",
        argument="[ROOT]",
        summary="60,000 colour images of 32x32 pixels in 10 classes, 170 MB",
        function="open_cifar10",
        downloads=True,
    ),
    DataSpec(
        name="cifar100",
        argument="[ROOT]",
        summary="60,000 colour images of 32x32 pixels in 100 classes, 169 MB",
        function="open_cifar100",
        downloads=True,
    ),
    DataSpec(
        name="svhn",
        argument="[ROOT]",
        summary="99,289 house-number digits of 32x32 pixels, without the extra set, 246 MB",
        function="open_svhn",
        downloads=True,
    ),
    DataSpec(
        name="fashion_mnist",
        argument="[ROOT]",
        summary="70,000 grey images of 28x28 pixels, resized to 32x32 and three channels, 31 MB",
        function="open_fashion_mnist",
        downloads=True,
    ),
)

_PATIENCE = 30.0  # seconds without an answer before a download is given up
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


@dataclass(frozen=True)
class _File:
    """A file of the set as it is downloaded: its address, its place, its checksum."""

    url: str
    path: Path
    md5: str


@dataclass(frozen=True, kw_only=True)
class _Set:
    name: str
    hub: str  # where the Hugging Face Hub has the same images
    make: Callable[[Path, bool, bool], Any]  # root, train, download -> torchvision's data set
    pixels: Callable[[Any], NDArray[np.uint8]]  # [N, C, H, W]
    labels: Callable[[Any], Any]
    classes: Callable[[Any], list[str]]
    files: Callable[[Path], list[_File]]
    image_size: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()


def open_cifar10(argument: str, faults: Faults) -> Source:
    """Open CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html)."""
    return _open(_cifar("cifar10", datasets.CIFAR10), argument)


def open_cifar100(argument: str, faults: Faults) -> Source:
    """Open CIFAR-100 with its 100 fine classes."""
    return _open(_cifar("cifar100", datasets.CIFAR100), argument)


def open_svhn(argument: str, faults: Faults) -> Source:
    """Open the cropped digits of SVHN (http://ufldl.stanford.edu/housenumbers/)."""
    kind = datasets.SVHN
    the_set = _Set(
        name="svhn",
        hub="ufldl-stanford/svhn/cropped_digits",
        make=lambda root, train, download: kind(
            root, split="train" if train else "test", download=download
        ),
        pixels=lambda found: found.data,
        labels=lambda found: found.labels,
        classes=lambda found: [str(digit) for digit in range(10)],
        files=lambda root: [
            _File(url, root / name, md5)
            for url, name, md5 in (kind.split_list[split] for split in ("train", "test"))
        ],
        notes=("the extra training images of SVHN are not used",),
    )
    return _open(the_set, argument)


def open_fashion_mnist(argument: str, faults: Faults) -> Source:
    """Open Fashion-MNIST (https://github.com/zalandoresearch/fashion-mnist)."""
    kind = datasets.FashionMNIST
    the_set = _Set(
        name="fashion_mnist",
        hub="zalando-datasets/fashion_mnist",
        make=lambda root, train, download: kind(root, train=train, download=download),
        pixels=lambda found: found.data.numpy()[:, None],
        labels=lambda found: found.targets.numpy(),
        classes=lambda found: list(found.classes),
        files=lambda root: [
            _File(kind.mirrors[0] + name, root / kind.__name__ / "raw" / name, md5)
            for name, md5 in kind.resources
        ],
        image_size=(32, 32),
        notes=("grey images, repeated to three channels",),
    )
    return _open(the_set, argument)


def _cifar(name: str, kind: Any) -> _Set:
    return _Set(
        name=name,
        hub=f"uoft-cs/{name}",
        make=lambda root, train, download: kind(root, train=train, download=download),
        pixels=lambda found: found.data.transpose(0, 3, 1, 2),
        labels=lambda found: found.targets,
        classes=lambda found: list(found.classes),
        files=lambda root: [_File(kind.url, root / kind.filename, kind.tgz_md5)],
    )


def cache_folder() -> Path:
    """Where data sets are kept that name no ROOT: ``keymix`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "keymix"


def _open(the_set: _Set, argument: str) -> Source:
    root = Path(argument).expanduser() if argument else cache_folder()
    train, test = _made(the_set, root, argument)

    def table(found: Any, split: str) -> Arrays:
        pixels = np.ascontiguousarray(the_set.pixels(found))
        labels = np.asarray(the_set.labels(found), dtype=np.int64)
        return Arrays(f"{the_set.name} {split}", pixels, labels)

    return Source(
        classes=tuple(the_set.classes(train)),
        train=table(train, "train"),
        test=table(test, "test"),
        image_size=the_set.image_size,
        notes=the_set.notes,
    )


def _made(the_set: _Set, root: Path, argument: str) -> tuple[Any, Any]:
    """Make both splits from what is there, or else download what is missing."""

    def both(download: bool) -> tuple[Any, Any]:
        return the_set.make(root, True, download), the_set.make(root, False, download)

    try:
        return both(False)
    except _TROUBLE:
        pass
    spec = f"{the_set.name}:{argument}" if argument else the_set.name
    try:
        root.mkdir(parents=True, exist_ok=True)
        # processes that start together must not write the same file at once
        with FileLock(root / f".{the_set.name}.lock"), _impatient():
            return both(True)
    except _TROUBLE as error:
        raise UserError(_no_data(the_set, root, spec, error)) from error


def _no_data(the_set: _Set, root: Path, spec: str, error: BaseException) -> str:
    """Say in one line what is missing or damaged, and the ways out."""
    wanted = [f for f in the_set.files(root) if not check_integrity(f.path, f.md5)]
    if not wanted:  # all archives are whole, but what was unpacked from them is not
        return (
            f"data {spec}: the unpacked files in {root} are damaged ({_words(error)}). "
            "Remove them, not the archives, and run the command again."
        )
    damaged = [str(f.path) for f in wanted if f.path.exists()]
    urls = ", ".join(f.url for f in wanted)
    trouble = f"cannot be downloaded ({_words(error)})"
    if damaged:
        are = "are damaged or incomplete (their MD5 differs)"
        if len(damaged) == 1:
            are = "is damaged or incomplete (its MD5 differs)"
        trouble = f"{' and '.join(damaged)} {are}; the set {trouble}"
    return (
        f"data {spec}: {trouble}. Put {urls} into {wanted[0].path.parent}, "
        f"or use hf:{the_set.hub} or parquet:PATH."
    )


def _words(error: BaseException) -> str:
    reason = getattr(error, "reason", None)  # URLError wraps the socket's error
    cause = reason if isinstance(reason, OSError) else error
    text = getattr(cause, "strerror", None) or str(cause)
    lines = [line for line in text.splitlines() if line.strip()]
    message = lines[-1].strip().rstrip(".") if lines else type(error).__name__
    return re.sub(r"<urlopen error (?:\[Errno -?\d+\] )?(.*)>", r"\1", message)


@contextmanager
def _impatient() -> Iterator[None]:
    """Let connections of torchvision's downloads, which set no limit, time out."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)

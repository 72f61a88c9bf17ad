# SPDX-License-Identifier: Apache-2.0
"""Volumes by their paths: NIfTI files, folders of DICOM series, and TIFF files of several pages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from keymix.data.decode import head_digest
from keymix.data.formats.base import Volume, bad
from keymix.data.formats.dicom import DicomSeries, series_files
from keymix.data.formats.nifti import NiftiVolume
from keymix.data.formats.tiff import TiffVolume
from keymix.data.sample import BadSampleError, Size, Stored
from keymix.data.slices import scaled

_SUFFIXES: dict[str, Callable[[Path], Volume]] = {
    ".nii.gz": NiftiVolume,
    ".nii": NiftiVolume,
    ".tif": TiffVolume,
    ".tiff": TiffVolume,
}
_CHANNEL = "_0000"  # nnU-Net's end of an image's name


def _suffix(path: Path) -> str:
    """Return the end of the name of a file that may be a volume."""
    return next((each for each in _SUFFIXES if path.name.lower().endswith(each)), "")


def case_of(path: Path) -> str:
    """Return the case by the name of a volume: nnU-Net's images end with a channel."""
    name = path.name if path.name.strip(".") else path.resolve().name
    return name[: len(name) - len(_suffix(path))].removesuffix(_CHANNEL)


def format_of(path: Path) -> Callable[[Path], Volume] | None:
    """Return the format of a volume, by its name or, of a folder, by what is in it."""
    if path.name.startswith(".") and path.name.strip("."):
        return None
    if path.is_dir():
        return DicomSeries if any(series_files(path)) else None
    return _SUFFIXES.get(_suffix(path))


def is_volume(path: Path) -> bool:
    """Whether what is there is a volume; a TIFF file of a single page is an image."""
    found = format_of(path)
    try:
        return found is not None and (found is not TiffVolume or open_volume(path).depth > 1)
    except BadSampleError:
        return False


def open_volume(path: Path) -> Volume:
    """Open a volume; one that is damaged, or is none, is refused by a `BadSampleError`."""
    with _lock(path):
        try:
            written = path.stat().st_mtime_ns  # one that changes is opened again
        except OSError as error:
            raise bad(path, error.strerror) from error
        return _opened(path, written)


@cache
def _lock(_: Path) -> Lock:
    return Lock()


@lru_cache(maxsize=256)
def _opened(path: Path, _: int) -> Volume:
    kind = format_of(path)
    if kind is None:
        raise bad(
            path, "it is no NIfTI or TIFF file, and no folder with DICOM files directly in it"
        )
    return kind(path)


@dataclass(frozen=True)
class VolumeSlices(Stored):
    """A slice with its neighbours as channels, each scaled to 0..255."""

    path: Path
    place: int
    count: int  # channels
    window: tuple[float, float] | None  # values that become 0 and 255; None for a slice's own

    def __call__(self) -> Tensor:
        """Read it, uint8 ``[C, h, w]``; beyond the ends the first and the last slice stand in."""
        volume, half = open_volume(self.path), self.count // 2
        last = volume.depth - 1
        places = [min(max(self.place + k, 0), last) for k in range(-half, half + 1)]
        planes = {at: scaled(volume.plane(at), self.window) for at in {*places}}
        return torch.from_numpy(np.stack([planes[at] for at in places]))

    def check(self, *, decode: bool) -> Size:
        """Read the head, or the slice."""
        if decode:
            self()
        return open_volume(self.path).size

    def digest(self, *, content: bool = True) -> bytes:
        """Hash name, place, its file's length and, with ``content``, the first 64 KiB of that."""
        stored, head = open_volume(self.path).stored, b""
        file = stored[self.place % len(stored)]
        if content:
            with file.open("rb") as stream:
                head = stream.read(1 << 16)
        name = hashlib.sha256(f"{self.path.name}\n{self.place}\n{self.count}".encode()).digest()
        return head_digest(file.stat().st_size, name + head)

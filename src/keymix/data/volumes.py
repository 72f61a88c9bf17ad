# SPDX-License-Identifier: Apache-2.0
"""Volumes of NIfTI files: slices across the body as images, and masks of slices as volumes again.

Whatever the order of a file's axes, a slice lies across the axis from feet to head, its first row
in front and its columns from the patient's left to the right (nibabel's RAS+ turned by 90 degrees).
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keymix.data.decode import head_digest
from keymix.data.sample import BadSampleError, Fault, Size, Stored
from keymix.data.slices import scaled
from keymix.errors import UserError

SUFFIXES = (".nii.gz", ".nii")
_CHANNEL = "_0000"  # nnU-Net's end of an image's name
_KEPT = 8  # volumes whose values a process keeps: a compressed one cannot be read by slices


def volume_stem(name: str) -> str | None:
    """Return the name of a file of a volume without its suffix; None of another file."""
    suffix = next((each for each in SUFFIXES if name.lower().endswith(each)), None)
    return None if suffix is None or name.startswith(".") else name[: -len(suffix)]


def case_of(name: str) -> str:
    """Return the case by the name of a volume's file: nnU-Net's images end with a channel."""
    return (volume_stem(name) or name).removesuffix(_CHANNEL)


@dataclass(frozen=True)
class Head:
    """What the head of a volume says."""

    size: Size  # rows and columns of a slice
    depth: int  # slices, from the feet
    spacing: tuple[float, float]  # millimetres from row to row and from column to column
    affine: tuple[float, ...]  # from voxels to millimetres, row by row


@dataclass(frozen=True)
class VolumeSlices(Stored):
    """A slice with its neighbours as channels, each scaled to 0..255."""

    path: Path
    place: int
    count: int  # channels
    window: tuple[float, float] | None  # values that become 0 and 255; None for a slice's own

    def __call__(self) -> Tensor:
        """Read it, uint8 ``[C, h, w]``; beyond the ends the first and the last slice stand in."""
        last = head_of(self.path).depth - 1
        half = self.count // 2
        places = [min(max(self.place + k, 0), last) for k in range(-half, half + 1)]
        planes = {at: scaled(plane(self.path, at), self.window) for at in {*places}}
        return torch.from_numpy(np.stack([planes[at] for at in places]))

    def check(self, *, decode: bool) -> Size:
        """Read the head, or the slice."""
        if decode:
            self()
        return head_of(self.path).size

    def digest(self, *, content: bool = True) -> bytes:
        """Hash name, place, length and, with ``content``, the first 64 KiB."""
        head = b""
        if content:
            with self.path.open("rb") as stream:
                head = stream.read(1 << 16)
        name = hashlib.sha256(f"{self.path.name}\n{self.place}\n{self.count}".encode()).digest()
        return head_digest(self.path.stat().st_size, name + head)


def head_of(path: Path) -> Head:
    """Read the head of a volume; one that is damaged, or has several values a voxel, is refused."""
    image, turned = _opened(path)
    shape, zooms = image.shape, image.header.get_zooms()
    x, y, z = (int(np.flatnonzero(turned[:, 0] == axis)[0]) for axis in range(3))
    return Head(
        size=(shape[y], shape[x]),
        depth=shape[z],
        spacing=(float(zooms[y]), float(zooms[x])),
        affine=tuple(image.affine.ravel().tolist()),
    )


def plane(path: Path, place: int) -> NDArray[Any]:
    """Read a slice, ``[h, w]``."""
    image, turned = _opened(path)
    axes = [int(np.flatnonzero(turned[:, 0] == axis)[0]) for axis in range(3)]
    depth = image.shape[axes[2]]
    at = place if turned[axes[2], 1] > 0 else depth - 1 - place
    chosen = tuple(at if axis == axes[2] else slice(None) for axis in range(3))
    try:
        values = _held(path) if path.suffix.lower() == ".gz" else _unscaled(image)
        across = np.asarray(values[chosen]).reshape([image.shape[a] for a in sorted(axes[:2])])
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise _bad(path, str(error)) from error
    slope, inter = image.dataobj.slope, image.dataobj.inter
    if (slope, inter) != (1, 0):
        across = across * slope + inter
    if not np.isfinite(across).all():
        raise _bad(path, f"slice {place} has values that are not finite")
    across = across if axes[0] < axes[1] else across.T
    return np.rot90(across[:: int(turned[axes[0], 1]), :: int(turned[axes[1], 1])])


def volume_of(planes: Sequence[NDArray[Any]], like: Path) -> bytes:
    """Make a volume of whole numbers of all slices that lies where another does, ``.nii.gz``.

    Axes, spacing and position are that one's; nothing else of its head is taken over, which may
    name a patient.
    """
    nib, (image, turned) = _nibabel(like), _opened(like)
    upright = np.stack([np.rot90(each, -1) for each in planes], axis=-1)
    back = nib.orientations.ornt_transform(nib.orientations.axcodes2ornt("RAS"), turned)
    values = nib.orientations.apply_orientation(upright, back).reshape(image.shape)
    kind = np.uint8 if values.min() >= 0 and values.max() <= 255 else np.int32
    made = nib.Nifti1Image(values.astype(kind), image.affine)
    for name in ("sform", "qform"):
        given, code = getattr(image, f"get_{name}")(coded=True)
        getattr(made, f"set_{name}")(given, int(code))
    made.header.set_xyzt_units(*image.header.get_xyzt_units())
    return gzip.compress(made.to_bytes(), mtime=0)


def _opened(path: Path) -> tuple[Any, NDArray[np.float64]]:
    """Open a volume without its values, and say how its axes lie (nibabel's orientation)."""
    return _opened_at(path, _written(path))


@lru_cache(maxsize=256)
def _opened_at(path: Path, _: int) -> tuple[Any, NDArray[np.float64]]:
    nib = _nibabel(path)
    try:
        image = nib.load(path)
    except (OSError, EOFError, zlib.error, nib.filebasedimages.ImageFileError) as error:
        raise _bad(path, str(error)) from error
    shape = image.shape
    if len(shape) < 3 or any(n != 1 for n in shape[3:]) or image.get_data_dtype().kind not in "iuf":
        text = f"{'x'.join(map(str, shape))} of {image.get_data_dtype()}"
        raise _bad(path, f"it is {text}, and no volume of one value a voxel")
    turned = nib.io_orientation(image.affine)
    if np.isnan(turned).any():
        raise _bad(path, "its affine matrix does not say how its axes lie")
    return image, turned


def _nibabel(path: Path) -> Any:
    try:
        return importlib.import_module("nibabel")
    except ImportError as error:
        raise UserError(f"{path}: NIfTI needs nibabel: pip install 'keymix[medical]'") from error


def _written(path: Path) -> int:
    """Say when a file was written: one that changes is opened again."""
    return path.stat().st_mtime_ns if path.exists() else 0


@cache
def _lock(_: Path) -> Lock:
    return Lock()


def _held(path: Path) -> NDArray[Any]:
    """Return the values of a compressed volume, which one thread reads for all."""
    with _lock(path):
        return _values(path, _written(path))


@lru_cache(maxsize=_KEPT)
def _values(path: Path, _: int) -> NDArray[Any]:
    image = _opened(path)[0]
    return _unscaled(image).reshape(image.shape[:3])


def _unscaled(image: Any) -> NDArray[Any]:
    """Return values as they are stored, in less memory than scaled ones."""
    return np.asarray(image.dataobj.get_unscaled())


def _bad(path: Path, why: str) -> BadSampleError:
    return BadSampleError([Fault(str(path), f"cannot read volume {path}: {why}")])

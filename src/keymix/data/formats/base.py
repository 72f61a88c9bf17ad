# SPDX-License-Identifier: Apache-2.0
"""An opened volume of any format: its slices across the body, and masks of slices as a volume.

Whatever the order of a volume's axes, a slice lies across the axis from feet to head, its first row
in front and its first column on the patient's right, as radiologists look at it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from keymix.data.sample import BadSampleError, Fault, Size
from keymix.errors import UserError

_KEPT = 8  # volumes whose values a process keeps: those that cannot be read by slices


class Volume(ABC):
    """A volume that is opened, without its values.

    Its `lie` gives for each axis of its own which of the body's it is, right, front or head, and 1
    or -1 for its direction (nibabel's orientation). `voxel` is in millimetres from row to row, from
    column to column and from slice to slice, 0 where unknown. `upright` is the affine matrix from
    voxels to the right, front and head to millimetres; None where nobody says how it lies.
    """

    suffix: ClassVar[str]
    """What a written volume's name ends with; nothing of a folder."""

    def __init__(
        self, stored: Sequence[Path], shape: Sequence[int], lie: Any, affine: NDArray[Any] | None
    ) -> None:
        self.stored, self.shape, self.lock = stored, tuple(shape), Lock()
        if np.isnan(lie).any():
            raise bad(stored[0], "its affine matrix does not say how its axes lie")
        self._body, self._ways = np.asarray(lie).astype(int).T
        self._axes = x, y, z = np.argsort(self._body).tolist()
        self.size: Size = (self.shape[y], self.shape[x])
        self.depth, self.voxel, self.upright = self.shape[z], (0.0, 0.0, 0.0), affine
        if affine is not None:
            turn = np.eye(4)[:, [*self._axes, 3]]
            turn[:3, :3] *= self._ways[self._axes]
            turn[:3, 3] = np.where(self._ways < 0, np.array(self.shape) - 1, 0)
            self.upright = affine @ turn
            across, down, up = np.linalg.norm(self.upright[:3, :3], axis=0).round(6).tolist()
            self.voxel = (down, across, up)

    @property
    def spacing(self) -> tuple[float, float] | None:
        """Millimetres from row to row and from column to column; None if unknown."""
        return self.voxel[:2] if min(self.voxel[:2]) > 0 else None

    @abstractmethod
    def across(self, axis: int, at: int) -> NDArray[Any]:
        """Read a slice across one of its axes, the others in their order."""

    def whole(self) -> NDArray[Any]:
        """Read all values."""
        return np.stack([self.across(2, at) for at in range(self.shape[2])], axis=-1)

    @abstractmethod
    def files(self, values: NDArray[Any]) -> dict[str, bytes]:
        """Make files of whole numbers that lie as it does, by the ends of their names.

        Nothing else of its head is taken over, which may name a patient.
        """

    def plane(self, place: int) -> NDArray[Any]:
        """Read a slice, ``[h, w]``."""
        x, y, z = self._axes
        values = self.across(z, place if self._ways[z] > 0 else self.depth - 1 - place)
        if not np.isfinite(values).all():
            raise bad(self.stored[0], f"slice {place} has values that are not finite")
        values = values.T if x < y else values
        return values[:: -self._ways[y], :: -self._ways[x]]

    def like(self, planes: Sequence[NDArray[Any]]) -> dict[str, bytes]:
        """Make the files of a volume of whole numbers of all slices, which lies where it lies."""
        upright = np.stack([each[::-1, ::-1].T for each in planes], axis=-1)
        turned = upright.transpose(self._body.tolist())
        return self.files(np.flip(turned, tuple(np.flatnonzero(self._ways < 0).tolist())))

    def held(self) -> NDArray[Any]:
        """Return all values, which one thread reads for all."""
        with self.lock:
            return _whole(self)


@lru_cache(maxsize=_KEPT)
def _whole(volume: Volume) -> NDArray[Any]:
    return volume.whole()


def fitting(values: NDArray[Any], *kinds: type[np.integer[Any]]) -> NDArray[Any]:
    """Store whole numbers in the first kind that has them all."""
    low, high = int(values.min()), int(values.max())
    for kind in kinds:
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return values.astype(kind)
    raise UserError(f"labels from {low} to {high} do not fit the format. Renumber the classes.")


def bad(path: Path, why: object) -> BadSampleError:
    """Make the error for a file, or a folder, of a volume that cannot be read."""
    text = " ".join(str(why).split())
    return BadSampleError([Fault(str(path), f"cannot read volume {path}: {text}")])


def library(name: str, path: Path) -> Any:
    """Import what reads a format."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"{path} needs {name}: pip install 'keymix[medical]'") from error

# SPDX-License-Identifier: Apache-2.0
"""NIfTI volumes: ``.nii`` is read by slices, of ``.nii.gz`` all is unpacked."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keymix.data.formats.base import Volume, bad, fitting, library


class NiftiVolume(Volume):
    """A NIfTI file; one that is damaged, or has several values per voxel, is refused."""

    suffix = ".nii.gz"

    def __init__(self, path: Path) -> None:
        self.nib = nib = library("nibabel", path)
        try:
            self.image = image = nib.load(path)
        except (OSError, EOFError, zlib.error, nib.filebasedimages.ImageFileError) as error:
            raise bad(path, error) from error
        shape, kind = image.shape, image.get_data_dtype()
        if len(shape) < 3 or any(n != 1 for n in shape[3:]) or kind.kind not in "iuf":
            text = f"{'x'.join(map(str, shape))} of {kind}"
            raise bad(path, f"it is {text}, and no volume of one value per voxel")
        super().__init__([path], shape[:3], nib.io_orientation(image.affine), image.affine)

    def whole(self) -> NDArray[Any]:
        """Read values as they are stored, in less memory than scaled ones."""
        return np.asarray(self.image.dataobj.get_unscaled()).reshape(self.shape)

    def across(self, axis: int, at: int) -> NDArray[Any]:
        """Read a slice, scaled."""
        path, data = self.stored[0], self.image.dataobj
        try:
            values = self.held() if path.suffix.lower() == ".gz" else self.whole()
            values = np.asarray(np.moveaxis(values, axis, 0)[at])
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise bad(path, error) from error
        plain = (data.slope, data.inter) == (1, 0)
        return values if plain else np.asarray(values * data.slope + data.inter)

    def files(self, values: NDArray[Any]) -> dict[str, bytes]:
        """Make a compressed file with its axes, spacing and position."""
        values = fitting(values, np.uint8, np.int32).reshape(self.image.shape)
        made = self.nib.Nifti1Image(values, self.image.affine)
        for name in ("sform", "qform"):
            given, code = getattr(self.image, f"get_{name}")(coded=True)
            getattr(made, f"set_{name}")(given, int(code))
        made.header.set_xyzt_units(*self.image.header.get_xyzt_units())
        return {self.suffix: gzip.compress(made.to_bytes(), mtime=0)}

# SPDX-License-Identifier: Apache-2.0
"""DICOM series: a folder of files of one slice each, which lie where their heads say.

Slices are sorted by position, and values are rescaled (Hounsfield units of CT). Its axes are
columns, rows and slices.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keymix.data.files import is_image
from keymix.data.formats.base import Volume, bad, fitting, library

_PLANE = {"ImageOrientationPatient": 6, "PixelSpacing": 2, "Rows": 1, "Columns": 1}
_PLACED = {**_PLANE, "ImagePositionPatient": 3}  # with the number of values
_KIND = ("SOPClassUID", "Modality", "SliceThickness", "SeriesInstanceUID")
_SCALE = ("RescaleSlope", "RescaleIntercept")
_READ = [*_PLACED, *_KIND, *_SCALE, "NumberOfFrames", "PhotometricInterpretation"]  # no patient
_UNEVEN = 0.1  # of the distance of slices: positions are rounded
_DAMAGE = (OSError, EOFError, ValueError, LookupError, AttributeError, TypeError, struct.error)
_RAS = np.diag([-1.0, -1.0, 1.0])  # DICOM's axes are to the left, back and head


def series_files(folder: Path) -> Iterator[Path]:
    """List the DICOM files of a folder by name: those that are called so, or begin so."""
    for path in sorted(folder.iterdir()):
        name = path.name.lower()
        if name.startswith(".") or name == "dicomdir" or is_image(name) or not path.is_file():
            continue
        with path.open("rb") as stream:
            if name.endswith(".dcm") or stream.read(132)[128:] == b"DICM":
                yield path


class DicomSeries(Volume):
    """A folder with the files of one series; slices that are missing or doubled are refused."""

    suffix = ""

    def __init__(self, path: Path) -> None:
        self.dicom = library("pydicom", path)
        self.damage = (self.dicom.errors.InvalidDicomError, *_DAMAGE)
        heads = {file: self._head(file) for file in series_files(path)}
        series: dict[str, list[str]] = {}
        for file, each in heads.items():
            series.setdefault(str(each.get("SeriesInstanceUID")), []).append(file.name)
        if len(series) > 1:
            counted = "; ".join(f"{each[0]} and {len(each) - 1} more" for each in series.values())
            raise bad(path, f"it has files of {len(series)} series ({counted}): keep one of them")
        other, self.head = next(iter(heads.items()))
        for file, each in heads.items():
            for name in _PLANE:
                if not np.allclose(each[name].value, self.head[name].value, atol=1e-4):
                    raise bad(file, f"its {name} differs from that of {other.name}")
        across, down = np.reshape(self.head.ImageOrientationPatient, (2, 3)).astype(float)
        normal = np.cross(across, down)
        at = {file: np.array(each.ImagePositionPatient, float) for file, each in heads.items()}
        slices = sorted(at, key=lambda file: float(normal @ at[file]))
        self.positions = [at[file] for file in slices]
        step = normal * float(self.head.get("SliceThickness") or 1)
        if len(slices) > 1:
            _refuse_uneven(path, slices, np.diff([normal @ each for each in self.positions]))
            step = (self.positions[-1] - self.positions[0]) / (len(slices) - 1)
        rows, columns = map(float, self.head.PixelSpacing)
        affine = np.eye(4)
        affine[:3, :3] = _RAS @ np.stack([across * columns, down * rows, step], axis=1)
        affine[:3, 3] = _RAS @ self.positions[0]
        shape = (int(self.head.Columns), int(self.head.Rows), len(slices))
        super().__init__(slices, shape, library("nibabel", path).io_orientation(affine), affine)

    def _head(self, file: Path) -> Any:
        """Read how a slice lies."""
        try:
            head = self.dicom.dcmread(file, stop_before_pixels=True, specific_tags=_READ)
            given = {name: head.get(name) for name in _READ}  # values are converted when asked for
            if (given["NumberOfFrames"] or 1) > 1:
                raise ValueError("it has several frames: make a file per slice of it, or NIfTI")
            for name, count in _PLACED.items():
                if np.size(given[name] or ()) != count:
                    raise ValueError(f"it is no slice of a volume: {name} is {given[name]}")
            if empty := [name for name in _SCALE if name in head and given[name] is None]:
                raise ValueError(f"its {empty[0]} is empty")
            if (look := given["PhotometricInterpretation"]) != "MONOCHROME2":
                raise ValueError(f"its pixels are {look}, and only MONOCHROME2 is read")
        except self.damage as error:
            raise bad(file, error) from error
        return head

    def across(self, axis: int, at: int) -> NDArray[Any]:
        """Read a file, or what lies across all of them."""
        if axis != 2:
            return np.asarray(np.moveaxis(self.held(), axis, 0)[at])
        file = self.stored[at]
        try:
            found = self.dicom.dcmread(file)
            pixels = self.dicom.pixels.apply_modality_lut(found.pixel_array, found)
            return np.asarray(pixels, np.float32).reshape(self.shape[1::-1]).T
        except RuntimeError as error:
            why = f"{error}: decompress it (gdcmconv --raw), or pip install 'pylibjpeg[all]'"
            raise bad(file, why) from error
        except self.damage as error:
            raise bad(file, error) from error

    def files(self, values: NDArray[Any]) -> dict[str, bytes]:
        """Make a series of its own, a file per slice, with new identifiers and no patient."""
        uid, decimal, own = self.dicom.uid, self.dicom.valuerep.DSfloat, self.head
        values = fitting(values, np.uint8, np.int16)
        study, series, frame = (uid.generate_uid() for _ in range(3))
        made = {}
        for k, position in enumerate(self.positions):
            one = self.dicom.Dataset()
            one.SOPClassUID = own.get("SOPClassUID", uid.SecondaryCaptureImageStorage)
            one.Modality = own.get("Modality", "OT")
            one.ImageType, one.InstanceNumber = ["DERIVED", "SECONDARY"], k + 1
            one.StudyInstanceUID, one.SeriesInstanceUID = study, series
            one.FrameOfReferenceUID = frame
            one.PatientName = one.PatientID = one.StudyDate = one.StudyTime = ""
            one.Manufacturer = one.SeriesDescription = "keymix"
            one.PixelSpacing, one.SliceThickness = own.PixelSpacing, own.get("SliceThickness")
            one.ImageOrientationPatient = own.ImageOrientationPatient
            one.ImagePositionPatient = [decimal(float(x), auto_format=True) for x in position]
            one.RescaleIntercept, one.RescaleSlope = 0, 1
            one.file_meta = self.dicom.dataset.FileMetaDataset()
            one.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
            pixels = np.ascontiguousarray(values[..., k].T)
            one.set_pixel_data(pixels, "MONOCHROME2", 8 * values.itemsize)
            stream = io.BytesIO()
            one.save_as(stream, enforce_file_format=True)
            made[f"/{k + 1:04d}.dcm"] = stream.getvalue()
        return made


def _refuse_uneven(path: Path, slices: Sequence[Path], gaps: NDArray[Any]) -> None:
    """Refuse a series of which slices are missing, or doubled."""
    usual = float(np.median(gaps))
    for k, gap in enumerate(gaps):
        if gap <= 0 or abs(gap - usual) > _UNEVEN * usual:
            why = f"are {gap:.4g} mm apart, and others {usual:.4g} mm"
            if gap > usual:
                why += ": a slice is missing"
            elif gap <= _UNEVEN * usual:
                why = "lie at the same place"
            raise bad(path, f"{slices[k].name} and {slices[k + 1].name} {why}")

# SPDX-License-Identifier: Apache-2.0
"""DICOM series: a folder of files of one slice each, which lie where their heads say.

Slices are sorted by position, values are rescaled (Hounsfield units of CT), and the axes are
columns, rows and slices in millimetres to the right, front and head: DICOM's own are to the left,
back and head.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keymix.data.files import is_image
from keymix.data.formats.base import Volume, bad, fitting, held, library

_PLACED = {
    "ImageOrientationPatient": 6,
    "ImagePositionPatient": 3,
    "PixelSpacing": 2,
    "Rows": 1,
    "Columns": 1,
}  # with the number of values
_READ = (
    *_PLACED,
    *("SeriesInstanceUID", "SOPClassUID", "Modality", "NumberOfFrames", "SliceThickness"),
    "PhotometricInterpretation",
)  # nothing of the patient
_UNEVEN = 0.1  # of the distance of slices: positions are rounded
_DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    struct.error,
)  # what pydicom raises of damaged files
_RAS = np.diag([-1.0, -1.0, 1.0])  # from left, back, head


def series_files(folder: Path) -> Iterator[Path]:
    """List the DICOM files of a folder by name: those that are called so, or begin so."""
    for path in sorted(folder.iterdir()):
        name = path.name.lower()
        if name.startswith(".") or name == "dicomdir" or is_image(name) or not path.is_file():
            continue
        if name.endswith(".dcm"):
            yield path
        else:
            with path.open("rb") as stream:
                if stream.read(132)[128:] == b"DICM":
                    yield path


class DicomSeries(Volume):
    """A folder with the files of one series; slices that are missing or doubled are refused."""

    suffix = ""

    def __init__(self, path: Path) -> None:
        self.dicom = library("pydicom", path)
        heads = [(file, self._head(file)) for file in series_files(path)]
        self._refuse_mixed(path, heads)
        first = heads[0][1]
        across, down = np.reshape(first.ImageOrientationPatient, (2, 3)).astype(float)
        normal = np.cross(across, down)
        at = {file: np.asarray(head.ImagePositionPatient, dtype=float) for file, head in heads}
        self.slices = sorted(at, key=lambda file: float(normal @ at[file]))
        self.positions = [at[file] for file in self.slices]
        gaps = np.diff([normal @ each for each in self.positions])
        usual = float(np.median(gaps)) if len(gaps) else float(first.get("SliceThickness") or 1)
        for k, gap in enumerate(gaps):
            if abs(gap - usual) > _UNEVEN * usual or gap <= 0:
                pair = " and ".join(file.name for file in self.slices[k : k + 2])
                if gap <= _UNEVEN * usual:
                    raise bad(path, f"{pair} lie at the same place")
                what = "a slice is missing" if gap > usual else "they are uneven"
                why = f"{pair} are {gap:.4g} mm apart, and others {usual:.4g} mm: {what}"
                raise bad(path, why)
        step = (self.positions[-1] - self.positions[0]) / len(gaps) if len(gaps) else usual * normal
        rows, columns = map(float, first.PixelSpacing)
        affine = np.eye(4)
        affine[:3, :3] = _RAS @ np.stack([across * columns, down * rows, step], axis=1)
        affine[:3, 3] = _RAS @ self.positions[0]
        shape = (int(first.Columns), int(first.Rows), len(heads))
        turned = library("nibabel", path).io_orientation(affine)
        super().__init__(path, shape, turned, affine)
        self.head = first

    def _head(self, file: Path) -> Any:
        """Read how a slice lies."""
        try:
            head = self.dicom.dcmread(file, stop_before_pixels=True, specific_tags=list(_READ))
            given = {name: head.get(name) for name in _READ}  # values are converted when asked for
            if (given["NumberOfFrames"] or 1) > 1:
                why = "it has several frames: convert it to one file per slice, or to NIfTI"
                raise ValueError(why)
            for name, count in _PLACED.items():
                if np.size(given[name] or ()) != count:
                    raise ValueError(f"it is no slice of a volume: {name} is {given[name]}")
            if (look := given["PhotometricInterpretation"]) != "MONOCHROME2":
                raise ValueError(f"its pixels are {look}, and only MONOCHROME2 is read")
        except (self.dicom.errors.InvalidDicomError, *_DAMAGE) as error:
            raise bad(file, error) from error
        return head

    @staticmethod
    def _refuse_mixed(path: Path, heads: list[tuple[Path, Any]]) -> None:
        """Refuse files of several series, and slices that are turned or sized otherwise."""
        series: dict[str, list[str]] = {}
        for file, head in heads:
            series.setdefault(str(head.get("SeriesInstanceUID")), []).append(file.name)
        if len(series) > 1:
            counted = "; ".join(f"{each[0]} and {len(each) - 1} more" for each in series.values())
            raise bad(path, f"it has files of {len(series)} series ({counted}): keep one of them")
        (other, first), *_ = heads
        for file, head in heads:
            for name in _PLACED.keys() - {"ImagePositionPatient"}:
                if not np.allclose(head[name].value, first[name].value, atol=1e-4):
                    raise bad(file, f"its {name} differs from that of {other.name}")

    def file(self, place: int) -> Path:
        """Return the file of a slice; of one across several files, any."""
        return self.slices[min(self.place(place), len(self.slices) - 1)]

    def _values(self, at: int) -> NDArray[np.float32]:
        """Read the rescaled values of a file, columns first."""
        file = self.slices[at]
        try:
            found = self.dicom.dcmread(file)
            pixels = self.dicom.pixels.apply_modality_lut(found.pixel_array, found)
            return np.asarray(pixels, dtype=np.float32).reshape(self.shape[1::-1]).T
        except RuntimeError as error:  # NotImplementedError too
            why = f"{error}: decompress it (gdcmconv --raw), or install pylibjpeg[all]"
            raise bad(file, why) from error
        except (self.dicom.errors.InvalidDicomError, *_DAMAGE) as error:
            raise bad(file, error) from error

    def across(self, axis: int, at: int) -> NDArray[Any]:
        """Read a file, or what lies across all of them."""
        return self._values(at) if axis == 2 else np.take(held(self), at, axis)

    def files(self, values: NDArray[Any]) -> dict[str, bytes]:
        """Make a series of its own, a file per slice, with new identifiers and no patient."""
        uid = self.dicom.uid
        values = fitting(self.path, values, np.uint8, np.int16)
        bits, own = 8 * values.itemsize, self.head
        study, series, frame = (uid.generate_uid() for _ in range(3))
        made = {}
        for k, position in enumerate(self.positions):
            one = self.dicom.Dataset()
            one.SOPClassUID, one.SOPInstanceUID = own.SOPClassUID, uid.generate_uid()
            one.StudyInstanceUID, one.SeriesInstanceUID = study, series
            one.FrameOfReferenceUID, one.Modality = frame, own.get("Modality", "OT")
            one.PatientName = one.PatientID = one.StudyDate = one.StudyTime = ""
            one.Manufacturer = one.SeriesDescription = "keymix"
            one.ImageType, one.InstanceNumber = ["DERIVED", "SECONDARY"], k + 1
            one.PixelSpacing = own.PixelSpacing
            one.ImageOrientationPatient = own.ImageOrientationPatient
            decimal = self.dicom.valuerep.DSfloat
            one.ImagePositionPatient = [decimal(x, auto_format=True) for x in position]
            one.SliceThickness = own.get("SliceThickness") or None
            one.Rows, one.Columns = self.shape[1::-1]
            one.SamplesPerPixel, one.PhotometricInterpretation = 1, "MONOCHROME2"
            one.BitsAllocated = one.BitsStored = bits
            one.HighBit, one.PixelRepresentation = bits - 1, int(bits == 16)
            one.RescaleIntercept, one.RescaleSlope = 0, 1
            content = values[..., k].T.tobytes()
            one.PixelData = content + b"\0" * (len(content) % 2)
            one["PixelData"].VR = "OB" if bits == 8 else "OW"
            one.file_meta = self.dicom.dataset.FileMetaDataset()
            one.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
            stream = io.BytesIO()
            one.save_as(stream, enforce_file_format=True)
            made[f"/{k + 1:04d}.dcm"] = stream.getvalue()
        return made

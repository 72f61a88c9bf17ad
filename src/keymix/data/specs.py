# SPDX-License-Identifier: Apache-2.0
"""The table of data specs, ``NAME`` or ``NAME:PATH``. Reading it costs no heavy import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keymix.errors import UserError, unknown


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A kind of data set.

    Args:
        name: What stands before the colon.
        argument: What stands after it (``"PATH"``), or nothing.
        summary: One line of help.
        module: The module whose ``open_source(argument)`` opens it.
    """

    name: str
    argument: str
    summary: str
    module: str

    @property
    def usage(self) -> str:
        """How to write it: ``digits``, ``folder:PATH``."""
        return f"{self.name}:{self.argument}" if self.argument else self.name


SPECS: tuple[DataSpec, ...] = (
    DataSpec(
        name="digits",
        argument="",
        summary="scikit-learn's 1,797 handwritten digits, each at its own place on a 12x12 canvas; "
        "no download",
        module="keymix.data.sources.digits",
    ),
    DataSpec(
        name="folder",
        argument="PATH",
        summary="PATH/<class>/ or PATH/{train,val,test}/<class>/ with image files",
        module="keymix.data.sources.folder",
    ),
    DataSpec(
        name="parquet",
        argument="PATH",
        summary="Hugging Face image layout: a parquet file, or a folder of train-*.parquet, "
        "test-*.parquet, validation-*.parquet",
        module="keymix.data.sources.parquet",
    ),
)


def parse(spec: str) -> tuple[DataSpec, str]:
    """Split a spec as typed into its table row and its argument.

    Raises:
        UserError: If the name is unknown, or a path is missing or not wanted.
    """
    name, colon, argument = spec.partition(":")
    known = {s.name: s for s in SPECS}
    if name not in known:
        if Path(spec).expanduser().exists():
            kind = "parquet" if _holds_parquet(Path(spec).expanduser()) else "folder"
            raise UserError(f"data {spec!r} is a path without its kind. Write {kind}:{spec}")
        raise unknown("data", name, known)
    row = known[name]
    if row.argument and not argument:
        raise UserError(f"data {spec!r} needs its {row.argument}. Write {row.usage}")
    if colon and not row.argument:
        raise UserError(f"data {spec!r}: {name} takes nothing after the name. Write {row.usage}")
    return row, argument


def existing_path(spec_name: str, argument: str) -> Path:
    """Make the path behind ``spec_name:argument``, with ``~`` for the home folder.

    Raises:
        UserError: If nothing is there.
    """
    path = Path(argument).expanduser()
    if not path.exists():
        raise UserError(f"data {spec_name}:{argument}: there is no {str(path)!r}. Check the path.")
    return path


def _holds_parquet(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".parquet"
    return any(path.glob("*.parquet")) or any(path.glob("data/*.parquet"))

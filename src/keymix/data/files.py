# SPDX-License-Identifier: Apache-2.0
"""Files and folders of data: folders by name, rows of CSV files, work in threads."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TypeVar

from keymix.errors import UserError

_T = TypeVar("_T")

SUFFIXES = frozenset(
    ".bmp .gif .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split()  # noqa: SIM905
)
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""What folders, files and columns may call each split, in any case."""
IMAGE_FOLDERS = ("images", "image", "imgs", "img", "jpegimages")
"""What a folder of images with masks may be called, in any case."""
MASK_FOLDERS = ("masks", "mask", "labels", "annotations", "segmentationclass")
"""What the folder of their masks may be called, in any case."""
_THREADS = 4
_CHUNK = 256  # inputs a task: threads pay for larger files, and cost little for small ones
_LONGEST = 1 << 26  # characters of a cell: run lengths of large images pass Python's 131,072
_SHOWN = 60  # characters of a row in a message


def existing_path(spec_name: str, argument: str) -> Path:
    """Make the path behind ``spec_name:argument``, with ``~`` for the home folder."""
    path = Path(argument).expanduser()
    if not path.exists():
        raise UserError(f"data {spec_name}:{argument}: there is no {str(path)!r}. Check the path.")
    return path


def existing_folder(spec_name: str, argument: str) -> Path:
    """Make the folder behind ``spec_name:argument``."""
    path = existing_path(spec_name, argument)
    if not path.is_dir():
        raise UserError(
            f"data {spec_name}:{argument}: {path} is a file. Give the folder of the classes."
        )
    return path


def folders(path: Path) -> list[str]:
    """List the visible folders inside, sorted."""
    return sorted(p.name for p in path.iterdir() if not is_hidden(p.name) and p.is_dir())


def folder_named(path: Path, names: Sequence[str]) -> Path | None:
    """Return the folder inside with one of some names, in any case; the first of several."""
    inside = {name.lower(): path / name for name in folders(path)} if path.is_dir() else {}
    return next((inside[name] for name in names if name in inside), None)


def is_hidden(name: str) -> bool:
    """Return whether a folder is no one's data: hidden, or what archives of macOS leave."""
    return name.startswith(".") or name == "__MACOSX"


def split_named(name: str) -> str:
    """Return the split that a name of `SPLIT_NAMES` means: train, val or test; empty for none."""
    return next((split for split, names in SPLIT_NAMES.items() if name.lower() in names), "")


def is_image(name: str) -> bool:
    """Return whether by its name a file is an image and not hidden."""
    return Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")


def read_rows(
    path: Path,
    columns: Sequence[str],
    report: Callable[[object, str], None],
    *,
    optional: Sequence[str] = (),
) -> list[tuple[int, tuple[str, ...]]]:
    """Read some columns of a CSV file, wherever they stand.

    Returns the line that each row ends on, and its cells in the order of ``columns`` and then of
    those that are ``optional``, stripped; a column that is not there has empty cells.
    """
    before = csv.field_size_limit(_LONGEST)
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, strict=True)
            head = [cell.strip() for cell in next(reader, [])]
            rows = [(reader.line_num, row) for row in reader if row]
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}. Restore it.") from error
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: {error}. Restore the file.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Restore it.") from error
    finally:
        csv.field_size_limit(before)
    places = []
    for column in columns:
        given = [name for name in column.split("|") if name in head]
        if not given:
            raise UserError(
                f"{path}: the first line has no column {column.replace('|', ' or ')}; it is "
                f"{short(head)!r}. Name the columns {','.join(columns)}."
            )
        places.append(head.index(given[0]))
    places += [head.index(name) if name in head else len(head) for name in optional]
    if not rows:
        raise UserError(f"{path} has no rows below its first line. Restore it.")
    found = []
    for line, row in rows:
        if len(row) != len(head):
            why = f"it has {len(row)} cells, not {len(head)}: {short(row)!r}. Correct or remove it."
            report(f"{path}: line {line}", why)
            continue
        found.append((line, tuple([*row, ""][place].strip() for place in places)))
    return found


def short(row: Sequence[str]) -> str:
    """Write a row as it stands in its file, cut to 60 characters."""
    line = ",".join(row)
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def threads(count: int) -> ThreadPool:
    """Make threads for a ``with`` block; ``imap`` gives results in the order of its items.

    Unlike those of a ``ThreadPoolExecutor``, neither the end of the block nor that of the process
    waits for them, whatever they wait for.
    """
    return ThreadPool(count)


def in_chunks(count: int, work: Callable[[range], _T]) -> list[_T]:
    """Run ``work`` on ranges that cover ``count``, in order of the ranges' results."""
    with threads(_THREADS) as pool:
        return list(pool.imap(work, ranges(count, _CHUNK)))


def ranges(count: int, size: int) -> list[range]:
    """Cut ``count`` positions into ranges of a size; the last may be shorter."""
    return [range(start, min(count, start + size)) for start in range(0, count, size)]

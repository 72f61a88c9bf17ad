# SPDX-License-Identifier: Apache-2.0
"""The folder of a comparison: whose it is, what may be deleted in it, the files of the result."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keymix.compare.plan import Plan
from keymix.errors import UserError

MANIFEST, RESULTS, TABLE, REPORT = "comparison.json", "results.json", "results.csv", "report.html"
RUNS, LOCK = "runs", ".lock"

COLUMNS = (
    "mixer",
    "seed",
    "epoch",
    "split",
    "metric",
    "value",
    "params",
    "macs",
    "latency_ms",
    "images_per_s",
    "peak_mib",
)


def identity(plan: Plan, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal for runs to stand in one comparison.

    Mixers, seeds and the baseline may change: an existing comparison grows by them.
    """
    return {
        "recipe": plan.recipe.to_dict(),
        "match": plan.match,
        "data": {"fingerprint": data["fingerprint"], "index_sha256": data["index_sha256"]},
    }


def claim(plan: Plan, data: Mapping[str, Any], *, overwrite: bool) -> None:
    """Take the folder for this comparison: a new one, or the one that is there to go on with.

    Raises:
        UserError: If the folder holds another comparison, or files that are no comparison's.
    """
    out = plan.out
    check_folder(out)
    manifest = out / MANIFEST
    wanted = identity(plan, data)
    made: list[str] = []
    if manifest.exists():
        there = _read(manifest)
        made = list(there.get("runs", []))
        differing = _differences(there["identity"], wanted)
        if differing and not overwrite:
            told = "; ".join(
                f"{key} is {_short(a)} there and {_short(b)} here" for key, a, b in differing[:3]
            )
            raise UserError(
                f"the folder {str(out)!r} holds another comparison: {told}. Name another with "
                "--out, or throw that one away with --overwrite."
            )
        if overwrite:
            clear(out, made)
            made = []
    ours = [str(plan.folder(e, s).relative_to(out)) for e in plan.entrants for s in plan.seeds]
    out.mkdir(parents=True, exist_ok=True)
    write_json(manifest, {"identity": wanted, "runs": sorted({*made, *ours})})


def check_folder(out: Path) -> None:
    """Refuse a place that no comparison can use, before any work.

    Raises:
        UserError: If it is a file, or a folder with files that are no comparison's.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {str(out)!r} is a file. Name a folder.")
    foreign = out.exists() and not (out / MANIFEST).exists()
    if foreign and any(path.name != LOCK for path in out.iterdir()):
        raise UserError(
            f"the folder {str(out)!r} is not empty and holds no comparison. Name another with "
            "--out."
        )


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the folder against a second comparison at the same time.

    Raises:
        UserError: If another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows; there two at a time are the user's to avoid
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another comparison is running in {str(out)!r}. Wait for it, or name another "
                "folder with --out."
            ) from None
        try:
            yield
        finally:
            (out / LOCK).unlink(missing_ok=True)


def clear(out: Path, runs: Sequence[str]) -> None:
    """Delete what a comparison made in its folder, and nothing else."""
    from keymix.train import folder as run_folder

    for name in runs:
        place = out / name
        if place.is_dir() and place.resolve().is_relative_to(out.resolve()):
            run_folder.clear(place)
            for empty in (place, place.parent):
                _remove_if_empty(empty)
    for log in (out / RUNS).glob("worker*.log"):
        log.unlink()
    _remove_if_empty(out / RUNS)
    for name in (RESULTS, TABLE, REPORT, MANIFEST):
        (out / name).unlink(missing_ok=True)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _read(path: Path) -> dict[str, Any]:
    from keymix.train.files import read_json

    values = read_json(path)
    if not isinstance(values.get("identity"), dict):
        raise UserError(f"{str(path)!r} is damaged. Delete it, or name another folder with --out.")
    return values


def _differences(a: Any, b: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found = []
        for key in {**a, **b}:
            path = f"{prefix}.{key}" if prefix else str(key)
            found += _differences(a.get(key), b.get(key), path)
        return found
    return [] if a == b else [(prefix.removeprefix("recipe."), a, b)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON whole or not at all; numbers that are not finite are refused."""
    write_text(path, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    from keymix.train.files import write_atomically

    write_atomically(path, lambda stream: stream.write(text.encode("utf-8")))


def write_csv(path: Path, record: Mapping[str, Any]) -> None:
    """Write ``results.csv``: a row a number, with the mixer's costs beside it."""
    import io

    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(csv_rows(record))
    write_text(path, stream.getvalue())


def csv_rows(record: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yield the rows of ``results.csv``, in the order of its columns."""
    for run in record["runs"]:
        if run["status"] != "done":
            continue
        cost = record["costs"].get(run["mixer"], {})
        for epoch in ("last", "best"):
            for split in ("val", "test"):
                for metric, value in run[epoch][split].items():
                    if value is not None:
                        yield [
                            run["mixer"],
                            run["seed"],
                            epoch,
                            split,
                            metric,
                            value,
                            *(_blank(cost.get(name)) for name in COLUMNS[6:]),
                        ]


def _blank(value: Any) -> Any:
    return "" if value is None else value

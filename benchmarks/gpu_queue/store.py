# SPDX-License-Identifier: Apache-2.0
"""Results on disk: one record a step, one file a job, and the code that a result belongs to.

A result is of the present code while the files that its process had loaded are the same but for
comments, docstrings and blank lines.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import os
import tokenize
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from gpu_queue.job import Job, Result

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "gpu"
ARCHIVE = "kept.zip"
"""Small files of all steps, by job and step: one file, since few may leave a machine."""
State = Literal["done", "failed", "partial"]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What is known of a step.

    Args:
        state: ``done``; ``failed``: it raised, or took far too long; ``partial``: it stopped in
            time, or was cut short.
        seconds: How long it took, over all of its starts.
        finished: When, UTC, ISO 8601.
        machine: Hardware and versions.
        command: Measures the step again.
        files: The project's files that mattered, relative to the checkout.
        digest: Of what is in them, see `digest_of`.
        commit: Of the checkout, where it is known.
        result: Of a step that is done.
        error: The end of what a failed step printed.
        progress: Of a partial one, what it said.
    """

    state: State
    seconds: float
    finished: str
    machine: dict[str, Any]
    command: str
    files: list[str] = field(default_factory=list)
    digest: str = ""
    commit: str | None = None
    result: Result | None = None
    error: str | None = None
    progress: Result | None = None

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {"seconds": (int, float), "machine": dict, "files": list}
        kinds |= dict.fromkeys(("finished", "command", "digest"), str)
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} is {getattr(self, name)!r}")
        if self.state not in get_args(State):
            raise ValueError(f"state is {self.state!r}")

    @property
    def present(self) -> bool:
        """Whether it belongs to the present code."""
        return bool(self.files) and self.digest == digest_of(self.files)


Records = dict[str, dict[str, Stored]]  # by name of the job and of the step


# ---- the code a result belongs to -------------------------------------------------------------


@functools.cache
def _content(path: Path) -> str:
    """Digest of what a file does; empty if there is none."""
    if not path.is_file():
        return ""
    data = path.read_bytes()
    if path.suffix == ".py":
        data = bare(data.decode()).encode()
    return hashlib.sha256(data).hexdigest()


def bare(source: str) -> str:
    """Python without comments, docstrings and blank lines, the same for every version of Python."""
    lines = [line.encode() for line in source.splitlines()]
    for node in _statements(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            text = body[0].value
            if isinstance(text.value, str):
                _blank(lines, text)
    left = b"\n".join(lines).decode()
    kept = left.splitlines()
    comments = [(1, 0)] if left.startswith("#") else []  # most files have the licence's line alone
    if left.count("#") > sum(line.count("#") for line in kept[: len(comments)]):
        comments = [
            token.start
            for token in tokenize.generate_tokens(io.StringIO(left).readline)
            if token.type == tokenize.COMMENT
        ]
    for row, column in comments:
        kept[row - 1] = kept[row - 1][:column]
    return "\n".join(line.rstrip() for line in kept if line.strip())


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """A node and the statements within it: docstrings lie in no expression."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, name, [])
        for each in inner if isinstance(inner, list) else []:
            yield from _statements(each)


def _blank(lines: list[bytes], text: ast.Constant) -> None:
    """Put an empty string where a docstring stands."""
    first, last = text.lineno - 1, (text.end_lineno or text.lineno) - 1
    rest = lines[last][text.end_col_offset :]
    lines[first] = lines[first][: text.col_offset] + b'""' + rest
    for row in range(first + 1, last + 1):
        lines[row] = b""


def digest_of(files: Iterable[str]) -> str:
    """Digest of the project's files, by their paths relative to the checkout."""
    whole = hashlib.sha256()
    for name in sorted(files):
        whole.update(f"{name}\0{_content(ROOT / name)}\n".encode())
    return whole.hexdigest()[:16]


_RUNNER = (
    "child",
    "job",
    "machine",
    "page",
    "processes",
    "run",
    "schedule",
    "store",
)  # measure nothing


@functools.cache
def _in_checkout(folder: str) -> bool:
    return Path(folder).resolve().is_relative_to(ROOT)


def loaded_files(modules: Mapping[str, Any], job: Job) -> list[str]:
    """List the project's files among loaded modules, without those of the queue and other jobs."""
    here = Path(__file__).resolve().parent
    own, found = Path(job.source).resolve(), set()
    for module in list(modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file)
        if not path.is_absolute() or not _in_checkout(file.rpartition(os.sep)[0]):
            continue
        if not path.is_file():
            continue
        path = path.resolve()
        if not path.is_relative_to(ROOT) or "site-packages" in path.parts:
            continue
        runner = path.stem in _RUNNER or path.name == "__init__.py"
        runner |= path.stem.endswith(("_report", "_results"))  # they report, and measure nothing
        if (
            path == own
            or not path.is_relative_to(here)
            or (path.parent != here / "jobs" and not runner)
        ):
            found.add(path.relative_to(ROOT).as_posix())
    return sorted(found)


# ---- on disk ----------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def record_file(folder: Path, job: str, step: str) -> Path:
    """Where a folder of records keeps a step."""
    return folder / job / f"{step.replace('/', '__')}.json"


def write_record(path: Path, stored: Stored) -> None:
    """Keep one step's record."""
    write_text(path, json.dumps(asdict(stored), indent=1))


def read_records(folder: Path) -> Records:
    """Read a folder of records; one that is damaged counts as not there."""
    found: Records = {}
    for path in sorted(folder.glob("*/*.json")):
        try:
            stored = Stored(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        found.setdefault(path.parent.name, {})[path.stem.replace("__", "/")] = stored
    return found


def merge(*sources: Records) -> Records:
    """Put records together; of two records of a step the later one counts.

    But a partial one does not displace another, nor a failure a result of the present code.
    """
    merged: Records = {}
    for source in sources:
        for job, steps in source.items():
            into = merged.setdefault(job, {})
            for step, stored in steps.items():
                other = into.get(step)
                into[step] = stored if other is None else max(stored, other, key=_rank)
    return merged


def _rank(stored: Stored) -> tuple[bool, bool, str]:
    good = stored.state == "done" and stored.present
    return stored.state != "partial", good, stored.finished


def real(records: Records, *, tiny: bool) -> Records:
    """Leave out what dry runs measured; in a dry run, what was measured in earnest."""
    return {
        job: {
            step: stored
            for step, stored in steps.items()
            if bool(stored.machine.get("dry_run")) == tiny
        }
        for job, steps in records.items()
    }


def write(folder: Path, jobs: Sequence[Job], records: Records) -> None:
    """Write the result file of each job that has records; equal parts stand in it once."""
    for job in jobs:
        steps = records.get(job.name)
        if not steps:
            continue
        machines: list[dict[str, Any]] = []
        codes: list[dict[str, Any]] = []
        lines = {}
        for name, stored in steps.items():
            code = {"digest": stored.digest, "commit": stored.commit, "files": stored.files}
            for known, part in ((machines, stored.machine), (codes, code)):
                if part not in known:
                    known.append(part)
            line: dict[str, Any] = {
                "state": stored.state,
                "seconds": stored.seconds,
                "finished": stored.finished,
                "machine": machines.index(stored.machine),
                "code": codes.index(code),
                "command": stored.command,
            }
            for key in ("result", "error", "progress"):
                if getattr(stored, key) is not None:
                    line[key] = getattr(stored, key)
            lines[name] = line
        whole = {
            "job": job.name,
            "number": job.number,
            "title": job.title,
            "purpose": job.purpose,
            "form": dict(job.form),
            "machines": machines,
            "code": codes,
            "steps": lines,
        }
        write_text(folder / job.file, json.dumps(whole, indent=1) + "\n")


def read(folder: Path) -> Records:
    """Read the result files of a folder.

    Raises:
        ValueError: If a file that is named like a result file is none; it is named.
    """
    found: Records = {}
    for path in sorted(folder.glob("[0-9]*-*.json")):
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
            steps = {}
            for name, line in whole["steps"].items():
                code = whole["code"][line.pop("code")]
                machine = whole["machines"][line.pop("machine")]
                steps[name] = Stored(**line, **code, machine=machine)
            found[whole["job"]] = steps
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"{path} is no result file of the queue: {error}") from error
    return found


def pack(keep: Path, target: Path) -> None:
    """Put small files into one archive; nothing where there are none."""
    files = sorted(path for path in keep.rglob("*") if path.is_file())
    if not files:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    names = {path.relative_to(keep).as_posix(): path for path in files}
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        if zipfile.is_zipfile(target):  # perhaps of another machine, whose results count too
            with zipfile.ZipFile(target) as before:
                for name in before.namelist():
                    if name not in names:
                        archive.writestr(name, before.read(name))
        for name, path in names.items():
            archive.write(path, name)
    part.replace(target)


def came_back(source: Path, jobs: Sequence[Job], *, commit: str | None) -> Records:
    """Read the result files that came back from a machine.

    Args:
        source: Folder with result files and perhaps an archive, as ``--results`` names it.
        jobs: All jobs.
        commit: Of the checkout, noted in results of the present code that know of none.

    Raises:
        ValueError: If there is no such folder, a file is not what its name says, or there is no
            result that was measured.
    """
    if not source.is_dir():
        raise ValueError(f"{source}: there is no such folder")
    came = real(read(source), tiny=False)
    if not any(came.values()):
        raise ValueError(f"{source} holds no result of the queue but perhaps those of a dry run")
    unknown = sorted(came.keys() - {job.name for job in jobs})
    if unknown:
        raise ValueError(f"{source} holds results of {', '.join(unknown)}, which is no job")
    if (source / ARCHIVE).exists() and not zipfile.is_zipfile(source / ARCHIVE):
        raise ValueError(f"{source / ARCHIVE} is no zip file; without it the rest can be taken")
    return {
        job: {
            step: replace(stored, commit=commit)
            if stored.commit is None and stored.present
            else stored
            for step, stored in steps.items()
        }
        for job, steps in came.items()
    }


def unpack(source: Path, jobs: Sequence[Job], target: Path) -> None:
    """Take the small files of jobs out of the archive that came back, if there is one."""
    if (source / ARCHIVE).is_file():
        names = {job.name for job in jobs}
        with zipfile.ZipFile(source / ARCHIVE) as files:
            files.extractall(
                target, [name for name in files.namelist() if name.partition("/")[0] in names]
            )

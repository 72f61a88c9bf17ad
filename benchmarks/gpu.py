# SPDX-License-Identifier: Apache-2.0
"""What keymix computes on a GPU, and how fast, in five slices of three minutes at most.

    python benchmarks/gpu.py --slices a,b --minutes 6 --out DIR
    python benchmarks/gpu.py --slices b --only re_attention
    python benchmarks/gpu.py --minutes 9 --data CIFAR10 --wheels WHEELS --commit HASH
    python benchmarks/gpu.py --device cpu --tiny --out DIR    # a dry run
    python benchmarks/gpu.py --page                           # docs/results/gpu.md

Neither an installed keymix nor a network is needed. `gpu_slices.py` has the slices. Each is a
process that measures unit after unit and writes OUT/SLICE.json after each. If a fault of the GPU
ends it, another takes the rest. Units that are there, of the same card and commit, are not
repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gpu_slices import (
    FLASH,
    FULL,
    KERNEL,
    LIMIT,
    ROOT,
    SLICES,
    THEIRS,
    Row,
    Setting,
    Units,
    failed,
    machine,
)

OUT, PAGE = ROOT / "docs" / "results" / "gpu", ROOT / "docs" / "results" / "gpu.md"
LONGEST = 170.0  # seconds of a slice
LEAST, GRACE = 15.0, 5.0  # seconds that a unit needs; that a slice may be late
BROKEN, STARTS = 3, 4  # exit code if the GPU does not answer any more; processes of a slice
AHEAD = 1.3  # a kernel stays if it is so many times as fast as the best other path

# ---- measuring ----------------------------------------------------------------------------------


def measured(row: Row) -> bool:
    """Whether a unit has results."""
    return not {"error", "skipped"} & {*row}


def measure(letter: str, setting: Setting, out: Path, only: Sequence[str], **run: str) -> int:
    """Measure what is not done of a slice until the time is up; return an exit code.

    ``run`` is its start, commit and command. Of earlier runs, results of the same card, versions
    and commit are kept.
    """
    file = out / f"{letter}.json"
    record: Row = {
        **run,
        "title": SLICES[letter][0],
        "machine": machine(setting.device),
        "rows": {},
        "left_out": [],
    }
    if file.exists():
        old = json.loads(file.read_text(encoding="utf-8"))
        same = all(old[key] == record[key] for key in ("machine", "commit"))
        same = same and bool(run["commit"]) and not run["commit"].endswith("-dirty")
        rows = old["rows"].items()
        record["rows"] = {u: row for u, row in rows if same or row["start"] == run["start"]}
    rows = record["rows"]
    units: Units = {}

    def note(unit: str, row: Row) -> None:
        rows[unit] = {"start": run["start"], **row}
        record["left_out"] = [each for each in units if each not in rows]
        part = file.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        part.replace(file)

    try:
        units = SLICES[letter][1](setting)
    except Exception as error:
        note("start", failed(error))
        return 0
    done = [u for u, row in rows.items() if measured(row) or row["start"] == run["start"]]
    todo = [u for u in units if u not in done and u.startswith(tuple(only) or "")]
    for unit in sorted(todo, key=rows.__contains__):  # what failed before comes last
        if setting.left() < LEAST:
            break
        note(unit, {"error": "did not end in time, or ended the process"})
        start = time.time()
        try:
            row = units[unit](setting)
        except Exception as error:
            row = failed(error)
        note(unit, row | {"seconds": time.time() - start})
        said = row.get("error") or row.get("skipped") or "measured"
        print(f"{letter} {unit}: {said}", flush=True)
        if "broken" in row:
            return BROKEN
    return 0


# ---- the decision -------------------------------------------------------------------------------


class Decision(NamedTuple):
    """What becomes of a kernel: ``"stays"``, ``"goes"``, ``"is wrong"`` or ``"open"``, and why."""

    verdict: str
    why: str


def decide(records: Mapping[str, Any]) -> dict[str, Decision]:
    """Decide which kernels stay, by the name that units begin with.

    A kernel stays if it is `AHEAD` at one size or more, forward or in training, or if it alone fits
    the memory. It goes only when all its sizes were measured.
    """
    found: dict[str, Decision] = {}
    for record in records.values():
        kernels: dict[str, dict[str, Row]] = {}
        for unit, row in record["rows"].items():
            kernels.setdefault(unit.partition(",")[0], {})[unit] = row
        for name, rows in kernels.items():
            ran = {unit: row["modes"] for unit, row in rows.items() if "modes" in row}
            if any(KERNEL in paths for modes in ran.values() for paths in modes.values()):
                missing = [u for u in (*rows, *record["left_out"]) if u.partition(",")[0] == name]
                found[name] = _decided(ran, [unit for unit in missing if unit not in ran])
    return found


def _decided(ran: Mapping[str, Row], missing: Sequence[str]) -> Decision:
    """Decide from the times of one kernel's units."""
    best, where, wrong, unclear = 0.0, "", [], [*missing]
    for unit, modes in ran.items():
        for mode, paths in modes.items():
            mine, place = paths.get(KERNEL, {"error": FULL}), f"{unit}, {mode}"
            others = [row for path, row in paths.items() if path not in (KERNEL, FLASH, THEIRS)]
            if "ms" not in mine:
                wrong += [f"{place}: {mine['error']}"] if mine["error"] != FULL else []
                continue
            if not mine.get("off", 0.0) <= LIMIT["bfloat16"]:
                wrong.append(f"{place}: off by {mine['off']:.1e}")
            times = [row["ms"] for row in others if "ms" in row]
            alone = not times and all(row["error"] == FULL for row in others)
            if not times and not alone:  # the others failed
                unclear.append(place)
                continue
            ahead = math.inf if alone else min(times) / mine["ms"]
            if ahead > best:
                best, where = ahead, place
    said = f"at best {best:.2f} times as fast as the best other path ({where})"
    if best == math.inf:
        said = f"it alone fits the memory ({where})"
    if wrong:
        return Decision("is wrong", "; ".join(wrong))
    if best >= AHEAD:
        return Decision("stays", said)
    if unclear:
        return Decision("open", f"{said}; not compared: {'; '.join(unclear)}")
    return Decision("goes", said)


# ---- the page -----------------------------------------------------------------------------------

HEAD = """# On one GPU

<!-- Made by `python benchmarks/gpu.py --page`: edit that. -->

"""
NONE = """Nothing has been measured on a GPU yet.

"""
HOW = f"""## Run it

A card for a few minutes is enough. Each slice takes three minutes at most:

- **a**: the tests marked `gpu`, for 90 seconds; then every path of every mixer, output and
  gradients, in float32 and bfloat16, against float64.
- **b**: each mixer with several paths at 196, 784 and 3,136 tokens, by every path and by the
  compiled equation, next to flash attention. Three minutes are about eight of the 18 units;
  `--only` names some.
- **c**: images per second of ViT-S/4 at 32 pixels and ViT-S/16 at 224 and 448 with six mixers,
  training and inference, compiled and not.
- **d**: a training step of QKFormer, and neurons, next to SpikingJelly 2.
- **e**: two epochs of ViT-S/4 on CIFAR-10 (or on made images), and where the time goes.

```bash
python benchmarks/gpu.py --slices a,b --minutes 6 --out RESULTS
python benchmarks/gpu.py --slices b --only re_attention --minutes 3 --out RESULTS
python benchmarks/gpu.py --minutes 9 --data DATA --wheels WHEELS --commit HASH --out RESULTS
```

The machine needs a copy of this checkout and PyTorch, neither a network nor an installed keymix.
`DATA` is a folder of CIFAR-10's parquet files ([Data](../data.md)). `WHEELS` is a folder of wheels
of what is missing there, often Lightning Fabric, SMP, pycocotools, SpikingJelly and loguru:
`pip download --no-deps -d WHEELS` fetches them elsewhere. What a missing package or the end of the
time leaves out is named; the same command with the same `--out` continues with it. Copy `RESULTS`
to `docs/results/gpu`; `python benchmarks/gpu.py --page` makes this page.

A Triton kernel stays if at one size, forward or in training, it is {AHEAD} times as fast as the
best other path of ours, or if it alone fits the memory. Otherwise it is deleted.
"""
DECIDED = """
The kernels of attention and of Q-K masks are deleted; their times stay here. The last four of their
18 units were measured after that, with the commit that still had them.

- **Fastest of ours** at every size: PyTorch's fused attention (`sdpa`) for `softmax`, `static_key`
  and `key_value`, which `auto` takes on CUDA. The compiled equation for `conv_static_key`,
  `re_attention` and `static_key_re_attention`, where `auto` takes the equation: compile the model
  (`torch.compile`, `keymix train --compile true`).
- **`blocked`** takes 4 to 38 times as long as the equation, and at 3,136 tokens 0.03 to 0.06 of its
  memory. `auto` never takes it on CUDA; name it where maps do not fit.
- **Images per second** (slice c): in training, uncompiled, with softmax beside it, `static_key`
  reaches 0.83 to 0.93 of softmax, `key_value` 0.92 to 1.02, `conv_static_key` 0.23 to 0.53,
  `re_attention` 0.06 to 0.37. Fewer multiply-adds are not more images per second on this card.
  Compiling makes `re_attention` 2.2 to 6.3 times as fast.
- **Tests**: timm 1.0.29 stood on the machine of slice a, and keymix needs 1.0.31, so the tests that
  build models failed with `No module named 'timm.models._input'`, and nine files could not be
  read. On an earlier machine with 1.0.31, 53 passed and one failed, which is mended.
"""


def read(folder: Path) -> dict[str, Any]:
    """Read the records of all slices that are there."""
    files = sorted(folder.glob("?.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table."""
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def page(folder: Path) -> str:
    """Write the page of all results in a folder."""
    records = read(folder)
    if not records:
        return HEAD + NONE + HOW
    decisions = [(name, *decision) for name, decision in decide(records).items()]
    parts = [HOW]
    if decisions:
        parts.append("## Decision\n\n" + table(("kernel", "verdict", "why"), decisions) + DECIDED)
    parts += [_section(letter, record) for letter, record in records.items()]
    return HEAD + "\n".join(parts)


def summary(folder: Path) -> str:
    """Say in a line for each slice what is measured, failed and left out."""
    return "\n".join(f"{name}: {_state(record)}" for name, record in read(folder).items())


def _state(record: Row) -> str:
    rows = record["rows"]
    parts = [
        f"{sum(map(measured, rows.values()))} of {len(rows) + len(record['left_out'])} measured"
    ]
    parts += [f"{unit}: {row['error']}" for unit, row in rows.items() if "error" in row]
    parts += [f"{unit} skipped: {row['skipped']}" for unit, row in rows.items() if "skipped" in row]
    if record["left_out"]:
        parts.append(f"left out: {'; '.join(record['left_out'])}")
    return ". ".join(parts) + "."


def _section(letter: str, record: Row) -> str:
    """Write a slice: what was measured where, then its tables."""
    machine = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
    seconds = sum(row.get("seconds", 0.0) for row in record["rows"].values())
    made = f"{machine}; commit {record['commit'] or 'unknown'}; {record['start']}; {seconds:.0f} s"
    text = f"## {letter}: {record['title']}\n\n{made}: "
    text += f"`python benchmarks/gpu.py {record['command']}`\n\n{_state(record)}\n"
    rows = {unit: row for unit, row in record["rows"].items() if measured(row)}
    for unit, row in rows.items():
        if "tests" in row:
            counts = ", ".join(f"{count} {how}" for how, count in row["tests"].items()) or "none"
            cut = "; cut after 90 s" if row["cut"] else ""
            text += f"\nTests: {counts}{cut}. Failed: {'; '.join(row['wrong']) or 'none'}.\n"
        if "epochs" in row:
            text += f"\n{unit}, {row['count']:,} {row['of']}, batch {row['batch']}: epochs of "
            text += " and ".join(f"{each['seconds']:.1f} s" for each in row["epochs"])
            text += ". Parts of a bare loop's epoch: "
            text += ", ".join(f"{part} {each:.2f} s" for part, each in row["parts"].items()) + ".\n"
    if lines := [line for unit, row in rows.items() for line in _error_lines(unit, row)]:
        heads = ("mixer, path", "dtype", "error of the output", "of the worst gradient", "wrong")
        text += "\n" + table(heads, lines)
    if lines := [line for unit, row in rows.items() for line in _time_lines(unit, row)]:
        heads = ("what", "path", "ms [quartiles]", "images/s", "peak MiB", "host, share", "off")
        text += "\n" + table(heads, lines)
    return text


def _error_lines(unit: str, row: Row) -> Iterable[Sequence[str]]:
    """Write the errors of a mixer, a line a path and dtype."""
    for path, dtypes in row.get("paths", {}).items():
        for dtype, errors in dtypes.items():
            wrong = [each for each in row["wrong"] if each.startswith(f"{path}, {dtype}")]
            numbers = (f"{errors[kind]:.1e}" for kind in ("output", "gradient"))
            yield f"{unit}, {path}", dtype, *numbers, "; ".join(wrong) or "-"


def _time_lines(unit: str, row: Row) -> Iterable[Sequence[str]]:
    """Write the times of a unit, a line a mode and path."""
    for mode, paths in row.get("modes", {}).items():
        for path, each in paths.items():
            if "ms" not in each:
                yield f"{unit}, {mode}", path, each["error"], "", "", "", ""
                continue
            numbers = {key: each.get(key) for key in ("peak_mib", "issued", "off")}
            yield (
                f"{unit}, {mode}",
                path,
                f"{each['ms']:.3f} [{each['ms_q1']:.3f}, {each['ms_q3']:.3f}]",
                f"{1e3 * row['images'] / each['ms']:,.0f}" if "images" in row else "-",
                "-" if numbers["peak_mib"] is None else f"{numbers['peak_mib']:,.0f}",
                "-" if numbers["issued"] is None else f"{numbers['issued']:.2f}",
                "-" if numbers["off"] is None else f"{numbers['off']:.1e}",
            )


# ---- the command --------------------------------------------------------------------------------


def commit_here() -> str:
    """Return the commit, marked if files are changed; empty without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, cwd=ROOT, text=True).strip()
    return ""


def recorded(words: Sequence[str]) -> str:
    """Return the command without a machine's paths; a record lies where `--out` led."""
    command = re.sub(r"--out[= ]('[^']*'|\S+) ?", "", shlex.join(words))
    place = r"--(data|wheels)[= ]('[^']*'|\S+)"
    return re.sub(place, lambda found: f"--{found[1]} {found[1].upper()}", command).strip()


def run_slice(command: Sequence[str], until: float) -> None:
    """Run a slice's process, and another if a fault ended it; none outlives its time."""
    for _ in range(STARTS):
        if until - time.time() < LEAST:
            return
        child = subprocess.Popen(command, start_new_session=True)
        try:
            code = child.wait(until + GRACE - time.time())
        except subprocess.TimeoutExpired:
            return
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if code != BROKEN and code >= 0:
            return


def main(argv: Sequence[str] | None = None) -> int:
    """Measure slices, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--slices", default="a,b,c,d,e", help="letters; default a,b,c,d,e")
    parser.add_argument("--only", default="", help="what names of units begin with, by commas")
    parser.add_argument("--minutes", type=float, default=15.0, help="of all slices; default 15")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10's parquet files")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of missing packages")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of results; default {OUT}")
    parser.add_argument("--commit", default=commit_here(), help="where there is no git")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    parser.add_argument("--page", action="store_true", help="write the page of the results")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.page:
        PAGE.write_text(page(args.out), encoding="utf-8")
        return 0
    slices = args.slices.split(",")
    if not {*slices} <= {*SLICES}:
        parser.error(f"--slices {args.slices}: choose from {','.join(SLICES)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device here; --device cpu --tiny is a dry run")
    if args.wheels and not [*args.wheels.glob("*.whl")]:
        parser.error(f"--wheels {args.wheels}: there is no *.whl")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.measure:  # by the loop below
        start, until, command = args.measure
        where = {"device": args.device, "tiny": args.tiny, "data": args.data}
        run = {"start": start, "commit": args.commit, "command": command}
        only = [*filter(None, args.only.split(","))]
        return measure(args.slices, Setting(**where, until=float(until)), args.out, only, **run)
    own = [*(sys.argv[1:] if argv is None else argv)]
    end, start = time.time() + 60 * args.minutes, time.strftime("%Y-%m-%d %H:%M:%S")
    with tempfile.TemporaryDirectory() as site:
        for wheel in args.wheels.glob("*.whl") if args.wheels else ():
            zipfile.ZipFile(wheel).extractall(site)
        places = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(places)
        for done, letter in enumerate(slices):
            until = time.time() + min(LONGEST, (end - time.time()) / (len(slices) - done))
            mine = ["--slices", letter, "--commit", args.commit]
            mine += ["--measure", start, str(until), recorded(own)]
            run_slice([sys.executable, __file__, *own, *mine], until)
    print(summary(args.out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""The tests marked ``gpu``, and the contract that all mixers keep, on CUDA in each precision.

Tests run in a pytest of their own; this module is a plugin in it, which notes what came of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gpu_queue.job import Context, Job, Result, Step, table

ROOT = Path(__file__).parents[3]
PRECISIONS = {"float64": "64", "float32": "32", "bf16": "bf16", "fp16": "16"}
MOST = 20  # failures that are kept
LINES, WIDTH = 8, 300  # of the error of each
WORKERS = 8  # processes for the contract: its tests are tiny, Python is what they wait for

# ---- in pytest ----------------------------------------------------------------------------------


class Record:
    """Notes outcomes and loaded files, and writes them where a run ends."""

    def __init__(self, folder: Path, root: Path, worker: str | None) -> None:
        self.folder, self.root, self.worker = folder, root, worker
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.failures: list[dict[str, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take a phase of a test: setup, call or teardown."""
        if report.failed:
            self._fail(report)
        elif report.skipped:
            self.outcomes["skipped"] += 1
            where = report.longrepr
            reason = str(where[2] if isinstance(where, tuple) else where)
            self.reasons[reason.removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self.outcomes["passed"] += 1

    def pytest_collectreport(self, report: Any) -> None:
        """Take a file that cannot be loaded."""
        if report.failed:
            self._fail(report)

    def _fail(self, report: Any) -> None:
        self.outcomes["failed"] += 1
        if len(self.failures) < MOST:
            lines = report.longreprtext.strip().splitlines()[-LINES:]
            error = "\n".join(line[:WIDTH] for line in lines)
            self.failures.append({"test": report.nodeid, "error": error})

    def pytest_sessionfinish(self, session: Any) -> None:
        """Write it; workers know the files, their controller the outcomes."""
        plugins = session.config.pluginmanager.get_plugins()  # each conftest.py is one
        modules = [*sys.modules.values(), *plugins]
        loaded = {getattr(module, "__file__", None) for module in modules}
        paths = sorted(Path(file) for file in loaded if file)
        own = [path for path in paths if path.is_relative_to(self.root)]
        noted: Result = {"files": [path.relative_to(self.root).as_posix() for path in own]}
        if self.worker is None:
            noted |= {
                **{name: self.outcomes[name] for name in ("passed", "failed", "skipped")},
                "reasons": dict(self.reasons.most_common(MOST)),
                "failures": self.failures,
            }
        file = self.folder / f"{self.worker or 'all'}.json"
        file.write_text(json.dumps(noted), encoding="utf-8")


def pytest_addoption(parser: Any) -> None:
    """Take the folder for the record."""
    parser.addoption("--record-in", type=Path, help="folder for outcomes and loaded files")


def pytest_configure(config: Any) -> None:
    """Begin to record."""
    worker = getattr(config, "workerinput", {}).get("workerid")
    record = Record(config.getoption("--record-in"), config.rootpath, worker)
    config.pluginmanager.register(record, "record-in")


# ---- the step -----------------------------------------------------------------------------------


def marked() -> list[str]:
    """Return the test files that hold a test marked ``gpu``."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [file for file in files if "pytest.mark.gpu" in file.read_text(encoding="utf-8")]
    return [file.relative_to(ROOT).as_posix() for file in found]


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """End a process with the step, also where the step is asked to end."""

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_tests(chosen: Sequence[str], workers: int, context: Context) -> Result:
    """Run pytest in a process of its own and return what came of the tests.

    Args:
        chosen: Paths and options that say which tests.
        workers: Processes side by side; 0 for none.
        context: Of the step.

    Raises:
        TimeoutError: If they do not end in time.
        RuntimeError: If pytest itself failed, with the end of its output.
    """
    folder = context.work / "record"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    command = [
        *(sys.executable, "-m", "pytest", *chosen, "-n", str(workers), "-q", "--tb=short"),
        *("-p", "no:cacheprovider", "-p", __name__, "--record-in", str(folder)),
        *("--rootdir", str(ROOT), "--continue-on-collection-errors", "--basetemp"),
        str(context.work / "temporary"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.pop("PYTEST_ADDOPTS", None)
    if context.data is not None:
        environment["KEYMIX_DATA"] = str(context.data)
    began = time.monotonic()
    with (
        (context.work / "output.txt").open("w+", encoding="utf-8") as output,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # so that its workers can be ended with it
        ) as process,
        _ended(process),
    ):
        try:
            code = process.wait(timeout=max(1.0, context.left() - 5))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the tests had not ended after {context.left():.0f} s") from None
        output.seek(0)
        if code not in (0, 1):
            raise RuntimeError(f"pytest ended with {code}:\n{output.read()[-2000:]}")
    result: Result = json.loads((folder / "all.json").read_text(encoding="utf-8"))
    files = {file for note in folder.iterdir() for file in json.loads(note.read_text())["files"]}
    del result["files"]
    return {
        **result,
        "seconds": round(time.monotonic() - began, 1),
        "workers": workers,
        "selection": " ".join(chosen),
        "_files": sorted(files),
    }


def measure_marked(context: Context) -> Result:
    """Run the tests marked ``gpu``, one after the other: some look at memory or at waits."""
    return run_tests([*marked(), "-m", "gpu"], 0, context)


def measure_contract(precision: str, which: str, context: Context) -> Result:
    """Run the contract suite on the device in a precision.

    Args:
        precision: As the option of the tests has it.
        which: Selection by marks.
        context: Of the step.
    """
    where = ["tests/contract"]
    if context.tiny:
        where = ["tests/contract/test_mixer_dtypes.py", "-k", "identity"]
    chosen = [*where, "-m", which, "--device", context.device, "--precision", precision]
    return run_tests(chosen, 0 if context.tiny else WORKERS, context)


def steps(tiny: bool) -> list[Step]:
    """Return the steps; one of them in the dry run, since each loads torch once more."""
    contract = [
        # 15 s until all workers have loaded torch and found 5,000 tests, 5 s for CUDA and the
        # neurons' kernels, and 5,000 tests of 20 ms (13 ms on a CPU, where an operation takes 3
        # to 5 us; a launch takes 10) by 8 workers on one GPU: 15 to 30 s
        Step(
            name=f"contract/{name}",
            seconds=60,
            measure=partial(measure_contract, precision, "not slow"),
            packages=("pytest", "xdist", "pytest_timeout"),
            gpu_gib=8,  # 0.6 a worker for CUDA itself
        )
        for name, precision in PRECISIONS.items()
        if not tiny or name == "bf16"
    ]
    compiled = Step(
        # 15 s to start; 14 mixers, compiled for a call and for its gradients: 20 s each, 8 at once
        name="contract/compiled",
        seconds=75,
        measure=partial(measure_contract, "32", "slow"),
        packages=("pytest", "xdist", "pytest_timeout"),
        gpu_gib=8,
    )
    gpu = Step(
        # 15 s to start, 20 s of kernels and shorter tests, 8 runs of 10 s
        name="gpu_marked",
        seconds=120,
        measure=measure_marked,
        packages=("pytest", "xdist", "pytest_timeout", "hypothesis"),
    )
    return contract if tiny else [gpu, *contract, compiled]


# ---- the section --------------------------------------------------------------------------------


def _answer(results: Mapping[str, Result]) -> str:
    failed = {name: found["failed"] for name, found in results.items() if found["failed"]}
    empty = [name for name, found in results.items() if not found["failed"] + found["passed"]]
    if failed:
        said = ", ".join(f"{count} in `{name}`" for name, count in failed.items())
        first = f"**{sum(failed.values())} tests fail:** {said}."
    elif len(empty) == len(results):
        first = "No test ran: all were skipped."
    else:
        count = sum(found["passed"] for found in results.values())
        first = f"All {count:,} tests that ran pass."
    if empty and len(empty) < len(results):
        first += f" In {', '.join(f'`{name}`' for name in empty)} none ran."
    missing = [step.name for step in steps(False) if step.name not in results]
    if missing:
        first += f" Not measured yet: {', '.join(f'`{name}`' for name in missing)}."
    return first


def section(results: Mapping[str, Result]) -> str:
    """Say how many tests pass, and what those that fail say."""
    rows = [
        [f"`{name}`", *(f"{found[key]:,}" for key in ("passed", "failed", "skipped")), seconds]
        for name, found in results.items()
        if (seconds := f"{found['seconds']:.0f}")
    ]
    parts = [
        _answer(results),
        table(["step", "passed", "failed", "skipped", "seconds"], rows),
        "`float64` and `float32` are without TF32; `bf16` and `fp16` are autocast of float32, the "
        "backward pass outside of it. Results of one mixer are compared with one another (alone "
        "and in a batch, folded, masked, copied, compiled) and in float64 with narrower ones, "
        "within the limits of `tests/tolerances.py`. Whether an option acts is asked in float64 "
        "alone.",
    ]
    for name, found in results.items():
        parts += [
            f"`{name}`: `{failure['test']}`\n\n```text\n{failure['error']}\n```"
            for failure in found["failures"]
        ]
        left = found["failed"] - len(found["failures"])
        if left > 0:
            parts.append(f"`{name}`: {left} more.")
    return "\n\n".join(parts)


JOB = Job(
    number=1,
    name="test_suite",
    title="Tests on CUDA",
    purpose=(
        "Does what holds on the CPU hold on CUDA? The tests marked `gpu`, and the contract that "
        "all mixers keep, in float64, float32, under autocast to bf16 and fp16, and compiled."
    ),
    form={
        "passed": "tests that passed",
        "failed": "tests that failed, or files that could not be loaded",
        "skipped": "tests that were skipped",
        "reasons": "how many were skipped for which reason",
        "failures": f"test and last lines of the error, of the first {MOST}",
        "seconds": "of the run, start included",
        "workers": "processes side by side; 0 for one",
        "selection": "what pytest was given",
    },
    steps=steps,
    section=section,
)

# SPDX-License-Identifier: Apache-2.0
"""Run what is left of the GPU measurements, for so many minutes.

    python benchmarks/gpu_queue/run.py --list
    python benchmarks/gpu_queue/run.py --minutes 9 --lease 27 --data DATA --results RESULTS
    python benchmarks/gpu_queue/run.py --dry-run --results RESULTS

Jobs come in order and consist of steps. A step is skipped if its result exists for the present
code, in ``docs/results/gpu``, in RESULTS or in the work folder on this machine; what was measured
on earlier code comes last. A step is started only if it fits into the minutes that are left;
trainings stop in time and resume from their checkpoint when the queue runs again on this machine.
The queue may be killed at any second: what was done is kept, and the rest runs the next time.
keymix need not be installed. DATA holds ``cifar10/*.parquet``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_queue.schedule import Queue

_BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[0] = str(_BENCHMARKS)  # where `gpu_queue` lies; processes started afresh need it too


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="end by itself after so long (default 9)")
    add(
        "--lease",
        type=float,
        default=float("inf"),
        metavar="MINUTES",
        help="the machine is given back in so many minutes from now: a training that cannot end "
        "by then is not started (default: never)",
    )
    add("--data", type=Path, metavar="DIR", help="folder with cifar10/*.parquet")
    add("--results", type=Path, metavar="DIR", help="where result files go; those there count")
    add(
        "--work",
        type=Path,
        metavar="DIR",
        default=Path(tempfile.gettempdir()) / "keymix-gpu-queue",
        help="folder on this machine's own disk for checkpoints and records (default: "
        "keymix-gpu-queue among the temporary files)",
    )
    add("--wheels", type=Path, metavar="DIR", help="wheels of packages that this machine lacks")
    add("--only", nargs="+", default=[], metavar="JOB[/STEP]", help="patterns, e.g. mixers/static*")
    add(
        "--again",
        nargs="+",
        default=[],
        metavar="JOB[/STEP]",
        help="measure again though there is a result",
    )
    add("--list", action="store_true", help="print what is done and what is next, and end")
    add("--dry-run", action="store_true", help="the smallest sizes, on the CPU")
    given = parser.parse_args(argv)
    if not given.minutes > 0 or not given.lease > 0:
        parser.error("--minutes and --lease must be above 0")
    if given.data is not None and not given.data.is_dir():
        parser.error(f"--data {given.data}: there is no such folder")
    if not given.list and given.results is None:
        parser.error("--results DIR is needed: say where result files go")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Run the queue; 0 if nothing failed, 1 if a step failed, 2 if nothing could run."""
    from gpu_queue import machine, store
    from gpu_queue.schedule import Queue

    start = time.monotonic()
    given = parse(argv)
    work = (given.work / "dry-run" if given.dry_run else given.work).resolve()
    source = str(store.ROOT / "src")
    sys.path.insert(1, source)
    paths = [source, str(_BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # Asking whether there is a GPU must not open it here: forks of this process would lose it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        if given.wheels is not None:
            machine.install(given.wheels, work / "site")
        queue = Queue(
            tiny=given.dry_run,
            data=None if given.data is None else given.data.resolve(),
            results=given.results,
            work=work,
            only=given.only,
            again=given.again,
            start=start,
            end=start + 60 * given.minutes,
            lease=start + 60 * given.lease,
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    complete = queue.packages()
    if given.list:
        queue.summary()
        return 0
    if not complete:
        return 2
    try:
        return measure(queue)
    except OSError as error:
        print(f"stopped: {error}; what was measured is kept in {work}", file=sys.stderr)
        return 2


def measure(queue: Queue) -> int:
    """Measure what fits, and print how it stands; 0 if nothing failed, else 1, or 2 if none ran.

    Raises:
        OSError: If a folder cannot be written to.
    """
    from filelock import FileLock, Timeout

    def stop(number: int, frame: FrameType | None) -> None:
        queue.stopping = True

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    queue.work.mkdir(parents=True, exist_ok=True)
    good = True
    try:
        with FileLock(queue.work / "lock").acquire(timeout=0):
            queue.publish_here()
            if queue.following([]) is not None:  # else there is no need to load anything
                if not queue.check():
                    return 2
                good = queue.run()
    except Timeout:
        print(f"another queue works in {queue.work}; give --work another folder", file=sys.stderr)
        return 2
    queue.summary()
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())

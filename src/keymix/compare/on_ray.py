# SPDX-License-Identifier: Apache-2.0
"""Train the runs of a comparison as tasks of a Ray cluster: ``keymix compare --on ray``.

A task does on its node what ``keymix compare --run`` does there, in the folder that all nodes
share; Ray starts it again when its process or node dies. What it did is read from the folder.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from keymix.compare.events import GRACE, LOOK, Course, Event, resume_hint
from keymix.compare.folder import PLAN
from keymix.compare.question import Plan, Question
from keymix.compare.runs import ERROR, read_error
from keymix.errors import FAILURES, Interrupted, KeymixWarning, UserError, reason
from keymix.mixers.registry import import_file
from keymix.train.files import LOCK, make_folder, write_text
from keymix.train.folder import is_finished
from keymix.train.model import load_data
from keymix.train.signals import interruptible

RETRIES = 3
"""How often Ray starts a run again whose process or node died."""
PATIENCE = 60.0
"""Seconds until this machine sees a node's file (NFS caches folders), or says that none starts."""
Train = Callable[..., None]


@contextmanager
def joined(on: str) -> Iterator[None]:
    """Be connected to Ray, which is started here if need be, for as long as the block runs."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starts nothing on a busy machine
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # its pages of text on what it retries
    os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))  # else without end
    if Path("~/.ray/auth_token").expanduser().exists():  # which a client does not send by itself
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError:
        raise UserError("--on ray needs Ray: `pip install 'keymix[ray]'`.") from None
    quietly = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        # which puts Ray's handler of SIGTERM away, and its warnings
        with interruptible(lambda: "nothing was begun"), warnings.catch_warnings(action="ignore"):
            ray.init(None if on == "ray" else on, **quietly)
    except (*FAILURES, ray.exceptions.RayError) as error:
        raise UserError(f"--on {on}: no cluster of Ray's there: {reason(error)}") from None
    try:
        yield
    finally:
        ray.shutdown()


def shares(question: Question, threads: int, *, fixed: bool) -> tuple[int, int, float]:
    """Return how many runs the cluster trains at once, and the threads and GPUs of each.

    A run takes a GPU by default if there is any; those on GPUs share the cores of their node unless
    threads are `fixed`. A UserError says why no run would ever start.
    """
    import ray

    nodes = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    asked, there = question.gpus_per_run, any(node.get("GPU") for node in nodes)
    gpus = float(there) if asked is None else asked
    each = int(1 / min(gpus, 1) + 1e-6) if gpus else 0  # runs that share a GPU, which is not split
    rooms = [int(node.get("GPU", 0) // max(gpus, 1)) * each if gpus else 10**9 for node in nodes]
    by_node = [*zip((int(node.get("CPU", 0)) for node in nodes), rooms, strict=True)]
    if gpus and not (fixed or question.processes):
        threads = max(1, min((n // room for n, room in by_node if room), default=1))
    at_once = sum(min(n // threads, room) for n, room in by_node)
    if not at_once:
        raise UserError(
            f"no node of the cluster has {gpus:g} GPUs and {threads} CPUs for a run: give fewer "
            "--gpus-per-run, or more --processes (each has fewer threads) in a new folder"
        )
    return at_once, threads, gpus


def train_on_ray(plan: Plan, course: Course, numbers: Sequence[int], train: Train) -> None:
    """Train runs, each by `train` on a node; SIGINT and SIGTERM let them save, and raise."""
    import ray

    question = plan.question
    *_, gpus = shares(question, plan.threads, fixed=True)
    question = replace(question, gpus_per_run=gpus)
    there = replace(plan, out=plan.out.resolve())
    places = {number: there.folder(*plan.pairs[number]) for number in numbers}
    task = ray.remote(num_cpus=plan.threads, num_gpus=gpus, max_retries=RETRIES)(train_here)
    kept, here = question.folder.resolve() / PLAN, Path.cwd()
    begun, due = set[int](), time.monotonic() + PATIENCE
    with interruptible(lambda: resume_hint(plan.out)) as interrupts, interrupts.deferred():
        left = {task.remote(train, there, number, kept, here): number for number in numbers}
        try:
            while left:
                interrupts.look()
                ended, _ = ray.wait([*left], timeout=LOOK)
                done = {left.pop(ref): ref for ref in ended}
                for number in {*left.values(), *done} - begun:
                    if number in done or (places[number] / LOCK).exists():
                        begun.add(number)
                        course.start(number)
                course.look()
                for number, ref in done.items():
                    _settle(ref, places[number])
                    course.end(number)
                if time.monotonic() > due:
                    due, text = due + PATIENCE, "" if begun else "Ray has started no run yet"
                    try:
                        shares(question, plan.threads, fixed=True)
                    except UserError as error:  # its nodes have left
                        text = str(error)
                    if text:
                        course.watch(Event(kind="note", text=f"waiting for the cluster: {text}"))
        finally:
            for ref in left:
                ray.cancel(ref)
            if left:
                ray.wait([*left], num_returns=len(left), timeout=GRACE)


def _settle(task: object, place: Path) -> None:
    """Leave in a run's folder why its task failed, or wait for the files of one that is done."""
    import ray

    why, limit = "", time.monotonic() + PATIENCE
    try:
        for text in ray.get(task):
            warnings.warn(text, KeymixWarning, stacklevel=3)
    except ray.exceptions.RayError as error:
        why = reason(getattr(error, "cause", error))
    while not why and not is_finished(place):
        time.sleep(LOOK)
        if time.monotonic() > limit:
            why = f"a node trained it, and {str(place)!r} lacks it: all nodes must share the folder"
    if why:
        make_folder(place)
        write_text(place / ERROR, f"{why}\n")


def train_here(train: Train, plan: Plan, number: int, kept: Path, here: Path) -> list[str]:
    """Train a run on this node, and return what it warned of or raise why it failed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    with suppress(OSError):
        os.chdir(here)  # relative paths are the command's
    if not kept.is_file():
        raise UserError(
            f"{socket.gethostname()} does not see {str(kept)!r}: all nodes must share the folder"
        )
    for path in plan.imports:
        import_file(path)
    with warnings.catch_warnings(record=True) as caught:
        try:
            train(plan, load_data(plan.recipe.data), watch=lambda event: None, only=number)
        except Interrupted as stop:
            if stop.signum == signal.SIGTERM:  # its node shuts down: the run resumes on another one
                os._exit(stop.exit_code)
            raise
    place = plan.folder(*plan.pairs[number])
    if not is_finished(place):
        raise UserError(read_error(place))
    return [str(each.message) for each in caught if issubclass(each.category, KeymixWarning)]

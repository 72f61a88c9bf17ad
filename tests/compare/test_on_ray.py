# SPDX-License-Identifier: Apache-2.0
"""Runs as tasks of a Ray cluster: killed, stopped; and what is refused."""

from __future__ import annotations

import csv
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from few_digits import small

from commands import wait_for
from keymix.analysis.threads import threads_each
from keymix.cli import main
from keymix.compare import on_ray, worker
from keymix.compare.events import Event
from keymix.compare.question import Question
from keymix.compare.run import train_one
from keymix.errors import Interrupted, UserError
from keymix.records import to_json
from keymix.train.files import LOCK

MEASURED = ("latency_ms", "images_per_s", "peak_mib")
FAULTS = '''
import os, signal, time
from pathlib import Path
from keymix.compare import worker

place, train = Path({place!r}), worker.train


def once(name):
    """Whether this is the first time, which a file says."""
    try:
        (place / name).open("x").close()
    except FileExistsError:
        return False
    return True


def struck(recipe, out, **more):
    """Train, and after an epoch be slow, or be killed once."""

    def strike(line):
        if (place / "slow").exists():
            time.sleep(1)
        elif once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)

    return train(recipe, out, **more | {{"progress": strike}})


worker.train = struck
'''


def processes_of(session: str) -> list[str]:
    """The commands of the processes that a cluster's session has."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = place.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if session in command:
            found.append(command[:100])
    return found


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of a node with the cores of a run; it ends with the test."""
    for name in ("RAY_worker_niceness", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # read when Ray is imported
    monkeypatch.setenv("RAY_task_oom_retries", "3")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    cores = {"num_cpus": threads_each(1)}
    made = cluster_utils.Cluster(
        initialize_head=True, head_node_args={**cores, "include_dashboard": False}
    )
    session = made.head_node.get_session_dir_path()
    try:
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        yield made
    finally:
        made.shutdown()
        wait_for(lambda: not processes_of(session))
        shutil.rmtree(session)


def table(out: Path) -> list[dict[str, str]]:
    with (out / "results.csv").open(newline="") as stream:
        rows = [*csv.DictReader(stream)]
    return [{key: row[key] for key in row if key not in MEASURED} for row in rows]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_cluster_trains_what_one_process_would_whatever_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One run is there before; others are stopped by Ctrl-C, and one is killed."""
    asked: dict[str, Any] = {"seeds": 1, "epochs": 2, "controls": False, "images": False}
    asked["mixers"] = "mhsa,ska,kv"
    alone, out = tmp_path / "alone", tmp_path / "out"
    handler = signal.getsignal(signal.SIGTERM)
    small(alone, **asked)
    asked["out"] = out
    words = {"data": "digits", "limit": 100, "processes": 1}
    assert train_one(Question(**asked, **words, reference=False), 0)

    monkeypatch.setattr(worker, "train", worker.train)  # to be restored
    faults = tmp_path / "faults.py"
    faults.write_text(FAULTS.format(place=str(tmp_path)))
    (tmp_path / "slow").touch()

    def stop(event: Event) -> None:
        if event.kind == "epoch":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="stopped by SIGINT: runs and checkpoints are kept in"):
        small(**asked, on="ray", imports=[faults], progress=stop)
    assert [*out.rglob("checkpoints/epochs_*")]
    assert not [*out.rglob(LOCK)], "a run was killed, and did not end"
    (tmp_path / "slow").unlink()

    events = list[Event]()
    small(**asked, on="ray", imports=[faults], progress=events.append)
    assert (tmp_path / "killed").exists()
    plan = next(event for event in events if event.kind == "plan")
    assert (plan.done, plan.total) == (1, 3)
    for kind in ("start", "done"):
        assert len({(e.mixer, e.seed) for e in events if e.kind == kind}) == 2
    assert table(out) == table(alone)

    again = list[Event]()
    small(**asked, progress=again.append)
    assert next((e.done, e.total) for e in again if e.kind == "plan") == (3, 3)

    with pytest.raises(
        UserError, match=r"no node of the cluster has 2 GPUs and \d+ CPUs for a run"
    ):
        small(**asked | {"out": tmp_path / "other"}, on="ray", gpus_per_run=2)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert not capfd.readouterr().out


# ---- without a cluster ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--gpus-per-run 0.5", "gpus_per_run = 0.5 is for runs on Ray: add --on ray."),
        ("--on ray --gpus-per-run 1.5", "gpus_per_run = 1.5: give a part of a GPU, or whole ones."),
        ("--on ray --gpus-per-run half", "option --gpus-per-run 'half': give a number."),
        ("--on slurm", "on = 'slurm': runs train on 'ray', or on 'ray://HOST:PORT'."),
        ("--on ray --plan", "--plan and --on exclude each other: --on trains all runs."),
        ("--on ray --run 0", "--run and --on exclude each other: --on trains all runs."),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    words: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words.split(), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"keymix: error: {line}\n"
    assert not (tmp_path / "out").exists()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"needs Ray: `pip install 'keymix\[ray\]'`"):
        small(tmp_path / "out", on="ray")
    assert not (tmp_path / "out").exists()


def with_nodes(monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, float]) -> None:
    """Let a cluster have these nodes, and one that is dead."""
    there = [{"Alive": True, "Resources": node} for node in nodes]
    there.append({"Alive": False, "Resources": {"CPU": 99.0, "GPU": 99.0}})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: there))


@pytest.mark.parametrize(
    ("gpus", "processes", "share"),
    [
        (None, None, (5, 8, 1.0)),  # a GPU each, and its part of the cores
        (0.5, None, (10, 4, 0.5)),
        (0.3, None, (15, 2, 0.3)),
        (2.0, None, (2, 16, 2.0)),
        (0.5, 2, (6, 6, 0.5)),  # as many threads as two processes have
        (0.0, None, (10, 6, 0.0)),
    ],
)
def test_runs_share_the_gpus_and_cores_of_nodes(
    gpus: float | None,
    processes: int | None,
    share: tuple[int, int, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_nodes(monkeypatch, {"CPU": 32.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}, {"CPU": 24.0})
    question = Question(on="ray", gpus_per_run=gpus, processes=processes)
    assert on_ray.shares(question, 6, fixed=False) == share


def test_what_no_node_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_nodes(monkeypatch, {"CPU": 8.0}, {"CPU": 4.0, "GPU": 1.0})
    for gpus, threads in ((2, 1), (0, 9), (1, 5)):
        with pytest.raises(UserError, match=f"has {gpus} GPUs and {threads} CPUs for a run: give"):
            on_ray.shares(Question(on="ray", gpus_per_run=gpus), threads, fixed=True)


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    kept = tmp_path / "plan.json"
    with pytest.raises(UserError, match=r"does not see '\S+plan.json': all nodes must share"):
        on_ray.train_here(pytest.fail, None, 0, kept, Path.cwd())  # type: ignore[arg-type]
    signal.signal(signal.SIGINT, handler)


def test_where_runs_train_is_not_kept_in_the_plan() -> None:
    question = Question(data="digits", on="ray://head:10001", gpus_per_run=0.5)
    assert not {"on", "gpus_per_run"} & to_json(question).keys()
    assert question.asks_for_runs_of(Question(data="digits"))

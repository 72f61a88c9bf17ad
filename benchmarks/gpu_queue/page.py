# SPDX-License-Identifier: Apache-2.0
"""Make ``docs/results/gpu.md`` of the result files in ``docs/results/gpu``.

    python benchmarks/gpu_queue/page.py
    python benchmarks/gpu_queue/page.py --take RESULTS

With ``--take`` the result files that came back from a machine are merged first. The page follows
from the files and the jobs; which results are of earlier code, ``run.py --list`` says.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # where `gpu_queue` lies

from gpu_queue import store
from gpu_queue.job import Job, table
from gpu_queue.jobs import jobs
from gpu_queue.store import Stored

PAGE = store.ROOT / "docs" / "results" / "gpu.md"
COMMAND = "python benchmarks/gpu_queue/page.py"
Known = Mapping[str, Stored]  # of one job, by step

_HOW = """\
**Before.** The GPU machine needs no network and no installation, but a copy of this checkout, a
folder `DATA` with `cifar10/*.parquet` ([Data](../data.md)), and wheels of the packages that it
lacks (`--wheels DIR`); Lightning Fabric, SpikingJelly and loguru are usually missing. The first
command, on that machine, prints what is done, what is next, how many minutes that needs and what is
lacking.

**On the machine.** The second command measures for nine minutes and ends by itself. `--lease` is
the number of minutes, from now, until the machine is given back: lower it each time that you
repeat the command (27, 17, 8). Finished steps are skipped, and a training resumes from its
checkpoint on the machine's disk. The command may be killed at any second. A step that failed is
repeated only with `--again JOB/STEP`. Copy `RESULTS` back before the machine goes: small JSON
files and one archive, of all that was measured there.

**Afterwards.** In your own checkout, at the same commit, the third command merges `RESULTS` into
`docs/results/gpu` and makes this page. Commit both.

```bash
python benchmarks/gpu_queue/run.py --list
python benchmarks/gpu_queue/run.py --minutes 9 --lease 27 --data DATA --results RESULTS
python benchmarks/gpu_queue/page.py --take RESULTS
```"""


# ---- one job ----------------------------------------------------------------------------------


class View:
    """A job and what is known of the steps that it has today.

    Args:
        job: The job.
        known: Its records, those of earlier steps among them.
    """

    def __init__(self, job: Job, known: Known) -> None:
        self.job = job
        self.steps = list(job.steps(False))
        names = [step.name for step in self.steps]
        self.known = {name: known[name] for name in names if name in known}
        self.dropped = len(known) - len(self.known)

    def those(self, state: str) -> dict[str, Stored]:
        """Records in a state, in the order of the steps."""
        return {name: stored for name, stored in self.known.items() if stored.state == state}

    @property
    def done(self) -> dict[str, Stored]:
        """What is measured."""
        return self.those("done")

    @property
    def state(self) -> str:
        """Where the job stands, in words."""
        of, done, failed = len(self.steps), len(self.done), len(self.those("failed"))
        if not done:
            text = "failed" if failed == of else "not measured yet"
        else:
            text = "measured" if done == of else f"{done} of {of} steps measured"
        return text + (f", {failed} failed" if failed and text != "failed" else "")

    @property
    def minutes(self) -> float:
        """What all steps take together, as measured or else by estimate."""
        results = {name: stored.result or {} for name, stored in self.done.items()}
        shared = max(1, self.job.side_by_side(results))
        total = 0.0
        for step in self.steps:
            there = self.done.get(step.name)
            takes = self.job.estimate(step, results) if there is None else there.seconds
            total += takes / (shared if step.resumable else 1)
        return total / 60

    @property
    def heading(self) -> str:
        """Number and title."""
        return f"{self.job.number}. {self.job.title}"

    @property
    def link(self) -> str:
        """The heading, with a link to its section."""
        anchor = re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")
        return f"[{self.heading}](#{anchor})"

    def section(self) -> str:
        """Everything that is known of it."""
        job = self.job
        parts = [f"## {self.heading}", job.purpose]
        results = {name: stored.result or {} for name, stored in self.done.items()}
        parts.append(job.section(results) if results else "Not measured yet.")
        parts += [job.always(), "\n".join([*self._troubles(), *self._origin()])]
        return "\n\n".join(part.strip() for part in parts if part.strip())

    def _troubles(self) -> list[str]:
        """Name what failed and what was cut short."""
        lines = []
        for name, stored in self.those("failed").items():
            last = (stored.error or "no message").strip().splitlines()[-1].strip()
            lines.append(f"- `{name}` failed after {_clock(stored.seconds)}: {_code(last)}")
        for name, stored in self.those("partial").items():
            lines.append(f"- `{name}` was cut short after {_clock(stored.seconds)}{_far(stored)}")
        if self.dropped:
            lines.append(f"- {_count(self.dropped, 'result')} of steps that are no longer measured")
        return lines

    def _origin(self) -> list[str]:
        """Say where, with what and by which command the results were measured."""
        rows = []
        machines = _unlike(stored.machine for stored in self.known.values())
        rows += [f"- Hardware: {_hardware(machine)}" for machine in machines]
        rows += [f"- Versions: {text}" for text in _unlike(map(_versions, machines))]
        if self.known:
            file = f"[{self.job.file}](gpu/{self.job.file})"
            rows.append(f"- Results: {file}{_commits(self.known.values())}")
        rows.append(
            f"- Command: `python benchmarks/gpu_queue/run.py --only {self.job.name} --data DATA "
            "--results RESULTS`"
        )
        return rows


def _far(stored: Stored) -> str:
    """Say how far a step came: ``: 12 of 40 epochs``."""
    progress = dict(stored.progress or {})
    of = progress.pop("of", None)
    return "" if of is None else ": " + ", ".join(f"{v} of {of} {k}" for k, v in progress.items())


def _hardware(machine: Mapping[str, Any]) -> str:
    parts = [str(machine.get("device", "unknown"))]
    if machine.get("total_gib"):
        parts.append(f"{machine['total_gib']:g} GiB")
    parts += [f"{name} {machine[name]}" for name in ("capability", "driver") if machine.get(name)]
    cores = f", {machine['cores']} cores" if machine.get("cores") else ""
    return f"{', '.join(parts)}; {machine.get('cpu', 'unknown processor')}{cores}"


def _versions(machine: Mapping[str, Any]) -> str:
    apart = {"device", "total_gib", "capability", "driver", "cpu", "cores"}
    return ", ".join(f"{k} {v}" for k, v in machine.items() if k not in apart and v is not None)


def _commits(known: Iterable[Stored]) -> str:
    """Name day and commit of results."""
    found = {
        f"{stored.finished[:10]}, "
        + ("commit not recorded" if stored.commit is None else f"commit `{stored.commit[:12]}`")
        for stored in known
    }
    return f" ({'; '.join(sorted(found))})"


def _unlike(values: Iterable[Any]) -> list[Any]:
    """List values in order, each once."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def _code(text: str) -> str:
    return f"`{text.replace('`', chr(39))[:300]}`"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# ---- the page ---------------------------------------------------------------------------------


def page(all_jobs: Sequence[Job], records: Mapping[str, Known]) -> str:
    """Make the page, Markdown.

    Args:
        all_jobs: The jobs in their order.
        records: What is known of each, by its name, as `store.read` gives it.
    """
    views = [View(job, records.get(job.name, {})) for job in all_jobs]
    rows = [
        (view.link, view.job.purpose, view.state, f"{max(1, round(view.minutes))}")
        for view in views
    ]
    summary = table(("job", "question", "state", "minutes"), rows).splitlines()
    summary[1] = "| --- | --- | --- | --: |"  # these are words
    parts = [
        "# On one GPU",
        f"<!-- Made by `{COMMAND}`: edit that, or the job. -->",
        _first(views),
        "\n".join(summary),
        "Minutes are measured where a step is, and estimated where it is not.",
        "## Running the queue",
        _HOW,
        *(view.section() for view in views),
    ]
    return "\n\n".join(parts) + "\n"


def _first(views: Sequence[View]) -> str:
    """Say what is known so far, and what this is."""
    of, done = sum(len(v.steps) for v in views), sum(len(v.done) for v in views)
    failed = sum(len(v.those("failed")) for v in views)
    if not done:
        message = "Nothing is measured on a GPU yet"
    elif done == of:
        message = f"All {of} steps of the queue are measured"
    else:
        message = f"{done} of {of} steps of the queue {'is' if done == 1 else 'are'} measured"
    message += f", {failed} failed" if failed else ""
    minutes = sum(view.minutes for view in views)
    return (
        f"{message}. This is a queue of {_count(len(views), 'job')} for a GPU that is at hand for "
        f"half an hour now and then; together they need about {minutes:.0f} minutes."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Take in what came back, if anything did, and write the page."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--take", type=Path, metavar="DIR", help="result files that came back")
    given = parser.parse_args(argv)
    try:
        records = store.read(store.RESULTS)
        if given.take is not None:
            came = store.came_back(given.take, jobs(), commit=_commit())
            records = store.merge(records, came)
        text = page(jobs(), records)  # first: what the page cannot show is not taken
        if given.take is not None:
            store.write(store.RESULTS, jobs(), records)
            store.unpack(given.take, jobs(), store.RESULTS)
            print(f"{_count(sum(map(len, came.values())), 'step')} taken from {given.take}")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    store.write_text(PAGE, text)
    print(f"wrote {PAGE}")
    return 0


def _commit() -> str | None:
    """Return the checkout's commit; None where files differ from it, or there is none."""
    git = ["git", "-C", str(store.ROOT)]
    try:
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--", "src", "benchmarks", "tests"],
            capture_output=True,
            text=True,
            check=True,
        )
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if changed.stdout.strip() else head.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""Kill runs at random places, resume them, and compare with runs that were not killed.

    python benchmarks/kill_resume.py                # 100 kills of a run; minutes
    python benchmarks/kill_resume.py --kills 5      # one at each kind of place
    python benchmarks/kill_resume.py --comparison   # each of `STRIKES` on a comparison; minutes

A run is forked from a process that has done the imports. It kills itself with SIGKILL at a step,
or within a write: with half of the bytes written, before the new file gets its name, or after.
Some are killed by their parent at a random moment instead. What was killed is started again, and
killed again or not, until it is done. Then the weights must be the same file, byte for byte, and
the metrics the same lines but for their times. Exits with 1 if anything differs.

A comparison is `keymix compare` with two processes. It imports this file, in the process from which
its runs are forked, too; there one signal is sent at one moment. Rerun, it must have the scores,
differences and weights of one that was not disturbed.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import hashlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from keymix.records import to_json

os.environ["OMP_NUM_THREADS"] = "1"  # a forked child must not need its parent's threads

import numpy as np
import torch
from PIL import Image

from keymix.data.augment import Augment
from keymix.report.frames import MEASURED
from keymix.tasks.classification.training import ClassificationTask
from keymix.train import engine, files, model
from keymix.train.recipe import DataConfig, ModelConfig, OptimConfig, Recipe, ScheduleConfig
from keymix.train.recipe import replace_path as replaced

PLAIN = Recipe(
    name="killed",
    data=DataConfig(spec="digits", limit=120, batch_size=16, eval_batch_size=64),
    augment=Augment(crop_padding=1),
    model=ModelConfig(
        name="vit_nano_p2_12",
        options={"depth": 1, "embed_dim": 16, "num_heads": 2},
        drop_rate=0.2,
    ),
    optim=OptimConfig(lr=1e-3),
    schedule=ScheduleConfig(epochs=3, warmup_epochs=0.5),
)
_SIDE = 100  # pixels: too large for memory, so that processes decode ahead
WITH_STATE = {  # what keeps a state or draws a number, all at once, by dotted key
    "ema": 0.9,
    "optim.accumulate": 2,
    "optim.clip_grad": 1.0,
    "loss.mixup": 0.4,
    "loss.cutmix": 1.0,
    "loss.label_smoothing": 0.1,
    "model.drop_path": 0.1,
    "augment.erasing": 0.5,
    "augment.rand_augment": [2, 9],
}
EVERYTHING = replaced(PLAIN, WITH_STATE)
_PARENT_ENDED = 1  # Linux: PR_SET_PDEATHSIG
WRITES = ("checkpoint", "metrics", "weights", "predictions", "summary", "recipe")
MOMENTS = ("half written", "before the rename", "after the rename")
WITHIN = (0.0, 0.0, 10.0)  # minutes between checkpoints, chosen again for each start


Place = tuple[str, int]  # a step, or a moment of a write of a kind; the how manyth


def settings(folder: Path) -> dict[str, Recipe]:
    """The recipes that are killed; one reads image files in worker processes."""
    files_of = replaced(
        PLAIN,
        {
            "data.spec": f"folder:{_images(folder)}",
            "data.limit": None,
            "data.image_size": _SIDE,
            "data.workers": 2,
            "data.val_fraction": 0.2,
            "augment.crop_padding": 0,
            "model.options.patch_size": _SIDE // 4,
            "augment.flip": True,
            "augment.erasing": 0.5,
        },
    )
    return {"plain": PLAIN, "everything": EVERYTHING, "image files, 2 workers": files_of}


def _images(folder: Path) -> Path:
    """Write images of differing sizes, so that they are read as they are wanted."""
    numbers = np.random.default_rng(0)
    for name in ("dark", "light", "middle"):
        (folder / name).mkdir(parents=True)
        for i in range(40):
            low = {"dark": 0, "middle": 60, "light": 120}[name]
            size = (16 + i % 3, 16 + i % 5)
            pixels = numbers.integers(low, low + 120, size, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:02d}.png")
    return folder


def kind_of(path: Path) -> str:
    """Name the kind of a file of a run."""
    if path.suffix == ".ckpt":
        return "checkpoint"
    return path.name.partition(".")[0].partition("_")[0]


def _kill_this() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Trap:
    """Count steps and writes in this process, and kill it, or strike otherwise, at a place."""

    def __init__(self, place: Place | None, strike: Callable[[], object] = _kill_this) -> None:
        self.place, self._strike = place, strike
        self.seen: Counter[str] = Counter()
        step, write = ClassificationTask.training_step, files.write_atomically

        def training_step(task: ClassificationTask, batch: Any, batch_idx: int) -> Any:
            self.pass_by("step")
            return step(task, batch, batch_idx)

        def write_atomically(path: Path, content: Callable[[BinaryIO], object]) -> None:
            kind = kind_of(path)

            def part(stream: BinaryIO) -> None:
                self.pass_by(f"{kind}, half written", lambda: content(_Half(stream)))
                content(stream)
                stream.flush()
                self.pass_by(f"{kind}, before the rename")

            write(path, part)
            self.pass_by(f"{kind}, after the rename")

        ClassificationTask.training_step = training_step  # type: ignore[method-assign]
        files.write_atomically = write_atomically

    def pass_by(self, what: str, before: Callable[[], object] | None = None) -> None:
        """Count a place; die there if it is the one."""
        self.seen[what] += 1
        if (what, self.seen[what]) == self.place:
            if before is not None:
                before()
            self._strike()


class _Half:
    """Takes the first half of what is written, and then no more."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        data = memoryview(data)
        self._stream.write(data[: max(1, len(data) // 2)])
        self._stream.flush()
        return len(data)


def run(recipe: Recipe, out: Path, place: Place | None, minutes: float) -> int:
    """Fork a run that ends with this process; return the child's process id.

    Args:
        recipe: The run.
        out: Its folder. Next to it lie then, in ``.seen.json``, the places that it passed.
        place: Where it kills itself.
        minutes: Between its checkpoints.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PARENT_ENDED, signal.SIGKILL)
        torch.set_num_threads(1)
        trap = _Trap(place)
        engine.train(recipe, out, checkpoint_minutes=minutes)
        seen_of(out).write_text(json.dumps(trap.seen))
        code = 0
    except BaseException:  # a child must never return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def seen_of(out: Path) -> Path:
    """Name the file of the places that a run passed."""
    return out.with_name(f"{out.name}.seen.json")


def wait(child: int, *, kill_after: float | None = None) -> int:
    """Wait for a child, killing it after so many seconds; 0, its exit code, or -9."""
    deadline = None if kill_after is None else time.monotonic() + kill_after
    while True:
        if deadline is not None and time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            deadline = None
        done, status = os.waitpid(child, 0 if deadline is None else os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)


def outcome(out: Path) -> dict[str, str]:
    """Hashes of the weights and of the metrics without their times, by file."""
    contents = {
        files.weights_file(which): (out / files.weights_file(which)).read_bytes()
        for which in ("last", "best")
    }
    lines: list[Any] = [to_json(line) for line in files.read_metrics(out / files.METRICS)]
    for line in lines:
        del line["seconds"], line["images_per_s"]
    contents[files.METRICS] = json.dumps(lines).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def choose(seen: dict[str, int], kind: str, chance: random.Random, moments: Sequence[str]) -> Place:
    """Choose a place of a kind among those that a whole run passes."""
    what = kind if kind == "step" else f"{kind}, {chance.choice(moments)}"
    return what, chance.randint(1, seen[what])


def kill_all(kills: int, seed: int, folder: Path) -> tuple[dict[str, Counter[str]], int]:
    """Do so many kills over all settings; return kills by place and outcome, and how many runs."""
    chance = random.Random(seed)
    whole: dict[str, tuple[dict[str, str], dict[str, int], float]] = {}
    recipes = settings(folder / "images")
    for name, recipe in recipes.items():
        out = folder / f"whole {name}"
        start = time.monotonic()
        if wait(run(recipe, out, None, 0.0)) != 0:
            raise SystemExit(f"{name}: a run that was not killed failed")
        seen = json.loads(seen_of(out).read_text())
        whole[name] = outcome(out), seen, time.monotonic() - start
    kinds, moments = ["step", "checkpoint", "metrics", "weights", "any moment"], MOMENTS[:1]
    if kills > len(kinds):
        moments = MOMENTS
        kinds = ["step"] * 5 + ["checkpoint"] * 4 + ["any moment"] * 4 + list(WRITES[1:])
    tallies = {column: Counter[str]() for column in ("kills", "resumed", "differing")}
    done = runs = 0
    while done < kills:
        name = list(recipes)[runs % len(recipes)]
        expected, seen, seconds = whole[name]
        out = folder / f"run {runs}"
        runs += 1
        places: list[str] = []
        planned = min(kills - done, chance.randint(1, 3) if kills > len(kinds) else 1)
        for _ in range(planned):
            kind = kinds[done % len(kinds)]
            minutes = chance.choice(WITHIN)
            if kind == "any moment":
                text = kind
                child = run(recipes[name], out, None, minutes)
                code = wait(child, kill_after=chance.uniform(0, seconds))
            else:
                place = choose(seen, kind, chance, moments)
                text = place[0]
                code = wait(run(recipes[name], out, place, minutes))
            if code == 0:  # it was done before it came to the place
                break
            if code != -signal.SIGKILL:
                raise SystemExit(f"{name}: {text}: exit code {code}")
            places.append(text)
            tallies["kills"][text] += 1
            done += 1
        code = wait(run(recipes[name], out, None, 10.0))
        found = outcome(out) if code == 0 else {}
        wrong = [file for file in expected if found.get(file) != expected[file]]
        wrong += [path.name for path in out.rglob("*.part")]
        for text in places:
            tallies["resumed"][text] += code == 0
            tallies["differing"][text] += bool(wrong)
        if wrong:
            print(f"{name}: exit code {code}, wrong or left over {wrong}: {places}")
    return tallies, runs


# ---- comparisons ----------------------------------------------------------------------------


class Strike(NamedTuple):
    """A signal at a moment of a comparison."""

    moment: str  # for the table
    at: str  # a function that is called then, or a place of `_Trap`
    count: int  # the how manyth
    within: str  # the process that comes to it: "parent", "fork" (from it runs are forked), "run"
    victim: str  # the process that gets the signal
    signum: signal.Signals
    code: int  # how the command ends


_KILL, _TERM, _INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
_MEASURES, _DRAWS = "keymix.compare.costs:peak_memory", "keymix.compare.folder:render"
STRIKES = (
    Strike("sizing", "keymix.compare.budget:timed", 2, "parent", "parent", _TERM, 143),
    Strike("writing the plan", "plan, half written", 1, "parent", "parent", _KILL, -9),
    Strike("loading", "keymix.data:load", 1, "parent", "parent", _INT, 130),
    Strike("loading", "keymix.data:load", 1, "fork", "fork", _KILL, 2),
    Strike("first epoch", "step", 2, "run", "run", _KILL, 1),
    Strike("first epoch", "step", 2, "run", "parent", _TERM, 143),
    Strike("second epoch", "step", 5, "run", "parent", _INT, 130),
    Strike("saving", "checkpoint, half written", 2, "run", "parent", _KILL, -9),
    Strike("saving", "checkpoint, half written", 2, "run", "fork", _KILL, 2),
    Strike("between runs", "summary, after the rename", 1, "run", "parent", _KILL, -9),
    Strike("measuring costs", _MEASURES, 1, "parent", "parent", _TERM, 143),
    Strike("drawing the page", _DRAWS, 1, "parent", "parent", _KILL, -9),
    Strike("writing the results", "results, half written", 2, "parent", "parent", _KILL, -9),
)
_ASKED, _PARENT = "KEYMIX_STRIKE", "KEYMIX_STRIKE_PARENT"  # in the environment: which, whom
_COMPARED = (
    "--data digits --limit 200 --mixers softmax,static_key --seeds 2 --epochs 3 --no-controls "
    "--no-reference --processes 2 --import"
)


def lie_in_wait(number: int, once: Path) -> None:
    """Send the signal of a strike at its moment, in one of the processes that import this file."""
    strike, here = STRIKES[number], os.getpid()
    main = sys.modules["__main__"].__spec__
    forks = main is not None and main.name == "keymix.compare.worker"
    parent = int(os.environ.setdefault(_PARENT, str(here)))

    def hit() -> None:
        forked = "run" if os.getpid() != here else ("fork" if forks else "parent")
        if forked != strike.within:
            return
        with suppress(FileExistsError):
            once.touch(exist_ok=False)
            whom = {"parent": parent, "fork": here, "run": os.getpid()}
            os.kill(whom[strike.victim], strike.signum)
            if strike.signum == signal.SIGKILL and strike.victim != "run":
                time.sleep(60)  # whoever has to end this process does so now

    if ":" not in strike.at:
        _Trap((strike.at, strike.count), hit)
        return
    name, _, function = strike.at.partition(":")
    module, calls = importlib.import_module(name), Counter[str]()
    called = getattr(module, function)

    def passing(*args: Any, **more: Any) -> Any:
        calls[function] += 1
        if calls[function] == strike.count:
            hit()
        return called(*args, **more)

    setattr(module, function, passing)


def compared(out: Path, number: int | None = None) -> tuple[int, str, list[int]]:
    """Run the comparison; return its exit code, what it said, and the processes that it left."""
    command = [sys.executable, "-m", "keymix", "compare", *_COMPARED.split(), __file__]
    asked = {} if number is None else {_ASKED: f"{number} {out}.struck"}
    said = out.with_suffix(".txt")
    with said.open("a") as stream:
        child = subprocess.Popen(
            [*command, "--out", str(out)],
            env=os.environ | asked,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        code = child.wait()
    deadline = time.monotonic() + 10
    while (left := _of_session(child.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return code, said.read_text(), left


def _of_session(number: int) -> list[int]:
    """The processes of a session that are alive, by Linux's /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == number and state != "Z":
                found.append(int(stat.parent.name))
    return found


def results_of(out: Path) -> dict[str, str]:
    """Hashes of a comparison's scores, differences and weights, by file."""
    with (out / "results.csv").open(newline="") as stream:
        rows = [
            {k: v for k, v in row.items() if k not in MEASURED} for row in csv.DictReader(stream)
        ]
    found = {"results.csv": json.dumps(rows).encode()}
    found["differences.csv"] = (out / "differences.csv").read_bytes()
    for place in sorted(out.glob("runs/*/seed*/*.safetensors")):
        found[str(place.relative_to(out))] = place.read_bytes()
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


def strike_all(folder: Path, numbers: Sequence[int]) -> bool:
    """Strike a comparison, resume it, print how it ended; whether all is as if undisturbed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    code, said, _ = compared(folder / "whole")
    if code != 0:
        raise SystemExit(said)
    whole, fine = results_of(folder / "whole"), True
    print(f"{'struck':44}{'code':>5}{'left':>5}{'resumed':>8}{'differing':>10}")
    for number in numbers:
        strike, out = STRIKES[number], folder / str(number)
        code, first, left = compared(out, number)
        again, second, _ = compared(out)
        found = results_of(out) if again == 0 else {}
        differing = sum(found.get(name) != whole[name] for name in whole) + len({*found} - {*whole})
        differing += len([*out.rglob("*.part")])
        what = f"{strike.moment}: {strike.signum.name} to the {strike.victim}"
        print(f"{what:44}{code:5}{len(left):5}{again == 0!s:>8}{differing:10}", flush=True)
        if (code, left, again, differing) != (strike.code, [], 0, 0) or "Traceback" in first:
            fine = False
            print(f"expected code {strike.code}\n{first}\n---\n{second.removeprefix(first)}")
    return fine


def main(argv: list[str] | None = None) -> int:
    """Kill, resume, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--comparison", action="store_true", help="strike a comparison instead")
    parser.add_argument("--only", type=int, nargs="*", help="strikes by number, from 0")
    options = parser.parse_args(argv)
    start = time.monotonic()
    if options.comparison:
        with tempfile.TemporaryDirectory() as folder:
            numbers = range(len(STRIKES)) if options.only is None else options.only
            fine = strike_all(Path(folder), numbers)
        print(f"{time.monotonic() - start:.0f} s")
        return 0 if fine else 1
    # once here, for the imports within: children need not do them
    data = model.load_data(PLAIN.data)
    model.build_model(PLAIN, num_classes=len(data.classes), in_chans=1, image_size=(12, 12))
    with tempfile.TemporaryDirectory() as folder:
        tallies, runs = kill_all(options.kills, options.seed, Path(folder))
    rows = [(place, *(each[place] for each in tallies.values())) for place in tallies["kills"]]
    print(f"{'killed at':34}{'kills':>7}{'resumed':>9}{'differing':>11}")
    kills, resumed, differing = (each.total() for each in tallies.values())
    for place, *counts in [*sorted(rows), ("all", kills, resumed, differing)]:
        print(f"{place:34}{counts[0]:7}{counts[1]:9}{counts[2]:11}")
    print(f"{runs} runs, seed {options.seed}, {time.monotonic() - start:.0f} s")
    return 1 if differing or resumed < kills else 0


if __name__ == "__main__":
    sys.exit(main())
elif _ASKED in os.environ:
    lie_in_wait(int(os.environ[_ASKED].split()[0]), Path(os.environ[_ASKED].split()[1]))

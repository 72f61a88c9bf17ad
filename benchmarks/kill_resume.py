# SPDX-License-Identifier: Apache-2.0
"""Kill runs at random places, resume them, and compare with runs that were not killed.

    python benchmarks/kill_resume.py             # 100 kills; minutes
    python benchmarks/kill_resume.py --kills 5   # one at each kind of place

A run is forked from a process that has done the imports. It kills itself with SIGKILL at a step,
or within a write: with half of the bytes written, before the new file gets its name, or after.
Some are killed by their parent at a random moment instead. What was killed is started again, and
killed again or not, until it is done. Then the weights must be the same file, byte for byte, and
the metrics the same lines but for their times. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from keymix.records import to_json

os.environ["OMP_NUM_THREADS"] = "1"  # a forked child must not need its parent's threads

import numpy as np
import torch
from PIL import Image

from keymix.data.augment import Augment
from keymix.tasks.classification.training import ClassificationTask
from keymix.train import engine, files, model
from keymix.train.recipe import DataConfig, ModelConfig, OptimConfig, Recipe, ScheduleConfig
from keymix.train.recipe import replace_path as replaced

if TYPE_CHECKING:
    from keymix.data.dataset import ImageData

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
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG: a fork does not outlive its parent, however that ends
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
WRITES = ("checkpoint", "metrics", "weights", "predictions", "summary", "recipe")
MOMENTS = ("half written", "before the rename", "after the rename")
WITHIN = (0.0, 0.0, 10.0)  # minutes between checkpoints, chosen again for each start


@dataclass(frozen=True)
class Place:
    """Where a run kills itself: at the n-th step, or at a moment of the n-th write of a kind.

    Of a step there are two places: ``step`` before it, and ``loss`` when its loss is known.
    """

    kind: str
    moment: str
    nth: int

    def __str__(self) -> str:
        return self.kind if not self.moment else f"{self.kind}, {self.moment}"


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


class _Trap:
    """Count steps and writes in this process, write each loss down, and kill it at a place."""

    def __init__(self, place: Place | None, losses: Path) -> None:
        self.place = place
        self.seen: Counter[str] = Counter()
        step, write = ClassificationTask.training_step, files.write_atomically

        def training_step(task: ClassificationTask, batch: Any, batch_idx: int) -> Any:
            self.pass_by("step", "")
            loss = step(task, batch, batch_idx)
            line = [task.current_epoch, batch_idx, float(loss.detach())]
            with losses.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self.pass_by("loss", "")
            return loss

        def write_atomically(path: Path, content: Callable[[BinaryIO], object]) -> None:
            kind = kind_of(path)

            def part(stream: BinaryIO) -> None:
                self.pass_by(kind, "half written", lambda: _half(stream, content))
                content(stream)
                stream.flush()
                self.pass_by(kind, "before the rename")

            write(path, part)
            self.pass_by(kind, "after the rename")

        ClassificationTask.training_step = training_step  # type: ignore[method-assign]
        files.write_atomically = write_atomically

    def pass_by(self, kind: str, moment: str, before: Callable[[], object] | None = None) -> None:
        """Count a place; die there if it is the one."""
        self.seen[f"{kind}/{moment}"] += 1
        wanted = self.place
        if wanted is None or (kind, moment) != (wanted.kind, wanted.moment):
            return
        if self.seen[f"{kind}/{moment}"] == wanted.nth:
            if before is not None:
                before()
            os.kill(os.getpid(), signal.SIGKILL)


class _Half:
    """Takes the first half of what is written, and then no more."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        data = memoryview(data)
        self._stream.write(data[: max(1, len(data) // 2)])
        self._stream.flush()
        return len(data)


def _half(stream: BinaryIO, content: Callable[[BinaryIO], object]) -> None:
    content(_Half(stream))  # type: ignore[arg-type]


def fork(work: Callable[[], object], failed: Path) -> int:
    """Fork a process that does some work; return its id.

    It ends with the process that forked it, however that one ends (on Linux).

    Args:
        work: What it does.
        failed: Takes the traceback if that fails.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
        torch.set_num_threads(1)
        work()
        code = 0
    except BaseException:  # a child must never return into its parent's code
        traceback.print_exc()
        failed.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def run(
    recipe: Recipe,
    out: Path,
    place: Place | None,
    minutes: float,
    data: ImageData | None = None,
) -> int:
    """Fork a run; return the child's process id.

    Next to its folder it leaves ``.seen.json`` (places that it passed), ``.losses.jsonl`` (epoch,
    step and loss of each step, one start after the other) and, if it failed, ``.failed.txt``.

    Args:
        recipe: The run.
        out: Its folder.
        place: Where it kills itself.
        minutes: Between its checkpoints.
        data: The recipe's images, if they are loaded already.
    """
    return fork(partial(_run, recipe, out, place, minutes, data), next_to(out, "failed.txt"))


def _run(
    recipe: Recipe, out: Path, place: Place | None, minutes: float, data: ImageData | None
) -> None:
    trap = _Trap(place, next_to(out, "losses.jsonl"))
    engine.train(recipe, out, checkpoint_minutes=minutes, data=data)
    next_to(out, "seen.json").write_text(json.dumps(trap.seen))


def next_to(out: Path, ending: str) -> Path:
    """Name a file next to the folder of a run."""
    return out.parent / f"{out.name}.{ending}"


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


def outcome(out: Path) -> tuple[str, str]:
    """Hashes of the weights and of the metrics without their times."""
    weights = hashlib.sha256()
    for which in ("last", "best"):
        weights.update((out / files.weights_file(which)).read_bytes())
    return weights.hexdigest(), hashlib.sha256(json.dumps(lines_of(out)).encode()).hexdigest()


def lines_of(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run without their times."""
    lines: list[dict[str, Any]] = [
        to_json(line) for line in files.read_metrics(out / files.METRICS)
    ]
    for line in lines:
        del line["seconds"], line["images_per_s"]
    return lines


def losses_of(out: Path) -> list[tuple[int, int, float]]:
    """Epoch, step and loss of each step of a run, one start after the other."""
    text = next_to(out, "losses.jsonl").read_text()
    return [(epoch, step, loss) for epoch, step, loss in map(json.loads, text.splitlines())]


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far two finished runs are apart, by their last weights, metrics and answers.

    Args:
        values: Parameters and running statistics, in numbers.
        differing: How many of them differ.
        largest: The largest difference.
        relative: Norm of the difference of all, over the norm of the first run's.
        lines: Epochs whose lines of metrics differ, times apart.
        images: Test images.
        answers: How many of them got other answers.
        first: Epoch and step of the first loss that differs; None where none does.
    """

    values: int
    differing: int
    largest: float
    relative: float
    lines: int
    images: int
    answers: int
    first: tuple[int, int] | None

    @property
    def same(self) -> bool:
        """Whether the runs are the same, to the bit."""
        return not (self.differing or self.lines or self.answers or self.first)


def distance(run: Path, other: Path) -> Distance:
    """Measure how far two finished runs are apart; of a step that was repeated, the last counts."""
    states = [files.read_weights(out / files.weights_file("last"))[0] for out in (run, other)]
    pairs = [(a.double(), states[1][name].double()) for name, a in states[0].items()]
    apart = [(a - b).abs() for a, b in pairs]
    norm = math.sqrt(sum(float(a.square().sum()) for a, _ in pairs))
    answers = [files.read_arrays(out / files.PREDICTIONS)["last_pred"] for out in (run, other)]
    losses = [{(epoch, step): loss for epoch, step, loss in losses_of(out)} for out in (run, other)]
    lines = zip_longest(lines_of(run), lines_of(other))  # an epoch's may be missing
    changed = (at for at, loss in losses[0].items() if losses[1].get(at) != loss)
    return Distance(
        values=sum(a.numel() for a, _ in pairs),
        differing=sum(int((d != 0).sum()) for d in apart),
        largest=max(float(d.max()) for d in apart),
        relative=math.sqrt(sum(float(d.square().sum()) for d in apart)) / norm,
        lines=sum(a != b for a, b in lines),
        images=len(answers[0]),
        answers=int((answers[0] != answers[1]).sum()),
        first=min(changed, default=None),
    )


@dataclass
class Tally:
    """What came of the kills at one kind of place."""

    kills: int = 0
    resumed: int = 0
    differing: int = 0


def choose(seen: dict[str, int], kind: str, chance: random.Random, moments: Sequence[str]) -> Place:
    """Choose a place of a kind among those that a whole run passes."""
    if kind == "step":
        return Place("step", "", chance.randint(1, seen["step/"]))
    moment = chance.choice(moments)
    return Place(kind, moment, chance.randint(1, seen[f"{kind}/{moment}"]))


def kill_all(kills: int, seed: int, folder: Path) -> tuple[dict[str, Tally], int]:
    """Do so many kills over all settings; return the tallies and the number of runs."""
    chance = random.Random(seed)
    whole: dict[str, tuple[tuple[str, str], dict[str, int], float]] = {}
    recipes = settings(folder / "images")
    for name, recipe in recipes.items():
        out = folder / f"whole {name}"
        start = time.monotonic()
        if wait(run(recipe, out, None, 0.0)) != 0:
            raise SystemExit(f"{name}: a run that was not killed failed")
        seen = json.loads(next_to(out, "seen.json").read_text())
        whole[name] = outcome(out), seen, time.monotonic() - start
    kinds, moments = ["step", "checkpoint", "metrics", "weights", "any moment"], MOMENTS[:1]
    if kills > len(kinds):
        moments = MOMENTS
        kinds = ["step"] * 5 + ["checkpoint"] * 4 + ["any moment"] * 4 + list(WRITES[1:])
    tallies: dict[str, Tally] = {}
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
                text = str(place)
                code = wait(run(recipes[name], out, place, minutes))
            if code == 0:  # it was done before it came to the place
                break
            if code != -signal.SIGKILL:
                raise SystemExit(f"{name}: {text}: exit code {code}")
            places.append(text)
            tallies.setdefault(text, Tally()).kills += 1
            done += 1
        code = wait(run(recipes[name], out, None, 10.0))
        same = code == 0 and outcome(out) == expected
        leftover = [path.name for path in out.rglob("*.part")]
        for text in places:
            tallies[text].resumed += code == 0
            tallies[text].differing += not same
        if not same or leftover:
            print(f"{name}: {out}: exit code {code}, same {same}, left {leftover}: {places}")
            print(distance(folder / f"whole {name}", out) if code == 0 else "it did not end")
            if same:
                tallies[places[-1]].differing += 1
    return tallies, runs


def main(argv: list[str] | None = None) -> int:
    """Kill, resume, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    start = time.monotonic()
    # once here, for the imports within: children need not do them
    data = model.load_data(PLAIN.data)
    model.build_model(PLAIN, num_classes=len(data.classes), in_chans=1, image_size=(12, 12))
    with tempfile.TemporaryDirectory() as folder:
        tallies, runs = kill_all(options.kills, options.seed, Path(folder))
    print(f"{'killed at':34}{'kills':>7}{'resumed':>9}{'differing':>11}")
    for place, tally in sorted(tallies.items()):
        print(f"{place:34}{tally.kills:7}{tally.resumed:9}{tally.differing:11}")
    kills = sum(tally.kills for tally in tallies.values())
    resumed = sum(tally.resumed for tally in tallies.values())
    wrong = sum(tally.differing for tally in tallies.values())
    print(f"{'all':34}{kills:7}{resumed:9}{wrong:11}")
    print(f"{runs} runs, seed {options.seed}, {time.monotonic() - start:.0f} s")
    return 1 if wrong or resumed < kills else 0


if __name__ == "__main__":
    sys.exit(main())

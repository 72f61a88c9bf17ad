# SPDX-License-Identifier: Apache-2.0
"""Images per second in training and inference of the models of SKA's Tables 1 and 2.

The models of one family are timed in turns in one process. Paper: Static Key Attention in Vision,
https://arxiv.org/abs/2412.07049. Its Table 1 prints "the number of images in an inference time of
one seconds" on one RTX 4090, and says neither the batch nor the precision; Table 2 prints none.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_queue.job import Context, Job, Result, Step, table
from gpu_queue.processes import end_with_parent

AGREES = 0.05  # of the published ratio: ours may be so much smaller and still hold
MARGIN = 0.02  # of `keymix.analysis.timing`: published ratios so near to 1 are no difference
AHEAD = 150.0  # seconds at most that models are compiled for in processes of their own
ISSUED = 0.9  # share of a batch in which the host issues it, above which the host sets the time
DECIDED = ("different", "not distinguishable")  # verdicts; others say that it was not to be seen
_NUMBER = itertools.count()
CLAIM = ("cifar10/vit_small", "CSKA-ViT-S")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model as the paper names it, and the images per second of its Table 1 (CIFAR-10)."""

    label: str
    model: str
    mixer: str | None = None  # the model's own if None
    published: int | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that are compared with the first of them, and sizes."""

    name: str  # the first parts of its steps' names
    recipe: str  # whose training step it is
    rows: tuple[Row, ...]
    batch: int = 512  # the recipe's
    side: int = 32
    classes: int = 10
    batches: int = 4  # of a pass, one after the other as in a loop, which does not wait
    rounds: int = 16
    seconds: tuple[float, float]  # of the eager and of the compiled step
    options: Mapping[str, Any] | None = None  # of the models besides, in a dry run


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is timed: a training step or an inference, in which precision and batch."""

    training: bool = False
    bfloat16: bool = True
    batch: int | None = None  # the family's if None


TRAINING, INFERENCE, FULL, SMALL = "training", "inference", "inference, float32", "inference, small"
SETTINGS = {
    TRAINING: Setting(training=True),
    INFERENCE: Setting(),
    FULL: Setting(bfloat16=False),
    SMALL: Setting(batch=64),
}
MODES: Mapping[str, tuple[str, ...]] = {
    "eager": (TRAINING, INFERENCE, FULL, SMALL),
    "compiled": (TRAINING, INFERENCE),
}


def _table_1(stem: str, label: str, published: Sequence[int]) -> tuple[Row, ...]:
    """The four rows of a model in SKA's Table 1."""
    names = (stem, f"ska_{stem}", f"ska_{stem}_wide", f"cska_{stem}")
    labels = (label, f"SKA-{label}", f"SKA-{label}, wide", f"CSKA-{label}")
    return tuple(
        Row(label=row, model=name, published=images)
        for row, name, images in zip(labels, names, published, strict=True)
    )


# Seconds, by paper arithmetic. Eager: 15 for start, imports, CUDA, four models and their counts;
# a round of 4 models x 4 batches of 512 at 15 to 40 ms a training step is 0.3 to 0.6 s, and 16
# rounds with 3 of warm-up 6 to 12 s; inference a third of it, in three settings. Compiled: the
# same for compiled and eager models in two settings (20 to 30); besides, the longest compilation
# of the four, which run at once on 16 cores (20 for 6 blocks, 60 for 18), and 2 to 8 a model to
# trace it again before its code is found in the cache. At 224 pixels: 256 images at 0.1 to 0.25 s.
FAMILIES: tuple[Family, ...] = (
    Family(
        name="cifar10/vit_small",
        recipe="vit_small_cifar10",
        rows=_table_1("vit_small_spt_p4_32", "ViT-S", (5008, 5120, 5010, 7220)),
        seconds=(35, 75),
    ),
    Family(
        name="cifar10/cait_small",
        recipe="cait_small_cifar10",
        rows=_table_1("cait_small_p4_32", "CaiT-S", (7358, 7880, 6830, 7575)),
        seconds=(35, 85),
    ),
    Family(
        name="cifar10/swin_tiny",
        recipe="swin_tiny_cifar10",
        rows=_table_1("swin_tiny_p2_32", "Swin-T", (5105, 5523, 5200, 4949)),
        seconds=(35, 110),
    ),
    Family(
        name="cifar10/cvt_13",
        recipe="cvt_13_cifar10",
        rows=_table_1("cvt_13_32", "CvT-13", (6349, 6896, 6440, 7042)),
        seconds=(35, 130),
    ),
    Family(
        name="imagenet/caformer_s18",
        recipe="cskaformer_s18_imagenet",
        rows=(
            Row(label="CAFormer-S18", model="caformer_s18"),
            Row(
                label="CAFormer-S18 of keymix's blocks",
                model="skaformer_s18",
                mixer="sep_conv/sep_conv/softmax/softmax",
            ),
            Row(label="SKAFormer-S18", model="skaformer_s18"),
            Row(label="CSKAFormer-S18", model="cskaformer_s18"),
        ),
        batch=256,
        side=224,
        classes=1000,
        batches=1,
        seconds=(50, 160),
    ),
)


def _tiny() -> list[tuple[Family, str]]:
    """Small models: two with a published ratio, one compiled, one of the other recipe."""
    vit, former = FAMILIES[0], FAMILIES[-1]
    small = {"batch": 2, "batches": 1, "rounds": 2, "seconds": (2, 5), "classes": 10}
    vit = replace(vit, options={"embed_dim": 16, "depth": 1, "num_heads": 2}, **small)
    former = replace(
        former,
        rows=former.rows[2:3],
        side=32,
        options={"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32), "head_dim": 8},
        **small,
    )
    return [
        (replace(vit, rows=(vit.rows[0], vit.rows[-1])), "eager"),
        (replace(vit, rows=vit.rows[:1]), "compiled"),
        (former, "eager"),
    ]


# ---- measuring -------------------------------------------------------------------------------


def _recipe(family: Family, row: Row) -> Any:
    """The family's recipe with a row's model; AdamW in place of an optimiser that is not fused."""
    from keymix import recipes

    recipe = recipes.get(family.recipe)
    options = {**recipe.model.options, **(family.options or {})}
    model = replace(recipe.model, name=row.model, mixer=row.mixer, options=options)
    optim = recipe.optim
    if optim.name not in ("adam", "adamw"):  # LAMB's every 16 batches hardly counts
        optim = replace(optim, name="adamw", lr=1e-4, accumulate=1)
    return replace(recipe, model=model, optim=optim)


def _built(family: Family, row: Row) -> Any:
    """A row's model on the CPU."""
    from keymix.train.model import build_model

    size = (family.side, family.side)
    return build_model(
        _recipe(family, row), num_classes=family.classes, in_chans=3, image_size=size
    )


def _batch(family: Family, device: str) -> tuple[Any, Any]:
    """Random pixels of 0 to 255, normalised, and labels, on the device."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    shape = (family.batch, 3, family.side, family.side)
    pixels = torch.randint(0, 256, shape, generator=generator, device=device)
    labels = torch.randint(0, family.classes, (family.batch,), generator=generator, device=device)
    return (pixels.float() / 255 - 0.5) / 0.25, labels


def _own_code(model: Any, backend: str) -> Callable[..., Any]:
    """Compile a model's call under a code object of its own.

    Graphs are kept by code object, eight at most, and models that are compiled by themselves share
    one.
    """
    import torch

    from keymix.train.task import own_code

    own = own_code(_call, f"call_{next(_NUMBER)}")
    return functools.partial(torch.compile(own, backend=backend, dynamic=False), model)


def _call(model: Any, images: Any) -> Any:
    return model(images)


class Runner:
    """A row's model that trains and answers on one batch, eager or by `torch.compile`."""

    def __init__(
        self, family: Family, row: Row, model: Any, batch: Any, *, device: str, compiled: bool
    ) -> None:
        from keymix.train.step import make_optimizer

        recipe = _recipe(family, row)
        self.device, self.batches = device, family.batches
        self.images, self.labels = batch
        self.model = model.to(device)
        # inductor's C++ takes half a minute a model: a dry run stops at the graph
        backend = "inductor" if device == "cuda" else "eager"
        self.forward = _own_code(self.model, backend) if compiled else self.model
        self.optimizer = make_optimizer(recipe.optim, self.model)
        self.clip, self.smoothing = recipe.optim.clip_grad, recipe.loss.label_smoothing

    def once(self, setting: Setting) -> Any:
        """Train on a batch, or classify one; the loss or the logits. The mode is set before."""
        import torch
        import torch.nn.functional as F

        images = self.images if setting.batch is None else self.images[: setting.batch]
        autocast = torch.autocast(self.device, torch.bfloat16, enabled=setting.bfloat16)
        if not setting.training:
            with torch.inference_mode(), autocast:
                return self.forward(images)
        self.optimizer.zero_grad()
        with autocast:
            logits = self.forward(images).float()
            loss = F.cross_entropy(logits, self.labels, label_smoothing=self.smoothing)
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.detach()

    def loop(self, setting: Setting) -> None:
        """Take the batches of a pass."""
        for _ in range(self.batches):
            self.once(setting)

    def first(self, setting: Setting) -> dict[str, Any]:
        """Take the first batch: seconds, graphs that were compiled, breaks and cached graphs."""
        import torch
        from torch._dynamo.utils import counters

        counters.clear()
        self.model.train(setting.training)
        start = time.perf_counter()
        self.once(setting)
        if self.device == "cuda":
            torch.cuda.synchronize()
        found = {
            "seconds": time.perf_counter() - start,
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": sum(counters["graph_break"].values()),
            "cached": counters["inductor"]["fxgraph_cache_hit"]
            + counters["aot_autograd"]["autograd_cache_hit"],
        }
        if not found["graphs"]:
            raise RuntimeError("no graph was compiled: this would time an eager model")
        return found

    def issued(self, setting: Setting) -> float | None:
        """Share of one batch in which the host issues it; None on a CPU. Near 1 the host limits."""
        import torch

        if self.device != "cuda":
            return None
        shares = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.once(setting)
            issued = time.perf_counter()
            torch.cuda.synchronize()
            shares.append((issued - start) / (time.perf_counter() - start))
        return statistics.median(shares)

    def peak_mib(self, setting: Setting) -> float | None:
        """Memory that one batch takes beyond weights, optimiser and images; None on a CPU."""
        import torch

        if self.device != "cuda":
            return None
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.once(setting)
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20


def _compile_one(family: Family, row: Row, device: str, file: Path) -> None:
    """Compile a row's model, so that its code lies in the cache, and write what it took."""
    import torch

    end_with_parent()
    torch.set_num_threads(1)  # threads do not outlive a fork
    model = _built(family, row)
    runner = Runner(family, row, model, _batch(family, device), device=device, compiled=True)
    first = {name: runner.first(SETTINGS[name]) for name in MODES["compiled"]}
    file.write_text(json.dumps(first))


def _compile_all(family: Family, context: Context) -> dict[str, Any]:
    """Compile the family's models at once, each in a process of its own; what each one took.

    CUDA and threads must not have been started in this process. A model that fails here, fails
    again where it is measured, and is reported there.
    """
    fork = multiprocessing.get_context("fork")
    limit = time.monotonic() + min(AHEAD, 0.6 * context.left())
    files = [context.work / f"compiled-{number}.json" for number in range(len(family.rows))]
    running = []
    for row, file in zip(family.rows, files, strict=True):
        file.unlink(missing_ok=True)
        process = fork.Process(target=_compile_one, args=(family, row, context.device, file))
        process.start()
        running.append(process)
    for process in running:
        process.join(max(0.0, limit - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return {
        row.label: json.loads(file.read_text())
        for row, file in zip(family.rows, files, strict=True)
        if file.exists()
    }


def _timed(runners: Mapping[str, Runner], setting: Setting, rounds: int) -> Any:
    """Time passes of all runners in turns, after a warm-up."""
    import torch

    from keymix.analysis.measure import timed
    from keymix.analysis.timing import Turns

    for runner in runners.values():
        runner.model.train(setting.training)
    turns = Turns(
        {
            name: timed(functools.partial(runner.loop, setting), torch.device(runner.device))
            for name, runner in runners.items()
        }
    )
    for _ in range(rounds):
        turns.round()
    return turns.samples


def _faster(base: Any, other: Any, comparisons: int) -> dict[str, Any]:
    """How many times as many images per second the other one takes, and whether that is sure."""
    from keymix.analysis.timing import compare

    paired = compare(base, other, comparisons=comparisons)
    low, middle, high = (1 / r for r in (paired.ratio_q3, paired.ratio, paired.ratio_q1))
    return {"q1": low, "median": middle, "q3": high, "p": paired.p, "verdict": paired.verdict}


def _measure(family: Family, mode: str, context: Context) -> Result:
    """Time a family's models in turns, in each setting of the mode."""
    compilations: dict[str, Any] = {}
    if mode == "compiled":
        # one place for all runs of this step, on the machine's own disk
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(context.work.parent / "inductor")
        compilations = _compile_all(family, context)

    import keymix
    from keymix.analysis.timing import quartiles

    size = (3, family.side, family.side)
    batch = _batch(family, context.device)
    runners: dict[str, Runner] = {}
    rows: dict[str, dict[str, Any]] = {}
    for row in family.rows:
        model = _built(family, row)
        found = keymix.count(model, size)
        rows[row.label] = {"model": row.model, "parameters": found.params, "macs": found.macs}
        make = functools.partial(Runner, family, row, batch=batch, device=context.device)
        runners[row.label] = make(model, compiled=mode == "compiled")
        if mode == "compiled":
            runners[f"eager {row.label}"] = make(_built(family, row), compiled=False)
            here = {name: runners[row.label].first(SETTINGS[name]) for name in MODES[mode]}
            rows[row.label]["first"] = compilations.get(row.label, here)
            rows[row.label]["again"] = here
    first, others = family.rows[0].label, len(family.rows) - 1
    for name in MODES[mode]:
        setting = SETTINGS[name]
        samples = _timed(runners, setting, family.rounds)
        images = family.batches * min(setting.batch or family.batch, family.batch)
        for label, row_of in rows.items():
            slow, middle, fast = (images / t for t in reversed(quartiles(samples[label].kept())))
            passes = 3 if setting.training else 1  # a backward pass is two forward passes
            entry: dict[str, Any] = {
                "q1": slow,
                "median": middle,
                "q3": fast,
                "tflops": 2 * row_of["macs"] * passes * middle / 1e12,
                "issued": runners[label].issued(setting),
                "peak_mib": runners[label].peak_mib(setting),
            }
            if label != first:
                entry["against_base"] = _faster(samples[first], samples[label], others)
            if mode == "compiled":
                eager = samples[f"eager {label}"]
                entry["against_eager"] = _faster(eager, samples[label], others + 1)
            row_of[name] = entry
    for label, row_of in rows.items():
        runners[label].model.train()
        row_of["finite"] = math.isfinite(float(runners[label].once(SETTINGS[TRAINING])))
    return {
        "family": family.name,
        "mode": mode,
        "rows": rows,
        "batch": family.batch,
        "small_batch": min(SETTINGS[SMALL].batch or 0, family.batch),
        "side": family.side,
        "batches_a_pass": family.batches,
        "rounds": family.rounds,
        "dtype": "bfloat16 autocast",
    }


def steps(tiny: bool) -> list[Step]:
    """A step each of eager and compiled, for every family."""
    wanted = _tiny() if tiny else [(family, mode) for family in FAMILIES for mode in MODES]
    return [
        Step(
            name=f"{family.name}/{mode}",
            seconds=family.seconds[list(MODES).index(mode)],
            measure=functools.partial(_measure, family, mode),
            gpu_gib=90.0 if family.side > 32 else 30.0,
        )
        for family, mode in wanted
    ]


# ---- saying ----------------------------------------------------------------------------------

Found = Mapping[str, Mapping[str, Any]]  # results of the steps that are done, by name

INFERENCES: tuple[tuple[str, str, str], ...] = (
    ("eager", INFERENCE, "eager"),
    ("eager", FULL, "eager, float32"),
    ("eager", SMALL, "eager, small batch"),
    ("compiled", INFERENCE, "compiled"),
)
TRAININGS = (("eager", TRAINING, "eager"), ("compiled", TRAINING, "compiled"))


def _entry(found: Found, family: str, mode: str, label: str, setting: str) -> Any:
    """What was measured of a row; an empty dict if nothing was."""
    result = found.get(f"{family}/{mode}", {})
    return result.get("rows", {}).get(label, {}).get(setting, {})


def _ratio(entry: Mapping[str, Any], against: str = "against_base") -> str:
    """A ratio, what the test says in its place, or a dash."""
    from keymix.analysis.timing import SHORT

    paired = entry.get(against)
    if paired is None:
        return "–"
    return (SHORT.get(paired["verdict"]) or f"{paired['median']:.2f}") + "†" * _by_host(entry)


def _by_host(entry: Mapping[str, Any]) -> bool:
    """Whether the host's launches, and not the GPU, set the time."""
    return (entry.get("issued") or 0.0) > ISSUED


def _number(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    return "–" if value is None else f"{value * scale:,.{digits}f}"


def _published(family: Family, label: str) -> float | None:
    """The published ratio of a row to its base."""
    base, row = family.rows[0], next(row for row in family.rows if row.label == label)
    if row.published is None or base.published is None:
        return None
    return row.published / base.published


def _ratios(
    found: Found, family: str, label: str, ways: Sequence[tuple[str, str, str]]
) -> list[tuple[str, Any]]:
    """A row's ratios to its base that were measured: in words, and with spread and verdict."""
    said = []
    for mode, setting, words in ways:
        entry = _entry(found, family, mode, label, setting)
        paired = entry.get("against_base")
        if paired is not None:
            unsure = "" if paired["verdict"] == "different" else f" ({paired['verdict']})"
            unsure += ", where the host's launches set the time" * _by_host(entry)
            said.append((f"{words} {paired['median']:.2f}{unsure}", paired))
    return said


def _claim(found: Found) -> str:
    """Say whether the published ratio of CSKA-ViT-S to ViT-S holds.

    It holds in a setting if the test calls the two different and our ratio is at least the
    published one less 5 %.
    """
    name, label = CLAIM
    family = next(family for family in FAMILIES if family.name == name)
    base = family.rows[0]
    row = next(row for row in family.rows if row.label == label)
    published = _published(family, label)
    assert published is not None  # Table 1 has it
    groups: dict[str, list[str]] = {"reached": [], "missed": [], "undecided": []}
    for text, paired in _ratios(found, name, label, INFERENCES):
        enough = paired["median"] >= (1 - AGREES) * published
        sure = {"different": "reached" if enough else "missed", "not distinguishable": "missed"}
        groups[sure.get(paired["verdict"], "undecided")].append(text)
    if not any(groups.values()):
        return f"Whether {label} is faster than {base.label} was not measured yet."
    answer = "is not decided"
    if groups["reached"] or groups["missed"]:
        answer = "holds in part" if groups["reached"] else "does not hold"
        answer = answer if groups["missed"] else "holds"
    parts = "; ".join(f"{word}: {', '.join(texts)}" for word, texts in groups.items() if texts)
    return (
        f'"{label} {row.published:,} against {base.label} {base.published:,}" images per second, '
        f"{published:.2f} times as many, **{answer}** in inference here ({parts})."
    )


def _others(found: Found) -> str:
    """Count how many of the published ratios of all rows lie on the same side of 1 here."""

    def side(ratio: float) -> int:
        return 0 if abs(ratio - 1) <= MARGIN else 1 if ratio > 1 else -1

    same = []
    for family in FAMILIES:
        for row in family.rows[1:]:
            published = _published(family, row.label)
            for _, paired in _ratios(found, family.name, row.label, INFERENCES[:1]):
                if published is not None and paired["verdict"] in DECIDED:
                    sure = paired["verdict"] == "different"
                    same.append(side(published) == (side(paired["median"]) if sure else 0))
    if not same:
        return ""
    return (
        f"Of {len(same)} published ratios to a family's first model, {sum(same)} are on the same "
        "side here (faster, slower, or no difference of more than 2 %; eager inference)."
    )


def _trained(found: Found) -> str:
    """Say how fast the claim's row and those at 224 pixels train."""
    said = []
    for family in FAMILIES:
        for row in family.rows[1:]:
            if (family.name, row.label) == CLAIM or row.published is None:
                texts = [text for text, _ in _ratios(found, family.name, row.label, TRAININGS)]
                said += [f"{row.label} {', '.join(texts)}"] if texts else []
    if not said:
        return ""
    return (
        "Training, which the paper does not print, in multiples of ViT-S's or CAFormer-S18's "
        f"images per second: {'; '.join(said)}."
    )


def _compilation(found: Found) -> str:
    """Say what compilation brings in training, where eager and compiled were timed in turns."""
    gains, breaks = [], 0
    for name, result in found.items():
        for row in result["rows"].values() if name.endswith("/compiled") else ():
            gains.append(row[TRAINING]["against_eager"]["median"])
            breaks += sum(each["breaks"] for each in row["again"].values())
    if not gains:
        return ""
    broken = f"{breaks} graph breaks" if breaks else "without a graph break"
    return (
        f"Compiled models ({len(gains)}) train at {min(gains):.2f} to {max(gains):.2f} times the "
        f"eager images per second, {broken}."
    )


def _inference_table(found: Found, family: Family, rows: Mapping[str, Any]) -> str:
    heads = ["inference", "parameters", "MACs, M", "published", "ratio"]
    lines = []
    for row in (row for row in family.rows if row.label in rows):
        counted = rows[row.label]
        ratio = None if row is family.rows[0] else _published(family, row.label)
        line = [row.label, f"{counted['parameters']:,}", _number(counted["macs"], 1, 1e-6)]
        line += [_number(row.published), _number(ratio, 2)]
        for mode, setting, _ in INFERENCES:
            entry = _entry(found, family.name, mode, row.label, setting)
            line += [_number(entry.get("median")), _ratio(entry)]
        lines.append(line)
    return table([*heads, *(h for _, _, words in INFERENCES for h in (words, "ratio"))], lines)


def _training_table(found: Found, family: Family, labels: Iterable[str]) -> str:
    heads = ["training"]
    for _, _, words in TRAININGS:
        heads += [words, "ratio", "TFLOP/s", "peak, GiB"]
    lines = []
    for label in labels:
        line = [label]
        for mode, setting, _ in TRAININGS:
            entry = _entry(found, family.name, mode, label, setting)
            line += [_number(entry.get("median")), _ratio(entry)]
            line += [_number(entry.get("tflops"), 1), _number(entry.get("peak_mib"), 2, 1 / 1024)]
        line.append(_ratio(entry, "against_eager"))
        compiled = found.get(f"{family.name}/compiled", {}).get("rows", {}).get(label)
        if compiled is None:
            line += ["–", "–"]
        else:
            first = compiled["first"].values()
            cached = " (cached)" if any(each["cached"] for each in first) else ""
            line.append(_number(sum(each["seconds"] for each in first)) + cached)
            line.append(_number(sum(each["breaks"] for each in compiled["again"].values())))
        lines.append(line)
    return table([*heads, "compiled / eager", "compilation, s", "graph breaks"], lines)


def _spread(found: Found) -> float:
    """The largest distance of a quartile of images per second from its median, as a share."""
    return max(
        abs(entry[side] / entry["median"] - 1)
        for result in found.values()
        for row in result["rows"].values()
        for setting in MODES[result["mode"]]
        for entry in (row[setting],)
        for side in ("q1", "q3")
    )


def section(results: Found) -> str:
    """Answer first, then two tables a family, then how it was measured."""
    answers = (_claim(results), _others(results), _trained(results), _compilation(results))
    parts = [" ".join(answer for answer in answers if answer)]
    infinite = [
        f"{label} ({result['mode']})"
        for result in results.values()
        for label, row in result["rows"].items()
        if not row["finite"]
    ]
    if infinite:
        parts.append(f"The loss was not finite at the end: {', '.join(infinite)}.")
    for family in FAMILIES:
        done = [results[k] for mode in MODES if (k := f"{family.name}/{mode}") in results]
        if not done:
            continue
        result = done[0]
        parts.append(
            f"**{family.rows[0].label} and its forms**, images per second; {result['side']} "
            f"pixels, batch {result['batch']} (small: {result['small_batch']})"
        )
        parts.append(_inference_table(results, family, result["rows"]))
        parts.append(_training_table(results, family, result["rows"]))
    rounds = " or ".join(map(str, sorted({result["rounds"] for result in results.values()})))
    parts.append(
        "Published: SKA's Table 1 (CIFAR-10), inference on one NVIDIA RTX 4090 at a batch and "
        "precision that the paper does not say. So only ratios compare: to the family's first "
        "model; n.d. where a paired test (1 % for the family together) calls no difference of "
        "more than 2 %, few where the rounds are too few for it, busy where halves of the rounds "
        f"contradict each other; †: the host took over {100 * ISSUED:.0f} % of the time to issue "
        "the batch, so launches are compared, not the GPU's work. Models of a family ran in turns "
        f"in one process, {rounds} rounds, medians; quartiles lie within "
        f"{100 * _spread(results):.1f} % of them. bfloat16 "
        "autocast, or float32 with PyTorch's defaults where it says so; random images on the "
        "device, so no data path. Training: forward pass, cross entropy, backward pass and an "
        "update of the recipe's fused Adam (at 224 pixels fused AdamW in place of the recipe's "
        "LAMB, which updates every 16 batches). TFLOP/s: 2 x MACs x 3 x images per second, as if "
        "a backward pass were two forward passes. Peak: what a training step takes beyond "
        "weights, optimiser and images. Compilation: first training step and first inference, "
        "all models of the family at once; compiled / eager from rounds of both in turns."
    )
    return "\n\n".join(parts)


JOB = Job(
    number=3,
    name="throughput",
    title="Images per second",
    purpose=(
        "How fast the 16 models of SKA's Table 1 and three of its Table 2 train and answer, eager "
        'and compiled; whether "CSKA-ViT-S 7,220 against ViT-S 5,008" holds.'
    ),
    form={
        "rows/<label>": "model, parameters, macs, finite (the loss at the end), settings",
        "rows/<label>/<setting>": "images per second (q1, median, q3), tflops, peak_mib, "
        "against_base and against_eager (ratio of images per second: q1, median, q3, p, verdict)",
        "rows/<label>/first": "compilation by setting: seconds, graphs, breaks, cached graphs",
        "rows/<label>/again": "the same behind it, where it is timed",
        "batch, small_batch, side, batches_a_pass, rounds, dtype": "how it was measured",
    },
    steps=steps,
    section=section,
)

# SPDX-License-Identifier: Apache-2.0
"""QKFormer on CIFAR-10 in a short run, its neurons and training step compared with SpikingJelly's.

Paper: QKFormer, https://arxiv.org/abs/2403.16552. Table 3: HST-4-384 on CIFAR-10, 96.18 %, by 410
epochs of batches of 64. Table 8: memory of Q-K token attention and of spiking self-attention.

The run, by paper arithmetic. HST-4-384 makes 6.06 G multiply-adds per image of 32 pixels in 4 steps
(`keymix.analysis.counting`), a training step three times as many: 36 GFLOP. The H200's peak in
bfloat16 is 989 TFLOP/s; at a tenth of it, which 3 x 3 convolutions of 48 to 384 channels reach,
2,700 images per second. Between the layers 65 M numbers per image are written forward and backward,
and read about twice: 0.4 GB in bfloat16, 7,000 images per second at 60 % of 4.8 TB/s. Forward and
backward are some 370 operations and AdamW's, about 600 launches; at 40 microseconds each with
Python around them 24 ms per step, so that batches of 64 come to 2,700 images per second at the very
most and an epoch of 704 of them takes 17 s, while batches of 256 leave the GPU the limit. With
3,000 images per second and 2 s for validation and checkpoint an epoch of 45,000 images takes 17 s:
20 minutes are 70 epochs. A published run of 410 would take two hours and cannot leave a machine
that is lent for half an hour. So the batch is 256, and the epochs are chosen from `EPOCHS` by the
speed measured before.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from gpu_queue.job import Context, Job, Result, Step, table
from gpu_queue.training import train_in_time

RECIPE = "qkformer_cifar10"
PUBLISHED, PUBLISHED_EPOCHS, PUBLISHED_BATCH = 0.9618, 410, 64
IMAGES, HELD_OUT = 45_000, 5_000  # of CIFAR-10's training images, by the recipe
MACS = 6.06e9  # of one image in 4 time steps, counted
PEAK = 989e12  # FLOP/s of an H200 in bfloat16, dense, by its data sheet

BATCH = 256
BATCHES = (64, 256, 512)
EPOCHS = (20, 30, 40, 60, 80, 100)
UNMEASURED = 40  # epochs where no speed was measured
RUN_SECONDS = 1200.0  # of the half hour, for the epochs; the rest is for starting and testing
RATE_IMAGES = 64

SHAPES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "tokens": ("tokens of CIFAR-10's last stage", (4, 64, 64, 384)),
    "hidden": ("hidden layer of its MLP", (4, 64, 64, 1536)),
    "stem": ("CIFAR-10's first stage", (4, 64, 96, 32, 32)),
    "imagenet": ("ImageNet's first stage", (4, 64, 96, 56, 56)),
    "large": ("ImageNet's first stage, 512 images", (4, 512, 96, 56, 56)),
}
BACKENDS = ("triton", "reference")  # those of a GPU
DTYPES = ("float32", "bfloat16", "float16")
WIDE = 600_000_000  # neurons, 2.4e9 numbers in 4 steps: more than 32 bits count
SIDES = (8, 10, 20, 30, 40, 50, 60, 80, 100, 128)
MIXERS = "qk_token,spiking_self,spiking_self(order=linear)"
ROUNDS = 12


# ---- speed and the run -----------------------------------------------------------------------


def _recipe(context: Context, *, batch: int, epochs: int) -> Any:
    """The published recipe, shortened.

    Warm-up, cool-down and the end of mixup stand at the same shares of the run. The learning rate
    of AdamW grows with the square root of the batch (Malladi et al. 2022, arXiv:2205.10287).
    """
    from keymix import recipes
    from keymix.train.recipe import replace_path

    base = recipes.get(RECIPE)
    share = epochs / base.schedule.epochs
    changes = {
        "data.spec": context.cifar10,
        "data.batch_size": batch,
        "optim.lr": base.optim.lr * math.sqrt(batch / base.data.batch_size),
        "schedule.epochs": epochs,
        "schedule.warmup_epochs": round(base.schedule.warmup_epochs * share, 2),
        "schedule.cooldown_epochs": max(1, round(base.schedule.cooldown_epochs * share)),
        "loss.mixup_off_epoch": round(base.loss.mixup_off_epoch * share),
    }
    if context.tiny:
        changes |= {
            "data.limit": 48,
            "data.image_size": 16,
            "model.options": {"embed_dim": 32, "num_heads": 2, "time_steps": 2},
        }
    return replace_path(base, changes)


def _speed(context: Context) -> Result:
    """Take training steps of the recipe's model, in turns with batches of several sizes."""
    import torch

    from keymix.analysis.measure import timed
    from keymix.analysis.memory import MIB
    from keymix.analysis.memory_growth import peak_bytes
    from keymix.analysis.timing import Turns
    from keymix.train.model import build_model
    from qkformer_step import training_step

    device = torch.device(context.device)
    batches, side, rounds = ((2, 4), 16, 3) if context.tiny else (BATCHES, 32, 15)
    torch.manual_seed(0)
    model = build_model(
        _recipe(context, batch=BATCH, epochs=UNMEASURED),
        num_classes=10,
        in_chans=3,
        image_size=(side, side),
        time_steps=None,
    )
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    steps = {}
    for batch in batches:
        images = torch.randn(batch, 3, side, side, device=device)
        labels = torch.randint(0, 10, (batch,), device=device)
        steps[str(batch)] = training_step(model, optimizer, images, labels, bfloat16=True)
    turns = Turns({batch: timed(step, device) for batch, step in steps.items()})
    for _ in range(rounds):
        turns.round()
    found = {}
    for batch, samples in turns.samples.items():
        found[batch] = _spread(samples)
        found[batch]["images_per_s"] = 1e3 * int(batch) / found[batch]["ms"]
        found[batch]["peak_mib"] = peak_bytes(steps[batch], device) / MIB
    return {"batches": found, "dtype": "bfloat16 autocast", "side": side, "mode": "eager"}


def _epochs_that_fit(images_per_s: float | None) -> int:
    """Choose the largest number of epochs that end in time at a measured speed."""
    if images_per_s is None:
        return UNMEASURED
    # validation is three times as fast; loader, checkpoint and a busy host take 15 % and 2 s
    epoch = 1.15 * (IMAGES + HELD_OUT / 3) / images_per_s + 2
    fitting = [epochs for epochs in EPOCHS if epochs * epoch <= RUN_SECONDS]
    return fitting[-1] if fitting else EPOCHS[0]


def _run(context: Context) -> Result:
    """Train, or resume; read the firing rates of the trained network on a CPU."""
    from keymix.records import to_json
    from keymix.train.model import load_data

    speed = context.results.get("speed", {}).get("batches", {}).get(str(BATCH), {})
    batch, epochs = BATCH, _epochs_that_fit(speed.get("images_per_s"))
    if context.tiny:
        batch, epochs = 16, 2
    recipe = _recipe(context, batch=batch, epochs=epochs)
    data = load_data(recipe.data)
    run = train_in_time(context, recipe, data)
    recipe = run.recipe
    epochs = recipe.schedule.epochs
    summary, lines = run.summary, run.metrics()
    seconds = [line["seconds"] for line in lines]  # of an epoch, validation and checkpoint included
    return {
        "epochs": epochs,
        "batch": recipe.data.batch_size,
        "lr": recipe.optim.lr,
        "seed": recipe.seed,
        "precision": recipe.precision,
        "last": to_json(summary.last),
        "best": to_json(summary.best),
        "seconds": summary.seconds,
        "images_per_s": summary.data.sizes["train"] / statistics.median(seconds),
        "metrics": [
            {key: value for key, value in line.items() if isinstance(value, int | float)}
            for line in lines
        ],
        "rates": _rates(run, data, images=8 if context.tiny else RATE_IMAGES),
    }


def _rates(run: Any, data: Any, *, images: int) -> Result:
    """Spikes a neuron a step on the first test images, by the name of their place in a block."""
    from keymix.analysis.spikes import spike_study
    from keymix.train.evaluation import eval_loader

    batch = next(iter(eval_loader(run.recipe, data, "test")))
    study = spike_study(run.model("last"), batch.images[:images].cpu())
    named = [f for f in study.firings if f.role is not None]
    return {
        "images": images,
        "rate": study.rate,
        "by_role": [{"stage": f.stage, "role": f.role, "rate": f.rate} for f in named],
    }


# ---- neurons ---------------------------------------------------------------------------------


def _neurons(context: Context, shape: tuple[int, ...]) -> Result:
    """Time neurons against SpikingJelly's at one shape, in every dtype."""
    import torch
    from spikingjelly.activation_based import functional

    import neurons
    from keymix.analysis.memory import MIB

    device = torch.device(context.device)
    backends, dtypes, rounds = BACKENDS, DTYPES, ROUNDS
    if context.tiny:  # Triton is for CUDA
        shape, backends, dtypes, rounds = (2, 3, 5), ("blocked",), DTYPES[:2], 2
    fused = functional.neuron_implementation("lif", device)["implementation"]
    # its potentials have the dtype of the currents; where that is not float32, it runs PyTorch's
    # operations step by step, whatever it says of the device (functional/neuron.py, lif_multi_step)
    theirs = {dtype: fused if dtype == "float32" else "torch-reference" for dtype in dtypes}
    found: Result = {"shape": list(shape), "numbers": math.prod(shape), "theirs": theirs}
    for dtype in dtypes:
        bench = neurons.bench(shape, backends, rounds, device, getattr(torch, dtype))
        for name in (neurons.BASELINE, *backends):
            row = {"peak_mib": bench.peaks[name] / MIB}
            row |= {"flips": bench.flips[name], "gap": bench.gaps[name]}
            for what, samples in (("forward", bench.forward), ("both", bench.both)):
                base = None if name == neurons.BASELINE else samples[neurons.BASELINE]
                row[what] = _spread(samples[name], base, len(backends))
            found.setdefault(dtype, {})[name] = row
    return found


def _spread(samples: Any, base: Any = None, comparisons: int = 1) -> Result:
    """Median and quartiles of times, and of their ratios to a baseline's in the same rounds."""
    from keymix.analysis.timing import compare, quartiles

    low, middle, high = (1e3 * each for each in quartiles(samples.kept()))
    found = {"ms": middle, "ms_q1": low, "ms_q3": high, "rounds": len(samples.kept())}
    if base is not None:
        paired = asdict(compare(base, samples, comparisons=comparisons))
        found |= {name: paired[name] for name in ("ratio", "ratio_q1", "ratio_q3", "verdict")}
    return found


def _correct(context: Context) -> Result:
    """Compare neurons on this device with the reference, in the same dtype and in float64."""
    import torch

    import neurons
    from keymix.ops.neuron.multi_step import choose

    device = torch.device(context.device)
    shapes = {"even": (4, 16, 64, 384), "odd": (5, 3, 7, 1111)}
    if context.tiny:
        shapes = {"odd": (3, 2, 5, 7)}
    lays = {"": lambda x: x, ", channels last": lambda x: x.mT.contiguous().mT}
    dtypes, kinds = ("float64", *DTYPES), neurons.every_kind()
    rows = []
    for size, dtype, name, how in itertools.product(shapes, dtypes, kinds, lays):
        torch.manual_seed(0)
        x = 2 * torch.randn(shapes[size], device=device).to(getattr(torch, dtype))
        x, grad = lays[how](x), torch.randn(shapes[size], device=device).to(x.dtype)
        found = neurons.outcome(kinds[name]("auto"), x, grad)
        same = neurons.outcome(kinds[name]("reference"), x, grad)
        exact = neurons.outcome(kinds[name]("reference").double(), x.double(), grad.double())
        row = {"neurons": name + how, "sizes": size, "dtype": dtype, "ran": choose("auto", x).name}
        row |= {"rate": float(found[0].mean()), **neurons.errors(found, same, exact)}
        rows.append(row)
    return {"rows": rows, "shapes": {name: list(shape) for name, shape in shapes.items()}}


def _wide(context: Context) -> Result:
    """Run neurons over more numbers than 32 bits count; compare the last of them."""
    import torch

    import neurons
    from keymix.layers.neurons import LIF
    from keymix.ops.neuron.multi_step import choose

    count = 1000 if context.tiny else WIDE
    tail = count // 100
    torch.manual_seed(0)
    x, grad = (torch.randn(4, count, device=context.device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    spikes = LIF()(x)
    spikes.backward(grad)
    end = [each[:, -tail:].detach() for each in (x, grad)]
    wanted = neurons.outcome(LIF(backend="reference"), *end)
    return {
        "numbers": 4 * count,
        "ran": choose("auto", x).name,
        "dtype": "bfloat16",
        "compared": 4 * tail,
        "spikes_differ": int((spikes[:, -tail:].double() != wanted[0]).sum()),
        "error": float((x.grad[:, -tail:].double() - wanted[1]).abs().max()),
    }


# ---- memory and the training step ------------------------------------------------------------


def _memory(context: Context) -> Result:
    """Measure the peak memory of Q-K token attention and of spiking self-attention."""
    from keymix.analysis.memory_growth import memory_growth

    sides = (4, 8, 10) if context.tiny else SIDES
    *_, study = memory_growth(MIXERS, sides=sides, device=context.device)
    rows = [asdict(row) for row in study.rows]
    return {
        "rows": rows,
        "dim": study.dim,
        "heads": study.num_heads,
        "dtype": "float32",
        "how": study.how,
        "orders": {name: _order_of_growth(rows, name) for name in study.mixers},
    }


def _order_of_growth(rows: Sequence[Mapping[str, Any]], mixer: str) -> float | None:
    """Fit the power of N that the memory of a mixer grows by.

    Least squares of the logarithms over the larger half of the numbers of tokens, where terms of
    lower order count little. None where fewer than two were measured.
    """
    points = [(row["tokens"], row["mib"]) for row in rows if row["mixer"] == mixer and row["mib"]]
    points = sorted(points)[len(points) // 2 :]
    if len(points) < 2:
        return None
    logs = [(math.log(tokens), math.log(mib)) for tokens, mib in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def _step(context: Context, bfloat16: bool) -> Result:
    """Time training steps of QKFormer against SpikingJelly's own."""
    import torch

    import qkformer_step

    setting, rounds = qkformer_step.Setting(batch=32, side=224, depths=(1, 2, 7)), ROUNDS
    if context.tiny:
        setting, rounds = replace(setting, batch=2, side=16, dim=96, depths=(1, 1, 1)), 2
    setting = replace(setting, device=context.device, bfloat16=bfloat16)
    on_gpu = torch.device(context.device).type == "cuda"
    peaks = {name: qkformer_step.peak(name, setting) for name in setting.names if on_gpu}
    samples = qkformer_step.times(setting, rounds)
    found: Result = {}
    for name in setting.names:
        base = None if name == qkformer_step.THEIRS else samples[qkformer_step.THEIRS]
        found[name] = _spread(samples[name], base, len(setting.names) - 1)
        found[name]["peak_mib"] = peaks.get(name)
    return {
        "steps": found,
        "batch": setting.batch,
        "side": setting.side,
        "depths": list(setting.depths),
        "dtype": "bfloat16 autocast" if bfloat16 else "float32",
    }


# ---- the page --------------------------------------------------------------------------------


def _range(values: Sequence[float], digits: int = 2) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _quotient(row: Mapping[str, Any]) -> str:
    """A ratio of times with its quartiles, or why it is none."""
    if row["verdict"] == "different":
        return f"{row['ratio']:.2f} [{row['ratio_q1']:.2f}, {row['ratio_q3']:.2f}]"
    return str(row["verdict"])


def _judged(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say of paired ratios how many are faster and slower."""
    apart = [row["ratio"] for row in rows if row["verdict"] == "different"]
    faster, slower = [r for r in apart if r < 1], [r for r in apart if r > 1]
    parts = []
    if faster:
        parts.append(f"faster in {len(faster)} (ratio of times {_range(faster)})")
    if slower:
        parts.append(f"slower in {len(slower)} ({_range(slower)})")
    if len(apart) < len(rows):
        parts.append(f"not shown to differ in {len(rows) - len(apart)}")
    return ", ".join(parts) + f" of {len(rows)}"


def _of_the_run(run: Result) -> list[str]:
    top1 = {which: run[which]["test"]["top1"] for which in ("last", "best")}
    said = (
        f"QKFormer HST-4-384, T = 4, reaches **{100 * top1['last']:.2f} %** on CIFAR-10's test set "
        f"after a shortened run of {run['epochs']} epochs in batches of {run['batch']} (one seed). "
        f"Published are {100 * PUBLISHED:.2f} % after {PUBLISHED_EPOCHS} epochs in batches of "
        f"{PUBLISHED_BATCH} (Table 3): the two are **not comparable**."
    )
    how = (
        f"Warm-up, cool-down and the end of mixup stand at the same shares of the run; the rate, "
        f"{run['lr']:.2g}, is the published one times the square root of the batches' quotient "
        "(arXiv:2205.10287). The recipe holds a tenth of the training images out, and the images "
        "here are re-encoded as JPEG."
    )
    rows = [
        ("test, last epoch", f"{100 * top1['last']:.2f} %", f"{100 * PUBLISHED:.2f} %"),
        ("test, epoch best in validation", f"{100 * top1['best']:.2f} %", ""),
        ("epochs", run["epochs"], PUBLISHED_EPOCHS),
        ("batch", run["batch"], PUBLISHED_BATCH),
        ("training, minutes", f"{run['seconds'] / 60:.1f}", ""),
        ("images/s, validation included", f"{run['images_per_s']:.0f}", ""),
    ]
    parts = [said, how, table(("", "here", "published"), rows)]
    rates = run["rates"]
    parts.append(
        f"Spikes per neuron per step on {rates['images']} test images: {rates['rate']:.4f} over "
        "all neurons; by place, means over blocks:"
    )
    stages = sorted({row["stage"] for row in rates["by_role"]})
    roles = list(dict.fromkeys(row["role"] for row in rates["by_role"]))

    def rate(role: str, stage: int) -> str:
        found = [r["rate"] for r in rates["by_role"] if (r["role"], r["stage"]) == (role, stage)]
        return f"{statistics.fmean(found):.4f}" if found else ""

    found = [(role, *(rate(role, stage) for stage in stages)) for role in roles]
    parts.append(table(("spikes", *(f"stage {stage}" for stage in stages)), found))
    return parts


def _of_the_speed(speed: Result) -> list[str]:
    found = speed["batches"]
    best = max(found, key=lambda batch: found[batch]["images_per_s"])
    first = min(found, key=int)
    gain = found[best]["images_per_s"] / found[first]["images_per_s"]
    share = 6 * MACS * found[best]["images_per_s"] / PEAK
    said = (
        f"In training ({speed['dtype']}, {speed['mode']}) batches of {best} are the fastest, "
        f"{found[best]['images_per_s']:.0f} images/s, {gain:.2f} times batches of {first}; that is "
        f"{100 * share:.1f} % of the peak of 989 TFLOP/s, at 6.06 G multiply-adds per image."
    )
    rows = []
    for batch, row in found.items():
        spread = f"{row['ms']:.1f} [{row['ms_q1']:.1f}, {row['ms_q3']:.1f}]"
        rows.append((batch, f"{row['images_per_s']:.0f}", spread, f"{row['peak_mib']:.0f}"))
    rounds = min(row["rounds"] for row in found.values())
    heads = ("batch", "images/s", "ms per step [quartiles]", "peak MiB")
    how = f"Median of {rounds} rounds in turns, {speed['side']} pixels."
    return [said, table(heads, rows), how]


def _ours(measured: Mapping[str, Any]) -> list[str]:
    """The neurons that are compared with SpikingJelly's, which stand first."""
    return list(measured)[1:]


def _of_the_neurons(found: Mapping[str, Result]) -> list[str]:
    pairs = [
        (place, dtype, result[dtype])
        for place, result in found.items()
        for dtype in DTYPES
        if dtype in result
    ]
    lead = _ours(pairs[0][2])[0]
    said = ""
    for theirs in dict.fromkeys(found[place]["theirs"][dtype] for place, dtype, _ in pairs):
        alike = [(d, m[lead]) for p, d, m in pairs if found[p]["theirs"][d] == theirs]
        said += (
            f"LIF by `{lead}` in {' and '.join(dict.fromkeys(d for d, _ in alike))} next to "
            f"SpikingJelly 2's, which runs its implementation `{theirs}` there: forward and "
            f"backward are {_judged([row['both'] for _, row in alike])} cases; forward alone "
            f"{_judged([row['forward'] for _, row in alike])}. "
        )
    memory = [m[lead]["peak_mib"] / next(iter(m.values()))["peak_mib"] for _, _, m in pairs]
    flips = max(m[lead]["flips"] for _, _, m in pairs)
    said += (
        f"Peak memory of forward and backward is {_range(memory)} times SpikingJelly's. At most "
        f"{1e6 * flips:.2f} spikes in a million differ: the two round the charge otherwise, and "
        "SpikingJelly's potentials have the dtype of the currents, ours float32."
    )
    rows = []
    for place, dtype, measured in pairs:
        base, *others = measured.values()
        for name, row in zip(_ours(measured), others, strict=True):
            rows.append(
                (
                    f"{SHAPES[place][0]}, {found[place]['shape']}",
                    dtype,
                    name,
                    f"{base['forward']['ms']:.3f}",
                    _quotient(row["forward"]),
                    f"{base['both']['ms']:.3f}",
                    _quotient(row["both"]),
                    f"{row['peak_mib'] / base['peak_mib']:.2f}",
                )
            )
    heads = ("currents [T, B, …]", "dtype", "neurons", "theirs, forward ms", "ratio")
    heads = (*heads, "theirs, both ms", "ratio of both", "ratio of memory")
    rounds = min(m[lead]["both"]["rounds"] for _, _, m in pairs)
    how = (
        f"Ratios of times over SpikingJelly's in the same round, median [quartiles] of at least "
        f"{rounds} rounds in turns; below 1 is faster. Forward alone runs without gradients. Below "
        "about 0.1 ms a pass is the host's time, not the GPU's."
    )
    return [said, table(heads, rows), how]


def _of_the_correctness(correct: Result) -> list[str]:
    by_dtype: dict[str, list[Mapping[str, Any]]] = {}
    for row in correct["rows"]:
        by_dtype.setdefault(row["dtype"], []).append(row)
    ran = " and ".join(sorted({row["ran"] for row in correct["rows"]}))
    equal = sum(row["flips"] == 0 for row in correct["rows"])
    said = (
        f"Spikes of `{ran}` are those of the reference in the same dtype bit for bit in {equal} of "
        f"{len(correct['rows'])} cases (neurons, sizes and memory formats)."
    )
    rows = []
    for dtype, cases in by_dtype.items():
        learned = [case["learned"] for case in cases if "learned" in case]
        rows.append(
            (
                dtype,
                f"{1e6 * max(case['flips'] for case in cases):.2f}",
                f"{1e6 * max(case['flips64'] for case in cases):.2f}",
                f"{max(case['error'] for case in cases):.1e}",
                f"{max(learned):.1e}" if learned else "",
            )
        )
    heads = ("dtype", "spikes per million not the reference's", "not those of float64")
    heads = (*heads, "error of the currents' gradients", "of the learned one")
    how = (
        "The worst of all cases. Errors of gradients are distances from float64 over the largest, "
        "of neurons whose spikes agree; the learned one's from the reference in the same dtype."
    )
    return [said, table(heads, rows), how]


def _of_the_wide(wide: Result) -> list[str]:
    same = "all" if wide["spikes_differ"] == 0 else f"all but {wide['spikes_differ']}"
    return [
        f"Of {wide['numbers']:,} currents at once ({wide['dtype']}, "
        f"`{wide['ran']}`), the last {wide['compared']:,} give {same} of the reference's spikes; "
        f"their gradients are at most {wide['error']:.1e} apart."
    ]


def _of_the_memory(memory: Result) -> list[str]:
    sides = sorted({row["side"] for row in memory["rows"]})
    mixers = list(memory["orders"])
    at = {(row["mixer"], row["side"]): row for row in memory["rows"]}
    orders = [
        f"`{name}` by N^{order:.2f}"
        for name, order in memory["orders"].items()
        if order is not None
    ]
    said = f"Peak memory grows with the tokens N: {', '.join(orders)}." if orders else ""
    printed = [
        row for row in memory["rows"] if row["paper_ratio"] is not None and row["ratio"] is not None
    ]
    if printed:
        row = min(printed, key=lambda row: abs(row["side"] - 50))
        said += (
            f" At sqrt(N) = {row['side']} `{row['mixer']}` takes {row['ratio']:.1f} times "
            f"`{mixers[0]}`'s memory; Table 8 of QKFormer prints {row['paper_ratio']:.2f}, and its "
            'text calls the growth of QKTA "linear to #Tokens".'
        )

    def cell(name: str, side: int) -> str:
        row = at[name, side]
        if row["mib"] is None:
            return str(row["reason"])
        paper = "" if row["paper_mib"] is None else f" ({row['paper_mib']:.2f})"
        return f"{row['mib']:.2f}{paper}"

    rows = [(side * side, *(cell(name, side) for name in mixers)) for side in sides]
    how = (
        f"MiB beyond queries, keys and values, forward, {memory['dtype']}, C = {memory['dim']}, "
        f"{memory['heads']} head, T = B = 1 ({memory['how']}); in brackets Table 8. The power of N "
        "is fitted to the larger half of the rows."
    )
    return [said.strip(), table(("N", *mixers), rows), how]


def _of_the_steps(found: Mapping[str, Result]) -> list[str]:
    says, rows = [], []
    for result in found.values():
        base, *others = result["steps"].items()
        for name, row in others:
            words = f"a step of `{name}` in {result['dtype']} takes {_quotient(row)} times the time"
            if row["verdict"] != "different":
                words = f"the time of `{name}` in {result['dtype']}: {row['verdict']}"
            if row["peak_mib"] is not None:
                words += f" and {row['peak_mib'] / base[1]['peak_mib']:.2f} times the memory"
            says.append(words)
        for name, row in result["steps"].items():
            peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
            spread = f"{row['ms']:.1f} [{row['ms_q1']:.1f}, {row['ms_q3']:.1f}]"
            ratio = "1" if name == base[0] else _quotient(row)
            rows.append((result["dtype"], name, spread, ratio, peak))
    result = next(iter(found.values()))
    rounds = min(row["rounds"] for each in found.values() for row in each["steps"].values())
    heads = ("dtype", "step of", "ms [quartiles]", "ratio of times", "peak MiB")
    how = (
        f"Training steps in turns, {rounds} rounds, batch {result['batch']}, {result['side']} "
        f"pixels, blocks {result['depths']}, T = 4, SGD, eager. In float32 cuDNN may take TF32, as "
        "is PyTorch's default. Under autocast ours calls the parts of a step one by one; "
        "SpikingJelly's potentials are bfloat16 there, for which it takes no fused kernel."
    )
    return [f"Next to SpikingJelly's own QKFormer: {'; '.join(says)}.", table(heads, rows), how]


def _section(results: Mapping[str, Result]) -> str:
    """Write what is there, the short answers first in each part."""
    parts = [] if "run" in results else ["The run on CIFAR-10 has not been made or has not ended."]
    for name, write in (
        ("run", _of_the_run),
        ("speed", _of_the_speed),
        ("neurons/", _of_the_neurons),
        ("correct", _of_the_correctness),
        ("wide", _of_the_wide),
        ("memory", _of_the_memory),
        ("step/", _of_the_steps),
    ):
        found = results.get(name)
        if name.endswith("/"):
            found = {each[len(name) :]: results[each] for each in results if each.startswith(name)}
        if found:
            parts += write(found)
    return "\n\n".join(part for part in parts if part)


_JELLY = ("spikingjelly", "loguru")


def _steps(tiny: bool) -> list[Step]:
    """The short ones first: the run takes what is left of the half hour.

    Each starts in 8 s (process, CUDA, keymix). ``speed``: a round of the three batches is 0.3 s,
    18 with the warm-up; 1.5 copies of 32 M numbers an image and two bytes are
    50 GB for 512 images. ``neurons``: 3 dtypes, each two compilations of ours and of theirs (2 s),
    15 rounds of two passes of at most 30 ms for four neurons (4 s). ``correct``: 64 kernels of
    0.3 s. ``wide``: 30 GB at 4.8 TB/s, and the random numbers. ``memory``: 30 passes of at most
    0.2 s. ``step``: 23 G multiply-adds per image, 32 images: 4.5 TFLOP, 0.1 to 0.3 s a step of
    three models, 15 rounds. ``run``: see the module.
    """
    places = list(SHAPES)[: 1 if tiny else None]
    dtypes = DTYPES[: 1 if tiny else 2]
    return [
        Step(name="speed", seconds=25, measure=_speed, gpu_gib=60),
        Step(name="correct", seconds=40, measure=_correct),
        Step(name="wide", seconds=20, measure=_wide, gpu_gib=40),
        *(
            Step(
                name=f"neurons/{place}",
                seconds=60 if place == "large" else 30,
                measure=functools.partial(_neurons, shape=SHAPES[place][1]),
                packages=_JELLY,
                gpu_gib=60 if place == "large" else 8,
            )
            for place in places
        ),
        Step(name="memory", seconds=20, measure=_memory, gpu_gib=8),
        *(
            Step(
                name=f"step/{dtype}",
                seconds=35,
                measure=functools.partial(_step, bfloat16=dtype != "float32"),
                packages=(*_JELLY, "h5py"),
                gpu_gib=40,
            )
            for dtype in dtypes
        ),
        Step(
            name="run",
            seconds=RUN_SECONDS + 60,
            measure=_run,
            resumable=True,
            least=400,  # a run that cannot end before the machine goes is lost
            data=() if tiny else ("cifar10",),
            gpu_gib=30,
        ),
    ]


JOB = Job(
    number=6,
    name="spiking",
    title="Spiking networks: QKFormer, its neurons and its attention",
    purpose=(
        "What does QKFormer HST-4-384 reach on CIFAR-10 in twenty minutes, and are our neurons, "
        "memory and training step ahead of SpikingJelly's on a GPU?"
    ),
    form={
        "speed": "by batch: ms per step, images/s with quartiles, peak MiB",
        "correct": "by neurons, sizes, dtype: share of spikes that differ, errors of gradients",
        "wide": "spikes that differ among the last of 2.4e9 currents",
        "neurons/*": "by dtype and neurons: ms forward and both, ratio to SpikingJelly's, MiB",
        "memory": "by mixer and tokens: peak MiB beside the paper's, fitted power of N",
        "step/*": "by model: ms a training step, ratio to SpikingJelly's, peak MiB",
        "run": "scores on the test set, metrics of each epoch, images/s, firing rates",
    },
    steps=_steps,
    section=_section,
)

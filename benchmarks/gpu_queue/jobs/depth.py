# SPDX-License-Identifier: Apache-2.0
"""Job 7: DeepViT's two curves, accuracy and collapse against depth, on images of 32 pixels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import sqrt
from statistics import mean, median
from typing import Any

from gpu_queue.job import Context, Job, Result, Step, table
from gpu_queue.training import train_in_time

PLAIN, RE = "softmax", "re_attention"
DEPTHS = (32, 24, 16, 12)  # the longest first, so that none is left over alone
SEEDS = (0, 1)
RECIPE = "small_images_vit"
SETTINGS: dict[str, Any] = {
    # the body of DeepViT's ablations (heads of 32 channels, MLP ratio 3) at half their width
    "model.options.embed_dim": 192,
    "model.options.num_heads": 6,
    "model.options.mlp_ratio": 3.0,
    # theirs is 5e-4 for a batch of 256, 3 epochs of warm-up of 300, no drop path
    "data.batch_size": 512,
    "optim.lr": 1e-3,
    "schedule.epochs": 40,
    "schedule.warmup_epochs": 3,
    "schedule.warmup_lr": 1e-6,
    "schedule.min_lr": 1e-5,
    "augment.rand_augment": [2, 9],
    "augment.rand_augment_first": True,
}
TINY: dict[str, Any] = {
    "model.options.embed_dim": 16,
    "model.options.num_heads": 2,
    "data.image_size": 16,
    "data.limit": 120,
    "data.batch_size": 64,
    "schedule.epochs": 2,
    "schedule.warmup_epochs": 1,
}
TAU, SIMILAR, UNIQUE = 0.5, 0.8, 0.9  # DeepViT: Eq. 7's cosine; appendix D; Fig. 3a and Sec. 5.2
SHOWN = 256  # test images that the maps are read on

SIDE_BY_SIDE = 2
"""Runs on the GPU at once. One alone keeps it busy for most of a step (`training_seconds`): two
fill the gaps, and more would only leave more of them half-done when the machine goes back."""

MACS = {PLAIN: 25_584_000, RE: 25_736_100}  # of one image and block, as `keymix.count` has them
TRAFFIC = {  # s of a block's forward and backward, 512 images: counted bytes of tensors over a rate
    PLAIN: 2.1e9 / 2.8e12,
    RE: 3.9e9 / 2.0e12,  # slower: products with 6 x 6, copies of maps with axes in turn
}

# Published on ImageNet-1k: top-1 of ViT and DeepViT, and their blocks similar to the one before
# (Table 4; of 12 blocks only ViT's top-1, Table 1).
PUBLISHED = {
    12: ("77.86, –", "–"),
    16: ("78.9, 79.1", "5, 0 of 16"),
    24: ("79.4, 80.1", "11, 0 of 24"),
    32: ("79.3, 80.9", "16, 0 of 32"),
}


# ---- measuring --------------------------------------------------------------------------------


def training_seconds(depth: int, mixer: str) -> float:
    """Estimate how long the epochs take while as many other runs share the GPU as may."""
    # A block's products are 79 GFLOP: 0.3 ms at 30 % of 790 TFLOP/s, within the time that memory
    # takes, 0.75 ms and 2 ms. The host needs less, some 6 us for each of 51 and 80 kernels. Besides
    # them a step has augmentation, embedding, head, loss and update. 45,000 images are 88 steps.
    # Compiling 32 blocks would take about as long as it saves.
    batch, epochs = SETTINGS["data.batch_size"], SETTINGS["schedule.epochs"]
    block = max(6 * MACS[mixer] * batch / (0.3 * 790e12), TRAFFIC[mixer])
    return SIDE_BY_SIDE * epochs * 88 * (0.005 + depth * block)


def seconds(depth: int, mixer: str, factor: float = 1.0) -> float:
    """Estimate how long a run takes, from the start of its process to its maps.

    Args:
        depth: Its blocks.
        mixer: Its mixer.
        factor: By how much runs that are done took longer than estimated.
    """
    checkpoints = SETTINGS["schedule.epochs"] * (0.2 + 0.02 * depth)  # up to 142 MB an epoch
    once = 30 + 0.6 * depth  # imports, decoding 60,000 images, the maps at the end on the host
    return factor * training_seconds(depth, mixer) + checkpoints + once


def estimate(step: Step, results: Mapping[str, Result]) -> float:
    """Correct a step's estimate by the runs that are done, those of its mixer if there are."""
    if not results:
        return step.seconds
    blocks, mixer, _ = step.name.split("/")
    took = {
        name: result["seconds"] / training_seconds(result["depth"], result["mixer"])
        for name, result in results.items()
    }
    alike = [factor for name, factor in took.items() if f"/{mixer}/" in name] or [*took.values()]
    return seconds(int(blocks.partition("-")[0]), mixer, median(alike))


def overrides(depth: int, mixer: str, seed: int) -> dict[str, Any]:
    """Return what the run changes of its recipe, by dotted key."""
    own = {"model.mixer": mixer, "model.options.depth": depth, "seed": seed}
    return SETTINGS | own


def measure(context: Context, depth: int, mixer: str, seed: int) -> Result:
    """Train one model, as far as the time lets, then read its accuracy and its maps."""
    import torch

    from keymix import recipes
    from keymix.train.recipe import replace_path

    changed = overrides(depth, mixer, seed) | {"data.spec": context.cifar10}
    recipe = replace_path(recipes.get(RECIPE), changed | (TINY if context.tiny else {}))
    run = train_in_time(context, recipe)
    rates = [line["images_per_s"] for line in run.metrics()]
    summary = run.summary
    gib = torch.cuda.max_memory_allocated() / 2**30 if context.device == "cuda" else None
    return {
        "depth": depth,
        "mixer": mixer,
        "seed": seed,
        "epochs": summary.epochs,
        "batch": recipe.data.batch_size,
        "precision": "bf16" if context.device == "cuda" else "32",
        "params": summary.params,
        "top1_last": summary.last.test.scores["top1"],
        "top1_best": summary.best.test.scores["top1"],
        "best_epoch": summary.best.epoch,
        "test_images": summary.data.sizes["test"],
        "seconds": summary.seconds,
        "images_per_s": median(rates[1:] or rates),
        "gpu_gib": gib,
        **_collapse(str(run.folder), 8 if context.tiny else SHOWN),
    }


def _collapse(run: str, images: int) -> Result:
    """Read the maps of a run's last weights on test images, as `keymix analyze collapse` does."""
    from keymix import collapse, count
    from keymix.analysis.collapse_record import or_none
    from keymix.studies.inputs import load_images, load_models

    (loaded,) = load_models([run])
    shown = load_images(loaded, None, limit=images)
    found = collapse(loaded.model, shown.batches(32), threshold=TAU, similar=SIMILAR, unique=UNIQUE)
    entropies = [e for layer in found.layers if (e := layer.entropy_normalised) is not None]
    return {
        "macs": count(loaded.model).macs,
        "images": found.images,
        "neighbours": [
            {
                "cosine": or_none(pair.mean),
                "centred": or_none(pair.centred),
                "share": or_none(pair.similar_fraction),
            }
            for pair in found.neighbours
        ],
        "like_nearest": len(found.blocks_like_nearest),
        "entropy": mean(entropies) if entropies else None,
        "headline": found.verdict.headline,
    }


# ---- telling ----------------------------------------------------------------------------------


def alike(result: Result, above: float = SIMILAR) -> int:
    """Count the neighbouring maps that are alike: in more than this share of their columns."""
    return sum((pair["share"] or 0.0) > above for pair in result["neighbours"])


def section(results: Mapping[str, Result]) -> str:
    """Say what depth did to maps and accuracy, with Re-attention and without."""
    runs: dict[tuple[int, str], list[Result]] = {}
    for result in sorted(results.values(), key=lambda r: (r["depth"], r["mixer"] == RE, r["seed"])):
        runs.setdefault((result["depth"], result["mixer"]), []).append(result)
    both = [depth for depth, _ in runs if (depth, PLAIN) in runs and (depth, RE) in runs]
    deepest = [max((depth for depth, name in runs if name == m), default=0) for m in (PLAIN, RE)]
    ends = [(depth, m) for depth, m in zip(deepest, (PLAIN, RE), strict=True) if depth]
    alone = [_alone(end, runs[end]) for end in ends]
    answer = _at(max(both), runs) if both else alone
    answer += [_along(mixer, runs) for mixer in (PLAIN, RE)]
    parts = [" ".join(each for each in answer if each), _by_depth(runs), _by_run(runs), _how(runs)]
    return "\n\n".join(parts)


def _at(depth: int, runs: Mapping[tuple[int, str], Sequence[Result]]) -> list[str]:
    """Compare the two mixers at one depth, over the seeds that both have."""
    plain = {run["seed"]: run for run in runs[depth, PLAIN]}
    re = {run["seed"]: run for run in runs[depth, RE]}
    seeds = sorted(plain.keys() & re.keys())
    if not seeds:
        return [_alone((depth, PLAIN), runs[depth, PLAIN]), _alone((depth, RE), runs[depth, RE])]
    without, with_ = [plain[s] for s in seeds], [re[s] for s in seeds]
    said = [
        f"Without Re-attention {_each(alike(r) for r in without)} of {depth - 1} neighbouring maps "
        f"are alike at {depth} blocks; with it, {_each(alike(r) for r in with_)}."
    ]
    plain_top, re_top = (
        _each(_percent(r["top1_last"]) for r in chosen) for chosen in (without, with_)
    )
    said.append(f"Test accuracy there: {plain_top} % against {re_top} %; {_doubt(without, with_)}.")
    said.append(_evenness(depth, without, with_))
    return said


def _doubt(without: Sequence[Result], with_: Sequence[Result]) -> str:
    """Say how certain it is which of two models of the same seeds answers better."""
    gains = [100 * (b["top1_last"] - a["top1_last"]) for a, b in zip(without, with_, strict=True)]
    images = without[0]["test_images"]
    shares = [run["top1_last"] for run in (without[0], with_[0])]
    chance = 196 * sqrt(sum(share * (1 - share) for share in shares) / images)
    if len(gains) == 1:
        if abs(gains[0]) <= chance:
            return f"one seed, and {images:,} images distinguish no less than {chance:.1f} points"
        return "one seed, so which of them is better is not certain"
    if min(gains) > 0 or max(gains) < 0:
        low, high = min(map(abs, gains)), max(map(abs, gains))
        return (
            f"{'Re-attention' if gains[0] > 0 else 'the plain model'} is ahead in each of "
            f"{len(gains)} seeds, by {low:.1f} to {high:.1f} points: likely, but not certain"
        )
    return f"{len(gains)} seeds do not agree on which is better: no clear difference"


def _evenness(depth: int, without: Sequence[Result], with_: Sequence[Result]) -> str:
    """Say whether alike maps share a pattern or their evenness; nothing where none are alike."""
    if not any(alike(run) for run in without):
        return ""
    plain, re = (_over(chosen, "centred") for chosen in (without, with_))
    if plain is None or re is None:
        return ""
    found = "a common pattern too" if plain >= TAU else "mostly even attention, not a pattern"
    return (
        f"With each column's mean taken off, the cosine of neighbours is {plain:.2f} against "
        f"{re:.2f} there, so what the plain maps share is {found}."
    )


def _alone(key: tuple[int, str], found: Sequence[Result]) -> str:
    depth, mixer = key
    how = "with" if mixer == RE else "without"
    return (
        f"At {depth} blocks {how} Re-attention {_each(alike(r) for r in found)} of {depth - 1} "
        f"neighbouring maps are alike, and test accuracy is "
        f"{_each(_percent(r['top1_last']) for r in found)} %."
    )


def _along(mixer: str, runs: Mapping[tuple[int, str], Sequence[Result]]) -> str:
    """Say what depth did to the accuracy of one mixer, over the seeds that both ends have."""
    depths = [depth for depth, name in runs if name == mixer]
    if len(depths) < 2:
        return ""
    first, last = min(depths), max(depths)
    shallow = {run["seed"]: run["top1_last"] for run in runs[first, mixer]}
    deep = {run["seed"]: run["top1_last"] for run in runs[last, mixer]}
    gains = [100 * (deep[s] - shallow[s]) for s in sorted(shallow.keys() & deep.keys())]
    if not gains:
        return ""
    how = "With" if mixer == RE else "Without"
    return (
        f"{how} Re-attention accuracy changes from {first} to {last} blocks by "
        f"{_each(f'{gain:+.1f}' for gain in gains)} points."
    )


def _by_depth(runs: Mapping[tuple[int, str], Sequence[Result]]) -> str:
    """Set accuracy and alike maps of both mixers side by side, with the paper's."""
    heads = (
        "blocks",
        "top-1, %: softmax",
        "Re-attention",
        "alike maps: softmax",
        "Re-attention",
        "DeepViT's top-1",
        "its similar blocks",
    )
    rows = []
    for depth in dict.fromkeys(depth for depth, _ in runs):
        both = [runs.get((depth, mixer), []) for mixer in (PLAIN, RE)]
        tops = [_each(_percent(r["top1_last"]) for r in found) or "–" for found in both]
        maps = [
            f"{_each(alike(r) for r in found)} of {depth - 1}" if found else "–" for found in both
        ]
        rows.append((depth, *tops, *maps, *PUBLISHED.get(depth, ("–", "–"))))
    return table(heads, rows)


def _by_run(runs: Mapping[tuple[int, str], Sequence[Result]]) -> str:
    """List what else was measured."""
    heads = (
        "blocks, mixer",
        "best on validation, %",
        "nearly all alike",
        "like nearest two",
        "Eq. 2",
        "centred",
        "entropy",
        "images/s",
    )
    rows = [
        (
            f"{depth}, {'Re-attention' if mixer == RE else 'softmax'}",
            _each(_percent(r["top1_best"]) for r in found),
            f"{_each(alike(r, UNIQUE) for r in found)} of {depth - 1}",
            f"{_each(r['like_nearest'] for r in found)} of {depth}",
            _each(_number(_over([r], "cosine")) for r in found),
            _each(_number(_over([r], "centred")) for r in found),
            _each(_number(r["entropy"]) for r in found),
            _each(f"{r['images_per_s']:,.0f}" for r in found),
        )
        for (depth, mixer), found in runs.items()
    ]
    return table(heads, rows)


def _how(runs: Mapping[tuple[int, str], Sequence[Result]]) -> str:
    one = next(iter(runs.values()))[0]
    seeds = sorted({run["seed"] for found in runs.values() for run in found})
    text = "Seed 0 alone" if seeds == [0] else f"Seeds {', '.join(map(str, seeds))}, apart by /"
    memory = [run["gpu_gib"] for found in runs.values() for run in found if run["gpu_gib"]]
    peak = f" A run took at most {max(memory):.1f} GiB of the GPU's memory." if memory else ""
    precision = "32-bit" if one["precision"] == "32" else f"{one['precision']} autocast"
    read = (
        f"{text}; weights of the last epoch. Alike: over 80 % of a map's columns have a cosine "
        f"above {TAU:g} (DeepViT, Eq. 2 and 7, appendix D); nearly all: over 90 %; like nearest "
        "two: its Fig. 3a ([equations](../collapse.md)). Eq. 2 and the centred cosine are means "
        f"over neighbours, read on {one['images']} test images; entropy is over ln M, 1 for even "
        "attention. Re-attention's BatchNorm takes the mean off its maps, so compare its Eq. 2 "
        "with the centred cosine of softmax. Rates are "
        f"medians over epochs, with up to {SIDE_BY_SIDE} runs on the GPU at once.{peak}"
    )
    trained = (
        f"CIFAR-10, of CIFAR-100's size (32 x 32, {one['test_images']:,} test images), "
        f"{one['epochs']} epochs, batch {one['batch']}, {precision}, not compiled. One recipe for "
        "both mixers, which this command runs on any machine (`--model.mixer softmax` for the "
        "other):"
    )
    paper = (
        "DeepViT's figures, those of ViT first "
        "([arXiv:2103.11886](https://arxiv.org/abs/2103.11886), Table 4; 12 blocks: Table 1), are "
        "for ImageNet-1k: 224 pixels, width 384, 196 patches, 300 epochs, mixup. Compare their "
        "direction, not their values."
    )
    return "\n\n".join([read, trained, f"```bash\n{_command()}\n```", paper])


def _command() -> str:
    """Return the command that trains the deepest run with Re-attention alone."""
    words = ["keymix train", RECIPE, "--data parquet:data/cifar10"]
    for key, value in overrides(DEPTHS[0], RE, SEEDS[0]).items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words.append(f"--{key} {text.lower()}")
    return " ".join([*words, f"--out deepvit-{DEPTHS[0]}b"])


def _over(found: Sequence[Result], what: str) -> float | None:
    values = [p[what] for run in found for p in run["neighbours"] if p[what] is not None]
    return mean(values) if values else None


def _each(values: Iterable[object]) -> str:
    return " / ".join(map(str, values))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{round(value, 2) + 0.0:.2f}"


# ---- the job ----------------------------------------------------------------------------------


def steps(tiny: bool) -> list[Step]:
    """List the runs, the first seed's whole curve first."""
    return [
        Step(
            name=f"{depth}-blocks/{mixer}/seed-{seed}",
            seconds=5.0 if tiny else seconds(depth, mixer),
            measure=partial(measure, depth=depth, mixer=mixer, seed=seed),
            resumable=True,
            least=120.0,  # the images are decoded again at each start
            packages=("pyarrow",),
            data=("cifar10",),
            gpu_gib=2 + depth * 0.6,  # a block keeps 0.5 GiB of 512 images in single precision
        )
        for seed in (SEEDS[:1] if tiny else SEEDS)
        for depth in ((2,) if tiny else DEPTHS)
        for mixer in (PLAIN, RE)
    ]


JOB = Job(
    number=7,
    name="depth",
    title="Depth with and without Re-attention",
    purpose=(
        "Do the attention maps of neighbouring blocks grow alike from 12 to 32 blocks (DeepViT), "
        "does Re-attention prevent it, and what does that do to the accuracy on CIFAR-10?"
    ),
    form={
        "depth, mixer, seed": "which run: blocks, softmax or re_attention",
        "epochs, batch, precision": "how it was trained",
        "params, macs": "trainable parameters; multiply-adds of one image",
        "top1_last, top1_best, best_epoch": "test accuracy of the last epoch's weights, and of "
        "those best on validation; that epoch, from 0",
        "test_images": "images behind the accuracy",
        "seconds, images_per_s": "of all epochs; median of the epochs' training rates",
        "gpu_gib": "most memory of the GPU that the process had allocated, GiB; null on a CPU",
        "images": "test images on which maps were read",
        "neighbours": "for each block and the next: mean Eq. 2 (cosine), the same with each "
        "column's mean taken off (centred), share of columns above 0.5 (share, Eq. 7)",
        "like_nearest": "blocks like their two nearest in over 90 % of their columns (Fig. 3a)",
        "entropy": "mean entropy of attention over ln M: 1 is even attention",
        "headline": "what `keymix analyze collapse` says of the run",
    },
    steps=steps,
    section=section,
    side_by_side=lambda results: SIDE_BY_SIDE,
    estimate=estimate,
)

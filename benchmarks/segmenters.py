# SPDX-License-Identifier: Apache-2.0
"""Which model is the default for masks: a SETR, U-Nets, or a U-Net with attention at its deepest.

    python benchmarks/segmenters.py --coco data/coco-subset --uwgi data/uw-madison-gi

*Scenes* are COCO's photographs, made 128 pixels long; their masks say where any thing is, and
crowds are ignored. Those of train2017 are for training and validation, those of val2017 for the
test; they are trained on and answered in windows of 96 pixels. *Slices* are those of UW-Madison GI
Tract, resized to 96 pixels. All models have one recipe: the default for masks but for the flips
upside down, which `keymix compare` leaves out too, and the number of epochs. Each model chooses its
learning rate of two on the scenes' validation images, at another seed; one that has another's name
in ``rate_of`` takes the rate of that.

Rerun the command to resume. It begins with an estimate of its time (``--plan`` stops behind it) and
ends with one table. Differences are from ``plain_unet``, intervals of 95 % over seeds and test
cases together. Steps are timed in turns, batches of 4 windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from pycocotools.coco import COCO

from keymix.analysis.counting import count
from keymix.analysis.measure import training_quartiles_ms
from keymix.analysis.statistics import crossed_difference, summarize
from keymix.models import create_model
from keymix.recipes import get
from keymix.tasks.segmentation.facts import TASK, MaskDetails
from keymix.train.engine import train
from keymix.train.folder import FinishedRun, read_finished
from keymix.train.recipe import ModelConfig, Recipe, replace_path
from measured import begin, options, table

SPLITS = {"train": "train2017", "test": "val2017"}
LONGEST, SIZE, BATCH = 128, 96, 4  # pixels of a scene's longer side and of a window; windows
EPOCHS = {"scenes": 25, "slices": 100}  # 350 and 600 updates
RATES, TUNING = (1e-3, 3e-3), 1_000  # learning rates, and the seed that chooses one
PLAIN = "plain_unet"


class Segmenter(NamedTuple):
    """A model: its name in keymix, its mixer and options, and whose learning rate it takes."""

    name: str
    mixer: str | None = None
    options: Mapping[str, Any] = {}
    rate_of: str = ""


MODELS = {
    "trans_unet_micro": Segmenter("trans_unet_micro", "softmax"),
    PLAIN: Segmenter(PLAIN),
    "setr_micro": Segmenter("setr_micro", "softmax"),
    "trans_unet_micro, identity": Segmenter(
        "trans_unet_micro", "identity", rate_of="trans_unet_micro"
    ),
    "setr_micro, identity": Segmenter("setr_micro", "identity", rate_of="setr_micro"),
    "unet, resnet18": Segmenter("unet", options={"backbone": "resnet18"}, rate_of=PLAIN),
}
Runs = dict[tuple[str, str], dict[int, FinishedRun]]
"""By data and model, then by seed."""


def make_scenes(coco: Path, out: Path) -> None:
    """Make images and masks of photographs and their polygons."""
    for split, folder in SPLITS.items():
        truth = COCO(str(coco / "annotations" / f"instances_{folder}.json"))
        for image in truth.loadImgs(sorted(truth.getImgIds())):
            picture = Image.open(coco / folder / image["file_name"]).convert("RGB")
            mask = np.zeros((picture.height, picture.width), np.uint8)
            found = truth.loadAnns(truth.getAnnIds(image["id"]))
            for each in sorted(found, key=lambda one: -one["iscrowd"]):
                mask[truth.annToMask(each) == 1] = 255 if each["iscrowd"] else 1
            scale = LONGEST / max(picture.size)
            size = round(scale * picture.width), round(scale * picture.height)
            for kind, made, how in (
                ("images", picture, Image.Resampling.BOX),
                ("masks", Image.fromarray(mask), Image.Resampling.NEAREST),
            ):
                place = out / split / kind / f"{Path(image['file_name']).stem}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                made.resize(size, how).save(place)
    (out / "classes.txt").write_text("background\nthing\n")


def recipe_of(part: str, spec: str, model: Segmenter, rate: float, seed: int) -> Recipe:
    """Return the recipe of a run."""
    changes = {
        "name": "segmenters",
        "data.spec": spec,
        "augment.vertical_flip": False,
        "optim.lr": rate,
        "schedule.epochs": EPOCHS[part],
        "seed": seed,
    }
    changes |= (
        {"data.test_fraction": 0.25} if part == "slices" else {"task.options.window_overlap": 0.5}
    )
    config = ModelConfig(name=model.name, mixer=model.mixer, options=dict(model.options))
    return replace_path(replace(get(TASK.recipes[""]), model=config), changes)


def trained(out: Path, name: str, recipe: Recipe) -> FinishedRun:
    """Train, or read what was trained."""
    run = train(recipe, out / name / f"lr{recipe.optim.lr:g}-seed{recipe.seed}", threads=1)
    found = read_finished(run.folder)
    last = found.summary.last
    shown = f"{percent(last.val['jaccard'])} on validation, {percent(last.test.scores['jaccard'])}"
    print(f"  {run.folder}: mean IoU {shown}, {found.summary.seconds:.0f} s", flush=True)
    return found


def percent(score: float | None) -> str:
    """Write a score."""
    return "" if score is None else f"{100 * score:.1f}"


def cells(part: str, name: str, found: Runs) -> Iterator[str]:
    """Write the scores of a model on a data set, next to those of the plain U-Net."""
    runs = found.get((part, name), {})
    tests = [run.summary.last.test.scores for run in runs.values()]
    if not tests:
        yield from ("", "", "", "")
        return
    told = summarize([100 * (test["jaccard"] or 0.0) for test in tests])
    yield f"{told.mean:.1f}" + ("" if told.sd is None else f" ± {told.sd:.1f}")
    answers = {
        label: {seed: run.answers["last"] for seed, run in found.get((part, label), {}).items()}
        for label in (name, PLAIN)
    }
    apart = None if name == PLAIN else crossed_difference(answers[name], answers[PLAIN])
    ends = () if apart is None else apart.ends()
    yield (
        ""
        if apart is None
        else "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * value for value in (apart.mean, *ends)))
    )
    yield percent(float(np.mean([test["dice"] or 0.0 for test in tests])))
    outlines = [run.summary.last.test.own.read(MaskDetails).surface_dice for run in runs.values()]
    yield percent(float(np.mean([each or 0.0 for each in outlines])))


def rows(names: Sequence[str], found: Runs, steps: Mapping[str, float]) -> Iterator[list[str]]:
    """The table: scores on both data sets, then what a model costs."""
    for name in names:
        rates = {run.recipe.optim.lr for part in EPOCHS for run in found[part, name].values()}
        model = MODELS[name]
        counted = count(built(model), (3, SIZE, SIZE), task="segmentation")
        yield [
            *(f"`{name}`", ", ".join(f"{rate:g}" for rate in sorted(rates))),
            *itertools.chain.from_iterable(cells(part, name, found) for part in EPOCHS),
            f"{counted.params / 1e6:.2f}",
            f"{counted.macs / 1e6:.0f}",
            f"{steps[name]:.1f}",
        ]


def built(model: Segmenter) -> Any:
    """Build a model for scenes."""
    mixer = {} if model.mixer is None else {"mixer": model.mixer}
    return create_model(model.name, img_size=SIZE, num_classes=2, **model.options, **mixer)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = options(__doc__, threads=1)
    parser.add_argument("--coco", type=Path, required=True, help="COCO's folder")
    parser.add_argument("--uwgi", type=Path, required=True, help="folder of the GI slices")
    parser.add_argument("--out", type=Path, default=Path("segmenters"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--plan", action="store_true", help="print the estimate and stop")
    given = begin(parser, argv)
    models = {name: built(MODELS[name]) for name in given.models}
    times = training_quartiles_ms(models, (3, SIZE, SIZE), batch_size=BATCH, seconds=40)
    steps = {name: median for name, (_, median, _) in times.items()}
    tuned = list(dict.fromkeys(MODELS[name].rate_of or name for name in given.models))
    updates = sum(steps.values()) * len(given.seeds) * (350 + 600)
    updates += sum(steps.get(name, 0.0) for name in tuned) * len(RATES) * 350
    print(f"about {1.7 * updates / 60_000:.0f} minutes on an idle machine", flush=True)
    if given.plan:
        return 0
    if not (given.out / "scenes" / "classes.txt").exists():
        make_scenes(given.coco, given.out / "scenes")
    data = {"scenes": f"masks:{given.out / 'scenes'}", "slices": f"uwgi:{given.uwgi}"}
    rates = {}
    for name in tuned:
        scores: dict[float, float] = {}
        for rate in RATES:
            recipe = recipe_of("scenes", data["scenes"], MODELS[name], rate, TUNING)
            run = trained(given.out / "tuning", name, recipe)
            scores[rate] = run.summary.last.val["jaccard"] or 0.0
        rates[name] = max(RATES, key=lambda rate: scores[rate])
    found: Runs = {}
    for part, seed, name in itertools.product(EPOCHS, given.seeds, given.models):
        model = MODELS[name]
        recipe = recipe_of(part, data[part], model, rates[model.rate_of or name], seed)
        found.setdefault((part, name), {})[seed] = trained(given.out / part / "runs", name, recipe)
    heads = ["model", "rate"]
    for part in EPOCHS:
        heads += [
            f"{part}: mean IoU, %",
            f"against `{PLAIN}`, points",
            "Dice, %",
            "surface Dice, %",
        ]
    heads += ["parameters, M", "multiply-adds, M", "step, ms"]
    table(heads, rows(given.models, found, steps))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""``keymix swap``: put a mixer into a trained model, or search which of its layers to swap."""

from __future__ import annotations

import argparse
import copy
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keymix.cli import console
from keymix.cli.console import VerbParser
from keymix.errors import UserError, one_line

if TYPE_CHECKING:
    from torch import Tensor, nn

    from keymix.cli.swap_folder import Folder
    from keymix.cli.swap_source import Source
    from keymix.mixers.spec import MixerSpec
    from keymix.swap.record import Search, Step
    from keymix.swap.result import BothScores, Swapped, SwapSetting

IMAGES = 256
"""Calibration images where nobody says how many."""

_DESCRIPTION = """\
Replace attention in a trained model, keeping its behaviour close: compatible weights are copied,
learned keys are estimated on training images. MODEL is a run's folder, or a keymix or timm model
by name with --data. --search swaps each layer alone, then picks layers up to the budget."""

_EPILOG = """\
examples:
  keymix swap my-run --mixer ska --out swapped
  keymix swap my-run --mixer ska --layers 4-7 --out middle
  keymix swap my-run --mixer ska --search --budget 0.5 --cost latency --out half
  keymix swap deit_tiny_patch16_224 --pretrained --data imagenet:PATH --mixer ska --out swapped
  keymix train swapped --model.weights swapped --schedule.epochs 1 \\
      --schedule.warmup_epochs 0 --loss.distill 0.5 --loss.distill_teacher my-run --out recovered

The calibration images are of the training split, the held-out ones of the validation split. The
test split is read with --test alone, once, at the end. A search that was stopped resumes when the
same command is given again."""


_MIXER = (
    "the new mixer, e.g. ska(activation=relu); separated by slashes, one for each chosen layer in "
    "turn, e.g. ska/mhsa"
)
_LAYERS = (
    "which layers: numbers from 0, ranges with both ends, patterns on module paths; e.g. 4-7, "
    "0,3 or blocks.[0-3].*; default all that attend; what is printed counts blocks from 1"
)


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix swap",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add = made.add_argument
    add("model", metavar="MODEL", help="a run's folder, or the name of a model")
    add("--mixer", required=True, metavar="M", help=_MIXER)
    add("--layers", metavar="LIST", help=_LAYERS)
    add(
        "--init",
        choices=("transfer", "fresh"),
        default="transfer",
        help="copy and estimate (default), or initialise as a new model does",
    )
    add(
        "--estimate",
        choices=("least_squares", "mean"),
        default="least_squares",
        help="how learned keys are estimated: least squares on the logits (default), or as means",
    )
    add("--images", type=int, metavar="N", help=f"how many images calibrate (default: {IMAGES})")
    add("--held-out", type=int, metavar="N", help="how many are held out (default: at most 1000)")
    add("--search", action="store_true", help="find the layers to swap within a budget")
    add(
        "--budget",
        type=float,
        metavar="B",
        help="share of the attention's cost to swap, above 0 to 1 (default: 0.5)",
    )
    add(
        "--cost",
        choices=("params", "macs", "latency"),
        help="what the budget counts of the original attention (default: params)",
    )
    add("--data", metavar="SPEC", help="the model's data (default: the run's own)")
    add("--pretrained", action="store_true", help="timm's weights, of a model by name")
    add("--weights", metavar="FILE", help="file with the weights of a model by name")
    made.add_image_size("what a model by name was made for")
    add("--test", action="store_true", help="score the test split too, before and after")
    made.add_out("the swapped model", default="runs/MODEL-MIXER", resumes=True)
    made.add_json()
    made.add_open()
    made.add_imports()
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix swap`` with the words after the verb; mistakes are raised as UserError."""
    made = parser()
    given = made.parse_args(argv)
    _refuse_idle(given)
    made.run_imports(given)

    from keymix.cli.swap_folder import PAGE, Folder
    from keymix.cli.swap_source import load_source
    from keymix.mixers.spec import parse_mixer
    from keymix.swap.search import checked_budget
    from keymix.train.files import locked
    from keymix.train.signals import interruptible

    spec = parse_mixer(given.mixer)
    if given.search:
        given.budget = checked_budget(0.5 if given.budget is None else given.budget)
        if len(spec.names) > 1:
            raise UserError(f"--mixer {spec.label}: a search puts one mixer into every layer")
    name = Path(given.model).name if given.out is None else ""
    folder = Folder(Path(given.out or f"runs/{name}-{spec.slug}"), overwrite=given.overwrite)
    with interruptible(folder.resume_hint), locked(folder.path, "swap"):
        console.note(f"loading {given.model} and its images")
        source = load_source(given)
        setting = _setting(given, spec, source)
        record = folder.finished(setting, test=given.test)
        if record is not None:
            console.note(f"{str(folder.path)!r} is done; --overwrite swaps again")
        else:
            known = folder.begin(setting)
            record = _swap(given, spec, source, folder, known, setting, argv)
            folder.finish(record)
    _print_result(record, folder.path, as_json=given.json)
    if given.open:
        console.open_page(folder.path / PAGE)
    return 0


def _refuse_idle(given: argparse.Namespace) -> None:
    """Refuse options that would do nothing."""
    if not given.search:
        for option in ("budget", "cost"):
            if getattr(given, option) is not None:
                raise UserError(f"--{option} is of a search: add --search, or leave it out")
    elif given.init == "fresh":
        raise UserError("--init fresh draws new keys, and a search calibrates them: leave it out")


def _setting(given: argparse.Namespace, spec: MixerSpec, source: Source) -> SwapSetting:
    from keymix.swap.result import SwapSetting

    return SwapSetting(
        model=given.model,
        mixer=spec.label,
        weights=source.weights,
        data=source.data.spec,
        image_size=tuple(source.seen.image_size),
        mean=tuple(source.seen.mean),
        std=tuple(source.seen.std),
        layers=given.layers,
        init=given.init,
        estimate=given.estimate,
        images=given.images,
        held_out=given.held_out,
        search=given.search,
        budget=given.budget,
        cost=given.cost,
    )


def _swap(
    given: argparse.Namespace,
    spec: MixerSpec,
    source: Source,
    folder: Folder,
    known: Search | None,
    setting: SwapSetting,
    argv: list[str],
) -> Swapped:
    """Swap, measure and write the model; return the record."""
    from keymix.analysis.study_record import joined
    from keymix.hosts.layers import find_layers
    from keymix.studies.inputs import RANDOM
    from keymix.swap.calibration import gather
    from keymix.swap.result import Swapped
    from keymix.swap.run import swap
    from keymix.swap.search import HeldOut, attention_costs, drawing
    from keymix.train.environment import frame

    model, layers = source.model, given.layers
    calibration: Tensor | None = None
    if given.init == "transfer" or given.images is not None:
        count = min(IMAGES, len(source.data.train)) if given.images is None else given.images
        calibration = source.images("train", count, "--images")[0]
    held_out = HeldOut(*source.images("val", given.held_out, "--held-out"))
    held_out.check(model)
    wanted: dict[str, Any] = dict(spec.model_kwargs())
    mixer, options = wanted["mixer"], wanted["mixer_options"]
    found: Search | None = None
    shown: Any = calibration
    if given.search:
        from keymix.swap.search import search

        console.note(f"reading the attention of {len(shown)} calibration images")
        shown = gather(model, shown, mixer, layers, mixer_options=options, estimate=given.estimate)
        with _watching() as progress:
            found = search(
                model,
                mixer,
                calibration=shown,
                images=held_out.images,
                labels=held_out.labels,
                budget=given.budget,
                cost=given.cost or "params",
                layers=layers,
                mixer_options=options,
                estimate=given.estimate,
                progress=progress,
                known=known,
                keep=folder.keep,
            )
        layers = [*found.layers]
    swapped = copy.deepcopy(model)
    with drawing(model, 0):
        report = swap(
            swapped,
            mixer,
            layers,
            mixer_options=options,
            init=given.init,
            calibration=shown,
            estimate=given.estimate,
        )
    places = find_layers(model)
    attention = attention_costs(model, places, given.cost or "params", held_out.images[:1])
    paths = [row.path for row in report.rows]
    numbers = tuple(i for i, each in enumerate(attention) if each.path in paths)
    share = sum(attention[i].share for i in numbers)
    before = held_out.step(model) if found is None else found.steps[0]
    after = None if found is None else _same_step(found, held_out, swapped)
    if after is None:
        after = held_out.step(model, swapped, numbers, share)
    folder.claim()
    _write_models(source, folder.path, model, swapped, held_out.images[:4])
    test = _test(source, model, swapped) if given.test else None
    return joined(
        Swapped,
        frame(shlex.join(["keymix", "swap", *argv])),
        model=source.name,
        mixer=spec.label,
        weights=source.weights,
        calibration=0 if calibration is None else len(calibration),
        held_out=len(held_out.labels),
        before=before,
        after=after,
        before_ms=after.original_ms,
        test=test,
        next=_next(source, folder.path),
        search=found,
        report=report,
        layers=len(places),
        nothing="random" if source.weights == RANDOM else held_out.says_nothing(model),
        setting=setting,
    )


def _same_step(found: Search, held_out: Any, swapped: nn.Module) -> Step | None:
    """The search's step for the model, if that is the one that it measured, drawn numbers too."""
    assert found.met is not None  # a search ends beyond its budget
    step = found.steps[found.met]
    loss, right = held_out.score(swapped)
    same = abs(loss - step.loss) <= 1e-4 * step.loss
    return step if same and float(right.double().mean()) == step.top1 else None


def _write_models(
    source: Source, folder: Path, model: nn.Module, swapped: nn.Module, images: Tensor
) -> None:
    """Write the swapped model, and a model by name as it was, for it may teach."""
    from keymix.swap.as_run import recipe_of, write

    if source.run is None:
        own = recipe_of(source.recipe, model, name=source.recipe.name)
        write(folder / "original", own, model, source.seen, images)
    write(folder, recipe_of(source.recipe, swapped), swapped, source.seen, images)


def _test(source: Source, model: nn.Module, swapped: nn.Module) -> BothScores:
    """Loss and accuracies of both models on the test split."""
    from keymix.swap.result import BothScores, TestScores
    from keymix.train.evaluation import score_split

    def scores(shown: nn.Module) -> TestScores:
        found = score_split(
            replace(source.recipe, precision="32"),
            shown,
            source.data,
            "test",
            numbers=source.numbers,
            classes=source.seen.classes,
        )
        metrics: dict[str, Any] = {**found.scores, "images": len(found.answers.index)}
        return TestScores(**metrics)

    score = source.data.task.score
    return BothScores(key=score.key, name=score.name, before=scores(model), after=scores(swapped))


def _next(source: Source, folder: Path) -> tuple[str, ...]:
    teacher = str(folder / "original") if source.run is None else source.name
    out = str(folder)
    schedule = source.recipe.schedule
    shorter = ["--schedule.warmup_epochs", "0"] if schedule.warmup_epochs else []
    shorter += ["--schedule.cooldown_epochs", "0"] if schedule.cooldown_epochs else []
    recover = ["keymix", "train", out, "--model.weights", out, "--schedule.epochs", "1", *shorter]
    recover += ["--loss.distill", "0.5", "--loss.distill_teacher", teacher]
    recover += ["--out", f"{out}-recovered"]
    return shlex.join(["keymix", "eval", out]), shlex.join(recover)


def _print_result(record: Swapped, folder: Path, *, as_json: bool) -> None:
    if as_json:
        whole = {"folder": str(folder), **record.to_dict()}
        console.say_json(whole)
        return
    from keymix.cli.swap_folder import PAGE

    console.show(record.tables["layers"])
    console.note(
        f"In brackets: 95 % interval over {record.held_out} held-out images. Latency of one "
        f"image: {record.after.latency_text}."
    )
    for note in record.notes:
        console.note(note)
    if record.test is not None:
        before, after = record.test.decisive
        console.say(
            f"test {record.test.name} {100 * before:.2f} % before, {100 * after:.2f} % after"
        )
    console.note("Then:")
    for line in record.next:
        console.note(f"  {line}")
    console.prose(record.answer)
    console.say(f"report   {folder / PAGE}")


@contextmanager
def _watching() -> Iterator[Callable[[str, float], None]]:
    """Show progress on standard error: a bar at a terminal, else a line for each measurement."""
    from keymix.report.formats import duration

    start, first = time.monotonic(), -1.0

    def left(share: float) -> str:
        nonlocal first
        if first < 0:
            first = share  # known before, where a stopped search resumes
        if share <= first:
            return ""
        rest = (time.monotonic() - start) * (1 - share) / (share - first)
        return f"; about {duration(rest)} left"

    if not console.err.is_terminal:
        yield lambda text, share: console.note(f"{share:4.0%} {text}{left(share)}")
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console.err, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda text, share: bar.update(
            task, completed=share, description=one_line(text + left(share))
        )

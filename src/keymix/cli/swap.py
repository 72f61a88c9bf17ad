# SPDX-License-Identifier: Apache-2.0
"""``keymix swap``: put a mixer into a trained model, or search which of its layers to swap."""

from __future__ import annotations

import argparse
import copy
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keymix.cli import console
from keymix.cli.console import VerbParser
from keymix.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from keymix.cli.swap_folder import Folder
    from keymix.cli.swap_source import Source
    from keymix.mixers.spec import MixerSpec
    from keymix.swap.held_out import HeldOut
    from keymix.swap.record import Search
    from keymix.swap.result import BothScores, Swapped, SwapSetting
    from keymix.train.recipe import Recipe

IMAGES = 256
"""Calibration images where nobody says how many."""

_DESCRIPTION = """\
Replace attention in a trained model, keeping its behaviour close: compatible weights are copied,
learned keys are estimated on training images. MODEL is a run's folder; or with --data what was
pushed (a folder, or OWNER/NAME on the Hub), or a keymix or timm model by name. With --max-drop or
--speed-up mixers and layers are searched for, and the answer is a plan that pays, or that nothing
does."""

_EPILOG = """\
examples:
  keymix swap my-run --mixer ska --out swapped
  keymix swap my-run --mixer ska --layers 4-7 --out middle
  keymix swap my-run --max-drop 1.0 --out faster
  keymix swap my-run --speed-up 1.2 --mixer 'sra,sra(key_grid=1/16)' --batch-size 32 --out faster
  keymix swap deit_tiny_patch16_224 --pretrained --data imagenet:PATH --mixer ska --out swapped
  keymix train swapped --model.weights swapped --schedule.epochs 1 \\
      --schedule.warmup_epochs 0 --loss.distill 0.5 --loss.distill_teacher my-run --out recovered

The calibration images are of the training split, the held-out ones of the validation split. The
test split is read with --test alone, once, at the end."""


_MIXER = (
    "the new mixer, e.g. ska(activation=relu); separated by slashes, one for each chosen layer in "
    "turn, e.g. ska/mhsa; of a search those to try, with commas (default: five)"
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
    add("model", metavar="MODEL", help="a run's folder, what was pushed, or the name of a model")
    add("--mixer", metavar="M", help=_MIXER)
    add("--layers", metavar="LIST", help=_LAYERS)
    add(
        "--init",
        choices=("transfer", "fresh"),
        default="transfer",
        help="copy and estimate (default), or initialise as a new model does",
    )
    add(
        "--estimate",
        choices=("least_squares", "mean", "reconstruct"),
        default="least_squares",
        help="how learned keys are estimated: least squares on the logits (default), as means, or "
        "with a few training steps towards the old outputs",
    )
    add("--images", type=int, metavar="N", help=f"how many images calibrate (default: {IMAGES})")
    add("--held-out", type=int, metavar="N", help="how many are held out (default: at most 1000)")
    add(
        "--max-drop",
        type=float,
        metavar="P",
        help="search for a faster model that loses at most P points of accuracy",
    )
    add("--speed-up", type=float, metavar="F", help="search for one that is F times as fast")
    add(
        "--batch-size",
        type=int,
        default=1,
        metavar="B",
        help="images at once whose latency is measured (default: 1)",
    )
    add(
        "--recover",
        type=int,
        metavar="N",
        help="then train the swapped model on for N epochs, the original as its teacher, and the "
        "original as long",
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
    from keymix.swap.result import Swapped
    from keymix.train.files import locked
    from keymix.train.signals import interruptible

    spec = None if _searches(given) else parse_mixer(given.mixer)
    name = Path(given.model).name if given.out is None else ""
    last = "faster" if spec is None else spec.slug
    folder = Folder(Path(given.out or f"runs/{name}-{last}"), overwrite=given.overwrite)
    with interruptible(lambda: "nothing was written yet"), locked(folder.path, "swap"):
        console.note(f"loading {given.model} and its images")
        source = load_source(given)
        setting = _setting(given, spec, source)
        record: Swapped | Search | None = folder.finished(setting, test=given.test)
        if record is not None:
            console.note(f"{str(folder.path)!r} is done; --overwrite swaps again")
        else:
            record = _swap(given, spec, source, folder, setting, argv)
            if isinstance(record, Swapped):
                folder.finish(record)
    page = folder.path / (PAGE if isinstance(record, Swapped) else f"{record.name}.html")
    if isinstance(record, Swapped):
        _print_result(record, folder.path, as_json=given.json)
        if given.recover is not None:
            _recover(_next(source, folder.path, given.recover)[1:], given.recover)
    elif given.json:
        console.say_json({"folder": str(folder.path), **record.to_dict()})
    else:
        console.show(record.tables["steps"])
        console.prose(record.answer)
        console.say(f"report   {page}")
    if given.open:
        console.open_page(page)
    return 0


def _searches(given: argparse.Namespace) -> bool:
    return given.max_drop is not None or given.speed_up is not None


def _refuse_idle(given: argparse.Namespace) -> None:
    """Refuse options that would do nothing."""
    if _searches(given):
        if given.init == "fresh":
            raise UserError(
                "--init fresh draws new keys, and a search calibrates them: leave it out"
            )
    elif given.mixer is None:
        raise UserError(
            "name what to put in with --mixer, or let --max-drop 1.0 (points of accuracy) or "
            "--speed-up 1.2 (times as fast) search for what pays"
        )
    if given.recover is not None and (given.recover < 1 or given.json):
        raise UserError("--recover is a number of epochs from 1 on, and not for --json")
    if given.max_drop is not None and not 0 <= given.max_drop < 100:
        raise UserError(f"--max-drop {given.max_drop:g}: give points of accuracy, such as 1.0")


def _setting(given: argparse.Namespace, spec: MixerSpec | None, source: Source) -> SwapSetting:
    from keymix.swap.result import SwapSetting

    return SwapSetting(
        model=given.model,
        mixer=given.mixer or "" if spec is None else spec.label,
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
        max_drop=given.max_drop,
        speed_up=given.speed_up,
        batch_size=given.batch_size,
    )


def _swap(
    given: argparse.Namespace,
    spec: MixerSpec | None,
    source: Source,
    folder: Folder,
    setting: SwapSetting,
    argv: list[str],
) -> Swapped | Search:
    """Swap, measure and write the model; return the record, or of a search without one that."""
    from keymix.analysis.study_record import joined
    from keymix.studies.inputs import RANDOM
    from keymix.swap.held_out import HeldOut
    from keymix.swap.result import Swapped
    from keymix.swap.run import swap
    from keymix.swap.search import drawing
    from keymix.train.environment import frame

    model = source.model
    calibration: Tensor | None = None
    if given.init == "transfer" or given.images is not None:
        count = min(IMAGES, len(source.data.train)) if given.images is None else given.images
        calibration = source.images("train", count, "--images")[0]
    score = source.data.task.score
    held_out = HeldOut(
        *source.images("val", given.held_out, "--held-out"),
        timed=given.batch_size,
        balanced=score.key == "balanced",
    )
    held_out.check(model)
    found: Search | None = None
    if spec is None:
        assert calibration is not None  # a search transfers
        made_by = frame(shlex.join(["keymix", "swap", *argv]))
        found = replace(_search(given, model, calibration, held_out), made_by=made_by)
        pays = found.report is not None and found.verdict in ("pays", "may pay")
        folder.begin(setting if pays else None)
        found.save(folder.path)
        if not pays:
            return found
        assert found.report is not None  # there is a plan
        report, before, after = found.report, found.original, found.judged
        swapped = report.swapped
    else:
        swapped = copy.deepcopy(model)
        wanted: dict[str, Any] = dict(spec.model_kwargs())
        options = {"init": given.init, "calibration": calibration, "estimate": given.estimate}
        with drawing(model, 0):
            report = swap(swapped, wanted.pop("mixer"), given.layers, **wanted, **options)
        blocks = {row.block - 1: row.after for row in report.rows}
        before, after = held_out.step(model), held_out.step(model, swapped, blocks)
        folder.begin(setting)
    recipes = _write_models(source, folder.path, model, swapped, held_out.images[:4])
    peaks_mib = _peaks(source, recipes, given)
    test = _test(source, model, swapped) if given.test else None
    return joined(
        Swapped,
        frame(shlex.join(["keymix", "swap", *argv])),
        model=source.name,
        mixer=", ".join(dict.fromkeys(after.mixers)) if spec is None else spec.label,
        weights=source.weights,
        calibration=0 if calibration is None else len(calibration),
        held_out=len(held_out.labels) if found is None else found.images[1],
        before=before,
        after=after,
        before_ms=after.original_ms,
        peaks_mib=peaks_mib,
        test=test,
        next=_next(source, folder.path),
        search=found,
        report=report,
        layers=len(report.rows) + len(report.untouched),
        scored=score.name,
        nothing="random" if source.weights == RANDOM else held_out.says_nothing(model),
        setting=setting,
    )


def _search(
    given: argparse.Namespace, model: nn.Module, calibration: Tensor, held_out: HeldOut
) -> Search:
    """Search for a plan that pays, and say what the images can tell before it begins."""
    from keymix.mixers.spec import parse_mixers
    from keymix.swap.search import CANDIDATES, search

    mixers: tuple[str, ...] = CANDIDATES
    if given.mixer is not None:
        mixers = tuple(spec.label for spec in parse_mixers(given.mixer))
    judge, changed = len(held_out.labels) // 2, 0.05  # share of answers that a swap may change
    wanted = ""
    if given.max_drop:
        count = 2 * changed * (196 / given.max_drop) ** 2
        wanted = f"; --held-out {count:.0f} would know it to ±{given.max_drop:g}"
    console.note(
        f"{judge} images will judge. If one answer in twenty changes, a change of accuracy is "
        f"known to about ±{196 * (changed / max(judge, 1)) ** 0.5:.1f} points{wanted}"
    )
    with console.working(lambda text, share: console.note(f"{share:4.0%} {text}")) as progress:
        return search(
            model,
            calibration=calibration,
            images=held_out.images,
            labels=held_out.labels,
            max_drop=None if given.max_drop is None else given.max_drop / 100,
            speed_up=given.speed_up,
            mixers=mixers,
            layers=given.layers,
            estimate=given.estimate,
            batch_size=given.batch_size,
            balanced=held_out.balanced,
            progress=progress,
        )


def _write_models(
    source: Source, folder: Path, model: nn.Module, swapped: nn.Module, images: Tensor
) -> tuple[Recipe, Recipe]:
    """Write the swapped model, and one of no run as it was, a teacher; return both recipes."""
    from keymix.swap.as_run import recipe_of, write

    own, other = source.recipe, recipe_of(source.recipe, swapped)
    if source.run is None:
        own = recipe_of(own, model, name=own.name)
        write(folder / "original", own, model, source.seen, images)
    write(folder, other, swapped, source.seen, images)
    return own, other


def _peaks(
    source: Source, recipes: tuple[Recipe, Recipe], given: argparse.Namespace
) -> tuple[float, float] | None:
    """Measure what a forward pass of a batch adds to weights and input, MiB: before and after.

    None where that is unknown, or so little that it says nothing.
    """
    from keymix.analysis.measure import measure_interleaved
    from keymix.analysis.memory import Build
    from keymix.compare.models import input_shape
    from keymix.records import to_json
    from keymix.swap.result import LEAST_MIB

    builds = {
        str(number): Build(
            factory="keymix.compare.costs:model_of",
            kwargs={"recipe": recipe.to_dict(), "data": to_json(source.seen)},
            imports=tuple(given.imports or ()),
        )
        for number, recipe in enumerate(recipes)
    }
    costs = measure_interleaved(
        builds, input_shape(source.seen), batch_size=given.batch_size, repeats=1
    )
    peaks = [cost.peak_inference_mib or 0.0 for cost in costs.values()]
    return (peaks[0], peaks[1]) if min(peaks) >= LEAST_MIB else None


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
        )
        metrics: dict[str, Any] = {**found.scores, "images": len(found.answers.index)}
        return TestScores(**metrics)

    score = source.data.task.score
    return BothScores(key=score.key, before=scores(model), after=scores(swapped))


def _next(source: Source, folder: Path, epochs: int = 1) -> tuple[str, ...]:
    """Return the commands that score the swapped model, train it on, and the original as long."""
    teacher = str(folder / "original") if source.run is None else source.name
    schedule, out = source.recipe.schedule, str(folder)
    shorter = ["--schedule.epochs", str(epochs)]
    shorter += ["--schedule.warmup_epochs", "0"] if schedule.warmup_epochs else []
    shorter += ["--schedule.cooldown_epochs", "0"] if schedule.cooldown_epochs else []
    taught = ["--loss.distill", "0.5", "--loss.distill_teacher", teacher]
    recover = ["keymix", "train", out, "--model.weights", out, *shorter, *taught]
    control = ["keymix", "train", teacher, "--model.weights", teacher, *shorter]
    return (
        shlex.join(["keymix", "eval", out]),
        shlex.join([*recover, "--out", f"{out}-recovered"]),
        shlex.join([*control, "--out", f"{out}-control"]),
    )


def _recover(commands: Sequence[str], epochs: int) -> None:
    """Train the swapped model on, and the original as long; say what each came to."""
    from keymix.cli.train import main as train
    from keymix.train.runs import load_run

    scores = []
    for line in commands:
        words = shlex.split(line)
        train(words[2:])
        summary = load_run(words[-1]).summary
        score = summary.data.task_kind.score
        assert summary.last.val is not None  # recipes that swap takes have a validation split
        scores.append(float(summary.last.val[score.key] or 0.0))
    console.say(
        f"after {epochs} epoch{'s' * (epochs != 1)}: {score.name} {100 * scores[0]:.1f} % swapped "
        f"and taught, {100 * scores[1]:.1f} % the original trained on as long (validation images)"
    )


def _print_result(record: Swapped, folder: Path, *, as_json: bool) -> None:
    if as_json:
        whole = {"folder": str(folder), **record.to_dict()}
        console.say_json(whole)
        return
    from keymix.cli.swap_folder import PAGE
    from keymix.report import formats

    console.show(record.tables["layers"])
    console.note(
        f"In brackets: 95 % interval over {record.held_out} held-out images. Latency: "
        f"{record.after.latency_text}."
    )
    if record.peaks_mib is not None:
        before, after = (formats.three_digits(peak) for peak in record.peaks_mib)
        console.note(f"Memory of a forward pass: {before} MiB before, {after} MiB after.")
    for note in record.notes:
        console.note(note)
    if record.test is not None:
        scores = [f"{100 * score:.2f} %" for score in record.test.decisive]
        console.say(f"test {record.scored} {scores[0]} before, {scores[1]} after")
    console.note("Then:")
    for line in record.next:
        console.note(f"  {line}")
    console.prose(record.answer)
    console.say(f"report   {folder / PAGE}")

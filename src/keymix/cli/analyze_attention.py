# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze attention``: where models look, over photos or as whole maps."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keymix.cli import console, models_and_images
from keymix.cli.console import VerbParser
from keymix.cli.models_and_images import refuse_frames, spikes_instead
from keymix.errors import NoAttentionMap, UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from keymix.analysis.attention_record import AttentionModel, AttentionRecord
    from keymix.analysis.overlay import Asking, Look
    from keymix.cli.models_and_images import Loaded

SUMMARY = "where a model looks: maps over photos or whole, heads, rollout"
RECORD, PAGE, MAPS = "attention.json", "attention.html", "maps.npz"

_DESCRIPTION = """\
Draw where models look: the attention maps of their layers over photos, or whole as matrices. It
takes runs, keymix's models and any of timm's that an adapter knows, with their own attention or
with mixers; the forward pass stays fused, and only the rows that are shown are formed again."""

_EPILOG = """\
examples:
  keymix analyze attention runs/mine --out looks
  keymix analyze attention vit_small_patch16_224 --pretrained --images photos --rollout --out looks
  keymix analyze attention runs/mine --layers 0,5,-1 --heads each --queries cls 3,4 --out looks
  keymix analyze attention swin_tiny_patch4_window7_224 --images a.jpg --queries 0.5,0.5 --out looks
SKA Fig. 5, stage 3 of CAFormer-S18:
  keymix analyze attention caformer_s18 --layers 6-14 --images a.jpg --out fig5 \\
    --mixers sep_conv/sep_conv/mhsa/mhsa,sep_conv/sep_conv/ska/mhsa,sep_conv/sep_conv/cska/mhsa
DeepViT Fig. 6, selected blocks of ViT over DeepViT:
  keymix analyze attention vit_32b deepvit_32b --view matrix --layers 0,7,15,23,30,31 \\
    --images a.jpg --stage final --out fig6
"""


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix analyze attention",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    models_and_images.add_arguments(add, limit=4)
    add(
        "--mixer",
        "--mixers",
        dest="mixers",
        metavar="LIST",
        help="put these into each model given by name, one after the other: mhsa,ska,cska; one "
        "mixer a stage with slashes",
    )
    add(
        "--layers",
        metavar="LIST",
        help="with commas: numbers from 0 (-1 is the last), ranges 6-14, patterns of paths "
        "'stages.2.*' (default: all with a map, at most 12 evenly)",
    )
    add(
        "--queries",
        nargs="+",
        metavar="Q",
        default=[],
        help="whose attention: cls, the class token; mean, over all patches; r,c, a patch by row "
        "and column from 0; 0.5,0.5, a place as shares of the image (default: cls where a class "
        "token passes through the layers and is read out, else mean)",
    )
    add("--heads", choices=("mean", "each"), default="mean", help="default: mean")
    add(
        "--stage",
        choices=("softmax", "final"),
        default="softmax",
        help="right after the softmax, or the map that multiplies V (default: softmax)",
    )
    add(
        "--view",
        choices=("image", "matrix"),
        default="image",
        help="over the photo, or whole maps N x N (default: image)",
    )
    add("--rollout", action="store_true", help="add rollout over --layers, all by default")
    add(
        "--scale",
        choices=("shared", "each"),
        default="shared",
        help="one scale of colours for a figure, or one a cell (default: shared)",
    )
    add("--out", metavar="DIR", required=True, help=f"write {PAGE}, PNGs, {MAPS}, {RECORD} there")
    add("--overwrite", action="store_true", help="replace the look that is in DIR")
    add("--json", action="store_true", help="print the record as JSON")
    made.add_imports()
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix analyze attention``.

    Args:
        argv: The words after ``attention``.

    Returns:
        0, or 2 if an image was broken (it is named; the others are drawn).
    """
    given = parser().parse_args(argv)
    queries = [_query(word) for word in given.queries]
    if given.view == "matrix" and (queries or given.rollout):
        raise UserError("--view matrix shows all queries: leave --queries and --rollout out")
    folder = console.checked_folder(given.out, RECORD, overwrite=given.overwrite)
    VerbParser.run_imports(given)

    from keymix.train.signals import interruptible

    done = False
    with (
        interruptible(lambda: "nothing was written"),
        console.made_folder(folder, lambda: done),
    ):
        loaded = _models(given)
        refuse_frames(loaded)
        models_and_images.warn_of_random(loaded, console.note)
        record, arrays = _looked(loaded, given, queries, argv)
        record = _write(record, arrays, folder)
        done = True
    if given.json:
        console.say_json(record)
    else:
        _tell(record)
    console.note(f"{folder / PAGE} shows it; {len(record.figures)} PNG and {MAPS} lie beside it")
    return console.tell_broken(record.left_out.values())


def _models(given: argparse.Namespace) -> list[Loaded]:
    """Load the models, each with every mixer of ``--mixers``."""
    from keymix.mixers.spec import parse_mixers

    names: list[str] = given.models
    if given.mixers is None:
        return models_and_images.load_models(names, pretrained=given.pretrained)
    runs = [name for name in names if models_and_images.is_run(name)]
    if runs:
        raise UserError(
            f"{runs[0]!r} is a run, which has its mixers: --mixers is of models by name"
        )
    if given.pretrained:
        raise UserError("--pretrained weights are of a model's own attention: leave --mixers out")
    return [
        models_and_images.named_model(
            name, spec.label if len(names) == 1 else f"{name} {spec.label}", **spec.model_kwargs()
        )
        for name in names
        for spec in parse_mixers(given.mixers)
    ]


def _query(word: str) -> Asking:
    """Read one of ``--queries``.

    Raises:
        UserError: If it is none.
    """
    from keymix.analysis.capture import At

    if word == "cls":
        return "cls"
    if word == "mean":
        return "mean"
    sides = word.split(",")
    try:
        if len(sides) != 2:
            raise ValueError(word)
        if any("." in side for side in sides):
            return At(*(float(side) for side in sides))
        return At(*(int(side) for side in sides))
    except ValueError:
        raise UserError(
            f"--queries {word!r}: give cls, mean, row,column of a patch such as 3,4, or shares of "
            "the image such as 0.5,0.5"
        ) from None


def _layers(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _looked(
    loaded: Sequence[Loaded],
    given: argparse.Namespace,
    queries: Sequence[Asking],
    argv: list[str],
) -> tuple[AttentionRecord, dict[str, np.ndarray[Any, Any]]]:
    """Look at every model: the record and its arrays."""
    from keymix.analysis.attention_record import AttentionRecord
    from keymix.analysis.overlay import look
    from keymix.analysis.study_record import joined

    arrays: dict[str, np.ndarray[Any, Any]] = {}
    models: list[AttentionModel] = []
    asked: tuple[Asking, ...] = tuple(queries)
    left_out: dict[str, str] = {}
    names: tuple[str, ...] = ()
    origin = ""
    for i, one in enumerate(loaded):
        console.note(f"looking at {one.label}")
        photos, shown, mine, origin = _photos(one, loaded, given, left_out)
        if names and mine != names:
            raise UserError("the models were shown other images: give --images")
        names = mine
        try:
            seen = look(
                one.model,
                one.view.normalised(photos),
                layers=_layers(given.layers),
                queries=asked,
                stage=given.stage,
                heads=given.heads,
                view=given.view,
                rollout=given.rollout,
            )
        except UserError as error:
            instead = spikes_instead(one) if isinstance(error, NoAttentionMap) else ""
            raise type(error)(f"{one.label}: {error}{instead}") from error
        asked = seen.queries
        models.append(_model(i, one, seen, arrays))
        if given.view == "image":
            arrays[f"m{i}.photos"] = shown.numpy()
    if given.rollout and all(m.rollout is None for m in models):
        raise UserError(f"{models[0].label}: no rollout: {models[0].no_rollout}")
    for m in models:
        if m.no_rollout is not None:
            console.note(f"{m.label}: no rollout: {m.no_rollout}")
    record = joined(
        AttentionRecord,
        console.frame("analyze", "attention", *argv),
        stage=given.stage,
        heads=given.heads,
        view=given.view,
        scale=given.scale,
        rollout=given.rollout,
        queries=tuple(_named(query) for query in asked),
        origin=origin,
        images=names,
        left_out=left_out,
        models=tuple(models),
    )
    return record, arrays


def _named(query: Asking) -> str:
    return query if isinstance(query, str) else f"{query.row},{query.column}"


def _photos(
    one: Loaded,
    loaded: Sequence[Loaded],
    given: argparse.Namespace,
    left_out: dict[str, str],
) -> tuple[Tensor, Tensor, tuple[str, ...], str]:
    """Read the images as one model sees them: pixels, what is shown, names, where from."""
    import torch

    source = one
    if given.images is None and one.run is None:  # a model by name beside a run sees the run's
        source = next((other for other in loaded if other.run is not None), one)
    images = models_and_images.load_images(source, given.images, limit=given.limit, view=one.view)
    pixels, names = [], []
    for i, name in enumerate(images.names):
        try:
            pixels.append(images.pixels(i))
        except UserError as error:
            left_out[name] = str(error)
            continue
        names.append(name)
    if not pixels:
        raise UserError(f"no image of {images.origin} can be read: {next(iter(left_out.values()))}")
    shown = torch.stack([images.picture(each) for each in pixels])
    return torch.stack(pixels), shown, tuple(names), images.origin


def _model(
    i: int, one: Loaded, seen: Look, arrays: dict[str, np.ndarray[Any, Any]]
) -> AttentionModel:
    """Record a model; its arrays go to the others."""
    from keymix.analysis.attention_record import AttentionLayer, AttentionModel, RolledOut
    from keymix.analysis.capture import At
    from keymix.analysis.study_record import joined

    def place(query: Asking, layout: Any) -> tuple[int, int] | None:
        if not isinstance(query, At):
            return None
        row, column = divmod(query.token(layout) - layout.prefix, layout.grid[1])
        return row, column

    layers = []
    for each in seen.layers:
        key = f"m{i}.layer{each.number}"
        arrays[key] = each.weights
        made = AttentionLayer(
            number=each.number,
            path=each.path,
            array=key,
            heads=each.weights.shape[1],
            heads_read=each.heads,
            keys=each.keys,
            even=each.even,
        )
        if each.prefix is not None and each.layout is not None:
            made = replace(
                made,
                grid=each.layout.grid,
                key_grid=each.layout.key_grid,
                places=tuple(place(query, each.layout) for query in seen.queries),
                peak=float((each.weights.max((-2, -1)) * each.even).mean()),
                prefix_share=float(each.prefix.mean()) if each.layout.prefix else None,
            )
        layers.append(made)
    rolled = None
    if seen.rollout is not None:
        layout = seen.layers[0].layout
        assert layout is not None  # it was rolled out over it
        arrays[f"m{i}.rollout"] = seen.rollout
        tokens = layout.prefix + layout.grid[0] * layout.grid[1]
        rolled = RolledOut(array=f"m{i}.rollout", tokens=tokens, layers=seen.rolled, of=seen.of)
    return joined(
        AttentionModel,
        one.studied(),
        photos=f"m{i}.photos",
        layers=tuple(layers),
        missing=seen.missing,
        rollout=rolled,
        no_rollout=seen.no_rollout,
    )


def _write(
    record: AttentionRecord, arrays: Mapping[str, np.ndarray[Any, Any]], folder: Path
) -> AttentionRecord:
    """Write all files; pictures of a look before go. Return the record with its figures."""
    from keymix.report.attention import figures, render
    from keymix.train.files import write_arrays, write_bytes, write_text

    drawn = []
    for each in figures(record, arrays):
        console.note(f"drew {each.file}")
        drawn.append(each)
    before = _pictures_of(folder)
    record = replace(record, figures=tuple(each.file for each in drawn))
    for each in drawn:
        write_bytes(folder / each.file, each.png)
    write_arrays(folder / MAPS, arrays)
    texts = {PAGE: render(record, drawn), RECORD: console.json_text(record)}
    for name, text in texts.items():
        write_text(folder / name, text)
    for stale in before - set(record.figures):
        (folder / stale).unlink(missing_ok=True)
    return record


def _pictures_of(folder: Path) -> set[str]:
    """The pictures that an earlier look wrote into the folder."""
    from keymix.train.files import read_json
    from keymix.train.recipe import is_name

    if not (folder / RECORD).exists():
        return set()
    try:
        named = read_json(folder / RECORD).get("figures", [])
    except UserError:
        return set()
    drawn = named if isinstance(named, list) else []
    return {name for name in drawn if is_name(name) and name.endswith(".png")}


def _tell(record: AttentionRecord) -> None:
    """Print a row a layer."""
    heads = ["model", "layer", "path", "strongest, x even", "on prefix tokens, %"]
    rows = []
    for model in record.models:
        for layer in model.layers:
            peak, share = layer.peak, layer.prefix_share
            rows.append(
                [
                    model.label,
                    str(layer.number),
                    layer.path,
                    "" if peak is None else f"{peak:.3g}",
                    "" if share is None else f"{100 * share:.1f}",
                ]
            )
        for path, why in model.missing.items():
            console.note(f"{model.label}: {path} has no map: {why}")
    console.table(heads, rows, left=3)

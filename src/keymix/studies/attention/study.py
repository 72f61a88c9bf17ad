# SPDX-License-Identifier: Apache-2.0
"""Where models look, over photos or as whole maps: the options and the run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keymix.analysis.attention_record import (
    AttentionLayer,
    AttentionModel,
    AttentionRecord,
    RolledOut,
)
from keymix.analysis.study_record import joined
from keymix.errors import NoAttentionMap, UserError
from keymix.studies import inputs
from keymix.studies.attention.result import Attention
from keymix.studies.study import Session, Study, split_list

if TYPE_CHECKING:
    from torch import Tensor

    from keymix.analysis.attention_pictures import Asking, Look
    from keymix.studies.inputs import Loaded


class _Attention(Study[Attention]):
    summary = "where a model looks: maps over photos or whole, heads, rollout"
    description = """\
Draw where models look: the attention maps of their layers over photos, or whole as matrices. It
takes runs, keymix's models and any of timm's that an adapter knows, with their own attention or
with mixers; the forward pass stays fused, and only the rows that are shown are formed again."""
    examples = """\
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

Blocks are numbered from 1; --layers counts from 0, as the model's paths do."""

    def add_options(self, add: Callable[..., Any]) -> None:
        inputs.add_arguments(add, limit=4)
        add(
            "--mixers",
            metavar="LIST",
            help="put these into each model given by name, one after the other: mhsa,ska,cska; one "
            "mixer per stage with slashes",
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
            help="whose attention: cls, the class token; mean, over all patches; r,c, a patch by "
            "row and column from 0; 0.5,0.5, a place as shares of the image (default: cls where a "
            "class token passes through the layers and is read out, else mean)",
        )
        add(
            "--heads",
            choices=("mean", "each"),
            default="mean",
            help="draw the mean over the heads, or each head (default: mean)",
        )
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
            help="one colour scale per figure, or one per cell (default: shared)",
        )

    def check(self, given: argparse.Namespace) -> None:
        given.queries = tuple(_query(word) for word in given.queries)
        if given.view == "matrix" and (given.queries or given.rollout):
            raise UserError("--view matrix shows all queries: leave --queries and --rollout out")

    def run(self, given: argparse.Namespace, session: Session) -> Iterator[Attention]:
        loaded = _models(given)
        inputs.refuse_frames(loaded)
        inputs.warn_of_random(loaded, session.note)
        arrays: dict[str, Any] = {}
        yield Attention(_looked(loaded, given, session, arrays), arrays)


STUDY = _Attention()


def _query(word: str) -> Asking:
    """Read one of ``--queries``."""
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


def _models(given: argparse.Namespace) -> list[Loaded]:
    """Load the models, each with every mixer of ``--mixers``."""
    from keymix.mixers.spec import parse_mixers

    names: list[str] = given.models
    if given.mixers is None:
        return inputs.load_models(names, pretrained=given.pretrained)
    runs = [name for name in names if inputs.is_run(name)]
    if runs:
        raise UserError(
            f"{runs[0]!r} is a run, which has its mixers: --mixers is of models by name"
        )
    if given.pretrained:
        raise UserError("--pretrained weights are of a model's own attention: leave --mixers out")
    return [
        inputs.named_model(
            name, spec.label if len(names) == 1 else f"{name} {spec.label}", **spec.model_kwargs()
        )
        for name in names
        for spec in parse_mixers(given.mixers)
    ]


def _looked(
    loaded: Sequence[Loaded],
    given: argparse.Namespace,
    session: Session,
    arrays: dict[str, Any],
) -> AttentionRecord:
    """Look at every model: the record; arrays go to the dictionary."""
    from keymix.analysis.attention_pictures import look

    models: list[AttentionModel] = []
    asked: tuple[Asking, ...] = given.queries
    left_out: dict[str, str] = {}
    names: tuple[str, ...] = ()
    origin = ""
    for i, one in enumerate(loaded):
        session.note(f"looking at {one.label}")
        photos, shown, mine, origin = _photos(one, loaded, given, left_out)
        if names and mine != names:
            raise UserError("the models were shown other images: give --images")
        names = mine
        try:
            seen = look(
                one.model,
                one.view.normalised(photos),
                layers=split_list(given.layers),
                queries=asked,
                stage=given.stage,
                heads=given.heads,
                view=given.view,
                rollout=given.rollout,
            )
        except UserError as error:
            instead = inputs.spikes_instead(one) if isinstance(error, NoAttentionMap) else ""
            raise type(error)(f"{one.label}: {error}{instead}") from error
        asked = seen.queries
        models.append(_model(i, one, seen, arrays))
        if given.view == "image":
            arrays[f"m{i}.photos"] = shown.numpy()
    if given.rollout and all(m.rollout is None for m in models):
        raise UserError(f"{models[0].label}: no rollout: {models[0].no_rollout}")
    return AttentionRecord(
        stage=given.stage,
        heads=given.heads,
        view=given.view,
        scale=given.scale,
        rollout=given.rollout,
        queries=tuple(q if isinstance(q, str) else f"{q.row},{q.column}" for q in asked),
        origin=origin,
        images=names,
        left_out=left_out,
        models=tuple(models),
    )


def _photos(
    one: Loaded,
    loaded: Sequence[Loaded],
    given: argparse.Namespace,
    left_out: dict[str, str],
) -> tuple[Tensor, Tensor, tuple[str, ...], str]:
    """Read the images as one model sees them: pixels, what is shown, names, where from."""
    source = one
    if given.images is None and one.run is None:  # a model by name next to a run sees the run's
        source = next((other for other in loaded if other.run is not None), one)
    images = inputs.load_images(source, given.images, limit=given.limit, view=one.view)
    names, pixels = zip(*images.readable(), strict=True)
    left_out.update(images.left_out)
    shown = inputs.one_size([images.picture(each) for each in pixels])
    return inputs.one_size(pixels, one.view.mean), shown, names, images.origin


def _model(i: int, one: Loaded, seen: Look, arrays: dict[str, Any]) -> AttentionModel:
    """Record a model; its arrays go to the dictionary."""
    from keymix.analysis.capture import At

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
        image=next((each.layout.image for each in seen.layers if each.layout), (1.0, 1.0)),
    )

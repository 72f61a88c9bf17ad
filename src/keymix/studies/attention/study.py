# SPDX-License-Identifier: Apache-2.0
"""Where models look, over photos or as whole maps: the options and the run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keymix.errors import NoAttentionMap, UserError
from keymix.studies import inputs
from keymix.studies.attention.result import (
    WHOLE,
    Attention,
    AttentionLayer,
    AttentionModel,
    AttentionRecord,
    RolledOut,
)
from keymix.studies.study import Session, Study, words

if TYPE_CHECKING:
    from torch import Tensor

    from keymix.analysis.capture import At
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
  keymix analyze attention vit_32b deepvit_32b --view matrix --images a.jpg --stage final --out maps

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
            type=words,
            metavar="LIST",
            help="with commas: numbers from 0 (-1 is the last), ranges 6-14, patterns of paths "
            "'stages.2.*' (default: all with a map, at most 12 evenly)",
        )
        add(
            "--queries",
            type=_query,
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

    def run(self, given: argparse.Namespace, session: Session) -> Iterator[Attention]:
        from keymix.data.pixels import picture

        if given.view == "matrix" and (given.queries or given.rollout):
            raise UserError("--view matrix shows all queries: leave --queries and --rollout out")
        loaded = _models(given)
        inputs.refuse_frames(loaded)
        inputs.warn_of_random(loaded, session.note)
        arrays: dict[str, Any] = {}
        models: list[AttentionModel] = []
        left_out: dict[str, str] = {}
        names: tuple[str, ...] = ()
        for i, one in enumerate(loaded):
            session.note(f"looking at {one.label}")
            images = _images(one, loaded, given)
            mine, pixels = zip(*images.readable(), strict=True)
            left_out.update(images.left_out)
            if names not in ((), mine):
                raise UserError("the models were shown other images: give --images")
            names = mine
            batch = one.view.normalised(inputs.one_size(pixels, one.view.mean))
            try:
                models.append(_look(f"m{i}", one, batch, given, arrays))
            except UserError as error:
                instead = inputs.spikes_instead(one) if isinstance(error, NoAttentionMap) else ""
                raise type(error)(f"{one.label}: {error}{instead}") from error
            if given.view == "image":
                photos = [picture(each, images.kind) for each in pixels]
                arrays[f"m{i}.photos"] = inputs.one_size(photos).numpy()
        if given.rollout and all(m.rollout is None for m in models):
            raise UserError(f"{models[0].label}: no rollout: {models[0].no_rollout}")
        record = AttentionRecord(
            stage=given.stage,
            heads=given.heads,
            view=given.view,
            scale=given.scale,
            rollout=given.rollout,
            queries=tuple(
                q if isinstance(q, str) else f"{q.row},{q.column}" for q in given.queries
            ),
            origin=images.origin,
            images=names,
            left_out=left_out,
            models=tuple(models),
        )
        yield Attention(record, arrays)


STUDY = _Attention()


def _query(word: str) -> str | At:
    """Read one of ``--queries``."""
    from keymix.analysis.capture import At

    if word in ("cls", "mean"):
        return word
    sides = word.split(",")
    try:
        if len(sides) != 2:
            raise ValueError(word)
        if any("." in side for side in sides):
            return At(*(float(side) for side in sides))
        return At(*(int(side) for side in sides))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{word!r}: give cls, mean, row,column of a patch such as 3,4, or shares of "
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


def _images(one: Loaded, loaded: Sequence[Loaded], given: argparse.Namespace) -> inputs.Images:
    """Find the images of one model; one by name next to a run is shown the run's."""
    source = one
    if given.images is None and one.run is None:
        source = next((other for other in loaded if other.run is not None), one)
    return inputs.load_images(source, given.images, limit=given.limit, view=one.view)


def _look(
    key: str, one: Loaded, images: Tensor, given: argparse.Namespace, arrays: dict[str, Any]
) -> AttentionModel:
    """Read what a model looks at, on normalised images; arrays go to the dictionary.

    A layer that was chosen must have a map; without a choice, some of those that have one are
    shown. Without queries the model's readout is asked, of this model and those that follow.
    Rollout goes over the layers that were chosen, else over every layer that has a map.
    """
    import torch

    from keymix.analysis.attention import attention_maps, on_image
    from keymix.analysis.capture import At, find_seats, shown_layers
    from keymix.analysis.rollout import attention_rollout

    def plain(found: Tensor) -> Any:
        return found.detach().float().cpu().numpy()

    model, paths, layers = one.model, list(find_seats(one.model)), given.layers
    missing: dict[str, str] = {}
    skipped = missing if layers is None else None
    there = attention_maps(model, images[:1], layers=layers, queries=[0], missing=skipped)
    if not there:
        path, why = next(iter(missing.items()))
        raise NoAttentionMap(f"no layer has a map: {path}: {why}")
    given.queries = given.queries or (there.readout,)
    wanted = shown_layers(list(there)) if layers is None else list(there)
    how: dict[str, Any] = {"stage": given.stage, "heads": given.heads, "windows": "image"}
    whole = given.view == "matrix"
    each = [
        attention_maps(model, images, layers=wanted, queries=query, **how)
        for query in ((None,) if whole else given.queries)
    ]
    made = []
    for path in wanted:
        number, layout = paths.index(path), each[0].layouts.get(path)
        rows = torch.cat([maps[path] for maps in each], 2)  # [B, h, queries, M]
        keys, seen = rows.shape[-1], each[0].seen[path]
        layer = AttentionLayer(
            number=number,
            path=path,
            array=f"{key}.layer{number}",
            heads=rows.shape[1],
            heads_read=each[0].heads[path],
            keys=keys,
            even=(seen,) if whole else tuple(keys if q == "mean" else seen for q in given.queries),
        )
        if not whole:
            if layout is None:
                raise UserError(f"it is unknown where the tokens of layer {path} lie on the image")
            prefix, rows = rows[..., : layout.prefix].sum(-1), on_image(rows, layout)
            grid = layout.grid
            tokens = [q.token(layout) if isinstance(q, At) else None for q in given.queries]
            layer = replace(
                layer,
                grid=grid,
                key_grid=layout.key_grid,
                places=tuple(
                    None if t is None else divmod(t - layout.prefix, grid[1]) for t in tokens
                ),
                peak=float((plain(rows).max((-2, -1)) * layer.even).mean()),
                prefix_share=float(plain(prefix).mean()) if layout.prefix else None,
            )
        arrays[layer.array] = plain(rows)
        made.append(layer)
    rolled, no_rollout = None, None
    if given.rollout:
        try:
            pictures = [
                attention_rollout(model, images, layers=list(there), query=query)
                for query in given.queries
            ]
            rolled = RolledOut(
                array=f"{key}.rollout",
                tokens=pictures[0].weights.shape[-1],
                layers=tuple(paths.index(path) for path in there),
                of=len(paths),
            )
            arrays[rolled.array] = plain(torch.stack([found.picture for found in pictures], 1))
        except UserError as error:
            no_rollout = str(error)
    layouts = each[0].layouts.values()
    return AttentionModel(
        **vars(one.studied()),
        photos=f"{key}.photos",
        layers=tuple(made),
        missing=missing,
        rollout=rolled,
        no_rollout=no_rollout,
        image=next((layout.image for layout in layouts), WHOLE),
    )

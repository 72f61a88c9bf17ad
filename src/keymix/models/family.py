# SPDX-License-Identifier: Apache-2.0
"""What families of models share: mix-ins, image sizes, rows of variants as models by name."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from timm.layers import LayerNorm, PatchEmbed, get_device_dtype
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from keymix.arguments import whole_size
from keymix.errors import UserError
from keymix.hosts.base import find_mixers
from keymix.layers.patches import patch_grid
from keymix.mixers.base import Grid
from keymix.mixers.spec import spec_of
from keymix.models.arguments import (
    arguments_of,
    check_arguments,
    check_value,
    refuse_weights,
)
from keymix.models.pretrained import names_weights, weights_of

Row = Mapping[str, Any]
Cfg = Row | Callable[[Row], Row]
"""What a family says of its models in timm's descriptions, or says by row."""


class MixerModel(nn.Module):
    """Mix-in, before a timm class, for models that host mixers."""

    def __call__(self, *images: Any, **more: Any) -> Any:
        """Run the model, hooks and all; refuse whole numbers, such as pixels of 8 bits."""
        refuse_whole_numbers(images[0] if images else more.get("x"))
        return super().__call__(*images, **more)

    def no_weight_decay(self) -> set[str]:
        """Names that weight decay leaves alone: the family's own, and what the mixers name."""
        family = getattr(super(), "no_weight_decay", None)
        names = set(family()) if family is not None else set()
        for path, mixer in find_mixers(self).items():
            names |= {f"{path}.{name}" for name in mixer.no_weight_decay()}
        return names

    def reset_classifier(self, num_classes: int, *args: Any, **timm: Any) -> None:
        """Replace the last layers, as the family does it."""
        check_value("num_classes", num_classes, int)
        family: Any = super()
        family.reset_classifier(num_classes, *args, **timm)


@dataclass(frozen=True)
class Wanted:
    """What `forward_intermediates` is asked for; with ``alone`` no final features."""

    indices: int | Sequence[int] | None
    norm: bool
    stop_early: bool
    alone: bool


class FeatureModel(MixerModel):
    """Mix-in for models of our own, on no class of timm's: they give maps of features as timm's do.

    ``feature_info`` lists the maps: channels, reduction and path.
    """

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return maps of features from between, and the final features, as timm's models do.

        ``indices`` are positions in ``feature_info``, or a number n for the last n; all if None.
        They are normalised as the last is if ``norm``. ``stop_early`` runs nothing behind the last.
        """
        if output_fmt != "NCHW":
            raise UserError(f"{output_fmt=} must be 'NCHW'")
        return self.intermediates(x, Wanted(indices, norm, stop_early, intermediates_only))

    @abstractmethod
    def intermediates(self, x: Tensor, wanted: Wanted) -> Any:
        """Do as `forward_intermediates`."""


class StageModel(FeatureModel):
    """Mix-in for our classifiers: ``stages`` of blocks with a grid each, and a linear ``head``."""

    stages: Any
    head: nn.Module
    num_features: int
    global_pool: str
    feature_info: list[dict[str, Any]]

    @abstractmethod
    def grids(self, image: Grid) -> list[Grid]:
        """Grid of the tokens in every stage, for images of this height and width in pixels."""

    @abstractmethod
    def check_pool(self, global_pool: str, num_classes: int) -> None:
        """Refuse what the model cannot read out."""

    @abstractmethod
    def keep_maps(self, count: int) -> None:
        """Drop what comes after the first ``count`` maps."""

    @property
    @abstractmethod
    def num_maps(self) -> int:
        """How many maps of features there are."""

    @abstractmethod
    def start(self, module: nn.Module) -> None:
        """Draw the weights of a linear map as the family does."""

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Say which parameters make a layer, as timm asks for layer-wise learning rates."""
        return stage_matcher(r"^stages\.0\.patch_embed", "(?:patch_embed|cls_token)", coarse=coarse)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of blocks in the backward pass instead of keeping them."""
        self.grad_checkpointing = enable
        for stage in self.stages:
            stage.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the last layer, none for no classes; and what is read out, unless it is None."""
        check_value("num_classes", num_classes, int)
        pool = self.global_pool if global_pool is None else global_pool
        self.check_pool(pool, num_classes)
        self.global_pool, self.num_classes = pool, num_classes
        head = linear_head(self.num_features, num_classes, **get_device_dtype(self))
        self.start(head)
        self.head = head.train(self.training)

    def set_input_size(self, img_size: int | Grid | None = None) -> None:
        """Change the image size (pixels), as timm's; all mixers are asked before any changes."""
        take_input_size(self, img_size, self.grids)

    def prune_intermediate_layers(
        self,
        indices: int | Sequence[int] = 1,
        prune_norm: bool = False,
        prune_head: bool = True,
    ) -> list[int]:
        """Drop what comes after the maps asked for."""
        take, last = feature_take_indices(self.num_maps, indices)
        if last + 1 < self.num_maps:
            self.keep_maps(last + 1)
            self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
            prune_norm = prune_head = True
        if prune_norm and "norm" in self._modules:
            self.norm: nn.Module = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return list(take)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images."""
        out: Tensor = self.forward_head(self.forward_features(x))
        return out

    @abstractmethod
    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last stage's features."""

    @abstractmethod
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Read the features out and classify, unless it stops before the classifier."""


def linear_head(width: int, num_classes: int, **factory: Any) -> nn.Module:
    """Make a linear classifier, nothing for no classes."""
    return nn.Linear(width, num_classes, **factory) if num_classes > 0 else nn.Identity()


def stage_matcher(stem: str, opening: str, *, coarse: bool) -> dict[str, Any]:
    """Return a timm ``group_matcher`` of stages, each with an opening before its blocks."""
    blocks = [
        (rf"^stages\.(\d+)\.{opening}", (0,)),
        (r"^stages\.(\d+)\.blocks\.(\d+)", None),
    ]
    return {"stem": stem, "blocks": r"^stages\.(\d+)" if coarse else blocks}


def refuse_whole_numbers(images: object) -> None:
    """Refuse images that are no floating-point numbers, for which no weights are."""
    if isinstance(images, Tensor) and not images.is_floating_point():
        raise UserError(
            f"images of {images.dtype}: the model takes floating-point numbers; normalise pixels, "
            "as (x.float() / 255 - mean) / std, and hand frames of events over as x.float()"
        )


def check_patches(model: nn.Module, size: Grid | None = None) -> None:
    """Refuse an image size that a model's patches do not fill, unless it pads them.

    The size is the model's own if None. That which a model of timm's was published for is never
    refused, nor any by models that do not cut patches.
    """
    embed: Any = getattr(model, "patch_embed", None)
    if not isinstance(embed, PatchEmbed) or embed.img_size is None:
        return
    size = (embed.img_size[0], embed.img_size[1]) if size is None else size
    published = getattr(model, "pretrained_cfg", {}).get("input_size", (0,))[1:]
    if size != tuple(published):
        patch_grid(size, embed.patch_size, padded=embed.dynamic_img_pad)


def grid_of(embed: Any, img_size: Any, patch_size: Any) -> Grid:
    """Return the grid that a patch embedding would have after ``set_input_size``, or refuse it."""
    size, patch = embed.img_size, embed.patch_size
    size = size if img_size is None else whole_size("img_size", img_size)
    patch = patch if patch_size is None else whole_size("patch_size", patch_size)
    return patch_grid(size, patch, padded=embed.dynamic_img_pad)


def refuse_unfit(reasons: Mapping[str, str | None]) -> None:
    """Refuse another image size where a mixer, by its path, has a reason against it."""
    against = {path: reason for path, reason in reasons.items() if reason is not None}
    if against:
        path, reason = next(iter(against.items()))
        more = f" (and {len(against) - 1} more)" if len(against) > 1 else ""
        raise UserError(f"{path}{more}: {reason}")


def asked_grid(model: Any, img_size: Any, patch_size: Any) -> Grid:
    """Return the grid of patches of a model at another size, after asking all of its mixers."""
    grid = grid_of(model.patch_embed, img_size, patch_size)
    mixers = find_mixers(model)
    refuse_unfit({path: mixer.refuses_grid(grid) for path, mixer in mixers.items()})
    return grid


def take_input_size(
    model: nn.Module, img_size: int | Grid | None, grids_of: Callable[[Grid], list[Grid]]
) -> None:
    """Change the image size of a model with an ``img_size``, and mixers at ``stages.<s>.…``.

    ``grids_of`` says the grid of every stage, for images of a height and width. A mixer that cannot
    take its new grid refuses for all, and nothing has changed.
    """
    if img_size is None:
        return
    size = whole_size("img_size", img_size)
    grids = grids_of(size)
    changes = []
    for path, mixer in find_mixers(model).items():
        grid = grids[int(path.split(".")[1])]
        changes.append((path, mixer, grid, mixer.site.key_grid_on(grid)))
    refuse_unfit({path: mixer.refuses_grid(to, key_grid=keys) for path, mixer, to, keys in changes})
    for _, mixer, to, keys in changes:
        mixer.set_grid(to, key_grid=keys)
    owner: Any = model
    owner.img_size = size
    update_model_input_size(model, size)


def with_norm_eps(eps: float | None, timm: Row) -> dict[str, Any]:
    """Add LayerNorms of this eps to the arguments of a timm class; timm's own if None."""
    if eps is None:
        return dict(timm)
    if timm.get("norm_layer") is not None:
        raise UserError(f"norm_eps={eps} is of the model's LayerNorms; leave norm_layer= out")
    return {**timm, "norm_layer": partial(LayerNorm, eps=eps)}


def overridden(row: Row, given: Row, with_mixer: Sequence[str] = ()) -> dict[str, Any]:
    """Replace values of a variant's row by what a user gave.

    Options for the row's own mixer join those of the row, in whichever of the forms that models
    take either has them; another mixer leaves them behind, and with them the row's arguments that
    ``with_mixer`` names. A row that has options names its mixer.
    """
    arguments = {**row, **given}
    options = given.get("mixer_options")
    if given.get("mixer") is not None:
        arguments["mixer_options"] = options
        arguments |= {name: given.get(name) for name in with_mixer}
    elif options is not None and row.get("mixer_options") is not None:
        mixer = row["mixer"]
        both = (spec_of(mixer, row["mixer_options"]), spec_of(mixer, options))
        joined = [{**dict(a), **dict(b)} for a, b in zip(*(s.options for s in both), strict=True)]
        arguments["mixer_options"] = joined
    return arguments


_FAMILIES: dict[str, tuple[type[nn.Module], Row]] = {}  # a model's name to its class and row


def family_of(name: str) -> tuple[type[nn.Module], Row]:
    """Return the class of a registered model, and the arguments that its row gives it."""
    return _FAMILIES[name]


def family_names() -> list[str]:
    """Return the names of the registered models."""
    return list(_FAMILIES)


def families() -> list[type[nn.Module]]:
    """Return the classes of the registered models, each once."""
    return list(dict.fromkeys(build for build, _ in _FAMILIES.values()))


def _described(row: Row, cfg: Cfg) -> dict[str, Any]:
    """Return timm's description of a model without weights to download.

    The family's ``reduction`` of the last map of features says what is pooled.
    """
    side, in_chans = row.get("img_size", 224), row.get("in_chans", 3)
    said = dict(cfg(row) if callable(cfg) else cfg)
    reduction = said.pop("reduction", None)
    return {
        "url": "",
        "num_classes": 1000 if side == 224 else 10,  # of ImageNet, or of small images
        "input_size": (in_chans, side, side),
        "pool_size": None if reduction is None else (side // reduction,) * 2,
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": (0.5,) * in_chans,
        "std": (0.5,) * in_chans,
        "license": "apache-2.0",
        **said,
    }


def register_variants(
    module: str,
    build: type[nn.Module],
    variants: Mapping[str, Row],
    *,
    cfg: Cfg,
    out_indices: int | None = 3,
    maps: str = "",
    filter_fn: Callable[..., Any] | None = None,
    with_mixer: Sequence[str] = (),
) -> None:
    """Register every row of a family's table in timm, under its name.

    timm looks for the descriptions in the module (its ``__name__``), so they are left there as
    ``default_cfgs``, with what ``cfg`` says of a row. Feature extractors
    (``features_only=True``) give the maps ``out_indices``, or all of them where the argument
    ``maps``, a number of blocks or a row of stages, says that there are fewer. ``filter_fn`` makes
    a checkpoint's tensors fit the model, as timm calls it. Another mixer in place of a row's own
    leaves the arguments ``with_mixer`` behind. ``pretrained`` of a model on a backbone is of the
    backbone.
    """
    described = {f"{name}.untrained": _described(row, cfg) for name, row in variants.items()}
    known = vars(sys.modules[module]).setdefault("default_cfgs", {})
    known.update(generate_default_cfgs(described))

    def register(name: str, row: Row) -> None:
        classes = _described(row, cfg)["num_classes"]
        on_backbone = "backbone_options" in arguments_of(build)

        def entry(pretrained: bool = False, **given: Any) -> nn.Module:
            if pretrained and not names_weights(weights_of(name, given)):
                if on_backbone:
                    options = {**(given.get("backbone_options") or {}), "pretrained": True}
                    return entry(**given | {"backbone_options": options})
                raise UserError(
                    f"{name} has no weights of its own to download; build it without pretrained= "
                    "and hand weights of your own or of timm's model to "
                    "keymix.models.load_weights(model, file)"
                )
            stored = given.get("pretrained_model_args") or {}
            refuse_weights(stored)
            # JSON has lists alone
            given |= {k: tuple(v) for k, v in given.items() if k in stored and isinstance(v, list)}
            check_arguments(name, build, row, given)
            arguments = {"num_classes": classes, **overridden(row, given, with_mixer)}
            last = out_indices
            if last is not None and maps in arguments:
                count = arguments[maps]
                last = min(last, count if isinstance(count, int) else len(count))
            model: nn.Module = build_model_with_cfg(
                build,
                name,
                pretrained,
                pretrained_filter_fn=filter_fn,
                feature_cfg={"out_indices": last, "feature_cls": "getter"},
                **arguments,
            )
            return model

        entry.__name__ = entry.__qualname__ = name
        entry.__module__ = module
        entry.__doc__ = f"{name}: see the table of variants in this module."
        register_model(entry)

    for name, row in variants.items():
        register(name, row)
        _FAMILIES[name] = (build, row)

# SPDX-License-Identifier: Apache-2.0
"""What all families of models share: rows of variants become timm models by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from timm.layers import LayerNorm
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from keymix.errors import UserError
from keymix.hosts.base import find_mixers
from keymix.mixers.spec import spec_of
from keymix.models.arguments import check_arguments, check_value
from keymix.models.pretrained import names_weights, weights_of

Row = Mapping[str, Any]


class MixerModel(nn.Module):
    """Mix-in, before a timm class, for models that host mixers."""

    def __call__(self, *images: Any, **more: Any) -> Any:
        """Run the model, hooks and all.

        Args:
            images: What the model's ``forward`` takes.
            more: The same by name.

        Raises:
            UserError: If images are whole numbers, such as pixels of 8 bits.
        """
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
        """Replace the last layers, as the family does it.

        Args:
            num_classes: Outputs; 0 for none.
            args: The other arguments of the family's method.
            timm: The same by name.

        Raises:
            UserError: If ``num_classes`` is no number of classes.
        """
        check_value("num_classes", num_classes, int)
        family: Any = super()
        family.reset_classifier(num_classes, *args, **timm)


def refuse_whole_numbers(images: object) -> None:
    """Refuse images that are no floating-point numbers, for which no weights are.

    Raises:
        UserError: It names the type and the remedy.
    """
    if isinstance(images, Tensor) and not images.is_floating_point():
        raise UserError(
            f"images of {images.dtype}: the model takes floating-point numbers; normalise pixels, "
            "as (x.float() / 255 - mean) / std, and hand frames of events over as x.float()"
        )


def base_cfg(img_size: int, in_chans: int = 3, **more: Any) -> dict[str, Any]:
    """Return timm's description of a model that has no weights of its own to download.

    Args:
        img_size: Side of the images it was made for, pixels.
        in_chans: Their channels.
        more: What the family says apart from that, such as ``first_conv`` and ``classifier``.
    """
    return {
        "url": "",
        "num_classes": 10,
        "input_size": (in_chans, img_size, img_size),
        "pool_size": None,
        "crop_pct": 1.0,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": (0.5,) * in_chans,
        "std": (0.5,) * in_chans,
        "license": "apache-2.0",
        **more,
    }


def with_norm_eps(eps: float | None, timm: Row) -> dict[str, Any]:
    """Add LayerNorms of this eps to the arguments of a timm class; timm's own if None.

    Raises:
        UserError: If ``norm_layer`` is given as well.
    """
    if eps is None:
        return dict(timm)
    if timm.get("norm_layer") is not None:
        raise UserError(f"norm_eps={eps} is of the model's LayerNorms; leave norm_layer= out")
    return {**timm, "norm_layer": partial(LayerNorm, eps=eps)}


def lay_over(row: Row, given: Row, with_mixer: Sequence[str] = ()) -> dict[str, Any]:
    """Lay what a user gave over a variant's row.

    Options for the row's own mixer join those of the row, in whichever of the forms that models
    take either has them; another mixer leaves them behind, and with them the row's arguments that
    ``with_mixer`` names. A row that has options names its mixer.

    Raises:
        UserError: If there are options of a mixer that the row has not, or too few or many.
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


def families() -> list[type[nn.Module]]:
    """Return the classes of the registered models, each once."""
    return list(dict.fromkeys(build for build, _ in _FAMILIES.values()))


def register_variants(
    module: str,
    build: type[nn.Module],
    variants: Mapping[str, Row],
    *,
    cfg: Callable[[str], dict[str, Any]],
    feature_cfg: Mapping[str, Any],
    filter_fn: Callable[..., Any] | None = None,
    with_mixer: Sequence[str] = (),
) -> None:
    """Register every row of a family's table in timm, under its name.

    timm looks for the descriptions in the module, so they are left there as ``default_cfgs``.

    Args:
        module: ``__name__`` of the family's module.
        build: The family's class.
        variants: Name to the arguments of the class.
        cfg: Makes a name's description, see :func:`base_cfg`.
        feature_cfg: How timm makes a feature extractor of the model (``features_only=True``).
        filter_fn: Makes a checkpoint's tensors fit the model, as timm calls it.
        with_mixer: Arguments of a row that belong to its mixer, so that another mixer given in
            its place leaves them behind.
    """
    described = {f"{name}.untrained": cfg(name) for name in variants}
    vars(sys.modules[module])["default_cfgs"] = generate_default_cfgs(described)

    def register(name: str, row: Row) -> None:
        classes = cfg(name)["num_classes"]

        def entry(pretrained: bool = False, **given: Any) -> nn.Module:
            if pretrained and not names_weights(weights_of(name, given)):
                raise UserError(
                    f"{name} has no weights of its own to download; build it without pretrained= "
                    "and hand weights of your own or of timm's model to "
                    "keymix.models.load_weights(model, file)"
                )
            check_arguments(name, build, row, given)
            model: nn.Module = build_model_with_cfg(
                build,
                name,
                pretrained,
                pretrained_filter_fn=filter_fn,
                feature_cfg=dict(feature_cfg),
                **{"num_classes": classes, **lay_over(row, given, with_mixer)},
            )
            return model

        entry.__name__ = entry.__qualname__ = name
        entry.__module__ = module
        entry.__doc__ = f"{name}: see the table of variants in this module."
        register_model(entry)

    for name, row in variants.items():
        register(name, row)
        _FAMILIES[name] = (build, row)

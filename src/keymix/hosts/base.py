# SPDX-License-Identifier: Apache-2.0
"""What every host adapter offers, and how mixers are put into a model through it."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal

from timm.layers import trunc_normal_
from torch import Tensor, nn

from keymix.errors import GridNeeded, UserError
from keymix.hosts.attention_inputs import Layout, Reading
from keymix.mixers.base import Grid, Site, TokenMixer
from keymix.mixers.head_mixer import HeadMixer
from keymix.mixers.registry import build, get_mixer_class, list_mixers
from keymix.mixers.registry import mixer_options as all_options
from keymix.mixers.spec import spec_of

MixerNames = str | Sequence[str]
MixerOptions = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None

PLAN = "swapped"
"""Under this name a mixer that was swapped in holds its plan."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One mixer to put into a model."""

    path: str  # of the place, such as ``blocks.3.attn``
    mixer: str  # canonical name
    options: dict[str, Any]  # all options that it is built with


@dataclass(frozen=True, kw_only=True)
class Place:
    """One place in a model where a token mixer sits.

    Attributes:
        path: Path of the host's attention module, e.g. ``"blocks.3.attn"``; the mixer's own path
            is this with ``.mixer`` behind it.
        stage: Index of the stage the block belongs to; 0 in models of one stage.
        site: What a mixer needs to know to sit there.
        defaults: Options that the host's own attention has (biases, dropouts); a mixer takes
            those that it knows.
        forms: Options of single mixers, by canonical name, in the form that this family has of
            them (CAFormer's separable convolution is 7x7), over ``defaults``.
        needs_mask: Why the host hands a mask to the mixer, None if it never does.
        extras: What else the host's attention does, in its words (norms of queries and keys,
            rotary positions, a gate): mixers with heads do it too, those without lose it.
        domain: What the tokens there are, as in a mixer's traits.
        prefix_known: Whether the number of prefix tokens is known; if not, the site's
            number of them is 0 and says nothing.
    """

    path: str
    stage: int
    site: Site
    defaults: Mapping[str, Any] = field(default_factory=dict)
    forms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs_mask: str | None = None
    extras: tuple[str, ...] = ()
    domain: Literal["dense", "spiking"] = "dense"
    prefix_known: bool = True


class Host(ABC):
    """Adapter to one family of models.

    Attributes:
        name: What errors call the family.
        generic: Whether it knows attention by itself, not a family; it is asked last.
        remedy: What else a user can do where a grid is not known, behind a comma.
        all_attend: Whether attention sits at all of its places, whatever it is called there.
        parts: Names in the host's own attention to those of the same thing in a mixer, where they
            differ; None for what does nothing. Loading of weights asks.
    """

    name: str
    generic: ClassVar[bool] = False
    all_attend: ClassVar[bool] = False
    remedy: ClassVar[str] = ""
    parts: ClassVar[Mapping[str, str | None]] = {}

    @abstractmethod
    def serves(self, model: nn.Module) -> bool:
        """Whether this adapter knows the model."""

    def bound(self, model: nn.Module) -> Host:
        """Return the adapter for this model, where one serves models of several families."""
        return self

    @abstractmethod
    def places(self, model: nn.Module) -> list[Place]:
        """List where attention sits, in the order of the forward pass."""

    @abstractmethod
    def put(self, model: nn.Module, place: Place, mixer: TokenMixer) -> None:
        """Put a mixer where the host's attention (or an earlier mixer) sits."""

    def site_for(self, place: Place, mixer: type[TokenMixer], options: Mapping[str, Any]) -> Site:
        """Return the site of one mixer at a place, where it depends on what the mixer declares.

        Other heads are refused where the host's own pass through more.

        Args:
            place: One of :meth:`places`.
            mixer: The mixer's class.
            options: The options it is about to get.
        """
        site = place.site
        if not place.extras or not issubclass(mixer, HeadMixer):
            return site
        own = (site.num_heads, place.defaults.get("head_dim", site.dim // site.num_heads))
        heads = options.get("num_heads", own[0])
        width = options.get("head_dim") or site.dim // heads
        if (heads, width) != own:
            raise UserError(
                f"{place.path} has {' and '.join(place.extras)} for {own[0]} heads of {own[1]} "
                f"channels, and mixer {mixer.mixer_name!r} would have {heads} of {width}; leave "
                "num_heads and head_dim as the model has them"
            )
        return site

    def reading(
        self, attention: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading:
        """Return what the family's own attention makes of a call.

        Leading axes are as mixers get them: ``[B, …]``, inside windows ``[B, windows, …]``.

        Args:
            attention: What sits at a place where no mixer was put.
            args: Positional arguments of the call.
            kwargs: The others.

        Raises:
            NoAttentionMap: If what sits there forms no map.
            UserError: If it cannot be read.
        """
        raise UserError(f"{type(attention).__name__} of {self.name} cannot be read")

    def weights(self, attention: nn.Module) -> dict[str, Tensor]:
        """Return the own projections of the family's attention, by the role they have in a mixer.

        ``q.weight [h * d, C]``, ``q.bias`` and so on for k, v, ``proj``, as ``nn.Linear`` lays
        them; no entry where there is no bias. Further ones have the name that a mixer gives them.

        Raises:
            UserError: If it cannot be read.
        """
        raise UserError(f"{type(attention).__name__} of {self.name} cannot be read")

    def joined(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Join what the family's attention holds in pieces and a mixer in one.

        Args:
            tensors: Those of one attention, by their names in it.

        Returns:
            The same, names as :attr:`parts` knows them.
        """
        return dict(tensors)

    def follow_calls(self, model: nn.Module) -> None:  # noqa: B027 - most need not
        """Record, from now on, what only calls of the model show: the size of their images.

        It is what :meth:`layout` and :meth:`reading` know of a call besides its tokens. A family
        whose modules store all of it needs none.
        """

    def layout(self, model: nn.Module, place: Place) -> Layout:
        """Say where the tokens of a place lie on the image, as of the model's last call.

        Raises:
            UserError: If it is not known.
        """
        return layout_on(model, place, place.site.grid)

    def update_grids(self, model: nn.Module) -> None:
        """Update the grids of all mixers, after the model has taken another image size.

        Args:
            model: The model; places where its own attention sits are passed over.

        Raises:
            UserError: If a mixer cannot take its new grid.
        """
        mixers = find_mixers(model)
        for place in self.places(model):
            grid, windows = place.site.grid, place.site.window_grid
            mixer = mixers.get(f"{place.path}.mixer")
            if grid is not None and mixer is not None:
                mixer.set_grid(grid, window_grid=windows)


class Encoded(nn.Module):
    """Mix-in for dense models: all tokens of an encoder are read as a map by what follows it.

    ``encoder`` is a model by itself or what wraps one; attention sits in the module at
    ``encoder_path``.
    """

    encoder: nn.Module
    encoder_path: str = "encoder"


def encoder_of(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the part in which attention sits, and what its names begin with.

    A model that is not dense is all encoder, and nothing comes before its names.
    """
    if not isinstance(model, Encoded):
        return model, ""
    return model.get_submodule(model.encoder_path), f"{model.encoder_path}."


def draw_truncated(linear: nn.Linear | nn.Conv2d) -> None:
    """Draw weights as most transformers do: truncated normal, 0.02; biases are nought."""
    trunc_normal_(linear.weight, std=0.02)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


UNKNOWN = "what it computes is not known; put the class's own back (del module.forward)"


def patched(module: nn.Module) -> bool:
    """Whether the forward of this one module was replaced: its weights are not all of it."""
    return "forward" in vars(module)


def refuse_adapter(path: str, attention: nn.Module) -> None:
    """Refuse attention whose projections hold an adapter of low rank (LoRA) besides."""
    for name, module in attention.named_modules():
        if "lora" in type(module).__name__.lower() or hasattr(module, "lora_A"):
            raise UserError(
                f"{path}.{name} is {type(module).__module__}.{type(module).__qualname__}, an "
                "adapter of low rank: merge the adapter first (PEFT: model.merge_and_unload())"
            )


@cache
def _hosts() -> tuple[Host, ...]:
    package = importlib.import_module("keymix.hosts")
    found: list[Host] = []
    for module in pkgutil.iter_modules(package.__path__):
        found += getattr(importlib.import_module(f"keymix.hosts.{module.name}"), "HOSTS", ())
    return tuple(sorted(found, key=lambda host: host.generic))


def find_host(model: nn.Module) -> Host:
    """Return the adapter that knows a model.

    Raises:
        UserError: If there is none; it names the model's class, the attention in it, and the
            families that have one.
    """
    for host in _hosts():
        if host.serves(model):
            return host.bound(model)
    families = ", ".join(host.name for host in _hosts())
    raise UserError(
        f"no adapter knows {_called(type(model))}{_attention_in(model)}; mixers can be put into: "
        f"{families}"
    )


def _called(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _attention_in(model: nn.Module) -> str:
    """Say what in a model looks like attention: class, arguments, first path, how many more."""
    kinds: dict[type[nn.Module], list[str]] = {}
    for path, module in model.named_modules():
        if path and called_attention(module):
            kinds.setdefault(type(module), []).append(path)
    texts = []
    for kind, paths in kinds.items():
        takes = ", ".join(list(inspect.signature(kind.forward).parameters)[1:])
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        changed = [path for path in paths if patched(model.get_submodule(path))]
        new = f", whose forward at {changed[0]} was replaced" if changed else ""
        texts.append(f"{_called(kind)}({takes}) at {paths[0]}{more}{new}")
    return (
        f" or what attends in it, {'; '.join(texts)}"
        if texts
        else ", in which nothing is called attention"
    )


ATTENTION = ("attention", "attn", "gpsa", "mhsa", "shsa", "litemla", "parallelscalingblock")


def called_attention(module: nn.Module) -> bool:
    """Whether a module's class, or one that it is made from, is named after attention.

    Some of timm's have other names: ConViT's, EfficientViT's, and blocks of one joint projection.
    """
    names = " ".join(base.__name__.lower() for base in type(module).__mro__)
    return any(word in names for word in ATTENTION)


def attends(host: Host, there: nn.Module) -> bool:
    """Whether what sits at one of a host's places is attention."""
    return host.all_attend or any(map(called_attention, there.modules()))


def find_mixers(model: nn.Module) -> dict[str, TokenMixer]:
    """Return the mixers of a model by path, in order."""
    return {path: m for path, m in model.named_modules() if isinstance(m, TokenMixer)}


def layout_on(model: nn.Module, place: Place, grid: Grid | None) -> Layout:
    """Say where tokens are that fill one grid of patches, and the keys of what sits there."""
    if grid is None:
        raise UserError(f"{place.path} does not know the grid of its tokens on the image")
    mixer = find_mixers(model).get(f"{place.path}.mixer")
    keys = None if mixer is None else mixer.key_grid_for(grid)
    return Layout(grid=grid, key_grid=keys or grid, prefix=place.site.num_prefix_tokens)


def class_token_reads_image(model: nn.Module) -> bool:
    """Whether a class token that passes through a model's mixers reads the image.

    Where no mixer sits among prefix tokens there is nothing to read: Swin and MetaFormer have no
    class token, and CaiT's meets the patches in layers of its own. Nor is there in dense models,
    which read the patches out.
    """
    if isinstance(model, Encoded):
        return True
    among = [m for m in find_mixers(model).values() if m.site.num_prefix_tokens]
    return not among or any(m.claims.mixes_prefix for m in among)


def _spread_names(mixer: MixerNames, places: Sequence[Place]) -> list[str]:
    """Give every place its mixer's canonical name."""
    names = [*spec_of(mixer).names]
    stages = places[-1].stage + 1 if places else 0
    if len(names) == len(places):
        return names
    if stages > 1 and len(names) == stages:
        return [names[place.stage] for place in places]
    if len(names) == 1:
        return names * len(places)
    stage_text = f", or {stages}, one per stage" if stages > 1 else ""
    raise UserError(
        f"{len(names)} mixers were given; this model takes one, or {len(places)}, one per "
        f"block{stage_text}"
    )


def _spread_options(
    options: MixerOptions, mixer: MixerNames, places: Sequence[Place]
) -> list[dict[str, Any]]:
    """Give every place its options: one dict for all, one per name, or one per given mixer."""
    given = spec_of(mixer, options)
    own = [dict(pairs) for pairs in given.options]
    if len(own) == len(places):
        return own
    if len(own) == 1:
        return own * len(places)
    return [own[place.stage] for place in places]


def known_of(name: str, place: Place, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that a mixer knows of a place's, its family's form and ``shared``."""
    known = all_options(name)
    wanted = {**place.defaults, **place.forms.get(name, {}), **shared}
    return {k: v for k, v in wanted.items() if k in known}


def build_for(
    host: Host, place: Place, name: str, options: Mapping[str, Any], **factory: Any
) -> TokenMixer:
    """Build a mixer for a place of this host, with all of its options, without putting it there."""
    kind = get_mixer_class(name)
    if kind.traits.domain not in (place.domain, "any"):
        fitting = ", ".join(list_mixers(domain=place.domain))
        raise UserError(
            f"mixer {name!r} takes {kind.traits.domain} tokens and cannot sit at {place.path}, "
            f"whose tokens are {place.domain}; what can: {fitting}"
        )
    site = host.site_for(place, kind, options)
    made = build(name, site, dict(options), **factory)
    if place.needs_mask and not made.claims.maskable:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        so = f" with {given}" if kind.traits.maskable and given else ""  # it is these that do it
        raise UserError(f"mixer {name!r}{so} cannot sit at {place.path}: {place.needs_mask}")
    return made


def put_mixers(
    model: nn.Module,
    mixer: MixerNames,
    mixer_options: MixerOptions = None,
    *,
    defaults: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    host: Host | None = None,
    keep_others: bool = False,
) -> list[str]:
    """Put mixers into every place of a model that its adapter names.

    All mixers are built before the first is put, so a refusal leaves the model as it was.

    Args:
        model: A model some adapter knows.
        mixer: One name, or one per stage, or one per block.
        mixer_options: One dict for all, one per mixer name, or a list as long as ``mixer``.
        defaults: Options for those mixers that know them, over the host's own; one for all
            places, or one a place.
        host: The adapter; looked up if None.
        keep_others: Put one name into those places alone where attention sits, and keep what
            mixes tokens otherwise, such as separable convolutions; into all if there is none.

    Returns:
        The paths of the mixers.

    Raises:
        UserError: If numbers, names or options do not fit, or a mixer cannot sit at a place.
    """
    host = host or find_host(model)
    places = host.places(model)
    if keep_others and isinstance(mixer, str):
        places = [
            each for each in places if attends(host, model.get_submodule(each.path))
        ] or places
    names = _spread_names(mixer, places)
    options = _spread_options(mixer_options, mixer, places)
    parameter = next(model.parameters())
    factory = {"device": parameter.device, "dtype": parameter.dtype}
    family = [defaults or {}] * len(places) if not isinstance(defaults, Sequence) else defaults
    built = [
        build_for(host, place, name, {**known_of(name, place, shared), **own}, **factory)
        for place, name, own, shared in zip(places, names, options, family, strict=True)
    ]
    for place, made in zip(places, built, strict=True):
        host.put(model, place, made)
    return [f"{place.path}.mixer" for place in places]


def plans_in(model: nn.Module) -> list[Plan]:
    """Return what was swapped into a model, in its order."""
    found = (getattr(mixer, PLAN, None) for mixer in find_mixers(model).values())
    return [plan for plan in found if isinstance(plan, Plan)]


def install(model: nn.Module, plans: Sequence[Plan]) -> dict[str, TokenMixer]:
    """Build all mixers of a plan, then put them in; return them by the path of their place.

    If one cannot be built or cannot sit there, nothing was put, unless the host itself refused
    while putting.
    """
    host = find_host(model)
    places = {place.path: place for place in host.places(model)}
    for plan in plans:
        if plan.path not in places:
            raise UserError(f"{plan.path} is no layer of this model with attention")
        refuse_adapter(plan.path, model.get_submodule(plan.path))
    built = {plan.path: _built(host, model, places[plan.path], plan) for plan in plans}
    for path, mixer in built.items():
        host.put(model, places[path], mixer)
    return built


def _built(host: Host, model: nn.Module, place: Place, plan: Plan) -> TokenMixer:
    anchor = next(model.get_submodule(place.path).parameters(), next(model.parameters()))
    factory = {"device": anchor.device, "dtype": anchor.dtype}
    try:
        mixer = build_for(host, place, plan.mixer, plan.options, **factory)
    except GridNeeded as error:
        raise UserError(
            f"{error}; how tokens lie at {place.path} is not known: choose other layers (layers=) "
            f"or another mixer{host.remedy}"
        ) from error
    setattr(mixer, PLAN, plan)
    return mixer


def shadow(model: nn.Module) -> nn.Module:
    """Copy a model's modules and buffers, for evaluation; its parameters are the model's own.

    Running it, or putting mixers into it, leaves modes, buffers and hooks of the model alone. Hooks
    are copied, since some are of the function (pruning's): those of the model run on the copy too.
    A model that cannot be copied is refused, with the reason.
    """
    shared: dict[int, Any] = {id(p): p for p in model.parameters()}
    try:
        copied = copy.deepcopy(model, shared)
    except (RuntimeError, TypeError) as error:
        raise _uncopied(model, error) from error
    for module in copied.modules():
        module.training = False  # eval() would call train() of the user's, which may merge weights
    return copied


def _uncopied(model: nn.Module, error: Exception) -> UserError:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                where = f"{path}.{name}" if path else name
                return UserError(
                    f"{where} holds a tensor of a backward graph, which cannot be copied; "
                    "detach() it, or set it to None"
                )
    why = str(error).strip().partition("\n")[0]
    return UserError(f"{type(model).__name__} cannot be copied: {type(error).__name__}: {why}")

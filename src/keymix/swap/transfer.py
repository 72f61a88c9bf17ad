# SPDX-License-Identifier: Apache-2.0
"""What a new mixer takes over from the attention that sat in its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from keymix.errors import NoAttentionMap, UserError
from keymix.hosts.blocks import POSITIONS
from keymix.hosts.layers import Layer
from keymix.mixers.base import TokenMixer
from keymix.mixers.head_mixer import HeadMixer
from keymix.mixers.map_mixer import MapMixer
from keymix.swap.plans import PREFIX, head_width, learned_keys_of, scale_of

PER_HEAD = ("q", "k", "v", "proj")
COUNTER = "num_batches_tracked"  # of a BatchNorm, no weight and no table


@dataclass(kw_only=True)
class Fate:
    """What became of the tensors of one layer, by name."""

    copied: set[str] = field(default_factory=set)  # taken over as they were
    # set from calibration images, or to the neutral value that keeps the function
    estimated: set[str] = field(default_factory=set)
    # of the old attention, without a place in the new mixer
    dropped: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)  # what else there is to say, a sentence each


def parts_of(mixer: TokenMixer) -> dict[str, Tensor]:
    """Return what a mixer's state holds, by role, as views that writing goes through.

    One projection of several roles is cut into theirs: ``qkv.weight`` is ``q.weight``,
    ``k.weight`` and ``v.weight``.
    """
    state = dict(mixer.state_dict())
    if isinstance(mixer, HeadMixer) and mixer.joint is not None:
        for leaf in ("weight", "bias"):
            joint = state.pop(f"{mixer.joint}.{leaf}", None)
            if joint is not None:
                roles = zip(mixer.roles, joint.chunk(len(mixer.roles)), strict=True)
                state |= {f"{role}.{leaf}": part for role, part in roles}
    return state


def source_of(layer: Layer) -> dict[str, Tensor]:
    """Return what sits at a layer now, by the names that mixers have.

    Where there is no query apart from the keys, the keys' projection is the queries' too; where
    tokens are the queries, that projection is the identity.
    """
    if layer.mixer is None:
        try:
            return {k: t.detach() for k, t in layer.host.weights(layer.module).items()}
        except NoAttentionMap:  # a convolution, say: what has a mixer's names is the same thing
            return dict(layer.module.state_dict())
        except UserError as error:
            raise UserError(f"layer {layer.path}: {error}") from error
    parts = parts_of(layer.mixer)
    if isinstance(layer.mixer, MapMixer) and _of_keys_alone(layer.mixer):
        for name in list(parts):
            for stem in ("k.", "post_projection.k.", "project.k."):
                if name.startswith(stem):
                    parts[stem[:-2] + "q." + name[len(stem) :]] = parts[name]
    if _of_tokens(layer.mixer):
        parts["q.weight"] = torch.eye(layer.mixer.site.dim).to(parts["v.weight"])
    return parts


def _of_keys_alone(mixer: TokenMixer) -> bool:
    """Whether keys meet keys, without queries apart from them."""
    return isinstance(mixer, MapMixer) and "k" in mixer.roles and "q" not in mixer.roles


def _of_tokens(mixer: TokenMixer | None) -> bool:
    """Whether tokens are the queries, without a projection."""
    return isinstance(mixer, HeadMixer) and "q" in mixer.roles and "q.weight" not in parts_of(mixer)


def transfer(layer: Layer, mixer: TokenMixer) -> Fate:
    """Copy into a new mixer what has the same meaning in the layer's present attention.

    Projections are copied by role, everything else by name where the shapes agree; what the mixer
    adds starts where it changes nothing. Where it scales its logits otherwise than the layer does,
    the ratio goes into the queries (into queries and keys alike, by its root, where these are one;
    into learned keys), so that logits keep their size. The layer is not changed.
    """
    fate, source, parts = Fate(), source_of(layer), parts_of(mixer)
    met_before = {} if layer.mixer is None else _meets(layer.mixer)
    met_now = _meets(mixer)
    other_queries = _of_tokens(mixer) and not _of_tokens(layer.mixer)
    alike = _heads_fit(layer, mixer, fate)
    taken = set()
    with torch.no_grad():
        for name, target in parts.items():
            role = name.partition(".")[0]
            given = source.get(name)
            if given is None and name.endswith(".bias") and f"{name[:-4]}weight" in source:
                given = torch.zeros_like(target) if role in PER_HEAD else None
            if given is None or given.shape != target.shape:
                continue
            if role in PER_HEAD and not alike:
                continue
            if met_before.get(name) == PREFIX != met_now.get(name):
                continue  # a key that prefix queries alone met
            if other_queries and name in met_now:
                continue  # a key that projected queries met
            target.copy_(given)
            fate.copied.add(name)
            taken.add(name)
        fate.estimated |= mixer.neutralize(fate.copied)
        if isinstance(mixer, MapMixer):
            _rescale(layer, mixer, parts, fate)
    own = set(source) if layer.mixer is None else set(parts_of(layer.mixer))
    fate.dropped |= {name for name in own - taken if not name.startswith("post_projection.")}
    heads, logits = isinstance(mixer, HeadMixer), isinstance(mixer, MapMixer)
    lost = [extra for extra in layer.place.extras if not (logits if extra == POSITIONS else heads)]
    if lost:
        why = "logits to add them to" if heads else "heads"
        fate.notes.append(f"{' and '.join(lost)} of the host are lost: this mixer has no {why}")
    if _of_keys_alone(mixer) and "q.weight" in fate.dropped:
        fate.notes.append("the keys were kept; they are the queries too, and the old ones dropped")
    if other_queries and "q.weight" in fate.dropped:
        fate.notes.append(
            "q is left out: tokens are the queries (query_proj=False), and keys start at random, "
            "since those of the layer met projected queries"
        )
    return fate


def _meets(mixer: TokenMixer) -> dict[str, str]:
    """Return which queries each parameter in place of computed keys meets, be they tokens."""
    options = {**mixer.built_with, "query_proj": True}
    learned = learned_keys_of(type(mixer), mixer.site, options)
    return {name: queries for queries, names in learned.items() for name in names}


def _heads_fit(layer: Layer, mixer: TokenMixer, fate: Fate) -> bool:
    """Whether heads are as many and as wide as they were."""
    if not isinstance(mixer, HeadMixer):
        return True
    before = layer.mixer
    heads = before.num_heads if isinstance(before, HeadMixer) else layer.place.site.num_heads
    width = head_width(layer)
    if (heads, width) == (mixer.num_heads, mixer.head_dim):
        return True
    fate.notes.append(
        f"{mixer.num_heads} heads of {mixer.head_dim} in place of {heads} of {width}: projections "
        "start afresh"
    )
    return False


def _rescale(layer: Layer, mixer: MapMixer, parts: Mapping[str, Tensor], fate: Fate) -> None:
    """Let logits keep their size under another scale."""
    before = scale_of(layer)
    if mixer.temperature is not None and "temperature" not in fate.copied:
        mixer.temperature.fill_(before).log_()
        fate.copied.add("temperature")
    ratio = before / float(mixer.gain())
    factor = ratio**0.5 if _of_keys_alone(mixer) else ratio
    learned = set(_meets(mixer))
    if learned:
        bearers = learned
    elif "q" in mixer.roles:
        bearers = {"q.weight", "q.bias"}
    else:
        bearers = {"k.weight", "k.bias"}
    names = sorted(bearers & fate.copied)
    if not names or abs(ratio - 1.0) < 1e-9:
        return
    role = names[0].partition(".")[0]
    if mixer.post_projection is not None and mixer.post_projection.norms(role):
        fate.notes.append(
            f"logits are {1 / ratio:.3g} times what they were: the host norms {role}, so that no "
            "projection can take the other scale"
        )
        return
    for name in names:
        parts[name].mul_(factor)
    fate.notes.append(f"{role} is {factor:.3g} times the host's, so that logits keep their size")


def keep_around(before: nn.Module, there: nn.Module, fate: Fate) -> set[str]:
    """Add to ``fate`` what became of what the host keeps: tables of positions, norms of heads.

    ``before`` is the host's attention, or the module that hosted a mixer, ``there`` the one that
    hosts the new mixer. Returns the names of what stands around the mixer.
    """
    state, original = there.state_dict(), before.state_dict()
    now = {n: t for n, t in state.items() if not n.startswith("mixer.")}
    fate.copied |= {n for n, t in now.items() if n in original and original[n].shape == t.shape}
    # made by the host with its own weights
    fate.copied |= {n[len("mixer.") :] for n in state if n.startswith("mixer.post_projection.")}
    fate.dropped |= {
        name
        for name, _ in before.named_parameters(recurse=False)
        if name not in now and name in there._parameters
    }
    return set(now)


def stems(names: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Shorten names of one fate to their module where none of its tensors has another fate."""
    mine = sorted(name for name in names if not name.endswith(COUNTER))
    apart = {name for name in others if not name.endswith(COUNTER)}
    short = []
    for name in mine:
        stem, _, leaf = name.rpartition(".")
        whole = stem and not any(other.startswith(f"{stem}.") for other in apart)
        short.append(stem if whole and leaf else name)
    return tuple(dict.fromkeys(short))


def trains(layer: Layer, name: str) -> bool:
    """Whether what a name was copied from trains."""
    if layer.mixer is None:
        return _host_trains(layer, name)
    original = dict(layer.mixer.named_parameters())
    joint = layer.mixer.joint if isinstance(layer.mixer, HeadMixer) else None
    if name in original:
        return original[name].requires_grad
    also = f"{joint}.{name.rpartition('.')[2]}"
    return original[also].requires_grad if also in original else True


def _host_trains(layer: Layer, name: str) -> bool:
    """Whether the host's parameter trains that lies in the same memory as what was copied.

    Where the host assembles a tensor, any of its weights, or biases, stands for it.
    """
    own = dict(layer.module.named_parameters())
    given = source_of(layer).get(name)
    memory = None if given is None else given.untyped_storage().data_ptr()
    alike = [p for p in own.values() if p.untyped_storage().data_ptr() == memory]
    kind = "bias" if name.endswith("bias") else "weight"
    alike = alike or [p for n, p in own.items() if kind in n] or list(own.values())
    return not alike or any(p.requires_grad for p in alike)


def names_of(mixer: TokenMixer, name: str) -> set[str]:
    """Return what a parameter is made of, by role; nothing if the host made it as its own."""
    if name.startswith("post_projection."):
        return set()
    if isinstance(mixer, HeadMixer) and name.rpartition(".")[0] == mixer.joint:
        return {f"{role}.{name.rpartition('.')[2]}" for role in mixer.roles}
    return {name}


def freeze_as(layer: Layer, mixer: TokenMixer, fate: Fate) -> None:
    """Let what was copied train as what it was copied from, and everything new train."""
    for name, parameter in mixer.named_parameters():
        names = names_of(mixer, name)
        if names:
            new = not names <= fate.copied
            parameter.requires_grad_(new or any(trains(layer, n) for n in names))

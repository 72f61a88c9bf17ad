# SPDX-License-Identifier: Apache-2.0
"""Mixers as text: ``mhsa,ska(activation=relu),sep_conv/cska/softmax/softmax``."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from keymix.errors import UserError, unknown
from keymix.mixers.registry import get_mixer_class, mixer_options, resolve

_ONE = re.compile(r"^\s*([A-Za-z_][\w-]*)\s*(?:\((.*)\))?\s*$", re.DOTALL)
_TIMES = re.compile(r"\*([1-9]\d{0,2})\s*$")
_LONGEST = 180  # bytes of a folder's name; file systems take 255, and it gets a beginning


@dataclass(frozen=True)
class MixerSpec:
    """What a model is to be built with: one mixer, or one per stage or block.

    Attributes:
        names: Canonical names; one for the whole model, or one per stage or block.
        options: Options of each of the names, in the same order, as sorted pairs.
    """

    names: tuple[str, ...]
    options: tuple[tuple[tuple[str, Any], ...], ...]

    @property
    def label(self) -> str:
        """The canonical text, which reads back to the same mixer; ``ska*4`` is four in a row."""
        texts = [
            name + (f"({','.join(f'{k}={v}' for k, v in opts)})" if opts else "")
            for name, opts in zip(self.names, self.options, strict=True)
        ]
        runs = [(text, len([*same])) for text, same in groupby(texts)]
        return "/".join(f"{t}*{n}" if n > 2 else "/".join([t] * n) for t, n in runs)

    @property
    def slug(self) -> str:
        """The label as a name of a folder; a long one is cut and ends in its digest."""
        text = re.sub(r"[^\w+=.,-]+", "-", self.label.replace("/", "+")).strip("-.")
        if len(text.encode()) <= _LONGEST:
            return text
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{text.encode()[: _LONGEST - 13].decode(errors='ignore')}-{digest}"

    @property
    def mixes_prefix(self) -> bool:
        """Whether a class token reads the image in any block."""
        return any(get_mixer_class(name).traits.mixes_prefix for name in self.names)

    @property
    def control(self) -> bool:
        """Whether all of it is controls."""
        return all(get_mixer_class(name).traits.control for name in self.names)

    def with_options(self, **options: Any) -> MixerSpec:
        """Return a copy with options set on every mixer."""
        merged = tuple(tuple(sorted({**dict(o), **options}.items())) for o in self.options)
        return MixerSpec(self.names, merged)

    def model_kwargs(self) -> dict[str, Any]:
        """Return ``mixer`` and ``mixer_options`` as the models take them."""
        mixers = [*self.names]
        options = [dict(o) for o in self.options]
        if len(mixers) == 1:
            return {"mixer": mixers[0], "mixer_options": options[0]}
        return {"mixer": mixers, "mixer_options": options}


def spec_of(
    mixer: str | Sequence[str],
    options: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
) -> MixerSpec:
    """Read what models take as ``mixer`` and ``mixer_options``, or refuse it.

    The mixer is one name or one per stage or block, or all of it as `parse_mixer` reads it; options
    are one dict for all, one per mixer name, or a list as long as ``mixer``.
    """
    if isinstance(mixer, str) and {"(", "/", "*"} & {*mixer}:
        written = parse_mixer(mixer)
        if not isinstance(options, Mapping | None):
            raise UserError(f"mixer {mixer!r} has its options in it: leave mixer_options out")
        return written.with_options(**options) if options else written
    names = tuple(resolve(name) for name in ([mixer] if isinstance(mixer, str) else mixer))
    if not _are_options(options):
        raise UserError(
            f"mixer_options={options!r} must be a dict such as {{'attn_drop': 0.1}}, or a list of "
            "dicts, one per mixer"
        )
    if options is not None and not isinstance(options, Mapping):
        if len(options) != len(names):
            raise UserError(f"{len(options)} mixer_options for {len(names)} mixers")
        own = [dict(each) for each in options]
    elif options and all(isinstance(value, Mapping) for value in options.values()):
        by_name = {resolve(name): dict(value) for name, value in options.items()}
        for name in by_name:
            if name not in names:
                raise unknown("mixer of this model in mixer_options:", name, names)
        own = [by_name.get(name, {}) for name in names]
    else:
        own = [dict(options or {}) for _ in names]
    return MixerSpec(names, tuple(tuple(sorted(each.items())) for each in own))


def _are_options(given: object) -> bool:
    """Whether it is a dict, or a list of dicts, or None."""
    every = given if isinstance(given, tuple | list) else [given]
    return all(each is None or isinstance(each, Mapping) for each in every)


def _split(text: str, mark: str) -> list[str]:
    """Split at a mark outside parentheses and quotes."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if depth < 0:
            raise UserError(f"mixers {text!r}: a closing bracket without an opening one")
        if char == mark and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise UserError(f"mixers {text!r}: a bracket is not closed")
    return [*parts, text[start:]]


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _comma_hint(before: Mapping[str, Any], rest: str) -> str:
    """Say how a value with a comma is written, where what follows one is no option's name."""
    if not before or rest.isidentifier():
        return ""
    name, value = list(before.items())[-1]
    sides = f"{name}={value}x{rest} or " if name.endswith("grid") else ""
    return f"; a comma ends a value: write {sides}{name}=({value},{rest})"


def _read_one(text: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    found = _ONE.match(text)
    if found is None:
        raise UserError(f"mixer {text.strip()!r} is not of the form name or name(option=value)")
    name = resolve(found[1])
    known = mixer_options(name)
    options: dict[str, Any] = {}
    for pair in _split(found[2], ",") if found[2] and found[2].strip() else []:
        key, equals, value = pair.partition("=")
        key = key.strip()
        if not equals:
            hint = _comma_hint(options, key)
            raise UserError(f"mixer {text.strip()!r}: option {key!r} needs a value, {key}=…{hint}")
        if key != "num_heads" and key not in known:
            raise unknown(f"option of mixer {name!r}:", key, [*known, "num_heads"])
        options[key] = _value(value.strip())
    return name, tuple(sorted(options.items()))


def parse_mixer(text: str) -> MixerSpec:
    """Read one mixer, or one per stage or block with slashes between them, ``ska*4`` for four.

    Raises:
        UserError: If a name or option is unknown, or a bracket is open; it gives the nearest names.
    """
    read: list[tuple[str, tuple[tuple[str, Any], ...]]] = []
    for part in _split(text, "/"):
        times = _TIMES.search(part)
        read += [_read_one(part[: times.start()] if times else part)] * (
            int(times[1]) if times else 1
        )
    return MixerSpec(tuple(n for n, _ in read), tuple(o for _, o in read))


def parse_mixers(text: str) -> list[MixerSpec]:
    """Read a comma-separated list of mixers.

    Example:
        >>> [spec.label for spec in parse_mixers("mhsa,ska(activation=relu)")]
        ['softmax', 'static_key(activation=relu)']

    Raises:
        UserError: If the list is empty, an entry is no mixer, or one stands there twice.
    """
    parts = [part for part in _split(text, ",") if part.strip()]
    if not parts:
        raise UserError("no mixer given; `keymix list mixers` shows them")
    specs = [parse_mixer(part) for part in parts]
    for i, spec in enumerate(specs):
        if spec in specs[:i]:
            raise UserError(f"mixer {spec.label!r} stands twice in {text!r}")
    return specs

# SPDX-License-Identifier: Apache-2.0
"""What all pages share: their templates' environment, their script and its hash.

A page asks nothing of the network. It is complete without its script, and its content policy lets
that one script run, known by its hash, and nothing else. Every text of a record is escaped.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from itertools import zip_longest
from typing import Any

import jinja2
from markupsafe import Markup, escape

from keymix.records import to_json
from keymix.report import formats

Script = str | tuple[str, str]
"""A file of ``templates/script``, or a package and a file of its ``script``."""


def render_page(
    template: str,
    view: Mapping[str, Any],
    *,
    payload: object = None,
    scripts: Sequence[Script] = ("core", "tables"),
    package: str = "",
) -> str:
    """Render a template that extends ``page.html.j2`` as an HTML document.

    It reads `view`, the ``r`` of which says by which command, when and on what it was made, unless
    a ``frame`` does. Its script, the files of which are joined in order, reads `payload` as
    JSON: the colours of the view's ``looks``, if none is given. The ``templates`` of a `package`
    can be included as ``own/…``.
    """
    code = script(scripts)
    record = view["r"]
    shown = {"looks": {}, "frame": record, "baseline": getattr(record, "baseline", None), **view}
    if payload is None:
        colours = ((label, look.colour) for label, look in shown["looks"].items())
        payload = {"mixers": [{"label": label, "colour": colour} for label, colour in colours]}
    shared = {
        "script": Markup(code),
        "digest": digest(code),
        "payload": as_element_text(payload),
    }
    return environment(package).get_template(template).render({**shown, **shared})


def as_element_text(content: object) -> Markup:
    """Write JSON that is safe inside a script element: ``<``, ``>`` and ``&`` as escapes."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Markup(text)


@functools.cache  # a template is compiled once per process, which takes longer than a page
def environment(package: str = "") -> jinja2.Environment:
    """Make the environment of the templates, with the filters that write quantities."""
    loader: jinja2.BaseLoader = jinja2.PackageLoader("keymix.report", "templates")
    if package:
        own = jinja2.PrefixLoader({"own": jinja2.PackageLoader(package, "templates")})
        loader = jinja2.ChoiceLoader([own, loader])
    env = jinja2.Environment(
        loader=loader,
        autoescape=lambda name: not (name or "").endswith(".txt.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: dict[str, Callable[..., Any]] = {
        "percent": formats.percent,
        "count": formats.count,
        "ms": formats.three_digits,
        "energy": formats.energy,
        "duration": formats.duration,
        "breakable": breakable,
        "with_code": with_code,
        "by_reason": by_reason,
        "capitalised": lambda text: text[:1].upper() + text[1:],
        "nice_json": lambda value: json.dumps(to_json(value), indent=2, ensure_ascii=False),
    }
    env.filters.update(filters)
    return env


def paragraphs(macro: Callable[..., str], *values: object) -> list[str]:
    """Render a macro of a template as plain text, and part it where a line is empty."""
    parts = re.split(r"\n\s*\n", macro(*values).strip())
    return [text for part in parts if (text := re.sub(r"[ \n]+", " ", part).strip())]


def script(names: Sequence[Script]) -> str:
    """Return a page's script: its files, joined into one function that shares no names."""
    shared = files("keymix.report") / "templates" / "script"
    places = [
        shared / f"{name}.js"
        if isinstance(name, str)
        else files(name[0]) / "script" / f"{name[1]}.js"
        for name in names
    ]
    parts = [place.read_text(encoding="utf-8") for place in places]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def digest(text: str) -> str:
    """Return a script's hash as a content policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def by_reason(missing: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Give each reason once, with the labels that it holds for."""
    found: dict[str, list[str]] = {}
    for label, reason in missing.items():
        found.setdefault(reason, []).append(label)
    return list(found.items())


def with_code(text: str) -> Markup:
    """Set what stands between backticks as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one is left over: it is no quotation
        return escape(text)
    quoted = [Markup("<code>{}</code>").format(each) for each in parts[1::2]]
    plain = [escape(each) for each in parts[::2]]
    return Markup("").join(
        part for pair in zip_longest(plain, quoted, fillvalue="") for part in pair
    )


def breakable(label: str) -> Markup:
    """Let a long label break behind brackets, commas, slashes, equals signs and underscores.

    A bracket that opens a remark in a sentence stays with its first word, a number stays whole.
    """
    parts = re.split(r"(?<=\S[(,/=_])(?=\S)(?<!\d,(?=\d{3}))", label)
    return Markup("<wbr>").join(parts)

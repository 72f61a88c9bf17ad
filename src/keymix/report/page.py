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
from typing import Any

import jinja2
from markupsafe import Markup

from keymix.report import formats


def render_page(
    template: str, view: Mapping[str, Any], *, payload: Markup, scripts: Sequence[str]
) -> str:
    """Render a template that extends ``page.html.j2``.

    Args:
        template: Its name in the folder of templates.
        view: What it reads.
        payload: The JSON that its script reads.
        scripts: Files of ``templates/script``, in the order they are joined.

    Returns:
        The HTML document.
    """
    code = script(scripts)
    shared = {"script": Markup(code), "digest": digest(code), "payload": payload}
    return environment().get_template(template).render({**view, **shared})


@functools.cache  # a template is compiled once a process, which takes longer than a page
def environment() -> jinja2.Environment:
    """Make the environment of the templates, with the filters that write quantities."""
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("keymix.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: dict[str, Callable[..., Any]] = {
        "percent": formats.percent,
        "points": formats.points,
        "distance": formats.distance,
        "count": formats.count,
        "ms": formats.milliseconds,
        "rate": formats.rate,
        "mib": formats.mib,
        "energy": formats.energy,
        "duration": formats.duration,
        "breakable": _breakable,
        "by_reason": _by_reason,
        "no_spread": formats.no_spread,
        "nice_json": lambda value: json.dumps(value, indent=2, ensure_ascii=False),
    }
    env.filters.update(filters)
    env.globals["span"] = formats.span
    return env


def script(names: Sequence[str]) -> str:
    """Return a page's script: its files, joined into one function that shares no names."""
    folder = files("keymix.report") / "templates" / "script"
    parts = [(folder / f"{name}.js").read_text(encoding="utf-8") for name in names]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def digest(text: str) -> str:
    """Return a script's hash as a content policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _by_reason(missing: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Tell each reason once, with the labels it holds for."""
    told: dict[str, list[str]] = {}
    for label, reason in missing.items():
        told.setdefault(reason, []).append(label)
    return list(told.items())


def _breakable(label: str) -> Markup:
    """Let a long label break behind brackets, commas, slashes, equals signs and underscores.

    A bracket that opens a remark in a sentence stays with its first word.
    """
    parts = re.split(r"(?<=\S[(,/=_])(?=\S)", label)
    return Markup("<wbr>").join(parts)

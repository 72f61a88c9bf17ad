# SPDX-License-Identifier: Apache-2.0
"""A hook of the documentation's build: formulas become MathML, docstring roles become links.

Browsers draw MathML themselves, so the pages need no script and no network.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.+?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.+?)\\\]\s*</div>', re.DOTALL)
_DIRECTIVE = re.compile(
    r"<p>\.\. math::(?:\s+(\S.*?)</p>|</p>\s*<div class=\"highlight\"><pre>(?:<span></span>)?"
    r"<code>(.+?)</code></pre></div>)",
    re.DOTALL,
)
_MATH_ROLE = re.compile(r":math:<code>(.+?)</code>", re.DOTALL)
_NAME_ROLE = re.compile(r":(?:class|func|meth|mod|attr):<code>(.+?)</code>")


def _mathml(display: str) -> Any:
    def replace(found: re.Match[str]) -> str:
        formula = next(filter(None, found.groups()))
        return str(convert(html.unescape(formula).strip(), display=display))

    return replace


def _link(found: re.Match[str]) -> str:
    name = found[1]
    last = name.rsplit(".", 1)[-1]
    return f'<autoref optional identifier="{name}"><code>{last}</code></autoref>'


def on_page_content(html_text: str, /, **_: Any) -> str:
    """Rewrite a page's HTML."""
    text = _BLOCK.sub(_mathml("block"), html_text)
    text = _DIRECTIVE.sub(_mathml("block"), text)
    text = _INLINE.sub(_mathml("inline"), text)
    text = _MATH_ROLE.sub(_mathml("inline"), text)
    return _NAME_ROLE.sub(_link, text)

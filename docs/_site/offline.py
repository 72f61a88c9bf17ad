# SPDX-License-Identifier: Apache-2.0
"""A hook of the documentation's build: reading a page asks no other host.

The theme's script counts a repository's stars at its host, wherever a page has the component
``source``. Without the mark the link stays and the script finds nothing to ask for.
"""

from __future__ import annotations

from typing import Any

_ASKS = ' data-md-component="source"'


def on_post_page(output: str, /, **_: Any) -> str:
    """Take the mark out of a finished page."""
    return output.replace(_ASKS, "")


def on_post_template(output: str, /, **_: Any) -> str:
    """Do the same to what is no page: the answer to a wrong address."""
    return on_post_page(output)

# SPDX-License-Identifier: Apache-2.0
"""An extension of the API pages' reader: the section ``Example:`` holds code, as ``Examples:``."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(\s*)Example:$", re.MULTILINE)


class OneExample(griffe.Extension):
    """Reads our singular heading as griffe's plural one."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the heading in an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _SECTION.sub(r"\1Examples:", obj.docstring.value)

# SPDX-License-Identifier: Apache-2.0
"""Names that become names of files and folders: a name is a name, and no path."""

from __future__ import annotations

import os
import re

_MOST = 200  # bytes; file systems take 255, and endings are added


def is_name(text: object) -> bool:
    """Whether a text names a file or folder on any system, and shows as it is.

    It is one part of a path without control characters, begins with no dot, is not blank at an end,
    and is short enough.

    Args:
        text: What should be a name.
    """
    return (
        is_part(text)
        and isinstance(text, str)
        and text.isprintable()
        and text == text.strip()
        and not text.startswith(".")
        and not any(mark in text for mark in "/\\")
        and len(text.encode("utf-8", errors="replace")) <= _MOST
    )


def as_name(text: str) -> str:
    """Make a name of a text that is none.

    Args:
        text: Such as ``"experiments/softmax"``, which becomes ``"experiments_softmax"``.
    """
    return re.sub(r"[^\w.-]+", "_", text).strip("._")[:100] or "run"


def is_part(text: object) -> bool:
    """Whether a text is one part of a path on this system, which stays in the folder above it.

    Args:
        text: What should name a file or folder.
    """
    marks = [mark for mark in (os.sep, os.altsep, "\0") if mark]
    return (
        isinstance(text, str)
        and text not in ("", os.curdir, os.pardir)
        and not any(mark in text for mark in marks)
    )

# SPDX-License-Identifier: Apache-2.0
"""What keymix raises when its user made a mistake: one sentence that names culprit and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. The command line prints the message without a traceback and exits with 2."""


class NoAttentionMap(UserError):
    """A mixer or layer was asked for an attention map and has none; the message says why."""


def unknown(kind: str, name: str, choices: Iterable[str]) -> UserError:
    """Make the error for an unknown name: it lists the nearest known names, or all of a few.

    Args:
        kind: What the name should have been, e.g. ``"mixer"``.
        name: What was given.
        choices: The names that exist.

    Returns:
        The error, for the caller to raise.
    """
    known = sorted(set(choices))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        remedy = "Did you mean " + " or ".join(repr(n) for n in near) + "?"
    elif not known:
        remedy = "There are none."
    elif len(known) <= 20:
        remedy = "Choose from " + ", ".join(known) + "."
    else:
        remedy = f"There are {len(known)}; `keymix list` shows them."
    return UserError(f"unknown {kind} {name!r}. {remedy}")

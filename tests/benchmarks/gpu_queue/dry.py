# SPDX-License-Identifier: Apache-2.0
"""Where the steps of a dry run are measured in tests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from gpu_queue.job import Context


def context(folder: Path, **more: Any) -> Context:
    """Make a step's context, with ``folder`` for its work and for what it keeps.

    ``more`` replaces fields; a folder that a run was stopped in is taken again.
    """
    given = {
        "device": "cpu",
        "tiny": True,
        "data": None,
        "work": folder,
        "keep": folder,
        "until": time.monotonic() + 600,
        **more,
    }
    for name in ("work", "keep"):
        given[name].mkdir(parents=True, exist_ok=True)
    return Context(**given)


def apart(folder: Path, **more: Any) -> Context:
    """Make a context whose two folders are ``work`` and ``keep`` in ``folder``."""
    return context(folder, work=folder / "work", keep=folder / "keep", **more)

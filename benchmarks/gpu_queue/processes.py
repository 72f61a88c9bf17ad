# SPDX-License-Identifier: Apache-2.0
"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import ctypes
import signal
import sys

_PARENT_ENDED = 1  # Linux: PR_SET_PDEATHSIG


def end_with_parent() -> None:
    """Let this process be killed when its parent ends, however that one ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_ENDED, signal.SIGKILL)

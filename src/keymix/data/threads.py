# SPDX-License-Identifier: Apache-2.0
"""Threads that nobody has to wait for: a signal ends the wait for a read that hangs."""

from __future__ import annotations

from multiprocessing.pool import ThreadPool


def threads(count: int) -> ThreadPool:
    """Make threads for a ``with`` block; ``imap`` gives results in the order of its items.

    Unlike those of a ``ThreadPoolExecutor``, neither the end of the block nor that of the process
    waits for them, whatever they wait for.
    """
    return ThreadPool(count)

# SPDX-License-Identifier: Apache-2.0
"""What Lightning is kept from: hints that are no news here, and taking Ctrl-C for itself.

Torch's switch for deterministic operations is ours too: Lightning turns it on and never off.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Lightning's hints to itself; warnings of others pass."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            warnings.filterwarnings("ignore", category=UserWarning, message=r".*`?lr_scheduler")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def ctrl_c_given_back() -> Iterator[None]:
    """Give Ctrl-C back its meaning: Lightning turns it into an exit and then ignores it."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if main else None
    try:
        yield
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise stop.__context__ from None
        raise
    finally:
        if main:
            signal.signal(signal.SIGINT, handler)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Refuse operations without a deterministic form within the block, if wanted.

    After it torch is as it was: the next run of this process may not want it.
    """
    if not wanted:
        yield
        return
    # cuBLAS reads it at its first use and then never again, so it stays
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark

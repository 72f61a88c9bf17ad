# SPDX-License-Identifier: Apache-2.0
"""What Lightning is kept from: hints that are no news here, and taking Ctrl-C for itself."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


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

# SPDX-License-Identifier: Apache-2.0
"""A wait for data while gradients are accumulated continues for a while after a signal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from keymix.errors import Interrupted
from keymix.train import loop
from keymix.train.signals import Interrupts, interruptible

PATIENCE = 30  # seconds until a wait counts as endless


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    with interruptible(lambda: "nothing was done") as interrupts, interrupts.deferred():
        yield interrupts


def wait(interrupts: Interrupts, *, grace: float, signalled: bool = True) -> None:
    """Wait for what never comes, and send a signal meanwhile."""
    with interrupts.waiting(grace=grace):
        if signalled:
            os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(PATIENCE)
    raise AssertionError("the wait went on")


def test_a_wait_with_grace_outlasts_a_signal(interrupts: Interrupts) -> None:
    with interrupts.waiting(grace=PATIENCE):
        os.kill(os.getpid(), signal.SIGTERM)
    assert interrupts.signum == signal.SIGTERM
    with pytest.raises(Interrupted):
        interrupts.look()


@pytest.mark.parametrize("before", [False, True])
def test_a_wait_ends_when_its_grace_is_over(interrupts: Interrupts, before: bool) -> None:
    if before:  # the signal came in the step
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Interrupted) as stopped:
        wait(interrupts, grace=0.05, signalled=not before)
    assert stopped.value is interrupts.ended_wait


def test_a_wait_without_grace_ends_at_once(interrupts: Interrupts) -> None:
    with pytest.raises(Interrupted):
        wait(interrupts, grace=0.0)


def test_a_run_that_accumulates_has_grace_between_its_updates_alone() -> None:
    seen = []

    class Recorder(Interrupts):
        def waiting(self, *, grace: float = 0.0) -> Any:
            seen.append(grace)
            return super().waiting(grace=grace)

    class Batches:
        def batches(self, start: int) -> Iterator[Any]:
            return iter([object()] * (5 - start))

    loader: Any = Batches()
    recorder = Recorder(lambda: "")
    assert len([*loop.served(loader, recorder, start=2, accumulate=2)]) == 3
    assert seen == [0, loop.GRACE, 0, loop.GRACE]

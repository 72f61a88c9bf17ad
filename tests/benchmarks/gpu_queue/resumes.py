# SPDX-License-Identifier: Apache-2.0
"""Measure kills and resumes of the dry run, with and without faults; write the results as JSON.

For a process of its own, as the queue has one for each step: PyTorch computes no gradients in a
process that was forked from one whose autograd had threads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def skip_a_batch() -> Iterator[None]:
    """Let a run that resumes within an epoch leave a batch out."""
    from keymix.train import loop

    def late(*args: Any, start: int = 0, **more: Any) -> Any:
        return served(*args, start=start + bool(start), **more)

    served = loop.served
    with mock.patch.object(loop, "served", late):
        yield


@contextmanager
def disturb_gradients() -> Iterator[None]:
    """Let no two runs have the same gradients."""
    import torch

    from keymix.train.nonfinite import Losses

    def disturb(losses: Losses) -> None:
        chance = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
        for p in losses._model.parameters():
            if p.grad is not None:
                p.grad.mul_(1 + 1e-6 * torch.randn(p.shape, generator=chance))

    with mock.patch.object(Losses, "before_update", disturb):
        yield


FAULTS: dict[str, Callable[[], Any]] = {"skips": skip_a_batch, "disturbed": disturb_gradients}
CASES = {  # step of the dry run, and the faults that are planted
    "everything": ("32,deterministic,everything", ()),
    "skips": ("32", ("skips",)),
    "disturbed": ("32", ("disturbed",)),
    "disturbed, skips": ("32", ("disturbed", "skips")),
}


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Measure a step of the dry run."""
    from dry import context

    from gpu_queue.jobs.kill_resume import JOB

    step = next(step for step in JOB.steps(True) if step.name == name)
    return step.measure(context(folder))


def main(folder: Path, out: Path) -> None:
    """Measure all cases; write the result of each, how often CUDA was asked for, files left."""
    import torch

    torch.set_num_threads(1)  # forks cannot use others
    asked: list[int] = []  # by this process: children have lists of their own

    def ask() -> bool:
        asked.append(os.getpid())
        return False

    found = {}
    with mock.patch.object(torch.cuda, "is_available", ask):
        for case, (name, faults) in CASES.items():
            with ExitStack() as planted:
                for fault in faults:
                    planted.enter_context(FAULTS[fault]())
                result = measured(name, folder)
            left = sorted(path.name for path in folder.iterdir())
            found[case] = {"result": result, "asked": len(asked), "left": left}
    out.write_text(json.dumps(found))

# SPDX-License-Identifier: Apache-2.0
"""The jobs in their order. Each is one file with a ``JOB``."""

from __future__ import annotations

import importlib

from gpu_queue.job import Job

ORDER = (
    "test_suite",
    "mixers",
    "throughput",
    "epoch_profile",
    "cifar10",
    "spiking",
    "depth",
    "kill_resume",
    "attention_kernels",
    "qk_mask",
    "few_keys",
)


def jobs() -> list[Job]:
    """Load them; this imports neither torch nor keymix."""
    loaded = [importlib.import_module(f"gpu_queue.jobs.{name}").JOB for name in ORDER]
    return sorted(loaded, key=lambda job: job.number)

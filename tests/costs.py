# SPDX-License-Identifier: Apache-2.0
"""What models cost: counted on ``meta`` for published figures, made up for comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from keymix.analysis import measure
from keymix.analysis.counting import Count, _Trial, count, default_input_size, run_counting
from keymix.analysis.memory import Peak
from keymix.models import create_model
from keymix.models.match import trainable

_COUNTED: dict[str, Cost] = {}


@dataclass(frozen=True)
class Cost:
    """Trainable parameters and multiply-adds, as ``keymix.count`` finds them."""

    params: int
    macs: int

    @property
    def flops(self) -> int:
        return 2 * self.macs


def on_meta(name: str, **options: Any) -> nn.Module:
    """The model without memory or numbers."""
    with torch.device("meta"):
        return create_model(name, **options)


def params(name: str, **options: Any) -> int:
    """Trainable parameters of a model."""
    return trainable(on_meta(name, **options))


def cost(name: str, size: Sequence[int] | None = None, **options: Any) -> Cost:
    """The cost of a model on an input of this size, by default its own."""
    key = repr((name, size, sorted(options.items())))
    if key not in _COUNTED:
        _COUNTED[key] = cost_of(on_meta(name, **options), size)
    return _COUNTED[key]


def cost_of(model: nn.Module, size: Sequence[int] | None = None) -> Cost:
    """The cost of a model on ``meta``, which is of no use afterwards."""
    shape = default_input_size(model) if size is None else size
    with torch.device("meta"):
        macs = run_counting(model.eval(), torch.zeros(1, *shape))
    return Cost(trainable(model), sum(macs.by_path.values()))


_OF_MODELS: dict[str, Count] = {}


@contextmanager
def cheap_costs() -> Iterator[None]:
    """Count a kind of model once, without its activations; make up its times and peak memory."""

    def counted(model: nn.Module, shape: Any, *, task: str) -> Count:
        key = f"{task} {shape} {model}"
        if key not in _OF_MODELS:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_Trial, "saved_bytes_per_image", lambda trial: {})
                _OF_MODELS[key] = count(model, shape, task=task)
        return _OF_MODELS[key]

    def timed(models: Any, shape: Any, *, batch_size: int, repeats: int, **more: Any) -> Any:
        made = measure.Cost(
            latency_ms=2.0,
            latency_q1_ms=1.5,
            latency_q3_ms=2.5,
            images_per_s=800.0,
            images_per_s_q1=700.0,
            images_per_s_q3=900.0,
            batch_size=batch_size,
            input_size=tuple(shape),
            repeats=repeats,
            threads=1,
            device="cpu",
            dtype="float32",
        )
        return dict.fromkeys(models, made)

    def trained(models: Any, *args: Any, **more: Any) -> dict[str, tuple[float, ...]]:
        return dict.fromkeys(models, (8.0, 9.0, 10.0))

    def known(builds: Any, *args: Any, **more: Any) -> dict[str, Peak]:
        peak = Peak(inference_mib=1.0, training_mib=2.0, note="not measured")
        return dict.fromkeys(builds, peak)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keymix.compare.costs.count", counted)
        patch.setattr("keymix.compare.costs.measure_interleaved", timed)
        patch.setattr("keymix.compare.costs.training_quartiles_ms", trained)
        patch.setattr("keymix.compare.costs.peak_memory", known)
        yield


@contextmanager
def no_trials() -> Iterator[None]:
    """Time no steps for a plan."""

    def none(*_: Any, **__: Any) -> None:
        raise RuntimeError("nothing is timed here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keymix.compare.budget.timed", none)
        yield

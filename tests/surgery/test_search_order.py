# SPDX-License-Identifier: Apache-2.0
"""In which order a search takes layers, where some cost nothing by the budget's measure."""

from __future__ import annotations

from typing import Any

from keymix.surgery.search_record import Attention, Search, Step, Trial


def test_layers_that_cost_nothing_come_last_whatever_they_bring() -> None:
    losses, shares = (1.5, 0.9, 1.125, 1.0), (0.75, 0.0, 0.25, 0.0)
    no_times: Any = dict.fromkeys(("latency_ms", "latency_q1_ms", "latency_q3_ms"))
    measured: Any = dict.fromkeys(Step.__dataclass_fields__, 1.0)
    told = Search(
        mixer="static_key",
        cost="params",
        estimate="least_squares",
        budget=0.5,
        images=10,
        attention=tuple(
            Attention(path=str(i), params=0, macs=0, share=share, **no_times)
            for i, share in enumerate(shares)
        ),
        candidates=(0, 1, 2, 3),
        trials=tuple(Trial(layer=i, loss=loss, top1=0.5) for i, loss in enumerate(losses)),
        steps=(Step(**{**measured, "layers": ()}),),
    )
    # rises of the loss for a unit of cost are 0.67 and 0.5; of those for nothing, -0.1 and 0
    assert told.order == (2, 0, 1, 3)

# SPDX-License-Identifier: Apache-2.0
"""A study of spikes, made up: one QKFormer in two stages, one network without names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from keymix.analysis.energy import ENERGIES
from keymix.analysis.spikes_record import Firing, InputValues, Operation, Raster
from keymix.analysis.study_record import UNNAMED, StudyRecord
from keymix.report.pictures import image_uri
from keymix.studies.spikes.result import Spikes, SpikeStudies

EVIL = "<script>alert('x')</script>&\"'"

ROLES = ("Q", "K", "A_t", "X'", "X''", "MLP layer 1", "MLP layer 2")
SHARES = {"binary": (0.75, 0.25), "counts": (0.5, 0.2, 0.1, 0.1, 0.05, 0.05), "real": None}


def firing(role: str | None, stage: int | None, rate: float, **changes: Any) -> Firing:
    return Firing(
        **{
            "path": f"stages.{stage}.{role}" if role else "stem.sn",
            "inward": role == "X'",
            "role": role,
            "mixer": "qk_token" if role in ROLES[:5] else None,
            "stage": stage,
            "block": stage,
            "rate": rate,
            "by_step": (rate / 2, 3 * rate / 2),
            "neurons": 100,
            "silent": 0.25,
            "largest": 1.0,
            **changes,
        }
    )


def operation(path: str, what: Any, kind: Any, **changes: float) -> Operation:
    real = kind == "real"
    return replace(
        Operation(
            path=path,
            what=what,
            input=kind,
            values=InputValues(kind=kind, mean=0.25, nonzero=0.25, shares=SHARES[kind]),
            dense=4e6,
            ann=2e6,
            macs=2e5 if real else 0.0,
            acs=0.0 if real else 1e6,
            acs_low=0.0 if real else 5e5 if kind == "counts" else 1e6,
        ),
        **changes,
    )


def bits(*rows: str) -> torch.Tensor:
    return torch.tensor([[bit == "1" for bit in row] for row in rows])


def raster(**changes: Any) -> Raster:
    """Six tokens on two rows, two channels, two steps."""
    made = Raster(
        path="stages.0.blocks.0.attn.mixer",
        stage=1,
        block=1,
        head=0,
        heads=2,
        step=1,
        start=1,
        grid=(2, 3),
        attention=bits("000000", "011001"),
        keys=bits("1101", "0111"),
        masked=bits("1100", "0100"),
    )
    return replace(made, **changes)


OPERATIONS = (
    operation("stem", "conv", "real"),
    operation("stages.0.patch_embed.convs.0.conv", "conv", "binary"),
    operation("stages.0.blocks.0.mlp.fc1", "linear", "counts"),
    operation("stages.0.blocks.0.attn.mixer", "sum", "binary", dense=0.0, ann=0.0),
)


def study(
    label: str, *, random: bool = False, drawn: tuple[Raster, ...] = (), **more: Any
) -> Spikes:
    """One model's study: 3.62 µJ, between 3.17 and 5.02, and 27.6 µJ without spikes."""
    rates = [firing(r, s, 0.01 * s * (i + 1)) for s in (1, 2) for i, r in enumerate(ROLES)]
    made = Spikes(
        **{
            "firings": (firing(None, None, 0.5), *rates),
            "operations": OPERATIONS,
            "time_steps": 2,
            "images": 20,
            "batch_norm": "folded",
            "cost": ENERGIES["fp32"],
            "repeated": (),
            "varies": True,
            **more,
        }
    )
    weights, origin = f"last epoch of runs/{label}", "test images of digits"
    made.of = replace(UNNAMED, label=label, random=random, weights=weights, origin=origin)
    if drawn:
        made.rasters, made.raster_image = drawn, "7.png"
        made.photo = image_uri(np.zeros((3, 2, 2), dtype=np.uint8))
    return made


def silent(label: str, **more: Any) -> Spikes:
    """Return a study of a network that hardly fires."""
    return study(label, firings=(firing(None, None, 0.5, silent=0.95),), **more)


def result(*studies: Spikes) -> SpikeStudies:
    made = SpikeStudies(studies)
    machine = {"keymix": "0.1", "machine": EVIL}
    made.made_by = StudyRecord(
        command=f"keymix analyze spikes qk '{EVIL}'", created="2026-01-01", environment=machine
    )
    return made


def spikes_record() -> SpikeStudies:
    """Two models, one of them with a hostile name, without blocks and rasters, and random."""
    return result(study("qk", drawn=(raster(),)), silent(EVIL, random=True))

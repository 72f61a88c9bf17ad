# SPDX-License-Identifier: Apache-2.0
"""A record of a study of spikes, made up: one QKFormer in two stages, one network without names."""

from __future__ import annotations

from typing import Any

import numpy as np

from keymix.analysis.spikes_record import RasterReading, SpikesStudy
from keymix.analysis.study_record import StudyRecord
from keymix.records import from_json
from keymix.report.pictures import image_uri
from keymix.studies.spikes.result import SpikeStudies

EVIL = "<script>alert('x')</script>&\"'"

ROLES = ("Q", "K", "A_t", "X'", "X''", "MLP layer 1", "MLP layer 2")
PAPER = {role: [0.1 + i / 100, 0.2 + i / 100] for i, role in enumerate(ROLES)}


def _firing(role: str | None, stage: int | None, block: int | None, rate: float) -> dict[str, Any]:
    return {
        "path": f"stages.{stage}.{role}" if role else "stem.sn",
        "inward": role == "X'",
        "role": role,
        "mixer": "qk_token" if role in ROLES[:5] else None,
        "stage": stage,
        "block": block,
        "rate": rate,
        "by_step": [rate / 2, 3 * rate / 2],
        "neurons": 100,
        "silent": 0.25,
        "largest": 1.0,
    }


def _operation(path: str, what: str, kind: str, **changes: Any) -> dict[str, Any]:
    shares = {"binary": [0.75, 0.25], "counts": [0.5, 0.2, 0.1, 0.1, 0.05, 0.05], "real": None}
    return {
        "path": path,
        "what": what,
        "input": kind,
        "values": {"kind": kind, "mean": 0.25, "nonzero": 0.25, "shares": shares[kind]},
        "dense": 4e6,
        "ann": 2e6,
        "macs": 4e6 if kind == "real" else 0.0,
        "acs": 0.0 if kind == "real" else 1e6,
        "acs_low": 0.0 if kind == "real" else 5e5,
        "energy": {"low": 4e5, "middle": 9e5, "high": 2.3e6 if kind == "counts" else 9e5},
        **changes,
    }


def raster() -> dict[str, Any]:
    """Six tokens on two rows, two channels, two steps."""
    return {
        "path": "stages.0.blocks.0.attn.mixer",
        "stage": 1,
        "block": 1,
        "head": 0,
        "heads": 2,
        "step": 1,
        "start": 1,
        "grid": [2, 3],
        "attention": ["000000", "011001"],
        "keys": ["1101", "0111"],
        "masked": ["1100", "0100"],
    }


def study(label: str, **changes: Any) -> dict[str, Any]:
    """What one model's study leaves."""
    firings = [_firing(None, None, None, 0.5)]
    firings += [_firing(r, s, s, 0.01 * s * (i + 1)) for s in (1, 2) for i, r in enumerate(ROLES)]
    return {
        "label": label,
        "name": f"runs/{label}",
        "weights": f"last epoch of runs/{label}",
        "random": False,
        "origin": "test images of digits",
        "left_out": {},
        "images": 12,
        "time_steps": 2,
        "batch_norm": "folded",
        "cost": {"name": "fp32", "mac": 4.6, "ac": 0.9, "numbers": "32-bit", "source": "Horowitz"},
        "rate": 0.125,
        "varies": True,
        "silent": 0.25,
        "sops": 2e6,
        "macs": 4e6,
        "energy": {"low": 1.7e6, "middle": 2.7e6, "high": 4.1e6},
        "ann": {"macs": 6e6, "energy": 2.76e7, "ratio": 10.22},
        "notes": [f"Note on {label}."],
        "once": ["stem"],
        "repeated": [],
        "saved_once": 0.0,
        "table": [
            {
                "mixer": "qk_token",
                "stage": s,
                "rates": {role: 0.01 * s * (i + 1) for i, role in enumerate(ROLES)},
            }
            for s in (1, 2)
        ],
        "paper": PAPER,
        "firings": firings,
        "operations": [
            _operation("stem", "conv", "real"),
            _operation("stages.0.patch_embed.convs.0.conv", "conv", "binary"),
            _operation("stages.0.blocks.0.mlp.fc1", "linear", "counts"),
            _operation("stages.0.blocks.0.attn.mixer", "sum", "binary", dense=0.0, ann=0.0),
        ],
        "rasters": [raster()],
        "raster_image": "7.png",
        "photo": image_uri(np.zeros((3, 2, 2), dtype=np.uint8)),
        "at_chance": False,
        **changes,
    }


def spikes_record() -> dict[str, Any]:
    """Two models, one of them with a hostile name, without blocks and rasters, and random."""
    plain = study(
        EVIL,
        random=True,
        table=[],
        rasters=[],
        photo=None,
        raster_image=None,
        silent=0.95,
        ann={"macs": 6e6, "energy": 2.76e7, "ratio": None},
        firings=[_firing(None, None, None, 0.5)],
    )
    return {
        "studies": [study("qk"), plain],
        "command": f"keymix analyze spikes qk '{EVIL}'",
        "created": "2026-01-01 12:00 UTC",
        "environment": {"keymix": "0.1", "machine": EVIL},
    }


def typed(record: dict[str, Any]) -> SpikeStudies:
    made = SpikeStudies([typed_study(each) for each in record["studies"]])
    made.made_by = from_json(StudyRecord, record, where="the record")
    return made


def typed_study(study: dict[str, Any]) -> SpikesStudy:
    return from_json(SpikesStudy, study, where="the study")


def typed_raster() -> RasterReading:
    return from_json(RasterReading, raster(), where="the raster")


def render(record: dict[str, Any]) -> str:
    return typed(record).html()

# SPDX-License-Identifier: Apache-2.0
"""A record of a study of cost, made up, with as many mixers as a page must hold."""

from __future__ import annotations

from typing import Any

from keymix.analysis.study_record import StudyRecord
from keymix.records import from_json
from keymix.studies.complexity.result import Complexity

EVIL = "<script>alert('x')</script>&\"'"
CONTROLS = ("identity", "pooling")
MIXERS = (
    "conv_static_key",
    "identity",
    "key_value",
    "pooling",
    "re_attention",
    "softmax",
    "static_key",
    "static_key_re_attention",
    "static_key(activation=relu,key_init_std=0.02)",
    EVIL,
)
TOKENS, SWEEP, DIMS = (49, 196, 784), (16, 256, 4096), (32, 256, 1024)


def _ratio(mixer: str, rank: int, tokens: int, dim: int) -> dict[str, Any]:
    known = mixer not in CONTROLS
    return {
        "mixer": mixer,
        "tokens": tokens,
        "dim": dim,
        "params": rank * dim * dim if known else 0,
        "macs": rank * dim * dim * tokens,
        "ratio": tokens * (1 + 0.01 * rank) + tokens**2 / dim if known else None,
        "reason": None if known else "it has no parameters",
    }


def _measured(mixer: str, rank: int, tokens: int) -> dict[str, Any]:
    fails = mixer == EVIL and tokens == 784
    latency = None if fails else 0.001 if mixer == "identity" else 0.01 * rank * tokens
    return {
        "mixer": mixer,
        "tokens": tokens,
        "grid": [7, tokens // 7],
        "params": 1000 * rank,
        "macs": 1000 * rank * tokens,
        "activation_bytes": 4 * tokens * tokens,
        "latency_ms": latency,
        "latency_q1_ms": latency and 0.9 * latency,
        "latency_q3_ms": latency and 1.1 * latency,
        "latency_ratio": latency and rank / 6,
        "latency_p": latency and 0.0005,
        "latency_verdict": latency and (None if mixer == "softmax" else "different"),
        "images_per_s": latency and 1000 / latency,
        "peak_inference_mib": None if fails else 0.0 if mixer == "identity" else 0.02 * tokens,
        "peak_training_mib": None if fails else 0.05 * rank * tokens,
        "peak_ratio": None if fails else rank / 6,
        "peak_note": None if fails else "growth of a fresh process with 2 threads, at batch 1",
        "reason": f"would need {EVIL}" if fails else None,
    }


def cost_record() -> dict[str, Any]:
    """Make the record, as ``keymix analyze complexity --json`` prints it."""
    ranked = [(mixer, rank) for rank, mixer in enumerate(MIXERS, 1)]
    return {
        "setting": {
            "dim": 256,
            "num_heads": 8,
            "at": 256,
            "tokens": list(TOKENS),
            "sweep_tokens": list(SWEEP),
            "sweep_dims": list(DIMS),
            "repeats": 10,
            "batch_size": 1,
            "device": "cpu",
            "threads": 2,
            "time_steps": 4,
        },
        "mixers": [
            {
                "label": mixer,
                "name": mixer.partition("(")[0],
                "domain": "dense",
                "control": mixer in CONTROLS,
                "reason": None,
            }
            for mixer in MIXERS
        ],
        "by_tokens": [_ratio(m, rank, n, 256) for m, rank in ranked for n in SWEEP],
        "by_dim": [_ratio(m, rank, 256, d) for m, rank in ranked for d in DIMS],
        "weights": [
            {
                "mixer": mixer,
                "sharing": "no",
                "kernels": ["3x3"],
                "dynamic": 2,
                "params_a_token": 256,
                "reason": None,
            }
            for mixer in MIXERS
        ],
        "scaling": [_measured(m, rank, n) for n in TOKENS for m, rank in ranked],
        "complete": True,
        "command": "keymix analyze complexity --out cost",
        "created": "2026-01-02 03:04 UTC",
        "environment": {"keymix": "0.0.1", "machine": "a test, 2 cores", "threads": "2"},
    }


def typed(record: dict[str, Any]) -> Complexity:
    made = from_json(Complexity, record, where="the record")
    made.made_by = from_json(StudyRecord, record, where="the record")
    return made


def render(record: dict[str, Any]) -> str:
    return typed(record).html()

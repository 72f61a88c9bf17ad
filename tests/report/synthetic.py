# SPDX-License-Identifier: Apache-2.0
"""A comparison's record made up from random numbers, for tests of the report."""

from __future__ import annotations

from typing import Any

import numpy as np

from keymix.compare.outcome import Scores, caution, lead, outcome
from keymix.report.pictures import image_uri

ACCURACY = {
    "softmax": 0.955,
    "static_key": 0.948,
    "conv_static_key": 0.962,
    "re_attention": 0.951,
    "key_value": 0.945,
    "identity": 0.41,
}
CONTROLS = ("identity",)
NO_MAP = "identity mixes no tokens, so it has no attention map"


def make_record(seeds: int = 3, *, accuracy: dict[str, float] | None = None) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    accuracy = accuracy or ACCURACY
    labels = list(accuracy)
    difficulty = rng.random(360)
    scores: dict[str, dict[int, Scores]] = {}
    runs = []
    for label, level in accuracy.items():
        scores[label] = {}
        for seed in range(seeds):
            noisy = 0.8 * difficulty + 0.2 * rng.random(360)
            correct = noisy < level + rng.normal(0, 0.006)
            top1 = float(correct.mean())
            scores[label][seed] = Scores(
                val_top1=top1 - 0.01, top1=top1, top5=min(1.0, top1 + 0.03), correct=correct
            )
            epochs = np.arange(1, 13)
            history = [
                {
                    "epoch": int(e),
                    "train_loss": float(2.3 * np.exp(-e / 3) + 0.1 + rng.normal(0, 0.03)),
                    "val_loss": float(2.3 * np.exp(-e / 3.5) + 1.1 - level + rng.normal(0, 0.03)),
                    "val_top1": float(level * (1 - np.exp(-e / 2)) + rng.normal(0, 0.01)),
                }
                for e in epochs
            ]
            mark = {"epoch": 12, "val": {"top1": top1 - 0.01}, "test": {"top1": top1}}
            runs.append(
                {
                    "mixer": label,
                    "seed": seed,
                    "status": "done",
                    "reason": None,
                    "folder": f"runs/{label}/seed{seed}",
                    "seconds": 8.4,
                    "last": mark,
                    "best": mark | {"epoch": 10},
                    "history": history,
                }
            )
    rows = outcome(labels, baseline=labels[0], seeds=range(seeds), scores=scores)
    mapped = [m for m in labels if m not in CONTROLS]
    weights = rng.random((len(labels), 4, 2, 6, 6)) ** 3
    return {
        "format": 1,
        "title": "Token mixers compared on digits",
        "facts": ["vit_nano_p2_12", f"{len(labels)} mixers × {seeds} seeds", "12 epochs"],
        "lead": lead(rows, baseline=labels[0]),
        "caution": caution(seeds),
        "created": "2026-03-01 12:00",
        "command": "keymix compare --data digits --mixers 'softmax,static_key(activation=relu)'",
        "environment": {"keymix": "0.1.0", "torch": "2.11.0", "machine": "2 cores"},
        "data": {"spec": "digits", "classes": [str(i) for i in range(10)]},
        "data_line": "digits, fingerprint 0123abcd",
        "recipe": {"name": "digits_vit", "optim": {"lr": 0.002}},
        "baseline": labels[0],
        "seeds": list(range(seeds)),
        "mixers": [{"label": m, "control": m in CONTROLS, "note": ""} for m in labels],
        "runs": runs,
        "outcome": {"last": rows, "best": rows},
        "curves_note": "",
        "costs": {
            m: {
                "params": 210_000 + 9000 * i,
                "macs": 7_600_000 - 500_000 * i,
                "activation_bytes": 900_000 - 20_000 * i,
                "latency_ms": 1.1 + 0.07 * ((i * 5) % 6),
                "latency_low_ms": 1.05,
                "latency_high_ms": 1.31,
                "images_per_s": 5200.0 - 211 * i,
                "peak_mib": 241.5 + i,
                "note": "",
            }
            for i, m in enumerate(labels)
        },
        "measured": {"batch_size": 64, "text": "Measured after training, one thread, CPU."},
        "attention": {
            "query": "Mean over patch tokens.",
            "images": [
                {
                    "png": image_uri((rng.random((1, 12, 12)) * 255).astype(np.uint8)),
                    "label": str(i),
                    "id": f"row {i}",
                }
                for i in range(4)
            ],
            "layers": ["block 2 of 4", "block 4 of 4"],
            "maps": {m: weights[i].tolist() for i, m in enumerate(mapped)},
            "missing": dict.fromkeys([m for m in labels if m in CONTROLS], NO_MAP),
        },
        "collapse": {
            "pairs": ["1–2", "2–3", "3–4"],
            "images": 64,
            "seed": 0,
            "similarity": {m: [0.4 + 0.1 * i, 0.6, 0.7 + 0.02 * i] for i, m in enumerate(mapped)},
            "missing": dict.fromkeys([m for m in labels if m in CONTROLS], NO_MAP),
        },
        "method": [
            {"title": "Same for all.", "text": "Order of the data, augmentation, schedule." * 3},
            {"title": "Readout.", "text": "Mean of the patch tokens." * 4},
            {"title": "Intervals.", "text": "Two questions, two intervals." * 6},
        ],
    }

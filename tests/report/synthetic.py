# SPDX-License-Identifier: Apache-2.0
"""A comparison's record made up from random numbers, for tests of the report."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keymix.compare.results import outcome
from keymix.compare.runs import Scores
from keymix.records import from_json, to_json
from keymix.report import comparison_page
from keymix.report.charts import Look
from keymix.report.gallery import Pictures
from keymix.report.part import page_of
from keymix.report.pictures import image_uri
from keymix.report.record import Results, opened
from keymix.report.sections.classes import ClassesView, classes_view
from keymix.task import get_task
from keymix.tasks.classification.answers import ClassAnswers

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
MACHINE = {
    "keymix": "0.2.0",
    "commit": "0123abcd",
    "python": "3.11.7",
    "packages": "torch 2.11.0, timm 1.0.31",
    "machine": "2 cores",
    "system": "Linux",
    "threads": "1",
}
OTHER_MACHINE = MACHINE | {"packages": "torch 2.12.0, timm 1.0.31", "machine": "16 cores"}
SEEN = ("attention", "collapse", "galleries")
HEADS, LAYERS, GRID = 3, 4, (6, 6)


def typed(record: dict[str, Any]) -> Results:
    """Open a record as if it had been read from a file; its pictures are apart."""
    return opened({k: v for k, v in record.items() if k not in SEEN}, where="the record")


def pictured(record: dict[str, Any]) -> Pictures:
    """Open the pictures of a record as if they had been read from their file."""
    return from_json(Pictures, {k: record[k] for k in SEEN if k in record}, where="the pictures")


def render(record: dict[str, Any]) -> str:
    return comparison_page.render(typed(record), pictured(record))


def packed(correct: npt.NDArray[np.bool_]) -> str:
    return base64.b64encode(np.packbits(correct).tobytes()).decode("ascii")


def packed_maps(weights: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Pack ``[image, layer, 1 + heads, h, w]`` as a record does."""
    scale = float(weights.max())
    levels = np.round(weights / scale * 65535).astype("<u2")
    return {
        "heads": weights.shape[2] - 1,
        "grid": list(weights.shape[3:]),
        "weights": base64.b64encode(levels.tobytes()).decode("ascii"),
        "scale": scale,
    }


def made_up_maps(rng: np.random.Generator, heads: int = HEADS) -> npt.NDArray[np.float64]:
    each = rng.random((4, LAYERS, heads, *GRID)) ** 3
    each /= each.sum((-1, -2), keepdims=True)
    return np.concatenate([each.mean(2, keepdims=True), each], axis=2)


def lose(record: dict[str, Any], mixer: str, seed: int, status: str, reason: str) -> None:
    """Turn a finished run of a record into one that failed or is missing."""
    run = next(r for r in record["runs"] if r["mixer"] == mixer and r["seed"] == seed)
    kept = {k: run[k] for k in ("mixer", "seed", "folder")}
    run.clear()
    run |= kept | {"status": status, "reason": reason}
    left = [r for r in record["runs"] if r["mixer"] == mixer and r["status"] == "done"]
    for which in ("last", "best"):
        row = next(r for r in record["outcome"][which] if r["mixer"] == mixer)
        top1 = [r[which]["test"]["top1"] for r in left]
        row["top1"] |= {"n": len(left), "mean": float(np.mean(top1)) if left else None}
        if not left:
            nothing = {"n": 0, "mean": None, "sd": None}
            row |= {"seeds": None, "images": None, "top1": nothing}
            row |= {"top5": nothing, "val_top1": nothing, "degree": "unclear"}
    if not left:
        record["costs"][mixer] = {"params": record["costs"][mixer]["params"]}
        record["confusions"].pop(mixer, None)
        record["attention"]["maps"].pop(mixer, None)
        record["attention"]["missing"][mixer] = "no run finished"


def make_record(
    seeds: int = 3,
    *,
    accuracy: dict[str, float] | None = None,
    classes: Sequence[str] = tuple(str(i) for i in range(10)),
    images: int = 360,
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    accuracy = accuracy or ACCURACY
    labels = list(accuracy)
    difficulty = rng.random(images)
    truth = np.arange(images) % len(classes)
    scores: dict[str, dict[int, Scores]] = {}
    mistakes: dict[str, Counter[tuple[int, int]]] = {label: Counter() for label in labels}
    runs = []
    for label, level in accuracy.items():
        scores[label] = {}
        for seed in range(seeds):
            noisy = 0.8 * difficulty + 0.2 * rng.random(images)
            correct = noisy < level + rng.normal(0, 0.006)
            top1 = float(correct.mean())
            wrong = (truth + 1 + rng.integers(0, min(3, len(classes) - 1), images)) % len(classes)
            pairs = zip(truth[~correct].tolist(), wrong[~correct].tolist(), strict=True)
            mistakes[label].update(pairs)
            scores[label][seed] = Scores(
                val=top1 - 0.01,
                test={"top1": top1, "top5": min(1.0, top1 + 0.03)},
                answers=ClassAnswers(
                    index=np.arange(images),
                    target=truth,
                    predicted=np.where(correct, truth, wrong),
                    top5=np.ones(images, dtype=bool),
                    confidence=np.ones(images, dtype=np.float16),
                    classes=tuple(classes),
                ),
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
                    "correct": packed(correct),
                    "class_correct": [int(correct[truth == c].sum()) for c in range(len(classes))],
                    "trained_with": int(seed == 1),
                }
            )
    task = get_task("classification")
    rows = outcome(labels, baseline=labels[0], scores=scores, task=task)
    as_json = to_json(rows)
    mapped = [m for m in labels if m not in CONTROLS]
    return {
        "format": 3,
        "created": "2026-03-01 12:00",
        "command": "keymix compare --data digits --mixers 'softmax,static_key(activation=relu)'",
        "environment": dict(MACHINE),
        "trained_with": [dict(MACHINE), dict(OTHER_MACHINE)] if seeds > 1 else [dict(MACHINE)],
        "test_images": images,
        "classes": {
            "names": list(classes),
            "test_images": [int((truth == c).sum()) for c in range(len(classes))],
        },
        "confusions": {
            m: [
                {"true": classes[a], "predicted": classes[b], "count": n, "share": n / 99}
                for (a, b), n in found.most_common(10)
            ]
            for m, found in mistakes.items()
        },
        "data": {
            "spec": "digits",
            "classes": list(classes),
            "image_size": [12, 12],
            "in_chans": 1,
            "mean": [0.5],
            "std": [0.5],
            "crop_pct": 1.0,
            "cached": True,
            "task": "classification",
            "sizes": {"train": 1000, "val": 100, "test": images},
            "index_sha256": dict.fromkeys(("train", "val", "test"), "ab" * 32),
            "fingerprint": "0123abcd" * 8,
            "left_out": [{"id": "7/torn.png", "reason": "broken PNG file"}],
            "left_out_count": 1,
        },
        "mechanisms": {},
        "findings": [],
        "recommendation": {"verdict": "undecided", "reason": "margin"},
        "references": [],
        "looks": [],
        "alpha": 0.05,
        "margin": 0.02,
        "images": True,
        "recipe": {
            "name": "digits_vit",
            "data": {"spec": "digits"},
            "model": {"name": "vit_nano_p2_12", "options": {}},
            "optim": {"lr": 0.002},
        },
        "match": None,
        "pooling": "avg",
        "pooled_for": [],
        "processes": 2,
        "threads": 1,
        "baseline": labels[0],
        "seeds": list(range(seeds)),
        "mixers": [{"label": m, "slug": m, "control": m in CONTROLS, "note": ""} for m in labels],
        "runs": runs,
        "outcome": {"last": as_json, "best": as_json},
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
        "measured": {
            "device": "cpu",
            "batch_size": 64,
            "repeats": 20,
            "threads": 1,
        },
        "attention": {
            "class_token": False,
            "seed": 0,
            "images": [
                {
                    "png": image_uri((rng.random((1, 12, 12)) * 255).astype(np.uint8)),
                    "label": str(i),
                    "id": f"row {i}",
                }
                for i in range(4)
            ],
            "layers": [f"Block {i + 1} of {LAYERS}" for i in range(LAYERS)],
            "maps": {m: packed_maps(made_up_maps(rng)) for m in mapped},
            "missing": dict.fromkeys([m for m in labels if m in CONTROLS], NO_MAP),
        },
        "collapse": {
            "pairs": ["1–2", "2–3", "3–4"],
            "images": 64,
            "seed": 0,
            "similarity": {m: [0.4 + 0.1 * i, 0.6, 0.7 + 0.02 * i] for i, m in enumerate(mapped)},
            "missing": dict.fromkeys([m for m in labels if m in CONTROLS], NO_MAP),
        },
    }


def with_answers(record: dict[str, Any]) -> dict[str, Any]:
    """Add what models answered to the images under their maps, and a gallery of eight images."""
    rng = np.random.default_rng(1)
    names, labels = record["classes"]["names"], [mixer["label"] for mixer in record["mixers"]]
    asked = [label for label in labels if label not in CONTROLS]
    record["attention"]["said"] = {
        label: [{"text": names[(i * k) % len(names)], "right": k == 1} for i in range(4)]
        for k, label in enumerate(asked, start=1)
    }
    scenes = [
        {
            "picture": image_uri((rng.random((1, 12, 12)) * 255).astype(np.uint8)),
            "id": f"{names[i]}/{i}.png",
            "size": [12, 12],
            "panels": [
                {"text": names[i]},
                *(
                    {
                        "mixers": {label: "50 %"},
                        "text": names[(i * k) % len(names)],
                        "right": k == 1,
                    }
                    for k, label in enumerate(asked, start=1)
                ),
            ],
        }
        for i in range(8)
    ]
    about = {"mixers": len(asked), "seeds": 3, "disputed": 40}
    record["galleries"] = {
        "disagreements": {"scenes": scenes, "about": about},
        "errors": {"scenes": scenes[1:], "about": about},
    }
    return record


def classes_of(record: Results, looks: Mapping[str, Look]) -> ClassesView:
    """Return the view of the classes of a record that has some."""
    found = page_of(record.task_kind).classes(record)
    assert found is not None
    return classes_view(found, looks, record.baseline)


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</script><script>alert(3)</script>",
    "שלום עולם",
    "مرحبا بالعالم",
    "🦊 fox 👩‍👩‍👧",
    "漢字の長い名前のクラスです",
    "a_name_without_any_break_" * 5,
)
LONG = "static_key(activation=relu,pos_dim={},num_heads=6,key_init=normal)"


def crowded_record() -> dict[str, Any]:
    """Make twelve mixers of long names, 200 classes of odd and long names, one seed, one failed."""
    plain = [f"class {i} of the herbarium, var. {'x' * (i % 30)}" for i in range(192)]
    accuracy = {"softmax": 0.8} | {LONG.format(i): 0.75 + 0.01 * i for i in range(9)}
    accuracy |= {"<img src=x onerror=alert(4)>": 0.83, "identity": 0.3}
    record = make_record(1, accuracy=accuracy, classes=(*HOSTILE, *plain), images=2000)
    record["attention"]["images"][0] |= {"label": HOSTILE[0], "id": HOSTILE[1]}
    lose(record, LONG.format(3), 0, "failed", "RuntimeError: " + "out_of_memory_" * 12)
    return record

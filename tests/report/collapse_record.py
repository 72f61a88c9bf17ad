# SPDX-License-Identifier: Apache-2.0
"""A record of a study of collapse, made up: a ViT, a DeepViT and a model in two stages."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from keymix.analysis.study_record import ModelOnImages, PairSimilarity, StudyRecord
from keymix.records import from_json
from keymix.report.tables import Table
from keymix.studies.collapse.readings import LayerReading
from keymix.studies.collapse.result import Collapse, Collapses, table
from keymix.studies.collapse.verdict import Verdict

EVIL = "<script>alert('x')</script>&\"'"


def _layer(block: int, stage: int, group: int | None, theta: bool) -> dict[str, Any]:
    lost = group is None
    return {
        "path": f"blocks.{block - 1}.attn",
        "block": block,
        "stage": stage,
        "attention": "softmax",
        "group": group,
        "missing": "pooling has none" if lost else None,
        "heads": None if lost else 2,
        "keys": None if lost else 65,
        "entropy": None if lost else 3.5,
        "entropy_by_head": None if lost else [3.0, 4.0],
        "entropy_normalised": None if lost else 0.8125,
        "sink": None if lost else 0.125,
        "sink_in_prefix": None if lost else 0.5,
        "uneven": None,
        "head_similarity": None if lost else 0.25,
        "heads_similar": None if lost else 0.1,
        "nearest": None if lost else 0.75,
        "feature_similarity": block / 10,
        "effective_rank": 40.0 - block,
        "full_rank": 48,
        "theta": [[1.5, -0.25], [0.0, 0.5]] if theta else None,
    }


def study(
    label: str, groups: list[list[int]], count: int, *, theta: bool = False, **changes: Any
) -> dict[str, Any]:
    """What one model's study leaves; blocks in no group have no map."""
    of = {block: i for i, group in enumerate(groups) for block in group}
    return {
        "label": label,
        "name": f"runs/{label}",
        "weights": f"last epoch of runs/{label}",
        "random": False,
        "origin": "test images of digits",
        "left_out": {},
        "images": 12,
        "threshold": 0.5,
        "similar": 0.8,
        "unique": 0.9,
        "nearest": 2,
        "verdict": {
            "collapsed": True,
            "headline": f"Headline of {label}",
            "evidence": [f"Evidence of {label}"],
            "caveats": [f"Caveat of {label}"],
        },
        "groups": [[f"blocks.{b - 1}.attn" for b in group] for group in groups],
        "apart": [],
        "layers": [_layer(b, 0, of.get(b), theta) for b in range(1, count + 1)],
        "pairs": [
            {
                "first": f"blocks.{p - 1}.attn",
                "second": f"blocks.{q - 1}.attn",
                "mean": 0.9,
                "centred": -0.3,
                "by_head": [0.9, 0.9],
                "similar_fraction": 0.955,
                "columns": 9,
                "left_out": 0,
            }
            for group in groups
            for p, q in combinations(group, 2)
        ],
    } | changes


def collapse_record() -> dict[str, Any]:
    """Three models, one of a hostile name."""
    return {
        "studies": [
            study("vit", [[1, 2, 3, 4]], 4),
            study(EVIL, [[1, 2, 3]], 3, theta=True, random=True),
            study("swin", [[1, 3], [2, 4]], 5),
        ],
        "command": f"keymix analyze collapse {EVIL}",
        "created": "2025-01-01 00:00 UTC",
        "environment": {"keymix": "0.0", "machine": "some"},
    }


def typed_study(study: dict[str, Any]) -> Collapse:
    def read(cls: type[Any], values: dict[str, Any]) -> Any:
        return from_json(cls, values, where="the study")

    keys = ("apart", "threshold", "similar", "unique", "nearest", "images")
    made = Collapse(
        layers=tuple(read(LayerReading, each) for each in study["layers"]),
        pairs=tuple(read(PairSimilarity, each) for each in study["pairs"]),
        groups=tuple(map(tuple, study["groups"])),
        takes_shared_from=True,
        of=read(ModelOnImages, study),
        **{key: study[key] for key in keys},
    )
    made.__dict__["verdict"] = read(Verdict, study["verdict"])  # what it is made of is not at hand
    return made


def typed(record: dict[str, Any]) -> Collapses:
    made = Collapses([typed_study(each) for each in record["studies"]])
    made.made_by = from_json(StudyRecord, record, where="the record")
    return made


def render(record: dict[str, Any]) -> str:
    return typed(record).html()


def charts(record: dict[str, Any]) -> dict[str, str]:
    """The SVG files."""
    return {n: str(text) for n, text in typed(record).files().items() if n.endswith(".svg")}


def table_of(study: dict[str, Any]) -> Table:
    return table([typed_study(study)])

# SPDX-License-Identifier: Apache-2.0
"""A record of a study of collapse, made up: a ViT, a DeepViT and a model in two stages."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from keymix.analysis.collapse_record import CollapseRecord, CollapseStudy
from keymix.records import from_json
from keymix.report.tables import Table
from keymix.studies.collapse import page

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
        "similar_blocks": {"blocks": [2], "count": 1, "of": len(of), "share": 0.5},
        "blocks_like_nearest": {"blocks": [], "count": 0, "of": len(of), "share": 0.0},
        "unique_blocks": [],
        "shared_from": None,
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


def render(record: dict[str, Any]) -> str:
    return page.render(from_json(CollapseRecord, record, where="the record"))


def files(record: dict[str, Any]) -> dict[str, str]:
    return page.files(from_json(CollapseRecord, record, where="the record"))


def table_of(study: dict[str, Any]) -> Table:
    return page.table([from_json(CollapseStudy, study, where="the study")])

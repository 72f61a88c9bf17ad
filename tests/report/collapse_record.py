# SPDX-License-Identifier: Apache-2.0
"""Studies of collapse, made up: a ViT, a DeepViT and a model in two stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from keymix.analysis.similarity import PairSimilarity
from keymix.analysis.study_record import ModelOnImages, StudyRecord
from keymix.studies.collapse.result import Collapse, Collapses, LayerReading

EVIL = "<script>alert('x')</script>&\"'"


def layer(block: int, group: int | None = 0, **changes: Any) -> LayerReading:
    """One of a ViT's layers, 64 tokens of width 48, well spread; in no group it has no map."""
    values = dict.fromkeys(LayerReading.__dataclass_fields__)
    values |= {"path": f"blocks.{block - 1}.attn", "block": block, "stage": 0, "group": group}
    values |= {"attention": "softmax", "remedy": "", "full_rank": 48}
    values |= {"effective_rank": 40.0 - block, "feature_similarity": block / 10}
    if group is None:
        values |= {"missing": "pooling has none"}
    else:
        values |= {"heads": 2, "keys": 65, "entropy": 3.5, "entropy_by_head": (3.0, 4.0)}
        values |= {"entropy_normalised": 0.8125, "sink": 0.125, "sink_in_prefix": 0.5}
        values |= {"head_similarity": 0.25, "heads_similar": 0.1, "nearest": 0.75}
    return LayerReading(**(values | changes))


def study(
    groups: Sequence[Sequence[int]],
    count: int,
    shares: Mapping[tuple[int, int], float] | float = 0.955,
    *,
    label: str = "vit",
    random: bool = False,
    cosine: float = 0.9,
    centred: float = 0.75,
    **changes: Any,
) -> Collapse:
    """A study of a model; blocks in no group have no map, pairs without a share of columns 0.1."""
    group_of = {block: i for i, group in enumerate(groups) for block in group}
    made = [layer(b, group_of.get(b)) for b in range(1, count + 1)]
    pairs = [
        PairSimilarity(
            first=f"blocks.{p - 1}.attn",
            second=f"blocks.{q - 1}.attn",
            mean=cosine,
            centred=centred,
            by_head=(cosine, cosine),
            similar_fraction=shares if isinstance(shares, float) else shares.get((p, q), 0.1),
            columns=9,
            left_out=0,
        )
        for group in groups
        for p, q in combinations(group, 2)
    ]
    of = ModelOnImages(
        label=label,
        name=f"runs/{label}",
        weights=f"last epoch of runs/{label}",
        random=random,
        origin="test images of digits",
        left_out={},
    )
    values: dict[str, Any] = {"layers": tuple(made), "pairs": tuple(pairs), "of": of}
    values |= {"groups": tuple(tuple(f"blocks.{b - 1}.attn" for b in group) for group in groups)}
    values |= {"threshold": 0.5, "similar": 0.8, "unique": 0.9, "nearest": 2, "images": 64}
    return Collapse(**(values | changes))


def together(*studies: Collapse) -> Collapses:
    """Studies as a command leaves them."""
    made = Collapses(studies)
    environment = {"keymix": "0.0", "machine": "some"}
    command = f"keymix analyze collapse {EVIL}"
    made.made_by = StudyRecord(command=command, created="2025-01-01", environment=environment)
    return made


def three_models() -> Collapses:
    """Three models, one of a hostile name with heads that are mixed."""
    theta = ((1.5, -0.25), (0.0, 0.5))
    mixed = tuple(layer(block, theta=theta) for block in (1, 2, 3))
    return together(
        study([[1, 2, 3, 4]], 4, centred=-0.3),
        study([[1, 2, 3]], 3, label=EVIL, random=True, layers=mixed),
        study([[1, 3], [2, 4]], 5, label="swin"),
    )

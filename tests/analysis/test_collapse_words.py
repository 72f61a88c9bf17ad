# SPDX-License-Identifier: Apache-2.0
"""What a study of collapse says, and when it says that nothing can be said."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from keymix.analysis.study_record import PairSimilarity, numbers
from keymix.models import create_model
from keymix.studies.collapse.measure import collapse
from keymix.studies.collapse.readings import LayerReading
from keymix.studies.collapse.result import Collapse


def layer(block: int, **changes: object) -> LayerReading:
    """One of a ViT's layers, 64 tokens of width 48, well spread."""
    values: dict = dict.fromkeys(LayerReading.__dataclass_fields__)
    values |= {"path": f"blocks.{block - 1}.attn", "block": block, "stage": 0, "group": 0}
    values |= {"attention": "softmax", "heads": 3, "keys": 64, "entropy_normalised": 0.5}
    values |= {"sink": 0.05, "sink_in_prefix": 0.0, "nearest": 0.2, "full_rank": 48}
    values |= {"effective_rank": 40.0 - block, "feature_similarity": 0.3}
    return LayerReading(**(values | changes))


def study(
    shares: dict[tuple[int, int], float], count: int, *, centred: float = 0.75, **changes: object
) -> Collapse:
    """A study of some blocks whose share of similar columns is 0.1 where none is given."""
    layers = [layer(i) for i in range(1, count + 1)]
    layers = changes.pop("layers", layers)  # type: ignore[assignment]
    mapped = [each for each in layers if each.group is not None]
    pairs = [
        PairSimilarity(
            first=a.path,
            second=b.path,
            centred=centred,
            mean=0.9 * shares.get((a.block, b.block), 0.1),
            by_head=(),
            similar_fraction=shares.get((a.block, b.block), 0.1),
            columns=9,
            left_out=0,
        )
        for a, b in combinations(mapped, 2)
    ]
    values: dict = {"layers": tuple(layers), "pairs": tuple(pairs), "apart": ()}
    values |= {"groups": (tuple(each.path for each in mapped),) if mapped else ()}
    values |= {"threshold": 0.5, "similar": 0.8, "unique": 0.9, "nearest": 2, "images": 64}
    return Collapse(**(values | {"takes_shared_from": True} | changes))


def all_of(blocks: range, share: float) -> dict[tuple[int, int], float]:
    return dict.fromkeys(combinations(blocks, 2), share)


def test_blocks_that_share_a_map_are_named_with_the_evidence_for_every_two() -> None:
    found = study(all_of(range(4, 9), 0.95) | {(5, 8): 0.85}, 8)
    verdict = found.verdict
    assert verdict.collapsed is True
    assert verdict.headline == "Blocks 4 to 8 compute nearly the same attention: similarity 0.85"
    assert verdict.evidence[1] == "Re-attention or map sharing could pay there."
    assert verdict.evidence[0] == (
        "Every two maps of blocks 4–8 are alike in at least 85 % of their columns, 94 % on average "
        "(cosine above 0.5); what is left when each column's mean is taken off has a cosine of "
        "0.75 on average (one map: 0.5 or more)."
    )
    assert "4 of 8 blocks (50 %) are similar to the one before" in verdict.evidence[2]
    assert found.similar_blocks == (5, 6, 7, 8)
    assert any("keymix compare" in line for line in verdict.caveats)


def test_the_rule_names_the_last_unique_block_and_the_command() -> None:
    found = study(all_of(range(4, 9), 0.95) | {(4, 7): 0.6}, 8)
    (unique,) = found.unique_blocks
    assert (unique.block, unique.sharing, unique.least) == (4, (5, 6, 7, 8), 0.6)
    assert found.shared_from == 4
    text = " ".join(found.verdict.evidence)
    assert "block 4 is the last unique one: blocks 5–8 could take its map" in text
    assert "agree in at least 60 % of columns (the rule looks at neighbours alone)" in text
    assert "--model.options.shared_from 4" in text
    model = create_model("vit_12b", depth=8, embed_dim=12, num_heads=3, shared_from=4, img_size=32)
    kinds = [block.attn.mixer.mixer_name for block in model.blocks]
    assert kinds == ["softmax"] * 4 + ["shared_map"] * 4
    remedies = collapse(model.eval(), torch.randn(1, 3, 32, 32)).remedies
    assert list(remedies.values()) == [""] * 4 + ["a shared map"] * 4


def test_a_share_of_just_90_percent_is_unique() -> None:
    assert study({(1, 2): 0.9}, 2).unique_blocks[0].block == 2
    assert study({(1, 2): 0.9001}, 2).unique_blocks[0].block == 1
    assert study({(1, 2): 0.8}, 2).similar_blocks == ()


def test_a_last_block_that_is_unique_shares_nothing() -> None:
    found = study(all_of(range(2, 6), 0.99), 6)
    assert found.shared_from is None
    assert found.unique_blocks[0].block == 6
    assert any("the last block is unique itself" in line for line in found.verdict.evidence)
    assert found.verdict.headline.startswith("Blocks 2 to 5 compute nearly the same")


def test_maps_that_drift_are_not_said_to_be_one() -> None:
    shares = all_of(range(2, 6), 0.3) | {(i, i + 1): 0.9 for i in range(2, 5)}
    verdict = study(shares, 6).verdict
    assert verdict.headline == (
        "Blocks 2 to 5 change their attention only little by little: similarity 0.81 from block to "
        "block"
    )
    assert verdict.evidence[1] == "Re-attention could pay there."
    assert "the two least alike in 30 % only" in verdict.evidence[0]


def test_when_nothing_collapses_it_says_so_with_the_most_alike() -> None:
    verdict = study({(2, 3): 0.44}, 5).verdict
    assert verdict.collapsed is False
    assert verdict.headline == (
        "No block repeats the attention of the one before: similarity at most 0.40"
    )
    assert "blocks 2 and 3: 44 % of their columns" in verdict.evidence[0]
    assert verdict.caveats == ()


def test_even_maps_are_reported_as_the_reason() -> None:
    layers = [layer(i, entropy_normalised=0.99) for i in range(1, 5)]
    verdict = study(all_of(range(1, 5), 1.0), 4, layers=layers).verdict
    assert verdict.headline.startswith("Blocks 1 to 4 attend nearly evenly, and so alike")
    assert "entropy 0.990 of ln M" in verdict.evidence[0]
    assert "column's mean is taken off has a cosine of 0.75 on average" in verdict.evidence[0]


def test_blocks_alike_in_evenness_only_are_not_said_to_share_a_map() -> None:
    found = study(all_of(range(1, 5), 1.0), 4, centred=0.0625)
    assert found.verdict.collapsed is False
    assert found.verdict.headline == (
        "Blocks 1 to 4 look alike only because their attention is spread out: similarity 0.90, "
        "without its even part 0.06"
    )
    assert any("even attention alone gives" in line for line in found.verdict.caveats)
    assert found.shared_from == 1
    assert not [line for line in found.verdict.evidence if "shared_from" in line]
    assert any("blocks 2–4 would take its map" in line for line in found.verdict.evidence)
    verdict = study(all_of(range(1, 5), 1.0), 4, centred=-0.004).verdict
    assert verdict.headline.endswith("without its even part 0.00")
    assert "has a cosine of 0.00 on average" in verdict.evidence[0]
    drifting = all_of(range(2, 6), 0.3) | {(i, i + 1): 0.9 for i in range(2, 5)}
    headline = study(drifting, 6, centred=0.1).verdict.headline
    assert headline.startswith("Blocks 2 to 5 look alike only")


@pytest.mark.parametrize(("centred", "shared"), [(0.4999, False), (0.5, True), (math.nan, True)])
def test_a_map_is_shared_from_half_a_centred_cosine_or_where_nothing_is_left(
    centred: float, shared: bool
) -> None:
    verdict = study(all_of(range(1, 4), 1.0), 3, centred=centred).verdict
    assert verdict.collapsed is shared
    assert ("nearly the same" in verdict.headline) is shared
    assert ("nothing is left" in verdict.evidence[0]) is math.isnan(centred)


def test_stretches_of_both_kinds_are_reported_apart() -> None:
    found = study(all_of(range(1, 4), 1.0) | all_of(range(4, 6), 1.0), 5)
    pairs = [
        replace(pair, centred=0.25 if pair.first == "blocks.3.attn" else 0.75)
        for pair in found.pairs
    ]
    verdict = replace(found, pairs=tuple(pairs)).verdict
    assert verdict.collapsed is True
    assert verdict.headline == (
        "Blocks 1 to 3 compute nearly the same attention: similarity 0.90; blocks 4 to 5 look "
        "alike only because their attention is spread out: similarity 0.90, without its even part "
        "0.25"
    )


def test_a_remedy_that_blocks_have_is_not_advised() -> None:
    layers = [layer(i) for i in range(1, 4)]
    remedies = {each.path: "Re-attention" for each in layers[1:]}
    found = study(all_of(range(1, 4), 0.99), 3, layers=layers, remedies=remedies)
    assert found.verdict.evidence[1] == "They are alike though they have Re-attention."
    mixed = replace(found, remedies=remedies | {layers[2].path: "a shared map"})
    assert mixed.verdict.evidence[1].endswith("have Re-attention or a shared map.")
    partly = replace(found, remedies={layers[1].path: "Re-attention"})
    assert partly.verdict.evidence[1].endswith("could pay there.")


@pytest.mark.parametrize(
    ("mixer", "remedy"),
    [("re_attention", "Re-attention"), ("static_key_re_attention", "Re-attention"), ("ska", "")],
)
def test_remedies_come_from_the_mixers(mixer: str, remedy: str) -> None:
    model = create_model("vit_nano_p4_12", mixer=mixer, depth=2)
    found = collapse(model.eval(), torch.randn(2, 1, 12, 12))
    assert set(found.remedies.values()) == {remedy}


def test_without_maps_or_pairs_nothing_is_said_about_collapse() -> None:
    none = study({}, 0, layers=[layer(i, group=None, missing="pooling has none") for i in (1, 2)])
    assert none.verdict.collapsed is None
    assert none.verdict.headline.startswith("No block has an attention map")
    assert none.verdict.caveats == ("Without a map: blocks 1–2 (pooling has none).",)
    assert any("effective rank goes from 39.0" in line for line in none.verdict.evidence)
    single = study({}, 1)
    assert single.verdict.collapsed is None
    assert single.verdict.headline.startswith("No two blocks can be compared")
    assert none.shared_from is None


def test_few_images_and_what_was_left_out_are_said() -> None:
    lines = study({}, 3, images=3, apart=("a and b: windows differ",)).verdict.caveats
    assert lines == (
        "Not compared: a and b: windows differ.",
        "Read on 3 images only: take more before you act on it.",
    )


def test_sinks_are_reported_from_three_tenths_on() -> None:
    layers = [layer(1), layer(2, sink=0.45, sink_in_prefix=0.9), layer(3)]
    lines = study({}, 3, layers=layers).verdict.evidence
    assert any("sinks in block 2: in block 2 one token gets 45 % of a head" in t for t in lines)
    assert any("prefix token in 90 % of heads and images" in t for t in lines)
    assert not any("sink" in t for t in study({}, 3).verdict.evidence)


def test_of_a_sink_among_an_unknown_prefix_no_share_is_said() -> None:
    layers = [layer(1), layer(2, sink=0.45, sink_in_prefix=None), layer(3)]
    (shown,) = (t for t in study({}, 3, layers=layers).verdict.evidence if "sink" in t)
    assert shown.endswith("one token gets 45 % of a head's attention.")


@pytest.mark.parametrize(
    ("found", "expected"),
    [([3], "block 3"), ([1, 2, 3, 7], "blocks 1–3, 7"), ([2, 9, 4], "blocks 2, 4, 9")],
)
def test_numbers_are_reported_in_spans(found: list[int], expected: str) -> None:
    assert numbers("block", found) == expected


def test_a_model_of_pooling_is_answered_without_a_map() -> None:
    model = create_model("vit_nano_p4_12", mixer="pooling", depth=2)
    verdict = collapse(model, torch.randn(2, 1, 12, 12)).verdict
    assert verdict.collapsed is None
    assert "pooling" in verdict.caveats[0]

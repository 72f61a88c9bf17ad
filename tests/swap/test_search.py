# SPDX-License-Identifier: Apache-2.0
"""The search for mixers and layers that make a trained model faster."""

from __future__ import annotations

import copy
import csv
import io
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from keymix.analysis.statistics import over_images
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.models import create_model
from keymix.records import from_json, to_json
from keymix.swap import search as searching
from keymix.swap.held_out import HeldOut, logits_of
from keymix.swap.record import Search, Step, Trial
from keymix.swap.run import swap
from keymix.swap.search import search
from mixer_cases import stir

SMALL: dict[str, Any] = {"embed_dim": 12, "num_heads": 3, "depth": 3, "num_classes": 4}
MIXERS = ("spatial_reduction", "identity")


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keymix.swap.held_out.ROUNDS", 2)
    monkeypatch.setattr("keymix.swap.search.ROUNDS", 2)


@pytest.fixture
def _made_up_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reduction saves 1 ms of 4, every identity 3, whatever the machine does."""

    def times(model: nn.Module, layer: Any, swapped: Any, batch: Tensor) -> dict[str, float]:
        return {"": 4.0, **{name: 1.0 if name == "identity" else 3.0 for name in swapped}}

    monkeypatch.setattr(searching, "_times", times)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    made = create_model("vit_nano_p2_12", **SMALL).eval()
    stir(made)
    return made


def images(count: int = 24, seed: int = 1) -> Tensor:
    return torch.randn(count, 1, 12, 12, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def labels(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(images(60, seed=2)).argmax(1)


def searched(model: nn.Module, labels: Tensor | None, **more: Any) -> Search:
    given: dict[str, Any] = {"images": images(60, seed=2), "labels": labels, "mixers": MIXERS}
    return search(model, calibration=images(), **{**given, **more})


@pytest.mark.usefixtures("_made_up_times")
def test_every_change_is_tried_alone_and_the_plan_stays_within_the_drop(
    model: nn.Module, labels: Tensor
) -> None:
    before = copy.deepcopy(model.state_dict())
    drawn = torch.random.get_rng_state()
    found = searched(model, labels, max_drop=0.2)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert {(t.layer, t.mixer) for t in found.trials} == {(i, m) for i in range(3) for m in MIXERS}
    choose = HeldOut(images(60, seed=2)[::2], labels[::2])
    original = choose.score(model)[0]
    for trial in found.trials:
        alone = copy.deepcopy(model)
        swap(alone, trial.mixer, trial.layer, drift=False)
        assert trial.rise == pytest.approx(choose.score(alone)[0] - original, abs=1e-5)
    assert found.steps[0].score == 1.0
    assert all(step.score >= 0.8 for step in found.steps)
    assert found.images == (30, 30)
    if found.report is not None:
        judge = HeldOut(images(60, seed=2)[1::2], labels[1::2])
        assert found.judged.score == pytest.approx(judge.score(found.report.swapped)[1])
        names = [m.mixer_name for m in find_mixers(found.report.swapped).values()]
        for layer, mixer in found.judged.chosen.items():
            assert names[layer] == mixer
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    again = from_json(Search, to_json(found), where="the search")
    assert again == found
    assert again.report is None


@pytest.mark.usefixtures("_made_up_times")
def test_without_a_drop_to_keep_everything_that_saves_time_is_swapped(
    model: nn.Module, labels: Tensor
) -> None:
    found = searched(model, labels, speed_up=1e6)
    assert found.judged.chosen == dict.fromkeys(range(3), "identity")
    rises = {(t.layer, t.mixer): t.rise for t in found.trials}
    first = found.steps[1].chosen
    assert len(first) == 1
    cheapest = min(
        rises,
        key=lambda each: searching._price(rises[each], 3.0 if each[1] == "identity" else 1.0),
    )
    assert next(iter(first.items())) == cheapest
    assert found.verdict in ("nothing pays", "unclear")  # a million times as fast


@pytest.mark.usefixtures("_made_up_times")
def test_a_search_leaves_no_hooks(labels: Tensor) -> None:
    own = VisionTransformer(img_size=12, patch_size=4, in_chans=1, **SMALL)  # keymix's listens
    before = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in own.modules()]
    searched(own, labels, layers=0, max_drop=0.5)
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in own.modules()] == before


def test_a_mixer_that_cannot_sit_in_a_layer_is_named_and_left_out() -> None:
    sizes = {"embed_dim": 12, "depths": (2, 1), "num_heads": (3, 3), "merging": (2,)}
    swin = create_model("swin_tiny_p2_32", num_classes=4, **sizes).eval()
    stir(swin)
    batch = torch.randn(40, 3, 32, 32)
    with torch.no_grad():
        labels = swin(batch).argmax(1)
    given: dict[str, Any] = {"calibration": batch[:8], "images": batch, "labels": labels}
    found = search(swin, mixers=["spatial_reduction"], max_drop=0.5, layers="0-1", **given)
    assert [trial.layer for trial in found.trials] == [0]
    assert len(found.refused) == 1
    assert "block 2" in found.refused[0]
    with pytest.raises(UserError, match="none of the mixers"):
        search(swin, mixers=["spatial_reduction"], max_drop=0.5, layers=1, **given)


@pytest.mark.usefixtures("_made_up_times")
def test_keys_of_a_plan_are_estimated_in_order(model: nn.Module, labels: Tensor) -> None:
    found = searched(model, labels, mixers=["static_key"], speed_up=1e9)
    assert found.report is not None
    assert found.judged.layers == (0, 1, 2)
    own = copy.deepcopy(model)
    swap(own, "static_key", calibration=images(), drift=False)
    shown = images(4, seed=5)
    assert torch.allclose(found.report.swapped(shown), own(shown), atol=1e-5)


def test_of_uneven_classes_balanced_accuracy_counts(model: nn.Module, labels: Tensor) -> None:
    shown = images(60, seed=2)
    theirs = labels.clone()
    theirs[::3] = (theirs[::3] + 1) % 4  # 20 wrong answers
    held_out = HeldOut(shown, theirs, balanced=True)
    recalls = [float((labels[theirs == k] == k).double().mean()) for k in theirs.unique()]
    assert held_out.score(model)[1] == pytest.approx(sum(recalls) / len(recalls))
    assert HeldOut(shown, theirs).score(model)[1] == pytest.approx(40 / 60)
    swapped = copy.deepcopy(model)
    swap(swapped, "identity", drift=False)
    measured = held_out.step(model, swapped, {0: "identity"})
    change = measured.score - held_out.score(model)[1]
    assert measured.change_low < change < measured.change_high


# ---- words ------------------------------------------------------------------------------------


def step(chosen: dict[int, str], **more: Any) -> Step:
    entries: dict[str, Any] = {"loss": 1.0, "score": 0.8, "params": 1}
    entries |= {"change_low": -0.011, "change_high": 0.005, "macs": 1, "latency_ms": 1}
    entries |= {"latency_ratio": 0.82, "latency_ratio_q1": 0.8, "latency_ratio_q3": 0.9}
    entries |= {"latency_p": 0.2, "latency_verdict": "different"}
    names = {"layers": tuple(chosen), "mixers": tuple(chosen.values())}
    return Step(**{**entries, **names, "original_ms": 1, **more})


def result(judged: Step, **more: Any) -> Search:
    entries: dict[str, Any] = {
        "mixers": ("sra", "identity"),
        "paths": ("a", "b", "c", "d"),
        "max_drop": 0.01,
        "speed_up": None,
        "batch_size": 1,
        "scored": "accuracy",
        "refused": (),
        "trials": (Trial(layer=0, mixer="sra", rise=0.1, score=0.7, saved_ms=1.0, share=0.5),),
        "steps": (step({}), judged),
        "original": step({}),
        "images": (500, 500),
    }
    return Search(**{**entries, "judged": judged, **more})


PLAN = {0: "sra", 1: "sra", 3: "identity"}


def test_a_plan_pays_if_it_is_faster_and_its_interval_within_the_limit() -> None:
    good = step(PLAN, score=0.799, change_low=-0.009, change_high=0.007)
    assert result(good).verdict == "pays"
    assert result(good).answer == (
        "This pays: sra in blocks 1 to 2 and identity in block 4; on 500 images that took no part "
        "in the choice accuracy changes by −0.1 points (95 %: −0.9 to +0.7) and saves 18 % of the "
        "time"
    )
    wide = result(step(PLAN, score=0.799, change_low=-0.019))
    assert wide.verdict == "may pay"
    assert wide.enough == 2000  # half as wide: four times as many
    assert "2,500 held-out images would tell" in wide.answer
    assert result(step(PLAN, score=0.78)).verdict == "nothing pays"
    slow = step(PLAN, latency_verdict="not distinguishable", change_low=0)
    assert result(slow).verdict == "nothing pays"
    assert result(slow).answer.startswith("Nothing here pays. The nearest plan: sra in blocks")
    assert result(step(PLAN, latency_ratio=1.2)).verdict == "nothing pays"
    assert result(good, speed_up=1.2).verdict == "pays"
    assert result(good, speed_up=1.3).verdict == "nothing pays"
    assert result(step(PLAN, score=0.1), max_drop=None, speed_up=1.2).verdict == "pays"


def test_a_busy_machine_leaves_it_open() -> None:
    busy = result(step(PLAN, latency_verdict="busy", latency_ratio=0.06))
    assert busy.verdict == "unclear"
    assert "the machine was too busy to compare times" in busy.answer
    rows = [*csv.DictReader(io.StringIO(busy.tables["steps"].csv()))]
    assert rows[1]["latency_ms"] == rows[1]["latency_change"] == ""
    assert rows[0]["latency_ms"] != ""
    assert busy.figures == {}


def test_no_plan_says_that_nothing_pays() -> None:
    none = result(step({}), steps=(step({}),))
    assert none.verdict == "nothing pays"
    assert none.answer == (
        "Nothing here pays: no change saves time and loses at most 1.0 points of accuracy"
    )
    assert none.figures == {}


def test_the_sentence_of_a_swap_grades_the_change_by_its_interval() -> None:
    def said(score: float, low: float, high: float, images: int = 100, **more: Any) -> str:
        chosen = dict.fromkeys((6, 7), "ska")
        after = step(chosen, score=score, change_low=low, change_high=high, **more)
        of = {"layers": 12, "mixer": "ska", "held_out": images, "scored": "accuracy"}
        return " ".join(result(after).words("cost", step({}), after, of))

    start = "Replacing attention in blocks 7 to 8 with ska"
    assert said(0.777, -0.035, -0.011).startswith(
        f"{start} costs 2.3 points of accuracy (95 %: 1.1 to 3.5)"
    )
    assert said(0.823, 0.011, 0.035).startswith(f"{start} gains 2.3 points of accuracy (95 %: 1.1")
    assert said(0.8, 0.0, 0.0).startswith(f"{start} changes accuracy by 0.0 points, which may be")
    slower = said(0.8, -0.01, 0.01, latency_ratio=1.052)
    assert slower.endswith(" and takes 5 % more time")
    same = said(0.8, -0.01, 0.01, latency_ratio=1.001)
    assert same.endswith("no difference in time can be measured")
    few = said(0.8, -0.01, 0.01, latency_verdict="too few rounds")
    assert few.endswith("; too few rounds were timed to compare times")
    assert said(0.5, -0.9, 0.3, images=1) == (
        "One held-out image is too few to say what replacing attention in blocks 7 to 8 with ska "
        "costs"
    )


def test_the_interval_is_that_of_a_comparison_on_the_same_answers(
    model: nn.Module, labels: Tensor
) -> None:
    held_out = HeldOut(images(60, seed=2), labels)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule("head").get_parameter("weight").neg_()
    step = held_out.step(model, other, dict.fromkeys(range(3), "ska"))
    answers = (logits_of(each, held_out.images).argmax(1) for each in (other, model))
    after, before = ((answer == labels).numpy() for answer in answers)
    wanted = over_images({0: after}, {0: before})
    assert wanted is not None
    assert wanted.difference < 0
    assert (step.change_low, step.change_high) == (wanted.low, wanted.high)


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"max_drop": None}, "needs max_drop="),
        ({"max_drop": 1.0}, r"max_drop=1\.0"),
        ({"speed_up": 0.9}, r"speed_up=0\.9"),
        ({"batch_size": 0}, "batch_size"),
        ({"labels": None}, "needs the labels of its held-out images"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "labels"),
        ({"labels": torch.full((60,), 9)}, "labels from 9 to 9 are no classes"),
        ({"labels": torch.zeros(60)}, "whole numbers"),
        ({"images": torch.zeros(60, 1, 12, 16)}, "held-out images are 1x12x16.*takes 1x12x12"),
        ({"images": torch.zeros(60, 12, 12)}, r"must be floating point numbers \[n, C, H, W\]"),
        ({"images": torch.zeros(39, 1, 12, 12)}, "39 held-out images are too few"),
        ({"layers": "7"}, "3 layers with attention"),
        ({"mixers": ["static_key(activaton=relu)"]}, "activation"),
        ({"mixers": ["static_key/softmax"]}, "one mixer"),
    ],
)
def test_a_search_that_cannot_be_is_one_line(
    model: nn.Module, labels: Tensor, more: dict[str, Any], match: str
) -> None:
    with pytest.raises(UserError, match=match) as refusal:
        searched(model, **{"labels": labels, "max_drop": 0.1, **more})
    assert "\n" not in str(refusal.value)

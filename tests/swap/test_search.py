# SPDX-License-Identifier: Apache-2.0
"""The search for the layers that a budget swaps."""

from __future__ import annotations

import copy
import csv
import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from keymix.analysis.counting import count
from keymix.analysis.statistics import over_images
from keymix.analysis.timing import Paired
from keymix.errors import Interrupted, UserError
from keymix.hosts import find_mixers
from keymix.hosts.layers import find_layers
from keymix.models import create_model
from keymix.records import from_json
from keymix.swap.record import Attention, Cost, Search, Step, Trial
from keymix.swap.run import swap
from keymix.swap.search import HeldOut, attention_costs, search
from mixer_cases import stir

SMALL: dict[str, Any] = {"embed_dim": 12, "num_heads": 3, "depth": 3, "num_classes": 4}


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keymix.swap.search.ROUNDS", 2)


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
        return model(images(seed=2)).argmax(1)


def searched(model: nn.Module, labels: Tensor | None, **more: Any) -> Search:
    given: dict[str, Any] = {"budget": 0.5, "images": images(seed=2), "labels": labels}
    return search(model, "static_key", calibration=images(), **{**given, **more})


@pytest.fixture(scope="module")
def found(model: nn.Module, labels: Tensor) -> tuple[Search, list[Search]]:
    kept: list[Search] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keymix.swap.search.ROUNDS", 2)
        return searched(model, labels, keep=kept.append), kept


def by_hand(model: nn.Module, layers: list[int], labels: Tensor) -> tuple[float, float]:
    swapped = copy.deepcopy(model)
    if layers:
        swap(swapped, "static_key", layers, calibration=images(), drift=False)
    with torch.no_grad():
        logits = swapped(images(seed=2))
    return float(F.cross_entropy(logits, labels)), float(
        (logits.argmax(1) == labels).float().mean()
    )


@pytest.mark.slow
def test_every_step_is_what_a_swap_of_its_layers_gives(
    model: nn.Module, labels: Tensor, found: tuple[Search, list[Search]]
) -> None:
    result = found[0]
    assert result.complete
    assert [len(step.layers) for step in result.steps] == [0, 1, 2, 3]
    for step in result.steps:
        loss, top1 = by_hand(model, list(step.layers), labels)
        assert step.loss == pytest.approx(loss, rel=1e-5)
        assert step.top1 == pytest.approx(top1)
        assert step.latency_ms > 0
        assert step.original_ms > 0
        assert 0 < step.latency_ratio_q1 <= step.latency_ratio <= step.latency_ratio_q3
        assert step.change_low <= step.top1 - 1.0 <= step.change_high
    assert result.steps[0].top1 == 1.0
    whole = copy.deepcopy(model)
    swap(whole, "static_key", init="fresh")
    for step, shown in ((result.steps[0], model), (result.steps[3], whole)):
        counted = count(shown)
        assert (step.params, step.macs) == (counted.params, counted.macs)
    assert result.steps[3].loss > result.steps[0].loss + 1e-3


@pytest.mark.slow
def test_layers_come_by_the_rise_of_the_loss_alone(
    model: nn.Module, labels: Tensor, found: tuple[Search, list[Search]]
) -> None:
    result = found[0]
    rises = {i: by_hand(model, [i], labels)[0] for i in range(3)}
    assert {trial.layer: pytest.approx(trial.loss, rel=1e-5) for trial in result.trials} == rises
    assert result.order == tuple(sorted(rises, key=rises.__getitem__))  # all cost the same
    assert result.steps[-1].layers == result.order


def test_the_budget_is_met_at_the_first_step_that_holds_it(
    found: tuple[Search, list[Search]],
) -> None:
    result = found[0]
    assert [step.share for step in result.steps] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert result.met == 2
    assert result.layers == tuple(sorted(result.order[:2]))
    for budget, met in ((1e-6, 1), (1 / 3, 1), (0.34, 2), (1.0, 3)):
        assert replace(result, budget=budget).met == met


def test_the_model_is_left_as_it_was(model: nn.Module, labels: Tensor) -> None:
    before = copy.deepcopy(model.state_dict())
    random = torch.random.get_rng_state()
    model.train()
    searched(model, labels, layers=1, budget=0.1)
    assert model.training
    model.eval()
    assert torch.equal(torch.random.get_rng_state(), random)
    assert {m.mixer_name for m in find_mixers(model).values()} == {"softmax"}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 6])
def test_a_search_that_was_stopped_goes_on_where_it_was(
    model: nn.Module,
    labels: Tensor,
    found: tuple[Search, list[Search]],
    after: int,
) -> None:
    result, kept = found
    assert len(kept) == 1 + 4 + 3  # costs, steps, trials
    known = from_json(Search, kept[after].to_dict(), where="the search")
    assert known == kept[after]
    more: list[Search] = []
    ended = searched(model, labels, known=known, keep=more.append)
    assert len(more) == len(kept) - after - 1
    assert ended.attention == known.attention
    assert ended.trials[: len(known.trials)] == known.trials
    assert ended.steps[: len(known.steps)] == known.steps
    lines = [(step.layers, step.loss, step.top1) for step in ended.steps]
    assert lines == [(step.layers, step.loss, step.top1) for step in result.steps]


def test_what_is_known_is_handed_on_before_a_stop(model: nn.Module, labels: Tensor) -> None:
    kept: list[Search] = []

    def keep(now: Search) -> None:
        kept.append(now)
        if now.trials:
            raise Interrupted(2, "stopped")

    with pytest.raises(Interrupted):
        searched(model, labels, keep=keep)
    assert len(kept[-1].trials) == 1
    assert not kept[-1].complete
    assert kept[-1].layers == ()


def test_a_search_of_another_setting_or_model_is_not_gone_on_with(
    model: nn.Module, labels: Tensor, found: tuple[Search, list[Search]]
) -> None:
    known = found[1][3]
    with pytest.raises(UserError, match="has estimate='least_squares', this one 'mean'"):
        searched(model, labels, known=known, estimate="mean")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    with pytest.raises(UserError, match="another model or of other images; search again"):
        searched(other, labels, known=known)


@pytest.mark.slow
def test_a_search_leaves_no_hooks(labels: Tensor) -> None:
    own = VisionTransformer(img_size=12, patch_size=4, in_chans=1, **SMALL)  # keymix's listens
    before = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in own.modules()]
    searched(own, labels, layers=0, budget=0.1)
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in own.modules()] == before


@pytest.mark.slow
@pytest.mark.parametrize("cost", ["params", "macs", "latency"])
def test_shares_are_of_the_original_attention(cost: Cost) -> None:
    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 8, 32, 64), "img_size": 32}
    staged = create_model("cskaformer_s18", **sizes).eval()
    counted = count(staged, (3, 32, 32))
    result = attention_costs(staged, find_layers(staged), cost, torch.randn(1, 3, 32, 32))
    assert math.fsum(each.share for each in result) == pytest.approx(1)
    if cost == "latency":
        times = [each.latency_ms or 0.0 for each in result]
        assert min(times) > 0
        for each in result:
            assert each.latency_q1_ms <= each.latency_ms <= each.latency_q3_ms
        assert [each.share * sum(times) for each in result] == pytest.approx(times)
        return
    for each in result:
        inside = [at for at in counted.layers if f"{at.path}.".startswith(f"{each.path}.")]
        assert each.params == sum(at.params for at in inside)
        assert each.macs == sum(at.macs for at in inside)
        total = sum(getattr(other, cost) for other in result)
        assert each.share == pytest.approx(getattr(each, cost) / total)


# ---- words ------------------------------------------------------------------------------------


NO_TIMES: Any = dict.fromkeys(("latency_ms", "latency_q1_ms", "latency_q3_ms"))


def step(layers: tuple[int, ...], **more: Any) -> Step:
    entries: dict[str, Any] = {"share": len(layers) / 4, "loss": 1.0, "top1": 0.8, "params": 1}
    entries |= {"change_low": -0.011, "change_high": 0.005, "macs": 1, "latency_ms": 1}
    entries |= {"latency_ratio": 0.82, "latency_ratio_q1": 0.8, "latency_ratio_q3": 0.9}
    entries |= {"latency_p": 0.2, "latency_verdict": "not distinguishable"}
    return Step(**{**entries, "layers": layers, "original_ms": 1, **more})


def test_the_sentence_reports_measured_numbers() -> None:
    attention = tuple(
        Attention(path=str(i), params=1, macs=1, share=0.25, **NO_TIMES) for i in range(4)
    )
    result = Search(
        mixer="static_key",
        estimate="least_squares",
        cost="params",
        budget=0.5,
        images=10,
        attention=attention,
        candidates=(0, 1, 2, 3),
        trials=tuple(Trial(layer=i, loss=1.0 + (i % 2), top1=0.5) for i in range(4)),
        steps=(
            step(()),
            step((0,), top1=0.8),
            step((0, 2), top1=0.797, latency_verdict="different"),
            step((0, 2, 1), latency_ratio=0.06, latency_verdict="busy"),
            step((0, 2, 1, 3)),
        ),
    )
    assert result.order == (0, 2, 1, 3)
    doubt = "points, which may be chance (95 %: −1.1 to +0.5)"
    assert result.answer == (
        f"Replacing attention in blocks 1, 3 with static_key changes accuracy by −0.3 {doubt} and "
        "saves 18 % of the time"
    )
    assert result.says(0) == "This is the original model, with nothing replaced"
    assert result.says(1) == (
        f"Replacing attention in block 1 with static_key changes accuracy by 0.0 {doubt}; no "
        "difference in time can be measured"
    )
    assert "in blocks 1 to 3 with" in result.says(3)
    assert result.says(3).endswith("; the machine was too busy to compare times")
    assert "in all 4 blocks with" in result.says(4)
    assert result.basis == "the parameters of the original model's attention"
    assert replace(result, budget=0.9, steps=result.steps[:3]).met is None
    dear = replace(attention[2], share=0.5)
    costs = replace(
        result,
        attention=(*attention[:2], dear, attention[3]),
        trials=tuple(replace(t, loss=1.1) for t in result.trials),
    )
    assert costs.order == (2, 0, 1, 3), "equal rises: the layer that costs more comes first"


def test_the_sentence_grades_the_change_by_its_interval() -> None:
    def said(top1: float, low: float, high: float, images: int = 100, **more: Any) -> str:
        after = step((6, 7), top1=top1, change_low=low, change_high=high, **more)
        return Search(
            mixer="ska",
            estimate="mean",
            cost="params",
            budget=1.0,
            images=images,
            attention=(Attention(path="", params=1, macs=1, share=1.0, **NO_TIMES),) * 12,
            steps=(step(()), after),
        ).says(1)

    start = "Replacing attention in blocks 7 to 8 with ska"
    assert said(0.777, -0.035, -0.011).startswith(
        f"{start} costs 2.3 points of accuracy (95 %: 1.1 to 3.5)"
    )
    assert said(0.823, 0.011, 0.035).startswith(f"{start} gains 2.3 points of accuracy (95 %: 1.1")
    assert said(0.8, 0.0, 0.0).startswith(f"{start} changes accuracy by 0.0 points, which may be")
    slower = said(0.8, -0.01, 0.01, latency_verdict="different", latency_ratio=1.052)
    assert slower.endswith(" and takes 5 % more time")
    same = said(0.8, -0.01, 0.01, latency_verdict="different", latency_ratio=1.001)
    assert same.endswith("no difference in time can be measured")
    few = said(0.8, -0.01, 0.01, latency_verdict="too few rounds")
    assert few.endswith("; too few rounds were timed to compare times")
    assert said(0.5, -0.9, 0.3, images=1) == (
        "One held-out image is too few to say what replacing attention in blocks 7 to 8 with ska "
        "costs"
    )


def test_a_busy_machine_leaves_times_and_their_change_open() -> None:
    result = Search(
        mixer="static_key",
        cost="params",
        estimate="least_squares",
        budget=0.5,
        images=10,
        attention=(Attention(path="0", params=1, macs=1, share=1.0, **NO_TIMES),),
        candidates=(0,),
        steps=(step(()), step((0,), latency_ratio=0.06, latency_verdict="busy")),
    )
    quiet, busy = csv.DictReader(io.StringIO(result.tables["steps"].csv()))
    times = ("latency_ms", "original_ms", "latency_change", "latency_q1", "latency_q3")
    assert [busy[name] for name in times] == [""] * 5
    assert "" not in [quiet[name] for name in times]
    assert result.steps[1].latency_text == "unclear, the machine was busy"
    assert "−94" not in result.tables["steps"].csv()
    different = replace(result.steps[1], latency_verdict="different")
    assert different.latency_text.startswith("−94")
    assert set(result.figures) == {"top1", "loss", "latency_change"}
    busy_steps = tuple(replace(each, latency_verdict="busy") for each in result.steps)
    only_busy = replace(result, steps=busy_steps)
    assert set(only_busy.figures) == {"top1", "loss"}


def test_a_search_of_a_version_without_the_test_goes_on_and_claims_nothing() -> None:
    record = Search(
        mixer="static_key",
        cost="params",
        estimate="least_squares",
        budget=0.5,
        images=10,
        steps=(step(()), step((0,))),
    ).to_dict()
    for each in record["steps"]:
        del each["latency_p"], each["latency_verdict"]
    before = from_json(Search, record, where="the search")
    assert [each.latency_verdict for each in before.steps] == [None, None]
    assert "−18" not in before.says(1)
    assert all(each.timed for each in before.steps)
    assert before.steps[1].latency_text == "not tested"
    assert not replace(before.steps[1], latency_verdict="busy").timed


@pytest.mark.slow
@pytest.mark.parametrize("verdict", ["different", "busy"])
def test_steps_share_the_level_of_the_test_and_the_original_is_not_tested(
    verdict: str, model: nn.Module, labels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[int] = []

    def paired(*models: nn.Module, comparisons: int, **more: Any) -> Paired:
        lines.append(comparisons)
        numbers = {"base_ms": 1.0, "other_ms": 1.3, "ratio": 1.3, "ratio_q1": 1.3, "ratio_q3": 1.3}
        found = {"rounds": 20, "quiet_share": 1.0, "p": 0.0, "verdict": verdict}
        return Paired(**{**numbers, **found})

    monkeypatch.setattr("keymix.swap.search.measure_paired", paired)
    found = searched(model, labels, layers=[0, 1])
    assert lines[1:] == [2, 2]
    original, *others = found.steps
    assert original.latency_verdict == ("busy" if verdict == "busy" else None)
    assert original.latency_p is None
    assert [each.latency_verdict for each in others] == [verdict] * 2
    assert found.steps[0].timed == (verdict != "busy")


def test_layers_that_cost_nothing_come_last_whatever_they_bring() -> None:
    losses, shares = (1.5, 0.9, 1.125, 1.0), (0.75, 0.0, 0.25, 0.0)
    result = Search(
        mixer="static_key",
        cost="params",
        estimate="least_squares",
        budget=0.5,
        images=10,
        attention=tuple(
            Attention(path=str(i), params=0, macs=0, share=share, **NO_TIMES)
            for i, share in enumerate(shares)
        ),
        candidates=(0, 1, 2, 3),
        trials=tuple(Trial(layer=i, loss=loss, top1=0.5) for i, loss in enumerate(losses)),
        steps=(step(()),),
    )
    # rises of the loss for a unit of cost are 0.67 and 0.5; of those for nothing, -0.1 and 0
    assert result.order == (2, 0, 1, 3)


def test_the_interval_is_that_of_a_comparison_on_the_same_answers(
    model: nn.Module, labels: Tensor
) -> None:
    held_out = HeldOut(images(seed=2), labels)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule("head").get_parameter("weight").neg_()
    step = held_out.step(model, other, (0, 1, 2), 1.0)
    after, before = (held_out.score(each)[1].numpy() for each in (other, model))
    wanted = over_images({0: after}, {0: before})
    assert wanted is not None
    assert wanted.difference < 0
    assert (step.change_low, step.change_high) == (wanted.low, wanted.high)


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"budget": 0}, "budget=0 must be above 0 and at most 1"),
        ({"budget": 1.01}, "budget=1.01 must be above 0"),
        ({"budget": math.nan}, "budget=nan must be above 0"),
        ({"budget": True}, "budget=True"),
        ({"cost": "flops"}, "cost.*flops"),
        ({"labels": None}, "needs the labels of its held-out images"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "one for each of the 24 held-out images"),
        ({"labels": torch.full((24,), 9)}, "labels from 9 to 9 are no classes"),
        ({"labels": torch.zeros(24)}, "whole numbers"),
        ({"images": torch.zeros(24, 1, 12, 16)}, "held-out images are 1x12x16.*takes 1x12x12"),
        ({"images": torch.zeros(24, 12, 12)}, r"must be floating point numbers \[n, C, H, W\]"),
        ({"layers": 0}, "1 layers named make up 33% of the parameters"),
        ({"layers": "7"}, "3 layers with attention"),
        ({"mixer_options": {"activaton": "relu"}}, "activation"),
    ],
)
def test_a_search_that_cannot_be_is_one_line(
    model: nn.Module, labels: Tensor, more: dict[str, Any], match: str
) -> None:
    with pytest.raises(UserError, match=match) as refusal:
        searched(model, **{"labels": labels, **more})
    assert "\n" not in str(refusal.value)


def test_another_search_is_not_gone_on_with(
    model: nn.Module, labels: Tensor, found: tuple[Search, list[Search]]
) -> None:
    with pytest.raises(UserError, match=r"earlier search has budget=0\.5, this one 0\.7"):
        searched(model, labels, budget=0.7, known=found[0])


def test_a_mixer_that_cannot_sit_somewhere_is_refused_before_anything_is_measured(
    labels: Tensor,
) -> None:
    sizes = {"embed_dim": 12, "depths": (2, 1), "num_heads": (3, 3), "merging": (2,)}
    swin = create_model("swin_tiny_p2_32", num_classes=4, **sizes)
    batch = torch.randn(8, 3, 32, 32)
    lines: list[str] = []
    with pytest.raises(UserError, match="pooling"):
        search(
            swin.eval(),
            "pooling",
            calibration=batch,
            images=batch,
            labels=labels[:8],
            budget=0.5,
            progress=lambda text, share: lines.append(text),
        )
    assert not lines

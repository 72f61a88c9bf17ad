# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from keymix.compare import folder
from keymix.compare.models import (
    choose_baseline,
    choose_mixers,
    choose_seeds,
    fitting,
    make_plan,
    meta_builder,
)
from keymix.compare.plan import named_recipe
from keymix.compare.question import Plan, Question
from keymix.data import load
from keymix.data.record import SameImages
from keymix.errors import UserError
from keymix.mixers.registry import get_mixer_class
from keymix.mixers.spec import parse_mixer
from keymix.models import create_model
from keymix.models.match import nearest, trainable
from keymix.train.recipe import Recipe


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def _recipe(**asked) -> Recipe:
    return named_recipe(Question(**({"data": "digits"} | asked)))[0]


def _plan(digits, mixers: str, *, recipe: Recipe | None = None, **asked) -> Plan:
    question = Question(data="digits", mixers=mixers, **asked)
    specs = choose_mixers(mixers, controls=question.controls)
    return make_plan(question, recipe or named_recipe(question)[0], digits, specs)


def test_default_mixers_are_the_dense_mechanisms_softmax_first_and_identity_last():
    labels = [spec.label for spec in choose_mixers(None, controls=True)]
    assert labels[0] == "softmax"
    assert labels[-1] == "identity"
    paper = {"softmax", "static_key", "conv_static_key", "re_attention", "key_value"}
    assert paper <= set(labels)
    for label in labels[:-1]:
        traits = get_mixer_class(label).traits
        assert not traits.control
        assert not traits.named_only


def test_default_mixers_of_a_spiking_model_are_the_spiking_mechanisms():
    labels = [spec.label for spec in choose_mixers(None, controls=True, model="qkformer_micro_32")]
    assert labels == ["spiking_self", "qk_channel", "qk_token", "spike_driven", "identity"]
    assert choose_mixers(None, controls=True, model="vit_tiny_patch16_224")[0].label == "softmax"
    named = choose_mixers("qkta,qkca,ssa", controls=True, model="qkformer_micro_32")
    assert choose_baseline(named, None).label == "spiking_self"


def test_controls_can_be_declined_and_are_not_doubled():
    assert [s.label for s in choose_mixers("mhsa,ska", controls=False)] == ["softmax", "static_key"]
    labels = [s.label for s in choose_mixers("identity,mhsa", controls=True)]
    assert labels == ["identity", "softmax"]


def test_one_mixer_alone_is_refused():
    with pytest.raises(UserError, match="at least two"):
        choose_mixers("mhsa", controls=False)


def test_baseline_is_softmax_wherever_it_stands_else_the_first():
    assert choose_baseline(choose_mixers("ska,mhsa", controls=True), None).label == "softmax"
    assert choose_baseline(choose_mixers("kv,ska", controls=True), None).label == "key_value"
    assert choose_baseline(choose_mixers("mhsa,ska", controls=True), "ska").label == "static_key"
    with pytest.raises(UserError, match="unknown baseline"):
        choose_baseline(choose_mixers("mhsa,ska", controls=True), "cska")


def test_seeds_are_a_number_or_a_list():
    assert choose_seeds(3) == (0, 1, 2)
    assert choose_seeds([4, 1]) == (4, 1)
    assert choose_seeds([2**64 - 1, 0]) == (2**64 - 1, 0)
    for bad in (0, [], [1, 1], [-1], [2**64], 10**14):
        with pytest.raises(UserError):
            choose_seeds(bad)


def test_a_comparison_holds_so_many_runs() -> None:
    assert len(choose_seeds(1_000, mixers=10)) == 1_000
    with pytest.raises(UserError, match=r"^1,001 seeds of 10 mixers are 10,010 runs, .* 1,000 see"):
        choose_seeds(1_001, mixers=10)


def test_recipe_follows_the_data():
    assert _recipe(data=None).name == "digits_vit"
    chosen = _recipe(data="folder:somewhere")
    assert chosen.name == "small_images_vit"
    assert chosen.data.spec == "folder:somewhere"


def test_recipe_takes_short_forms_and_overrides():
    recipe = _recipe(epochs=3, limit=50, overrides={"optim.lr": 0.5})
    assert (recipe.schedule.epochs, recipe.data.limit, recipe.optim.lr) == (3, 50, 0.5)


def test_a_warmup_longer_than_the_epochs_asked_for_keeps_its_share():
    long = _recipe(
        overrides={"schedule.epochs": 10, "schedule.warmup_epochs": 2.0},
    )
    short = _recipe(recipe=long, epochs=2)
    assert short.schedule.warmup_epochs == pytest.approx(0.4)


@pytest.mark.parametrize(("key", "flag"), [("seed", "--seeds"), ("model.mixer", "--mixers")])
def test_what_a_comparison_varies_is_no_recipe_field(key, flag):
    with pytest.raises(UserError, match=flag):
        _recipe(overrides={key: 1})


def test_unknown_recipe_key_names_the_nearest():
    with pytest.raises(UserError, match=r"optim\.lr"):
        _recipe(overrides={"optim.lrr": 1})


def test_a_mixer_without_prefix_tokens_makes_every_model_read_out_by_the_mean(digits):
    plan = _plan(digits, "mhsa", model="vit_micro_p4_32", controls=True)
    assert plan.pooled_for == ("identity",)
    assert plan.pooling == plan.recipe.model.global_pool == "avg"
    for mixer in plan.mixers:
        assert plan.recipe_for(mixer, 1).model.global_pool == "avg"


def test_without_such_a_mixer_the_class_token_stays(digits):
    plan = _plan(digits, "mhsa,ska", model="vit_micro_p4_32", controls=False)
    assert plan.pooled_for == ()
    assert plan.pooling == "token"
    assert plan.recipe.model.global_pool is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pooling", "pooled_for"),
    [
        ("cait_micro_p4_32", "token", ()),  # the class token meets the patches in layers of its own
        ("swin_micro_p2_32", "avg", ()),
        ("caformer_micro_32", "avg", ()),
        ("cvt_micro_32", "avg", ("identity",)),
    ],
)
def test_only_a_class_token_that_receives_nothing_changes_the_readout(
    digits, model: str, pooling: str, pooled_for: tuple[str, ...]
):
    photos = replace(digits, image_size=(32, 32), in_chans=3)
    plan = _plan(photos, "mhsa,ska", model=model, controls=True)
    assert (plan.pooling, plan.pooled_for) == (pooling, pooled_for)


def test_mixers_nobody_named_are_left_out_where_they_cannot_sit(digits):
    photos = replace(digits, image_size=(32, 32), in_chans=3)
    recipe = _recipe(model="swin_micro_p2_32")
    specs = choose_mixers(None, controls=True)
    kept, reasons = fitting(specs, recipe, photos)
    assert [s.label for s in specs if s not in kept] == ["re_attention"]
    ready = replace(recipe, model=replace(recipe.model, name="vit_micro_p4_32"))
    assert fitting(specs, ready, photos) == (specs, ())
    (reason,) = reasons
    assert "mixer re_attention" in reason
    assert "windows are shifted" in reason


def test_what_was_left_out_is_kept_with_the_plan(digits, tmp_path: Path):
    why = "swin with mixer re_attention: it cannot sit there"
    plan = replace(_plan(digits, "mhsa,ska", out=tmp_path), cannot_sit=(why,))
    folder.keep(folder.Stored(plan=plan, data=SameImages.of(digits.record())))
    again = folder.read(tmp_path).plan
    assert again == replace(plan, question=again.question)
    assert again.question == replace(plan.question, out=again.question.out)


def test_a_cool_down_longer_than_the_epochs_asked_for_keeps_its_share():
    long = _recipe(
        overrides={"schedule.epochs": 30, "schedule.cooldown_epochs": 10},
    )
    short = _recipe(recipe=long, epochs=6)
    assert short.schedule.cooldown_epochs == 2


def test_weights_that_are_not_there_are_refused_before_training(digits, tmp_path: Path):
    recipe = _recipe(overrides={"model.weights": str(tmp_path / "gone")})
    with pytest.raises(UserError, match="gone"):
        _plan(digits, "mhsa,ska", recipe=recipe)


def test_weights_that_do_not_fit_are_refused_before_training(digits, tmp_path: Path):
    path = tmp_path / "own.pth"
    recipe = _recipe(overrides={"model.weights": str(path)})
    state = meta_builder(recipe, digits)(parse_mixer("ska")).to_empty(device="cpu").state_dict()
    state = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    torch.save(state, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = _plan(digits, "mhsa,ska", recipe=recipe)
    assert plan.recipe.model.weights == str(path)
    torch.save({**state, "pos_embed": torch.zeros(1, 5, 3)}, path)
    with pytest.raises(UserError, match=r"own\.pth.*pos_embed is \[1, 5, 3\]"):
        _plan(digits, "mhsa,ska", recipe=recipe)


def test_a_class_token_by_hand_with_a_mixer_without_prefix_tokens_is_refused(digits):
    recipe = _recipe(model="vit_micro_p4_32")
    recipe = replace(recipe, model=replace(recipe.model, global_pool="token"))
    with pytest.raises(UserError, match="--no-controls"):
        _plan(digits, "mhsa", recipe=recipe)


def test_heads_that_do_not_divide_are_refused_before_training(digits):
    with pytest.raises(UserError, match="num_heads=5"):
        _plan(digits, "mhsa(num_heads=5),ska")


def test_runs_differ_in_mixer_and_seed_alone(digits):
    plan = _plan(digits, "mhsa,ska")
    one, two = plan.recipe_for(plan.mixers[0], 0), plan.recipe_for(plan.mixers[1], 1)

    def bare(recipe: Recipe) -> Recipe:
        return replace(recipe, seed=0, model=replace(recipe.model, mixer=None))

    assert bare(one) == bare(two)
    assert (one.model.mixer, two.model.mixer) == ("softmax", "static_key")
    assert (one.seed, two.seed) == (0, 1)


def test_a_model_beyond_memory_is_refused_before_anything_trains(digits):
    with pytest.raises(UserError, match=r"with mixer key_value\(pos_dim=10000000000\) has weights"):
        _plan(digits, "mhsa,kv(pos_dim=10000000000)")


def test_planning_leaves_the_random_state_alone(digits):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    _plan(digits, "mhsa,ska")
    assert torch.equal(before, torch.get_rng_state())


def test_nearest_takes_ties_to_the_smaller():
    assert nearest(25, lambda w: 10 * w, 1, 9) == 2
    assert nearest(26, lambda w: 10 * w, 1, 9) == 3
    assert nearest(1000, lambda w: 10 * w, 1, 9) == 8
    assert nearest(25, lambda w: 10 * w, 6, 0, -1) == 2


@pytest.mark.slow
def test_matched_width_is_the_best_of_all_heads_then_of_all_widths(digits):
    plan = _plan(digits, "mhsa,kv", match="params", controls=False)
    target = plan.mixers[0].params
    chosen = plan.mixers[1]
    specs = choose_mixers("kv,mhsa", controls=False)
    build = meta_builder(plan.recipe, digits)

    def count(heads: int, width: int) -> int:
        return trainable(build(specs[0].with_options(num_heads=heads, head_dim=width)))

    own = next(iter(build(specs[0]).modules()))
    from keymix.hosts import find_mixers

    site = next(iter(find_mixers(own).values())).site
    width = site.dim // site.num_heads
    heads = min(
        range(site.num_heads, 3 * site.num_heads),
        key=lambda h: (abs(count(h, width) - target), h),
    )
    best = min(range(1, 3 * width), key=lambda w: (abs(count(heads, w) - target), w))
    assert chosen.label == f"key_value(head_dim={best},num_heads={heads})"
    assert chosen.params == count(heads, best)
    assert f"{heads} heads of {best}" in chosen.note


def test_matching_leaves_the_baseline_and_larger_mixers_as_they_are(digits):
    plan = _plan(digits, "mhsa,cska,kv(num_heads=2)", match="params")
    assert [e.label for e in plan.mixers] == [
        "softmax",
        "conv_static_key",
        "key_value(num_heads=2)",
        "identity",
    ]
    assert "not widened" in plan.mixers[1].note
    assert "by hand" in plan.mixers[2].note
    assert "control" in plan.mixers[3].note


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "own", "mixed"),
    [
        (
            "caformer_micro_32",
            "sep_conv/sep_conv/softmax/softmax",
            "sep_conv/sep_conv/ska/softmax",
        ),
        ("swin_micro_p2_32", "mhsa", "kv/softmax/softmax"),
    ],
)
def test_a_model_matched_alone_is_the_one_that_a_comparison_chooses(
    digits, model: str, own: str, mixed: str
):
    photos = replace(digits, image_size=(32, 32), in_chans=3)
    plan = _plan(photos, f"{own},{mixed}", model=model, controls=False, match="params")
    chosen = plan.mixers[1].label.split("/")
    assert [stage for stage in chosen if "head_dim" in stage] == [
        stage for stage in chosen if stage.startswith(("static_key", "key_value"))
    ]
    with torch.device("meta"):
        alone = create_model(model, mixer=mixed.split("/"), match="params", in_chans=3)
        compared = create_model(model, **parse_mixer(plan.mixers[1].label).model_kwargs())
    assert [(k, p.shape) for k, p in alone.named_parameters()] == [
        (k, p.shape) for k, p in compared.named_parameters()
    ]


def test_labels_of_matched_mixers_read_back(digits):
    plan = _plan(digits, "mhsa,ska", match="params")
    label = plan.mixers[1].label
    assert parse_mixer(label).label == label

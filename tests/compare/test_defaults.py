# SPDX-License-Identifier: Apache-2.0
"""What a comparison takes where nobody named a recipe, and that it says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from keymix import task
from keymix.compare import run
from keymix.compare.events import Event
from keymix.compare.plan import at_the_models_size, default_note, named_recipe
from keymix.compare.question import Plan, Question
from keymix.data import specs
from keymix.data.specs import built_in
from keymix.errors import KeymixWarning, UserError
from keymix.train.recipe import Recipe

EVENTS, SPIKING = "moving_digits_qkformer", "qkformer_micro_32"


@pytest.mark.parametrize(
    ("data", "model", "mixers", "recipe", "built"),
    [
        ("moving_digits", None, None, EVENTS, SPIKING),
        ("moving_digits:200", None, "mhsa,ska", EVENTS, SPIKING),
        ("events:mine", None, None, EVENTS, SPIKING),
        ("cifar10dvs:there", None, None, EVENTS, SPIKING),
        ("dvs128:there", None, None, EVENTS, SPIKING),
        (None, None, "qkta,qkca,ssa", EVENTS, SPIKING),
        (None, None, ["qkta/qkta/ssa", "identity"], EVENTS, SPIKING),
        ("digits", None, "qkta,ssa", "digits_vit", SPIKING),
        ("cifar10", None, "qkta,ssa", "small_images_vit", SPIKING),
        ("cifar10", None, "mhsa,qkta", "small_images_vit", "vit_micro_conv_p4_32"),
        ("cifar10", None, "identity,pooling", "small_images_vit", "vit_micro_conv_p4_32"),
        ("cifar10", "qkformer_hst_4_384", "qkta,ssa", "small_images_vit", "qkformer_hst_4_384"),
        (None, None, None, "digits_vit", "vit_nano_p4_12"),
        ("masks:mine", None, None, "small_masks_unet", "trans_unet_micro"),
        ("uwgi:there", None, "mhsa,kv(pos_dim=50)", "small_masks_unet", "trans_unet_micro"),
    ],
)
def test_data_and_mixers_choose_recipe_and_model(
    data: str | None, model: str | None, mixers: str | Sequence[str] | None, recipe: str, built: str
) -> None:
    found, why = named_recipe(Question(data=data, model=model, mixers=mixers))
    assert (found.name, found.model.name) == (recipe, built)
    assert f"with model {built}" in default_note(found, why)
    assert bool(why) == (built in (SPIKING, "trans_unet_micro"))


def test_the_recipe_of_events_is_for_all_data_of_events() -> None:
    kinds = {spec.name for spec in built_in().values() if spec.events}
    assert kinds == {"moving_digits", "cifar10dvs", "dvs128", "events"}
    assert named_recipe(Question(data="moving_digits"))[0].data.image_size is None


def recordings(root: Path, height: int, width: int) -> str:
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for i in range(10):
            events = {"t": np.arange(40), "x": np.full(40, width - 1), "y": np.full(40, height - 1)}
            np.savez(root / name / f"{i}.npz", **events, p=np.arange(40) % 2)
    return f"events:{root}"


@pytest.mark.parametrize(
    ("sensor", "size"),
    [((48, 64), 32), ((32, 33), 32), ((32, 32), None), ((16, 64), None), ((8, 8), None)],
)
def test_frames_have_the_size_that_the_model_is_made_for(
    sensor: tuple[int, int], size: int | None, tmp_path: Path
) -> None:
    data = recordings(tmp_path / "mine", *sensor)

    def sized(**changed: object) -> Recipe:
        return at_the_models_size(named_recipe(Question(data=data, overrides=changed))[0])

    assert sized().data.image_size == size
    assert sized(**{"data.image_size": 12}).data.image_size == 12
    assert sized(**{"model.name": "qkformer_hst_2_256"}).data.image_size is None
    assert ("at 32x32 pixels" in default_note(sized(), "why")) == (size == 32)


def begun(monkeypatch: pytest.MonkeyPatch, **call: object) -> tuple[Plan, list[str]]:
    """The plan of a comparison that is stopped before it trains, and what it has said."""
    plans: list[Plan] = []
    said: list[str] = []

    class Stop(Exception):
        pass

    def claim(plan: Plan, *_: object, **__: object) -> None:
        plans.append(plan)
        raise Stop

    def watch(event: Event) -> None:
        if event.kind == "note":
            said.append(event.text)

    monkeypatch.setattr(run.folder, "claim", claim)
    with pytest.raises(Stop):
        run.compare(reference=False, **call, progress=watch)  # type: ignore[arg-type]
    return plans[0], said


@pytest.mark.slow
def test_recordings_are_compared_without_more_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan, said = begun(monkeypatch, data="moving_digits:100", out=tmp_path / "out")
    assert plan.labels == ("spiking_self", "qk_channel", "qk_token", "spike_driven", "identity")
    assert plan.recipe.data.spec == "moving_digits:100"
    assert said[1] == (
        "moving_digits:100 holds recordings of events: recipe moving_digits_qkformer with model "
        "qkformer_micro_32 is taken; --recipe and --model name others"
    )
    assert sum("is taken" in text for text in said) == 1


def test_what_is_named_is_taken_without_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = {"data": "moving_digits:100", "mixers": "qkta,ssa", "recipe": EVENTS, "limit": 60}
    plan, said = begun(monkeypatch, **call, out=tmp_path / "out")
    assert plan.labels == ("qk_token", "spiking_self", "identity")
    assert not any("is taken" in text for text in said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"data": "moving_digits:100", "model": "vit_micro_p4_32"},
            "model 'vit_micro_p4_32' takes images, and data 'moving_digits:100' has frames",
        ),
        (
            {"data": "moving_digits:100", "model": "vit_tiny_patch16_224"},
            "model 'vit_tiny_patch16_224' takes images",
        ),
        (
            {"data": "moving_digits:100", "mixers": "mhsa,ska"},
            "mixer softmax: .*whose tokens are spiking",
        ),
        (
            {"mixers": "qkta,mhsa,identity,ska/ssa"},
            r"^spiking mixers \(qk_token, spiking_self\) and dense ones \(softmax, static_key\) "
            r"take different tokens and cannot be compared in one model: name .*\. --ann adds a ",
        ),
        (
            {"data": "moving_digits:100", "mixers": ["qkta", "mhsa"]},
            r"^spiking mixers \(qk_token\)",
        ),
        ({"recipe": "digits_vit", "mixers": "mhsa,qkta"}, r"and dense ones \(softmax\) take"),
        (
            {"data": "moving_digits:100", "recipe": "small_images_vit", "model": SPIKING},
            r"augment\.crop_padding=4 does not fit",
        ),
        (
            {"data": "digits", "overrides": {"augment.snn_wide": True}},
            r"augment\.snn_wide=True does not fit",
        ),
        (
            {"data": "digits", "limit": 100, "overrides": {"augment.auto_augment": "rand-m9"}},
            r"augment\.auto_augment='rand-m9' changes images one by one",
        ),
    ],
)
def test_what_does_not_fit_is_one_line_without_warnings_or_folder(
    call: dict[str, object], message: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    with pytest.raises(UserError, match=message):
        run.compare(**call, out=tmp_path / "out")  # type: ignore[arg-type]
    assert not [w for w in recwarn if issubclass(w.category, KeymixWarning)]
    assert not (tmp_path / "out").exists()


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> str:
    """Data of a task of one's own that has a recipe for the data set ``jars`` alone."""
    monkeypatch.setattr(task, "_OWN", {})
    monkeypatch.setattr(specs, "_OWN", {})
    task.register_task(
        task.Task(
            name="counting",
            does="counts things",
            holds="images with a number each",
            scores=(task.Score(key="error", name="error", short="error", label="error"),),
            recipes={"jars": "digits_vit"},
            training=object(),
            answers=object(),
        )
    )
    for name in ("jars", "boxes"):
        specs.source(name, summary="", task="counting")(lambda argument, faults: None)
    return "counting"


def test_a_task_of_ones_own_brings_its_recipe_or_says_that_one_is_needed(counting: str) -> None:
    found, why = named_recipe(Question(data="jars"))
    assert (found.name, why) == ("digits_vit", "jars holds images with a number each")
    with pytest.raises(UserError, match=f"{counting}.*boxes.*--recipe"):
        named_recipe(Question(data="boxes"))

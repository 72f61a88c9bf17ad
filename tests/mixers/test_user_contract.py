# SPDX-License-Identifier: Apache-2.0
"""A class from outside keymix that breaks a rule of the seam is refused at its first use."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

from broken_mixers import BROKEN, EVEN_GRIDS, GOOD, HEAD, MEAN, written
from keymix import create_mixer
from keymix.errors import Interrupted, UserError
from keymix.mixers import registry, user_mixers
from keymix.mixers.contract import breaks_roles
from keymix.models import create_model
from keymix.swap import swap
from mixer_cases import ACCURACY, make

SITE: dict[str, Any] = {"dim": 24, "num_heads": 2, "grid": (4, 4), "num_prefix_tokens": 1}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named_in_one_line(rule: str, tmp_path: Path) -> None:
    registry.import_file(written(tmp_path, BROKEN[rule]))
    for _ in range(2):  # it is refused whenever it is used
        with pytest.raises(UserError, match=r"docs/own-mixer\.md") as caught:
            create_mixer("mine", **SITE)
        message = str(caught.value)
        assert f"mixer 'mine' breaks the rule {rule.partition(': ')[0]!r}" in message
        assert "\n" not in message


@pytest.mark.parametrize("rule", ["shape: averaged away", "signature"])
def test_every_door_refuses_it(rule: str, tmp_path: Path) -> None:
    registry.import_file(written(tmp_path, BROKEN[rule]))
    name = rule.partition(": ")[0]
    small = {"embed_dim": 12, "depth": 1, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, **small)
    doors = {
        "create_model": lambda: create_model("vit_nano_p2_12", mixer="mine"),
        "create_model on meta": lambda: create_model("vit_nano_p2_12", mixer="mine", device="meta"),
        "swap": lambda: swap(model, "mine"),
    }
    for door in doors.values():
        with pytest.raises(UserError, match=f"breaks the rule '{name}'"):
            door()
    with torch.device("meta"), pytest.raises(UserError, match=f"breaks the rule '{name}'"):
        create_mixer("mine", **SITE)


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_what_keeps_the_rules_is_built_and_checked_once(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.import_file(written(tmp_path, text))
    mixer = create_mixer("mine", **SITE)
    spikes = torch.ones(3, 2, 17, 24) if mixer.claims.domain == "spiking" else torch.ones(2, 17, 24)
    assert mixer(spikes).shape == spikes.shape
    tried: list[Any] = []
    monkeypatch.setattr(user_mixers, "outcomes", lambda *given: tried.append(given) or iter(()))
    create_mixer("mine", **SITE)
    assert not tried


def test_the_check_leaves_no_trace(tmp_path: Path, shapes_checked: bool) -> None:
    """Weights, running statistics, modes and random states are as without a check."""
    text = GOOD["a norm"]
    registry.import_file(written(tmp_path, text))
    kind = registry.get_mixer_class("mine")
    states = []
    for _ in range(2):  # the second time, the class has been checked
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        made = create_mixer("mine", **SITE)
        states.append(
            (
                {k: v.clone() for k, v in made.state_dict().items()},
                made.training,
                torch.rand(3),
                0.0 if shapes_checked else random.random(),  # the checker draws from it too
                np.random.rand(),
            )
        )
    assert kind in user_mixers._KEPT
    for one, other in zip(*states, strict=True):
        if isinstance(one, dict):
            assert one["norm.running_mean"].abs().sum() == 0
            assert all(torch.equal(one[k], other[k]) for k in one)
        else:
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_the_check_seeds_the_cpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise AssertionError("it reseeds every device, and the CPU's state alone is put back")

    for module, name in ((torch, "manual_seed"), (torch.cuda, "manual_seed_all")):
        monkeypatch.setattr(module, name, refuse)
    text = MEAN.replace("(self, site):", "(self, site, *, scale: float = 0.5):")
    text = text.replace("self.proj =", "self.drop = nn.Dropout(scale)\n        self.proj =")
    text = text.replace("return self.proj(", "return self.drop(x) + self.proj(")
    registry.import_file(written(tmp_path, HEAD + text))
    assert create_mixer("mine", **SITE) is not None
    trial = user_mixers.Trial(registry.get_mixer_class("mine"))
    assert [o.why for o in user_mixers.outcomes(trial)] == [None] * len(user_mixers.RULES)


OWN = "class Own(Exception): pass\n"


@pytest.mark.parametrize("where", ["super().__init__(site)", "return self.proj("])
@pytest.mark.parametrize(
    ("error", "says"),
    [("Own('seven')", "Own: seven"), ("SystemExit(5)", "SystemExit: 5"), ("StopIteration()", "")],
)
def test_whatever_its_code_raises_is_one_line(
    where: str, error: str, says: str, tmp_path: Path
) -> None:
    registry.import_file(
        written(tmp_path, HEAD + OWN + MEAN.replace(where, f"raise {error}\n        {where}"))
    )
    with pytest.raises(UserError, match=r"mixer 'mine' breaks the rule") as caught:
        create_mixer("mine", **SITE)
    assert says in str(caught.value)


@pytest.mark.parametrize("error", [MemoryError(), Interrupted(2, "it stands")])
def test_what_ends_the_work_is_let_through(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.import_file(written(tmp_path, GOOD["a mean"]))
    kind = registry.get_mixer_class("mine")

    def stop(*given: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(kind, "forward", stop)
    with pytest.raises(type(error)):
        create_mixer("mine", **SITE)


def test_modes_outside_do_not_reach_the_check(tmp_path: Path) -> None:
    registry.import_file(written(tmp_path, GOOD["a norm"]))
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), torch.inference_mode():
        made = create_mixer("mine", **SITE)
    assert all(t.is_meta for t in made.state_dict().values())
    assert registry.get_mixer_class("mine") in user_mixers._KEPT


def test_a_mixer_that_needs_another_site_is_tried_on_its_own(tmp_path: Path) -> None:
    registry.import_file(written(tmp_path, EVEN_GRIDS))
    assert create_mixer("mine", **{**SITE, "num_prefix_tokens": 0}) is not None


def test_its_own_refusals_stay_its_own(tmp_path: Path) -> None:
    text = MEAN + "        if width < 1: raise UserError(f'{width=} must be at least 1')\n"
    text = text.replace("def __init__(self, site):", "def __init__(self, site, *, width: int = 1):")
    registry.import_file(written(tmp_path, HEAD + text))
    with pytest.raises(UserError, match=r"^width=0 must be at least 1$"):
        create_mixer("mine", **SITE, width=0)
    assert registry.get_mixer_class("mine") not in user_mixers._KEPT  # nothing was tried yet
    assert create_mixer("mine", **SITE, width=2) is not None


FLAT = "if x.dim() > 3: raise UserError('tokens must be [B, N, C]')\n        return "


def test_a_refusal_ends_the_check_of_no_other_rule(tmp_path: Path) -> None:
    text = GOOD["a mean"].replace("return ", FLAT + "x.roll(1, -2) + ")
    registry.import_file(written(tmp_path, text))
    with pytest.raises(UserError, match="breaks the rule 'permutation'"):
        create_mixer("mine", **SITE)


@pytest.mark.parametrize(
    ("init", "says"),
    [
        ("def __init__(self): super().__init__(None)", "must take the site first"),
        ("def __init__(self, dim): super().__init__(dim)", "must take the site first"),
    ],
)
def test_a_constructor_without_a_site_is_refused_when_it_registers(
    init: str, says: str, tmp_path: Path
) -> None:
    text = f"{HEAD}@register_mixer('mine')\nclass Mine(TokenMixer):\n    {init}\n"
    with pytest.raises(UserError, match=r"own-mixer\.md") as caught:
        registry.import_file(written(tmp_path, text))
    assert says in str(caught.value)
    assert "mine" not in registry.list_mixers()


def test_a_role_that_is_projected_for_nothing_is_named() -> None:
    mixer: Any = make("softmax").eval()
    mixer.factors = lambda inputs: (inputs["q"], inputs["q"])
    result = breaks_roles(mixer, ACCURACY)
    assert result is not None
    assert re.search(r"role 'k'", result)

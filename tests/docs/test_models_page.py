# SPDX-License-Identifier: Apache-2.0
"""docs/models.md tells every model, and what it says of refusals is so."""

from __future__ import annotations

import re

import pytest
from documents import DOCS, table

import keymix
from each import together
from keymix.errors import UserError
from keymix.mixers.registry import get_mixer_class
from keymix.models import list_models
from keymix.models.match import trainable

PAGE = (DOCS / "models.md").read_text(encoding="utf-8")
FAMILIES = {
    name: row[0] for row in table(PAGE, "models-table") for name in re.findall(r"`(\w+)`", row[1])
}


def base(name: str) -> str:
    """The name without what stands for another mixer or width."""
    for mark in ("cska_", "ska_"):
        name = name.removeprefix(mark)
    return name.removesuffix("_wide")


def test_every_model_is_reported_and_every_name_is_a_model() -> None:
    assert {base(name) for name in list_models()} == set(FAMILIES)


def test_small_models_are_small() -> None:
    small = [name for name, family in FAMILIES.items() if family == "small"]
    assert len(small) == 11
    for name in small:
        assert trainable(keymix.create_model(name)) < 700_000, name


@together
@pytest.mark.parametrize("mixer", keymix.list_mixers(domain="dense"))
def test_shifted_windows_refuse_what_the_page_says(mixer: str) -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith("| shifted windows"))
    if get_mixer_class(mixer).traits.maskable:
        keymix.create_model("swin_micro_p2_32", mixer=mixer)
        assert f"`{mixer}`" not in row
        return
    with pytest.raises(UserError, match=mixer):
        keymix.create_model("swin_micro_p2_32", mixer=mixer)
    assert f"`{mixer}`" in row or get_mixer_class(mixer).traits.named_only
    keymix.create_model("swin_micro_p2_32", mixer=mixer, shifted=False)


@pytest.mark.slow
@together
@pytest.mark.parametrize("mixer", keymix.list_mixers(domain="dense"))
def test_every_mixer_sits_in_cvt_and_cait_and_caformer_and_dense_models(mixer: str) -> None:
    for name in (
        "cvt_micro_32",
        "cait_micro_p4_32",
        "caformer_micro_32",
        "setr_micro",
        "trans_unet_micro",
    ):
        keymix.create_model(name, mixer=mixer)

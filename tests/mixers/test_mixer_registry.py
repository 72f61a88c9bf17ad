# SPDX-License-Identifier: Apache-2.0
"""Names, sites and the text form of mixers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from each import together
from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.mixers import registry
from keymix.mixers.base import Site
from keymix.mixers.spec import parse_mixer, parse_mixers
from keymix.models import create_model
from mixer_cases import refused


def test_names_and_aliases() -> None:
    names = registry.list_mixers()
    assert names == sorted(names)
    wanted = {"mhsa": "softmax", "ska": "static_key", "cska": "conv_static_key", "kv": "key_value"}
    for alias, name in wanted.items():
        assert registry.resolve(alias) == registry.resolve(name) == name
        assert alias in registry.aliases_of(name)
        assert registry.get_mixer_class(alias).mixer_name == name
    assert registry.list_mixers("*static*") == [
        "conv_static_key",
        "static_key",
        "static_key_re_attention",
    ]
    assert "identity" in registry.list_mixers(domain="spiking")


@pytest.mark.parametrize(
    ("wrong", "right"), [("statc_key", "static_key"), ("re_atention", "re_attention")]
)
def test_unknown_names_are_answered_with_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(UserError, match=f"unknown mixer '{wrong}'.*'{right}'"):
        registry.resolve(wrong)


def test_names_joined_by_slashes_are_no_name_and_build_a_model() -> None:
    with pytest.raises(UserError, match=r"names 2 mixers: give a list, \['qkta', 'ssa'\]"):
        registry.resolve("qkta/ssa")
    for text, names in (("qkta/qkta/ssa", ["qkta", "qkta", "ssa"]), ("qkta", "qkta")):
        one, other = (create_model("qkformer_micro_32", mixer=each) for each in (text, names))
        kinds = [[type(m) for m in find_mixers(model).values()] for model in (one, other)]
        assert kinds[0] == kinds[1]
    written = create_model("vit_micro_p4_32", mixer="ska(activation=relu)")
    assert {mixer.built_with["activation"] for mixer in find_mixers(written).values()} == {"relu"}


@together
@pytest.mark.parametrize(
    "site",
    [
        {"dim": 0},
        {"dim": -8},
        {"dim": 8.0},
        {"dim": True},
        {"dim": 8, "num_heads": 0},
        {"dim": 8, "windows": 0},
        {"dim": 8, "num_prefix_tokens": -1},
        {"dim": 8, "num_prefix_tokens": 1.0},
        {"dim": 8, "grid": (0, 4)},
        {"dim": 8, "grid": (4,)},
        {"dim": 8, "grid": (2, 2, 2)},
        {"dim": 8, "grid": (2.0, 2)},
        {"dim": 8, "grid": 4},
        {"dim": 8, "key_grid": (2, -1)},
    ],
    ids=str,
)
def test_sites_that_cannot_be_are_refused_by_name(site: dict[str, Any]) -> None:
    with refused(rf"^{list(site)[-1]}="):
        Site(**site)


def test_a_site_counts_its_tokens() -> None:
    site = Site(dim=8, grid=(2, 3), num_prefix_tokens=2, key_grid=(1, 2))
    assert (site.grid, site.num_tokens, site.num_keys, site.has_own_key_grid) == (
        (2, 3),
        8,
        4,
        True,
    )
    assert not Site(dim=8, grid=(2, 3), key_grid=(2, 3)).has_own_key_grid
    with pytest.raises(UserError, match="no grid"):
        _ = Site(dim=8).num_tokens
    with pytest.raises(AttributeError):
        site.dim = 3  # type: ignore[misc]


def test_a_site_or_its_arguments_but_not_both() -> None:
    site = Site(dim=8, num_heads=2, grid=(2, 2))
    assert registry.create_mixer("ska", site).site == site
    assert registry.create_mixer("ska", site, num_heads=4).num_heads in (2, 4)
    with pytest.raises(UserError, match="not both"):
        registry.create_mixer("ska", site, dim=8)
    with pytest.raises(UserError, match="needs dim="):
        registry.create_mixer("ska")


def test_heads_among_the_options_replace_the_sites() -> None:
    site = Site(dim=8, num_heads=2, grid=(2, 2))
    mixer = registry.build("ska", site, {"num_heads": 4})
    assert mixer.num_heads == mixer.site.num_heads == 4
    assert site.num_heads == 2


def test_device_and_dtype_reach_mixers_that_take_them() -> None:
    mixer = registry.create_mixer("ska", dim=8, grid=(2, 2), device="meta", dtype=torch.float64)
    assert mixer.key.is_meta
    assert mixer.key.dtype == torch.float64
    assert isinstance(
        registry.create_mixer("pooling", dim=8, grid=(2, 2), device="meta"), nn.Module
    )


def test_texts_read_back_to_the_same_mixers() -> None:
    text = "mhsa,ska(activation=relu, key_init_std=0.02),sep_conv/cska(kernel_size=5)/kv/identity"
    specs = parse_mixers(text)
    assert [s.label for s in specs] == [
        "softmax",
        "static_key(activation=relu,key_init_std=0.02)",
        "sep_conv/conv_static_key(kernel_size=5)/key_value/identity",
    ]
    assert [parse_mixer(s.label) for s in specs] == specs
    assert specs[1].model_kwargs() == {
        "mixer": "static_key",
        "mixer_options": {"activation": "relu", "key_init_std": 0.02},
    }
    assert specs[2].model_kwargs()["mixer_options"] == [{}, {"kernel_size": 5}, {}, {}]
    assert all(set(s.slug).isdisjoint("/() ") for s in specs)
    assert len({s.slug for s in specs}) == 3
    assert (specs[2].mixes_prefix, parse_mixer("pooling").mixes_prefix) == (True, False)
    assert parse_mixer("identity/pooling").control
    assert not specs[2].control


@together
@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("False", False), ("none", None), ("3", 3), ("0.5", 0.5), ("gelu", "gelu")],
)
def test_values_in_texts_are_python_values(text: str, value: Any) -> None:
    (options,) = parse_mixer(f"sep_conv(act={text})").options
    assert dict(options)["act"] == value
    assert type(dict(options)["act"]) is type(value)


@together
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no mixer given"),
        (" , ", "no mixer given"),
        ("skaa", "unknown mixer 'skaa'"),
        ("ska(", "not closed"),
        ("ska)", "closing bracket"),
        ("ska(activation)", "needs a value, activation=…$"),
        ("ska(key_grid=4,4)", r"key_grid=4x4 or key_grid=\(4,4\)"),
        ("ska(key_init_std=0,5)", r"write key_init_std=\(0,5\)"),
        ("ska(activaton=relu)", "'activation'"),
        ("softmax,mhsa", "stands twice"),
        ("ska//kv", "not of the form"),
        ("ska kv", "not of the form"),
    ],
)
def test_bad_texts_are_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_mixers(text)


def test_the_folder_of_many_mixers_has_a_name_that_file_systems_take():
    many = [parse_mixer("/".join(["conv_static_key"] * 40 + [last])) for last in ("mhsa", "ska")]
    assert all(len(spec.slug) <= 180 for spec in many)
    assert many[0].slug != many[1].slug
    assert parse_mixer("ska/mhsa").slug == "static_key+softmax"


def test_several_equal_mixers_in_a_row_are_written_with_their_number() -> None:
    read = parse_mixer("mhsa*2/ska(key_grid=1/4)*3/mhsa")
    assert read.names == ("softmax",) * 2 + ("static_key",) * 3 + ("softmax",)
    assert [dict(each).get("key_grid") for each in read.options] == [None] * 2 + ["1/4"] * 3 + [
        None
    ]
    assert read.label == "softmax/softmax/static_key(key_grid=1/4)*3/softmax"
    assert parse_mixer(read.label) == read
    for wrong in ("ska*0", "ska*", "ska*2.5"):
        with pytest.raises(UserError, match="mixer"):
            parse_mixer(wrong)

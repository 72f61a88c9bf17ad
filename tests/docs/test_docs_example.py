# SPDX-License-Identifier: Apache-2.0
"""The example of a user's own mixer computes what it says and joins a comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from documents import DOCS

from costs import cheap_costs
from keymix import create_mixer
from keymix.cli import main
from keymix.mixers import registry
from keymix.mixers.map_mixer import MapMixer

EXAMPLE = DOCS / "examples" / "my_mixer.py"


@pytest.fixture
def distance() -> MapMixer:
    """The example's mixer at a site with a class token."""
    registry.import_file(EXAMPLE)
    made = create_mixer("distance", dim=12, num_heads=2, grid=(3, 5), num_prefix_tokens=1)
    assert isinstance(made, MapMixer)
    return made.double()


def test_the_example_weighs_keys_by_distance(distance: MapMixer) -> None:
    x = torch.randn(2, 16, 12, dtype=torch.float64)
    q, k, v = (t.reshape(2, 16, 2, 6).transpose(1, 2) for t in distance.qkv(x).chunk(3, -1))
    squares = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    maps = (-0.5 * squares * 6**-0.5).softmax(-1)
    torch.testing.assert_close(distance.attention_map(x), maps)
    y = distance.proj((maps @ v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(distance(x), y)


def test_the_example_gives_single_rows_and_gradients(distance: MapMixer) -> None:
    x = torch.randn(2, 16, 12, dtype=torch.float64, requires_grad=True)
    whole = distance.attention_map(x)
    torch.testing.assert_close(distance.attention_map(x, queries=[0, 7]), whole[..., [0, 7], :])
    distance(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in distance.parameters())


@pytest.mark.slow
def test_the_example_joins_a_comparison_from_the_command_line(
    tmp_path: Path,
) -> None:
    """In this process. That a comparison starts from a shell is asked elsewhere."""
    words = ["compare", "--import", str(EXAMPLE), "--mixers", "mhsa,distance", "--no-controls"]
    words += ["--seeds", "1", "--epochs", "1", "--limit", "100", "--processes", "1"]
    with cheap_costs():
        assert main([*words, "--out", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert [row["mixer"] for row in record["outcome"]["last"]] == [
        "softmax",
        "distance",
        "plain network",
    ]
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000

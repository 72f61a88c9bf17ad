# SPDX-License-Identifier: Apache-2.0
"""A mixer of the user's own, in one file, is a mixer like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keymix.errors import UserError
from keymix.hosts import find_mixers
from keymix.mixers import registry
from keymix.mixers.base import explain_backend
from keymix.models import create_model
from mixer_cases import make, tokens
from tolerances import differs

FILE = '''
"""Queries are the tokens, keys their running mean; one option."""
import torch
from torch import nn
from keymix.mixers.base import Traits
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import register_mixer

@register_mixer("cosine", aliases=("cos",))
class Cosine(MapMixer):
    def __init__(self, site, *, sharpness: float = 1.0, device=None, dtype=None):
        super().__init__(site, device=device, dtype=dtype)
        self.sharpness = sharpness

    def factors(self, inputs):
        unit = nn.functional.normalize
        return self.sharpness * unit(inputs["q"], dim=-1), unit(inputs["k"], dim=-1)
'''


def written(folder: Path, text: str, name: str = "cosine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_one_file_enters_models_lists_and_maps(tmp_path: Path) -> None:
    path = written(tmp_path, FILE)
    registry.import_file(path)
    registry.import_file(str(path))  # once more does no harm
    assert "cosine" in registry.list_mixers()
    assert registry.resolve("cos") == "cosine"
    assert list(registry.mixer_options("cos")) == ["sharpness"]
    model = create_model("vit_nano_p2_12", mixer="cos", mixer_options={"sharpness": 3.0})
    assert {m.sharpness for m in find_mixers(model).values()} == {3.0}
    model(torch.randn(2, 1, 12, 12)).sum().backward()
    mixer = make("cosine", {"sharpness": 4.0}).eval()
    rows = mixer.attention_map(tokens(mixer), queries=[1])
    assert rows.shape == (2, 3, 1, 6)
    assert torch.allclose(rows.sum(-1), torch.ones_like(rows[..., 0]))
    with pytest.raises(UserError, match=r"sharpnes.*Did you mean 'sharpness'"):
        make("cosine", {"sharpnes": 4.0})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ValueError('seven')", "ValueError: seven"),
        ("{}['a']", "KeyError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import no_such_module_here", "no_such_module_here"),
        ("def f(:", "SyntaxError"),
        ("undefined", "NameError"),
        ("import sys; sys.exit(5)", "sys.exit"),
        ("raise SystemExit", "sys.exit"),
        ("raise BaseException('loud')", "BaseException: loud"),
        ("class Own(Exception): pass\nraise Own('mine')", "Own: mine"),
        ("raise ExceptionGroup('several', [ValueError()])", "ExceptionGroup"),
        ("def f(): f()\nf()", "RecursionError"),
        ("try: 1 / 0\nexcept ArithmeticError as e: raise ImportError('no part') from e", "by zero"),
        (FILE.replace('"cosine", ', '"softmax", '), "'softmax' is taken by keymix.mixers.softmax"),
        (FILE.replace('("cos",)', '("ska",)'), "'ska' is taken"),
        (FILE.replace("*, sharpness", "sharpness"), "'sharpness' must be a named keyword-only"),
        (FILE.replace("(MapMixer)", "(nn.Module)"), "not a TokenMixer class"),
    ],
)
def test_a_file_that_fails_is_answered_in_words(tmp_path: Path, text: str, says: str) -> None:
    before = registry.list_mixers()
    with pytest.raises(UserError, match=r"--import .*broken.py: ") as caught:
        registry.import_file(written(tmp_path, text, "broken.py"))
    assert says in str(caught.value) or "TypeCheckError" in str(caught.value)
    assert registry.list_mixers() == before
    assert registry.get_mixer_class("softmax").__module__ == "keymix.mixers.softmax"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.py: no such file"):
        registry.import_file(tmp_path / "nowhere.py")
    with pytest.raises(UserError, match=r"notes.txt: not a Python file"):
        registry.import_file(written(tmp_path, "x = 1", "notes.txt"))
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UserError, match=r"folder.py: not a regular file"):
        registry.import_file(tmp_path / "folder.py")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("def logits(self, i, grid, rows=None): return 2 * i['q'] @ i['k'].mT", "logits"),
        ("def activate(self, logits): return logits.relu()", "activate"),
        ("def mix_after(self, maps, track): return 2 * maps", "mix_after"),
    ],
)
def test_a_step_of_ones_own_is_taken_whatever_the_backend(
    tmp_path: Path, body: str, why: str
) -> None:
    """The fused path knows none of these steps, so it must not be chosen over them."""
    text = (
        "from keymix.mixers.softmax import SoftmaxAttention\n"
        "from keymix.mixers.registry import register_mixer\n"
        f"@register_mixer('stepping')\nclass Stepping(SoftmaxAttention):\n    {body}\n"
    )
    registry.import_file(written(tmp_path, text, f"{why}.py"))
    mixer, plain = make("stepping"), make("softmax")
    x = tokens(mixer)
    assert explain_backend(mixer).name == "reference"
    assert why in explain_backend(mixer).why
    assert differs(mixer(x), plain(x))


def test_an_abstract_mixer_says_what_it_lacks() -> None:
    from keymix.mixers.base import TokenMixer
    from keymix.mixers.map_mixer import MapMixer

    @registry.register_mixer("lacking_map")
    class LackingMap(MapMixer):
        pass

    @registry.register_mixer("lacking")
    class Lacking(TokenMixer):
        pass

    for name, says in (("lacking_map", "must define factors"), ("lacking", "must define forward")):
        with pytest.raises(UserError, match=says):
            make(name)
    assert (LackingMap.mixer_name, Lacking.mixer_name) == ("lacking_map", "lacking")

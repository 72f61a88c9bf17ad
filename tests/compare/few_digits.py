# SPDX-License-Identifier: Apache-2.0
"""A comparison of seconds: two mixers on a hundred digits, one epoch; and mixers that break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keymix.compare.run import Comparison, compare

BRITTLE = '''
from keymix.mixers.base import Site, TokenMixer, Traits
from keymix.mixers.registry import register_mixer


@register_mixer("brittle_{name}")
class Brittle(TokenMixer):
    """Passes every check and breaks in training."""

    traits = Traits(mixes_prefix=False)

    def forward(self, x, grid=None, bias=None):
        if self.training and len(x) > 3:  # batches of training, not the trial runs before
            {how}
        return x
'''


def brittle(folder: Path, name: str, how: str) -> str:
    path = folder / f"brittle_{name}.py"
    path.write_text(BRITTLE.format(name=name, how=how), encoding="utf-8")
    return str(path)


FINISHED: dict[str, Any] = {"seeds": 2, "epochs": 2}
"""What the comparison that tests share has in addition."""


def small(out: Path, **more: Any) -> Comparison:
    settings: dict[str, Any] = {
        "data": "digits",
        "mixers": "mhsa,ska",
        "seeds": 1,
        "limit": 100,
        "epochs": 1,
        "processes": 1,
        "reference": False,
        "out": out,
    }
    return compare(**(settings | more))

# SPDX-License-Identifier: Apache-2.0
"""Files with mixers that break a rule each, by the rule's name, and some that keep them all."""

from __future__ import annotations

from pathlib import Path

HEAD = """
import torch
from torch import nn
from keymix import MapMixer, TokenMixer, Traits, UserError, register_mixer
from keymix.mixers.spiking import SpikingMixer

"""

MEAN = """
@register_mixer("mine")
class Mine(TokenMixer):
    traits = Traits(maskable=False)
    def forward(self, x, grid=None, bias=None):
        return self.proj(x.mean(-2, keepdim=True).expand_as(x))
    def __init__(self, site):
        super().__init__(site)
        self.proj = nn.Linear(site.dim, site.dim)
"""


def forward(
    body: str, traits: str = "maskable=False", takes: str = "x, grid=None, bias=None"
) -> str:
    """A file with one mixer of this forward; ``self.proj`` is a linear map."""
    text = MEAN.replace("(self, x, grid=None, bias=None)", f"(self, {takes})")
    text = text.replace("Traits(maskable=False)", f"Traits({traits})")
    return HEAD + text.replace("return self.proj(x.mean(-2, keepdim=True).expand_as(x))", body)


MIXED = "self.proj(x.mean(-2, keepdim=True).expand_as(x))"
PASSED = "torch.cat((x[..., :p, :], self.proj(x[..., p:, :])), -2)"

BROKEN = {
    "constructor": HEAD + MEAN.replace("super().__init__(site)", "self.site = site"),
    "constructor: no site": HEAD
    + MEAN.replace("super().__init__(site)", "nn.Module.__init__(self)"),
    "signature": forward(f"return {MIXED}", takes="x"),
    "signature: no bias": forward(f"return {MIXED}", takes="x, grid=None"),
    "shape: one short": forward(f"return {MIXED}[..., 1:, :]"),
    "shape: averaged away": forward("return self.proj(x.mean(-2))"),
    "shape: a tuple": forward(f"return {MIXED}, None"),
    "shape: NaN": forward(f"return {MIXED}.abs().neg().log()"),
    "shape: another type": forward(f"return {MIXED}.double()"),
    "shape: raises": forward("return self.nothing(x)"),
    "leading axes": forward(
        "B, N, C = x.shape\n        return self.proj(x.mean(1, True).expand(B, N, C))"
    ),
    "leading axes: over the second": forward(
        "return self.proj(x.mean(1, keepdim=True).expand_as(x))"
    ),
    "type": forward(f"return {MIXED}.float()"),
    "input": forward(f"x += 1\n        return {MIXED}"),
    "repetition": forward(f"return nn.functional.dropout({MIXED}, 0.5)"),
    "images": forward(f"return {MIXED} + x.mean(0, keepdim=True)"),
    "mixes_prefix": forward(f"return {MIXED}", "maskable=False, mixes_prefix=False"),
    "mixes_prefix: blind": forward(
        f"p = self.site.num_prefix_tokens\n        return {PASSED}",
        "maskable=False, permutation='positional'",
    ),
    "permutation": forward(f"return {MIXED} + x.roll(1, -2)"),
    "maskable": forward(f"return {MIXED}", ""),
    "roles": HEAD
    + """
@register_mixer("mine")
class Mine(MapMixer):
    def factors(self, inputs):
        return inputs["q"], inputs["q"]
""",
    "shape: a role that is not there": HEAD
    + """
@register_mixer("mine")
class Mine(MapMixer):
    roles, joint = ("q", "v"), None
    def factors(self, inputs):
        return inputs["q"], inputs["k"]
""",
    "shape: no forward": HEAD + "@register_mixer('mine')\nclass Mine(TokenMixer): pass\n",
    "leading axes: of a spiking mixer": forward(
        "T, B, N, C = x.shape\n        return (self.proj(x) > 0).to(x)",
        "domain='spiking', maskable=False, mixes_prefix=False",
    ),
}

GOOD = {
    "a mean": HEAD + MEAN,
    "a map": HEAD
    + """
@register_mixer("mine")
class Mine(MapMixer):
    def factors(self, inputs):
        return inputs["q"], inputs["k"]
""",
    "a norm": HEAD
    + MEAN.replace(
        "(site.dim, site.dim)", "(site.dim, site.dim)\n        self.norm = nn.BatchNorm1d(site.dim)"
    ).replace(
        "return self.proj(", "return self.norm(x.flatten(0, -2)).reshape(x.shape) + self.proj("
    ),
    "starts at nought": HEAD
    + MEAN.replace(
        "(site.dim, site.dim)", "(site.dim, site.dim)\n        nn.init.zeros_(self.proj.weight)"
    ),
    "spikes": HEAD
    + """
@register_mixer("mine")
class Mine(SpikingMixer):
    def gather(self, parts, note):
        return self.attn_sn(3 * parts["q"].mean(-3, keepdim=True)) * parts["k"]
""",
}

EVEN_GRIDS = forward(
    "H, W = self.site.grid\n"
    "        y = x.unflatten(-2, (H // 2, 2, W // 2, 2)).mean((-5, -3), keepdim=True)\n"
    "        y = y.expand(*x.shape[:-2], H // 2, 2, W // 2, 2, -1)\n"
    "        return self.proj(y.reshape(x.shape))",
    "maskable=False, permutation='positional'",
)


def written(folder: Path, text: str) -> Path:
    """The file, where it was written."""
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return path

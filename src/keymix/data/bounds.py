# SPDX-License-Identifier: Apache-2.0
"""What each number of a recipe may be: one table, which the recipe's dataclasses check against.

What depends on the data, the machine or another field (batches per epoch, cores, the peak learning
rate) is checked where both are known: `keymix.train.validate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from keymix.errors import UserError

MOST_OF_A_SEED = 2**64 - 1  # what PyTorch's generators take


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a number may be."""

    least: float
    most: float
    whole: bool = False  # whether it is a whole number
    above: bool = False  # whether the smallest itself is refused
    below: bool = False  # whether the largest itself is refused
    off: bool = False  # whether 0 is allowed too, and means none
    pair: bool = False  # whether two such numbers will do too
    word: str | None = None  # a word that will do too

    def takes(self, value: Any) -> bool:
        """Return whether a value will do."""
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number:
            return False
        if not isinstance(value, Integral) and not math.isfinite(value):
            return False
        low = value <= self.least if self.above else value < self.least
        high = value >= self.most if self.below else value > self.most
        return (not self.whole or value == int(value)) and (
            not (low or high) or (self.off and value == 0)
        )

    def __str__(self) -> str:
        """Say what a number must be."""
        ends = f"{'(' if self.above else '['}{self.least}, {self.most}{')' if self.below else ']'}"
        other = (" or 0 for none" if self.off else "") + (f" or {self.word}" if self.word else "")
        return f"a {'whole ' if self.whole else ''}number in {ends}{other}"


def _whole(least: int, most: int) -> Bound:
    return Bound(least=least, most=most, whole=True)


_SHARE = Bound(least=0, most=1)
_BELOW_ONE = Bound(least=0, most=1, below=True)
_PART = Bound(least=0, most=1, above=True, below=True)
_SEED = _whole(0, MOST_OF_A_SEED)
_BATCH = _whole(1, 65_536)  # the largest of the large-batch papers is 32,768
_SIDE = 13_377  # of the largest square that image decoders take
_EPOCHS = 1_000_000
_RATE = 1_000.0

BOUNDS: Mapping[str, Bound | tuple[Bound, ...]] = {
    "data.image_size": Bound(least=1, most=_SIDE, whole=True, pair=True),
    "data.channels": _whole(1, 3),
    "data.limit": _whole(1, 10**12),
    "data.val_fraction": _PART,
    "data.split_seed": _SEED,
    "data.batch_size": _BATCH,
    "data.eval_batch_size": _BATCH,
    "data.workers": _whole(0, 1_024),
    "data.time_steps": _whole(1, 1_024),
    "data.stack": _whole(1, 255),
    "data.test_fraction": _PART,
    "data.white_level": Bound(least=1, most=65_535, whole=True, word="auto"),
    "augment.crop_padding": _whole(0, _SIDE),
    "augment.random_resized_crop": (
        Bound(least=0.0001, most=1),
        Bound(least=0.0001, most=1),
    ),
    "augment.rand_augment": (_whole(0, 14), _whole(0, 30)),  # operations and bins of torchvision's
    "augment.erasing": _SHARE,
    "augment.multi_scale": (_whole(1, _SIDE), _whole(1, _SIDE)),
    "model.drop_path": _BELOW_ONE,
    "model.drop_rate": _BELOW_ONE,
    "optim.lr": Bound(least=1e-12, most=_RATE),
    "optim.weight_decay": Bound(least=0, most=100),
    "optim.betas": (_BELOW_ONE, _BELOW_ONE),
    "optim.clip_grad": Bound(least=1e-9, most=1e9, off=True),
    "optim.accumulate": _whole(1, 4_096),
    "optim.layer_decay": Bound(least=0, most=1, above=True),
    "schedule.epochs": _whole(1, _EPOCHS),
    "schedule.warmup_epochs": Bound(least=0, most=_EPOCHS),
    "schedule.cooldown_epochs": _whole(0, _EPOCHS),
    "schedule.warmup_lr": Bound(least=0, most=_RATE),
    "schedule.min_lr": Bound(least=0, most=_RATE),
    "schedule.milestones": (_whole(1, _EPOCHS), _whole(1, _EPOCHS)),
    "schedule.power": Bound(least=0.001, most=100),
    "loss.label_smoothing": _BELOW_ONE,
    "loss.mixup": Bound(least=0.001, most=100, off=True),
    "loss.cutmix": Bound(least=0.001, most=100, off=True),
    "loss.mixup_prob": Bound(least=0, most=1, above=True),
    "loss.mixup_off_epoch": _whole(1, _EPOCHS),
    "loss.similarity": Bound(least=0, most=1_000),
    "loss.similarity_blocks": _whole(0, 1_024),
    "loss.distill": _SHARE,
    "loss.distill_temperature": Bound(least=0.01, most=1_000),
    "ema": _BELOW_ONE,
    "seed": _SEED,
}
"""By dotted key; of a field of several numbers one bound each."""


def check_numbers(record: Any, prefix: str = "") -> None:
    """Hold the numbers of a recipe's frozen dataclass against the table.

    Whole numbers become ``int``, others ``float`` without a negative zero, and lists tuples, so
    that equal settings are equal records.
    """
    for item in fields(record):
        bound, value = BOUNDS.get(f"{prefix}{item.name}"), getattr(record, item.name)
        word = bound.word if isinstance(bound, Bound) else None
        if bound is not None and value != word and value is not None:
            taken = _taken(f"{prefix}{item.name}", value, bound)
            object.__setattr__(record, item.name, taken)


def _taken(name: str, value: Any, bound: Bound | tuple[Bound, ...]) -> Any:
    several = isinstance(value, tuple | list)
    parts = list(value) if several else [value]
    if isinstance(bound, tuple):
        bounds = bound
    else:
        bounds = (bound, bound) if bound.pair and several else (bound,)
    fits = several == (len(bounds) > 1) and len(parts) == len(bounds)
    if not fits or not all(one.takes(part) for one, part in zip(bounds, parts, strict=True)):
        raise UserError(f"{name} = {value!r}: must be {' and '.join(map(str, bounds))}.")
    kept = tuple(
        int(part) if one.whole else float(part) + 0.0
        for part, one in zip(parts, bounds, strict=True)
    )
    return kept if several else kept[0]

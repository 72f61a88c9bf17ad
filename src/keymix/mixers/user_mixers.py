# SPDX-License-Identifier: Apache-2.0
"""Mixers from outside keymix: checked against the contract at their first use, or in whole."""

from __future__ import annotations

import copy
import random
import types
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from keymix.arguments import accepted
from keymix.errors import Attempt, UserError
from keymix.mixers import contract
from keymix.mixers.base import Site, TokenMixer

SMALL = Site(dim=12, num_heads=3, grid=(2, 3), num_prefix_tokens=2)
ROUGH = contract.Accuracy(dtype=torch.float32, near=1e-4, far=1e-5)
PAGE = "docs/own-mixer.md"

# what is no option, and options that choose a way of computing and leave the result as it is
_NO_RESULT = ("site", "device", "dtype", "backend", "order")

_KEPT: weakref.WeakSet[type[TokenMixer]] = weakref.WeakSet()


def from_outside(kind: type[TokenMixer]) -> bool:
    """Whether a class is a user's own."""
    return kind.__module__.partition(".")[0] != "keymix"


class Trial:
    """A mixer's class on a small site with options, for the rules to try."""

    def __init__(
        self, kind: type[TokenMixer], site: Site = SMALL, options: Mapping[str, Any] | None = None
    ) -> None:
        self.kind, self.site, self.options = kind, site, dict(options or {})

    def make(
        self, options: Mapping[str, Any] | None = None, *, stirred: bool = True, seed: int = 0
    ) -> TokenMixer:
        """Build the mixer in float32, for evaluation, its weights moved away from their start."""
        torch.default_generator.manual_seed(seed)  # other devices' states are the caller's
        random.seed(seed)
        np.random.seed(seed)
        chosen = self.options if options is None else options
        made = self.kind(self.site, **chosen).to(ROUGH.dtype).eval()
        if stirred:  # so that a wide mixer's softmax stays soft
            contract.stir(made, 0.3 * min(1.0, (SMALL.dim / self.site.dim) ** 0.5))
        return made

    @cached_property
    def mixer(self) -> TokenMixer:
        """The mixer that rules share; they leave it as it is."""
        stirred = self.make()
        if stirred.site is self.site and contract.breaks_signature(self.kind) is None:
            y = stirred(contract.example_tokens(stirred, dtype=ROUGH.dtype))
            if isinstance(y, torch.Tensor) and not torch.isfinite(y).all():
                return self.make(stirred=False)  # it takes no other weights than its own
        return stirred


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of the contract: its name in messages, what it says, and what finds it broken.

    `first` rules are checked on the first mixer of a class, not by the suite alone; the rules after
    a broken `base` rule are not tried.
    """

    name: str
    says: str
    broken: Callable[[Trial], str | None]
    first: bool = True
    base: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a rule: why it is broken, if so, and the error of the mixer's code."""

    rule: Rule
    why: str | None
    error: BaseException | None = None


def _constructor(trial: Trial) -> str | None:
    made = trial.make(stirred=False)
    return contract.breaks_constructor(made, trial.site)


def _shape(trial: Trial) -> str | None:
    training = copy.deepcopy(trial.mixer).train()
    return contract.breaks_shape(trial.mixer, ROUGH) or contract.breaks_shape(training, ROUGH)


def _dtype(trial: Trial) -> str | None:
    wide = replace(ROUGH, dtype=torch.float64)
    return contract.breaks_shape(copy.deepcopy(trial.mixer).double(), wide)


def _prefix(trial: Trial) -> str | None:
    return contract.breaks_prefix(trial.mixer, ROUGH) if trial.site.num_prefix_tokens else None


def _gradients(trial: Trial) -> str | None:
    for training in (True, False):
        mixer = copy.deepcopy(trial.mixer).train(training)
        why = contract.breaks_gradients(mixer, ROUGH)
        if why is not None:
            return why
    return None


def _state(trial: Trial) -> str | None:
    return contract.breaks_state(trial.mixer, trial.make(stirred=False, seed=1), ROUGH)


def _meta(trial: Trial) -> str | None:
    with torch.device("meta"):
        made = trial.kind(trial.site, **trial.options)
    real = [name for name, tensor in made.state_dict().items() if not tensor.is_meta]
    return f"{real[0]} has memory where none was asked for" if real else None


def _options(trial: Trial) -> str | None:
    """Say which option does nothing at any other value that its class takes."""
    for name, (parameter, hint) in accepted(trial.kind).items():
        if name in _NO_RESULT:
            continue
        default = trial.options.get(name, parameter.default)
        tried = []
        for value in other_values(hint, default):
            with Attempt() as attempt:
                acts = contract.option_acts(
                    trial.make, trial.options, {**trial.options, name: value}, ROUGH
                )
            if attempt.error is not None:
                continue  # no value of this option
            tried.append(value)
            if acts:
                break
        else:
            if tried:
                values = ", ".join(map(repr, tried))
                return f"option {name!r} changes neither the output nor a gradient at {values}"
    return None


def other_values(hint: Any, default: Any) -> list[Any]:
    """Guess values of an option other than its default from its resolved annotation."""
    number = default if isinstance(default, int | float) and default else 0
    guesses: dict[Any, list[Any]] = {
        bool: [True, False],
        int: [int(number) + 1, int(number) + 2, 2 * int(number) or 5],
        float: [0.5, 2.0 * number, number / 2],
    }
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = typing.get_args(hint)
        return [value for part in parts for value in other_values(part, default)]
    values = guesses.get(hint, [])
    if typing.get_origin(hint) is typing.Literal:
        values = list(typing.get_args(hint))
    return [value for value in values if value is not default and value != default]


def _of_mixer(
    name: str, says: str, check: Callable[[TokenMixer, contract.Accuracy], str | None]
) -> Rule:
    """Make a rule that a check of one mixer decides, at the first use of a class too."""
    return Rule(name=name, says=says, broken=lambda trial: check(trial.mixer, ROUGH))


RULES: tuple[Rule, ...] = (
    Rule(
        name="constructor",
        says="__init__(self, site, *, options) hands the site to super().__init__(site)",
        broken=_constructor,
        base=True,
    ),
    Rule(
        name="signature",
        says="forward(self, x, grid=None, bias=None)",
        broken=lambda trial: contract.breaks_signature(trial.kind),
        base=True,
    ),
    Rule(
        name="shape",
        says="tokens [B, N, C] come back as a finite tensor [B, N, C] of their type and device",
        broken=_shape,
        base=True,
    ),
    _of_mixer(
        "input",
        "the tokens are not written to",
        contract.breaks_input,
    ),
    _of_mixer(
        "repetition",
        "equal calls have equal answers in evaluation",
        contract.breaks_repetition,
    ),
    _of_mixer(
        "images",
        "images of a batch do not see one another in evaluation",
        contract.breaks_images,
    ),
    _of_mixer(
        "leading axes",
        "tokens may have any leading axes, [*, N, C]",
        contract.breaks_leading_axes,
    ),
    Rule(
        name="type",
        says="tokens of another type (float64) come back in it after mixer.to(dtype)",
        broken=_dtype,
    ),
    Rule(
        name="mixes_prefix",
        says="prefix tokens depend on the patches exactly where traits.mixes_prefix is True",
        broken=_prefix,
    ),
    _of_mixer(
        "permutation",
        "permuted tokens give the permuted output unless traits say 'positional'",
        contract.breaks_permutation,
    ),
    _of_mixer(
        "maskable",
        "bias of minus infinity hides a token unless traits say maskable=False",
        contract.breaks_mask,
    ),
    _of_mixer(
        "roles",
        "every role of a MapMixer changes the output",
        contract.breaks_roles,
    ),
    Rule(
        name="gradients",
        says="gradients reach the tokens and every parameter but those of zero_gradients",
        broken=_gradients,
        first=False,
    ),
    Rule(
        name="options",
        says="every option changes the output or a gradient",
        broken=_options,
        first=False,
    ),
    Rule(
        name="state",
        says="state_dict and deep copies hold all there is",
        broken=_state,
        first=False,
    ),
    Rule(
        name="meta",
        says="it builds without memory under torch.device('meta')",
        broken=_meta,
        first=False,
    ),
)


def outcomes(trial: Trial, rules: Sequence[Rule] = RULES) -> Iterator[Outcome]:
    """Try rules one after another, on the CPU, apart from every random state and mode outside.

    After a broken rule that the others need, none is tried.
    """
    for rule in rules:
        with _apart(), Attempt() as attempt:
            found = Outcome(rule=rule, why=rule.broken(trial))
        error = attempt.error
        if error is not None:
            first = (str(error).strip().splitlines() or [""])[0]
            why = first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"
            found = Outcome(rule=rule, why=why, error=error)
        yield found
        if found.why is not None and rule.base:
            return


@contextmanager
def _apart() -> Iterator[None]:
    """Leave no trace in generators, and nothing outside in the results."""
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
            torch.no_grad(),
        ):
            yield
    finally:
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)


def broken(name: str, outcome: Outcome) -> UserError:
    """Make the error of a broken rule."""
    rule = outcome.rule
    return UserError(
        f"mixer {name!r} breaks the rule {rule.name!r} ({rule.says}): {outcome.why}; see {PAGE}"
    )


def check_first(kind: type[TokenMixer], site: Site, options: Mapping[str, Any]) -> None:
    """Check a class from outside keymix on a small input, once per process, or raise a UserError.

    A class may need other sites than the first that is tried: what its code raises counts only
    if it does so on the grid of ``site`` too. Its own refusals do not count; but a class that
    refuses to be built on all of them is checked again at its next use.
    """
    if not from_outside(kind) or kind in _KEPT:
        return
    first = [rule for rule in RULES if rule.first]
    built, found = False, None
    for each in _sites(site):
        tried = list(outcomes(Trial(kind, each, options), first))
        built = built or tried[0].why is None
        broke = [outcome for outcome in tried if outcome.why is not None]
        found = next((one for one in broke if not isinstance(one.error, UserError)), None)
        if not broke or (found is not None and found.error is None):
            break
    if found is not None:
        raise broken(kind.mixer_name, found) from found.error
    if built:
        _KEPT.add(kind)


def _sites(site: Site) -> list[Site]:
    """Return small sites like one, and last one of its own grid and prefix tokens."""
    bare = partial(
        replace,
        site,
        key_grid=None,
        windows=1,
        window_grid=None,
        project=None,
        post_projection=None,
    )
    tried = [
        bare(grid=SMALL.grid, num_prefix_tokens=SMALL.num_prefix_tokens),
        bare(grid=SMALL.grid),
        bare(grid=site.grid or SMALL.grid),
    ]
    return [each for i, each in enumerate(tried) if each not in tried[:i]]

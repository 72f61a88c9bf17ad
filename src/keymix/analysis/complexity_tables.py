# SPDX-License-Identifier: Apache-2.0
"""The papers' tables of cost, each formula beside what is counted of the mixer itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from keymix.analysis.complexity_formulas import KEY_VALUE_TABLE_1, TABLE_6, Formula, KeyValueFormula
from keymix.analysis.complexity_record import (
    FormulaRow,
    KeyValueRow,
    RatioPoint,
    Setting,
    WeightRow,
)
from keymix.analysis.complexity_sites import (
    Candidate,
    Counted,
    attempt,
    candidates,
    counted,
    near_square,
)
from keymix.analysis.complexity_weights import weight_facts
from keymix.errors import UserError
from keymix.mixers.map_mixer import MapMixer
from keymix.mixers.registry import get_mixer_class


class Ledger:
    """Counts of mixers at sites, each counted once."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Counted | None, str | None]] = {}

    def look(
        self, candidate: Candidate, tokens: int, *, dim: int | None = None, biases: bool = False
    ) -> tuple[Counted | None, str | None]:
        """Return the count of a mixer, or None and the reason.

        Args:
            candidate: The mixer.
            tokens: N.
            dim: Another width than the candidate's.
            biases: Whether with the biases that options can switch off.
        """
        arguments = candidate.arguments(near_square(tokens), dim=dim, biases=biases)
        key = json.dumps(arguments, sort_keys=True)
        if key not in self._known:
            self._known[key] = attempt(lambda: counted(arguments))
        return self._known[key]

    def count(self, candidate: Candidate, tokens: int, **more: int | None) -> Counted:
        """Return the count of one of the papers' mixers.

        Raises:
            UserError: If it cannot be counted there.
        """
        found, reason = self.look(candidate, tokens, dim=more.get("dim"))
        if found is None:
            raise UserError(f"mixer {candidate.label!r} at {tokens} tokens: {reason}")
        return found


def formula_rows(ledger: Ledger, sizes: Setting) -> tuple[FormulaRow, ...]:
    """Compare the formulas of Table 6 with counts at the tables' site and all of the figure's."""
    return tuple(_formula_row(ledger, sizes, formula) for formula in TABLE_6)


def _formula_row(ledger: Ledger, sizes: Setting, formula: Formula) -> FormulaRow:
    candidate = _named(formula.mixer, sizes)
    here = ledger.count(candidate, sizes.at)
    pairs = [(sizes.at, sizes.dim)]
    pairs += [(n, sizes.dim) for n in sizes.sweep_tokens]
    pairs += [(sizes.at, d) for d in sizes.sweep_dims]
    pairs = list(dict.fromkeys(pairs))
    disagree = []
    for n, d in pairs:
        found = ledger.count(candidate, n, dim=d)
        if (found.macs, _weights(found)) != (formula.macs(n, d), formula.params(n, d)):
            disagree.append((n, d))
    return FormulaRow(
        mixer=formula.mixer,
        printed=formula.printed,
        macs_text=formula.macs_text,
        params_text=formula.params_text,
        ratio_text=formula.ratio_text,
        macs=formula.macs(sizes.at, sizes.dim),
        params=formula.params(sizes.at, sizes.dim),
        ratio=float(formula.ratio(sizes.at, sizes.dim)),
        macs_counted=here.macs,
        params_counted=_weights(here),
        biases=here.biases,
        sites=len(pairs),
        disagree=tuple(disagree),
    )


def _weights(count: Counted) -> int:
    return count.params - sum(count.biases.values())


def _named(name: str, sizes: Setting) -> Candidate:
    return candidates(name, dim=sizes.dim, num_heads=sizes.num_heads)[0]


def ratio_points(
    ledger: Ledger, candidate: Candidate, sites: Sequence[tuple[int, int]]
) -> list[RatioPoint]:
    """Count a mixer along one axis of the figure."""
    printed = {f.mixer: f for f in TABLE_6} if not candidate.options else {}
    points = []
    for n, d in sites:
        found, reason = ledger.look(candidate, n, dim=d)
        formula = printed.get(candidate.label)
        if found is not None and found.ratio is None:
            reason = "it has no parameters"
        points.append(
            RatioPoint(
                mixer=candidate.label,
                tokens=n,
                dim=d,
                params=None if found is None else found.params,
                macs=None if found is None else found.macs,
                ratio=None if found is None else found.ratio,
                formula=None if formula is None else float(formula.ratio(n, d)),
                reason=reason,
            )
        )
    return points


def weight_rows(
    ledger: Ledger, chosen: Sequence[Candidate], sizes: Setting
) -> tuple[WeightRow, ...]:
    """Read Table 7 off every mixer."""
    return tuple(_weight_row(ledger, candidate, sizes.sweep_tokens) for candidate in chosen)


def _weight_row(ledger: Ledger, candidate: Candidate, tokens: Sequence[int]) -> WeightRow:
    facts, reason = attempt(lambda: weight_facts(candidate))
    row = WeightRow(
        mixer=candidate.label,
        params_a_token=_a_token(ledger, candidate, tokens[0], tokens[-1]),
        reason=reason,
    )
    if facts is not None:
        row = replace(row, sharing=facts.sharing, kernels=facts.kernels, dynamic=facts.dynamic)
    for formula in TABLE_6:
        if formula.mixer == candidate.label:
            row = replace(
                row,
                printed=formula.printed,
                printed_sharing=formula.sharing,
                printed_dynamic=formula.dynamic,
            )
    return row


def _a_token(ledger: Ledger, candidate: Candidate, few: int, many: int) -> float | None:
    small, large = (ledger.look(candidate, tokens)[0] for tokens in (few, many))
    if small is None or large is None:
        return None
    grown, tokens = large.params - small.params, many - few
    return grown / tokens if grown % tokens else grown // tokens


def key_value_rows(ledger: Ledger, sizes: Setting) -> tuple[KeyValueRow, ...]:
    """Compare the formulas of Table 1 with counts."""
    return tuple(_key_value_row(ledger, sizes, formula) for formula in KEY_VALUE_TABLE_1)


def _key_value_row(ledger: Ledger, sizes: Setting, formula: KeyValueFormula) -> KeyValueRow:
    plain = _named(formula.mixer, sizes)
    label = f"{formula.mixer}(pos_dim={sizes.pos_dim})" if formula.positions else formula.mixer
    candidate = _named(label, sizes)
    base, whole = (ledger.count(each, sizes.at) for each in (plain, candidate))
    params, macs = _queries_and_keys(plain, base)
    return KeyValueRow(
        mixer=label,
        printed=formula.printed,
        macs_text=formula.macs_text,
        params_text=formula.params_text,
        macs=formula.macs(sizes.at, sizes.dim, sizes.pos_dim),
        params=formula.params(sizes.dim, sizes.pos_dim),
        macs_counted=macs + whole.macs - base.macs,
        params_counted=params + _weights(whole) - _weights(base),
        biases=whole.biases,
        macs_total=whole.macs,
        params_total=whole.params,
    )


def _queries_and_keys(candidate: Candidate, count: Counted) -> tuple[int, int]:
    """Take the share of V out of the joint projection's parameters and multiply-adds."""
    cls = get_mixer_class(candidate.name)
    if not issubclass(cls, MapMixer) or cls.joint is None:
        raise UserError(f"mixer {candidate.label!r} has no joint projection of its roles")
    params, macs = count.layers[cls.joint]
    kept = len([role for role in cls.roles if role != "v"])
    return params * kept // len(cls.roles), macs * kept // len(cls.roles)

# SPDX-License-Identifier: Apache-2.0
"""``keymix analyze``: what models attend to, whether they collapse, what mixers cost."""

from __future__ import annotations

from keymix.cli import (
    analyze_attention,
    analyze_collapse,
    analyze_complexity,
    analyze_memory,
    analyze_spikes,
    console,
)
from keymix.errors import missing, unknown

_ANALYSES = {
    "attention": analyze_attention,
    "collapse": analyze_collapse,
    "complexity": analyze_complexity,
    "memory": analyze_memory,
    "spikes": analyze_spikes,
}


def main(argv: list[str]) -> int:
    """Run ``keymix analyze``.

    Args:
        argv: The words after the verb.

    Returns:
        0; mistakes are raised as UserError.
    """
    if not argv:
        raise missing("analysis", _ANALYSES)
    if argv[0] in ("-h", "--help"):
        console.say(_help())
        return 0
    if argv[0] not in _ANALYSES:
        raise unknown("analysis", argv[0], _ANALYSES)
    return int(_ANALYSES[argv[0]].main(argv[1:]))


def _help() -> str:
    usages = [
        analysis.parser().format_usage().removeprefix("usage: ").rstrip()
        for analysis in _ANALYSES.values()
    ]
    rows = [f"  {name:<11} {analysis.SUMMARY}" for name, analysis in _ANALYSES.items()]
    hint = "`keymix analyze attention --help` and so on say more."
    return "usage: " + "\n       ".join(usages) + "\n\n" + "\n".join(rows) + "\n\n" + hint

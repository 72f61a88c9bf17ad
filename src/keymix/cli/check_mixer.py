# SPDX-License-Identifier: Apache-2.0
"""``keymix check-mixer``: run the contract of mixers on a file of one's own, and say what holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from keymix.cli.console import VerbParser, say, table
from keymix.errors import UserError

if TYPE_CHECKING:
    from keymix.mixers.user_mixers import Outcome

DESCRIPTION = """\
Run the contract of mixers on the mixers that a file registers, and show which rules hold.
Every mixer is built on a small site (12 channels, 3 heads, 2 prefix tokens, a grid of 2x3) and
shown random tokens on the CPU. The exit code is 2 if a rule is broken."""

EXAMPLES = """\
examples:
  keymix check-mixer docs/examples/my_mixer.py
  keymix check-mixer my_mixer.py --mixer "banded(width=5)"      with options of its own
  keymix check-mixer my_mixer.py --json"""


def parser() -> VerbParser:
    """Return the parser of the command line."""
    made = VerbParser(
        prog="keymix check-mixer",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    made.add_argument("file", metavar="FILE.py", help="a file that registers your own mixers")
    made.add_argument(
        "--mixer",
        metavar="M",
        help="only this mixer, with options if it needs any: banded(width=5) (default: all)",
    )
    made.add_json()
    return made


def main(argv: list[str]) -> int:
    """Run ``keymix check-mixer``: 0 if every rule holds, else a UserError names those broken."""
    given = parser().parse_args(argv)
    from keymix.mixers.registry import import_file, names_in
    from keymix.mixers.user_mixers import PAGE

    import_file(given.file)
    found = names_in(given.file)
    if not found:
        raise UserError(f"{given.file} registers no mixer: @register_mixer names one; see {PAGE}")
    chosen = {each: {} for each in found} if given.mixer is None else _named(given.mixer, found)
    results = {name: _examined(name, options) for name, options in chosen.items()}
    if given.json:
        say(json.dumps([_plain(name, each) for name, each in results.items()], indent=2))
    else:
        rows = [
            [name, o.rule.name, "no" if o.why else "yes", o.why or o.rule.says]
            for name, each in results.items()
            for o in each
        ]
        table(["mixer", "rule", "holds", "what"], rows, left=4)
    broken = [_summary(name, each) for name, each in results.items() if any(o.why for o in each)]
    if broken:
        raise UserError(f"{given.file}: {'; '.join(broken)}; see {PAGE}")
    return 0


def _summary(name: str, results: list[Outcome]) -> str:
    """Name the rules that a mixer breaks, and say how many were not tried for it."""
    from keymix.mixers.user_mixers import RULES

    left = len(RULES) - len(results)
    rules = ", ".join(o.rule.name for o in results if o.why)
    return f"mixer {name!r} breaks {rules}" + (f" ({left} rules were not tried)" if left else "")


def _named(text: str, found: list[str]) -> dict[str, dict[str, Any]]:
    """Read a mixer of the file, with its options."""
    from keymix.mixers.spec import parse_mixer

    spec = parse_mixer(text)
    if len(spec.names) != 1 or spec.names[0] not in found:
        raise UserError(f"--mixer {text}: name one that the file registers: {', '.join(found)}")
    return {spec.names[0]: dict(spec.options[0])}


def _examined(name: str, options: dict[str, Any]) -> list[Outcome]:
    """Try every rule on a mixer, which must have all options that have no default."""
    from keymix.mixers.registry import get_mixer_class, mixer_options
    from keymix.mixers.user_mixers import Trial, outcomes

    lacking = [
        option
        for option, parameter in mixer_options(name).items()
        if parameter.default is parameter.empty and option not in options
    ]
    if lacking:
        wanted = ",".join(f"{option}=…" for option in lacking)
        raise UserError(
            f'mixer {name!r} has no default of {lacking[0]}: --mixer "{name}({wanted})"'
        )
    return list(outcomes(Trial(get_mixer_class(name), options=options)))


def _plain(name: str, results: list[Outcome]) -> dict[str, Any]:
    rules = [
        {"name": o.rule.name, "says": o.rule.says, "holds": o.why is None, "why": o.why}
        for o in results
    ]
    return {"mixer": name, "holds": all(o.why is None for o in results), "rules": rules}

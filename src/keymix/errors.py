# SPDX-License-Identifier: Apache-2.0
"""What keymix raises when its user made a mistake: one sentence that names culprit and remedy."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. The command line prints the message without a traceback and exits with 2."""


class WriteError(UserError):
    """A file of a run or a comparison could not be written; the old one is whole."""


class Reported(UserError):
    """What ends a training on several ranks, of which another process says it."""


class KeymixWarning(RuntimeWarning):
    """Something that stops nothing but should be seen. The command line prints it in one line."""


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM ended the work; the message says what is saved and how to resume.

    A KeyboardInterrupt, so that code which lets Ctrl-C through lets this through.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = int(signum)

    @property
    def exit_code(self) -> int:
        """What a process that ends by it returns: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signum


class NoAttentionMap(UserError):
    """A mixer or layer was asked for an attention map and has none; the message says why."""


class GridNeeded(UserError):
    """A mixer cannot be built without knowing how its tokens lie on the image."""


class Attempt:
    """Runs a user's code within ``with`` and keeps what it raises as ``error``, ``SystemExit`` too.

    Let through is what ends the work and is no fault of that code: a signal, a full memory, and
    a KeyboardInterrupt where nothing distinguishes Ctrl-C from what the code raises.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Attempt:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        self.error = error
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            return signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        return not isinstance(error, Interrupted | MemoryError)


FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a user's mixer, task or data may raise without ending more than what it was asked for."""


def reason(error: BaseException) -> str:
    """Write an error as one line of at most 300 characters; a `UserError` says all by itself."""
    words, kind = " ".join(str(error).split()), type(error).__name__
    line = words if isinstance(error, UserError) else f"{kind}: {words}" if words else kind
    return line if len(line) <= 300 else line[:299] + "…"


def unknown(kind: str, name: str, choices: Iterable[str], *, listed: bool = True) -> UserError:
    """Make the error for an unknown name: it lists the nearest known names, or all of a few.

    `kind` is what the name should have been. Many names are given here too unless `keymix list`
    shows them (`listed`).
    """
    known = sorted(set(choices))
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        remedy = "Did you mean " + " or ".join(repr(n) for n in near) + "?"
    elif not known:
        remedy = "There are none."
    elif len(known) <= 20 or not listed:
        remedy = "Choose from " + ", ".join(each or "''" for each in known) + "."
    else:
        remedy = f"There are {len(known)}; `keymix list` shows them."
    return UserError(f"unknown {kind} {name!r}. {remedy}")


def missing(kind: str, choices: Iterable[str]) -> UserError:
    """Make the error for a name that was left out, such as an analysis: it lists the choices."""
    return UserError(f"which {kind}? Choose from {', '.join(sorted(choices))}.")


def require(condition: bool, name: str, value: object, remedy: str) -> None:
    """Refuse a value, named by its dotted key, unless a condition holds."""
    if not condition:
        raise UserError(f"{name} = {value!r}: {remedy}.")


def check_positive(**numbers: int) -> None:
    """Refuse numbers below 1, by name."""
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"{name}={number} must be at least 1")


def one_line(text: str) -> str:
    """Show control characters, such as a name may hold, as escapes: nothing drives a terminal."""
    return text if text.isprintable() else text.translate(_ESCAPES)


def shown(text: str) -> str:
    """Show the control characters of lines as escapes, but for line ends and tabs."""
    return text if text.isprintable() else text.translate(_IN_LINES)


_CONTROLS = (
    *range(0x20),
    *range(0x7F, 0xA0),
    *(0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)),  # turn text around
)
_ESCAPES = {code: repr(chr(code))[1:-1] if code < 0x7F else f"\\u{code:04x}" for code in _CONTROLS}
_IN_LINES = {code: text for code, text in _ESCAPES.items() if chr(code) not in "\n\t"}


def whole_number(text: str) -> int:
    """Read a whole number that a person wrote, ``256`` or ``1e6``; a ValueError if it is none."""
    try:
        return int(text)
    except ValueError:
        number = float(text.strip())
    if not number.is_integer():
        raise ValueError(f"{text!r} is no whole number")
    return int(number)

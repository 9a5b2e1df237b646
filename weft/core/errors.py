"""Errors: what was given, what is required, and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class WeftError(Exception):
    """Base of all errors of weft: `message` says what is wrong, `hint` what to do.

    >>> str(WeftError("timeout must be > 0, got 0.", hint="Give seconds."))
    'timeout must be > 0, got 0. Give seconds.'
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries; keyword-only arguments do not survive the default pickling.
        return _rebuild, (type(self), self.message, self.hint)


class InputError(WeftError, ValueError):
    """An invalid argument, file or option."""


class ScheduleError(WeftError):
    """A schedule that does not compute its attention."""


class AgreementError(WeftError):
    """Ranks that are about to run different things."""


class DerivativeError(WeftError, NotImplementedError):
    """A derivative, or a transform of torch, that weft does not compute."""


class CommError(WeftError, RuntimeError):
    """A peer that is lost, stuck or late; names the operation and the peer."""


class MissingError(WeftError, ImportError):
    """A missing package or tool; names the command that installs it."""


def nearest_of(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest known one, or all of them."""
    from difflib import get_close_matches

    names = list(known)
    near = get_close_matches(name, names, 1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names) or 'none'}."


def _rebuild(kind: type[WeftError], message: str, hint: str) -> WeftError:
    return kind(message, hint=hint)

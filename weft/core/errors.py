"""The few errors weft raises. Each says what was given, which rule it breaks and what would work."""

from __future__ import annotations

from collections.abc import Iterable


class WeftError(Exception):
    """Base of all weft errors: `message` says what is wrong, `hint` what would work."""

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
    """An argument, file or option that breaks a rule."""


class ScheduleError(WeftError):
    """A schedule that would not compute the attention it claims to."""


class AgreementError(WeftError):
    """Ranks that are about to run different things."""


class DerivativeError(WeftError, NotImplementedError):
    """A derivative, or a transform of torch's, that weft does not compute."""


class CommError(WeftError, RuntimeError):
    """A peer that is lost, stuck or late; names the operation and the peer waited for."""


class MissingError(WeftError, ImportError):
    """Something that is not installed; names the command that adds it."""


def nearest_of(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known: the one that was meant, if one is near, or all there are."""
    from difflib import get_close_matches

    names = list(known)
    near = get_close_matches(name, names, 1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names) or 'none'}."


def _rebuild(kind: type[WeftError], message: str, hint: str) -> WeftError:
    return kind(message, hint=hint)

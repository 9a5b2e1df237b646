"""Numbers as people type them: 2,3 or 8."""

from __future__ import annotations

from weft.core.errors import InputError


def counts(text: str, name: str) -> list[int]:
    """Positive whole numbers, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"{name}={text!r} is not a list of counts.", hint="Write 2 or 2,3,4.")
    return [int(part) for part in parts]

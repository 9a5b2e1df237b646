"""Names of step caches, as in `--cache first-block:0.08`; without torch."""

from __future__ import annotations

from weft.core.errors import InputError

CACHES: dict[str, float] = {"first-block": 0.05, "pab": 2, "taylorseer": 5}
"""The default of the number of each: a threshold, or every how many steps is computed."""


def parse_cache(text: str) -> tuple[str, float]:
    """Return a cache's name and number: NAME or NAME:NUMBER."""
    name, colon, number = text.partition(":")
    if name not in CACHES:
        raise InputError(
            f"There is no cache {name!r}; there are {', '.join(CACHES)}.",
            hint="Set others in a script: model.enable_cache(MagCacheConfig(…)).",
        )
    try:
        value = float(number) if colon else CACHES[name]
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf") or (isinstance(CACHES[name], int) and value % 1):
        kind = "an integer" if isinstance(CACHES[name], int) else "a number"
        raise InputError(
            f"--cache {name} takes {kind} > 0, got {number!r}.", hint=f"Write {name}:{CACHES[name]}."
        )
    return name, value

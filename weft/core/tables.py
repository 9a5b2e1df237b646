"""Tables: TOML or JSON as a dataclass; a name that does not exist, or a value of another kind, is refused."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from weft.core.errors import InputError, nearest_of

Kind = TypeVar("Kind")
UNIONS = (types.UnionType, Union)
MAX_INT = 2**63 - 1
"""Larger ones do not fit into an array."""
SHOWN = 160
"""Characters of a value that a message shows."""


def read(kind: type[Kind], said: Any, where: str) -> Kind:
    """A dataclass, whose fields may be others and tuples of others; `where` begins what is refused.

    A field with the `metadata` {"name": …} is called so in the table, as Python may have no such name.
    """
    known = {field.metadata.get("name", field.name): field for field in fields(cast("Any", kind))}
    if not isinstance(said, Mapping):
        raise InputError(f"{where} is {shown(said)}.", hint=f"It is a table of {', '.join(known)}.")
    table = cast("Mapping[str, Any]", said)
    for name in table:
        if name not in known:
            hint = nearest_of(str(name)[:SHOWN], known)
            raise InputError(f"{where}: there is no {shown(name)}.", hint=hint)
    for name, field in known.items():
        if name not in table and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{where}: {name} is not told.", hint=f"It is a table of {', '.join(known)}.")
    hints = get_type_hints(kind)
    told = {known[name].name: (name, given) for name, given in table.items()}
    return kind(**{field: entry(hints[field], given, where, name) for field, (name, given) in told.items()})


def entry(kind: Any, given: Any, where: str, name: str) -> Any:
    """One value of a table: of one kind, or of one of several."""
    if type(None) in _options(kind) and _fits(type(None), given):
        return None
    for option in _options(kind):
        if is_dataclass(option):
            return read(cast("Any", option), given, f"{where} [{name}]")
        if is_dataclass(_inner(option)) and isinstance(given, list | tuple):
            return tuple(read(_inner(option), row, f"{where} [[{name}]]") for row in cast("list[Any]", given))
        if _fits(option, given):
            return tuple(given) if get_origin(option) is tuple else float(given) if option is float else given
    raise InputError(f"{where}: {name} = {shown(given)}.", hint=f"It is {describe(kind)}.")


def shown(given: Any) -> str:
    """A value for a message, however large."""
    try:
        text = " ".join(repr(given).split())  # arrays have lines
    except (ValueError, RecursionError):  # a whole number of more digits than Python prints
        return "too large to show"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in UNIONS else (kind,)


def _inner(kind: Any) -> Any:
    """What a tuple is of."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


@cache
def check_of(kind: Any) -> Callable[[Any], bool]:
    """Return whether values are of an annotated type, as a function; made once for each type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return lambda given: isinstance(given, str | int | None) and given in inner
    if origin in UNIONS:
        checks = [check_of(option) for option in inner]
        return lambda given: any(check(given) for check in checks)
    if origin is tuple:
        parts = [check_of(each) for each in inner if each is not Ellipsis]
        if inner[-1] is Ellipsis:
            return lambda given: isinstance(given, list | tuple) and all(map(parts[0], cast("Any", given)))
        return lambda given: (
            isinstance(given, list | tuple)
            and len(cast("Any", given)) == len(parts)
            and all(check(each) for check, each in zip(parts, cast("Any", given), strict=True))
        )
    # To Python a truth value is a whole number too; to a reader it is a slip of the pen.
    if kind is int:
        return lambda given: type(given) is int and abs(given) <= MAX_INT
    if kind is float:
        # NaN is not equal to itself.
        return lambda given: given == given if type(given) is float else check_of(int)(given)
    known = origin or kind
    return (lambda _: True) if known is Any else (lambda given: isinstance(given, known))


def _fits(kind: Any, given: Any) -> bool:
    return check_of(kind)(given)


def describe(kind: Any) -> str:
    """Say in a few words which values an annotated type takes."""
    if get_origin(kind) is Literal:
        return " or ".join(f'"{word}"' for word in get_args(kind))
    if get_origin(kind) in UNIONS:
        return " or ".join(describe(option) for option in get_args(kind) if option is not type(None))
    if get_origin(kind) is tuple:
        many = "a list of" if get_args(kind)[-1] is Ellipsis else str(len(get_args(kind)))
        return f"{many} {describe(_inner(kind)).removeprefix('a ')}s"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return "an array" if "ndarray" in str(kind) else words.get(kind, "a table")

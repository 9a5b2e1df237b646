"""Tables: read TOML or JSON into a dataclass; unknown names and values of another type are errors."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from weft.core.errors import InputError, nearest_of

Kind = TypeVar("Kind")
UNIONS = (types.UnionType, Union)
MAX_INT = 2**63 - 1
"""Larger ones do not fit into an array."""
MAX_SHOWN = 160
"""Characters of a value that a message shows."""


def read(kind: type[Kind], value: Any, source: str) -> Kind:
    """Make a dataclass, whose fields may be others and tuples of others; errors begin with `source`.

    A field with the `metadata` {"name": …} has that key in the table, which need not be a name of Python.
    """
    known = {field.metadata.get("name", field.name): field for field in fields(cast("Any", kind))}
    if not isinstance(value, Mapping):
        raise InputError(f"{source} must be a table of {', '.join(known)}, got {shown(value)}.")
    table = cast("Mapping[str, Any]", value)
    for name in table:
        if name not in known:
            hint = nearest_of(str(name)[:MAX_SHOWN], known)
            raise InputError(f"{source}: unknown key {shown(name)}.", hint=hint)
    for name, field in known.items():
        if name not in table and field.default is MISSING and field.default_factory is MISSING:
            hint = f"The keys are {', '.join(known)}."
            raise InputError(f"{source}: missing required key {name!r}.", hint=hint)
    hints = _hints(kind)
    fields_of_keys = {name: known[name].name for name in table}
    return kind(
        **{field: entry(hints[field], table[name], source, name) for name, field in fields_of_keys.items()}
    )


_hints = cache(get_type_hints)


def entry(kind: Any, value: Any, source: str, name: str) -> Any:
    """Convert one value of a table to a type, or to the first type of a union that fits."""
    if type(None) in _options(kind) and check_of(type(None))(value):
        return None
    for option in _options(kind):
        if is_dataclass(option):
            return read(cast("Any", option), value, f"{source} [{name}]")
        if is_dataclass(_inner(option)) and isinstance(value, list | tuple):
            return tuple(
                read(_inner(option), row, f"{source} [[{name}]]") for row in cast("list[Any]", value)
            )
        if check_of(option)(value):
            return tuple(value) if get_origin(option) is tuple else float(value) if option is float else value
    raise InputError(f"{source}: {name} must be {describe(kind)}, got {shown(value)}.")


def shown(value: Any) -> str:
    """Return a value as a message shows it, however large it is."""
    try:
        text = " ".join(repr(value).split())  # arrays print several lines
    except (ValueError, RecursionError):  # a whole number of more digits than Python prints
        return "too large to show"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} …"


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in UNIONS else (kind,)


def _inner(kind: Any) -> Any:
    """The type of the first item of a tuple type."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


@cache
def check_of(kind: Any) -> Callable[[Any], bool]:
    """Return a function that checks whether values are of an annotated type; cached for each type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return lambda value: isinstance(value, str | int | None) and value in inner
    if origin in UNIONS:
        checks = [check_of(option) for option in inner]
        return lambda value: any(check(value) for check in checks)
    if origin is tuple:
        checks = [check_of(each) for each in inner if each is not Ellipsis]
        if inner[-1] is Ellipsis:
            return lambda value: isinstance(value, list | tuple) and all(map(checks[0], cast("Any", value)))
        return lambda value: (
            isinstance(value, list | tuple)
            and len(cast("Any", value)) == len(checks)
            and all(check(each) for check, each in zip(checks, cast("Any", value), strict=True))
        )
    # To Python a bool is an int too; in a file it is a mistake.
    if kind is int:
        return lambda value: type(value) is int and abs(value) <= MAX_INT
    if kind is float:
        # NaN is not equal to itself.
        return lambda value: value == value if type(value) is float else check_of(int)(value)
    cls = dict if is_typeddict(kind) else origin or kind
    return (lambda _: True) if cls is Any else (lambda value: isinstance(value, cls))


def describe(kind: Any) -> str:
    """Describe in a few words the values of an annotated type."""
    if get_origin(kind) is Literal:
        return " or ".join(f'"{word}"' for word in get_args(kind))
    if get_origin(kind) in UNIONS:
        return " or ".join(describe(option) for option in get_args(kind) if option is not type(None))
    if get_origin(kind) is tuple:
        count = "a list of" if get_args(kind)[-1] is Ellipsis else str(len(get_args(kind)))
        return f"{count} {describe(_inner(kind)).removeprefix('a ')}s"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return "an array" if "ndarray" in str(kind) else words.get(kind, "a table")

"""Tables: TOML or JSON as a dataclass; a name that does not exist, or a value of another kind, is refused."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from weft.core.errors import InputError, nearest_of

Kind = TypeVar("Kind")
UNIONS = (types.UnionType, Union)


def read(kind: type[Kind], said: Any, where: str) -> Kind:
    """A dataclass, whose fields may be others and tuples of others; `where` begins what is refused.

    A field with the `metadata` {"name": …} is called so in the table, as Python may have no such name.
    """
    known = {field.metadata.get("name", field.name): field for field in fields(cast("Any", kind))}
    if not isinstance(said, Mapping):
        raise InputError(f"{where} is {said!r}.", hint=f"It is a table of {', '.join(known)}.")
    table = cast("Mapping[str, Any]", said)
    for name in table:
        if name not in known:
            raise InputError(f"{where}: there is no {name!r}.", hint=nearest_of(str(name), known))
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
    raise InputError(f"{where}: {name} = {given!r}.", hint=f"It is {_said(kind)}.")


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in UNIONS else (kind,)


def _inner(kind: Any) -> Any:
    """What a tuple is of."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def _fits(kind: Any, given: Any) -> bool:
    if get_origin(kind) is Literal:
        return given in get_args(kind)
    if get_origin(kind) is tuple:
        if not isinstance(given, list | tuple):
            return False
        inner, values = get_args(kind), cast("list[Any]", given)
        inner = inner[:1] * len(values) if inner[-1] is Ellipsis else inner
        return len(values) == len(inner) and all(map(_fits, inner, values))
    # To Python a truth value is a whole number too; to a reader it is a slip of the pen.
    if isinstance(given, bool) and kind is not bool:
        return False
    return isinstance(given, int | float) if kind is float else isinstance(given, kind)


def _said(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f'"{word}"' for word in get_args(kind))
    if get_origin(kind) in UNIONS:
        return " or ".join(_said(option) for option in get_args(kind) if option is not type(None))
    if get_origin(kind) is tuple:
        many = "a list of" if get_args(kind)[-1] is Ellipsis else str(len(get_args(kind)))
        return f"{many} {_said(_inner(kind)).removeprefix('a ')}s"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return words.get(kind, "a table")

"""Every value of weft as JSON and back: one walk over frozen dataclasses, and the digest of it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

import numpy as np

from weft.core import tables
from weft.core.errors import InputError
from weft.core.files import parse_json

DTYPES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float32",
    "float64",
)
_KINDS: dict[str, type[Any]] = {}
Kind = TypeVar("Kind")


def value(kind: type[Kind]) -> type[Kind]:
    """Class decorator: makes a frozen dataclass readable from JSON by its own name."""
    _KINDS[kind.__name__] = kind
    return kind


def to_plain(thing: Any) -> Any:
    """Dataclasses, arrays, tuples and numbers as what `json` can write."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = {f.name: to_plain(getattr(thing, f.name)) for f in dataclasses.fields(thing) if f.init}
        return {"kind": type(thing).__name__, **fields}
    if isinstance(thing, np.ndarray):
        return _array_to_plain(cast("np.ndarray[Any, Any]", thing))
    if isinstance(thing, tuple | list):
        return [to_plain(item) for item in cast("list[Any]", thing)]
    if isinstance(thing, dict):
        return {str(key): to_plain(item) for key, item in cast("dict[Any, Any]", thing).items()}
    return cast("Any", thing).item() if isinstance(thing, np.generic) else thing


def _array_to_plain(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    # Masks are bits in long runs: base64 of the packed bytes is small enough and needs no reader of its own.
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"kind": "array", "dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def from_plain(plain: Any) -> Any:
    """The inverse of `to_plain`; lists become tuples, so that values are hashable again."""
    if isinstance(plain, list):
        return tuple(from_plain(item) for item in cast("list[Any]", plain))
    if not isinstance(plain, dict):
        return plain
    table = cast("dict[str, Any]", plain)
    kind = table.get("kind")
    if kind == "array":
        return _array_from_plain(table)
    fields = {key: from_plain(item) for key, item in table.items() if key != "kind"}
    if kind is None:
        return fields
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        raise InputError(f"{tables.shown(kind)} is not a value of weft.", hint=f"Known: {known}.")
    return _build(kind, fields)


def _build(kind: str, fields: dict[str, Any]) -> Any:
    """A value of fields that may be of any type."""
    types = _types(_KINDS[kind])
    for name, given in fields.items():
        if name not in types:
            raise InputError(
                f"{kind} has no field {name[:80]!r}.", hint=f"It has {', '.join(sorted(types))}."
            )
        if not tables.check_of(types[name])(given):
            hint = f"It is {tables.describe(types[name])}."
            raise InputError(f"{kind}.{name} is {tables.shown(given)}.", hint=hint)
    try:
        return _KINDS[kind](**fields)
    except InputError:
        raise
    except (TypeError, AttributeError, ValueError, ArithmeticError, LookupError) as error:
        raise InputError(f"{kind} cannot be read: {error}.") from None  # such as a field that is missing


@cache
def _types(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _array_from_plain(table: dict[str, Any]) -> np.ndarray[Any, Any]:
    try:
        if table["dtype"] not in DTYPES:
            raise InputError(
                f"An array is of {tables.shown(table['dtype'])}.", hint=f"Known: {', '.join(DTYPES)}."
            )
        raw = np.frombuffer(base64.b64decode(table["data"]), dtype=table["dtype"])
        return raw.reshape(table["shape"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        hint = "It has data (base64 of its bytes), dtype and shape."
        raise InputError(f"An array cannot be read: {error!r}.", hint=hint) from None


def dumps(thing: Any) -> str:
    return json.dumps(to_plain(thing), sort_keys=True, separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    """A value from JSON that anybody may have written: one that is valid, or an InputError."""
    return from_plain(parse_json(text, "This"))


def digest(thing: Any) -> str:
    """Sixteen hex digits that are equal on two machines exactly when the values are."""
    return hashlib.sha256(dumps(thing).encode()).hexdigest()[:16]

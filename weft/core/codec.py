"""Codec: the frozen dataclasses of weft as JSON and back, and their digests."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from functools import cache
from typing import Any, cast, get_type_hints

import numpy as np

from weft.core.errors import InputError

DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float32", "float64",
)  # fmt: skip


class Value:
    """Base of the dataclasses that `loads` makes from JSON, by the name of their class."""


def to_plain(value: Any) -> Any:
    """Convert dataclasses, arrays, tuples and numbers to what `json` can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, np.ndarray):
        return _array_to_plain(cast("np.ndarray[Any, Any]", value))
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in cast("dict[Any, Any]", value).items()}
    return cast("Any", value).item() if isinstance(value, np.generic) else value


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
    if not isinstance(kind, str) or (cls := _class(kind)) is None:
        from weft.core.tables import shown

        hint = f"Known: {', '.join(sorted(_classes()))}."
        raise InputError(f"Unknown kind of value {shown(kind)}.", hint=hint)
    return _build(cls, fields)


def _build(cls: type[Value], fields: dict[str, Any]) -> Any:
    """Make a value from fields that may be of any type."""
    from weft.core.tables import check_of, describe, shown

    kind, types = cls.__name__, _types(cls)
    for name, value in fields.items():
        if name not in types:
            raise InputError(
                f"{kind} has no field {name[:80]!r}.", hint=f"It has {', '.join(sorted(types))}."
            )
        if not check_of(types[name])(value):
            raise InputError(f"{kind}.{name} must be {describe(types[name])}, got {shown(value)}.")
    try:
        return cls(**fields)
    except InputError:
        raise
    except (TypeError, AttributeError, ValueError, ArithmeticError, LookupError) as error:
        raise InputError(f"{kind} cannot be read: {error}.") from None  # such as a field that is missing


def _classes(base: type[Value] = Value) -> dict[str, type[Value]]:
    """All public subclasses that are defined by now, by name."""
    classes: dict[str, type[Value]] = {}
    for cls in base.__subclasses__():
        classes |= {} if cls.__name__.startswith("_") else {cls.__name__: cls}
        classes |= _classes(cls)
    return classes


_CLASSES: dict[str, type[Value]] = {}


def _class(kind: str) -> type[Value] | None:
    if kind not in _CLASSES:
        _CLASSES.update(_classes())
    return _CLASSES.get(kind)


@cache
def _types(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _array_from_plain(table: dict[str, Any]) -> np.ndarray[Any, Any]:
    from weft.core.tables import shown

    try:
        if table["dtype"] not in DTYPES:
            raise InputError(
                f"Unknown dtype {shown(table['dtype'])} of an array.", hint=f"Known: {', '.join(DTYPES)}."
            )
        raw = np.frombuffer(base64.b64decode(table["data"]), dtype=table["dtype"])
        return raw.reshape(table["shape"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        hint = "Pass data (base64 of its bytes), dtype and shape."
        raise InputError(f"An array cannot be read: {error!r}.", hint=hint) from None


def dumps(value: Any) -> str:
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    """Return the value of JSON from any source, checked, or raise an InputError."""
    from weft.core.files import parse_json

    return from_plain(parse_json(text, "This"))


def digest(value: Any) -> str:
    """Return 16 hex digits that are equal on two machines exactly when the values are."""
    return hashlib.sha256(dumps(value).encode()).hexdigest()[:16]

"""Strategies by name, one kind a file. A file of this folder is found by itself.

ulysses         heads over all ranks                 gather        each rank fetches the keys it needs
ring            keys and values travel around        usp:4x2       heads over 4, a ring over 2
swapped:4x2     as usp, the ring inside a machine    gather:4x2    heads over 4, fetched over 2
torus:4x2       as swapped, in stages by machine     torus:4x2c2d1 in halves, 1 own stage left for the end
…+balanced      heads and blocks dealt by load       …+cuts        blocks in order, cut by load
"""

from __future__ import annotations

import re
from functools import cache

from weft.core.errors import InputError
from weft.core.modules import modules
from weft.plan.strategy import BALANCES, Strategy, factors


@cache
def kinds() -> tuple[type[Strategy], ...]:
    """Of all files, the one that is to be preferred first."""
    classes = [
        each
        for module in modules(__name__).values()
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Strategy) and each.__module__ == module.__name__
    ]
    return tuple(sorted(classes, key=lambda kind: kind.order))


def short_names() -> list[str]:
    """Names that need no numbers."""
    return [*dict.fromkeys(name for kind in kinds() for name in kind.short(1)), "zigzag"]


def parse(name: str, ranks: int) -> Strategy:
    """The strategy of a name, for so many ranks."""
    plain, _, balance = name.partition("+")
    if plain == "zigzag":
        if _balance(balance, name) not in ("none", "zigzag"):
            raise InputError(f"{name}: zigzag takes no other balance.", hint=f"Use zigzag or ring+{balance}.")
        plain, balance = "ring", "zigzag"
    for kind in kinds():
        if shape := kind.short(ranks).get(plain):
            return kind(*shape, _balance(balance, name))
        if match := re.fullmatch(rf"{kind.kind}:(?P<ulysses>\d+)x(?P<ring>\d+){kind.options}", plain):
            fields = {key: int(number) for key, number in match.groupdict().items() if number}
            _check_ranks(kind, name, fields["ulysses"] * fields["ring"], ranks)
            return kind(balance=_balance(balance, name), **fields)
    shapes = ", ".join(f"{kind.kind}:UxR" for kind in kinds())
    raise InputError(
        f"There is no strategy {name!r}.",
        hint=f"Use auto, {', '.join(short_names())}, {shapes}; add +balanced or +cuts.",
    )


def _check_ranks(kind: type[Strategy], name: str, needed: int, ranks: int) -> None:
    if needed != ranks:
        legal = ", ".join(f"{kind.kind}:{u}x{r}" for u, r in factors(ranks))
        raise InputError(f"{name} needs {needed} ranks; there are {ranks}.", hint=f"Legal here: {legal}.")


def _balance(word: str, name: str) -> str:
    if word and word not in BALANCES:
        raise InputError(f"{name}: there is no balance {word!r}.", hint=f"Use one of {', '.join(BALANCES)}.")
    return word or "none"

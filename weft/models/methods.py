"""Methods: sparse attention by name, `topk:0.2,dense_steps=10`, with its authors' settings as defaults.

A spec is a producer's name and options as in `weft.masks.spec`, or topk:SHARE, and for all of them

dense_steps, dense_layers, dense_last   the first steps, the first and the last layers that stay dense; below
                                        1 a share of them
refresh                                 steps that a mask is kept for before it is made anew
recall                                  queries by which some calls are judged; 0 for none
block                                   tokens of a block
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from weft.core.errors import InputError
from weft.core.voxels import Extent
from weft.masks.grid import TokenGrid
from weft.masks.spec import PRODUCERS, mask_from_spec, options
from weft.models.context import AttentionContext, SparseAttention
from weft.models.producers import Geometric, Profiled, TopK

USUAL = 50  # steps, where nobody knows how many: those of the published settings


@dataclass(frozen=True)
class Rules:
    """When a producer is asked; numbers below 1 are shares."""

    dense_steps: float = 0.0
    dense_layers: float = 0.0
    dense_last: float = 0.0
    refresh: int = 1
    recall: int = 32
    block: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            number = getattr(self, field.name)
            least = field.name in ("refresh", "block")
            if not least <= number or (number >= 1 and number != int(number)):
                raise InputError(
                    f"{field.name}={number:g}.",
                    hint=f"Give {'1' if least else '0'} or more, whole from 1 on, such as {field.name}=5.",
                )

    def is_dense(self, ctx: AttentionContext) -> bool:
        return (
            ctx.step < _count(self.dense_steps, ctx.steps or USUAL)
            or ctx.layer < _count(self.dense_layers, ctx.layers)
            or ctx.layer >= ctx.layers - _count(self.dense_last, ctx.layers)
        )


def _count(given: float, of: int) -> int:
    return round(given * of) if given < 1 else int(given)


# As the authors run Wan and HunyuanVideo in 50 steps. topk is as AdaSpa, whose authors also find that the
# patterns of tiles hardly change from step to step.
PUBLISHED = {
    "sta": Rules(dense_steps=0.3),
    "svg": Rules(dense_steps=0.3, dense_layers=0.03),
    "radial": Rules(dense_steps=0.24, dense_layers=1),
    "topk": Rules(dense_steps=0.2, refresh=5),
}


def parse(spec: str) -> tuple[SparseAttention, Rules]:
    """The producer that a spec names, and when it is asked."""
    name, _, rest = spec.partition(":")
    rules, own, given = PUBLISHED.get(name, Rules()), dict[str, str](), dict[str, float]()
    for part in rest.split(",") if rest else ():
        key, equals, written = (word.strip() for word in part.partition("="))
        if equals and hasattr(rules, key):
            given[key] = _number(key, written, whole=isinstance(getattr(rules, key), int))
        else:
            own[key] = part
    rules = replace(rules, **given)
    return _producer(name, own, rules.block), rules


def _number(key: str, written: str, *, whole: bool) -> float:
    try:
        return int(written) if whole else float(written)
    except ValueError:
        raise InputError(f"{key}={written} cannot be read.", hint=f"Write it like {key}=5.") from None


def _producer(name: str, own: dict[str, str], block: int) -> SparseAttention:
    tile = own.get("tile", "").partition("=")[2]
    if name == "topk":
        return _topk(own, tile, block)
    text = f"{name}:{','.join(own.values())}" if own else name
    if name in PUBLISHED or name not in PRODUCERS:  # errors at once; others may fit certain heads only
        mask_from_spec(text, heads=1, grid=TokenGrid(1, 1, 1), block=block)
    if name == "svg" and "spatial" not in own:
        kinds = (",".join([*own.values(), f"spatial={part}"]) for part in (1, 0))
        return Profiled(*(Geometric(f"svg:{kind}", block=block) for kind in kinds))
    return Geometric(text, block=block, tile=_extent(tile) if tile else options(name).get("tile"))


def _topk(own: dict[str, str], tile: str, block: int) -> TopK:
    try:
        share, *rest = (part for key, part in own.items() if key != "tile")
        if not rest:
            return TopK(float(share), block=block, tile=_extent(tile or "4x4x4"))
    except ValueError:
        pass
    raise InputError(
        f"topk:{','.join(own.values())} cannot be read.",
        hint="Write it like topk:0.2 or topk:0.2,tile=4x4x4; "
        + ", ".join(f.name for f in fields(Rules))
        + ".",
    )


def _extent(written: str) -> Extent:
    t, h, w = map(int, written.split("x"))
    return t, h, w

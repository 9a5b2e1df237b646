"""weft: one long sequence, woven over many devices.

Sequence parallelism for Diffusion Transformers: attention over a sequence that is split over ranks, exact for
any sequence length, number of heads and number of ranks, dense or block-sparse.

A pipeline of Diffusers, under torchrun or `weft run script.py --ranks 4`, the same line on every rank:

    pipe = weft.parallelize(pipe.to(weft.device()))
    video = pipe("a loom at work").frames
    print(weft.explain(pipe))

Tensors, [B, H, local tokens, D] on every rank:

    out = weft.attention(q, k, v)
    out = weft.attention(q, k, v, mask="sta", grid=(21, 30, 52), layout="bshd")

A schedule is data. It is chosen, built, proved and timed without tensors, for any number of ranks:

    >>> import weft
    >>> tokens = weft.Layout.even(2047, 5)
    >>> problem = weft.Problem(batch=1, heads=3, kv_heads=3, head_dim=64, q=tokens, kv=tokens)
    >>> weft.plan(weft.BlockMask.dense(3, 2047), "5xh100").schedule.name
    'ulysses'
    >>> schedule = weft.build("ring", problem)
    >>> weft.verify(schedule)
    ScheduleCost(5 ranks, 12,576,768 bytes in 20 messages, imbalance 1.001)
    >>> weft.verify(weft.reverse(schedule)).ranks
    5
    >>> weft.mask("sta:window=1x3x3", grid=(2, 16, 16), heads=3)
    BlockMask(3 heads (1 patterns), 512×512 tokens, blocks 64×64, 75.0% active)

A name is imported at its first use: `import weft` is quick and needs no torch, and neither does planning.
"""

from __future__ import annotations as _annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from weft.core.errors import WeftError
    from weft.core.layout import Layout
    from weft.core.mask import BlockMask
    from weft.core.mesh import Mesh
    from weft.core.problem import Problem
    from weft.core.schedule import Schedule
    from weft.core.topology import Topology
    from weft.diffusers.adapter import Adapter, Shard
    from weft.diffusers.explain import explain
    from weft.diffusers.parallelize import parallelize, restore
    from weft.masks.grid import TokenGrid
    from weft.masks.spec import mask_from_spec as mask
    from weft.plan import plan
    from weft.plan.choose import build
    from weft.run.attention import attention
    from weft.run.devices import device
    from weft.run.measure.trace import trace
    from weft.run.switch import assert_sharded, gather, split, switch
    from weft.schedule.reverse import reverse
    from weft.schedule.verify import verify
    from weft.switching.stages import stages

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "BlockMask",
    "Layout",
    "Mesh",
    "Problem",
    "Schedule",
    "Shard",
    "TokenGrid",
    "Topology",
    "WeftError",
    "assert_sharded",
    "attention",
    "build",
    "device",
    "explain",
    "gather",
    "mask",
    "parallelize",
    "plan",
    "restore",
    "reverse",
    "split",
    "stages",
    "switch",
    "trace",
    "verify",
]

_HOMES = {
    "Adapter": "weft.diffusers.adapter",
    "BlockMask": "weft.core.mask",
    "Layout": "weft.core.layout",
    "Mesh": "weft.core.mesh",
    "Problem": "weft.core.problem",
    "Schedule": "weft.core.schedule",
    "Shard": "weft.diffusers.adapter",
    "TokenGrid": "weft.masks.grid",
    "Topology": "weft.core.topology",
    "WeftError": "weft.core.errors",
    "assert_sharded": "weft.run.switch",
    "attention": "weft.run.attention",
    "build": "weft.plan.choose",
    "device": "weft.run.devices",
    "explain": "weft.diffusers.explain",
    "gather": "weft.run.switch",
    "mask": "weft.masks.spec:mask_from_spec",
    "parallelize": "weft.diffusers.parallelize",
    "plan": "weft.plan:",  # the package itself, which can be called
    "restore": "weft.diffusers.parallelize",
    "reverse": "weft.schedule.reverse",
    "split": "weft.run.switch",
    "stages": "weft.switching.stages",
    "switch": "weft.run.switch",
    "trace": "weft.run.measure.trace",
    "verify": "weft.schedule.verify",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    from importlib import import_module

    module, colon, attribute = _HOMES[name].partition(":")
    try:
        value = import_module(module)
        if attribute or not colon:
            value = getattr(value, attribute or name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from weft.core.errors import MissingError
        from weft.core.install import install_command

        raise MissingError(
            f"weft.{name} needs torch, which is not installed.",
            hint=f"Add it with: {install_command('torch')}",
        ) from error
    globals()[name] = value  # cached: the next access does not call this function
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

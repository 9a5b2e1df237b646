"""Region: the part of a transformer that runs on this rank's tokens, from where they are cut to the gather.

Hooks cut and gather, each attention module becomes a `Site`. What an adapter does not declare is found out:
attention modules that it does not name, and attention computed outside of the named ones, are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any

import numpy as np
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.masks.grid import TokenGrid
from weft.models.adapter import Adapter, Cut, Cuts, matching, modules, parameters, put
from weft.models.attend import Site, put_around
from weft.models.clock import Clock
from weft.models.context import AttentionContext, SparseAttention
from weft.models.dropout import Dropped
from weft.models.guard import Guard, check_processor, refuse_undeclared
from weft.models.padding import mask_inputs
from weft.models.prove import Proof
from weft.models.randomness import share_numbers
from weft.models.shards import Shards
from weft.models.sparsity import problem_of
from weft.plan.place import Place
from weft.run.gpus import topology_for
from weft.run.world import World


class Region:
    """Installed in a model until `remove`; `run` is the model's forward with its tokens sharded."""

    def __init__(  # noqa: PLR0913 - what parallelize was told
        self,
        model: nn.Module,
        adapter: Adapter,
        *,
        name: str = "",
        plan: Any = "auto",
        sparsity: SparseAttention | None = None,
        clock: Clock | None = None,
        backend: str = "auto",
        check: bool = False,
        tells: bool = False,
    ) -> None:
        self.model, self.adapter, self.plan = model, adapter.for_model(model), plan
        self.backend = backend
        kind = type(model).__name__
        self.name = kind if name in ("", kind) else f"{kind} {name}"
        """What planners call the model: a pipeline may have two of a class."""
        self.worlds: dict[World, None] = {}
        """That it has run on: with guidance, halves of the ranks too."""
        self.sparsity, self.clock = sparsity, clock or Clock()
        self.extent, self.layers = (1, 1, 1), 0
        self.orders: set[tuple[str, ...]] = set()
        """Streams as attentions have them."""
        self._names = parameters(model)
        self.shards = Shards()
        self.mask_inputs: tuple[Any, ...] = ()
        """What attention masks of this forward are made of."""
        self.forward: Callable[..., Any] = model.forward
        self.proof = Proof() if check else None
        self.tells = tells
        """Whether this is the one rank that prints."""
        self.runs = self.run_now = 0
        self._enter = _cut_inputs(self, "the model", model, self.adapter.inputs.get("", {}))
        self.drops = False
        self.quiet = 0
        """Above 0 inside attention modules, where attention is expected."""
        self._undo: list[Callable[[], Any]] = []
        try:
            self._install()
        except BaseException:
            self.remove()
            raise

    def run(self, mesh: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output, whole on every rank of a mesh, each of which computes its tokens of it."""
        if getattr(self.model, "is_cache_enabled", False):
            raise InputError(
                f"A cache of Diffusers' is enabled on this {type(self.model).__name__}: each rank would "
                "decide by its own tokens what to compute.",
                hint="Call disable_cache() on it.",
            )
        self.shards = Shards(mesh)
        self.runs = self.run_now = self.runs + 1
        self.mask_inputs = mask_inputs({**dict(zip(self._names, args, strict=False)), **kwargs})
        world = self.shards.world  # asked for here: blocks that are compiled cannot find it
        self.worlds[world] = None
        if self.drops and self.model.training:
            share_numbers(world)
        if self.sparsity is not None:
            self._begin({**dict(zip(self._names, args, strict=False)), **kwargs})
        args, kwargs = self._enter(self.model, args, kwargs)
        # What was found right is looked at less and less often.
        looked_at = self.model.training or not self.runs & (self.runs - 1)
        with self._remembered(), Guard(self) if looked_at else nullcontext():
            out = self.forward(*args, **kwargs)
        if self.proof is not None:
            if self.tells:
                sys.stderr.write(f"weft: {self.proof}\n")
            self.proof = None
        return out

    def _begin(self, given: Mapping[str, Any]) -> None:
        """What masks depend on."""
        if self.adapter.grid is None:
            raise InputError(
                f"The adapter of {self.adapter.model} does not say how its tokens lie in space and time.",
                hint="Masks need it: Adapter(…, grid=lambda model, given: (frames, rows, columns)).",
            )
        self.extent = self.adapter.grid(self.model, given)
        self.clock.tick(given)

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        """Blocks that are computed again for their gradients see the streams of this forward."""
        model, own = self.model, (self.shards, self.extent, self.run_now, self.mask_inputs)
        checkpoint: Any = vars(model).get("_gradient_checkpointing_func")

        def again(block: Any, *args: Any) -> Any:
            before = self.shards, self.extent, self.run_now, self.mask_inputs
            self.shards, self.extent, self.run_now, self.mask_inputs = own
            try:
                return block(*args)
            finally:
                self.shards, self.extent, self.run_now, self.mask_inputs = before

        if checkpoint is None:
            yield
            return
        undo = put(
            model,
            "_gradient_checkpointing_func",
            lambda block, *args: checkpoint(partial(again, block), *args),
        )
        try:
            yield
        finally:
            undo()

    @property
    def watched(self) -> bool:
        """Whether an attention is more than its plan."""
        return self.sparsity is not None or self.proof is not None

    def context(self, site: Site, q: Tensor, scale: float | None, layout: Layout) -> AttentionContext:
        """What sparse attention is told of a call."""
        video = site.streams.index("video")
        text = layout.size - prod(self.extent)
        grid = TokenGrid(*self.extent, prefix=text if video else 0, suffix=0 if video else text)
        step, branch = self.clock.now
        return AttentionContext(
            layer=site.layer, layers=self.layers, step=step, steps=self.clock.steps, branch=branch, grid=grid,
            heads=q.shape[1], layout=layout, world=self.shards.world, scale=scale, backend=self.backend,
            run=self.run_now, name=site.name, module=site.module, hidden=site.hidden,
        )  # fmt: skip

    def planned(self, ctx: AttentionContext, mask: BlockMask, tokens: Layout, qkv: tuple[Tensor, ...]) -> Any:
        """The plan of a sparse attention: the planner's, unless the user gave one or the mask stays."""
        sparse: Any = self.sparsity
        if not isinstance(self.plan, str) or not getattr(sparse, "changes", True):
            return self.plan
        q, k, _ = qkv
        name = getattr(sparse, "name", type(sparse).__name__)
        place = Place(self.name, ctx.layer, ctx.branch, name)
        loads = sparse.loads(ctx) if hasattr(sparse, "loads") else None
        if loads is not None:
            loads = np.tile(loads, mask.heads // len(loads))
        return ctx.world.planner.plan(
            place,
            problem_of(tokens, q, k),
            mask,
            step=ctx.step,
            topology=lambda: topology_for(None, tokens.ranks, q.device, ctx.backend),
            asked=self.plan,
            loads=loads,
        )

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _install(self) -> None:
        model, adapter = self.model, self.adapter
        sites = [
            (name, module, streams)
            for pattern, streams in adapter.attention.items()
            for name, module in matching(model, pattern)
        ]
        self.layers = len(sites)
        self.orders = {tuple(streams.rstrip("?").split()) for _, _, streams in sites}
        local = [found for pattern in adapter.local for found in matching(model, pattern)]
        refuse_undeclared(model, [name for name, *_ in sites] + [name for name, _ in local])
        for layer, (name, module, streams) in enumerate(sites):
            check_processor(name, module)
            self._use_native(module)
            self._undo.append(put_around(module, Site(self, name, module, streams, layer)))
        for _, module in local:
            self._undo.append(put_around(module, self))
        for name, module in modules(model).items():
            if isinstance(module, nn.Dropout) and module.p:
                self.drops = True
                self._undo.append(put_around(module, Dropped(self, name, module)))
        self._install_hooks()

    def _install_hooks(self) -> None:
        """What is cut and put together again."""
        model, adapter = self.model, self.adapter
        for pattern, cuts in adapter.inputs.items():
            # One function for all modules of a class: else torch.compile would compile each of them.
            known: dict[type, Any] = {}
            for _, module in matching(model, pattern) if pattern else ():
                cut = known.setdefault(type(module), _cut_inputs(self, pattern, module, cuts))
                self._hook(module.register_forward_pre_hook(cut, with_kwargs=True))
        for pattern, out in adapter.outputs.items():
            for name, module in matching(model, pattern):
                self._hook(module.register_forward_hook(_cut_output(self, name, out)))
        for pattern, cut in adapter.gather.items():
            for name, module in matching(model, pattern):
                self._hook(module.register_forward_hook(_gather_output(self, name, cut)))

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _use_native(self, module: Any) -> None:
        """Diffusers' dispatcher may be set to kernels of which nobody sees the call."""
        processor: Any = getattr(module, "processor", None)
        if getattr(processor, "_attention_backend", None) is not None:
            self._undo.append(partial(setattr, processor, "_attention_backend", processor._attention_backend))
            processor._attention_backend = "native"

    def around(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module that may compute attention."""
        self.quiet += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self.quiet -= 1


def _cut_inputs(region: Region, name: str, module: nn.Module, cuts: Mapping[str, Cuts]) -> Any:
    order = parameters(module)

    def cut(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = [*zip_longest(order[: len(args)], args, fillvalue=""), *kwargs.items()]
        own = [region.shards.cut(value, cuts.get(each), f"{each} of {name}") for each, value in given]
        return tuple(own[: len(args)]), dict(zip(kwargs, own[len(args) :], strict=True))

    return cut


def _cut_output(region: Region, name: str, cuts: Cuts) -> Any:
    return lambda _module, _args, out: region.shards.cut(out, cuts, f"The output of {name}")


def _gather_output(region: Region, name: str, cut: Cut) -> Any:
    return lambda _module, _args, out: region.shards.gather(out, cut, f"The output of {name}")

"""Region: the part of a transformer that runs on this rank's tokens, from where they are cut to the gather.

Modules are wrapped by name: those that cut and gather, attention modules (`Site`) and dropouts. What an
adapter does not declare is found out: attention modules that it does not name, and attention computed
outside of the named ones, are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.masks.grid import TokenGrid
from weft.models.adapter import Adapter, matching, module_at, modules, parameters
from weft.models.attend import Site
from weft.models.clock import Clock
from weft.models.context import AttentionContext, SparseAttention
from weft.models.dropout import Dropped, whole_counts
from weft.models.guard import Guard, check_processor, refuse_undeclared
from weft.models.hook import ModuleHook
from weft.models.mixing import refuse_mixing
from weft.models.padding import mask_inputs
from weft.models.prove import Proof
from weft.models.randomness import share_numbers
from weft.models.shards import Shards
from weft.models.sparsity import problem_of
from weft.models.unsupported import refuse_arguments, refuse_caches
from weft.models.wrap import SITE, is_wrapped, unwrap_module, wrap_module
from weft.plan.place import Place
from weft.run.gpus import topology_for
from weft.run.world import World

BACKEND = "_weft_attention_backend"
"""Where a processor keeps the backend that it was set to."""


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
        self._probed: set[tuple[Any, ...]] = set()
        """Kinds of calls that are known to mix no tokens."""
        self.mask_inputs: tuple[Any, ...] = ()
        """What attention masks of this forward are made of."""
        self.forward: Callable[..., Any] = model.forward
        self.proof = Proof() if check else None
        self.tells = tells
        """Whether this is the one rank that prints."""
        self.runs = self.run_now = 0
        self.active = False
        """Whether the model runs, or its gradients are computed: else modules are called alone."""
        self.quiet = 0
        """Above 0 inside attention modules, where attention is expected."""
        self.drops = False
        self.whole: frozenset[int] = frozenset()
        """How many tokens there may be of what is not cut, such as a text."""
        self.wrapped: dict[str, tuple[nn.Module, ModuleHook]] = {}
        """By name, for as long as a module of that name is there."""
        try:
            self._install()
        except BaseException:
            self.remove()
            raise

    def run(self, mesh: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output, whole on every rank of a mesh, each of which computes its tokens of it."""
        if self._is_changed():
            self._install()
            self._probed.clear()
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        refuse_caches(self.model, self._parts)
        refuse_arguments(self.adapter, self.model, given)
        self.shards = Shards(mesh)
        self.runs = self.run_now = self.runs + 1
        self.mask_inputs = mask_inputs(given)
        world = self.shards.world  # asked for here: blocks that are compiled cannot find it
        self.worlds[world] = None
        if self.model.training and self.drops:
            share_numbers(world)
            self.whole = whole_counts(given)
        if self.sparsity is not None:
            self._begin(given)
        kind = self.model.training, *(name for name, value in given.items() if value is not None)
        if world.comm.size > 1 and kind not in self._probed:
            refuse_mixing(self, args, kwargs)
            self._probed.add(kind)
        # What was found right is looked at less and less often.
        looked_at = self.model.training or self.runs == 1
        if not looked_at and not self.runs & (self.runs - 1):  # graphs of torch.compile are for one mode each
            looked_at = all(part._compiled_call_impl is None for part in self._parts)
        before, self.active = self.active, True
        try:
            with Guard(self) if looked_at else nullcontext():
                out = self._enter.around(self.forward, args, kwargs)
        finally:
            self.active = before
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

    def remember(self, out: Any) -> None:
        """Blocks that are computed again for the gradients of an output see the streams of this forward.

        Whatever checkpoints them: its gradient comes first, and those of later forwards before it.
        """
        own = self.shards, self.extent, self.run_now, self.mask_inputs

        def recall(_: Tensor) -> None:
            self.shards, self.extent, self.run_now, self.mask_inputs = own
            self.active = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

        if isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(recall)

    def _end(self) -> None:
        self.active = False

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
        """Take it off, and only it: what others have put on since stays."""
        for module, _ in self.wrapped.values():
            unwrap_module(module)
            if hasattr(processor := getattr(module, "processor", None), BACKEND):
                processor._attention_backend = vars(processor).pop(BACKEND)  # type: ignore[union-attr]
        self.wrapped = {}

    def _is_changed(self) -> bool:
        """Whether a wrapped module has made way for another, as for one with LoRA, or a dropout is new."""
        for name, (module, hook) in self.wrapped.items():
            if module_at(self.model, name) is not module or not is_wrapped(module, hook):
                return True
        return self.model.training and any(
            isinstance(module, nn.Dropout) and module.p and SITE not in vars(module)
            for module in self.model.modules()
        )

    def _install(self) -> None:
        """Wrap the modules that the adapter names, and dropouts, as they are now."""
        model, adapter = self.model, self.adapter
        hooks: dict[str, ModuleHook] = {"": ModuleHook(self, "the model")}
        for pattern, cuts in adapter.inputs.items():
            for name, module in matching(model, pattern):
                hook = hooks.setdefault(name, ModuleHook(self, pattern))
                hook.order, hook.inputs = parameters(module), {**hook.inputs, **cuts}
        for pattern, out in adapter.outputs.items():
            for name, _ in matching(model, pattern):
                hooks.setdefault(name, ModuleHook(self, pattern)).output = out
        for pattern, cut in adapter.gather.items():
            for name, _ in matching(model, pattern):
                hooks.setdefault(name, ModuleHook(self, pattern)).gather = cut
        self._install_inner(hooks)
        by_name = modules(model)
        self.remove()
        self._enter, self._parts = hooks.pop(""), [*by_name.values()]
        for name, hook in hooks.items():
            self.wrapped[name] = by_name[name], hook
            wrap_module(by_name[name], hook)
            if isinstance(hook.inner, Site):
                _use_native(by_name[name])

    def _install_inner(self, hooks: dict[str, ModuleHook]) -> None:
        """Attention and dropout: what runs otherwise than in one process."""
        model, adapter = self.model, self.adapter
        sites = [
            (name, module, streams)
            for pattern, streams in adapter.attention.items()
            for name, module in matching(model, pattern)
        ]
        local = [name for pattern in adapter.local for name, _ in matching(model, pattern)]
        refuse_undeclared(model, [name for name, *_ in sites] + local)
        inner: dict[str, Any] = dict.fromkeys(local, self)
        for layer, (name, module, streams) in enumerate(sites):
            check_processor(name, module)
            inner[name] = Site(self, name, module, streams, layer)
        for name, module in modules(model).items():
            if isinstance(module, nn.Dropout) and module.p:
                inner[name] = Dropped(self, name, module)
        for name, role in inner.items():
            hooks.setdefault(name, ModuleHook(self, name)).inner = role
        self.layers, self.drops = len(sites), any(isinstance(role, Dropped) for role in inner.values())
        self.orders = {tuple(streams.rstrip("?").split()) for _, _, streams in sites}

    def around(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module that may compute attention."""
        self.quiet += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self.quiet -= 1


def _use_native(module: Any) -> None:
    """Diffusers' dispatcher may be set to kernels of which nobody sees the call."""
    processor: Any = getattr(module, "processor", None)
    if getattr(processor, "_attention_backend", None) is not None:
        setattr(processor, BACKEND, processor._attention_backend)
        processor._attention_backend = "native"

"""ShardedRegion: the part of a transformer that runs on this rank's tokens, from the split to the gather.

Modules are wrapped by name: those that split and gather, attention modules and dropouts. Attention that the
adapter does not declare raises an error, in modules that it does not name and outside of the named ones.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree, tree_leaves

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.diffusers.adapter import Adapter
from weft.diffusers.attention_hook import AttentionHook, restore_backend, use_native_backend
from weft.diffusers.cache_dit import check_cache_dit
from weft.diffusers.checks import PlanSpec, check_arguments, check_declared, check_processor, running_module
from weft.diffusers.module_hook import DropoutHook, ModuleHook, full_sizes
from weft.diffusers.padding import MaskInputs, mask_inputs
from weft.diffusers.sampled_check import SampledCheck
from weft.diffusers.shards import TokenShards
from weft.diffusers.step_caches import StepCaches
from weft.diffusers.step_counter import StepCounter
from weft.diffusers.token_probe import check_mixing
from weft.hooks.module_tree import forward_parameters, matching, module_at, modules
from weft.hooks.rng import RandomGuard, broadcast_rng
from weft.hooks.wrap import WRAPPER, Args, Forward, Kwargs, is_wrapped, unwrap_module, wrap_module
from weft.masks.grid import TokenGrid
from weft.plan.place import AttentionId
from weft.run.topology import topology_for
from weft.run.world import MeshLike, World
from weft.sparse.context import AttentionContext, SparseAttention
from weft.sparse.mask_cache import problem_of


@dataclass(eq=False)
class ShardedRegion:
    """Installed in a model until `remove`; `run` is the model's forward with its tokens sharded.

    name            the model's name in plans: a pipeline may have two of a class.
    sampled_check   of the attentions of the first forward.
    verbose         whether this is the one rank that prints.
    """

    model: nn.Module
    adapter: Adapter
    name: str = ""
    plan: PlanSpec = "auto"
    sparsity: SparseAttention | None = None
    step_counter: StepCounter = field(default_factory=StepCounter)
    backend: str = "auto"
    sampled_check: SampledCheck | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        self.adapter = self.adapter.for_model(self.model)
        self.worlds: dict[World, None] = {}
        """That it has run on: with guidance, halves of the ranks too."""
        self.extent, self.layers = (1, 1, 1), 0
        self.orders: set[tuple[str, ...]] = set()
        """Streams as attentions have them."""
        self._names = forward_parameters(self.model)
        self.shards = TokenShards()
        self._probed: set[tuple[bool | str, ...]] = set()
        """Kinds of calls that are known to mix no tokens."""
        self.mask_inputs = MaskInputs()
        """What attention masks of this forward are made of."""
        self.forward: Forward = self.model.forward
        self.runs = self.run_now = 0
        self.active = False
        """Whether the model runs, or its gradients are computed: else modules are called alone."""
        self._allowed = 0
        """Above 0 inside modules that may draw random numbers: attentions and dropouts."""
        self.has_dropout = False
        self.full_sizes: frozenset[int] = frozenset()
        """How many tokens there may be of inputs that are not split, such as a text."""
        self.wrapped: dict[str, tuple[nn.Module, ModuleHook]] = {}
        """By name, for as long as a module of that name is there."""
        self.caches = StepCaches(self)
        try:
            self._install()
        except BaseException:
            self.remove()
            raise

    def run(self, mesh: MeshLike, args: Args, kwargs: Kwargs) -> PyTree:
        """Return the model's output, full on every rank of a mesh; each rank computes its tokens of it."""
        check_cache_dit(self.model)
        if self._is_changed():
            self._install()
            self._probed.clear()
        self.caches.prepare()
        arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        check_arguments(self.adapter, self.model, arguments)
        self.shards = TokenShards(mesh)
        if self.adapter.grid is not None:
            self.shards.grid = partial(self.adapter.grid, self.model, arguments)
        self.runs = self.run_now = self.runs + 1
        self.mask_inputs = mask_inputs(arguments)
        world = self.shards.world  # looked up here: blocks that are compiled cannot
        self.worlds[world] = None
        if self.model.training and self.has_dropout:
            broadcast_rng(world)
            self.full_sizes = full_sizes(arguments)
        if self.sparsity is not None:
            self._begin_step(arguments)
        kind = self.model.training, *(name for name, value in arguments.items() if value is not None)
        unprobed: InputError | None = None
        if world.comm.size > 1 and kind not in self._probed:
            unprobed = check_mixing(self, args, kwargs)
        before, self.active = self.active, True
        try:
            with RandomGuard(self.random_error) if self._is_guarded() else nullcontext():
                out = self.enter.around(self.forward, args, kwargs)
        finally:
            self.active = before
        if unprobed is not None:
            raise unprobed
        self._probed.add(kind)
        self.caches.count()
        if self.sampled_check is not None:
            if self.verbose:
                sys.stderr.write(f"weft: {self.sampled_check}\n")
            self.sampled_check = None
        return out

    def _is_guarded(self) -> bool:
        """Return whether random numbers are checked: less and less often, once a forward was right."""
        if self.model.training or self.runs == 1:
            return True
        # A FunctionMode would recompile graphs of torch.compile, which are specific to it.
        return not self.runs & (self.runs - 1) and all(
            module._compiled_call_impl is None for module in self.submodules
        )

    def random_error(self) -> InputError | None:
        """Return the error of a random number that is drawn now."""
        if self._allowed or not self.shards.sizes:
            return None
        return InputError(
            f"{running_module(self.model)} draws random numbers for this rank's tokens only.",
            hint="Only nn.Dropout draws what one process would; use it, or draw before tokens are split.",
        )

    def around(self, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        """Run a module that may draw random numbers."""
        self._allowed += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self._allowed -= 1

    def _begin_step(self, arguments: Mapping[str, PyTree]) -> None:
        """Determine what masks depend on."""
        if self.adapter.grid is None:
            raise InputError(
                f"The adapter of {self.adapter.model} has no grid, which masks need.",
                hint="Declare it: Adapter(…, grid=lambda model, arguments: (frames, rows, columns)).",
            )
        self.extent = self.adapter.grid(self.model, arguments)
        self.step_counter.tick(arguments)

    def restore_in_backward(self, out: PyTree) -> None:
        """Let blocks that are recomputed for the gradients of an output see the shards of this forward.

        However they are checkpointed: the output's gradient comes first, and those of later forwards before.
        """
        state = self.shards, self.extent, self.run_now, self.mask_inputs

        def restore(_: Tensor) -> None:
            self.shards, self.extent, self.run_now, self.mask_inputs = state
            self.active = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(restore)

    def _end_backward(self) -> None:
        self.active = False

    def context(
        self, hook: AttentionHook, q: Tensor, scale: float | None, layout: Layout
    ) -> AttentionContext:
        """Return the context of a call, for sparse attention."""
        video = hook.streams.index("video")
        text = layout.size - prod(self.extent)
        grid = TokenGrid(*self.extent, prefix=text if video else 0, suffix=0 if video else text)
        step, branch = self.step_counter.now
        return AttentionContext(
            layer=hook.layer, layers=self.layers, step=step, steps=self.step_counter.steps, branch=branch,
            grid=grid, heads=q.shape[1], layout=layout, world=self.shards.world, scale=scale,
            backend=self.backend, run=self.run_now, name=hook.name, module=hook.module, hidden=hook.hidden,
        )  # fmt: skip

    def planned(
        self, ctx: AttentionContext, mask: BlockMask, tokens: Layout, qkv: tuple[Tensor, ...]
    ) -> PlanSpec:
        """Return the plan of a sparse attention: the planner's, unless one was passed or the mask stays."""
        sparsity = self.sparsity
        if not isinstance(self.plan, str) or not getattr(sparsity, "changes", True):
            return self.plan
        q, k, _ = qkv
        name = getattr(sparsity, "name", type(sparsity).__name__)
        loads_of = getattr(sparsity, "loads", None)
        loads = None if loads_of is None else loads_of(ctx)
        return ctx.world.planner.plan(
            AttentionId(self.name, ctx.layer, ctx.branch, name),
            problem_of(tokens, q, k),
            mask,
            step=ctx.step,
            topology=lambda: topology_for(None, tokens.ranks, q.device, ctx.backend),
            strategy=self.plan,
            shares=None if loads is None else np.tile(loads, mask.heads // len(loads)),
        )

    def remove(self) -> None:
        """Unwrap all modules; keep wrappers that other libraries added since."""
        for module, _ in self.wrapped.values():
            unwrap_module(module)
            restore_backend(module)
        self.wrapped = {}
        self.caches.remove()

    def _is_changed(self) -> bool:
        """Return whether a wrapped module was replaced, as by one with LoRA, or a dropout is new."""
        for name, (module, hook) in self.wrapped.items():
            if module_at(self.model, name) is not module or not is_wrapped(module, hook):
                return True
        return self.model.training and any(
            isinstance(module, nn.Dropout) and module.p and WRAPPER not in vars(module)
            for module in self.model.modules()
        )

    def _install(self) -> None:
        """Wrap the modules that the adapter names, and dropouts, as they are now."""
        hooks = {"": ModuleHook(self, "the model")}

        def each(pattern: str) -> list[tuple[nn.Module, ModuleHook]]:
            return [
                (module, hooks.setdefault(name, ModuleHook(self, pattern)))
                for name, module in matching(self.model, pattern)
            ]

        for pattern, specs in self.adapter.inputs.items():
            for module, hook in each(pattern):
                hook.order, hook.inputs = forward_parameters(module), {**hook.inputs, **specs}
        for pattern, spec in self.adapter.outputs.items():
            for _, hook in each(pattern):
                hook.output = spec
        for pattern, spec in self.adapter.gather.items():
            for _, hook in each(pattern):
                hook.gather = spec
        by_name = modules(self.model)
        self._add_inner(hooks, by_name)
        self.remove()
        self.enter, self.submodules = hooks.pop(""), [*by_name.values()]
        for name, hook in hooks.items():
            self.wrapped[name] = by_name[name], hook
            wrap_module(by_name[name], hook)
            if isinstance(hook.inner, AttentionHook):
                use_native_backend(by_name[name])

    def _add_inner(self, hooks: dict[str, ModuleHook], by_name: Mapping[str, nn.Module]) -> None:
        """Add the hooks of attention and dropout: what does not run as in one process."""
        attentions = [
            (name, module, streams)
            for pattern, streams in self.adapter.attention.items()
            for name, module in matching(self.model, pattern)
        ]
        local = [name for pattern in self.adapter.local for name, _ in matching(self.model, pattern)]
        check_declared(self.model, [name for name, *_ in attentions] + local)
        inner: dict[str, AttentionHook | DropoutHook | ShardedRegion] = dict.fromkeys(local, self)
        for layer, (name, module, streams) in enumerate(attentions):
            check_processor(name, module)
            hook = AttentionHook(self, name, module, streams, layer)
            inner[name] = self if streams == "whole" else hook
        dropouts = {
            name: DropoutHook(self, name, module)
            for name, module in by_name.items()
            if isinstance(module, nn.Dropout) and module.p
        }
        for name, hook in {**inner, **dropouts}.items():
            hooks.setdefault(name, ModuleHook(self, name)).inner = hook
        self.layers, self.has_dropout = len(attentions), bool(dropouts)
        self.orders = {hook.streams for hook in inner.values() if isinstance(hook, AttentionHook)}

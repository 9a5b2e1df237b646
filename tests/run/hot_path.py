"""A GPU that is none: FakeTensor on `cuda`, with everything that torch is asked to do on it recorded.

    with fake_cuda() as seen:
        ...                         # warm up
        seen.clear()
        ...                         # the hot path
    assert not seen.faults

Works with every build of torch. The CPU build refuses some calls on CUDA tensors before they are dispatched
(`copy_`, indexing, copies from the host); those are routed around here. Never differentiate in it: autograd
on fake CUDA tensors ends the process in some builds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NARROW, WIDE = (torch.bfloat16, torch.float16), (torch.float32, torch.float64)
SYNCHRONIZE = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal")
RANDOM = ("aten::uniform_", "aten::normal_")
aten = torch.ops.aten


class Seen(TorchDispatchMode):
    """What reached the dispatcher: operations by name, and those that an asynchronous GPU must not see."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.mixed: list[str] = []
        """Operations with tensors of both devices."""
        self.copies: list[str] = []
        """Copies between host and device."""
        self.reads: list[str] = []
        """Reads of values, which wait for the device."""
        self.widened: list[str] = []
        """16-bit tensors that were made float32, but for results of attention: their sums are float32."""
        self._results: dict[int, Any] = {}
        """Storages of what attention returned, held so that no other can be taken for them."""

    def clear(self) -> None:
        self.names.clear()
        self._results.clear()
        for each in (self.mixed, self.copies, self.reads, self.widened):
            each.clear()

    @property
    def faults(self) -> dict[str, list[str]]:
        kinds = {"mixed": self.mixed, "copies": self.copies, "reads": self.reads, "widened": self.widened}
        return {kind: found for kind, found in kinds.items() if found}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        self.names[name] += 1
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not str(kwargs.get("device")).startswith("cuda") and not any(
            isinstance(x, FakeTensor) for x in tensors
        ):
            with unset_fake_temporarily():  # work of the host is real
                return func(*args, **kwargs)
        if name in SYNCHRONIZE and any(x.device.type == "cuda" for x in tensors):
            self.reads.append(_told(name, tensors))
            if name == "aten::_local_scalar_dense":
                return args[0].dtype.is_floating_point and 1.0 or 1
        if name in RANDOM:  # their decompositions ask for a real device
            return args[0]
        if name == "aten::_to_copy":
            return self._converted(func, args[0], args, kwargs)
        on_host = [x for x in tensors if x.device.type == "cpu" and x.ndim]
        on_device = [x for x in tensors if x.device.type == "cuda"]
        if on_host and on_device:
            (self.copies if name == "aten::copy_" else self.mixed).append(_told(name, tensors))
            if name == "aten::copy_":
                return args[0]
        if name == "aten::copy_":
            self._widens(args[1], args[0].dtype, name)
        out = func(*args, **kwargs)
        from_results = any(x.untyped_storage()._cdata in self._results for x in tensors)
        if "_scaled_dot_product_" in name or (from_results and name.startswith("aten::index_")):
            storages = [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)]
            self._results.update({storage._cdata: storage for storage in storages})
        return out

    def moved(self, source: Tensor, options: list[Any]) -> Tensor:
        """Copy from the host to the device."""
        self.copies.append(_told("to", [source]))
        dtype = next((each for each in options if isinstance(each, torch.dtype)), source.dtype)
        return torch.empty(source.shape, dtype=dtype, device="cuda")

    def _converted(self, func: Any, source: Tensor, args: Any, kwargs: Any) -> Any:
        device, dtype = kwargs.get("device"), kwargs.get("dtype") or source.dtype
        if device is not None and torch.device(device).type != source.device.type:
            self.copies.append(_told("to", [source]))
            return torch.empty(source.shape, dtype=dtype, device=device)
        self._widens(source, dtype, "to")
        return func(*args, **kwargs)

    def _widens(self, source: Tensor, dtype: torch.dtype, name: str) -> None:
        is_result = source.untyped_storage()._cdata in self._results
        if source.device.type == "cuda" and source.dtype in NARROW and dtype in WIDE and not is_result:
            self.widened.append(_told(name, [source]))


class _Around(TorchFunctionMode):
    """Calls that a build without CUDA refuses in their Python bindings."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and args[0].device.type == "cpu" and _goes_to_device(args[1:], kwargs or {}):
            return self.seen.moved(args[0], [*args[1:], *(kwargs or {}).values()])
        if func in (torch.tensor, torch.as_tensor) and _goes_to_device((), kwargs or {}):
            return self.seen.moved(func(args[0], dtype=(kwargs or {}).get("dtype")), [])
        if func in _READS and args[0].device.type == "cuda":
            self.seen.reads.append(_told(func.__name__, [args[0]]))
            return _READS[func]
        around = _ROUTES.get(func)
        if around is not None and isinstance(args[0], Tensor) and args[0].device.type == "cuda":
            return around(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _goes_to_device(args: Any, kwargs: Any) -> bool:
    return any(
        str(each).startswith("cuda") or (isinstance(each, Tensor) and each.device.type == "cuda")
        for each in (*args, *kwargs.values())
        if isinstance(each, str | torch.device | Tensor)
    )


def _copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:  # noqa: FBT001, FBT002
    return aten.copy_.default(into, source, non_blocking)


def _contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    if x.is_contiguous(memory_format=memory_format):
        return x
    return aten.clone.default(x, memory_format=memory_format)


def _getitem(x: Tensor, index: Any) -> Tensor:
    """Basic indexing by views; a tensor among the indices is aten.index."""
    indices = index if isinstance(index, tuple) else (index,)
    if any(isinstance(each, Tensor | list) for each in indices):
        gathered: list[Tensor | None] = []
        for dim, each in enumerate(indices):
            if isinstance(each, slice):
                x = _sliced(x, dim, each)
                gathered.append(None)
            else:
                gathered.append(torch.as_tensor(each))
        return aten.index.Tensor(x, gathered)
    dim = 0
    for at, each in enumerate(indices):
        if each is Ellipsis:
            dim = x.ndim - (len(indices) - at - 1 - sum(i is None for i in indices[at + 1 :]))
        elif each is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(each, slice):
            x, dim = _sliced(x, dim, each), dim + 1
        else:
            x = x.select(dim, each)
    return x


def _sliced(x: Tensor, dim: int, at: slice) -> Tensor:
    return x if at == slice(None) else aten.slice.Tensor(x, dim, at.start, at.stop, at.step or 1)


def _setitem(x: Tensor, index: Any, value: Any) -> None:
    indices = index if isinstance(index, tuple) else (index,)
    if any(isinstance(each, Tensor | list) for each in indices):
        gathered = [None if isinstance(each, slice) else torch.as_tensor(each) for each in indices]
        for dim, each in enumerate(indices):
            if isinstance(each, slice):
                x = _sliced(x, dim, each)
        aten.index_put_.default(x, gathered, value)
        return
    part = _getitem(x, index)
    part.fill_(value) if not isinstance(value, Tensor) else _copy(part, value.expand_as(part))


_READS: dict[Any, Any] = {Tensor.__float__: 1.0, Tensor.__int__: 1, Tensor.__bool__: False, Tensor.item: 1}
"""What reads of values that do not exist give."""
_ROUTES: dict[Any, Callable[..., Any]] = {
    Tensor.copy_: _copy,
    Tensor.contiguous: _contiguous,
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    Tensor.data_ptr: lambda x: x.untyped_storage()._cdata,
}


def _launches(seen: Seen) -> Iterator[Any]:
    """Patches that count launches of Triton kernels instead of making them."""
    if find_spec("triton") is None:
        return
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001
        name = getattr(self, "__name__", None) or self.base_fn.__name__
        seen.names[f"triton::{name}"] += 1

    for kind in (JITFunction, Autotuner):
        yield patch.object(kind, "run", run)


@contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0), name: str = "NVIDIA H100 80GB HBM3") -> Iterator[Seen]:
    """Tensors on `cuda` have no data; what is done with them is recorded."""
    facts: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": capability,
        "get_device_name": name, "is_current_stream_capturing": False, "set_device": None,
        "get_device_properties": SimpleNamespace(
            name=name, uuid="one", total_memory=80 * 2**30, major=capability[0], minor=capability[1],
            multi_processor_count=132,
        ),
        "current_stream": SimpleNamespace(cuda_stream=0), "device": nullcontext(),
    }  # fmt: skip
    with ExitStack() as stack:
        for function, value in facts.items():
            stack.enter_context(patch.object(torch.cuda, function, lambda *_, value=value, **__: value))
        # The optional packages have tests of their own; what is recorded must not depend on them.
        stack.enter_context(patch("weft.run.kernels.choice.installed", lambda: frozenset({"triton"})))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        seen = stack.enter_context(Seen())
        stack.enter_context(_Around(seen))
        for each in _launches(seen):
            stack.enter_context(each)
        yield seen


def _told(name: str, tensors: list[Tensor]) -> str:
    shapes = ", ".join(f"{str(x.dtype)[6:]}{list(x.shape)} on {x.device.type}" for x in tensors)
    return f"{name}({shapes})"

"""Intercept calls: `wrap_module` of a method of a module or pipeline, `FunctionMode` of torch functions.

The object's class is replaced by one that is derived from it and overrides the method; one attribute of
the object holds the `ForwardWrapper`. So the wrapper moves with the object, the object can be copied, and
hooks of other libraries stay, whether they were added before or after. docs/interception.md lists all uses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, update_wrapper
from inspect import signature
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import PyTree

from weft.core.errors import InputError

Args = tuple[PyTree, ...]
Kwargs = dict[str, PyTree]
Forward = Callable[..., PyTree]
"""A method that is intercepted, bound to its object."""
Target = Any
"""An object whose method is intercepted: a module, or a pipeline of whatever class."""
T = TypeVar("T")

WRAPPER = "_weft_wrapper"


class FunctionMode(TorchFunctionMode):
    """Replace the torch functions of a set by `call`."""

    functions: frozenset[Forward] = frozenset()

    def __torch_function__(
        self, func: Forward, types: tuple[type, ...], args: Args = (), kwargs: Kwargs | None = None
    ) -> PyTree:
        if func in self.functions:
            return self.call(func, args, kwargs or {})
        return run_function(func, args, kwargs or {})

    def call(self, func: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        raise NotImplementedError


def run_function(func: Forward, args: Args, kwargs: Kwargs) -> PyTree:
    """Run a torch function: by its name, as torch.compile cannot trace the Python code of some methods."""
    if isinstance(func, FunctionType) and getattr(Tensor, func.__name__, None) is func:
        return getattr(args[0], func.__name__)(*args[1:], **kwargs)
    return func(*args, **kwargs)


class ForwardWrapper:
    """Runs one method of an object; derive from it and override `around`."""

    method = "forward"
    opaque = False
    """Whether torch.compile must not trace it."""
    is_copied = False
    """Whether deep copies of its object have it too; by default they are plain."""

    def around(self, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        """Run `forward`, the plain method, and whatever belongs before and after it."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, PyTree]) -> ForwardWrapper | None:
        """Return the wrapper whose `after_copy` is called with the copy, which is plain."""
        return self if self.is_copied else None

    def after_copy(self, new: Target) -> None:
        """Wrap a deep copy as the original is wrapped."""
        wrap_module(new, self)


def wrap_module(target: Target, wrapper: ForwardWrapper) -> None:
    """Route calls of a method of an object, by default a module's forward, through a wrapper.

    Wrapped modules of one class share one derived class, so torch.compile compiles one graph for all of them.
    """
    own, method = vars(target), wrapper.method
    own[WRAPPER] = wrapper
    if not hasattr(type(target), "_weft_plain"):
        target.__class__ = _derived_class(type(target), method, wrapper.opaque)
    _rebind(target, getattr(type(target)._weft_plain, method), getattr(type(target), method))
    inner = own.get(method)
    if inner is not None and not _calls_wrapper(inner):  # hooks of other libraries stay inside
        own[method] = _with_signature(partial(_run, target, inner), inner)


def put_outside(target: Target) -> None:
    """Let the wrapper of an object run around what other libraries have put on since."""
    own = vars(target)
    method = own[WRAPPER].method
    inner = own.get(method)
    if inner is not None and not is_outside(inner):
        own[method] = _with_signature(partial(_run, target, inner), inner)


def is_outside(method: Forward | None) -> bool:
    """Return whether a method of an instance runs its wrapper first."""
    return isinstance(method, partial) and method.func is _run


def unwrap_module(target: Target) -> None:
    """Undo `wrap_module`; other references to the method then call the original."""
    own = vars(target)
    wrapper = own.pop(WRAPPER, None)
    if wrapper is None:
        return
    inner = own.get(wrapper.method)
    if isinstance(inner, partial) and is_outside(inner):
        own[wrapper.method] = inner.args[1]
    plain = type(target)._weft_plain
    _rebind(target, getattr(type(target), wrapper.method), getattr(plain, wrapper.method))
    if "_weft_plain" in vars(type(target)):  # else another library, as FSDP2 does, derived a class from it
        target.__class__ = plain


def _rebind(target: Target, old: Forward, new: Forward) -> None:
    """Replace the bound methods that other libraries hold in the object, to call or to restore them."""
    for key, value in vars(target).items():
        if getattr(value, "__self__", None) is target and getattr(value, "__func__", None) is old:
            vars(target)[key] = MethodType(new, target)


def is_wrapped(target: Target, wrapper: ForwardWrapper) -> bool:
    """Return whether a wrapper is on an object and runs; another library may have put a method over it."""
    own = vars(target)
    if own.get(WRAPPER) is not wrapper:
        return False
    inner = own.get(wrapper.method)
    return getattr(inner, "__self__", None) is not target or _calls_wrapper(inner)


def _run(target: Target, inner: Forward, *args: PyTree, **kwargs: PyTree) -> PyTree:
    wrapper = vars(target).get(WRAPPER)
    if wrapper is None:
        return inner(*args, **kwargs)
    return wrapper.around(partial(_run_inner, target, inner), args, kwargs)


def _run_inner(target: Target, inner: Forward, *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Run the inner method without the wrapper: it may call the derived class's method again."""
    wrapper = vars(target).pop(WRAPPER)
    try:
        return inner(*args, **kwargs)
    finally:
        vars(target)[WRAPPER] = wrapper


def _calls_wrapper(method: Forward | None) -> bool:
    """Return whether a method runs the wrapper, perhaps inside of decorators."""
    while method is not None:
        function = getattr(method, "__func__", method)
        if getattr(function, "_weft", False) or is_outside(method):
            return True
        method = getattr(method, "__wrapped__", None)
    return False


@cache
def _derived_class(plain: type, name: str, opaque: bool) -> type:  # noqa: FBT001 - a cache's key
    inner = getattr(plain, name)  # looked up once: Diffusers disables torch.compile for some classes

    def method(self: Target, *args: PyTree, **kwargs: PyTree) -> PyTree:
        wrapper = getattr(self, WRAPPER, None)
        if wrapper is None:
            return inner(self, *args, **kwargs)
        return wrapper.around(partial(inner, self), args, kwargs)

    # Code of its own: torch.compile counts recompilations, of which it allows 8, by code.
    method.__code__ = method.__code__.replace(co_name=f"{plain.__name__}_{name}")
    vars(_with_signature(method, inner))["_weft"] = True
    if opaque:
        vars(method)["_torchdynamo_disable"] = True
    body = {name: method, "_weft_plain": plain, "__module__": plain.__module__, "__doc__": plain.__doc__}
    # Not __deepcopy__: torch's checkpoint_wrapper would take it for its own.
    body |= {"__copy__": _copy, "__reduce_ex__": _reduce, "__setstate__": _set_state}
    return type(plain.__name__, (plain,), body)


def derived_classes(plain: type) -> list[type]:
    """Return the classes that objects of a class have while they are wrapped."""
    kinds = plain.__subclasses__() if isinstance(plain, type) else []
    return [kind for kind in kinds if "_weft_plain" in vars(kind)]


def _with_signature(method: Forward, inner: Forward) -> Forward:
    """Copy name, docstring and signature, but no __wrapped__: accelerate would unwrap it."""
    update_wrapper(method, inner)
    del vars(method)["__wrapped__"]
    vars(method)["__signature__"] = signature(inner)
    return method


def _copy(self: T) -> T:
    new = object.__new__(type(self))
    vars(new).update(vars(self))
    return new


def _reduce(self: Target, _: int) -> tuple[Callable[[CopiedClass], Target], tuple[CopiedClass], Kwargs]:
    """Take apart for copy.deepcopy, which calls `_set_state` of the copy; pickle fails at `CopiedClass`."""
    state = {key: value for key, value in vars(self).items() if key != "_compiled_call_impl"}
    return _new, (CopiedClass(type(self)),), state


def _set_state(self: Target, state: Kwargs) -> None:
    wrapper = state.pop(WRAPPER, None)
    vars(self).update(state)
    self.__class__ = vars(type(self)).get("_weft_plain", type(self))
    if wrapper is not None:
        wrapper.after_copy(self)


class CopiedClass(NamedTuple):
    """The class of a deep copy; it cannot be pickled."""

    kind: type

    def __deepcopy__(self, memo: dict[int, PyTree]) -> CopiedClass:
        return self

    def __reduce_ex__(self, _: int) -> str:
        raise InputError(
            f"This {self.kind.__name__} is parallelized: a file cannot hold its connections to other ranks.",
            hint="Save its state_dict(), call save_pretrained, or weft.restore it first.",
        )


def _new(copied: CopiedClass) -> Target:
    return object.__new__(copied.kind)

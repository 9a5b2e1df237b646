"""`wrap_module`: the one way in which weft is on a model, a VAE or a pipeline.

The object's class becomes one derived from its own, with one method more, and the object has one attribute,
which says what happens around that method. So it goes where the object goes: it is called whoever calls, it
can be copied, and what others have put on before or after stays. docs/interception.md has the whole list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, update_wrapper
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple

from weft.core.errors import InputError

SITE = "_weft_site"
Method = Callable[..., Any]


class Around:
    """What happens around a method of an object."""

    method = "forward"
    opaque = False
    """Whether torch.compile must not look into it."""

    def around(self, forward: Method, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def before_copy(self) -> None:
        """Take off what cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Around | None:
        """Return what puts itself on the copy, which is plain; nothing if another does, or nobody."""

    def after_copy(self, new: Any) -> None:
        """Put on a deep copy what the original has."""


def wrap_module(owner: Any, site: Around) -> None:
    """Let a site run a method of an object, by default a module's forward.

    A class of its own, not a function of its own: blocks that are alike stay alike for torch.compile.
    """
    own, method = vars(owner), site.method
    own[SITE] = site
    if not hasattr(type(owner), "_weft_plain"):
        owner.__class__ = _derived(type(owner), method, site.opaque)
    _change_kept(owner, getattr(type(owner)._weft_plain, method), getattr(type(owner), method))
    inner = own.get(method)
    if inner is not None and not _reaches_site(inner):  # hooks of other libraries: theirs stays inside
        own[method] = _like(partial(_run, owner, inner), inner)


def unwrap_module(owner: Any) -> None:
    """Take off what `wrap_module` put on; what others hold of it runs what was there before."""
    own = vars(owner)
    site = own.pop(SITE, None)
    if site is None:
        return
    inner = own.get(site.method)
    if isinstance(inner, partial) and inner.func is _run:
        own[site.method] = inner.args[1]
    plain = type(owner)._weft_plain
    _change_kept(owner, getattr(type(owner), site.method), getattr(plain, site.method))
    if "_weft_plain" in vars(type(owner)):  # else somebody has derived from it, as FSDP2 does
        owner.__class__ = plain


def _change_kept(owner: Any, old: Method, new: Method) -> None:
    """Change the method that others have noted in the object, to call it or to put it back."""
    for key, value in vars(owner).items():
        if getattr(value, "__self__", None) is owner and getattr(value, "__func__", None) is old:
            vars(owner)[key] = MethodType(new, owner)


def is_wrapped(owner: Any, site: Around) -> bool:
    """Whether a site is still on an object, and not cut off by a method that was put back over it."""
    own = vars(owner)
    if own.get(SITE) is not site:
        return False
    inner = own.get(site.method)
    return getattr(inner, "__self__", None) is not owner or _reaches_site(inner)


def _run(owner: Any, inner: Method, *args: Any, **kwargs: Any) -> Any:
    site = vars(owner).get(SITE)
    if site is None:
        return inner(*args, **kwargs)
    return site.around(partial(_run_inner, owner, inner), args, kwargs)


def _run_inner(owner: Any, inner: Method, *args: Any, **kwargs: Any) -> Any:
    """Run what is inside, which may call the derived class's method: once is enough."""
    site = vars(owner).pop(SITE)
    try:
        return inner(*args, **kwargs)
    finally:
        vars(owner)[SITE] = site


def _reaches_site(method: Any) -> bool:
    """Whether a method is, or was put by a decorator around, one that runs the site."""
    while method is not None:
        function = getattr(method, "__func__", method)
        if getattr(function, "_weft", False) or (isinstance(method, partial) and method.func is _run):
            return True
        method = getattr(method, "__wrapped__", None)
    return False


@cache
def _derived(plain: type, name: str, opaque: bool) -> type:  # noqa: FBT001 - a cache's key
    own = getattr(plain, name)  # not looked up below: Diffusers has torch.compile not look into some classes

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        site = getattr(self, SITE, None)
        if site is None:
            return own(self, *args, **kwargs)
        return site.around(partial(own, self), args, kwargs)

    # Code of its own: torch.compile counts recompilations, of which it allows 8, by code.
    method.__code__ = method.__code__.replace(co_name=f"{plain.__name__}_{name}")
    _like(method, own)._weft = True  # type: ignore[attr-defined]
    if opaque:
        method._torchdynamo_disable = True  # type: ignore[attr-defined]
    body = {name: method, "_weft_plain": plain, "__module__": plain.__module__, "__doc__": plain.__doc__}
    # Not __deepcopy__: torch's checkpoint_wrapper would take it for its own.
    body |= {"__copy__": _copy, "__reduce_ex__": _reduce, "__setstate__": _set_state}
    return type(plain.__name__, (plain,), body)


def derived(plain: Any) -> list[type]:
    """The classes that modules of a class have while they are wrapped."""
    kinds = plain.__subclasses__() if isinstance(plain, type) else []
    return [kind for kind in kinds if "_weft_plain" in vars(kind)]


def _like(method: Method, own: Method) -> Method:
    """Give a method the looks of another, but no __wrapped__: who unwraps, as accelerate does, stops here."""
    update_wrapper(method, own)
    del method.__wrapped__  # type: ignore[attr-defined]
    method.__signature__ = signature(own)  # type: ignore[attr-defined]
    return method


def _copy(self: Any) -> Any:
    new = object.__new__(type(self))
    vars(new).update(vars(self))
    return new


def _reduce(self: Any, _: Any) -> Any:
    """Take apart for copy.deepcopy, which puts together by `_set_state`; pickle stops at `_Kind`."""
    if (site := vars(self).get(SITE)) is not None:
        site.before_copy()
    state = {key: value for key, value in vars(self).items() if key != "_compiled_call_impl"}
    return _new, (_Kind(type(self)),), state


def _set_state(self: Any, state: dict[str, Any]) -> None:
    site = state.pop(SITE, None)
    vars(self).update(state)
    self.__class__ = vars(type(self)).get("_weft_plain", type(self))
    if site is not None:
        site.after_copy(self)


class _Kind(NamedTuple):
    """The class of a copy, and only of a copy."""

    kind: type

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kind:
        return self

    def __reduce_ex__(self, _: Any) -> Any:
        raise InputError(
            f"This {self.kind.__name__} is parallelized: a file cannot hold its connections to other ranks.",
            hint="Save its state_dict(), call save_pretrained, or weft.restore it first.",
        )


def _new(kind: _Kind) -> Any:
    return object.__new__(kind.kind)

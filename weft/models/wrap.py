"""`wrap_module`: the one way in which weft is on a model, a VAE or a pipeline.

The object's class becomes one derived from its own, with one method more, and the object has one attribute,
which says what happens around that method. So it goes where the object goes: it is called whoever calls, it
can be copied, and what others have put on before or after stays. docs/interception.md has the whole list.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial, update_wrapper
from inspect import signature
from typing import Any

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

    def after_copy(self, new: Any, memo: dict[int, Any]) -> None:
        """Put on a deep copy, which is plain, what the original has."""

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return nothing: what is copied by other ways than `_deepcopy` is plain."""


def wrap_module(owner: Any, site: Around) -> None:
    """Let a site run a method of an object, by default a module's forward.

    A class of its own, not a function of its own: blocks that are alike stay alike for torch.compile.
    """
    own, method = vars(owner), site.method
    own[SITE] = site
    if not hasattr(type(owner), "_weft_plain"):
        owner.__class__ = _derived(type(owner), method, site.opaque)
    inner = own.get(method)
    if inner is not None and not _reaches_site(inner):  # hooks of other libraries: theirs stays inside
        own[method] = _like(partial(_run, owner, inner), inner)


def unwrap_module(owner: Any) -> None:
    """Take off what `wrap_module` put on; what others hold of it runs what was there before."""
    own, kind = vars(owner), vars(type(owner))
    site = own.pop(SITE, None)
    inner = None if site is None else own.get(site.method)
    if isinstance(inner, partial) and inner.func is _run:
        own[site.method] = inner.args[1]  # type: ignore[union-attr]
    if "_weft_plain" in kind:  # else somebody has derived from the derived class, as FSDP2 does
        owner.__class__ = kind["_weft_plain"]


def is_wrapped(owner: Any, site: Around) -> bool:
    """Whether a site is still on an object, and not cut off by a method that was put back over it."""
    own = vars(owner)
    if own.get(SITE) is not site:
        return False
    inner = own.get(site.method)
    return getattr(inner, "__self__", None) is not owner or _reaches_site(inner)


def _run(owner: Any, inner: Method, *args: Any, **kwargs: Any) -> Any:
    site = getattr(owner, SITE, None)
    return inner(*args, **kwargs) if site is None else site.around(inner, args, kwargs)


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

    _like(method, own)._weft = True  # type: ignore[attr-defined]
    if opaque:
        method._torchdynamo_disable = True  # type: ignore[attr-defined]
    body = {name: method, "_weft_plain": plain, "__module__": plain.__module__, "__doc__": plain.__doc__}
    body |= {"__copy__": _copy, "__reduce_ex__": _refuse_pickle}
    if not hasattr(plain, "__deepcopy__"):  # FSDP2 refuses it
        body["__deepcopy__"] = _deepcopy
    return type(plain.__name__, (plain,), body)


def _like(method: Method, own: Method) -> Method:
    """Give a method the looks of another, but no __wrapped__: who unwraps, as accelerate does, stops here."""
    update_wrapper(method, own)
    del method.__wrapped__  # type: ignore[attr-defined]
    method.__signature__ = signature(own)  # type: ignore[attr-defined]
    return method


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    kind = vars(type(self)).get("_weft_plain", type(self))
    site = getattr(self, SITE, None)
    if site is not None:
        site.before_copy()
    new = memo[id(self)] = kind.__new__(kind)
    state = {key: value for key, value in vars(self).items() if key not in (SITE, "_compiled_call_impl")}
    vars(new).update(copy.deepcopy(state, memo))
    if site is not None:
        site.after_copy(new, memo)
    return new


def _copy(self: Any) -> Any:
    new = type(self).__new__(type(self))
    vars(new).update(vars(self))
    return new


def _refuse_pickle(self: Any, _: Any) -> Any:
    raise InputError(
        f"This {type(self).__name__} is parallelized: a file cannot hold its connections to other ranks.",
        hint="Save its state_dict(), call save_pretrained, or weft.restore it first.",
    )

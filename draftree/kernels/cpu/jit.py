"""numba by name, without importing it: what kernels are declared with becomes numba's own only when
something has to be compiled.

A start whose kernels all lie on disk needs the declarations but no compiler. So each declaration is
a stand-in that knows how to make the real thing, and `realize` puts real things in the place of all
stand-ins before the compiler looks at the modules.
"""

import sys
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any

_PACKAGE = "draftree.kernels."


class Deferred:
    """Something of numba's that is made when it is first used. Must be bound to a module's name."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @cached_property
    def real(self) -> Any:
        return self._make()

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.real(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by whoever inspects modules, who must not wake numba
            raise AttributeError(name)
        return getattr(self.real, name)


def realize(function: Callable[..., Any]) -> None:
    """Put the real things in place, in all kernel modules that are loaded and where the function
    is.
    """
    loaded = [vars(m) for name, m in list(sys.modules.items()) if name.startswith(_PACKAGE)]
    for names in (*loaded, function.__globals__):
        for name, value in list(names.items()):
            if isinstance(value, Deferred):
                names[name] = value.real


def _of_numba(module: str, name: str) -> Any:
    return Deferred(lambda: getattr(import_module(module), name))


def _decorator(module: str, name: str) -> Callable[..., Any]:
    """A decorator of numba's that is applied later; with options or without."""

    def decorate(function: Any = None, **options: Any) -> Any:
        def apply(function: Any) -> Deferred:
            def make() -> Any:
                real = getattr(import_module(module), name)
                return real(**options)(function) if options else real(function)

            return Deferred(make)

        return apply if function is None else apply(function)

    return decorate


njit = _decorator("numba", "njit")
intrinsic = _decorator("numba.extending", "intrinsic")
types = _of_numba("numba", "types")
cgutils = _of_numba("numba.core", "cgutils")
carray = _of_numba("numba", "carray")


def overload(target: Callable[..., Any], **options: Any) -> Callable[[Any], Deferred]:
    """A function that picks what calls of target compile to."""

    def apply(function: Any) -> Deferred:
        return Deferred(
            lambda: import_module("numba.extending").overload(target, **options)(function)
        )

    return apply

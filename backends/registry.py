"""Names to backends, imported when first asked for.

Other packages add theirs under the entry-point group `sidestep.backends`: the name is the backend's, the
object a callable without arguments that returns a `Backend`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable

from .base import Backend

_OWN = {
    "cudnn": ".cudnn_graph:CudnnBackend",
    "nvfuser": ".nvfuser_fusion:NvfuserBackend",
    "torch_flash": ".torch_sdpa:FlashBackend",
    "torch_efficient": ".torch_sdpa:EfficientBackend",
    "torch_math": ".torch_sdpa:MathBackend",
}
GROUPS = {"torch": ("torch_flash", "torch_efficient", "torch_math")}
_added: dict[str, Callable[[], Backend]] = {}


@functools.lru_cache(maxsize=1)
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group="sidestep.backends")}


def known() -> tuple[str, ...]:
    """Every name that an order may hold, groups included."""
    return (*_OWN, *_entry_points(), *_added, *GROUPS)


def expand(names: Iterable[str]) -> tuple[str, ...]:
    """The names of single backends, groups spelled out, each once, in order.

    Raises:
        ValueError: an unknown name, or none at all; the known ones are listed.
    """
    names = list(names)
    if odd := [name for name in names if not isinstance(name, str)]:
        raise ValueError(f"a backend's name is text, got {odd[0]!r}; known: {', '.join(known())}")
    single = [part for name in names for part in GROUPS.get(name, (name,))]
    # Asked for the others only, for entry points are looked for in every installed package (23 ms among 200 of them).
    others = set(single) - _OWN.keys() - _added.keys()
    if unknown := sorted(others - set(_entry_points() if others else ())):
        raise ValueError(f"unknown backend {', '.join(map(repr, unknown))}; known: {', '.join(known())}")
    if not single:
        raise ValueError(f"no backend given; known: {', '.join(known())}")
    return tuple(dict.fromkeys(single))


def register(name: str, make: Callable[[], Backend]) -> None:
    """Make a backend known to this process under `name`; an earlier one of that name is replaced."""
    _added[name] = make
    get.cache_clear()


@functools.cache
def get(name: str) -> Backend:
    """The backend called `name`, one object for the process.

    Raises:
        ValueError: an unknown name.
        ImportError: an added backend's package cannot be imported.
    """
    if name in _added:
        return _added[name]()
    if name in _OWN:
        module, attribute = _OWN[name].split(":")
        backend: Backend = getattr(importlib.import_module(module, __package__), attribute)()
        return backend
    if name in _entry_points():
        made: Backend = _entry_points()[name].load()()
        return made
    raise ValueError(f"unknown backend {name!r}; known: {', '.join(known())}")

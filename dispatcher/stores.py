"""The stores that the settings name, opened at first use: one for failures, one for plans. Imports no torch."""

from __future__ import annotations

import threading
from pathlib import Path

from . import settings
from .cache import Layered, Store, open_layers, open_remote, open_store

_lock = threading.Lock()
_open: dict[str, Store] = {}
_remote: Store | None = None  # one for both: whether a server answers is found out once


def get(name: str) -> Store:
    """The store of that name: `failures` or `plans`. The first is never evicted, whatever the other needs."""
    with _lock:
        if name not in _open:
            _open[name] = _new(name)
        return _open[name]


def _new(name: str) -> Store:
    global _remote
    chosen = settings.get()
    if chosen.cache == "off":
        return open_store("off", None)
    _remote = _remote or open_remote(chosen.cache, chosen.signing_key)
    return open_layers(name, folder(), _remote, chosen.plan_bytes if name == "plans" else None)


def folder() -> Path | None:
    """The folder of the disk cache; None where there is none."""
    return settings.get().disk()


def reset() -> None:
    """Close the stores; the next use opens those that the settings name then."""
    global _remote
    with _lock:
        for store in _open.values():
            store.close()
        _open.clear()
        _remote = None


def usable(name: str) -> bool:
    """Whether records really outlive this process, as far as the store has been used; what is wrong was logged.

    A server that does not answer is not asked about: it may come back, and the disk has what it misses.
    """
    opened = get(name)
    return not isinstance(opened, Layered) or opened.usable

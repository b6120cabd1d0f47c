"""The stores that the settings name, opened at first use: one for failures, one for plans. Imports no torch."""

from __future__ import annotations

import threading
from pathlib import Path

from . import settings
from .cache import Layered, Store, open_store

_lock = threading.Lock()
_open: dict[str, Store] = {}


def get(name: str) -> Store:
    """The store of that name: `failures` or `plans`. The first is never evicted, whatever the other needs."""
    with _lock:
        if name not in _open:
            limit = settings.get().plan_bytes if name == "plans" else None
            _open[name] = open_store(settings.get().cache, folder(), name, limit)
        return _open[name]


def folder() -> Path | None:
    """The folder of the disk cache; None where there is none."""
    chosen = settings.get()
    return chosen.directory() if chosen.cache == "disk" else None


def reset() -> None:
    """Close the stores; the next use opens those that the settings name then."""
    with _lock:
        for store in _open.values():
            store.close()
        _open.clear()


def usable(name: str) -> bool:
    """Whether records really outlive this process, as far as the store has been used; what is wrong was logged."""
    opened = get(name)
    return not isinstance(opened, Layered) or opened.usable

"""The stores that the settings name, opened at first use: one for failures, one for plans. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from . import settings
from .cache import Layered, Store, StoreError, open_layers, open_remote
from .cache.bundle import BundleStore
from .events import logger, once

_lock = threading.Lock()
_open: dict[str, Layered] = {}
_read: dict[str, BundleStore] = {}  # bundles, each opened once for both stores
_remote: Store | None = None  # one for both: whether a server answers is found out once


def get(name: str) -> Layered:
    """The store of that name: `failures` or `plans`. The first is never evicted, whatever the other needs."""
    with _lock:
        if name not in _open:
            _open[name] = _new(name, _bundles(name))
        return _open[name]


def open_own(name: str) -> Layered:
    """The cache's own store of that name, opened anew, without the bundles of SIDESTEP_BUNDLE."""
    with _lock:
        return _new(name, ())


def _new(name: str, bundles: Sequence[Store]) -> Layered:
    global _remote
    chosen = settings.get()
    if _remote is None and chosen.cache != "off":
        _remote = open_remote(chosen.cache, chosen.signing_key)
    return open_layers(name, folder(), bundles, _remote, chosen.plan_bytes if name == "plans" else None)


def _bundles(name: str) -> list[BundleStore]:
    """The bundles of SIDESTEP_BUNDLE that can be read; one warning for each of the others."""
    found = []
    for path in settings.get().bundle:
        bundle = _read.setdefault(path, BundleStore(Path(path)))
        try:
            bundle.open()
        except StoreError as error:
            if once(f"bundle {path}"):
                logger.warning("%s", error)
            continue
        count, reason = bundle.distrusted_plans()
        if count and name == "plans" and once(f"plans of bundle {path}"):
            logger.warning("%d plans of the bundle %s are not used: they are native code, and %s.", count, path, reason)
        found.append(bundle)
    return found


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
        _read.clear()
        _remote = None


def usable(name: str) -> bool:
    """Whether records really outlive this process, as far as the store has been used; what is wrong was logged.

    A server that does not answer is not asked about: it may come back, and the disk has what it misses.
    """
    return get(name).usable

"""The stores that the settings name, opened at first use: one for failures, one for plans. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import settings
from .cache import Layered, Store, StoreError, open_store
from .cache.bundle import BundleStore
from .events import logger, once

_lock = threading.Lock()
_open: dict[str, Store] = {}
_read: dict[str, BundleStore] = {}  # bundles, each opened once for both stores


def get(name: str) -> Store:
    """The store of that name: `failures` or `plans`. The first is never evicted, whatever the other needs."""
    with _lock:
        if name not in _open:
            own, bundles = open_own(name), _bundles(name)
            _open[name] = _OverBundles(own, bundles) if bundles else own
        return _open[name]


def open_own(name: str) -> Store:
    """The cache's own store of that name, opened anew, without the bundles of SIDESTEP_BUNDLE."""
    limit = settings.get().plan_bytes if name == "plans" else None
    return open_store(settings.get().cache, folder(), name, limit)


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


class _OverBundles:
    """A store over bundles, which are read and listed; what is deleted there is hidden by an empty value."""

    def __init__(self, own: Store, bundles: Sequence[BundleStore]) -> None:
        self.own = own
        self._bundles = bundles

    def get(self, key: str) -> bytes | None:
        value = self.own.get(key)
        return (self._in_bundles(key) if value is None else value) or None

    def set(self, key: str, value: bytes) -> None:
        self.own.set(key, value)

    def delete(self, key: str) -> bool:
        found = self.get(key) is not None
        self.own.delete(key)
        if self._in_bundles(key):
            self.own.set(key, b"")
        return found

    def keys(self, prefix: str = "", newest_first: bool | None = False) -> Iterator[str]:
        yield from (key for key in self.own.keys(prefix, newest_first) if self.own.get(key))
        seen: set[str] = set()
        for bundle in self._bundles:
            for key in bundle.keys(prefix, newest_first):
                if key not in seen and self.own.get(key) is None:
                    yield key
                seen.add(key)

    def close(self) -> None:
        for store in (self.own, *self._bundles):
            store.close()

    def _in_bundles(self, key: str) -> bytes | None:
        for bundle in self._bundles:
            try:
                value = bundle.get(key)
            except StoreError as error:
                if once(f"bundle {bundle.path}"):
                    logger.warning("%s", error)
                continue
            if value:
                return value
        return None


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
        _read.clear()


def usable(name: str) -> bool:
    """Whether records really outlive this process, as far as the store has been used; what is wrong was logged."""
    opened = get(name)
    return is_usable(opened.own if isinstance(opened, _OverBundles) else opened)


def is_usable(store: Store) -> bool:
    """The same of a store that `open_own` opened."""
    return not isinstance(store, Layered) or store.usable

"""A store that lives as long as its process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from .store import check_item


class MemoryStore:
    """A dict, in the order in which keys were last set.

    Args:
        max_bytes: The values' greatest total size; the oldest make room. None: no limit.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._values: dict[str, bytes] = {}
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """Return the value, or None."""
        check_item(key)
        with self._lock:
            return self._values.get(key)

    def set(self, key: str, value: bytes) -> None:
        """Store the value; it becomes the newest."""
        check_item(key, value)
        with self._lock:
            self._drop(key)
            self._values[key] = value
            self._bytes += len(value)
            while self._max_bytes is not None and self._bytes > self._max_bytes:
                self._drop(next(iter(self._values)))

    def delete(self, key: str) -> bool:
        """Delete the value; return whether there was one."""
        check_item(key)
        with self._lock:
            return self._drop(key)

    def keys(self, prefix: str = "", newest_first: bool | None = False) -> Iterator[str]:
        """Iterate over the keys of this moment that begin with `prefix`."""
        with self._lock:
            keys = [key for key, value in self._values.items() if value and key.startswith(prefix)]
        return reversed(keys) if newest_first else iter(keys)

    def close(self) -> None:
        """Nothing to let go of; the values stay."""

    def _drop(self, key: str) -> bool:
        value = self._values.pop(key, None)
        self._bytes -= len(value or b"")
        return value is not None

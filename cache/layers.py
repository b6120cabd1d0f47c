"""One store over another, so that trouble with the lower one never reaches the caller."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from .store import Store, StoreError

logger = logging.getLogger("sidestep")


class Layered:
    """A store that cannot fail (memory) over one that can (disk).

    The lower store is the truth while it works: asking it costs 20 us, on the slow path only, and so another process's
    new record and another process's deletion are both seen at once. The upper one gets a copy of all that passes, and
    answers alone after the lower one's first trouble: one warning, and then this process does not try again, for a lock
    or a sick disk costs a second each time.
    """

    def __init__(self, upper: Store, lower: Store) -> None:
        self._upper = upper
        self._lower = lower
        self._usable = True
        self._lock = threading.Lock()

    @property
    def usable(self) -> bool:
        """Whether the lower store still takes part."""
        return self._usable

    def get(self, key: str) -> bytes | None:
        """Return the value, or None."""
        if self._usable:
            try:
                value = self._lower.get(key)
            except StoreError as error:
                self._give_up(error)
            else:
                if value is None:
                    self._upper.delete(key)
                else:
                    self._upper.set(key, value)
                return value
        return self._upper.get(key)

    def set(self, key: str, value: bytes) -> None:
        """Store the value in both."""
        if self._usable:
            try:
                self._lower.set(key, value)
            except StoreError as error:
                self._give_up(error)
        self._upper.set(key, value)

    def delete(self, key: str) -> bool:
        """Delete the value in both; return whether there was one."""
        found = False
        if self._usable:
            try:
                found = self._lower.delete(key)
            except StoreError as error:
                self._give_up(error)
        return self._upper.delete(key) or found

    def keys(self, prefix: str = "", newest_first: bool | None = False) -> Iterator[str]:
        """Iterate over the lower store's keys (all that is in the upper one went there too), or else the upper's."""
        listed = False
        if self._usable:
            try:
                for key in self._lower.keys(prefix, newest_first):
                    listed = True
                    yield key
                return
            except StoreError as error:
                self._give_up(error)
        # A listing that broke off stays short, as the warning says, rather than name keys twice.
        if not listed:
            yield from self._upper.keys(prefix, newest_first)

    def close(self) -> None:
        """Close both."""
        self._lower.close()
        self._upper.close()

    def _give_up(self, error: StoreError) -> None:
        with self._lock:
            first, self._usable = self._usable, False
        if first:
            logger.warning("%s", error)

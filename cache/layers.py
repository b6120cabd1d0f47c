"""Stores in layers, so that trouble with one of them never reaches the caller."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from .store import AwayError, Store, StoreError

logger = logging.getLogger("sidestep")

_Result = TypeVar("_Result")


class Layered:
    """Stores one under another: memory, which cannot fail, first; then disk; then what others share.

    A look-up is answered by the first layer that has the key, and copied into the writable ones above it. The second
    layer (disk) is the truth over the first while it works: asking it costs 20 us, on the slow path only, and so
    another process's new record and another process's deletion are both seen at once. Memory gets a copy of all that
    passes, and answers in place of a disk that fails.

    A layer that raises StoreError is given up for this process, with one warning, for a lock or a sick disk costs a
    second each time. One that raises AwayError is passed over this time: it says itself what is wrong, and when to come
    back.

    A store with a true attribute `read_only` is read and listed, never written. What is deleted while such a layer
    still has it is hidden by an empty value in the layers above. To `get` and `keys` an empty value is none.

    Args:
        stores: The layers, from the top; the first must not raise StoreError.
        is_current: Whether a value still stands; one that does not is given only where no layer below has a better one.
    """

    def __init__(self, *stores: Store, is_current: Callable[[bytes], bool] | None = None) -> None:
        self._layers = [_Layer(store) for store in stores]
        self._is_current = is_current
        self._order = list(range(len(stores)))
        if len(stores) > 1 and self._layers[1].writable:
            self._order[:2] = 1, 0

    @property
    def usable(self) -> bool:
        """Whether no layer that is written was given up."""
        return all(layer.usable for layer in self._layers if layer.writable)

    def get(self, key: str) -> bytes | None:
        """Return the value, or None."""
        place, value = self._find(key)
        if value is None:
            self._layers[0].store.delete(key)
            return None
        # What lies on this machine anyway needs no copy on its disk.
        for layer in self._layers[: place if self._layers[place].writable else 1]:
            layer.set(key, value)
        return value or None

    def set(self, key: str, value: bytes) -> None:
        """Store the value in every writable layer."""
        for layer in self._layers:
            layer.set(key, value)

    def delete(self, key: str) -> bool:
        """Delete the value in every writable layer; return whether there was one."""
        found = bool(self._find(key)[1])
        for place, layer in enumerate(self._layers):
            if layer.writable:
                layer.ask(lambda store: store.delete(key))
            elif layer.ask(lambda store: store.get(key))[1]:
                for above in self._layers[:place]:
                    above.set(key, b"")
        return found

    def keys(self, prefix: str = "", newest_first: bool | None = False) -> Iterator[str]:
        """Iterate over the keys of all layers without repeats: the upper layers' first, in the order of each."""
        asked: list[_Layer] = []
        answered = False
        for place in self._order:
            # All that is in memory went to the disk too.
            if place == 0 and answered:
                continue
            layer, listed, answered = self._layers[place], False, False
            if layer.usable:
                try:
                    for key in layer.store.keys(prefix, newest_first):
                        listed = True
                        # Named before, or hidden by an empty value.
                        if all(above.ask(lambda store, key=key: store.get(key))[1] is None for above in asked):  # type: ignore[misc]
                            yield key
                    answered = True
                except AwayError:
                    pass
                except StoreError as error:
                    layer.give_up(error)
            # A listing that broke off stays short, as the warning says, rather than name keys twice.
            if listed and not answered:
                return
            asked.append(layer)

    def close(self) -> None:
        """Close all."""
        for layer in self._layers:
            layer.store.close()

    def _find(self, key: str) -> tuple[int, bytes | None]:
        """Return the place of the layer that answers, and its value."""
        best: tuple[int, bytes | None] = len(self._layers), None
        answered = False
        for place in self._order:
            # Memory, after a disk that has answered.
            if place == 0 and answered:
                continue
            answered, value = self._layers[place].ask(lambda store: store.get(key))
            if value is None:
                continue
            if not value or self._is_current is None or self._is_current(value):
                return place, value
            if best[1] is None:
                best = place, value
        return best


class _Layer:
    """A store, and whether it takes part."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.writable = not getattr(store, "read_only", False)
        self.usable = True
        self._lock = threading.Lock()

    def ask(self, question: Callable[[Store], _Result]) -> tuple[bool, _Result | None]:
        """Return whether the store answered, and its answer."""
        if self.usable:
            try:
                return True, question(self.store)
            except AwayError:
                pass
            except StoreError as error:
                self.give_up(error)
        return False, None

    def set(self, key: str, value: bytes) -> None:
        """Store the value, if this can be done here."""
        if self.writable:
            self.ask(lambda store: store.set(key, value))

    def give_up(self, error: StoreError) -> None:
        """Ask no more; one warning."""
        with self._lock:
            first, self.usable = self.usable, False
        if first:
            logger.warning("%s", error)

"""The protocol of every store, and how one is opened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from .records import record_id

# Memory for copies of what the disk holds: some thousand records. A listing that reads a million must not fill memory.
_MEMORY_BYTES = 2**24


class StoreError(Exception):
    """A store cannot be used: its text names the place, the cause and the remedy."""


class RefusedError(ValueError):
    """Something that is neither a text key nor a bytes value: never pickled, never unpickled."""


class Store(Protocol):
    """Text keys to bytes. A value that is damaged or refused is a miss.

    Every method but `close` may raise StoreError when the store cannot be used (`Layered` never does), and RefusedError
    when the caller passes a key that is not text or a value that is not bytes.
    """

    def get(self, key: str) -> bytes | None:
        """Return the value, or None."""

    def set(self, key: str, value: bytes) -> None:
        """Store the value; it becomes the newest."""

    def delete(self, key: str) -> bool:
        """Delete the value; return whether there was one."""

    def keys(self, prefix: str = "", newest_first: bool | None = False) -> Iterator[str]:
        """Iterate over the keys that begin with `prefix`.

        They come in the order in which they were last set (False), in its reverse (True), or as is quickest (None).
        """

    def close(self) -> None:
        """Let go of files and connections. A closed store opens again when it is used."""


def check_item(key: object, value: object = b"") -> None:
    """Raise RefusedError unless `key` is text that UTF-8 can hold and `value` is bytes."""
    if type(key) is not str:
        raise RefusedError(f"a key is text, not {type(key).__name__}")
    if type(value) is not bytes:
        raise RefusedError(f"a value is bytes, not {type(value).__name__}")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise RefusedError(f"a key is text that UTF-8 can hold, not {key!r}") from error


def find_by_id(store: Store, id_prefix: str) -> list[str]:
    """Return the keys whose record id begins with `id_prefix`; looks at every key."""
    keys = store.keys(newest_first=None)
    return [key for key in keys if record_id(key).startswith(id_prefix)]


def open_store(kind: str, directory: Path | None, name: str = "failures", max_bytes: int | None = None) -> Store:
    """Return the store that a setting names. Nothing is opened or created before its first use.

    Args:
        kind: "off", kept in this process only; or "disk", kept in `directory`.
        directory: The cache folder; "off" does not use it.
        name: Of the folder in it.
        max_bytes: What it may hold on disk; the oldest make room. None: no limit.

    Raises:
        ValueError: `kind` is neither, or "disk" comes without a directory.
    """
    from .memory_store import MemoryStore

    if kind == "off":
        return MemoryStore(_MEMORY_BYTES)
    if kind != "disk":
        raise ValueError(f"a store is 'off' or 'disk', not {kind!r}")
    if directory is None:
        raise ValueError("a 'disk' store needs a directory")
    # diskcache is imported only here: a process without a disk store does not pay for it.
    from .disk_store import DiskStore
    from .layers import Layered

    return Layered(MemoryStore(_MEMORY_BYTES), DiskStore(directory, name, max_bytes))

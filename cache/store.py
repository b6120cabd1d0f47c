"""The protocol of every store, and how one is opened."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .records import DamagedRecordError, FailureRecord, record_id

if TYPE_CHECKING:
    from .layers import Layered

# Memory for copies of what the disk holds: some thousand records. A listing that reads a million must not fill memory.
_MEMORY_BYTES = 2**24


class StoreError(Exception):
    """A store cannot be used: its text names the place, the cause and the remedy."""


class AwayError(StoreError):
    """A store does not answer for now; it has said so, and may answer later."""


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
        """Iterate over the keys that begin with `prefix`; those whose value is empty are left out.

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


def open_store(kind: str, directory: Path | None, signing_key: str | None = None) -> Store:
    """Return the store for failures that a setting names. Nothing is opened or created before its first use.

    Args:
        kind: "off", kept in this process only; "disk", kept in `directory`; or the URL of a Redis-protocol server,
            kept in `directory` and there.
        directory: The cache folder; "off" does not use it.
        signing_key: What plans on a server are signed with.

    Raises:
        ValueError: `kind` is none of these, or no directory comes with it.
    """
    from .memory_store import MemoryStore

    if kind == "off":
        return MemoryStore(_MEMORY_BYTES)
    remote = open_remote(kind, signing_key)
    if directory is None:
        raise ValueError("a 'disk' store, also one over a server, needs a directory")
    return open_layers("failures", directory, remote=remote)


def open_remote(kind: str, signing_key: str | None = None) -> Store | None:
    """Return the store on a server that `kind` names, to be shared by all layers over it; None for "disk".

    Raises:
        ValueError: `kind` is neither, or the URL cannot be used.
    """
    if kind == "disk":
        return None
    if "://" not in kind:
        raise ValueError(
            f"a store is 'off', 'disk' or a Redis-protocol server's URL (redis://, rediss://, unix://), not {kind!r}"
        )
    # redis is imported only here: a process without such a store does not pay for it.
    from .remote_store import RemoteStore

    return RemoteStore(kind, signing_key)


def open_layers(
    name: str,
    directory: Path | None,
    bundles: Sequence[Store] = (),
    remote: Store | None = None,
    max_bytes: int | None = None,
) -> Layered:
    """Return memory over the disk store ``directory/name``, over `bundles`, over `remote`.

    Args:
        name: "failures", or "plans".
        directory: The cache folder; None for no disk store.
        bundles: Stores that are only read.
        remote: A store that others share.
        max_bytes: What the disk store may hold; the oldest make room. None: no limit.
    """
    from .layers import Layered
    from .memory_store import MemoryStore

    layers: list[Store] = [MemoryStore(_MEMORY_BYTES)]
    if directory is not None:
        # diskcache is imported only here: a process without a disk store does not pay for it.
        from .disk_store import DiskStore

        layers.append(DiskStore(directory, name, max_bytes))
    layers += bundles
    if remote is None:
        return Layered(*layers)
    return Layered(*layers, remote, is_current=_is_current if name == "failures" else None)


def _is_current(value: bytes) -> bool:
    """Whether a failure still stands: of one that lapsed here, another machine may have a newer record."""
    try:
        return FailureRecord.from_bytes(value).is_valid(time.time())
    except DamagedRecordError:
        return False


def redacted(url: str) -> str:
    """Return the URL without its user, password and options: for people, and for logs."""
    scheme, mark, rest = url.partition("://")
    place, _, query = rest.partition("?")
    # A '?' in a password that was not written as %3F.
    if not mark or "@" in query:
        return f"{scheme}://***" if mark else "***"
    _, at, host = place.rpartition("@")
    return f"{scheme}://{'***@' if at else ''}{host}"

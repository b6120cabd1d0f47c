"""A store in a diskcache folder that may have been planted by anybody: nothing in it is trusted but what was asked for.

diskcache 5.6.3 unpickles keys and values; opens and deletes any file that a row names; sets every row of the Settings
table as an attribute of the Cache, of its Disk and as a PRAGMA; runs the triggers and views that the database holds;
and repeats a locked statement for 60 seconds. Here: no pickle; files inside the folder only; the Settings table is
never read; a database with a schema that diskcache did not write is refused; opening an existing one writes nothing,
and every wait ends after a second.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import DBNAME, EVICTION_POLICY, MODE_BINARY, MODE_RAW, UNKNOWN

from .folder import cache_folder, refuse_network
from .store import RefusedError, StoreError, check_item

_TIMEOUT = 1.0  # seconds; a write takes 0.2 ms, so a lock held longer is somebody's open transaction
_PAGE = 1000  # keys fetched by one statement of a listing

# Written to a new database, for those who open the folder with plain diskcache: nothing is ever evicted.
_SETTINGS = {
    "eviction_policy": "none",
    "cull_limit": 0,
    "size_limit": 2**62,
    "statistics": 0,
    "tag_index": 0,
    # A mapped file that somebody truncates is a SIGBUS.
    "sqlite_mmap_size": 0,
    "sqlite_auto_vacuum": 0,
    # All in rows, which end at 1e9 bytes: a file would go before the transaction that lets go of it is committed, and
    # stay where a process dies between the two; and a bound is kept by counting pages.
    "disk_min_file_size": 2**31 - 1,
}
# https://sqlite.org/security.html, "Untrusted SQLite Database Files".
_PRAGMAS = ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0", "synchronous = NORMAL")


class BytesDisk(diskcache.Disk):  # type: ignore[misc]
    """Text keys and bytes values as they are; pickle, and files outside the folder, refused with RefusedError."""

    def put(self, key: object) -> tuple[str, bool]:
        """Return the key as the database holds it."""
        check_item(key)
        return str(key), True

    def get(self, key: object, raw: object) -> str:
        """Return the key that the database holds."""
        if not raw:
            raise RefusedError("a pickled key")
        check_item(key)
        return str(key)

    def store(self, value: object, read: bool, key: Any = UNKNOWN) -> tuple[int, int, str | None, bytes | None]:
        """Return size, mode, file name and value as the database holds them, which is all in the row."""
        if read:
            raise RefusedError("a file in place of a value")
        check_item("", value)
        assert isinstance(value, bytes)
        return 0, MODE_RAW, None, value

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        """Return the value of a row; earlier versions wrote large ones to files."""
        if mode == MODE_RAW and type(value) is bytes and not read:
            return value
        if mode == MODE_BINARY and not read:
            path = self._inside(filename)
            # A pipe would wait for its writer for ever.
            if not stat.S_ISREG(path.lstat().st_mode):
                raise RefusedError(f"not a file: {filename!r}")
            return path.read_bytes()
        raise RefusedError(f"a row of mode {mode!r}, holding {type(value).__name__}")

    def remove(self, file_path: object) -> None:
        """Delete a row's file if it is one of ours. After the row's commit, where this runs, raising helps nobody."""
        with contextlib.suppress(RefusedError):
            super().remove(str(self._inside(file_path)))

    def _inside(self, filename: object) -> Path:
        # The form that diskcache gives to its names, Disk.filename.
        if not isinstance(filename, str) or not re.fullmatch(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{28}\.val", filename):
            raise RefusedError(f"a file name that is not ours: {filename!r}")
        # Not Path.resolve, which raises RuntimeError for links in a circle (until Python 3.13).
        root = Path(os.path.realpath(self._directory))
        if os.path.realpath(root / filename) != str(root / filename):
            raise RefusedError(f"a link in place of a file: {filename!r}")
        return root / filename


class _Template(diskcache.Cache):  # type: ignore[misc]
    """diskcache's own way of making a database, in memory."""

    _con: Any = None

    def __init__(self) -> None:
        self._con = sqlite3.connect(":memory:", isolation_level=None)
        super().__init__("/", **_SETTINGS)  # a folder that exists; nothing is read or written there


@functools.cache
def _schema() -> tuple[tuple[str, ...], frozenset[tuple[str, str, str | None]]]:
    """Return the statements that make a database, and all that a database of diskcache may contain."""
    template = _Template()
    con = template._con
    with contextlib.closing(con):
        statements = tuple(con.iterdump())
        for policy in EVICTION_POLICY.values():
            if policy["init"]:
                con.execute(policy["init"])
        template.create_tag_index()
        return statements, frozenset(con.execute("SELECT type, name, sql FROM sqlite_master"))


class _Cache(diskcache.Cache):  # type: ignore[misc]
    """diskcache's get, set and delete, on a database opened in our own way.

    Raises:
        OSError, sqlite3.Error, RefusedError: The database cannot be used.
    """

    def __init__(self, folder: Path) -> None:  # the base's would read and write the Settings table
        self._directory = str(folder)
        self._timeout = _TIMEOUT
        self._local = threading.local()
        self._txn_id = None
        self._disk = BytesDisk(self._directory)
        for name, value in _SETTINGS.items():
            setattr(self, name, value)
        if not os.path.lexists(folder / DBNAME):
            self._create(folder)
        # A rollback journal, which WAL mode never has, may name a file that SQLite then deletes (its super-journal).
        if os.path.lexists(folder / f"{DBNAME}-journal"):
            raise RefusedError(f"{DBNAME}-journal is not diskcache's")
        for name in (DBNAME, f"{DBNAME}-wal", f"{DBNAME}-shm"):
            self._make_private(folder / name)
        found = set(self._con.execute("SELECT type, name, sql FROM sqlite_master"))
        if ("table", "Cache") not in {item[:2] for item in found}:
            raise RefusedError(f"{DBNAME} is not a diskcache database")
        if foreign := found - _schema()[1]:
            raise RefusedError(f"{DBNAME} contains what diskcache did not write: {sorted(map(repr, foreign))[0]:.200}")

    def shrink(self, max_bytes: int) -> None:
        """Delete the oldest rows, but never the newest, until the pages in use are few enough. In a transaction."""
        for _ in range(_PAGE):
            (pages,) = self._con.execute(
                "SELECT page_count - freelist_count FROM pragma_page_count, pragma_freelist_count"
            ).fetchone()
            (size,) = self._con.execute("PRAGMA page_size").fetchone()
            if pages * size <= max_bytes:
                return
            rows = self._con.execute("SELECT key FROM Cache ORDER BY rowid LIMIT 2").fetchall()
            if len(rows) < 2:
                return
            self.delete(rows[0][0])

    @staticmethod
    def _create(folder: Path) -> None:
        """Make the database aside and link it into place: it is never seen unfinished, and needs no lock."""
        # mkstemp makes it 0600, and SQLite its -wal and -shm after it.
        number, name = tempfile.mkstemp(prefix=f"{DBNAME}.", suffix=".new", dir=folder)
        os.close(number)
        try:
            with contextlib.closing(sqlite3.connect(name, isolation_level=None)) as con:
                con.execute("PRAGMA journal_mode = WAL")
                for statement in _schema()[0]:
                    con.execute(statement)
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(name, folder / DBNAME)
        finally:
            for ending in ("", "-wal", "-shm"):
                with contextlib.suppress(OSError):
                    Path(name + ending).unlink()

    @staticmethod
    def _make_private(path: Path) -> None:
        try:
            status = path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise RefusedError(f"{path.name} is not a file of ours")
        if status.st_mode & 0o077:
            with contextlib.suppress(FileNotFoundError):  # the last user's close deletes -wal and -shm
                path.chmod(0o600)

    @property
    def _con(self) -> sqlite3.Connection:
        con: sqlite3.Connection | None = getattr(self._local, "con", None)
        if con is None:
            # mode=rw: a database that is missing is an error, not a new file that others may read.
            uri = f"{Path(self._directory, DBNAME).as_uri()}?mode=rw"
            con = sqlite3.connect(uri, uri=True, timeout=self._timeout, isolation_level=None)
            # One key that is not UTF-8 must not hide the others.
            con.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
            for pragma in _PRAGMAS:
                con.execute(f"PRAGMA {pragma}")
            self._local.con = con
        return con


# Caches of a parent process. SQLite forbids a child to use or close them (https://sqlite.org/howtocorrupt.html, 2.6),
# so they are kept from the garbage collector.
_of_parents: list[_Cache] = []


class DiskStore:
    """Records in ``directory/name``, opened at the first use, in each process and thread for itself.

    Every method but `close` raises StoreError when the folder or the database cannot be used.

    Args:
        directory: The cache folder.
        name: Of the folder in it.
        max_bytes: What the database may hold; the records set longest ago make room. None: no limit.
    """

    def __init__(self, directory: Path, name: str = "failures", max_bytes: int | None = None) -> None:
        self._directory = directory.absolute()
        self._name = name
        self._max_bytes = max_bytes
        self._opened: tuple[int, _Cache] | None = None

    def get(self, key: str) -> bytes | None:
        """Return the value, or None."""
        check_item(key)
        with self._cache() as cache:
            try:
                value: bytes | None = cache.get(key)
            except RefusedError:
                return None
            return value

    def set(self, key: str, value: bytes) -> None:
        """Store the value; it becomes the newest."""
        check_item(key, value)
        with self._cache() as cache, cache.transact():
            # An updated row would keep its place; a new one is the last by rowid, which makes "newest first" cheap.
            cache.delete(key)
            cache.set(key, value)
            if self._max_bytes is not None:
                cache.shrink(self._max_bytes)

    def delete(self, key: str) -> bool:
        """Delete the value; return whether there was one."""
        check_item(key)
        with self._cache() as cache:
            return bool(cache.delete(key))

    def keys(self, prefix: str = "", newest_first: bool | None = False) -> Iterator[str]:
        """Iterate over the keys that begin with `prefix`: see `Store`."""
        if newest_first is None:
            yield from self._keys_of_index(prefix)
            return
        compare, order = ("<", "DESC") if newest_first else (">", "ASC")
        select = (
            f"SELECT rowid, key FROM Cache WHERE rowid {compare} ? AND raw = 1 AND typeof(key) = 'text'"
            # A large value is in a file, and NULL here.
            " AND (value IS NULL OR length(value) > 0)"
            f" AND substr(key, 1, ?) = ? ORDER BY rowid {order} LIMIT {_PAGE}"
        )
        rowid = 2**63 - 1 if newest_first else -(2**63)
        while True:
            with self._cache() as cache:
                rows = cache._con.execute(select, (rowid, len(prefix), prefix)).fetchall()
            if not rows:
                return
            for _, key in rows:
                yield key
            rowid = rows[-1][0]

    def _keys_of_index(self, prefix: str) -> Iterator[str]:
        """Iterate over the keys by their index, a fortieth of the database: its rows lie among the values."""
        # Bytes: a key that is not UTF-8 would come back as another one, and the next page begin at the wrong place.
        select = (
            "SELECT CAST(key AS BLOB) FROM Cache INDEXED BY Cache_key_raw WHERE key {} CAST(? AS TEXT) AND raw = 1"
            f" AND typeof(key) = 'text' AND substr(key, 1, ?) = ? ORDER BY key LIMIT {_PAGE}"
        )
        last, compare = prefix.encode(), ">="
        while True:
            with self._cache() as cache:
                rows = cache._con.execute(select.format(compare), (last, len(prefix), prefix)).fetchall()
            if not rows:
                return
            for (key,) in rows:
                yield key.decode("utf-8", "replace")
            (last,), compare = rows[-1], ">"

    def close(self) -> None:
        """Close this thread's connection."""
        if self._opened and self._opened[0] == os.getpid():
            with contextlib.suppress(sqlite3.Error):
                self._opened[1].close()

    @contextlib.contextmanager
    def _cache(self) -> Iterator[_Cache]:
        try:
            if self._opened and self._opened[0] != os.getpid():
                _of_parents.append(self._opened[1])
                self._opened = None
            if self._opened is None:
                folder = cache_folder(self._directory, self._name)
                refuse_network(folder)
                self._opened = os.getpid(), _Cache(folder)
            yield self._opened[1]
        except (OSError, sqlite3.Error, diskcache.Timeout, OverflowError, RefusedError) as error:
            # diskcache leaves a transaction open when its COMMIT fails: closing ends it, so that others need not wait.
            self.close()
            cause = str(error) or "cannot be written (locked by another process, or read-only)"
            raise StoreError(
                f"The cache in {self._directory / self._name} cannot be used: {type(error).__name__}: {cause}."
                " Records are kept in this process's memory only. Set SIDESTEP_CACHE_DIR to a private folder on a local"
                " disk with free space, delete the folder if it is damaged, or set SIDESTEP_CACHE=off."
            ) from error

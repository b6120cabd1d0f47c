"""One file of failure records and plans, which a container image or another machine takes over.

It is a zip, so that standard tools read it (``unzip -l FILE``, ``unzip -p FILE manifest.json``)::

    failure/<environment>/<backend>/<problem>    framed bytes, as records.py writes them
    plan/<environment>/<backend>/<problem>       the same
    manifest.json      {"schema": 1, "created": "...", "counts": {...}, "environments": {digest: fields}}

A zip rather than an SQLite file, whose pages and schema would be a stranger's input to a large parser that also runs
triggers and views; and its directory gives random access just as well. The manifest comes last, so that a bundle is
written in one pass and counts what is really in it.

Promises: nothing is ever unpacked to a path: names are keys. No entry takes more memory than a record may have. What is
named twice, encrypted, too large, cut short or fails its CRC is a miss, and `damage` and `read` say why. Plans are
native code: they are given only from a file that is ours or root's and that others cannot write.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import secrets
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .folder import replaceable
from .records import DamagedRecordError, FailureRecord, PlanRecord
from .store import StoreError, check_item

SCHEMA = 1
MANIFEST = "manifest.json"
KINDS = ("failure", "plan")
# A traceback has some kB; a plan's graphs at most 2**26 bytes, and zlib makes no more than 1/1000 of nothing.
_LARGEST = {"failure": 2**24, "plan": 2**26 + 2**20, MANIFEST: 2**24}
# What zipfile raises for a file that anybody may have written.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, OverflowError, RecursionError)


@dataclass(frozen=True)
class _Opened:
    """A bundle as one process has it open."""

    process: int
    file: BinaryIO
    archive: zipfile.ZipFile
    entries: Mapping[str, zipfile.ZipInfo]
    damage: Mapping[str, str]
    manifest: Mapping[str, Any]
    distrust: str


class BundleStore:
    """A bundle as a store that is read and never written, opened at the first use, in each process for itself.

    Every method but `close` raises StoreError when the file is no bundle or cannot be read.

    Args:
        path: The file.
    """

    read_only = True

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._opened: _Opened | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def open(self) -> None:
        """Open the file now, if it is not."""
        self._open()

    def get(self, key: str) -> bytes | None:
        """Return the value, or None; None too where it is damaged, or a plan in a file not to be trusted."""
        check_item(key)
        try:
            return self.read(key)
        except (KeyError, DamagedRecordError):
            return None

    def read(self, key: str) -> bytes:
        """Return the value.

        Raises:
            KeyError: There is none, or it is a plan in a file not to be trusted.
            DamagedRecordError: It cannot be read; why.
        """
        opened = self._open()
        if opened.distrust and key.startswith("plan/"):
            raise KeyError(key)
        if key in opened.damage:
            raise DamagedRecordError(opened.damage[key])
        return _read(opened.archive, opened.entries[key], self._path)

    def set(self, key: str, value: bytes) -> None:
        """Refuse."""
        raise StoreError(f"The bundle {self._path} is read, never written; see: sidestep cache merge")

    def delete(self, key: str) -> bool:
        """Refuse."""
        raise StoreError(f"The bundle {self._path} is read, never written; see: sidestep cache export")

    def keys(self, prefix: str = "", newest_first: bool | None = False) -> Iterator[str]:
        """Iterate over the keys that begin with `prefix`, in the order in which they were written, or its reverse."""
        opened = self._open()
        found = [
            key
            for key in opened.entries
            if key.startswith(prefix) and not (opened.distrust and key.startswith("plan/"))
        ]
        return reversed(found) if newest_first else iter(found)

    def close(self) -> None:
        """Let go of the file."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.archive.close()
            opened.file.close()

    def damage(self) -> dict[str, str]:
        """Return what is wrong with the file's directory, by name; each entry's contents are looked at by `read`."""
        return dict(self._open().damage)

    def distrusted_plans(self) -> tuple[int, str]:
        """Return how many plans the file holds that it is not trusted to give, and why."""
        opened = self._open()
        return sum(key.startswith("plan/") for key in opened.entries) if opened.distrust else 0, opened.distrust

    @property
    def created(self) -> str:
        """When the bundle was written, as it says."""
        return str(self._open().manifest.get("created"))

    def _open(self) -> _Opened:
        # A forked child shares the parent's place in the file, so it opens its own.
        if self._opened is None or self._opened.process != os.getpid():
            self._opened = self._fresh()
        return self._opened

    def _fresh(self) -> _Opened:
        with contextlib.ExitStack() as stack:
            try:
                # Opening a pipe that nobody writes to would wait for ever.
                number = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                file = stack.enter_context(open(number, "rb"))
                status = os.fstat(number)
                if not stat.S_ISREG(status.st_mode):
                    raise zipfile.BadZipFile("not a regular file")
                archive = zipfile.ZipFile(file)
            except (OSError, *_DAMAGE) as error:
                raise self._error(str(error)) from error
            entries: dict[str, zipfile.ZipInfo] = {}
            damage: dict[str, str] = {}
            for info in archive.infolist():
                name = info.filename
                if name in entries:
                    damage[name] = "it is named twice"
                elif name != MANIFEST and name.partition("/")[0] not in KINDS:
                    damage[name] = "it is neither a failure record nor a plan"
                else:
                    entries[name] = info
            manifest = self._manifest(archive, entries.pop(MANIFEST, None))
            counts = Counter(name.partition("/")[0] for name in entries)
            if manifest.get("counts") != {kind: counts[kind] for kind in KINDS}:
                found = ", ".join(f"{kind} {counts[kind]}" for kind in KINDS)
                damage[MANIFEST] = f"it counts {manifest.get('counts')!r:.100}, the file holds {found}"
            stack.pop_all()
            return _Opened(os.getpid(), file, archive, entries, damage, manifest, _distrust(status))

    def _manifest(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo | None) -> dict[str, Any]:
        if info is None:
            raise self._error(f"a zip without {MANIFEST}")
        try:
            manifest = json.loads(_read(archive, info, self._path))
        except (ValueError, RecursionError) as error:
            raise self._error(f"{MANIFEST}: {error}") from error
        schema = manifest.get("schema") if isinstance(manifest, dict) else None
        if type(schema) is not int or schema != SCHEMA:
            raise self._error(f"its schema is {schema!r:.100}, and this version reads {SCHEMA}")
        return dict(manifest)

    def _error(self, cause: str) -> StoreError:
        return StoreError(
            f"The bundle {self._path} cannot be used: {cause}. Expected a file that `sidestep cache export` or "
            "`sidestep cache merge` wrote: make it anew, or leave it out of SIDESTEP_BUNDLE."
        )


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> bytes:
    """Return an entry's contents, of which zipfile looks at the CRC."""
    if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DamagedRecordError("it is encrypted, or compressed in a way that bundles are not")
    largest = _LARGEST[info.filename.partition("/")[0]]
    if info.file_size > largest:
        raise DamagedRecordError(f"it claims {info.file_size} bytes, of {largest} at most")
    try:
        with archive.open(info) as file:
            data = file.read()
    except OSError as error:
        raise StoreError(f"The bundle {path} cannot be read any more: {error}. Is its disk still there?") from error
    except _DAMAGE as error:
        raise DamagedRecordError(f"{type(error).__name__}: {error}") from error
    if len(data) != info.file_size or not data:
        raise DamagedRecordError(f"it has {len(data)} bytes, of {info.file_size}")
    return data


def _distrust(status: os.stat_result) -> str:
    """Return why native code from the file is not run; "" where it may be: as in the cache folder, or root's."""
    if status.st_uid not in (0, os.geteuid()):
        return f"it is owned by user {status.st_uid}, not by us ({os.geteuid()}) or root: a copy of it would be yours"
    if status.st_mode & 0o022:
        return "it is writable by others: chmod go-w makes it private"
    return ""


def write_bundle(path: Path, records: Iterable[tuple[FailureRecord | PlanRecord, bytes]]) -> dict[str, int]:
    """Write a bundle, in place of `path` once it is whole; the same records in the same order make the same entries.

    It may be read by all (umask permitting): a container's process is often not the user who made the image.

    Args:
        path: The file. One that is there is replaced if it is a bundle.
        records: Each with its framed bytes.

    Returns:
        How many of each kind.

    Raises:
        OSError: It cannot be written, or is something else than a bundle; `path` is as it was.
    """
    path = _replaceable(path)
    counts = dict.fromkeys(KINDS, 0)
    environments: dict[str, dict[str, Any]] = {}
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(number, "wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for record, data in records:
                    kind, environment, *_ = record.key.split("/")
                    counts[kind] += 1
                    environments[environment] = record.environment
                    # A plan's graphs are compressed already.
                    method = zipfile.ZIP_STORED if kind == "plan" else zipfile.ZIP_DEFLATED
                    archive.writestr(_info(record.key), data, method)
                now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
                manifest = {"schema": SCHEMA, "created": now, "counts": counts, "environments": environments}
                archive.writestr(_info(MANIFEST), json.dumps(manifest, indent=2), zipfile.ZIP_DEFLATED)
            file.flush()
            os.fsync(number)
        partial.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return counts


def _replaceable(path: Path) -> Path:
    path = replaceable(path)
    if path.exists() and path.stat().st_size:
        with contextlib.closing(BundleStore(path)) as bundle:
            try:
                bundle.open()
            except StoreError as error:
                what = "a file that is no bundle, or a damaged one: it is not replaced, delete it if it is to go"
                raise FileExistsError(errno.EEXIST, what, str(path)) from error
    return path


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)  # dated 1980, whenever it is written
    info.create_system = 3  # as on Unix, everywhere
    info.external_attr = 0o644 << 16
    return info

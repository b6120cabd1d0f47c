"""Builds that kill their process, remembered by a file written before the build: the folder ``intents``.

A file's name is sha256(key). Its first line is the key, its second how many builds in a row began and did not end;
after that comes what the fault handler wrote. The process that builds holds the file's flock and deletes the file at
the end, whatever the end; so a file without a holder is a build that took its process along. The kernel lets go of a
dead process's flock: no process id is tested.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .folder import cache_folder

_LONGEST = 2**20  # bytes read of a dump; the fault handler writes 100 frames of 100 threads at most


@dataclass(frozen=True)
class Crash:
    """A build that killed its process.

    Attributes:
        key: What was built.
        dump: The fault handler's text; empty after SIGKILL.
        time: Unix time of the death as nearly as known, seconds.
        count: How many builds of the key died in a row.
    """

    key: str
    dump: str
    time: float
    count: int

    @property
    def summary(self) -> str:
        """One line: the dump's first, where there is one."""
        return self.dump.strip().partition("\n")[0] or f"{self.count} builds ended their process"


class _FaultHandler:
    """The process's fault handler, lent to the builds that run: it writes to the one begun last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: list[int] = []
        self._was_enabled = False

    def lend(self, file: int) -> None:
        with self._lock:
            if not self._files:
                self._was_enabled = faulthandler.is_enabled()
            self._files.append(file)
            faulthandler.enable(file)

    def give_back(self, file: int) -> None:
        with self._lock:
            self._files.remove(file)
            if self._files:
                faulthandler.enable(self._files[-1])
            elif self._was_enabled:
                # Python does not tell which file it was. Not sys.stderr: pytest and Jupyter put objects there whose
                # file is another, or closed later, or none.
                faulthandler.enable(2)
            else:
                faulthandler.disable()


_fault_handler = _FaultHandler()


class Intents:
    """The intents in ``directory/intents``. Without a directory, or with any trouble there, the methods do nothing."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = None if directory is None else directory.absolute()

    @contextlib.contextmanager
    def begin(self, key: str) -> Iterator[None]:
        """Keep an intent for `key` while the block, which builds in this process, runs."""
        held = self._start(key)
        try:
            yield
        finally:
            if held:
                path, file = held
                _fault_handler.give_back(file)
                with contextlib.suppress(OSError):
                    path.unlink()
                os.close(file)

    def find_crash(self, key: str) -> Crash | None:
        """Return the crash that an intent without a holder shows, or None.

        It shows one when it holds a fault handler's dump, or is the second in a row: the first without a dump may be
        SIGKILL's, from preemption or for want of memory.
        """
        with self._locked(key, create=False) as held:
            if held is None:
                return None
            count, dump = _read(held[1], key)
            if "Fatal Python error" in dump or count >= 2:
                return Crash(key, dump, os.fstat(held[1]).st_mtime, count)
        return None

    def clear(self, key: str) -> None:
        """Forget what `find_crash` would show; a build that runs is left alone."""
        with self._locked(key, create=False) as held:
            if held is not None:
                with contextlib.suppress(OSError):
                    held[0].unlink()

    def _start(self, key: str) -> tuple[Path, int] | None:
        with self._locked(key, create=True) as held:
            if held is None:
                return None
            path, file = held
            try:
                count, _ = _read(file, key)
                os.ftruncate(file, 0)
                os.write(file, f"{_first_line(key)}\n{count + 1}\n".encode())
                kept = os.dup(file)  # shares the lock
            except OSError:
                # Half an intent would count as a death.
                with contextlib.suppress(OSError):
                    path.unlink()
                return None
        _fault_handler.lend(kept)
        return path, kept

    @contextlib.contextmanager
    def _locked(self, key: str, *, create: bool) -> Iterator[tuple[Path, int] | None]:
        """Give the intent's path and open, locked file; None when it is absent, held, or cannot be used."""
        if self._directory is None:
            yield None
            return
        file = -1
        path = self._directory / "intents" / hashlib.sha256(key.encode()).hexdigest()
        try:
            if create:
                cache_folder(self._directory, "intents")
            # O_APPEND: the fault handler writes where the file ends. O_NONBLOCK: a planted pipe must not wait.
            flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(path, flags | os.O_CREAT if create else flags, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(file)
            # No links: deleted between open and flock by the process that held it.
            usable = stat.S_ISREG(status.st_mode) and status.st_nlink > 0
        except OSError:
            usable = False
        try:
            yield (path, file) if usable else None
        finally:
            if file >= 0:
                os.close(file)


def _first_line(key: str) -> str:
    return key.replace("\n", " ")


def _read(file: int, key: str) -> tuple[int, str]:
    """Return how many builds began and did not end, and the dump; (0, "") unless the file is an intent for `key`."""
    try:
        text = os.pread(file, _LONGEST, 0).decode("utf-8", "replace")
    except OSError:
        return 0, ""
    first, _, rest = text.partition("\n")
    count, _, dump = rest.partition("\n")
    if first != _first_line(key) or not count.isdecimal() or len(count) > 9:
        return 0, ""
    return int(count), dump

"""One builder per key on one machine: the others wait for what it leaves in the store."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from .folder import cache_folder


@contextlib.contextmanager
def single_flight(directory: Path | None, key: str, limit: float) -> Iterator[None]:
    """Run the block, which builds `key`, while no other process on this machine does; look in the store again first.

    It is a flock, so a killed builder holds nothing up. After `limit` seconds, or where nothing can be locked, the
    block runs all the same: a graph built twice costs less than one waited for.

    Args:
        directory: The cache folder; None where there is none, so nobody to share with.
        key: What is built. Keys share 4096 locks, so that the folder stays small.
        limit: Seconds to wait at most.
    """
    if directory is None:
        yield
        return
    import filelock  # a process that builds nothing does not pay for it

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError, filelock.Timeout):
            folder = cache_folder(directory.absolute(), "locks")
            path = folder / hashlib.sha256(key.encode()).hexdigest()[:3]
            stack.enter_context(filelock.FileLock(path, mode=0o600).acquire(timeout=limit, poll_interval=0.005))
        yield

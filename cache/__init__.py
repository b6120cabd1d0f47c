"""Where failures and built plans are kept: bytes in, bytes out; nothing here knows of attention.

The folder, 0700 and ours::

    <directory>/
        README.md  CACHEDIR.TAG  .gitignore
        failures/cache.db     FailureRecords, a diskcache folder; never evicted
        plans/cache.db        PlanRecords, another one; the oldest make room
        intents/<sha256>      one small file per build that is running, or that killed its process
        locks/<3 digits>      held by the process that builds

Promises: slow or absent, never harmful. No pickle is read or written. Damage is a miss. A folder that cannot be used
costs one warning, and the process keeps its records in memory. A server that a fleet shares is one more layer below.
"""

from .folder import cache_folder
from .intents import Crash, Intents
from .layers import Layered
from .memory_store import MemoryStore
from .records import (
    DamagedRecordError,
    FailureRecord,
    Kind,
    Origin,
    PlanRecord,
    failure_key,
    frame,
    plan_key,
    record_id,
    unframe,
)
from .single_flight import single_flight
from .store import (
    AwayError,
    RefusedError,
    Store,
    StoreError,
    find_by_id,
    open_layers,
    open_remote,
    open_store,
    redacted,
)

__all__ = [
    "AwayError",
    "Crash",
    "DamagedRecordError",
    "FailureRecord",
    "Intents",
    "Kind",
    "Layered",
    "MemoryStore",
    "Origin",
    "PlanRecord",
    "RefusedError",
    "Store",
    "StoreError",
    "cache_folder",
    "failure_key",
    "find_by_id",
    "frame",
    "open_layers",
    "open_remote",
    "open_store",
    "plan_key",
    "record_id",
    "redacted",
    "single_flight",
    "unframe",
]

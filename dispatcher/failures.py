"""The failure records of this process's cache: look-up, keeping, crash intents. Imports no torch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from . import settings
from .cache import Crash, DamagedRecordError, FailureRecord, Intents, Kind, Layered, Store, find_by_id, open_store
from .events import logger, once

if TYPE_CHECKING:
    from .problem import AttentionProblem

_lock = threading.Lock()
_store: Store | None = None


def store() -> Store:
    """The store that the settings name, opened at first use."""
    global _store
    with _lock:
        if _store is None:
            chosen = settings.get()
            _store = open_store(chosen.cache, chosen.disk(), chosen.signing_key)
        return _store


def reset() -> None:
    """Close the store; the next use opens the one that the settings name then."""
    global _store
    with _lock:
        if _store is not None:
            _store.close()
        _store = None


def usable() -> bool:
    """Whether records really outlive this process, as far as the store has been used; what is wrong was logged.

    A server that does not answer is not asked about: it may come back, and the disk has what it misses.
    """
    opened = store()
    return not isinstance(opened, Layered) or opened.usable


def _intents() -> Intents:
    return Intents(settings.get().disk())


def _read(key: str) -> FailureRecord | None:
    data = store().get(key)
    if data is None:
        return None
    try:
        record = FailureRecord.from_bytes(data)
    except DamagedRecordError as error:
        if once(f"damaged {key}"):
            logger.info("a damaged record is passed over: %s: %s", key, error)
        return None
    return record if record.key == key else None


def remembered(key: str, problem: AttentionProblem, manifest: Mapping[str, Any]) -> FailureRecord | None:
    """The record under `key` that is valid now and really speaks of this problem and environment; else None."""
    record = _read(key)
    if record is None or record.environment != dict(manifest) or _differs(record.problem, problem):
        return None
    return record if record.is_valid(time.time()) else None


def _differs(kept: Mapping[str, Any], problem: AttentionProblem) -> bool:
    from .problem import AttentionProblem

    try:
        return AttentionProblem.from_json(kept) != problem
    except ValueError:
        return True


def keep(record: FailureRecord) -> None:
    """Store a failure; an earlier one of the same key lends it its history."""
    earlier = _read(record.key)
    store().set(record.key, (earlier.again(record) if earlier else record).to_bytes())
    _intents().clear(record.key)


def note(
    key: str,
    kind: Kind,
    backend: str,
    problem: AttentionProblem,
    manifest: Mapping[str, Any],
    *,
    direction: Literal["forward", "backward"],
    stage: str,
    exception: tuple[str, str, str],
    duration: float,
    built_on: Literal["local", "offline"],
    at: float | None = None,
) -> FailureRecord:
    """Store a failure that happened now, or at unix time `at`; `exception` is its type, text and traceback."""
    at = time.time() if at is None else at
    record = FailureRecord(
        key=key,
        kind=kind,
        backend=backend,
        direction=direction,
        stage=stage,
        exception_type=exception[0],
        exception_text=exception[1],
        traceback=exception[2],
        problem=problem.to_json(),
        environment=dict(manifest),
        first_time=at,
        last_time=at,
        count=1,
        duration=duration,
        built_on=built_on,
    )
    keep(record)
    return record


def crash(key: str) -> Crash | None:
    """The crash that an earlier process's unfinished build of `key` shows."""
    return _intents().find_crash(key)


@contextlib.contextmanager
def intent(key: str | None) -> Iterator[None]:
    """While a build runs, leave a mark that survives the death of the process; nothing without a key."""
    if key is None:
        yield
        return
    with _intents().begin(key):
        yield


def records(newest_first: bool = True) -> Iterator[FailureRecord]:
    """Every readable record."""
    for key in list(store().keys("failure/", newest_first)):
        record = _read(key)
        if record is not None:
            yield record


def find(id_prefix: str) -> list[FailureRecord]:
    """The records whose id begins with `id_prefix`."""
    found = (_read(key) for key in find_by_id(store(), id_prefix))
    return [record for record in found if record is not None]


def forget(record: FailureRecord) -> None:
    """Delete a record; the next call tries the backend again."""
    store().delete(record.key)
    _intents().clear(record.key)

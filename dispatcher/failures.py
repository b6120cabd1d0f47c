"""The failure records of this process's cache: look-up, keeping, crash intents. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from . import stores
from .cache import Crash, DamagedRecordError, FailureRecord, Intents, Kind, Store, find_by_id
from .events import logger, once

if TYPE_CHECKING:
    from .problem import AttentionProblem


def store() -> Store:
    """Where the records are."""
    return stores.get("failures")


def _intents() -> Intents:
    return Intents(stores.folder())


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
    if record is None or record.environment != dict(manifest) or not problem.is_written(record.problem):
        return None
    return record if record.is_valid(time.time()) else None


def keep(record: FailureRecord) -> None:
    """Store a failure; an earlier one of the same key lends it its history."""
    earlier = _read(record.key)
    store().set(record.key, (earlier.again(record) if earlier else record).to_bytes())
    _intents().clear(record.key)


def summary(name: str, text: str) -> str:
    """One line: the class, and the reason, which the frontend puts behind its own words and a dump of the graph."""
    sign = next((sign for sign in ("Reason:", "the backend declined:") if sign in text), "")
    words, _, reason = text.partition(sign) if sign else ("", "", text)
    if words.endswith("("):
        reason = reason.strip().removesuffix(")")
    lines = reason.strip().splitlines()
    if lines and lines[0].endswith(":"):  # the reason comes after it
        lines[0] = " ".join(map(str.strip, lines[:2]))
    return f"{name.rpartition('.')[2]}: {lines[0][:200]}" if lines else name


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


def clear_crash(key: str) -> None:
    """Forget what `crash` would show."""
    _intents().clear(key)


def crash(key: str) -> Crash | None:
    """The crash that an earlier process's unfinished build of `key` shows."""
    return _intents().find_crash(key)


def pardon(key: str) -> None:
    """Forget the unfinished build of a process that was ended on purpose; one that crashed by itself stays."""
    found = crash(key)
    if found is None or not found.dump:
        _intents().clear(key)


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
    for key in store().keys("failure/", newest_first):
        record = _read(key)
        if record is not None:
            yield record


def find(id_prefix: str) -> list[FailureRecord]:
    """The records whose id begins with `id_prefix`."""
    found = (_read(key) for key in find_by_id(store(), id_prefix))
    return [record for record in found if record is not None]


def expire(record: FailureRecord) -> None:
    """Let the next call try the backend again. The record stays, dated 1970: a process that is killed loses no more."""
    store().set(record.key, dataclasses.replace(record, last_time=0.0).to_bytes())
    _intents().clear(record.key)


def restore(record: FailureRecord) -> None:
    """Undo `expire`, unless it has failed again since: then the later failure has taken over the record's history."""
    found = _read(record.key)
    if found is None or not found.last_time:
        store().set(record.key, record.to_bytes())
    _intents().clear(record.key)


def forget(record: FailureRecord) -> None:
    """Delete a record; the next call tries the backend again."""
    store().delete(record.key)
    _intents().clear(record.key)

"""Built plans: bounded in memory, and their graphs in the store for the next process. Imports no torch."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from . import settings, stores
from .cache import DamagedRecordError, PlanRecord, frame, unframe
from .events import counters, logger, once

if TYPE_CHECKING:
    from .backends.base import Plan, Target
    from .problem import AttentionProblem

# For each device. A plan of a forward and a backward has some 200 kB of graphs, and about as much memory.
MAX_PLANS = 1024
MAX_BYTES = 2**28
_EVICTED_AT_MOST = 256  # plans that may wait for the collector


class Memory:
    """Plans whose first run succeeded; of each device's, the one not used for longest makes room."""

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._plans: dict[Target, dict[tuple[str, AttentionProblem], tuple[Plan, int]]] = {}
        self._bytes: dict[Target, int] = {}
        self._evicted = 0

    def take(self, backend: str, problem: AttentionProblem, target: Target) -> tuple[Plan, int] | None:
        """Take out a plan and its size in bytes; put it back where it goes on being used."""
        found = self._plans.get(target, {}).pop((backend, problem), None)
        if found is not None:
            self._bytes[target] -= found[1]
        return found

    def put(self, backend: str, problem: AttentionProblem, target: Target, plan: Plan, size: int) -> list[Plan]:
        """Keep a plan as the latest, and return those that made room."""
        plans = self._plans.setdefault(target, {})
        self.take(backend, problem, target)
        plans[backend, problem] = plan, size
        self._bytes[target] = self._bytes.get(target, 0) + size
        evicted = []
        while len(plans) > MAX_PLANS or (self._bytes[target] > MAX_BYTES and len(plans) > 1):
            oldest, asked = next(iter(plans))
            found = self.take(oldest, asked, target)
            assert found is not None
            evicted.append(found[0])
            self._evicted += 1
            if self._evicted % _EVICTED_AT_MOST == 0:
                gc.collect()  # a route's autograd function is a class, which only the collector frees, with its plan
        return evicted

    def clear(self) -> None:
        """Let go of every plan."""
        self._plans.clear()
        self._bytes.clear()

    def __len__(self) -> int:
        """Plans kept, of all devices."""
        return sum(map(len, self._plans.values()))


def find(key: str, problem: AttentionProblem, manifest: Mapping[str, Any]) -> PlanRecord | None:
    """The plan under `key`, if it really is of this problem and environment; whatever is damaged is a miss."""
    data = stores.get("plans").get(key)
    if data is None:
        return None
    try:
        record = PlanRecord.from_bytes(data)
        if record.key != key or record.environment != dict(manifest) or not problem.is_written(record.problem):
            raise DamagedRecordError("it is of another problem or environment than its key says")
    except DamagedRecordError as error:
        not_loaded(key, error)
        return None
    return record


def keep(record: PlanRecord) -> None:
    """Store a plan for other processes."""
    stores.get("plans").set(record.key, record.to_bytes())


def not_loaded(key: str, error: Exception) -> None:
    """Drop a stored plan that cannot be used: it is built once more. Counted, and logged once for each plan."""
    counters.load_failures += 1
    stores.get("plans").delete(key)
    if once(f"load {key}"):
        logger.info("a stored plan cannot be used and is built anew: %s: %s: %s", key, type(error).__name__, error)


def verified_key(environment_digest: str, backend: str, problem_digest: str) -> str:
    """The key of the mark that a backend's numbers were found right: ``verified/<environment>/<backend>/<problem>``."""
    return f"verified/{environment_digest}/{backend}/{problem_digest}"


def mark(key: str, about: Mapping[str, Any]) -> None:
    """Keep a mark, bounded with the plans; `about`, in JSON, is what it is valid for."""
    stores.get("plans").set(key, frame(json.dumps(about, sort_keys=True).encode()))


def is_marked(key: str, about: Mapping[str, Any]) -> bool:
    """Whether that mark is kept; a damaged one is none."""
    return stores.get("plans").get(key) == frame(json.dumps(about, sort_keys=True).encode())


_WANTED = "wanted/"
_refusing: ContextVar[bool] = ContextVar("sidestep_refuse_builds", default=False)


@contextlib.contextmanager
def refuse_builds() -> Iterator[None]:
    """In the block nothing is built: what is not in memory or in the cache goes to a backend that needs no build.

    Each time is counted (`stats()["refused_builds"]`), and the problem put on the list of `sidestep warmup --wanted`.
    SIDESTEP_BUILD=never says the same for a process. During a CUDA graph capture it is so by itself.
    """
    token = _refusing.set(True)
    try:
        yield
    finally:
        _refusing.reset(token)


def refused_here() -> bool:
    """Inside `refuse_builds()`."""
    return _refusing.get()


def may_build() -> bool:
    """Whether something may be built now."""
    return not _refusing.get() and settings.get().build == "always"


def want(problem: AttentionProblem) -> None:
    """Put a problem on the list of those to warm up; it lies with the plans, so it is bounded with them."""
    counters.refused_builds += 1
    key = _WANTED + problem.digest()
    if once(key):
        mark(key, problem.to_json())


def wanted() -> list[AttentionProblem]:
    """The problems on that list, the oldest first."""
    from .problem import AttentionProblem

    found = []
    for key in list(stores.get("plans").keys(_WANTED)):
        data = stores.get("plans").get(key)
        with contextlib.suppress(ValueError):  # DamagedRecordError is one
            found.append(AttentionProblem.from_json(json.loads(unframe(data or b""))))
    return found


def not_wanted(problem: AttentionProblem) -> None:
    """Take a problem off that list."""
    stores.get("plans").delete(_WANTED + problem.digest())

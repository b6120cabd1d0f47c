"""What is kept of a failure and of a built plan, and its form in bytes.

A stored value is framed: one line of JSON, ``{"schema": 1, "sha256": "..."}``, a newline, the payload. Whatever does
not match its header is damaged, and damage is a miss. A failure's payload is JSON; a plan's is one line of JSON, a
newline, and its graphs, one behind the other, compressed by zlib.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["unsupported", "error", "crash", "timeout", "wrong", "denied"]
Direction = Literal["forward", "backward"]
Origin = Literal["local", "offline"]

SCHEMA = 1
DAY = 86400.0
# Of a plan's graphs, in all: one has some 100 kB, and what claims to be larger is not unpacked.
_LARGEST_PLAN = 2**26
# A refusal is asked again after 30 days; a bug, which a new version may have fixed unseen, after 1 day, doubling to 30.
_LONGEST_RETRY_DAYS = 30


class DamagedRecordError(ValueError):
    """A stored value is not what was written: to be treated as a miss."""


def frame(payload: bytes) -> bytes:
    """Put the header line (schema number, sha256) before a payload."""
    header = {"schema": SCHEMA, "sha256": hashlib.sha256(payload).hexdigest()}
    return json.dumps(header).encode() + b"\n" + payload


def unframe(data: bytes) -> bytes:
    """Return the payload of `frame`.

    Raises:
        DamagedRecordError: `data` is not bytes, or the header, schema number or hash is not right.
    """
    if not isinstance(data, bytes):
        raise DamagedRecordError(f"a stored value is bytes, not {type(data).__name__}")
    line, _, payload = data.partition(b"\n")
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError("the header line is not JSON") from error
    expected = {"schema": SCHEMA, "sha256": hashlib.sha256(payload).hexdigest()}
    # `True == 1`, so the type is looked at too.
    if header != expected or type(header["schema"]) is not int:
        raise DamagedRecordError(f"the header is not the payload's: {line[:200]!r}, expected {expected}")
    return payload


def failure_key(environment_digest: str, backend: str, problem_digest: str) -> str:
    """Return the key of a failure: ``failure/<environment>/<backend>/<problem>``."""
    return f"failure/{environment_digest}/{backend}/{problem_digest}"


def plan_key(environment_digest: str, backend: str, problem_digest: str) -> str:
    """Return the key of a built plan: ``plan/<environment>/<backend>/<problem>``."""
    return f"plan/{environment_digest}/{backend}/{problem_digest}"


def record_id(key: str) -> str:
    """Return the id that people use: the first 12 hex digits of sha256(key)."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class FailureRecord:
    """One backend's failure on one problem in one environment.

    Attributes:
        key: `failure_key(...)`.
        kind: What happened; decides when it is tried again.
        backend: Name of the backend.
        direction: "forward" or "backward".
        stage: The step of the build that failed.
        exception_type: Fully qualified name.
        exception_text: ``str(exception)``.
        traceback: Full text, chained exceptions included.
        problem: The attention problem, JSON.
        environment: The manifest that the key's environment digest stands for, JSON.
        first_time: Unix time of the first failure, seconds.
        last_time: Unix time of the latest failure, seconds.
        count: How many times it failed.
        duration: Seconds that the latest failed attempt took.
        built_on: "offline" when built for a GPU that was not there.
    """

    key: str
    kind: Kind
    backend: str
    direction: Direction
    stage: str
    exception_type: str
    exception_text: str
    traceback: str
    problem: dict[str, Any]
    environment: dict[str, Any]
    first_time: float
    last_time: float
    count: int
    duration: float
    built_on: Origin

    @property
    def id(self) -> str:
        """The first 12 hex digits of sha256(key)."""
        return record_id(self.key)

    def retry_time(self) -> float | None:
        """Return the unix time from which the build may be tried again, or None: not in this environment."""
        if self.kind == "unsupported":
            return self.last_time + _LONGEST_RETRY_DAYS * DAY
        if self.kind in ("error", "timeout"):
            # The inner min keeps a planted count from making a number of a million digits.
            days = min(1 << min(self.count - 1, 10), _LONGEST_RETRY_DAYS)
            return self.last_time + days * DAY
        return None

    def is_valid(self, now: float) -> bool:
        """Whether the failure still stands at unix time `now`; one dated 0 is to be tried again, whatever its kind.

        One of more than a day ahead was dated by a clock gone wrong, and would stand for years.
        """
        retry = self.retry_time()
        return self.last_time > 0 and (retry is None or self.last_time - DAY < now < retry)

    def again(self, newer: FailureRecord) -> FailureRecord:
        """Return `newer`, a later failure of the same key, with this record's history.

        Raises:
            ValueError: `newer` has another key.
        """
        if newer.key != self.key:
            raise ValueError(f"not the same failure: {self.key!r} and {newer.key!r}")
        return dataclasses.replace(newer, first_time=self.first_time, count=self.count + 1)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FailureRecord:
        """Return the record of `to_json`.

        Raises:
            ValueError: Naming the field that is missing, unknown, or of another type.
        """
        _check("failure record", data, _CHECKS)
        return cls(**{**data, **{name: float(data[name]) for name in ("first_time", "last_time", "duration")}})

    def to_bytes(self) -> bytes:
        """Return the framed JSON of the record."""
        return frame(json.dumps(self.to_json(), sort_keys=True).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> FailureRecord:
        """Return the record of `to_bytes`.

        Raises:
            DamagedRecordError: For any damage.
        """
        try:
            return cls.from_json(json.loads(unframe(data)))
        except DamagedRecordError:
            raise
        except (ValueError, RecursionError) as error:
            raise DamagedRecordError(str(error)) from error


@dataclass(frozen=True)
class PlanRecord:
    """One backend's built graphs for one problem in one environment.

    Attributes:
        key: `plan_key(...)`.
        backend: Name of the backend.
        names: What the library calls the plan of each direction.
        problem: The attention problem, JSON.
        environment: The manifest that the key's environment digest stands for, JSON.
        time: Unix time of the build, seconds.
        seconds: How long it took.
        built_on: "offline" when built for a GPU that was not there.
        graphs: The serialized graph of each direction.
    """

    key: str
    backend: str
    names: dict[str, str]
    problem: dict[str, Any]
    environment: dict[str, Any]
    time: float
    seconds: float
    built_on: Origin
    graphs: Mapping[str, bytes]

    @property
    def size(self) -> int:
        """Bytes of the graphs, not compressed."""
        return sum(map(len, self.graphs.values()))

    def to_json(self) -> dict[str, Any]:
        """Return all but the graphs, of which the sizes are given."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "graphs": {name: len(graph) for name, graph in self.graphs.items()}}

    def to_bytes(self) -> bytes:
        """Return the framed form of the record."""
        # The order of the graphs is that of their sizes in the header.
        header = json.dumps(self.to_json()).encode()
        return frame(header + b"\n" + zlib.compress(b"".join(self.graphs.values()), 1))

    @classmethod
    def from_bytes(cls, data: bytes) -> PlanRecord:
        """Return the record of `to_bytes`.

        Raises:
            DamagedRecordError: For any damage.
        """
        line, _, packed = unframe(data).partition(b"\n")
        try:
            header = json.loads(line)
            _check("plan record", header, _PLAN_CHECKS)
            sizes = header["graphs"]
            unpacker = zlib.decompressobj()
            whole = unpacker.decompress(packed, sum(sizes.values()) + 1)
        except (ValueError, RecursionError, zlib.error) as error:
            raise DamagedRecordError(str(error)) from error
        if len(whole) != sum(sizes.values()) or not unpacker.eof or unpacker.unused_data:
            raise DamagedRecordError("plan record: the graphs have not the sizes that the header names")
        graphs, start = {}, 0
        for name, size in sizes.items():
            graphs[name] = whole[start : start + size]
            start += size
        return cls(**{**header, "graphs": graphs})


def _check(what: str, data: object, checks: Mapping[str, tuple[str, Callable[[Any], bool]]]) -> None:
    """Raise ValueError naming the field of `data` that is missing, unknown, or of another type."""
    if not isinstance(data, dict):
        raise ValueError(f"a {what} is a JSON object, not {type(data).__name__}")
    if odd := sorted(checks.keys() ^ data.keys(), key=str):
        raise ValueError(f"{what}: field {odd[0]!r} is {'missing' if odd[0] in checks else 'unknown'}")
    for name, (expected, accepts) in checks.items():
        if not accepts(data[name]):
            raise ValueError(f"{what}: field {name!r} must be {expected}, got {data[name]!r:.100}")


def _text(value: object) -> bool:
    return isinstance(value, str)


def _seconds(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e12 and math.isfinite(value)  # type: ignore[arg-type]


def _object(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _texts(value: object) -> bool:
    return _object(value) and all(map(_text, value.values()))  # type: ignore[attr-defined]


def _sizes(value: object) -> bool:
    if not _object(value):
        return False
    sizes = list(value.values())  # type: ignore[attr-defined]
    return all(type(size) is int and size > 0 for size in sizes) and 0 < sum(sizes) <= _LARGEST_PLAN


_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "key": ("text", _text),
    "kind": (f"one of {get_args(Kind)}", get_args(Kind).__contains__),
    "backend": ("text", _text),
    "direction": (f"one of {get_args(Direction)}", get_args(Direction).__contains__),
    "stage": ("text", _text),
    "exception_type": ("text", _text),
    "exception_text": ("text", _text),
    "traceback": ("text", _text),
    "problem": ("a JSON object", _object),
    "environment": ("a JSON object", _object),
    "first_time": ("a finite number of seconds", _seconds),
    "last_time": ("a finite number of seconds", _seconds),
    "count": ("a whole number of at least 1", lambda value: type(value) is int and value >= 1),
    "duration": ("a finite number of seconds", _seconds),
    "built_on": (f"one of {get_args(Origin)}", get_args(Origin).__contains__),
}
_PLAN_CHECKS = {
    **{name: _CHECKS[name] for name in ("key", "backend", "problem", "environment", "built_on")},
    "names": ("a JSON object of texts", _texts),
    "time": _CHECKS["last_time"],
    "seconds": _CHECKS["duration"],
    "graphs": (f"a JSON object of sizes, {_LARGEST_PLAN} bytes at most", _sizes),
}

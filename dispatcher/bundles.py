"""Bundles: export, import and merge of failure records and plans, and what a cache or a bundle holds.

A bundle comes from anywhere, so every entry is looked at: frame, record, and that its name is that of its own problem,
backend and environment. What is not so is refused and named; the rest is taken. Imports no torch, except to tell which
environments are this machine's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import environment, settings, stores
from .cache import DamagedRecordError, FailureRecord, PlanRecord, Store, StoreError, failure_key, plan_key
from .cache.bundle import KINDS, BundleStore, write_bundle
from .errors import SidestepError
from .problem import AttentionProblem

Record = FailureRecord | PlanRecord
_STORES = dict(zip(KINDS, ("failures", "plans"), strict=True))


class BundleError(SidestepError, RuntimeError):
    """A bundle or the cache cannot be used for what was asked; nothing was done."""


class Entry(NamedTuple):
    """A record that was looked at, and its framed bytes."""

    record: Record
    data: bytes


@dataclass(frozen=True)
class Refused:
    """What was not taken.

    Attributes:
        file: where it is.
        name: of the entry.
        reason: what is wrong with it.
    """

    file: str
    name: str
    reason: str


@dataclass
class Group:
    """What there is of one backend in one environment.

    Attributes:
        environment: the digest in the keys.
        backend: its name.
        fields: what the digest stands for; empty where no record could be read.
        failures: how many records of failures.
        plans: how many plans.
        bytes: of all, as a store holds them.
        here: whether this is an environment of this machine; None where nobody asked.
        differs: what is different on the nearest device here, whose value comes first; empty where there is no device.
    """

    environment: str
    backend: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    failures: int = 0
    plans: int = 0
    bytes: int = 0
    here: bool | None = None
    differs: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The group as a JSON object."""
        return dataclasses.asdict(self)


@dataclass
class Report:
    """What became of the entries.

    Attributes:
        groups: what was good, by environment and backend.
        refused: what was not.
        written: how many records were written.
        unchanged: how many the cache had already, as new or newer.
    """

    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    written: int = 0
    unchanged: int = 0

    def counted(self, entry: Entry) -> Entry:
        """The entry, a good one, which is added to its group."""
        group = _group(self.groups, entry.record.key)
        group.fields = entry.record.environment
        _add(group, entry.record.key, len(entry.data))
        return entry

    def total(self, kind: str) -> int:
        """How many good entries there were of `failures` or `plans`."""
        return sum(getattr(group, kind) for group in self.groups.values())


def check(key: str, data: bytes) -> Record:
    """The record of a stored value, if it is whole and what its key says.

    Raises:
        DamagedRecordError: it is not.
    """
    is_plan = key.startswith("plan/")
    record = PlanRecord.from_bytes(data) if is_plan else FailureRecord.from_bytes(data)
    try:
        problem = AttentionProblem.from_json(record.problem).digest()
        manifest = environment.digest(record.environment)
    except (ValueError, OverflowError, RecursionError) as error:
        raise DamagedRecordError(f"its problem or environment cannot be read by this version: {error}") from error
    expected = (plan_key if is_plan else failure_key)(manifest, record.backend, problem)
    if not key == record.key == expected or not re.fullmatch(r"[^/\\.][^/\\]*", record.backend):
        raise DamagedRecordError("it is of another problem, backend or environment than its name says")
    return record


def newer(one: Record, other: Record) -> Record:
    """What to keep of two records of one key, in either order.

    Of failures the later one, with the earliest first time and the larger count, but what a person denied stays denied;
    of plans the later one.
    """
    if isinstance(one, FailureRecord) and isinstance(other, FailureRecord):
        first_time, count = min(one.first_time, other.first_time), max(one.count, other.count)
        both = [dataclasses.replace(record, first_time=first_time, count=count) for record in (one, other)]
        return max(both, key=lambda record: (record.kind == "denied", record.last_time, record.to_bytes()))
    assert isinstance(one, PlanRecord)
    assert isinstance(other, PlanRecord)
    return max(one, other, key=lambda record: (record.time, record.to_bytes()))


def export(file: Path, kinds: Sequence[str] = KINDS, backend: str | None = None, prefix: str = "") -> Report:
    """Write what the cache itself holds (not what SIDESTEP_BUNDLE adds) to a bundle; damaged values stay behind.

    Args:
        file: the bundle; replaced where there is one.
        kinds: `failure`, `plan`.
        backend: only this one's.
        prefix: only of environments whose digest begins so.

    Raises:
        BundleError: there is nothing to write, or it cannot be written.
    """
    report = Report()

    def selected() -> Iterator[Entry]:
        for kind in kinds:
            with _own(kind) as store:
                for key in store.keys(f"{kind}/{prefix}"):
                    if backend in (None, _parts(key)[1]):
                        yield from _look(key, store.get(key), "the cache", report)

    entries = selected()
    first = next(entries, None)
    if first is None:
        place = stores.folder() or "memory (SIDESTEP_CACHE=off)"
        raise BundleError(f"nothing to export: no such records in {place}; see: sidestep cache info")

    _write(file, itertools.chain([first], entries), report)
    return report


def take(file: Path, kinds: Sequence[str] = KINDS) -> Report:
    """Import a bundle into the cache; what is damaged is refused, what the cache has as new or newer stays.

    Args:
        file: the bundle.
        kinds: `failure`, `plan`.

    Raises:
        BundleError: the file is no bundle, or there is no cache to import into.
    """
    if stores.folder() is None:
        raise BundleError("SIDESTEP_CACHE=off keeps nothing: there is no cache to import into")
    report = Report()
    with contextlib.ExitStack() as stack:
        bundle = stack.enter_context(_opened(file))
        own = {kind: stack.enter_context(_own(kind)) for kind in KINDS}
        for entry in map(report.counted, _entries(bundle, kinds, report)):
            key = entry.record.key
            kind = key.partition("/")[0]
            before = _before(own[kind], key)
            after = entry.record if before is None else newer(before, entry.record)
            if after == before:
                report.unchanged += 1
                continue
            own[kind].set(key, entry.data if after is entry.record else after.to_bytes())
            report.written += 1
    return report


def merge(files: Sequence[Path], output: Path) -> Report:
    """Write one bundle of several, oldest records first; what is damaged is refused.

    Raises:
        BundleError: one of the files is no bundle, there is nothing to write, or it cannot be written.
    """
    report = Report()
    with contextlib.ExitStack() as stack:
        bundles = [stack.enter_context(_opened(file)) for file in files]
        places: dict[str, list[BundleStore]] = {}
        times: dict[str, float] = {}
        for bundle in bundles:
            for record, _ in _entries(bundle, KINDS, report):
                places.setdefault(record.key, []).append(bundle)
                times[record.key] = max(times.get(record.key, 0.0), _time(record))
        if not places:
            refused = "".join(f"\n  {one.file}: {one.name}: {one.reason}" for one in report.refused)
            raise BundleError(f"nothing to merge: no good record in {', '.join(map(str, files))}{refused}")

        def merged() -> Iterator[Entry]:
            for key in sorted(places, key=lambda key: (times[key], key)):
                records = [check(key, bundle.read(key)) for bundle in places[key]]
                chosen = records[0]
                for record in records[1:]:
                    chosen = newer(chosen, record)
                yield Entry(chosen, chosen.to_bytes())

        _write(output, merged(), report)
    return report


def info(file: Path | None = None) -> Report:
    """What the cache itself, or a bundle, holds, by environment and backend; values are counted, not looked at.

    Raises:
        BundleError: the file is no bundle, or the cache cannot be used.
    """
    report = Report()
    with contextlib.ExitStack() as stack:
        if file is None:
            opened = {kind: stack.enter_context(_own(kind)) for kind in KINDS}
        else:
            bundle = stack.enter_context(_opened(file))
            report.refused += _damage(bundle)
            opened = dict.fromkeys(KINDS, bundle)
        for kind, store in opened.items():
            for key in store.keys(f"{kind}/"):
                data = store.get(key)
                if not data:
                    continue
                group = _group(report.groups, key)
                _add(group, key, len(data))
                if not group.fields:
                    with contextlib.suppress(DamagedRecordError):
                        group.fields = check(key, data).environment
    return report


def clear(kinds: Sequence[str]) -> dict[str, int]:
    """Delete all that the cache's own stores of these kinds hold, and return how many values that was."""
    counts = {}
    for kind in kinds:
        with _own(kind) as store:
            counts[kind] = sum(map(store.delete, list(store.keys(newest_first=None))))
    return counts


def locate(groups: Iterable[Group]) -> None:
    """Fill in which environments are this machine's, and what is different here. Imports torch."""
    import torch

    from .backends import registry
    from .backends.base import Target

    for group in groups:
        group.here = False
        try:
            backend = registry.get(group.backend)
        except (ValueError, ImportError):
            continue
        device = "cpu" if group.fields.get("device") == "cpu" else "cuda"
        targets = [Target()] if device == "cpu" else [Target(index) for index in range(torch.cuda.device_count())]
        found = (environment.manifest(backend, device, target) for target in targets)
        manifests = [manifest for manifest in found if manifest is not None]
        differences = [
            {
                name: (manifest.get(name), group.fields.get(name))
                for name in dict.fromkeys((*manifest, *group.fields))
                if manifest.get(name) != group.fields.get(name)
            }
            for manifest in manifests
        ]
        if differences:
            group.differs = min(differences, key=len)
            group.here = not group.differs


def _parts(key: str) -> tuple[str, str]:
    """The environment and the backend of a key."""
    _, manifest, backend, *_ = (*key.split("/"), "", "")
    return manifest, backend


def _group(groups: dict[tuple[str, str], Group], key: str) -> Group:
    return groups.setdefault(_parts(key), Group(*_parts(key)))


def _add(group: Group, key: str, size: int) -> None:
    name = _STORES[key.partition("/")[0]]
    setattr(group, name, getattr(group, name) + 1)
    group.bytes += size


def _time(record: Record) -> float:
    return record.last_time if isinstance(record, FailureRecord) else record.time


def _look(key: str, data: bytes | None, place: str, report: Report) -> Iterator[Entry]:
    """The entry, if there is one and it is good; else its refusal goes to the report."""
    if not data:
        return
    try:
        yield Entry(check(key, data), data)
    except DamagedRecordError as error:
        report.refused.append(Refused(place, key, str(error)))


def _entries(bundle: BundleStore, kinds: Sequence[str], report: Report) -> Iterator[Entry]:
    """The good entries of a bundle; what else it holds goes to the report."""
    place = str(bundle.path)
    refused = _damage(bundle, kinds)
    report.refused += refused
    named = {one.name for one in refused}
    for kind in kinds:
        for key in bundle.keys(f"{kind}/"):
            if key in named:
                continue
            try:
                data = bundle.read(key)
            except DamagedRecordError as error:
                report.refused.append(Refused(place, key, str(error)))
            else:
                yield from _look(key, data, place, report)


def _damage(bundle: BundleStore, kinds: Sequence[str] = KINDS) -> list[Refused]:
    found = [Refused(str(bundle.path), name, reason) for name, reason in bundle.damage().items()]
    count, reason = bundle.distrusted_plans()
    if count and "plan" in kinds:
        said = f"plans are native code, and {reason}"
        found.append(Refused(str(bundle.path), f"{count} plan{'s' if count > 1 else ''}", said))
    return found


def _before(store: Store, key: str) -> Record | None:
    """What the cache has, if it is good."""
    data = store.get(key)
    with contextlib.suppress(DamagedRecordError):
        return check(key, data) if data else None
    return None


@contextlib.contextmanager
def _own(kind: str) -> Iterator[Store]:
    """The cache's own store, without what SIDESTEP_BUNDLE adds."""
    store = stores.open_own(_STORES[kind])
    try:
        yield store
        if not store.usable:
            raise BundleError(f"the cache in {settings.get().directory()} cannot be used")
    finally:
        store.close()


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BundleStore]:
    bundle = BundleStore(file)
    try:
        bundle.open()
        yield bundle
    except StoreError as error:
        raise BundleError(str(error)) from error
    finally:
        bundle.close()


def _write(file: Path, entries: Iterable[Entry], report: Report) -> None:
    try:
        report.written = sum(write_bundle(file, map(report.counted, entries)).values())
    except OSError as error:
        raise BundleError(f"the bundle {file} cannot be written: {error}; choose another place for it") from error

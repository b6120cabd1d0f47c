"""Every way a call can go: which backend is asked, what is kept of a failure, who answers then, and what is counted.

The failing backends here are small real ones, registered as another package's would be.
"""

from __future__ import annotations

import dataclasses
import linecache
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from process import Counters, reload_settings
from reference import assert_close, attention
from small import Small, SmallPlan, check, registered, tensors

import sidestep
from sidestep import events, failures, plans, selection
from sidestep.backends import registry
from sidestep.cache import FailureRecord
from sidestep.decisions import Chosen, Failed, Rejected, Remembered
from sidestep.problem import AttentionProblem

sdpa: Any = sidestep.scaled_dot_product_attention
DAY = 86400.0


@pytest.fixture
def small() -> Iterator[Small]:
    """One such backend, known as "small" for the length of a test."""
    with registered(Small()) as backend:
        yield backend


def records() -> list[FailureRecord]:
    return list(failures.records())


def the_record() -> FailureRecord:
    (record,) = records()
    return record


def new_routes() -> None:
    """Drop routes and plans and open the store anew, as a new process on the same folder would."""
    sidestep.configure()
    events._said.clear()


def edit(record: FailureRecord, **changes: Any) -> None:
    failures.store().set(record.key, dataclasses.replace(record, **changes).to_bytes())


# --- hits, misses and orders ----------------------------------------------------------------------------------------


def test_a_second_call_is_a_hit(counters: Counters) -> None:
    given = tensors()
    for _ in range(3):
        check(given)
    assert (counters.calls, counters.hits, counters.selections) == (3, 2, 1)
    assert (counters.builds, counters.build_failures, counters.fallbacks) == (0, 0, 1)
    check(tensors(size=16))
    assert (counters.calls, counters.hits, counters.selections) == (4, 2, 2)


def test_what_tells_calls_apart(small: Small, counters: Counters) -> None:
    """Each of these is a route of its own, and a problem of its own is one build more."""
    given = tensors()
    variants: list[Callable[[], Any]] = [
        lambda: sdpa(*given, backends="small"),
        lambda: sdpa(*given, scale=0.5, backends="small"),
        lambda: sdpa(*given, is_causal=True, backends="small"),
        lambda: sdpa(*given, torch.ones(5, 5, dtype=torch.bool), backends="small"),
        lambda: sdpa(*given, torch.zeros(5, 5), backends="small"),
        lambda: sdpa(*given, torch.zeros(5, 1), backends="small"),
        lambda: sdpa(*tensors(grad=True), backends="small"),
        lambda: sdpa(*(t.double() for t in given), backends="small"),
        lambda: sdpa(*(t.mT.contiguous().mT for t in given), backends="small"),
    ]
    for number, variant in enumerate(variants, 1):
        variant()
        assert counters.selections == counters.builds == number
    for variant in variants:
        variant()
    assert counters.hits == counters.selections == len(variants)


def test_one_problem_is_built_once(small: Small, counters: Counters) -> None:
    """Another signature of the same problem selects, and finds the plan."""
    given = tensors()
    check(given, backends="small")
    check(given, backends="small", scale=8**-0.5)
    check(given, backends=["small", "torch"])
    assert (counters.selections, counters.builds) == (3, 1)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given]
    check(turned, backends="small")
    check([t.as_strided(t.shape, (7, *t.stride()[1:])) for t in turned], backends="small")  # of the one batch
    assert (counters.selections, counters.builds) == (5, 2)


def test_orders_nest_and_a_call_has_the_last_word(small: Small, counters: Counters) -> None:
    given = tensors()

    def asked() -> bool:
        small.asked.clear()
        check(given)
        return "forward" in small.asked

    assert not asked()
    with sidestep.use_backends("small", "torch"):
        assert asked()
        with sidestep.use_backends("torch"):
            assert not asked()
            check(given, backends="small")
            assert small.asked
        assert asked()
        with pytest.raises(ZeroDivisionError), sidestep.use_backends("torch"):
            raise ZeroDivisionError
        assert asked()
        other: list[bool] = []
        thread = threading.Thread(target=lambda: other.append(asked()))
        thread.start()
        thread.join()
        assert other == [False], "a block is its own context's"
    assert not asked()


@pytest.mark.parametrize("names", ["small", ["small"], ("small", "torch_math"), "torch", ["torch_math", "torch_flash"]])
def test_orders_per_call(names: Any, small: Small) -> None:
    check(tensors(), backends=names)
    assert bool(small.asked) == ("small" in names)


@pytest.mark.parametrize("names", ["flash", ["torch", "flash"], ["torch_math", "cuDNN"], "cudnn,torch", []])
def test_unknown_names(names: Any, counters: Counters) -> None:
    """A ValueError that lists what is known, in every way of giving an order; nothing has changed afterwards."""
    given = tensors()
    with pytest.raises(ValueError, match="torch_efficient") as caught:
        sdpa(*given, backends=names)
    assert "cudnn" in str(caught.value)
    assert "nvfuser" in str(caught.value)
    with (
        pytest.raises(ValueError, match="torch_efficient"),
        sidestep.use_backends(*([names] if names == "flash" else names)),
    ):
        pass
    if names != "cudnn,torch":  # text in a setting is a list
        with pytest.raises(ValueError, match="torch_efficient"):
            sidestep.configure(backends=names)
    assert counters.selections == 0
    check(given)


def test_the_order_of_a_process(
    small: Small, counters: Counters, monkeypatch: pytest.MonkeyPatch, lenient: None
) -> None:
    """SIDESTEP_BACKENDS, and configure(backends=...), which drops the routes of the old order."""
    monkeypatch.setenv("SIDESTEP_BACKENDS", "small, torch")
    reload_settings()
    check(tensors())
    assert "build" in small.asked
    assert (counters.selections, counters.fallbacks) == (1, 0)
    sidestep.configure(backends=["torch_math"])
    small.asked.clear()
    check(tensors())
    assert not small.asked
    assert counters.selections == 2
    sidestep.configure(backends="small")
    small.failing = {"build": NotImplementedError("not here")}
    with pytest.raises(sidestep.NoBackendError, match="not here"):
        sdpa(*tensors())
    small.failing = {"build": TypeError("a bug")}
    with pytest.raises(TypeError, match="a bug"):
        sdpa(*tensors(size=4))


def test_an_unknown_name_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTEP_BACKENDS", "cudn,torch")
    with pytest.raises(ValueError, match="unknown backend 'cudn'"):
        reload_settings()


@pytest.mark.parametrize(
    ("values", "text"),
    [({"strict": "perhaps"}, "strict"), ({"cache": "floppy"}, "cache"), ({"speed": 11}, "unknown setting speed")],
)
def test_settings_that_cannot_be(values: Any, text: str) -> None:
    with pytest.raises(sidestep.SettingError, match=text):
        sidestep.configure(**values)
    check(tensors())


def test_routes_are_bounded(monkeypatch: pytest.MonkeyPatch, counters: Counters) -> None:
    monkeypatch.setattr(selection, "MAX_ROUTES", 4)
    monkeypatch.setattr(plans, "MAX_PLANS", 2)
    for _ in range(2):
        for size in range(1, 9):
            check(tensors(size=size))
    assert len(selection.routes) == len(selection._memory) == 2  # a plan that goes takes its routes along
    assert len(selection._memory) == 2
    assert counters.selections == 16


def test_graph_plans_are_bounded(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in use, and those that wait for the garbage collector: nothing else is alive, however many there were."""
    monkeypatch.setattr(plans, "MAX_PLANS", 8)
    monkeypatch.setattr(plans, "_EVICTED_AT_MOST", 4)
    alive: weakref.WeakSet[SmallPlan] = weakref.WeakSet()
    made = SmallPlan.__init__

    def count(plan: SmallPlan, *arguments: Any) -> None:
        made(plan, *arguments)
        alive.add(plan)

    monkeypatch.setattr(SmallPlan, "__init__", count)
    for size in range(1, 65):
        query, key, value = tensors(grad=True, size=size)
        sdpa(query, key, value, backends="small").sum().backward()
        assert len(alive) <= 8 + 4 + 1
    assert len(selection._memory) == len(selection.routes) == 8


def test_threads_that_miss_together_build_once(small: Small, counters: Counters) -> None:
    barrier, wrong = threading.Barrier(8), []

    def work() -> None:
        given = tensors()
        barrier.wait()
        try:
            for _ in range(20):
                check(given, backends=["small", "torch"])
        except BaseException as error:  # noqa: BLE001 - reported below
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert counters.builds == 1
    assert counters.calls == 160
    assert counters.hits == 160 - counters.selections


# --- rules ----------------------------------------------------------------------------------------------------------


def test_a_rule_is_no_failure(small: Small, counters: Counters) -> None:
    """Nothing is built, logged as a failure or kept; alone, the reason is the error."""
    small.reasons = ("too small", "too green")
    check(tensors(), backends=["small", "torch_math"])
    assert small.asked == []
    assert (counters.fallbacks, counters.builds, counters.build_failures, counters.skipped_known_bad) == (1, 0, 0, 0)
    assert records() == []
    with pytest.raises(sidestep.NoBackendError, match="small: rejected: too small; too green") as caught:
        sdpa(*tensors(), backends="small")
    assert caught.value.decisions == (Rejected("small", ("too small", "too green")),)
    assert isinstance(caught.value, NotImplementedError)
    assert "float32 cpu, batch 1, heads 2, length 5, head_size 8, inference" in str(caught.value)


def test_the_error_gives_every_backends_reason(small: Small) -> None:
    small.failing = {"build": NotImplementedError("odd hours only")}
    with pytest.raises(sidestep.NoBackendError) as caught:
        sdpa(*tensors(), backends=["cudnn", "small", "torch_efficient"])
    kinds = [type(decision) for decision in caught.value.decisions]
    assert kinds == [Rejected, Failed, Rejected]
    for text in (
        "cudnn: rejected: device cpu",
        "small: failed (unsupported)",
        "odd hours only",
        "torch_efficient: rej",
    ):
        assert text in str(caught.value)
    assert isinstance(caught.value.__cause__, NotImplementedError)


def test_observers_are_told(small: Small) -> None:
    small.failing = {"build": NotImplementedError("no")}
    given = tensors()
    with events.observe() as seen:
        check(given, backends=["small", "torch_math"])
        check(given, backends=["small", "torch_math"])
    ((problem, decisions),) = seen
    assert problem.query.shape == (1, 2, 5, 8)
    assert [type(decision) for decision in decisions] == [Failed, Chosen]


# --- failures: kinds, stages, directions, records -------------------------------------------------------------------

STEPS = {
    "build": ("forward", "compile"),
    "forward": ("forward", "execute"),
    "backward": ("backward", "execute"),
}
ERRORS: dict[str, tuple[Callable[[], Exception], str]] = {
    "NotImplementedError": (lambda: NotImplementedError("no such thing\nsecond line"), "unsupported"),
    "RuntimeError": (lambda: RuntimeError("odd number of wheels"), "error"),
    "AssertionError": (lambda: AssertionError(), "error"),
    "TypeError": (lambda: TypeError("unpack (expected 2)"), "error"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ERRORS)
def test_a_failure_is_recorded_and_the_next_backend_answers(
    step: str, name: str, small: Small, counters: Counters, caplog: pytest.LogCaptureFixture, lenient: None
) -> None:
    make, kind = ERRORS[name]
    error = make()
    small.failing, small.cause = {step: error}, KeyError("the deeper reason")
    before = time.time()
    with caplog.at_level(logging.INFO, "sidestep"):
        check(tensors(grad=True), backends=["small", "torch_math"])
        check(tensors(grad=True), backends=["small", "torch_math"])
    record = the_record()
    assert (record.kind, record.backend, record.built_on) == (kind, "small", "local")
    assert (record.direction, record.stage) == STEPS[step]
    assert (record.exception_type, record.exception_text) == (name, str(error))
    assert (record.count, record.first_time) == (1, record.last_time)
    assert before <= record.first_time <= time.time()
    assert 0 <= record.duration < 60
    assert record.environment == {"schema": 1, "small": "1", "device": "cpu"}
    problem = AttentionProblem.from_json(record.problem)
    assert (problem.query.shape, problem.dtype, problem.training) == ((1, 2, 5, 8), "float32", True)
    assert record.key.split("/")[2:] == ["small", problem.digest()]

    # The traceback: chained, and its last frame is the line that raised.
    assert "KeyError: 'the deeper reason'" in record.traceback
    assert "direct cause" in record.traceback
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', record.traceback)
    path, line, function = frames[-1]
    assert (Path(path).name, function) == ("small.py", "refuse")
    assert "# this is the line" in linecache.getline(path, int(line))
    assert str(error).splitlines()[-1:] == [] or str(error).splitlines()[-1] in record.traceback.splitlines()[-1]

    # The counters: one selection, one failure, one fallback; the second call was a hit.
    assert (counters.calls, counters.hits, counters.selections) == (2, 1, 1)
    assert (counters.builds, counters.build_failures, counters.fallbacks, counters.skipped_known_bad) == (1, 1, 1, 0)

    # The log: one line, with the id and the command; a warning that names the place, if it is a bug.
    (said,) = [entry for entry in caplog.records if "small" in entry.getMessage()]
    assert said.levelno == (logging.WARNING if kind == "error" else logging.INFO)
    assert f"sidestep failures show {record.id}" in said.getMessage()
    assert len(said.getMessage().splitlines()) == 1
    if kind == "error":
        assert f"small.py:{line}" in said.getMessage()
        assert name in said.getMessage()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("way", ["SIDESTEP_STRICT", "backends=name", "backends=[name]", "use_backends"])
def test_a_bug_is_raised_unchanged_where_that_is_asked_for(
    step: str, way: str, small: Small, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is on record all the same; under SIDESTEP_STRICT=1 it is met again, not remembered."""
    if way != "SIDESTEP_STRICT":
        monkeypatch.setenv("SIDESTEP_STRICT", "0")
        reload_settings()
    error = AssertionError("a bug")
    small.failing = {step: error}

    def call() -> None:
        given = tensors(grad=True)
        if way == "use_backends":
            with sidestep.use_backends("small"):
                sdpa(*given)
        else:
            names = {"SIDESTEP_STRICT": ["small", "torch"], "backends=name": "small", "backends=[name]": ["small"]}
            sdpa(*given, backends=names[way])

    with pytest.raises(AssertionError) as caught:
        call()
    assert caught.value is error
    assert the_record().kind == "error"
    assert (counters.selections, counters.build_failures, counters.fallbacks) == (1, 1, 0)
    with pytest.raises(AssertionError if way == "SIDESTEP_STRICT" else sidestep.NoBackendError) as again:
        call()
    if way == "SIDESTEP_STRICT":
        assert the_record().count == 2
    else:
        assert the_record().id in str(again.value)
        assert counters.builds == 1, "a remembered failure raises, and nothing is built"


def test_a_refusal_falls_back_even_under_strict(small: Small) -> None:
    small.failing = {"build": NotImplementedError("no")}
    check(tensors(), backends=["small", "torch"])
    assert the_record().kind == "unsupported"
    with pytest.raises(sidestep.NoBackendError) as caught:
        sdpa(*tensors(size=4), backends="small")
    assert isinstance(caught.value.__cause__, NotImplementedError)


def test_a_forward_is_not_served_without_its_backward(small: Small) -> None:
    """Training is refused as a whole; inference of the same shapes is another problem and is served."""
    small.failing = {"backward": NotImplementedError("one way only")}
    with pytest.raises(sidestep.NoBackendError, match="one way only"):
        sdpa(*tensors(grad=True), backends="small")
    check(tensors(), backends="small")
    assert the_record().problem["training"] is True


# --- what is remembered ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "kind"), [(NotImplementedError("no"), "unsupported"), (ValueError("bug"), "error")])
def test_known_bad_is_passed_over(
    error: Exception, kind: str, small: Small, counters: Counters, caplog: pytest.LogCaptureFixture, lenient: None
) -> None:
    """New routes, same folder: nothing is built, nothing is logged, and the record is untouched."""
    small.failing = {"build": error}
    check(tensors(), backends=["small", "torch_math"])
    record = the_record()
    new_routes()
    counters.reset()
    small.asked.clear()
    caplog.clear()
    with caplog.at_level(logging.INFO, "sidestep"):
        check(tensors(), backends=["small", "torch_math"])
    assert small.asked == []
    assert (counters.skipped_known_bad, counters.fallbacks, counters.selections) == (1, 1, 1)
    assert counters.builds == counters.build_failures == 0
    assert the_record() == record
    assert not caplog.records
    with pytest.raises(sidestep.NoBackendError) as caught:
        sdpa(*tensors(), backends="small")
    (decision,) = caught.value.decisions
    assert isinstance(decision, Remembered)
    assert (decision.record_id, decision.kind) == (record.id, kind)


@pytest.mark.parametrize(
    ("kind", "count", "days"),
    [
        ("unsupported", 1, 30),
        ("unsupported", 7, 30),
        ("error", 1, 1),
        ("error", 2, 2),
        ("error", 4, 8),
        ("error", 9, 30),
    ],
)
def test_a_record_expires(kind: str, count: int, days: int, small: Small, counters: Counters, lenient: None) -> None:
    """A refusal after 30 days, a bug after 1, doubling to 30; the new failure goes on with the old one's history."""
    small.failing = {"build": NotImplementedError("no") if kind == "unsupported" else ValueError("bug")}
    check(tensors(), backends=["small", "torch_math"])
    record = the_record()
    now = time.time()
    edit(record, count=count, first_time=now - 100 * DAY, last_time=now - days * DAY + 60)
    new_routes()
    check(tensors(), backends=["small", "torch_math"])
    assert counters.builds == 1
    edit(record, count=count, first_time=now - 100 * DAY, last_time=now - days * DAY - 60)
    new_routes()
    check(tensors(), backends=["small", "torch_math"])
    assert counters.builds == 2
    renewed = the_record()
    assert (renewed.count, renewed.first_time) == (count + 1, now - 100 * DAY)
    assert renewed.last_time >= now


def test_an_expired_record_of_what_works_now(small: Small, counters: Counters) -> None:
    small.failing = {"build": NotImplementedError("no")}
    check(tensors(), backends=["small", "torch_math"])
    edit(the_record(), last_time=time.time() - 31 * DAY)
    new_routes()
    small.failing = {}
    check(tensors(), backends="small")
    assert counters.builds == 2


def test_another_environment_tries_again(small: Small, counters: Counters) -> None:
    """A record is valid for the versions of its backend; each environment keeps its own."""
    small.failing = {"build": NotImplementedError("no")}
    for version in ("1", "2", "1"):
        small.version = version
        new_routes()
        check(tensors(), backends=["small", "torch_math"])
    assert counters.builds == 2
    assert counters.skipped_known_bad == 1
    assert {record.environment["small"] for record in records()} == {"1", "2"}


def test_a_forgotten_record_is_tried_again(small: Small, counters: Counters) -> None:
    small.failing = {"build": NotImplementedError("no")}
    check(tensors(), backends=["small", "torch_math"])
    failures.forget(the_record())
    assert records() == []
    new_routes()
    check(tensors(), backends=["small", "torch_math"])
    assert counters.builds == 2


@pytest.mark.parametrize("damage", ["truncated", "junk", "flipped", "empty", "another problem", "another environment"])
def test_a_damaged_record_is_a_miss(damage: str, small: Small, counters: Counters) -> None:
    """And is replaced by what the new attempt shows."""
    small.failing = {"build": NotImplementedError("no")}
    check(tensors(), backends=["small", "torch_math"])
    record = the_record()
    whole = record.to_bytes()
    flipped = whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:]
    made = {"truncated": whole[:-5], "junk": b"\x80\x04junk", "flipped": flipped, "empty": b""}
    if damage in made:
        failures.store().set(record.key, made[damage])
    elif damage == "another problem":
        edit(record, problem={**record.problem, "is_causal": True})
    else:
        edit(record, environment={**record.environment, "small": "0"})
    new_routes()
    check(tensors(), backends=["small", "torch_math"])
    assert counters.builds == 2
    assert counters.skipped_known_bad == 0
    assert the_record().problem == record.problem
    new_routes()
    check(tensors(), backends=["small", "torch_math"])
    assert counters.builds == 2


def test_an_unreadable_environment_keeps_nothing(
    small: Small, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    small.version = RuntimeError("no version to be found")
    small.failing = {"build": NotImplementedError("no")}
    with caplog.at_level(logging.INFO, "sidestep"):
        check(tensors(), backends=["small", "torch_math"])
        check(tensors(), backends=["small", "torch_math"])
    assert records() == []
    assert counters.builds == 1, "within the process the route stands"
    assert "environment unreadable" in caplog.text
    new_routes()
    check(tensors(), backends=["small", "torch_math"])
    assert counters.builds == 2
    small.failing = {}
    check(tensors(size=4), backends="small")


def test_the_cache_in_memory_alone(
    small: Small, counters: Counters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SIDESTEP_CACHE=off: remembered in the process, and nothing on disk."""
    monkeypatch.setenv("SIDESTEP_CACHE", "off")
    monkeypatch.setenv("SIDESTEP_CACHE_DIR", str(tmp_path / "never"))
    reload_settings()
    small.failing = {"build": NotImplementedError("no")}
    check(tensors(), backends=["small", "torch_math"])
    check(tensors(), backends=["small", "torch_flash"])
    assert (counters.builds, counters.skipped_known_bad) == (1, 1)
    assert len(records()) == 1
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("trouble", ["a file", "damaged", "below a file"])
def test_store_trouble_is_harmless(
    trouble: str, small: Small, counters: Counters, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One warning that names the folder; the process remembers; attention is unaffected."""
    folder = tmp_path / "troubled"
    if trouble == "damaged":
        (folder / "failures").mkdir(parents=True, mode=0o700)
        folder.chmod(0o700)
        (folder / "failures" / "cache.db").write_bytes(b"not a database at all" * 100)
    else:
        folder.write_text("here is a file")
    sidestep.configure(cache_dir=folder / "deeper" if trouble == "below a file" else folder)
    small.failing = {"build": NotImplementedError("no")}
    check(tensors(), backends=["small", "torch_math"])
    check(tensors(), backends=["small", "torch_flash"])
    check(tensors(grad=True), backends=["small", "torch_flash"])
    assert (counters.builds, counters.skipped_known_bad) == (2, 1)
    (warning,) = [entry for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert str(folder) in warning.getMessage()
    assert len(records()) == 2


# --- what is not the configuration's fault --------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [MemoryError("no room"), torch.OutOfMemoryError("CUDA out of memory")], ids=repr)
def test_out_of_memory_is_not_recorded(error: Exception, step: str, small: Small, counters: Counters) -> None:
    """The next backend answers, the next call tries again, and nothing is kept."""
    small.failing = {step: error}
    for number in (1, 2):
        check(tensors(grad=True), backends=["small", "torch_math"])
        assert (counters.builds, counters.build_failures, counters.selections) == (number, number, number)
    assert records() == []
    small.failing = {}
    check(tensors(grad=True), backends=["small", "torch_math"])
    assert counters.fallbacks == 2
    assert counters.build_failures == 2
    check(tensors(grad=True), backends=["small", "torch_math"])
    assert counters.hits == 1


def test_out_of_memory_with_nobody_left_is_out_of_memory(small: Small) -> None:
    """What a training loop catches stays what it is."""
    small.failing = {"build": torch.OutOfMemoryError("CUDA out of memory")}
    with pytest.raises(torch.OutOfMemoryError):
        sdpa(*tensors(), backends="small")
    assert records() == []


def test_a_missing_library_is_known_for_the_process(
    small: Small, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    small.failing = {"build": ImportError("libsmall.so: undefined symbol")}
    with caplog.at_level(logging.INFO, "sidestep"):
        for size in (4, 8, 16):
            check(tensors(size=size), backends=["small", "torch_math"])
            check(tensors(size=size), backends=["small", "torch_math"])
    assert (counters.builds, counters.build_failures, counters.hits) == (1, 1, 3)
    assert records() == []
    assert len([entry for entry in caplog.records if "small" in entry.getMessage()]) == 1
    with pytest.raises(sidestep.NoBackendError, match="undefined symbol"):
        sdpa(*tensors(), backends="small")
    new_routes()
    small.failing = {}
    check(tensors(), backends="small")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_interrupts_pass(error: BaseException, step: str, small: Small, counters: Counters, lenient: None) -> None:
    small.failing = {step: error}
    with pytest.raises(type(error)) as caught:
        sdpa(*tensors(grad=True), backends=["small", "torch_math"])
    assert caught.value is error
    assert counters.build_failures == 0
    assert records() == []
    small.failing = {}
    check(tensors(grad=True), backends="small")
    assert counters.skipped_known_bad == 0


# --- a backward that fails when it runs -----------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "kind"), [(NotImplementedError("no"), "unsupported"), (ValueError("bug"), "error")])
def test_a_failing_backward_is_computed_by_the_next_backend(
    error: Exception, kind: str, small: Small, counters: Counters, caplog: pytest.LogCaptureFixture, lenient: None
) -> None:
    given = tensors(grad=True)
    small.late, small.failing = True, {"backward": error}
    with caplog.at_level(logging.INFO, "sidestep"):
        check(given, backends=["small", "torch_math"])
    record = the_record()
    assert (record.kind, record.direction, record.stage) == (kind, "backward", "execute")
    assert (record.backend, record.exception_text) == ("small", str(error))
    assert "# this is the line" in record.traceback
    assert AttentionProblem.from_json(record.problem).training
    assert len([entry for entry in caplog.records if record.id in entry.getMessage()]) == 1
    counters.reset()
    small.asked.clear()
    check(given, backends=["small", "torch_math"])
    assert small.asked == [], "the next call knows"
    assert (counters.skipped_known_bad, counters.fallbacks, counters.builds) == (1, 1, 0)


def test_two_backwards_of_one_forward_that_fail(small: Small, lenient: None) -> None:
    """A kept graph: each backward is computed elsewhere, on the values of the forward."""
    given = tensors(grad=True)
    small.late, small.failing = True, {"backward": ValueError("bug")}
    output = sdpa(*given, backends=["small", "torch_flash", "torch_math"])
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = torch.autograd.grad(attention(*wide).sum(), wide)
    for _ in range(2):
        for mine, theirs in zip(torch.autograd.grad(output.sum(), given, retain_graph=True), expected, strict=True):
            assert_close(mine, theirs, "gradient", gradient=True)
    assert the_record().count == 2


@pytest.mark.parametrize("why", ["strict", "one name", "dropout", "nobody left", "out of memory"])
def test_a_failing_backward_that_must_be_raised(why: str, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    if why != "strict":
        monkeypatch.setenv("SIDESTEP_STRICT", "0")
        reload_settings()
    error: Exception = MemoryError("no room") if why == "out of memory" else ValueError("bug")
    small.late, small.failing = True, {"backward": error}
    names = {"one name": ["small"], "nobody left": ["small", "cudnn"]}.get(why, ["small", "torch_math"])
    output = sdpa(*tensors(grad=True), backends=names, dropout_p=0.5 if why == "dropout" else 0.0)
    with pytest.raises(type(error)) as caught:
        output.sum().backward()
    assert caught.value is error
    assert len(records()) == (0 if why == "out of memory" else 1)


def test_a_second_derivative_of_a_graph_plan_is_refused(small: Small) -> None:
    """The first is right under create_graph=True; a second one through any input is an error, not a zero."""
    given = tensors(grad=True)
    for number in range(3):
        output = sdpa(*given, backends="small")
        grads = torch.autograd.grad(output.sum(), given, create_graph=True)
        wide = [t.detach().double().requires_grad_() for t in given]
        for mine, theirs in zip(grads, torch.autograd.grad(attention(*wide).sum(), wide), strict=True):
            assert_close(mine, theirs, "gradient", gradient=True)
        with pytest.raises(RuntimeError, match="double backward"):
            grads[number].sum().backward()


# --- entry points of the registry -----------------------------------------------------------------------------------


def test_a_registered_backend_is_known(small: Small) -> None:
    assert "small" in registry.known()
    assert registry.get("small") is small
    with pytest.raises(ValueError, match="small"):
        registry.get("nobody")


def test_for_own_names_no_other_package_is_looked_at() -> None:
    """Every process's first call would pay for it, by all that is installed."""
    registry._entry_points.cache_clear()
    assert registry.expand(["cudnn", "torch"]) == ("cudnn", "torch_flash", "torch_efficient", "torch_math")
    assert registry._entry_points.cache_info().misses == 0
    with pytest.raises(ValueError, match="unknown backend 'nobody'"):
        registry.expand(["cudnn", "nobody"])
    assert registry._entry_points.cache_info().misses == 1


def test_groups_are_spelled_out_once() -> None:
    assert registry.expand(["torch_math", "torch"]) == ("torch_math", "torch_flash", "torch_efficient")
    with pytest.raises(ValueError, match="no backend given"):
        registry.expand([])

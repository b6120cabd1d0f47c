"""Built plans: kept, loaded by the next process, dropped when of no use, bounded; and builds that are refused."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from process import Counters, reload_settings
from small import Small, SmallPlan, check, registered, tensors

import sidestep
from sidestep import events, failures, plans, selection, stores
from sidestep.backends.base import Progress, Target
from sidestep.cache import DamagedRecordError, PlanRecord, frame, plan_key, single_flight
from sidestep.decisions import Chosen, Rejected
from sidestep.problem import AttentionProblem

sdpa: Any = sidestep.scaled_dot_product_attention


class Keeping(Small):
    """Its plans can be kept: what stands for their graphs says which problem they are of."""

    serializes = True

    def build(self, problem: AttentionProblem, target: Target, progress: Progress) -> SmallPlan:
        plan = super().build(problem, target, progress)
        if self.serializes:
            progress.graphs["forward"] = problem.digest().encode() * 50
            progress.names["forward"] = "by hand"
        return plan

    def load(self, problem: AttentionProblem, target: Target, graphs: Mapping[str, bytes]) -> SmallPlan:
        self.step("load")
        assert graphs == {"forward": problem.digest().encode() * 50}
        return SmallPlan(self, problem)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeping]:
    """Such a backend, whose builds are worth keeping however quick."""
    monkeypatch.setattr(selection, "_WORTH_KEEPING_S", 0.0)
    with registered(Keeping()) as backend:
        assert isinstance(backend, Keeping)
        yield backend


def new_process() -> None:
    """Let go of all that a new process on the same folder would not have."""
    reload_settings()
    events._said.clear()


def decisions(*given: Any, **keywords: Any) -> tuple[Any, ...]:
    """What one call decides."""
    with sidestep.observe() as seen:
        sdpa(*given, **keywords)
    ((_, decided),) = seen
    return decided


def stored() -> list[str]:
    return list(stores.get("plans").keys("plan/"))


def test_the_next_process_loads(small: Keeping, counters: Counters) -> None:
    given = tensors(grad=True)
    assert [d.plan for d in decisions(*given, backends="small")] == ["built"]
    (key,) = stored()
    record = PlanRecord.from_bytes(stores.get("plans").get(key) or b"")
    assert (record.key, record.backend, record.names, record.built_on) == (
        key,
        "small",
        {"forward": "by hand"},
        "local",
    )
    assert AttentionProblem.from_json(record.problem).training
    assert record.environment["small"] == "1"
    new_process()
    small.asked.clear()
    assert [d.plan for d in decisions(*given, backends="small")] == ["loaded"]
    assert "build" not in small.asked
    check(given, backends="small")
    assert (counters.builds, counters.loads, counters.load_failures) == (1, 1, 0)
    # Another order's signature misses, and finds the plan in memory.
    assert decisions(*given, backends=["small", "torch"])[0].plan == "in memory"
    assert (counters.builds, counters.loads) == (1, 1)


def test_another_environment_builds(small: Keeping, counters: Counters) -> None:
    check(tensors(), backends="small")
    new_process()
    small.version = "2"
    check(tensors(), backends="small")
    assert (counters.builds, counters.loads) == (2, 0)
    assert len(stored()) == 2


def damage_header(record: PlanRecord) -> bytes:
    return record.to_bytes()[:-20]


DAMAGE = {
    "cut": damage_header,
    "one byte": lambda record: b"x",
    "another key": lambda record: dataclasses.replace(record, key=record.key + "0").to_bytes(),
    "another environment": lambda record: dataclasses.replace(record, environment={"small": "0"}).to_bytes(),
    "another problem": lambda record: dataclasses.replace(record, problem={**record.problem, "scale": 2.0}).to_bytes(),
    "no problem": lambda record: dataclasses.replace(record, problem={"a": 1}).to_bytes(),
    "a failure": lambda record: frame(b'{"key": "x"}'),
    "other graphs": lambda record: dataclasses.replace(record, graphs={"forward": b"no"}).to_bytes(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_cannot_be_loaded_is_built_once_more(
    damage: str, small: Keeping, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    check(tensors(), backends="small")
    (key,) = stored()
    whole = stores.get("plans").get(key) or b""
    stores.get("plans").set(key, DAMAGE[damage](PlanRecord.from_bytes(whole)))
    new_process()
    with caplog.at_level(logging.INFO, "sidestep"):
        check(tensors(), backends="small")
    assert (counters.builds, counters.loads, counters.load_failures) == (2, 0, 1)
    assert len([r for r in caplog.records if "is built anew" in r.message]) == 1
    assert not list(failures.records())
    new_process()
    check(tensors(), backends="small")  # the plan that was built anew was kept
    assert (counters.builds, counters.loads, counters.load_failures) == (2, 1, 1)


def test_a_loaded_plan_that_does_not_run_is_built_once_more(small: Keeping, counters: Counters) -> None:
    check(tensors(), backends="small")
    new_process()
    runs = iter([RuntimeError("illegal instruction")])

    def once(name: str, step: Any = small.step) -> None:
        if name == "forward" and (error := next(runs, None)):
            raise error
        step(name)

    small.step = once  # type: ignore[method-assign]
    check(tensors(), backends="small")
    assert (counters.builds, counters.loads, counters.load_failures, counters.build_failures) == (2, 0, 1, 0)
    assert not list(failures.records())


def test_only_then_is_the_configuration_bad(small: Keeping, counters: Counters, lenient: None) -> None:
    check(tensors(), backends="small")
    new_process()
    small.failing["forward"] = RuntimeError("illegal instruction")
    assert [type(d) for d in decisions(*tensors(), backends=["small", "torch_math"])][-1] is Chosen
    assert (counters.builds, counters.load_failures, counters.build_failures) == (2, 1, 1)
    (record,) = failures.records()
    assert (record.kind, record.stage) == ("error", "execute")
    assert not stored()
    new_process()
    check(tensors(), backends=["small", "torch_math"])
    assert (counters.builds, counters.skipped_known_bad) == (2, 1)


def test_want_of_memory_does_not_drop_a_plan(small: Keeping, counters: Counters) -> None:
    check(tensors(), backends="small")
    new_process()
    small.failing["load"] = torch.OutOfMemoryError("CUDA out of memory")
    check(tensors(), backends=["small", "torch_math"])
    assert (counters.builds, counters.loads, counters.load_failures) == (1, 0, 0)
    del small.failing["load"]
    check(tensors(), backends=["small", "torch_math"])
    assert (counters.builds, counters.loads) == (1, 1)


def test_a_plan_whose_loading_ends_the_process(small: Keeping, counters: Counters) -> None:
    """The plan is dropped and built anew: it says nothing of the configuration."""
    check(tensors(), backends="small")
    (key,) = stored()
    text = (
        "import faulthandler, os, signal, sys\nfrom sidestep import failures\n"
        f"with failures.intent({key!r}):\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    assert subprocess.run([sys.executable, "-c", text], stderr=subprocess.DEVNULL).returncode == -signal.SIGSEGV
    new_process()
    for _ in range(2):
        check(tensors(), backends="small")
        assert (counters.builds, counters.loads, counters.load_failures) == (2, 0, 1)
    assert not list(failures.records())


def test_plans_that_cannot_be_serialized_are_used_and_marked(small: Keeping, counters: Counters) -> None:
    small.serializes = False
    (decision,) = decisions(*tensors(), backends="small")
    assert (decision.plan, str(decision)) == ("built, not kept", "serves the call (plan built, not kept)")
    check(tensors(), backends="small")
    assert not stored()
    assert counters.builds == 1


def test_quick_builds_are_not_kept(small: Keeping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_WORTH_KEEPING_S", 1e9)
    check(tensors(), backends="small")
    assert not stored()


def test_plans_on_disk_are_bounded_and_failures_stay(
    small: Keeping, monkeypatch: pytest.MonkeyPatch, lenient: None
) -> None:
    monkeypatch.setenv("SIDESTEP_PLAN_BYTES", "100000")
    reload_settings()
    small.failing["build"] = NotImplementedError("no")
    check(tensors(size=3), backends=["small", "torch_math"])
    small.failing.clear()
    for size in range(8, 108):
        sdpa(*tensors(size=size), backends="small")
    kept = stored()
    assert 5 < len(kept) < 100
    assert (Path(os.environ["SIDESTEP_CACHE_DIR"]) / "plans" / "cache.db").stat().st_size < 150_000
    last = AttentionProblem.from_json(PlanRecord.from_bytes(stores.get("plans").get(kept[-1]) or b"").problem)
    assert last.query.shape[3] == 107
    assert len(list(failures.records())) == 1


def test_plans_in_memory_are_bounded_by_bytes(
    small: Keeping, monkeypatch: pytest.MonkeyPatch, counters: Counters
) -> None:
    monkeypatch.setattr(plans, "MAX_BYTES", 4 * 1600)
    for size in range(1, 9):
        check(tensors(size=size), backends="small")
    assert len(selection._memory) == len(selection.routes) == 4
    check(tensors(size=8), backends=["small", "torch"])
    check(tensors(size=1), backends=["small", "torch"])
    assert (counters.builds, counters.loads) == (8, 1)


@pytest.mark.parametrize("way", ["block", "variable"])
def test_refused_builds_go_to_a_backend_that_builds_nothing(
    way: str, small: Keeping, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tensors(size=8), backends=["small", "torch"])
    new_process()
    if way == "variable":
        monkeypatch.setenv("SIDESTEP_BUILD", "never")
        reload_settings()
    block = sidestep.refuse_builds() if way == "block" else sidestep.observe()
    small.asked.clear()
    with block:  # type: ignore[attr-defined]
        check(tensors(size=8), backends=["small", "torch"])  # from the cache: that is no build
        assert "load" in small.asked
        with sidestep.observe() as seen:
            for _ in range(3):
                check(tensors(size=16), backends=["small", "torch"])
        ((problem, (first, *_, last)),) = seen
        assert (type(first), type(last)) == (Rejected, Chosen)
        assert "nothing may be built" in str(first)
        check(tensors(size=16), backends="torch_math")
        with pytest.raises(sidestep.NoBackendError, match="nothing may be built"):
            sdpa(*tensors(size=16), backends="small")
    assert "build" not in small.asked
    assert (counters.builds, counters.loads, counters.refused_builds) == (1, 1, 2)
    (key,) = stores.get("plans").keys("wanted/")
    assert key == f"wanted/{problem.digest()}"
    if way == "block":
        check(tensors(size=16), backends=["small", "torch"])
        assert small.asked.count("build") == 1  # outside it is built, whatever was decided inside
        check(tensors(size=16), backends=["small", "torch"])
        assert small.asked.count("build") == 1


def test_what_was_refused_is_wanted_also_where_the_call_raises(small: Keeping, counters: Counters) -> None:
    """Nothing is lost with a selection that ends in an exception."""
    buggy = Small("buggy")
    buggy.builds, buggy.failing = False, {"forward": ValueError("a bug")}
    with registered(buggy), sidestep.refuse_builds():
        sidestep.configure(strict=True)
        for times in (1, 2):
            with pytest.raises(ValueError, match="a bug"):
                sdpa(*tensors(), backends=["small", "buggy", "torch_math"])
            assert counters.refused_builds == times
    assert len(list(stores.get("plans").keys("wanted/"))) == 1


def test_what_was_wanted_is_warmed_up(small: Keeping, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sidestep warmup --wanted` asks about it in a process that builds, and takes it off the list."""
    monkeypatch.setenv("SIDESTEP_BUILD", "never")
    reload_settings()
    for size in (8, 16):
        check(tensors(size=size), backends=["small", "torch"])
    command = [sys.executable, "-m", "sidestep", "warmup", "--wanted", "--json"]
    listed, done, again = (
        json.loads(subprocess.run([*command, *more], stdout=subprocess.PIPE, text=True, check=True).stdout)
        for more in (["--dry-run"], ["--backends", "torch"], [])
    )
    sizes = [[item["problem"]["query"]["shape"][3] for item in answer["items"]] for answer in (listed, done, again)]
    assert sizes == [[8, 16], [8, 16], []]
    assert [item["outcome"] for item in done["items"]] == ["served", "served"]


def test_one_builder_per_key_among_processes(tmp_path: Path) -> None:
    """Four processes want the same four graphs for an absent H200: each is built once in all."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "defaults: {batch: 1, heads: 2, query_length: 64, head_size: 64, dtype: float16}\n"
        "problems: [{causal: [false, true]}, {training: true}, {head_size: 65, training: true}]\n"
    )
    command = [sys.executable, "-m", "sidestep", "warmup", str(spec), "--device", "h200", "--json"]
    env = {name: value for name, value in os.environ.items() if name != "SIDESTEP_STRICT"}
    running = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]
    answers = [child.communicate(timeout=1200) for child in running]
    assert [child.returncode for child in running] == [0] * 4, answers
    stats = [json.loads(out)["stats"] for out, _ in answers]
    assert sum(one["builds"] for one in stats) == 2 + 2 + 1
    assert sum(one["loads"] for one in stats) == 3 * 3
    assert sum(one["build_failures"] for one in stats) == 1
    assert sum(one["skipped_known_bad"] for one in stats) == 3


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_graph_that_the_frontend_cannot_read_is_built_once_more(tmp_path: Path, keep: float) -> None:
    """The record is in order, and its key; what is in it is not."""
    spec = tmp_path / "spec.yaml"
    spec.write_text("problems: [{batch: 1, heads: 2, query_length: 64, head_size: 64, dtype: float16}]\n")
    command = [sys.executable, "-m", "sidestep", "warmup", str(spec), "--device", "h200", "--json"]

    def stats() -> dict[str, int]:
        answer: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        return {name: answer["stats"][name] for name in ("builds", "loads", "load_failures", "build_failures")}

    assert stats() == {"builds": 1, "loads": 0, "load_failures": 0, "build_failures": 0}
    store = stores.get("plans")
    (key,) = store.keys("plan/")
    whole = PlanRecord.from_bytes(store.get(key) or b"")
    cut = {name: graph[: int(keep * len(graph))] for name, graph in whole.graphs.items()}
    store.set(key, dataclasses.replace(whole, graphs=cut).to_bytes())
    assert stats() == {"builds": 1, "loads": 0, "load_failures": 1, "build_failures": 0}
    assert stats() == {"builds": 0, "loads": 1, "load_failures": 0, "build_failures": 0}


def test_a_killed_builder_holds_nothing_up(tmp_path: Path) -> None:
    text = (
        "import pathlib, sys, time\nfrom sidestep.cache import single_flight\n"
        f"with single_flight(pathlib.Path({str(tmp_path)!r}), 'key', 60):\n"
        "    print('held', flush=True)\n    time.sleep(600)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    order: list[str] = []
    with single_flight(tmp_path, "key", 0.05):
        order.append("did not wait for ever")
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with single_flight(tmp_path, "key", 10**9):
        order.append("got it")
    assert order == ["did not wait for ever", "got it"]


def test_where_nothing_can_be_locked_everybody_builds(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("a file in place of the folder")
    ran = []
    for folder in (tmp_path, None):
        with single_flight(folder, "key", 600):
            ran.append(folder)
    assert ran == [tmp_path, None]


def record() -> PlanRecord:
    return PlanRecord(
        key=plan_key("e", "b", "p"),
        backend="b",
        names={"forward": "one"},
        problem={},
        environment={"schema": 1},
        time=1.0,
        seconds=2.0,
        built_on="offline",
        graphs={"backward": bytes(1000), "forward": b"abc"},
    )


def test_a_record_comes_back_as_it_was() -> None:
    data = record().to_bytes()
    assert PlanRecord.from_bytes(data) == record()
    assert len(data) < 1000  # compressed
    assert record().size == 1003


def test_a_record_that_unpacks_to_more_than_it_says_is_damaged() -> None:
    header, _, packed = record().to_bytes().partition(b"\n")[2].partition(b"\n")
    for sizes in (
        {"backward": 999, "forward": 3},
        {"forward": 1004},
        {"forward": 2**40},
        {"forward": 0},
        {},
        {"a": -1},
    ):
        changed = json.dumps({**json.loads(header), "graphs": sizes}).encode()
        with pytest.raises(DamagedRecordError):
            PlanRecord.from_bytes(frame(changed + b"\n" + packed))
    assert PlanRecord.from_bytes(frame(header + b"\n" + packed)) == record()


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(PlanRecord)])
def test_every_field_is_checked(field: str) -> None:
    header, _, packed = record().to_bytes().partition(b"\n")[2].partition(b"\n")
    for changed in ({**json.loads(header), field: [1]}, {k: v for k, v in json.loads(header).items() if k != field}):
        with pytest.raises(DamagedRecordError, match=field):
            PlanRecord.from_bytes(frame(json.dumps(changed).encode() + b"\n" + packed))

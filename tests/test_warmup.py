"""Warm-ups: real cuDNN builds for an absent H200, in real children that refuse, crash, hang and die."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sidestep import failures
from sidestep.backends.cudnn_offline import PROFILE_FOLDER
from sidestep.cache import FailureRecord, failure_key
from sidestep.environment import digest
from sidestep.problem import AttentionProblem
from sidestep.spec import parse
from sidestep.warmup import default_jobs
from sidestep.worker import Worker, WorkerError

ROOT = Path(__file__).resolve().parent.parent

SPEC = """
defaults: {batch: 1, heads: 2, query_length: 128, head_size: 64, training: true}
problems:
  - {dtype: float32}                  # refused: no backward
  - {head_size: 264}                  # refused: no backward
  - {dtype: float64}                  # by rule
  - {training: false}                 # builds
  - {dropout: 1}                      # nobody is asked
  - {causal: [false, true], mask: [none, bool], training: false}    # the first was there already; one cannot be
"""
HUNG_AFTER = 4.0  # seconds, in which a busy machine still answers a small question
ARGUMENTS = ["--batch", 1, "--heads", 1, "--query-length", 4, "--head-size", 8]
CPU = "problems: [{batch: 1, heads: 2, query_length: 8, head_size: 16, device: cpu}]"


@pytest.fixture(autouse=True, scope="module")
def signals_as_a_terminal_has_them() -> Iterator[None]:
    """What nohup, or a shell's `&`, ignores, all children would ignore."""
    usual: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@dataclass
class Run:
    """What a command left."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.stdout)
        assert data["schema"] == 1
        return data

    @property
    def items(self) -> list[Any]:
        found: list[Any] = self.json["items"]
        return found


def sidestep(*arguments: object, **variables: str) -> Run:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "sidestep", *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=1200)
    return Run(done.returncode, done.stdout, done.stderr)


def spec(folder: Path, text: str) -> Path:
    """A SPEC file."""
    path = folder / "spec.yaml"
    path.write_text(text)
    return path


def cache_of(run_folder: Path) -> dict[str, str]:
    return {"SIDESTEP_CACHE_DIR": str(run_folder / "sidestep-cache")}


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, Run]:
    """A folder whose cache two processes warmed up, one after the other, and what they said."""
    folder = tmp_path_factory.mktemp("warmed")
    arguments = ("warmup", spec(folder, SPEC), "--device", "h200")
    first = sidestep(*arguments, "--json", **cache_of(folder), SIDESTEP_STRICT="1")
    second = sidestep(*arguments, "--jobs", 1, **cache_of(folder), SIDESTEP_STRICT="1")  # in the SPEC's order
    return folder, first, second


def test_refusals_are_found_and_recorded(warmed: tuple[Path, Run, Run]) -> None:
    folder, first, _ = warmed
    assert first.code == 0, first.stderr
    assert [(i["outcome"], i["served_by"], i["counters"].get("builds", 0)) for i in first.items] == [
        ("refused", None, 1),
        ("refused", None, 1),
        ("by rule", None, 0),
        ("served", "cudnn", 1),
        ("constant", None, 0),
        ("served", "cudnn", 1),
        ("served", "cudnn", 1),
    ]
    assert [i["label"] for i in first.items] == [*(f"problems[{n}]" for n in range(5)), *["problems[5]"] * 2]
    assert [[one["decision"] for one in i["decisions"]] for i in first.items[:4]] == [
        ["failed"],
        ["failed"],
        ["rejected"],
        ["chosen"],
    ]
    stats = first.json["stats"]
    assert (stats["builds"], stats["build_failures"], stats["skipped_known_bad"]) == (5, 2, 0)
    assert stats["selections"] == 6
    assert "1 combinations skipped" in first.stderr
    records = sidestep("failures", "list", "--json", **cache_of(folder)).items
    assert sorted(r["id"] for r in records) == sorted(i["decisions"][0]["record_id"] for i in first.items[:2])
    for record in records:
        assert (record["kind"], record["direction"], record["built_on"]) == ("unsupported", "backward", "offline")
        assert record["environment"]["device"] == "NVIDIA H200"
        assert "in create_execution_plans" in record["traceback"]
        assert "cudnnGraphNotSupportedError: no engine" in record["traceback"]


def test_the_second_process_builds_nothing_that_was_refused(warmed: tuple[Path, Run, Run]) -> None:
    _, first, second = warmed
    assert second.code == 0, second.stderr
    assert second.stdout.count("known bad") >= 2
    heads = [line for line in second.stdout.splitlines() if line.startswith("[")]
    assert [line.split("s  ")[0].split()[1] for line in heads] == [
        "known", "known", "by", "served", "constant", "served", "served",
    ]  # fmt: skip
    assert all("[builds 0]" in line for line in heads[:3])
    assert second.stdout.splitlines()[-1].startswith(
        "7 problems: 2 known bad, 1 by rule, 3 served, 1 constant; "
        "builds 0, loads 3, build_failures 0, skipped_known_bad 2; "
    )
    assert first.items[0]["decisions"][0]["record_id"] in second.stdout


def test_explain_for_the_profile_remembers(warmed: tuple[Path, Run, Run]) -> None:
    folder, first, _ = warmed
    shape = ["--batch", 1, "--heads", 2, "--query-length", 128, "--device", "h200", "--backends", "cudnn"]
    known = sidestep(
        "explain", *shape, "--head-size", 264, "--training", "--json", **cache_of(folder), SIDESTEP_STRICT=""
    )
    assert known.code == 0
    (decision,) = known.items
    assert decision["decision"] == "remembered"
    assert decision["record_id"] == first.items[1]["decisions"][0]["record_id"]


def test_retry_of_a_refusal_renews_its_record(warmed: tuple[Path, Run, Run]) -> None:
    folder, first, _ = warmed
    id = first.items[0]["decisions"][0]["record_id"]  # noqa: A001
    (before,) = sidestep("failures", "show", id, "--json", **cache_of(folder)).items
    tried = sidestep("failures", "retry", id, "--json", **cache_of(folder))
    assert tried.code == 1
    (item,) = tried.items
    assert (item["id"], item["forgotten"], item["decision"]["decision"]) == (id, False, "failed")
    assert tried.json["stats"]["builds"] == 1
    (after,) = sidestep("failures", "show", id, "--json", **cache_of(folder)).items
    assert after["count"] == before["count"] + 1
    assert after["first_time"] == before["first_time"]


def planted(folder: Path, first: Run, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> FailureRecord:
    """A record, in the warmed cache, that says of the problem that builds that it does not."""
    for name, value in cache_of(folder).items():
        monkeypatch.setenv(name, value)
    from conftest import reload_settings

    reload_settings()
    (like,) = failures.find(first.items[0]["decisions"][0]["record_id"])
    problem = AttentionProblem.from_json(first.items[3]["problem"])
    environment = {**like.environment, **changes.pop("environment", {})}
    key = failure_key(digest(environment), "cudnn", problem.digest())
    record = dataclasses.replace(like, key=key, problem=problem.to_json(), environment=environment, count=1, **changes)
    failures.keep(record)
    return record


def test_retry_that_succeeds_forgets(warmed: tuple[Path, Run, Run], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, first, _ = warmed
    record = planted(folder, first, monkeypatch)
    tried = sidestep("failures", "retry", record.id)
    assert (tried.code, tried.stdout) == (0, "cudnn: works now; the record is forgotten\n")
    assert sidestep("failures", "show", record.id).code == 1


def test_retry_in_another_environment_tries_nothing(
    warmed: tuple[Path, Run, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first, _ = warmed
    record = planted(folder, first, monkeypatch, environment={"cudnn_frontend": "1.0.0"})
    tried = sidestep("failures", "retry", record.id)
    assert tried.code == 1
    assert "another environment here: cudnn_frontend" in tried.stderr
    assert "(recorded: 1.0.0)" in tried.stderr
    assert sidestep("failures", "show", record.id, "--json").items[0]["count"] == 1
    failures.forget(record)


def test_retry_of_a_gpu_record_without_the_gpu_keeps_it(
    warmed: tuple[Path, Run, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first, _ = warmed
    record = planted(folder, first, monkeypatch, built_on="local")
    tried = sidestep("failures", "retry", record.id, CUDA_VISIBLE_DEVICES="")
    assert (tried.code, tried.stdout) == (1, "")
    assert "no GPU here" in tried.stderr
    assert sidestep("failures", "show", record.id, "--json").items[0]["count"] == 1
    failures.forget(record)


def test_local_problems_run_on_this_machine(tmp_path: Path) -> None:
    run = sidestep("warmup", spec(tmp_path, CPU), "--json")
    assert run.code == 0, run.stderr
    (item,) = run.items
    assert item["served_by"] == "torch_flash"
    assert [one["decision"] for one in item["decisions"]] == ["rejected", "rejected", "chosen"]
    assert run.json["stats"]["fallbacks"] == 1


def test_without_a_gpu_the_profile_is_asked_for(tmp_path: Path) -> None:
    run = sidestep("warmup", spec(tmp_path, CPU.replace("cpu", "cuda")), CUDA_VISIBLE_DEVICES="")
    assert run.code == 1
    assert "--device PROFILE (h200)" in run.stderr


def test_a_dry_run_lists_and_starts_nothing(tmp_path: Path) -> None:
    run = sidestep("warmup", spec(tmp_path, SPEC), "--dry-run", "--json")
    assert run.code == 0
    assert len(run.items) == 7
    assert [item["constant"] for item in run.items].count(True) == 1
    assert "stats" not in run.json
    assert not (tmp_path / "sidestep-cache").exists()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"CC": "/no/such/compiler"}, "need a C compiler"),
        ({"CC": "false"}, "could not make the stand-in driver"),
    ],
)
def test_a_machine_that_lacks_something_is_1_and_no_refusal(
    tmp_path: Path, variables: Mapping[str, str], said: str
) -> None:
    run = sidestep("warmup", spec(tmp_path, SPEC), "--device", "h200", **variables)
    assert run.code == 1
    assert said in run.stderr
    assert "Traceback" not in run.stderr
    assert sidestep("failures", "list", "--json").items == []


def test_a_profile_of_another_cudnn_is_1(tmp_path: Path) -> None:
    (shipped,) = PROFILE_FOLDER.glob("h200_cudnn_9.19.json")
    profile = tmp_path / "old.json"
    profile.write_text(json.dumps({**json.loads(shipped.read_text()), "cudnn": 91800}))
    run = sidestep("warmup", spec(tmp_path, SPEC), "--device", profile)
    assert run.code == 1
    assert "is for cuDNN 91800" in run.stderr
    assert sidestep("failures", "list", "--json").items == []


@pytest.mark.parametrize(
    "command",
    [
        ["warmup", None],
        ["explain", *ARGUMENTS],
        ["failures", "add", "--backend", "cudnn", "--kind", "denied", *ARGUMENTS],
    ],
)
def test_an_empty_device_is_no_device_profile(tmp_path: Path, command: list[Any]) -> None:
    path = spec(tmp_path, SPEC)
    run = sidestep(*(path if argument is None else argument for argument in command), "--device", "")
    assert (run.code, run.stdout) == (1, "")
    assert "no device profile ''" in run.stderr


def test_a_problem_that_memory_cannot_hold_does_not_end_the_others(tmp_path: Path) -> None:
    huge = "{batch: 1, heads: 1, query_length: %s, head_size: %s, device: cpu, dtype: float32}"
    entries = [huge % (2**31 - 1, 2**31 - 1), huge % (2**31 - 1, 2**18), huge % (4, 8)]
    run = sidestep("warmup", spec(tmp_path, f"problems: [{', '.join(entries)}]"), "--jobs", 1, "--json")
    assert run.code == 0
    assert [item["served_by"] for item in run.items] == [None, None, "torch_flash"]
    for item in run.items[:2]:
        assert {decision["kind"] for decision in item["decisions"]} == {"transient"}
        assert "do not fit in memory" in item["decisions"][0]["text"]
    assert sidestep("failures", "list", "--json").items == []


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("problems: [{batch: 1}]", [], "problems[0]: missing field heads"),
        (CPU.replace("batch: 1", "batch: 1, dropout: 2"), [], "problems[0]: dropout_p must be a probability"),
        ("problems: [", [], "not YAML"),
        (CPU, ["--backends", "nonsense"], "unknown backend 'nonsense'"),
        (CPU, ["--backends", "cudnn,torch", "--device", "h200"], "nothing can be learnt without the GPU"),
        (CPU, ["--timeout", "0"], "--timeout"),
        (CPU, ["--timeout", "nan"], "more than 0 and 1e9 at most"),
        (CPU, ["--timeout", "inf"], "more than 0 and 1e9 at most"),
    ],
)
def test_wrong_usage_is_2(tmp_path: Path, text: str, arguments: list[str], said: str) -> None:
    run = sidestep("warmup", spec(tmp_path, text), *arguments)
    assert (run.code, run.stdout) == (2, "")
    assert said in run.stderr


def test_warmup_runs_as_a_file(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "warmup.py"), str(spec(tmp_path, CPU)), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("problems[0]  bfloat16 cpu")


# A package of somebody else's, with backends whose builds really end, hang or break their process, at batch size 1.
ODD = """
import ctypes, os, pathlib, signal, time

class Plan:
    def infer(self, query, key, value, attn_mask):
        return query

class Odd:
    builds = True
    def __init__(self, name):
        self.name = name
    def rejects(self, problem):
        return ()
    def versions(self):
        return {"odd": 1}
    def verdict(self, error):
        return "error"
    def build(self, problem, target, progress):
        progress.begin("forward")
        progress.stage = "odd"
        if problem.query.shape[0] > 1:
            return Plan()
        return getattr(self, self.name.removeprefix("odd_"))()
    def segv(self):
        ctypes.string_at(0)
    def hang(self):
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock, as cuDNN's calls may
    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)
    def killed_once(self):
        flag = pathlib.Path(os.environ["ODD_FLAG"])
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Plan()
    def noisy(self):
        print("noise")
        os.write(1, b'{"noise": 1}\\n')
        assert os.read(0, 1) == b""
        return Plan()
    def bug(self):
        first, second = 1, 2, 3
    def meet(self):
        folder = pathlib.Path(os.environ["ODD_FLAG"])
        folder.mkdir(exist_ok=True)
        (folder / str(os.getpid())).touch()
        while len(list(folder.iterdir())) < 2:  # until another process builds too
            time.sleep(0.01)
        return Plan()
"""
MODES = ("segv", "hang", "killed", "killed_once", "noisy", "bug", "meet")
FOUR = CPU.replace("batch: 1", "batch: [2, 3, 1, 4]")


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The SPEC of a problem, and the backends odd_* installed for child processes."""
    (tmp_path / "odd_backends.py").write_text(ODD + "".join(f"def {m}(): return Odd('odd_{m}')\n" for m in MODES))
    info = tmp_path / "odd_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd_backends\nVersion: 1.0\n")
    points = "".join(f"odd_{mode} = odd_backends:{mode}\n" for mode in MODES)
    (info / "entry_points.txt").write_text(f"[sidestep.backends]\n{points}")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("ODD_FLAG", str(tmp_path / "flag"))
    return spec(tmp_path, CPU)


def only_record() -> dict[str, Any]:
    (record,) = sidestep("failures", "list", "--json").items
    assert isinstance(record, dict)
    return record


def test_a_build_that_crashes_is_recorded_and_passed_over(odd: Path) -> None:
    order = ("--backends", "odd_segv,torch_math", "--json")
    run = sidestep("warmup", odd, *order)
    assert run.code == 1
    (item,) = run.items
    assert [(d["decision"], d.get("kind")) for d in item["decisions"]] == [("failed", "crash"), ("chosen", None)]
    stats = run.json["stats"]
    assert (stats["selections"], stats["builds"], stats["build_failures"]) == (1, 1, 1)
    assert stats["skipped_known_bad"] == 0
    record = only_record()
    assert record["exception_text"] == "ended by SIGSEGV: Fatal Python error: Segmentation fault"
    assert "in segv" in record["traceback"]
    again = sidestep("warmup", odd, *order)
    assert [d["decision"] for d in again.items[0]["decisions"]] == ["remembered", "chosen"]
    assert (again.json["stats"]["builds"], again.json["stats"]["skipped_known_bad"]) == (0, 1)
    tried = sidestep("failures", "retry", record["id"], "--json")
    assert tried.code == 1
    assert (tried.items[0]["forgotten"], tried.items[0]["decision"]["kind"]) == (False, "crash")
    assert (only_record()["count"], only_record()["first_time"]) == (2, record["first_time"])


def test_a_build_that_hangs_is_killed_and_recorded_with_where(odd: Path) -> None:
    run = sidestep("warmup", odd, "--backends", "odd_hang,torch_math", "--timeout", HUNG_AFTER, "--json")
    assert run.code == 1
    (item,) = run.items
    assert [(d["decision"], d.get("kind")) for d in item["decisions"]] == [("failed", "timeout"), ("chosen", None)]
    record = only_record()
    assert (record["kind"], record["duration"], record["built_on"]) == ("timeout", HUNG_AFTER, "local")
    assert f"limit of {HUNG_AFTER:g} s" in record["exception_text"]
    assert "in hang" in record["traceback"]


@pytest.mark.parametrize(("mode", "kind"), [("segv", "crash"), ("hang", "timeout")])
def test_the_others_go_on_where_a_child_dies_or_hangs(odd: Path, tmp_path: Path, mode: str, kind: str) -> None:
    order = ("--backends", f"odd_{mode},torch_math", "--timeout", HUNG_AFTER, "--jobs", 2, "--json")
    run = sidestep("warmup", spec(tmp_path, FOUR), *order)
    assert run.code == 1
    assert [item["problem"]["query"]["shape"][0] for item in run.items] == [2, 3, 1, 4]
    assert [item["served_by"] for item in run.items] == [f"odd_{mode}", f"odd_{mode}", "torch_math", f"odd_{mode}"]
    assert run.items[2]["decisions"][0]["kind"] == kind
    assert f"in {mode}" in only_record()["traceback"]
    stats = run.json["stats"]
    assert (stats["selections"], stats["builds"], stats["build_failures"]) == (4, 4, 1)
    assert not intents(tmp_path)


def test_children_work_side_by_side_and_are_no_more_than_problems(odd: Path, tmp_path: Path) -> None:
    two = spec(tmp_path, CPU.replace("query_length: 8", "query_length: [8, 9]"))
    run = sidestep("warmup", two, "--backends", "odd_meet", "--jobs", 8, "--json")
    assert run.code == 0, run.stderr
    assert [item["served_by"] for item in run.items] == ["odd_meet"] * 2
    assert len(list((tmp_path / "flag").iterdir())) == 2


def test_the_default_is_a_child_for_each_core_and_few_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert (default_jobs("h200"), default_jobs(None)) == (64, 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 7})
    assert (default_jobs("h200"), default_jobs(None)) == (2, 2)


def intents(folder: Path) -> list[str]:
    """The builds, by their keys, that began and did not end."""
    return [path.read_text().splitlines()[0] for path in (folder / "sidestep-cache" / "intents").glob("*")]


def children_of(parent: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent:
            found.add(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("as_json", "number"),
    [(True, signal.SIGINT), (False, signal.SIGINT), (True, signal.SIGTERM), (False, signal.SIGHUP)],
)
def test_ctrl_c_ends_the_children_and_keeps_what_was_done(
    odd: Path, tmp_path: Path, as_json: bool, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "sidestep", "warmup", str(spec(tmp_path, FOUR)), *(["--json"] if as_json else [])]
    command += ["--backends", "odd_bug,odd_hang", "--jobs", "2"]
    env = {**os.environ, "SIDESTEP_STRICT": "0"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        talk = process.stderr if as_json else process.stdout
        assert talk is not None
        heads: list[str] = []
        while len(heads) < 3:  # all but the one that hangs
            line = talk.readline()
            assert line, "it ended by itself"
            heads += [line] if line.startswith("[") else []
        while not any("/odd_hang/" in key for key in intents(tmp_path)):
            time.sleep(0.01)
        children = children_of(process.pid)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 128 + number
    assert len(children) == 2
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert "interrupted: 3 of 4 problems done" in stderr
    assert "Traceback" not in stderr
    if as_json:
        data = json.loads(stdout)
        assert [item["problem"]["query"]["shape"][0] for item in data["items"]] == [2, 3, 4]
        assert data["error"]["type"] == ("KeyboardInterrupt" if number == signal.SIGINT else "Interrupted")
        assert data["stats"]["selections"] == 3
    else:
        assert stdout.splitlines()[-1].startswith("3 problems: 3 served; builds 3, ")
    assert only_record()["kind"] == "error"  # found before the hang
    assert not intents(tmp_path)  # to end a build is not a crash of it
    if number != signal.SIGINT:
        return
    again = sidestep(
        "warmup", tmp_path / "spec.yaml", *command[-4:], "--timeout", HUNG_AFTER, "--json", SIDESTEP_STRICT="0"
    )
    assert [(d["decision"], d["kind"]) for d in again.items[2]["decisions"]] == [
        ("remembered", "error"),
        ("failed", "timeout"),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_retry_that_is_interrupted_keeps_the_record(odd: Path, tmp_path: Path, number: signal.Signals) -> None:
    run = sidestep(
        "warmup", spec(tmp_path, CPU), "--backends", "odd_hang,torch_math", "--timeout", HUNG_AFTER, "--json"
    )
    assert run.code == 1
    before = only_record()
    command = [sys.executable, "-m", "sidestep", "failures", "retry", before["id"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not intents(tmp_path):
            time.sleep(0.01)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=600)
    assert (process.returncode, stdout, stderr) == (128 + number, "", f"interrupted ({number.name})\n")
    assert only_record() == before
    assert not intents(tmp_path)


def test_a_terminal_has_a_bar_and_its_ctrl_c_works(odd: Path, tmp_path: Path) -> None:
    """Typed at the terminal, Ctrl-C reaches the foreground process group as a whole."""
    command = [sys.executable, "-m", "sidestep", "warmup", str(spec(tmp_path, FOUR)), "--backends", "odd_hang"]
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [*command, "--jobs", "2"])
    shown = b""
    while b"3/4" not in shown or not intents(tmp_path):
        shown += os.read(terminal, 2**16)  # the bar is drawn some times a second
    children = children_of(process)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # the terminal's other side is closed
        while part := os.read(terminal, 2**16):
            shown += part
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert len(children) == 2
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert b"\xe2\x94\x81" in shown  # the bar
    assert b"interrupted: 3 of 4 problems done" in shown
    assert b"Traceback" not in shown
    assert not intents(tmp_path)


def test_work_that_cannot_be_done_here_reports_what_was_done(tmp_path: Path) -> None:
    mixed = spec(tmp_path, CPU.replace("device: cpu", "device: [cpu, cuda]").replace("batch: 1", "batch: [2, 3]"))
    run = sidestep("warmup", mixed, "--backends", "torch_math", "--jobs", 1, "--json", CUDA_VISIBLE_DEVICES="")
    assert run.code == 1
    assert [(i["problem"]["query"]["shape"][0], i["problem"]["device"]) for i in run.items] == [(2, "cpu"), (3, "cpu")]
    assert run.json["error"]["type"] == "WorkerError"
    assert "no GPU here" in run.json["error"]["text"]
    assert "Error: no GPU here" in run.stderr


def test_a_stopped_worker_starts_no_child() -> None:
    before = children_of(os.getpid())  # of tests that ran earlier in this process
    worker = Worker()
    worker.stop()
    with pytest.raises(WorkerError, match="stopped"):
        worker.ask(parse(CPU).items[0].problem)
    assert children_of(os.getpid()) <= before


def test_a_bug_in_strict_mode_ends_the_children_and_reports_what_was_done(odd: Path, tmp_path: Path) -> None:
    order = ("--backends", "odd_bug", "--jobs", 2, "--json")
    run = sidestep("warmup", spec(tmp_path, FOUR), *order, SIDESTEP_STRICT="1")
    assert run.code == 1
    assert run.json["error"]["type"] == "ValueError"
    done = [item["problem"]["query"]["shape"][0] for item in run.items]
    assert 1 not in done
    assert done
    assert run.json["stats"]["selections"] == len(done)
    assert not intents(tmp_path)


def test_problems_of_the_cpu_are_left_out_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    both = spec(tmp_path, CPU.replace("device: cpu", "device: [cpu, cuda], training: [false, true]"))
    run = sidestep("warmup", both, "--device", "h200", "--dry-run", "--json")
    assert run.code == 0
    assert [item["problem"]["device"] for item in run.items] == ["cuda", "cuda"]
    assert run.stderr.count("2 problems of device cpu skipped") == 1
    assert len(sidestep("warmup", both, "--dry-run", "--json").items) == 4


def test_the_second_death_without_a_dump_is_a_crash(odd: Path) -> None:
    run = sidestep("warmup", odd, "--backends", "odd_killed", "--json")
    assert run.code == 1
    assert [(d["decision"], d["kind"]) for d in run.items[0]["decisions"]] == [("failed", "crash")]
    assert run.json["stats"]["build_failures"] == 2
    assert only_record()["exception_text"] == "ended by SIGKILL: 2 builds ended their process"


def test_one_death_by_sigkill_says_nothing(odd: Path) -> None:
    run = sidestep("warmup", odd, "--backends", "odd_killed_once", "--json")
    assert run.code == 0, run.stderr
    assert run.items[0]["served_by"] == "odd_killed_once"
    assert sidestep("failures", "list", "--json").items == []


def test_without_a_cache_a_death_ends_the_work(odd: Path) -> None:
    run = sidestep("warmup", odd, "--backends", "odd_segv", SIDESTEP_CACHE="off")
    assert run.code == 1
    assert "did not (ended by SIGSEGV)" in run.stderr
    assert "SIDESTEP_CACHE" in run.stderr


def test_what_a_build_prints_does_not_disturb(odd: Path) -> None:
    run = sidestep("warmup", odd, "--backends", "odd_noisy", "--json")
    assert run.code == 0, run.stderr
    assert run.items[0]["served_by"] == "odd_noisy"
    assert '{"noise": 1}' in run.stderr


def test_a_bug_is_raised_in_strict_mode_and_reported_as_it_was(odd: Path) -> None:
    run = sidestep("warmup", odd, "--backends", "odd_bug,torch_math", "--json", SIDESTEP_STRICT="1")
    assert run.code == 1
    assert run.items == []
    error = run.json["error"]
    assert error["type"] == "ValueError"
    assert error["text"].startswith("too many values to unpack")
    assert error["traceback"] in run.stderr
    assert error["traceback"].startswith("Traceback (most recent call last):\n")
    last_frame = error["traceback"][error["traceback"].rindex("  File ") :]
    assert "odd_backends.py" in last_frame
    assert "first, second = 1, 2, 3" in last_frame
    assert only_record()["traceback"].endswith(last_frame)


def test_a_bug_falls_back_with_a_warning_and_is_1(odd: Path) -> None:
    run = sidestep("warmup", odd, "--backends", "odd_bug,torch_math", "--json", SIDESTEP_STRICT="0")
    assert run.code == 1
    assert run.items[0]["outcome"] == "served"
    assert [(d["decision"], d.get("kind")) for d in run.items[0]["decisions"]] == [
        ("failed", "error"),
        ("chosen", None),
    ]
    (warning,) = [line for line in run.stderr.splitlines() if "bug" in line and not line.startswith("[")]
    assert "odd_backends.py:" in warning
    assert "too many values to unpack" in warning
    assert only_record()["id"] in warning


def test_a_kernel_that_does_not_compile_is_a_refusal(tmp_path: Path) -> None:
    """CuDNN 9.19's own source for float32 with dropout: NVRTC works, so this is known, and not tried again."""
    path = spec(
        tmp_path,
        "problems: [{batch: 1, heads: 1, query_length: 128, head_size: 32, dtype: float32, dropout: 0.1}]",
    )
    first, second = (sidestep("warmup", path, "--device", "h200", "--json", **cache_of(tmp_path)) for _ in range(2))
    assert [run.items[0]["outcome"] for run in (first, second)] == ["refused", "known bad"]
    (decision,) = first.items[0]["decisions"]
    assert decision["kind"] == "unsupported"
    assert "runtime kernel compilation failure" in decision["text"]
    assert (first.json["stats"]["builds"], second.json["stats"]["builds"]) == (1, 0)

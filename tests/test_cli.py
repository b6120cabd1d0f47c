"""The commands that run nothing: failures, explain, settings; their output, JSON and exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click.testing
import pytest

import sidestep
from sidestep import cli, failures, stores
from sidestep.cache import FailureRecord, failure_key
from sidestep.decisions import Chosen
from sidestep.problem import AttentionProblem, Layout
from sidestep.worker import Worker, WorkerError

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ["--batch", "2", "--heads", "4", "--query-length", "8", "--head-size", "16"]


def run(*arguments: str) -> click.testing.Result:
    """The command in this process."""
    return click.testing.CliRunner().invoke(cli.main, arguments, prog_name="sidestep")


def items(*arguments: str) -> list[Any]:
    """What `--json` gives; the shape of the whole is looked at here."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert set(data) >= {"schema", "items"}
    assert data["schema"] == 1
    assert isinstance(data["items"], list)
    return data["items"]


def record(number: int, kind: Any = "unsupported", **changes: Any) -> FailureRecord:
    """A record as selection writes it, of a problem of its own."""
    layout = Layout.of((1, 1, number + 1, 64))
    problem = AttentionProblem("cuda", "float32", layout, layout, layout, scale=0.125, training=True)
    made = FailureRecord(
        key=failure_key("0" * 16, "cudnn", problem.digest()),
        kind=kind,
        backend="cudnn",
        direction="backward",
        stage="check_support",
        exception_type="cudnn.cudnnGraphNotSupportedError",
        exception_text="No valid engine configs\nsecond line",
        traceback=f'Traceback (most recent call last):\n  File "x.py", line {number}, in f\nsome.Error: text\n',
        problem=problem.to_json(),
        environment={"cudnn": 91900, "device": "NVIDIA H200"},
        first_time=1_700_000_000.0,
        last_time=1_700_000_000.0 + number,
        count=1,
        duration=0.25,
        built_on="offline",
    )
    return dataclasses.replace(made, **changes)


def keep(*made: FailureRecord) -> list[str]:
    """Store records; return their ids."""
    for one in made:
        failures.keep(one)
    return [one.id for one in made]


def test_list_newest_first_and_filtered() -> None:
    a, b, c, d = keep(
        record(0), record(1, "error"), record(2, backend="nvfuser", key="failure/1/nvfuser/2"), record(3, "denied")
    )
    assert [item["id"] for item in items("failures", "list")] == [d, c, b, a]
    assert [item["id"] for item in items("failures", "list", "--last", "2")] == [d, c]
    assert [item["id"] for item in items("failures", "list", "--kind", "error")] == [b]
    assert [item["id"] for item in items("failures", "list", "--backend", "cudnn", "--last", "2")] == [d, b]
    assert items("failures", "list", "--kind", "wrong") == []


def test_list_for_people_has_one_line_a_record_in_a_pipe() -> None:
    ids = keep(*map(record, range(3)))
    result = run("failures", "list")
    lines = result.stdout.splitlines()
    assert " ".join(lines[0].split()) == "ID KIND BACKEND DIRECTION COUNT LAST (UTC) PROBLEM EXCEPTION"
    assert [line.split()[0] for line in lines[1:]] == ids[::-1]
    assert "float32 cuda, batch 1, heads 1, length 3, head_size 64, training" in lines[1]
    assert "2023-11-14T22:13 " in lines[1]
    assert "cudnnGraphNotSupportedError: No valid engine configs" in lines[1]
    assert "\x1b" not in result.stdout


def test_a_list_begins_with_the_reason_and_not_with_the_frontends_own_words() -> None:
    said = "no engine proposed a plan for this graph (the backend declined: head size 264 (of 256 at most))"
    keep(record(0, exception_text=said), record(1, exception_text="A Reason: because"), record(2, exception_text=""))
    exceptions = [line.partition("training")[2].strip() for line in run("failures", "list").stdout.splitlines()[1:]]
    name = "cudnnGraphNotSupportedError"
    assert exceptions == [f"cudnn.{name}", f"{name}: because", f"{name}: head size 264 (of 256 at most)"]


def shown_at(columns: int, *arguments: str) -> str:
    """What a terminal of that width shows, without colours."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ.pop("COLUMNS", None)
        os.execv(sys.executable, [sys.executable, "-c", SIZED, str(columns), *arguments])
    shown = b""
    with contextlib.suppress(OSError):  # the terminal's other side is closed
        while part := os.read(terminal, 2**16):
            shown += part
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n")


SIZED = """
import fcntl, struct, sys, termios
fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, int(sys.argv[1]), 0, 0))
from sidestep.cli import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize("columns", [1, 20, 80, 160])
def test_whatever_the_width_of_a_terminal_everything_can_be_read(columns: int) -> None:
    (one,) = keep(record(0))
    shown = shown_at(columns, "failures", "list")
    # Without room for both, problem and exception have lines of their own; where they wrap, words stay in order.
    for text in (one, "unsupported", "2023-11-14T22:13"):
        assert text in shown
    for text in ("float32 cuda, batch 1", "No valid engine configs"):
        assert text in (shown if columns < 160 else " ".join(shown.split())), shown
    if columns == 80:
        assert [len(line) - len(line.lstrip()) for line in shown.splitlines()] == [0, 4, 4] * 2


def printed(redirect: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    command = ["bash", "-c", f'"$0" -m sidestep failures list {redirect}', sys.executable]
    return subprocess.run(command, capture_output=True, env={**os.environ, **variables})


def test_what_the_output_cannot_hold_is_escaped() -> None:
    keep(record(0, exception_text="no engine \u2014 none"))
    done = printed("", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"no engine \\u2014 none" in done.stdout
    assert "no engine \u2014 none".encode() in printed("", PYTHONIOENCODING="utf-8").stdout


def test_closed_and_full_outputs() -> None:
    keep(record(0))
    for closed in (">&-", ">&- 2>&-", ">&- 2>&- <&-"):
        done = printed(closed)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), closed
    done = printed(">/dev/full")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"Error: the output cannot be written (No space left on device); what was done stays done\n"
    assert printed(">/dev/full 2>/dev/full").returncode == 1


def test_an_empty_list_says_where_it_looked(tmp_path: Path) -> None:
    result = run("failures", "list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert str(tmp_path / "sidestep-cache") in result.stderr


def test_show_is_everything() -> None:
    (one,) = keep(record(6, count=3))
    text = run("failures", "show", one[:6]).stdout
    kept = record(6)
    for part in (
        one,
        "unsupported",
        "backward, check_support, after 0.25 s",
        "float32 cuda, batch 1, heads 1, length 7, head_size 64, training",
        "No valid engine configs\nsecond line",
        "2023-11-14T22:13:20+00:00",
        "2023-11-14T22:13:26+00:00 (count 3)",
        "after 2023-12-14T22:13:26+00:00",
        "cudnn 91900, device NVIDIA H200",
        json.dumps(kept.problem, sort_keys=True),
        kept.traceback.strip(),
        f"sidestep failures retry {one}",
        f"sidestep failures forget {one}",
    ):
        assert part in text
    (item,) = items("failures", "show", one)
    assert item["traceback"] == kept.traceback
    assert item["problem"] == json.loads(json.dumps(kept.problem))
    assert item["retry_time"] == "2023-12-14T22:13:26+00:00"
    assert {field.name for field in dataclasses.fields(FailureRecord)} | {"id", "retry_time"} == set(item)


@pytest.mark.parametrize(("kind", "said"), [("denied", "never, a person"), ("crash", "when the environment changes")])
def test_show_says_when_no_time_is_set(kind: str, said: str) -> None:
    (one,) = keep(record(1, kind))
    assert f"tried again  {said}" in run("failures", "show", one).stdout
    assert items("failures", "show", one)[0]["retry_time"] is None


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    (one,) = keep(record(1, exception_text="\x1b]0;title\x07 [bold]x[/bold] :smile:", traceback="a\x1b[31mb\rc\n"))
    for command in (["list"], ["show", one]):
        text = run("failures", *command).stdout
        assert not {"\x1b", "\x07", "\r"} & set(text)
        assert "[bold]x[/bold] :smile:" in text


def test_times_beyond_the_calendar_are_shown() -> None:
    (one,) = keep(record(1, last_time=9e11))
    assert "since 1970" in run("failures", "show", one).stdout


@pytest.mark.parametrize("command", ["show", "forget", "retry"])
@pytest.mark.parametrize("given", ["ffffffffffff", "", "nonsense"])
def test_an_unknown_id_is_1(command: str, given: str) -> None:
    keep(record(1))
    result = run("failures", command, given)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"no record {given!r}" in result.stderr
    assert len(items("failures", "list")) == 1


def test_an_ambiguous_id_is_1_and_lists_the_candidates() -> None:
    ids = keep(*map(record, range(17)))  # 16 first digits
    digit = next(one[0] for one in ids if sum(other[0] == one[0] for other in ids) > 1)
    result = run("failures", "show", digit)
    assert result.exit_code == 1
    assert "ambiguous" in result.stderr
    assert all(one in result.stderr for one in ids if one[0] == digit)


def test_forget() -> None:
    ids = keep(record(0), record(1, "error"), record(2, "error"), record(3))
    assert run("failures", "forget", ids[0][:8], ids[1]).exit_code == 0
    assert [item["id"] for item in items("failures", "list")] == [ids[3], ids[2]]
    assert items("failures", "forget", "--kind", "error") == [{"id": ids[2]}]
    assert items("failures", "forget", "--all") == [{"id": ids[3]}]
    assert items("failures", "list") == []
    assert run("failures", "forget", "--all").exit_code == 0


def test_forget_forgets_nothing_when_one_id_is_wrong() -> None:
    (one,) = keep(record(0))
    assert run("failures", "forget", one, "ffff").exit_code == 1
    assert len(items("failures", "list")) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["failures", "forget"],
        ["failures", "forget", "abc", "--all"],
        ["failures", "list", "--kind", "nonsense"],
        ["failures", "list", "--last", "0"],
        ["failures", "show"],
        ["nonsense"],
        ["warmup", "/no/such/file.yaml"],
        ["explain"],
        ["explain", *SHAPE, "--dtype", "half"],
        ["explain", *SHAPE, "--mask", "bool", "--causal"],
        ["explain", *SHAPE, "--mask", "bool", "--mask-shape", "1,1"],
        ["explain", *SHAPE, "--kv-heads", "3"],
        ["explain", *SHAPE, "--backends", "nonsense"],
    ],
)
def test_wrong_usage_is_2_on_stderr(arguments: list[str]) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr


@pytest.mark.parametrize("kind", ["wrong", "denied"])
def test_retry_leaves_alone_what_a_build_cannot_refute(kind: str) -> None:
    (one,) = keep(record(0, kind))
    result = run("failures", "retry", one)
    assert result.exit_code == 1
    assert f"sidestep failures forget {one}" in result.stderr
    assert items("failures", "show", one)[0]["kind"] == kind


@pytest.mark.parametrize("kind", ["unsupported", "error", "crash", "timeout"])
def test_a_record_is_there_all_the_time_that_it_is_tried_again(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Killed in the middle, a retry loses nothing; ended by an exception, it changes nothing."""
    (one,) = keep(record(0, kind))
    (made,) = failures.find(one)
    seen: list[FailureRecord] = []

    def ask(*_: Any, **__: Any) -> None:
        seen.extend(failures.find(one))
        raise WorkerError("no child today")

    monkeypatch.setattr(Worker, "ask", ask)
    assert run("failures", "retry", one, "--device", "h200").exit_code == 1
    assert [dataclasses.replace(during, last_time=made.last_time) for during in seen] == [made]
    assert not seen[0].is_valid(made.last_time)  # so that it is tried
    assert failures.find(one) == [made]


def test_retry_needs_the_profile_of_the_recorded_gpu() -> None:
    (one,) = keep(record(0, environment={"device": "NVIDIA B200", "cudnn": 91900}))
    result = run("failures", "retry", one)
    assert result.exit_code == 1
    assert "no device profile is shipped" in result.stderr
    assert "--device" in result.stderr
    assert items("failures", "show", one)[0]["count"] == 1


def test_a_cache_that_cannot_be_used_is_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "file"
    place.write_text("")
    sidestep.configure(cache_dir=place)
    for command in (["list"], ["show", "abc"], ["forget", "--all"]):
        stores.reset()
        result = run("failures", *command)
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"the cache in {place} cannot be used" in result.stderr


def test_without_a_cache_the_list_is_empty_and_says_why() -> None:
    sidestep.configure(cache="off")
    result = run("failures", "list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "SIDESTEP_CACHE=off" in result.stderr


def test_a_bad_setting_is_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sidestep", "settings"],
        env={**os.environ, "SIDESTEP_CACHE": "nonsense"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "SIDESTEP_CACHE='nonsense': expected 'disk' or 'off'" in done.stderr


def test_settings(tmp_path: Path) -> None:
    rows = {item["variable"]: item for item in items("settings")}
    assert rows["SIDESTEP_BACKENDS"]["value"] == ["cudnn", "nvfuser", "torch"]
    assert rows["SIDESTEP_CACHE_DIR"]["value"] == str(tmp_path / "sidestep-cache")
    assert rows["SIDESTEP_STRICT"]["text"] == "1"
    text = run("settings").stdout
    assert all(name in text for name in rows)


def test_listing_imports_neither_torch_nor_cudnn() -> None:
    (one, two) = keep(record(0), record(1))
    script = f"""
import json, sys
from sidestep.cli import main
for arguments in (["list"], ["show", "{one}"], ["forget", "{two}"]):
    main(["failures", *arguments], standalone_mode=False)
    main(["failures", "list", "--json"], standalone_mode=False)
heavy = sorted(m for m in ("torch", "cudnn", "numpy", "yaml", "cuda") if m in sys.modules)
print(json.dumps(heavy))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert [item["id"] for item in items("failures", "list")] == [one]


def test_inspect_failures_runs_as_a_file() -> None:
    (one,) = keep(record(0))
    script = [sys.executable, str(ROOT / "scripts" / "inspect_failures.py")]
    done = subprocess.run([*script, "list", "--json"], capture_output=True, text=True, check=True)
    assert [item["id"] for item in json.loads(done.stdout)["items"]] == [one]
    assert subprocess.run([*script, "show", "ffff"], capture_output=True).returncode == 1
    assert subprocess.run([*script, "nonsense"], capture_output=True).returncode == 2


def test_explain_on_the_cpu_runs_nothing() -> None:
    before = sidestep.stats()
    decisions = items("explain", *SHAPE, "--device", "cpu", "--dtype", "float32")
    assert [(one["backend"], one["decision"]) for one in decisions] == [
        ("cudnn", "rejected"),
        ("nvfuser", "rejected"),
        ("torch_flash", "untried"),
        ("torch_efficient", "rejected"),
        ("torch_math", "untried"),
    ]
    assert decisions[3]["reasons"] == ["device cpu: runs on cuda"]
    assert sidestep.stats() == before
    text = run("explain", *SHAPE, "--device", "cpu", "--backends", "torch_math").stdout
    assert "torch_math  untried: rules pass" in text


def test_explain_says_when_no_backend_is_asked() -> None:
    assert items("explain", *SHAPE, "--device", "cpu", "--dropout", "1") == []
    assert "no backend is asked" in run("explain", *SHAPE, "--device", "cpu", "--key-length", "0").stderr


def test_explain_for_an_unknown_profile_is_1() -> None:
    result = run("explain", *SHAPE, "--device", "nonsense")
    assert result.exit_code == 1
    assert "nonsense" in result.stderr


def test_observe_collects_decisions_on_the_slow_path_only() -> None:
    import torch

    query = torch.randn(1, 2, 8, 16)
    with sidestep.observe() as seen:
        for _ in range(3):
            sidestep.scaled_dot_product_attention(query, query, query, backends=["cudnn", "torch_math"])
    sidestep.scaled_dot_product_attention(query, query, query, backends=["torch_math"])
    ((problem, decisions),) = seen
    assert problem.query.shape == (1, 2, 8, 16)
    assert [type(one).__name__ for one in decisions] == ["Rejected", "Chosen"]
    assert decisions[1].backend == "torch_math"


def test_child_settings_are_this_process_settings(tmp_path: Path) -> None:
    from sidestep.settings import Settings, get

    sidestep.configure(backends=["torch_math", "cudnn"], cache_dir=tmp_path, strict=False)
    assert Settings.from_environ(get().to_environ()) == get()
    sidestep.configure(cache_dir=None, strict=True)
    assert Settings.from_environ(get().to_environ()) == get()


# --- failures add -----------------------------------------------------------------------------------------------------


def test_a_person_forbids_a_configuration() -> None:
    """It is passed over, never tried again, and allowed again when forgotten."""
    import torch

    given = [torch.randn(2, 4, 8, 16) for _ in range(3)]
    sdpa: Any = sidestep.scaled_dot_product_attention
    denied = [*SHAPE, "--dtype", "float32", "--device", "cpu"]
    done = run("failures", "add", "--backend", "torch_flash", "--reason", "too loud", *denied)
    assert done.exit_code == 0, done.output
    assert "torch_flash is not asked any more: float32 cpu, batch 2" in done.stderr
    (made,) = failures.records()
    assert done.stdout.strip() == made.id
    assert (made.kind, made.backend, made.exception_text) == ("denied", "torch_flash", "too loud")
    assert made.retry_time() is None
    (decision,) = items("explain", *denied, "--backends", "torch_flash")
    assert (decision["decision"], decision["kind"], decision["record_id"]) == ("remembered", "denied", made.id)
    with sidestep.observe() as seen:
        sdpa(*given, backends=["torch_flash", "torch_math"])
    assert [one.backend for one in seen[0][1] if isinstance(one, Chosen)] == ["torch_math"]
    with pytest.raises(sidestep.NoBackendError, match="too loud"):
        sdpa(*given, backends="torch_flash")
    sdpa(*(t[:1] for t in given), backends="torch_flash")  # another configuration
    assert "too loud" in run("failures", "show", made.id).stdout
    assert run("failures", "retry", made.id).exit_code == 1
    assert run("failures", "forget", made.id).exit_code == 0
    sidestep.configure()
    sdpa(*given, backends="torch_flash")


def test_what_is_forbidden_for_an_absent_gpu_is_valid_on_it() -> None:
    """Under the key that a build for the profile has."""
    (made,) = items("failures", "add", "--backend", "cudnn", "--kind", "denied", "--device", "h200", *SHAPE)
    assert (made["environment"]["device"], made["built_on"]) == ("NVIDIA H200", "offline")
    assert made["exception_text"] == "a person said so"
    (decision,) = items("explain", *SHAPE, "--device", "h200", "--backends", "cudnn")
    assert (decision["decision"], decision["kind"]) == ("remembered", "denied")
    (other,) = items("explain", *SHAPE, "--causal", "--device", "h200", "--backends", "cudnn")
    assert other["decision"] == "untried"


def test_without_the_gpu_or_its_profile_nothing_can_be_forbidden_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("failures", "add", "--backend", "cudnn", "--kind", "denied", "--device", "cuda", *SHAPE)
    assert done.exit_code == 1
    assert "environment" in done.stderr
    assert "--device PROFILE" in done.stderr
    assert not list(failures.records())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kind", "denied", *SHAPE],
        ["--backend", "cudnn", *SHAPE, "--key-length", "0"],
        ["--backend", "torch", "--kind", "denied", *SHAPE],
        ["--backend", "nobody", "--kind", "denied", *SHAPE],
        ["--backend", "cudnn", "--kind", "error", *SHAPE],
        ["--backend", "cudnn", "--kind", "denied", *SHAPE[2:]],
        ["--backend", "cudnn", "--kind", "denied", *SHAPE, "--dtype", "int8"],
    ],
    ids=lambda arguments: " ".join(arguments[:4]),
)
def test_wrong_usage_of_add_is_2(arguments: list[str]) -> None:
    done = run("failures", "add", *arguments, "--device", "cpu")
    assert (done.exit_code, done.stdout) == (2, "")
    assert not list(failures.records())

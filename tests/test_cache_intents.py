"""Builds that kill their process: real deaths of real processes."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from sidestep.cache import Intents

DEATHS = {
    "segv": ("import ctypes; ctypes.string_at(0)", signal.SIGSEGV, "Segmentation fault"),
    "abrt": ("import os; os.abort()", signal.SIGABRT, "Aborted"),
    "fpe": ("import os; os.kill(os.getpid(), 8)", signal.SIGFPE, "Floating point exception"),
    "bus": ("import os; os.kill(os.getpid(), 7)", signal.SIGBUS, "Bus error"),
    "ill": ("import os; os.kill(os.getpid(), 4)", signal.SIGILL, "Illegal instruction"),
}
KILL = "import os; os.kill(os.getpid(), 9)"


def die(path, key, code, before=""):
    """Run `code` inside an intent in a child; return its exit status and stderr."""
    program = (
        f"import pathlib, sys\nfrom sidestep.cache import Intents\n{before}\n"
        f"def deadly_build():\n    {code}\n"
        "with Intents(pathlib.Path(sys.argv[1])).begin(sys.argv[2]):\n    deadly_build()\n"
    )
    child = subprocess.run([sys.executable, "-c", program, str(path), key], stderr=subprocess.PIPE, text=True)
    return child.returncode, child.stderr


def files(path):
    return [file.name for file in (path / "intents").iterdir()]


@pytest.mark.parametrize("death", DEATHS)
def test_a_fatal_signal_is_a_crash(tmp_path, death):
    code, number, name = DEATHS[death]
    began = time.time()
    status, stderr = die(tmp_path, "failure/e/cudnn/p", code)
    assert status == -number
    assert stderr == ""  # the handler wrote to the intent
    intents = Intents(tmp_path)
    crash = intents.find_crash("failure/e/cudnn/p")
    assert crash is not None
    assert (crash.key, crash.count) == ("failure/e/cudnn/p", 1)
    assert crash.dump.startswith(f"Fatal Python error: {name}\n")
    assert "deadly_build" in crash.dump
    assert began - 2 <= crash.time <= time.time() + 2
    assert intents.find_crash("failure/e/cudnn/p") == crash
    assert intents.find_crash("another") is None
    intents.clear("failure/e/cudnn/p")
    assert intents.find_crash("failure/e/cudnn/p") is None
    assert files(tmp_path) == []


def test_the_second_kill_is_a_crash(tmp_path):
    intents = Intents(tmp_path)
    assert die(tmp_path, "k", KILL)[0] == -9
    assert intents.find_crash("k") is None
    assert intents.find_crash("k") is None  # looking does not count
    assert die(tmp_path, "k", KILL)[0] == -9
    crash = intents.find_crash("k")
    assert crash is not None
    assert (crash.key, crash.dump, crash.count) == ("k", "", 2)
    die(tmp_path, "k", DEATHS["segv"][0])
    crash = intents.find_crash("k")
    assert crash is not None
    assert crash.count == 3
    assert "Segmentation fault" in crash.dump


@pytest.mark.parametrize("code", ["pass", "raise ValueError", "sys.exit(3)", "raise KeyboardInterrupt"])
def test_a_build_that_ends_clears_what_a_kill_left(tmp_path, code):
    die(tmp_path, "k", KILL)
    assert len(files(tmp_path)) == 1
    die(tmp_path, "k", code)
    assert files(tmp_path) == []
    die(tmp_path, "k", KILL)
    assert Intents(tmp_path).find_crash("k") is None


def test_keys_do_not_count_for_each_other(tmp_path):
    die(tmp_path, "a", KILL)
    die(tmp_path, "b", KILL)
    assert Intents(tmp_path).find_crash("a") is None
    assert Intents(tmp_path).find_crash("b") is None


def test_a_build_that_runs_is_no_crash(tmp_path):
    die(tmp_path, "k", DEATHS["segv"][0])
    program = (
        "import pathlib, sys\nfrom sidestep.cache import Intents\n"
        "with Intents(pathlib.Path(sys.argv[1])).begin('k'):\n    print('building', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "building\n"
    intents = Intents(tmp_path)
    assert intents.find_crash("k") is None
    intents.clear("k")
    with intents.begin("k"):  # a second builder of the key has no intent, and takes none away
        assert len(files(tmp_path)) == 1
    assert len(files(tmp_path)) == 1
    child.kill()
    child.communicate()
    crash = intents.find_crash("k")
    assert crash is not None
    assert crash.count == 2


def test_the_file(tmp_path):
    with Intents(tmp_path).begin("failure/e/cudnn/p"):
        (name,) = files(tmp_path)
        text = (tmp_path / "intents" / name).read_text()
        mode = (tmp_path / "intents" / name).stat().st_mode & 0o777
    assert text == "failure/e/cudnn/p\n1\n"
    assert (len(name), mode) == (64, 0o600)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"k", b"k\n", b"k\nmany\nFatal Python error", b"other\n9\n", b"k\n" + b"9" * 5000]
)
def test_a_file_that_is_not_an_intent_is_no_crash(tmp_path, content):
    intents = Intents(tmp_path)
    with intents.begin("k"):
        (name,) = files(tmp_path)
    path = tmp_path / "intents" / name
    path.write_bytes(content)
    assert intents.find_crash("k") is None
    with intents.begin("k"):
        assert path.read_text() == "k\n1\n"
    assert not path.exists()


@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
def test_other_things_in_place_of_the_file_do_no_harm(tmp_path, what):
    intents = Intents(tmp_path / "cache")
    with intents.begin("k"):
        (name,) = files(tmp_path / "cache")
    path = tmp_path / "cache" / "intents" / name
    target = tmp_path / "target"
    target.write_text("mine")
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    assert intents.find_crash("k") is None
    with intents.begin("k"):
        pass
    assert target.read_text() == "mine"


def run(program, *arguments):
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_fault_handler_is_put_back(tmp_path, enabled):
    program = (
        "import ctypes, faulthandler, pathlib, sys\nfrom sidestep.cache import Intents\n"
        f"if {enabled}: faulthandler.enable()\n"
        "with Intents(pathlib.Path(sys.argv[1])).begin('k'):\n    assert faulthandler.is_enabled()\n"
        f"assert faulthandler.is_enabled() is {enabled}\n"
        "ctypes.string_at(0)\n"
    )
    child = run(program, str(tmp_path))
    assert child.returncode == -signal.SIGSEGV
    assert ("Fatal Python error: Segmentation fault" in child.stderr) is enabled
    assert files(tmp_path) == []


def test_under_pytest_the_fault_handler_stays_as_it_was(tmp_path):
    before = faulthandler.is_enabled()
    with Intents(tmp_path).begin("k"):
        assert faulthandler.is_enabled()
    assert faulthandler.is_enabled() is before


OVERLAP = """
import contextlib, ctypes, faulthandler, pathlib, sys
from sidestep.cache import Intents
intents = Intents(pathlib.Path(sys.argv[1]))
with contextlib.ExitStack() as a, contextlib.ExitStack() as b:
    a.enter_context(intents.begin("a"))
    b.enter_context(intents.begin("b"))
    {exits}
    ctypes.string_at(0)
"""


@pytest.mark.parametrize(
    ("exits", "blamed", "spared"), [("", "b", "a"), ("a.close()", "b", "a"), ("b.close()", "a", "b")]
)
def test_builds_that_overlap(tmp_path, exits, blamed, spared):
    assert run(OVERLAP.format(exits=exits), str(tmp_path)).returncode == -signal.SIGSEGV
    intents = Intents(tmp_path)
    assert intents.find_crash(blamed) is not None
    assert intents.find_crash(spared) is None


def test_many_threads(tmp_path):
    intents = Intents(tmp_path)
    before = faulthandler.is_enabled()

    def build(name):
        for number in range(30):
            with intents.begin(f"{name}/{number % 3}"):  # keys are shared by two threads each
                pass

    threads = [threading.Thread(target=build, args=(number // 2,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files(tmp_path) == []
    assert faulthandler.is_enabled() is before

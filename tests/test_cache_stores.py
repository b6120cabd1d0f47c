"""Stores at work: what every store does, and many processes and threads on one folder."""

import contextlib
import multiprocessing
import os
import sqlite3
import stat
import subprocess
import sys
import threading

import diskcache
import pytest
from store_worker import work

from sidestep.cache import Layered, MemoryStore, RefusedError, disk_store, find_by_id, open_store, record_id
from sidestep.cache.disk_store import DiskStore

OPENERS = {
    "memory": lambda path: MemoryStore(),
    "disk": DiskStore,
    "layered": lambda path: open_store("disk", path),
}


@pytest.fixture(params=OPENERS)
def store(request, tmp_path):
    store = OPENERS[request.param](tmp_path / "cache")
    yield store
    store.close()


def test_set_get_delete(store):
    assert store.get("a") is None
    store.set("a", b"1")
    store.set("a", b"\x00\xff")
    assert store.get("a") == b"\x00\xff"
    assert store.delete("a") is True
    assert store.delete("a") is False
    assert store.get("a") is None


def test_large_values_and_odd_keys(store):
    large = os.urandom(1 << 20)
    for key in ("", "large", "ümlaut/\U0001f600", "a'; DROP TABLE Cache; --", "nul\0nul"):
        store.set(key, large)
        assert store.get(key) == large
    assert len(list(store.keys())) == 5
    store.set("large", b"small")
    assert store.get("large") == b"small"


def test_keys_are_in_the_order_in_which_they_were_last_set(store):
    for number in range(2500):
        store.set(f"{'even' if number % 2 == 0 else 'odd'}/{number}", b"x")
    store.set("even/0", b"again")
    assert next(store.keys(newest_first=True)) == "even/0"
    expected = [f"even/{number}" for number in range(2, 2500, 2)] + ["even/0"]
    assert list(store.keys("even/")) == expected
    assert list(store.keys("even/", newest_first=True)) == expected[::-1]
    assert list(store.keys("ev_n/")) == []
    assert len(list(store.keys())) == 2500


def test_keys_in_any_order(store):
    expected = {f"{'even' if number % 2 == 0 else 'odd'}/{number}" for number in range(2500)}
    for key in expected:
        store.set(key, b"x")
    assert sorted(store.keys(newest_first=None)) == sorted(expected)
    assert sorted(store.keys("odd/", newest_first=None)) == sorted(key for key in expected if key.startswith("odd/"))
    assert list(store.keys("nothing/", newest_first=None)) == []


def test_planted_keys_do_not_stop_a_listing(tmp_path):
    store = DiskStore(tmp_path)
    store.set("a", b"1")
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "failures" / "cache.db")) as con, con:
        for key in (b"\xf5", b"\xff/", b"b"):
            con.execute("INSERT INTO Cache (key, raw, value) VALUES (CAST(? AS TEXT), 1, x'31')", (key,))
        con.execute(
            "INSERT INTO Cache (key, raw, value) VALUES (7, 1, x'31'), (x'63', 1, x'31'), ('pickled', 0, x'31')"
        )
    for order in (None, False, True):
        assert sorted(store.keys(newest_first=order)) == ["a", "b", "\ufffd", "\ufffd/"]


def test_keys_while_they_are_deleted(store):
    for number in range(1500):
        store.set(str(number), b"x")
    keys = store.keys()
    for key in keys:
        store.delete(key)
    assert list(store.keys()) == []


def test_a_writer_that_dies_leaves_the_old_value(tmp_path):
    """However large the value is: killed between the old one's deletion and the end of the transaction."""
    code = (
        "import os, pathlib, sys; from sidestep.cache import disk_store;"
        "s = disk_store.DiskStore(pathlib.Path(sys.argv[1])); s.set('a', b'x' * 300_000);"
        "disk_store._Cache.set = lambda *_: os.kill(os.getpid(), 9); s.set('a', b'y')"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    assert DiskStore(tmp_path).get("a") == b"x" * 300_000


def test_only_text_and_bytes(store):
    for key in (1, b"k", None, ("k",), "\ud800"):
        with pytest.raises(RefusedError):
            store.set(key, b"v")
        with pytest.raises(RefusedError):
            store.get(key)
        with pytest.raises(RefusedError):
            store.delete(key)
    for value in ("v", 1, None, bytearray(b"v"), {"pickle": "me"}):
        with pytest.raises(RefusedError):
            store.set("k", value)
    assert list(store.keys()) == []


def test_find_by_id(store):
    for number in range(50):
        store.set(f"failure/e/cudnn/{number}", b"x")
    key = "failure/e/cudnn/7"
    assert find_by_id(store, record_id(key)) == [key]
    assert find_by_id(store, record_id(key)[:8]) == [key]
    assert len(find_by_id(store, "")) == 50
    assert find_by_id(store, "x") == []


def test_a_closed_store_opens_again(store):
    store.set("a", b"1")
    store.close()
    assert store.get("a") == b"1"


def test_open_store(tmp_path):
    assert isinstance(open_store("off", None), MemoryStore)
    assert isinstance(open_store("disk", tmp_path / "cache"), Layered)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="'redis'"):
        open_store("redis", tmp_path)
    with pytest.raises(ValueError, match="directory"):
        open_store("disk", None)


def test_memory_makes_room():
    store = MemoryStore(max_bytes=100)
    for number in range(5):
        store.set(str(number), b"x" * 30)
    assert list(store.keys()) == ["2", "3", "4"]
    store.delete("3")
    store.set("5", b"x" * 40)
    assert list(store.keys()) == ["2", "4", "5"]
    store.set("6", b"x" * 101)
    assert list(store.keys()) == []


def test_layers_see_what_other_processes_do(tmp_path):
    ours, theirs = open_store("disk", tmp_path), open_store("disk", tmp_path)
    ours.set("a", b"1")
    theirs.set("a", b"2")
    assert ours.get("a") == b"2"
    theirs.delete("a")
    assert ours.get("a") is None
    assert list(ours.keys()) == []
    theirs.set("b", b"3")
    assert list(ours.keys()) == ["b"]


def test_the_folder(tmp_path):
    code = (
        "import os, pathlib, sys; os.umask(0); from sidestep.cache import open_store;"
        "s = open_store('disk', pathlib.Path(sys.argv[1]));"
        "s.set('a', b'x'); s.set('b', b'x' * 300000); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "cache")]).returncode == -9
    cache = tmp_path / "cache"
    assert sorted(path.name for path in cache.iterdir()) == [".gitignore", "CACHEDIR.TAG", "README.md", "failures"]
    assert (cache / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    assert "*" in (cache / ".gitignore").read_text().splitlines()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    inside = [cache / "failures", *(cache / "failures").rglob("*")]
    assert {path.suffix for path in inside if path.is_file()} == {".db", ".db-wal", ".db-shm"}
    assert {path.name: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in inside} == dict.fromkeys(
        (path.name for path in inside), 0
    )
    store = DiskStore(cache)
    assert (store.get("a"), store.get("b")) == (b"x", b"x" * 300000)


def test_a_folder_that_holds_other_things_is_not_tagged(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    open_store("disk", tmp_path).set("a", b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failures", "notes.txt"]


def test_plain_diskcache_can_read_the_folder_and_evicts_nothing(tmp_path):
    store = DiskStore(tmp_path)
    store.set("a", b"1")
    with diskcache.Cache(tmp_path / "failures") as plain:
        assert plain["a"] == b"1"
        assert len(plain) == 1
        assert plain.check() == []
        assert plain.cull() == 0
        assert plain.eviction_policy == "none"
    with diskcache.Cache(tmp_path / "failures", eviction_policy="least-recently-used", tag_index=1) as plain:
        plain["b"] = b"2"
    again = DiskStore(tmp_path)
    assert (again.get("a"), again.get("b")) == (b"1", b"2")


def test_opening_and_reading_write_nothing(tmp_path):
    DiskStore(tmp_path).set("a", b"1")
    writer = sqlite3.connect(tmp_path / "failures" / "cache.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")  # no other write can happen until it ends
    store = DiskStore(tmp_path)
    assert store.get("a") == b"1"
    assert list(store.keys()) == ["a"]
    writer.execute("ROLLBACK")
    writer.close()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_many_processes(tmp_path, method):
    context = multiprocessing.get_context(method)
    barrier, failures = context.Barrier(4), context.Queue()
    workers = [context.Process(target=work, args=(tmp_path, name, barrier, failures)) for name in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    told = [] if failures.empty() else failures.get()
    assert [worker.exitcode for worker in workers] == [0] * 4, told
    store = DiskStore(tmp_path)
    expected = {
        f"{name}/{number}": f"{name} {number}".encode() * 100
        for name in range(4)
        for number in range(100)
        if number % 3
    }
    keys = list(store.keys())
    assert {key: store.get(key) for key in keys if key != "shared"} == expected
    assert not list((tmp_path / "failures").glob("*.new*"))


def test_many_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "_TIMEOUT", 300.0)  # a busy machine is no trouble of the store's
    store = open_store("disk", tmp_path)
    wrong = []

    def run(name):
        for number in range(50):
            store.set(f"{name}/{number}", b"%d" % number)
            if store.get(f"{name}/{number}") != b"%d" % number:
                wrong.append((name, number))

    threads = [threading.Thread(target=run, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(list(DiskStore(tmp_path).keys())) == 400


def test_a_forked_child_opens_its_own(tmp_path):
    store = open_store("disk", tmp_path)
    store.set("parent", b"1")
    parents = store._layers[1].store._opened[1]._con
    child = os.fork()
    if child == 0:
        try:
            store.set("child", b"2")
            ok = store.get("parent") == b"1" and store._layers[1].store._opened[1]._con is not parents
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get("child") == b"2"
    store.set("parent", b"3")
    assert DiskStore(tmp_path).get("parent") == b"3"
    check = sqlite3.connect(tmp_path / "failures" / "cache.db")
    assert check.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    check.close()

"""Real trouble: one warning that names the path and the remedy, and then memory only."""

import json
import logging
import os
import resource
import shutil
import sqlite3
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

from sidestep.cache import Intents, StoreError, cache_folder, open_store
from sidestep.cache.disk_store import DiskStore
from sidestep.cache.folder import file_system

NOBODY = 65534


@pytest.fixture
def public():
    """A folder that every user may enter, unlike tmp_path, and that belongs to the user of `as_other_user`."""
    path = Path(tempfile.mkdtemp(prefix="sidestep-test-"))
    path.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


def in_child(function, *, as_nobody=False):
    """Run `function` in a forked child, which root's rights do not help, and return its result, JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            if as_nobody and os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            result = function()
            with open(writer, "w") as file:
                json.dump(result, file)
        finally:
            if sys.exc_info()[0]:
                traceback.print_exc()
            os._exit(0)
    os.close(writer)
    with open(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text)


def use(directory):
    """Use a store as a process would; return what it answered and the warnings that it logged."""
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("sidestep")
    logger.addHandler(handler)
    try:
        store = open_store("disk", directory)
        answers = [store.get("a")]
        store.set("a", b"1" * 10_000)
        store.set("b", b"2")
        answers += [store.get("a") == b"1" * 10_000, store.get("b") == b"2", sorted(store.keys())]
        answers += [store.delete("b"), store.get("b"), sorted(store.keys())]
        store.close()
    finally:
        logger.removeHandler(handler)
    return [answers, warnings]


def check(outcome, path, cause):
    answers, warnings = outcome
    assert answers == [None, True, True, ["a", "b"], True, None, ["a"]]
    assert [level for level, _ in warnings] == ["WARNING"]
    for part in (str(path), cause, "SIDESTEP_CACHE_DIR", "SIDESTEP_CACHE=off"):
        assert part in warnings[0][1]


def test_no_trouble_no_warning(tmp_path):
    assert use(tmp_path) == [[None, True, True, ["a", "b"], True, None, ["a"]], []]
    assert DiskStore(tmp_path).get("a") == b"1" * 10_000


@pytest.mark.parametrize("content", [b"this is not a database, and long enough to be read as one " * 50, b""])
def test_damaged(tmp_path, content):
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "cache.db").write_bytes(content)
    check(use(tmp_path), tmp_path / "failures", "not a database" if content else "not a diskcache database")
    assert (tmp_path / "failures" / "cache.db").read_bytes() == content


def test_damaged_in_the_middle(tmp_path, caplog):
    store = DiskStore(tmp_path)
    for number in range(200):
        store.set(f"{number}", os.urandom(3000))
    store.close()
    path = tmp_path / "failures" / "cache.db"
    data = bytearray(path.read_bytes())
    data[8192:-4096] = os.urandom(len(data) - 12288)
    path.write_bytes(data)
    damaged = open_store("disk", tmp_path)
    assert damaged.get("5") is None
    damaged.set("5", b"1")
    assert damaged.get("5") == b"1"
    list(damaged.keys())
    assert len(caplog.records) <= 1


def test_truncated_under_an_open_store(tmp_path):
    store = open_store("disk", tmp_path)
    for number in range(200):
        store.set(f"{number}", b"x" * 3000)
    os.truncate(tmp_path / "failures" / "cache.db", 5000)
    os.truncate(tmp_path / "failures" / "cache.db-wal", 100)
    store.set("new", b"1")
    assert store.get("new") == b"1"


def test_full_disk(tmp_path):
    DiskStore(tmp_path).set("old", b"1")

    def full():
        # The kernel refuses every byte past this, as a full disk does; root's rights do not help.
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return use(tmp_path)

    answers, warnings = in_child(full)
    # "old" is on a disk that is given up, but it was there for the first look.
    assert answers == [None, True, True, ["a", "b"], True, None, ["a"]]
    assert len(warnings) == 1
    assert str(tmp_path / "failures") in warnings[0][1]
    assert DiskStore(tmp_path).get("old") == b"1"
    assert DiskStore(tmp_path).get("a") is None


def test_full_disk_before_the_database_is_there(tmp_path):
    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return use(tmp_path)

    check(in_child(full), tmp_path / "failures", "OperationalError")
    assert list((tmp_path / "failures").iterdir()) == []


def test_full_disk_and_a_large_value(tmp_path):
    DiskStore(tmp_path).set("old", b"1")

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
        store = open_store("disk", tmp_path)
        store.set("large", b"x" * 200_000)
        return store.get("large") == b"x" * 200_000

    assert in_child(full) is True
    assert not list((tmp_path / "failures").rglob("*.val"))


def test_read_only(public):
    folder = public / "cache"
    folder.mkdir(mode=0o500)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    check(in_child(lambda: use(folder), as_nobody=True), folder, "Permission denied")


def test_read_only_database(public):
    def fill():
        store = DiskStore(public)
        store.set("old", b"1")
        store.close()
        (public / "failures" / "cache.db").chmod(0o400)
        return use(public)

    check(in_child(fill, as_nobody=True), public / "failures", "readonly")


def test_locked_by_an_open_transaction(tmp_path):
    DiskStore(tmp_path).set("old", b"1")
    other = sqlite3.connect(tmp_path / "failures" / "cache.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    check(in_child(lambda: use(tmp_path)), tmp_path / "failures", "locked by another process")
    other.execute("COMMIT")
    other.close()
    assert DiskStore(tmp_path).get("a") is None


def test_locked_exclusively(tmp_path):
    store = DiskStore(tmp_path)
    store.set("old", b"1")
    store.close()
    other = sqlite3.connect(tmp_path / "failures" / "cache.db", isolation_level=None)
    other.execute("PRAGMA journal_mode = DELETE")  # in which, unlike in WAL mode, a writer shuts readers out
    other.execute("BEGIN EXCLUSIVE")
    check(in_child(lambda: use(tmp_path)), tmp_path / "failures", "database is locked")
    other.execute("COMMIT")
    other.close()
    assert DiskStore(tmp_path).get("old") == b"1"


def test_owned_by_someone_else(public):
    if os.geteuid() != 0:
        public = Path("/usr")  # root's
    check(use(public), public, "owned by user")
    assert not (public / "failures").exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
def test_writable_by_others(tmp_path, mode):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    check(use(tmp_path / "cache"), tmp_path / "cache", "writable by others")
    assert list((tmp_path / "cache").iterdir()) == []


def test_failures_folder_writable_by_others(tmp_path):
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures").chmod(0o777)
    check(use(tmp_path), tmp_path / "failures", "writable by others")


def test_the_path_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    check(use(tmp_path / "file"), tmp_path / "file", "File exists")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_path_is_under_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    check(use(tmp_path / "file" / "cache"), tmp_path / "file" / "cache", "Not a directory")


def test_records_seen_before_the_trouble_are_still_known(tmp_path, caplog):
    DiskStore(tmp_path).set("theirs", b"1")
    store = open_store("disk", tmp_path)
    store.set("ours", b"2")
    assert store.get("theirs") == b"1"
    other = sqlite3.connect(tmp_path / "failures" / "cache.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store.set("new", b"3")
    other.execute("ROLLBACK")
    other.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    keys = list(store.keys())
    assert {key: store.get(key) for key in keys} == {"theirs": b"1", "ours": b"2", "new": b"3"}


def test_a_failed_commit_does_not_keep_the_lock(tmp_path):
    store = DiskStore(tmp_path)
    store.set("a", b"1")
    reader = sqlite3.connect(tmp_path / "failures" / "cache.db", isolation_level=None)
    reader.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        store.set("b", b"2")
    reader.execute("ROLLBACK")
    reader.close()
    DiskStore(tmp_path).set("c", b"3")
    store.set("b", b"2")
    assert sorted(store.keys()) == ["a", "b", "c"]


def test_a_working_folder_that_changes_or_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store("disk", Path("cache"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    store.set("a", b"1")
    assert (tmp_path / "cache" / "failures" / "cache.db").is_file()
    assert list((tmp_path / "other").iterdir()) == []


def test_intents_in_trouble_do_nothing(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for directory in (tmp_path / "file", tmp_path / "open", None):
        intents = Intents(directory)
        with intents.begin("k"):
            assert intents.find_crash("k") is None
        intents.clear("k")
    assert list((tmp_path / "open").iterdir()) == []


MOUNTS = r"""22 28 0:20 / /proc rw,nosuid - proc proc rw
28 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 28 0:35 / /home rw,relatime shared:2 - nfs4 server:/home rw,vers=4.2
41 40 0:36 / /home/me/fast\040disk rw - xfs /dev/sdb rw
42 28 0:37 / /scratch rw shared:3 master:1 - lustre mds:/fs rw
43 28 0:38 / /mnt rw - ext4 /dev/sdc rw
44 43 0:39 / /mnt rw - fuse.sshfs host: rw
broken
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/x", "ext4"),
        ("/home/me/.cache", "nfs4"),
        ("/home/me/fast disk/c", "xfs"),
        ("/homely", "ext4"),
        ("/scratch", "lustre"),
        ("/mnt/x", "fuse.sshfs"),
    ],
)
def test_file_system_of_a_path(path, kind):
    assert file_system(Path(path), MOUNTS) == kind


def test_file_system_of_this_machine():
    assert file_system(Path("/proc/self"), Path("/proc/self/mountinfo").read_text()) == "proc"
    assert file_system(Path("/x"), "") == ""


def test_cache_folder_follows_a_link_that_the_user_made(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "big")
    assert cache_folder(tmp_path / "cache", "failures").is_dir()
    assert (tmp_path / "big" / "failures").is_dir()

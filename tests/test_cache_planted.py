"""A planted database: nothing in it is run, and nothing outside the folder is read or deleted."""

import io
import os
import pickle
import sqlite3
import struct
from pathlib import Path

import diskcache
import pytest

from sidestep.cache import RefusedError, StoreError
from sidestep.cache.disk_store import BytesDisk, DiskStore


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def planted(tmp_path):
    """A store with one good record, closed, and a connection to its database."""
    store = DiskStore(tmp_path / "cache")
    store.set("good", b"good")
    store.close()
    con = sqlite3.connect(tmp_path / "cache" / "failures" / "cache.db", isolation_level=None)
    yield con
    con.close()


def row(con, key, *, raw=1, mode=1, filename=None, value=None, size=0):
    con.execute(
        "INSERT INTO Cache(key, raw, store_time, size, mode, filename, value) VALUES (?, ?, 0, ?, ?, ?, ?)",
        (key, raw, size, mode, filename, value),
    )


def test_pickles_are_not_loaded(planted, tmp_path):
    fuse = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(fuse))
    name = f"aa/bb/{'c' * 28}.val"
    file = tmp_path / "cache/failures" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(bomb)
    row(planted, "inline", mode=4, value=bomb)
    row(planted, "in a file", mode=4, filename=name)
    row(planted, bomb, raw=0, mode=1, value=b"x")
    row(planted, bomb, raw=1, mode=1, value=b"x")
    store = DiskStore(tmp_path / "cache")
    assert store.get("inline") is None
    assert store.get("in a file") is None
    assert list(store.keys()) == ["good", "inline", "in a file"]
    assert store.get("good") == b"good"
    store.set("inline", b"mine")
    assert store.get("inline") == b"mine"
    assert store.delete("in a file")
    assert not fuse.exists()
    pickle.loads(bomb)  # noqa: S301
    assert fuse.exists()  # the bomb was a real one


def test_the_disk_refuses_pickle_in_all_four(tmp_path):
    disk = BytesDisk(str(tmp_path))
    fuse = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(fuse))
    with pytest.raises(RefusedError):
        disk.put(("a", "tuple"))
    with pytest.raises(RefusedError):
        disk.get(bomb, False)
    with pytest.raises(RefusedError):
        disk.get(bomb, True)
    with pytest.raises(RefusedError):
        disk.store({"a": 1}, False)
    with pytest.raises(RefusedError):
        disk.store(io.BytesIO(b"x"), True)
    with pytest.raises(RefusedError):
        disk.fetch(4, None, bomb, False)
    with pytest.raises(RefusedError):
        disk.fetch(4, f"aa/bb/{'c' * 28}.val", None, False)
    for value in ("text", 1, 1.5, None):
        with pytest.raises(RefusedError):
            disk.fetch(1, None, value, False)
    with pytest.raises(RefusedError):
        disk.fetch(1, None, b"x", True)
    with pytest.raises(RefusedError):
        disk.fetch(3, f"aa/bb/{'c' * 28}.val", None, False)
    assert not fuse.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("use", ["get", "set", "delete"])
@pytest.mark.parametrize("how", ["absolute", "relative", "link", "linked folder", "dots"])
def test_files_outside_are_neither_read_nor_deleted(planted, tmp_path, how, use):
    folder = tmp_path / "cache" / "failures"
    outside = tmp_path / "aa" / "bb" / f"{'c' * 28}.val"
    outside.parent.mkdir(parents=True)
    outside.write_bytes(b"secret")
    name = f"aa/bb/{'c' * 28}.val"
    if how == "absolute":
        name = str(outside)
    elif how == "relative":
        name = f"../../{name}"
    elif how == "dots":
        name = f"aa/../../../{name}"
        (folder / "aa").mkdir()
    elif how == "link":
        (folder / "aa/bb").mkdir(parents=True)
        (folder / name).symlink_to(outside)
    else:
        (folder / "aa").symlink_to(tmp_path / "aa")
    assert (folder / name).read_bytes() == b"secret"  # the trap is set
    row(planted, "trap", mode=2, filename=name)
    store = DiskStore(tmp_path / "cache")
    if use == "get":
        assert store.get("trap") is None
    elif use == "set":
        store.set("trap", b"mine")
        assert store.get("trap") == b"mine"
    else:
        assert store.delete("trap")
        assert store.get("trap") is None
    assert outside.read_bytes() == b"secret"
    assert store.get("good") == b"good"


@pytest.mark.parametrize("name", ["", ".", "..", "nul\0", "x" * 5000, 7, b"aa", "cache.db", f"aa/bb/{'c' * 28}.val\n"])
def test_odd_file_names_are_misses(planted, tmp_path, name):
    row(planted, "odd", mode=2, filename=name)
    store = DiskStore(tmp_path / "cache")
    assert store.get("odd") is None
    store.set("odd", b"mine")
    assert store.get("odd") == b"mine"
    assert store.get("good") == b"good"


def test_a_pipe_in_place_of_a_file_does_not_wait(planted, tmp_path):
    name = f"aa/bb/{'c' * 28}.val"
    pipe = tmp_path / "cache/failures" / name
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    row(planted, "pipe", mode=2, filename=name)
    assert DiskStore(tmp_path / "cache").get("pipe") is None


def test_links_in_a_circle_are_a_miss(planted, tmp_path):
    (tmp_path / "cache/failures/aa").symlink_to("aa")
    row(planted, "circle", mode=2, filename=f"aa/bb/{'c' * 28}.val")
    store = DiskStore(tmp_path / "cache")
    assert store.get("circle") is None
    assert store.delete("circle")


def test_a_missing_file_is_a_miss(planted, tmp_path):
    row(planted, "gone", mode=2, filename=f"aa/bb/{'c' * 28}.val")
    assert DiskStore(tmp_path / "cache").get("gone") is None


def test_the_settings_table_is_not_believed(planted, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    planted.executemany(
        "INSERT OR REPLACE INTO Settings VALUES (?, ?)",
        [
            ("disk__directory", str(elsewhere)),
            ("_directory", str(elsewhere)),
            ("get", "not callable"),
            ("_disk", "not a disk"),
            ("disk_min_file_size", 0),
            ("eviction_policy", "least-recently-used"),
            ("cull_limit", 10),
            ("size_limit", 0),
            ("statistics", 1),
            ("sqlite_journal_mode", "off"),
            ("sqlite_locking_mode", "exclusive"),
            ("sqlite_query_only", 1),
            (b"sqlite_bytes", 1),
            ("count", "many"),
        ],
    )
    store = DiskStore(tmp_path / "cache")
    for number in range(50):
        store.set(str(number), b"x" * 200_000)
    assert len(list(store.keys())) == 51  # nothing was evicted
    assert store.get("good") == b"good"
    assert list(elsewhere.iterdir()) == []
    assert planted.execute("SELECT COUNT(*) FROM Cache").fetchall() == [(51,)]


FOREVER = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i, i FROM n"


@pytest.mark.parametrize(
    "statement",
    [
        f"CREATE TRIGGER t AFTER INSERT ON Cache BEGIN INSERT INTO Settings {FOREVER}; END",
        "CREATE TRIGGER t AFTER INSERT ON Cache BEGIN DELETE FROM Cache; END",
        f"CREATE VIEW v AS {FOREVER}",
        "CREATE TABLE more (x)",
        "CREATE INDEX slow ON Cache (length(value))",
        "DROP TABLE Cache",
    ],
)
def test_a_foreign_schema_is_refused(planted, tmp_path, statement):
    planted.execute(statement)
    store = DiskStore(tmp_path / "cache")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"cache\.db"):
            store.set("a", b"1")


def test_a_view_in_place_of_the_table_is_refused(planted, tmp_path):
    planted.execute("DROP TABLE Cache")
    planted.execute(f"CREATE VIEW Cache AS {FOREVER}")
    with pytest.raises(StoreError, match="not a diskcache database"):
        DiskStore(tmp_path / "cache").get("a")


def test_odd_keys_and_row_numbers(planted, tmp_path):
    planted.execute("INSERT INTO Cache(key, raw, mode, value) VALUES (CAST(x'ff' AS TEXT), 1, 1, x'00')")
    for key in (1, 1.5, b"bytes", None):
        row(planted, key, value=b"x")
    planted.execute("INSERT INTO Cache(rowid, key, raw, mode, value) VALUES (-5, 'before', 1, 1, x'01')")
    planted.execute(
        "INSERT INTO Cache(rowid, key, raw, mode, value) VALUES (9223372036854775806, 'after', 1, 1, x'02')"
    )
    store = DiskStore(tmp_path / "cache")
    assert list(store.keys()) == ["before", "good", "\ufffd", "after"]
    assert list(store.keys(newest_first=True)) == ["after", "\ufffd", "good", "before"]


@pytest.mark.parametrize("name", ["cache.db", "cache.db-wal"])
def test_a_linked_database_is_refused(tmp_path, name):
    DiskStore(tmp_path / "theirs").set("a", b"1")
    folder = tmp_path / "cache" / "failures"
    folder.mkdir(parents=True)
    (folder / "cache.db").touch()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "theirs" / "failures" / "cache.db")
    with pytest.raises(StoreError, match="not a file of ours"):
        DiskStore(tmp_path / "cache").set("a", b"2")
    assert DiskStore(tmp_path / "theirs").get("a") == b"1"


def test_a_rollback_journal_is_not_played_back(planted, tmp_path):
    # https://sqlite.org/fileformat.html, "The Rollback Journal": no pages, and the name of a super-journal at the end.
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    planted.execute("PRAGMA journal_mode = DELETE")
    planted.close()
    name = str(victim).encode()
    header = bytes.fromhex("d9d505f920a163d7") + struct.pack(">5I", 0, 0, 0, 512, 4096)
    tail = struct.pack(">I", 2**30 // 4096 + 1) + name + struct.pack(">II", len(name), sum(name)) + header[:8]
    journal = tmp_path / "cache/failures/cache.db-journal"
    journal.write_bytes(header.ljust(512, b"\0") + tail)
    with pytest.raises(StoreError, match="journal"):
        DiskStore(tmp_path / "cache").get("good")
    assert victim.read_bytes() == b"precious"


def test_a_linked_folder_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "failures").symlink_to(tmp_path / "theirs")
    with pytest.raises(StoreError, match="a link where a folder belongs"):
        DiskStore(tmp_path / "cache").set("a", b"1")
    assert list((tmp_path / "theirs").iterdir()) == []


def test_modes_of_a_folder_from_elsewhere_are_closed(tmp_path):
    folder = tmp_path / "failures"
    with diskcache.Cache(folder) as plain:
        plain["a"] = b"1"
        (folder / "cache.db").chmod(0o644)
        folder.chmod(0o755)
        assert DiskStore(tmp_path).get("a") == b"1"
        assert {path.name: oct(path.stat().st_mode & 0o777) for path in (folder, *folder.glob("cache.db*"))} == {
            "failures": "0o700",
            "cache.db": "0o600",
            "cache.db-wal": "0o600",
            "cache.db-shm": "0o600",
        }

"""The store of a fleet, on a real server: what is written and read, what is believed, and a server that goes away."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process import reload_settings
from redis_server import PATIENCE, Server, running

import sidestep
from sidestep import failures
from sidestep.cache import AwayError, FailureRecord, Layered, MemoryStore, failure_key, frame, open_layers, open_store
from sidestep.cache.disk_store import DiskStore
from sidestep.cache.records import DAY
from sidestep.cache.remote_store import RemoteStore
from sidestep.errors import SettingError
from sidestep.settings import Settings

KEY = "correct horse battery staple"
PLAN = "plan/e/cudnn/p"


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    """A server that holds nothing."""
    shared.client().flushall()
    return shared


@pytest.fixture(autouse=True)
def all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sidestep")


def record(number: int = 0, **fields: Any) -> FailureRecord:
    data: dict[str, Any] = {
        "key": failure_key("e", "cudnn", str(number)),
        "kind": "unsupported",
        "backend": "cudnn",
        "direction": "forward",
        "stage": "build",
        "exception_type": "cudnn.cudnnGraphNotSupportedError",
        "exception_text": f"number {number}",
        "traceback": "Traceback ...",
        "problem": {},
        "environment": {},
        "first_time": time.time(),
        "last_time": time.time(),
        "count": 1,
        "duration": 0.5,
        "built_on": "local",
        **fields,
    }
    return FailureRecord(**data)


def put(store: Any, *records: FailureRecord) -> None:
    for one in records:
        store.set(one.key, one.to_bytes())


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.levelname for one in caplog.records]


# --- through the layers ---


def test_write_through(server: Server, tmp_path: Path) -> None:
    store = open_store(server.url, tmp_path)
    assert not tmp_path.joinpath("failures").exists()
    put(store, one := record())
    assert server.client().get(f"sidestep:{one.key}") == one.to_bytes()
    assert DiskStore(tmp_path).get(one.key) == one.to_bytes()
    assert store.delete(one.key) is True
    assert server.client().dbsize() == 0
    assert DiskStore(tmp_path).get(one.key) is None
    assert store.delete(one.key) is False


def test_read_through_with_backfill(server: Server, tmp_path: Path) -> None:
    put(open_store(server.url, tmp_path / "a"), one := record())
    theirs = open_store(server.url, tmp_path / "b")
    assert list(theirs.keys()) == [one.key]
    assert theirs.get(one.key) == one.to_bytes()
    server.client().flushall()
    assert theirs.get(one.key) == one.to_bytes()
    assert DiskStore(tmp_path / "b").get(one.key) == one.to_bytes()


def test_another_process_gets_it_through_the_server_alone(server: Server, tmp_path: Path) -> None:
    put(open_store(server.url, tmp_path / "a"), one := record())
    environ = {**os.environ, "SIDESTEP_CACHE": server.url, "SIDESTEP_CACHE_DIR": str(tmp_path / "b")}
    for arguments in (["list"], ["show", one.id[:6]]):
        done = subprocess.run(
            [sys.executable, "-m", "sidestep", "failures", *arguments, "--json"],
            env=environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert [item["id"] for item in json.loads(done.stdout)["items"]] == [one.id]
        assert done.stderr == ""
    assert DiskStore(tmp_path / "b").get(one.key) == one.to_bytes()


def test_a_newer_record_of_another_machine_replaces_one_that_lapsed_here(server: Server, tmp_path: Path) -> None:
    store = open_store(server.url, tmp_path)
    lapsed = record(last_time=time.time() - 31 * DAY)
    put(store, lapsed)
    assert server.client().dbsize() == 0  # nothing that lapsed is written there
    assert store.get(lapsed.key) == lapsed.to_bytes()
    put(RemoteStore(server.url), newer := record(count=2))
    assert store.get(newer.key) == newer.to_bytes()
    assert DiskStore(tmp_path).get(newer.key) == newer.to_bytes()


def test_listing_is_the_union_without_repeats(server: Server, tmp_path: Path) -> None:
    both, disk_only, remote_only = (record(number) for number in range(3))
    put(store := open_store(server.url, tmp_path), both)
    put(DiskStore(tmp_path), disk_only)
    put(RemoteStore(server.url), remote_only)
    assert list(store.keys(newest_first=True)) == [disk_only.key, both.key, remote_only.key]
    assert list(store.keys("failure/e/cudnn/2")) == [remote_only.key]
    assert list(store.keys("failure/*")) == []


def test_a_thousand_keys_are_listed_once(server: Server) -> None:
    put(RemoteStore(server.url), *(many := [record(number) for number in range(2500)]))
    assert sorted(RemoteStore(server.url).keys()) == sorted(one.key for one in many)


# --- what is written ---


@pytest.mark.parametrize(
    ("kind", "count", "days"),
    [("unsupported", 1, 30), ("error", 1, 1), ("error", 4, 8), ("timeout", 2, 2), ("crash", 1, 90), ("denied", 1, 90)],
)
def test_time_to_live_by_kind(server: Server, kind: str, count: int, days: int) -> None:
    one = record(kind=kind, count=count)
    put(RemoteStore(server.url), one)
    assert server.client().ttl(f"sidestep:{one.key}") == pytest.approx(days * DAY, abs=60)


def test_time_to_live_of_a_clock_gone_wrong_and_of_plans(server: Server) -> None:
    store = RemoteStore(server.url, KEY)
    put(store, one := record(last_time=1e11))
    store.set(PLAN, b"graph")
    for key in (one.key, PLAN):
        assert server.client().ttl(f"sidestep:{key}") == pytest.approx(90 * DAY, abs=60)


def test_only_what_parses_is_written_and_believed(server: Server, tmp_path: Path) -> None:
    one, other = record(0), record(1)
    store, remote = open_store(server.url, tmp_path), RemoteStore(server.url)
    values = [b"", b"x", frame(b"{}"), one.to_bytes()[:-1], other.to_bytes()]
    for value in values:
        remote.set(one.key, value)
    remote.set("something/else", one.to_bytes())
    assert server.client().dbsize() == 0
    for value in values:
        server.client().set(f"sidestep:{one.key}", value)
        assert store.get(one.key) is None
    server.client().set("sidestep:something/else", one.to_bytes())
    assert remote.get("something/else") is None
    assert list(DiskStore(tmp_path).keys()) == []


def test_sizes_are_bounded(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    large = record(traceback="x" * 2**24)
    remote = RemoteStore(server.url)
    put(remote, large)
    assert server.client().dbsize() == 0
    server.client().set(f"sidestep:{large.key}", large.to_bytes())
    sent = server.client().info()["total_net_output_bytes"]
    assert remote.get(large.key) is None
    assert server.client().info()["total_net_output_bytes"] - sent < 2**23
    assert levels(caplog) == ["INFO", "INFO"]


def test_odd_things_on_the_server(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    one = record()
    server.client().rpush(f"sidestep:{one.key}", "a list")
    server.client().set(b"sidestep:failure/\xff\xfe", "x")
    server.client().set("sidestep:failure/" + "x" * 5000, "x")
    remote = RemoteStore(server.url)
    assert remote.get(one.key) is None
    assert list(remote.keys()) == [one.key]
    put(remote, one)
    assert remote.get(one.key) == one.to_bytes()
    assert caplog.records == []


def test_prefixes_do_not_meet(server: Server) -> None:
    one, two = record(0), record(1)
    a, b = RemoteStore(f"{server.url}&prefix=a[*"), RemoteStore(f"{server.url}&prefix=a[*:b")
    plain = RemoteStore(server.url)
    put(a, one)
    put(b, two)
    assert sorted(server.client().keys()) == sorted([f"a[*:{one.key}".encode(), f"a[*:b:{two.key}".encode()])
    assert [list(store.keys()) for store in (a, b, plain)] == [[one.key], [two.key], []]
    assert (a.get(two.key), b.get(one.key), plain.get(one.key)) == (None, None, None)
    assert b.delete(one.key) is False
    assert a.get(one.key) == one.to_bytes()


# --- plans ---


def test_a_signed_plan_loads(server: Server, tmp_path: Path) -> None:
    RemoteStore(server.url, KEY).set(PLAN, b"graph")
    expected = hmac.new(KEY.encode(), b"sidestep plan 14:plan/e/cudnn/pgraph", hashlib.sha256).hexdigest()
    assert server.client().get(f"sidestep:{PLAN}") == f"{expected}\ngraph".encode()
    store = open_layers("plans", tmp_path, remote=RemoteStore(server.url, KEY))
    assert store.get(PLAN) == b"graph"
    assert DiskStore(tmp_path, "plans").get(PLAN) == b"graph"
    assert list(store.keys("plan/")) == [PLAN]


@pytest.mark.parametrize("how", ["unsigned", "another key", "tampered", "moved", "cut", "no signature"])
def test_other_plans_are_refused(server: Server, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = server.client()
    RemoteStore(server.url, "another" if how == "another key" else KEY).set(PLAN, b"graph")
    good, key = client.get(f"sidestep:{PLAN}"), PLAN
    if how == "moved":
        key = f"{PLAN}2"
    changed = {
        "unsigned": b"graph",
        "tampered": good.replace(b"graph", b"grasp"),
        "cut": good[:-1],
        "no signature": b"\ngraph",
    }
    client.set(f"sidestep:{key}", changed.get(how, good))
    store = open_layers("plans", tmp_path, remote=RemoteStore(server.url, KEY))
    for _ in range(3):
        assert store.get(key) is None
    assert DiskStore(tmp_path, "plans").get(key) is None
    assert levels(caplog) == ["WARNING"]
    assert "SIDESTEP_SIGNING_KEY" in caplog.text
    assert KEY not in caplog.text


def test_without_a_signing_key_plans_stay_here(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RemoteStore(server.url, KEY).set(PLAN, b"graph")
    store = open_layers("plans", tmp_path, remote=RemoteStore(server.url))
    assert store.get(PLAN) is None
    assert list(store.keys()) == []
    store.set(PLAN, b"mine")
    assert store.get(PLAN) == b"mine"
    assert store.delete(PLAN)
    assert server.client().get(f"sidestep:{PLAN}").endswith(b"\ngraph")
    assert levels(caplog) == ["INFO"]
    put(store, one := record())  # records need none
    assert server.client().exists(f"sidestep:{one.key}")


# --- a server in trouble ---


def test_a_server_that_goes_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running() as server:
        store = open_store(server.url, tmp_path)
        put(store, record(0))
        server.stop()
        put(store, one := record(1))
        for number in range(3):
            assert (store.get(record(number).key) is not None) == (number < 2)
        assert len(list(store.keys())) == 2
        assert levels(caplog) == ["WARNING"]
        for part in (str(server.socket), "SIDESTEP_CACHE"):
            assert part in caplog.text
        server.start()
        deadline = time.monotonic() + 300
        while not server.client().dbsize():
            assert time.monotonic() < deadline
            time.sleep(0.05)
            put(store, one)
        assert levels(caplog) == ["WARNING", "INFO"]
        assert "answers again" in caplog.records[1].message
        server.stop()
        assert store.get(record(2).key) is None
        assert store.get(one.key) == one.to_bytes()
        assert levels(caplog) == ["WARNING", "INFO"]
        assert isinstance(store, Layered)
        assert store.usable


def test_a_server_that_hangs_is_asked_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A thousand look-ups cost one time-out, and a while later another."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = open_store(f"redis://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        before = time.monotonic()
        for number in range(1000):
            assert store.get(record(number).key) is None
        pauses = time.monotonic() - before  # at least half a second lies between two attempts
        silent.setblocking(False)
        attempts = 0
        while True:
            try:
                silent.accept()[0].close()
            except BlockingIOError:
                break
            attempts += 1
    assert 1 <= attempts <= 1 + pauses / 0.5
    assert levels(caplog) == ["WARNING"]
    assert "Timeout" in caplog.text


def test_a_frozen_server_and_the_time_outs_of_the_url(caplog: pytest.LogCaptureFixture) -> None:
    with running() as server:
        one = record()
        patient = RemoteStore(server.url)
        hasty = RemoteStore(server.hasty_url)
        put(patient, one)
        with server.frozen():
            with pytest.raises(AwayError, match="Timeout"):
                hasty.get(one.key)
            with pytest.raises(AwayError, match="a moment ago"):
                hasty.get(one.key)
            timer = threading.Timer(1, server.thaw)
            timer.start()
            assert patient.get(one.key) == one.to_bytes()
            timer.join()
        assert levels(caplog) == ["WARNING"]


def test_the_pause_grows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    remote, now, pauses = RemoteStore(f"unix://{tmp_path}/none"), 1000.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(9):
        now = remote._away_until
        with pytest.raises(AwayError, match="not answer"):
            remote.get(record().key)
        pauses.append((remote._pause, remote._away_until - now))
    assert [pause for pause, _ in pauses] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert all(0.499 * pause <= wait <= 1.001 * pause for pause, wait in pauses)
    assert len({wait / pause for pause, wait in pauses}) > 1


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\n",
        b"nonsense\r\n",
        b":12x\r\n",
        b"$-7\r\n",
        b"*1\r\n" * 5000,
        b"-ERR \xff\x1b[31m secret\r\n",
        b":1\r\n",
    ],
)
def test_a_server_gone_mad_is_a_miss(answer: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mad:

        def serve() -> None:
            while True:
                try:
                    client = mad.accept()[0]
                except OSError:
                    return
                with client:
                    client.settimeout(300)
                    while client.recv(65536):
                        client.sendall(answer)
                        if not answer:
                            break

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        store = open_store(f"redis://:secret@127.0.0.1:{mad.getsockname()[1]}", tmp_path)
        assert store.get(record().key) is None
        put(store, one := record())
        assert list(store.keys()) == [one.key]
        assert store.get(one.key) == one.to_bytes()
        mad.shutdown(socket.SHUT_RDWR)
    assert "secret" not in caplog.text
    assert "\x1b" not in caplog.text
    assert levels(caplog) == ["WARNING"]


def test_a_full_server_is_still_read(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with running("--maxmemory-policy", "noeviction") as server:
        put(RemoteStore(server.url), one := record())
        server.client().config_set("maxmemory", "1")
        store = open_store(server.url, tmp_path)
        put(store, record(1), record(2))
        assert store.get(one.key) == one.to_bytes()
        assert levels(caplog) == ["WARNING"]
        assert "maxmemory" in caplog.text


def test_passwords(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with running("--requirepass", "p@ss/wörd") as server:
        one = record()
        right = f"redis://:p%40ss%2Fw%C3%B6rd@127.0.0.1:{server.port}/3?{PATIENCE}"
        put(open_store(right, tmp_path / "a"), one)
        assert open_store(right, tmp_path / "b").get(one.key) == one.to_bytes()
        assert server.client(password="p@ss/wörd", db=3).dbsize() == 1
        assert caplog.records == []
        for number, url in enumerate((f"redis://:wr0ng@127.0.0.1:{server.port}", f"unix://:wr0ng@{server.socket}")):
            store = open_store(f"{url}?{PATIENCE}", tmp_path / f"wrong{number}")
            for _ in range(3):
                assert store.get(one.key) is None
            assert levels(caplog) == ["WARNING"] * (number + 1)
            assert "AuthenticationError" in caplog.text
        assert "wr0ng" not in caplog.text


# --- processes and threads ---


def test_a_forked_child_connects_for_itself(server: Server, tmp_path: Path) -> None:
    store = RemoteStore(server.url)
    put(store, one := record(0))
    ours = store._opened
    child = os.fork()
    if child == 0:
        try:
            put(store, *(record(number) for number in range(1, 50)))
            good = store.get(one.key) == one.to_bytes() and store._opened is not ours
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    for _ in range(50):
        assert store.get(one.key) == one.to_bytes()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store._opened is ours
    assert len(list(store.keys())) == 50


def test_many_threads(server: Server, tmp_path: Path) -> None:
    store, wrong = open_store(server.url, tmp_path), []

    def work(thread: int) -> None:
        for number in range(thread * 20, thread * 20 + 20):
            put(store, one := record(number))
            if store.get(one.key) != one.to_bytes() or RemoteStore(server.url).get(one.key) != one.to_bytes():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert server.client().dbsize() == 160


def test_a_closed_store_opens_again(server: Server) -> None:
    store = RemoteStore(server.url)
    put(store, one := record())
    store.close()
    assert store.get(one.key) == one.to_bytes()


# --- settings ---

SECRET_URL = "redis://user:s3cret@localhost:1/0?socket_timeout=1&password=s3cret"


def test_secrets_are_shown_nowhere(tmp_path: Path) -> None:
    environ = {**os.environ, "SIDESTEP_CACHE": SECRET_URL, "SIDESTEP_SIGNING_KEY": KEY}
    for arguments in (["settings"], ["settings", "--json"], ["failures", "list"], ["failures", "show", "12"]):
        done = subprocess.run(
            [sys.executable, "-m", "sidestep", *arguments], env=environ, capture_output=True, text=True
        )
        assert "localhost:1" in done.stdout + done.stderr
        for secret in ("s3cret", KEY):
            assert secret not in done.stdout + done.stderr
    settings = Settings.from_environ({"SIDESTEP_CACHE": SECRET_URL, "SIDESTEP_SIGNING_KEY": KEY})
    store = RemoteStore(settings.cache, settings.signing_key)
    with pytest.raises(AwayError) as error:
        store.get(record().key)
    for text in (repr(settings), str(settings), repr(store), str(error.value)):
        assert "s3cret" not in text
        assert KEY not in text
    assert Settings.from_environ(settings.to_environ()) == settings


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis:///0",
        "redis://:s3cret",
        "redis://:s3/cret@localhost",
        "redis://:12/s3cret@localhost",
        "redis://u:12?s3cret=1@localhost",
        "redis://u:12#s3cret@localhost",
        "redis://localhost/s3cret",
        "redis://localhost:s3cret",
        "redis://localhost?socket_timeout=s3cret",
        "redis://localhost?no_such_option=s3cret",
        "unix://:s3cret@",
        "http://:s3cret@localhost",
        "redis:/:s3cret@localhost",
    ],
)
def test_urls_that_cannot_be_used(url: str) -> None:
    with pytest.raises(SettingError, match=r"SIDESTEP_CACHE=.*redis://") as error:
        Settings.from_environ({"SIDESTEP_CACHE": url})
    assert "s3cret" not in str(error.value)
    with pytest.raises(SettingError) as error:
        sidestep.configure(cache=url)
    assert "s3cret" not in str(error.value)


def test_without_the_package_the_setting_says_what_to_install() -> None:
    script = "import sys; sys.modules['redis'] = None; from sidestep import settings; settings.get()"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "SIDESTEP_CACHE": SECRET_URL}, capture_output=True, text=True
    )
    assert "SettingError" in done.stderr
    assert "pip install 'sidestep[redis]'" in done.stderr
    assert "s3cret" not in done.stderr


def test_redis_is_imported_for_such_an_url_only(server: Server) -> None:
    script = "import sys; from sidestep import failures; failures.store().get('a'); print('redis' in sys.modules)"
    for cache, expected in (("disk", "False"), ("off", "False"), (server.url, "True")):
        done = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "SIDESTEP_CACHE": cache}, capture_output=True, text=True
        )
        assert done.stdout.strip() == expected, done.stderr


# --- a warm-up and the fleet ---


def test_what_one_machine_found_refused_no_other_builds(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "problems: [{batch: 1, heads: 2, query_length: 128, head_size: 64, training: true, dtype: float32}]"
    )
    found = []
    for machine in ("a", "b"):
        environ = {**os.environ, "SIDESTEP_CACHE": server.url, "SIDESTEP_CACHE_DIR": str(tmp_path / machine)}
        done = subprocess.run(
            [sys.executable, "-m", "sidestep", "warmup", str(spec), "--device", "h200", "--json"],
            env=environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        stats = json.loads(done.stdout)["stats"]
        found.append([stats[name] for name in ("builds", "build_failures", "skipped_known_bad")])
    assert found == [[1, 1, 0], [0, 0, 1]]
    # And forgetting is for all that ask the server.
    monkeypatch.setenv("SIDESTEP_CACHE", server.url)
    monkeypatch.setenv("SIDESTEP_CACHE_DIR", str(tmp_path / "b"))
    reload_settings()
    (one,) = failures.records()
    failures.forget(one)
    assert server.client().dbsize() == 0


# --- layers of other kinds ---


class Bundle(MemoryStore):
    """Read, never written."""

    read_only = True


def test_a_read_only_layer(tmp_path: Path) -> None:
    bundle = Bundle()
    for key in "abc":
        bundle.set(key, b"bundled")
    store = Layered(MemoryStore(), DiskStore(tmp_path), bundle)
    assert store.get("a") == b"bundled"
    assert DiskStore(tmp_path).get("a") is None  # it lies on this machine anyway
    store.set("b", b"mine")
    store.set("d", b"mine")
    assert (store.get("b"), bundle.get("b"), bundle.get("d")) == (b"mine", b"bundled", None)
    assert list(store.keys()) == ["b", "d", "a", "c"]
    assert [store.delete(key) for key in ("a", "c", "c", "d", "z")] == [True, True, False, True, False]
    assert bundle.get("c") == b"bundled"
    assert list(store.keys()) == ["b"]
    for other in (store, Layered(MemoryStore(), DiskStore(tmp_path), bundle)):
        assert [other.get(key) for key in "abcd"] == [None, b"mine", None, None]
        assert list(other.keys()) == ["b"]
    store.set("c", b"again")
    assert store.get("c") == b"again"
    assert list(store.keys(newest_first=True)) == ["c", "b"]


def test_a_read_only_layer_under_memory_alone() -> None:
    bundle = Bundle()
    bundle.set("a", b"bundled")
    store = Layered(MemoryStore(), bundle)
    store.set("b", b"mine")
    assert (store.get("a"), store.get("b")) == (b"bundled", b"mine")
    assert sorted(store.keys()) == ["a", "b"]
    assert store.delete("a")
    assert store.get("a") is None
    assert list(store.keys()) == ["b"]


def test_a_disk_that_fails_leaves_memory_and_the_server(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("mine")
    store = open_store(server.url, tmp_path / "file")
    put(store, one := record(0))
    put(RemoteStore(server.url), two := record(1))
    assert levels(caplog) == ["WARNING"]
    assert store.get(one.key) == one.to_bytes()
    assert store.get(two.key) == two.to_bytes()
    server.client().flushall()
    assert (store.get(one.key), store.get(two.key)) == (one.to_bytes(), two.to_bytes())
    assert sorted(store.keys()) == [one.key, two.key]
    assert isinstance(store, Layered)
    assert not store.usable

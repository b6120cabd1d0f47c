"""Bundles: what one machine exports another takes over, and what nobody takes."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from process import reload_settings
from test_warmup import Run, sidestep, spec

import sidestep as package
from sidestep import bundles, cli, failures, stores
from sidestep.cache import FailureRecord, PlanRecord, StoreError, failure_key, frame, plan_key
from sidestep.cache import bundle as bundle_file
from sidestep.cache.bundle import BundleStore, write_bundle
from sidestep.environment import digest
from sidestep.problem import AttentionProblem, Layout

H200: dict[str, str | int] = {"schema": 1, "cudnn": 91900, "device": "NVIDIA H200"}
Record = FailureRecord | PlanRecord


def run(*arguments: object) -> click.testing.Result:
    """The command in this process."""
    return click.testing.CliRunner().invoke(cli.main, list(map(str, arguments)), prog_name="sidestep")


def told(*arguments: object, code: int = 0) -> Any:
    """What `--json` gives."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    data = json.loads(result.stdout)
    assert data["schema"] == 1
    return data


def problem(number: int) -> AttentionProblem:
    layout = Layout.of((1, 1, number + 1, 64))
    return AttentionProblem("cuda", "float32", layout, layout, layout, scale=0.125, training=True)


def failure(number: int, environment: dict[str, Any] = H200, **changes: Any) -> FailureRecord:
    """A record as selection writes it."""
    made = FailureRecord(
        key=failure_key(digest(environment), "cudnn", problem(number).digest()),
        kind="unsupported",
        backend="cudnn",
        direction="backward",
        stage="check_support",
        exception_type="cudnn.cudnnGraphNotSupportedError",
        exception_text="no",
        traceback="Traceback (most recent call last):\n",
        problem=problem(number).to_json(),
        environment=environment,
        first_time=1000.0 + number,
        last_time=2000.0 + number,
        count=1,
        duration=0.25,
        built_on="offline",
    )
    return dataclasses.replace(made, **changes)


def plan(number: int, environment: dict[str, Any] = H200, **changes: Any) -> PlanRecord:
    """A plan as selection writes it; its graph is none that loads."""
    made = PlanRecord(
        key=plan_key(digest(environment), "cudnn", problem(number).digest()),
        backend="cudnn",
        names={"forward": "engine 1"},
        problem=problem(number).to_json(),
        environment=environment,
        time=3000.0 + number,
        seconds=1.0,
        built_on="offline",
        graphs={"forward": b"graph" * 100},
    )
    return dataclasses.replace(made, **changes)


def store_of(key: str) -> Any:
    return stores.get("plans" if key.startswith("plan/") else "failures")


def keep(*records: Record) -> None:
    for one in records:
        store_of(one.key).set(one.key, one.to_bytes())


def kept() -> dict[str, bytes]:
    """What the cache itself holds."""
    found = {}
    for name in ("failures", "plans"):
        store = stores.open_own(name)
        found.update({key: value for key in list(store.keys()) if (value := store.get(key))})
        store.close()
    return found


def written(path: Path, *records: Record) -> Path:
    """A bundle of those records."""
    write_bundle(path, [(one, one.to_bytes()) for one in records])
    return path


def use(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Put SIDESTEP_BUNDLE in force, as a new process would."""
    monkeypatch.setenv("SIDESTEP_BUNDLE", ",".join(map(str, paths)))
    reload_settings()


# --- end to end, with real builds for an absent GPU ---

SPEC = """
defaults: {batch: 1, heads: 2, query_length: 128, head_size: 64, training: true}
problems:
  - {dtype: float32}     # refused
  - {training: false}    # built
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Run]:
    """A SPEC, the bundle of the cache that a warm-up of it left, and what the export said."""
    folder = tmp_path_factory.mktemp("exported")
    path, bundle, cache = spec(folder, SPEC), folder / "bundle.zip", str(folder / "cache")
    warmed = sidestep("warmup", path, "--device", "h200", "--json", SIDESTEP_CACHE_DIR=cache)
    assert warmed.code == 0, warmed.stderr
    assert (warmed.json["stats"]["builds"], warmed.json["stats"]["build_failures"]) == (2, 1)
    return path, bundle, sidestep("cache", "export", bundle, "--json", SIDESTEP_CACHE_DIR=cache)


def assert_nothing_was_built(run: Run) -> None:
    assert run.code == 0, run.stderr
    assert [item["outcome"] for item in run.items] == ["known bad", "served"]
    stats = run.json["stats"]
    assert (stats["builds"], stats["loads"], stats["skipped_known_bad"]) == (0, 1, 1)


def test_an_imported_bundle_spares_the_builds(exported: tuple[Path, Path, Run]) -> None:
    path, bundle, export = exported
    assert export.code == 0, export.stderr
    assert [(item["failures"], item["plans"]) for item in export.items] == [(1, 1)]
    taken = sidestep("cache", "import", bundle, "--json", CUDA_VISIBLE_DEVICES="")
    assert taken.code == 0, taken.stderr
    assert (taken.json["written"], taken.json["unchanged"], taken.json["refused"]) == (2, 0, [])
    assert [(item["here"], item["fields"]["device"]) for item in taken.items] == [(False, "NVIDIA H200")]
    assert_nothing_was_built(sidestep("warmup", path, "--device", "h200", "--json"))
    again = sidestep("cache", "import", bundle, CUDA_VISIBLE_DEVICES="")
    assert "0 taken, 2 here already" in again.stderr
    assert "2 of other environments: kept, and used where they belong:\n  cudnn on NVIDIA H200: " in again.stderr
    assert "native code" in again.stderr


def test_a_bundle_beneath_the_cache_spares_them_too(exported: tuple[Path, Path, Run]) -> None:
    path, bundle, _ = exported
    variables = {"SIDESTEP_BUNDLE": str(bundle)}
    assert_nothing_was_built(sidestep("warmup", path, "--device", "h200", "--json", **variables))
    assert kept() == {}
    (listed,) = sidestep("failures", "list", "--json", **variables).items
    assert sidestep("failures", "show", listed["id"], "--json", **variables).items == [listed]
    # Forgotten, it is built, and recorded in the cache, once more.
    assert sidestep("failures", "forget", listed["id"], **variables).code == 0
    assert sidestep("failures", "list", "--json", **variables).items == []
    again = sidestep("warmup", path, "--device", "h200", "--json", **variables)
    assert [item["outcome"] for item in again.items] == ["refused", "served"]
    assert [FailureRecord.from_bytes(value).id for value in kept().values()] == [listed["id"]]


# --- export ---


def test_export_selects(tmp_path: Path) -> None:
    bundle, none = tmp_path / "b.zip", tmp_path / "none.zip"
    other = {**H200, "cudnn": 91000}
    nvfuser = failure(9, backend="nvfuser", key=failure_key(digest(H200), "nvfuser", problem(9).digest()))
    keep(failure(0), failure(1, other), nvfuser, plan(0))
    stores.get("plans").set("wanted/0", frame(b"{}"))
    stores.get("failures").set(failure(7).key, b"damaged")

    def names(*options: str) -> set[str]:
        assert run("cache", "export", bundle, *options).exit_code == 0
        with zipfile.ZipFile(bundle) as archive:
            assert archive.testzip() is None
            return set(archive.namelist()) - {"manifest.json"}

    assert names() == {failure(0).key, failure(1, other).key, nvfuser.key, plan(0).key}
    assert names("--failures-only") == {failure(0).key, failure(1, other).key, nvfuser.key}
    assert names("--plans-only") == {plan(0).key}
    assert names("--backend", "nvfuser") == {nvfuser.key}
    assert names("--environment", digest(other)[:6]) == {failure(1, other).key}
    assert [one["name"] for one in told("cache", "export", bundle)["refused"]] == [failure(7).key]
    nothing = run("cache", "export", none, "--backend", "nobody")
    assert (nothing.exit_code, none.exists()) == (1, False)
    assert "nothing to export" in nothing.stderr
    assert run("cache", "export", bundle, "--plans-only", "--failures-only").exit_code == 2
    assert run("cache", "export", tmp_path / "no" / "folder" / "b.zip").exit_code == 1


def test_the_same_records_make_the_same_entries(tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        with zipfile.ZipFile(written(tmp_path / name, failure(0), plan(0))) as archive:
            contents.append([(i.filename, i.date_time, i.CRC, i.file_size) for i in archive.infolist()[:-1]])
            manifest = json.loads(archive.read("manifest.json"))
    assert contents[0] == contents[1]
    assert manifest["counts"] == {"failure": 1, "plan": 1}
    assert manifest["environments"] == {digest(H200): H200}


def test_a_bundle_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = written(tmp_path / "b.zip", failure(0))
    before = path.read_bytes()

    def broken() -> Iterator[tuple[Record, bytes]]:
        yield failure(1), failure(1).to_bytes()
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_bundle(path, broken())
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "sidestep-cache"] == ["b.zip"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("command", [["export"], ["merge", "in.zip", "-o"]])
def test_only_a_bundle_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    keep(failure(0))
    monkeypatch.chdir(tmp_path)
    written(Path("in.zip"), failure(1))
    (tmp_path / "spec.yaml").write_text("problems: []")
    with zipfile.ZipFile("model.zip", "w") as archive:
        archive.writestr("weights", "1 2 3")
    os.mkfifo("pipe")
    Path("folder").mkdir()
    before = {name: Path(name).read_bytes() for name in ("spec.yaml", "model.zip")}
    for name in ("spec.yaml", "model.zip", "pipe", "folder", ""):
        done = run("cache", *command, name)
        assert done.exit_code in (1, 2), name
        assert isinstance(done.exception, SystemExit), name
        assert name in done.stderr
        assert "Error" in done.stderr
    assert {name: Path(name).read_bytes() for name in before} == before
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)
    (tmp_path / "link").symlink_to("target")
    Path("empty").touch()
    for name in ("link", "link", "empty"):
        assert run("cache", *command, name).exit_code == 0
    assert Path("link").is_symlink()
    assert len(list(BundleStore(Path("target")).keys())) == len(list(BundleStore(Path("empty")).keys())) == 1


# --- import: what is refused ---


def rezipped(path: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """The bundle with other contents, and a manifest that counts them."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    manifest = json.loads(entries.pop("manifest.json"))
    kinds = [name.partition("/")[0] for name in entries]
    manifest["counts"] = {kind: kinds.count(kind) for kind in ("failure", "plan")}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
        archive.writestr("manifest.json", json.dumps(manifest))


def patched(path: Path, name: str, central: int, local: int, value: bytes) -> None:
    """Other bytes in both headers of an entry (APPNOTE.TXT, 4.3.7 and 4.3.12)."""
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02")
    while data[start + 46 : start + 46 + len(name)] != name.encode():
        start = data.index(b"PK\x01\x02", start + 1)
    data[start + central : start + central + len(value)] = value
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo(name).header_offset
    data[start + local : start + local + len(value)] = value
    path.write_bytes(data)


BAD = failure(1, last_time=1.7e9)


def changed(**changes: Any) -> Callable[[Path], None]:
    """The record under its own name with something else in it, framed anew."""
    data = frame(json.dumps({**BAD.to_json(), **changes}, sort_keys=True).encode())
    return lambda path: rezipped(path, lambda entries: entries.update({BAD.key: data}))


def flipped(path: Path) -> None:
    """One bit of the contents."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(BAD.key)
    data[info.header_offset + 30 + len(BAD.key) + info.compress_size // 2] ^= 4
    path.write_bytes(data)


def lzma(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data, zipfile.ZIP_LZMA if name == BAD.key else zipfile.ZIP_STORED)


def bomb(path: Path) -> None:
    rezipped(path, lambda entries: entries.update({BAD.key: b" " * (2**24 + 1)}))


def named_twice(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(BAD.key, BAD.to_bytes())


def without_frame(path: Path) -> None:
    rezipped(path, lambda entries: entries.update({BAD.key: entries[BAD.key].partition(b"\n")[2]}))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "frame": (without_frame, "header"),
    "field": (changed(kind="nonsense"), "'kind' must be"),
    "key": (changed(key=failure(5).key), "its name says"),
    "problem": (changed(problem=problem(5).to_json()), "its name says"),
    "environment": (changed(environment={**H200, "driver": 1}), "its name says"),
    "backend": (changed(backend="nvfuser"), "its name says"),
    "a problem of no version": (changed(problem={"heads": 8}), "cannot be read by this version"),
    "a number too large": (changed(problem={**BAD.problem, "scale": 10**400}), "cannot be read by this version"),
    "crc": (flipped, ""),
    "encrypted": (lambda path: patched(path, BAD.key, 8, 6, b"\x01\x00"), "encrypted"),
    "lzma": (lzma, "compressed in a way"),
    "bomb": (bomb, "16777217 bytes"),
    "a size that is not so": (lambda path: patched(path, BAD.key, 24, 22, b"\xff\xff\x00\x00"), ""),
    "twice": (named_twice, "named twice"),
}


# The others are entries like any other: their lies are found where a record is compared with what it is asked for.
UNREADABLE = {"crc", "encrypted", "lzma", "bomb", "a size that is not so", "twice"}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_is_refused_and_the_rest_taken(case: str, tmp_path: Path) -> None:
    spoil, reason = DAMAGE[case]
    path = written(tmp_path / "b.zip", failure(0), BAD, plan(0))
    spoil(path)
    result = told("cache", "import", path, code=1)
    refused = {one["name"]: one["reason"] for one in result["refused"]}
    assert set(refused) - {"manifest.json"} == {BAD.key}
    assert reason in refused[BAD.key]
    assert set(kept()) == {failure(0).key, plan(0).key}
    text = run("cache", "import", path)
    assert text.exit_code == 1
    assert f"refused: {BAD.key}: " in text.stderr
    assert (BundleStore(path).get(BAD.key) is None) is (case in UNREADABLE)


def test_names_that_are_no_keys_are_refused_and_never_paths(tmp_path: Path) -> None:
    path = written(tmp_path / "b.zip", failure(0))
    evil = failure(1, backend="../../..")
    evil = dataclasses.replace(evil, key=failure_key(digest(H200), evil.backend, problem(1).digest()))
    strange = {
        "../../evil": b"x",
        "/etc/evil": b"x",
        "failure/": b"",
        "wanted/0": frame(b"{}"),
        evil.key: evil.to_bytes(),
    }
    rezipped(path, lambda entries: entries.update(strange))
    result = told("cache", "import", path, code=1)
    assert {one["name"] for one in result["refused"]} == {*strange}
    assert set(kept()) == {failure(0).key}
    assert not list(tmp_path.rglob("*evil*"))


def test_an_entry_that_was_taken_out_is_missed(tmp_path: Path) -> None:
    path = written(tmp_path / "b.zip", failure(0))
    with zipfile.ZipFile(path) as archive:
        manifest = archive.read("manifest.json")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", manifest)
    (refused,) = told("cache", "import", path, code=1)["refused"]
    assert (refused["name"], "the file holds failure 0" in refused["reason"]) == ("manifest.json", True)


def newer_schema(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps({"schema": 2, "counts": {"failure": 0, "plan": 0}}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def no_manifest(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(failure(0).key, failure(0).to_bytes())


NO_BUNDLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda path: path.write_text("hello"), "not a zip"),
    "empty": (lambda path: path.write_bytes(b""), "not a zip"),
    "cut short": (cut, "not a zip"),
    "missing": (lambda path: path.unlink(), "No such file"),
    "pipe": (pipe, "not a regular file"),
    "a zip of something else": (no_manifest, "without manifest.json"),
    "of a later version": (newer_schema, "schema is 2, and this version reads 1"),
}


@pytest.mark.parametrize("case", NO_BUNDLE)
def test_what_is_no_bundle_is_1_and_changes_nothing(case: str, tmp_path: Path) -> None:
    spoil, reason = NO_BUNDLE[case]
    path = written(tmp_path / "b.zip", failure(0))
    spoil(path)
    for command in (("import", path), ("info", path), ("merge", path, "-o", tmp_path / "c.zip")):
        result = run("cache", *command)
        assert result.exit_code == 1
        assert isinstance(result.exception, SystemExit)
        assert str(path) in result.stderr
        assert reason in result.stderr
    assert kept() == {}
    assert not (tmp_path / "c.zip").exists()


def test_without_a_cache_there_is_nothing_to_import_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTEP_CACHE", "off")
    reload_settings()
    result = run("cache", "import", written(tmp_path / "b.zip", failure(0)))
    assert result.exit_code == 1
    assert "SIDESTEP_CACHE=off" in result.stderr


def test_a_cache_that_cannot_be_used_is_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "b.zip", failure(0))
    (tmp_path / "file").touch()
    monkeypatch.setenv("SIDESTEP_CACHE_DIR", str(tmp_path / "file"))
    reload_settings()
    for command in ("import", "export"):
        result = run("cache", command, path)
        assert (result.exit_code, isinstance(result.exception, SystemExit)) == (1, True)


# --- plans are native code ---


def test_plans_of_a_file_that_others_can_write_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "b.zip", failure(0), plan(0), plan(1))
    path.chmod(0o664)
    result = told("cache", "import", path, code=1)
    (refused,) = result["refused"]
    assert refused["name"] == "2 plans"
    assert "chmod go-w" in refused["reason"]
    assert set(kept()) == {failure(0).key}
    store = BundleStore(path)
    assert list(store.keys()) == [failure(0).key]
    assert store.get(plan(0).key) is None
    # What is asked for is taken, and is no failure then.
    assert told("cache", "import", path, "--failures-only")["refused"] == []
    # A merge would make them ours.
    assert told("cache", "merge", path, "-o", tmp_path / "c.zip", code=1)["refused"] == [refused]
    assert list(BundleStore(tmp_path / "c.zip").keys()) == [failure(0).key]
    path.chmod(0o644)
    assert told("cache", "import", path)["refused"] == []
    assert set(kept()) == {failure(0).key, plan(0).key, plan(1).key}


@pytest.mark.parametrize(("owner", "mode", "trusted"), [(0, 0o644, True), (None, 0o600, True), (12345, 0o600, False)])
def test_plans_are_ours_or_roots(owner: int | None, mode: int, trusted: bool) -> None:
    uid = os.geteuid() if owner is None else owner
    status = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, uid, 0, 1, 0, 0, 0))
    assert (bundle_file._distrust(status) == "") is trusted


# --- two records of one key ---


def test_import_keeps_the_newer_with_the_larger_count(tmp_path: Path) -> None:
    old = failure(0, last_time=5000.0, count=7, first_time=900.0, exception_text="ours")
    keep(old, failure(1, kind="denied"), plan(0, time=9000.0))
    path = written(
        tmp_path / "b.zip",
        failure(0, last_time=6000.0, count=2, exception_text="theirs"),
        failure(1, last_time=9999.0),
        plan(0, time=8000.0, names={"forward": "engine 2"}),
    )
    assert told("cache", "import", path)["written"] == 1
    found = kept()
    merged = FailureRecord.from_bytes(found[old.key])
    assert (merged.exception_text, merged.last_time, merged.first_time, merged.count) == ("theirs", 6000.0, 900.0, 7)
    assert FailureRecord.from_bytes(found[failure(1).key]).kind == "denied"
    assert PlanRecord.from_bytes(found[plan(0).key]).names == {"forward": "engine 1"}
    assert told("cache", "import", path)["written"] == 0
    assert kept() == found


def test_a_newer_plan_replaces_the_cache_s(tmp_path: Path) -> None:
    keep(plan(0))
    path = written(tmp_path / "b.zip", plan(0, time=8000.0, names={"forward": "engine 2"}))
    assert told("cache", "import", path)["written"] == 1
    assert PlanRecord.from_bytes(kept()[plan(0).key]).names == {"forward": "engine 2"}


failure_pairs = st.builds(
    lambda kind, first, last, count, text: failure(
        0, kind=kind, first_time=first, last_time=last, count=count, exception_text=text
    ),
    st.sampled_from(["unsupported", "error", "denied"]),
    st.sampled_from([1.0, 2.0]),
    st.sampled_from([3.0, 4.0]),
    st.integers(1, 3),
    st.sampled_from(["a", "b"]),
)


@hypothesis_settings(max_examples=200, deadline=None)
@given(failure_pairs, failure_pairs)
def test_whichever_comes_first_the_same_is_kept(one: FailureRecord, other: FailureRecord) -> None:
    both = bundles.newer(one, other)
    assert both == bundles.newer(other, one)
    assert bundles.newer(both, one) == bundles.newer(both, other) == both
    assert isinstance(both, FailureRecord)
    assert (both.kind == "denied") is ("denied" in (one.kind, other.kind))


# --- merge ---


def test_merge(tmp_path: Path) -> None:
    a = written(tmp_path / "a.zip", failure(3), failure(0, count=4), plan(0))
    b = written(tmp_path / "b.zip", failure(0, last_time=2500.0), failure(1, {**H200, "driver": 3}))
    orders = []
    for files in ((a, b), (b, a)):
        data = told("cache", "merge", *files, "-o", tmp_path / "c.zip")
        assert sorted((item["failures"], item["plans"]) for item in data["items"]) == [(1, 0), (2, 1)]
        store = BundleStore(tmp_path / "c.zip")
        orders.append({key: store.read(key) for key in list(store.keys())})
        assert list(orders[-1]) == [failure(1, {**H200, "driver": 3}).key, failure(3).key, failure(0).key, plan(0).key]
    assert orders[0] == orders[1]
    one = FailureRecord.from_bytes(orders[0][failure(0).key])
    assert (one.last_time, one.count) == (2500.0, 4)
    # In place, and with something damaged.
    flip = written(tmp_path / "d.zip", BAD, failure(4))
    flipped(flip)
    data = told("cache", "merge", a, flip, "-o", a, code=1)
    assert [(one["name"], one["file"]) for one in data["refused"]] == [(BAD.key, str(flip))]
    assert set(BundleStore(a).keys()) == {failure(3).key, failure(0).key, plan(0).key, failure(4).key}


# --- info and clear ---


def test_info_of_cache_and_bundle(tmp_path: Path) -> None:
    assert told("cache", "info")["items"] == []
    keep(failure(0), failure(1, {"device": "cpu"}), plan(0))
    path = tmp_path / "b.zip"
    assert run("cache", "export", path).exit_code == 0
    for place in ((), (path,)):
        items = told("cache", "info", *place)["items"]
        assert {item["environment"]: (item["failures"], item["plans"], item["fields"]) for item in items} == {
            digest(H200): (1, 1, H200),
            digest({"device": "cpu"}): (1, 0, {"device": "cpu"}),
        }
        assert sum(item["bytes"] for item in items) == sum(map(len, kept().values()))
        assert digest(H200) in run("cache", "info", *place).stdout


def test_clear() -> None:
    keep(failure(0), plan(0), plan(1))
    assert run("cache", "clear").exit_code == 2
    assert told("cache", "clear", "--plans")["items"] == [{"kind": "plan", "deleted": 2}]
    assert set(kept()) == {failure(0).key}
    assert run("cache", "clear", "--all").exit_code == 0
    assert kept() == {}


# --- SIDESTEP_BUNDLE ---


def test_bundles_lie_beneath_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = written(tmp_path / "a.zip", failure(0, exception_text="a"), failure(1))
    b = written(tmp_path / "b.zip", failure(0, exception_text="b"), failure(2))
    use(monkeypatch, a, b)
    keep(failure(1, exception_text="ours"))
    assert [(r.key, r.exception_text) for r in failures.records()] == [
        (failure(1).key, "ours"),
        (failure(0).key, "a"),
        (failure(2).key, "no"),
    ]
    assert set(kept()) == {failure(1).key}
    # What fails once more continues the bundle's history, in the cache.
    failures.keep(failure(2, last_time=9000.0))
    assert FailureRecord.from_bytes(kept()[failure(2).key]).count == 2


def test_what_is_forgotten_stays_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, written(tmp_path / "a.zip", failure(0), plan(0)))
    assert run("failures", "forget", failure(0).id).exit_code == 0
    stores.get("plans").delete(plan(0).key)
    for _ in range(2):
        assert run("failures", "show", failure(0).id).exit_code == 1
        assert failures.remembered(failure(0).key, problem(0), H200) is None
        assert (list(failures.records()), list(stores.get("plans").keys("plan/"))) == ([], [])
        assert stores.get("plans").get(plan(0).key) is None
        reload_settings()  # as in a new process
    assert run("cache", "export", tmp_path / "none.zip").exit_code == 1  # what hides is no record
    monkeypatch.delenv("SIDESTEP_BUNDLE")
    reload_settings()
    assert list(failures.records()) == []
    # Imported, it is there again.
    assert told("cache", "import", tmp_path / "a.zip")["written"] == 2


def attend() -> torch.Tensor:
    query = torch.randn(1, 2, 8, 16)
    return package.scaled_dot_product_attention(query, query, query)


@pytest.mark.parametrize("case", NO_BUNDLE)
def test_a_bundle_that_cannot_be_read_is_one_warning(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "b.zip", failure(0))
    NO_BUNDLE[case][0](path)
    use(monkeypatch, path, written(tmp_path / "good.zip", failure(1)))
    with caplog.at_level(logging.WARNING, "sidestep"):
        assert attend().shape == (1, 2, 8, 16)
        assert [r.key for r in failures.records()] == [failure(1).key]
        assert list(stores.get("plans").keys("plan/")) == []
    (warning,) = caplog.messages
    assert str(path) in warning
    assert "make it anew, or leave it out of SIDESTEP_BUNDLE" in warning


def test_a_bundle_s_lies_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: BAD.last_time)
    for case in ("key", "problem", "environment", "a number too large", "crc", "twice"):
        path = written(tmp_path / f"{len(case)}.zip", BAD)
        DAMAGE[case][0](path)
        use(monkeypatch, path)
        assert failures.remembered(BAD.key, problem(1), H200) is None
    use(monkeypatch, written(tmp_path / "good.zip", BAD))
    found = failures.remembered(BAD.key, problem(1), H200)
    assert found is not None
    assert found.to_bytes() == BAD.to_bytes()


def test_plans_beneath_the_cache_need_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "b.zip", failure(0), plan(0))
    use(monkeypatch, path)
    assert stores.get("plans").get(plan(0).key) == plan(0).to_bytes()
    path.chmod(0o666)
    use(monkeypatch, path)
    with caplog.at_level(logging.WARNING, "sidestep"):
        assert stores.get("plans").get(plan(0).key) is None
        assert stores.get("failures").get(failure(0).key) == failure(0).to_bytes()
    (warning,) = caplog.messages
    assert str(path) in warning
    assert "chmod go-w" in warning


def test_a_bundle_is_never_written(tmp_path: Path) -> None:
    path = written(tmp_path / "b.zip", failure(0))
    store = BundleStore(path)
    for write in (lambda: store.set("failure/a", b""), lambda: store.delete(failure(0).key)):
        with pytest.raises(StoreError, match="never written"):
            write()
    assert store.read_only
    assert list(store.keys("failure/", newest_first=True)) == [failure(0).key]
    assert list(store.keys("plan/")) == []
    store.close()
    assert store.get(failure(0).key) == failure(0).to_bytes()


def test_threads_and_forked_children_read_one_bundle(tmp_path: Path) -> None:
    records = [failure(number, traceback=str(number) * 5000) for number in range(50)]
    store = BundleStore(written(tmp_path / "b.zip", *records))
    expected = {one.key: one.to_bytes() for one in records}
    wrong = []

    def read() -> bool:
        return all(store.get(key) == value for _ in range(10) for key, value in expected.items())

    assert store.get(records[0].key) == expected[records[0].key]
    children = []
    for _ in range(2):
        if (child := os.fork()) == 0:
            os._exit(0 if read() else 1)
        children.append(child)
    threads = [threading.Thread(target=lambda: wrong.extend([] if read() else [1])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert wrong == []


def test_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIDESTEP_BUNDLE", " a.zip, /x/b.zip,")
    reload_settings()
    from sidestep import settings

    assert settings.get().bundle == (str(tmp_path / "a.zip"), "/x/b.zip")
    assert settings.get().to_environ()["SIDESTEP_BUNDLE"] == f"{tmp_path}/a.zip,/x/b.zip"
    package.configure(bundle=[tmp_path / "c.zip"])
    assert settings.get().bundle == (str(tmp_path / "c.zip"),)

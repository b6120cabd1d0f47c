"""Records: when a failure is tried again, and that only what was written is read."""

import dataclasses
import hashlib
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.cache import DamagedRecordError, FailureRecord, failure_key, frame, record_id, unframe

DAY = 86400.0
RECORD = FailureRecord(
    key=failure_key("e0", "cudnn", "p0"),
    kind="error",
    backend="cudnn",
    direction="forward",
    stage="build_plans",
    exception_type="builtins.RuntimeError",
    exception_text="no",
    traceback="Traceback (most recent call last):\n...",
    problem={"heads": 8},
    environment={"backend": "cudnn", "version": 91900},
    first_time=1000.0,
    last_time=2000.0,
    count=1,
    duration=0.5,
    built_on="local",
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), json_values, max_size=4)
# Lone surrogates included: a traceback quotes file names as Python sees them.
texts = st.text(st.characters())
seconds = st.floats(min_value=0, max_value=1e11)
records = st.builds(
    FailureRecord,
    key=texts,
    kind=st.sampled_from(["unsupported", "error", "crash", "timeout", "wrong", "denied"]),
    backend=texts,
    direction=st.sampled_from(["forward", "backward"]),
    stage=texts,
    exception_type=texts,
    exception_text=texts,
    traceback=texts,
    problem=objects,
    environment=objects,
    first_time=seconds,
    last_time=seconds,
    count=st.integers(1, 10**9),
    duration=seconds,
    built_on=st.sampled_from(["local", "offline"]),
)


@settings(max_examples=50, deadline=None)
@given(records)
def test_round_trip(record):
    assert FailureRecord.from_bytes(record.to_bytes()) == record
    assert FailureRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_changed_byte_is_damage(data):
    good = RECORD.to_bytes()
    place = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != good[place]))
    bad = good[:place] + bytes([byte]) + good[place + 1 :]
    try:
        read = FailureRecord.from_bytes(bad)
    except DamagedRecordError:
        return
    # White space in the header line is all that may differ.
    assert read == RECORD
    assert place < good.index(b"\n")


@pytest.mark.parametrize("length", [0, 1, 50, 100, 101, 200])
def test_a_truncated_record_is_damaged(length):
    with pytest.raises(DamagedRecordError):
        FailureRecord.from_bytes(RECORD.to_bytes()[:length])


def header(payload, **changes):
    return (
        json.dumps({"schema": 1, "sha256": hashlib.sha256(payload).hexdigest(), **changes}).encode() + b"\n" + payload
    )


@pytest.mark.parametrize(
    "data",
    [
        None,
        "text",
        bytearray(frame(b"{}")),
        b"[]\n{}",
        b"[" * 100_000 + b"\n",
        header(b"{}", schema=2),
        header(b"{}", schema=True),
        header(b"{}", schema=1.0),
        header(b"{}", sha256="0" * 64),
        header(b"{}", more=1),
    ],
)
def test_bad_frames(data):
    with pytest.raises(DamagedRecordError):
        unframe(data)


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b"{}", b"null", b"\xff", b"[" * 100_000])
def test_a_good_frame_round_other_things_is_damaged(payload):
    assert unframe(frame(payload)) == payload
    with pytest.raises(DamagedRecordError):
        FailureRecord.from_bytes(frame(payload))


WRONG = {
    "key": [None, 1, b"x"],
    "kind": ["transient", "", None, ["error"]],
    "backend": [1],
    "direction": ["sideways"],
    "stage": [None],
    "exception_type": [0],
    "exception_text": [[]],
    "traceback": [{}],
    "problem": [[], "x", None],
    "environment": [[], 3],
    "first_time": ["1", None, True, float("nan"), float("inf"), 10**400],
    "last_time": [False, float("-inf")],
    "count": [0, -1, 1.0, True, "1"],
    "duration": [None, float("nan")],
    "built_on": ["remote"],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])  # type: ignore[attr-defined]
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"'{field}'"):
        FailureRecord.from_json({**RECORD.to_json(), field: value})


def test_every_field_is_tried_above():
    assert WRONG.keys() == {field.name for field in dataclasses.fields(FailureRecord)}


def test_missing_and_unknown_fields_are_named():
    data = RECORD.to_json()
    with pytest.raises(ValueError, match="'colour' is unknown"):
        FailureRecord.from_json({**data, "colour": "red"})
    del data["stage"]
    with pytest.raises(ValueError, match="'stage' is missing"):
        FailureRecord.from_json(data)


def test_key_and_id():
    assert RECORD.key == "failure/e0/cudnn/p0"
    assert RECORD.id == record_id(RECORD.key) == hashlib.sha256(b"failure/e0/cudnn/p0").hexdigest()[:12]


@pytest.mark.parametrize(
    ("kind", "count", "days"),
    [
        ("unsupported", 1, 30),
        ("unsupported", 9, 30),
        ("error", 1, 1),
        ("error", 2, 2),
        ("error", 3, 4),
        ("error", 5, 16),
        ("error", 6, 30),
        ("error", 10**12, 30),
        ("timeout", 1, 1),
        ("timeout", 4, 8),
        ("crash", 1, None),
        ("wrong", 1, None),
        ("denied", 1, None),
    ],
)
def test_when_it_is_tried_again(kind, count, days):
    record = dataclasses.replace(RECORD, kind=kind, count=count)
    if days is None:
        assert record.retry_time() is None
        assert record.is_valid(1e12)
        assert record.is_valid(-1e12)
    else:
        retry = 2000.0 + days * DAY
        assert record.retry_time() == retry
        assert record.is_valid(retry - 1)
        assert not record.is_valid(retry)
        # A clock may be set back a little; a record from next year is one of a clock gone wrong.
        assert record.is_valid(2000.0 - 0.9 * DAY)
        assert not record.is_valid(2000.0 - DAY)


def test_again_keeps_the_history():
    newer = dataclasses.replace(
        RECORD, kind="timeout", traceback="t", first_time=9.0, last_time=9000.0, count=1, duration=7.0
    )
    merged = dataclasses.replace(RECORD, count=4).again(newer)
    assert merged == dataclasses.replace(newer, first_time=1000.0, count=5)
    with pytest.raises(ValueError, match="failure/e/b/p"):
        RECORD.again(dataclasses.replace(newer, key="failure/e/b/p"))


def test_the_import_is_light():
    code = (
        "import sys, sidestep.cache; print([m for m in ('torch', 'cudnn', 'diskcache', 'sqlite3') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"

"""AttentionProblem: everything a backend may know of a call, the same after JSON, and one name for one meaning."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.problem import (
    DTYPES,
    AttentionProblem,
    Layout,
    Mask,
    canonical_stride,
    contiguous_stride,
    default_scale,
    memory_order,
)

shapes = st.tuples(*[st.integers(0, 5)] * 4)
strides = st.tuples(*[st.integers(0, 10**6)] * 4)
layouts = st.builds(Layout.of, shapes, st.none() | strides)
masks = st.builds(
    lambda layout, dtype, grad: Mask(layout.shape, layout.stride, dtype, grad),
    layouts,
    st.sampled_from(("bool", *DTYPES)),
    st.booleans(),
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
problems = st.builds(
    AttentionProblem,
    device=st.sampled_from(["cuda", "cpu"]),
    dtype=st.sampled_from(DTYPES),
    query=layouts,
    key=layouts,
    value=layouts,
    mask=st.none() | masks,
    is_causal=st.booleans(),
    dropout_p=st.floats(0, 1),
    scale=numbers,
    training=st.booleans(),
    deterministic=st.booleans(),
)
PLAIN = AttentionProblem(
    "cuda", "bfloat16", Layout.of((2, 8, 5, 64)), Layout.of((2, 4, 7, 64)), Layout.of((2, 4, 7, 32)), scale=0.125
)


def indices(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """The element that each index addresses."""
    return [sum(i * s for i, s in zip(at, stride, strict=True)) for at in itertools.product(*map(range, shape))]


@settings(deadline=None)
@given(problems)
def test_json_round_trip(problem: AttentionProblem) -> None:
    """Through text: the same problem, the same digest."""
    back = AttentionProblem.from_json(json.loads(json.dumps(problem.to_json())))
    assert back == problem
    assert hash(back) == hash(problem)
    assert back.digest() == problem.digest()
    assert str(back) == str(problem)


@settings(deadline=None)
@given(problems, problems)
def test_digests_tell_problems_apart(one: AttentionProblem, other: AttentionProblem) -> None:
    assert (one.digest() == other.digest()) == (one == other)
    assert len(one.digest()) == 32
    assert int(one.digest(), 16) >= 0


@pytest.mark.parametrize("field", [item.name for item in dataclasses.fields(AttentionProblem)])
def test_every_field_is_in_the_digest(field: str) -> None:
    changed: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float16",
        "query": Layout.of((2, 8, 5, 64), (2560, 64, 512, 1)),
        "key": Layout.of((2, 4, 9, 64)),
        "value": Layout.of((2, 4, 7, 64)),
        "mask": Mask((1, 1, 1, 7), (7, 7, 7, 1)),
        "is_causal": True,
        "dropout_p": 0.1,
        "scale": 1.0,
        "training": True,
        "deterministic": True,
    }
    other = dataclasses.replace(PLAIN, **{field: changed[field]})
    assert other != PLAIN
    assert other.digest() != PLAIN.digest()


def test_the_mask_is_in_the_digest() -> None:
    mask = Mask((1, 1, 5, 7), (35, 35, 7, 1))
    variants = [
        mask,
        dataclasses.replace(mask, dtype="float32"),
        dataclasses.replace(mask, requires_grad=True),
        dataclasses.replace(mask, stride=(35, 35, 1, 5)),
        dataclasses.replace(mask, shape=(1, 1, 1, 7)),
    ]
    assert len({dataclasses.replace(PLAIN, mask=m).digest() for m in variants}) == len(variants)


def test_digests_are_the_same_in_every_process() -> None:
    """No hash seed, no order of a set: keys outlive processes. And torch is not imported for it."""
    script = (
        "import json, sys; from sidestep.problem import AttentionProblem\n"
        "print(AttentionProblem.from_json(json.loads(sys.argv[1])).digest(), 'torch' in sys.modules)"
    )
    for seed in ("0", "1"):
        command = [sys.executable, "-c", script, json.dumps(PLAIN.to_json())]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed})
        assert done.stdout.split() == [PLAIN.digest(), "False"]


def test_the_digest_of_a_problem_is_fixed() -> None:
    """A change here makes every record and plan that people have unreachable: raise the schema with it."""
    assert PLAIN.digest() == "6204a3c4b05680d2edbe47337fa2bec8"


# --- strides --------------------------------------------------------------------------------------------------------


@given(shapes, strides)
def test_canonical_strides_address_the_same_elements(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    made = canonical_stride(shape, stride)
    assert indices(shape, made) == indices(shape, stride)
    assert canonical_stride(shape, made) == made
    assert all(a == b for a, b, size in zip(made, stride, shape, strict=True) if size != 1)


@given(shapes, strides, strides)
def test_layouts_of_the_same_elements_are_equal(shape: Any, one: Any, other: Any) -> None:
    """Only the strides of dimensions of size 1 are free, and they do not count."""
    mixed = tuple(a if size != 1 else b for a, b, size in zip(one, other, shape, strict=True))
    assert Layout.of(shape, one) == Layout.of(shape, mixed)


@given(shapes, st.permutations(range(4)))
def test_memory_order_of_dense_layouts(shape: tuple[int, ...], order: list[int]) -> None:
    """The order in which a dense tensor was laid out, apart from dimensions that have no extent."""
    stride = contiguous_stride(shape, order)
    found = [dim for dim in memory_order(shape, stride) if shape[dim] > 1]
    if 0 not in shape:
        assert found == [dim for dim in order if shape[dim] > 1]
    assert sorted(memory_order(shape, stride)) == [0, 1, 2, 3]


@given(shapes, strides, shapes)
def test_dense_strides_are_dense(shape: Any, stride: Any, other: Any) -> None:
    """Every element of a dense layout has a place of its own, and none is wasted."""
    for given_shape in (None, other):
        wanted = shape if given_shape is None else other
        made = Layout.of(shape, stride).dense(given_shape)
        assert sorted(indices(wanted, made)) == list(range(len(indices(wanted, made))))


@given(problems)
def test_the_output_is_dense_with_the_head_size_innermost(problem: AttentionProblem) -> None:
    shape, stride = problem.output_shape, problem.output_stride
    assert shape == (*problem.query.shape[:3], problem.value.shape[3])
    assert stride[3] == 1
    assert sorted(indices(shape, stride)) == list(range(len(indices(shape, stride))))


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((2, 4, 8, 16), (512, 128, 16, 1), (512, 128, 16, 1)),
        ((2, 4, 8, 16), (512, 16, 64, 1), (512, 16, 64, 1)),
        ((2, 4, 8, 16), (16, 32, 128, 1), (16, 32, 128, 1)),
        ((2, 4, 8, 16), (4096, 16, 512, 1), (512, 16, 64, 1)),
        ((2, 4, 8, 16), (0, 128, 16, 1), (512, 128, 16, 1)),
        ((2, 4, 8, 16), (128, 0, 16, 1), (512, 128, 16, 1)),
        ((1, 4, 1, 16), (7, 16, 3, 1), (64, 16, 16, 1)),
    ],
)
def test_the_output_follows_the_query(shape: Any, stride: Any, expected: Any) -> None:
    """Contiguous, (B, S, H, D), (S, H, B, D), a slice of a packed buffer, expanded batches, expanded heads."""
    query = Layout.of(shape, stride)
    problem = dataclasses.replace(PLAIN, query=query, key=query, value=query)
    made = problem.output_stride
    assert [m for m, size in zip(made, shape, strict=True) if size > 1] == [
        e for e, size in zip(expected, shape, strict=True) if size > 1
    ]


# --- reading --------------------------------------------------------------------------------------------------------


def test_what_may_be_left_out() -> None:
    shape = {"shape": [2, 8, 5, 64]}
    problem = AttentionProblem.from_json(
        {
            "device": "cpu",
            "dtype": "float32",
            "query": shape,
            "key": shape,
            "value": shape,
            "mask": {"shape": [1, 1, 5, 5]},
        }
    )
    assert problem.query.stride == (2560, 320, 64, 1)
    assert problem.scale == default_scale(64) == 0.125
    assert problem.mask == Mask((1, 1, 5, 5), (25, 25, 5, 1), "bool", False)
    assert (problem.is_causal, problem.dropout_p, problem.training, problem.deterministic) == (False, 0.0, False, False)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sizes": 3}, "unknown field sizes"),
    ({"device": "tpu"}, "device"),
    ({"dtype": "float8"}, "dtype"),
    ({"query": {"shape": [1, 2, 3]}}, "query.shape"),
    ({"query": {"shape": [1, 2, 3, -4]}}, "query.shape"),
    ({"query": {"shape": [1, 2, 3, 4.0]}}, "query.shape"),
    ({"query": {"shape": [1, 2, 3, True]}}, "query.shape"),
    ({"query": [1, 2, 3, 4]}, "query"),
    ({"key": {"shape": [1, 2, 3, 4], "stride": [1, 2]}}, "key.stride"),
    ({"value": {"shape": [1, 2, 3, 4], "dtype": "bool"}}, "value"),
    ({"mask": {"shape": [1, 1, 5, 7], "dtype": "int8"}}, "mask"),
    ({"mask": {"shape": [1, 1, 5, 7], "requires_grad": 1}}, "mask"),
    ({"mask": {"stride": [1, 1, 5, 7]}}, "mask"),
    ({"is_causal": 1}, "is_causal"),
    ({"training": "yes"}, "training"),
    ({"dropout_p": "0.1"}, "dropout_p"),
    ({"dropout_p": True}, "dropout_p"),
    ({"scale": [1]}, "scale"),
]


@pytest.mark.parametrize(("change", "text"), WRONG, ids=[str(change) for change, _ in WRONG])
def test_what_cannot_be_read_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        AttentionProblem.from_json({**PLAIN.to_json(), **change})


@pytest.mark.parametrize("name", ["device", "dtype", "query", "key", "value"])
def test_what_is_missing_is_named(name: str) -> None:
    data = PLAIN.to_json()
    del data[name]
    with pytest.raises(ValueError, match=f"missing field {name}"):
        AttentionProblem.from_json(data)


@pytest.mark.parametrize("data", [None, [], "problem", 3])
def test_what_is_no_object(data: Any) -> None:
    with pytest.raises(ValueError, match="expected an object"):
        AttentionProblem.from_json(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.sampled_from([item.name for item in dataclasses.fields(AttentionProblem)]), JSON)
def test_nothing_but_a_value_error(name: str, value: Any) -> None:
    """A damaged record must be a miss, so reading raises ValueError or succeeds, whatever is in a field."""
    try:
        problem = AttentionProblem.from_json({**PLAIN.to_json(), name: value})
    except ValueError:
        return
    assert AttentionProblem.from_json(problem.to_json()).digest() == problem.digest()


def test_one_line_for_people() -> None:
    assert str(PLAIN) == ("bfloat16 cuda, batch 2, heads 8, kv_heads 4, length 5x7, head_size 64/32, inference")
    other = dataclasses.replace(
        PLAIN,
        query=Layout.of((2, 8, 5, 64), (2560, 64, 512, 1)),
        mask=Mask((1, 1, 5, 7), (35, 35, 7, 1), "float32", True),
        dropout_p=0.25,
        scale=0.5,
        training=True,
    )
    for part in ("strided", "float32 mask 1x1x5x7, mask gradient", "dropout 0.25", "scale 0.5", "training"):
        assert part in str(other)

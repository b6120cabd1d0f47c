"""SPEC files: what they hold, and what is said of those that cannot be used."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sidestep.problem import AttentionProblem, Layout, Mask
from sidestep.spec import FIELDS, SpecError, load, parse, problem_of

ONE = "batch: 2, heads: 4, query_length: 8, head_size: 16"


def problems(text: str) -> list[AttentionProblem]:
    return [item.problem for item in parse(text).items]


def test_defaults_are_those_of_the_design() -> None:
    (problem,) = problems(f"problems: [{{{ONE}}}]")
    layout = Layout.of((2, 4, 8, 16))
    assert problem == AttentionProblem("cuda", "bfloat16", layout, layout, layout, scale=0.25)


def test_every_field() -> None:
    (problem,) = problems(
        "problems: [{batch: 2, heads: 4, kv_heads: 2, query_length: 8, key_length: 10, head_size: 16, "
        "value_head_size: 32, dtype: float16, training: true, mask: same, mask_shape: [B, 1, S_q, S_kv], "
        "mask_grad: true, dropout: 0.5, layout: bshd, scale: 0.1, device: cpu}]"
    )
    assert problem == AttentionProblem(
        device="cpu",
        dtype="float16",
        query=Layout((2, 4, 8, 16), (512, 16, 64, 1)),
        key=Layout((2, 2, 10, 16), (320, 16, 32, 1)),
        value=Layout((2, 2, 10, 32), (640, 32, 64, 1)),
        mask=Mask((2, 1, 8, 10), (80, 80, 10, 1), "float16", True),
        dropout_p=0.5,
        scale=0.1,
        training=True,
    )


def test_lists_mean_every_combination_and_defaults_may_be_lists() -> None:
    found = problems(
        f"defaults: {{{ONE}, dtype: [float16, bfloat16]}}\n"
        "problems: [{head_size: [16, 32, 64], training: [false, true]}]"
    )
    assert len(found) == len(set(found)) == 12
    assert {(p.dtype, p.query.shape[3], p.training) for p in found} == {
        (dtype, size, training)
        for dtype in ("float16", "bfloat16")
        for size in (16, 32, 64)
        for training in (False, True)
    }


def test_mask_shapes_combine_as_lists_of_lists() -> None:
    shapes = "[[1, 1, 1, S_kv], [B, H, S_q, S_kv], [2, 1, 8, 1]]"
    found = problems(f"problems: [{{{ONE}, key_length: 9, mask: [bool, float32], mask_shape: {shapes}}}]")
    assert [(p.mask.shape, p.mask.dtype) for p in found if p.mask] == [
        (shape, dtype) for dtype in ("bool", "float32") for shape in ((1, 1, 1, 9), (2, 4, 8, 9), (2, 1, 8, 1))
    ]


def test_what_cannot_be_in_a_product_is_skipped_and_counted() -> None:
    spec = parse(f"problems: [{{{ONE}, causal: [false, true], mask: [none, bool, float32]}}]")
    assert spec.skipped == 2
    assert [(i.problem.is_causal, i.problem.mask is None) for i in spec.items] == [
        (False, True),
        (False, False),
        (False, False),
        (True, True),
    ]
    spec = parse(f"problems: [{{{ONE}, training: true, mask: [none, bool, same], mask_grad: true}}]")
    assert (len(spec.items), spec.skipped) == (1, 2)


def test_duplicates_are_dropped() -> None:
    items = parse(f"problems: [{{{ONE}}}, {{{ONE}, kv_heads: [4, 2]}}]").items
    assert [item.label for item in items] == ["problems[0]", "problems[1]"]


def test_whole_problems_keep_their_strides() -> None:
    layout = Layout((1, 2, 8, 16), (999, 400, 20, 1))
    strided = AttentionProblem("cuda", "float16", layout, layout, layout, scale=0.25)
    (problem,) = problems(f"problems: [{{problem: {json.dumps(strided.to_json())}}}]")
    assert problem == AttentionProblem.from_json(strided.to_json())
    assert problem.query.stride[1:] == (400, 20, 1)


@pytest.mark.parametrize(
    ("field", "constant"), [("dropout: 1", True), ("key_length: 0", True), ("dropout: 0.9", False)]
)
def test_constant_outputs_are_marked(field: str, constant: bool) -> None:
    (item,) = parse(f"problems: [{{{ONE}, {field}}}]").items
    assert item.constant is constant


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("problems: [", "line 1"),
        ("problems:\n  - {batch: 2\n  - x", "line 3"),
        ("[1, 2]", "expected `problems:`"),
        ("problem: []", "expected `problems:`"),
        ("problems: []", "one entry or more"),
        ("problems: 3", "one entry or more"),
        ("problems: [3]", "problems[0]: expected fields"),
        ("defaults: 3\nproblems: [{}]", "defaults: expected fields"),
        (
            f"problems: [{{{ONE}}}, {{{ONE}, headsize: 3, x: 1}}]",
            "problems[1]: unknown field headsize, x; known: batch",
        ),
        ("defaults: {problem: 1}\nproblems: [{}]", "defaults: unknown field problem"),
        ("problems: [{batch: 1, head_size: 8}]", "problems[0]: missing field heads, query_length"),
        (
            f"problems: [{{{ONE}, dtype: half}}]",
            "dtype: expected one of float16, bfloat16, float32, float64, got 'half'",
        ),
        (f"problems: [{{{ONE}, key_length: -1}}]", "key_length: expected a whole number, 0 or more, got -1"),
        (f"problems: [{{{ONE}, key_length: true}}]", "key_length: expected a whole number, 0 or more, got True"),
        (f"problems: [{{{ONE}, key_length: [1, x]}}]", "key_length: expected a whole number, 0 or more, got 'x'"),
        (f"problems: [{{{ONE}, causal: 1}}]", "causal: expected true or false, got 1"),
        (f"problems: [{{{ONE}, dropout: 1.5}}]", "problems[0]: dropout_p must be a probability from 0 to 1, got 1.5"),
        (f"problems: [{{{ONE}, dropout: .nan}}]", "dropout: expected a probability"),
        (f"problems: [{{{ONE}, scale: .inf}}]", "scale: expected a number"),
        (f"problems: [{{{ONE}, mask: bool, mask_shape: [1, S_q]}}]", "mask_shape: expected four of"),
        (
            f"problems: [{{{ONE}, mask: bool, mask_shape: [3, 1, S_q, S_kv]}}]",
            "problems[0]: attn_mask: shape (3, 1, 8, 8)",
        ),
        (f"problems: [{{{ONE}, mask: bool, causal: true}}]", "problems[0]: causal and a mask cannot be combined"),
        (f"problems: [{{{ONE}, mask: bool, mask_grad: true}}]", "mask_grad needs a mask of float32 or same, got bool"),
        (f"problems: [{{{ONE}, kv_heads: 3}}]", "number of heads of key (3) must divide that of query (4)"),
        (f"problems: [{{{ONE}, kv_heads: 0}}]", "number of heads of key (0)"),
        ("", "expected `problems:` and, if wanted, `defaults:`, found nothing"),
        (f"problems: [{{{ONE}, dtype: []}}]", "problems[0]: dtype: an empty list means no combination"),
        (f"problems: [{{{ONE}, batch: 3}}]", "batch stands there twice"),
        (f"problems: []\nproblems: [{{{ONE}}}]", "problems stands there twice"),
        (f"problems: [{{{ONE}, scale: 1e-3}}]", "write 0.1 or 1.0e-1"),
        ("problems: " + "[" * 100_000, "in one another"),
        ("problems: 2026-99-99", "not YAML: month must be"),
        (
            "defaults: {batch: [1, 2]}\nproblems: [{heads: &n [" + "1, " * 300 + "1], head_size: *n}]",
            "181202 combinations",
        ),
        # A billion of texts, as an alias has them: nobody may write them out, not even for an error.
        (
            "problems: {a: &a [x, x, x, x, x, x, x, x, x, x], "
            + ", ".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in itertools.pairwise("abcdefghi"))
            + "}",
            "one entry or more",
        ),
        ("problems: [{problem: {device: cuda}}]", "problems[0]: problem: missing field dtype, key, query, value"),
        (f"problems: [{{problem: {{}}, {ONE}}}]", "problems[0]: `problem:` holds the whole problem"),
    ],
)
def test_errors_name_the_entry_and_what_was_wrong(text: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert said in str(caught.value)


def test_keys_that_others_are_merged_over_are_no_repetition() -> None:
    text = "defaults: &d {batch: 1, heads: 2, head_size: 4, query_length: 3}\n"
    text += "problems: [&e {<<: *d, batch: 5}, {<<: *e, batch: 6}, {<<: [*e, *d], heads: 7}]"
    assert [problem.query.shape for problem in problems(text)] == [(5, 2, 3, 4), (6, 2, 3, 4), (5, 7, 3, 4)]


def test_whole_problems_are_checked_too() -> None:
    shapes = {"query": [2, 4, 8, 16], "key": [1, 4, 8, 16], "value": [2, 4, 8, 16]}
    problem = {name: {"shape": shape} for name, shape in shapes.items()} | {"device": "cpu", "dtype": "float32"}
    with pytest.raises(SpecError, match=r"problems\[0\].*one batch size"):
        parse(f"problems: [{{problem: {json.dumps(problem)}}}]")
    problem["key"] = {"shape": [2, 4, 9, 16]}
    with pytest.raises(SpecError, match=r"problems\[0\].*one length"):
        parse(f"problems: [{{problem: {json.dumps(problem)}}}]")


def test_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_bytes(b"\xff\xfe problems")
    with pytest.raises(SpecError, match=r"some\.yaml"):
        load(path)
    path.write_text("problems: {")
    with pytest.raises(SpecError, match=r"(?s)some\.yaml: not YAML.*line 1"):
        load(path)


def test_one_problem_by_fields() -> None:
    fields = {"batch": 1, "heads": 2, "query_length": 3, "head_size": 4}
    assert problem_of(fields).query == Layout.of((1, 2, 3, 4))
    with pytest.raises(SpecError, match="missing field batch"):
        problem_of({})
    assert set(fields) < set(FIELDS)


def test_yaml_builds_no_objects() -> None:
    with pytest.raises(SpecError, match="not YAML"):
        parse("problems: !!python/object/apply:os.getcwd []")


def test_imports_no_torch() -> None:
    script = "import sys, sidestep.spec; print([m for m in ('torch', 'cudnn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

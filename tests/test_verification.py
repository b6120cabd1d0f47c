"""SIDESTEP_VERIFY=1: what computes wrong numbers is recorded and passed over, and what computes right ones passes.

The backend that is wrong where it is told to be is tests/small.py's, on the CPU.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from process import Counters, reload_settings
from reference import BACKENDS, assert_close, attention
from small import Small, SmallPlan, check, registered, tensors

import sidestep
from sidestep import cli, events, failures, selection, stores, verification
from sidestep.backends import registry
from sidestep.backends.base import Progress, Target
from sidestep.cache import FailureRecord
from sidestep.decisions import Chosen, Remembered
from sidestep.problem import AttentionProblem, Layout, Mask, default_scale

sdpa: Any = sidestep.scaled_dot_product_attention
ORDER = ["small", "torch_math"]
Spoil = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Small]:
    """That backend, with SIDESTEP_VERIFY=1."""
    monkeypatch.setenv("SIDESTEP_VERIFY", "1")
    reload_settings()
    with registered(Small()) as backend:
        yield backend


def new_process() -> None:
    sidestep.configure()
    events._said.clear()


def the_record() -> FailureRecord:
    (record,) = failures.records()
    return record


def at_minus_120(name: str, query: torch.Tensor, key: torch.Tensor) -> bool:
    logits = (query.double() @ key.double().mT) * query.shape[-1] ** -0.5
    return bool(logits.mean() < -100)


def off(result: str, only: Callable[..., bool] = lambda *_: True, by: float = 1.0) -> Spoil:
    """Adds `by` to one number of a result, the one at (0, 1, 3, 2)."""

    def spoil(name: str, tensor: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
        if name == result and only(name, query, key):
            tensor[0, 1, 3, 2] += by

    return spoil


RESULTS = {
    "output": "output",
    "query": "gradient of query",
    "key": "gradient of key",
    "value": "gradient of value",
    "attn_mask": "gradient of attn_mask",
}


@pytest.mark.parametrize("only", [None, at_minus_120], ids=["always", "logits near -120"])
@pytest.mark.parametrize("result", RESULTS)
def test_a_wrong_result_is_recorded_and_the_next_backend_answers(
    result: str, only: Any, small: Small, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    """The record says how wrong and where; the answer is right; the next process does not try again."""
    small.spoil = off(result, only) if only else off(result)
    given = [t.detach() for t in tensors()]
    mask = torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(1))
    leaves = [t.requires_grad_() for t in (*given, mask)] if result != "output" else [*given, mask]
    expected = attention(*(t.detach().double() for t in leaves))
    for number in range(2):
        assert_close(sdpa(*leaves, backends=ORDER), expected, "output")
        record = the_record()
        assert (record.kind, record.stage) == ("wrong", "verify")
        assert record.direction == ("forward" if result == "output" else "backward")
        assert record.exception_type == "sidestep.verification.WrongNumbersError"
        lines = record.exception_text.splitlines()
        assert all(line.startswith(f"{RESULTS[result]} is wrong on '") for line in lines)
        assert all("largest at (0, 1, 3, 2): " in line for line in lines)
        sets = {re.search("on '(.*?)'", line)[1] for line in lines}  # type: ignore[index]
        assert sets == {"logits near -120", "logits -128"} if only else len(sets) > 4
        found = re.match(r".*: error (\S+), allowed (\S+), largest at \(.*\): (\S+) in place of (\S+)$", lines[0])
        assert found
        error, allowed, actual, right = map(float, found.groups())
        assert error > allowed
        assert actual - right == pytest.approx(1, abs=1e-4)
        assert (counters.skipped_known_bad, counters.builds, counters.fallbacks) == (number, 1, number + 1)
        assert len([entry for entry in caplog.records if "wrong numbers" in entry.getMessage()]) == 1
        sidestep.configure()  # as the next process
    if result != "output":
        again = [t.detach().double().requires_grad_() for t in leaves]
        theirs = torch.autograd.grad(attention(*again).sum(), again)
        for grad, other in zip(torch.autograd.grad(sdpa(*leaves, backends=ORDER).sum(), leaves), theirs, strict=True):
            assert_close(grad, other, "gradient", gradient=True)
    sidestep.configure(verify=False)
    assert_close(sdpa(*leaves, backends=ORDER), expected, "output")
    assert counters.builds == 1, "known bad without SIDESTEP_VERIFY too"


@pytest.mark.parametrize(
    ("data", "sees"),
    [
        ("expanded gradient", lambda call: 0 in call["grad_output"].stride()),
        ("transposed gradient", lambda call: 1 != call["grad_output"].stride(-1) != 0),
        ("right padding", lambda call: not call["attn_mask"][..., -1].any() and call["attn_mask"][..., 0].all()),
        ("left padding", lambda call: not call["attn_mask"][..., 0].any() and call["attn_mask"][..., -1].any()),
        ("empty rows", lambda call: not call["attn_mask"][..., 0, :].any() and call["attn_mask"][..., 1, 0].all()),
    ],
)
def test_what_is_wrong_for_one_kind_of_call_alone_is_found(
    data: str, sees: Callable[[dict[str, Any]], bool], small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By how the gradient of the output arrives, and by what a mask leaves out."""
    call: dict[str, Any] = {}
    backward = SmallPlan.backward

    def watched(plan: SmallPlan, grad_output: Any, *tensors: Any) -> Any:
        call.update(grad_output=grad_output, attn_mask=tensors[3])
        return backward(plan, grad_output, *tensors)

    def spoil(name: str, tensor: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
        if name == "value" and sees(call):
            tensor[0, 0, 0, 0] += 1

    monkeypatch.setattr(SmallPlan, "backward", watched)
    small.spoil = spoil
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    sdpa(*tensors(grad=True), mask, backends=ORDER)
    found = the_record().exception_text.splitlines()
    assert [line.partition(" on ")[2].partition(":")[0] for line in found] == [f"'{data}'"]


def test_what_is_not_a_number_is_found_and_is_the_worst(small: Small) -> None:
    small.spoil = off("output", by=torch.nan)
    check(tensors(), backends=ORDER)
    text = the_record().exception_text.splitlines()[0]
    assert "error inf, allowed" in text
    assert "largest at (0, 1, 3, 2): nan in place of" in text


def test_what_is_never_written_is_found(small: Small) -> None:
    """A backend that leaves its last row as it was allocated, where an allocator gives out what it just got."""

    def unwritten(name: str, tensor: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
        if name == "output" and at_minus_120(name, query, key):
            tensor[..., -1, :] = torch.empty_like(tensor)[..., -1, :]

    small.spoil = unwritten
    check(tensors(), backends=ORDER)
    assert the_record().kind == "wrong"


def test_one_name_refuses_and_says_why(small: Small) -> None:
    small.spoil = off("output")
    with pytest.raises(sidestep.NoBackendError, match=r"output is wrong on '") as caught:
        sdpa(*tensors(), backends="small")
    assert isinstance(caught.value.__cause__, verification.WrongNumbersError)
    new_process()
    with pytest.raises(sidestep.NoBackendError) as caught:
        sdpa(*tensors(), backends="small")
    assert isinstance(caught.value.decisions[0], Remembered)


def test_not_asked_for_nothing_is_verified(small: Small, counters: Counters) -> None:
    sidestep.configure(verify=False)
    small.spoil = off("output", at_minus_120)
    check(tensors(), backends="small")
    assert small.asked == ["build", "forward", "forward"]
    assert not list(failures.records())


def test_what_is_right_is_verified_once_for_all_processes(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again in another environment, by another version of the data, or where the mark is damaged."""

    def runs() -> int:
        small.asked.clear()
        check(tensors(grad=True), backends="small")
        return small.asked.count("forward")

    once = 2  # the first run, and the call
    sets = 8
    assert runs() == once + sets
    assert runs() == 1
    new_process()
    assert runs() == once
    small.version = "2"
    new_process()
    assert runs() == once + sets
    monkeypatch.setattr(verification, "VERSION", verification.VERSION + 1)
    new_process()
    assert runs() == once + sets
    new_process()
    assert runs() == once
    for key in list(stores.get("plans").keys("verified/")):
        stores.get("plans").set(key, b"junk")
    new_process()
    assert runs() == once + sets
    assert not list(failures.records())


def test_backends_without_a_build_are_marked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTEP_VERIFY", "1")
    reload_settings()
    asked: list[str] = []
    real = verification.verify

    def counted(problem: AttentionProblem, *rest: Any) -> None:
        asked.append(str(problem))
        real(problem, *rest)

    monkeypatch.setattr(verification, "verify", counted)
    for _ in range(2):
        check(tensors(), backends="torch_math")
        new_process()
    assert len(asked) == 1


def test_the_call_is_undisturbed(small: Small) -> None:
    """Random state, the caller's tensors and settings of torch are as they were."""
    given = tensors(grad=True)
    copies = [t.detach().clone() for t in given]
    state = torch.get_rng_state()
    torch.use_deterministic_algorithms(True)
    try:
        sdpa(*given, backends="small")
        assert torch.get_deterministic_debug_mode() == 2
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(torch.get_rng_state(), state)
    for mine, copy in zip(given, copies, strict=True):
        assert torch.equal(mine, copy)
        assert mine.grad is None


def test_dropout_is_not_verified_and_says_so(small: Small, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sidestep"):
        sdpa(*tensors(), dropout_p=0.5, backends="torch_math")
    assert "not verified, for with dropout its numbers are drawn" in caplog.text
    assert not list(stores.get("plans").keys("verified/"))


def test_want_of_memory_lets_the_plan_serve_unmarked(small: Small, caplog: pytest.LogCaptureFixture) -> None:
    def full(name: str, tensor: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
        if at_minus_120(name, query, key):
            raise torch.OutOfMemoryError("CUDA out of memory")

    small.spoil = full
    check(tensors(), backends="small")
    assert "not verified, for want of memory" in caplog.text
    assert not list(stores.get("plans").keys("verified/"))


def test_show_prints_it_and_retry_refuses(small: Small) -> None:
    small.spoil = off("value")
    check(tensors(grad=True), backends=ORDER)
    record = the_record()
    run = click.testing.CliRunner().invoke
    shown = run(cli.main, ["failures", "show", record.id])
    assert shown.exit_code == 0
    assert "wrong" in shown.stdout
    assert "gradient of value is wrong on" in shown.stdout
    assert "largest at (0, 1, 3, 2)" in shown.stdout
    refused = run(cli.main, ["failures", "retry", record.id])
    assert refused.exit_code == 1
    assert "found wrong by its numbers" in refused.output
    assert the_record() == record
    assert run(cli.main, ["failures", "forget", record.id]).exit_code == 0
    small.spoil = lambda *_: None
    new_process()
    check(tensors(grad=True), backends="small")


# --- real backends ---------------------------------------------------------------------------------------------------


def problem(
    dtype: str,
    query: tuple[int, int, int, int],
    keys: int | None = None,
    kv_heads: int | None = None,
    mask: tuple[tuple[int, ...], str, bool] | None = None,
    layout: str = "bhsd",
    device: str = "cpu",
    **other: Any,
) -> AttentionProblem:
    batch, heads, length, size = query

    def of(heads: int, length: int) -> Layout:
        shape = (batch, heads, length, size)
        return Layout.of(shape, (length * heads * size, size, heads * size, 1) if layout == "bshd" else None)

    key = of(kv_heads or heads, keys or length)
    made = None
    if mask is not None:
        plain = Layout.of(mask[0])
        made = Mask(plain.shape, plain.stride, mask[1], mask[2])
    fields = {"scale": default_scale(size), "training": True, **other}
    return AttentionProblem(device, dtype, of(heads, length), key, key, made, **fields)


def spread(device: str) -> list[AttentionProblem]:
    """Dtypes, masks, causality, grouped heads, layouts, scales."""
    found = []
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        found += [
            problem(dtype, (2, 2, 65, 64), 129, device=device),
            problem(dtype, (1, 2, 33, 64), device=device, training=False),
            problem(dtype, (1, 4, 40, 64), kv_heads=2, device=device, is_causal=True),
            problem(dtype, (1, 2, 1, 64), 64, device=device, layout="bshd"),
            problem(dtype, (1, 2, 17, 8), 24, device=device, scale=-0.3),
            problem(dtype, (2, 2, 24, 32), 40, mask=((2, 1, 1, 40), "bool", False), device=device),
            problem(dtype, (2, 2, 24, 32), mask=((2, 2, 24, 24), "bool", False), device=device),
            problem(dtype, (2, 2, 24, 32), 40, mask=((1, 1, 24, 40), dtype, True), device=device),
            problem(dtype, (2, 4, 24, 32), 40, 2, mask=((2, 1, 1, 40), dtype, True), device=device),
            problem(dtype, (1, 2, 24, 32), 40, mask=((1, 2, 24, 1), "float32", False), device=device),
        ]
    return found


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        pytest.param(device, backend, marks=[pytest.mark.gpu] if device == "cuda" else [])
        for device, backends in BACKENDS.items()
        for backend in backends
    ],
)
def test_real_backends_pass(device: str, backend: str) -> None:
    """Served and verified, or refused for another reason than its numbers; known-bad rules apply before."""
    sidestep.configure(verify=True)
    served = 0
    for asked in spread(device):
        target = Target(-1 if device == "cpu" else 0)
        given = verification.inputs(asked, torch.device(device), "plain")
        (decision,) = selection.select(asked, (backend,), target, given[:4]).decisions
        assert getattr(decision, "kind", None) != "wrong", str(decision)
        served += isinstance(decision, Chosen)
    assert served >= {"nvfuser": 4, "torch_flash": 8}.get(backend, 10)  # what each takes of them
    assert len(list(stores.get("plans").keys("verified/"))) == served


def test_a_wrong_scale_or_causality_is_seen_on_every_problem() -> None:
    """The plan of a neighbouring problem is found wrong."""
    backend = registry.get("torch_math")
    for asked in spread("cpu")[:20]:
        other = dataclasses.replace(asked, scale=asked.scale * 1.25)
        plan = backend.build(other, Target(), Progress())
        with pytest.raises(verification.WrongNumbersError):
            verification.verify(
                asked,
                Target(),
                lambda given, grad, plan=plan, asked=asked: selection._results(plan, asked, given, Progress(), grad),  # type: ignore[misc]
            )


@pytest.mark.parametrize("block", [1, 500, 3000])
def test_the_reference_is_the_same_in_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query at a time, some, some heads: math attention passes, and a spoilt number is found where it is."""
    monkeypatch.setattr(verification, "_BLOCK", block)
    backend = registry.get("torch_math")
    for asked in (
        problem("float32", (2, 4, 13, 16), 21, 2, mask=((2, 1, 13, 21), "float32", True)),
        problem("float32", (2, 4, 13, 16), 21, 2, mask=((1, 4, 1, 21), "float32", True)),
        problem("float32", (2, 4, 13, 16), 21, 2, is_causal=True),
    ):
        plan = backend.build(asked, Target(), Progress())
        given = verification.inputs(asked, torch.device("cpu"), "plain")
        output, grads = selection._results(plan, asked, given[:4], Progress(), given.grad_output)
        with torch.no_grad():
            assert verification.compare(asked, given, output, grads, "plain") == []
            for index, grad in enumerate(grads):
                if grad is None:
                    continue
                at = tuple(size - 1 for size in grad.shape)
                right = grad[at].clone()
                grad[at] += 10 * grad.abs().max()
                (found,) = verification.compare(asked, given, output, grads, "plain")
                assert (found.result, found.at) == (list(RESULTS.values())[index + 1], at)
                grad[at] = right


def test_inputs_lie_in_the_problems_layouts() -> None:
    """Strides and all; expanded dimensions stay so; masks have their empty rows and their padding."""
    expanded = Mask((2, 2, 6, 9), (0, 0, 9, 1), "bool")
    layout = Layout.of((2, 2, 6, 8), (96, 8, 16, 1))
    key = Layout.of((2, 2, 9, 8), (0, 72, 8, 1))
    asked = AttentionProblem("cpu", "float16", layout, key, key, expanded, scale=default_scale(8))
    for data in verification.data_sets(asked):
        given = verification.inputs(asked, torch.device("cpu"), data)
        assert given.query.stride() == layout.stride
        assert given.key.stride() == key.stride
        assert given.attn_mask is not None
        assert given.attn_mask.stride() == expanded.stride
        assert all(tensor.isfinite().all() for tensor in given if tensor is not None)
        rows = given.attn_mask.any(-1)
        if data == "empty rows":
            assert not rows[..., ::3].any()
            assert rows[..., 1::3].all()
        elif data == "left padding":
            assert not given.attn_mask[..., 0].any()
            assert given.attn_mask[..., -1, :].any()
        else:
            assert rows.all()
        logits = given.query.double() @ given.key.double().mT * default_scale(8)
        if data == "logits near -120":
            assert logits.max() < -100


# --- warm-up ---------------------------------------------------------------------------------------------------------


def test_a_warm_up_verifies(tmp_path: Path, counters: Counters) -> None:
    """In a child; what it found right the next process need not look at."""
    path = tmp_path / "spec.yaml"
    path.write_text("problems: [{batch: 1, heads: 2, query_length: 9, head_size: 16, device: cpu, training: true}]")
    done = click.testing.CliRunner().invoke(cli.main, ["warmup", str(path), "--verify", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["items"][0]["served_by"] == "torch_flash"
    (key,) = stores.get("plans").keys("verified/")
    assert "/torch_flash/" in key


def test_a_warm_up_for_an_absent_gpu_cannot_verify(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("problems: [{batch: 1, heads: 2, query_length: 9, head_size: 16}]")
    done = click.testing.CliRunner().invoke(cli.main, ["warmup", str(path), "--verify", "--device", "h200"])
    assert done.exit_code == 2
    assert "nothing can be run" in done.output

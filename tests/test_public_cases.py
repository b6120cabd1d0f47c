"""Inputs publicly reported as refused, wrong or crashing somewhere: each runs, and each statement about it is a test.

A statement about what cuDNN itself does is tested on the GPU with cuDNN (9.19) alone, its rules bypassed, and
everywhere for what Sidestep does about it.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from process import Counters
from reference import BACKENDS, INPUTS, TOLERANCE, Result, assert_close, build, compare, error, reference, run

import sidestep
from sidestep import failures
from sidestep.backends import cudnn_graph, known_bad, registry
from sidestep.backends.base import GraphPlan, Progress, Target
from sidestep.decisions import Failed, Rejected
from sidestep.problem import AttentionProblem, Layout
from sidestep.semantics import Call, canonicalize, problem_of

CASES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("cases").joinpath("public_cases.json").read_text(encoding="utf-8")
)["cases"]
sdpa = sidestep.scaled_dot_product_attention


def scales(case: dict[str, Any]) -> list[float | None]:
    """The scale of each call that the case makes in turn."""
    return case["scale"] if isinstance(case["scale"], list) else [case["scale"]]


def dtype_of(case: dict[str, Any]) -> torch.dtype:
    """The dtype of the query."""
    return getattr(torch, case["dtype"][0] if isinstance(case["dtype"], list) else case["dtype"])


def ran(case: dict[str, Any], device: str, **keywords: Any) -> tuple[Result, Result]:
    """The answer and the reference, for the case's first scale."""
    inputs = build(case, device, scales(case)[0])
    return run(sdpa, inputs, **keywords), reference(inputs)


def problem(case: dict[str, Any], device: str | None = None) -> AttentionProblem:
    """The canonical problem of the case, on CPU strides; as if on `device` where given."""
    inputs = build(case, "cpu", scales(case)[0])
    arguments, flags = inputs.arguments(), inputs.flags
    call = Call(
        arguments["query"],
        arguments["key"],
        arguments["value"],
        arguments.get("attn_mask"),
        flags["dropout_p"],
        flags["is_causal"],
        flags["scale"],
        flags["enable_gqa"],
    )
    found = problem_of(canonicalize(call)[0], bool(case["requires_grad"]), deterministic=False)
    return found if device is None else replace(found, device=device)


def refused(case: dict[str, Any], device: str, backend: str) -> sidestep.NoBackendError | None:
    """The backend's refusal of the case's call, checked to be one, or None where it serves."""
    try:
        run(sdpa, build(case, device, scales(case)[0]), backends=backend)
    except sidestep.NoBackendError as refusal:
        (decision,) = refusal.decisions
        assert decision.backend == backend
        assert getattr(decision, "reasons", ()) or getattr(decision, "kind", "") == "unsupported", decision
        return refusal
    return None


def by_cudnn_alone(case: dict[str, Any]) -> Result:
    """Output and gradients of the argument tensors from cuDNN's graphs, without rules and remedies; on the GPU."""
    asked, inputs = problem(case, "cuda"), build(case, "cuda", scales(case)[0])
    plan = cudnn_graph.CudnnBackend().build_form(asked, Target(0), Progress(), {})
    leaves = {name: leaf.detach() for name, leaf in inputs.leaves.items()}
    given = inputs.arguments(leaves)
    mask = given.get("attn_mask")
    while mask is not None and mask.dim() < 4:
        mask = mask[None]
    tensors = (given["query"], given["key"], given["value"], mask)
    pool = [torch.full(asked.output_shape, torch.nan, dtype=dtype_of(case), device="cuda") for _ in range(4)]
    del pool
    if not asked.training:
        return Result(plan.infer(*tensors), {})
    assert isinstance(plan, GraphPlan)
    output, *residuals = plan.forward(*tensors)
    grad_output = inputs.grad_output(output.shape)
    grads = plan.backward(grad_output, *tensors, output, *residuals)
    return Result(output, {name: g for name, g in zip(INPUTS, grads, strict=False) if g is not None})


def is_cudnn_9_19() -> bool:
    """True where the loaded cuDNN is the one that the statements speak of."""
    import cudnn

    return int(cudnn.backend_version()) == 91900


def no_records() -> bool:
    """True when the store holds nothing."""
    return not list(failures.store().keys())


# --- the statements -------------------------------------------------------------------------------------------------

Check = Callable[[dict[str, Any], str, Counters], None]
CHECKS: dict[str, Check] = {}


def states(*texts: str) -> Callable[[Check], Check]:
    """Register the check of a statement."""

    def register(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(texts, check))
        return check

    return register


@states("reference", "reference with top-left alignment")
def matches_the_reference(case: dict[str, Any], device: str, counters: Counters) -> None:
    result, expected = ran(case, device)
    compare(result, expected, dtype_of(case))
    assert set(result.grads) == set(build(case, "cpu").trained())


@states("reference within 1e-5")
def within_1e_5(case: dict[str, Any], device: str, counters: Counters) -> None:
    result, expected = ran(case, device)
    assert error(result.output, expected.output) <= 1e-5


@states("a backend whose backward cannot be built must not serve the forward")
def no_forward_without_backward(case: dict[str, Any], device: str, counters: Counters) -> None:
    inputs = build(case, device)
    expected = reference(inputs)
    for backend in BACKENDS[device]:
        try:
            output = sdpa(**inputs.arguments(), **inputs.flags, backends=backend)
        except sidestep.NoBackendError:
            continue  # refused as a whole, before any output
        assert not output.requires_grad
        if refused(case, device, backend) is None:
            compare(run(sdpa, inputs, backends=backend), expected, dtype_of(case))
    before = counters.build_failures
    compare(run(sdpa, inputs), expected, dtype_of(case))
    assert counters.build_failures == before, "the default order met a failure that is already on record"


@states("output (8,2,640,64)")
def output_has_the_value_head_size(case: dict[str, Any], device: str, counters: Counters) -> None:
    assert ran(case, device)[0].output.shape == (8, 2, 640, 64)


@states("forward and backward")
def forward_and_backward(case: dict[str, Any], device: str, counters: Counters) -> None:
    result, _ = ran(case, device)
    assert result.output.isfinite().all()
    assert set(result.grads) == {"query", "key", "value"}
    assert all(grad.isfinite().all() and grad.any() for grad in result.grads.values())
    for backend in BACKENDS[device]:
        if refused(case, device, backend) is None:
            compare(*ran(case, device, backends=backend), dtype_of(case))


@states("on sm_90 cuDNN builds the forward and refuses the backward, so training goes elsewhere")
def training_goes_elsewhere(case: dict[str, Any], device: str, counters: Counters) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        inference = build({**case, "requires_grad": []}, device)
        assert_close(run(sdpa, inference, backends="cudnn").output, reference(inference).output, "cudnn's forward")
        refusal = refused(case, device, "cudnn")
        assert refusal is not None
        assert isinstance(refusal.decisions[0], Failed)
        (record,) = failures.records()
        assert (record.kind, record.direction, record.backend) == ("unsupported", "backward", "cudnn")
        assert record.stage in record.traceback
    counters.reset()
    result, expected = ran(case, device)
    compare(result, expected, dtype_of(case))
    assert counters.selections == counters.fallbacks == 1


@states("empty output and empty gradients")
def everything_is_empty(case: dict[str, Any], device: str, counters: Counters) -> None:
    result, _ = ran(case, device)
    assert result.output.shape == (0, 10, 3952, 64)
    assert {name: grad.shape for name, grad in result.grads.items()} == {
        name: tuple(case[name]["shape"]) for name in case["requires_grad"]
    }
    assert not sum(grad.numel() for grad in result.grads.values())


@states("no backend is called and no cache entry is written")
def no_backend_is_called(case: dict[str, Any], device: str, counters: Counters) -> None:
    ran(case, device)
    assert counters.calls >= 1
    assert counters.selections == counters.builds == counters.fallbacks == 0
    assert no_records()


@states("empty output, zero gradients for key and value")
def empty_output_zero_gradients(case: dict[str, Any], device: str, counters: Counters) -> None:
    result, _ = ran(case, device)
    assert result.output.shape == (1, 2, 0, 64)
    assert result.grads["query"].shape == (1, 2, 0, 64)
    assert result.grads["key"].shape == result.grads["value"].shape == (1, 2, 64, 64)
    assert not result.grads["key"].any()
    assert not result.grads["value"].any()


KILLED = """
import json, sys
from sidestep.backends import cudnn_offline
profile = cudnn_offline.activate("h200")  # before torch, which loads the driver where there is one
from sidestep.backends import cudnn_graph
from sidestep.backends.base import Progress, Target
from sidestep.problem import AttentionProblem
problem = AttentionProblem.from_json(json.loads(sys.argv[1]))
print("building", flush=True)
cudnn_graph.CudnnBackend().build(problem, Target(0, profile), Progress())
print("built", flush=True)
"""


@states("building this graph kills the process on cuDNN 9.19")
def the_build_kills_and_is_not_tried(case: dict[str, Any], device: str, counters: Counters) -> None:
    asked = problem(case, "cuda")
    assert registry.get("cudnn").rejects(asked) == ("a dimension of size 0",)
    ran(case, device)
    assert counters.selections == counters.builds == 0
    if is_cudnn_9_19():  # a real build, in a process of its own, for the GPU that the profile describes
        command = [sys.executable, "-c", KILLED, json.dumps(asked.to_json())]
        died = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        assert died.stdout == "building\n", died.stderr
        assert died.returncode == -signal.SIGFPE


@states("zeros, like the reference")
def zeros(case: dict[str, Any], device: str, counters: Counters) -> None:
    result, expected = ran(case, device)
    assert result.output.shape == expected.output.shape
    assert not result.output.any()
    assert not expected.output.any()
    assert not any(grad.any() for grad in result.grads.values())
    assert result.grads["query"].shape == (1, 2, 64, 64)


@states("a valid output layout with last stride 1")
def valid_output_layout(case: dict[str, Any], device: str, counters: Counters) -> None:
    for backend in (None, *BACKENDS[device]):
        if backend is not None and refused(case, device, backend) is not None:
            continue
        output = ran(case, device, backends=backend)[0].output
        assert output.stride(-1) == 1
        addressed = sorted((step, size) for step, size in zip(output.stride(), output.shape, strict=True) if size > 1)
        dense = 1
        for step, size in addressed:  # every element has a place of its own, and no place is wasted
            assert step == dense
            dense *= size


@states("finite gradients equal to the reference")
def finite_gradients(case: dict[str, Any], device: str, counters: Counters) -> None:
    result, expected = ran(case, device)
    assert all(grad.isfinite().all() for grad in result.grads.values()), "gradients are not finite"
    # dQ sums what nearly cancels: kernels that keep probabilities in bfloat16 are off by 0.1 to 0.2 of it, flash on CPU
    # too (0.22 and 0.17). The efficient kernel, finite on all of these, is the yardstick.
    yardstick = ran(case, device, backends="torch_efficient")[0] if device == "cuda" else result
    theirs = error(yardstick.grads["query"], expected.grads["query"])
    if theirs > 3 * TOLERANCE[dtype_of(case)]:
        assert error(result.grads["query"], expected.grads["query"]) <= 1.5 * theirs
        result, expected = (
            Result(one.output, {name: grad for name, grad in one.grads.items() if name != "query"})
            for one in (result, expected)
        )
    compare(result, expected, dtype_of(case))


@states("cuDNN 9.19 gives dQ all NaN")
def cudnn_gives_nan_dq(case: dict[str, Any], device: str, counters: Counters) -> None:
    if is_cudnn_9_19():
        assert by_cudnn_alone(case).grads["query"].isnan().all()
    expected = reference(build(case, device))
    compare(ran(case, device, backends="torch_math")[0], expected, dtype_of(case))
    # dQ is 0.01 where dK is 0.7: what the efficient kernel rounds away in bfloat16 is a fifth of it. It is finite.
    finite = ran(case, device, backends="torch_efficient")[0]
    assert all(grad.isfinite().all() for grad in finite.grads.values())
    assert_close(finite.output, expected.output, "output", dtype=dtype_of(case))


@states("cuDNN 9.19 gives every dK and dV NaN")
def cudnn_gives_nan_dk_dv(case: dict[str, Any], device: str, counters: Counters) -> None:
    if is_cudnn_9_19():
        grads = by_cudnn_alone(case).grads
        assert grads["key"].isnan().all()
        assert grads["value"].isnan().all()
    expected = reference(build(case, device))
    for backend in ("torch_math", "torch_efficient", "torch_flash"):
        compare(ran(case, device, backends=backend)[0], expected, dtype_of(case))


@states("the empty row is exactly zero in output and gradients, on every backend that serves it")
def empty_row_is_zero(case: dict[str, Any], device: str, counters: Counters) -> None:
    served = [backend for backend in BACKENDS[device] if refused(case, device, backend) is None]
    assert "torch_math" in served
    assert device == "cuda" or "torch_flash" in served
    for backend in served:
        result, expected = ran(case, device, backends=backend)
        assert not result.output[..., 7, :].any(), backend
        assert not result.grads["query"][..., 7, :].any(), backend
        compare(result, expected, dtype_of(case))


@states("rows 4 to 7 are exactly zero")
def rows_4_to_7_are_zero(case: dict[str, Any], device: str, counters: Counters) -> None:
    for backend in (None, *BACKENDS[device]):
        if backend is not None and refused(case, device, backend) is not None:
            continue
        result, expected = ran(case, device, backends=backend)
        assert not result.output[..., 4:, :].any(), backend
        assert not result.grads["query"][..., 4:, :].any(), backend
        assert result.output[..., :4, :].all()
        compare(result, expected, dtype_of(case))


@states("0 and 1 are added to the scores, not treated as a bool mask")
def zero_and_one_are_added(case: dict[str, Any], device: str, counters: Counters) -> None:
    as_bool = {**case, "attn_mask": {**case["attn_mask"], "dtype": "bool", "kind": "corner-4x4"}}
    plain = {**case, "attn_mask": None}
    result, expected = ran(case, device)
    assert_close(result.output, expected.output, "output with 0 and 1 added")
    for other in (as_bool, plain):
        assert error(result.output, reference(build(other, device)).output) > 0.01
    assert result.output[..., 4:, :].all(), "rows with zeros only are as if there were no mask"


@states("each call in turn matches the reference with its own scale")
def each_scale_in_turn(case: dict[str, Any], device: str, counters: Counters) -> None:
    assert len(scales(case)) == 4
    for again in range(2):
        for scale in scales(case):
            inputs = build(case, device, scale)
            output = sdpa(**inputs.arguments(), **inputs.flags)
            assert_close(output, reference(inputs).output, f"scale {scale}")
        assert counters.calls == 4 * (again + 1)
        assert counters.hits == 4 * again


@states("at most one warning")
def at_most_one_warning(case: dict[str, Any], device: str, counters: Counters) -> None:
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger().addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                ran(case, device)
    finally:
        logging.getLogger().removeHandler(listener)
    heard += [str(warning.message) for warning in caught]
    assert len(heard) <= 1, heard


@states("the output has the query's order of dimensions in memory, so transpose(1,2).reshape copies nothing")
def output_layout_follows_the_query(case: dict[str, Any], device: str, counters: Counters) -> None:
    inputs = build(case, device)
    for backend in (None, *BACKENDS[device]):
        if backend == "nvfuser" and refused(case, device, backend) is not None:
            continue  # takes contiguous inputs alone
        output = run(sdpa, inputs, backends=backend).output
        assert output.stride() == tuple(case["query"]["stride"])
        flat = output.transpose(1, 2).reshape(1, 2048, 512)
        assert flat.data_ptr() == output.data_ptr(), backend


@states("top-left alignment: the output equals value[..., 0:1, :] within 1e-6")
def one_causal_query_sees_the_first_key(case: dict[str, Any], device: str, counters: Counters) -> None:
    for backend in (None, *BACKENDS[device]):
        if backend is not None and refused(case, device, backend) is not None:
            continue
        inputs = build(case, device)
        output = run(sdpa, inputs, backends=backend).output
        assert (output - inputs.leaves["value"][..., 0:1, :]).abs().max() <= 1e-6, backend


@states("reference under torch.compile")
def reference_under_compile(case: dict[str, Any], device: str, counters: Counters) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda **arguments: sdpa(**arguments) * 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = build(case, device)
        compare(run(compiled, inputs), reference(inputs), dtype_of(case))


@states("declared with query dimension 1 the cuDNN backward is silently wrong")
def the_query_dimension_of_the_bias(case: dict[str, Any], device: str, counters: Counters) -> None:
    bias = cudnn_graph.bias_layout(problem(case, "cuda"))
    assert bias == ((2, 1, 256, 256), (256, 256, 0, 1), "bfloat16"), "expanded, stride 0, no copy"
    if device == "cpu":
        return
    inputs = build(case, device)
    expected = reference(inputs)
    compare(run(sdpa, inputs, backends="cudnn"), expected, dtype_of(case))
    if is_cudnn_9_19():
        whole = cudnn_graph.bias_layout
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cudnn_graph, "bias_layout", lambda asked: ((2, 1, 1, 256), (256, 256, 256, 1), "bfloat16"))
            wrong = by_cudnn_alone(case)
        assert cudnn_graph.bias_layout is whole
        assert_close(wrong.output, expected.output, "output")
        assert max(error(wrong.grads[name], expected.grads[name]) for name in ("query", "key", "value")) > 0.3


@states("cuDNN 9.19 builds this on sm_90 and leaves NaN")
def cudnn_leaves_nan(case: dict[str, Any], device: str, counters: Counters) -> None:
    (reason,) = known_bad.rejections("cudnn", problem(case, "cuda"), {})
    assert reason.startswith("float32 with a value's head size over 128: ")
    refusal = refused(case, device, "cudnn")
    assert refusal is not None
    assert isinstance(refusal.decisions[0], Rejected)
    assert counters.builds == 0
    assert ran(case, device)[0].output.isfinite().all()
    if device == "cuda" and is_cudnn_9_19() and torch.cuda.get_device_capability() == (9, 0):
        output = by_cudnn_alone(case).output
        assert output[..., 128:].isnan().all()  # the rest is written, and finite (H200)


@states("the mask is not expanded to (2,8,77,77) in memory")
def the_mask_is_not_expanded(case: dict[str, Any], device: str, counters: Counters) -> None:
    shape, stride, dtype = cudnn_graph.bias_layout(problem(case, "cuda")) or ((), (), "")
    assert (shape, stride[2], dtype) == ((2, 1, 77, 77), 0, "float16")
    mask = build(case, device).leaves["attn_mask"]
    query, key, value = (build(case, device).leaves[name] for name in ("query", "key", "value"))
    call = Call(query, key, value, mask, 0.0, False, None, False)
    canonical = canonicalize(call)[0].attn_mask
    assert canonical is not None
    assert canonical.data_ptr() == mask.data_ptr(), "what backends see is the caller's own mask"
    if device == "cpu":
        return
    for backend in BACKENDS[device]:
        if backend == "torch_math" or refused({**case, "requires_grad": []}, device, backend) is not None:
            continue  # math makes the logits, which are as large, whatever the mask is
        inputs = build(case, device)
        given = inputs.arguments()
        sdpa(**given, **inputs.flags, backends=backend)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = sdpa(**given, **inputs.flags, backends=backend)
        torch.cuda.synchronize()
        grown = torch.cuda.max_memory_allocated() - before - output.numel() * output.element_size()
        assert grown < 2 * 8 * 77 * 77 * 2, f"{backend} took {grown} bytes beside the output"


@states("reference gradient of the mask")
def gradient_of_the_mask(case: dict[str, Any], device: str, counters: Counters) -> None:
    result, expected = ran(case, device)
    assert list(result.grads) == ["attn_mask"]
    assert result.grads["attn_mask"].shape == (1, 4, 32, 32)
    compare(result, expected, dtype_of(case))


@states("the same key as the contiguous layout of the same numbers")
def same_key_as_contiguous(case: dict[str, Any], device: str, counters: Counters) -> None:
    plain = {**case, **{name: {"shape": case[name]["shape"]} for name in ("query", "key", "value")}}
    assert case["query"]["stride"] != list(Layout.of(case["query"]["shape"]).stride)
    assert problem(case) == problem(plain)
    assert problem(case).digest() == problem(plain).digest()
    assert_close(ran(case, device)[0].output, ran(plain, device)[0].output.double(), "output")


@states("InvalidCallError before any backend is tried")
def invalid_before_any_backend(case: dict[str, Any], device: str, counters: Counters) -> None:
    inputs = build(case, device)
    for backend in (None, *BACKENDS[device]):
        with pytest.raises(sidestep.InvalidCallError) as caught:
            sdpa(**inputs.arguments(), **inputs.flags, backends=backend)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, RuntimeError)
        assert str(dtype_of(case)).removeprefix("torch.") in str(caught.value) or "dropout_p" in str(caught.value)
    assert counters.selections == counters.builds == 0


@states("no record")
def leaves_no_record(case: dict[str, Any], device: str, counters: Counters) -> None:
    inputs = build(case, device)
    with pytest.raises(sidestep.InvalidCallError):
        sdpa(**inputs.arguments(), **inputs.flags)
    assert no_records()


@states("query, key and value are slices of one (4,64,5120) buffer")
def slices_of_one_buffer(case: dict[str, Any], device: str, counters: Counters) -> None:
    inputs = build(case, device)
    assert list(inputs.leaves) == ["buffer"]
    buffer = inputs.leaves["buffer"].view(4, 64, 5120)
    heads = {"query": (0, 32), "key": (4096, 4), "value": (4608, 4)}
    for name, (offset, count) in heads.items():
        part = buffer[..., offset : offset + count * 128].unflatten(-1, (count, 128)).transpose(1, 2)
        given = inputs.arguments()[name]
        assert (given.data_ptr(), given.stride(), given.shape) == (part.data_ptr(), part.stride(), part.shape)
    compare(run(sdpa, inputs), reference(inputs), dtype_of(case))


# --- the tests ------------------------------------------------------------------------------------------------------


def parameters(case: dict[str, Any], statement: str | None) -> Iterator[Any]:
    """The case on each device on which it means something."""
    for device in ("cpu", "cuda"):
        if device == "cpu" and case["device"] == "cuda":
            continue
        marks = [pytest.mark.gpu] if device == "cuda" else []
        values = (case, device) if statement is None else (case, statement, device)
        yield pytest.param(*values, marks=marks, id="-".join(filter(None, (case["id"], statement, device))))


@pytest.mark.parametrize(("case", "device"), [p for case in CASES for p in parameters(case, None)])
def test_case(case: dict[str, Any], device: str) -> None:
    """It runs, in every scale it names: shape and dtype as torch's, or a clear InvalidCallError where torch refuses."""
    for scale in scales(case):
        inputs = build(case, device, scale)
        if any("InvalidCallError" in statement for statement in case["expect"]):
            with pytest.raises(sidestep.InvalidCallError):
                run(sdpa, inputs)
            continue
        result = run(sdpa, inputs)
        assert result.output.shape == (*case["query"]["shape"][:-1], case["value"]["shape"][-1])
        assert result.output.dtype is dtype_of(case)
        assert result.output.isfinite().all()
        assert {name: grad.shape for name, grad in result.grads.items()} == {
            name: inputs.leaves[name].shape for name in inputs.trained()
        }


@pytest.mark.parametrize(
    ("case", "statement", "device"),
    [p for case in CASES for statement in case["expect"] for p in parameters(case, statement)],
)
def test_statement(case: dict[str, Any], statement: str, device: str, counters: Counters) -> None:
    """One item of the case's `expect`; a statement that nobody checks is a KeyError here."""
    CHECKS[statement](case, device, counters)


def test_every_statement_has_its_check() -> None:
    """And every check its statement: 43 inputs, 66 statements."""
    stated = [statement for case in CASES for statement in case["expect"]]
    assert (len(CASES), len(stated)) == (43, 66)
    assert set(stated) == set(CHECKS)

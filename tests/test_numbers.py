"""Every backend, alone and strictly, on every problem: right numbers in both directions, or a refusal with its reason.

The reference is float64 attention (reference.py). What a backend refuses, the default order must still answer.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from process import Counters
from reference import BACKENDS, DEVICES, HAS_NVFUSER, Inputs, Result, attention, bshd, build, compare, reference, run

import sidestep
from sidestep import failures
from sidestep.decisions import Failed, Rejected, Remembered

sdpa: Any = sidestep.scaled_dot_product_attention
TRAINED = ("query", "key", "value")


def problem(
    name: str,
    query: tuple[int, int, int, int] = (2, 4, 64, 64),
    keys: int | None = None,
    kv_heads: int | None = None,
    value_size: int | None = None,
    dtype: str = "bfloat16",
    mask: tuple[tuple[int, ...], str, str] | None = None,
    mask_stride: tuple[int, ...] | None = None,
    strides: tuple[Any, Any, Any] | None = None,
    grads: tuple[str, ...] = TRAINED,
    **other: Any,
) -> Any:
    """A case in the form of cases/public_cases.json."""
    batch, heads, length, size = query
    key = (batch, kv_heads or heads, keys or length, size)
    value = (*key[:3], value_size or size)
    case: dict[str, Any] = {"dtype": dtype, "requires_grad": list(grads), "enable_gqa": kv_heads is not None, **other}
    layouts = strides or (None, None, None)
    for argument, shape, stride in zip(TRAINED, (query, key, value), layouts, strict=True):
        case[argument] = {"shape": list(shape), **({"stride": stride} if stride else {})}
    if mask is not None:
        case["attn_mask"] = dict(zip(("shape", "dtype", "kind"), mask, strict=True))
        if mask_stride:
            case["attn_mask"]["stride"] = mask_stride
    return pytest.param(case, id=name)


ALL = (*TRAINED, "attn_mask")
BSHD = bshd(2, 4, 64, 64)
PACKED = (64 * 3 * 4 * 64, 64, 3 * 4 * 64, 1)

PROBLEMS = [
    problem("bf16"),
    problem("fp16", dtype="float16"),
    problem("fp32", dtype="float32"),
    problem("fp64", dtype="float64"),
    problem("fp16-inference", dtype="float16", grads=()),
    problem("fp32-inference", dtype="float32", grads=()),
    problem("causal", is_causal=True),
    problem("causal-fp16-odd-length", (1, 2, 77, 64), dtype="float16", is_causal=True),
    problem("causal-more-keys", (1, 2, 33, 64), keys=70, is_causal=True),
    problem("causal-more-queries", (1, 2, 70, 64), keys=33, is_causal=True),
    problem("causal-fp64", dtype="float64", is_causal=True),
    problem("scale", scale=0.3),
    problem("scale-negative-fp32", dtype="float32", scale=-0.1),
    problem("scale-zero", scale=0.0),
    problem("scale-negative-causal", is_causal=True, scale=-0.3),
    problem("scale-negative-causal-odd-fp16", (1, 2, 77, 64), dtype="float16", is_causal=True, scale=-0.3),
    problem("scale-negative-odd-lengths", (1, 2, 65, 64), keys=129, scale=-0.3),
    problem("scale-negative-mask", scale=-0.3, mask=((64, 64), "bool", "causal")),
    problem("scale-zero-causal-fp32", dtype="float32", is_causal=True, scale=0.0),
    problem("length-1", (2, 4, 1, 64)),
    problem("one-query", (2, 4, 1, 64), keys=100),
    problem("one-query-long-keys", (1, 2, 1, 128), keys=2048),
    problem("one-key", (2, 4, 16, 64), keys=1),
    problem("odd-lengths", (1, 3, 65, 64), keys=129),
    problem("long", (1, 2, 512, 64), keys=768, dtype="float16"),
    problem("head-1", (1, 2, 33, 1)),
    problem("head-8", (2, 2, 40, 8), dtype="float16"),
    problem("head-65", (1, 2, 64, 65)),
    problem("head-72-fp32", (1, 2, 48, 72), dtype="float32"),
    problem("head-128", (1, 2, 128, 128)),
    problem("head-160-fp32-inference", (1, 2, 64, 160), dtype="float32", grads=()),
    problem("head-256", (1, 2, 64, 256)),
    problem("head-264", (1, 2, 64, 264)),
    problem("head-512", (1, 2, 32, 512), dtype="float16"),
    problem("head-512-inference", (1, 2, 32, 512), grads=()),
    problem("value-head-smaller", (2, 2, 64, 128), value_size=64),
    problem("value-head-larger", (1, 2, 48, 64), value_size=96, dtype="float16"),
    problem("value-head-1-fp32", (1, 2, 20, 32), value_size=1, dtype="float32"),
    problem("grouped", (2, 8, 64, 64), kv_heads=2),
    problem("grouped-one-key-head-causal", (1, 6, 65, 64), kv_heads=1, dtype="float16", is_causal=True),
    problem("grouped-mask-fp32", (1, 8, 32, 64), kv_heads=4, dtype="float32", mask=((32, 32), "float32", "normal")),
    problem("mask-bool-rank-2", mask=((64, 64), "bool", "causal")),
    problem("mask-bool-rank-3", mask=((4, 64, 64), "bool", "random-keep-90")),
    problem("mask-bool-full", mask=((2, 4, 64, 64), "bool", "random-keep-90")),
    problem("mask-bool-over-heads", mask=((2, 1, 64, 64), "bool", "block-diagonal")),
    problem("mask-bool-over-batch-fp16", dtype="float16", mask=((1, 4, 64, 64), "bool", "random-keep-90")),
    problem("mask-bool-keys-only", mask=((2, 1, 1, 64), "bool", "key-padding")),
    problem("mask-bool-empty-row", (1, 2, 16, 64), mask=((16, 16), "bool", "row-7-empty")),
    problem("mask-bool-odd-keys-fp32", (2, 2, 9, 32), keys=77, dtype="float32", mask=((9, 77), "bool", "all-true")),
    problem("mask-same-rank-2", mask=((64, 64), "bfloat16", "normal")),
    problem("mask-same-rank-3-one-head", mask=((1, 64, 64), "bfloat16", "normal")),
    problem("mask-same-keys-only", mask=((2, 1, 1, 64), "bfloat16", "normal")),
    problem("mask-same-queries-only", mask=((2, 1, 64, 1), "bfloat16", "normal")),
    problem("mask-same-one-number", mask=((2, 4, 1, 1), "float16", "normal"), dtype="float16"),
    problem("mask-same-odd-keys", (1, 2, 33, 64), keys=77, mask=((1, 2, 33, 77), "bfloat16", "normal")),
    problem("mask-float-minus-inf", mask=((64, 64), "bfloat16", "causal")),
    problem("mask-float-empty-row-fp16", (1, 2, 16, 64), dtype="float16", mask=((16, 16), "float16", "row-7-empty")),
    problem("mask-float32-over-bf16", mask=((64, 64), "float32", "normal")),
    problem("mask-float32-over-fp16-keys", dtype="float16", mask=((2, 1, 1, 64), "float32", "key-padding")),
    problem("mask-float32-over-fp64", dtype="float64", mask=((2, 1, 64, 64), "float32", "normal")),
    problem("mask-expanded", mask=((2, 4, 64, 64), "bfloat16", "normal"), mask_stride=(64, 0, 0, 1)),
    problem("mask-expanded-keys", mask=((2, 4, 64, 64), "bfloat16", "normal"), mask_stride=(64, 0, 1, 0)),
    problem("mask-transposed", mask=((2, 4, 64, 64), "bfloat16", "normal"), mask_stride=(16384, 4096, 1, 64)),
    problem("mask-gradient", mask=((2, 4, 64, 64), "bfloat16", "normal"), grads=ALL),
    problem("mask-gradient-fp32", dtype="float32", mask=((2, 4, 64, 64), "float32", "normal"), grads=ALL),
    problem("mask-gradient-rank-2-fp16", dtype="float16", mask=((64, 64), "float16", "normal"), grads=ALL),
    problem("mask-gradient-keys-only", mask=((2, 1, 1, 64), "bfloat16", "normal"), grads=ALL),
    problem("mask-gradient-float32-over-fp16", dtype="float16", mask=((64, 64), "float32", "normal"), grads=ALL),
    problem("mask-gradient-alone", mask=((1, 4, 64, 64), "bfloat16", "normal"), grads=("attn_mask",)),
    problem("bshd", strides=(BSHD, BSHD, BSHD)),
    problem("bshd-fp16-causal", dtype="float16", is_causal=True, strides=(BSHD, BSHD, BSHD)),
    problem("bshd-query-alone", strides=(BSHD, None, None)),
    problem("packed", strides=(PACKED, PACKED, PACKED)),
    problem("sbhd", strides=((256, 64, 512, 1),) * 3),
    problem("expanded-query", strides=((0, 4096, 64, 1), None, None)),
    problem("expanded-heads-fp32", dtype="float32", strides=(None, (4096, 0, 64, 1), (4096, 0, 64, 1))),
    problem("expanded-length", strides=(None, (16384, 4096, 0, 1), None)),
    problem("rows-unaligned", strides=((64 * 4 * 65, 64 * 65, 65, 1), None, None)),
    problem("head-size-strided-fp32", dtype="float32", strides=((16384, 4096, 1, 64), None, (16384, 4096, 1, 64))),
    problem("one-of-everything-fp32", (1, 1, 1, 1), dtype="float32"),
    problem("batch-17-causal", (17, 1, 24, 32), is_causal=True),
    problem("gradient-of-ones-expanded", grad_output="expanded-ones"),
    problem("gradient-transposed", grad_output="transposed"),
]

# What cuDNN 9.19 and torch were seen to serve on an H200, so that a rule gone wrong cannot pass as a refusal.
PLAIN = {"bf16", "fp16", "causal", "scale", "head-128", "mask-bool-rank-2", "mask-same-rank-2"}
MUST_SERVE = {
    ("cuda", "cudnn"): PLAIN
    | {"grouped", "bshd", "packed", "mask-bool-keys-only", "mask-same-keys-only", "fp32-inference"},
    ("cuda", "nvfuser"): {"bf16", "fp16", "causal", "head-128"},
    ("cuda", "torch_flash"): {"bf16", "fp16", "causal", "scale", "head-128", "bshd", "packed", "head-256"},
    ("cuda", "torch_efficient"): PLAIN | {"fp32", "bshd", "packed", "head-512", "mask-bool-keys-only"},
}
# The CPU kernel takes everything but these.
FLASH_REFUSES_ON_CPU = {
    "scale-negative-causal",
    "scale-negative-causal-odd-fp16",
    "scale-zero-causal-fp32",
    "value-head-smaller", "value-head-larger", "value-head-1-fp32", "head-size-strided-fp32",
    "mask-gradient", "mask-gradient-fp32", "mask-gradient-rank-2-fp16", "mask-gradient-keys-only",
    "mask-gradient-float32-over-fp16", "mask-gradient-alone",
}  # fmt: skip


def check_layout(inputs: Inputs, output: torch.Tensor) -> None:
    """The output is dense, and its dimensions lie in memory in the query's order, the head size innermost."""
    query = inputs.arguments()["query"]
    assert output.stride(-1) == 1 or output.shape[-1] == 1
    steps = [(step, size) for step, size in zip(output.stride(), output.shape, strict=True) if size > 1]
    dense = 1
    for step, size in sorted(steps):
        assert step == dense, f"output strides {output.stride()} of {tuple(output.shape)} are not dense"
        dense *= size
    given = [query.stride(dim) for dim in range(3) if query.shape[dim] > 1 and query.stride(dim)]
    made = [output.stride(dim) for dim in range(3) if query.shape[dim] > 1 and query.stride(dim)]
    assert sorted(range(len(made)), key=lambda dim: -given[dim]) == sorted(range(len(made)), key=lambda dim: -made[dim])


def check_refusal(refusal: sidestep.NoBackendError, backend: str) -> None:
    """One decision, about this backend, that says why; and a failure is one of kind unsupported, with a record."""
    (decision,) = refusal.decisions
    assert decision.backend == backend
    assert backend in str(refusal)
    if isinstance(decision, Rejected):
        assert decision.reasons
        assert all(decision.reasons)
        return
    assert isinstance(decision, (Failed, Remembered))
    assert decision.kind == "unsupported", decision
    assert decision.text
    assert decision.record_id
    (record,) = failures.find(decision.record_id)
    assert (record.kind, record.backend) == ("unsupported", backend)
    assert record.traceback.rstrip().splitlines()[-1]


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        pytest.param(device, backend, marks=[pytest.mark.gpu] if device == "cuda" else [])
        for device, backends in BACKENDS.items()
        for backend in backends
    ],
)
@pytest.mark.parametrize("case", PROBLEMS)
def test_backend(case: dict[str, Any], device: str, backend: str, counters: Counters) -> None:
    """Right output and gradients, or a refusal with a reason, after which the default order serves."""
    name = next(p.id for p in PROBLEMS if p.values[0] is case)
    inputs = build(case, device, case.get("scale"))
    expected = reference(inputs)
    dtype = getattr(torch, case["dtype"])
    try:
        result = run(sdpa, inputs, backends=backend)
    except sidestep.NoBackendError as refusal:
        check_refusal(refusal, backend)
        assert backend != "torch_math", "the last resort"
        assert (device, backend) != ("cpu", "torch_flash") or name in FLASH_REFUSES_ON_CPU
        assert name not in MUST_SERVE.get((device, backend), ())
        counters.reset()
        with pytest.raises(sidestep.NoBackendError):
            run(sdpa, inputs, backends=backend)
        assert counters.builds == counters.build_failures == 0, "refused before: nothing is tried again"
        result = run(sdpa, inputs)
    else:
        assert (device, backend) != ("cpu", "torch_flash") or name not in FLASH_REFUSES_ON_CPU
        assert not list(failures.records()), "nothing failed"
        check_layout(inputs, result.output)
    assert result.output.dtype is dtype
    for leaf, grad in result.grads.items():
        assert grad.dtype is inputs.leaves[leaf].dtype
    compare(result, expected, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", PROBLEMS)
def test_default_order(case: dict[str, Any], device: str, counters: Counters) -> None:
    """The default order answers everything, in the query's layout, and a second call is a hit."""
    inputs = build(case, device, case.get("scale"))
    expected = reference(inputs)
    result = run(sdpa, inputs)
    compare(result, expected, getattr(torch, case["dtype"]))
    check_layout(inputs, result.output)
    assert counters.selections == 1
    counters.reset()
    again = run(sdpa, inputs)
    assert counters.selections == 0
    assert counters.hits == counters.calls
    compare(again, expected, getattr(torch, case["dtype"]))


# --- which gradients ------------------------------------------------------------------------------------------------

COMBINATIONS = [c for n in range(1, 5) for c in itertools.combinations(ALL, n)]


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        pytest.param(device, backend, marks=[pytest.mark.gpu] if device == "cuda" else [])
        for device, backends in BACKENDS.items()
        for backend in (None, *backends)
    ],
)
@pytest.mark.parametrize("grads", COMBINATIONS, ids="-".join)
def test_gradients_for_exactly_those_who_need_them(device: str, backend: str | None, grads: tuple[str, ...]) -> None:
    case = problem(
        "", (2, 2, 24, 16), keys=40, mask=((1, 2, 24, 40), "float32", "normal"), dtype="float32", grads=grads
    )
    inputs = build(case.values[0], device)
    leaves = {name: leaf.clone().requires_grad_(name in grads) for name, leaf in inputs.leaves.items()}
    try:
        output = sdpa(**leaves, backends=backend)
    except sidestep.NoBackendError as refusal:
        assert backend is not None
        check_refusal(refusal, backend)
        assert backend != "torch_math"
        assert device == "cuda" or "attn_mask" in grads
        return
    output.backward(inputs.grad_output(output.shape))
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == set(grads)
    found = Result(output.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})
    compare(found, reference(inputs), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backward_first", [False, True])
def test_a_call_whose_needs_change(device: str, backward_first: bool, counters: Counters) -> None:
    """Inference, training and no_grad are calls of their own, on the same tensors."""
    inputs = build(problem("").values[0], device)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in inputs.leaves.items()}
    with torch.set_grad_enabled(backward_first):
        assert sdpa(**leaves).requires_grad is backward_first
    with torch.set_grad_enabled(not backward_first):
        assert sdpa(**leaves).requires_grad is not backward_first
    with torch.inference_mode():
        assert not sdpa(**leaves).requires_grad
    assert counters.selections == 2
    sdpa(**leaves).backward(inputs.grad_output((2, 4, 64, 64)))
    expected = reference(inputs)
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    compare(Result(expected.output, found), expected, torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_accumulate_and_the_graph_may_be_kept(device: str) -> None:
    inputs = build(problem("", dtype="float32").values[0], device)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in inputs.leaves.items()}
    output = sdpa(**leaves)
    grad_output = inputs.grad_output(output.shape)
    output.backward(grad_output, retain_graph=True)
    output.backward(grad_output)
    expected = reference(inputs)
    grads = {name: leaf.grad / 2 for name, leaf in leaves.items() if leaf.grad is not None}
    compare(Result(output.detach(), grads), expected, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_one_tensor_as_query_key_and_value(device: str) -> None:
    leaf = torch.randn(2, 4, 32, 64, generator=torch.Generator().manual_seed(3)).to(device).requires_grad_()
    wide = leaf.detach().double().requires_grad_()
    sdpa(leaf, leaf, leaf, is_causal=True).sum().backward()
    attention(wide, wide, wide, is_causal=True).sum().backward()
    assert leaf.grad is not None
    assert wide.grad is not None
    assert (leaf.grad.double() - wide.grad).abs().max() <= 3e-5 * wide.grad.abs().max()


# --- dropout --------------------------------------------------------------------------------------------------------


def _served(device: str) -> list[tuple[str, str | None]]:
    return [(device, backend) for backend in (None, *BACKENDS[device])]


@pytest.mark.parametrize(
    ("device", "backend"),
    [pytest.param(*p, marks=[pytest.mark.gpu] if p[0] == "cuda" else []) for d in BACKENDS for p in _served(d)],
)
def test_dropout(device: str, backend: str | None) -> None:
    """One seed, one answer; the next call draws anew; the mean is kept; gradients go with the weights that stayed."""
    inputs = build(problem("", (1, 2, 128, 64), dropout_p=0.3).values[0], device)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in inputs.leaves.items()}

    def draw(seed: int | None) -> torch.Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        return sdpa(**leaves, dropout_p=0.3, backends=backend)

    try:
        first = draw(1)
    except sidestep.NoBackendError as refusal:
        assert backend is not None
        check_refusal(refusal, backend)
        assert backend != "torch_math"
        return
    second = draw(None)
    again = draw(1)
    other = draw(2)
    assert torch.equal(first, again), "the first call, which selects, draws what a hit draws"
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)
    whole = reference(build(problem("", (1, 2, 128, 64)).values[0], device))
    mean = torch.stack([draw(seed).detach().double() for seed in range(200, 232)]).mean(0)
    assert (mean - whole.output).abs().mean() < 0.3 * whole.output.abs().mean()
    # One draw is linear in the value, so the gradient of sum(output * g), times the value, is sum(output * g) itself:
    # true only where the backward drops what the forward dropped.
    output = draw(5)
    grad_output = inputs.grad_output(output.shape)
    (grad,) = torch.autograd.grad(output, leaves["value"], grad_output)
    terms = output.detach().double() * grad_output.double()
    product = (grad.double() * leaves["value"].detach().double()).sum(-2)
    assert abs(product.sum() - terms.sum()) <= 3e-2 * terms.square().sum().sqrt()


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_of_everything(device: str, counters: Counters) -> None:
    """Probability 1: zeros, zero gradients, no backend, and nothing drawn from the generator."""
    inputs = build(problem("", dropout_p=1.0).values[0], device)
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    result = run(sdpa, inputs)
    assert not result.output.any()
    assert set(result.grads) == set(TRAINED)
    assert not any(grad.any() for grad in result.grads.values())
    assert counters.selections == 0
    assert torch.equal(state, torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state())


# --- what is known to be refused, on the H200 -----------------------------------------------------------------------

SECOND_PROCESS = """
import json, sys, torch, sidestep
for size, dtype in json.loads(sys.argv[1]):
    tensors = [torch.randn(1, 2, 64, size).to("cuda", getattr(torch, dtype)).requires_grad_() for _ in range(3)]
    sidestep.scaled_dot_product_attention(*tensors).sum().backward()
print(json.dumps(sidestep.stats()))
"""


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "dtype"), [(264, "bfloat16"), (64, "float32")])
def test_a_refused_backward_falls_through_once(size: int, dtype: str, counters: Counters) -> None:
    """Record, right gradients, and a second process that builds nothing of what is known bad."""
    case = problem("", (1, 2, 64, size), dtype=dtype).values[0]
    inputs = build(case, "cuda")
    with sidestep.use_backends("cudnn", "torch"):
        compare(run(sdpa, inputs), reference(inputs), getattr(torch, dtype))
        compare(run(sdpa, inputs), reference(inputs), getattr(torch, dtype))
    assert counters.fallbacks == counters.selections == 1
    assert counters.builds >= 1
    record = next(record for record in failures.records() if record.backend == "cudnn")
    assert (record.kind, record.direction, record.built_on) == ("unsupported", "backward", "local")
    assert "create_execution_plans" in record.traceback
    assert record.exception_text in record.traceback
    command = [sys.executable, "-c", SECOND_PROCESS, json.dumps([[size, dtype]])]
    for order in ("cudnn,torch", "cudnn,nvfuser,torch"):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=1200, env={**os.environ, "SIDESTEP_BACKENDS": order}
        )
        assert done.returncode == 0, done.stderr
        stats = json.loads(done.stdout.splitlines()[-1])
        assert stats["skipped_known_bad"] >= 1
        if order == "cudnn,torch":
            assert stats["builds"] == stats["build_failures"] == 0
        assert stats["fallbacks"] == 1


@pytest.mark.gpu
def test_a_forward_that_builds_is_still_served() -> None:
    """Head size 264: refused for training, served for inference."""
    inference = build(problem("", (1, 2, 64, 264), grads=()).values[0], "cuda")
    compare(run(sdpa, inference, backends="cudnn"), reference(inference), torch.bfloat16)
    with pytest.raises(sidestep.NoBackendError):
        run(sdpa, build(problem("", (1, 2, 64, 264)).values[0], "cuda"), backends="cudnn")


if HAS_NVFUSER:

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        "case",
        [
            problem("grouped", (2, 8, 64, 64), kv_heads=2),
            problem("head-65", (1, 2, 64, 65)),
            problem("bshd", strides=(BSHD, BSHD, BSHD)),
        ],
    )
    def test_nvfuser_refusals_are_recorded_and_fallen_through(case: dict[str, Any], counters: Counters) -> None:
        inputs = build(case, "cuda")
        with sidestep.use_backends("nvfuser", "torch"):
            compare(run(sdpa, inputs), reference(inputs), torch.bfloat16)
        assert counters.fallbacks == 1
        record = next(record for record in failures.records() if record.backend == "nvfuser")
        assert record.kind == "unsupported"
        assert "RuntimeError" in record.traceback
        counters.reset()
        sidestep.configure()  # routes and plans go, as in a new process
        with sidestep.use_backends("nvfuser", "torch"):
            compare(run(sdpa, inputs), reference(inputs), torch.bfloat16)
        assert counters.skipped_known_bad >= 1
        assert counters.builds == 0


@pytest.mark.gpu
def test_graphs_are_built_once(counters: Counters) -> None:
    """Inference builds one graph, training two; hits build none."""
    for grads, builds in (((), 1), (TRAINED, 2)):
        counters.reset()
        inputs = build(problem("", grads=grads).values[0], "cuda")
        for _ in range(3):
            run(sdpa, inputs, backends="cudnn")
        assert counters.builds == builds
        assert counters.selections == 1


def test_the_problems_are_many() -> None:
    """At least 40, each under a name of its own."""
    names = [p.id for p in PROBLEMS]
    assert len(set(names)) == len(names) >= 40
    named = set().union(FLASH_REFUSES_ON_CPU, *MUST_SERVE.values())
    assert named <= set(names)

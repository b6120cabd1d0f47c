"""Every way in which users reach the dispatcher gives float64's numbers, on the CPU and on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import reference
import thunder
import torch
from process import Counters
from reference import DEVICES
from torch.utils.checkpoint import checkpoint

import sidestep
import sidestep.thunder_executor
from sidestep import failures
from sidestep.thunder_executor import FallbackExecutor
from sidestep.transformers_attention import attention_forward

Attention = Callable[..., torch.Tensor]

SHAPES: dict[str, Any] = {name: {"shape": [2, 4, 128, 64]} for name in ("query", "key", "value")}
TRAINING: dict[str, Any] = {**SHAPES, "requires_grad": ["query", "key", "value"]}
KEYS: dict[str, Any] = {name: {"shape": [2, 4, 192, 64]} for name in ("key", "value")}
CASES: dict[str, dict[str, Any]] = {
    "inference": {**SHAPES, "is_causal": True},
    "training": {**TRAINING, "is_causal": True},
    "grouped": {**TRAINING, "key": {"shape": [2, 2, 128, 64]}, "value": {"shape": [2, 2, 128, 64]}, "enable_gqa": True},
    "padding": {**TRAINING, "attn_mask": {"shape": [2, 1, 1, 128], "dtype": "bool", "kind": "key-padding"}},
    "empty row": {**TRAINING, "attn_mask": {"shape": [128, 128], "dtype": "bool", "kind": "row-7-empty"}},
    "one gradient": {**TRAINING, "requires_grad": ["value"], "grad_output": "transposed"},
    # What cuDNN 9.19 answers with NaN gradients.
    "negative": {**TRAINING, **KEYS, "data": "logits-near--120"},
}


def torchs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The call that users write; the name is looked up when it is made."""
    attention: Attention = torch.nn.functional.scaled_dot_product_attention
    if enable_gqa:
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)
    return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def installed(*arguments: Any, **flags: Any) -> torch.Tensor:
    with sidestep.installed():
        return torchs(*arguments, **flags)


def from_transformers(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **flags: Any
) -> torch.Tensor:
    causal = flags["is_causal"] and attn_mask is None
    output, _ = attention_forward(
        torch.nn.Module(), query, key, value, attn_mask, flags["dropout_p"], flags["scale"], causal
    )
    return output.transpose(1, 2)


def compiled(device: str) -> Attention:
    """Inductor on the GPU; on the CPU the same graphs without a C++ compiler's minutes."""
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    function: Attention = torch.compile(sidestep.scaled_dot_product_attention, fullgraph=True, backend=backend)
    return function


def checkpointed(**given: Any) -> torch.Tensor:
    output: torch.Tensor = checkpoint(sidestep.scaled_dot_product_attention, **given, use_reentrant=False)
    return output


WAYS: dict[str, Callable[[str], Attention]] = {
    "installed": lambda _: installed,
    "compiled": compiled,
    "checkpointed": lambda _: checkpointed,
    "transformers": lambda _: from_transformers,
    "thunder": lambda _: thunder.jit(torchs, executors=["sidestep"]),
    "thunder's own": lambda _: thunder.jit(torchs, executors=[FallbackExecutor(["cudnn", "sdpa", "torch"])]),
}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test compiled is no other test's."""
    yield
    torch._dynamo.reset()


def inputs(case: str, device: str) -> reference.Inputs:
    dtype = "bfloat16" if device == "cuda" else "float32"
    return reference.build({**CASES[case], "dtype": dtype}, device)


# Thunder 0.2.6 by itself knows no grouped heads, and has NaN in a row without a key.
THUNDERS_LIMITS = ("grouped", "empty row")


@pytest.mark.parametrize(
    ("way", "case"),
    [(way, case) for way in WAYS for case in CASES if way != "thunder's own" or case not in THUNDERS_LIMITS],
)
@pytest.mark.parametrize("device", DEVICES)
def test_numbers(device: str, way: str, case: str, lenient: None, counters: Counters) -> None:
    """Lenient, because Thunder's own executors do raise, and are passed over."""
    given = inputs(case, device)
    with sidestep.observe() as seen:
        result = reference.run(WAYS[way](device), given)
    dtype = given.leaves["query"].dtype
    expected = reference.reference(given)
    if case == "negative":  # logits of 120 cost float32 a digit, and a query's gradient nearly cancels
        reference.assert_close(result.output, expected.output, "output", gradient=True, dtype=dtype)
        assert all(torch.isfinite(grad).all() for grad in result.grads.values())
    else:
        reference.compare(result, expected, dtype)
    if way != "thunder's own":
        assert counters.calls > 0
        first = {"cpu": "torch_flash", "cuda": "cudnn"}[device]
        assert {decisions[-1].backend for _, decisions in seen} == {first}


@pytest.mark.parametrize("way", ["compiled", "thunder"])
@pytest.mark.parametrize("device", DEVICES)
def test_dropout_of_a_backward_is_that_of_its_forward(device: str, way: str) -> None:
    """With values that are the identity an output shows its weights, and a gradient of the values too."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    query, key = (torch.randn(1, 2, 64, 64, device=device, dtype=dtype) for _ in range(2))
    value = torch.eye(64, device=device, dtype=dtype).expand(1, 2, 64, 64).clone().requires_grad_()
    function = WAYS[way](device)
    outputs = [function(query, key, value, dropout_p=0.5) for _ in range(2)]
    dropped = [output == 0 for output in outputs]
    assert not torch.equal(*dropped)
    for output, zeros in zip(outputs, dropped, strict=True):
        assert 0.4 < zeros.float().mean() < 0.6
        # Of a row of weights, each times one: what was dropped adds nothing.
        (grad,) = torch.autograd.grad(output, value, torch.ones_like(output))
        torch.testing.assert_close(grad[..., 0].float(), output.detach().float().sum(-2), atol=5e-2, rtol=3e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_one_compiled_function_for_many_lengths(device: str) -> None:
    function = compiled(device)
    torch._dynamo.utils.counters.clear()
    dtype = "bfloat16" if device == "cuda" else "float32"
    for length in (128, 96, 160):
        case = {name: {"shape": [2, 4, length, 64]} for name in ("query", "key", "value")}
        given = reference.build({**case, "requires_grad": list(case), "is_causal": True, "dtype": dtype}, device)
        result = reference.run(function, given)
        reference.compare(result, reference.reference(given), getattr(torch, dtype))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # static first, dynamic for all others


@pytest.mark.gpu
def test_why_thunders_cudnn_executor_was_passed_over(lenient: None) -> None:
    """Thunder 0.2.6 asks the frontend for what 1.32 has not; the record says so, and the next trace does not try."""
    given = inputs("training", "cuda")
    for _ in range(2):
        result = reference.run(WAYS["thunder's own"]("cuda"), given)
        reference.compare(result, reference.reference(given), torch.bfloat16)
    (record,) = [record for record in failures.records() if record.backend.endswith("cudnn")]
    assert (record.kind, record.exception_type) == ("error", "AttributeError")
    assert record.count == 1

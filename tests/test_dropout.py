"""Dropout: what is drawn is torch's generator's, is what was asked for, and is the backward's too.

With value rows that are unit vectors the output is the dropped weights themselves, so every weight can be looked at.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference import BACKENDS

import sidestep
from sidestep.backends import registry
from sidestep.decisions import Failed, Rejected, Remembered
from sidestep.problem import AttentionProblem, Layout

sdpa: Any = sidestep.scaled_dot_product_attention
KEYS = 64
SERVING = [
    pytest.param(device, backend, marks=[pytest.mark.gpu] if device == "cuda" else [], id=f"{device}-{backend}")
    for device, backends in BACKENDS.items()
    for backend in backends
]


def weights_after(dropout_p: float, backend: str, device: str, batch: int = 64, grad: bool = False) -> Any:
    """The dropped weights (batch, 4, 64, 64), each 0 or 1/64/(1 - p), or the decision of a backend that refuses."""
    query, key = (torch.zeros(batch, 4, 64, KEYS, device=device, dtype=torch.float16) for _ in range(2))
    value = torch.eye(KEYS, device=device, dtype=torch.float16).expand(batch, 4, KEYS, KEYS).contiguous()
    tensors = [t.requires_grad_(grad) for t in (query, key, value)]
    try:
        return sdpa(*tensors, dropout_p=dropout_p, backends=backend), tensors
    except sidestep.NoBackendError as refusal:
        (decision,) = refusal.decisions
        assert isinstance(decision, (Rejected, Failed, Remembered))
        assert isinstance(decision, Rejected) or decision.kind == "unsupported", decision
        assert backend != "torch_math", "the last resort"
        return None, decision


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dropout_p", [0.01, 0.1, 0.5])
@pytest.mark.parametrize(("device", "backend"), SERVING)
def test_the_keep_rate_is_what_was_asked_for(
    device: str, backend: str, dropout_p: float, training: bool, record_property: Any
) -> None:
    """Over 1,048,576 weights, within 3 sigma of 1 - p, and those kept are scaled by 1/(1 - p)."""
    torch.manual_seed(20)
    output, _ = weights_after(dropout_p, backend, device, grad=training)
    if output is None:
        assert (device, backend) != ("cuda", "cudnn")
        return
    count = output.numel()
    assert count >= 10**6
    kept = output[output != 0].double()
    rate, sigma = len(kept) / count, math.sqrt(dropout_p * (1 - dropout_p) / count)
    record_property("keep_rate", rate)
    off = (rate - 1 + dropout_p) / sigma
    text = f"{backend} kept {rate:.6f} of {count} weights, asked for {1 - dropout_p}: {off:+.2f} sigma"
    print(text)
    assert abs(rate - (1 - dropout_p)) <= 3 * sigma, text
    scaled = kept * KEYS * (1 - dropout_p)
    assert (scaled - 1).abs().max() < 2e-3, f"{backend} scales by {scaled.mean():.6f}/(1 - p)"


@pytest.mark.parametrize(("device", "backend"), SERVING)
def test_one_seed_one_answer_and_the_backward_drops_what_the_forward_dropped(device: str, backend: str) -> None:
    """Gradients are those of the weights that the forward kept, for query, key and value; the next call draws anew."""
    results = []
    for seed in (7, 7, None):
        if seed is not None:
            torch.manual_seed(seed)
        output, tensors = weights_after(0.3, backend, device, batch=2, grad=True)
        if output is None:
            return
        grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device, output.dtype)
        results.append((output.detach(), *torch.autograd.grad(output, tensors, grad_output)))
    for first, again in zip(*results[:2], strict=True):
        # A backward may add up in any order; whole weights would be off by 1/64.
        assert (first.double() - again.double()).abs().max() <= 1e-3 * first.double().abs().max()
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][0], results[2][0])
    kept = (results[0][0] != 0).double() / 0.7  # what a weight is multiplied with
    grad_output = grad_output.double()
    weights = torch.full_like(kept, 1 / KEYS)
    found = results[0][3].double()
    expected = (kept * weights).mT @ grad_output
    assert (found - expected).abs().max() <= 3 * 4e-3 * expected.abs().max()
    # With query and key zero their gradients are zero; with other ones the logits' gradients show.
    query, key = (torch.randn(2, 4, 64, KEYS, generator=torch.Generator().manual_seed(s)) for s in (2, 3))
    value = torch.eye(KEYS).expand(2, 4, KEYS, KEYS)
    leaves = [t.to(device, torch.float16).contiguous().requires_grad_() for t in (query, key, value)]
    torch.manual_seed(7)
    output = sdpa(*leaves, dropout_p=0.3, backends=backend)
    grads = torch.autograd.grad(output, leaves, grad_output.half())
    wide = [t.detach().double().requires_grad_() for t in leaves]
    softmax = torch.softmax(wide[0] @ wide[1].mT * KEYS**-0.5, -1)
    expected_output = softmax * kept @ wide[2]
    assert (output.double() - expected_output).abs().max() <= 4e-3 * expected_output.abs().max(), "same seed, same mask"
    for grad, right in zip(grads, torch.autograd.grad(expected_output, wide, grad_output), strict=True):
        assert (grad.double() - right).abs().max() <= 3 * 4e-3 * right.abs().max()


@pytest.mark.parametrize(("device", "backend"), SERVING)
def test_everything_dropped_is_zeros(device: str, backend: str) -> None:
    before = sidestep.stats()["selections"]
    output, tensors = weights_after(1.0, backend, device, batch=2, grad=True)
    assert not output.any()
    assert not any(grad.any() for grad in torch.autograd.grad(output.sum(), tensors))
    assert sidestep.stats()["selections"] == before


@pytest.mark.parametrize(
    ("dropout_p", "rounds"), [(0.0, False), (0.5, False), (0.25, False), (0.01, True), (0.1, True), (0.3, True)]
)
def test_flash_on_cuda_is_refused_what_it_rounds(dropout_p: float, rounds: bool) -> None:
    """It keeps floor(255 (1 - p)) + 1 of 256; on the CPU it has no dropout."""
    layout = Layout.of((1, 2, 64, 64))
    problem = AttentionProblem("cuda", "float16", layout, layout, layout, dropout_p=dropout_p)
    for name in ("torch_flash", "nvfuser"):
        assert any("flash rounds it" in reason for reason in registry.get(name).rejects(problem)) is rounds
    for name in ("cudnn", "torch_efficient", "torch_math"):
        assert not registry.get(name).rejects(problem)

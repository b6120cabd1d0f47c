"""Attention in float64, inputs described as in cases/public_cases.json, and the comparison of the two."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# As cases/public_cases.json says: the largest difference over the reference's largest magnitude; gradients, 3 times.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-11}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INPUTS = ("query", "key", "value", "attn_mask")
HAS_NVFUSER = importlib.util.find_spec("nvfuser_direct") is not None
BACKENDS = {
    "cpu": ("torch_flash", "torch_math"),
    "cuda": ("cudnn", *(("nvfuser",) if HAS_NVFUSER else ()), "torch_flash", "torch_efficient", "torch_math"),
}


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
) -> torch.Tensor:
    """Plain attention in the inputs' dtype: a bool mask's False excludes, an empty row is zero, causal is top-left."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    size = query.shape[-1]
    logits = query @ key.transpose(-1, -2) * (1 / math.sqrt(size) if scale is None else scale)
    if is_causal:
        allowed = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~allowed, -torch.inf)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        logits = logits.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        logits = logits + attn_mask
    if not logits.shape[-1]:
        return (logits @ value) * 1.0
    empty = logits.detach().amax(-1, keepdim=True) == -torch.inf
    weights = torch.softmax(logits.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    return weights @ value


def torch_math(*arguments: Any, **keywords: Any) -> torch.Tensor:
    """The answer of torch.nn.functional, by its math kernel: the others on the CPU check less than they rely on."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*arguments, **keywords)


def torch_refuses(tensors: dict[str, Any], flags: dict[str, Any]) -> bool:
    """Torch's verdict: refused by its math kernel, or by its own choice of a kernel.

    Each alone lets something pass: math a dropout under 0 and masks of rank 1, the CPU's flash kernel causal
    together with a mask. That one also reads beyond a value that is shorter than the key, so it is not asked then.
    """
    shapes = [tensors["key"].shape, tensors["value"].shape]
    whole = all(len(shape) > 1 for shape in shapes) and shapes[0][-2] == shapes[1][-2]
    for function in (torch_math, *((torch.nn.functional.scaled_dot_product_attention,) if whole else ())):
        try:
            function(**tensors, **flags)
        except (RuntimeError, IndexError, ValueError):
            return True
    return False


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the expected values' largest magnitude; infinite when anything is not finite."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    if not actual.numel():
        return 0.0
    difference = (actual.detach().to(expected.dtype) - expected.detach()).abs().max().item()
    if not math.isfinite(difference):
        return math.inf
    largest = expected.detach().abs().max().item()
    # Where the true numbers are all zero, as a single key's gradient is, inputs of size 1 are the measure.
    return difference / (largest if largest > 1e-9 else 1.0)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, what: str, gradient: bool = False, dtype: torch.dtype | None = None
) -> None:
    """Fail where `actual` is farther from `expected` than its dtype allows."""
    allowed = TOLERANCE[dtype or actual.dtype] * (3 if gradient else 1)
    found = error(actual, expected)
    assert found <= allowed, f"{what}: relative error {found:.2g}, at most {allowed:.2g} is allowed"


@dataclass
class Inputs:
    """The tensors of a case: `leaves`, and how each argument is made from one of them.

    Attributes:
        leaves: the tensors whose gradients are compared; one buffer where arguments share it.
        views: argument -> (name of the leaf, the differentiable view of it).
    """

    leaves: dict[str, torch.Tensor]
    views: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]]
    requires_grad: tuple[str, ...]
    flags: dict[str, Any]
    grad_output: Callable[[Sequence[int]], torch.Tensor] = field(repr=False)

    def arguments(self, leaves: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """Query, key, value and, where there is one, attn_mask, made from `leaves`."""
        chosen = self.leaves if leaves is None else leaves
        return {name: view(chosen[leaf]) for name, (leaf, view) in self.views.items()}

    def trained(self) -> tuple[str, ...]:
        """The leaves that need a gradient."""
        return tuple(dict.fromkeys(self.views[name][0] for name in self.requires_grad))


@dataclass
class Result:
    """An output and the gradients of the leaves that need one."""

    output: torch.Tensor
    grads: dict[str, torch.Tensor]


def run(function: Callable[..., torch.Tensor], inputs: Inputs, **keywords: Any) -> Result:
    """Call `function`; on CUDA a second time, on buffers that hold NaN, so that what is never written shows."""
    if inputs.leaves[inputs.views["query"][0]].is_cuda:
        _run(function, inputs, keywords, poisoned=False)
        return _run(function, inputs, keywords, poisoned=True)
    return _run(function, inputs, keywords, poisoned=False)


def _run(function: Callable[..., torch.Tensor], inputs: Inputs, keywords: Mapping[str, Any], poisoned: bool) -> Result:
    trained = inputs.trained()
    leaves = {name: leaf.detach().requires_grad_(name in trained) for name, leaf in inputs.leaves.items()}
    if poisoned:
        poison(inputs)
    output = function(**inputs.arguments(leaves), **inputs.flags, **keywords)
    if not trained:
        return Result(output, {})
    grad_output = inputs.grad_output(output.shape)
    if poisoned:
        poison(inputs)
    grads = torch.autograd.grad(output, [leaves[name] for name in trained], grad_output)
    return Result(output.detach(), dict(zip(trained, grads, strict=True)))


def poison(inputs: Inputs) -> None:
    """Fill with NaN, and free, memory of the sizes that outputs, gradients and statistics are about to get."""
    arguments = inputs.arguments()
    query, value = arguments["query"], arguments["value"]
    rows = query.numel() // max(query.shape[-1], 1)
    taken = [
        torch.full((max(t.numel(), 1),), torch.nan, dtype=query.dtype, device=query.device)
        for t in (*arguments.values(), *inputs.leaves.values())
    ]
    for _ in range(2):
        taken.append(torch.full((rows * value.shape[-1] + 1,), torch.nan, dtype=query.dtype, device=query.device))
        taken.append(torch.full((rows + 1,), torch.nan, dtype=torch.float32, device=query.device))
    del taken


def reference(inputs: Inputs) -> Result:
    """The same call in float64."""
    wide = {n: t.detach() if t.dtype is torch.bool else t.detach().double() for n, t in inputs.leaves.items()}
    trained = inputs.trained()
    for name in trained:
        wide[name].requires_grad_()
    output = attention(**inputs.arguments(wide), **{n: v for n, v in inputs.flags.items() if n != "dropout_p"})
    if not trained:
        return Result(output, {})
    grad_output = inputs.grad_output(output.shape).double()
    grads = torch.autograd.grad(output, [wide[name] for name in trained], grad_output, allow_unused=True)
    made = (g if g is not None else torch.zeros_like(wide[n]) for n, g in zip(trained, grads, strict=True))
    return Result(output.detach(), dict(zip(trained, made, strict=True)))


def compare(result: Result, expected: Result, dtype: torch.dtype) -> None:
    """Output and every gradient within the tolerance of `dtype`, the query's."""
    assert_close(result.output, expected.output, "output", dtype=dtype)
    assert result.grads.keys() == expected.grads.keys()
    for name, grad in result.grads.items():
        assert_close(grad, expected.grads[name], f"gradient of {name}", gradient=True, dtype=dtype)


def bshd(batch: int, heads: int, length: int, size: int) -> tuple[int, int, int, int]:
    """Strides of (B, H, S, D) whose memory is (B, S, H, D)."""
    return (length * heads * size, size, heads * size, 1)


def build(case: Mapping[str, Any], device: str = "cpu", scale: float | None = None) -> Inputs:
    """The tensors of a case; numbers are drawn on the CPU with seed 0, so that every device sees the same."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    dtypes = case["dtype"] if isinstance(case["dtype"], list) else [case["dtype"]] * 3
    size = case["query"]["shape"][-1]
    data = case.get("data", "normal")

    def numbers(name: str, count: int) -> torch.Tensor:
        drawn = normal(count)
        sign = {"query": 1.0, "key": -1.0}.get(name)
        if data == "normal" or sign is None:
            return drawn
        if data == "q=4,k=-4":
            return torch.full((count,), 4.0 * sign)
        assert data == "logits-near--120", data
        return sign * math.sqrt(120 / (size * (scale or 1 / math.sqrt(size)))) + 0.05 * drawn

    leaves: dict[str, torch.Tensor] = {}
    views: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {}
    shared = any("offset" in case[name] for name in INPUTS[:3])
    if shared:
        described = [case[name] for name in INPUTS[:3]]
        extent = max(_extent(d["shape"], d["stride"]) + d.get("offset", 0) for d in described)
        leaves["buffer"] = normal(extent).to(getattr(torch, dtypes[0])).to(device)
        for name, d in zip(INPUTS, described, strict=False):
            views[name] = ("buffer", _slice(d["shape"], d["stride"], d.get("offset", 0)))
    else:
        for name, dtype in zip(INPUTS, dtypes, strict=False):
            shape, stride = case[name]["shape"], case[name].get("stride")
            drawn = functools.partial(numbers, name)
            leaves[name] = _leaf(drawn, shape, stride, getattr(torch, dtype), device)
            views[name] = (name, _expansion(shape))
    mask = case.get("attn_mask")
    if mask is not None:
        leaves["attn_mask"] = _mask(mask, case, normal, random, device)
        views["attn_mask"] = ("attn_mask", _expansion(mask["shape"]))

    state = random.get_state()

    def grad_output(shape: Sequence[int]) -> torch.Tensor:
        drawn = torch.Generator()
        drawn.set_state(state)
        dtype, kind = getattr(torch, dtypes[0]), case.get("grad_output", "normal")
        if kind == "expanded-ones":
            return torch.ones((), dtype=dtype, device=device).expand(*shape)
        if kind == "transposed":
            swapped = (*shape[:-2], shape[-1], shape[-2])
            return torch.randn(swapped, generator=drawn).to(dtype).to(device).transpose(-1, -2)
        assert kind == "normal", kind
        return torch.randn(tuple(shape), generator=drawn).to(dtype).to(device)

    flags = {"is_causal": case.get("is_causal", False), "enable_gqa": case.get("enable_gqa", False)}
    flags |= {"scale": scale, "dropout_p": case.get("dropout_p", 0.0)}
    return Inputs(leaves, views, tuple(case.get("requires_grad", ())), flags, grad_output)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    return 1 + sum((s - 1) * t for s, t in zip(shape, stride, strict=True))


def _slice(shape: Sequence[int], stride: Sequence[int], offset: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda buffer: buffer.as_strided(tuple(shape), tuple(stride), offset)


def _expansion(shape: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda leaf: leaf.expand(tuple(shape))


def _leaf(
    numbers: Callable[[int], torch.Tensor],
    shape: Sequence[int],
    stride: Sequence[int] | None,
    dtype: torch.dtype,
    device: str,
) -> torch.Tensor:
    """The tensor before it was expanded: of size 1 where the stride is 0, and with the other strides."""
    if stride is None:
        return numbers(math.prod(shape)).view(*shape).to(dtype).to(device)
    small = [1 if not step else size for size, step in zip(shape, stride, strict=True)]
    return numbers(_extent(small, stride)).to(dtype).to(device).as_strided(small, tuple(stride))


def _mask(
    mask: Mapping[str, Any],
    case: Mapping[str, Any],
    normal: Callable[..., torch.Tensor],
    random: torch.Generator,
    device: str,
) -> torch.Tensor:
    shape, kind, dtype = mask["shape"], mask["kind"], getattr(torch, mask["dtype"])
    if kind == "normal":
        return _leaf(normal, shape, mask.get("stride"), dtype, device)
    rows, keys = shape[-2:]
    row, column = torch.arange(rows)[:, None], torch.arange(keys)
    keep = torch.ones(*shape, dtype=torch.bool)
    if kind == "causal":
        keep &= column <= row
    elif kind == "block-diagonal":
        keep &= row * 4 // rows == column * 4 // keys
    elif kind == "random-keep-90":
        keep = (torch.rand(*shape, generator=random) < 0.9) | (row == column)
    elif kind == "key-padding":
        batches = case["query"]["shape"][0]
        kept = torch.tensor([keys - b * keys // (2 * batches) for b in range(batches)])
        keep &= column < kept.view(-1, *[1] * (len(shape) - 1))
    elif kind == "row-7-empty":
        keep &= row != 7
    elif kind in ("corner-4x4", "corner-4x4-as-0-1"):
        keep &= (row < 4) & (column < 4)
    else:
        assert kind == "all-true", kind
    if dtype is torch.bool:
        made = keep
    elif kind.endswith("as-0-1"):
        made = keep.to(dtype)
    else:
        made = torch.where(keep, 0.0, -torch.inf).to(dtype)
    return made.to(device)

"""Calls drawn from all that torch accepts, and some that it refuses: output and gradients beside float64 attention.

Every argument is a view of a buffer, whose gradient is compared: dimensions in any order in memory, expanded, singleton
ones of any stride, gaps, odd offsets, and query, key and value as slices of one packed buffer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reference import DEVICES, INPUTS, TOLERANCE, Inputs, reference, run, torch_refuses

import sidestep

EXAMPLES = 2000
sdpa: Any = sidestep.scaled_dot_product_attention


@dataclass
class View:
    """A tensor as a view of a buffer."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    buffer: str = ""

    @property
    def extent(self) -> int:
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.as_strided(self.shape, self.stride, self.offset)


@dataclass
class Case:
    """A call; `off` says that something may be wrong with it."""

    views: dict[str, View]
    dtype: str
    mask_dtype: str
    requires_grad: tuple[str, ...]
    flags: dict[str, Any]
    grad_layout: str
    empty_row: bool
    off: bool = field(default=False)


def one_in(count: int) -> st.SearchStrategy[bool]:
    return st.integers(0, count - 1).map(lambda number: number == count - 1)


def strides(draw: st.DrawFn, shape: Sequence[int]) -> tuple[int, ...]:
    """Of a view whose dimensions lie in any order, with gaps, some of them expanded, singleton ones anywhere."""
    rank = len(shape)
    order = draw(st.one_of(st.just(list(range(rank))), st.permutations(range(rank))))
    step, gap = draw(st.sampled_from([1, 1, 1, 1, 2])), draw(st.sampled_from([0, 0, 0, 1, 8]))
    expanded = draw(st.sampled_from([None] * 4 + list(range(rank))))
    result = [0] * rank
    for dim in reversed(order):
        if dim == expanded:
            continue
        result[dim] = step
        step = step * max(shape[dim], 1) + gap
    for dim, size in enumerate(shape):
        if size == 1:
            result[dim] = draw(st.sampled_from([result[dim], 0, 1, 7]))
    return tuple(result)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rank = draw(st.sampled_from([4, 4, 4, 3, 2, 5]))
    zero = draw(one_in(12))
    size = st.sampled_from([1, 2, 3, 0] if zero else [1, 2, 3])
    batch = [draw(size) for _ in range(max(rank - 3, 0))]
    heads, enable_gqa = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    lengths = st.sampled_from([1, 2, 4, 5, 8, 0] if zero else [1, 2, 4, 5, 8, 17])
    queries, keys = draw(lengths), draw(lengths)
    head_size = draw(st.sampled_from([1, 2, 4, 8, 16]))
    value_size = draw(st.sampled_from([head_size, head_size, 1, 4, 8]))
    shapes: dict[str, list[int]] = {}
    packed = draw(one_in(6))
    for name, length, last in zip(INPUTS, (queries, keys, keys), (head_size, head_size, value_size), strict=False):
        lead = list(batch) if packed else [draw(st.sampled_from([n, n, n, 1])) for n in batch]
        if rank > 2:
            divisors = [n for n in (1, 2, 4) if heads % n == 0] if enable_gqa else [heads, heads, 1]
            lead.append(heads if name == "query" or packed else draw(st.sampled_from(divisors)))
        if not packed and lead and not enable_gqa and draw(one_in(8)):
            lead = lead[1:]
        shapes[name] = [*lead, queries if packed else length, head_size if packed else last]
    keys = shapes["key"][-2]
    off = draw(one_in(20))
    if off:
        shape = shapes[draw(st.sampled_from(INPUTS[:3]))]
        shape[draw(st.integers(0, len(shape) - 1))] = draw(st.sampled_from([1, 2, 3, 5]))
    views = {}
    if packed and not off:
        whole = strides(draw, [*shapes["query"], 3])
        if not whole[-1]:  # three names for the same numbers are allowed too
            whole = (*whole[:-1], 0)
        offset = draw(st.sampled_from([0, 0, 1, 3]))
        for number, name in enumerate(INPUTS[:3]):
            views[name] = View(tuple(shapes[name]), whole[:-1], offset + number * whole[-1], "packed")
    else:
        for name in INPUTS[:3]:
            offset = draw(st.sampled_from([0, 0, 0, 1, 3, 8]))
            views[name] = View(tuple(shapes[name]), strides(draw, shapes[name]), offset, name)
    is_causal = draw(one_in(4))
    if draw(st.booleans()) and (not is_causal or draw(one_in(30))):
        target = [*batch, *([heads] if rank > 2 else []), queries, keys]
        shape = [draw(st.sampled_from([n, n, 1])) for n in target][draw(st.integers(0, rank - 2)) :]
        if off and draw(st.booleans()):
            shape[draw(st.integers(0, len(shape) - 1))] = 6
        offset = draw(st.sampled_from([0, 0, 1, 8]))
        views["attn_mask"] = View(tuple(shape), strides(draw, shape), offset, "attn_mask")
    dtype = draw(st.sampled_from(["float32", "float32", "bfloat16", "float16", "float64"]))
    mask_dtype = draw(st.sampled_from(["bool", dtype, dtype, "float32", *(["float64", "int32"] if off else [])]))
    floats = [name for name in views if name != "attn_mask" or mask_dtype not in ("bool", "int32")]
    return Case(
        views,
        dtype,
        mask_dtype,
        tuple(name for name in floats if draw(st.booleans())),
        {
            "is_causal": is_causal,
            "scale": draw(st.sampled_from([None, None, None, 0.5, -0.3, 0.0, 1])),
            "enable_gqa": enable_gqa,
            "dropout_p": 0.0,
        },
        draw(st.sampled_from(["contiguous", "transposed", "expanded", "gaps"])),
        draw(one_in(3)),
        off,
    )


def inputs_of(case: Case, device: str) -> Inputs:
    """The tensors of a case, from seed 0."""
    random = torch.Generator().manual_seed(0)
    leaves: dict[str, torch.Tensor] = {}
    for name, view in case.views.items():
        extent = max(one.extent for one in case.views.values() if one.buffer == view.buffer)
        if view.buffer in leaves:
            continue
        numbers = torch.randn(max(extent, 1), generator=random)
        if name != "attn_mask":
            leaves[view.buffer] = numbers.to(getattr(torch, case.dtype)).to(device)
            continue
        dtype = getattr(torch, case.mask_dtype)
        excluded = numbers < -0.8
        if case.empty_row and 0 not in view.shape:
            for column in range(view.shape[-1]):  # of the first row
                excluded[view.offset + column * view.stride[-1]] = True
        made = ~excluded if dtype is torch.bool else numbers.masked_fill(excluded & case.empty_row, -torch.inf)
        leaves[view.buffer] = made.to(dtype).to(device)
    views: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        name: (view.buffer, view.of) for name, view in case.views.items()
    }
    return Inputs(leaves, views, case.requires_grad, case.flags, functools.partial(grad_output, case, device))


def grad_output(case: Case, device: str, shape: Sequence[int]) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    dtype = getattr(torch, case.dtype)
    if case.grad_layout == "expanded":
        return torch.full((), 0.7, dtype=dtype, device=device).expand(*shape)
    if case.grad_layout == "transposed":
        return torch.randn(*shape[:-2], shape[-1], shape[-2], generator=random).to(device, dtype).mT
    if case.grad_layout == "gaps":
        return torch.randn(*shape, 2, generator=random).to(device, dtype)[..., 0]
    return torch.randn(*shape, generator=random).to(device, dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, what: str, allowed: float) -> None:
    """Within `allowed` of the largest magnitude, or of 1, that of the inputs, where results cancel."""
    assert actual.shape == expected.shape, what
    if actual.numel():
        difference = (actual.detach().double() - expected).abs().max().item()
        assert difference <= allowed * max(expected.abs().max().item(), 1.0), f"{what}: {difference:.3g} off"


def check(case: Case, device: str) -> None:
    inputs = inputs_of(case, device)
    arguments = inputs.arguments()
    sizes = [size for name in INPUTS[:3] for size in case.views[name].shape[:-2]]
    # Of no batch or no heads torch 2.11 dies on the CPU; tests/test_semantics.py says what is meant.
    if 0 not in sizes and torch_refuses({name: t.cpu() for name, t in arguments.items()}, case.flags):
        before = sidestep.stats()["selections"]
        with pytest.raises(sidestep.InvalidCallError):
            sdpa(**arguments, **case.flags)
        assert sidestep.stats()["selections"] == before
        return
    if case.off and 0 in sizes:
        return
    found, expected = run(sdpa, inputs), reference(inputs)
    dtype = getattr(torch, case.dtype)
    assert found.output.dtype is dtype
    close(found.output, expected.output, "output", TOLERANCE[dtype])
    for name, grad in found.grads.items():
        assert grad.dtype is inputs.leaves[name].dtype
        # A buffer's gradient is added up in its own dtype, and of a float32 mask over float64 it is rounded to that.
        close(grad, expected.grads[name], f"gradient of {name}", 3 * max(TOLERANCE[dtype], TOLERANCE[grad.dtype]))
    assert all(math.isfinite(grad.sum().item()) for grad in found.grads.values())


@pytest.mark.parametrize("device", DEVICES)
def test_any_call(device: str) -> None:
    """What torch accepts is right, whatever its layout; what it refuses is InvalidCallError."""
    sidestep.configure(cache="off")

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(cases())
    def any_call(case: Case) -> None:
        seen.append(case)
        check(case, device)

    seen: list[Case] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits
    try:
        any_call()
    finally:
        torch.set_num_threads(threads)
    assert len(seen) >= EXAMPLES

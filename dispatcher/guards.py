"""One native check in place of a dozen attribute reads, where this torch has it.

`torch._C._dynamo.guards.TensorGuards` is what dynamo compared tensors with before it ran compiled code: exact type,
dispatch keys (so device, autocast and inference mode), dtype, device index, requires_grad, sizes and strides, and that
no tensor is given twice. It is private, so what it must tell apart is tried before it is trusted; without it the
signature alone decides, at 1.5 us more a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Check = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]


def like(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Check:
    """A check whether three tensors would give the same signature as these; it keeps none of them."""
    return _guards(query, key, value) if _works() else never


def never(*_: torch.Tensor) -> bool:
    """Nothing is alike."""
    return False


def _guards(*tensors: torch.Tensor) -> Check:
    sizes: Any = [list(tensor.shape) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    check: Check = torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=sizes,
        dynamic_dims_strides=strides,
    ).check
    return check


@functools.lru_cache(maxsize=1)
def _works() -> bool:
    query, key, value = (torch.empty(2, 3, 4, 5, device="cpu", dtype=torch.float32) for _ in range(3))
    others = [
        key[:, :2],
        key.transpose(1, 2).contiguous().transpose(1, 2),
        key[:1].expand(2, 3, 4, 5),
        key.half(),
        torch.empty(2, 3, 4, 5, device="meta", dtype=torch.float32),
        torch.empty(2, 3, 4, 5, device="cpu", dtype=torch.float32, requires_grad=True),
        torch.nn.Parameter(key, requires_grad=False),
    ]
    try:
        check = _guards(query, key, value)
        alike = check(torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        told = not any(check(query, other, value) or check(query, key, other) for other in others)
        with torch.autocast("cpu", torch.bfloat16):
            told = told and not check(query, key, value)
    except (AttributeError, TypeError, ValueError, RuntimeError, SystemError):
        return False
    return alike and told

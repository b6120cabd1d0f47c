"""The backward, pinned to the plan that served the forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from .selection import Served


class Attention(torch.autograd.Function):
    """Forward and backward of one plan, for backends whose kernels autograd does not know."""

    @staticmethod
    def forward(
        ctx: Any,
        served: Served,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """(B, H_q, S_q, D_v) from (B, H_q, S_q, D), (B, H_kv, S_kv, D), (B, H_kv, S_kv, D_v) and a rank-4 mask."""
        output, *residuals = served.forward(query, key, value, attn_mask)
        ctx.save_for_backward(query, key, value, attn_mask, output, *residuals)
        ctx.served = served
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Gradients of query, key, value and mask; autograd drops those that nobody needs."""
        # The wrapper of once_differentiable costs microseconds, and is needed only under create_graph=True.
        return _refuse_second(ctx, grad_output) if torch.is_grad_enabled() else _backward(ctx, grad_output)


def _backward(ctx: Any, grad_output: torch.Tensor) -> Any:
    return (None, *ctx.served.backward(grad_output, *ctx.saved_tensors))


_refuse_second = once_differentiable(_backward)

# Function.apply without its Python wrapper, which looks for functorch transforms (8 us of 25, H200): under those, a
# call has failed before, for their tensors have no data_ptr() for the signature.
apply: Any = super(torch.autograd.Function, Attention).apply


class Zeros(torch.autograd.Function):
    """A zero output, connected to its inputs, whose gradients are zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        shape: tuple[int, ...],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Zeros of `shape`, in the query's dtype."""
        ctx.save_for_backward(query, key, value, attn_mask)
        return query.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Zeros for every input that needs a gradient."""
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return (None, *(torch.zeros_like(tensor) if need else None for tensor, need in needed))

"""The backward, pinned to the plan that served the forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .selection import Served, recover_backward


def route(served: Served) -> Any:
    """A function of query, key, value and mask that is differentiable once, by the plan's forward and backward.

    It has an autograd function of its own: what it serves is then no argument, which would cost an attribute of the
    context, a gradient of None and 3 to 6 % of a tiny forward and backward.
    """
    plan: Any = served.plan
    run_forward, run_backward, is_grad_enabled = plan.forward, plan.backward, torch.is_grad_enabled

    class Attention(_Serving):
        @staticmethod
        def forward(
            ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
        ) -> torch.Tensor:
            results = run_forward(query, key, value, attn_mask)
            ctx.save_for_backward(query, key, value, attn_mask, *results)
            output: torch.Tensor = results[0]
            return output

        @staticmethod
        def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
            """Gradients of all four; autograd drops those that nobody needs."""
            saved = ctx.saved_tensors
            if is_grad_enabled():  # create_graph=True
                with torch.no_grad():
                    grads = Attention.backward(ctx, grad_output)
                return _once(grads, grad_output, saved[:4])
            try:
                return run_backward(grad_output, *saved)
            except Exception as error:  # noqa: BLE001 - like every other failure: classified and recorded
                return recover_backward(error, served, grad_output, saved[:4])

    Attention.served = served
    # Function.apply without its Python wrapper, which looks for functorch transforms (8 us of 25, H200): under those, a
    # call has failed before, for their tensors have no data_ptr() for the signature.
    return super(torch.autograd.Function, Attention).apply


class _Serving(torch.autograd.Function):
    served: Served


def function_of(route: Any) -> Any | None:
    """The autograd function, with what it `served`, of a route made by `route`; None of any other route."""
    function = getattr(route, "__self__", None)
    return function if isinstance(function, type) and issubclass(function, _Serving) else None


def _once(grads: Sequence[torch.Tensor | None], grad_output: torch.Tensor, saved: Sequence[torch.Tensor | None]) -> Any:
    """`grads`, such that differentiating them raises.

    once_differentiable would look at grad_output alone, and let second derivatives through query, key and value vanish
    without a word.
    """
    inputs = [tensor for tensor in saved if tensor is not None and tensor.requires_grad]
    apply: Any = _Once.apply
    return tuple(None if grad is None else apply(grad, grad_output, *inputs) for grad in grads)


class _Once(torch.autograd.Function):
    """A gradient that depends on its other arguments in a way that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        raise RuntimeError(
            "the gradients of this backend cannot be differentiated again (double backward); torch_math's can: "
            "scaled_dot_product_attention(..., backends='torch_math')"
        )


class Zeros(torch.autograd.Function):
    """A zero output, connected to its inputs, whose gradients are zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Zeros of `shape` and `stride`, in the query's dtype."""
        ctx.inputs = [None if t is None else (t.shape, t.dtype) for t in (query, key, value, attn_mask)]
        return query.new_empty_strided(shape, stride).zero_()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Zeros for every input that needs a gradient."""
        needed = zip(ctx.inputs, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(grad_output.new_zeros(like[0], dtype=like[1]) if need else None for like, need in needed))

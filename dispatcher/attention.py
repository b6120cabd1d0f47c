"""The hot path: signature tuple -> route -> run. Everything else happens on a miss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from . import routing, selection
from .backends import registry
from .events import counters

_is_grad_enabled = torch.is_grad_enabled
_is_deterministic = torch.are_deterministic_algorithms_enabled
# One flag for all devices; the public spelling asks for each device in turn (torch/amp/autocast_mode.py uses it too).
_is_any_autocast = torch._C._is_any_autocast_enabled

_order: ContextVar[tuple[str, ...] | None] = ContextVar("sidestep_backends", default=None)
_routes, latest = selection.routes, selection.latest
_get_order = _order.get


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backends: str | Sequence[str] | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, by the first backend that really can.

    Args:
        query: (B, H_q, S_q, D), or any rank from 2 with (..., S_q, D); float16, bfloat16, float32 or float64.
        key: (B, H_kv, S_kv, D).
        value: (B, H_kv, S_kv, D_v).
        attn_mask: broadcastable to (B, H_q, S_q, S_kv). bool: False excludes. float32 or the query's dtype: added
            to the logits. A query whose keys are all excluded gets zeros.
        dropout_p: probability, 0 to 1, of dropping an attention weight; applied whenever it is over 0.
        is_causal: query i sees keys 0 to i; not together with a mask.
        scale: factor of the logits; 1/sqrt(D) when None.
        enable_gqa: several query heads share a key head (H_kv divides H_q).
        backends: one name (strict: no fallback), or names in the order in which to try them, for this call.

    Returns:
        (B, H_q, S_q, D_v), with the query's order of dimensions in memory; differentiable once.

    Raises:
        InvalidCallError: torch refuses the call too; no backend was tried.
        NoBackendError: no backend can serve it; the text gives every backend's reason.
        ValueError: an unknown backend name; the known ones are listed.
    """
    order = _get_order() if backends is None else backends if isinstance(backends, str) else tuple(backends)
    flags = (dropout_p, is_causal, scale, enable_gqa, order, _is_grad_enabled() and (1, _is_deterministic()))
    last = latest.entry
    try:
        pointers = query.data_ptr() | key.data_ptr() | value.data_ptr()
        # Most calls are like the one before them: the next layer, the next step.
        # The check ends the process on a nested tensor, whose sizes and strides raise where nothing may (torch 2.11).
        alike = (
            attn_mask is None and last.flags == flags
            and not (pointers & 15 or query.is_nested or key.is_nested or value.is_nested)
            and last.check(query, key, value)
        )  # fmt: skip
        signature = () if alike else (
            type(query), type(key), type(value), type(attn_mask),
            query.shape, query.stride(), query.dtype, query.device, query.requires_grad,
            key.shape, key.stride(), key.dtype, key.device, key.requires_grad,
            value.shape, value.stride(), value.dtype, value.device, value.requires_grad,
            None if attn_mask is None else (
                attn_mask.shape, attn_mask.stride(), attn_mask.dtype, attn_mask.device, attn_mask.requires_grad,
                attn_mask.data_ptr() & 15,
            ),
            pointers & 15, flags, routing.autocast_dtype(query) if _is_any_autocast() else None,
        )  # fmt: skip
    except (AttributeError, RuntimeError) as error:
        raise routing.unusable(error, query, key, value, attn_mask) from error
    if alike:
        counters.hits += 1
        return last.route(query, key, value, None)
    entry = _routes.get(signature)
    if entry is None:
        call = routing.Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return routing.miss(signature, flags, call, order)
    counters.hits += 1
    latest.entry = entry
    return entry.route(query, key, value, attn_mask)


def _in_graph(*arguments: Any, **options: Any) -> torch.Tensor:
    """What torch.compile sees in its place; eager calls never come here."""
    from .torch_op import attention

    return attention(*arguments, **options)


def traced_as(function: Any, other: Any) -> None:
    """Let torch.compile trace `other` in place of `function`, by the attributes that functions have which it made.

    The first counts where a function is called, the other two where it is itself what is compiled.
    """
    function._torchdynamo_inline = other
    function._torchdynamo_orig_callable, function._torchdynamo_wrapper_id = other, id(function)


traced_as(scaled_dot_product_attention, _in_graph)


@contextlib.contextmanager
def use_backends(*names: str) -> Iterator[None]:
    """Try these backends, in this order, for the calls in the block; one name is strict.

    Raises:
        ValueError: an unknown name; the known ones are listed.
    """
    registry.expand(names)
    token = _order.set(names)
    try:
        yield
    finally:
        _order.reset(token)


@contextlib.contextmanager
def _use_backends_in_graph(*names: str) -> Iterator[None]:
    """The same for a block inside a compiled function: dynamo follows a list, not a context variable."""
    from .torch_op import blocks

    blocks.append(names)
    try:
        yield
    finally:
        blocks.pop()


traced_as(use_backends, _use_backends_in_graph)

"""From a call to what runs it: validated, canonical, selected, installed. Runs on a miss only."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.amp.autocast_mode import is_autocast_available

from . import autograd, guards, plans, selection, settings
from .backends import registry
from .backends.base import GraphPlan, Plan, Target
from .errors import InvalidCallError
from .events import counters
from .selection import Entry, Route
from .semantics import ALIGNMENT, Call, canonicalize, constant_output, is_canonical, problem_of

__all__ = ["Call", "autocast_dtype", "backends_of", "decide", "miss", "unusable"]


def miss(
    signature: tuple[Any, ...], flags: tuple[Any, ...], call: Call, order: str | tuple[str, ...] | None
) -> torch.Tensor:
    """Answer a call for which there is no route, and install one.

    Raises:
        InvalidCallError, NoBackendError, ValueError: as `scaled_dot_product_attention` says.
    """
    refusing = plans.refused_here()
    if refusing and (known := selection.refusing_routes.get(signature)):
        counters.hits += 1
        return known.route(*call[:4])
    counters.misses += 1
    decided = selection.generation
    route, plan, settled = decide(call, backends_of(order))
    if settled and not isinstance(call.scale, torch.Tensor):  # a tensor's number may change
        # Without a mask, aligned, and outside autocast, three tensors and the flags say all.
        aligned = not any(tensor.data_ptr() % ALIGNMENT for tensor in call.tensors())
        plain = call.attn_mask is None and aligned and autocast_dtype(call.query) is None
        check = guards.like(*call[:3]) if plain else guards.never
        selection.install(signature, Entry(route, flags, check, plan), decided, refusing)
    return route(*call[:4])


def backends_of(order: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The single backends that an order names; None is the one of the settings.

    Raises:
        ValueError: an unknown name; the known ones are listed.
    """
    names = settings.get().backends if order is None else (order,) if isinstance(order, str) else order
    return registry.expand(names)


def unusable(error: Exception, *tensors: Any) -> InvalidCallError:
    """The error for arguments that have no shape, strides or storage to decide by."""
    kinds = ", ".join("None" if tensor is None else type(tensor).__name__ for tensor in tensors)
    return InvalidCallError(
        f"query, key, value and attn_mask must be dense tensors with storage of their own, got {kinds}: {error}. "
        "Nested and sparse tensors, and tensors under vmap or torch.func transforms, are not supported"
    )


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast gives attention on the tensor's device, or None where it is off."""
    device = tensor.device.type
    if not is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


_Routed = tuple[Route, "Plan | None", bool]  # what to run, the plan in it, and whether it may be installed


def decide(call: Call, order: tuple[str, ...]) -> _Routed:
    """What runs a call: validated, canonical, selected; nothing is installed.

    Raises:
        InvalidCallError, NoBackendError: as `scaled_dot_product_attention` says.
    """
    dtype = autocast_dtype(call.query)
    if dtype is not None:  # attention is on autocast's list of operators that run in the lower precision
        with torch.autocast(call.query.device.type, enabled=False):
            inner, plan, settled = decide(_lowered(call, dtype), order)
        return functools.partial(_run_lowered, inner, call[4:], dtype), plan, settled
    call.validate(torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors()))
    if is_canonical(call):
        return _canonical_route(call, order)
    canonical, shape = canonicalize(call)
    inner, plan, settled = _canonical_route(canonical, order)
    return functools.partial(_run_canonicalized, inner, call[4:], shape), plan, settled


def _lowered(call: Call, dtype: torch.dtype) -> Call:
    def lower(tensor: torch.Tensor) -> torch.Tensor:
        kept = not tensor.is_floating_point() or tensor.dtype is torch.float64
        return tensor if kept else tensor.to(dtype)

    query, key, value, mask = call[:4]
    return Call(lower(query), lower(key), lower(value), None if mask is None else lower(mask), *call[4:])


def _run_lowered(
    inner: Route,
    flags: tuple[Any, ...],
    dtype: torch.dtype,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
) -> torch.Tensor:
    with torch.autocast(query.device.type, enabled=False):
        lowered = _lowered(Call(query, key, value, attn_mask, *flags), dtype)
        return inner(*lowered[:4])


def _run_canonicalized(
    inner: Route,
    flags: tuple[Any, ...],
    shape: tuple[int, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
) -> torch.Tensor:
    canonical, _ = canonicalize(Call(query, key, value, attn_mask, *flags))
    return inner(*canonical[:4]).reshape(shape)


def _canonical_route(call: Call, order: tuple[str, ...]) -> _Routed:
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors())
    problem = problem_of(call, training, training and torch.are_deterministic_algorithms_enabled())
    if constant_output(problem):
        zeros: Any = autograd.Zeros.apply
        return functools.partial(zeros, problem.output_shape, problem.output_stride), None, True
    index = call.query.device.index
    result = selection.select(problem, order, Target(-1 if index is None else index), call[:4])
    if result.served is None:
        raise selection.no_backend(problem, result)
    plan = result.served.plan
    if problem.training and isinstance(plan, GraphPlan):
        return autograd.route(result.served), plan, result.settled
    return plan.infer, plan, result.settled

"""Sidestep in Lightning Thunder's executor lists: `thunder.jit(model, executors=["sidestep", "sdpa"])`.

Importing this module registers the executor by its name. While tracing it looks at shapes, rules and records: nothing
is built and no GPU is touched. In traces it is one of three operators:

    sidestep_attention            inference: the output, and nothing is saved
    sidestep_attention_forward    training: the output, RESIDUALS tensors (None where unused), what served, and copies
                                  of inputs and output that the program changes in place afterwards
    sidestep_attention_backward   the gradients, by what served the forward

The residuals are tensors of the trace, so that Thunder saves, offloads and frees them as its own.
`FallbackExecutor` (thunder_fallback.py) is the general form, for any symbol and any of Thunder's executors.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

import torch

try:
    import thunder  # noqa: F401 - the rest of this module needs it
except ModuleNotFoundError as _error:
    if _error.name != "thunder":
        raise
    raise ImportError(
        "sidestep.thunder_executor needs lightning-thunder, which is not installed: pip install 'sidestep[thunder]'",
        name="thunder",
    ) from _error

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.compile_data import get_compile_data
from thunder.core.prims import OpTags
from thunder.core.proxies import AnyProxy, NumberProxy, TensorProxy
from thunder.core.transform_common import NON_FUNCTIONAL_OPS
from thunder.core.transforms import get_grad, put_grad
from thunder.extend import OperatorExecutor, register_executor
from thunder.transforms.autocast import maybe_downcast_to, register_autocast_rule

from . import __version__, attention, autograd, guards, plans, routing, selection
from .backends.base import Target
from .decisions import Untried
from .errors import InvalidCallError
from .events import counters
from .problem import AttentionProblem
from .semantics import ALIGNMENT, Call, constant_output, validate
from .thunder_fallback import FallbackExecutor
from .thunder_traces import (
    attention_problem,
    changed_in_place,
    copy,
    info_of,
    keep_from_recomputation,
    needs_gradient,
    number,
)

__all__ = ["RESIDUALS", "FallbackExecutor", "executor"]

# Tensors between forward and backward, besides the inputs and the output. Seen: cuDNN and nvFuser 3, torch's kernels 6.
RESIDUALS = 8
_is_deterministic = torch.are_deterministic_algorithms_enabled


class _Executor(OperatorExecutor):  # type: ignore[misc] # thunder has no types
    """can_execute is the only hook that sees the bound symbol, whose tags the gradient's transform needs."""

    def __init__(self) -> None:
        super().__init__("sidestep", version=__version__)
        self.latest = threading.local()

    def can_execute(self, bsym: Any) -> bool:
        claimed: bool = super().can_execute(bsym)
        if claimed:
            self.latest.bsym = bsym
        return claimed


executor = _Executor()
register_executor(executor)

# --- while tracing: which calls are claimed ---


def _claims(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> bool:
    """Whether torch would take the call and some backend may: by rules and records, from what a trace knows."""
    tensors = [t for t in (query, key, value, attn_mask) if t is not None]
    if not all(isinstance(t, TensorProxy) for t in tensors) or query.device.type not in ("cpu", "cuda"):
        return False
    # A number that the trace does not fix says nothing here.
    dropout_p = 0.0 if isinstance(dropout_p, NumberProxy) else dropout_p
    is_causal = not isinstance(is_causal, NumberProxy) and bool(is_causal)
    infos = [info_of(t) for t in tensors]
    problem = attention_problem(query, key, value, attn_mask, dropout_p, is_causal, scale)
    try:
        mask = None if attn_mask is None else infos[3]
        validate(infos[0], infos[1], infos[2], mask, dropout_p, is_causal, enable_gqa)
        return _may_serve(problem, routing.backends_of(attention._get_order()), query.device)
    except InvalidCallError:
        return False


def _may_serve(problem: AttentionProblem | None, order: Sequence[str], device: Any) -> bool:
    """False where every backend is known to refuse a problem; strides and gradients are not known yet."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if problem is None or constant_output(problem) or (device.type == "cuda" and not started):
        return True
    target = Target(-1 if device.type == "cpu" else device.index)
    # The last ones refuse least.
    return any(isinstance(selection.explain(problem, (name,), target)[0], Untried) for name in reversed(order))


# --- the operators: what they look like in a trace, and what they run ---


def _output(query: TensorProxy, key: TensorProxy, value: TensorProxy, enable_gqa: bool) -> TensorProxy:
    heads_last = 3 if enable_gqa else 2
    leading = [tuple(t.shape[:-heads_last]) for t in (query, key, value)]
    rank = max(map(len, leading))
    # Of each dimension the one size that is not 1; it may be a proxy, which is to stay one.
    aligned = [(*[1] * (rank - len(sizes)), *sizes) for sizes in leading]
    batch = [next((size for size in sizes if number(size) != 1), 1) for sizes in zip(*aligned, strict=True)]
    return TensorProxy(like=query, shape=(*batch, *query.shape[-heads_last:-1], value.shape[-1]), requires_grad=False)


def _infer_meta(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,  # noqa: ARG001
    *, scale: Any = None, enable_gqa: bool = False,  # noqa: ARG001 - vjp() reads this signature
) -> Any:  # fmt: skip
    return _output(query, key, value, enable_gqa)


def _forward_meta(
    query: Any, key: Any, value: Any, attn_mask: Any, *_: Any, enable_gqa: bool, copied: Sequence[int] = (), **__: Any
) -> Any:
    # Backends differ in their residuals, and which one serves is not known yet: what a trace says of them is nominal.
    residuals = [
        TensorProxy(prefix="residual", shape=(1,), dtype=dtypes.float32, device=query.device) for _ in range(RESIDUALS)
    ]
    output = _output(query, key, value, enable_gqa)
    known = (query, key, value, attn_mask, output)
    copies = [TensorProxy(like=known[place], requires_grad=False) for place in copied]
    return (output, *residuals, AnyProxy(None, prefix="served_by"), *copies)


def _backward_meta(
    _grad_output: Any, query: Any, key: Any, value: Any, attn_mask: Any, *_: Any, mask_grad: bool
) -> Any:
    inputs = (query, key, value, *([attn_mask] if mask_grad else []))
    return tuple(TensorProxy(like=tensor, requires_grad=False) for tensor in inputs)


def _infer(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,
    *, scale: Any = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    # Thunder runs its computations, and its backwards, under no_grad.
    return attention.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, bool(is_causal), scale, enable_gqa
    )


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
    dropout_p: float, is_causal: bool, *, scale: float | None, enable_gqa: bool, mask_grad: bool,
    copied: Sequence[int] = (),
) -> tuple[Any, ...]:  # fmt: skip
    """The output, RESIDUALS tensors or None, what `_backward` needs to know of them, and copies of what changes."""
    flags = (
        "thunder", dropout_p, is_causal, scale, enable_gqa, mask_grad, attention._get_order(), _is_deterministic()
    )  # fmt: skip
    last = selection.latest.entry
    if (
        attn_mask is None and last.flags == flags
        and not (query.data_ptr() | key.data_ptr() | value.data_ptr()) % ALIGNMENT
        and last.check(query, key, value)
    ):  # fmt: skip
        counters.hits += 1  # like the call before it, as in attention.py
        route: Any = last.route
    else:
        route = _route((query, key, value, attn_mask), flags)
    result: tuple[Any, ...] = route(query, key, value, attn_mask)
    return _with_copies(result, (query, key, value, attn_mask, result[0]), copied) if copied else result


def _route(tensors: Sequence[torch.Tensor | None], flags: tuple[Any, ...]) -> Any:
    """What runs a forward, found by its signature; decided, and installed, where there is none."""
    _, dropout_p, is_causal, scale, enable_gqa, mask_grad, order, _ = flags
    given = [t for t in tensors if t is not None]
    misaligned = [t.data_ptr() % ALIGNMENT for t in given]
    signature = (*[(t.shape, t.stride(), t.dtype, t.device) for t in given], *misaligned, *flags)
    refusing = plans.refused_here()
    entry = (selection.refusing_routes if refusing else selection.routes).get(signature)
    if entry is not None:
        counters.hits += 1
        if not refusing:
            selection.latest.entry = entry
        return entry.route
    counters.misses += 1
    decided = selection.generation
    query, key, value, mask = _leaves(tensors, mask_grad)
    call = Call(query, key, value, mask, dropout_p, bool(is_causal), scale, enable_gqa)
    with torch.enable_grad():
        found, plan, settled = routing.decide(call, routing.backends_of(order))
    function = autograd.function_of(found)
    route: Any = _Alone(function) if function is not None else functools.partial(_through_autograd, found, mask_grad)
    if settled:
        plain = len(given) == 3 and not any(misaligned)
        check = guards.like(*given) if plain else guards.never
        selection.install(signature, selection.Entry(route, flags, check, plan), decided, refusing)
    return route


def _with_copies(result: tuple[Any, ...], known: Sequence[Any], copied: Sequence[int]) -> tuple[Any, ...]:
    """`result` and copies of what will change; residuals may be views of that."""
    changing = {known[place].untyped_storage().data_ptr() for place in copied}
    output, *residuals, served_by = result
    kept = [copy(t) if t is not None and t.untyped_storage().data_ptr() in changing else t for t in residuals]
    return (output, *kept, served_by, *[copy(known[place]) for place in copied])


def _backward(
    grad_output: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None, output: torch.Tensor, residuals: Sequence[Any], served_by: _Alone | _Graph,
    *, mask_grad: bool,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    saved = (query, key, value, attn_mask, output, *residuals)
    return tuple(served_by.gradients(grad_output, saved)[: 4 if mask_grad else 3])


class _Alone:
    """A plan with a forward and a backward of its own: autograd takes no part. One for all calls of a signature."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.used = 5

    def __call__(self, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
        output, *residuals = self.function.served.plan.forward(*tensors)
        if len(residuals) > RESIDUALS:
            name = self.function.served.backend
            raise NotImplementedError(f"{name} has {len(residuals)} residuals, and Thunder's traces hold {RESIDUALS}")
        self.used = 5 + len(residuals)
        return (output, *residuals, *[None] * (RESIDUALS - len(residuals)), self)

    def gradients(self, grad_output: torch.Tensor, saved: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        """Gradients of query, key, value and mask; one that fails is recorded, and computed by another backend."""
        context = types.SimpleNamespace(saved_tensors=saved[: self.used])
        grads: Sequence[torch.Tensor | None] = self.function.backward(context, grad_output)
        return grads

    def __repr__(self) -> str:
        return f"<{self.function.served.backend}>"


class _Graph:
    """The autograd graph of one forward, without its tensors, which are put in for a backward."""

    def __init__(self, output: torch.Tensor, leaves: Sequence[Any], tensors: list[Any], beyond: list[Any]) -> None:
        self._edge = torch.autograd.graph.get_gradient_edge(output)
        self._leaves = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        self._tensors, self._beyond = tensors, beyond
        for leaf in self._leaves:  # only the graph's end is needed, and not the memory that it would keep
            leaf.data = leaf.data.new_empty(0)

    def gradients(self, grad_output: torch.Tensor, saved: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        """Gradients of query, key, value and, where it needs one, mask."""
        self._tensors[:] = [*saved, *self._beyond]
        try:
            # The graph holds no tensors, so nothing is gained by freeing it; a CUDA graph runs it once and replays it.
            grads = torch.autograd.grad([self._edge], self._leaves, [grad_output], True, allow_unused=True)
        finally:
            self._tensors.clear()
        return [torch.zeros_like(t) if grad is None else grad for grad, t in zip(grads, saved, strict=False)]


def _through_autograd(route: Any, mask_grad: bool, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """A forward of operators that autograd knows; what they save for the backward become the residuals."""
    leaves = _leaves(tensors, mask_grad)
    packed: list[torch.Tensor] = []
    places: list[int] = []  # of what was packed, in `current`
    current: list[Any] = []  # query, key, value, mask, output, residuals: filled while a backward runs

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    # Neither function may know of the graph: it would be a cycle through autograd's nodes, which nothing collects.
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda index: current[places[index]])
    with torch.enable_grad(), hooks:
        output = route(*leaves)
    known = [*tensors, output]
    residuals: list[Any] = []
    for tensor in packed:
        place = next((place for place, one in enumerate(known) if one is not None and _same(tensor, one)), None)
        if place is None:
            place = len(known) + len(residuals)
            residuals.append(tensor.detach())
        places.append(place)
    packed.clear()  # the graph's hooks hold the list
    residuals += [None] * (RESIDUALS - len(residuals))
    graph = _Graph(output, leaves, current, residuals[RESIDUALS:])
    return (output.detach(), *residuals[:RESIDUALS], graph)


def _leaves(tensors: Sequence[torch.Tensor | None], mask_grad: bool) -> Any:
    """Query, key, value and mask, detached, such that gradients of those that need one can be asked for."""
    query, key, value, mask = [None if t is None else t.detach() for t in (*tensors, None)[:4]]
    for tensor in (query, key, value, *([mask] if mask_grad else [])):
        assert tensor is not None
        tensor.requires_grad_()
    return query, key, value, mask


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


# --- what the trace is told ---

# Neither recomputed nor merged with a like call: dropout would be drawn anew, or only once.
_TAGS = (OpTags.RANDOM_OP, OpTags.DONT_AUTO_RECOMPUTE_IN_BACKWARD)
_infer_symbol = executor.register_operator("sidestep_attention", meta=_infer_meta, fn=_infer, tags=_TAGS)
_forward_symbol = executor.register_operator("sidestep_attention_forward", meta=_forward_meta, fn=_forward, tags=_TAGS)
_backward_symbol = executor.register_operator("sidestep_attention_backward", meta=_backward_meta, fn=_backward)
NON_FUNCTIONAL_OPS.update({_infer_symbol.id, _forward_symbol.id})


def _with_gradients(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,
    *, scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if isinstance(dropout_p, NumberProxy) or dropout_p > 0:
        keep_from_recomputation(executor.latest.bsym)
    mask_grad = attn_mask is not None and dtypes.is_float_dtype(attn_mask.dtype) and needs_gradient(attn_mask)
    # The output that the program knows, by its name.
    copied = changed_in_place((query, key, value, attn_mask, executor.latest.bsym.output))
    flags = {"scale": scale, "enable_gqa": enable_gqa, "mask_grad": mask_grad, "copied": copied}
    output, *rest = _forward_symbol(query, key, value, attn_mask, dropout_p, is_causal, **flags)
    residuals, served_by, copies = rest[:RESIDUALS], rest[RESIDUALS], rest[RESIDUALS + 1 :]
    saved = [query, key, value, attn_mask, output]
    for place, made in zip(copied, copies, strict=True):
        saved[place] = made
    grads = _backward_symbol(get_grad(output), *saved, tuple(residuals), served_by, mask_grad=mask_grad)
    for tensor, grad in zip((query, key, value, attn_mask), grads, strict=False):
        put_grad(tensor, grad)
    return output


def _without_gradients(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,
    *, scale: Any = None,
) -> Any:  # fmt: skip
    return _infer_symbol(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def _torchs_with_gradients(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,
    *, scale: Any = None,
) -> Any:  # fmt: skip
    """With the parameters of Thunder's symbol: its vjp() takes them from here."""
    return _with_gradients(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


executor.register_implementation(
    ltorch.scaled_dot_product_attention,
    checker=_claims,
    execution_transform=_without_gradients,
    grad_transform=_torchs_with_gradients,
)
executor.register_implementation(_infer_symbol, _infer_symbol, grad_transform=_with_gradients)


def _lookaside(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,
    scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """What the interpreter calls for torch's function: Thunder's own symbol, where that can say what torch can.

    It knows no enable_gqa, and refuses a float mask of another dtype than the query's, as under autocast.
    """
    other_dtype = attn_mask is not None and dtypes.is_float_dtype(attn_mask.dtype) and attn_mask.dtype != query.dtype
    if enable_gqa or other_dtype or (attn_mask is not None and _autocast_is_on()):
        return _infer_symbol(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=bool(enable_gqa)
        )
    return ltorch.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def _own_lookaside(*arguments: Any, backends: Any = None, **options: Any) -> Any:
    """The same for Sidestep's own function."""
    if backends is not None:
        raise InvalidCallError(_NO_ORDER.format("backends="))
    return _lookaside(*arguments, **options)


def _refuse_block(*_: str) -> Any:
    raise InvalidCallError(_NO_ORDER.format("use_backends"))


_NO_ORDER = (
    "{} inside a function that thunder.jit traces would be forgotten when the trace runs: open a "
    "`with sidestep.use_backends(...)` block around the call of the traced function"
)
executor._lookasides.update(
    {
        torch._C._nn.scaled_dot_product_attention: _lookaside,  # what stands in torch.nn.functional may be Sidestep
        attention.scaled_dot_product_attention: _own_lookaside,
        attention.use_backends: _refuse_block,
    }
)
# Thunder does not see names that a module makes when they are asked for.
for _name in ("scaled_dot_product_attention", "use_backends"):
    getattr(sys.modules[__package__ or ""], _name)


def _autocast_is_on() -> bool:
    data = get_compile_data()
    return data is not None and not data.autocast_stack.is_empty()


def _lowered(query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, dtype: Any, **keywords: Any) -> Any:
    """Autocast's rule, as torch has it: a float mask is lowered too."""
    return _infer_symbol(*maybe_downcast_to(dtype, (query, key, value, attn_mask)), *rest, **keywords)


register_autocast_rule(_infer_symbol.id)(_lowered)

"""Library operators, so that torch.compile can hold attention in its graph. Imported while something is compiled.

    sidestep::attention            query, key, value, mask -> output, logsumexp
    sidestep::attention_backward   the gradients, for AOTAutograd's backward graph

Which backend serves is decided when the operator runs, by the dispatcher, as in eager mode: nothing is built while
tracing, and one graph with dynamic lengths meets a backend for each length.

What a graph saves for its backward must have a shape that is known while tracing, and backends keep different things.
So the graph saves one thing that fits: the logsumexp, where a backend with a backward of its own keeps nothing else.
Everywhere else (a mask, dropout, torch's kernels) the backward runs the forward once more. `_pins` says which it is
without asking the device: a signature whose forwards were ever served in different ways always runs it once more.

Dropout is drawn from a seed that the graph draws: the backward's second forward draws the same, and no pass of the
compiler takes two calls for one.
"""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .attention import scaled_dot_product_attention
from .problem import contiguous_stride, memory_order
from .routing import Call, _lowered
from .selection import MAX_ROUTES
from .semantics import is_canonical

_LIBRARY: Any = torch.library.Library("sidestep", "DEF")  # type: ignore[no-untyped-call]
_OPTIONS = (
    "Tensor? attn_mask, Tensor? seed, bool[] needs, float dropout_p, bool is_causal, float? scale, bool enable_gqa, "
    "str? backends"
)
_LIBRARY.define(f"attention(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "attention_backward(Tensor grad_output, Tensor output, Tensor logsumexp, Tensor query, Tensor key, Tensor value, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_Options = Any  # attn_mask, seed, needs, dropout_p, is_causal, scale, enable_gqa, backends

_AUTOGRAD = [
    getattr(torch._C.DispatchKey, name)
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")
]

# The orders of use_backends() blocks that are open in the function being traced.
blocks: list[tuple[str, ...]] = []


def attention(
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
    """`scaled_dot_product_attention` as torch.compile traces it.

    Args:
        query: as for `scaled_dot_product_attention`, as the others.
        key: as there.
        value: as there.
        attn_mask: as there.
        dropout_p: as there; a number.
        is_causal: as there.
        scale: as there; a number.
        enable_gqa: as there.
        backends: as there; where None, and in no `use_backends` block of the traced function, the order is the one in
            force when the compiled function is called.

    Raises:
        InvalidCallError: while tracing; torch wraps it in an exception of its own.
    """
    if backends is None and blocks:
        backends = blocks[-1]
    names = backends if backends is None or isinstance(backends, str) else ",".join(backends)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    query, key, value, attn_mask = (call if dtype is None else _lowered(call, dtype))[:4]
    grad = torch.is_grad_enabled()
    needs = [grad and tensor is not None and tensor.requires_grad for tensor in (query, key, value, attn_mask)]
    seed = torch.randint(2**62, (1,), dtype=torch.int64, device="cpu") if dropout_p > 0 else None
    output: torch.Tensor = torch.ops.sidestep.attention(
        query, key, value, attn_mask, seed, needs, dropout_p, is_causal, scale, enable_gqa, names
    )[0]
    return output


class _Pin:
    """How the forwards of one signature were served: by the backward of one backend, or not only so (None)."""

    def __init__(self, backend: str | None) -> None:
        self.backend = backend
        self.function: Any = lambda: None  # to the autograd function of the latest route


_pins: dict[tuple[Any, ...], _Pin] = {}
_lock = threading.Lock()


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: _Options
) -> tuple[torch.Tensor, torch.Tensor]:
    needs = options[2]
    training = any(needs)
    _, output = _run(query, key, value, *options)
    statistics = query.new_empty(_statistics(output.shape, training), dtype=torch.float32)
    if training:
        found = _residual(output, statistics.shape) if _is_plain(query, key, value, options) else None
        _pin(_signature(query, key, value, options), None if found is None else found[0])
        statistics = statistics if found is None else found[1]
    return _laid_out(output.detach(), *_output_layout(_call(query, key, value, options))), statistics


def _backward(
    grad_output: torch.Tensor,
    output: torch.Tensor,
    statistics: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *options: _Options,
) -> tuple[torch.Tensor, ...]:
    needs, inputs = options[2], (query, key, value, options[0])
    pin = _pins.get(_signature(query, key, value, options))
    function = pin.function() if pin is not None and pin.backend and _is_plain(query, key, value, options) else None
    if function is not None:
        saved = types.SimpleNamespace(saved_tensors=(query, key, value, None, output, statistics))
        with _recording(False):
            grads = list(function.backward(saved, grad_output))
    else:
        leaves, again = _run(query, key, value, *options)
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        with _recording(True):
            found = iter(torch.autograd.grad(again, wanted, grad_output))
        grads = [next(found) if need else None for need in needs]
    return tuple(
        _laid_out(grad, tensor.shape, _grad_stride(tensor)) if need else query.new_empty(0)
        for grad, tensor, need in zip(grads, inputs, needs, strict=True)
    )


def _run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: _Options
) -> tuple[list[Any], torch.Tensor]:
    """The eager call, on tensors of its own."""
    attn_mask, seed, needs, dropout_p, is_causal, scale, enable_gqa, backends = options
    names = backends if backends is None or "," not in backends else tuple(backends.split(","))
    with _recording(any(needs)), _seeded(seed, query.device):
        leaves: list[Any] = [
            tensor if tensor is None else tensor.detach().requires_grad_(need)
            for tensor, need in zip((query, key, value, attn_mask), needs, strict=True)
        ]
        eager: Any = scaled_dot_product_attention
        output = eager(*leaves, dropout_p, is_causal, scale, enable_gqa, backends=names)
        return leaves, output


@contextlib.contextmanager
def _recording(grad: bool) -> Iterator[None]:
    """Inside an operator autograd is switched off, beneath Python's grad mode; here it is as `grad` says."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.set_grad_enabled(grad):
        yield


@contextlib.contextmanager
def _seeded(seed: torch.Tensor | None, device: torch.device) -> Iterator[None]:
    """With torch's generators at `seed`, and back where they were afterwards."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield


def _call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options) -> Call:
    return Call(query, key, value, options[0], *options[3:7])


def _is_plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options) -> bool:
    """Nothing but the logsumexp could have to be kept, and the backend sees these very tensors."""
    return options[0] is None and options[1] is None and is_canonical(_call(query, key, value, options))


def _residual(output: torch.Tensor, shape: Sequence[int]) -> tuple[Any, torch.Tensor] | None:
    """The autograd function that served and the logsumexp that it kept, where it keeps nothing else."""
    node: Any = output.grad_fn
    function = getattr(node, "_forward_cls", None)
    if getattr(function, "served", None) is None:
        return None
    kept = node.saved_tensors[5:]  # after query, key, value, mask and output
    if len(kept) != 1 or kept[0].shape != shape or kept[0].dtype != torch.float32 or not kept[0].is_contiguous():
        return None
    return function, kept[0]


def _signature(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: _Options) -> tuple[Any, ...]:
    tensors = [(t.shape, t.stride(), t.dtype) for t in (query, key, value, options[0]) if t is not None]
    return (query.device, *tensors, tuple(options[2]), *options[3:], torch.are_deterministic_algorithms_enabled())


def _pin(signature: tuple[Any, ...], function: Any) -> None:
    backend = None if function is None else function.served.backend
    with _lock:
        pin = _pins.get(signature)
        if pin is None:
            if len(_pins) >= MAX_ROUTES:
                return  # no pin: the forward is run once more
            pin = _pins[signature] = _Pin(backend)
        if pin.backend != backend:
            pin.backend = None
        if pin.backend:
            pin.function = weakref.ref(function)


def _statistics(output: Sequence[int], training: bool) -> list[int]:
    return [*output[:-1], 1] if training else [0]


def _output_layout(call: Call) -> tuple[Sequence[int], Sequence[int]]:
    """Shape and strides of the output, in the query's order of dimensions, also of symbolic sizes."""
    query, value = call.query, call.value
    batch: Sequence[int] = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        *(t.shape[: -3 if call.enable_gqa else -2] for t in call[:3])
    )
    shape = (*batch, *query.shape[-3 if call.enable_gqa else -2 : -1], value.shape[-1])
    if len(shape) != query.dim():
        return shape, contiguous_stride(shape)
    order = [dim for dim in memory_order(query.shape, query.stride()) if dim != query.dim() - 1]
    return shape, contiguous_stride(shape, [*order, query.dim() - 1])


def _grad_stride(tensor: torch.Tensor) -> Sequence[int]:
    return contiguous_stride(tensor.shape, memory_order(tensor.shape, tensor.stride()))


def _laid_out(tensor: torch.Tensor | None, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """`tensor` with the strides that the graph was promised; copied only where they differ."""
    assert tensor is not None
    if tensor.stride() == tuple(stride):
        return tensor
    if all(size <= 1 or a == b for size, a, b in zip(shape, tensor.stride(), stride, strict=True)):
        return tensor.as_strided(list(shape), list(stride))
    return tensor.new_empty_strided(list(shape), list(stride)).copy_(tensor)


def _fake_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: _Options
) -> tuple[torch.Tensor, torch.Tensor]:
    call = _call(query, key, value, options)
    shape, stride = _output_layout(call)
    output = query.new_empty_strided(list(shape), list(stride))
    return output, query.new_empty(_statistics(shape, any(options[2])), dtype=torch.float32)


def _fake_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    query, key, value, *options = arguments[3:]  # after grad_output, output and logsumexp
    return tuple(
        tensor.new_empty_strided(list(tensor.shape), list(_grad_stride(tensor))) if need else query.new_empty(0)
        for tensor, need in zip((query, key, value, options[0]), options[2], strict=True)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, attn_mask, seed, *options = inputs
    ctx.save_for_backward(*output, query, key, value, attn_mask, seed)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_output: torch.Tensor | None, _: torch.Tensor | None) -> tuple[Any, ...]:
    if grad_output is None:
        return (None,) * 11
    grads = torch.ops.sidestep.attention_backward(grad_output, *ctx.saved_tensors, *ctx.options)
    return (*(grad if need else None for grad, need in zip(grads, ctx.options[0], strict=True)), *[None] * 7)


_LIBRARY.impl("attention", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("sidestep::attention", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("sidestep::attention_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("sidestep::attention", _differentiate, setup_context=_keep, lib=_LIBRARY)

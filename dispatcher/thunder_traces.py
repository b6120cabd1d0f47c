"""What both executors ask of Thunder's traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from thunder.core import devices, dtypes
from thunder.core.compile_data import _compile_data  # it has no public way to the statistics
from thunder.core.prims import PrimIDs
from thunder.core.proxies import NumberProxy, Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbolTag

from .problem import DTYPES, AttentionProblem, Layout, Mask, default_scale
from .semantics import TensorInfo


def number(size: Any) -> int:
    """A size, which a trace for "symbolic values" has as a proxy: that of the call that it is traced for."""
    return int(size.value if isinstance(size, NumberProxy) else size)


def info_of(tensor: TensorProxy | torch.Tensor) -> TensorInfo:
    """What validation looks at."""
    if isinstance(tensor, torch.Tensor):
        return TensorInfo.of(tensor)
    dtype = str(dtypes.to_torch_dtype(tensor.dtype)).removeprefix("torch.")
    return TensorInfo(tuple(map(number, tensor.shape)), dtype, str(devices.to_torch_device(tensor.device)))


def attention_problem(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any,
    *, training: bool = False,
) -> AttentionProblem | None:  # fmt: skip
    """The problem of a call, of tensors or of proxies, which have no strides and count as contiguous.

    A number that the trace leaves open counts as its default. None where backends would see another, canonical call.
    """
    tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    infos = [info_of(tensor) for tensor in tensors]
    shapes = [info.shape for info in infos]
    if any(len(shape) != 4 for shape in shapes) or len({shape[0] for shape in shapes[:3]}) > 1:
        return None
    if shapes[1][1] != shapes[2][1] or infos[0].dtype not in DTYPES or infos[-1].dtype not in ("bool", *DTYPES):
        return None
    layouts = [
        Layout.of(info.shape, t.stride() if isinstance(t, torch.Tensor) else None)
        for info, t in zip(infos, tensors, strict=True)
    ]
    return AttentionProblem(
        device=infos[0].device.partition(":")[0],
        dtype=infos[0].dtype,
        query=layouts[0],
        key=layouts[1],
        value=layouts[2],
        mask=None if attn_mask is None else Mask(layouts[3].shape, layouts[3].stride, infos[3].dtype),
        is_causal=not isinstance(is_causal, NumberProxy) and bool(is_causal),
        dropout_p=0.0 if isinstance(dropout_p, NumberProxy) else float(dropout_p),
        scale=default_scale(shapes[0][3]) if scale is None or isinstance(scale, NumberProxy) else float(scale),
        training=training,
    )


def keep_from_recomputation(bsym: Any) -> None:
    """What a checkpoint would recompute in the backward, with new random numbers, is kept from the forward instead."""
    bsym.tags.discard(BoundSymbolTag.RECOMPUTE_IN_BACKWARD)
    for output in bsym.flat_proxy_outs:
        output.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)


def changed_in_place(known: Sequence[Any]) -> tuple[int, ...]:
    """The places, among `known`, of tensors to whose memory the program that is being differentiated writes.

    What is saved of them must be a copy, which has to be an output of the operator that computes the forward: what only
    a backward reads, Thunder computes there, after the write. Nor would torch notice, since what Thunder saves it saves
    after the forward.
    """
    _, stats = _compile_data.get()
    if stats is None or not stats.last_traces:
        return ()
    aliased = [one for one in stats.last_traces[-1].bound_symbols if one.sym.id == PrimIDs.UPDATE_ALIASES]
    changed = {proxy.name for one in aliased for proxy in one.flat_proxy_args}
    return tuple(place for place, one in enumerate(known) if isinstance(one, TensorProxy) and one.name in changed)


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which a plan was made for; dimensions of stride 0 stay so."""
    if not tensor.numel():
        return tensor.clone()
    extent = Layout(tensor.shape, tensor.stride()).extent
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def needs_gradient(tensor: TensorProxy) -> bool:
    """Whether a tensor of the trace that is being differentiated depends on an input that needs a gradient.

    Thunder says so of inputs only, so the trace is walked back to them; without one at hand the answer is True.
    """
    _, stats = _compile_data.get()
    if stats is None or not stats.last_traces:
        return True
    trace = stats.last_traces[-1]
    inputs = {proxy.name for proxy in trace.args if isinstance(proxy, Proxy)}
    producers: dict[str, Any] = {}

    def collect(bsyms: Sequence[Any]) -> None:
        for bsym in bsyms:
            arguments = {proxy.name for proxy in bsym.flat_proxy_args}
            for proxy in bsym.flat_proxy_outs:
                if proxy.name not in arguments:
                    producers.setdefault(proxy.name, bsym)
            collect(bsym.subsymbols)

    collect(trace.bound_symbols)
    seen: set[str] = set()
    left: list[Any] = [tensor]
    while left:
        proxy = left.pop()
        if proxy.name in seen or ProxyTag.DETACHED_AUTOGRAD_GRAPH in proxy.tags:
            continue
        seen.add(proxy.name)
        if proxy.name in inputs:
            if isinstance(proxy, TensorProxy) and proxy.requires_grad:
                return True
        elif proxy.name not in producers:
            return True
        elif producers[proxy.name].sym.name != "detach":
            left += producers[proxy.name].flat_proxy_args
    return False

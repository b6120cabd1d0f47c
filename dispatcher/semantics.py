"""What a call means before any backend sees it.

`validate` refuses what torch refuses, on plain values, so that a SPEC can be checked without torch.
`canonicalize` turns what torch accepts into the canonical call that backends see, by differentiable
views: rank 4, equal batches, key heads that divide the query's, a rank-4 mask with every dimension 1 or
full, data pointers aligned. `constant_output` answers the calls that need no backend at all.

Source of the rules: torch.nn.functional.scaled_dot_product_attention (torch 2.11), its documentation
and `_scaled_dot_product_attention_math`, which broadcasts batches as matmul does.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .errors import InvalidCallError
from .problem import DTYPES, AttentionProblem, Layout, Mask, default_scale

if TYPE_CHECKING:
    import torch

# Bytes. CUDA kernels here read 16 bytes at a time (cuDNN's default tensor alignment, flash's vector loads).
ALIGNMENT = 16


@dataclass(frozen=True)
class TensorInfo:
    """What validation looks at of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorInfo:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), str(tensor.device))


def _broadcast(shapes: Sequence[Sequence[int]], what: str) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    result = []
    for dim in range(-rank, 0):
        sizes = {shape[dim] for shape in shapes if len(shape) >= -dim} - {1}
        if len(sizes) > 1:
            raise InvalidCallError(
                f"{what} {', '.join(str(tuple(shape)) for shape in shapes)} do not broadcast in dimension {dim}: "
                f"expected equal sizes, or 1"
            )
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def validate(
    query: TensorInfo,
    key: TensorInfo,
    value: TensorInfo,
    attn_mask: TensorInfo | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> None:
    """Refuse a call that torch refuses.

    Raises:
        InvalidCallError: what was wrong and what was expected.
    """
    named = {"query": query, "key": key, "value": value}
    for name, info in named.items():
        if len(info.shape) < 2:
            raise InvalidCallError(f"{name}: expected rank 2 or more, (..., length, head size), got shape {info.shape}")
        if info.dtype not in DTYPES:
            raise InvalidCallError(f"{name}: expected one of {', '.join(DTYPES)}, got {info.dtype}")
    for attribute in ("dtype", "device"):
        values = {name: getattr(info, attribute) for name, info in named.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in values.items())
            raise InvalidCallError(f"query, key and value must have one {attribute}, got {listed}; convert them first")
    if query.shape[-1] != key.shape[-1]:
        raise InvalidCallError(
            f"query and key must have one head size (last dimension), got {query.shape[-1]} and {key.shape[-1]}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise InvalidCallError(
            f"key and value must have one length (dimension -2), got {key.shape[-2]} and {value.shape[-2]}"
        )
    if not 0.0 <= dropout_p <= 1.0:
        raise InvalidCallError(f"dropout_p must be a probability from 0 to 1, got {dropout_p}")
    leading = [info.shape[:-2] for info in named.values()]
    if enable_gqa:
        if min(map(len, leading)) < 1:
            raise InvalidCallError("enable_gqa needs a head dimension (-3) in query, key and value: rank 3 or more")
        heads = query.shape[-3]
        for name in ("key", "value"):
            if not named[name].shape[-3] or heads % named[name].shape[-3]:
                raise InvalidCallError(
                    f"enable_gqa: the number of heads of {name} ({named[name].shape[-3]}) must divide that of "
                    f"query ({heads})"
                )
        leading = [shape[:-1] for shape in leading]
    _broadcast(leading, "the leading dimensions of query, key and value")
    if attn_mask is not None:
        # The mask is added to the product of query and key, which has no dimension that value alone brings in.
        batch = _broadcast(leading[:2], "the leading dimensions of query and key")
        _validate_mask(attn_mask, query, key, batch + ((query.shape[-3],) if enable_gqa else ()))
        if is_causal:
            raise InvalidCallError(
                "attn_mask and is_causal=True cannot be combined; put the causal part into the mask, "
                "or leave the mask out"
            )


def _validate_mask(mask: TensorInfo, query: TensorInfo, key: TensorInfo, batch: tuple[int, ...]) -> None:
    allowed = ("bool", "float32", query.dtype)
    if mask.dtype not in allowed:
        raise InvalidCallError(
            f"attn_mask: expected bool, float32 or the query's dtype ({query.dtype}), got {mask.dtype}"
        )
    if mask.device != query.device:
        raise InvalidCallError(f"attn_mask is on {mask.device}, query on {query.device}; move one of them")
    target = (*batch, query.shape[-2], key.shape[-2])
    if not 2 <= len(mask.shape) <= len(target):
        raise InvalidCallError(
            f"attn_mask: expected rank 2 to {len(target)}, (..., query length, key length), got shape {mask.shape}"
        )
    for dim in range(-len(mask.shape), 0):
        if mask.shape[dim] not in (1, target[dim]):
            raise InvalidCallError(
                f"attn_mask: shape {mask.shape} does not broadcast to {target}, (..., query length, key length), "
                f"in dimension {dim}"
            )


class Call(NamedTuple):
    """The arguments of one call, in torch's meaning."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    def validate(self, training: bool = False) -> None:
        """Refuse what torch refuses.

        Raises:
            InvalidCallError: what was wrong and what was expected.
        """
        if not isinstance(self.is_causal, bool) or not isinstance(self.enable_gqa, bool):
            raise InvalidCallError(
                f"is_causal and enable_gqa must be True or False, got {self.is_causal!r} and {self.enable_gqa!r}"
            )
        if not isinstance(self.dropout_p, numbers.Real):
            raise InvalidCallError(f"dropout_p must be a number, got {self.dropout_p!r}")
        scalar = getattr(self.scale, "dim", lambda: 1)() == 0  # a 0-dimensional tensor, which torch takes for a number
        if self.scale is not None and not isinstance(self.scale, numbers.Real) and not scalar:
            raise InvalidCallError(f"scale must be a number or None, got {self.scale!r}")
        if training and any(tensor.is_inference() for tensor in self.tensors()):
            raise InvalidCallError(
                "a tensor made under torch.inference_mode() cannot take part in a call that needs gradients; clone it"
            )
        own = [type(tensor).__name__ for tensor in self.tensors() if _dispatches(tensor)]
        if own:
            raise InvalidCallError(
                f"{own[0]} is a kind of tensor with operators of its own (__torch_dispatch__) and is not supported: "
                "give its local or inner tensors (DTensor.to_local()), or call torch's own function, which "
                "sidestep.install() does for such tensors"
            )
        if any(hasattr(size, "data_ptr") for tensor in self.tensors() for size in tensor.shape):
            raise InvalidCallError(
                "under torch.jit.trace sizes are tensors, and a backend is chosen by numbers: use torch.compile, or "
                "call torch's own function, which sidestep.install() does while something is traced"
            )
        mask = None if self.attn_mask is None else TensorInfo.of(self.attn_mask)
        infos = (TensorInfo.of(self.query), TensorInfo.of(self.key), TensorInfo.of(self.value))
        validate(*infos, mask, self.dropout_p, self.is_causal, self.enable_gqa)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Query, key, value and, where there is one, the mask."""
        given = (self.query, self.key, self.value, self.attn_mask)
        return tuple(tensor for tensor in given if tensor is not None)


def problem_of(call: Call, training: bool, deterministic: bool) -> AttentionProblem:
    """The problem of a canonical call."""
    query, key, value, mask = call[:4]
    return AttentionProblem(
        device=query.device.type,
        dtype=str(query.dtype).removeprefix("torch."),
        query=Layout.of(query.shape, query.stride()),
        key=Layout.of(key.shape, key.stride()),
        value=Layout.of(value.shape, value.stride()),
        mask=None if mask is None else _mask_of(mask, training),
        is_causal=bool(call.is_causal),
        dropout_p=float(call.dropout_p),
        scale=default_scale(query.shape[3]) if call.scale is None else float(call.scale),
        training=training,
        deterministic=deterministic,
    )


def _mask_of(mask: torch.Tensor, training: bool) -> Mask:
    layout = Layout.of(mask.shape, mask.stride())
    return Mask(layout.shape, layout.stride, str(mask.dtype).removeprefix("torch."), training and mask.requires_grad)


def is_canonical(call: Call) -> bool:
    """True when backends can see the call as it is."""
    query, key, value, mask = call[:4]
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    if key.shape[1] != value.shape[1]:
        return False
    if key.shape[1] != query.shape[1] and not (call.enable_gqa or key.shape[1] == 1):
        return False
    if mask is not None and mask.dim() != 4:
        return False
    return not any(map(_misaligned, call.tensors()))


def _dispatches(tensor: torch.Tensor) -> bool:
    """DTensor, FakeTensor, jagged tensors and their like, which have no memory of their own to give to a kernel."""
    dispatch = getattr(type(tensor), "__torch_dispatch__", None)
    return getattr(dispatch, "__name__", "") != "_disabled_torch_dispatch_impl"  # what plain tensors have


def _misaligned(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.data_ptr() % ALIGNMENT != 0


def canonicalize(call: Call) -> tuple[Call, tuple[int, ...]]:
    """The canonical call with the same answer, and the shape to view its output in.

    Every step is differentiable, so gradients arrive at the caller's own tensors, reduced over what was
    broadcast. Only misaligned tensors, grouped heads of unequal number in key and value, and batches of
    rank over 4 that are broadcast, are copied.
    """
    query, key, value, mask = call[:4]
    heads_last = 3 if call.enable_gqa else 2  # dimensions, from the end, that do not broadcast with one another
    batch = _broadcast([t.shape[:-heads_last] for t in (query, key, value)], "batch dimensions")
    rank = len(batch) + heads_last
    output_shape = (*batch, *query.shape[-heads_last:-1], value.shape[-1])
    if call.enable_gqa and key.shape[-3] != value.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    shared = not call.enable_gqa and rank == 4 and key.dim() == value.dim() == 4 and key.shape[1] == value.shape[1] == 1

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        target = list(batch)
        if shared and tensor is not query:
            target[1] = 1  # one key head for all query heads: grouped heads, nothing to expand
        tensor = tensor.expand(*target, *tensor.shape[-heads_last:])
        while tensor.dim() < 4:
            tensor = tensor.unsqueeze(0)
        return tensor.flatten(0, tensor.dim() - 4) if tensor.dim() > 4 else tensor

    query, key, value = (widen(t) for t in (query, key, value))
    if mask is not None:
        while mask.dim() < max(rank, 4):
            mask = mask.unsqueeze(0)
        if mask.dim() > 4:
            lead = mask.shape[: rank - 3]
            if any(size != 1 for size in lead):
                mask = mask.expand(*output_shape[: rank - 3], *mask.shape[rank - 3 :])
            mask = mask.flatten(0, rank - 4)
    if any(_misaligned(t) for t in (query, key, value)):
        # All three: which of them it was is not in a call's signature, and a plan is for the strides of all.
        query, key, value = query.clone(), key.clone(), value.clone()
    if mask is not None and _misaligned(mask):
        mask = mask.clone()
    grouped = key.shape[1] != query.shape[1]
    return Call(query, key, value, mask, call.dropout_p, call.is_causal, call.scale, grouped), output_shape


def constant_output(problem: AttentionProblem) -> bool:
    """True where the output is zeros (or empty) whatever the numbers: no backend is asked.

    An empty output, no keys at all, or every weight dropped.
    """
    return 0 in problem.output_shape or problem.key.shape[2] == 0 or problem.dropout_p == 1.0

"""AttentionProblem: all that a backend may know of one call. It holds no tensor and imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

DTYPES = ("float16", "bfloat16", "float32", "float64")
_ITEMSIZE = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def contiguous_stride(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor whose dimensions lie in memory in `order`, outermost first."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(order if order is not None else range(len(shape))):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def canonical_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """`stride` with that of every dimension of size 1, which addresses nothing, replaced by one fixed choice.

    Layouts that address the same elements get the same strides, so the same key.
    """
    result = list(stride)
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            result[dim] = 1 if dim == len(shape) - 1 else max(shape[dim + 1] * result[dim + 1], 1)
    return tuple(result)


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions from the outermost to the innermost in memory; where strides tie, as they stand.

    A dimension of stride 0 is expanded and has no place in memory of its own: it stays behind the
    dimension before it.
    """
    keys: list[float] = []
    for dim, step in enumerate(stride):
        keys.append(step if step else (keys[dim - 1] if dim else float("inf")))
    return tuple(sorted(range(len(shape)), key=lambda dim: (-keys[dim], dim)))


@dataclass(frozen=True)
class Layout:
    """Shape and strides, in elements, of one rank-4 tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], stride: Sequence[int] | None = None) -> Layout:
        """A layout with canonical strides; contiguous when `stride` is None."""
        return cls(tuple(shape), canonical_stride(shape, contiguous_stride(shape) if stride is None else stride))

    @property
    def extent(self) -> int:
        """Elements from the first to the last in memory."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def dense(self, shape: Sequence[int] | None = None) -> tuple[int, ...]:
        """Strides of a dense tensor of `shape` (default: this shape) with this layout's order of dimensions."""
        return contiguous_stride(self.shape if shape is None else shape, memory_order(self.shape, self.stride))


@dataclass(frozen=True)
class Mask(Layout):
    """An attn_mask (B or 1, H or 1, S_q or 1, S_kv or 1); `dtype` bool excludes where False, else it is added."""

    dtype: str = "bool"
    requires_grad: bool = False


@dataclass(frozen=True)
class AttentionProblem:
    """One canonical call.

    Attributes:
        device: 'cuda' or 'cpu'; which GPU it is belongs to the environment.
        dtype: of query, key, value and output.
        query: (B, H_q, S_q, D).
        key: (B, H_kv, S_kv, D); H_kv divides H_q.
        value: (B, H_kv, S_kv, D_v).
        mask: the attn_mask's layout, or None.
        is_causal: query i sees keys 0 to i (top-left alignment).
        dropout_p: probability of dropping an attention weight.
        scale: the factor of the logits, resolved.
        training: some input needs a gradient.
        deterministic: torch.use_deterministic_algorithms is on.
    """

    device: str
    dtype: str
    query: Layout
    key: Layout
    value: Layout
    mask: Mask | None = None
    is_causal: bool = False
    dropout_p: float = 0.0
    scale: float = 1.0
    training: bool = False
    deterministic: bool = False

    @property
    def output_shape(self) -> tuple[int, ...]:
        """(B, H_q, S_q, D_v)."""
        return (*self.query.shape[:3], self.value.shape[3])

    @property
    def output_stride(self) -> tuple[int, ...]:
        """Strides of a dense output in the query's order of dimensions, the head size innermost."""
        order = [dim for dim in memory_order(self.query.shape, self.query.stride) if dim != 3]
        return contiguous_stride(self.output_shape, [*order, 3])

    def inputs(self) -> dict[str, Layout]:
        """The layouts of query, key and value by name."""
        return {"query": self.query, "key": self.key, "value": self.value}

    @property
    def grouped(self) -> bool:
        """Several query heads share a key head."""
        return self.query.shape[1] != self.key.shape[1]

    @property
    def itemsize(self) -> int:
        """Bytes of an element of query, key and value."""
        return _ITEMSIZE[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """The problem as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AttentionProblem:
        """Read what `to_json` wrote; strides and scale may be left out (contiguous; 1/sqrt(D)).

        Raises:
            ValueError: naming the field that is missing, unknown or of the wrong type.
        """
        known = {item.name for item in fields(cls)}
        if not isinstance(data, Mapping):
            raise ValueError(f"problem: expected an object, got {type(data).__name__}")
        if unknown := sorted(set(data) - known):
            raise ValueError(f"problem: unknown field {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        if missing := sorted({"device", "dtype", "query", "key", "value"} - set(data)):
            raise ValueError(f"problem: missing field {', '.join(missing)}")
        values = dict(data)
        for name in ("query", "key", "value"):
            values[name] = _layout(name, data[name], {"shape", "stride"})
        if data.get("mask") is not None:
            layout = _layout("mask", data["mask"], {"shape", "stride", "dtype", "requires_grad"})
            dtype, requires_grad = data["mask"].get("dtype", "bool"), data["mask"].get("requires_grad", False)
            if dtype not in ("bool", *DTYPES) or not isinstance(requires_grad, bool):
                raise ValueError(f"problem: mask: dtype {dtype!r} or requires_grad {requires_grad!r} cannot be")
            values["mask"] = Mask(layout.shape, layout.stride, dtype, requires_grad)
        for name in ("is_causal", "training", "deterministic"):
            if not isinstance(values.get(name, False), bool):
                raise ValueError(f"problem: {name}: expected true or false, got {values[name]!r}")
        if values["device"] not in ("cuda", "cpu"):
            raise ValueError(f"problem: device: expected 'cuda' or 'cpu', got {values['device']!r}")
        if values["dtype"] not in DTYPES:
            raise ValueError(f"problem: dtype: expected one of {', '.join(DTYPES)}, got {values['dtype']!r}")
        for name, default in (("dropout_p", 0.0), ("scale", default_scale(values["query"].shape[3]))):
            number = values.get(name)
            if number is None:
                number = default
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise ValueError(f"problem: {name}: expected a number, got {number!r}")
            values[name] = float(number)
        return cls(**values)

    def is_written(self, data: Mapping[str, Any]) -> bool:
        """Whether `data`, JSON that anybody may have written, stands for this problem."""
        try:
            return AttentionProblem.from_json(data) == self
        except (ValueError, OverflowError):  # a whole number that is too large for a float
            return False

    def digest(self) -> str:
        """32 hex digits that name the problem in keys."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def __str__(self) -> str:
        """One line for people."""
        batch, heads, queries, size = self.query.shape
        parts = [f"{self.dtype} {self.device}", f"batch {batch}", f"heads {heads}"]
        if self.grouped:
            parts.append(f"kv_heads {self.key.shape[1]}")
        parts.append(f"length {queries}" + (f"x{self.key.shape[2]}" if self.key.shape[2] != queries else ""))
        parts.append(f"head_size {size}" + (f"/{self.value.shape[3]}" if self.value.shape[3] != size else ""))
        if any(part.stride != contiguous_stride(part.shape) for part in (self.query, self.key, self.value)):
            parts.append("strided")
        if self.is_causal:
            parts.append("causal")
        if self.mask is not None:
            parts.append(f"{self.mask.dtype} mask {'x'.join(map(str, self.mask.shape))}")
            if self.mask.requires_grad:
                parts.append("mask gradient")
        if self.dropout_p:
            parts.append(f"dropout {self.dropout_p:g}")
        if self.scale != default_scale(size):
            parts.append(f"scale {self.scale:g}")
        parts.append("training" if self.training else "inference")
        return ", ".join(parts)


def default_scale(head_size: int) -> float:
    """1/sqrt(head size), torch's default; 1 for head size 0, where there is nothing to scale."""
    return float(head_size**-0.5) if head_size else 1.0


def _layout(name: str, data: object, allowed: set[str]) -> Layout:
    if not isinstance(data, Mapping) or "shape" not in data or set(data) - allowed:
        raise ValueError(f"problem: {name}: expected an object with {', '.join(sorted(allowed))}, got {data!r}")
    shape, stride = data["shape"], data.get("stride")
    for label, numbers in (("shape", shape), ("stride", stride)):
        if label == "stride" and numbers is None:
            continue
        if not isinstance(numbers, (list, tuple)) or len(numbers) != 4 or not all(type(n) is int for n in numbers):
            raise ValueError(f"problem: {name}.{label}: expected four whole numbers, got {numbers!r}")
        if min(numbers) < 0:
            raise ValueError(f"problem: {name}.{label}: a negative number in {numbers!r}")
    return Layout.of(shape, stride)

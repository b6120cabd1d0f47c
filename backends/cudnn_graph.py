"""cuDNN attention graphs, built by nvidia-cudnn-frontend for exact shapes and the true strides.

Sources: the frontend's documentation of `sdpa` and `sdpa_backward` (1.28 to 1.32), and what was measured on an
H200 with cuDNN 9.19 where a rule or a choice says so.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .base import Direction, Plan, Progress, Target, Verdict
from .layouts import additive, uneven

if TYPE_CHECKING:
    from ..problem import AttentionProblem, Layout

# Raised when what the builder declares changes, so that records and plans of the old builder are not believed.
BUILDER = 1

# Tensor uids: our own, so that a deserialized plan is bound by the same numbers.
Q, K, V, OUT, STATS, BIAS, SEED, OFFSET, DO, DQ, DK, DV, DBIAS = range(1, 14)


class CudnnBackend:
    """Forward and backward graphs on CUDA."""

    name = "cudnn"
    builds = True

    def rejects(self, problem: AttentionProblem) -> tuple[str, ...]:
        """See `Backend.rejects`: what a build cannot show, or must not be asked."""
        named = {"query": problem.query, "key": problem.key, "value": problem.value}
        rules = [
            (problem.device != "cuda", f"device {problem.device}: runs on cuda"),
            (problem.dtype == "float64", "float64"),
            # These end the process, or divide by zero inside the frontend (cuDNN 9.19, gpu_facts trap 2).
            (any(0 in layout.shape for layout in named.values()), "a dimension of size 0"),
        ]
        rules += [
            (layout.stride[3] != 1, f"{name}: last stride {layout.stride[3]}, must be 1")
            for name, layout in named.items()
        ]
        # Builds, runs and leaves NaN (cuDNN 9.19 on an H200; gpu_facts trap 5, and seen again at head size 160).
        sizes = (problem.query.shape[3], problem.value.shape[3])
        rules.append((problem.dtype == "float32" and max(sizes) > 128, f"float32 with head size {max(sizes)} over 128"))
        # The frontend refuses these since 1.32; 1.28 builds them, for kernels that read 16 bytes at a time.
        step = 16 // problem.itemsize
        rules += [
            (uneven(layout, step), f"{name}: strides {layout.stride} are not multiples of 16 bytes")
            for name, layout in named.items()
        ]
        mask = problem.mask
        if mask is not None:
            rules.append((mask.stride[3] not in (0, 1), f"mask: last stride {mask.stride[3]}, must be 1 or 0"))
        if mask is not None and mask.requires_grad:
            # The bias is declared with its query dimension expanded (trap 4), and dBias of that form is refused; the
            # unexpanded form builds and gives wrong dQ, dK, dV.
            rules += [
                (mask.shape[2] == 1 != problem.query.shape[2], "gradient of a mask whose query dimension is 1"),
                (mask.dtype != problem.dtype, f"gradient of a {mask.dtype} mask over {problem.dtype}"),
            ]
        return tuple(reason for fails, reason in rules if fails)

    def versions(self) -> dict[str, str | int]:
        """See `Backend.versions`."""
        import cudnn

        return {"cudnn": cudnn.backend_version(), "cudnn_frontend": cudnn.__version__, "builder": BUILDER}

    def build(self, problem: AttentionProblem, target: Target, progress: Progress) -> Plan:
        """See `Backend.build`. The backward comes first: it is refused more often, in milliseconds."""
        progress.stage = "import"
        import cudnn  # noqa: F401 - an ImportError belongs to this stage

        directions: list[Direction] = ["backward", "forward"] if problem.training else ["forward"]
        graphs = {}
        for direction in directions:
            progress.begin(direction)
            graphs[direction] = _build(problem, direction, target, progress)
        return CudnnPlan(problem, graphs["forward"], graphs.get("backward"), target.index)

    def verdict(self, error: Exception) -> Verdict:
        """A refusal is the frontend's own class, or a NOT_SUPPORTED status; without driver or NVRTC it is neither."""
        import cudnn

        text = str(error)
        if any(sign in text for sign in _NO_DEVICE):
            return "transient"
        if isinstance(error, (cudnn.cudnnGraphNotSupportedError, NotImplementedError)):
            return "unsupported"
        return "unsupported" if isinstance(error, RuntimeError) and "NOT_SUPPORTED" in text else "error"


# What the texts name when it is the machine that is lacking: the class is that of a real refusal (trap 13).
_NO_DEVICE = (
    "libcuda",
    "cudaGetDevice",
    "cuda_get_device",
    "RUNTIME_PREREQUISITE_MISSING",
    "NVRTC",
    "INTERNAL_ERROR_COMPILATION_FAILED",
    "NVIDIA driver",
)


def _build(problem: AttentionProblem, direction: Direction, target: Target, progress: Progress) -> Any:
    import cudnn

    progress.stage = "define"
    if target.profile is None:
        device = {"handle": _handles.get(target.index)}
    else:
        profile = target.profile
        device = {
            "device_property": profile.device_property(),
            "sm_version": profile.sm_version,
            "sm_count": profile.sm_count,
        }
    graph = cudnn.pygraph(
        io_data_type=_types()[problem.dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **device,
    )
    (_define_forward if direction == "forward" else _define_backward)(graph, problem)
    for stage, step in (
        ("validate", graph.validate),
        ("build_operation_graph", graph.build_operation_graph),
        # Mode A alone: FALLBACK finds nothing more (77 cases tried), and its text hides the reason for a refusal.
        ("create_execution_plans", lambda: graph.create_execution_plans([cudnn.heur_mode.A])),
        ("check_support", graph.check_support),
        ("build_plans", graph.build_plans),
    ):
        progress.stage = stage
        with _quiet():
            step()
    return graph


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The frontend (1.32) also logs a refusal, as a warning; it is raised, so it is told once."""
    logger = logging.getLogger("cudnn.pygraph")

    def keep(record: logging.LogRecord) -> bool:
        return "treating as a decline" not in record.msg

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _types() -> dict[str, Any]:
    import cudnn

    kind = cudnn.data_type
    return {"float16": kind.HALF, "bfloat16": kind.BFLOAT16, "float32": kind.FLOAT, "float64": kind.DOUBLE}


def _declare(graph: Any, uid: int, name: str, shape: Sequence[int], stride: Sequence[int], dtype: str) -> Any:
    return graph.tensor(dim=list(shape), stride=list(stride), data_type=_types()[dtype], uid=uid, name=name)


def _inputs(graph: Any, problem: AttentionProblem) -> dict[str, Any]:
    """Query, key, value, scale, causality, bias and dropout: what both directions are told alike."""
    import cudnn

    def layout(uid: int, name: str, given: Layout) -> Any:
        return _declare(graph, uid, name, given.shape, given.stride, problem.dtype)

    arguments: dict[str, Any] = {
        "q": layout(Q, "query", problem.query),
        "k": layout(K, "key", problem.key),
        "v": layout(V, "value", problem.value),
        "attn_scale": problem.scale,
        "use_causal_mask": problem.is_causal,
    }
    bias = bias_layout(problem)
    if bias is not None:
        arguments["bias"] = _declare(graph, BIAS, "bias", *bias)
    if problem.dropout_p > 0:
        seed, offset = (
            graph.tensor(dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.INT64, uid=uid, name=name)
            for uid, name in ((SEED, "philox_seed"), (OFFSET, "philox_offset"))
        )
        arguments["dropout"] = (problem.dropout_p, seed, offset)
    return arguments


def bias_layout(problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...], str] | None:
    """Shape, strides and dtype of the additive bias that stands for the mask.

    The query dimension is always expanded, with stride 0: declared with size 1 the backward is silently wrong
    (gpu_facts, trap 4). The other dimensions are as they broadcast. A bool mask becomes 0 and -inf in the query's
    dtype, contiguous in the mask's own shape.
    """
    mask = problem.mask
    if mask is None:
        return None
    batch, heads, queries, keys = mask.shape
    stride, dtype = mask.stride, mask.dtype
    if dtype == "bool":
        stride, dtype = mask.dense(), problem.dtype
    rows = problem.query.shape[2]
    return (batch, heads, rows, keys), (*stride[:2], stride[2] if queries == rows > 1 else 0, stride[3]), dtype


def _define_forward(graph: Any, problem: AttentionProblem) -> None:
    import cudnn

    output, stats = graph.sdpa(name="sdpa", is_inference=not problem.training, **_inputs(graph, problem))
    _result(output, OUT, problem.output_shape, problem.output_stride, _types()[problem.dtype])
    if problem.training:
        _result(stats, STATS, *_stats(problem), cudnn.data_type.FLOAT)


def _define_backward(graph: Any, problem: AttentionProblem) -> None:
    arguments = _inputs(graph, problem)
    shape, stride = problem.output_shape, problem.output_stride
    arguments["o"] = _declare(graph, OUT, "output", shape, stride, problem.dtype)
    arguments["dO"] = _declare(graph, DO, "grad_output", shape, stride, problem.dtype)
    arguments["stats"] = _declare(graph, STATS, "logsumexp", *_stats(problem), "float32")
    mask = problem.mask
    if mask is not None and mask.requires_grad:
        dtype = problem.dtype
        arguments["dBias"] = _declare(graph, DBIAS, "grad_bias", mask.shape, mask.dense(), dtype)
    if problem.deterministic:
        arguments["use_deterministic_algorithm"] = True
    grads = graph.sdpa_backward(name="sdpa_backward", **arguments)
    for tensor, uid, layout in zip(grads, (DQ, DK, DV), (problem.query, problem.key, problem.value), strict=True):
        _result(tensor, uid, layout.shape, layout.dense(), _types()[problem.dtype])


def _stats(problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    batch, heads, queries, _ = problem.query.shape
    return (batch, heads, queries, 1), (heads * queries, queries, 1, 1)


def _result(tensor: Any, uid: int, shape: Sequence[int], stride: Sequence[int], dtype: Any) -> None:
    tensor.set_output(True).set_uid(uid).set_dim(list(shape)).set_stride(list(stride)).set_data_type(dtype)


class _Handles(threading.local):
    """One cuDNN handle for each thread and device, on the thread's current stream."""

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}
        self._streams: dict[int, int] = {}

    def get(self, index: int) -> Any:
        import cudnn

        # The raw number costs 0.1 us, torch.cuda.current_stream() 5 (gpu_facts); inductor's code calls it too.
        stream = torch._C._cuda_getCurrentRawStream(index)
        if self._streams.get(index) != stream:
            if index not in self._handles:
                with torch.cuda.device(index):
                    self._handles[index] = cudnn.create_handle()
            cudnn.set_stream(handle=self._handles[index], stream=stream)
            self._streams[index] = stream
        return self._handles[index]


_handles = _Handles()


class CudnnPlan:
    """A forward graph and, for training, a backward one; `GraphPlan` says what the methods do."""

    differentiable = False

    def __init__(self, problem: AttentionProblem, forward: Any, backward: Any | None, index: int) -> None:
        mask = problem.mask
        self._dtype = getattr(torch, problem.dtype)
        self._dropout = problem.dropout_p > 0
        self._plain = mask is None and not self._dropout
        self._output = (problem.output_shape, problem.output_stride)
        self._stats = _stats(problem)
        self._grads = [(layout.shape, layout.dense()) for layout in (problem.query, problem.key, problem.value)]
        if mask is not None and mask.requires_grad:
            self._grads.append((mask.shape, mask.dense()))
        optional = ([BIAS] if mask is not None else []) + ([SEED, OFFSET] if self._dropout else [])
        results = [OUT, STATS] if problem.training else [OUT]
        self._forward = _runner(forward, [Q, K, V, *optional, *results], index)
        if backward is not None:
            grads = [DQ, DK, DV, DBIAS][: len(self._grads)]
            self._backward = _runner(backward, [Q, K, V, *optional, OUT, DO, STATS, *grads], index)

    def infer(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """See `Plan.infer`."""
        output = torch.empty_strided(*self._output, dtype=self._dtype, device=query.device)
        optional = () if self._plain else self._optional(query, attn_mask)
        self._forward([query, key, value, *optional, output])
        return output

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """See `GraphPlan.forward`; the residuals are logsumexp (B, H, S, 1) float32, then bias and dropout seed."""
        output = torch.empty_strided(*self._output, dtype=self._dtype, device=query.device)
        stats = torch.empty_strided(*self._stats, dtype=torch.float32, device=query.device)
        optional = () if self._plain else self._optional(query, attn_mask)
        self._forward([query, key, value, *optional, output, stats])
        return output, (stats, *optional)

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        output: torch.Tensor,
        residuals: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `GraphPlan.backward`."""
        stats, *optional = residuals
        if grad_output.stride() != self._output[1] or grad_output.data_ptr() % 16:
            given = grad_output
            grad_output = torch.empty_strided(*self._output, dtype=self._dtype, device=query.device).copy_(given)
        dtype, device = self._dtype, query.device
        grads = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride in self._grads]
        self._backward([query, key, value, *optional, output, grad_output, stats, *grads])
        return (*grads, None)[:4]  # type: ignore[return-value]

    def _optional(self, query: torch.Tensor, attn_mask: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Bias and dropout seed, where the graph has them."""
        bias = () if attn_mask is None else (additive(attn_mask, self._dtype),)
        if not self._dropout:
            return bias
        # From torch's generator, on the device: no synchronization, and a CUDA graph draws anew at every replay. The
        # rows are 16 bytes apart, cuDNN's alignment.
        words = torch.randint(0, 2**31, (2, 2), dtype=torch.int64, device=query.device)
        return (*bias, words[0, :1], words[1, :1])


def _runner(graph: Any, uids: Sequence[int], index: int) -> Callable[[list[torch.Tensor]], None]:
    """Runs `graph` on buffers given in the order of `uids`, on the current stream of the device."""
    size = max(graph.get_workspace_size(), 1)
    byte = torch.uint8
    device = torch.device("cuda", index)
    order = tuple(uids)
    execute = graph.execute
    if "tensor_uids" not in inspect.signature(execute).parameters:  # the frontend before 1.31

        def by_name(buffers: list[torch.Tensor]) -> None:
            workspace = torch.empty(size, dtype=byte, device=device)
            execute(dict(zip(order, buffers, strict=True)), workspace, handle=_handles.get(index))

        return by_name

    def ordered(buffers: list[torch.Tensor]) -> None:
        workspace = torch.empty(size, dtype=byte, device=device)
        execute(buffers, workspace, _handles.get(index), tensor_uids=order)

    return ordered

"""cuDNN attention graphs, built by nvidia-cudnn-frontend for exact shapes and the true strides.

Sources: the frontend's documentation of `sdpa` and `sdpa_backward` (1.28 to 1.32), and what was measured on an
H200 with cuDNN 9.19 where a rule or a choice says so.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import inspect
import logging
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import cudnn_offline
from .base import Direction, Plan, Progress, Target, Verdict
from .known_bad import BOUNDED_LOGITS, PADDING_MASK
from .known_bad import forms as wanted_forms
from .layouts import SCALE, additive, last_strides, uneven_strides

if TYPE_CHECKING:
    from ..problem import AttentionProblem, Layout

# Raised when what the builder declares changes, so that records and plans of the old builder are not believed.
BUILDER = 3

# Tensor uids: our own, so that a deserialized plan is bound by the same numbers. Buffers are given in this order, in
# which what a direction computes comes after what it is given, and what never changes after both.
Q, K, V, BIAS, SEED, OFFSET, OUT, STATS, DO, DQ, DK, DV, DBIAS, QUERY_LENGTHS, KEY_LENGTHS = range(1, 16)

Forms = Mapping[Direction, str]


class CudnnBackend:
    """Forward and backward graphs on CUDA."""

    name = "cudnn"
    builds = True

    def rejects(self, problem: AttentionProblem) -> tuple[str, ...]:
        """See `Backend.rejects`: what a build cannot show, or must not be asked."""
        sizes = (problem.query.shape[3], problem.value.shape[3])
        rules = [
            (problem.device != "cuda", f"device {problem.device}: runs on cuda"),
            (problem.dtype == "float64", "float64"),
            (not problem.scale > 0, SCALE),
            # These end the process, or divide by zero inside the frontend (docs/gpu-notes.md, 2).
            (any(0 in layout.shape for layout in problem.inputs().values()), "a dimension of size 0"),
            # CUDA's limit for a grid's second and third dimension; found out while the plan is loaded (H200).
            (max(problem.query.shape[:2]) > 65535, "more than 65,535 batches or heads"),
            *last_strides(problem),
        ]
        if not any(size % 8 for size in sizes):
            # The frontend refuses these since 1.32, and 1.28 builds them; other head sizes are refused by both.
            rules += uneven_strides(problem)
        mask = problem.mask
        if mask is not None:
            rules.append((mask.stride[3] not in (0, 1), f"mask: last stride {mask.stride[3]}, must be 1 or 0"))
        if mask is not None and mask.requires_grad:
            rules.append((mask.dtype != problem.dtype, f"gradient of a {mask.dtype} mask over {problem.dtype}"))
        return tuple(reason for fails, reason in rules if fails)

    def versions(self) -> dict[str, str | int]:
        """See `Backend.versions`."""
        import cudnn

        return {"cudnn": cudnn.backend_version(), "cudnn_frontend": cudnn.__version__, "builder": BUILDER}

    def build(self, problem: AttentionProblem, target: Target, progress: Progress) -> Plan:
        """See `Backend.build`."""
        progress.stage = "import"
        return self.build_form(problem, target, progress, self._forms(problem, target))

    def build_form(self, problem: AttentionProblem, target: Target, progress: Progress, forms: Forms) -> Plan:
        """As `build`, in a form of the graphs that the caller chooses.

        The backward comes first: it is refused more often, in milliseconds.

        Args:
            problem: as for `build`.
            target: as for `build`.
            progress: as for `build`.
            forms: the remedy that changes a direction's graph, by direction: "padding_mask" declares one that hides
                nothing; "bounded_logits", of a backward, bounds each by its row's logsumexp. Neither changes a number
                that is right (docs/gpu-notes.md, 3).

        Raises:
            Exception: the frontend's own, as it is.
        """
        progress.stage = "import"
        import cudnn  # noqa: F401 - an ImportError belongs to this stage

        directions: list[Direction] = ["backward", "forward"] if problem.training else ["forward"]
        graphs: dict[str, Any] = {}
        for direction in directions:
            progress.begin(direction)
            graphs[direction] = _build(problem, direction, target, progress, forms.get(direction))
        for direction in directions:
            progress.direction, progress.stage = direction, "serialize"
            graph = graphs[direction]
            blob = _serialized(graph)
            if blob:
                progress.graphs[direction] = blob
                progress.names[direction] = graph.get_plan_name_at_index(0)
        if len(progress.graphs) < len(graphs):
            progress.graphs.clear()
        if target.profile is not None:
            return AbsentPlan()
        if progress.graphs:
            # As a later process will load it: the kernels are the same, and a call costs 3 us less (H200).
            return self._load(problem, target, progress.graphs, forms)
        return CudnnPlan(problem, graphs, target.index, forms)

    def load(self, problem: AttentionProblem, target: Target, graphs: Mapping[str, bytes]) -> Plan:
        """See `LoadingBackend.load`."""
        if target.profile is not None:
            _deserialized(graphs, device_property=target.profile.device_property())
            return AbsentPlan()
        return self._load(problem, target, graphs, self._forms(problem, target))

    def _forms(self, problem: AttentionProblem, target: Target) -> Forms:
        """The remedies that rules want; where rules say otherwise, so does the manifest."""
        facts = {**self.versions(), "compute_capability": _compute_capability(target)}
        return wanted_forms(self.name, problem, facts)

    def _load(self, problem: AttentionProblem, target: Target, graphs: Mapping[str, bytes], forms: Forms) -> Plan:
        return CudnnPlan(problem, _deserialized(graphs, handle=_handle(target.index)), target.index, forms)

    def verdict(self, error: Exception) -> Verdict:
        """A refusal is the frontend's own class, or a NOT_SUPPORTED status; without driver or NVRTC it is neither."""
        import cudnn

        text = str(error)
        if any(sign in text for sign in _NO_DEVICE):
            return "transient"
        if "COMPILATION_FAILED" in text and not _nvrtc_works():
            return "transient"
        if isinstance(error, (cudnn.cudnnGraphNotSupportedError, NotImplementedError)):
            return "unsupported"
        return "unsupported" if isinstance(error, RuntimeError) and "NOT_SUPPORTED" in text else "error"


def _compute_capability(target: Target) -> str:
    """As the manifest has it: "9.0"."""
    if target.profile is not None:
        return "{}.{}".format(*divmod(target.profile.sm_version, 10))
    return "{}.{}".format(*torch.cuda.get_device_capability(target.index))


# What the texts name when the machine is lacking: the class is that of a real refusal (docs/gpu-notes.md, 9).
_NO_DEVICE = (
    "libcuda",
    "cudaGetDevice",
    "cuda_get_device",
    "driver version is insufficient",
    "RUNTIME_PREREQUISITE_MISSING",
    "Could not open libnvrtc",
    "NVIDIA driver",
)


def _nvrtc_works() -> bool:
    """Whether a kernel that does not compile is cuDNN's fault (float32 with dropout, 9.19), not want of a compiler."""
    try:
        cudnn_offline.prove_nvrtc(80)  # any architecture that it still knows
    except cudnn_offline.OfflineError:
        return False
    return True


def _build(
    problem: AttentionProblem, direction: Direction, target: Target, progress: Progress, form: str | None
) -> Any:
    import cudnn

    progress.stage = "define"
    if target.profile is None:
        device = {"handle": _handle(target.index)}
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
    with contextlib.ExitStack() as at_end:
        if direction == "forward":
            _define_forward(graph, problem, form)
        else:
            _define_backward(graph, problem, form, at_end)
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


def _serialized(graph: Any) -> bytes:
    """The built graph as bytes; empty where the frontend has no form for it (engines of its own)."""
    import cudnn

    try:
        return bytes(graph.serialize(**_as_bytes()))
    except (cudnn.cudnnGraphNotSupportedError, NotImplementedError, RuntimeError):
        return b""


def _deserialized(graphs: Mapping[str, bytes], **device: Any) -> dict[str, Any]:
    """The graphs of serialized ones, for the device of a handle, or for one of which there are only the properties."""
    import cudnn

    loaded, handle = {}, [device["handle"]] if "handle" in device else []
    for direction, blob in graphs.items():
        loaded[direction] = cudnn.pygraph(**device)
        loaded[direction].deserialize(*handle, blob if _as_bytes() else list(blob))
    return loaded


@functools.cache
def _as_bytes() -> dict[str, bool]:
    """What asks for bytes; without it, and before frontend 1.32, a serialized graph is a list of numbers."""
    import cudnn

    return {"as_bytes": True} if "as_bytes" in inspect.signature(cudnn.pygraph.serialize).parameters else {}


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


def _inputs(graph: Any, problem: AttentionProblem, form: str | None) -> dict[str, Any]:
    """Query, key, value, scale, causality, bias, dropout and lengths: what both directions are told alike."""
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
    if form == PADDING_MASK:
        arguments["use_padding_mask"] = True
        dim, stride = [problem.query.shape[0], 1, 1, 1], [1, 1, 1, 1]
        for uid, name in ((QUERY_LENGTHS, "seq_len_q"), (KEY_LENGTHS, "seq_len_kv")):
            kind = cudnn.data_type.INT32
            arguments[name] = graph.tensor(dim=dim, stride=stride, data_type=kind, uid=uid, name=name)
    return arguments


def bias_layout(problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...], str] | None:
    """Shape, strides and dtype of the additive bias that stands for the mask.

    The query dimension is always expanded, with stride 0: declared with size 1 the backward is silently wrong
    (docs/gpu-notes.md, 4). The other dimensions are as they broadcast. A bool mask becomes 0 and -inf in the query's
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


def _define_forward(graph: Any, problem: AttentionProblem, form: str | None) -> None:
    import cudnn

    output, stats = graph.sdpa(name="sdpa", is_inference=not problem.training, **_inputs(graph, problem, form))
    _result(output, OUT, problem.output_shape, problem.output_stride, _types()[problem.dtype])
    if problem.training:
        _result(stats, STATS, *_stats(problem), cudnn.data_type.FLOAT)


def _define_backward(graph: Any, problem: AttentionProblem, form: str | None, at_end: contextlib.ExitStack) -> None:
    arguments = _inputs(graph, problem, form)
    shape, stride = problem.output_shape, problem.output_stride
    arguments["o"] = _declare(graph, OUT, "output", shape, stride, problem.dtype)
    arguments["dO"] = _declare(graph, DO, "grad_output", shape, stride, problem.dtype)
    arguments["stats"] = _declare(graph, STATS, "logsumexp", *_stats(problem), "float32")
    mask = problem.mask
    if mask is not None and mask.requires_grad:
        dtype = problem.dtype
        arguments["dBias"] = _declare(graph, DBIAS, "grad_bias", mask.shape, mask.dense(), dtype)
    if form == BOUNDED_LOGITS:
        _bound(arguments, at_end)
    if problem.deterministic:
        arguments["use_deterministic_algorithm"] = True
    grads = graph.sdpa_backward(name="sdpa_backward", **arguments)
    for tensor, uid, layout in zip(grads, (DQ, DK, DV), (problem.query, problem.key, problem.value), strict=True):
        _result(tensor, uid, layout.shape, layout.dense(), _types()[problem.dtype])


def _bound(arguments: dict[str, Any], at_end: contextlib.ExitStack) -> None:
    """Bound the logits of a backward by the logsumexp, so that none of the weights made from them is over 1.

    No true weight is. But the kernel also makes weights of keys that are not there, with logits of 0, and where the
    logsumexp is under -88 such a weight is infinite, and 0 times it NaN.

    Args:
        arguments: of `sdpa_backward`, to be changed.
        at_end: gets what must be done when the graph is built, or has failed to be.
    """
    bias, bound = arguments.pop("bias", None), arguments["stats"]
    if "dBias" in arguments:
        raise NotImplementedError("bounded logits: a bias of which there is a gradient")
    seen: list[Any] = []

    def bounded(graph: Any, logits: Any) -> Any:
        seen.append(graph)
        # What is given as "bias" would be added after this, and the bound is that of the sum.
        return graph.min(input0=logits if bias is None else graph.add(a=logits, b=bias), input1=bound)

    arguments["score_mod"] = bounded
    arguments["score_mod_bprop"] = lambda graph, grad: graph.identity(input=grad)

    @at_end.callback
    def release() -> None:
        # The frontend's graph (1.28 to 1.32) keeps the function in one of the frontend's own, whose variables hold the
        # graph: neither would ever be freed.
        for graph in seen:
            for cell in getattr(getattr(graph, "_lower", None), "__closure__", None) or ():
                cell.cell_contents = None


def _stats(problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    batch, heads, queries, _ = problem.query.shape
    return (batch, heads, queries, 1), (heads * queries, queries, 1, 1)


def _result(tensor: Any, uid: int, shape: Sequence[int], stride: Sequence[int], dtype: Any) -> None:
    tensor.set_output(True).set_uid(uid).set_dim(list(shape)).set_stride(list(stride)).set_data_type(dtype)


# Workspaces up to this size are kept, one for each thread and stream; larger ones are allocated for each call. A
# forward's is 256 bytes, a small backward's some 100 kB (cuDNN 9.19), and an allocation costs a sixth of a call.
_KEPT_WORKSPACE = 2**18
# Of threads that have ended, by device and stream. Work on one stream is done in order, so another thread's calls there
# may have them; those on another stream would not wait, so they are never freed.
_spare_workspaces: dict[tuple[int, int], list[torch.Tensor]] = {}


def _lasting(index: int, allocate: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Allocate what is never freed, for any thread and stream.

    In a thread of its own: torch.compile with CUDA graphs lets its thread allocate from a pool, in which nothing may be
    left behind. Dispatch modes, which may make it something else, are the caller's thread's too.
    """

    def made() -> torch.Tensor:
        # The new thread's device is the first; a context there costs memory that no other rank may take.
        with torch.cuda.device(index):
            # Not the caller's stream: what is freed there is given out at once.
            stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                tensor = allocate()
            stream.synchronize()
            return tensor

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        try:
            allocation = thread.submit(made)
        except RuntimeError:  # the interpreter is ending, and no thread can be started
            return made()
        return allocation.result()


def _spare(workspaces: dict[tuple[int, int], torch.Tensor]) -> None:
    """Take over an ended thread's workspaces."""
    for place, workspace in workspaces.items():
        _spare_workspaces.setdefault(place, []).append(workspace)


class _Lane:
    """What a thread runs graphs with: the cuDNN handle of its device, on its current stream, and a workspace.

    Work on one stream is done in order, so one workspace serves all plans of a lane.
    """

    __slots__ = (
        "__weakref__", "_handles", "_workspaces", "address", "backend_handle", "handle", "index", "pointers", "stream",
        "workspace",
    )  # fmt: skip

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}
        self._workspaces: dict[tuple[int, int], torch.Tensor] = {}  # by device and stream
        weakref.finalize(self, _spare, self._workspaces).atexit = False
        self.index = self.stream = -1
        self.handle: Any = None
        self.backend_handle: Any = None  # the number in the handle, which frontends with a raw entry point have
        self.workspace: torch.Tensor | None = None
        self.pointers = (ctypes.c_uint64 * 16)()
        self.address = ctypes.addressof(self.pointers)

    def switch(self, index: int, stream: int) -> None:
        """Go to a device and stream."""
        import cudnn

        if index not in self._handles:
            with torch.cuda.device(index):
                self._handles[index] = _new_handle(index)
        self.handle = self._handles[index]
        self.backend_handle = getattr(self.handle, "backend_handle", None)
        cudnn.set_stream(handle=self.handle, stream=stream)
        self.workspace = None
        self.index, self.stream = index, stream

    def find_workspace(self) -> torch.Tensor:
        """The workspace of this thread on this stream."""
        place = self.index, self.stream
        workspace = self._workspaces.get(place)
        if workspace is None:
            try:
                workspace = _spare_workspaces.get(place, []).pop()
            except IndexError:
                new = functools.partial(torch.empty, _KEPT_WORKSPACE, dtype=torch.uint8, device=f"cuda:{self.index}")
                workspace = _lasting(self.index, new)
            self._workspaces[place] = workspace
        self.workspace = workspace
        return workspace


class _Lanes(threading.local):
    """Each thread's lane; an attribute of a thread's own costs several times one of an object, so it is read once."""

    def __init__(self) -> None:
        self.own = _Lane()


_lanes = _Lanes()


def _new_handle(index: int) -> Any:
    """A cuDNN handle for the current device.

    The frontend's own function asks CUDA's Python bindings which that is, and importing them costs 19 ms (H200).
    """
    import cudnn

    if cudnn.__version__.startswith(_RAW_FRONTENDS):
        return cudnn.Handle(cudnn._pybind_module.create_handle(), index, 0)
    return cudnn.create_handle()


def _handle(index: int) -> Any:
    """The thread's handle for a device, on its current stream."""
    lane = _lanes.own
    lane.switch(index, torch._C._cuda_getCurrentRawStream(index))
    return lane.handle


class AbsentPlan:
    """Says that the graphs can be built for a GPU that is not here; they cannot be run."""

    def infer(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """See `Plan.infer`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("this plan was built for a GPU that is not here")


class CudnnPlan:
    """A forward graph and, for training, a backward one; `GraphPlan` says what the methods do.

    Few Python objects are touched on the way: autograd runs a backward in a thread of its own, where every object that
    the caller's thread has just used comes from another core's cache (10 us of a tiny backward's 65 on an H200).
    """

    def __init__(self, problem: AttentionProblem, graphs: Mapping[str, Any], index: int, forms: Forms) -> None:
        mask = problem.mask
        dtype = self._dtype = getattr(torch, problem.dtype)
        self._dropout = problem.dropout_p > 0
        self._plain = mask is None and not self._dropout
        self._output_stride = problem.output_stride
        new = functools.lru_cache(functools.partial(_allocation, index))  # layouts that are the same share one
        self._new_output = new(problem.output_shape, problem.output_stride, dtype)
        optional = ([BIAS] if mask is not None else []) + ([SEED, OFFSET] if self._dropout else [])
        lengths = _full_lengths(problem, index) if PADDING_MASK in forms.values() else {}
        results = {OUT: self._new_output}
        if problem.training:
            results[STATS] = new(*_stats(problem), torch.float32)
        constants = lengths if forms.get("forward") == PADDING_MASK else {}
        self._forward = _runner(graphs["forward"], [Q, K, V, *optional], results, constants, index)
        if problem.training:
            inputs = (problem.query, problem.key, problem.value)
            grads = {uid: new(t.shape, t.dense(), dtype) for uid, t in zip((DQ, DK, DV), inputs, strict=True)}
            if mask is not None and mask.requires_grad:
                grads[DBIAS] = new(mask.shape, mask.dense(), dtype)
            self._no_more = () if DBIAS in grads else (None,)
            constants = lengths if forms.get("backward") == PADDING_MASK else {}
            given = [Q, K, V, *optional, OUT, STATS, DO]
            self._backward = _runner(graphs["backward"], given, grads, constants, index)

    def infer(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """See `Plan.infer`."""
        if self._plain:
            return self._forward(query, key, value)[0]
        return self._forward(query, key, value, *self._optional(query, attn_mask))[0]

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
    ) -> Sequence[torch.Tensor]:
        """See `GraphPlan.forward`; the residuals are logsumexp (B, H, S, 1) float32, then bias and dropout seed."""
        if self._plain:
            return self._forward(query, key, value)
        optional = self._optional(query, attn_mask)
        return (*self._forward(query, key, value, *optional), *optional)

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        output: torch.Tensor,
        stats: torch.Tensor,
        *optional: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """See `GraphPlan.backward`."""
        if grad_output.stride() != self._output_stride or grad_output.data_ptr() % 16:
            grad_output = self._new_output().copy_(grad_output)
        return (*self._backward(query, key, value, *optional, output, stats, grad_output), *self._no_more)

    def _optional(self, query: torch.Tensor, attn_mask: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Bias and dropout seed, where the graph has them."""
        bias = () if attn_mask is None else (additive(attn_mask, self._dtype),)
        if not self._dropout:
            return bias
        # From torch's generator, on the device: no synchronization, and a CUDA graph draws anew at every replay. The
        # rows are 16 bytes apart, cuDNN's alignment.
        words = torch.randint(0, 2**31, (2, 2), dtype=torch.int64, device=query.device)
        return (*bias, words[0, :1], words[1, :1])


_Allocation = Callable[[], torch.Tensor]


def _full_lengths(problem: AttentionProblem, index: int) -> dict[int, torch.Tensor]:
    """What a padding mask that hides nothing is given: the lengths of every query and key sequence, by uid."""
    batch = problem.query.shape[0]
    return {
        QUERY_LENGTHS: _lengths(index, batch, problem.query.shape[2]),
        KEY_LENGTHS: _lengths(index, batch, problem.key.shape[2]),
    }


@functools.cache
def _lengths(index: int, batch: int, length: int) -> torch.Tensor:
    """(B, 1, 1, 1) int32 on the device.

    Never freed: a CUDA graph that captured a plan's kernels outlives the plan, and reads it at every replay.
    """
    shape, device = (batch, 1, 1, 1), f"cuda:{index}"
    return _lasting(index, lambda: torch.full(shape, length, dtype=torch.int32, device=device))


def _runner(
    graph: Any,
    inputs: Sequence[int],
    results: dict[int, _Allocation],
    constants: dict[int, torch.Tensor],
    index: int,
) -> Callable[..., list[torch.Tensor]]:
    """Runs `graph` on the current stream of the device, on its inputs, and returns its results, newly allocated.

    Args:
        graph: built, or deserialized.
        inputs: uids of what the runner will be given, in order.
        results: uids of what it computes, and how to allocate each.
        constants: uids of inputs that are the same in every call; all uids together ascend, in this order.
        index: of the device.
    """
    uids = (*inputs, *results, *constants)
    raw = _raw_entry_point(graph, uids)
    execute = None if raw is not None else _entry_point(graph, uids)
    count, allocations = len(uids), tuple(results.values())
    fixed = tuple(constants.values())
    fixed_pointers = tuple(tensor.data_ptr() for tensor in fixed)
    pack, data_ptr = struct.Struct(f"{count}Q").pack_into, torch.Tensor.data_ptr
    size = max(graph.get_workspace_size(), 1)
    kept = size <= _KEPT_WORKSPACE
    device = torch.device("cuda", index)
    empty, byte, lanes = torch.empty, torch.uint8, _lanes
    # The raw number costs 0.1 us, torch.cuda.current_stream() 5; inductor's generated code calls it too.
    current_stream, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    is_capturing = torch._C._cuda_isCurrentStreamCapturing

    def launch(*given: torch.Tensor) -> list[torch.Tensor]:
        computed = [allocate() for allocate in allocations]
        lane, stream = lanes.own, current_stream(index)
        if lane.stream != stream or lane.index != index:
            lane.switch(index, stream)
        # What a CUDA graph captures must live as long as the graph, so it gets a workspace from the graph's pool.
        if kept and not is_capturing():
            workspace = lane.workspace if lane.workspace is not None else lane.find_workspace()
        else:
            workspace = empty(size, dtype=byte, device=device)
        if execute is not None:
            execute(lane.handle, workspace, (*given, *computed, *fixed))
        else:
            pack(lane.pointers, 0, *map(data_ptr, given), *map(data_ptr, computed), *fixed_pointers)
            raw(lane.address, count, data_ptr(workspace), lane.backend_handle, -1)
        return computed

    if torch.cuda.device_count() == 1:
        return launch

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        if current_device() == index:
            return launch(*given)
        with torch.cuda.device(index):
            return launch(*given)

    return run


# Frontends whose private parts were read, and seen right on an H200. `_execute_with_raw_ptrs` takes device pointers in
# ascending order of uid, copied before it returns; `execute` checks the buffers first, in Python, and costs 4 us more
# of 16. A handle is made of cuDNN's own, the device's index and its stream, which is 0 at first.
_RAW_FRONTENDS = ("1.32.",)


def _raw_entry_point(graph: Any, uids: Sequence[int]) -> Any:
    import cudnn

    known = cudnn.__version__.startswith(_RAW_FRONTENDS) and graph._variant_pack_uids() == list(uids)
    return graph._lowered_graph._execute_with_raw_ptrs if known else None


def _entry_point(graph: Any, uids: tuple[int, ...]) -> Callable[[Any, torch.Tensor, Sequence[torch.Tensor]], None]:
    execute = graph.execute
    if "tensor_uids" in inspect.signature(execute).parameters:  # since frontend 1.31
        return lambda handle, workspace, buffers: execute(buffers, workspace, handle, tensor_uids=uids)
    return lambda handle, workspace, buffers: execute(dict(zip(uids, buffers, strict=True)), workspace, handle=handle)


def _allocation(index: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> _Allocation:
    """Allocates one tensor, on the device that the plan is for."""
    quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if quick is not None and torch.cuda.device_count() == 1:
        # What inductor's generated code allocates with, on the current device; half the cost of torch.empty_strided.
        return functools.partial(quick, shape, stride, dtype)
    device = torch.device("cuda", index)
    return functools.partial(torch.empty_strided, shape, stride, dtype=dtype, device=device)

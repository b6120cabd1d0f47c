"""nvFuser's attention operator (`nvfuser_direct`), which runs torch's flash kernel inside a fusion.

Seen on an H200 with nvFuser 0.2.36: right forward and backward for contiguous (B, H, S, D) inputs; grouped
heads, head sizes that are no multiple of 8, float32 and other strides are refused when the fusion is defined
or run. The rules below hold only what the fusion cannot express; the refusals are met for real.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .base import Plan, Progress, Target, Verdict
from .layouts import OTHER_CAUSAL, SCALE, other_causal, rounded_dropout

if TYPE_CHECKING:
    from ..problem import AttentionProblem


class NvfuserBackend:
    """Flash attention through `nvfuser_direct`; absent where that package is absent."""

    name = "nvfuser"
    builds = True

    def rejects(self, problem: AttentionProblem) -> tuple[str, ...]:
        """See `Backend.rejects`."""
        rules = [
            (importlib.util.find_spec("nvfuser_direct") is None, "package nvfuser_direct is not installed"),
            (problem.device != "cuda", f"device {problem.device}: runs on cuda"),
            (problem.mask is not None, "no mask"),
            (problem.deterministic, "no deterministic backward"),
            (other_causal(problem), OTHER_CAUSAL),
            (not problem.scale > 0, SCALE),
            rounded_dropout(problem),
        ]
        return tuple(reason for fails, reason in rules if fails)

    def versions(self) -> dict[str, str | int]:
        """See `Backend.versions`: the distribution that holds `nvfuser_direct`, and torch, whose kernel it runs."""
        return {"nvfuser": _version(), "torch": torch.__version__, "builder": 1}

    def build(self, problem: AttentionProblem, target: Target, progress: Progress) -> Plan:
        """See `Backend.build`: defines the fusions; nvFuser compiles, and refuses, when they first run."""
        if target.profile is not None:
            raise NotImplementedError("nvFuser learns what it can do only by running, on the GPU")
        progress.stage = "import"
        import nvfuser_direct

        progress.begin("forward")
        forward = _define(nvfuser_direct, problem, backward=False)
        backward = None
        if problem.training:
            progress.begin("backward")
            backward = _define(nvfuser_direct, problem, backward=True)
        progress.direction, progress.stage = "forward", "execute"
        return NvfuserPlan(forward, backward)

    def verdict(self, error: Exception) -> Verdict:
        """NvFuser says no with a RuntimeError, whatever the reason; anything else is a bug."""
        return "unsupported" if isinstance(error, (RuntimeError, NotImplementedError)) else "error"


@functools.lru_cache(maxsize=1)
def _version() -> str:
    owners = importlib.metadata.packages_distributions().get("nvfuser_direct", [])
    if not owners:
        raise importlib.metadata.PackageNotFoundError("nvfuser_direct")
    return ", ".join(sorted(f"{name} {importlib.metadata.version(name)}" for name in set(owners)))


def _define(nvfuser: Any, problem: AttentionProblem, *, backward: bool) -> Callable[[list[Any]], list[Any]]:
    types = {"float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "float64": "Double"}
    dtype = getattr(nvfuser.DataType, types[problem.dtype])
    query, key, value = problem.query.shape, problem.key.shape, problem.value.shape
    output = problem.output_shape
    dropout_p, is_causal, scale = problem.dropout_p, problem.is_causal, problem.scale

    # nvFuser prints its exceptions and their tracebacks, to stdout and stderr; they are raised too.
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), nvfuser.FusionDefinition() as fusion:

        def tensor(shape: Sequence[int], kind: Any = dtype) -> Any:
            contiguity = [None if size == 1 else True for size in shape]  # None is nvFuser's word for a dimension of 1
            return fusion.define_tensor(shape=list(shape), contiguity=contiguity, dtype=kind)

        if not backward:
            results = fusion.ops.sdpfa_fwd(
                tensor(query), tensor(key), tensor(value), dropout_p=dropout_p, is_causal=is_causal, scale=scale
            )
        else:
            unsigned = nvfuser.DataType.UInt64
            grad, inputs = tensor(output), [tensor(query), tensor(key), tensor(value)]
            out, logsumexp = tensor(output), tensor(query[:3], nvfuser.DataType.Float)
            seed, offset = tensor([2], unsigned), tensor([], unsigned)
            results = fusion.ops.sdpfa_bwd(grad, *inputs, out, logsumexp, dropout_p, is_causal, seed, offset, scale)
        for result in results:
            fusion.add_output(result)
    return fusion.execute  # type: ignore[no-any-return]


class NvfuserPlan:
    """A forward fusion and, for training, a backward one."""

    def __init__(
        self, forward: Callable[[list[Any]], list[Any]], backward: Callable[[list[Any]], list[Any]] | None
    ) -> None:
        self._forward = forward
        self._backward = backward

    def infer(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """See `Plan.infer`."""
        return self.forward(query, key, value, attn_mask)[0]

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """See `GraphPlan.forward`; the residuals are logsumexp (B, H, S) float32, philox seed and offset."""
        return tuple(self._forward([query, key, value]))

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        output: torch.Tensor,
        *residuals: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `GraphPlan.backward`."""
        assert self._backward is not None, "built for inference, asked for gradients"
        grads = self._backward([grad_output.contiguous(), query, key, value, output, *residuals])
        return grads[0], grads[1], grads[2], None

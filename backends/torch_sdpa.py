"""torch's own kernels, each called directly, never through torch's choice among them.

The operators are differentiable by themselves: autograd runs the backward of the kernel that ran forward.
They have no build step: what they cannot do they refuse when they run, so a plan's first run decides.

Rules here are those whose breach the operators do not notice (torch 2.11, tried): on a query whose last
stride is not 1 the CPU kernel computes garbage; a bool mask is added as 0 and 1 by `_math`; a float32 mask
over float64 is misread by the CPU kernel; flash on CUDA aligns causal masks at the bottom right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..problem import default_scale
from .base import Plan, Progress, Target, Verdict
from .layouts import OTHER_CAUSAL, SCALE, Rule, additive, last_strides, other_causal, rounded_dropout, uneven_strides

if TYPE_CHECKING:
    from ..problem import AttentionProblem

_Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


class _TorchPlan:
    """Runs one operator, and moves its output into the query's order of dimensions where it comes in another."""

    def __init__(self, problem: AttentionProblem, operator: _Operator) -> None:
        self._operator = operator
        self._stride = problem.output_stride
        # Dimensions of size 1 have strides of no meaning, which operators choose as they like.
        self._dims = [dim for dim, size in enumerate(problem.output_shape) if size > 1]
        self.infer: _Operator = self._first

    def _first(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """`Plan.infer`, until an output has shown its layout: an operator always chooses the same for one problem."""
        output = self._operator(query, key, value, attn_mask)
        stride = output.stride()
        if all(stride[dim] == self._stride[dim] for dim in self._dims):
            self.infer = self._operator
            return output
        order = sorted(range(4), key=lambda dim: -self._stride[dim])
        back = [order.index(dim) for dim in range(4)]

        def relayout(output: torch.Tensor) -> torch.Tensor:
            if order == back == [0, 1, 2, 3]:
                return output.contiguous()
            return output.permute(order).contiguous().permute(back)

        self.infer = lambda *tensors: relayout(self._operator(*tensors))
        return relayout(output)


class _TorchBackend:
    """What the three have in common."""

    name: str
    builds = False

    def rejects(self, problem: AttentionProblem) -> tuple[str, ...]:
        """See `Backend.rejects`."""
        return tuple(reason for fails, reason in self._rules(problem) if fails)

    def _rules(self, problem: AttentionProblem) -> list[Rule]:
        raise NotImplementedError

    def versions(self) -> dict[str, str | int]:
        """See `Backend.versions`."""
        return {"torch": torch.__version__, "builder": 1}

    def build(self, problem: AttentionProblem, target: Target, progress: Progress) -> Plan:
        """See `Backend.build`; nothing is built, so nothing is raised."""
        if target.profile is not None:
            raise NotImplementedError(f"{self.name} has no build step, so nothing can be learnt without the GPU")
        progress.stage = "execute"
        return _TorchPlan(problem, self._operator(problem))

    def _operator(self, problem: AttentionProblem) -> _Operator:
        raise NotImplementedError

    def verdict(self, error: Exception) -> Verdict:
        """A check of the operator's own (RuntimeError) is a refusal; anything else is a bug."""
        return "unsupported" if isinstance(error, (RuntimeError, NotImplementedError)) else "error"


def _device_rule(problem: AttentionProblem, *devices: str) -> Rule:
    return problem.device not in devices, f"device {problem.device}: runs on {' and '.join(devices)}"


class FlashBackend(_TorchBackend):
    """FlashAttention 2 on CUDA; torch's CPU flash kernel on CPU."""

    name = "torch_flash"

    def _rules(self, problem: AttentionProblem) -> list[Rule]:
        rules = [_device_rule(problem, "cuda", "cpu"), *last_strides(problem)]
        sizes = (problem.query.shape[3], problem.value.shape[3])
        rules.append((sizes[0] != sizes[1], f"head size of value {sizes[1]}, must be that of query ({sizes[0]})"))
        rules.append((sizes[0] == 0, "head size 0"))
        if problem.device == "cpu":
            rules.append((problem.dropout_p > 0, "no dropout on CPU"))
            rules.append((bool(problem.mask and problem.mask.requires_grad), "no gradient of the mask"))
            rules.append((problem.is_causal and not problem.scale > 0, SCALE))
        else:
            rules.append((problem.mask is not None, "no mask on CUDA"))
            rules.append((other_causal(problem), OTHER_CAUSAL))
            rules.append(rounded_dropout(problem))
            if sizes[0] % 8 == 0:  # other head sizes are padded, which makes dense copies
                rules += uneven_strides(problem)
            rules.append((not problem.scale > 0, SCALE))
        return rules

    def _operator(self, problem: AttentionProblem) -> _Operator:
        dropout_p, is_causal, scale = problem.dropout_p, problem.is_causal, problem.scale
        if problem.device == "cpu":
            dtype = getattr(torch, problem.dtype)
            widen = problem.dtype == "float64"  # a float32 mask is misread over float64 (torch 2.11)

            def on_cpu(
                query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
            ) -> torch.Tensor:
                if attn_mask is not None:
                    attn_mask = additive(attn_mask, dtype)
                    attn_mask = attn_mask.to(dtype) if widen else attn_mask
                return torch._scaled_dot_product_flash_attention_for_cpu(
                    query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
                )[0]

            return on_cpu
        operator = torch._scaled_dot_product_flash_attention
        size = problem.query.shape[3]
        if size % 8:  # the kernel takes multiples of 8; zeros in the rest change neither logits nor output
            pad = torch.nn.functional.pad
            rest = (0, 8 - size % 8)

            def padded(
                query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: torch.Tensor | None
            ) -> torch.Tensor:
                output = operator(
                    pad(query, rest), pad(key, rest), pad(value, rest), dropout_p, is_causal, False, scale=scale
                )[0]
                return output[..., :size]

            return padded
        return lambda query, key, value, _: operator(query, key, value, dropout_p, is_causal, False, scale=scale)[0]


class EfficientBackend(_TorchBackend):
    """Memory-efficient attention (CUTLASS) on CUDA."""

    name = "torch_efficient"

    def _rules(self, problem: AttentionProblem) -> list[Rule]:
        rules = [_device_rule(problem, "cuda"), *last_strides(problem), *uneven_strides(problem)]
        # The forward takes other head sizes, and the backward ends in a misaligned address, which no process survives.
        sizes, step = (problem.query.shape[3], problem.value.shape[3]), 16 // problem.itemsize
        rules.append((any(size % step for size in sizes), f"head sizes {sizes}: must be multiples of {step}"))
        rules.append((0 in sizes, "head size 0"))
        mask = problem.mask
        if mask is not None:
            wide = mask.dtype not in ("bool", problem.dtype)
            rules.append((wide, f"{mask.dtype} mask over {problem.dtype}: would have to be rounded"))
        return rules

    def _operator(self, problem: AttentionProblem) -> _Operator:
        training, dropout_p, is_causal = problem.training, problem.dropout_p, problem.is_causal
        operator: Callable[..., tuple[torch.Tensor, ...]] = torch._scaled_dot_product_efficient_attention
        if problem.scale != default_scale(problem.query.shape[3]):  # handing it over costs 0.4 us of a call's 12 (H200)
            operator = functools.partial(operator, scale=problem.scale)
        groups = problem.query.shape[1] // max(problem.key.shape[1], 1)
        dtype = getattr(torch, problem.dtype)
        batch, heads, queries, _ = problem.query.shape
        keys = problem.key.shape[2]
        step = 16 // problem.itemsize

        if groups == 1 and problem.mask is None:
            return lambda query, key, value, _: operator(query, key, value, None, training, dropout_p, is_causal)[0]

        def run(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
        ) -> torch.Tensor:
            if groups > 1:
                key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            if attn_mask is not None:
                attn_mask = additive(attn_mask, dtype)
                # The kernel reads the mask's rows 16 bytes at a time: pad them, once, where they are uneven.
                uneven = attn_mask.stride(3) != 1 or any(stride % step for stride in attn_mask.stride()[:3])
                if uneven or attn_mask.data_ptr() % 16:
                    attn_mask = attn_mask.expand(-1, -1, -1, keys)
                    attn_mask = torch.nn.functional.pad(attn_mask, (0, -keys % step))[..., :keys]
                attn_mask = attn_mask.expand(batch, heads, queries, keys)
            return operator(query, key, value, attn_mask, training, dropout_p, is_causal)[0]

        return run


class MathBackend(_TorchBackend):
    """Plain matrix products and a softmax, on any device torch has; half types are computed in float32."""

    name = "torch_math"

    def _rules(self, problem: AttentionProblem) -> list[Rule]:
        return [_device_rule(problem, "cuda", "cpu")]

    def _operator(self, problem: AttentionProblem) -> _Operator:
        dropout_p, is_causal, scale, grouped = problem.dropout_p, problem.is_causal, problem.scale, problem.grouped
        dtype = getattr(torch, problem.dtype)

        def run(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
        ) -> torch.Tensor:
            if attn_mask is not None:
                attn_mask = additive(attn_mask, dtype)
            return torch._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
            )[0]

        return run

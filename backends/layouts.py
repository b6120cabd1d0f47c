"""What several backends ask of layouts, and the one form of attn_mask that kernels see."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..problem import AttentionProblem


Rule = tuple[bool, str]  # whether the problem breaks it, and what to say then

SCALE = "scale must be positive: what is left out is -inf before it is scaled"
OTHER_CAUSAL = "causal with other key than query length: flash aligns at the bottom right"


def other_causal(problem: AttentionProblem) -> bool:
    """True where flash's causal mask is not torch's (seen on an H200: 77 queries over 100 keys, error 1.1)."""
    return problem.is_causal and problem.query.shape[2] != problem.key.shape[2]


def rounded_dropout(problem: AttentionProblem) -> Rule:
    """Flash draws a byte for each weight, and keeps it up to floor(255 (1 - p)) (set_params_fprop in flash_api.cpp).

    So it keeps 253 of 256 where 0.01 is to be dropped, 230 where 0.1 is: 17 and 5 sigma off over a million weights.
    """
    kept = (math.floor((1 - problem.dropout_p) * 255) + 1) / 256
    rounded = problem.dropout_p > 0 and abs(kept - (1 - problem.dropout_p)) > 1e-6
    return rounded, f"dropout {problem.dropout_p:g}: flash rounds it to {1 - kept:.4g}"


def last_strides(problem: AttentionProblem) -> list[Rule]:
    """The head sizes must be contiguous."""
    return [
        (layout.stride[3] != 1, f"{name}: last stride {layout.stride[3]}, must be 1")
        for name, layout in problem.inputs().items()
    ]


def uneven_strides(problem: AttentionProblem) -> list[Rule]:
    """Steps to the next row, head and batch must be multiples of 16 bytes: kernels read as much at a time."""
    step = 16 // problem.itemsize
    rules = []
    for name, layout in problem.inputs().items():
        steps = [stride for stride, size in zip(layout.stride[:3], layout.shape[:3], strict=True) if size > 1]
        uneven = any(stride % step for stride in steps)
        rules.append((uneven, f"{name}: strides {layout.stride} are not multiples of 16 bytes"))
    return rules


def additive(attn_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask that is added to the logits: 0 and -inf, in `dtype`, from a bool one; a float one as it is."""
    if attn_mask.dtype is torch.bool:
        # No tensor is kept for the two constants: one made during a CUDA graph capture would be the graph's.
        return torch.where(attn_mask, 0.0, -torch.inf).to(dtype)
    return attn_mask

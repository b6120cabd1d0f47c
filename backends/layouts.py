"""What several backends ask of layouts, and the one form of attn_mask that kernels see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..problem import AttentionProblem, Layout


OTHER_CAUSAL = "causal with other key than query length: flash aligns at the bottom right"


def other_causal(problem: AttentionProblem) -> bool:
    """True where flash's causal mask is not torch's (seen on an H200: 77 queries over 100 keys, error 1.1)."""
    return problem.is_causal and problem.query.shape[2] != problem.key.shape[2]


def uneven(layout: Layout, step: int) -> bool:
    """True when a step to the next row, head or batch is no multiple of `step` elements."""
    return any(stride % step for stride, size in zip(layout.stride[:3], layout.shape[:3], strict=True) if size > 1)


def additive(attn_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask that is added to the logits: 0 and -inf, in `dtype`, from a bool one; a float one as it is."""
    if attn_mask.dtype is torch.bool:
        # No tensor is kept for the two constants: one made during a CUDA graph capture would be the graph's.
        return torch.where(attn_mask, 0.0, -torch.inf).to(dtype)
    return attn_mask

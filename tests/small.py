"""A small real backend for the CPU, registered as another package's would be, that fails where it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from reference import assert_close, attention

import sidestep
from sidestep.backends import registry
from sidestep.backends.base import Progress, Target, Verdict
from sidestep.problem import AttentionProblem


def refuse(error: BaseException, cause: BaseException | None = None) -> None:
    """Raise `error`."""
    raise error from cause  # this is the line


class Small:
    """A backend for the CPU, with a backward of its own, that fails where it is told to.

    Attributes:
        failing: the step ("rejects", "build", "forward", "backward") -> what is raised there.
        late: a backward fails only once its route is at work, not on the zero gradient of the first run.
        spoil: makes results wrong: called with the name ("output", "query", ... of a gradient), the tensor, to be
            changed in place, and the call's query and key.
    """

    builds = True

    def __init__(self, name: str = "small") -> None:
        self.name = name
        self.failing: dict[str, BaseException] = {}
        self.cause: BaseException | None = None
        self.late = False
        self.reasons: tuple[str, ...] = ()
        self.version: str | BaseException = "1"
        self.asked: list[str] = []
        self.spoil: Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], None] = lambda *_: None

    def step(self, name: str) -> None:
        """Fail if this step is to fail."""
        self.asked.append(name)
        if name in self.failing:
            refuse(self.failing[name], self.cause)

    def rejects(self, problem: AttentionProblem) -> tuple[str, ...]:
        return self.reasons

    def versions(self) -> dict[str, str | int]:
        if isinstance(self.version, BaseException):
            raise self.version
        return {"small": self.version}

    def build(self, problem: AttentionProblem, target: Target, progress: Progress) -> SmallPlan:
        progress.begin("forward")
        progress.stage = "compile"
        self.step("build")
        return SmallPlan(self, problem)

    def verdict(self, error: Exception) -> Verdict:
        return "unsupported" if isinstance(error, NotImplementedError) else "error"


class SmallPlan:
    """Attention in float64, and its gradients."""

    def __init__(self, backend: Small, problem: AttentionProblem) -> None:
        self.backend, self.problem = backend, problem

    def infer(self, query: Any, key: Any, value: Any, attn_mask: Any) -> torch.Tensor:
        self.backend.step("forward")
        made = self._run(query, key, value, attn_mask)
        self.backend.spoil("output", made, query, key)
        return made

    def forward(self, query: Any, key: Any, value: Any, attn_mask: Any) -> tuple[torch.Tensor, ...]:
        return (self.infer(query, key, value, attn_mask), query.new_ones(3))

    def backward(
        self, grad_output: Any, query: Any, key: Any, value: Any, attn_mask: Any, output: Any, *residuals: Any
    ) -> Any:
        if not self.backend.late or grad_output.any():
            self.backend.step("backward")
        assert output.shape == grad_output.shape
        assert [tuple(r.shape) for r in residuals] == [(3,)]
        trains_mask = self.problem.mask is not None and self.problem.mask.requires_grad
        leaves = [t.detach().requires_grad_() for t in (query, key, value, *([attn_mask] if trains_mask else []))]
        with torch.enable_grad():
            made = self._run(leaves[0], leaves[1], leaves[2], leaves[3] if trains_mask else attn_mask)
        grads = torch.autograd.grad(made, leaves, grad_output)
        for name, grad in zip(("query", "key", "value", "attn_mask"), grads, strict=False):
            self.backend.spoil(name, grad, query, key)
        return (*grads, None)[:4]

    def _run(self, query: Any, key: Any, value: Any, attn_mask: Any) -> torch.Tensor:
        query64, key64, value64 = (t.double() for t in (query, key, value))
        mask = attn_mask if attn_mask is None or attn_mask.dtype is torch.bool else attn_mask.double()
        p = self.problem
        made = attention(query64, key64, value64, mask, p.is_causal, p.scale, p.grouped)
        return made.to(query.dtype)


@contextmanager
def registered(backend: Small) -> Iterator[Small]:
    """In the block the backend is known by its name."""
    registry.register(backend.name, lambda: backend)
    try:
        yield backend
    finally:
        registry._added.pop(backend.name)
        registry.get.cache_clear()


def tensors(*, grad: bool = False, size: int = 8) -> list[Any]:
    """Query, key and value of (1, 2, 5, size)."""
    random = torch.Generator().manual_seed(size)
    return [torch.randn(1, 2, 5, size, generator=random).requires_grad_(grad) for _ in range(3)]


def check(given: list[Any], **keywords: Any) -> torch.Tensor:
    """The call's answer, whose output and gradients are compared with the reference."""
    output = sidestep.scaled_dot_product_attention(*given, **keywords)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    expected = attention(*wide)
    assert_close(output, expected, "output")
    if given[0].requires_grad:
        grads, theirs = (torch.autograd.grad(o.square().sum(), t) for o, t in ((output, given), (expected, wide)))
        for mine, other in zip(grads, theirs, strict=True):
            assert_close(mine, other, "gradient", gradient=True)
    return output

"""What a backend promises: the protocols, and the exception contract of every method.

A backend never catches broadly and never records: it says through `Progress` what it is doing, raises what
went wrong as it is, and classifies an exception when asked. `sidestep.selection` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from ..problem import AttentionProblem
    from .cudnn_offline import DeviceProfile

Direction = Literal["forward", "backward"]
# What an exception means for the configuration: `transient` says nothing about it and is never kept.
Verdict = Literal["unsupported", "error", "transient"]


@dataclass(frozen=True)
class Target:
    """The device to build for: a local one by its index (-1 on CPU), or an absent GPU by its profile."""

    index: int = -1
    profile: DeviceProfile | None = None

    @property
    def built_on(self) -> Literal["local", "offline"]:
        """How records and plans made for this target are marked."""
        return "local" if self.profile is None else "offline"


@dataclass
class Progress:
    """Where an attempt stands, so that a failure's record can say so.

    Attributes:
        direction: of the graph being built or run.
        stage: the build step, or `execute`.
        on_build: called once for every graph whose construction begins.
        graphs: the graphs of a plan that was built, serialized; a plan without them cannot be kept.
        names: what the library calls them.
    """

    direction: Direction = "forward"
    stage: str = "start"
    on_build: Callable[[], None] = lambda: None
    graphs: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def begin(self, direction: Direction) -> None:
        """The construction of a graph begins."""
        self.direction = direction
        self.stage = "define"
        self.on_build()


class Plan(Protocol):
    """Serves one problem on one device, by operators that autograd knows (or see `GraphPlan`)."""

    def infer(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """(B, H_q, S_q, D_v), on the current stream, without touching the inputs.

        Raises:
            Exception: whatever the kernels raise; `Backend.verdict` classifies it.
        """


@runtime_checkable
class GraphPlan(Plan, Protocol):
    """A plan with a forward and a backward of its own; built for training, both exist."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
    ) -> Sequence[torch.Tensor]:
        """The output, then the residuals: what `backward` needs besides the inputs and the output.

        Raises:
            Exception: whatever the kernels raise; `Backend.verdict` classifies it.
        """

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        output: torch.Tensor,
        *residuals: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of query, key, value and, if the problem says that the mask needs one, mask (else None).

        `grad_output` may have any strides.

        Raises:
            Exception: whatever the kernels raise; `Backend.verdict` classifies it.
        """


class Backend(Protocol):
    """One implementation of attention.

    Attributes:
        name: as in orders, settings and records.
        builds: it has a build step, so it cannot be asked for something new during a CUDA graph capture.
    """

    name: str
    builds: bool

    def rejects(self, problem: AttentionProblem) -> tuple[str, ...]:
        """Every rule by which the problem is refused, from the problem alone; empty when none does.

        Uses no GPU and imports nothing heavy. Raises nothing.
        """

    def versions(self) -> dict[str, str | int]:
        """Versions on which this backend's verdicts depend, the builder's own included.

        Raises:
            ImportError, OSError, RuntimeError, AttributeError: a version cannot be read; nothing is kept then.
        """

    def build(self, problem: AttentionProblem, target: Target, progress: Progress) -> Plan:
        """A plan for `problem` on `target`: where it trains, forward and backward.

        Raises:
            Exception: the library's own, as it is; `verdict` classifies it.
        """

    def verdict(self, error: Exception) -> Verdict:
        """What `error`, raised by this backend's build or plan, means for the configuration. Raises nothing.

        Out of memory, missing libraries and lost devices are found before this is asked.
        """


@runtime_checkable
class LoadingBackend(Backend, Protocol):
    """A backend whose plans can be kept: `build` leaves their graphs in `Progress.graphs`."""

    def load(self, problem: AttentionProblem, target: Target, graphs: Mapping[str, bytes]) -> Plan:
        """The plan that was built for `problem` in this environment; for an absent GPU nothing is unpacked.

        Raises:
            Exception: the library's own. Whatever it is, the plan is built anew.
        """

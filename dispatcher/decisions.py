"""What was decided about a backend for a problem: one sum type, one text form, one JSON form.

The same values serve the error of a call that nobody could serve, `explain`, the log and `--json`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Chosen:
    """The backend serves the problem.

    Attributes:
        backend: its name.
        plan: where the plan comes from: `built`, `loaded` from the cache, `in memory`, or `built, not kept` where it
            cannot be serialized; empty where there is nothing to build.
    """

    backend: str
    plan: str = field(default="", compare=False)

    def __str__(self) -> str:
        """One line, without the backend's name."""
        return f"serves the call (plan {self.plan})" if self.plan else "serves the call"


@dataclass(frozen=True)
class Rejected:
    """A rule says no; nothing was run."""

    backend: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """One line, without the backend's name."""
        return "rejected: " + "; ".join(self.reasons)


@dataclass(frozen=True)
class Remembered:
    """A record that is still valid says that the backend fails; nothing was run."""

    backend: str
    record_id: str
    kind: str
    text: str

    def __str__(self) -> str:
        """One line, without the backend's name."""
        return f"known bad ({self.kind}): {self.text} [sidestep failures show {self.record_id}]"


@dataclass(frozen=True)
class Failed:
    """The backend was tried and failed; `record_id` is None where nothing was kept."""

    backend: str
    kind: str
    text: str
    record_id: str | None = None

    def __str__(self) -> str:
        """One line, without the backend's name."""
        where = f" [sidestep failures show {self.record_id}]" if self.record_id else ""
        return f"failed ({self.kind}): {self.text}{where}"


@dataclass(frozen=True)
class Untried:
    """Only in `explain`: rules pass, nothing is remembered; a call would build."""

    backend: str

    def __str__(self) -> str:
        """One line, without the backend's name."""
        return "untried: rules pass and nothing is remembered; a call would try it"


Decision = Chosen | Rejected | Remembered | Failed | Untried


def describe(decisions: tuple[Decision, ...] | list[Decision]) -> str:
    """One line for each decision, `backend: what was decided`."""
    return "\n".join(f"  {decision.backend}: {decision}" for decision in decisions)


def to_json(decision: Decision) -> dict[str, Any]:
    """The decision as a JSON object; `decision` names which of the five it is."""
    return {"decision": type(decision).__name__.lower(), **asdict(decision)}


def from_json(data: dict[str, Any]) -> Decision:
    """The decision that `to_json` wrote."""
    kinds: dict[str, Callable[..., Decision]] = {
        kind.__name__.lower(): kind for kind in (Chosen, Rejected, Remembered, Failed, Untried)
    }
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items() if name != "decision"}
    return kinds[data["decision"]](**values)

"""SymbolProblem: one call of any of Thunder's symbols, as a failure record describes it. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class SymbolProblem:
    """What an executor was asked.

    Attributes:
        symbol: Thunder's id, for instance "torch.nn.functional.layer_norm".
        device: 'cuda' or 'cpu'.
        training: gradients are needed.
        arguments: by name. A tensor is {"shape", "dtype"}, with "stride" where it is known, which is when it runs;
            a number that a trace leaves open is {"number": its type}; anything that JSON has no form for is its text.
    """

    symbol: str
    device: str
    training: bool
    arguments: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The problem as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SymbolProblem:
        """Read what `to_json` wrote.

        Raises:
            ValueError: a field is missing, unknown or of the wrong type.
        """
        expected = {"symbol": str, "device": str, "training": bool, "arguments": Mapping}
        if not isinstance(data, Mapping) or set(data) != {item.name for item in fields(cls)}:
            raise ValueError(f"problem of a symbol: expected an object with {', '.join(expected)}, got {data!r:.200}")
        for name, kind in expected.items():
            if not isinstance(data[name], kind):
                raise ValueError(f"problem of a symbol: {name}: expected {kind.__name__}, got {data[name]!r:.200}")
        return cls(**data)

    def is_written(self, data: Mapping[str, Any]) -> bool:
        """Whether `data`, JSON that anybody may have written, stands for this problem."""
        return _text(self.to_json()) == _text(data)

    def digest(self) -> str:
        """32 hex digits that name the problem in keys."""
        return hashlib.sha256(_text(self.to_json()).encode()).hexdigest()[:32]

    def __str__(self) -> str:
        """One line for people."""
        given = ", ".join(f"{name}={_short(value)}" for name, value in self.arguments.items() if value is not None)
        return f"{self.symbol}({given}), {self.device}, {'training' if self.training else 'inference'}"


def _text(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and isinstance(value.get("shape"), (list, tuple)):
        return f"{value.get('dtype')} {'x'.join(map(str, value['shape'])) or 'scalar'}"
    if isinstance(value, Mapping) and set(value) == {"number"}:
        return f"any {value['number']}"
    return value if isinstance(value, str) else json.dumps(value)

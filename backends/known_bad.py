"""Rules about numbers that are wrong although the graph builds, and what to do about each.

The shipped ones are in known_bad.toml beside this module, which says how a rule is written; a user's own file
(SIDESTEP_RULES) adds to them. The promises:

- A rule is data. Every condition names a fact of the problem and compares it; nothing of a file is run.
- What a file says wrongly is an error that names the file, the rule and what was expected, never a rule left out.
- A version or architecture that cannot be read, or not be compared with a rule's, lies in every range: a backend is
  rather left out than believed.
- Rules that change a graph are part of the environment that its records are kept for (`identity`), so that no plan or
  failure of the other form is taken for this one. Rules that leave a backend out change nothing that is kept.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..problem import DTYPES
from . import registry

if TYPE_CHECKING:
    from ..problem import AttentionProblem, Mask
    from .base import Direction

SHIPPED = Path(__file__).with_name("known_bad.toml")

# What helps: the next backend of the order, whichever it is, or another form of the graph, for those that can make it.
NEXT_BACKEND, PADDING_MASK, BOUNDED_LOGITS = "next_backend", "padding_mask", "bounded_logits"
_REMEDIES: dict[str, tuple[str, ...] | None] = {
    NEXT_BACKEND: None,
    PADDING_MASK: ("cudnn",),
    BOUNDED_LOGITS: ("cudnn",),
}

Facts = Mapping[str, "str | int"]


class RuleError(ValueError):
    """A file of rules cannot be used; the text names the file, the rule and what was expected."""


def _broadcast(dim: int) -> Callable[[AttentionProblem], bool]:
    """Whether the mask has size 1 where the logits have more."""

    def differs(problem: AttentionProblem) -> bool:
        query, keys = problem.query.shape, problem.key.shape[2]
        return problem.mask is not None and problem.mask.shape[dim] == 1 != (*query[:3], keys)[dim]

    return differs


def _of_mask(read: Callable[[Mask], Any]) -> Callable[[AttentionProblem], Any]:
    return lambda problem: None if problem.mask is None else read(problem.mask)


# The facts that `when` may name. None, for what a problem has not, is equal to nothing.
_FACTS: dict[str, tuple[type, Callable[[AttentionProblem], Any]]] = {
    "dtype": (str, lambda problem: problem.dtype),
    "batch": (int, lambda problem: problem.query.shape[0]),
    "heads": (int, lambda problem: problem.query.shape[1]),
    "kv_heads": (int, lambda problem: problem.key.shape[1]),
    "query_length": (int, lambda problem: problem.query.shape[2]),
    "key_length": (int, lambda problem: problem.key.shape[2]),
    "head_size": (int, lambda problem: problem.query.shape[3]),
    "value_head_size": (int, lambda problem: problem.value.shape[3]),
    "grouped": (bool, lambda problem: problem.grouped),
    "causal": (bool, lambda problem: problem.is_causal),
    "dropout": (bool, lambda problem: problem.dropout_p > 0),
    "deterministic": (bool, lambda problem: problem.deterministic),
    "mask": (bool, lambda problem: problem.mask is not None),
    "mask_dtype": (str, _of_mask(lambda mask: mask.dtype)),
    "mask_gradient": (bool, lambda problem: problem.mask is not None and problem.mask.requires_grad),
    "mask_broadcasts_batch": (bool, _broadcast(0)),
    "mask_broadcasts_heads": (bool, _broadcast(1)),
    "mask_broadcasts_queries": (bool, _broadcast(2)),
    "mask_broadcasts_keys": (bool, _broadcast(3)),
}


_CHOICES = {"dtype": DTYPES, "mask_dtype": ("bool", *DTYPES)}


@dataclass(frozen=True)
class Rule:
    """One rule; known_bad.toml says what each field means."""

    name: str
    backend: str
    effect: str
    remedy: str
    report: str
    reproduced: str
    direction: Direction | None = None
    when: dict[str, Any] = field(default_factory=dict, hash=False)
    versions: dict[str, Any] = field(default_factory=dict, hash=False)
    architecture: Any = None

    @property
    def directions(self) -> tuple[Direction, ...]:
        """What the rule is about."""
        return ("forward", "backward") if self.direction is None else (self.direction,)

    def applies(self, problem: AttentionProblem, facts: Facts) -> bool:
        """Whether `problem` is one of those that the rule is about.

        Args:
            problem: the call.
            facts: of the environment: the backend's versions, and `compute_capability`.
        """
        if self.direction == "backward" and not problem.training:
            return False
        if not all(_holds(_FACTS[name][1](problem), test) for name, test in self.when.items()):
            return False
        required = dict(self.versions)
        if self.architecture is not None:
            if problem.device != "cuda":
                return False
            required["compute_capability"] = self.architecture
        return all(name not in facts or _in_range(facts[name], test) for name, test in required.items())


def _holds(value: Any, test: Any) -> bool:
    """Whether a fact passes one test: a value, a list of values, or an object of operators that must all hold."""
    if value is None:
        return False
    if isinstance(test, list):
        return value in test
    if not isinstance(test, dict):
        return bool(value == test)
    return all(
        (
            "min" not in test or value >= test["min"],
            "max" not in test or value <= test["max"],
            "over" not in test or value > test["over"],
            "mod" not in test or value % test["mod"] == test["is"],
        )
    )


def _in_range(version: str | int, test: Any) -> bool:
    """Whether a version passes a test, or cannot be compared with it: 91900 with "9.19.0", or no number in it."""
    comparable = _version(version) and all(isinstance(value, type(version)) for value in _values(test))
    return not comparable or _holds(_version(version), _versions(test))


def _version(value: str | int) -> tuple[int, ...]:
    """91900 -> (91900,), "2.11.0+cu130" -> (2, 11): versions are compared as numbers, part by part; 2.11 is 2.11.0."""
    if isinstance(value, int):
        return (value,)
    parts = list(map(int, re.findall(r"\d+", value.partition("+")[0])))
    while len(parts) > 1 and not parts[-1]:
        del parts[-1]
    return tuple(parts)


def _versions(test: Any) -> Any:
    if isinstance(test, list):
        return [_version(value) for value in test]
    return {name: _version(value) for name, value in test.items()} if isinstance(test, dict) else _version(test)


# --- files ---


def load(path: Path) -> tuple[Rule, ...]:
    """The rules of a TOML file.

    Raises:
        RuleError: the file cannot be read, is no TOML, or a rule of it says something that no rule can say.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: neither UTF-8 nor TOML
        raise RuleError(f"rules cannot be read from {path}: {error}") from error
    rules = content.get("rule", [])
    if set(content) - {"rule"} or not isinstance(rules, list):
        odd = ", ".join(sorted(set(content) - {"rule"})) or "rule"
        raise RuleError(f"{path}: expected a list of [[rule]] and nothing else, found {odd}")
    made = []
    for place, item in enumerate(rules, 1):
        name = item.get("name") if isinstance(item, dict) else None
        made.append(_rule(item, f"{path}: rule {name!r}" if isinstance(name, str) else f"{path}: rule {place}"))
    return tuple(made)


_TEXTS = ("name", "backend", "effect", "remedy", "report", "reproduced")
_OPTIONAL = ("direction", "when", "versions", "architecture")


def _rule(item: Any, where: str) -> Rule:
    if not isinstance(item, dict):
        raise RuleError(f"{where}: expected a table, got {item!r}")
    _names(item, (*_TEXTS, *_OPTIONAL), where, "field")
    for name in _TEXTS:
        if not isinstance(item.get(name), str) or not item[name]:
            raise RuleError(f"{where}: {name}: expected a text, got {item.get(name)!r}")
    try:
        registry.expand((item["backend"],))
    except ValueError as error:
        raise RuleError(f"{where}: backend: {error}") from error
    if item.get("direction") not in (None, "forward", "backward"):
        raise RuleError(f"{where}: direction: expected 'forward' or 'backward', got {item['direction']!r}")
    _names({item["remedy"]: None}, _REMEDIES, where, "remedy")
    able = _REMEDIES[item["remedy"]]
    if able is not None and item["backend"] not in able:
        raise RuleError(f"{where}: remedy {item['remedy']!r} is one of {', '.join(able)}, not of {item['backend']!r}")
    if item["remedy"] == BOUNDED_LOGITS and item.get("direction") != "backward":
        # The bound is the forward's logsumexp.
        raise RuleError(f"{where}: remedy {BOUNDED_LOGITS!r}: expected direction 'backward'")
    for table in ("when", "versions"):
        if not isinstance(item.get(table, {}), dict):
            raise RuleError(f"{where}: {table}: expected a table, got {item[table]!r}")
    _names(item.get("when", {}), _FACTS, f"{where}: when", "condition")
    for name, test in item.get("when", {}).items():
        _test(test, _FACTS[name][0], f"{where}: when.{name}")
        if odd := [value for value in _values(test) if name in _CHOICES and value not in _CHOICES[name]]:
            raise RuleError(f"{where}: when.{name}: expected one of {', '.join(_CHOICES[name])}, got {odd[0]!r}")
    for name, test in item.get("versions", {}).items():
        first = next(iter(_values(test)), None)
        _version_test(test, int if isinstance(first, int) else str, f"{where}: versions.{name}")
    if "architecture" in item:
        _version_test(item["architecture"], str, f"{where}: architecture")
    return Rule(**item)


def _names(given: Mapping[str, Any], known: Any, where: str, what: str) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise RuleError(f"{where}: unknown {what} {', '.join(map(repr, unknown))}; known: {', '.join(known)}")


def _test(test: Any, kind: type, where: str, operators: tuple[str, ...] | None = None) -> None:
    """Refuse a test that cannot be made on a fact of `kind`; `operators` are those of numbers when None."""
    if isinstance(test, dict):
        if operators is None:
            operators = ("min", "max", "over", "mod", "is") if kind is int else ()
        _names(test, operators, where, "operator")
        if not test or ("mod" in test) != ("is" in test) or test.get("mod") == 0:
            raise RuleError(f"{where}: expected at least one operator, 'mod' (not 0) and 'is' together, got {test!r}")
    for value in _values(test):
        if type(value) is not kind:  # a bool is an int for isinstance
            raise RuleError(f"{where}: expected {_KINDS[kind]}, got {value!r}")
    never = test == []
    if isinstance(test, dict):
        in_order = {name: _version(value) for name, value in test.items()}
        never = "max" in test and (
            in_order.get("min", in_order["max"]) > in_order["max"] or in_order.get("over", ()) >= in_order["max"]
        )
        never = never or ("mod" in test and not 0 <= test["is"] < test["mod"])
    if never:
        raise RuleError(f"{where}: never holds, so the rule would never apply: {test!r}")


def _version_test(test: Any, kind: type, where: str) -> None:
    """The same for a test of versions."""
    _test(test, kind, where, ("min", "max", "over"))
    if odd := [value for value in _values(test) if not _version(value)]:
        raise RuleError(f"{where}: expected a version, as '2.11.0', got {odd[0]!r}")


def _values(test: Any) -> list[Any]:
    """The values that a test compares with."""
    return list(test.values()) if isinstance(test, dict) else test if isinstance(test, list) else [test]


_KINDS = {int: "a whole number", str: "a text", bool: "true or false"}


# --- the rules in force ---


@dataclass(frozen=True)
class RuleFile:
    """A user's file as it was when it was read; as text, its path."""

    path: Path
    rules: tuple[Rule, ...]

    def __str__(self) -> str:
        return str(self.path)


_added: Callable[[], RuleFile | None] = lambda: None  # noqa: E731 - a value until there are settings


def follow(added: Callable[[], RuleFile | None]) -> None:
    """Ask `added`, from now on, for the rules beside the shipped ones: backends know no settings."""
    global _added
    _added = added


@functools.cache
def _shipped() -> tuple[Rule, ...]:
    return load(SHIPPED)


def rules(backend: str) -> tuple[Rule, ...]:
    """The rules in force about one backend."""
    added = _added()
    every = (*_shipped(), *(added.rules if added else ()))
    return tuple(rule for rule in every if backend in registry.GROUPS.get(rule.backend, (rule.backend,)))


def rejections(backend: str, problem: AttentionProblem, facts: Facts) -> tuple[str, ...]:
    """Why rules leave a backend out; empty where none does."""
    return tuple(
        f"{rule.effect} (rule {rule.name}; {rule.report})"
        for rule in rules(backend)
        if rule.remedy == NEXT_BACKEND and rule.applies(problem, facts)
    )


def forms(backend: str, problem: AttentionProblem, facts: Facts) -> dict[Direction, str]:
    """The remedies that change the graphs, by direction; where several rules want one, that of the last."""
    wanted = [rule for rule in rules(backend) if rule.remedy != NEXT_BACKEND and rule.applies(problem, facts)]
    return {direction: rule.remedy for rule in wanted for direction in rule.directions}


def identity(backend: str) -> dict[str, str]:
    """What of the rules a backend's records depend on: a digest of those that change its graphs; empty without."""
    deciding = [
        [rule.remedy, rule.direction, rule.when, rule.versions, rule.architecture]
        for rule in rules(backend)
        if rule.remedy != NEXT_BACKEND
    ]
    if not deciding:
        return {}
    text = json.dumps(sorted(json.dumps(rule, sort_keys=True) for rule in deciding))
    return {"remedies": hashlib.sha256(text.encode()).hexdigest()[:16]}

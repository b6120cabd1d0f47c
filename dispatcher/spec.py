"""SPEC files: attention problems written down in YAML, for a warm-up. Imports no torch.

    defaults: {batch: 2, heads: 16, head_size: 128, dtype: [float16, bfloat16]}
    problems:
      - {query_length: [1024, 4096], causal: true, training: [false, true]}
      - {query_length: 1024, mask: bool, mask_shape: [B, 1, S_q, S_kv]}
      - problem: {...}          # a whole AttentionProblem, as sidestep.record_problems writes it

A field that is a list means every combination.
"""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .errors import InvalidCallError, SidestepError
from .problem import DTYPES, AttentionProblem, Layout, Mask, default_scale
from .semantics import TensorInfo, constant_output, validate

_SIZES = ("batch", "heads", "kv_heads", "query_length", "key_length", "head_size", "value_head_size")
_SWITCHES = ("causal", "training", "mask_grad")
_CHOICES = {
    "dtype": DTYPES,
    "layout": ("bhsd", "bshd"),
    "mask": ("none", "bool", "float32", "same"),
    "device": ("cuda", "cpu"),
}
_REQUIRED = ("batch", "heads", "query_length", "head_size")
_DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "causal": False,
    "training": False,
    "dropout": 0.0,
    "layout": "bhsd",
    "mask": "none",
    "mask_grad": False,
    "mask_shape": [1, 1, "S_q", "S_kv"],
    "scale": None,
    "device": "cuda",
}
FIELDS = (*_SIZES, *_DEFAULTS)
_MOST = 100_000  # combinations of a SPEC; a graph takes 45 ms to 1.5 s to build, so a day's work on one core


class _Loader(yaml.SafeLoader):
    """YAML's plain types; a key that stands twice is an error, where PyYAML takes the last and says nothing."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The mapping as it is written, before `<<` puts others into it."""
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            name = key.tag, str(key.value)
            if name in names:
                raise yaml.composer.ComposerError(None, None, f"{key.value} stands there twice", key.start_mark)
            names.add(name)
        return node


class SpecError(SidestepError, ValueError):
    """A SPEC that cannot be used: which entry, what was wrong, what was expected."""


@dataclass(frozen=True)
class Item:
    """One problem of a SPEC.

    Attributes:
        problem: the problem.
        label: the entry that it came from, `problems[2]`.
        constant: its output is zeros or empty, so no backend is ever asked.
    """

    problem: AttentionProblem
    label: str
    constant: bool


@dataclass(frozen=True)
class Spec:
    """The problems of a SPEC, each once.

    Attributes:
        items: in the file's order.
        skipped: how many combinations of a product cannot be (causal together with a mask; the gradient of a mask
            that is bool or not there).
    """

    items: tuple[Item, ...]
    skipped: int

    def __add__(self, other: Spec) -> Spec:
        """The problems of both."""
        items = {item.problem: item for item in self.items}
        for item in other.items:
            items.setdefault(item.problem, item)
        return Spec(tuple(items.values()), self.skipped + other.skipped)


def load(path: Path) -> Spec:
    """Read a SPEC file.

    Raises:
        SpecError: naming the file, the entry, and what was wrong.
        OSError: the file cannot be read.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (SpecError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: {error}") from error


def parse(text: str) -> Spec:
    """The problems of a SPEC's text.

    Raises:
        SpecError: naming the entry, and what was wrong.
    """
    try:
        data = _Loader(text).get_single_data()
    except yaml.YAMLError as error:  # its text names line and column
        raise SpecError(f"not YAML: {error}") from error
    except RecursionError as error:
        raise SpecError("not a SPEC: lists or mappings in one another hundreds of times") from error
    except ValueError as error:  # a date that is none, a number of too many digits
        raise SpecError(f"not YAML: {error}") from error
    if not isinstance(data, Mapping) or not {"problems"} <= set(data) <= {"defaults", "problems"}:
        found = _short(list(data) if isinstance(data, Mapping) else data) if data else "nothing"
        raise SpecError(f"expected `problems:` and, if wanted, `defaults:`, found {found}")
    defaults, entries = data.get("defaults") or {}, data["problems"]
    _check_fields("defaults", defaults)
    if not isinstance(entries, list) or not entries:
        raise SpecError(f"problems: expected a list with one entry or more, got {_short(entries)}")
    return of_entries(((f"problems[{number}]", entry) for number, entry in enumerate(entries)), defaults)


def of_entries(entries: Iterable[tuple[str, Any]], defaults: Mapping[str, Any] | None = None) -> Spec:
    """The problems of entries.

    Args:
        entries: each with the label that errors and items name it by.
        defaults: fields for entries that leave them out.

    Raises:
        SpecError: naming the entry, and what was wrong.
    """
    items: dict[AttentionProblem, Item] = {}
    skipped = 0
    total = 0
    for label, entry in entries:
        total += _combinations(defaults or {}, entry)
        if total > _MOST:
            raise SpecError(f"{label}: {total} combinations up to here, of {_MOST} at most; make several SPECs of it")
        for problem in _expand(label, defaults or {}, entry):
            if problem is None:
                skipped += 1
            else:
                _check_problem(label, problem)
                items.setdefault(problem, Item(problem, label, constant_output(problem)))
    return Spec(tuple(items.values()), skipped)


def dump(problems: Iterable[AttentionProblem]) -> str:
    """A SPEC's text that holds whole problems, true strides and all; `parse` gives them back."""
    entries = [{"problem": problem.to_json()} for problem in problems]
    return yaml.safe_dump({"problems": entries}, sort_keys=False, default_flow_style=None, width=120)


def problem_of(fields: Mapping[str, Any]) -> AttentionProblem:
    """One problem from a SPEC's fields; those left out have a SPEC's defaults.

    Raises:
        SpecError: what was wrong.
    """
    for problem in _expand("problem", {}, fields):
        assert problem is not None  # only a list lets a combination be skipped
        _check_problem("problem", problem)
        return problem
    raise AssertionError("a combination at least")


def _check_fields(label: str, fields: object) -> None:
    if not isinstance(fields, Mapping):
        raise SpecError(f"{label}: expected fields with values, got {_short(fields)}")
    if unknown := sorted(str(name) for name in fields if name not in FIELDS):
        raise SpecError(f"{label}: unknown field {', '.join(unknown)}; known: {', '.join(FIELDS)}")
    for name, value in fields.items():
        alternatives = _alternatives(name, value)
        if not alternatives:
            raise SpecError(f"{label}: {name}: an empty list means no combination; leave the field out for its default")
        for one in alternatives:
            if expected := _wrong(name, one):
                raise SpecError(f"{label}: {name}: expected {expected}, got {_short(one)}")


def _short(value: object) -> str:
    """The value for an error, cut while it is made: an alias can stand for more than memory holds."""
    return f"{reprlib.repr(value):.80}"


def _alternatives(name: str, value: Any) -> Sequence[Any]:
    """The values that a field may take; a mask's shape is itself a list."""
    if name == "mask_shape":
        return value if isinstance(value, list) and any(isinstance(part, list) for part in value) else [value]
    return value if isinstance(value, list) else [value]


def _wrong(name: str, value: Any) -> str | None:
    """What was expected, where `value` cannot be."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if name in _SIZES:
        return None if type(value) is int and 0 <= value < 2**31 else "a whole number, 0 or more"
    if name in _SWITCHES:
        return None if isinstance(value, bool) else "true or false"
    if name in _CHOICES:
        return None if value in _CHOICES[name] else f"one of {', '.join(_CHOICES[name])}"
    if name == "dropout":
        return None if number else f"a probability, 0 to 1{_not_text(value)}"
    if name == "scale":
        return None if number or value is None else f"a number{_not_text(value)}"
    fits = isinstance(value, list) and len(value) == 4
    fits = fits and all(type(part) is int or part in ("B", "H", "S_q", "S_kv") for part in value)
    return None if fits else "four of: a whole number, B, H, S_q, S_kv"


def _not_text(value: object) -> str:
    return " (YAML takes 1e-1 for a text: write 0.1 or 1.0e-1)" if isinstance(value, str) else ""


def _expand(label: str, defaults: Mapping[str, Any], entry: Any) -> Iterator[AttentionProblem | None]:
    """Every combination of an entry; None for one that a product holds and that cannot be."""
    if isinstance(entry, Mapping) and "problem" in entry:
        if len(entry) > 1:
            raise SpecError(f"{label}: `problem:` holds the whole problem; other fields do not go with it")
        try:
            yield AttentionProblem.from_json(entry["problem"])
        except ValueError as error:
            raise SpecError(f"{label}: {error}") from error
        return
    _check_fields(label, entry)
    fields = {**_DEFAULTS, **defaults, **entry}
    if missing := [name for name in _REQUIRED if name not in fields]:
        raise SpecError(f"{label}: missing field {', '.join(missing)}")
    alternatives = {name: _alternatives(name, value) for name, value in fields.items()}
    for values in itertools.product(*alternatives.values()):
        one = dict(zip(alternatives, values, strict=True))
        names, reason = _impossible(one)
        if not names:
            yield _problem(one)
        elif any(isinstance(fields[name], list) for name in names):
            yield None
        else:
            raise SpecError(f"{label}: {reason}")


def _combinations(defaults: Mapping[str, Any], entry: Any) -> int:
    """How many combinations an entry means; whether it can be one at all is not asked."""
    fields = {**defaults, **entry} if isinstance(entry, Mapping) and "problem" not in entry else {}
    return math.prod(len(_alternatives(name, value)) for name, value in fields.items())


def _impossible(fields: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """The fields that exclude one another, and what to say; no fields where all is well."""
    if fields["causal"] and fields["mask"] != "none":
        return ("causal", "mask"), "causal and a mask cannot be combined: torch refuses such a call"
    if fields["mask_grad"] and fields["mask"] in ("none", "bool"):
        return ("mask_grad", "mask"), f"mask_grad needs a mask of float32 or same, got {fields['mask']}"
    return (), ""


def _problem(fields: Mapping[str, Any]) -> AttentionProblem:
    batch, heads, queries, size = (fields[name] for name in _REQUIRED)
    keys, kv_heads = fields.get("key_length", queries), fields.get("kv_heads", heads)
    training, dtype = fields["training"], fields["dtype"]

    def layout(heads: int, length: int, size: int) -> Layout:
        shape = (batch, heads, length, size)
        if fields["layout"] == "bhsd":
            return Layout.of(shape)
        return Layout.of(shape, (length * heads * size, size, heads * size, 1))

    mask = None
    if fields["mask"] != "none":
        names = {"B": batch, "H": heads, "S_q": queries, "S_kv": keys}
        contiguous = Layout.of([names.get(part, part) for part in fields["mask_shape"]])
        mask_dtype = dtype if fields["mask"] == "same" else fields["mask"]
        mask = Mask(contiguous.shape, contiguous.stride, mask_dtype, training and fields["mask_grad"])
    return AttentionProblem(
        device=fields["device"],
        dtype=dtype,
        query=layout(heads, queries, size),
        key=layout(kv_heads, keys, size),
        value=layout(kv_heads, keys, fields.get("value_head_size", size)),
        mask=mask,
        is_causal=fields["causal"],
        dropout_p=float(fields["dropout"]),
        scale=default_scale(size) if fields["scale"] is None else float(fields["scale"]),
        training=training,
    )


def _check_problem(label: str, problem: AttentionProblem) -> None:
    query, key, value = (TensorInfo(part.shape, problem.dtype) for part in (problem.query, problem.key, problem.value))
    mask = problem.mask
    try:
        validate(
            query,
            key,
            value,
            None if mask is None else TensorInfo(mask.shape, mask.dtype),
            problem.dropout_p,
            problem.is_causal,
            enable_gqa=problem.grouped,
        )
    except InvalidCallError as error:
        raise SpecError(f"{label}: {error}") from error
    # What torch would broadcast is broadcast before a problem is made of it.
    if len({part.shape[0] for part in (query, key, value)}) > 1 or key.shape[1] != value.shape[1]:
        raise SpecError(f"{label}: query, key and value must have one batch size, key and value one number of heads")
    if not math.isfinite(problem.scale):
        raise SpecError(f"{label}: scale: expected a finite number, got {problem.scale}")

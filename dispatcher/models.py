"""Presets: the attention of well-known models, from models.yaml. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .spec import Spec, SpecError, of_entries


@dataclass(frozen=True)
class Model:
    """A preset.

    Attributes:
        source: where its numbers are published.
        problems: a SPEC's entries, without what the caller gives.
        note: what to know when using it; may be empty.
    """

    source: str
    problems: tuple[Mapping[str, Any], ...]
    note: str = ""

    @property
    def lengths_are_given(self) -> bool:
        """The caller chooses the lengths; the model fixes none."""
        return any("query_length" not in fields for fields in self.problems)

    def to_json(self) -> dict[str, Any]:
        """The preset as JSON."""
        return {"source": self.source, "note": self.note, "problems": list(map(dict, self.problems))}


@functools.cache
def models() -> Mapping[str, Model]:
    """Every preset by its name."""
    data = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
    return {name: Model(**{**fields, "problems": tuple(fields["problems"])}) for name, fields in data.items()}


def spec_of(
    names: Sequence[str],
    batch: Sequence[int],
    lengths: Sequence[int],
    dtype: Sequence[str] = ("bfloat16",),
    layout: Sequence[str] = ("bshd",),
    training: Sequence[bool] = (False,),
) -> Spec:
    """The problems of models, in every combination of what is given.

    Args:
        names: of the presets.
        batch: batch sizes.
        lengths: of queries and keys, in tokens; not for a model that fixes its own.
        dtype: as in a SPEC.
        layout: bshd, (B, S, H, D) memory seen as (B, H, S, D), is what the models' projections give.
        training: with gradients and the model's dropout, or without.

    Raises:
        SpecError: an unknown name, lengths that are missing or that no model takes, or a value that cannot be.
    """
    if unknown := [name for name in names if name not in models()]:
        raise SpecError(f"unknown model {', '.join(unknown)}; known: {', '.join(models())}")
    lacking = [name for name in names if models()[name].lengths_are_given]
    if lacking and not lengths:
        raise SpecError(f"{', '.join(lacking)}: how long are the calls? Give --length 2048,4096, say")
    if lengths and not lacking:
        raise SpecError(f"{', '.join(names)}: the model fixes its lengths, so --length does not go with it")
    given = {"batch": list(batch), "dtype": list(dtype), "layout": list(layout)}

    def entries() -> Iterator[tuple[str, dict[str, Any]]]:
        for name in names:
            for number, fields in enumerate(models()[name].problems):
                for trains in training:
                    entry = {"query_length": list(lengths), **given, **fields, "training": trains}
                    if not trains:
                        entry.pop("dropout", None)
                    yield f"{name}[{number}]", entry

    return of_entries(entries())

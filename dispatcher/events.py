"""Counters and the one logger; nothing is printed and no handler is installed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass

logger = logging.getLogger("sidestep")


@dataclass
class Counters:
    """What this process, and the child processes that worked for it, did.

    `calls` and `hits` count calls; the others count while a route is selected. Each is
    changed by a single `+=` on a plain attribute, between whose load and store CPython
    (3.10 and newer, with its lock) does not switch threads.
    """

    calls: int = 0
    hits: int = 0
    selections: int = 0
    builds: int = 0  # graphs whose construction was begun: a forward and a backward are two
    build_failures: int = 0  # refusals and errors met while building or on the first run
    skipped_known_bad: int = 0  # backends passed over because a valid record says that they fail
    fallbacks: int = 0  # selections answered by another backend than the first of the order

    def add(self, others: Mapping[str, int]) -> None:
        """Add the counters of a child process."""
        for name, value in others.items():
            setattr(self, name, getattr(self, name) + value)

    def as_dict(self) -> dict[str, int]:
        """A copy as a plain dictionary."""
        return asdict(self)


counters = Counters()

_said: set[str] = set()


def once(key: str) -> bool:
    """True the first time that `key` is asked about in this process."""
    if key in _said:
        return False
    _said.add(key)
    return True

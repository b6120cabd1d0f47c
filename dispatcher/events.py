"""Counters, subscribers and the one logger; nothing is printed and no handler is installed."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decisions import Decision
    from .problem import AttentionProblem

logger = logging.getLogger("sidestep")


@dataclass
class Counters:
    """What this process, and the child processes that worked for it, did.

    `hits` and `misses` count calls; each is changed by a single `+= 1` on a plain attribute, between whose load and
    store CPython (3.10 and newer, with its lock) does not switch threads. The others count while a route is selected,
    under selection's lock.
    """

    hits: int = 0  # calls that found a route
    misses: int = 0  # all other calls, the refused ones included
    selections: int = 0
    builds: int = 0  # graphs whose construction was begun: a forward and a backward are two
    loads: int = 0  # plans taken from the store in place of being built
    load_failures: int = 0  # stored plans that could not be used, and were dropped
    refused_builds: int = 0  # selections in which a backend was passed over, for nothing could be built
    build_failures: int = 0  # refusals and errors met while building or on the first run
    skipped_known_bad: int = 0  # backends passed over because a valid record says that they fail
    fallbacks: int = 0  # selections answered by another backend than the first of the order

    def add(self, others: Mapping[str, int]) -> None:
        """Add the counters of a child process, as its `as_dict` gave them; from any thread."""
        with _adding:
            for name in asdict(self):
                if others[name]:
                    setattr(self, name, getattr(self, name) + others[name])

    def as_dict(self) -> dict[str, int]:
        """A copy as a plain dictionary, with the calls in all."""
        return {"calls": self.hits + self.misses, **asdict(self)}


_adding = threading.Lock()
counters = Counters()

_said: set[str] = set()


def once(key: str) -> bool:
    """True the first time that `key` is asked about in this process."""
    if key in _said:
        return False
    if len(_said) >= 4096:  # bounded: a long run may say something twice rather than grow
        _said.clear()
    _said.add(key)
    return True


# Told by select() what it decided: on the slow path only.
subscribers: list[Callable[[AttentionProblem, tuple[Decision, ...]], None]] = []


@contextlib.contextmanager
def observe() -> Iterator[list[tuple[AttentionProblem, tuple[Decision, ...]]]]:
    """Collect what is decided in the block, by every thread: (problem, decisions), the serving backend last.

    A call that was decided before decides nothing any more, and adds nothing.
    """
    seen: list[tuple[AttentionProblem, tuple[Decision, ...]]] = []

    def tell(problem: AttentionProblem, decisions: tuple[Decision, ...]) -> None:
        seen.append((problem, decisions))

    subscribers.append(tell)
    try:
        yield seen
    finally:
        subscribers.remove(tell)

"""The state of this process that a test begins with, and its counters. Imports no torch."""

from __future__ import annotations

import dataclasses
import os

import sidestep
from sidestep.settings import Settings


def reload_settings() -> None:
    """Read the environment anew, as a new process would; routes and plans go, and the store is opened again."""
    current = Settings.from_environ(os.environ)
    sidestep.configure(**{field.name: getattr(current, field.name) for field in dataclasses.fields(current)})


class Counters:
    """What `sidestep.stats()` grew by since the test began, or since `reset()`."""

    calls: int
    hits: int
    selections: int
    builds: int
    build_failures: int
    skipped_known_bad: int
    fallbacks: int

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Count from here."""
        self._start = sidestep.stats()

    def __getattr__(self, name: str) -> int:
        return sidestep.stats()[name] - self._start[name]

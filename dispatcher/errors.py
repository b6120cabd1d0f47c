"""The exceptions that Sidestep raises on its own account."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decisions import Decision


class SidestepError(Exception):
    """The base of every exception below."""


class InvalidCallError(SidestepError, ValueError, RuntimeError):
    """The caller's mistake: no backend was tried and nothing was recorded.

    A RuntimeError too, because that is what torch raises for the same call.
    """


class SettingError(SidestepError, ValueError):
    """A setting, or the environment variable behind it, has a value that cannot be used."""


class NoBackendError(SidestepError, NotImplementedError):
    """No backend of the order could serve the call; the text gives every backend's reason.

    Attributes:
        decisions: what was decided about each backend, in the order in which they were asked.
    """

    def __init__(self, message: str, decisions: Sequence[Decision] = ()) -> None:
        """Keep `decisions` beside the text."""
        super().__init__(message)
        self.decisions = tuple(decisions)


class DeviceLostError(SidestepError, RuntimeError):
    """A CUDA error that no later call in this process survives; raised from the error that showed it."""

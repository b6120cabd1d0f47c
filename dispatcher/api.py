"""Process-wide functions that need no torch: counters and settings."""

from __future__ import annotations

import sys
from typing import Any

from . import settings, stores
from .events import counters


def stats() -> dict[str, int]:
    """What this process did so far.

    Returns:
        calls and hits count calls; selections, builds (graphs begun), build_failures, skipped_known_bad and
        fallbacks (answered by another backend than the first of the order) count what selections did.
    """
    return counters.as_dict()


def configure(**values: Any) -> None:
    """Change settings for this process, and drop every route and plan.

    Args:
        **values: backends (names, in order), cache ('disk' or 'off'), cache_dir, plan_bytes,
            build ('always' or 'never'), strict, verify.

    Raises:
        SettingError: an unknown name or a value that cannot be used.
    """
    settings.change(values)
    stores.reset()
    selection = sys.modules.get(f"{__package__}.selection")
    if selection is not None:  # otherwise there is nothing to drop, and torch need not be imported for it
        selection.forget_plans()

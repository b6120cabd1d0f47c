"""Sidestep: scaled dot-product attention by the first backend that really can.

Nothing happens at import: no CUDA, no file, no environment variable; neither torch nor cudnn is imported
before a name that needs them is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import configure, stats
    from .attention import scaled_dot_product_attention, use_backends
    from .drop_in import install, installed, uninstall
    from .errors import DeviceLostError, InvalidCallError, NoBackendError, SettingError, SidestepError
    from .events import observe
    from .plans import refuse_builds
    from .recording import record_problems

_HOMES = {
    "DeviceLostError": "errors",
    "InvalidCallError": "errors",
    "NoBackendError": "errors",
    "SettingError": "errors",
    "SidestepError": "errors",
    "configure": "api",
    "install": "drop_in",
    "installed": "drop_in",
    "observe": "events",
    "record_problems": "recording",
    "refuse_builds": "plans",
    "scaled_dot_product_attention": "attention",
    "stats": "api",
    "uninstall": "drop_in",
    "use_backends": "attention",
}
__all__ = [
    "DeviceLostError",
    "InvalidCallError",
    "NoBackendError",
    "SettingError",
    "SidestepError",
    "configure",
    "install",
    "installed",
    "observe",
    "record_problems",
    "refuse_builds",
    "scaled_dot_product_attention",
    "stats",
    "uninstall",
    "use_backends",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

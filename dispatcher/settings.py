"""Every SIDESTEP_* variable, in one typed table.

They are read once, at first use; `sidestep.configure` changes them afterwards.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .backends import registry
from .errors import SettingError

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    registry.expand(names)
    return names


def _switch(text: str) -> bool:
    if text.lower() not in _TRUE | _FALSE:
        raise ValueError("expected 1 or 0")
    return text.lower() in _TRUE


def _cache(text: str) -> str:
    if text not in ("off", "disk"):
        raise ValueError("expected 'disk' or 'off'")
    return text


def _bytes(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("expected a number of bytes")
    return int(text)


def _build(text: str) -> str:
    if text not in ("always", "never"):
        raise ValueError("expected 'always' or 'never'")
    return text


def _path(text: str) -> Path | None:
    return Path(text).expanduser().absolute() if text else None


def _paths(text: str) -> tuple[str, ...]:
    return tuple(str(Path(path.strip()).expanduser().absolute()) for path in text.split(",") if path.strip())


def _setting(default: Any, variable: str, parse: Callable[[str], Any], meaning: str) -> Any:
    return field(default=default, metadata={"variable": variable, "parse": parse, "meaning": meaning})


@dataclass(frozen=True)
class Settings:
    """The settings of a process; each field's metadata names its variable and says what it means."""

    backends: tuple[str, ...] = _setting(
        ("cudnn", "nvfuser", "torch"),
        "SIDESTEP_BACKENDS",
        _names,
        "names in the order in which they are tried, separated by commas; one name is strict (no fallback)",
    )
    cache: str = _setting("disk", "SIDESTEP_CACHE", _cache, "'disk', or 'off' for memory only")
    cache_dir: Path | None = _setting(
        None, "SIDESTEP_CACHE_DIR", _path, "the folder of the disk cache; the user's cache folder when empty"
    )
    plan_bytes: int = _setting(
        2**31,
        "SIDESTEP_PLAN_BYTES",
        _bytes,
        "bytes of built plans on disk (a plan has some 30 kB for each direction); the oldest make room",
    )
    bundle: tuple[str, ...] = _setting(
        (),
        "SIDESTEP_BUNDLE",
        _paths,
        "bundles (`sidestep cache export`) read beneath the cache, separated by commas; the first has precedence",
    )
    build: str = _setting(
        "always",
        "SIDESTEP_BUILD",
        _build,
        "'always', or 'never': what would have to be built goes to a backend that needs no build, as when serving",
    )
    strict: bool = _setting(
        False, "SIDESTEP_STRICT", _switch, "1 raises an exception of kind `error` instead of falling back"
    )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read every variable that is set.

        Raises:
            SettingError: naming the variable, its value and what was expected.
        """
        values = {}
        for setting in fields(cls):
            variable = setting.metadata["variable"]
            if variable in environ:
                values[setting.name] = _parsed(variable, environ[variable], setting.metadata["parse"])
        return cls(**values)

    def to_environ(self) -> dict[str, str]:
        """The variables that give another process these settings."""
        result = {}
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, tuple):
                value = ",".join(value)
            elif isinstance(value, bool):
                value = int(value)
            result[setting.metadata["variable"]] = "" if value is None else str(value)
        return result

    def directory(self) -> Path:
        """The folder of the disk cache."""
        if self.cache_dir is not None:
            return self.cache_dir
        import platformdirs

        return Path(platformdirs.user_cache_dir("sidestep", appauthor=False))


def _parsed(variable: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise SettingError(f"{variable}={text!r}: {error}") from None


_lock = threading.Lock()
_current: Settings | None = None


def get() -> Settings:
    """The settings in force, read from the environment at the first call."""
    global _current
    if _current is None:
        with _lock:
            _current = _current or Settings.from_environ(os.environ)
    return _current


def change(values: Mapping[str, Any]) -> Settings:
    """Put `values` in force. Text is parsed as the variable would be.

    Raises:
        SettingError: for an unknown name or a value that cannot be used.
    """
    global _current
    table = {setting.name: setting.metadata for setting in fields(Settings)}
    if unknown := sorted(set(values) - set(table)):
        raise SettingError(f"unknown setting {', '.join(unknown)}; known: {', '.join(table)}")
    parsed = {}
    for name, value in values.items():
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if isinstance(text, (list, tuple)):
            text = ",".join(map(str, text))
        elif isinstance(text, bool):
            text = str(int(text))
        elif not isinstance(text, str):
            text = "" if text is None else str(text)
        parsed[name] = _parsed(f"configure({name}=...)", text, table[name]["parse"])
    updated = replace(get(), **parsed)
    with _lock:
        _current = updated
    return updated

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

from .backends import known_bad, registry
from .cache import open_remote, redacted
from .errors import SettingError
from .events import logger, once

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
    if text != "off" and (text == "disk" or "://" in text):
        open_remote(text)  # connects to nothing; an URL that cannot be used is told now, not in the first call
    elif text != "off":
        raise ValueError(
            "expected 'disk' or 'off', or the URL of a Redis-protocol server (redis://, rediss://, unix://)"
        )
    return text


def _bytes(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("expected a number of bytes")
    return int(text)


def _build(text: str) -> str:
    if text not in ("always", "never"):
        raise ValueError("expected 'always' or 'never'")
    return text


def _show_cache(text: str) -> str:
    return redacted(text) if ":" in text else text


def _key(text: str) -> str | None:
    return text or None


def _path(text: str) -> Path | None:
    return Path(text).expanduser().absolute() if text else None


def _paths(text: str) -> tuple[str, ...]:
    return tuple(str(Path(path.strip()).expanduser().absolute()) for path in text.split(",") if path.strip())


def _rules(text: str) -> known_bad.RuleFile | None:
    path = _path(text)
    return None if path is None else known_bad.RuleFile(path, known_bad.load(path))


def _setting(
    default: Any, variable: str, parse: Callable[[str], Any], meaning: str, show: Callable[[str], str] = str
) -> Any:
    """A field; `show` leaves out of the variable's text what nobody but its reader may see."""
    return field(default=default, metadata={"variable": variable, "parse": parse, "meaning": meaning, "show": show})


@dataclass(frozen=True)
class Settings:
    """The settings of a process; each field's metadata names its variable and says what it means."""

    backends: tuple[str, ...] = _setting(
        ("cudnn", "nvfuser", "torch"),
        "SIDESTEP_BACKENDS",
        _names,
        "names in the order in which they are tried, separated by commas; one name is strict (no fallback)",
    )
    cache: str = _setting(
        "disk",
        "SIDESTEP_CACHE",
        _cache,
        "'disk', 'off' for memory only, or redis://[[user]:password@]host[:port][/db], a server that machines share",
        _show_cache,
    )
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
    signing_key: str | None = _setting(
        None,
        "SIDESTEP_SIGNING_KEY",
        _key,
        "a secret that the machines sharing a server have in common: plans from it load only when signed with it",
        lambda text: "***" if text else "",
    )
    strict: bool = _setting(
        False, "SIDESTEP_STRICT", _switch, "1 raises an exception of kind `error` instead of falling back"
    )
    verify: bool = _setting(
        False,
        "SIDESTEP_VERIFY",
        _switch,
        "1 compares each configuration's output and gradients with float64 attention before it is first used",
    )
    rules: known_bad.RuleFile | None = _setting(
        None, "SIDESTEP_RULES", _rules, "a TOML file of known-bad rules, in the form of backends/known_bad.toml"
    )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read every variable that is set; one warning for each SIDESTEP_* that is none.

        Raises:
            SettingError: naming the variable, its value and what was expected.
        """
        values = {}
        for setting in fields(cls):
            variable = setting.metadata["variable"]
            if variable in environ:
                values[setting.name] = _parsed(variable, environ[variable], setting.metadata)
        known = [setting.metadata["variable"] for setting in fields(cls)]
        for name in environ:
            if name.startswith("SIDESTEP_") and name not in known and once(f"no setting {name}"):
                import difflib

                meant = difflib.get_close_matches(name, known, 1, 0.8)
                hint = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(known)}"
                logger.warning("%s is no setting of this version and does nothing: %s", name, hint)
        return cls(**values)

    def __repr__(self) -> str:
        """The fields, without secrets."""
        return f"Settings({', '.join(f'{setting.name}={self.shown(setting.name)!r}' for setting in fields(self))})"

    def shown(self, name: str) -> Any:
        """The value of a field as it may be shown; the others are as they are."""
        value = getattr(self, name)
        show = next(setting.metadata["show"] for setting in fields(self) if setting.name == name)
        return value if show is str or value is None else show(value)

    def to_environ(self) -> dict[str, str]:
        """The variables that give another process these settings, secrets included."""
        result = {}
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, tuple):
                value = ",".join(value)
            elif isinstance(value, bool):
                value = int(value)
            result[setting.metadata["variable"]] = "" if value is None else str(value)
        return result

    def disk(self) -> Path | None:
        """The folder of the disk cache; None when nothing is kept."""
        return None if self.cache == "off" else self.directory()

    def directory(self) -> Path:
        """The folder of the disk cache, if there is to be one."""
        if self.cache_dir is not None:
            return self.cache_dir
        import platformdirs

        return Path(platformdirs.user_cache_dir("sidestep", appauthor=False))


def _parsed(variable: str, text: str, metadata: Mapping[str, Any]) -> Any:
    try:
        return metadata["parse"](text)
    except ValueError as error:
        # Of an URL that cannot be used nobody knows which part is the password.
        shown = repr(text) if metadata["show"] is str or ":" not in text else "***"
        raise SettingError(f"{variable}={shown}: {error}") from None


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
        parsed[name] = _parsed(f"configure({name}=...)", text, table[name])
    updated = replace(get(), **parsed)
    with _lock:
        _current = updated
    return updated


known_bad.follow(lambda: get().rules)

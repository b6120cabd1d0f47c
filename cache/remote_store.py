"""A store on a Redis-protocol server that the machines of a fleet share.

Promises. The server is a peer like any other on the network: what it says is bounded in size and checked before it goes
further, a failure record by its frame and its key, a plan, which is native code, by an HMAC that only those who hold
the signing key can make. It may be away, slow or full: no answer is waited for longer than a short time-out, a server
that gave none is left alone for a while, and one warning says so. No text that leaves here holds a password.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from .records import DAY, DamagedRecordError, FailureRecord
from .store import AwayError, check_item, redacted

logger = logging.getLogger("sidestep")

_TIMEOUT = 0.2  # seconds to connect, and for each answer; a server in the same building needs less than a millisecond
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds for which a server that gave no answer is left alone
_LONGEST_LISTING = 5.0  # seconds of SCAN
_PAGE = 1000  # keys looked at by one SCAN: the server does nothing else meanwhile
_TO_LIVE = 90 * DAY  # of what has no time of its own
_LONGEST_KEY = 1024
# A traceback has some kilobytes, a serialized graph some megabytes.
_LONGEST = {"failure/": 2**22, "plan/": 2**26}

_EXPECTED = (
    "expected redis://[[user]:password@]host[:port][/db], rediss:// likewise for TLS, or "
    "unix://[[user]:password@]/path/to/socket; special characters in a password as %XX; options of the redis client, "
    "and prefix=NAME, after a '?'"
)

# Clients of a parent process: a child that let the garbage collector close them could wait for a lock of theirs.
_of_parents: list[Any] = []


class RemoteStore:
    """Failure records and signed plans on a server, under ``<prefix>:<key>``, connected at the first use.

    Every method but `close` raises AwayError while the server does not answer. A value that may not be kept there (not
    a failure record or a plan, too large, without a signing key) is not written, and not an error.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``. Its query is the redis client's (``socket_timeout``,
            ``socket_connect_timeout``, ...), and ``prefix``, the first part of every key, "sidestep" when left out.
        signing_key: Plans are signed and verified with it; without one they are neither written nor read.

    Raises:
        ValueError: The URL cannot be used, or the package `redis` is missing. The text does not hold the URL.
    """

    def __init__(self, url: str, signing_key: str | None = None) -> None:
        self._place = redacted(url)
        self._options = _options(url)
        self._prefix = f"{self._options.pop('prefix', 'sidestep')}:"
        self._secrets = [str(value) for name, value in self._options.items() if "password" in name]
        # As the variable's bytes, whatever the locale makes of them.
        self._signing_key = signing_key.encode(errors="surrogateescape") if signing_key else None
        self._opened: tuple[int, Any] | None = None
        self._lock = threading.Lock()
        self._pause = 0.0
        self._away_until = 0.0
        self._said: set[str] = set()
        self._connect()  # options that the client does not know are told now

    def __repr__(self) -> str:
        """The class and the place, without secrets."""
        return f"{type(self).__name__}({self._place})"

    def get(self, key: str) -> bytes | None:
        """Return the value, or None; a plan without its signature."""
        check_item(key)
        kind = self._kind(key)
        if kind is None:
            return None
        limit = _LONGEST[kind]
        with self._client() as client:
            try:
                # No more than the limit is asked for, and nothing is the same as an empty value.
                value = client.getrange(self._prefix + key, 0, limit)
            except _redis().ResponseError as error:
                if not str(error).startswith("WRONGTYPE"):
                    raise
                return None
        if not isinstance(value, bytes) or not value:
            return None
        if len(value) > limit:
            self._say(logging.INFO, f"{key}: more than {limit} bytes on the cache server {self._place}; passed over")
            return None
        if kind == "failure/":
            return value if _parsed(key, value) else None
        signature, _, plan = value.partition(b"\n")
        if hmac.compare_digest(signature, self._signature(key, plan)):
            return plan
        self._say(
            logging.WARNING,
            f"A plan on the cache server {self._place} is not signed with this process's SIDESTEP_SIGNING_KEY: it is"
            " not used. Give all that share the server the same key, or another prefix; if they have, somebody else"
            f" writes there. The first such plan: {key}",
        )
        return None

    def set(self, key: str, value: bytes) -> None:
        """Store the value until its time to be tried again, or for 90 days."""
        check_item(key, value)
        kind = self._kind(key)
        if kind is None or not value:
            return
        seconds = _TO_LIVE
        if kind == "failure/":
            record = _parsed(key, value)
            if record is None:
                return
            retry_time = record.retry_time()
            if retry_time is not None:
                seconds = min(retry_time - time.time(), _TO_LIVE)
        else:
            value = self._signature(key, value) + b"\n" + value
        if seconds < 1:
            return
        if len(value) > _LONGEST[kind] or len(key.encode()) > _LONGEST_KEY:
            self._say(logging.INFO, f"{key}: too large for the cache server {self._place}; not written there")
            return
        with self._client() as client, self._refusals():
            client.set(self._prefix + key, value, ex=int(seconds))

    def delete(self, key: str) -> bool:
        """Delete the value; return whether there was one."""
        check_item(key)
        if self._kind(key) is None:
            return False
        with self._client() as client, self._refusals():
            return bool(client.delete(self._prefix + key))
        return False

    def keys(self, prefix: str = "", newest_first: bool | None = False) -> Iterator[str]:
        """Iterate over the keys that begin with `prefix`, in no order, as far as five seconds of SCAN go."""
        start = self._prefix + prefix
        pattern = re.sub(r"([][*?\\^-])", r"\\\1", start) + "*"
        seen: set[str] = set()
        cursor, spent = 0, 0.0
        while True:
            clock = time.monotonic()
            with self._client() as client:
                cursor, names = client.scan(cursor, match=pattern, count=_PAGE)
            spent += time.monotonic() - clock
            for name in names:
                key = _key(name, start)
                if key is not None and key not in seen and self._kind(key.removeprefix(self._prefix)):
                    seen.add(key)
                    yield key.removeprefix(self._prefix)
            if cursor == 0:
                return
            if spent > _LONGEST_LISTING:
                logger.warning(
                    "the listing of the cache server %s ends after %g s; there may be more", self._place, spent
                )
                return

    def close(self) -> None:
        """Close this process's connections."""
        if self._opened and self._opened[0] == os.getpid():
            with contextlib.suppress(*_trouble()):
                self._opened[1].close()

    def _kind(self, key: str) -> str | None:
        """Return the kind of the key, if it may be kept here."""
        kind = next((kind for kind in _LONGEST if key.startswith(kind)), None)
        if kind == "plan/" and self._signing_key is None:
            self._say(
                logging.INFO,
                f"plans are neither written to nor read from the cache server {self._place}: no SIDESTEP_SIGNING_KEY",
            )
            return None
        return kind

    def _signature(self, key: str, value: bytes) -> bytes:
        assert self._signing_key is not None
        # The key is in it, so that one plan cannot be served for another; its length, so that it ends where it ends.
        name = key.encode()
        made = hmac.new(self._signing_key, b"sidestep plan %d:%s" % (len(name), name), hashlib.sha256)
        made.update(value)
        return made.hexdigest().encode()

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        if time.monotonic() < self._away_until:
            raise AwayError(f"the cache server {self._place} did not answer a moment ago")
        try:
            if self._opened and self._opened[0] != os.getpid():
                _of_parents.append(self._opened[1])
                self._opened = None
            if self._opened is None:
                self._opened = os.getpid(), self._connect()
            yield self._opened[1]
        except _trouble() as error:
            text = f"{type(error).__name__}: {self._without_secrets(error)}"
            self._leave_alone(text)
            raise AwayError(f"the cache server {self._place} does not answer: {text}") from None
        with self._lock:
            back, self._pause = self._pause > 0, 0.0
        if back:
            logger.info("the cache server %s answers again", self._place)

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """A server that answers, and refuses to write (full, read-only), may still be read."""
        try:
            yield
        except _redis().ResponseError as error:
            self._say(
                logging.WARNING,
                f"The cache server {self._place} refuses to be written to: {self._without_secrets(error)}. What it"
                " holds is still read. Give it memory (maxmemory), or a user that may write.",
                "refusal",
            )

    def _leave_alone(self, cause: str) -> None:
        now = time.monotonic()
        with self._lock:
            if now < self._away_until:  # another thread was told the same
                return
            self._pause = min(2 * self._pause, _LONGEST_PAUSE) or _FIRST_PAUSE
            # Not all of a fleet at the same moment.
            self._away_until = now + self._pause * random.uniform(0.5, 1)
        self._say(
            logging.WARNING,
            f"The cache server {self._place} does not answer: {cause}. Records are kept on this machine only until it"
            " does; it is tried again in a second, later once a minute. Check SIDESTEP_CACHE (host, user, password),"
            " the network and the server (redis-cli ping), or set SIDESTEP_CACHE=disk.",
            "away",
        )

    def _say(self, level: int, text: str, what: str | None = None) -> None:
        """Log a text, or the first of those that say `what`, once."""
        what = what or text.partition(f" {self._place}")[0]
        with self._lock:
            first = what not in self._said and len(self._said) < 100
            self._said.add(what)
        if first:
            logger.log(level, "%s", text)

    def _without_secrets(self, error: BaseException) -> str:
        """The error's text, which may be the server's own, cut, printable, and without passwords."""
        text = str(error).rstrip(".")
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return "".join(char if char.isprintable() else " " for char in text[:300])

    def _connect(self) -> Any:
        redis = _redis()
        from redis.connection import Connection

        options = {**self._options}
        pool = redis.ConnectionPool(connection_class=options.pop("connection_class", Connection), **options)
        try:
            pool.connection_class(**pool.connection_kwargs)
        except (TypeError, ValueError, redis.RedisError) as error:
            raise ValueError(
                f"the redis client refuses an option of the URL ({self._without_secrets(error)}); {_EXPECTED}"
            ) from None
        return redis.Redis(connection_pool=pool)


def _redis() -> Any:
    try:
        import redis
    except ModuleNotFoundError:
        raise ValueError("the package redis is not installed: pip install 'sidestep[redis]'") from None
    return redis


def _trouble() -> tuple[type[BaseException], ...]:
    # Beside its own exceptions the client raises what parsing the answer of a server gone mad raises.
    redis = _redis()
    return (redis.RedisError, redis.exceptions.ChildDeadlockedError, OSError, ValueError, TypeError, RecursionError)


def _options(url: str) -> dict[str, Any]:
    """Return the arguments of a connection.

    Raises:
        ValueError: Without the URL, which may hold a password, in its text.
    """
    _redis()
    from redis.backoff import NoBackoff
    from redis.connection import parse_url
    from redis.retry import Retry

    try:
        parts = urlsplit(url)
        given: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ValueError(f"not an URL that can be used; {_EXPECTED}") from None
    # A '/', '#' or '?' in a password ends the host's part of an URL: the client would connect to something else.
    is_file = parts.scheme == "unix"
    place = parts.path if is_file else parts.hostname
    misread = parts.fragment or "@" in parts.query or not (is_file or re.fullmatch(r"/?\d*", parts.path))
    if not place or misread:
        raise ValueError(f"not an URL that can be used; {_EXPECTED}")
    # RESP2: no handshake beyond what a password and a database number need.
    defaults = {"socket_timeout": _TIMEOUT, "socket_connect_timeout": _TIMEOUT, "protocol": 2}
    return {**defaults, **given, "decode_responses": False, "retry": Retry(NoBackoff(), 0)}


def _parsed(key: str, value: bytes) -> FailureRecord | None:
    try:
        record = FailureRecord.from_bytes(value)
    except DamagedRecordError:
        return None
    return record if record.key == key else None


def _key(name: object, start: str) -> str | None:
    """The key of a name that a listing gave, if it is one that was asked for."""
    if not isinstance(name, bytes) or len(name) > _LONGEST_KEY + len(start.encode()):
        return None
    try:
        key = name.decode()
    except UnicodeDecodeError:
        return None
    return key if key.startswith(start) else None

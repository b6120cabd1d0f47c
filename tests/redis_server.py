"""A real Redis-protocol server of a test's own: redis-server, or valkey-server."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Server:
    """A server that keeps nothing on disk, listening on a socket in `folder` and on a port of this machine.

    Args:
        folder: Short: a socket's path has 107 bytes at most.
        options: The server's own, as ``"--requirepass", "secret"``.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        assert binary, "these tests need a Redis-protocol server: apt-get install redis-server (or valkey)"
        self.socket = folder / "socket"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket)]
        self._command += ["--save", "", "--appendonly", "no", "--dir", str(folder), *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Its socket."""
        return f"unix://{self.socket}"

    def start(self) -> None:
        """Start it, empty, and wait until it listens."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
                client.connect(str(self.socket))
                return
            assert self._process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It listens, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.thaw()

    def thaw(self) -> None:
        """End `frozen`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self, **options: Any) -> Any:
        """A client that does what the test wants."""
        import redis

        return redis.Redis(unix_socket_path=str(self.socket), **options)


@contextlib.contextmanager
def running(*options: str) -> Iterator[Server]:
    """A server for a block."""
    with tempfile.TemporaryDirectory(prefix="sidestep-redis-") as folder:
        server = Server(Path(folder), *options)
        try:
            yield server
        finally:
            server.stop()

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

PATIENCE = "socket_timeout=300&socket_connect_timeout=300"


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
        self.port = 0
        self._command = [binary, "--bind", "127.0.0.1", "--unixsocket", str(self.socket)]
        self._command += ["--save", "", "--appendonly", "no", "--dir", str(folder), *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def hasty_url(self) -> str:
        """Its socket, with the time-outs that users have: on a busy machine a server may miss them."""
        return f"unix://{self.socket}"

    @property
    def url(self) -> str:
        """Its socket, and all the time that a busy machine needs."""
        return f"{self.hasty_url}?{PATIENCE}"

    def start(self) -> None:
        """Start it, empty, and wait until it listens."""
        for _ in range(20):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
            self._process = subprocess.Popen([*self._command, "--port", str(self.port)], stdout=subprocess.DEVNULL)
            deadline = time.monotonic() + 300
            while self._process.poll() is None:  # it ends by itself where another program has taken the port meanwhile
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
                    client.connect(str(self.socket))
                    return
                assert time.monotonic() < deadline, "the server does not listen"
                time.sleep(0.01)
        raise AssertionError("the server ended")

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

"""What a thousand clients of one cache server cost: look-ups a second, latencies, the server's work and memory.

    python scripts/bench_fleet.py [--clients 1000] [--output docs/benchmarks.json]

Needs redis-server or valkey-server, and starts its own. Every client is a thread with a store and a connection of its
own, over a few processes, on the server's machine: "all at once" is bounded by the clients' Python on that machine's
cores, so the server's own CPU time for each look-up is reported too. Time-outs are long here, and what took longer than
the usual one is counted. Results go under the key "fleet" of the output.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import multiprocessing
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sidestep.cache import FailureRecord, failure_key
from sidestep.cache.remote_store import RemoteStore
from sidestep.scripts import report

PROCESSES = 8
RECORDS = 10_000
TIMEOUT_S, USUAL_TIMEOUT_S = 60, 0.2
EACH = 50  # look-ups of a client in a phase in which all ask at once
PACED_S, PERIOD_S = 20.0, 1.0  # every client asks once a second: far more than a job does, which asks when it builds
PHASES = ("first look-up (connects)", "hit, all at once", "miss, all at once", "hit, paced", "miss, paced")
TRACEBACK = '  File "sidestep/backends/cudnn_graph.py", line 100, in build\n    graph.build_plans()\n' * 40


def record(number: int) -> FailureRecord:
    """A record of the usual size, 4 kB."""
    now = time.time()
    return FailureRecord(
        key=failure_key("0" * 16, "cudnn", f"{number:016x}"),
        kind="unsupported",
        backend="cudnn",
        direction="backward",
        stage="build",
        exception_type="cudnn.cudnnGraphNotSupportedError",
        exception_text="No valid engine configs for Matmul_ADD_Reduction_SUB_EXP_",
        traceback=TRACEBACK,
        problem={"query": [[2, 16, 4096, 128]] * 6},
        environment={"cudnn": 91900, "device": "NVIDIA H200"},
        first_time=now,
        last_time=now,
        count=1,
        duration=0.7,
        built_on="local",
    )


@contextlib.contextmanager
def running_server() -> Iterator[tuple[str, Any]]:
    """The URL of a new, empty server, and a client of it."""
    import redis

    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise SystemExit("bench_fleet needs a Redis-protocol server: apt-get install redis-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            client = redis.Redis(port=port)
            for _ in range(300):
                with contextlib.suppress(redis.ConnectionError):
                    client.ping()
                    break
                time.sleep(0.1)
            yield f"redis://127.0.0.1:{port}", client
        finally:
            server.kill()
            server.wait()


def look_up(store: RemoteStore, key: str, latencies: list[float]) -> None:
    """One look-up."""
    clock = time.perf_counter()
    store.get(key)
    latencies.append(time.perf_counter() - clock)


def a_client(url: str, barrier: threading.Barrier, report: Any) -> None:
    """The first look-up, which connects, then hits and misses at once and at a client's own pace."""
    store = RemoteStore(f"{url}?socket_timeout={TIMEOUT_S}&socket_connect_timeout={TIMEOUT_S}")
    found: dict[str, list[float]] = {name: [] for name in PHASES}

    def key(hit: bool) -> str:
        return record(random.randrange(RECORDS) + (0 if hit else RECORDS)).key

    for name in PHASES:
        hit, keys = "hit" in name, [key("hit" in name) for _ in range(EACH)]
        barrier.wait()
        if name == "first look-up (connects)":
            look_up(store, keys[0], found[name])
        elif "paced" in name:
            end = time.monotonic() + PACED_S
            time.sleep(random.uniform(0, PERIOD_S))
            while time.monotonic() < end:
                look_up(store, key(hit), found[name])
                time.sleep(PERIOD_S)
        else:
            for one in keys:
                look_up(store, one, found[name])
        barrier.wait()  # all are done
    report(found)
    barrier.wait()  # connected until the server's memory was read
    store.close()


def a_process(url: str, clients: int, barrier: Any, results: Any) -> None:
    """Some of the clients, each a thread."""
    local = threading.Barrier(clients, action=barrier.wait)  # the last thread here waits for the other processes
    found: list[dict[str, list[float]]] = []
    threads = [threading.Thread(target=a_client, args=(url, local, found.append)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    while len(found) < clients:
        time.sleep(0.05)
    results.put({name: [seconds for one in found for seconds in one[name]] for name in PHASES})
    for thread in threads:
        thread.join()


def usage(client: Any) -> dict[str, float]:
    """The server's CPU seconds and memory."""
    info = client.info()
    return {
        "cpu": info["used_cpu_user"] + info["used_cpu_sys"],
        "memory": info["used_memory"],
        "rss": info["used_memory_rss"],
        "clients": info["connected_clients"],
    }


def main() -> int:
    """Run the phases, print a table, add the results to the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=report.PLACE)
    arguments = parser.parse_args()
    clients = arguments.clients // PROCESSES * PROCESSES
    with running_server() as (url, client):
        empty = usage(client)
        store = RemoteStore(url)
        for number in range(RECORDS):
            store.set(record(number).key, record(number).to_bytes())
        store.close()
        filled = usage(client)
        context = multiprocessing.get_context("spawn")
        barrier, results = context.Barrier(PROCESSES + 1), context.Queue()
        arguments_each = (url, clients // PROCESSES, barrier, results)
        workers = [context.Process(target=a_process, args=arguments_each) for _ in range(PROCESSES)]
        for worker in workers:
            worker.start()
        spans: dict[str, tuple[float, float]] = {}
        for name in PHASES:
            barrier.wait()
            before, clock = usage(client), time.perf_counter()
            barrier.wait()
            spans[name] = time.perf_counter() - clock, usage(client)["cpu"] - before["cpu"]
        found = [results.get() for _ in workers]
        full = usage(client)
        barrier.wait()
        for worker in workers:
            worker.join()
        version = client.info("server")
    fleet: dict[str, Any] = {
        **report.circumstances(),
        "server": f"{version.get('server_name', 'redis')} {version['redis_version']}",
        "redis_py": importlib.metadata.version("redis"),
        "clients": clients,
        "connections": int(full["clients"]) - 1,
        "records": RECORDS,
        "record_bytes": len(record(0).to_bytes()),
        "server_bytes_per_record": round((filled["memory"] - empty["memory"]) / RECORDS),
        "server_bytes_per_connection": round((full["memory"] - filled["memory"]) / clients),
        "server_rss_mb": round(full["rss"] / 2**20, 1),
        "lookups": {},
    }
    for name in PHASES:
        seconds, cpu = spans[name]
        latencies = sorted(one for part in found for one in part[name])
        fleet["lookups"][name] = {
            "lookups": len(latencies),
            "per_second": round(len(latencies) / seconds),
            "median_ms": round(statistics.median(latencies) * 1e3, 3),
            "p99_ms": round(latencies[int(len(latencies) * 0.99)] * 1e3, 3),
            "over_200_ms": sum(one > USUAL_TIMEOUT_S for one in latencies),
            "server_cpu_us": round(cpu / len(latencies) * 1e6, 1),
        }
        print(f"{name:26} {fleet['lookups'][name]}")
    print({name: value for name, value in fleet.items() if name != "lookups"})
    output: Path = arguments.output
    report.keep(output, "fleet", fleet)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

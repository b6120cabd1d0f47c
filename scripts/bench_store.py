"""A store of a million failure records: opening it, looking a record up, listing, finding one by its id.

Makes the store in a temporary folder (some 5 GB, minutes), measures in fresh processes, prints, and puts the medians
into docs/benchmarks.json under "store". Needs no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from sidestep.cache import FailureRecord, failure_key
from sidestep.cache.disk_store import DiskStore
from sidestep.environment import digest
from sidestep.problem import AttentionProblem, Layout
from sidestep.scripts import report

# Seconds; the targets that the project sets itself.
TARGETS = {"open": 0.1, "first_hit": 0.002, "first_miss": 0.002, "list_last_50": 1.0}
ENVIRONMENT: dict[str, str | int] = {
    "schema": 1,
    "builder": 1,
    "cudnn": 91900,
    "cudnn_frontend": "1.32.0",
    "device": "NVIDIA H200",
    "compute_capability": "9.0",
    "sm_count": 132,
    "l2_bytes": 62914560,
    "driver": 12080,
    "cuda_runtime": "13.0",
}
FRAME = """\
  File "/opt/venv/lib/python3.11/site-packages/cudnn/graph_{}.py", line {}, in create_execution_plans
    self.graph.create_execution_plans(policy, {})
"""
# One process: open, the first look-up of a key that is there and of one that is not. Opening is lazy, so it is told
# apart by a statement that reads nothing but the schema.
LOOK_UP = """
import json, pathlib, sys, time
from sidestep.cache.disk_store import DiskStore
folder, hit, miss = sys.argv[1:]
started = time.perf_counter()
store = DiskStore(pathlib.Path(folder), "failures")
with store._cache():
    opened = time.perf_counter()
found = store.get(hit)
looked = time.perf_counter()
missing = store.get(miss)
done = time.perf_counter()
assert found is not None and missing is None
print(json.dumps([opened - started, looked - opened, done - looked]))
"""


def record(number: int) -> FailureRecord:
    """A record as selection writes it, of a problem of its own, with a traceback of some 1.5 kB."""
    layout = Layout.of((1 + number % 16, 8, 1 + number // 16, 64))
    problem = AttentionProblem("cuda", "bfloat16", layout, layout, layout, scale=0.125, training=True)
    trace = "".join(FRAME.format(depth, number % 1000 + depth, number) for depth in range(8))
    return FailureRecord(
        key=failure_key(digest(ENVIRONMENT), "cudnn", problem.digest()),
        kind="unsupported",
        backend="cudnn",
        direction="backward",
        stage="create_execution_plans",
        exception_type="cudnn.cudnnGraphNotSupportedError",
        exception_text="no engine supports this graph: No valid engine configs",
        traceback=f"Traceback (most recent call last):\n{trace}cudnn.cudnnGraphNotSupportedError: no engine\n",
        problem=problem.to_json(),
        environment=dict(ENVIRONMENT),
        first_time=1.7e9 + number,
        last_time=1.7e9 + number,
        count=1,
        duration=0.25,
        built_on="offline",
    )


def batches(count: int, size: int = 10_000) -> Iterator[range]:
    """The numbers below `count`, some at a time."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def fill(folder: Path, count: int) -> None:
    """The rows that DiskStore writes, many in one transaction."""
    store = DiskStore(folder, "failures")
    for numbers in batches(count):
        with store._cache() as cache, cache.transact():
            for number in numbers:
                one = record(number)
                store.set(one.key, one.to_bytes())
        print(f"\r{numbers[-1] + 1} records", end="", file=sys.stderr)
    print(file=sys.stderr)
    store.close()


def seconds(folder: Path, *arguments: str) -> float:
    """How long a command takes, as a whole process."""
    command = [sys.executable, "-m", "sidestep", *arguments]
    started = time.perf_counter()
    subprocess.run(command, env=variables(folder), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def variables(folder: Path) -> dict[str, str]:
    """The environment of a command with that cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SIDESTEP_")}
    return {**kept, "SIDESTEP_CACHE_DIR": str(folder)}


def measure(folder: Path, count: int, rounds: int) -> dict[str, float]:
    """Medians, in seconds."""
    found: dict[str, list[float]] = {}
    missing = failure_key(digest(ENVIRONMENT), "cudnn", "0" * 32)
    for turn in range(rounds):
        one = record((turn * 7919 + count // 2) % count)
        command = [sys.executable, "-c", LOOK_UP, str(folder), one.key, missing]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        opened, hit, miss = json.loads(done.stdout)
        times = {
            "open": opened,
            "first_hit": hit,
            "first_miss": miss,
            "list_last_50": seconds(folder, "failures", "list", "--last", "50"),
            "show": seconds(folder, "failures", "show", one.id),
            "version": seconds(folder, "--version"),
        }
        for name, value in times.items():
            found.setdefault(name, []).append(value)
    return {name: round(statistics.median(values), 6) for name, values in found.items()}


def main() -> int:
    """Fill, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="Fill this one, or measure it where it is filled; and keep it.")
    parser.add_argument("--output", type=Path, default=report.PLACE)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = arguments.folder or Path(temporary)
        database = folder / "failures" / "cache.db"
        if not database.exists():
            started = time.perf_counter()
            fill(folder, arguments.records)
            print(f"filled in {time.perf_counter() - started:.0f} s", file=sys.stderr)
        medians = measure(folder, arguments.records, arguments.rounds)
        size = sum(path.stat().st_size for path in itertools.chain([database], database.parent.glob("cache.db-*")))
    reached = {name: medians[name] <= target for name, target in TARGETS.items()}
    results = {
        "records": arguments.records,
        "bytes": size,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU needed",
        "rounds": arguments.rounds,
        "seconds": medians,
        "at_most": TARGETS,
        "reached": reached,
    }
    report.keep(arguments.output, "store", results)
    print(json.dumps(results, indent=2))
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

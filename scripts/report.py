"""What the benchmarks share: a clock, where they keep their results, the frontend that Thunder's executor needs."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PLACE = Path("docs/benchmarks.json")


def circumstances() -> dict[str, Any]:
    """Date and versions; those of the GPU too where torch sees one."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": sys.version.split()[0],
        "cpus": len(os.sched_getaffinity(0)),
    }
    import torch

    if torch.cuda.is_available():
        import cudnn

        found |= {
            "device": torch.cuda.get_device_properties(0).name,
            "torch": torch.__version__,
            "cudnn": cudnn.backend_version(),
            "cudnn_frontend": cudnn.__version__,
        }
    return found


def microseconds(
    contestants: Mapping[str, Callable[[], Any]], rounds: int, calls: int, busy: bool = False
) -> dict[str, float]:
    """The median time of one call, in microseconds, the contestants taking turns; a GPU is idle when a turn begins.

    Args:
        contestants: by name.
        rounds: in which each has a turn.
        calls: of a turn.
        busy: whether a turn ends when the GPU has done it, and not already when it is issued.
    """
    import torch

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for function in contestants.values():
        for _ in range(max(calls // 2, 3)):
            function()
    gc.collect()
    gc.disable()  # as timeit does: a collection belongs to no contestant
    try:
        for turn in range(rounds):
            # Each is the first as often as the others, after a few calls that are not timed: who comes after another,
            # or after a collection, finds the processor's caches cold (15 to 25 us of 300).
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                function = contestants[name]
                for _ in range(3):
                    function()
                wait()
                start = time.perf_counter()
                for _ in range(calls):
                    function()
                if busy:
                    wait()
                times[name].append((time.perf_counter() - start) / calls * 1e6)
            gc.collect()
    finally:
        gc.enable()
    wait()
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def add_thunder_site(parser: argparse.ArgumentParser) -> None:
    """The option --thunder-site.

    Thunder's cudnn executor raises AttributeError with the nvidia-cudnn-frontend that Sidestep needs. The option's
    folder holds an older one, for the processes that run Thunder's executors.
    """

    def folder(text: str) -> Path:
        if not Path(text, "cudnn").is_dir():
            how = f"pip install --no-deps --target {text} nvidia-cudnn-frontend==1.23.0"
            raise argparse.ArgumentTypeError(f"there is no cudnn in {text}; for cuDNN 9.19: {how}")
        return Path(text).resolve()

    what = "an older cudnn frontend for Thunder's own executors, in processes of their own"
    parser.add_argument("--thunder-site", type=folder, metavar="FOLDER", help=what)


def thunder_environ(site: Path | None) -> dict[str, str]:
    """The variables of a process that is to find what --thunder-site names."""
    if site is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])}


def keep(path: Path, name: str, results: dict[str, Any]) -> None:
    """Put `results` under `name` in the file, and leave the others in it alone."""
    report = json.loads(path.read_text()) if path.exists() else {"schema": 1}
    path.write_text(json.dumps({**report, name: results}, indent=2) + "\n")

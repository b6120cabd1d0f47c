"""Where the benchmarks keep their results: one JSON object, a key for each of them."""

from __future__ import annotations

import datetime
import json
import os
import sys
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


def keep(path: Path, name: str, results: dict[str, Any]) -> None:
    """Put `results` under `name` in the file, and leave the others in it alone."""
    report = json.loads(path.read_text()) if path.exists() else {"schema": 1}
    path.write_text(json.dumps({**report, name: results}, indent=2) + "\n")

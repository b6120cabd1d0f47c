"""What the benchmarks share: where they keep their results, and the frontend that Thunder's cudnn executor needs."""

from __future__ import annotations

import argparse
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

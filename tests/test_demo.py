"""The main job: `make demo` runs this script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_demo() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "demo.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert len(re.findall(r"error against float64: .* right$", done.stdout, re.MULTILINE)) == 8
    assert "WRONG" not in done.stdout
    # One of the twelve is refused by rule, four by cuDNN: fp32 training, head sizes 65, 264 and 512 with training.
    assert (
        "12 problems: 7 served, 4 refused, 1 by rule; builds 15, loads 0, build_failures 4, skipped_known_bad 0"
        in done.stdout
    )
    assert done.stdout.count("\n  builds 0, loads 7, skipped_known_bad 4, the rest by rule\n") == 2
    assert done.stdout.endswith("Done: numbers right, nothing built twice.\n")
    assert re.search(r"^ +File .*cudnn_graph\.py", done.stdout, re.MULTILINE)
    assert "cudnnGraphNotSupportedError: no engine" in done.stdout

"""The main job: `make demo` runs this script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_demo() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "demo.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert len(re.findall(r"error against float64: .* right$", done.stdout, re.MULTILINE)) == 8
    assert "WRONG" not in done.stdout
    # Two of the twelve are refused by rule, three by cuDNN: fp32 training, head sizes 264 and 512 with training.
    assert (
        "12 problems: 7 served, 3 refused, 2 by rule; builds 14, build_failures 3, skipped_known_bad 0" in done.stdout
    )
    assert "of the 5 refused: builds 0, skipped_known_bad 3, the rest by rule" in done.stdout
    assert re.search(r"^ +File .*cudnn_graph\.py", done.stdout, re.MULTILINE)
    assert "cudnnGraphNotSupportedError: no engine" in done.stdout

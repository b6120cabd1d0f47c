"""scripts/compare_numbers.py on the CPU: who is right is counted so, and so is a planted backend that is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import TESTS

SCRIPT = TESTS.parent / "scripts" / "compare_numbers.py"
# As `PLANTED` says: wrong in one gradient, not finite for one set of data, or the end of the process for one problem.
PLANTED = """
import os
import torch
from small import Small, SmallPlan

class Planted(Small):
    def build(self, problem, target, progress):
        if os.environ["PLANTED"] == "abort" and problem.key.shape[2] == 128:
            os.abort()
        return super().build(problem, target, progress)

def spoil(name, tensor, query, key):
    if os.environ["PLANTED"] == "wrong" and name == "value":
        tensor[-1, -1, -1, -1] += 1
    if os.environ["PLANTED"] == "nan" and name == "query" and key.float().mean() < -1:
        tensor[0, 0, 0, 0] = torch.nan

def planted():
    backend = Planted("planted")
    backend.spoil = spoil
    return backend
"""


def compare(output: Path, *options: str, code: int = 0, environ: Mapping[str, str] | None = None) -> str:
    """What it prints."""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--children", "1", "--output", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environ or {})}, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def entries(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_the_table(tmp_path: Path) -> None:
    """Torch's flash kernel refuses a value of another head size; what is in the file is not run again."""
    output = tmp_path / "numbers.jsonl"
    options = ("--sets", "public,trap3", "--limit", "3")
    printed = compare(output, *options)
    table = (
        "| problems | torch | torch_flash | torch_math | sidestep |\n"
        "|---|---|---|---|---|\n"
        "| public, 3 | 3 / 0 / 0 / 0 / 0 | 1 / 0 / 0 / 2 / 0 | 3 / 0 / 0 / 0 / 0 | 3 / 0 / 0 / 0 / 0 |\n"
    )
    assert table in printed
    assert len(entries(output)) == 12
    assert compare(output, *options) == printed
    assert compare(output, "--summary") == printed
    assert len(entries(output)) == 12
    cut = output.read_text().splitlines(keepends=True)
    output.write_text("".join(line for line in cut if '"torch_math"' not in line or '"tiny-head-16"' in line))
    assert "| 1 / 0 / 0 / 0 / 0 + 2 not run |" in compare(output, "--summary")


@pytest.mark.parametrize(
    ("planted", "cell", "why"),
    [
        ("wrong", "0 / 2 / 0 / 0 / 0", "gradient of value is wrong on '"),
        ("nan", "0 / 0 / 2 / 0 / 0", "gradient of query is wrong on 'logits "),
        ("abort", "1 / 0 / 0 / 0 / 1", "edges, crash: 1\n    bf16 h2 1x128 d64 BHQK: status -6 at: call on plain\n"),
    ],
)
def test_a_planted_backend_is_found_out(tmp_path: Path, planted: str, cell: str, why: str) -> None:
    """And one that ends its process costs the problem that it was at."""
    (tmp_path / "planted.py").write_text(PLANTED)
    info = tmp_path / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sidestep.backends]\nplanted = planted:planted\n")
    output = tmp_path / "numbers.jsonl"
    path = os.pathsep.join([str(tmp_path), str(TESTS)])
    environ = {"PYTHONPATH": path, "SIDESTEP_BACKENDS": "planted", "PLANTED": planted}
    options = ("--sets", "edges", "--contestants", "sidestep", "--limit", "2")
    printed = compare(output, *options, code=1, environ=environ)
    assert f"| edges, 2 | {cell} |\n" in printed
    assert why in printed

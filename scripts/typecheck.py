"""Run mypy on the package in the shape in which it is installed.

`dispatcher/`, `cache/` and `backends/` become `sidestep`, `sidestep.cache` and
`sidestep.backends` only at build time, so static tools need a tree of links
with the installed shape.  Paths in what the tools print are the real ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import tomllib  # the tools run on Python 3.11 or newer

ROOT = Path(__file__).resolve().parent.parent


def link_tree(tree: Path) -> dict[str, str]:
    """Link each mapped folder into `tree`; return {linked path: real path}."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    mapping: dict[str, str] = project["tool"]["setuptools"]["package-dir"]
    real: dict[str, str] = {}
    for package, folder in {**mapping, "tests": "tests"}.items():
        there = tree.joinpath(*package.split("."))
        there.mkdir(parents=True, exist_ok=True)
        for entry in sorted((ROOT / folder).iterdir()):
            if entry.name != "__pycache__":
                (there / entry.name).symlink_to(entry)
                real[str(there / entry.name)] = str(entry.relative_to(ROOT))
    return real


def run(command: list[str], tree: Path, real: dict[str, str]) -> int:
    env = dict(os.environ, MYPYPATH=str(tree))
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    text = done.stdout + done.stderr
    for linked in sorted(real, key=len, reverse=True):
        for form in (linked, os.path.relpath(linked, tree)):
            text = text.replace(form, real[linked])
    print(text, end="")
    return done.returncode


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve()
        real = link_tree(tree)
        mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        return max(
            run([*mypy, "--strict", "-p", "sidestep"], tree, real),
            run([*mypy, "tests"], tree, real),
        )


if __name__ == "__main__":
    raise SystemExit(main())

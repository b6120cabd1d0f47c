"""What a real run calls, written down as a SPEC for a warm-up. Imports no torch."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from . import events, spec
from .cache.folder import replaceable

if TYPE_CHECKING:
    from .decisions import Decision
    from .problem import AttentionProblem


@contextlib.contextmanager
def record_problems(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write the SPEC of the calls made in the block, by every thread: `sidestep warmup PATH` reads it.

    Each problem stands there once, in the order of the first calls, those included that were decided before the block.
    Not there: calls with a constant output, which ask no backend, and replays of a CUDA graph, which call nothing.
    The first call of each kind in the block takes a little longer (some 0.1 ms); nothing is built again.

    Args:
        path: the file, which is replaced when the block ends, also by an exception; a device or a pipe is refused.

    Raises:
        OSError: the file cannot be written; before the block runs, where that shows by then.
    """
    file = _writable(Path(path).absolute())  # the block may change the current folder
    problems: dict[AttentionProblem, None] = {}

    def tell(problem: AttentionProblem, _decisions: tuple[Decision, ...]) -> None:
        if math.isfinite(problem.scale):  # a SPEC holds no other
            problems.setdefault(problem)

    events.subscribers.append(tell)
    try:
        selection = sys.modules.get(f"{__package__}.selection")
        if selection is not None:  # otherwise there was no call before
            selection.forget_routes()  # a call with a route would select nothing, and tell nothing
        yield
    finally:
        events.subscribers.remove(tell)
        _write(file, list(problems))


def _writable(file: Path) -> Path:
    """The file that is to be replaced, links followed."""
    try:
        target = replaceable(file)
        with tempfile.TemporaryFile(dir=target.parent):
            return target
    except OSError as error:
        what = f"record_problems cannot write here ({error.strerror}); give a file in a folder of yours that exists"
        raise type(error)(error.errno, what, str(file)) from error


def _write(file: Path, problems: list[AttentionProblem]) -> None:
    """Replace the file as a whole: a warm-up that reads it meanwhile finds the old or the new one."""
    if not problems:
        events.logger.warning("no call reached a backend in the block: %s lists no problem", file)
    head = f"# The attention of a real run: {len(problems)} problems, in the order of their first calls.\n"
    aside = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        aside.write_text(head + spec.dump(problems), encoding="utf-8")
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)

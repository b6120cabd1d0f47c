"""Every test begins in a process that has done nothing yet, with a cache of its own, and with bugs raised.

A test marked `gpu` is collected everywhere; where there is no GPU it is deselected, and the summary says how many.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# With the root on sys.path (`python -m pytest` puts it there), `import cache` would make second copies of modules.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != TESTS.parent]
sys.path.insert(0, str(TESTS))  # for `import process, reference`

from process import Counters, reload_settings  # noqa: E402 - found by the line above

with contextlib.suppress(ModuleNotFoundError):  # where only GPU tests run it may be absent
    from hypothesis import HealthCheck, settings

    # A busy machine is no failure: by default an example that takes 200 ms is one.
    settings.register_profile("sidestep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("sidestep")

_NOT_RUN = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-only", action="store_true", help="run only the tests marked gpu")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    here = False
    if gpu:
        import torch

        here = torch.cuda.is_available()
    only = config.getoption("--gpu-only")
    if only and not here:
        raise pytest.UsageError("--gpu-only: torch sees no GPU here, or no test marked gpu was collected")
    dropped = [item for item in items if item not in gpu] if only else [] if here else gpu
    config.stash[_NOT_RUN] = 0 if here else len(gpu)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if count := config.stash.get(_NOT_RUN, 0):
        terminalreporter.write_line(f"{count} gpu tests not run: no GPU here")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No SIDESTEP_* variable but SIDESTEP_STRICT=1 and a cache folder for this test; nothing said or known yet."""
    from sidestep import events

    for name in list(os.environ):
        if name.startswith("SIDESTEP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SIDESTEP_STRICT", "1")
    monkeypatch.setenv("SIDESTEP_CACHE_DIR", str(tmp_path / "sidestep-cache"))
    reload_settings()
    events._said.clear()


@pytest.fixture(autouse=True)
def device_survives(request: pytest.FixtureRequest) -> Iterator[None]:
    """A CUDA error that no process survives ends the run at the test that made it, and not in hundreds after it."""
    yield
    if request.node.get_closest_marker("gpu"):
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"{request.node.nodeid} lost the device: {error}", returncode=1)


@pytest.fixture
def counters() -> Counters:
    """The growth of the counters during the test."""
    return Counters()


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SIDESTEP_STRICT: an error falls back, as it does for users."""
    monkeypatch.delenv("SIDESTEP_STRICT")
    reload_settings()

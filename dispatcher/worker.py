"""Attention problems answered in a child process, so that a build may crash, hang, or be for a GPU that is not here.

`python -m sidestep.worker [--device PROFILE]` is the child; `Worker` is the parent's side. One JSON object a line:

    child   {"gpus": 1}                                                     ready
    parent  {"problem": {...}, "backends": [...] | null, "only_in": {...} | null}
    child   {"environments": {"cudnn": {...}}}                              the backends asked, before they are
    child   {"decisions": [...], "seconds": 0.7, "counters": {"builds": 2, ...}}
            or {"unable": "why this problem cannot be asked here"}
            or {"exception": {"type": ..., "text": ..., "traceback": ..., "about_here": false}}, and the child ends

Failure records are written by selection, in the child, to the store that the parent's settings name. A child that
dies leaves a crash intent, and one that hangs is aborted, which leaves one with a dump of where it hung: asked the same
problem again, the next child finds a record and passes on. This module imports no torch; the child does.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from . import environment, failures, settings
from .backends import registry
from .cache import Kind, Origin, failure_key
from .decisions import Decision, Failed, Remembered, from_json, to_json
from .errors import SidestepError
from .events import counters
from .problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from .backends.base import Target

# Asked without a GPU these would record that they cannot, for a GPU on which they can.
_NEED_THE_GPU = {"nvfuser", *registry.GROUPS["torch"]}
_START_LIMIT_S = 300.0  # importing torch takes 4 s on two cores, and minutes from a cold network disk
_ABORT_LIMIT_S = 5.0  # the fault handler writes its dump in milliseconds
# A death without a dump may be SIGKILL's, from want of memory; the second in a row becomes a record (cache.intents),
# found when the problem is asked for the third time. More deaths than this mean that no record could be kept.
_MOST_DEATHS = 4


class WorkerError(SidestepError, RuntimeError):
    """The work cannot be done here; the text says why and what to do."""


class ChildError(SidestepError, RuntimeError):
    """An exception that ended the child: under SIDESTEP_STRICT=1 a backend's bug.

    Attributes:
        exception_type: its qualified name.
        text: `str(exception)`.
        traceback: its full text, as the child saw it.
    """

    def __init__(self, exception_type: str, text: str, traceback: str) -> None:
        """Keep what the child reported."""
        super().__init__(f"{exception_type}: {text}")
        self.exception_type, self.text, self.traceback = exception_type, text, traceback


@dataclass(frozen=True)
class Answer:
    """What a child decided about one problem.

    Attributes:
        decisions: about every backend asked, in order.
        seconds: how long it took, restarts after a death included.
        counters: what it added to the counters.
    """

    decisions: tuple[Decision, ...]
    seconds: float
    counters: Mapping[str, int]


def offline_order(backends: Sequence[str] | None) -> tuple[str, ...]:
    """The backends to ask for a GPU that is not here: those that can learn something without it.

    Raises:
        ValueError: one of `backends` cannot, or is unknown.
    """
    order = ("cudnn",) if backends is None else registry.expand(backends)
    if wrong := [name for name in order if name in _NEED_THE_GPU]:
        raise ValueError(f"{', '.join(wrong)}: nothing can be learnt without the GPU; cudnn can be asked")
    return order


class Worker:
    """A child that answers problems in turn, started at the first one; a context manager.

    For one thread at a time, but for `stop`, which is for any.

    Args:
        device: a device profile's name or path; None for this machine's own devices.
        verify: as SIDESTEP_VERIFY=1.
    """

    def __init__(self, device: str | None = None, verify: bool = False) -> None:
        self._device = device
        self._verify = verify
        self._child: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._lock = threading.Lock()  # between stop() and a child that is just being started
        self._stopped = False

    @property
    def _built_on(self) -> Origin:
        return "local" if self._device is None else "offline"

    def __enter__(self) -> Worker:
        """The worker itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """End the child: at once, where something was raised."""
        self.close(at_once=kind is not None)

    def close(self, at_once: bool = False) -> None:
        """End the child, if there is one."""
        child, self._child, self._received = self._child, None, b""
        if child is None or child.stdin is None or child.stdout is None:
            return
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        try:
            child.wait(0 if at_once else _ABORT_LIMIT_S)
        except subprocess.TimeoutExpired:
            _kill(child)
            child.wait()
        child.stdout.close()

    def stop(self) -> None:
        """Kill the child, from any thread; what it is asked raises WorkerError, and no other child is started."""
        with self._lock:
            self._stopped = True
            child = self._child
            if child is not None and child.poll() is None:
                _kill(child)

    def ask(
        self,
        problem: AttentionProblem,
        backends: Sequence[str] | None = None,
        timeout: float = 300.0,
        only_in: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Let the child decide; the counters of this process grow by the child's.

        Args:
            problem: with an output that is not constant.
            backends: names, in order; None for the order in force (for an absent GPU: cudnn).
            timeout: seconds for one child's attempt, its start not counted.
            only_in: the environment that every backend must find; nothing is tried in another.

        Raises:
            WorkerError: the problem cannot be asked here.
            ChildError: the child ended by an exception.
        """
        request = {"problem": problem.to_json(), "backends": backends, "only_in": only_in}
        started, clock = time.time(), time.perf_counter()
        deaths: list[str] = []
        # Without a cache the next child would know nothing of a death.
        most = _MOST_DEATHS if settings.get().disk() else 1
        while len(deaths) < most:
            environments: dict[str, Any] = {}
            try:
                self._start()
                self._send(request)
                environments = self._receive(_START_LIMIT_S)["environments"]
                reply = self._receive(timeout)
            except _HungError:
                self._abort()
                deaths.append(f"no answer within {timeout:g} s")
                how = f"the build ran past its limit of {timeout:g} s"
                if not _keep_death(problem, environments, "timeout", how, timeout, self._built_on):
                    raise WorkerError(
                        f"no answer within {timeout:g} s for {problem}, and not in a build that a record could be kept "
                        f"of (backends asked: {', '.join(environments) or 'none yet'}). A longer --timeout may help"
                    ) from None
            except _DiedError as died:
                if self._stopped:
                    _pardon(problem, environments)
                    raise WorkerError(f"stopped while asking about {problem}") from died
                deaths.append(str(died))
                # The signal's name is known here alone; without a dump one death says nothing yet.
                _keep_death(problem, environments, "crash", str(died), time.perf_counter() - clock, self._built_on)
            except KeyboardInterrupt:
                self.close(at_once=True)
                _pardon(problem, environments)
                raise
            else:
                return _answer(reply, started, time.perf_counter() - clock, deaths)
        raise WorkerError(
            f"the child that was to answer {problem} did not ({'; '.join(deaths)}), and no record of it could be kept. "
            "Is there a cache (SIDESTEP_CACHE, SIDESTEP_CACHE_DIR)? Is there enough memory?"
        )

    def _start(self) -> None:
        if self._child is not None:
            return
        command = [sys.executable, "-m", "sidestep.worker"]
        if self._device is not None:
            command += ["--device", self._device]
        with self._lock:
            if self._stopped:
                raise WorkerError("stopped: no child is started any more")
            # A group of its own, so that it ends as a whole; no code from the current folder (Python 3.11 and newer).
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                # A child is there to build.
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith("SIDESTEP_")},
                    **settings.get().to_environ(),
                    "SIDESTEP_BUILD": "always",
                    **({"SIDESTEP_VERIFY": "1"} if self._verify else {}),
                    "PYTHONSAFEPATH": "1",
                },
            )
        self._receive(_START_LIMIT_S)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            self._died()

    def _receive(self, limit: float) -> dict[str, Any]:
        """The child's next message.

        Raises:
            _HungError, _DiedError: there was none.
            WorkerError, ChildError: it says that it cannot go on.
        """
        assert self._child is not None
        assert self._child.stdout is not None
        deadline = time.monotonic() + limit
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._child.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise _HungError
            part = os.read(self._child.stdout.fileno(), 2**16)
            if not part:
                self._died()
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "unable" in message:
            raise WorkerError(message["unable"])
        if raised := message.get("exception"):
            if raised["about_here"]:
                raise WorkerError(raised["text"])
            raise ChildError(raised["type"], raised["text"], raised["traceback"])
        return message

    def _died(self) -> NoReturn:
        assert self._child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_ABORT_LIMIT_S)
        code = self._child.poll()
        self.close()
        if code is not None and code < 0:
            raise _DiedError(f"ended by {signal.Signals(-code).name}")
        raise _DiedError(f"ended with status {code}")

    def _abort(self) -> None:
        """End a child that hangs; SIGABRT lets the fault handler write into the intent where it hangs."""
        assert self._child is not None
        self._child.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_ABORT_LIMIT_S)
        self.close(at_once=True)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """With the compilers that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


class _HungError(Exception):
    """No message in time."""


class _DiedError(Exception):
    """The child is gone; the text says how."""


def _key(problem: AttentionProblem, backend: str, manifest: environment.Manifest) -> str:
    return failure_key(environment.digest(manifest), backend, problem.digest())


def _pardon(problem: AttentionProblem, environments: Mapping[str, Any]) -> None:
    """The child's end was ours, and no death of a backend's."""
    for name, manifest in environments.items():
        if manifest:
            failures.pardon(_key(problem, name, manifest))


def _keep_death(
    problem: AttentionProblem, environments: Mapping[str, Any], kind: Kind, how: str, seconds: float, built_on: Origin
) -> bool:
    """Record a child's end, of the backend whose intent shows that it was in a build; whether there was such a one."""
    for name, manifest in environments.items():
        key = _key(problem, name, manifest) if manifest else None
        crash = failures.crash(key) if key else None
        if key is None or crash is None:
            continue
        failures.note(
            key,
            kind,
            name,
            problem,
            manifest,
            direction="backward" if problem.training else "forward",
            stage="build",
            exception=(
                "TimeoutError" if kind == "timeout" else "ProcessDied",
                f"{how}: {crash.summary}" if kind == "crash" else how,
                crash.dump or how,
            ),
            duration=seconds,
            built_on=built_on,
        )
        return True
    return False


def _answer(reply: Mapping[str, Any], started: float, seconds: float, deaths: Sequence[str]) -> Answer:
    """The reply as an Answer; what this very question killed has failed now, and is not remembered."""
    decisions = [from_json(decision) for decision in reply["decisions"]]
    added = dict(reply["counters"])
    for index, decision in enumerate(decisions if deaths else ()):
        if isinstance(decision, Remembered) and _is_newer(decision.record_id, started):
            decisions[index] = Failed(decision.backend, decision.kind, decision.text, decision.record_id)
            added["skipped_known_bad"] -= 1
    # The child took its counters along; at least one graph was begun for each death.
    added["builds"] += len(deaths)
    added["build_failures"] += len(deaths)
    counters.add(added)
    return Answer(tuple(decisions), seconds if deaths else reply["seconds"], added)


def _is_newer(record_id: str, started: float) -> bool:
    # A crash's time is a file's, which may lie milliseconds before the clock's.
    return any(record.last_time > started - 1 for record in failures.find(record_id))


def main() -> None:
    """The child. Reads requests from stdin and answers on stdout, which nobody else can write to."""
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to stderr
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    # Crashes are expected here, and recorded otherwise than by a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    def send(message: Mapping[str, Any]) -> None:
        protocol.write(json.dumps(message) + "\n")
        protocol.flush()

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from .backends.cudnn_offline import OfflineError

        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        text = "".join(traceback.format_exception(kind, error, trace))
        raised = {"type": name, "text": str(error), "traceback": text, "about_here": kind is OfflineError}
        with contextlib.suppress(BrokenPipeError):  # the parent is gone
            send({"exception": raised})

    sys.excepthook = report  # an exception is the end of the child: here nothing is caught
    arguments = sys.argv[1:]
    if arguments and (len(arguments) != 2 or arguments[0] != "--device"):
        raise SystemExit("usage: python -m sidestep.worker [--device PROFILE]")
    profile = None
    if arguments:
        from .backends import cudnn_offline

        profile = cudnn_offline.activate(arguments[1])  # before torch is imported
    import torch

    from .backends.base import Target

    gpus = torch.cuda.device_count() if profile is None else 0
    send({"gpus": gpus})
    for line in requests:
        request = json.loads(line)
        problem = AttentionProblem.from_json(request["problem"])
        if profile is not None:
            target = Target(0, profile)
        elif problem.device == "cpu":
            target = Target()
        elif gpus:
            target = Target(torch.cuda.current_device())
        else:
            send({"unable": f"no GPU here for {problem}: build for one that is not here with --device PROFILE (h200)"})
            continue
        _serve(request, problem, target, send)


def _serve(request: Mapping[str, Any], problem: AttentionProblem, target: Target, send: Any) -> None:
    from . import selection

    names = request["backends"]
    if target.profile is not None:
        order = offline_order(names)
    else:
        order = registry.expand(settings.get().backends if names is None else names)
    environments = {name: environment.manifest(registry.get(name), problem.device, target) for name in order}
    wanted = request["only_in"]
    for name, found in environments.items():
        if wanted is not None and found != wanted:
            differing = sorted(key for key in {*wanted, *(found or {})} if (found or {}).get(key) != wanted.get(key))
            listed = ", ".join(f"{key} {(found or {}).get(key)} (recorded: {wanted.get(key)})" for key in differing)
            send({"unable": f"{name} has another environment here: {listed}"})
            return
    send({"environments": environments})
    before, clock = counters.as_dict(), time.perf_counter()
    decisions: tuple[Decision, ...]
    try:
        tensors = random_tensors(problem, target) if target.profile is None else None
    except (MemoryError, RuntimeError) as error:
        if not selection.lacks_memory(error):
            raise
        text = f"its tensors do not fit in memory: {str(error).splitlines()[0]}"
        decisions = tuple(Failed(name, "transient", text) for name in order)
    else:
        decisions = selection.select(problem, order, target, tensors, strict=False).decisions
    grown = {name: value - before[name] for name, value in counters.as_dict().items()}
    seconds = time.perf_counter() - clock
    selection.forget_plans()  # asked once; what a plan holds on the device is free for the next problem
    send({"decisions": list(map(to_json, decisions)), "seconds": seconds, "counters": grown})


def random_tensors(problem: AttentionProblem, target: Target) -> tuple[torch.Tensor | None, ...]:
    """Random query, key, value and mask, with the problem's shapes, strides and dtypes."""
    import torch

    device = torch.device("cpu") if target.index < 0 else torch.device("cuda", target.index)

    def make(layout: Any, dtype: str) -> torch.Tensor:
        if layout.extent >= 2**61:  # bytes that torch would not count right
            raise MemoryError(f"{layout.extent} numbers")
        numbers = torch.randn(layout.extent, device=device)
        whole = numbers > 0 if dtype == "bool" else numbers.to(getattr(torch, dtype))
        return whole.as_strided(layout.shape, layout.stride)

    mask = None if problem.mask is None else make(problem.mask, problem.mask.dtype)
    return (*(make(layout, problem.dtype) for layout in (problem.query, problem.key, problem.value)), mask)


if __name__ == "__main__":
    main()

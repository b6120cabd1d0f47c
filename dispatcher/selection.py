"""select(): the one place that tries, catches, classifies and records.

A reader sees here every way a call can go. For each backend of the order, until one serves: a rule rejects
it, a valid record says that it fails, it fails now (recorded, with the full traceback), or it is chosen.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import environment, failures, guards, settings
from .backends import registry
from .backends.base import Backend, GraphPlan, Plan, Progress, Target
from .cache import FailureRecord, failure_key
from .decisions import Chosen, Decision, Failed, Rejected, Remembered, Untried, describe
from .errors import DeviceLostError, NoBackendError, SidestepError
from .events import counters, logger, once, subscribers

if TYPE_CHECKING:
    from .problem import AttentionProblem

_Tensors = Sequence["torch.Tensor | None"]

# Plans whose first run succeeded, the latest selected last. A plan holds a compiled graph (about 100 kB on disk).
MAX_PLANS = 1024
_plans: dict[tuple[str, AttentionProblem, Target], Plan] = {}
_EVICTED_AT_MOST = 256  # plans that may wait for the collector
_evicted = 0
_unusable: dict[str, Failed] = {}  # backends whose library is missing or mismatched: known for this process only
_lock = threading.RLock()


def _after_fork() -> None:
    """A lock that another thread held at the fork is held for ever in the child."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class Selection:
    """What select() decided.

    Attributes:
        decisions: about every backend asked, in order; the last is Chosen where one serves.
        served: the chosen plan with what it serves; None where no backend does, or nothing could be run.
        settled: False where the next call should decide anew (out of memory, capture in progress).
        cause: where nobody serves, the exception of the last failure, if any.
    """

    decisions: tuple[Decision, ...]
    served: Served | None = None
    settled: bool = True
    cause: Exception | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A plan at work for one problem: what a route runs."""

    backend: str
    plan: Plan
    problem: AttentionProblem
    order: tuple[str, ...]
    target: Target


def select(
    problem: AttentionProblem,
    order: tuple[str, ...],
    target: Target,
    tensors: _Tensors | None = None,
    strict: bool | None = None,
) -> Selection:
    """Find the first backend of `order` that can serve `problem`, by building and, on `tensors`, running.

    Args:
        problem: a canonical, valid problem with a non-constant output.
        order: names of single backends; one alone is strict.
        target: the device.
        tensors: query, key, value and mask of the call, for the first run; None where nothing can be run.
        strict: raise what is of kind `error`; when None, where the order is one name.

    Raises:
        Exception: the backend's own, of kind `error`, where the order is strict or SIDESTEP_STRICT=1.
        DeviceLostError: the device cannot be used any more.
    """
    with _lock:
        counters.selections += 1
        selection = _select(problem, order, target, tensors, len(order) == 1 if strict is None else strict)
    for tell in list(subscribers):
        tell(problem, selection.decisions)
    return selection


def _select(
    problem: AttentionProblem, order: tuple[str, ...], target: Target, tensors: _Tensors | None, strict: bool
) -> Selection:
    decisions: list[Decision] = []
    settled = True
    cause: Exception | None = None
    error: Exception | None = None
    attempt: Plan | tuple[Failed, Exception] | None = None
    capturing = problem.device == "cuda" and target.profile is None and torch.cuda.is_current_stream_capturing()
    for name in order:
        backend = registry.get(name)
        plan = _plans.pop((name, problem, target), None)
        proven = plan is not None or not capturing  # during a capture nothing is run to see whether it can
        if plan is None:
            if (known := _known(backend, problem, target)) is not None:
                counters.skipped_known_bad += isinstance(known, Remembered)
                decisions.append(known)
                continue
            if capturing and backend.builds:
                settled = False
                decisions.append(Rejected(name, ("a CUDA graph is being captured: nothing can be built",)))
                continue
            attempt = _attempt(backend, problem, target, None if capturing else tensors, strict)
            if isinstance(attempt, tuple):
                failed, error = attempt
                # Memory is what a caller can do something about, so that error is the one to raise at the end.
                cause = cause if isinstance(cause, torch.OutOfMemoryError) else error
                settled = settled and (failed.kind != "transient" or name in _unusable)
                decisions.append(failed)
                continue
            plan = attempt
        if proven:
            _remember_plan((name, problem, target), plan)
        else:
            settled = False
        decisions.append(Chosen(name))
        counters.fallbacks += len(decisions) > 1
        # An exception's traceback holds this frame, and this frame must not hold it: the call's tensors would stay.
        cause = error = attempt = None
        return Selection(tuple(decisions), Served(name, plan, problem, order, target), settled)
    return Selection(tuple(decisions), None, settled, cause)


def _remember_plan(key: tuple[str, AttentionProblem, Target], plan: Plan) -> None:
    """Keep a plan as the latest; the one not selected for longest goes, with its routes, when there are too many."""
    global _evicted
    _plans[key] = plan
    while len(_plans) > MAX_PLANS:
        _drop_routes(_plans.pop(next(iter(_plans))))
        _evicted += 1
        if _evicted % _EVICTED_AT_MOST == 0:
            gc.collect()  # a route's autograd function is a class, which only the collector frees, and its plan with it


def no_backend(problem: AttentionProblem, selection: Selection) -> Exception:
    """The exception for a selection in which nobody serves."""
    if isinstance(selection.cause, torch.OutOfMemoryError):
        return selection.cause
    error = NoBackendError(
        f"no backend can serve {problem}:\n{describe(selection.decisions)}\n"
        f"Add a backend to the order (SIDESTEP_BACKENDS, backends=, use_backends), or see `sidestep failures list`.",
        selection.decisions,
    )
    error.__cause__ = selection.cause
    return error


def explain(problem: AttentionProblem, order: tuple[str, ...], target: Target) -> tuple[Decision, ...]:
    """What a call would meet, by rules and records alone; nothing is built or run."""
    backends = map(registry.get, order)
    return tuple(_known(backend, problem, target) or Untried(backend.name) for backend in backends)


def forget_routes() -> None:
    """Let every signature be selected anew at its next call; plans stay, so that nothing is built for it."""
    global generation
    with _lock:
        generation += 1
        _drop_routes()


def forget_plans() -> None:
    """Let go of every route and plan, and of what is known for this process only."""
    with _lock:
        forget_routes()
        _plans.clear()
        _unusable.clear()


def _known(backend: Backend, problem: AttentionProblem, target: Target) -> Decision | None:
    """What rules and records say, or None when only an attempt can tell."""
    if reasons := backend.rejects(problem):
        return Rejected(backend.name, reasons)
    if backend.name in _unusable:
        return _unusable[backend.name]
    manifest = environment.manifest(backend, problem.device, target)
    record = None
    if manifest is not None:
        key = _key(backend, problem, manifest)
        record = failures.remembered(key, problem, manifest) or _crashed(key, backend, problem, target, manifest)
    if record is None or (record.kind == "error" and settings.get().strict):
        return None  # under SIDESTEP_STRICT=1 a bug is met again, not remembered
    return Remembered(backend.name, record.id, record.kind, _summary(record.exception_type, record.exception_text))


def _crashed(
    key: str, backend: Backend, problem: AttentionProblem, target: Target, manifest: environment.Manifest
) -> FailureRecord | None:
    """The record of a build that took an earlier process along, made from the intent that it left behind."""
    crash = failures.crash(key) if backend.builds else None
    if crash is None:
        return None
    first = crash.dump.strip().splitlines()[0] if crash.dump.strip() else f"{crash.count} builds ended their process"
    return failures.note(
        key,
        "crash",
        backend.name,
        problem,
        manifest,
        direction="backward" if problem.training else "forward",
        stage="build",
        exception=("ProcessDied", first, crash.dump or first),
        duration=0.0,
        built_on=target.built_on,
        at=crash.time,
    )


def _key(backend: Backend, problem: AttentionProblem, manifest: environment.Manifest) -> str:
    return failure_key(environment.digest(manifest), backend.name, problem.digest())


def _attempt(
    backend: Backend, problem: AttentionProblem, target: Target, tensors: _Tensors | None, strict: bool
) -> Plan | tuple[Failed, Exception]:
    """Build, and run once; a failure is classified, recorded and returned, or raised where that is asked for."""
    progress = Progress(on_build=_count_build)
    manifest = environment.manifest(backend, problem.device, target)
    key = _key(backend, problem, manifest) if manifest else None
    started = time.perf_counter()
    try:
        with failures.intent(key if backend.builds else None):
            plan = backend.build(problem, target, progress)
            if tensors is not None:
                _first_run(plan, problem, target, tensors, progress)
        return plan
    except SidestepError:
        raise  # ours, and about something else: a call within the call, a lost device
    except Exception as error:
        failed = _failed(error, backend, problem, target, progress, manifest, time.perf_counter() - started)
        if failed.kind == "error" and (strict or settings.get().strict):
            raise
        return failed, error


def _count_build() -> None:
    counters.builds += 1


def _first_run(plan: Plan, problem: AttentionProblem, target: Target, tensors: _Tensors, progress: Progress) -> None:
    """Run the plan once on the call's tensors, and its backward on a zero gradient; random state is put back."""
    progress.direction, progress.stage = "forward", "execute"
    with torch.random.fork_rng([target.index] if problem.device == "cuda" else [], enabled=problem.dropout_p > 0):
        _gradients(plan, problem, tensors, progress)
    if problem.device == "cuda":
        torch.cuda.synchronize(target.index)  # what the kernels did wrong is blamed on this plan, not on a later call


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Run apart from what the caller has around the call: it must neither see our runs nor change their outcome.

    Dispatch modes and saved-tensor hooks (checkpointing recomputes in them, selective checkpointing would store the
    first run's results as the call's), anomaly mode (NaN in the caller's data is not our failure), and the autograd
    engine's device threads (one may run another thread's backward, which waits for the lock that is held here).
    """
    with (
        torch.utils._python_dispatch._disable_current_modes(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        torch.autograd.set_detect_anomaly(False),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


def _gradients(
    plan: Plan,
    problem: AttentionProblem,
    tensors: _Tensors,
    progress: Progress,
    grad_output: torch.Tensor | None = None,
) -> Sequence[torch.Tensor | None]:
    """Forward and, where the problem trains, the gradients for `grad_output` (zeros when None), apart."""
    with _apart():
        detached: list[Any] = [None if tensor is None else tensor.detach() for tensor in tensors]
        query, key, value, mask = detached
        if not problem.training:
            with torch.no_grad():
                plan.infer(query, key, value, mask)
            return ()
        if isinstance(plan, GraphPlan):
            with torch.no_grad():
                output, *residuals = plan.forward(query, key, value, mask)
                progress.direction = "backward"
                grad_output = torch.zeros_like(output) if grad_output is None else grad_output
                return plan.backward(grad_output, query, key, value, mask, output, *residuals)
        leaves = [query, key, value] + ([mask] if problem.mask and problem.mask.requires_grad else [])
        with torch.enable_grad():
            for leaf in leaves:
                leaf.requires_grad_()
            output = plan.infer(query, key, value, mask)
            progress.direction = "backward"
            grad_output = torch.zeros_like(output) if grad_output is None else grad_output
            grads = torch.autograd.grad(output, leaves, grad_output)
        return (*grads, None)[:4]


def recover_backward(
    error: Exception, served: Served, grad_output: torch.Tensor, tensors: _Tensors
) -> tuple[torch.Tensor | None, ...]:
    """Record a backward that failed to run, and compute the gradients by the next backend.

    Raises:
        Exception: `error`, where nothing can be computed instead: dropout is on, the order is strict, the failure
            says nothing of the configuration (out of memory), or no other backend serves.
    """
    problem, target = served.problem, served.target
    backend = registry.get(served.backend)
    with _lock:
        manifest = environment.manifest(backend, problem.device, target)
        # How long it ran is not known: the hot path takes no time.
        failed = _failed(error, backend, problem, target, Progress("backward", "execute"), manifest, 0.0)
        if failed.kind != "transient":
            _plans.pop((served.backend, problem, target), None)
            _drop_routes(served.plan)
    rest = served.order[served.order.index(served.backend) + 1 :]
    wanted = failed.kind == "error" and settings.get().strict
    if not rest or wanted or problem.dropout_p > 0 or failed.kind == "transient":
        raise error
    selection = select(problem, rest, target, tensors, strict=False)
    if selection.served is None:
        raise error
    return tuple(_gradients(selection.served.plan, problem, tensors, Progress(), grad_output))


def _failed(
    error: Exception,
    backend: Backend,
    problem: AttentionProblem,
    target: Target,
    progress: Progress,
    manifest: environment.Manifest | None,
    duration: float,
) -> Failed:
    """Classify, record and log one failure."""
    counters.build_failures += 1
    kind = _verdict(error, backend, problem, target)
    text = _summary(_name(error), str(error))
    if kind == "transient":
        failed = Failed(backend.name, kind, text)
        if isinstance(error, (ImportError, OSError)):
            _unusable[backend.name] = failed
        if once(f"transient {backend.name} {text}"):
            logger.info("%s cannot serve now, nothing is kept of it: %s", backend.name, text)
        return failed
    record_id = None
    if manifest is not None:
        record_id = failures.note(
            _key(backend, problem, manifest),
            kind,
            backend.name,
            problem,
            manifest,
            direction=progress.direction,
            stage=progress.stage,
            exception=(_name(error), str(error), "".join(traceback.format_exception(error))),
            duration=duration,
            built_on=target.built_on,
        ).id
    _log(backend, problem, progress, kind, text, error, record_id)
    return Failed(backend.name, kind, text, record_id)


def _verdict(error: Exception, backend: Backend, problem: AttentionProblem, target: Target) -> Any:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, ImportError)):
        return "transient"
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY):
        return "transient"
    if problem.device == "cuda" and target.profile is None and not torch.cuda.is_current_stream_capturing():
        lost = _lost(target.index)
        if lost is not None:
            raise DeviceLostError(
                f"{backend.name} met a CUDA error that this process cannot survive while serving {problem}: {error}. "
                f"Restart the process; `sidestep failures` keeps nothing of it. To go around {backend.name}, leave it "
                f"out of SIDESTEP_BACKENDS; CUDA_LAUNCH_BLOCKING=1 shows the call that failed. ({lost})"
            ) from error
    return backend.verdict(error)


# torch's CPU allocator, the CUDA driver and run time, cuBLAS and cuDNN.
_NO_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED")


def _lost(index: int) -> RuntimeError | None:
    """The error of a device that cannot be used any more; one that passes is cleared, or the next backend meets it.

    A kernel launch of torch's reports, and so clears, what an earlier launch left behind.
    """
    lost = None
    for _ in range(2):
        try:
            torch.zeros(1, device=torch.device("cuda", index))
            torch.cuda.synchronize(index)
        except RuntimeError as error:
            lost = error
        else:
            return None
    return lost


def _log(
    backend: Backend,
    problem: AttentionProblem,
    progress: Progress,
    kind: str,
    text: str,
    error: Exception,
    record_id: str | None,
) -> None:
    """One line for each failure in a process: the id and the command that shows more; a bug is a warning."""
    if not once(f"failure {backend.name} {problem.digest()}"):
        return
    more = f"sidestep failures show {record_id}" if record_id else "nothing could be kept: environment unreadable"
    if kind == "error":
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno}"
        message = "%s failed with a bug, %s, at %s (%s %s) on %s; the next backend is asked. %s"
        logger.warning(message, backend.name, text, where, progress.direction, progress.stage, problem, more)
    else:
        message = "%s cannot serve %s (%s %s: %s); the next backend is asked. %s"
        logger.info(message, backend.name, problem, progress.direction, progress.stage, text, more)


def _name(error: Exception) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _summary(name: str, text: str) -> str:
    """One line: the class, and the reason, which the frontend puts behind its own words and a dump of the graph."""
    sign = next((sign for sign in ("Reason:", "the backend declined:") if sign in text), "")
    lines = (text.partition(sign)[2] if sign else text).strip().splitlines()
    return f"{name.rpartition('.')[2]}: {lines[0][:200]}" if lines else name


Route = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


@dataclass(slots=True, eq=False)
class Entry:
    """What runs calls of one signature, and how to know such a call again.

    Attributes:
        route: runs query, key, value and mask.
        flags: the part of the signature that is not about tensors.
        check: True for query, key and value like those of the signature, which has no mask then.
        plan: what the route runs, if it is a plan.
    """

    route: Route
    flags: tuple[Any, ...]
    check: guards.Check
    plan: Plan | None = None


class Latest:
    """Holds the entry of the latest call, of any thread."""

    __slots__ = ("entry",)

    def __init__(self) -> None:
        self.entry = _NO_ENTRY


_NO_ENTRY = Entry(lambda *tensors: tensors[0], (), guards.never)
latest = Latest()
# Signature of a call -> what runs it. Filled on a miss, emptied when settings change.
MAX_ROUTES = 16384
routes: dict[tuple[Any, ...], Entry] = {}


# Grows when routes are dropped: one that was decided before is not installed any more.
generation = 0


def install(signature: tuple[Any, ...], entry: Entry, decided: int) -> None:
    """Let later calls with `signature` run `entry`, unless settings changed since generation `decided`."""
    with _lock:
        if decided == generation:
            routes[signature] = entry
        while len(routes) > MAX_ROUTES:
            del routes[next(iter(routes))]


def _drop_routes(plan: Plan | None = None) -> None:
    """Drop the routes that run `plan`, or all."""
    for signature in [signature for signature, entry in routes.items() if plan is None or entry.plan is plan]:
        # A thread that has just looked it up may still make it the latest: no call is like it any more.
        routes.pop(signature).flags = ()
    latest.entry = _NO_ENTRY

"""select(): the one place that tries, catches, classifies and records.

A reader sees here every way a call can go. For each backend of the order, until one serves: a rule rejects
it, a valid record says that it fails, it fails now (recorded, with the full traceback), or it is chosen.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch

from . import environment, failures, guards, plans, settings, stores, verification
from .backends import known_bad, registry
from .backends.base import Backend, GraphPlan, LoadingBackend, Plan, Progress, Target, Verdict
from .cache import FailureRecord, Kind, PlanRecord, failure_key, plan_key, single_flight
from .decisions import Chosen, Decision, Failed, Rejected, Remembered, Untried, describe
from .errors import DeviceLostError, NoBackendError, SidestepError
from .events import counters, logger, once, subscribers

if TYPE_CHECKING:
    from .problem import AttentionProblem

_Tensors = Sequence["torch.Tensor | None"]
_Result = TypeVar("_Result")
_Outcome = TypeVar("_Outcome")

_memory = plans.Memory()
# What loading costs (5 ms a graph): a plan that is built as quickly is not worth a place in the cache.
_WORTH_KEEPING_S = 0.01
# A builder that takes longer than the slowest build seen (4 s, two cold kernels on a slow core) is not waited for.
_LONGEST_WAIT_S = 30.0
# Why a backend that builds was passed over.
_NO_BUILDS = ("nothing may be built now (SIDESTEP_BUILD=never, refuse_builds()); see sidestep warmup --wanted",)
_CAPTURING = ("a CUDA graph is being captured: nothing can be built",)
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


@dataclass(frozen=True, eq=False)
class _Case:
    """One backend, asked about one problem on one device."""

    backend: Backend
    problem: AttentionProblem
    target: Target

    @functools.cached_property
    def manifest(self) -> environment.Manifest | None:
        """What records and plans are valid for; without it nothing is kept and nothing remembered."""
        return environment.manifest(self.backend, self.problem.device, self.target)

    @functools.cached_property
    def key(self) -> str | None:
        """Of the failure."""
        return self._made_by(failure_key)

    @functools.cached_property
    def plan_key(self) -> str | None:
        """Of the plan, where the backend's plans can be kept."""
        return self._made_by(plan_key) if isinstance(self.backend, LoadingBackend) else None

    @property
    def verified_key(self) -> str | None:
        """Of the mark that the numbers were found right."""
        return self._made_by(plans.verified_key)

    def _made_by(self, make: Callable[[str, str, str], str]) -> str | None:
        if self.manifest is None:
            return None
        return make(environment.digest(self.manifest), self.backend.name, self._digest)

    @functools.cached_property
    def _digest(self) -> str:
        return self.problem.digest()


class _Made(NamedTuple):
    """A plan that ran, its size in bytes, and where it comes from."""

    plan: Plan
    size: int
    origin: str


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
        decisions: list[Decision] = []
        try:
            strict = len(order) == 1 if strict is None else strict
            selection = _select(problem, order, target, tensors, strict, decisions)
        finally:
            if any(isinstance(one, Rejected) and one.reasons in (_NO_BUILDS, _CAPTURING) for one in decisions):
                plans.want(problem)
    for tell in list(subscribers):
        tell(problem, selection.decisions)
    return selection


def _select(
    problem: AttentionProblem,
    order: tuple[str, ...],
    target: Target,
    tensors: _Tensors | None,
    strict: bool,
    decisions: list[Decision],
) -> Selection:
    """`select`, adding to `decisions` as they are taken."""
    settled = True
    cause: Exception | None = None
    error: Exception | None = None
    attempt: _Made | tuple[Decision, Exception | None] | None = None
    capturing = problem.device == "cuda" and target.profile is None and torch.cuda.is_current_stream_capturing()
    for name in order:
        case = _Case(registry.get(name), problem, target)
        proven = not capturing  # during a capture nothing is run to see whether it can
        if kept := _memory.take(name, problem, target):
            made, proven = _Made(*kept, "in memory" if case.backend.builds else ""), True
        else:
            if (known := _known(case)) is not None:
                counters.skipped_known_bad += isinstance(known, Remembered)
                decisions.append(known)
                continue
            if capturing and case.backend.builds:
                settled = False
                decisions.append(Rejected(name, _CAPTURING))
                continue
            attempt = _attempt(case, None if capturing else tensors, strict)
            assert attempt is not None
            if not isinstance(attempt, _Made):
                decision, error = attempt
                # Memory is what a caller can do something about, so that error is the one to raise at the end.
                cause = cause if isinstance(cause, torch.OutOfMemoryError) else error or cause
                counters.skipped_known_bad += isinstance(decision, Remembered)
                if isinstance(decision, Failed):
                    settled = settled and (decision.kind != "transient" or name in _unusable)
                decisions.append(decision)
                continue
            made = attempt
        if proven:
            for evicted in _memory.put(name, problem, target, made.plan, made.size):
                _drop_routes(evicted)
        else:
            settled = False
        decisions.append(Chosen(name, made.origin))
        counters.fallbacks += len(decisions) > 1
        # An exception's traceback holds this frame, and this frame must not hold it: the call's tensors would stay.
        cause = error = attempt = None
        return Selection(tuple(decisions), Served(name, made.plan, problem, order, target), settled)
    return Selection(tuple(decisions), None, settled, cause)


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
    cases = (_Case(registry.get(name), problem, target) for name in order)
    return tuple(_known(case) or Untried(case.backend.name) for case in cases)


def attempt(
    backend: Any, problem: Any, target: Target, progress: Progress, step: Callable[[], _Result]
) -> _Result | Failed:
    """Take a step of something that is no backend of ours; what it raises is classified, recorded, logged, returned.

    Args:
        backend: has the `name`, `builds`, `versions` and `verdict` of a `Backend`.
        problem: has the `device`, `digest`, `to_json` and `is_written` of an AttentionProblem.
        target: the device.
        progress: where the step stands.
        step: what to do.

    Raises:
        Exception: the step's own, of kind `error`, under SIDESTEP_STRICT=1.
        DeviceLostError: the device cannot be used any more.
    """
    return _guarded(step, _Case(backend, problem, target), progress, False, lambda failed, _: failed)


def remembered(backend: Any, problem: Any, target: Target) -> Decision | None:
    """What records say about something that `attempt` takes; None when only an attempt can tell."""
    case = _Case(backend, problem, target)
    return _unusable.get(backend.name) or _remembered(case)


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
        _memory.clear()
        _unusable.clear()


def _known(case: _Case) -> Decision | None:
    """What rules and records say, or None when only an attempt can tell."""
    if reasons := case.backend.rejects(case.problem):
        return Rejected(case.backend.name, reasons)
    if case.backend.name in _unusable:
        return _unusable[case.backend.name]
    if reasons := known_bad.rejections(case.backend.name, case.problem, case.manifest or {}):
        return Rejected(case.backend.name, reasons)
    return _remembered(case)


def _remembered(case: _Case) -> Remembered | None:
    record = None
    if case.key is not None and case.manifest is not None:
        record = failures.remembered(case.key, case.problem, case.manifest) or _crashed(case)
    if record is None or (record.kind == "error" and settings.get().strict):
        return None  # under SIDESTEP_STRICT=1 a bug is met again, not remembered
    text = failures.summary(record.exception_type, record.exception_text)
    return Remembered(case.backend.name, record.id, record.kind, text)


def _crashed(case: _Case) -> FailureRecord | None:
    """The record of a build that took an earlier process along, made from the intent that it left behind."""
    crash = failures.crash(case.key) if case.key and case.backend.builds else None
    if crash is None:
        return None
    progress = Progress("backward" if case.problem.training else "forward", "build")
    exception = ("ProcessDied", crash.summary, crash.dump or crash.summary)
    return _note(case, "crash", progress, exception, 0.0, crash.time)


def _note(
    case: _Case,
    kind: Kind,
    progress: Progress,
    exception: tuple[str, str, str],
    duration: float,
    at: float | None = None,
) -> FailureRecord | None:
    """Record a failure, where the environment can be read."""
    if case.key is None or case.manifest is None:
        return None
    return failures.note(
        case.key,
        kind,
        case.backend.name,
        case.problem,
        case.manifest,
        direction=progress.direction,
        stage=progress.stage,
        exception=exception,
        duration=duration,
        built_on=case.target.built_on,
        at=at,
    )


def _attempt(case: _Case, tensors: _Tensors | None, strict: bool) -> _Made | tuple[Decision, Exception | None] | None:
    """Load or build a plan.

    Nothing is kept in a variable: an exception's traceback holds this frame, and would be held by it.
    """
    return (
        (_try(_load, case, tensors, strict) if case.plan_key else None)
        or _refused(case)
        or _built_once(case, tensors, strict)
    )


def _refused(case: _Case) -> _Made | tuple[Decision, Exception | None] | None:
    """The rejection of what would have to be built, where nothing may be."""
    if not case.backend.builds or plans.may_build():
        return None
    return Rejected(case.backend.name, _NO_BUILDS), None


def _built_once(
    case: _Case, tensors: _Tensors | None, strict: bool
) -> _Made | tuple[Decision, Exception | None] | None:
    """What a build gives, or what another process of this machine just found out by one."""
    if case.plan_key is None:
        return _try(_build, case, tensors, strict)
    with single_flight(stores.folder(), case.plan_key, _LONGEST_WAIT_S):
        return (
            _try(_load, case, tensors, strict)
            or ((known, None) if (known := _remembered(case)) else None)
            or _try(_build, case, tensors, strict)
        )


def _try(
    step: Callable[[_Case, _Tensors | None, Progress], _Made | None],
    case: _Case,
    tensors: _Tensors | None,
    strict: bool,
) -> _Made | tuple[Decision, Exception | None] | None:
    progress = Progress(on_build=_count_build)
    taken = functools.partial(step, case, tensors, progress)
    return _guarded(taken, case, progress, strict, lambda failed, error: (failed, error))


def _guarded(
    step: Callable[[], _Result],
    case: _Case,
    progress: Progress,
    strict: bool,
    outcome: Callable[[Failed, Exception], _Outcome],
) -> _Result | _Outcome:
    """Take a step; a failure is classified, recorded and given to `outcome`, or raised where that is asked for."""
    started = time.perf_counter()
    try:
        return step()
    except SidestepError:
        raise  # ours, and about something else: a call within the call, a lost device
    except Exception as error:
        with _lock:
            failed = _failed(error, case, progress, time.perf_counter() - started)
        if failed.kind == "error" and (strict or settings.get().strict):
            raise
        return outcome(failed, error)


def _load(case: _Case, tensors: _Tensors | None, progress: Progress) -> _Made | None:
    """The plan from the store, after a first run; None where there is none, or it is of no use and was dropped."""
    key, backend = case.plan_key, case.backend
    if key is None or case.manifest is None or not isinstance(backend, LoadingBackend):
        return None
    record = plans.find(key, case.problem, case.manifest)
    if record is None:
        return None
    if failures.crash(key):
        failures.clear_crash(key)
        plans.not_loaded(key, RuntimeError("loading it ended a process"))
        return None
    progress.stage = "load"
    try:
        with failures.intent(key):
            plan = backend.load(case.problem, case.target, record.graphs)
            if tensors is not None:
                _prove(plan, case, tensors, progress)
    except SidestepError:
        raise
    except Exception as error:
        if _verdict(error, case) == "transient":
            raise
        plans.not_loaded(key, error)
        return None
    counters.loads += 1
    return _Made(plan, record.size, "loaded")


def _build(case: _Case, tensors: _Tensors | None, progress: Progress) -> _Made:
    """A plan that was built, ran, and is kept where that pays."""
    started = time.perf_counter()
    with failures.intent(case.key if case.backend.builds else None):
        plan = case.backend.build(case.problem, case.target, progress)
        seconds = time.perf_counter() - started
        if tensors is not None:
            _prove(plan, case, tensors, progress)
    graphs = progress.graphs
    if not case.backend.builds or not graphs or case.plan_key is None or case.manifest is None:
        return _Made(plan, 0, "built, not kept" if case.backend.builds else "")
    record = PlanRecord(
        key=case.plan_key,
        backend=case.backend.name,
        names=progress.names,
        problem=case.problem.to_json(),
        environment=dict(case.manifest),
        time=time.time(),
        seconds=seconds,
        built_on=case.target.built_on,
        graphs=graphs,
    )
    if seconds > _WORTH_KEEPING_S:
        plans.keep(record)
    return _Made(plan, record.size, "built")


def _count_build() -> None:
    counters.builds += 1


def _prove(plan: Plan, case: _Case, tensors: _Tensors, progress: Progress) -> None:
    """Run a plan on the call's tensors and, where that is asked for, compare its numbers with the reference."""
    problem, target = case.problem, case.target
    _first_run(plan, problem, target, tensors, progress)
    if settings.get().verify:
        progress.stage = "verify"
        with _apart():
            verification.ensure(
                problem,
                target,
                case.verified_key,
                case.manifest or {},
                lambda given, grad_output: _results(plan, problem, given, progress, grad_output),
            )


def _first_run(plan: Plan, problem: AttentionProblem, target: Target, tensors: _Tensors, progress: Progress) -> None:
    """Run the plan once on the call's tensors, and its backward on a zero gradient; random state is put back."""
    progress.direction, progress.stage = "forward", "execute"
    with torch.random.fork_rng([target.index] if problem.device == "cuda" else [], enabled=problem.dropout_p > 0):
        _results(plan, problem, tensors, progress)
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


def _results(
    plan: Plan,
    problem: AttentionProblem,
    tensors: _Tensors,
    progress: Progress,
    grad_output: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
    """The output and, where the problem trains, the gradients for `grad_output` (zeros when None), apart."""
    with _apart():
        detached: list[Any] = [None if tensor is None else tensor.detach() for tensor in tensors]
        query, key, value, mask = detached
        if not problem.training:
            with torch.no_grad():
                return plan.infer(query, key, value, mask), ()
        if isinstance(plan, GraphPlan):
            with torch.no_grad():
                output, *residuals = plan.forward(query, key, value, mask)
                progress.direction = "backward"
                grad_output = torch.zeros_like(output) if grad_output is None else grad_output
                return output, plan.backward(grad_output, query, key, value, mask, output, *residuals)
        leaves = [query, key, value] + ([mask] if problem.mask and problem.mask.requires_grad else [])
        with torch.enable_grad():
            for leaf in leaves:
                leaf.requires_grad_()
            output = plan.infer(query, key, value, mask)
            progress.direction = "backward"
            grad_output = torch.zeros_like(output) if grad_output is None else grad_output
            grads = torch.autograd.grad(output, leaves, grad_output)
        return output.detach(), (*grads, None)[:4]


def recover_backward(
    error: Exception, served: Served, grad_output: torch.Tensor, tensors: _Tensors
) -> tuple[torch.Tensor | None, ...]:
    """Record a backward that failed to run, and compute the gradients by the next backend.

    Raises:
        Exception: `error`, where nothing can be computed instead: dropout is on, the order is strict, the failure
            says nothing of the configuration (out of memory), or no other backend serves.
    """
    problem, target = served.problem, served.target
    case = _Case(registry.get(served.backend), problem, target)
    with _lock:
        # How long it ran is not known: the hot path takes no time.
        failed = _failed(error, case, Progress("backward", "execute"), 0.0)
        if failed.kind != "transient":
            _memory.take(served.backend, problem, target)
            _drop_routes(served.plan)
    rest = served.order[served.order.index(served.backend) + 1 :]
    wanted = failed.kind == "error" and settings.get().strict
    if not rest or wanted or problem.dropout_p > 0 or failed.kind == "transient":
        raise error
    selection = select(problem, rest, target, tensors, strict=False)
    if selection.served is None:
        raise error
    return tuple(_results(selection.served.plan, problem, tensors, Progress(), grad_output)[1])


def _failed(error: Exception, case: _Case, progress: Progress, duration: float) -> Failed:
    """Classify, record and log one failure."""
    counters.build_failures += 1
    name = case.backend.name
    kind = _verdict(error, case)
    if isinstance(error, verification.WrongNumbersError):
        progress.direction = error.direction
    text = failures.summary(_name(error), str(error))
    if kind == "transient":
        failed = Failed(name, kind, text)
        if isinstance(error, (ImportError, OSError)):
            _unusable[name] = failed
        if once(f"transient {name} {text}"):
            logger.info("%s cannot serve now, nothing is kept of it: %s", name, text)
        return failed
    trace = "".join(traceback.format_exception(error))
    record = _note(case, kind, progress, (_name(error), str(error), trace), duration)
    record_id = None if record is None else record.id
    _log(name, case.problem, progress, kind, text, error, record_id)
    return Failed(name, kind, text, record_id)


def _verdict(error: Exception, case: _Case) -> Verdict | Literal["wrong"]:
    if isinstance(error, verification.WrongNumbersError):
        return "wrong"
    if isinstance(error, ImportError) or lacks_memory(error):
        return "transient"
    name, target = case.backend.name, case.target
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    here = case.problem.device == "cuda" and target.profile is None and started
    if here and not torch.cuda.is_current_stream_capturing():
        lost = _lost(target.index)
        if lost is not None:
            raise DeviceLostError(
                f"{name} met a CUDA error that this process cannot survive while serving {case.problem}: {error}. "
                f"Restart the process; `sidestep failures` keeps nothing of it. To go around {name}, leave it "
                f"out of SIDESTEP_BACKENDS; CUDA_LAUNCH_BLOCKING=1 shows the call that failed. ({lost})"
            ) from error
    return case.backend.verdict(error)


def lacks_memory(error: Exception) -> bool:
    """Whether memory, of the host or of the device, was not enough: that says nothing of a configuration."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)


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
    name: str,
    problem: AttentionProblem,
    progress: Progress,
    kind: str,
    text: str,
    error: Exception,
    record_id: str | None,
) -> None:
    """One line for each failure in a process: the id and the command that shows more; a bug is a warning."""
    if not once(f"failure {name} {problem.digest()}"):
        return
    more = f"sidestep failures show {record_id}" if record_id else "nothing could be kept: environment unreadable"
    if kind == "error":
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno}"
        message = "%s failed with a bug, %s, at %s (%s %s) on %s; the next backend is asked. %s"
        logger.warning(message, name, text, where, progress.direction, progress.stage, problem, more)
    elif kind == "wrong":
        message = "%s computes wrong numbers (%s; %s) on %s; the next backend is asked. %s"
        logger.warning(message, name, progress.direction, text, problem, more)
    else:
        message = "%s cannot serve %s (%s %s: %s); the next backend is asked. %s"
        logger.info(message, name, problem, progress.direction, progress.stage, text, more)


def _name(error: Exception) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


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
# The same for calls inside refuse_builds(), which may be answered by another backend than outside.
refusing_routes: dict[tuple[Any, ...], Entry] = {}


# Grows when routes are dropped: one that was decided before is not installed any more.
generation = 0


def install(signature: tuple[Any, ...], entry: Entry, decided: int, refusing: bool) -> None:
    """Let later calls with `signature` run `entry`, unless settings changed since generation `decided`."""
    chosen = refusing_routes if refusing else routes
    with _lock:
        if decided == generation:
            chosen[signature] = entry
        while len(chosen) > MAX_ROUTES:
            del chosen[next(iter(chosen))]


def _drop_routes(plan: Plan | None = None) -> None:
    """Drop the routes that run `plan`, or all."""
    for chosen in (routes, refusing_routes):
        for signature in [signature for signature, entry in chosen.items() if plan is None or entry.plan is plan]:
            # A thread that has just looked it up may still make it the latest: no call is like it any more.
            chosen.pop(signature).flags = ()
    latest.entry = _NO_ENTRY

"""Warm-ups: backends asked about every problem of a SPEC, in child processes side by side. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import LifoQueue, SimpleQueue
from typing import Any

from .decisions import Chosen, Decision, Failed, Rejected, Remembered, describe, to_json
from .errors import SidestepError
from .spec import Item, Spec
from .worker import Answer, Worker

_BUGS = ("error", "crash", "timeout", "wrong")
_MOST_ON_A_GPU = 8  # children; each holds a CUDA context, about 0.5 GB


@dataclass(frozen=True)
class Outcome:
    """What a warm-up found for one problem; `answer` is None where the output is constant and nobody was asked."""

    item: Item
    answer: Answer | None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """About every backend asked, in order."""
        return self.answer.decisions if self.answer else ()

    @property
    def served_by(self) -> str | None:
        """The backend that serves, if one does."""
        return next((decision.backend for decision in self.decisions if isinstance(decision, Chosen)), None)

    @property
    def is_bug(self) -> bool:
        """A backend failed, now or before, in a way that is no refusal."""
        return any(isinstance(one, (Failed, Remembered)) and one.kind in _BUGS for one in self.decisions)

    @property
    def word(self) -> str:
        """The outcome in one word."""
        if self.answer is None:
            return "constant"
        if self.served_by:
            return "served"
        if self.is_bug:
            return "bug"
        if any(isinstance(decision, Remembered) for decision in self.decisions):
            return "known bad"
        return "by rule" if all(isinstance(decision, Rejected) for decision in self.decisions) else "refused"

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON."""
        return {
            **item_json(self.item),
            "outcome": self.word,
            "served_by": self.served_by,
            "decisions": list(map(to_json, self.decisions)),
            "seconds": self.answer.seconds if self.answer else 0.0,
            "counters": dict(self.answer.counters) if self.answer else {},
        }


def default_jobs(device: str | None) -> int:
    """How many children work side by side: one for each core of this process; on a GPU that is here, 8 at most."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return cores if device is not None else min(cores, _MOST_ON_A_GPU)


def warm_up(
    spec: Spec,
    device: str | None = None,
    backends: Sequence[str] | None = None,
    timeout: float = 300.0,
    jobs: int = 1,
    verify: bool = False,
) -> Generator[Outcome, None, None]:
    """Ask about every problem; outcomes come as they are found, with one job in the SPEC's order.

    The counters of this process grow by the children's. The children end with the iterator: at once where it is closed
    early, interrupted, or raises, and then what was found by that time still comes first.

    Args:
        spec: the problems.
        device: a device profile; None for this machine's devices.
        backends: in order; None for the order in force (cudnn, for an absent GPU).
        timeout: seconds per problem.
        jobs: children at a time; never more than problems.
        verify: compare what serves with the reference, as SIDESTEP_VERIFY=1 does.

    Raises:
        WorkerError: the work cannot be done here.
        ChildError: under SIDESTEP_STRICT=1, a backend's bug.
    """
    workers = [Worker(device, verify) for _ in range(min(jobs, len(spec.items)))]
    idle: LifoQueue[Worker] = LifoQueue()  # one that has its child already is taken first
    for worker in workers:
        idle.put(worker)

    def ask(item: Item) -> Outcome:
        if item.constant:
            return Outcome(item, None)
        worker = idle.get()
        try:
            return Outcome(item, worker.ask(item.problem, backends, timeout))
        finally:
            idle.put(worker)

    executor = ThreadPoolExecutor(max(len(workers), 1), thread_name_prefix="warm-up")
    found: SimpleQueue[Future[Outcome]] = SimpleQueue()
    finished = False
    try:
        for future in [executor.submit(ask, item) for item in spec.items]:
            future.add_done_callback(found.put)
        try:
            for _ in spec.items:
                yield found.get().result()
            finished = True
        except (SidestepError, KeyboardInterrupt):
            _stop(executor, workers)
            while not found.empty():
                future = found.get()
                if not future.cancelled() and future.exception() is None:
                    yield future.result()
            raise
    finally:
        if finished:
            list(executor.map(Worker.close, workers))  # they take their time, side by side
        else:
            _stop(executor, workers)
        executor.shutdown()


def _stop(executor: ThreadPoolExecutor, workers: Sequence[Worker]) -> None:
    """End every child at once, and wait for the threads that ask them."""
    for worker in workers:
        worker.stop()
    executor.shutdown(cancel_futures=True)
    for worker in workers:
        worker.close(at_once=True)


def outcome_text(outcome: Outcome) -> str:
    """An outcome for people: one line, and below it why no backend before the serving one serves."""
    answer = outcome.answer
    head = f"{outcome.word:<9} {answer.seconds if answer else 0:5.1f} s  {outcome.item.problem}"
    if answer is None:
        return f"{head}\n    zeros or empty whatever the numbers: no backend is asked"
    builds = answer.counters["builds"]
    return f"{head}  [builds {builds}]\n" + "\n".join(f"  {line}" for line in describe(answer.decisions).splitlines())


def summary(outcomes: Sequence[Outcome]) -> str:
    """The counters of a warm-up in one line."""
    words = [outcome.word for outcome in outcomes]
    counted = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    total = {
        name: sum(outcome.answer.counters[name] for outcome in outcomes if outcome.answer)
        for name in ("builds", "loads", "build_failures", "skipped_known_bad")
    }
    seconds = sum(outcome.answer.seconds for outcome in outcomes if outcome.answer)
    counters = ", ".join(f"{name} {value}" for name, value in total.items())
    return f"{len(outcomes)} problems: {counted or 'none'}; {counters}; {seconds:.1f} s"


def item_json(item: Item) -> dict[str, Any]:
    """A problem of a SPEC as JSON."""
    return {
        "label": item.label,
        "text": str(item.problem),
        "problem": item.problem.to_json(),
        "constant": item.constant,
    }

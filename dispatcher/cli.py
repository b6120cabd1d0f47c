"""The command line: each command is a pure function that returns data, and two printers.

Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 not found or the work failed, 2 wrong usage, a SPEC or a
setting that cannot be used included, 130 interrupted (143 by SIGTERM, 129 by SIGHUP). torch, cudnn, yaml and rich are
imported by the commands that need them: a listing must not wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib
import io
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from . import __version__, api, plans, stores
from . import failures as records
from . import settings as settings_table
from .cache import FailureRecord, Kind
from .decisions import Chosen, Decision, to_json
from .errors import SidestepError
from .problem import AttentionProblem
from .symbol_problem import SymbolProblem

if TYPE_CHECKING:
    from .backends.base import Target
    from .spec import Spec
    from .warmup import Outcome
    from .worker import Answer, ChildError

_PIPE_WIDTH = 1000  # columns: a pipe has no edge at which a line would have to be cut
_NARROWEST = 20  # columns, in which a sentence can still be read
_NOT_PRINTED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class _Program(click.Command):
    """What is started from a shell: it prints to whatever there is, in whatever encoding, and says when it cannot."""

    def main(self, *args: Any, **options: Any) -> Any:
        _open_streams()
        try:
            return super().main(*args, **options)
        except OSError as error:
            if error.filename is not None or error.errno not in _NOT_PRINTED:
                raise
            with contextlib.suppress(OSError):
                click.echo(
                    f"Error: the output cannot be written ({error.strerror}); what was done stays done", err=True
                )
            with open(os.devnull, "w") as nothing:  # for what the interpreter flushes at its end
                os.dup2(nothing.fileno(), 1)
            sys.exit(1)


def _open_streams() -> None:
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, this one; a database or a bundle would have it otherwise, and what is printed.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class Interrupted(KeyboardInterrupt):
    """A signal asked the process to end: as Ctrl-C does, so that children end and what was done is told."""

    def __init__(self, number: int = signal.SIGINT, _frame: object = None) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number  # as shells say it

    @classmethod
    def handle(cls, number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice: the second must not disturb the end
        raise cls(number, frame)


@contextmanager
def _signals_are_exceptions() -> Iterator[None]:
    """SIGTERM (a job's time is over, a container stops) and SIGHUP (the terminal is gone), unless they are ignored."""
    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, Interrupted.handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_code(interrupt: KeyboardInterrupt) -> int:
    return interrupt.exit_code if isinstance(interrupt, Interrupted) else Interrupted().exit_code


class _Command(_Program):
    """Sidestep's own exceptions as click's: a text on stderr, and the exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _signals_are_exceptions():
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            click.echo(f"interrupted ({str(interrupt) or 'SIGINT'})", err=True)
            sys.exit(_exit_code(interrupt))
        except SidestepError as error:
            kind = click.UsageError if isinstance(error, ValueError) else click.ClickException
            raise kind(str(error)) from error


class _Group(_Program, click.Group):
    command_class = _Command
    group_class = type


def _names(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    from .backends import registry

    names = tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        registry.expand(names)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return names


def _seconds(_context: click.Context, _option: click.Parameter, number: float) -> float:
    if not 0 < number <= 1e9:  # nan too; the operating system's clock ends somewhere beyond
        raise click.BadParameter(f"expected seconds, more than 0 and 1e9 at most, got {number:g}")
    return number


_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
_backends = click.option("--backends", callback=_names, metavar="A,B", help="Names in the order in which to ask them.")
_timeout = click.option(
    "--timeout", type=float, callback=_seconds, default=300.0, show_default=True, help="Seconds per problem."
)
_kind = click.option("--kind", type=click.Choice(get_args(Kind)), help="Only records of this kind.")


_problem_options = (
    click.option("--batch", type=int, required=True),
    click.option("--heads", type=int, required=True),
    click.option("--kv-heads", type=int, help="Default: heads."),
    click.option("--query-length", type=int, required=True),
    click.option("--key-length", type=int, help="Default: query length."),
    click.option("--head-size", type=int, required=True),
    click.option("--value-head-size", type=int, help="Default: head size."),
    click.option("--dtype", default="bfloat16", show_default=True),
    click.option("--layout", default="bhsd", show_default=True, help="bhsd or bshd: the order in memory."),
    click.option("--causal", is_flag=True),
    click.option("--training", is_flag=True),
    click.option("--mask", default="none", show_default=True, help="none, bool, float32, or same (the query's dtype)."),
    click.option("--mask-shape", default="1,1,S_q,S_kv", show_default=True, help="Of B, H, S_q, S_kv and numbers."),
    click.option("--mask-grad", is_flag=True, help="The mask needs a gradient."),
    click.option("--dropout", type=float, default=0.0, show_default=True),
    click.option("--scale", type=float, help="Default: 1/sqrt(head size)."),
    click.option("--device", metavar="cpu|cuda|PROFILE", help="Default: cuda where there is a GPU, else cpu."),
)


def _of_problem(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that describe a problem, in the order in which they stand above."""
    return functools.reduce(lambda made, option: option(made), reversed(_problem_options), command)


def _problem_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those options as a SPEC's fields.

    Raises:
        SpecError: the problem cannot be; told before torch is imported.
    """
    from . import spec

    shape = [int(part) if part.strip().isdecimal() else part.strip() for part in given["mask_shape"].split(",")]
    fields = {name: value for name, value in {**given, "mask_shape": shape}.items() if value is not None}
    spec.problem_of(fields)
    return fields


@click.group(cls=_Group)
@click.version_option(__version__, prog_name="sidestep")
def main() -> None:
    """Scaled dot-product attention by the first backend that really works: what is known, and why."""


# failures ------------------------------------------------------------------------------------------------------------


@main.group()
def failures() -> None:
    """The records of builds that failed. IDs may be cut to any unique prefix."""


@failures.command("list")
@_kind
@click.option("--backend", help="Only this backend's.")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Only the N newest.")
@_json
def failures_list(kind: str | None, backend: str | None, last: int | None, as_json: bool) -> None:
    """List the records, the newest first."""
    found = list(itertools.islice(select_records(kind, backend), last))
    _require_cache()
    if as_json:
        _print_json([record_json(record) for record in found])
    elif found:
        rows = [
            (
                record.id,
                record.kind,
                record.backend,
                record.direction,
                str(record.count),
                _iso(record.last_time)[:16],
                problem_text(record),
                _first_line(record),
            )
            for record in found
        ]
        header = ("ID", "KIND", "BACKEND", "DIRECTION", "COUNT", "LAST (UTC)", "PROBLEM", "EXCEPTION")
        _print_table(header, rows, whole=6)
    else:
        click.echo(f"no such failures on record ({_place()})", err=True)


@failures.command("show")
@click.argument("id")
@_json
def failures_show(id: str, as_json: bool) -> None:  # noqa: A002 - the name on the command line
    """Show all of one record, its traceback included."""
    record = find_record(id)
    if as_json:
        _print_json([record_json(record)])
    else:
        click.echo(_clean(record_text(record)))


def _one_backend(_context: click.Context, _option: click.Parameter, name: str) -> str:
    from .backends import registry

    try:
        (single,) = registry.expand((name,))
    except ValueError as error:
        known = ", ".join(registry.known())
        raise click.BadParameter(f"expected one backend, got {name!r}; known: {known}") from error
    return single


@failures.command("add")
@click.option("--backend", required=True, callback=_one_backend, help="The backend that is not to serve it.")
@click.option(
    "--kind",
    type=click.Choice(["denied"]),
    default="denied",
    show_default=True,
    help="A person says so.",
)
@click.option("--reason", default="", metavar="TEXT", help="Why; `show` prints it.")
@_of_problem
@_json
def failures_add(backend: str, kind: Kind, reason: str, device: str | None, as_json: bool, **given: Any) -> None:
    """Forbid a backend to serve a problem; `failures forget ID` allows it again. Prints the record's ID.

    The record is valid where this machine's versions, and the device that is meant, are the same.
    """
    record = deny(_problem_fields(given), device, backend, reason, kind)
    _require_cache()
    if as_json:
        _print_json([record_json(record)])
    else:
        click.echo(f"{backend} is not asked any more: {problem_text(record)}", err=True)
        click.echo(record.id)


def deny(
    fields: Mapping[str, Any], device: str | None, backend: str, reason: str, kind: Kind = "denied"
) -> FailureRecord:
    """Record that a person forbids a backend to serve a problem.

    Args:
        fields: as in a SPEC, without `device`.
        device: as for `explain_problem`.
        backend: its name.
        reason: kept as the exception's text.
        kind: of the record.

    Raises:
        SpecError: the problem cannot be, or asks no backend.
        WorkerError: the device profile cannot be used here, or the environment that the record would be valid for
            cannot be known.
    """
    from . import environment
    from .backends import registry
    from .cache import failure_key
    from .semantics import constant_output
    from .spec import SpecError
    from .worker import WorkerError

    device, target, problem = _problem_on(fields, device)
    if constant_output(problem):
        raise SpecError(f"nothing to forbid: no backend is asked for zeros or nothing, as the output is of {problem}")
    if device == "cuda" and not _has_gpu():
        raise WorkerError(
            "no GPU here, so the environment that the record would be valid for cannot be known: give the GPU's "
            "profile, --device PROFILE (h200), or run this on the GPU machine"
        )
    manifest = environment.manifest(registry.get(backend), problem.device, target)
    if manifest is None:
        raise WorkerError(f"the versions of {backend} cannot be read here, and a record is valid for these alone")
    return records.note(
        failure_key(environment.digest(manifest), backend, problem.digest()),
        kind,
        backend,
        problem,
        manifest,
        direction="backward" if problem.training else "forward",
        stage="denied",
        exception=("Denied", reason or "a person said so", ""),
        duration=0.0,
        built_on=target.built_on,
    )


@failures.command("forget")
@click.argument("ids", nargs=-1, metavar="ID...")
@click.option("--all", "everything", is_flag=True, help="Every record, or all of a kind.")
@_kind
@_json
def failures_forget(ids: tuple[str, ...], everything: bool, kind: str | None, as_json: bool) -> None:
    """Forget records, so that the next call tries the backend again."""
    if bool(ids) == (everything or kind is not None):
        raise click.UsageError("give IDs, or --all, or --kind KIND")
    found = [find_record(one) for one in ids] if ids else list(select_records(kind, None))
    _require_cache()
    for record in found:
        records.forget(record)
    if as_json:
        _print_json([{"id": record.id} for record in found])
    else:
        click.echo(f"forgotten: {', '.join(record.id for record in found) or 'nothing, there was none'}", err=True)


@failures.command("retry")
@click.argument("id")
@click.option("--device", metavar="PROFILE", help="The device profile of a record made for an absent GPU.")
@_timeout
@_json
def failures_retry(id: str, device: str | None, timeout: float, as_json: bool) -> None:  # noqa: A002 - as above
    """Try again now, in a child process: on success the record is forgotten, else renewed."""
    from .worker import ChildError

    record = find_record(id)
    try:
        decision = retry(record, device, timeout).decisions[0]
    except ChildError as error:
        if as_json:
            _print_json([{"id": record.id, "forgotten": False, "decision": None}], True, error)
        _fail(error)
    forgotten = isinstance(decision, Chosen)
    if as_json:
        _print_json([{"id": record.id, "forgotten": forgotten, "decision": to_json(decision)}], True)
    else:
        what = "works now; the record is forgotten" if forgotten else str(decision)
        click.echo(_clean(f"{decision.backend}: {what}"))
    sys.exit(0 if forgotten else 1)


def select_records(kind: str | None, backend: str | None) -> Iterator[FailureRecord]:
    """The records of a kind and a backend (None: of all), newest first."""
    for record in records.records():
        if kind in (None, record.kind) and backend in (None, record.backend):
            yield record


def find_record(id_prefix: str) -> FailureRecord:
    """The one record whose id begins with `id_prefix`.

    Raises:
        click.ClickException: there is none, or there are several.
    """
    found = records.find(id_prefix) if id_prefix else []
    _require_cache()
    if not found:
        raise click.ClickException(f"no record {id_prefix!r} ({_place()}); see: sidestep failures list")
    if len(found) > 1:
        raise click.ClickException(
            f"{id_prefix!r} is ambiguous: {', '.join(sorted(record.id for record in found))}; give more digits"
        )
    return found[0]


def record_json(record: FailureRecord) -> dict[str, Any]:
    """A record as JSON: its fields, times in ISO 8601, its id, and when it is tried again."""
    retry_time = record.retry_time()
    return {
        "id": record.id,
        **record.to_json(),
        "first_time": _iso(record.first_time),
        "last_time": _iso(record.last_time),
        "retry_time": None if retry_time is None else _iso(retry_time),
    }


def record_text(record: FailureRecord) -> str:
    """All of a record for people."""
    retry_time = record.retry_time()
    never = "never, a person said so" if record.kind == "denied" else "when the environment changes"
    lines = {
        "kind": record.kind,
        "backend": record.backend,
        "failed in": f"{record.direction}, {record.stage}, after {record.duration:.3g} s",
        "problem": problem_text(record),
        "exception": f"{record.exception_type}: {record.exception_text}",
        "first": _iso(record.first_time),
        "last": f"{_iso(record.last_time)} (count {record.count})",
        "tried again": never if retry_time is None else f"after {_iso(retry_time)}, or when the environment changes",
        "built on": "a machine without the GPU" if record.built_on == "offline" else "the device itself",
        "environment": ", ".join(f"{name} {value}" for name, value in record.environment.items()),
        "as JSON": json.dumps(record.problem),
    }
    return "\n".join(
        [
            f"failure {record.id}",
            *(f"  {name:<12} {text}" for name, text in lines.items()),
            "",
            record.traceback.rstrip(),
            "",
            f"  try it now:  sidestep failures retry {record.id}",
            f"  forget it:   sidestep failures forget {record.id}",
        ]
    )


def problem_text(record: FailureRecord) -> str:
    """The record's problem in one line; as JSON where another version wrote it."""
    for kind in (AttentionProblem, SymbolProblem):
        with suppress(ValueError):
            return str(kind.from_json(record.problem))
    return json.dumps(record.problem)


def retry(record: FailureRecord, device: str | None, timeout: float) -> Answer:
    """Ask the record's backend again, in a child; the record is forgotten on success, else renewed or kept.

    Args:
        record: what failed.
        device: the device profile for a record made offline; None for the shipped one of its GPU.
        timeout: seconds.

    Raises:
        WorkerError: it cannot be tried here; the record is kept.
        ChildError: under SIDESTEP_STRICT=1, the backend's bug.
    """
    from .worker import Worker, WorkerError

    if record.kind in ("wrong", "denied"):
        reason = "found wrong by its numbers, which a build does not show" if record.kind == "wrong" else "denied"
        raise WorkerError(f"{record.id} was {reason}; to allow it: sidestep failures forget {record.id}")
    if record.backend.startswith("thunder:"):
        raise WorkerError(
            f"{record.id} is of an executor of Thunder's, which only a trace can try again: "
            f"sidestep failures forget {record.id}, and run the program"
        )
    try:
        problem = AttentionProblem.from_json(record.problem)
    except ValueError as error:
        raise WorkerError(f"{record.id} was written by another version, and is kept: {error}") from error
    if record.built_on == "offline":
        device = _shipped_profile(record) if device is None else device
    forgotten = False
    with Worker(device) as worker:
        records.expire(record)
        try:
            answer = worker.ask(problem, [record.backend], timeout, only_in=record.environment)
            forgotten = isinstance(answer.decisions[0], Chosen)
        finally:
            if forgotten:
                records.forget(record)
            else:
                records.restore(record)
    return answer


def _shipped_profile(record: FailureRecord) -> str:
    from .backends.cudnn_offline import PROFILE_FOLDER, OfflineError, load_profile
    from .worker import WorkerError

    wanted = (record.environment.get("device"), record.environment.get("cudnn"))
    for path in sorted(PROFILE_FOLDER.glob("*.json")):
        try:
            profile = load_profile(str(path))
        except OfflineError as error:
            raise WorkerError(str(error)) from error
        if (profile.device_name, profile.cudnn) == wanted:
            return str(path)
    raise WorkerError(
        f"{record.id} was made for {wanted[0]} with cuDNN {wanted[1]}, for which no device profile is shipped: "
        "give one with --device PROFILE. The record is kept"
    )


# explain -------------------------------------------------------------------------------------------------------------


@main.command()
@_of_problem
@_backends
@_json
def explain(device: str | None, backends: tuple[str, ...] | None, as_json: bool, **given: Any) -> None:
    """What a call would meet, by rules and records alone: nothing is built or run."""
    fields = _problem_fields(given)
    device, decisions, problem = explain_problem(fields, device, backends)
    if as_json:
        click.echo(
            json.dumps(
                {"schema": 1, "items": list(map(to_json, decisions)), "device": device, "problem": problem.to_json()}
            )
        )
        return
    click.echo(f"{problem}; device {device}", err=True)
    if not decisions:
        click.echo("the output is zeros or empty whatever the numbers: no backend is asked", err=True)
        return
    _print_table(("BACKEND", "DECISION"), [(decision.backend, str(decision)) for decision in decisions], whole=1)


def explain_problem(
    fields: Mapping[str, Any], device: str | None, backends: Sequence[str] | None
) -> tuple[str, tuple[Decision, ...], AttentionProblem]:
    """What is known of a problem, and nothing tried.

    Args:
        fields: as in a SPEC, without `device`.
        device: 'cpu', 'cuda' or a device profile; None for cuda where there is a GPU, else cpu.
        backends: in order; None for the order in force.

    Returns:
        The device, the decisions (none where the output is constant), the problem.

    Raises:
        SpecError: the problem cannot be.
        WorkerError: the device profile cannot be used here.
    """
    from . import selection
    from .backends import registry
    from .semantics import constant_output

    device, target, problem = _problem_on(fields, device)
    if device == "cuda" and not _has_gpu():
        click.echo("no GPU here: rules alone can tell; records need a GPU, or a device profile (h200)", err=True)
    if constant_output(problem):
        return device, (), problem
    order = registry.expand(settings_table.get().backends if backends is None else backends)
    return device, selection.explain(problem, order, target), problem


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _problem_on(fields: Mapping[str, Any], device: str | None) -> tuple[str, Target, AttentionProblem]:
    """The device that is meant, as a target too, and the problem on it; arguments and exceptions of explain_problem."""
    from . import spec
    from .backends.base import Target
    from .backends.cudnn_offline import OfflineError, check_version, load_profile
    from .worker import WorkerError

    if device is None:
        device = "cuda" if _has_gpu() else "cpu"
    target = Target(-1 if device == "cpu" else 0)
    if device not in ("cpu", "cuda"):
        try:
            target = Target(0, load_profile(device))
            assert target.profile is not None
            import cudnn

            check_version(target.profile, int(cudnn.backend_version()))
        except (OfflineError, ImportError) as error:
            raise WorkerError(str(error)) from error
    return device, target, spec.problem_of({**fields, "device": "cpu" if device == "cpu" else "cuda"})


# warmup --------------------------------------------------------------------------------------------------------------


def _list(kind: type) -> Callable[..., Any]:
    """Reads `1,2`."""

    def read(_context: click.Context, _option: click.Parameter, text: str | None) -> tuple[Any, ...]:
        try:
            return tuple(kind(part.strip()) for part in (text or "").split(",") if part.strip())
        except ValueError as error:
            raise click.BadParameter(f"expected whole numbers with commas between them, got {text!r}") from error

    return read


def _list_models(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    from .models import models

    if context.params.get("as_json"):
        _print_json([{"name": name, **model.to_json()} for name, model in models().items()])
    else:
        rows = [
            (name, "; ".join(_fields_text(fields) for fields in model.problems), model.note, model.source)
            for name, model in models().items()
        ]
        _print_table(("MODEL", "ATTENTION", "NOTE", "SOURCE"), rows, whole=1)
    context.exit()


def _fields_text(fields: Mapping[str, Any]) -> str:
    return ", ".join(name if value is True else f"{name} {value}" for name, value in fields.items())


@main.command()
@click.argument(
    "spec", metavar="[SPEC]", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path), default=None
)
@click.option(
    "--model", callback=_list(str), metavar="A,B", help="The attention of well-known models, with SPEC or without."
)
@click.option("--wanted", is_flag=True, help="What was called while nothing could be built (SIDESTEP_BUILD=never).")
@click.option("--list-models", is_flag=True, callback=_list_models, expose_value=False, help="List them, and exit.")
@click.option("--batch", callback=_list(int), metavar="N,...", help="Of --model: batch sizes. Default: 1.")
@click.option(
    "--length", callback=_list(int), metavar="N,...", help="Of --model: lengths of queries and keys, in tokens."
)
@click.option("--training", is_flag=True, help="Of --model: with gradients and the model's dropout.")
@click.option("--inference", is_flag=True, help="Of --model: without; the default where --training is not given.")
@click.option("--dtype", callback=_list(str), metavar="A,...", help="Of --model. Default: bfloat16.")
@click.option(
    "--layout", callback=_list(str), metavar="A,...", help="Of --model: bshd, the default, or bhsd in memory."
)
@click.option("--device", metavar="PROFILE", help="Build for a GPU that is not here: a shipped name (h200) or a path.")
@_backends
@_timeout
@click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="Child processes side by side. Default: the cores; without --device 8 at most, for each holds about 0.5 GB "
    "of the GPU.",
)
@click.option(
    "--verify", is_flag=True, help="Compare output and gradients with float64 attention; what is wrong is recorded."
)
@click.option("--dry-run", is_flag=True, help="Only list the problems.")
@click.option("--json", "as_json", is_flag=True, is_eager=True, help="One JSON object on stdout.")
def warmup(
    spec: Path | None,
    device: str | None,
    backends: tuple[str, ...] | None,
    timeout: float,
    jobs: int | None,
    verify: bool,
    dry_run: bool,
    as_json: bool,
    **presets: Any,
) -> None:
    """Ask the backends about every problem of a SPEC (YAML), in child processes, and record what they refuse.

    What is known by then is not tried again, so a warm-up that was interrupted goes on where it was. Exit code 0 though
    there are refusals; 1 where a backend has a bug (error, crash, timeout, wrong) or the work failed; 130 where Ctrl-C
    ended it: what was found stays recorded.
    """
    from .warmup import default_jobs, item_json, summary, warm_up
    from .worker import ChildError, WorkerError, offline_order

    if verify and device is not None:
        raise click.UsageError(
            "--verify runs what it verifies, and the GPU of --device is not here: nothing can be run"
        )
    loaded = _problems(spec, **presets)
    if device is not None:
        try:
            offline_order(backends)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--backends") from error
        loaded = _for_a_gpu(loaded)
    if loaded.skipped:
        click.echo(f"{loaded.skipped} combinations skipped that cannot be (causal with a mask, mask_grad)", err=True)
    if dry_run:
        if as_json:
            _print_json(list(map(item_json, loaded.items)))
        else:
            for item in loaded.items:
                click.echo(f"{item.label}  {item.problem}")
        return
    outcomes: list[Outcome] = []
    ended_by: ChildError | WorkerError | KeyboardInterrupt | None = None
    found = warm_up(loaded, device, backends, timeout, jobs or default_jobs(device), verify)
    with _reporter(len(loaded.items), as_json) as report, closing(found):
        try:
            for outcome in found:
                if presets["wanted"]:
                    plans.not_wanted(outcome.item.problem)
                outcomes.append(outcome)
                report(outcome)
        except (ChildError, WorkerError, KeyboardInterrupt) as error:
            ended_by = error
    if as_json:
        position = {item.problem: number for number, item in enumerate(loaded.items)}
        outcomes.sort(key=lambda outcome: position[outcome.item.problem])
        _print_json([outcome.to_json() for outcome in outcomes], True, ended_by)
    elif outcomes or ended_by is None:
        click.echo(summary(outcomes))
    if isinstance(ended_by, KeyboardInterrupt):
        click.echo(
            f"interrupted: {len(outcomes)} of {len(loaded.items)} problems done; the same command goes on", err=True
        )
        sys.exit(_exit_code(ended_by))
    if isinstance(ended_by, ChildError):
        _fail(ended_by)
    if ended_by is not None:
        raise ended_by
    _require_cache()
    sys.exit(1 if any(outcome.is_bug for outcome in outcomes) else 0)


def _problems(
    spec: Path | None, wanted: bool, model: Sequence[str], training: bool, inference: bool, **given: Sequence[Any]
) -> Spec:
    """Those of the SPEC, those wanted, and those of the models."""
    from . import models
    from .spec import Item, Spec, load

    if not model:
        options = {**given, "training": training, "inference": inference}
        if unused := [f"--{name}" for name, value in options.items() if value]:
            raise click.UsageError(f"{', '.join(unused)}: of --model, which is not given; a SPEC says it itself")
        if spec is None and not wanted:
            raise click.UsageError("give a SPEC, or --model NAME (see --list-models), or --wanted")
    loaded = Spec((), 0) if spec is None else load(spec)
    if wanted:
        loaded += Spec(tuple(Item(problem, "wanted", False) for problem in plans.wanted()), 0)
    if model:
        trains = [False] * (inference or not training) + [True] * training
        chosen = {name: value for name, value in given.items() if value and name not in ("batch", "length")}
        loaded += models.spec_of(model, given["batch"] or (1,), given["length"], training=trains, **chosen)
    return loaded


def _for_a_gpu(spec: Spec) -> Spec:
    """Without the CPU's problems, which a GPU's profile says nothing of."""
    items = tuple(item for item in spec.items if item.problem.device != "cpu")
    if left_out := len(spec.items) - len(items):
        click.echo(
            f"{left_out} problems of device cpu skipped: --device is about a GPU; leave it out for them", err=True
        )
    return dataclasses.replace(spec, items=items)


@contextmanager
def _reporter(total: int, quiet: bool) -> Iterator[Callable[[Outcome], None]]:
    """Prints outcomes as they come: on stdout, or, where that is for JSON, in short on stderr; a bar on a terminal."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress
    from rich.text import Text

    from .warmup import outcome_text

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("warm-up", total=total)

            def tell(outcome: Outcome) -> None:
                if not quiet and sys.stdout.isatty():
                    console.print(Text(_clean(outcome_text(outcome))))
                elif not quiet:
                    click.echo(_clean(outcome_text(outcome)))
                progress.advance(task)

            yield tell
        return
    done = itertools.count(1)

    def line(outcome: Outcome) -> None:
        if quiet:
            click.echo(f"[{next(done)}/{total}] {outcome.word}: {outcome.item.problem}", err=True)
        else:
            click.echo(_clean(f"[{next(done)}/{total}] {outcome_text(outcome)}"))

    yield line


# device-profile -------------------------------------------------------------------------------------------------------


@main.command("device-profile")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--name", help="The profile's name; the file's without its ending when left out.")
def device_profile(file: Path, name: str | None) -> None:
    """Record this machine's GPU in FILE, for `warmup --device FILE` where it is not."""
    from .backends import cudnn_offline

    try:
        profile = cudnn_offline.record_profile(file, name or file.stem)
    except cudnn_offline.OfflineError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{file}: {profile.device_name}, cuDNN {profile.cudnn}", err=True)


# settings ------------------------------------------------------------------------------------------------------------


@main.command()
@_json
def settings(as_json: bool) -> None:
    """The settings in force, and what they mean."""
    rows = settings_json()
    if as_json:
        _print_json(rows)
    else:
        _print_table(
            ("VARIABLE", "VALUE", "MEANING"), [(r["variable"], r["text"], r["meaning"]) for r in rows], whole=2
        )


_JSON = (str, int, float, tuple, type(None))  # as they are; files are texts


def settings_json() -> list[dict[str, Any]]:
    """Every setting: name, variable, value, the value as the variable's text, meaning; no secrets."""
    chosen = settings_table.get()
    texts = chosen.to_environ()
    return [
        {
            "name": setting.name,
            "variable": setting.metadata["variable"],
            "value": value if isinstance(value := chosen.shown(setting.name), _JSON) else str(value),
            "text": setting.metadata["show"](texts[setting.metadata["variable"]]),
            "meaning": setting.metadata["meaning"],
        }
        for setting in dataclasses.fields(chosen)
    ]


# printing ------------------------------------------------------------------------------------------------------------


def _print_json(items: Sequence[Any], with_stats: bool = False, error: BaseException | None = None) -> None:
    data: dict[str, Any] = {"schema": 1, "items": items}
    if with_stats:
        data["stats"] = api.stats()
    if error is not None:
        from .worker import ChildError

        told = error if isinstance(error, ChildError) else ChildError(type(error).__name__, str(error), "")
        data["error"] = {"type": told.exception_type, "text": told.text, "traceback": told.traceback}
    click.echo(json.dumps(data))


def _print_table(header: Sequence[str], rows: Iterable[Sequence[str]], whole: int) -> None:
    """A table, as wide as its contents in a pipe; on a terminal the first `whole` columns stay whole, others wrap.

    Where a terminal leaves them no room, they are on lines of their own, below.
    """
    from rich.cells import cell_len, set_cell_size
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[_clean(cell) for cell in row] for row in rows]
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    widths = [max(map(cell_len, column)) for column in zip(*(row[:whole] for row in (header, *cells)), strict=True)]
    if sum(widths) + 2 * whole + _NARROWEST * (len(header) - whole) > console.width:
        for row in (header, *cells):
            click.echo("  ".join(map(set_cell_size, row, widths)).rstrip())
            for cell in row[whole:]:
                click.echo(f"    {cell}")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(header):
        table.add_column(name, no_wrap=index < whole, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    with console.capture() as printed:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))


def _fail(error: ChildError) -> None:
    """Show an exception that ended a child, as it was, and exit."""
    click.echo(error.traceback.rstrip(), err=True)
    click.echo("Error: the child ended by this exception", err=True)
    sys.exit(1)


def _require_cache() -> None:
    if not stores.usable("failures"):
        raise click.ClickException(f"the cache in {settings_table.get().directory()} cannot be used")


def _place() -> str:
    chosen = settings_table.get()
    if chosen.cache == "off":
        return "SIDESTEP_CACHE=off keeps none between processes"
    return f"in {chosen.directory()}" + ("" if chosen.cache == "disk" else f" and {chosen.shown('cache')}")


def _clean(text: str) -> str:
    """The text without what a terminal would obey: a record may hold any bytes."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _first_line(record: FailureRecord) -> str:
    text = records.summary(record.exception_type, record.exception_text)
    return text[: 80 if sys.stdout.isatty() else 200]


def _iso(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # a planted time beyond the year 9999
        return f"{seconds:g} s since 1970"


importlib.import_module(".cache_cli", __package__)  # adds `sidestep cache` with the group and the printers from above

"""Whose numbers are right: torch's choice, torch's kernels, Thunder's cudnn executor and Sidestep, in one table.

    python scripts/compare_numbers.py --output numbers.jsonl [--sets public,trap3,fp32,bias] [--seconds 540]
    python scripts/compare_numbers.py --output numbers.jsonl --thunder-site FOLDER
    python scripts/compare_numbers.py --output numbers.jsonl --summary
    python scripts/compare_numbers.py --output numbers.jsonl --device cpu --limit 20

Problems are the public cases of tests/cases, with their own data, and the sets of scripts/sweep_numbers.py, none with
dropout, each on the adversarial data of SIDESTEP_VERIFY. A contestant is asked once, so that what is decided at a
first call is decided, and then for each set of data, with NaN in the memory that its results are about to get. Output
and every gradient are compared with float64 attention, within the tolerances of SIDESTEP_VERIFY. A problem is

    right      all of it, on all data; where the call is one that nobody can answer: it raised
    wrong      some number is not what it should be
    NaN        some number is not finite where it should be
    refused    it raised; Thunder's executor also where it left the call to others
    crash      the process died, hung, or lost the device

Each contestant has children of its own; one that dies costs the problem it was at. The output has a line for each
problem and contestant, and what it holds is not run again: a run that was cut goes on where it ended. The exit code
is 1 where Sidestep has a problem that is wrong, NaN or a crash.

Thunder's cudnn executor raises AttributeError with the nvidia-cudnn-frontend that Sidestep needs. FOLDER holds an older
one for its children alone: pip install --no-deps --target FOLDER nvidia-cudnn-frontend==1.23.0 (for cuDNN 9.19).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sidestep.scripts import report, sweep_numbers
from sidestep.scripts.sweep_numbers import Config, Lane

TESTS = Path(__file__).resolve().parent.parent / "tests"
CONTESTANTS = {
    "cuda": ("torch", "torch_cudnn", "torch_flash", "torch_efficient", "thunder_cudnn", "sidestep"),
    "cpu": ("torch", "torch_flash", "torch_math", "sidestep"),
}
SETS = ("public", *(name for name in sweep_numbers.SETS if name not in sweep_numbers.TIMES))
# From what is best to what is worst; a problem is the worst of what it is on its sets of data.
VERDICTS = ("right", "refused", "wrong", "NaN", "crash")
COLUMNS = ("right", "wrong", "NaN", "refused", "crash")
UNJUDGED = "not judged"  # this script failed, not the contestant

# --- problems ---


@functools.cache
def public_cases() -> dict[str, dict[str, Any]]:
    """The public cases by name."""
    cases = json.loads(TESTS.joinpath("cases", "public_cases.json").read_text(encoding="utf-8"))["cases"]
    return {case["id"]: case for case in cases}


def problems(names: Sequence[str], device: str) -> list[Config]:
    """What each contestant is asked, the public cases first."""
    sweeps = [name for name in names if name != "public"]
    return [
        {"device": device, **made}
        for made in (
            *(
                {"set": "public", "case": name}
                for name, case in (public_cases().items() if "public" in names else ())
                if case["device"] in ("any", device)
            ),
            *({key: value for key, value in made.items() if key != "forms"} for made in sweep_numbers.grid(sweeps)),
        )
    ]


class Question(NamedTuple):
    """One call on one set of data.

    Attributes:
        data: its name.
        arguments: query, key, value and mask, detached, and the gradient of the output.
        flags: is_causal, scale, enable_gqa, dropout_p.
        requires_grad: for each of the four.
        problem: an AttentionProblem; None of a call that nobody can answer.
        canonical: the arguments as the problem says them.
    """

    data: str
    arguments: Any
    flags: Mapping[str, Any]
    requires_grad: tuple[bool, ...]
    problem: Any
    canonical: Any


def questions(made: Config) -> Iterator[Question]:
    """The problem on each of its sets of data."""
    return _of_case(public_cases()[made["case"]], made["device"]) if made["set"] == "public" else _of_sweep(made)


def _of_sweep(made: Config) -> Iterator[Question]:
    import dataclasses

    import torch

    from sidestep import verification

    problem = dataclasses.replace(sweep_numbers.problem_of(made), device=made["device"])
    flags = {"is_causal": problem.is_causal, "scale": None, "enable_gqa": problem.grouped, "dropout_p": 0.0}
    trained = (*[problem.training] * 3, problem.mask is not None and problem.mask.requires_grad)
    for data in verification.data_sets(problem):
        given = verification.inputs(problem, torch.device(made["device"]), data)
        yield Question(data, given, flags, trained, problem, given)


def _of_case(case: Mapping[str, Any], device: str) -> Iterator[Question]:
    from sidestep.semantics import Call, canonicalize, problem_of
    from sidestep.verification import Inputs

    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    reference = importlib.import_module("reference")
    scales = case["scale"] if isinstance(case["scale"], list) else [case["scale"]]
    for scale in scales:
        built = reference.build(case, device, scale)
        # The arguments themselves are trained, and not the leaves that they are views of: what torch does between the
        # two is nobody's here.
        given = {name: tensor.detach() for name, tensor in built.arguments().items()}
        trained = tuple(name in case["requires_grad"] for name in reference.INPUTS)
        for (name, tensor), train in zip(given.items(), trained, strict=False):
            given[name] = tensor.requires_grad_(train)
        query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
        grad_output = built.grad_output((*query.shape[:-1], value.shape[-1]))
        data = case["data"] if len(scales) == 1 else f"scale {scale}"
        arguments = Inputs(query, key, value, mask, grad_output)
        if any("InvalidCallError" in statement for statement in case["expect"]):
            yield Question(data, arguments, built.flags, trained, None, None)
            continue
        flags = built.flags
        call = Call(
            query, key, value, mask, flags["dropout_p"], flags["is_causal"], flags["scale"], flags["enable_gqa"]
        )
        canonical = canonicalize(call)[0]
        problem = problem_of(canonical, any(trained), deterministic=False)
        yield Question(data, arguments, flags, trained, problem, Inputs(*canonical[:4], grad_output))


# --- contestants ---

Attention = Callable[..., Any]  # as torch.nn.functional.scaled_dot_product_attention


def contestant(name: str) -> Attention:
    """A contestant, for the calls of one problem."""
    import torch

    plain: Attention = torch.nn.functional.scaled_dot_product_attention
    if name == "sidestep":
        import sidestep

        sidestep.configure(cache="off")  # what an earlier process found out about a backend is found out again
        return sidestep.scaled_dot_product_attention
    if name == "thunder_cudnn":
        return _thunder_cudnn(plain)
    if name == "torch":
        return plain
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {
        "torch_cudnn": SDPBackend.CUDNN_ATTENTION,
        "torch_flash": SDPBackend.FLASH_ATTENTION,
        "torch_efficient": SDPBackend.EFFICIENT_ATTENTION,
        "torch_math": SDPBackend.MATH,
    }

    def alone(*arguments: Any, **keywords: Any) -> Any:
        with sdpa_kernel([kernels[name]]):
            return plain(*arguments, **keywords)

    return alone


def _thunder_cudnn(plain: Attention) -> Attention:
    made: dict[tuple[Any, ...], Any] = {}

    def attention(query: Any, key: Any, value: Any, **keywords: Any) -> Any:
        import thunder  # here, where what it raises is a refusal

        rest = [one for one in thunder.get_default_executors() if one.name not in ("cudnn", "sdpa")]
        mask = keywords.pop("attn_mask", None)
        if not keywords["enable_gqa"]:
            del keywords["enable_gqa"]  # Thunder 0.2.6 does not know it
        kind = tuple(sorted(keywords.items()))
        if kind not in made:
            made[kind] = thunder.jit(
                lambda q, k, v, m: plain(q, k, v, attn_mask=m, **dict(kind)), executors=["cudnn", *rest]
            )
        output = made[kind](query, key, value, mask)
        ran = {symbol.sym.name for symbol in thunder.last_traces(made[kind])[-1].bound_symbols}
        if "cudnn_sdpa_fwd" not in ran:
            raise NotImplementedError("Thunder's cudnn executor left the call to other executors")
        return output

    return attention


# --- a child: asks and judges ---


class RefusedError(Exception):
    """The contestant raised."""


def answer(attention: Attention, question: Question, device: str) -> tuple[Any, list[Any]]:
    """Output and gradients, written to memory that held NaN.

    Raises:
        RefusedError: the contestant raised.
    """
    import torch

    from sidestep import verification

    leaves: list[Any] = [
        None if tensor is None else tensor.detach().requires_grad_(train)
        for tensor, train in zip(question.arguments[:4], question.requires_grad, strict=True)
    ]
    trained = [leaf for leaf, train in zip(leaves, question.requires_grad, strict=True) if train]

    def poison() -> None:
        if question.problem is not None:
            verification.poison(question.problem, torch.device(device))

    grads: list[Any] = []
    try:
        poison()
        output = attention(*leaves[:3], attn_mask=leaves[3], **question.flags)
        if trained:
            poison()
            grads = list(torch.autograd.grad(output, trained, question.arguments.grad_output))
        if device == "cuda":
            torch.cuda.synchronize()
    except _raised() as error:
        raise RefusedError(f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0][:200]}") from error
    return output.detach(), [grads.pop(0) if train else None for train in question.requires_grad]


@functools.cache
def _raised() -> tuple[type[Exception], ...]:
    """What contestants raise where they refuse, or fail in a way that a process survives."""
    usual = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)
    found: tuple[type[Exception], ...] = (*usual, ImportError, OSError, MemoryError)
    with contextlib.suppress(ImportError):
        from cudnn import cudnnGraphNotSupportedError

        found += (cudnnGraphNotSupportedError,)
    return found


def is_lost(device: str) -> bool:
    """Whether the device cannot be used any more; an error that passes is cleared."""
    import torch

    for _ in range(2 if device == "cuda" else 0):
        try:
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
        except RuntimeError:
            continue
        return False
    return device == "cuda"


def judge(question: Question, output: Any, grads: Sequence[Any]) -> tuple[str, str]:
    """What an answer is, and why."""
    import torch

    from sidestep import verification
    from sidestep.semantics import constant_output

    problem = question.problem
    if problem is None:
        return "wrong", "it answered a call that nobody can answer"
    query, _, value = question.arguments[:3]
    shape = (*query.shape[:-1], value.shape[-1])
    if output.shape != shape or output.dtype is not query.dtype:
        return "wrong", f"output {tuple(output.shape)} {output.dtype}, expected {shape} {query.dtype}"
    output = output.reshape(problem.output_shape)
    grads = [
        None if grad is None else grad.reshape(like.shape)
        for grad, like in zip(grads, question.canonical[:4], strict=True)
    ]
    if constant_output(problem):
        for result in (output, *(grad for grad in grads if grad is not None)):
            if result.any():
                return "wrong" if result.isfinite().all() else "NaN", "not zero where nothing is seen"
        return "right", ""
    with torch.no_grad():
        found = verification.compare(problem, question.canonical, output, grads, question.data)
    if not found:
        return "right", ""
    worst = max(found, key=lambda one: one.error / one.allowed)
    return "wrong" if math.isfinite(worst.error) else "NaN", str(worst)


def examine(name: str, made: Config, at: Callable[[str], None]) -> dict[str, Any]:
    """Ask a contestant on every set of data; where the device is lost, the process ends."""
    at("problem")
    device, verdict, why = made["device"], "right", ""
    attention = contestant(name)
    for number, question in enumerate(questions(made)):
        at(f"call on {question.data}")
        try:
            if number == 0:
                answer(attention, question, device)
            output, grads = answer(attention, question, device)
        except RefusedError as error:
            if is_lost(device):
                at(f"call on {question.data}: {error}")
                os._exit(1)
            if isinstance(error.__cause__, _memory_errors()):
                return {"verdict": UNJUDGED, "why": str(error)}
            found = ("right", "") if question.problem is None else ("refused", str(error))
            if number == 0:  # and so on the other data: it does not look at them to decide
                return {"verdict": found[0], "why": found[1]}
        else:
            at(f"judge on {question.data}")
            found = judge(question, output, grads)
            del output, grads
        if VERDICTS.index(found[0]) > VERDICTS.index(verdict):
            verdict, why = found
    return {"verdict": verdict, "why": why}


def _memory_errors() -> tuple[type[Exception], ...]:
    import torch

    return torch.OutOfMemoryError, MemoryError


def prepared(name: str) -> sweep_numbers.Examine:
    """What examines one contestant."""
    warnings.simplefilter("ignore")  # sdpa_kernel tells by warnings what it then raises
    import torch  # noqa: F401 - what it takes is no problem's

    return functools.partial(examine, name)


# --- the parent ---


def lanes(options: argparse.Namespace, configs: Sequence[Config]) -> list[Lane]:
    """The problems of each contestant, and how its children are started."""
    found = []
    for name in options.contestants:
        environ = report.thunder_environ(options.thunder_site if name == "thunder_cudnn" else None)
        made = [{"contestant": name, **one} for one in configs]
        found.append(Lane(made, [str(Path(__file__).resolve()), "--child", name], environ))
    return found


def verdict_of(entry: Mapping[str, Any]) -> tuple[str, str]:
    """What a line of the output says, and why."""
    if "died" in entry:
        return "crash" if " at: call on " in entry["died"] else UNJUDGED, entry["died"]
    return entry["result"]["verdict"], entry["result"]["why"]


def label(made: Config) -> str:
    """A problem in few characters."""
    return str(made["case"]) if made["set"] == "public" else sweep_numbers.label(made)


def summary(entries: Sequence[Mapping[str, Any]], most: int) -> None:
    """Print the table, and below it what went wrong, and why."""
    counts: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    asked: dict[str, set[str]] = collections.defaultdict(set)
    groups: dict[tuple[str, str, str], list[str]] = collections.defaultdict(list)
    for entry in entries:
        made = entry["config"]
        name = made["contestant"]
        verdict, why = verdict_of(entry)
        counts[made["set"], name][verdict] += 1
        asked[made["set"]].add(sweep_numbers.identity({**made, "contestant": ""}))
        if verdict not in ("right", "refused"):
            groups[name, made["set"], verdict].append(f"{label(made)}: {why}")
    known = [*CONTESTANTS["cpu"][:-1], *CONTESTANTS["cuda"]]  # Sidestep is the last of both
    names = sorted({name for _, name in counts}, key=known.index)
    print(f"Problems that are {' / '.join(COLUMNS)}, and behind a + those that are not judged, or not run.\n")
    print(f"| problems | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for kind in sorted(asked, key=SETS.index):
        cells = []
        for name in names:
            found = counts[kind, name]
            cell = " / ".join(str(found[column]) for column in COLUMNS)
            rest = {UNJUDGED: found[UNJUDGED], "not run": len(asked[kind]) - sum(found.values())}
            cells.append("".join([cell, *(f" + {count} {what}" for what, count in rest.items() if count)]))
        print(f"| {kind}, {len(asked[kind])} | {' | '.join(cells)} |")
    for group, lines in sorted(groups.items()):
        print(f"\n{', '.join(group)}: {len(lines)}")
        for line in sorted(lines)[:most]:
            print(f"    {line}")
        if len(lines) > most:
            print(f"    and {len(lines) - most} more")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def main() -> int:
    """Ask whom the output does not hold yet, then print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sets", type=_names, default="public,trap3,fp32,bias", help=f"of {', '.join(SETS)}")
    parser.add_argument("--contestants", type=_names, help="default: all of the device, separated by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=540.0, help="no problem is begun after this time")
    parser.add_argument("--children", type=int, default=2, help="processes of each contestant")
    parser.add_argument("--limit", type=int, help="only the first so many problems")
    parser.add_argument("--most", type=int, default=10, help="problems named for each finding")
    report.add_thunder_site(parser)
    parser.add_argument("--summary", action="store_true", help="only print the summary of the output")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sweep_numbers.serve(functools.partial(prepared, options.child))
        return 0
    if options.output is None:
        parser.error("--output is missing")
    options.contestants = options.contestants or list(CONTESTANTS[options.device])
    for given, known in ((options.sets, SETS), (options.contestants, CONTESTANTS[options.device])):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
    if "public" in options.sets and not TESTS.joinpath("cases").is_dir():
        parser.error(f"the public cases are read from {TESTS}: run this in the repository, or leave out the set public")
    if not options.summary:
        configs = problems(options.sets, options.device)[: options.limit]
        sweep_numbers.sweep(lanes(options, configs), options.output, options.children, options.seconds)
    entries = sweep_numbers.read(options.output)
    summary(entries, options.most)
    own = [verdict_of(entry)[0] for entry in entries if entry["config"]["contestant"] == "sidestep"]
    return 1 if any(verdict in ("wrong", "NaN", "crash") for verdict in own) else 0


if __name__ == "__main__":
    raise SystemExit(main())

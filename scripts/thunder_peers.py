"""Thunder's own tests of attention, with Thunder's executors, and again with Sidestep first in every list.

    python scripts/thunder_peers.py [--device cuda|cpu] [--only tests|samples] [--thunder-site DIR] [--output FILE.json]

Two parts, on a GPU where there is one, else on the CPU:

tests    the attention tests in the installed lightning-thunder (its cudnn and sdpa executors, OpInfo, gradients), run
         by pytest. A test that asks for an operator of Thunder's by its name is content with Sidestep's: nothing else
         is changed. They need: pip install 'pytest==8.4.2' pytest-benchmark fdm einops expecttest
         A test that fails for want of a GPU, where there is none, counts as skipped.
samples  every OpInfo sample of attention, and the samples of the cudnn executor's tests, in four dtypes, without and
         with gradients of all float inputs, masks included, against torch in float64.

A sample that passes with Thunder's executors and not with Sidestep is looked at again. It is no worse where each result
out of tolerance is off by at most WORSE times what Thunder's is, or by at most one rounding, to the dtype, of the parts
that the true result is a sum of. The parts are the measure where they cancel: a gradient of logits is a weight times
(gradient of the weight - sum of gradient times output), which is nearly 0 where the softmax is saturated. Kernels that
keep an output in place of the weights (flash, cuDNN, nvFuser) take that difference of rounded numbers; plain matrix
products do not.

What is done is told on stderr as it goes. The exit code is 1 where a test is lost, or a sample that is worse by that
measure.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sidestep.scripts import report

FILES = ("test_cudnn_executor.py", "test_sdpaex_executor.py", "test_ops.py", "test_grad.py", "test_core.py")
CHOSEN = "scaled_dot_product or sdpa or cudnn"
NEEDED = ("pytest", "pytest_benchmark", "fdm", "einops", "expecttest")
# The variables by which the plugin below is told what to do.
FIRST, ANSWER = "THUNDER_PEERS_SIDESTEP_FIRST", "THUNDER_PEERS_ANSWER"
# The largest difference over the reference's largest magnitude; gradients, 3 times (tests/reference.py).
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-11}
WORSE = 2.0
Outcomes = dict[str, str]

# --- the plugin: this module, loaded by pytest ------------------------------------------------------------------------

_outcomes: Outcomes = {}


def pytest_configure() -> None:
    """Make only the tests that are chosen, and put Sidestep first in every list, where that is asked for."""
    import thunder
    from thunder.tests import framework

    framework.ops.__call__ = _few(framework.ops.__call__)
    if not os.environ.get(FIRST):
        return
    from sidestep.thunder_executor import executor

    def first(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: [executor, *(one for one in function(*given) if one != executor)]

    thunder.resolve_executors = first(thunder.resolve_executors)
    for kind in (framework.TorchTestExecutor, framework.nvFuserTestExecutor):
        kind.executors_list = first(kind.executors_list)
    last_traces = thunder.last_traces
    thunder.last_traces = lambda function: [_Trace(trace) for trace in last_traces(function)]


def _few(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Thunder makes a test of each operator, dtype and executor: minutes, for thousands that CHOSEN leaves out."""
    words = CHOSEN.split(" or ")

    def make_few(ops: Any, template: Any) -> Any:
        if not any(word in f"{template.__module__} {template.__name__}" for word in words):
            ops.opinfos = [one for one in ops.opinfos if any(word in one.name for word in words)]
        return make(ops, template)

    return make_few


def pytest_runtest_logreport(report: Any) -> None:
    """Note a test's outcome."""
    if report.outcome == "failed" and not torch.cuda.is_available() and "no NVIDIA driver" in report.longreprtext:
        _outcomes[report.nodeid] = "skipped"
    elif report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        xfail = hasattr(report, "wasxfail")
        _outcomes[report.nodeid] = (
            {"skipped": "xfailed", "passed": "xpassed"}.get(report.outcome, "failed") if xfail else report.outcome
        )
    elif report.outcome == "failed":
        _outcomes[report.nodeid] = "failed"


def pytest_sessionfinish() -> None:
    """Hand the outcomes over."""
    if ANSWER in os.environ:
        Path(os.environ[ANSWER]).write_text(json.dumps(_outcomes))


class _Through:
    """Anything, through and through but for what a subclass changes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __str__(self) -> str:
        return str(self._inner)


class _Trace(_Through):
    @property
    def bound_symbols(self) -> list[Any]:
        return [_BoundSymbol(one) if one.sym.name.startswith("sidestep_") else one for one in self._inner.bound_symbols]


class _BoundSymbol(_Through):
    @property
    def sym(self) -> Any:
        return _Symbol(self._inner.sym)


class _Symbol(_Through):
    @property
    def name(self) -> str:
        return _Name(self._inner.name)

    @property
    def id(self) -> str:
        return _Name(self._inner.id)


class _Name(str):
    """Equal to every name of an attention operator."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and ("sdpa" in other or "scaled_dot_product" in other)


# --- the tests --------------------------------------------------------------------------------------------------------


def run_tests(device: str, site: Path | None, first: bool) -> Outcomes:
    """The outcome of each of Thunder's tests, with Sidestep first or with Thunder's executors, and their frontend."""
    import thunder

    folder = Path(thunder.__file__).parent / "tests"
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "answer.json"
        env = {**os.environ, ANSWER: str(answer), FIRST: "1" if first else "", "SIDESTEP_CACHE_DIR": f"{place}/cache"}
        env |= report.thunder_environ(None if first else site)
        if device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        chosen = [str(folder / name) for name in FILES]
        options = ["-v", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder), "-k", CHOSEN]
        command = [sys.executable, "-m", "pytest", "-p", "sidestep.scripts.thunder_peers", *options, *chosen]
        subprocess.run(command, env=env, cwd=place, stdout=sys.stderr)  # as it goes: on a GPU this takes minutes
        outcomes: Outcomes = json.loads(answer.read_text()) if answer.exists() else {}
    if not outcomes:
        raise SystemExit("pytest ran no test; what it said is above")
    return outcomes


# --- the samples ------------------------------------------------------------------------------------------------------


def samples(device: str, dtype: torch.dtype, grad: bool) -> Iterator[tuple[str, Any]]:
    """A name and Thunder's SampleInput, of every generator."""
    from thunder.core import dtypes
    from thunder.tests.opinfos import get_opinfo
    from thunder.tests.test_cudnn_executor import grad_scaled_dot_product_attention_reference_generator

    plain, training = (get_opinfo(f"{name}scaled_dot_product_attention") for name in ("", "grad_forward_"))
    generators = {
        "samples": plain.sample_inputs,
        "references": plain.reference_inputs,
        "grad_forward": training.sample_inputs,
        "cudnn": lambda *given, **more: grad_scaled_dot_product_attention_reference_generator(plain, *given, **more),
    }
    for name, generate in generators.items():
        torch.manual_seed(0)
        given_dtype = dtype if name == "cudnn" else dtypes.to_dtype(dtype)
        for index, sample in enumerate(generate(device, given_dtype, requires_grad=grad)):
            yield f"{name}[{index}] {str(dtype).removeprefix('torch.')} {'training' if grad else 'inference'}", sample


@dataclasses.dataclass(frozen=True)
class Error:
    """How far one result is from float64.

    Attributes:
        name: `output`, or which gradient.
        off: the largest difference; infinite where there is no such result, or NaN in it.
        largest: the largest true magnitude.
        allowed: by the tolerance, or as twice the error of torch itself.
        rounding: of the parts that the true result is a sum of.
    """

    name: str
    off: float
    largest: float
    allowed: float
    rounding: float

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{self.name}: off by {self.off:.2g}, largest {self.largest:.2g}, allowed {self.allowed:.2g}, "
            f"a rounding of the parts {self.rounding:.2g}"
        )


def errors_of(jitted: Callable[..., torch.Tensor], sample: Any) -> list[Error]:
    """The errors of the output, and of the gradients of its sum, beside torch in float64."""
    function: Any = torch.nn.functional.scaled_dot_product_attention

    def copies(wide: bool) -> tuple[list[Any], dict[str, Any]]:
        def own(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            made = one.detach().double() if wide and one.is_floating_point() else one.detach()
            return made.requires_grad_(one.requires_grad)

        return [own(one) for one in sample.args], {name: own(one) for name, one in sample.kwargs.items()}

    def run(attention: Callable[..., torch.Tensor], wide: bool) -> list[Any]:
        args, keywords = copies(wide)
        output = attention(*args, **keywords)
        every = (*args, *keywords.values())
        trained = [one for one in every if isinstance(one, torch.Tensor) and one.requires_grad]
        grads = torch.autograd.grad(output.sum(), trained, allow_unused=True) if trained else ()
        return [output.detach(), *grads]

    actual, exact = run(jitted, False), run(function, True)
    try:
        eager = run(function, False)
    except RuntimeError:  # torch's choice of a kernel refuses some calls
        with sdpa_kernel(SDPBackend.MATH):
            eager = run(function, False)
    args, keywords = copies(True)
    sizes = parts(*args, **keywords)
    found = []
    for index, (one, true, theirs, size) in enumerate(zip(actual, exact, eager, sizes, strict=True)):
        name = f"gradient {index} of {len(exact) - 1}" if index else "output"
        if one is None or one.shape != true.shape:
            found.append(Error(f"{name} (none, or of another shape)", math.inf, 0.0, 0.0, 0.0))
        elif true.numel():
            off, torchs_off = ((x.double() - true).abs().max().item() for x in (one, theirs))
            largest = true.abs().max().item()
            # Where the true numbers are all zero, inputs of size 1 are the measure.
            allowed = TOLERANCE[one.dtype] * (3 if index else 1) * (largest if largest > 1e-9 else 1.0)
            rounding = torch.finfo(one.dtype).eps / 2 * size.max().item()
            off = math.inf if math.isnan(off) else off
            found.append(Error(name, off, largest, max(allowed, 2 * torchs_off), rounding))
    return found


def parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    _: float = 0.0, is_causal: bool = False, scale: float | None = None, **__: float,
) -> list[torch.Tensor]:  # fmt: skip
    """Of the output, and of each gradient of its sum, the summed magnitudes of the parts; no dropout, no groups."""
    given = (query, key, value, attn_mask)
    query, key, value = (one.detach() for one in given[:3])
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    logits = query @ key.mT * factor
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype is torch.bool
        logits = logits.masked_fill(~attn_mask, -torch.inf) if boolean else logits + attn_mask.detach()
    weights = torch.softmax(logits, -1).nan_to_num()  # a row without a key is one of zeros
    row = (weights @ value).abs().sum(-1, keepdim=True)
    part = weights * (value.abs().sum(-1).unsqueeze(-2) + row)
    over_value = weights.mT.sum(-1, keepdim=True).expand(*weights.shape[:-2], *value.shape[-2:])
    factor = abs(factor)
    every = (part @ key.abs() * factor, part.mT @ query.abs() * factor, over_value, part)
    grads = [
        size.sum_to_size(one.shape)
        for size, one in zip(every, given, strict=True)
        if one is not None and one.requires_grad
    ]
    return [weights @ value.abs(), *grads]


def verdict(errors: Sequence[Error]) -> str:
    """'passed', or the first result that is farther from float64 than is allowed."""
    return next((str(one) for one in errors if not one.off <= one.allowed), "passed")


def is_worse(own: Sequence[Error], ours: Sequence[Error]) -> bool:
    """Whether a result is out of tolerance, by more than WORSE times Thunder's error and a rounding of its parts."""
    pairs = itertools.zip_longest(own, ours)
    return any(a is None or b is None or not b.off <= max(b.allowed, WORSE * a.off, b.rounding) for a, b in pairs)


def run_samples(device: str, first: bool, skip: int) -> None:
    """Print a line of JSON for each sample but the first `skip`: its name, and when it ran its outcome and errors.

    One that draws random numbers has no errors.
    """
    import thunder

    import sidestep.thunder_executor  # noqa: F401 - registers the name

    executors = [*(["sidestep"] if first else []), *thunder.get_default_executors()]
    function: Any = torch.nn.functional.scaled_dot_product_attention
    every = (one for dtype in TOLERANCE for grad in (False, True) for one in samples(device, dtype, grad))
    for name, sample in itertools.islice(every, skip, None):
        print(json.dumps({"name": name}), flush=True)
        errors: list[Error] = []
        dropout = sample.kwargs.get("dropout_p", sample.args[4] if len(sample.args) > 4 else 0.0)
        if dropout:
            outcome = "skipped"
        else:
            try:
                jitted = thunder.jit(lambda *a, **k: function(*a, **k), executors=executors)
                errors = errors_of(jitted, sample)
                outcome = verdict(errors)
            except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
                outcome = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        told = {"name": name, "outcome": outcome, "errors": [dataclasses.asdict(error) for error in errors]}
        print(json.dumps(told), flush=True)
        print(f"{'sidestep' if first else 'thunder'}: {name}: {outcome}", file=sys.stderr, flush=True)


def collect_samples(device: str, site: Path | None, first: bool) -> tuple[Outcomes, dict[str, list[Error]]]:
    """Outcome and errors of each sample, run in a process of its own; in another one after one that ends it."""
    outcomes: Outcomes = {}
    errors: dict[str, list[Error]] = {}
    command = [sys.executable, str(Path(__file__).resolve()), "--device", device]
    command += ["--child", "sidestep" if first else "thunder", "--skip"]
    with tempfile.TemporaryDirectory() as place:
        env = {**os.environ, **report.thunder_environ(None if first else site), "SIDESTEP_CACHE_DIR": place}
        while True:
            done = subprocess.run([*command, str(len(outcomes))], env=env, stdout=subprocess.PIPE, text=True)
            name = None
            for told in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
                name = told["name"]
                if "outcome" in told:
                    outcomes[name] = told["outcome"]
                    errors[name] = [Error(**one) for one in told["errors"]]
            if not done.returncode:
                return outcomes, errors
            if name is None or name in outcomes:
                raise SystemExit(f"the samples' process ended with status {done.returncode}, at no sample")
            outcomes[name] = f"the process died: status {done.returncode}"


# --- the comparison ---------------------------------------------------------------------------------------------------


def compare(own: Outcomes, ours: Outcomes) -> dict[str, Any]:
    """Counts, and the cases that are not alike."""
    good = ("passed", "xpassed")

    def counts(outcomes: Outcomes) -> dict[str, int]:
        known = (*good, "skipped", "xfailed")
        return dict(collections.Counter(outcome if outcome in known else "failed" for outcome in outcomes.values()))

    lost = {name: ours.get(name, "missing") for name, o in own.items() if o in good and ours.get(name) not in good}
    won = {
        name: outcome for name, outcome in own.items() if outcome not in (*good, "skipped") and ours.get(name) in good
    }
    neither = {
        name: {"thunder": outcome, "sidestep": ours.get(name, "missing")}
        for name, outcome in own.items()
        if outcome not in (*good, "skipped") and ours.get(name) not in good
    }
    return {"thunder": counts(own), "sidestep": counts(ours), "lost": lost, "won": won, "neither": neither}


def main() -> int:
    """Run both parts both ways, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=("tests", "samples"))
    parser.add_argument("--output", type=Path, help="JSON, in which every case that is not alike is listed")
    parser.add_argument("--child", choices=("thunder", "sidestep"), help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    report.add_thunder_site(parser)
    options = parser.parse_args()
    if missing := [name for name in ("thunder", *NEEDED) if importlib.util.find_spec(name) is None]:
        names = "lightning-thunder 'pytest==8.4.2' pytest-benchmark fdm einops expecttest"
        print(f"thunder_peers needs {', '.join(missing)}: pip install {names}", file=sys.stderr)
        return 1
    if options.child:
        run_samples(options.device, options.child == "sidestep", options.skip)
        return 0
    results: dict[str, Any] = {}
    asked = (options.device, options.thunder_site)
    parts: dict[str, Callable[..., Any]] = {"tests": run_tests, "samples": collect_samples}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = {
            part: pool.map(functools.partial(run, *asked), (False, True))
            for part, run in parts.items()
            if options.only in (None, part)
        }
        if "tests" in running:
            results["tests"] = compare(*running["tests"])
            results["tests"]["worse"] = list(results["tests"]["lost"])
        if "samples" in running:
            both = running["samples"]
            (own, own_errors), (ours, our_errors) = both
            results["samples"] = found = compare(own, ours)
            found["worse"] = [n for n in found["lost"] if is_worse(own_errors[n], our_errors.get(n, []))]
            found["errors"] = {
                name: [[dataclasses.asdict(one) for one in errors.get(name, [])] for errors in (own_errors, our_errors)]
                for name in (*found["lost"], *found["neither"])
            }
    print(f"{'':10}{'executors':12}{'passed':>8}{'failed':>8}{'xfailed':>9}{'skipped':>9}")
    for part, result in results.items():
        for name in ("thunder", "sidestep"):
            count = collections.Counter(result[name])
            passed = count["passed"] + count["xpassed"]
            row = f"{passed:>8}{count['failed']:>8}{count['xfailed']:>9}{count['skipped']:>9}"
            print(f"{part:10}{name:12}{row}")
        for kind in ("lost", "won"):
            for case, outcome in result[kind].items():
                print(f"  {kind}{', and worse' if case in result['worse'] else ''}: {case}: {outcome}")
                if kind == "lost" and part == "samples":
                    for a, b in itertools.zip_longest(own_errors[case], our_errors.get(case, [])):
                        print(f"    Thunder's executors: {a}\n    Sidestep:            {b}")
    if options.output:
        options.output.write_text(json.dumps({**report.circumstances(), "device": options.device, **results}, indent=2))
    return 1 if any(result["worse"] for result in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())

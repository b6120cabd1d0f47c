"""FallbackExecutor: any symbol, any of Thunder's executors; who raises is recorded, and the next one serves."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import sidestep
from sidestep import failures
from sidestep.cli import main
from sidestep.symbol_problem import SymbolProblem

pytest.importorskip("thunder", reason="the extra thunder is not installed")

import thunder
import thunder.torch as ltorch
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transforms import get_grad, put_grad
from thunder.executors import passes
from thunder.extend import OperatorExecutor, StatefulExecutor, deregister_executor, register_executor

from sidestep.thunder_executor import FallbackExecutor

F = torch.nn.functional
pytestmark = pytest.mark.usefixtures("lenient")


class Child:
    """One of Thunder's executors: gelu and attention by torch, failing where and how it is told to."""

    def __init__(self, name: str = "child") -> None:
        self.failing: dict[str, BaseException] = {}
        self.calls: list[str] = []
        self.executor = OperatorExecutor(name, version="1")
        register_executor(self.executor)
        functions: dict[Any, Callable[..., Any]] = {
            ltorch.gelu: F.gelu,
            ltorch.scaled_dot_product_attention: F.scaled_dot_product_attention,
            ltorch.dropout: F.dropout,
        }
        for symbol, function in functions.items():
            self._register(symbol, function)

    def step(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise self.failing[name]

    def _register(self, symbol: Any, function: Callable[..., Any]) -> None:
        def checker(*args: Any, **kwargs: Any) -> bool:
            self.step("checker")
            return True

        def run(*args: Any, **kwargs: Any) -> Any:
            self.step("forward")
            return function(*args, **kwargs)

        def run_backward(grad: Any, first: Any, *rest: Any, **kwargs: Any) -> Any:
            self.step("backward")
            tensors = [t.detach().requires_grad_() for t in (first, *rest) if isinstance(t, torch.Tensor)]
            others = [t for t in rest if not isinstance(t, torch.Tensor)]
            with torch.enable_grad():
                return torch.autograd.grad(function(*tensors, *others, **kwargs), tensors, grad)

        def meta(_grad: Any, *args: Any, **kwargs: Any) -> Any:
            return tuple(TensorProxy(like=t, requires_grad=False) for t in args if isinstance(t, TensorProxy))

        name = symbol.name
        forward = self.executor.register_operator(f"child_{name}", like=symbol, fn=run)
        backward = self.executor.register_operator(f"child_{name}_backward", meta=meta, fn=run_backward)

        def transform(*args: Any, **kwargs: Any) -> Any:
            self.step("transform")
            return forward(*args, **kwargs)

        def grad_transform(*args: Any, **kwargs: Any) -> Any:
            output = transform(*args, **kwargs)
            grads = backward(get_grad(output), *args, **kwargs)
            for tensor, grad in zip([t for t in args if isinstance(t, TensorProxy)], grads, strict=True):
                put_grad(tensor, grad)
            return output

        self.executor.register_implementation(
            symbol, checker=checker, execution_transform=transform, grad_transform=grad_transform
        )


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    yield made
    deregister_executor(made.executor)


def compare(executor: FallbackExecutor, function: Any, *inputs: torch.Tensor) -> Any:
    """Output and gradients under `thunder.jit` are torch's."""
    jitted = thunder.jit(function, executors=[executor])
    output, expected = jitted(*inputs), function(*inputs)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    if trained:
        grads = torch.autograd.grad(output.square().sum(), trained)
        wanted = torch.autograd.grad(expected.square().sum(), trained)
        for mine, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    return jitted


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def records() -> dict[str, Any]:
    (record,) = failures.records()
    return {
        "backend": record.backend,
        "kind": record.kind,
        "at": (record.direction, record.stage),
        "text": f"{record.exception_type}: {record.exception_text}",
        "record": record,
    }


@pytest.mark.parametrize("step", ["checker", "transform", "forward", "backward"])
@pytest.mark.parametrize(
    "error", [ValueError("too many values"), RuntimeError("no kernel for this")], ids=["bug", "no"]
)
def test_a_child_that_raises_is_recorded_and_the_next_serves(
    child: Child, step: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    child.failing[step] = error
    compare(FallbackExecutor(["child", "torch"]), F.gelu, leaf(3, 4))
    found = records()
    assert (found["backend"], found["kind"]) == (
        "thunder:child",
        "error" if type(error) is ValueError else "unsupported",
    )
    stage = step if step in ("checker", "transform") else "execute"
    assert found["at"] == ("backward" if step == "backward" else "forward", stage)
    assert found["text"] == f"{type(error).__name__}: {error}"
    assert 'test_thunder_fallback.py", line' in found["record"].traceback
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (type(error) is ValueError)


@pytest.mark.parametrize("step", ["checker", "transform", "forward", "backward"])
def test_what_is_known_is_not_asked_again(child: Child, step: str) -> None:
    """In this process, and, since a new executor has seen nothing yet, in a later one."""
    child.failing[step] = ValueError("broken")
    executor = FallbackExecutor(["child", "torch"])
    jitted = compare(executor, F.gelu, leaf(3, 4))
    asked = child.calls.count(step)
    assert asked == 1
    jitted(leaf(3, 4)).sum().backward()
    compare(FallbackExecutor(["child", "torch"], name="another"), F.gelu, leaf(3, 4))
    assert child.calls.count(step) == 1
    assert records()["record"].count == 1
    child.failing.clear()
    sidestep.configure()  # as a new process
    child.calls.clear()
    compare(executor, F.gelu, leaf(3, 4))
    assert step not in child.calls
    failures.forget(records()["record"])
    sidestep.configure()
    compare(executor, F.gelu, leaf(3, 4))
    assert step in child.calls


def test_other_shapes_are_other_problems(child: Child) -> None:
    child.failing["forward"] = ValueError("broken")
    executor = FallbackExecutor(["child", "torch"])
    compare(executor, F.gelu, leaf(3, 4))
    child.failing.clear()
    child.calls.clear()
    compare(executor, F.gelu, leaf(3, 5))
    assert child.calls.count("forward") == child.calls.count("backward") == 1


def test_forward_and_backward_are_of_one_child(child: Child) -> None:
    jitted = compare(FallbackExecutor(["child", "torch"]), F.gelu, leaf(3, 4))
    assert [call for call in child.calls if call not in ("checker", "transform")] == ["forward", "backward"]
    with torch.no_grad():
        jitted(leaf(3, 4))
    assert child.calls[-1] == "forward"


def test_a_whole_network_with_every_symbol_wrapped(child: Child) -> None:
    """Also symbols that only torch claims, several outputs, and views."""
    child.failing["forward"] = ValueError("broken")

    def network(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        hidden = F.layer_norm(F.gelu(F.linear(x, w, b)), (6,), b, b)
        first, second = torch.split(hidden, 3, -1)
        values, _ = torch.topk(torch.softmax(first + second * 2.0, -1), 2)
        query = hidden[None, None]
        return values.sum() + F.scaled_dot_product_attention(query, query, query).exp().mean()

    executor = FallbackExecutor(["child", "torch"])
    jitted = compare(executor, network, leaf(5, 4), leaf(6, 4), leaf(6))
    names = [bsym.sym.name for bsym in thunder.last_traces(jitted)[-1].bound_symbols]
    assert sum(name.startswith("fallback_") for name in names) >= 8
    assert {record.problem.get("symbol", "attention") for record in failures.records()} == {
        "torch.nn.functional.gelu",
        "attention",
    }


def test_symbols_restrict_it(child: Child) -> None:
    for symbols in ([F.gelu], [ltorch.gelu], ["torch.nn.functional.gelu"]):
        executor = FallbackExecutor(["child", "torch"], symbols=symbols)
        jitted = compare(executor, lambda x: F.gelu(x).sin(), leaf(3, 4))
        names = [bsym.sym.name for bsym in thunder.last_traces(jitted)[-1].bound_symbols]
        assert [name.partition("_")[0] for name in names if "gelu" in name] == ["fallback"]
        assert "sin" in names
    with pytest.raises(ValueError, match="is no symbol of Thunder's"):
        FallbackExecutor(["torch"], symbols=[print])


def test_a_trace_names_the_children(child: Child) -> None:
    jitted = compare(FallbackExecutor(["child", "torch"]), F.gelu, leaf(3, 4))
    assert "torch.nn.functional.gelu, by the first that can: child, torch" in str(thunder.last_traces(jitted)[-1])


def test_what_changes_in_place_after_the_call_is_saved_before() -> None:
    """Exp saves its output, and sin its input; torch would refuse the backward, and Thunder alone computes wrong."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        output = y.sin()
        y.mul_(2.0)
        grown = output.exp()
        grown.mul_(3.0)
        return grown + y

    x = torch.randn(3, 4, requires_grad=True)
    jitted = thunder.jit(
        function, executors=[FallbackExecutor(["torch"], name="in_place", symbols=[torch.exp, torch.sin])]
    )
    (grad,) = torch.autograd.grad(jitted(x).sum(), x)
    torch.testing.assert_close(grad, (3 * x.sin().exp() * x.cos() + 2).detach())


def test_dropout_whose_backward_fails(child: Child) -> None:
    """The forward drew numbers that no other child knows: recorded and raised, and the next call is served."""
    jitted = thunder.jit(lambda x: F.dropout(x, 0.5), executors=[FallbackExecutor(["child", "torch"])])
    x = leaf(64)
    child.failing["backward"] = ValueError("broken")
    with pytest.raises(sidestep.NoBackendError, match=r"drew random numbers.*ValueError: broken"):
        jitted(x).sum().backward()
    output = jitted(x)
    output.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x, output)


def test_nobody_serves(child: Child) -> None:
    child.failing["forward"] = ValueError("broken")
    jitted = thunder.jit(F.gelu, executors=[FallbackExecutor(["child"])])
    for _ in range(2):
        with pytest.raises(sidestep.NoBackendError, match=r"gelu.*\n.*thunder:child.*broken"):
            jitted(leaf(3, 4).detach())
    assert child.calls.count("forward") == 1


def test_strict_raises(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    sidestep.configure(strict=True)
    child.failing["forward"] = ValueError("broken")
    with pytest.raises(ValueError, match="broken"):
        thunder.jit(F.gelu, executors=[FallbackExecutor(["child", "torch"])])(leaf(3, 4))


def test_out_of_memory_is_not_recorded(child: Child) -> None:
    child.failing["forward"] = torch.OutOfMemoryError("out of memory")
    executor = FallbackExecutor(["child", "torch"])
    jitted = compare(executor, F.gelu, leaf(3, 4))
    assert list(failures.records()) == []
    child.failing.clear()
    child.calls.clear()
    jitted(leaf(3, 4))
    assert "forward" in child.calls


@pytest.mark.parametrize("function", [torch.exp, torch.mul, F.linear, F.silu, torch.reshape, torch.sin])
def test_symbols_are_torchs_functions_too(function: Any) -> None:
    """Of some Thunder's table holds a Python function, which chooses between a symbol and DTensor's."""
    executor = FallbackExecutor(["torch"], name=f"only_{function.__name__}", symbols=[function])
    assert executor.symbols in [{getattr(ltorch, function.__name__).id}, {f"torch.{function.__name__}"}]


def test_names_and_children() -> None:
    assert FallbackExecutor(["sdpa", "torch"]).name == "fallback_sdpa_torch"
    assert thunder.get_executor("fallback_sdpa_torch") == FallbackExecutor(["sdpa", "torch"])
    with pytest.raises(ValueError, match="no_such"):
        FallbackExecutor(["no_such"])
    with pytest.raises(ValueError, match="at least one"):
        FallbackExecutor([])
    with pytest.raises(ValueError, match="keeps state"):
        FallbackExecutor([StatefulExecutor("stateful")])


def test_symbolic_values(child: Child) -> None:
    """One trace, other numbers: what failed with one of them is tried with the other."""
    attention: Any = F.scaled_dot_product_attention
    jitted = thunder.jit(
        lambda x, scale: attention(x, x, x, scale=scale),
        executors=[FallbackExecutor(["child", "torch"])],
        cache="symbolic values",
    )
    x = leaf(1, 2, 5, 8).detach()
    child.failing["forward"] = ValueError("broken")
    for scale, asked in ((0.5, 1), (0.5, 1), (0.25, 2)):
        torch.testing.assert_close(jitted(x, scale), attention(x, x, x, scale=scale))
        assert child.calls.count("forward") == asked
    assert thunder.cache_misses(jitted) == 1


# --- records ----------------------------------------------------------------------------------------------------------


def test_the_command_line_shows_them(child: Child) -> None:
    child.failing["forward"] = ValueError("broken")
    executor = FallbackExecutor(["child", "torch"])
    compare(executor, lambda x: F.gelu(x, approximate="tanh"), leaf(3, 4))
    query = leaf(1, 2, 5, 8)
    compare(executor, lambda x: F.scaled_dot_product_attention(x, x, x), query)
    listed = CliRunner().invoke(main, ["failures", "list"]).output
    assert "torch.nn.functional.gelu(a=float32 3x4, approximate=tanh), cpu, training" in listed
    assert "float32 cpu, batch 1, heads 2, length 5, head_size 8, training" in listed
    assert listed.count("thunder:child") == 2
    items = json.loads(CliRunner().invoke(main, ["failures", "list", "--json"]).output)["items"]
    for item in items:
        shown = CliRunner().invoke(main, ["failures", "show", item["id"]]).output
        assert "ValueError: broken" in shown
        assert "executor_version 1" in shown
        retried = CliRunner().invoke(main, ["failures", "retry", item["id"]])
        assert retried.exit_code == 1
        assert "only a trace can try again" in retried.output


def test_a_problem_is_its_json() -> None:
    problem = SymbolProblem("torch.add", "cpu", False, {"a": {"shape": [2], "dtype": "float32"}, "alpha": 2, "b": None})
    written = json.loads(json.dumps(problem.to_json()))
    assert SymbolProblem.from_json(written) == problem
    assert problem.is_written(written)
    assert not problem.is_written({**written, "training": True})
    assert str(problem) == "torch.add(a=float32 2, alpha=2), cpu, inference"
    odd: Any
    for odd in ({}, {**written, "device": 1}, {**written, "more": 1}, []):
        with pytest.raises(ValueError, match="problem of a symbol"):
            SymbolProblem.from_json(odd)


# --- Thunder's own cudnn executor -------------------------------------------------------------------------------------


def traced(executors: list[Any], *, device: str) -> list[str]:
    """The names in an execution trace of attention on that device, of which nothing is run."""

    def function(q: Any, k: Any, v: Any) -> Any:
        pass

    trace = TraceCtx(function)
    with tracectx(trace):
        made = [
            TensorProxy(name, shape=(1, 2, 64, 64), device=devices.to_device(device), dtype=dtypes.float16)
            for name in "qkv"
        ]
        trace.args = tuple(made)
        output = ltorch.scaled_dot_product_attention(*made)
        thunder.core.prims.python_return(output)
    return [bsym.sym.name for bsym in passes.transform_for_execution(trace, executors).bound_symbols]


def test_the_cudnn_executor_dies_while_tracing_and_a_wrapped_list_works(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a frontend of 1.27 or newer. Only the handle, which its checker makes first, needs a GPU."""
    from thunder.executors import cudnn_sdpa

    monkeypatch.setattr(cudnn_sdpa, "_get_cudnn_handle", lambda _device: None)
    cudnn = thunder.get_executor("cudnn")
    with pytest.raises(AttributeError, match="scaled_dot_product_flash_attention"):
        traced([cudnn], device="cuda:0")
    names = traced([FallbackExecutor(["cudnn", "torch"])], device="cuda:0")
    assert any(name.startswith("fallback_scaled_dot_product_attention") for name in names)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "thunder:cudnn failed with a bug, AttributeError: " in warning
    assert "scaled_dot_product_flash_attention" in warning


SCRIPT = """
import json, sys, torch, thunder, sidestep
from sidestep.thunder_executor import FallbackExecutor
from sidestep import failures
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
f = torch.nn.functional.scaled_dot_product_attention
jitted = thunder.jit(lambda q, k, v: f(q, k, v), executors=[FallbackExecutor(["cudnn", "sdpa", "torch"])])
output, expected = jitted(q, k, v), f(q, k, v)
grads, wanted = (torch.autograd.grad(o.sum(), (q, k, v)) for o in (output, expected))
errors = [(a - b).abs().max().item() for a, b in zip((output, *grads), (expected, *wanted))]
print(json.dumps({"errors": errors, "stats": sidestep.stats(), "records": [r.to_json() for r in failures.records()]}))
"""


@pytest.mark.gpu
def test_with_the_cudnn_executor_on_a_gpu(tmp_path: Path) -> None:
    """Forward and backward; the record says why cudnn does not serve, and a second process does not ask it again."""
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    for result in found:
        assert max(result["errors"]) < 0.01
        records = [record for record in result["records"] if record["backend"] == "thunder:cudnn"]
        assert records
        assert all("scaled_dot_product_flash_attention" in record["exception_text"] for record in records)
        assert all("cudnn_sdpa.py" in record["traceback"] for record in records)
    assert found[0]["stats"]["build_failures"] > 0
    assert found[1]["stats"]["build_failures"] == 0

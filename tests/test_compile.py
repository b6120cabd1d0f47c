"""torch.compile: one graph, the numbers of eager mode, and the dispatcher's choice at run time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from process import Counters
from torch.utils.checkpoint import checkpoint

import sidestep
from sidestep import torch_op
from sidestep.backends import registry

sdpa: Any = sidestep.scaled_dot_product_attention
functional: Any = torch.nn.functional


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch_op._pins.clear()
    yield
    torch._dynamo.reset()
    sidestep.uninstall()


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def tensors(*shape: int, grad: bool = True) -> Any:
    shape = shape or (2, 4, 10, 8)
    return [torch.randn(shape, requires_grad=grad) for _ in range(3)]


def results(function: Callable[..., Any], inputs: Any) -> list[torch.Tensor]:
    output = function(*inputs)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    weight = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output.dtype)
    return [output, *(torch.autograd.grad(output, wanted, weight) if wanted else ())]


def same(function: Callable[..., Any], inputs: Any, **options: Any) -> None:
    torch.testing.assert_close(results(compiled(function, **options), inputs), results(function, inputs))


def test_the_function_itself_compiled() -> None:
    """Not a function that calls it: torch.compile looks for what to trace in another way then."""
    inputs = tensors()
    same(sdpa, inputs)
    with sidestep.installed():
        same(functional.scaled_dot_product_attention, inputs)


MASK = torch.ones(10, 10, dtype=torch.bool).tril()
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool mask": {"attn_mask": MASK},
    "float mask": {"attn_mask": torch.randn(2, 1, 10, 10)},
    "math": {"backends": "torch_math"},
    "order": {"backends": ["torch_flash", "torch_math"]},
    "nothing": {"dropout_p": 1.0},
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_eager(name: str, grad: bool, counters: Counters) -> None:
    same(lambda q, k, v: sdpa(q.sin(), k, v, **CASES[name]) * 2, tensors(grad=grad))
    assert counters.calls >= 2


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_other_compilers(backend: str) -> None:
    same(lambda q, k, v: sdpa(q.sin(), k, v, is_causal=True).cos(), tensors(), backend=backend)


def test_layouts_ranks_and_grouped_heads() -> None:
    for shapes in (
        [(5, 6, 8), (5, 7, 8), (5, 7, 8)],
        [(6, 8), (7, 8), (7, 4)],
        [(2, 3, 4, 5, 8), (3, 4, 6, 8), (1, 3, 4, 6, 8)],
        [(2, 4, 5, 8), (1, 4, 6, 8), (1, 1, 6, 8)],
    ):
        same(lambda q, k, v: sdpa(q, k, v), [torch.randn(shape, requires_grad=True) for shape in shapes])
    same(lambda q, k, v: sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), tensors(2, 10, 4, 8))
    query, key, value = tensors()
    same(lambda q, k, v: sdpa(q, k[:, :2], v[:, :2], enable_gqa=True), [query, key, value])
    same(lambda q: sdpa(q, q, q), [query])
    same(lambda q: sdpa(q, key.detach(), value.detach()), [query])


def test_gradient_of_a_mask() -> None:
    query, key, value = tensors()
    mask = torch.randn(4, 1, 10, requires_grad=True)
    same(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), [query, key, value, mask])
    same(lambda m: sdpa(query.detach(), key.detach(), value.detach(), attn_mask=m), [mask])


def test_dynamic_lengths_are_one_graph(counters: Counters) -> None:
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda q, k, v: sdpa(q, k, v, is_causal=True).sin(), fullgraph=True, backend=graphs)
    for length in (7, 12, 33):
        inputs = tensors(2, 4, length, 8)
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 2)
        eager = results(lambda q, k, v: sdpa(q, k, v, is_causal=True).sin(), inputs)
        torch.testing.assert_close(results(function, inputs), eager)
    assert graphs.frame_count == 1
    assert counters.selections == 3


def test_nothing_is_selected_while_tracing(counters: Counters) -> None:
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append((counters.selections, [str(node.target) for node in graph.graph.nodes if node.op[:4] == "call"]))
        return graph

    torch.compile(lambda q, k, v: sdpa(q, k, v), fullgraph=True, backend=backend)(*tensors(grad=False))
    assert seen[0][0] == 0
    assert any("sidestep.attention" in target for target in seen[0][1])
    assert counters.selections == 1


def chosen(function: Callable[..., Any], inputs: Any) -> list[str]:
    sidestep.configure()
    with sidestep.observe() as seen:
        function(*inputs)
    return [decisions[-1].backend for _, decisions in seen]


def test_the_order_in_force_is_respected() -> None:
    inputs = tensors(grad=False)
    outside = compiled(lambda q, k, v: sdpa(q, k, v))
    assert chosen(outside, inputs) == ["torch_flash"]
    with sidestep.use_backends("torch_math"):
        assert chosen(outside, inputs) == ["torch_math"]

    @compiled
    def inside(q: Any, k: Any, v: Any) -> Any:
        with sidestep.use_backends("torch_math"):
            first = sdpa(q, k, v)
        return first + sdpa(q + 1, k, v, scale=0.5)

    assert chosen(inside, inputs) == ["torch_math", "torch_flash"]
    assert torch_op.blocks == []
    with pytest.raises(ValueError, match="unknown backend 'foo'"):
        compiled(lambda q, k, v: sdpa(q, k, v, backends="foo"))(*inputs)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout(backend: str) -> None:
    """Two calls draw differently, a seed draws the same again, and a backward is of what its forward drew."""
    query, key, _ = tensors(2, 4, 32, 32)
    value = torch.eye(32).expand(2, 4, 32, 32).clone().requires_grad_()
    twice = compiled(lambda q, k, v: (sdpa(q, k, v, dropout_p=0.5), sdpa(q, k, v, dropout_p=0.5)), backend=backend)
    torch.manual_seed(3)
    first, second = twice(query, key, value)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    torch.testing.assert_close(twice(query, key, value)[0], first)
    for weights in (first, second):  # the values are unit vectors
        assert 0.4 < float((weights == 0).float().mean()) < 0.6
        (grad,) = torch.autograd.grad(weights.sum(-1).sum(), value, retain_graph=True)
        torch.testing.assert_close(grad[..., 0], weights.sum(2))


def test_autocast_and_no_grad() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return sdpa(q, k, v)

    same(function, tensors())
    inputs = tensors()
    with torch.no_grad():
        assert not compiled(lambda q, k, v: sdpa(q, k, v))(*inputs).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(lambda q, k, v: sdpa(q, k, v))(*inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_checkpoint_in_a_compiled_function(dropout_p: float) -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        block = lambda q, k, v: sdpa(q.sin(), k, v, dropout_p=dropout_p)  # noqa: E731
        return checkpoint(block, q, k, v, use_reentrant=False)

    inputs = tensors()
    if dropout_p:
        output, *grads = results(compiled(function), inputs)
        weight = torch.linspace(-1, 1, 640).reshape(output.shape)
        torch.testing.assert_close((grads[2] * inputs[2]).sum(), (output * weight).sum())  # linear in the values
    else:
        same(function, inputs)


def test_behind_torchs_function() -> None:
    function = compiled(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True).sin())
    inputs = tensors(grad=False)
    plain = function(*inputs)
    assert chosen(function, inputs) == []
    with sidestep.installed():
        assert chosen(function, inputs) == ["torch_flash"]
        torch.testing.assert_close(function(*inputs), plain)
    assert chosen(function, inputs) == []


def test_a_wrong_call_is_refused_while_tracing(counters: Counters) -> None:
    query, key, value = tensors(grad=False)
    with pytest.raises(Exception, match=r"head size|broadcast|shape"):
        compiled(lambda q, k, v: sdpa(q, k, v))(query, key[..., :7], value)
    assert counters.selections == 0


# --- a backend with a backward of its own: the graph saves its logsumexp -------------------------------------------


class Graphs:
    """A backend whose plans are GraphPlans: a forward with a logsumexp, a backward that needs it; float32 math."""

    name, builds = "graphs", False
    backwards = 0

    def rejects(self, problem: Any) -> tuple[str, ...]:
        return ()

    def versions(self) -> dict[str, str | int]:
        return {"graphs": 1}

    def build(self, problem: Any, target: Any, progress: Any) -> Any:
        self.problem = problem
        return Graphs()

    def verdict(self, error: Exception) -> Any:
        return "error"

    def infer(self, query: Any, key: Any, value: Any, attn_mask: Any) -> Any:
        return self.forward(query, key, value, attn_mask)[0]

    def forward(self, query: Any, key: Any, value: Any, attn_mask: Any) -> Any:
        logits = query @ key.mT * query.shape[-1] ** -0.5
        return logits.softmax(-1) @ value, logits.logsumexp(-1, keepdim=True)

    def backward(self, grad: Any, query: Any, key: Any, value: Any, attn_mask: Any, output: Any, lse: Any) -> Any:
        Graphs.backwards += 1
        scale = query.shape[-1] ** -0.5
        weights = (query @ key.mT * scale - lse).exp()
        inner = weights * (grad @ value.mT - (grad * output).sum(-1, keepdim=True)) * scale
        return inner @ key, inner.mT @ query, weights.mT @ grad, None


@pytest.fixture
def graphs() -> Iterator[None]:
    registry.register("graphs", Graphs)
    yield
    registry._added.pop("graphs")
    registry.get.cache_clear()


@pytest.mark.usefixtures("graphs")
def test_the_backward_of_the_backend_runs_on_what_the_graph_saved(counters: Counters) -> None:
    function, inputs = compiled(lambda q, k, v: sdpa(q, k, v, backends=["graphs", "torch_math"])), tensors()
    expected = results(lambda q, k, v: sdpa(q, k, v, backends="torch_math"), inputs)
    torch.testing.assert_close(results(function, inputs), expected)
    counters.reset()
    before = Graphs.backwards
    torch.testing.assert_close(results(function, inputs), expected)
    assert (counters.calls, Graphs.backwards) == (1, before + 1)  # no second forward


@pytest.mark.usefixtures("graphs")
def test_a_forward_by_another_backend_is_never_given_that_backward(counters: Counters) -> None:
    """Its logsumexp was not kept: the forward runs once more, whoever serves by then."""
    function, inputs = compiled(lambda q, k, v: sdpa(q, k, v)), tensors()
    expected = results(lambda q, k, v: sdpa(q, k, v, backends="torch_math"), inputs)
    for order in (("graphs",), ("torch_math",), ("graphs",)):
        with sidestep.use_backends(*order):
            output = function(*inputs)
        with sidestep.use_backends("graphs"):
            weight = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
            torch.testing.assert_close([output, *torch.autograd.grad(output, inputs, weight)], expected)


def test_eager_calls_neither_import_the_operators_nor_the_compiler() -> None:
    script = """
import sys, torch, sidestep
with sidestep.installed():
    torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8, requires_grad=True)).sum().backward()
print([name for name in ("sidestep.torch_op", "torch._dynamo", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""CUDA graphs, streams and threads on the GPU: right numbers, and nothing built where nothing may be."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from process import Counters

import sidestep
from sidestep import failures, plans

pytestmark = pytest.mark.gpu
sdpa: Any = sidestep.scaled_dot_product_attention


def tensors(length: int, batch: int = 2, grad: bool = False) -> Any:
    shape = (batch, 4, length, 64)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]


def reference(inputs: Any, **options: Any) -> list[torch.Tensor]:
    """Output and gradients of the sum, in float64."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output = sdpa(*leaves, **options, backends="torch_math")
    return [output.detach(), *torch.autograd.grad(output.sum(), leaves)]


def close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=False):
        torch.testing.assert_close(one.double(), other, atol=3e-2, rtol=3e-2)


def warm(function: Any) -> None:
    """As torch asks: on another stream, before the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("order", ["cudnn", "torch"])
def test_a_warmed_forward_and_backward(order: str, counters: Counters) -> None:
    inputs = tensors(128, grad=True)
    step = lambda: sdpa(*inputs, is_causal=True, backends=order)  # noqa: E731
    warm(lambda: torch.autograd.grad(step().sum(), inputs))
    counters.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
        grads = torch.autograd.grad(output.sum(), inputs)
    assert (counters.selections, counters.builds) == (0, 0)
    for _ in range(3):
        with torch.no_grad():
            for tensor in inputs:
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        torch.cuda.synchronize()
        close([output, *grads], reference(inputs, is_causal=True))


def test_dropout_draws_anew_at_every_replay() -> None:
    query, key, _ = tensors(64)
    value = torch.eye(64, device="cuda", dtype=torch.bfloat16).expand(2, 4, 64, 64).contiguous()
    warm(lambda: sdpa(query, key, value, dropout_p=0.5))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights = sdpa(query, key, value, dropout_p=0.5)
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(weights == 0)
    assert all(0.4 < float(dropped.float().mean()) < 0.6 for dropped in drawn)
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("grad", [False, True])
def test_an_unwarmed_call_needs_no_build(grad: bool, counters: Counters) -> None:
    inputs = tensors(192, grad=grad)
    warm(lambda: torch.nn.functional.scaled_dot_product_attention(*inputs))  # the libraries' own first use
    graph = torch.cuda.CUDAGraph()
    with sidestep.observe() as seen, torch.cuda.graph(graph):
        output = sdpa(*inputs)
        grads = torch.autograd.grad(output.sum(), inputs) if grad else []
    graph.replay()
    torch.cuda.synchronize()
    close([output, *grads], reference(inputs))
    assert [decisions[-1].backend for _, decisions in seen] == ["torch_flash"]
    assert (counters.builds, counters.refused_builds) == (0, 1)
    assert list(failures.records()) == []
    assert len(plans.wanted()) == 1
    with sidestep.observe() as seen:  # outside of the capture it is decided anew
        sdpa(*inputs)
    assert [decisions[-1].backend for _, decisions in seen] == ["cudnn"]


def test_a_graph_outlives_its_plans() -> None:
    """Its workspace is its own: neither a cleared memory nor a later call on the stream changes what it replays."""
    inputs = tensors(96, grad=True)
    warm(lambda: torch.autograd.grad(sdpa(*inputs).sum(), inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = sdpa(*inputs)
        grads = torch.autograd.grad(output.sum(), inputs)
    sidestep.configure()
    others = tensors(160, grad=True)
    for _ in range(3):
        torch.autograd.grad(sdpa(*others).sum(), others)
    graph.replay()
    torch.cuda.synchronize()
    close([output, *grads], reference(inputs))


def test_threads_and_streams() -> None:
    """Eight threads, each with two streams, call the same and different signatures at once, the first calls too."""
    lengths = (64, 96, 128, 160)
    data = {length: tensors(length, grad=True) for length in lengths}
    expected = {length: reference(data[length]) for length in lengths}
    torch.cuda.synchronize()
    wrong: list[Any] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            streams = [torch.cuda.Stream() for _ in range(2)]
            start.wait(60)
            for turn in range(40):
                length = lengths[(number + turn) % 4]
                with torch.cuda.stream(streams[turn % 2]):
                    inputs = [tensor.detach().clone().requires_grad_() for tensor in data[length]]
                    output = sdpa(*inputs)
                    found = [output, *torch.autograd.grad(output.sum(), inputs)]
                    torch.cuda.current_stream().synchronize()
                close(found, expected[length])
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(("length", "is_causal"), [(128, True), (192, False)])  # the second with a padding mask
def test_a_compiled_function_in_cuda_graphs(length: int, is_causal: bool) -> None:
    """Whose first calls run in the graphs' memory pool, where nothing of ours may stay."""
    torch._dynamo.reset()

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return sdpa(query * 1, key, value, is_causal=is_causal)

    function: Any = torch.compile(attention, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        inputs = tensors(length, grad=True)
        torch.compiler.cudagraph_mark_step_begin()
        output = function(*inputs)
        grads = torch.autograd.grad(output.sum(), inputs)
        close([output.clone(), *(grad.clone() for grad in grads)], reference(inputs, is_causal=is_causal))
    torch._dynamo.reset()

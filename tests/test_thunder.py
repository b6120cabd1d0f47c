"""Sidestep in Thunder's executor lists: numbers, gradients, what a trace costs and shows, and known pitfalls."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from process import Counters, reload_settings
from reference import assert_close, attention
from small import Small, SmallPlan, registered

import sidestep
from sidestep import failures

pytest.importorskip("thunder", reason="the extra thunder is not installed")

import thunder
from thunder.core.transform_common import cse
from torch.utils.checkpoint import checkpoint

import sidestep.thunder_executor as executor_module
from sidestep.problem import AttentionProblem
from sidestep.scripts import bench_thunder, thunder_peers
from sidestep.thunder_executor import FallbackExecutor

sdpa: Any = torch.nn.functional.scaled_dot_product_attention
ROOT = Path(__file__).resolve().parent.parent


def jit(function: Any, **options: Any) -> Any:
    return thunder.jit(function, executors=["sidestep"], **options)


def tensors(*shapes: Sequence[int], grad: bool = True, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=random, dtype=dtype).requires_grad_(grad) for shape in shapes]


def qkv(*shape: int, grad: bool = True) -> list[torch.Tensor]:
    return tensors(shape, shape, shape, grad=grad)


def check(jitted: Any, function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """`jitted` on the inputs, with its gradients, is `function` in float64."""
    output: torch.Tensor = jitted(*inputs)
    wide = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs]
    expected = function(*wide)
    assert_close(output, expected, "output")
    trained = [index for index, tensor in enumerate(inputs) if tensor.requires_grad]
    assert output.requires_grad == bool(trained)
    if trained:
        weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
        grads = torch.autograd.grad((output * weight).sum(), [inputs[index] for index in trained])
        wanted = torch.autograd.grad((expected * weight).sum(), [wide[index] for index in trained])
        for index, mine, other in zip(trained, grads, wanted, strict=True):
            assert_close(mine, other, f"gradient of input {index}", gradient=True)
    return output


def operators(jitted: Any, backward: bool = False) -> list[str]:
    """The names of what a function's latest trace runs."""
    trace = (thunder.last_backward_traces if backward else thunder.last_traces)(jitted)[-1]
    ignored = ("python_", "unpack_", "del", "clear_")
    return [bsym.sym.name for bsym in trace.bound_symbols if not bsym.sym.name.startswith(ignored)]


FORWARD, BACKWARD, INFERENCE = "sidestep_attention_forward", "sidestep_attention_backward", "sidestep_attention"


@pytest.fixture
def small() -> Iterator[Small]:
    """A backend with a backward of its own, first in the order."""
    with registered(Small()) as backend, sidestep.use_backends("small", "torch"):
        yield backend


# --- numbers and gradients --------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "plain": (sdpa, attention, qkv(2, 4, 6, 8)),
    "causal": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        lambda q, k, v: attention(q, k, v, is_causal=True),
        qkv(2, 4, 6, 8),
    ),
    "scale": (lambda q, k, v: sdpa(q, k, v, scale=0.3), lambda q, k, v: attention(q, k, v, scale=0.3), qkv(2, 4, 6, 8)),
    "other lengths and sizes": (sdpa, attention, tensors((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 16))),
    "rank 3": (sdpa, attention, qkv(4, 6, 8)),
    "rank 5": (sdpa, attention, qkv(2, 3, 2, 6, 8)),
    "broadcast batch": (sdpa, attention, tensors((1, 4, 6, 8), (2, 4, 6, 8), (2, 1, 6, 8))),
    "grouped heads": (
        lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
        lambda q, k, v: attention(q, k, v, enable_gqa=True),
        tensors((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
    ),
    "grouped heads, causal": (
        lambda q, k, v: sdpa(q, k, v, is_causal=True, scale=0.5, enable_gqa=True),
        lambda q, k, v: attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True),
        tensors((2, 4, 6, 8), (2, 1, 6, 8), (2, 1, 6, 8)),
    ),
    "one tensor for all": (lambda x: sdpa(x, x, x), lambda x: attention(x, x, x), tensors((2, 4, 6, 8))),
    "some gradients": (sdpa, attention, [*tensors((2, 4, 6, 8)), *qkv(2, 4, 6, 8, grad=False)[1:]]),
    "transposed": (
        lambda q, k, v: sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2),
        lambda q, k, v: attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2),
        qkv(2, 6, 4, 8),
    ),
    "two layers": (
        lambda q, k, v: sdpa(sdpa(q, k, v), k, v),
        lambda q, k, v: attention(attention(q, k, v), k, v),
        qkv(2, 4, 6, 8),
    ),
    "float64": (sdpa, attention, tensors((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8), dtype=torch.float64)),
    "bool mask": (sdpa, attention, [*qkv(2, 4, 6, 6), torch.ones(6, 6).tril() > 0]),
    "empty rows": (sdpa, attention, [*qkv(2, 4, 6, 6), torch.ones(6, 6).tril(-1) > 0]),
    "empty rows, float": (
        sdpa,
        attention,
        [*qkv(2, 4, 6, 6), torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu() > 0, -torch.inf)],
    ),
}
for _shape in ((6, 6), (2, 1, 1, 6), (1, 1, 6, 6), (2, 4, 6, 6), (1, 4, 6, 1)):
    for _grad in (False, True):
        _mask = tensors(_shape, grad=_grad)
        CASES[f"float mask {_shape}{' with gradient' * _grad}"] = (sdpa, attention, [*qkv(2, 4, 6, 8), *_mask])
        CASES[f"intermediate mask {_shape}{' with gradient' * _grad}"] = (
            lambda q, k, v, m: sdpa(q, k, v, m * m),
            lambda q, k, v, m: attention(q, k, v, m * m),
            [*qkv(2, 4, 6, 8), *_mask],
        )


@pytest.mark.parametrize("order", [("small", "torch"), ("torch",), ("torch_math",)], ids="-".join)
@pytest.mark.parametrize("case", CASES)
def test_numbers_and_gradients(case: str, order: tuple[str, ...]) -> None:
    function, expected, inputs = CASES[case]
    jitted = jit(function)
    with registered(Small()) as backend, sidestep.use_backends(*order):
        backend.reasons = ("a mask that needs a gradient",) if "mask" in case and "with" in case else ()
        for _ in range(2):  # selected, then found
            check(jitted, expected, inputs)
        assert set(operators(jitted)) & {FORWARD}
        with torch.no_grad():
            assert_close(jitted(*inputs), expected(*[t.double() if t.is_floating_point() else t for t in inputs]), "")
        assert INFERENCE in operators(jitted)
    if order[0] == "small" and not backend.reasons:
        assert "backward" in backend.asked


def test_a_module_trains_as_in_torch() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
            self.bias = torch.nn.Parameter(torch.randn(1, 2, 5, 5))

        def forward(self, x: torch.Tensor) -> Any:
            q, k, v = self.qkv(x).view(3, 5, 3, 2, 8).unbind(2)
            heads = [t.transpose(1, 2) for t in (q, k, v)]
            return self.out(sdpa(*heads, attn_mask=self.bias.tanh()).transpose(1, 2).reshape(3, 5, 16))

    torch.manual_seed(0)
    block = Block()
    jitted = jit(block)
    x = torch.randn(3, 5, 16)
    grads = []
    for model in (block, jitted):
        for _ in range(2):
            block.zero_grad()
            model(x).square().sum().backward()
        grads.append({name: parameter.grad for name, parameter in block.named_parameters()})
    assert FORWARD in operators(jitted)
    for name, expected in grads[0].items():
        torch.testing.assert_close(grads[1][name], expected)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_by_a_transform(masked: bool) -> None:
    """Thunder's grad() differentiates in another way than a backward of torch's does."""
    from thunder.core.transforms import grad

    inputs = [*qkv(2, 4, 6, 8), *([torch.randn(6, 6, requires_grad=True)] if masked else [])]
    grads = grad(jit(lambda *t: sdpa(*t).sin().sum()))(*inputs)
    wanted = torch.autograd.grad(attention(*inputs).sin().sum(), inputs)
    for mine, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_what_needs_no_gradient_gets_none() -> None:
    """A mask computed from an input without gradient costs no mask gradient; nor does a detached one."""
    for function in (
        lambda q, k, v, m: sdpa(q, k, v, m * 2),
        lambda q, k, v, m: sdpa(q, k, v, (m * q.mean()).detach()),
    ):
        jitted = jit(function)
        jitted(*qkv(1, 2, 5, 8), torch.randn(5, 5))
        assert "mask_grad=False" in str(thunder.last_traces(jitted)[-1])


def test_detached_and_no_grad_regions_are_inference() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        with torch.no_grad():
            left = sdpa(q, k, v)
        return left * sdpa(q, k, v)

    jitted = jit(function)
    check(jitted, lambda q, k, v: attention(q, k, v).detach() * attention(q, k, v), qkv(1, 2, 5, 8))
    assert sorted(set(operators(jitted)) - {"mul"}) == [INFERENCE, FORWARD]


def changed_output(q: Any, k: Any, v: Any, attend: Any = sdpa) -> Any:
    output = attend(q, k, v).transpose(1, 2)
    output.mul_(2.0)
    return output.sin()


def changed_input(place: int) -> Callable[..., Any]:
    def function(q: Any, k: Any, v: Any, attend: Any = sdpa) -> Any:
        tensors = [q * 1, k * 1, v * 1]
        output = attend(tensors[0], tensors[1].transpose(2, 3).transpose(2, 3), tensors[2])
        tensors[place].mul_(3.0)
        return output + tensors[place]

    return function


def changed_mask(q: Any, k: Any, v: Any, attend: Any = sdpa) -> Any:
    mask = q @ k.transpose(2, 3)
    output = attend(q, k, v, mask)
    mask.mul_(3.0)
    return output


CHANGED = {"output": changed_output, "mask": changed_mask}
CHANGED |= {name: changed_input(place) for place, name in enumerate(("query", "key", "value"))}


@pytest.mark.parametrize("order", [("small", "torch_flash", "torch_math"), ("torch_math",)], ids="-".join)
@pytest.mark.parametrize("changed", CHANGED)
def test_what_changes_in_place_after_the_call_is_saved_before(changed: str, order: tuple[str, ...]) -> None:
    """Thunder's traces have no version counters, by which torch would refuse the backward, or compute the same."""

    def on_copies(*tensors: torch.Tensor) -> torch.Tensor:
        return attention(*[tensor.clone() for tensor in tensors]).clone()

    with registered(Small()) as backend, sidestep.use_backends(*order):
        backend.reasons = ("a mask that needs a gradient",) if changed == "mask" else ()
        for _ in range(2):
            jitted = jit(CHANGED[changed])
            check(jitted, lambda q, k, v: CHANGED[changed](q, k, v, attend=on_copies), qkv(2, 4, 6, 8))
    assert "copied=()" not in str(thunder.last_traces(jitted)[-1])


def test_nothing_is_copied_where_nothing_changes() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        output = sdpa(q, k, v)
        other = output * 2
        other.add_(1.0)
        return other

    jitted = jit(function)
    check(jitted, lambda q, k, v: attention(q, k, v) * 2 + 1, qkv(2, 4, 6, 8))
    assert "copied=()" in str(thunder.last_traces(jitted)[-1])


# --- a trace ----------------------------------------------------------------------------------------------------------


class Look(thunder.Transform):
    """Keeps what a function says when a trace is ready and nothing of it has run."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function, self.seen = function, []  # type: ignore[var-annotated]

    def transform_trace_post_optimization(self, trace: Any, **_: Any) -> Any:
        self.seen.append(self.function())
        return trace


def test_tracing_tries_nothing(small: Small, counters: Counters) -> None:
    """0 builds, 0 selections, 0 runs, forward and backward; all of that comes with the first call."""
    inputs = qkv(1, 2, 5, 8)
    look = Look(lambda: (sidestep.stats(), list(small.asked), torch.cuda.is_initialized()))  # type: ignore[no-untyped-call]
    before = look.function()
    jitted = jit(lambda q, k, v: sdpa(sdpa(q, k, v), k, v), transforms=[look])
    jitted(*inputs)
    assert look.seen == [before] * 2  # a forward and a backward trace
    assert operators(jitted) == [FORWARD] * 2
    assert (counters.selections, counters.builds, counters.hits) == (1, 1, 1)


def test_a_trace_is_readable_and_says_what_ran() -> None:
    jitted = jit(lambda q, k, v: sdpa(q, k, v, is_causal=True))
    jitted(*qkv(1, 2, 5, 8)).sum().backward()
    assert operators(jitted) == [FORWARD]
    assert operators(jitted, backward=True) == [BACKWARD]
    text = str(thunder.last_traces(jitted)[-1])
    call = next(line for line in text.splitlines() if FORWARD in line)
    assert f"{FORWARD}(q, k, v, None, 0.0, True, enable_gqa=False, copied=(), scale=None, mask_grad=False)" in call
    assert call.count("residual") == executor_module.RESIDUALS
    assert "served_by" in call


@pytest.mark.parametrize("record", [False, True])
def test_claims_by_rules_and_by_records(record: bool, lenient: None) -> None:
    """A strict order in which nobody can serve leaves the call to the next executor of Thunder's list."""
    inputs = [t.detach() for t in qkv(1, 2, 5, 8)]
    with registered(Small()) as backend, sidestep.use_backends("small"):
        if record:
            backend.failing["build"] = NotImplementedError("no such kernel")
            with pytest.raises(sidestep.NoBackendError, match="no such kernel"):
                jit(sdpa)(*inputs)
            backend.failing.clear()
            assert backend.asked == ["build"]
        else:
            backend.reasons = ("not today",)
        jitted = jit(sdpa)
        torch.testing.assert_close(jitted(*inputs), sdpa(*inputs))
        assert INFERENCE not in operators(jitted)
        assert backend.asked == ["build"] * record


def test_what_torch_refuses_is_not_claimed() -> None:
    """Causal with a mask: Thunder's own answer stands."""
    with pytest.raises(ValueError, match="Explicit attn_mask should not be set when is_causal=True"):
        jit(lambda q, k, v, m: sdpa(q, k, v, m, is_causal=True))(*qkv(1, 2, 5, 8), torch.zeros(5, 5))


def test_one_trace_is_served_by_several_backends(small: Small) -> None:
    """Strides are no part of a trace: the dispatcher picks at run time, and each backward follows its forward."""
    jitted = jit(sdpa)
    contiguous = qkv(1, 2, 5, 8)
    strided = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in contiguous]

    def rejects(problem: AttentionProblem) -> tuple[str, ...]:
        return ("strided",) if "strided" in str(problem) else ()

    small.rejects = rejects  # type: ignore[method-assign]
    outputs = [jitted(*inputs) for inputs in (contiguous, strided)]
    assert small.asked.count("forward") == 2  # the first run and the call
    small.asked.clear()
    grads = [torch.autograd.grad(o.sum(), t) for o, t in zip(outputs, (contiguous, strided), strict=True)]
    assert small.asked == ["backward"]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other)
    assert thunder.cache_misses(jitted) == 1


@pytest.mark.parametrize("cache", ["constant values", "symbolic values", "no caching"])
def test_caching_modes(cache: str) -> None:
    """Numbers that change between calls of one trace."""
    jitted = jit(lambda q, k, v, p, scale: sdpa(q, k, v, dropout_p=p, scale=scale), cache=cache)
    inputs = qkv(1, 2, 5, 8)
    eager: Any = sidestep.scaled_dot_product_attention
    for p, scale in ((0.0, 0.5), (0.0, 0.25), (0.5, 0.25)):
        torch.manual_seed(3)
        output = jitted(*inputs, p, scale)
        grads = torch.autograd.grad(output.square().sum(), inputs)
        torch.manual_seed(3)
        expected = eager(*inputs, dropout_p=p, scale=scale)
        torch.testing.assert_close(output, expected)
        for mine, other in zip(grads, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
            torch.testing.assert_close(mine, other)
    traces = {"constant values": 3, "symbolic values": 1, "no caching": 3}
    assert thunder.cache_misses(jitted) == traces[cache]


@pytest.mark.parametrize("mask", [None, "float32", "bool"])
def test_autocast(mask: str | None) -> None:
    """As torch: query, key, value and a float mask are lowered; Thunder alone refuses the float32 mask."""
    inputs = qkv(1, 2, 5, 8)
    masks = {"float32": tensors((5, 5)), "bool": [torch.ones(5, 5).tril() > 0]}.get(mask or "", [])
    leaves = [*inputs, *(m for m in masks if m.is_floating_point())]
    jitted = jit(sdpa)
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = jitted(*inputs, *masks), sdpa(*inputs, *masks)
    assert output.dtype is torch.bfloat16
    assert FORWARD in operators(jitted)
    torch.testing.assert_close(output, expected)
    pairs = zip(torch.autograd.grad(output.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True)
    for mine, other in pairs:
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, other, rtol=0.02, atol=0.02)


def test_a_float32_mask_over_another_dtype() -> None:
    inputs = [t.detach().bfloat16() for t in qkv(1, 2, 5, 8)]
    mask = torch.randn(5, 5)
    torch.testing.assert_close(jit(sdpa)(*inputs, mask), sdpa(*inputs, mask))


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_two_like_dropout_calls_stay_two() -> None:
    jitted = jit(lambda q, k, v: (sdpa(q, k, v, dropout_p=0.5), sdpa(q, k, v, dropout_p=0.5)))
    first, second = jitted(*qkv(1, 2, 16, 8))
    assert not torch.equal(first, second)
    merged = cse(thunder.last_traces(jitted)[-1])  # as nvFuser's pass has it done
    assert [bsym.sym.name for bsym in merged.bound_symbols].count(FORWARD) == 2


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_backward_drops_what_the_forward_dropped(recomputed: bool) -> None:
    """The output is linear in value: <grad_value, value> is <grad_output, output>, if the weights are the same."""

    def function(q: Any, k: Any, v: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return sdpa(q, k, v, dropout_p=0.5).view(16, 16) * 2.0  # what follows it is recomputed

        return checkpoint(attend, q, k, v, use_reentrant=False) if recomputed else attend(q, k, v)

    query, key, value = qkv(1, 2, 16, 8)
    jitted = jit(function)
    output = jitted(query, key, value)
    weight = torch.randn(output.shape)
    assert FORWARD not in operators(jitted, backward=True)
    (grad,) = torch.autograd.grad((output * weight).sum(), value)
    torch.testing.assert_close((grad * value).sum(), (output * weight).sum())


def test_checkpoint_without_dropout_recomputes() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return checkpoint(lambda *t: sdpa(*t).sin(), q, k, v, use_reentrant=False)

    jitted = jit(function)
    check(jitted, lambda *t: attention(*t).sin(), qkv(1, 2, 5, 8))
    assert FORWARD in operators(jitted, backward=True)


# --- what is kept between forward and backward ------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("small", "torch"), ("torch_flash",), ("torch_math",)], ids="-".join)
def test_residuals_are_tensors_that_autograd_sees_and_frees(order: tuple[str, ...]) -> None:
    packed: list[weakref.ref[Any]] = []
    shapes = []

    class Packed:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    def pack(tensor: torch.Tensor) -> Packed:
        made = Packed(tensor)
        packed.append(weakref.ref(made))
        shapes.append(tuple(tensor.shape))
        return made

    inputs = qkv(1, 2, 5, 8)
    with registered(Small()), sidestep.use_backends(*order):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda made: made.tensor):
            output = jit(sdpa)(*inputs)
        expected = {"small": (3,), "torch_flash": (1, 2, 5), "torch_math": (1, 2, 5, 5)}[order[0]]
        assert expected in shapes
        first, second = (torch.autograd.grad(output.sum(), inputs, retain_graph=keep) for keep in (True, False))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)
    assert not any(ref() for ref in packed), "kept after the backward, while the output lives"


@pytest.mark.parametrize("order", ["torch_flash", "torch_math"])
def test_what_served_keeps_no_memory(order: str) -> None:
    def uses(tensor: torch.Tensor) -> int:
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined, no-any-return]

    inputs = qkv(1, 2, 5, 8, grad=False)
    run: Any = executor_module._forward
    flags: dict[str, Any] = {"scale": None, "enable_gqa": False, "mask_grad": False}
    with sidestep.use_backends(order):
        run(*inputs, None, 0.0, False, **flags)
        before = [uses(tensor) for tensor in inputs]
        output, *residuals, served_by = run(*inputs, None, 0.0, False, **flags)
    kept = [tensor for tensor in residuals if tensor is not None]
    assert kept
    alone = uses(torch.ones(2)) - 1
    all_of_them = [*inputs, output, *kept]  # several may be views of one
    places = [tensor.untyped_storage().data_ptr() for tensor in all_of_them]
    assert before == [alone + 1] * 3
    assert [uses(tensor) for tensor in all_of_them] == [alone + places.count(place) for place in places]
    assert served_by is not None


# --- the seed story ---------------------------------------------------------------------------------------------------


class Broken(SmallPlan):
    """With a bug of the kind that Thunder took for "unsupported" and then tripped over."""

    def backward(self, *_: Any) -> Any:
        assert False, "a bug in the backward"  # noqa: B011, PT015 - this is the line


@pytest.mark.parametrize("late", [False, True])
def test_with_a_bug_in_a_backward_it_still_trains(
    late: bool, small: Small, lenient: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the bug shows in a backward that is already at work, and not on the first run."""
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# noqa: B011, PT015" in text)
    works = SmallPlan.backward

    def backward(plan: Any, grad_output: torch.Tensor, *rest: Any) -> Any:
        return works(plan, grad_output, *rest) if late and not grad_output.any() else Broken.backward(plan)

    monkeypatch.setattr(SmallPlan, "backward", backward)
    caplog.set_level(logging.INFO, "sidestep")
    inputs = qkv(1, 2, 5, 8)
    jitted = jit(sdpa)
    optimizer = torch.optim.SGD(inputs, lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = jitted(*inputs).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        check(jitted, attention, [t.detach().clone().requires_grad_() for t in inputs])
    assert losses[0] > losses[1] > losses[2]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert f"{Path(__file__)}:{line} (backward execute)" in warnings[0]
    assert "AssertionError: a bug in the backward" in warnings[0]
    assert "unpack" not in caplog.text
    (record,) = failures.records()
    assert (record.kind, record.backend, record.direction) == ("error", "small", "backward")
    assert f'test_thunder.py", line {line}, in backward' in record.traceback
    assert "unpack" not in record.traceback
    assert thunder.cache_misses(jitted) == 1


def test_under_strict_the_bug_is_raised(small: Small) -> None:
    small.failing["backward"] = AssertionError("a bug")
    with pytest.raises(AssertionError, match="a bug"):
        jit(sdpa)(*qkv(1, 2, 5, 8))


# --- behind torch's function, and by its own name ---------------------------------------------------------------------


@pytest.mark.parametrize("executors", [["sidestep"], ["torch"], ["fallback"]], ids="".join)
def test_while_it_is_installed(executors: list[str]) -> None:
    """What stands in for torch's function is traced as torch's, whoever is in the list."""

    def function(q: Any, k: Any, v: Any, m: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, m)

    with sidestep.installed():
        symbols = [torch.nn.functional.scaled_dot_product_attention]
        chosen = (
            [FallbackExecutor(["torch"], name="behind", symbols=symbols)] if executors == ["fallback"] else executors
        )
        jitted = thunder.jit(function, executors=chosen)
        inputs = [*qkv(2, 4, 6, 6), *tensors((6, 6))]
        check(jitted, attention, inputs)
        assert (FORWARD in operators(jitted)) == (executors == ["sidestep"])
        assert any(name.startswith("fallback_") for name in operators(jitted)) == (executors == ["fallback"])
    check(jitted, attention, inputs)


def test_by_its_own_name() -> None:
    jitted = jit(lambda q, k, v: sidestep.scaled_dot_product_attention(q, k, v, is_causal=True))
    check(jitted, lambda q, k, v: attention(q, k, v, is_causal=True), qkv(2, 4, 6, 8))
    assert operators(jitted) == [FORWARD]


def test_an_order_inside_a_trace_is_refused() -> None:
    """It would be in force while tracing, and forgotten when the trace runs."""

    def block(q: Any, k: Any, v: Any) -> Any:
        with sidestep.use_backends("torch_math"):
            return sdpa(q, k, v)

    def argument(q: Any, k: Any, v: Any) -> Any:
        return sidestep.scaled_dot_product_attention(q, k, v, backends="torch_math")

    for function in (block, argument):
        with pytest.raises(sidestep.InvalidCallError, match=r"open a `with sidestep\.use_backends"):
            jit(function)(*qkv(2, 4, 6, 8))


# --- importing --------------------------------------------------------------------------------------------------------


def test_without_thunder_the_extra_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.modules['thunder'] = None; import sidestep; import sidestep.thunder_executor"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: sidestep.thunder_executor needs lightning-thunder" in done.stderr
    assert "pip install 'sidestep[thunder]'" in done.stderr


def test_importing_registers_the_name_and_changes_no_default() -> None:
    assert thunder.get_executor("sidestep") is executor_module.executor
    assert executor_module.executor not in thunder.get_default_executors()


def test_settings_are_heeded(small: Small) -> None:
    """A change of settings drops the routes that traces use too."""
    jitted = jit(sdpa)
    inputs = qkv(1, 2, 5, 8)
    jitted(*inputs)
    small.asked.clear()
    reload_settings()
    jitted(*inputs)
    assert small.asked == ["build", "forward", "backward", "forward"]


def test_what_answers_where_nothing_is_built_answers_there_alone(small: Small) -> None:
    """The quick check for a call like the one before carries no route out of refuse_builds(), nor between two ways."""
    jitted, inputs = jit(sdpa), qkv(1, 2, 5, 8)
    with sidestep.refuse_builds():
        for _ in range(2):
            jitted(*inputs)
    assert "build" not in small.asked
    for function in (jitted, sidestep.scaled_dot_product_attention, jitted, jitted):
        small.asked.clear()
        check(function, sdpa, inputs)
        assert "forward" in small.asked
        assert "backward" in small.asked


# --- the documentation ------------------------------------------------------------------------------------------------


def test_the_worked_example(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/thunder.md: both blocks, one behind the other, as a reader would run them."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "thunder.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    run: dict[str, Any] = {"__name__": "example"}
    exec(compile(blocks[0], "docs/thunder.md", "exec"), run)
    printed = capsys.readouterr().out
    assert f"{FORWARD}(" in printed
    assert "torch_math: " in printed
    assert "mask gradient, training" in printed
    grads = {name: parameter.grad.clone() for name, parameter in run["model"].named_parameters()}
    exec(compile(blocks[1], "docs/thunder.md", "exec"), run)
    assert "fallback_scaled_dot_product_attention" in str(thunder.last_traces(run["jitted"])[-1])
    run["model"].zero_grad()
    run["model"](run["x"], run["mask"]).square().mean().backward()  # torch alone
    for name, parameter in run["model"].named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_thunders_times_are_compared_by_what_both_processes_run() -> None:
    """A process that is twice as slow changes nothing, and an opponent that costs nothing is no reason for praise."""

    def judged(here: dict[str, float], there: dict[str, float], device: str = "cuda") -> dict[str, Any]:
        return bench_thunder.judged(bench_thunder.TINY[0], here, there, device)

    here = {"sidestep": 100.0, "thunder_sdpa": 110.0, "idle": 80.0}
    there = {"thunder_sdpa": 55.0, "thunder_cudnn": 140.0, "idle": 40.0}
    found = judged(here, there)
    assert found["this_process_over_the_other"] == 2
    assert found["ratio"] == {"thunder_sdpa": 0.909, "thunder_cudnn": 0.357}
    assert found["overhead_ratio"] == {"thunder_sdpa": 0.667, "thunder_cudnn": 0.1}
    assert found["missed"] == []
    assert judged({**here, "sidestep": 131.0}, there)["missed"] == ["thunder_cudnn", "thunder_sdpa"]
    assert judged({**here, "thunder_sdpa": 80.0}, there)["missed"] == ["thunder_sdpa"]
    assert judged(here, {})["missed"] == ["thunder_cudnn"], "not measured is not reached"
    assert judged(here, {}, "cpu")["missed"] == []
    step = bench_thunder.judged(bench_thunder.STEP, here, there, "cuda")
    assert (step["ratio"], step["missed"]) == ({"thunder_sdpa": 0.909, "thunder_cudnn": 0.357}, [])
    assert "overhead_ratio" not in step


def test_without_thunders_autograd_nothing_is_recorded_for_a_backward() -> None:
    """A computation runs under no_grad, which Sidestep's operator relies on."""
    inputs = qkv(1, 2, 5, 8)
    assert all(tensor.requires_grad for tensor in inputs)
    jitted = thunder.jit(lambda q, k, v: sdpa(q, k, v), executors=["sidestep"], disable_torch_autograd=True)
    output = jitted(*inputs)
    assert "sidestep_attention(" in str(thunder.last_traces(jitted)[-1])
    assert not output.requires_grad


# --- Thunder's own tests with Sidestep first --------------------------------------------------------------------------


def test_peers_lose_nothing_silently() -> None:
    own = {"a": "passed", "b": "passed", "c": "failed", "d": "skipped", "e": "xfailed", "f": "xpassed", "g": "off by 1"}
    ours = {"a": "passed", "b": "off by 2", "c": "passed", "d": "skipped", "e": "xpassed", "g": "off by 1"}
    found = thunder_peers.compare(own, ours)
    assert found["lost"] == {"b": "off by 2", "f": "missing"}
    assert found["won"] == {"c": "failed", "e": "xfailed"}
    assert found["neither"] == {"g": {"thunder": "off by 1", "sidestep": "off by 1"}}
    assert found["thunder"] == {"passed": 2, "failed": 2, "skipped": 1, "xfailed": 1, "xpassed": 1}


def test_peers_samples_are_compared_with_float64() -> None:
    """Right numbers pass; wrong ones, wrong mask gradients and NaN do not."""

    class Sample:
        args, kwargs = tuple(qkv(1, 2, 5, 8)), {"attn_mask": torch.randn(5, 5, requires_grad=True)}

    def without_mask_gradient(*args: Any, attn_mask: torch.Tensor) -> Any:
        return sdpa(*args, attn_mask=attn_mask * 0.5 + attn_mask.detach() * 0.5)

    def outcome(function: Callable[..., torch.Tensor]) -> str:
        return thunder_peers.verdict(thunder_peers.errors_of(function, Sample))

    assert outcome(jit(lambda *a, **k: sdpa(*a, **k))) == "passed"
    assert "output: off by inf" in outcome(lambda *a, **k: sdpa(*a, **k) * torch.nan)
    assert "output: off by" in outcome(lambda *a, **k: sdpa(*a, **k) * 1.001)
    assert "gradient 4 of 4" in outcome(without_mask_gradient)


def test_peers_errors_are_measured_by_the_parts_where_they_cancel() -> None:
    """A saturated softmax: gradients are differences of rounded numbers, and no kernel gives more than a rounding."""
    q, k, v = ((7 * t).detach().requires_grad_() for t in qkv(4, 3, 8))

    class Sample:
        args, kwargs = (q, k, v), {"is_causal": True}

    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]

    def errors(backend: str, factor: float = 1.0) -> list[thunder_peers.Error]:
        function: Any = sidestep.scaled_dot_product_attention
        return thunder_peers.errors_of(lambda *a, **k: function(*a, **k, backends=backend) * factor, Sample)

    own, flash = errors("torch_math"), errors("torch_flash")
    assert thunder_peers.verdict(own) == "passed"
    assert thunder_peers.verdict(flash) != "passed"
    assert not thunder_peers.is_worse(own, flash)
    assert thunder_peers.is_worse(own, errors("torch_flash", 1.0001))
    assert thunder_peers.is_worse(own, flash[:-1])
    # The parts of the output are those of sum(weight * |value|).
    sizes = thunder_peers.parts(wide[0], wide[1], wide[2], is_causal=True)
    torch.testing.assert_close(sizes[0], attention(wide[0], wide[1], wide[2].abs(), is_causal=True))
    assert [size.shape for size in sizes] == [t.shape for t in (q, q, k, v)]

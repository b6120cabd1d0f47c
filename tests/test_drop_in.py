"""The dispatcher behind torch's function: what it reaches, what it leaves to torch, and that nothing stays of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from process import Counters
from torch.nn.attention import SDPBackend, sdpa_kernel

import sidestep
from sidestep import drop_in

torch_sdpa: Any = functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    sidestep.uninstall()
    assert functional.scaled_dot_product_attention is torch_sdpa


def tensors(length: int, grad: bool = False) -> Any:
    return [torch.randn(1, 2, length, 8, requires_grad=grad) for _ in range(3)]


def served(function: Callable[[], Any]) -> list[str]:
    """The backends that were chosen in a call."""
    sidestep.configure()  # every signature is new
    with sidestep.observe() as seen:
        function()
    return [decisions[-1].backend for _, decisions in seen]


# --- put in, and taken out ------------------------------------------------------------------------------------------


def test_a_process_and_a_block(counters: Counters) -> None:
    query, key, value = tensors(4)
    sidestep.install()
    sidestep.install()
    with sidestep.installed(), sidestep.installed():
        torch.testing.assert_close(
            functional.scaled_dot_product_attention(query, key, value), torch_sdpa(query, key, value)
        )
    functional.scaled_dot_product_attention(query, key, value)
    assert counters.calls == 2
    sidestep.uninstall()
    assert functional.scaled_dot_product_attention is torch_sdpa
    assert counters.calls == 2


def test_an_exception_ends_a_block_too() -> None:
    with pytest.raises(KeyError), sidestep.installed():
        raise KeyError
    assert functional.scaled_dot_product_attention is torch_sdpa


def test_a_block_goes_on_when_another_thread_s_ends() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with sidestep.installed():
            inside.set()
            leave.wait(300)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(300)
    with sidestep.installed():
        leave.set()
        thread.join()
        assert functional.scaled_dot_product_attention is not torch_sdpa


def test_uninstall_in_a_block_waits_for_its_end() -> None:
    sidestep.install()
    with sidestep.installed():
        sidestep.uninstall()
        assert functional.scaled_dot_product_attention is not torch_sdpa
    assert functional.scaled_dot_product_attention is torch_sdpa


def test_a_function_that_somebody_put_over_ours_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = tensors(4)
    sidestep.install()
    ours: Any = functional.scaled_dot_product_attention
    theirs = lambda *arguments: ours(*arguments)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", theirs)
        sidestep.uninstall()
        assert functional.scaled_dot_product_attention is theirs
        assert served(lambda: functional.scaled_dot_product_attention(query, key, value)) == []
    sidestep.install()
    assert served(lambda: functional.scaled_dot_product_attention(query, key, value)) == ["torch_flash"]


def test_other_settings_of_torch_are_untouched() -> None:
    def settings() -> tuple[Any, ...]:
        cuda = torch.backends.cuda
        switches = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
        return (*switches, cuda.cudnn_sdp_enabled(), torch.backends.mha.get_fastpath_enabled(), torch.get_rng_state())

    before, names = settings(), dict(vars(functional))
    with sidestep.installed():
        functional.scaled_dot_product_attention(*tensors(4))
        changed = {name for name, value in vars(functional).items() if value is not names[name]}
        assert changed == {"scaled_dot_product_attention"}
        assert settings()[:-1] == before[:-1]
    assert {name for name, value in vars(functional).items() if value is not names[name]} == set()


# --- what it reaches ------------------------------------------------------------------------------------------------


def test_a_name_bound_before_is_out_of_reach() -> None:
    with sidestep.installed():
        assert served(lambda: torch_sdpa(*tensors(4))) == []


def test_multihead_attention_where_it_calls_the_function() -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def run(**arguments: Any) -> torch.Tensor:
        output: torch.Tensor = layer(x, x, x, need_weights=False, **arguments)[0]
        return output

    for arguments in ({}, {"key_padding_mask": padding}):
        expected = run(**arguments)
        with sidestep.installed():
            torch.testing.assert_close(run(**arguments), expected)
            assert served(lambda: run(**arguments)) == ["torch_flash"]  # noqa: B023
    with sidestep.installed():
        assert served(lambda: layer(x, x, x)) == []  # it returns weights: computed without the function


def test_an_encoder_layer_where_it_calls_the_function() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    with sidestep.installed():
        assert served(lambda: layer(x).sum().backward()) == ["torch_flash"]
        layer.eval()
        with torch.no_grad():
            assert served(lambda: layer(x)) == []  # one fused C++ operator
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                assert served(lambda: layer(x)) == ["torch_flash"]
            finally:
                torch.backends.mha.set_fastpath_enabled(True)


def test_backends_do_not_come_back_to_it(counters: Counters) -> None:
    for name in ("torch_flash", "torch_math"):
        with sidestep.installed(), sidestep.use_backends(name):
            functional.scaled_dot_product_attention(*tensors(6))
    assert (counters.calls, counters.selections) == (2, 2)


def test_a_default_device_is_no_way_around() -> None:
    with sidestep.installed(), torch.device("cpu"):
        assert served(lambda: functional.scaled_dot_product_attention(*tensors(4))) == ["torch_flash"]


# --- torch's switches -----------------------------------------------------------------------------------------------


def test_what_sdpa_kernel_forbids_is_not_used() -> None:
    query, key, value = tensors(5, grad=True)
    call = lambda: functional.scaled_dot_product_attention(query, key, value)  # noqa: E731
    with sidestep.installed():
        assert served(call) == ["torch_flash"]
        with sdpa_kernel(SDPBackend.MATH):
            assert served(call) == ["torch_math"]
            (grad,) = torch.autograd.grad(call().sum(), query, create_graph=True)
            grad.sum().backward()  # only math can be differentiated twice
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            assert drop_in.permitted() == ("torch_efficient", "torch_math")
            assert served(call) == ["torch_math"]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            assert drop_in.permitted() == ("cudnn",)
        with sdpa_kernel(SDPBackend.MATH), sidestep.use_backends("torch_flash"):
            assert served(call) == []  # nothing is left: torch answers
        assert served(call) == ["torch_flash"]


def test_without_its_switch_a_backend_goes_with_flash() -> None:
    with sidestep.use_backends("cudnn", "nvfuser", "torch"):
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            assert drop_in.permitted() == ("nvfuser", "torch_flash", "torch_math")
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
            assert drop_in.permitted() == ("cudnn", "torch_math")


# --- what torch answers ---------------------------------------------------------------------------------------------


def both(function: Callable[[], Any]) -> None:
    """The same with and without the drop-in, and no backend is asked."""
    expected = function()
    with sidestep.installed():
        functional.scaled_dot_product_attention(*tensors(4))  # a route that nothing may be mistaken for
        found = []
        with sidestep.observe() as seen:
            found.append(function())
    assert seen == []
    torch.testing.assert_close(found[0], expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_and_torch_func() -> None:
    batch = torch.randn(3, 1, 2, 4, 8)
    call = lambda x: functional.scaled_dot_product_attention(x, x, x)  # noqa: E731
    both(lambda: torch.vmap(call)(batch))
    both(lambda: torch.func.grad(lambda x: call(x).sum())(batch[0]))
    both(lambda: torch.vmap(torch.func.grad(lambda x: call(x).sum()))(batch))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    jagged = layout == torch.jagged  # (B, ragged, H, D) there; (B, H, ragged, D) here
    parts = [torch.randn(length, 2, 8) if jagged else torch.randn(2, length, 8) for length in (3, 4)]

    def run() -> list[torch.Tensor]:
        nested = torch.nested.nested_tensor(parts, layout=layout)
        nested = nested.transpose(1, 2) if jagged else nested
        output = functional.scaled_dot_product_attention(nested, nested, nested)
        return list((output.transpose(1, 2) if jagged else output).unbind())

    both(run)


def test_other_devices_and_tensors_without_memory() -> None:
    meta = torch.empty(1, 2, 4, 8, device="meta")
    both(lambda: functional.scaled_dot_product_attention(meta, meta, meta).shape)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(1, 2, 4, 8)
        both(lambda: functional.scaled_dot_product_attention(fake, fake, fake).shape)


def test_a_subclass_sees_torchs_function() -> None:
    seen = []

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    query = tensors(4)[0].as_subclass(Watching)
    with sidestep.installed():
        assert type(functional.scaled_dot_product_attention(query, query, query)) is Watching
    assert seen == [torch_sdpa]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_tracing_and_exporting() -> None:
    query, key, value = tensors(4)

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value)

    expected = call(query, key, value)
    with sidestep.installed():
        traced: Any = torch.jit.trace(call, (query, key, value))
        exported = torch.export.export(Module(), (query, key, value)).module()
        symbolic = torch.fx.symbolic_trace(Module())
        scripted = torch.jit.script(Module())
    for compiled in (traced, exported, symbolic, scripted):
        torch.testing.assert_close(compiled(query, key, value), expected)
    assert "scaled_dot_product_attention" in str(traced.graph)
    assert any(node.target is torch_sdpa for node in symbolic.graph.nodes)


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")
def test_tracing_by_its_own_name_is_refused() -> None:
    with pytest.raises(sidestep.InvalidCallError, match=r"under torch\.jit\.trace sizes are tensors"):
        torch.jit.trace(lambda *t: sidestep.scaled_dot_product_attention(*t), tuple(tensors(4)))


class Module(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value)


def test_a_wrong_call_gets_torchs_own_words() -> None:
    query, key, value = tensors(4)
    with sidestep.installed(), pytest.raises(RuntimeError) as caught:
        functional.scaled_dot_product_attention(query, key[..., :7], value)
    assert not isinstance(caught.value, sidestep.InvalidCallError)
    assert isinstance(caught.value.__context__, sidestep.InvalidCallError)

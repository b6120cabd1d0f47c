"""What stands around a call (hooks, modes, threads, forks, settings) neither changes a decision nor is harmed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from process import Counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sidestep
from sidestep import failures, selection, semantics, settings
from sidestep.backends import cudnn_graph, registry

sdpa: Any = sidestep.scaled_dot_product_attention
torch_sdpa: Any = torch.nn.functional.scaled_dot_product_attention


def tensors(length: int, grad: bool = True) -> list[torch.Tensor]:
    return [torch.randn(1, 2, length, 8, requires_grad=grad) for _ in range(3)]


class Refusing:
    """A backend that raises, where and what the test says."""

    name, builds = "refusing", False

    def __init__(self, error: Exception, verdict: str = "unsupported") -> None:
        self.error, self.kind = error, verdict

    def rejects(self, problem: Any) -> tuple[str, ...]:
        return ()

    def versions(self) -> dict[str, str | int]:
        return {"refusing": 1}

    def build(self, problem: Any, target: Any, progress: Any) -> Any:
        raise type(self.error)(*self.error.args)  # a new one: its traceback is not to be kept here

    def verdict(self, error: Exception) -> Any:
        return self.kind


@pytest.fixture
def refusing() -> Iterator[None]:
    registry.register("refusing", lambda: Refusing(NotImplementedError("no")))
    yield
    registry._added.pop("refusing")
    registry.get.cache_clear()


def records() -> list[Any]:
    return list(failures.records())


# --- the first run is apart -----------------------------------------------------------------------------------------


def test_a_first_call_inside_a_checkpoint() -> None:
    query = torch.randn(1, 2, 16, 8, requires_grad=True)

    def block(function: Any) -> torch.Tensor:
        result = checkpoint(lambda q: function(q, q, q).sin(), query, use_reentrant=False)
        return torch.autograd.grad(result.sum(), query)[0]

    torch.testing.assert_close(block(sdpa), block(torch_sdpa))
    assert records() == []


def test_a_first_call_inside_a_selective_checkpoint() -> None:
    """Three layers alike: what is saved of each must be its own result, not that of a first run."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op == kernel else CheckpointPolicy.PREFER_RECOMPUTE

    query = torch.randn(1, 2, 16, 8, requires_grad=True)

    def step(function: Any) -> torch.Tensor:
        def layers(x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = function(x.cos(), x, x).sin()
            return x

        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        result = checkpoint(layers, query, use_reentrant=False, context_fn=contexts)
        return torch.autograd.grad(result.sum(), query)[0]

    torch.testing.assert_close(step(sdpa), step(torch_sdpa))


def test_hooks_and_modes_see_one_call_only() -> None:
    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            type(self).seen += 1
            return func(*args, **(kwargs or {}))

    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(1)
        return tensor

    query, key, value = tensors(17)
    counts = []
    for _ in range(2):
        packed.clear()
        Count.seen = 0
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
            Count(),
        ):
            sdpa(query, key, value)
        counts.append((len(packed), Count.seen))
    assert counts[0] == counts[1]
    assert counts[0][0] > 0


def test_the_callers_data_is_no_failure_of_a_backend() -> None:
    query, key, value = tensors(18)
    query.data[0, 0, 0, 0] = torch.nan
    with torch.autograd.detect_anomaly(check_nan=True):
        sdpa(query, key, value)
    assert records() == []


def test_inference_tensors_are_the_callers_mistake(counters: Counters) -> None:
    with torch.inference_mode():
        query = torch.randn(1, 2, 19, 8)
    _, key, value = tensors(19)
    with pytest.raises(sidestep.InvalidCallError, match="inference_mode"):
        sdpa(query, key, value)
    assert counters.selections == 0
    assert sdpa(query, key.detach(), value.detach()).shape == query.shape


def test_no_memory_is_not_recorded() -> None:
    big = torch.randn(1, 1, 1, 8).expand(1, 1, 3_000_000, 8)
    with pytest.raises(sidestep.NoBackendError, match="transient"):
        sdpa(big, big, big, backends="torch_math")
    assert records() == []


# --- decisions ------------------------------------------------------------------------------------------------------


def test_whichever_is_misaligned_the_canonical_strides_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature says that some pointer is misaligned, not whose; a plan is for the strides of all."""
    monkeypatch.setattr(semantics, "_misaligned", lambda tensor: tensor.data_ptr() % semantics.ALIGNMENT != 0)

    def view(offset: int) -> torch.Tensor:
        return torch.randn(1, 2, 16, 24, dtype=torch.bfloat16)[..., offset : offset + 8]

    strides = set()
    for offsets in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)):
        query, key, value = map(view, offsets)
        call = semantics.Call(query, key, value, None, 0.0, False, None, False)
        assert not semantics.is_canonical(call)
        strides.add(tuple(tensor.stride() for tensor in semantics.canonicalize(call)[0][:3]))
    assert len(strides) == 1


@pytest.mark.usefixtures("refusing")
def test_a_fallback_keeps_no_tensor_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        query = torch.randn(1, 2, 22, 8)
        sdpa(query, query, query, backends=["refusing", "torch"])
        alive = weakref.ref(query)
        del query
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("refusing")
def test_a_missing_folder_does_not_stop_a_fallback(tmp_path: Path, lenient: None) -> None:
    registry.register("refusing", lambda: Refusing(AssertionError("bug"), "error"))
    gone = tmp_path / "gone"
    gone.mkdir()
    here = Path.cwd()
    os.chdir(gone)
    gone.rmdir()
    try:
        assert sdpa(*tensors(23), backends=["refusing", "torch"]).shape == (1, 2, 23, 8)
    finally:
        os.chdir(here)


def test_a_route_decided_under_other_settings_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install, decided, changed = selection.install, threading.Event(), threading.Event()

    def late(*arguments: Any) -> None:
        decided.set()
        changed.wait(300)
        install(*arguments)

    monkeypatch.setattr(selection, "install", late)
    query, key, value = tensors(24, grad=False)
    thread = threading.Thread(target=sdpa, args=(query, key, value))
    thread.start()
    decided.wait(300)
    sidestep.configure(backends="torch_math")
    changed.set()
    thread.join()
    assert selection.routes == {}
    with sidestep.observe() as seen:
        sdpa(query, key, value)
    assert [decision.backend for _, decisions in seen for decision in decisions] == ["torch_math"]


def test_a_dropped_route_is_not_taken_for_the_latest() -> None:
    """As after a thread that looked a route up just before the settings changed, and made it the latest just after."""
    query, key, value = tensors(28, grad=False)
    for _ in range(3):
        sdpa(query, key, value)
    stale = selection.latest.entry
    assert stale.plan is not None
    sidestep.configure(backends="torch_math")
    selection.latest.entry = stale
    with sidestep.observe() as seen:
        sdpa(query, key, value)
    assert [decision.backend for _, decisions in seen for decision in decisions] == ["torch_math"]


def test_a_fork_during_a_selection_does_not_hang() -> None:
    building, forked = threading.Event(), threading.Event()

    class Slow(Refusing):
        def build(self, problem: Any, target: Any, progress: Any) -> Any:
            building.set()
            forked.wait(300)
            return super().build(problem, target, progress)

    registry.register("slow", lambda: Slow(NotImplementedError("no")))
    try:
        thread = threading.Thread(target=sdpa, args=tensors(25, grad=False), kwargs={"backends": ["slow", "torch"]})
        thread.start()
        building.wait(300)
        child = os.fork()
        if child == 0:
            threading.Timer(300, os._exit, (1,)).start()
            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
            sdpa(*tensors(3, grad=False), backends="torch_math")
            os._exit(0)
        forked.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        registry._added.pop("slow")
        registry.get.cache_clear()


LOADER = """
import sys, torch, sidestep

class Attending(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        x = torch.full((1, 2, 4 + index, 8), float(index))
        return sidestep.scaled_dot_product_attention(x, x, x)[0, 0, 0, 0]

if __name__ == "__main__":
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    sidestep.install()
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(x, x, x).sum().backward()
    loader = torch.utils.data.DataLoader(Attending(), num_workers=2, multiprocessing_context=sys.argv[1])
    print([round(float(batch), 3) for _ in range(2) for batch in loader])
    torch.nn.functional.scaled_dot_product_attention(x, x, x).sum().backward()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loaders_are_harmless(method: str, tmp_path: Path) -> None:
    script = tmp_path / "loader.py"
    script.write_text(LOADER)
    done = subprocess.run([sys.executable, str(script), method], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([0.0, 1.0, 2.0, 3.0] * 2)


def test_deterministic_mode_is_no_other_problem_without_gradients(counters: Counters) -> None:
    query, key, value = tensors(26, grad=False)
    sdpa(query, key, value)
    torch.use_deterministic_algorithms(True)
    try:
        with sidestep.observe() as seen:
            sdpa(query, key, value)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [problem.deterministic for problem, _ in seen] == [False]


# --- arguments ------------------------------------------------------------------------------------------------------


def test_a_scale_in_a_tensor_is_read_at_every_call() -> None:
    query, key, value = tensors(27, grad=False)
    scale = torch.tensor(0.5)
    for number in (0.5, 2.0):
        scale.fill_(number)
        torch.testing.assert_close(sdpa(query, key, value, scale=scale), torch_sdpa(query, key, value, scale=number))


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale": "0.5"},
        {"is_causal": "no"},
        {"is_causal": None},
        {"is_causal": numpy.bool_(True)},
        {"enable_gqa": 1},
        {"dropout_p": "0.1"},
        {"dropout_p": None},
        {"attn_mask": [1]},
        {"key": None},
        {"query": torch.randn(1, 2, 4, 8).to_sparse()},
    ],
    ids=str,
)
def test_arguments_of_other_types_are_refused_clearly(arguments: dict[str, Any], counters: Counters) -> None:
    query, key, value = tensors(4, grad=False)
    with pytest.raises(sidestep.InvalidCallError, match=r"must be|not supported"):
        sdpa(**({"query": query, "key": key, "value": value} | arguments))
    assert counters.selections == 0


def test_under_vmap_the_text_says_so() -> None:
    query = torch.randn(3, 1, 2, 4, 8)
    with pytest.raises(sidestep.InvalidCallError, match="vmap"):
        torch.vmap(lambda q: sdpa(q, q, q))(query)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    """After a call of the same flags too: the check for calls like the one before must not see one."""
    plain = tensors(4, grad=False)
    for _ in range(2):
        sdpa(*plain)
    nested = torch.nested.nested_tensor([torch.randn(4, 2, 8)], layout=layout).transpose(1, 2)
    for place in range(4):
        given = [nested if place in (index, 3) else tensor for index, tensor in enumerate(plain)]
        with pytest.raises(sidestep.InvalidCallError, match=r"not supported"):
            sdpa(*given)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_with_operators_of_their_own_are_refused(counters: Counters) -> None:
    """A kernel would be given their data_ptr(), which is 0; a route for a plain tensor is none for them."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    plain = tensors(4, grad=False)
    for _ in range(2):
        sdpa(*plain)
        sdpa(*plain, attn_mask=torch.zeros(4, 4))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        distributed = [distribute_tensor(tensor, mesh) for tensor in plain]
        mask = distribute_tensor(torch.zeros(4, 4), mesh)
    finally:
        torch.distributed.destroy_process_group()
    with FakeTensorMode():
        fake = [torch.empty(1, 2, 4, 8) for _ in range(3)]
    with pytest.raises(sidestep.InvalidCallError, match=r"DTensor .* not supported.*to_local"):
        sdpa(*distributed)
    with pytest.raises(sidestep.InvalidCallError, match=r"FakeTensor .* not supported"):
        sdpa(*fake)
    with pytest.raises(sidestep.InvalidCallError, match=r"DTensor .* not supported"):
        sdpa(*plain, attn_mask=mask)
    assert sdpa(*(tensor.to_local() for tensor in distributed)).shape == (1, 2, 4, 8)
    assert counters.selections == 2


def test_names_may_be_any_text_and_nothing_else() -> None:
    class Name(str):
        __slots__ = ()

    query, key, value = tensors(5, grad=False)
    assert sdpa(query, key, value, backends=Name("torch_math")).shape == query.shape
    for wrong in (["torch_math"], 3):
        with pytest.raises(ValueError, match="is text"), sidestep.use_backends(wrong):  # type: ignore[arg-type]
            pass


def test_constant_outputs_have_the_querys_order_too() -> None:
    query = torch.randn(2, 10, 5, 8).transpose(1, 2).requires_grad_()
    output = sdpa(query, query, query, dropout_p=1.0)
    assert output.stride() == query.stride()
    assert not torch.autograd.grad(output.sum(), query)[0].any()


def test_settings_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sidestep.SettingError, match=r"SIDESTEP_BACKENDS='cudnn,foo'.*unknown backend 'foo'"):
        settings.Settings.from_environ({"SIDESTEP_BACKENDS": "cudnn,foo"})
    for wrong in ({"strict": 2}, {"backends": None}, {"backends": "foo"}, {"nothing": 1}, {"cache": 5}):
        with pytest.raises(sidestep.SettingError):
            sidestep.configure(**wrong)
    sidestep.configure(backends="cudnn, torch")
    sidestep.configure(backends=["torch_math"])
    monkeypatch.chdir("/")
    sidestep.configure(cache_dir="relative")
    assert settings.get().directory() == Path("/relative")


def test_a_variable_that_is_no_setting_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"SIDESTEP_BACKEND": "cudnn", "SIDESTEP_STRICT": "1", "SIDESTEP_Q": "", "OTHER": "1"}
    for _ in range(2):
        assert settings.Settings.from_environ(environ) == settings.Settings(strict=True)
    backend, odd = [record.getMessage() for record in caplog.records]
    assert backend == "SIDESTEP_BACKEND is no setting of this version and does nothing: did you mean SIDESTEP_BACKENDS?"
    assert "SIDESTEP_Q is no setting" in odd
    assert "there are SIDESTEP_BACKENDS, SIDESTEP_CACHE, " in odd


def test_autocast_may_change_its_dtype_between_calls() -> None:
    query, key, value = tensors(29, grad=False)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16, None, torch.float16):
        for _ in range(3):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                assert sdpa(query, key, value).dtype is (dtype or torch.float32)


def test_an_ended_threads_workspaces_go_to_the_next_on_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never freed, and threads that come and go take no more of them."""
    made: list[torch.Tensor] = []

    def lasting(index: int, allocate: Any) -> torch.Tensor:
        made.append(torch.zeros(8))
        return made[-1]

    monkeypatch.setattr(cudnn_graph, "_lasting", lasting)
    monkeypatch.setattr(cudnn_graph, "_spare_workspaces", {})
    found: list[Any] = []

    def work(stream: int, times: int = 2) -> None:
        lane = cudnn_graph._lanes.own
        lane.index = 0
        for _ in range(times):
            lane.stream = stream
            found.append(lane.find_workspace())

    for stream in (7, 7, 9, 7):
        thread = threading.Thread(target=work, args=(stream,))
        thread.start()
        thread.join()
        gc.collect()
    assert len(made) == 2
    expected = [made[0]] * 4 + [made[1]] * 2 + [made[0]] * 2
    assert all(one is other for one, other in zip(found, expected, strict=True))

"""What attention costs under `thunder.jit` with Sidestep, and with Thunder's own executors. Meant for an NVIDIA GPU.

    python scripts/bench_thunder.py [--output docs/benchmarks.json] [--device cuda|cpu] [--thunder-site DIR]
        [--only tiny]

Per call: the CPU time to issue a tiny call, and its time with an LLM shape, without and with gradients. Then a training
step of a small Llama. Contestants take turns round by round; medians are reported. One of Thunder's executors that
fails here is named with its exception. Its cudnn executor needs an older frontend than Sidestep; with

    pip install --no-deps --target DIR nvidia-cudnn-frontend==1.23.0

Thunder's executors are measured once more, in a process with that frontend. What fails here is taken from there, times
what the contestants of both processes take here over what they take there.

Most of a tiny call is Thunder's own: `idle` is an executor whose attention returns memory that it has. What a tiny call
costs beyond that is its `overhead`.

Targets, on a GPU: a tiny call's overhead at most a quarter of Thunder's cudnn executor's and no more than its sdpa
executor's; a step no slower than the best of Thunder's. Where one is missed the exit code is 1. On the CPU, where
Thunder's attention executors decline, the contestant is its default list, and there are no targets: that run only shows
that this works.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import sidestep
from sidestep.scripts import report

Function = Callable[[], Any]
attention: Any = torch.nn.functional.scaled_dot_product_attention
TINY = ("tiny call", "tiny, with gradients")
STEP = "step of a small Llama"
# Sidestep's overhead (of a step: time) over another's, at most.
LIMITS = {
    **{key: {"thunder_cudnn": 0.25, "thunder_sdpa": 1.0} for key in TINY},
    STEP: {"thunder_cudnn": 1.0, "thunder_sdpa": 1.0},
}


def executor_lists(device: str, only_own: bool) -> dict[str, list[Any]]:
    """Contestant -> executors; without Sidestep, where that is asked for."""
    import thunder

    claiming = ("cudnn", "sdpa")
    rest = [one for one in thunder.get_default_executors() if one.name not in claiming]
    own = {f"thunder_{name}": [name, *rest] for name in claiming} if device == "cuda" else {"thunder": rest}
    own["idle"] = [idle(), *rest]
    if only_own:
        return own
    import sidestep.thunder_executor

    return {"sidestep": [sidestep.thunder_executor.executor, *rest], **own}


@functools.cache
def idle() -> Any:
    """A Thunder executor whose attention does nothing, forward or backward, for value like query."""
    from thunder import torch as ltorch
    from thunder.core.proxies import TensorProxy
    from thunder.core.transforms import get_grad, put_grad
    from thunder.extend import OperatorExecutor, register_executor

    made = OperatorExecutor("idle", version="0")
    register_executor(made)
    memory = functools.cache(lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device))

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return memory(tensor.shape, tensor.dtype, tensor.device)

    def proxy(tensor: Any) -> Any:
        return TensorProxy(like=tensor, requires_grad=False)

    forward = made.register_operator("idle_forward", meta=lambda q, k, v: proxy(q), fn=lambda q, k, v: like(q))  # noqa: ARG005
    backward = made.register_operator(
        "idle_backward",
        meta=lambda grad, q, k, v, output: (proxy(q), proxy(k), proxy(v)),  # noqa: ARG005
        fn=lambda grad, q, k, v, output: (like(q), like(k), like(v)),  # noqa: ARG005
    )

    def with_gradients(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        output = forward(query, key, value)
        grads = backward(get_grad(output), query, key, value, output)
        for tensor, grad in zip((query, key, value), grads, strict=True):
            put_grad(tensor, grad)
        return output

    made.register_implementation(
        ltorch.scaled_dot_product_attention,
        execution_transform=lambda query, key, value, *_, **__: forward(query, key, value),
        grad_transform=with_gradients,
    )
    return made


def working(
    make: Callable[[list[Any]], Function], device: str, failed: dict[str, str], only_own: bool
) -> dict[str, Function]:
    """The contestants that run; why the others do not goes into `failed`."""
    found = {}
    for name, executors in executor_lists(device, only_own).items():
        try:
            function = make(executors)
            function()
        except (RuntimeError, ValueError, AttributeError, TypeError, KeyError) as error:
            if name in ("sidestep", "idle"):
                raise
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        else:
            found[name] = function
    return found


def call(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, grad: bool
) -> Callable[[list[Any]], Function]:
    """A jitted causal call of (batch, heads, length, head size), with its backward where `grad`."""
    import thunder

    batch, heads, length, size = shape
    inputs = [
        torch.randn(batch, length, heads, size, device=device, dtype=dtype).transpose(1, 2).requires_grad_(grad)
        for _ in range(3)
    ]
    weight = torch.randn_like(inputs[0]).detach()

    def make(executors: list[Any]) -> Function:
        jitted = thunder.jit(lambda q, k, v: attention(q, k, v, is_causal=True), executors=executors)
        if grad:
            return lambda: torch.autograd.grad(jitted(*inputs), inputs, weight)
        return lambda: jitted(*inputs)

    return make


class Layer(torch.nn.Module):
    """A layer of Llama 2: as many key heads as query heads, rotary embeddings, SwiGLU."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads, hidden = heads, 8 * size // 3 // 64 * 64
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(size, eps=1e-5) for _ in range(2))
        self.qkv = torch.nn.Linear(size, 3 * size, bias=False)
        self.out = torch.nn.Linear(size, size, bias=False)
        self.gate, self.up = (torch.nn.Linear(size, hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(hidden, size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(batch, length, size) to the same."""
        batch, length, size = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, size // self.heads)
        query, key, value = [part.transpose(1, 2) for part in qkv.unbind(2)]

        def rotate(heads: torch.Tensor) -> torch.Tensor:
            left, right = heads.chunk(2, -1)
            return heads * cos + torch.cat((-right, left), -1) * sin

        mixed: torch.Tensor = attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, size))
        y = self.norms[1](x)
        fed: torch.Tensor = self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))
        return x + fed


class Llama(torch.nn.Module):
    """Embeddings, layers, logits, and the loss of predicting the next token."""

    def __init__(self, vocabulary: int, size: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, size)
        self.layers = torch.nn.ModuleList(Layer(size, heads) for _ in range(layers))
        self.norm, self.head = torch.nn.RMSNorm(size, eps=1e-5), torch.nn.Linear(size, vocabulary, bias=False)
        half = size // heads // 2
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of (batch, length) tokens."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def training_step(device: str) -> Callable[[list[Any]], Function]:
    """Forward, backward and an optimizer's step of a small Llama."""
    import thunder

    sizes = (32000, 1024, 8, 2, 2048) if device == "cuda" else (128, 64, 2, 2, 32)
    batch, length = (4, 2048) if device == "cuda" else (2, 32)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens, targets = torch.randint(sizes[0], (2, batch, length), device=device)

    def make(executors: list[Any]) -> Function:
        torch.manual_seed(0)
        model = Llama(*sizes).to(device, dtype)
        jitted = thunder.jit(model, executors=executors)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            jitted(tokens, targets).backward()
            optimizer.step()

        return step

    return make


def measure(device: str, only: str, failed: dict[str, str], own: bool = False) -> dict[str, dict[str, float]]:
    """Benchmark whose name holds `only` -> contestant -> microseconds; of Thunder's `own` executors, or all."""
    gpu = device == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    tiny, large = (1, 2, 64, 64), (4, 32, 4096, 128) if gpu else (1, 2, 128, 64)
    many, few = (41, 15) if gpu else (7, 7)  # rounds: of tiny calls, and of those that keep a GPU busy
    sizes = "x".join(map(str, large))
    benches: list[tuple[str, Callable[[list[Any]], Function], int, bool]] = [
        (TINY[0], call(tiny, dtype, device, False), 100, False),
        (TINY[1], call(tiny, dtype, device, True), 50, False),
        (f"call {sizes}", call(large, dtype, device, False), 5, True),
        (f"{sizes}, with gradients", call(large, dtype, device, True), 5, True),
        (STEP, training_step(device), 3, True),
    ]
    return {
        name: report.microseconds(working(make, device, failed, own), few if busy else many, calls, busy)
        for name, make, calls, busy in benches
        if only in name
    }


def elsewhere(device: str, only: str, site: Path) -> dict[str, dict[str, float]]:
    """What `measure` finds of Thunder's executors in a process with another frontend."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--device", device, "--only", only, "--own"],
        env={**os.environ, **report.thunder_environ(site)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def judged(name: str, times: dict[str, float], there: dict[str, float], device: str) -> dict[str, Any]:
    """A benchmark's times, here and in the other process, with Sidestep's ratios to them and its targets."""
    both = [times[one] / there[one] for one in times.keys() & there.keys()]
    factor = statistics.geometric_mean(both) if both else 1.0

    def ratios(what: Callable[[dict[str, float], str], float]) -> dict[str, float | None]:
        """Sidestep's over the others'; None where those are nothing."""
        mine = what(times, "sidestep")
        theirs = {one: what(there, one) * factor for one in there} | {one: what(times, one) for one in times}
        return {
            one: round(mine / value, 3) if value > 0 else None
            for one, value in theirs.items()
            if one not in ("sidestep", "idle")
        }

    found = {"microseconds": times, "other_frontend": there, "this_process_over_the_other": round(factor, 3)}
    found["ratio"] = decisive = ratios(lambda taken, one: taken[one])
    if name in TINY:  # each process has an idle executor of its own
        found["overhead_ratio"] = decisive = ratios(lambda taken, one: taken[one] - taken["idle"])
    limits = LIMITS.get(name, {}) if device == "cuda" else {}
    missed = [one for one, limit in limits.items() if (ratio := decisive.get(one)) is None or ratio > limit]
    return {**found, "at_most": limits, "missed": missed}


def main() -> int:
    """Run every comparison, print it, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=report.PLACE)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    report.add_thunder_site(parser)
    parser.add_argument("--only", default="", metavar="TEXT", help="the benchmarks whose name holds it")
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device: str = options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("bench_thunder needs an NVIDIA GPU, and torch sees none here; --device cpu for a try", file=sys.stderr)
        return 1
    if options.own:
        print(json.dumps(measure(device, options.only, {}, own=True)))
        return 0
    other = elsewhere(device, options.only, options.thunder_site) if options.thunder_site else {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        sidestep.configure(cache_dir=folder)
        measured = measure(device, options.only, failed)
    results: dict[str, Any] = {}
    for name, times in measured.items():
        results[name] = judged(name, times, other.get(name, {}), device)
        print(f"{name:36} {results[name]}")
    for name, why in failed.items():
        print(f"{name} does not work here: {why}")
    found = {**report.circumstances(), "device_type": device, "results": results, "failed": failed}
    report.keep(options.output, "thunder", found)
    return 1 if any(result["missed"] for result in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())

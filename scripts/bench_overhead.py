"""What a call costs on the CPU, against torch's own paths, and what its kernels cost on the GPU. Needs an NVIDIA GPU.

    python scripts/bench_overhead.py [--output docs/benchmarks.json]

Every figure of a comparison comes from one run, its contestants taking turns round by round; medians over the
rounds are reported, and the ratio of the medians. Where a target is missed the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cudnn
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_attention

import sidestep
from sidestep.scripts import report

ROUNDS, CALLS = 41, 200
Function = Callable[[], Any]


def cpu_microseconds(contestants: dict[str, Function], calls: int = CALLS) -> dict[str, float]:
    """The median time to issue one call, in microseconds."""
    return report.microseconds(contestants, ROUNDS, calls)


def gpu_microseconds(contestants: dict[str, Function], calls: int = 20) -> dict[str, float]:
    """The median time that one call keeps the GPU busy, in microseconds, between CUDA events."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for function in contestants.values():
        for _ in range(10):
            function()
    for _ in range(ROUNDS):
        for name, function in contestants.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(calls):
                function()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / calls * 1e3)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def tensors(batch: int, heads: int, kv_heads: int, length: int, size: int, dtype: torch.dtype, grad: bool) -> Any:
    """Query, key and value as a projection leaves them: (B, S, H, D) in memory, seen as (B, H, S, D)."""
    return [
        torch.randn(batch, length, h, size, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_(grad)
        for h in (heads, kv_heads, kv_heads)
    ]


def training_step(attention: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor) -> Function:
    """Forward and backward."""
    return lambda: torch.autograd.grad(attention(*inputs), inputs, grad)


def bench_inference() -> dict[str, float]:
    """A tiny, launch-bound call; torch's is made under sdpa_kernel(CUDNN_ATTENTION), entered outside the loop."""
    q, k, v = tensors(1, 2, 2, 64, 64, torch.bfloat16, False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return cpu_microseconds(
            {
                "torch_cudnn": lambda: torch_attention(q, k, v),
                "sidestep": lambda: sidestep.scaled_dot_product_attention(q, k, v),
            }
        )


def bench_training() -> dict[str, float]:
    """The same, forward and backward."""
    inputs = tensors(1, 2, 2, 64, 64, torch.bfloat16, True)
    grad = torch.randn_like(inputs[0])
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return cpu_microseconds(
            {
                "torch_cudnn": training_step(torch_attention, inputs, grad),
                "sidestep": training_step(sidestep.scaled_dot_product_attention, inputs, grad),
            },
            calls=100,
        )


def bench_known_bad() -> dict[str, float]:
    """float32 with head size 512, refused by cuDNN 9.19: a record says so, and torch_efficient serves."""
    q, k, v = tensors(1, 2, 2, 64, 512, torch.float32, False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        sidestep.scaled_dot_product_attention(q, k, v)
        sidestep.configure(strict=False)  # routes are dropped; the record is in the cache
        before = sidestep.stats()
        with sidestep.observe() as seen:
            sidestep.scaled_dot_product_attention(q, k, v)
        after = sidestep.stats()
        served = seen[0][1][-1].backend
        if after["builds"] != before["builds"] or served != "torch_efficient":
            raise SystemExit(f"not a known-bad configuration served by torch_efficient: {seen}")
        return cpu_microseconds(
            {
                "torch_efficient": lambda: torch_attention(q, k, v),
                "sidestep": lambda: sidestep.scaled_dot_product_attention(q, k, v),
            }
        )


def own_graph(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor) -> Function:
    """The serving backend alone: a causal forward graph built and run with the frontend's public API."""
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    inputs = [graph.tensor_like(tensor) for tensor in (q, k, v)]
    scale = q.shape[-1] ** -0.5
    result, _ = graph.sdpa(
        name="sdpa", q=inputs[0], k=inputs[1], v=inputs[2], attn_scale=scale, is_inference=True, use_causal_mask=True
    )
    result.set_output(True).set_dim(list(output.shape)).set_stride(list(output.stride()))
    graph.build([cudnn.heur_mode.A])
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
    buffers = dict(zip((*inputs, result), (q, k, v, output), strict=True))
    return lambda: graph.execute(buffers, workspace, handle=handle)


def bench_kernels(shape: tuple[int, int, int, int, int]) -> dict[str, float]:
    """A causal LLM shape (batch, heads, key heads, length, head size), where kernels dwarf the launch."""
    q, k, v = tensors(*shape, torch.bfloat16, False)
    with torch.no_grad():
        output = sidestep.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        alone = own_graph(q, k, v, torch.empty_like(output))
        return gpu_microseconds(
            {
                "cudnn_alone": alone,
                "sidestep": lambda: sidestep.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
            }
        )


def main() -> int:
    """Run every comparison, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=report.PLACE)
    output: Path = parser.parse_args().output
    if not torch.cuda.is_available():
        print("bench_overhead needs an NVIDIA GPU, and torch sees none here", file=sys.stderr)
        return 1
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        sidestep.configure(cache_dir=stack.enter_context(tempfile.TemporaryDirectory()))
        benches: list[tuple[str, Callable[[], dict[str, float]], Callable[[float], float]]] = [
            ("inference, tiny (CPU us)", bench_inference, lambda base: base),
            ("forward and backward, tiny (CPU us)", bench_training, lambda base: 1.1 * base),
            ("known-bad, tiny, inference (CPU us)", bench_known_bad, lambda base: base + 2.0),
            ("kernels, 4x32x4096x128 (GPU us)", lambda: bench_kernels((4, 32, 32, 4096, 128)), lambda b: 1.03 * b),
            ("kernels, 1x32/8x8192x128 (GPU us)", lambda: bench_kernels((1, 32, 8, 8192, 128)), lambda b: 1.03 * b),
        ]
        for name, run, limit in benches:
            times = run()
            base = next(value for key, value in times.items() if key != "sidestep")
            bound = round(limit(base), 2)
            results[name] = {
                **times,
                "ratio": round(times["sidestep"] / base, 3),
                "at_most": bound,
                "reached": times["sidestep"] <= bound,
            }
            print(f"{name:40} {results[name]}")
    report.keep(output, "overhead", {**report.circumstances(), "rounds": ROUNDS, "results": results})
    return 0 if all(result["reached"] for result in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

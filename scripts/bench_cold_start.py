"""What a new process pays before its first results: cold, warm, and torch's own cuDNN path. Needs an NVIDIA GPU.

    python scripts/bench_cold_start.py [--output docs/benchmarks.json] [--only start,together,bundle,memory]
        [--bundle FILE --verdicts FILE]

start     20 configurations, forward and backward, in a fresh process each time: with an empty cache, with the cache
          that the first left behind, and through torch under sdpa_kernel(CUDNN_ATTENTION). Timed from the first call
          to the last result on the GPU; imports and the CUDA context come before, for all alike (what Sidestep imports
          at its first call, the frontend and the store's library, is told beside it as `imports`). Once as in a new
          container, with an empty folder for the driver's own cache of compiled kernels (CUDA_CACHE_PATH) for each
          process: there the targets apply. Then with a folder that such processes have filled before, as on a machine
          that is used again.
together  8 processes at once on an empty cache, each over the 20 configurations, against one alone.
bundle    Plans of random problems that were built without a GPU, as the commands below made them; imported into an
          empty cache here, every plan is loaded, run, and compared with the one that is built here.
              python scripts/bench_cold_start.py --write-random 320 > random.yaml
              SIDESTEP_CACHE_DIR=offline sidestep warmup random.yaml --device h200 --json > verdicts.json
              SIDESTEP_CACHE_DIR=offline sidestep cache export offline.bundle
memory    10,000 different problems in one process, for a backend that builds and for those that do not.

Everything in one run, contestants taking turns; medians. Where a target is missed the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sidestep.scripts import report

ROUNDS = 3
TOGETHER = 8
# What models call (`sidestep warmup --list-models`, and the papers of the others): dtype, batch, heads, kv_heads, query
# length, key length, head size, causal.
CONFIGURATIONS = [
    ("bfloat16", 2, 32, 8, 1024, 1024, 128, True),  # llama-3-8b, mistral-7b
    ("bfloat16", 2, 32, 8, 2048, 2048, 128, True),
    ("bfloat16", 1, 64, 8, 2048, 2048, 128, True),  # llama-3-70b
    ("bfloat16", 2, 32, 8, 1024, 1024, 64, True),  # llama-3.2-1b
    ("bfloat16", 2, 28, 4, 1024, 1024, 128, True),  # qwen2.5-7b
    ("bfloat16", 2, 16, 16, 512, 512, 256, True),  # gemma-7b
    ("bfloat16", 2, 32, 32, 1024, 1024, 96, True),  # phi-3-mini
    ("bfloat16", 2, 32, 32, 1024, 1024, 80, True),  # phi-2
    ("float16", 4, 12, 12, 1024, 1024, 64, True),  # gpt2
    ("float16", 2, 20, 20, 512, 512, 64, True),  # gpt2-large
    ("float16", 8, 12, 12, 512, 512, 64, False),  # bert-base
    ("float16", 4, 16, 16, 384, 384, 64, False),  # bert-large
    ("float16", 8, 12, 12, 197, 197, 64, False),  # vit-b-16
    ("float16", 4, 16, 16, 729, 729, 72, False),  # siglip-so400m
    ("float16", 1, 20, 20, 1500, 1500, 64, False),  # whisper-large-v3, the encoder
    ("float16", 1, 20, 20, 448, 1500, 64, False),  # its decoder's cross attention
    ("float16", 2, 10, 10, 4096, 4096, 64, False),  # stable-diffusion-xl
    ("float16", 2, 10, 10, 4096, 77, 64, False),  # its cross attention
    ("float16", 2, 8, 8, 4096, 4096, 40, False),  # stable-diffusion-1.5
    ("float16", 2, 8, 8, 256, 256, 160, False),  # its deepest level
]
# Largest difference over the largest magnitude, of output and gradients.
TOLERANCE = 3e-2


# the children --------------------------------------------------------------------------------------------------------


def child(what: str) -> None:
    """Run every configuration once, forward and backward; waits for a line on stdin, and tells what it did."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import sidestep

    torch.manual_seed(0)
    calls = []
    for name, batch, heads, kv_heads, queries, keys, size, causal in CONFIGURATIONS:
        dtype = getattr(torch, name)
        shapes = ((batch, heads, queries, size), (batch, kv_heads, keys, size), (batch, kv_heads, keys, size))
        tensors = [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]
        calls.append((tensors, causal, torch.randn(shapes[0], device="cuda", dtype=dtype)))
    attention: Any = sidestep.scaled_dot_product_attention
    if what == "torch":
        attention = torch.nn.functional.scaled_dot_product_attention
    importing = time.perf_counter()
    if what == "sidestep":
        importlib.import_module("cudnn")
        importlib.import_module("sidestep.cache.disk_store")
    imports = time.perf_counter() - importing
    # What torch itself loads and imports at its first gradients (sympy among it: 0.6 s) is no contestant's.
    warm = torch.randn(8, 8, device="cuda", requires_grad=True)
    torch.autograd.grad(warm @ warm, warm, torch.ones_like(warm))
    torch.cuda.synchronize()
    tell({"ready": True})
    sys.stdin.readline()
    began = time.time()
    results = []
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for tensors, causal, grad in calls:
            output = attention(*tensors, is_causal=causal, enable_gqa=tensors[0].shape[1] != tensors[1].shape[1])
            results.append((output, *torch.autograd.grad(output, tensors, grad)))
            torch.cuda.synchronize()
    ended = time.time()
    wrong = sum(not right(call, result) for call, result in zip(calls, results, strict=True))
    tell({"began": began, "ended": ended, "wrong": wrong, "imports": imports, **sidestep.stats()})


def right(call: Any, result: Any) -> bool:
    """Whether output and gradients are those of float32 math attention."""
    import torch

    tensors, causal, grad = call
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    groups = wide[0].shape[1] // wide[1].shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in wide[1:])
    logits = wide[0] @ key.transpose(-1, -2) * wide[0].shape[-1] ** -0.5
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    output = torch.softmax(logits, -1) @ value
    expected = (output, *torch.autograd.grad(output, wide, grad.float()))
    return all(error(mine, theirs) < TOLERANCE for mine, theirs in zip(result, expected, strict=True))


def error(actual: Any, expected: Any) -> float:
    """The largest difference over the largest magnitude."""
    return float((actual.detach().float() - expected).abs().max() / expected.detach().abs().max())


def tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def run_children(what: str, caches: list[Path], driver_cache: Path | None = None) -> list[dict[str, Any]]:
    """Start a child for each cache folder, let them begin together, and return what they tell."""
    children = []
    for cache in caches:
        command = [sys.executable, str(Path(__file__).resolve()), "--child", what]
        env = {**os.environ, "SIDESTEP_CACHE_DIR": str(cache), "SIDESTEP_BACKENDS": "cudnn"}
        if driver_cache is not None:
            env["CUDA_CACHE_PATH"] = str(driver_cache)
        children.append(
            subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        )
    for one in children:
        assert one.stdout is not None
        one.stdout.readline()
    for one in children:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    answers = [one.communicate()[0] for one in children]
    if any(one.returncode for one in children):
        raise SystemExit(f"a child ended with {[one.returncode for one in children]}")
    return [json.loads(answer) for answer in answers]


# the parts -----------------------------------------------------------------------------------------------------------


def folders() -> Iterator[Path]:
    """New empty cache folders."""
    with tempfile.TemporaryDirectory() as folder:
        number = 0
        while True:
            number += 1
            yield Path(folder, str(number))


def start(new: Iterator[Path]) -> dict[str, Any]:
    """Cold, warm and torch in turn, as on a new machine and as on one that is used again."""
    used = next(new)
    for what in ("torch", "sidestep"):
        run_children(what, [next(new)], used)
    found = {"new_machine": _start(new, None), "used_machine": _start(new, used)}
    return {**found, "reached": found["new_machine"]["reached"]}


def _start(new: Iterator[Path], driver_cache: Path | None) -> dict[str, Any]:
    """Cold, warm and torch in turn, with one folder for the driver's cache, or a new one for each process."""
    seconds: dict[str, list[float]] = {"torch": [], "cold": [], "warm": []}
    told: dict[str, Any] = {}
    for _ in range(ROUNDS):
        cache = next(new)
        for name in seconds:
            (told[name],) = run_children("torch" if name == "torch" else "sidestep", [cache], driver_cache or next(new))
            if told[name]["wrong"]:
                raise SystemExit(f"{name}: {told[name]['wrong']} configurations wrong")
            seconds[name].append(told[name]["ended"] - told[name]["began"])
    median = {name: round(statistics.median(times), 4) for name, times in seconds.items()}
    cold, torchs = (round(median[name] / median["warm"], 1) for name in ("cold", "torch"))
    graphs = 2 * len(CONFIGURATIONS)
    built = (told["cold"]["builds"], told["warm"]["builds"], told["warm"]["loads"])
    return {
        "configurations": len(CONFIGURATIONS),
        "rounds": ROUNDS,
        "seconds": median,
        "imports": round(told["warm"]["imports"], 4),
        "cold_over_warm": cold,
        "torch_over_warm": torchs,
        "at_least": {"cold_over_warm": 12, "torch_over_warm": 10},
        "builds": {"cold": built[0], "warm": built[1]},
        "reached": cold >= 12 and torchs >= 10 and built == (graphs, 0, len(CONFIGURATIONS)),
    }


def together(new: Iterator[Path]) -> dict[str, Any]:
    """Eight processes against one, each on an empty cache."""
    alone, shared, builds, wrong = [], [], [], 0
    for _ in range(ROUNDS):
        (one,) = run_children("sidestep", [next(new)])
        alone.append(one["ended"] - one["began"])
        told = run_children("sidestep", [next(new)] * TOGETHER)
        shared.append(max(t["ended"] for t in told) - min(t["began"] for t in told))
        builds.append(sum(t["builds"] for t in told))
        wrong += sum(t["wrong"] for t in told)
    ratio = round(statistics.median(shared) / statistics.median(alone), 3)
    graphs = 2 * len(CONFIGURATIONS)
    return {
        "processes": TOGETHER,
        "seconds": {"one": round(statistics.median(alone), 3), "all": round(statistics.median(shared), 3)},
        "ratio": ratio,
        "at_most": 1.2,
        "graphs": graphs,
        "builds": builds,
        "wrong": wrong,
        "reached": ratio <= 1.2 and set(builds) == {graphs} and not wrong,
    }


def random_spec(count: int) -> str:
    """Random problems, of which some are refused, as a SPEC; always the same."""
    from sidestep import spec

    draw = random.Random(20261130)
    problems: list[Any] = []
    while len(problems) < count:
        heads = draw.choice([1, 2, 3, 4, 8])
        causal = draw.random() < 0.4
        mask = "none" if causal or draw.random() < 0.5 else draw.choice(["bool", "same", "float32"])
        fields: dict[str, Any] = {
            "batch": draw.choice([1, 2, 3]),
            "heads": heads,
            "kv_heads": draw.choice([h for h in (1, 2, heads) if heads % h == 0]),
            "query_length": draw.choice([1, 2, 7, 33, 64, 100, 128, 200, 384]),
            "key_length": draw.choice([1, 5, 64, 65, 128, 192, 200, 513]),
            "head_size": draw.choice([8, 32, 40, 64, 65, 80, 96, 128, 128, 160, 192, 256, 264]),
            "dtype": draw.choice(["float16", "bfloat16", "bfloat16", "float32"]),
            "causal": causal,
            "training": draw.random() < 0.6,
            "layout": draw.choice(["bhsd", "bshd"]),
            "dropout": draw.choice([0.0, 0.0, 0.0, 0.1]),
            "mask": mask,
        }
        if draw.random() < 0.2:
            fields["value_head_size"] = draw.choice([32, 64, 128])
        if mask != "none":
            fields["mask_shape"] = [
                draw.choice([1, "B"]), draw.choice([1, "H"]), draw.choice([1, "S_q"]), "S_kv"
            ]  # fmt: skip
            fields["mask_grad"] = mask != "bool" and fields["training"] and draw.random() < 0.3
        problem = spec.problem_of(fields)
        if problem not in problems:
            problems.append(problem)
    return spec.dump(problems)


def bundle(new: Iterator[Path], file: Path, verdicts: Path) -> dict[str, Any]:
    """Plans built without a GPU, loaded here, against plans built here."""
    cache = next(new)
    subprocess.run(
        [sys.executable, "-m", "sidestep", "cache", "import", str(file)],
        env={**os.environ, "SIDESTEP_CACHE_DIR": str(cache)},
        check=True,
    )
    running = []
    for number in range(TOGETHER):
        command = [sys.executable, str(Path(__file__).resolve()), "--child", f"bundle {number}"]
        command += ["--bundle", str(cache), "--verdicts", str(verdicts)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    answers = [json.loads(one.communicate()[0].splitlines()[-1]) for one in running]
    total = {name: sum(answer[name] for answer in answers) for name in answers[0] if name != "disagreements"}
    disagreements = [one for answer in answers for one in answer["disagreements"]]
    same = total["equal_outputs"] == total["close_gradients"] == total["loaded"] > 0
    reached = not disagreements and not total["built_with_cache"] and same
    return {**total, "disagreements": disagreements, "reached": reached}


def bundle_child(imported: Path, verdicts: Path, number: int) -> None:
    """Ask about each problem twice: with the imported cache, and with an empty one; compare verdicts and numbers."""
    import torch

    import sidestep
    from sidestep import selection
    from sidestep.backends.base import GraphPlan, Target
    from sidestep.decisions import Chosen
    from sidestep.problem import AttentionProblem
    from sidestep.worker import random_tensors

    items = json.loads(verdicts.read_text())["items"][number::TOGETHER]
    names = ("served", "refused", "loaded", "built_with_cache", "equal_outputs", "close_gradients")
    totals = {"problems": len(items), **dict.fromkeys(names, 0)}
    disagreements = []
    with tempfile.TemporaryDirectory() as empty:
        for item in items:
            problem, target = AttentionProblem.from_json(item["problem"]), Target(0)
            torch.manual_seed(0)
            tensors: Any = random_tensors(problem, target)
            answers, numbers = [], []
            for cache in (str(imported), empty):
                sidestep.configure(cache_dir=cache)
                before = sidestep.stats()
                made = selection.select(problem, ("cudnn",), target, tensors, strict=False)
                answers.append(isinstance(made.decisions[-1], Chosen))
                if cache != empty:
                    totals["built_with_cache"] += sidestep.stats()["builds"] - before["builds"]
                    totals["loaded"] += sidestep.stats()["loads"] - before["loads"]
                if made.served is None:
                    continue
                torch.manual_seed(1)
                plan: Any = made.served.plan
                with torch.no_grad():
                    if problem.training and isinstance(plan, GraphPlan):
                        output, *residuals = plan.forward(*tensors)
                        grad = torch.ones_like(output)
                        numbers.append([output, *plan.backward(grad, *tensors, output, *residuals)])
                    else:
                        numbers.append([plan.infer(*tensors)])
            totals["served" if answers[1] else "refused"] += 1
            if {*answers, item["served_by"] == "cudnn"} != {answers[0]}:
                disagreements.append([str(problem), item["outcome"], answers])
            if len(numbers) == 2:
                (mine, *grads), (theirs, *others) = ([t for t in part if t is not None] for part in numbers)
                totals["equal_outputs"] += torch.equal(mine.nan_to_num(), theirs.nan_to_num())
                # Gradients are summed in an order that differs from run to run.
                totals["close_gradients"] += all(map(close, grads, others))
    tell({**totals, "disagreements": disagreements})


def close(actual: Any, expected: Any) -> bool:
    """Whether they differ by 1 % of the largest number at most; of 1 where all are small, as with a single key."""
    bound = 1e-2 * max(1.0, float(expected.abs().max()))
    return bool((actual.float() - expected.float()).abs().max() <= bound)


def memory() -> dict[str, Any]:
    """The process's memory, and the GPU's, over thousands of different problems."""
    import resource

    import torch

    import sidestep
    from sidestep import plans, selection

    def megabytes() -> tuple[float, float]:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        free, total = torch.cuda.mem_get_info()
        return pages * resource.getpagesize() / 2**20, (total - free) / 2**20

    def grow(count: int, backends: str, steps: int) -> list[list[float]]:
        seen = []
        for number in range(count):
            x = torch.zeros(1, 1, 1 + number, 8, device="cuda", dtype=torch.float16)
            sidestep.scaled_dot_product_attention(x, x, x, backends=backends)
            if (number + 1) % (count // steps) == 0:
                torch.cuda.empty_cache()
                seen.append([round(number, 1) for number in megabytes()])
        return seen

    with tempfile.TemporaryDirectory() as cache:
        sidestep.configure(cache_dir=cache, strict=False)
        most = plans.MAX_PLANS
        plain = grow(10_000, "torch_flash", 10)
        kept = len(selection._memory), len(selection.routes)
        sidestep.configure()
        plans.MAX_PLANS = 64
        built = grow(512, "cudnn", 8)
        built_kept = len(selection._memory)
    # After the bounds are reached: the last half against the first half.
    growth = {"torch_flash": round(plain[-1][0] - plain[len(plain) // 2][0], 1)}
    half = len(built) // 2
    growth |= {"cudnn": round(built[-1][0] - built[half][0], 1), "cudnn_gpu": round(built[-1][1] - built[half][1], 1)}
    return {
        "problems": {"torch_flash": 10_000, "cudnn": 512},
        "plans_at_most": {"torch_flash": most, "cudnn": 64},
        "plans_kept": {"torch_flash": kept[0], "cudnn": built_kept},
        "mb_process_and_gpu": {"torch_flash": plain, "cudnn": built},
        "mb_grown_at_the_bound": growth,
        "reached": kept == (most, most) and built_kept == 64 and max(growth.values()) < 64,
    }


def main() -> int:
    """Run the parts, print them, keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=report.PLACE)
    parser.add_argument("--only", default="start,together,memory", help="default: %(default)s, and bundle if given")
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--verdicts", type=Path)
    parser.add_argument("--write-random", type=int, metavar="N", help="print the SPEC of N random problems")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write_random:
        print(random_spec(arguments.write_random), end="")
        return 0
    if arguments.child:
        if arguments.child.startswith("bundle "):
            bundle_child(arguments.bundle, arguments.verdicts, int(arguments.child.split()[1]))
        else:
            child(arguments.child)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("bench_cold_start needs an NVIDIA GPU, and torch sees none here", file=sys.stderr)
        return 1
    wanted = [*arguments.only.split(","), *(["bundle"] if arguments.bundle and arguments.verdicts else [])]
    new = folders()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "start": lambda: start(new),
        "together": lambda: together(new),
        "memory": memory,
        "bundle": lambda: bundle(new, arguments.bundle, arguments.verdicts),
    }
    results = {}
    for name in dict.fromkeys(wanted):
        results[name] = parts[name]()
        print(name, json.dumps(results[name]), flush=True)
    report.keep(arguments.output, "cold_start", {**report.circumstances(), "results": results})
    return 0 if all(result["reached"] for result in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Where cuDNN's attention graphs leave wrong numbers, and whether a remedy cures them: what the rules rest on.

    python scripts/sweep_numbers.py --output sweep.jsonl [--sets trap3,fp32,bias] [--seconds 240] [--children 8]
    python scripts/sweep_numbers.py --output times.jsonl --sets time
    python scripts/sweep_numbers.py --output sweep.jsonl --summary

Builds graphs through Sidestep's own backend, below its rules, runs forward and backward into buffers that hold NaN,
and compares with float64 attention on several sets of data. One JSON line for each configuration is appended to the
output; configurations that it already holds are not run again, so a run that was cut goes on where it ended. The
most telling ones come first. Each child process takes one configuration after the other; one that dies (an illegal
memory access is sticky) takes along only that one, which is noted, and another child takes its place.

`--offline` builds everything for the H200 on a machine without a GPU and runs nothing.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Config = dict[str, Any]

# --- the grid; a bias is given by the letters of its shape: B, H, Q, K, or 1 ---

MULTIPLES = (63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
LONG = (320, 448, 576, 704, 832, 960, 1088, 2112)
VERY_LONG = (4160, 8256)
QUERIES = (1, 2, 3, 63, 64, 65, 127, 128, 129, 200, 256, 704)
HALF = ("bfloat16", "float16")
DEVICE = "cuda"  # where data, reference and comparison are
# The remedies of each direction; `as_is` declares the bias without expanding its query dimension.
FORMS: dict[str, dict[Any, str]] = {
    "plain": {},
    "padded": {"forward": "padding_mask", "backward": "padding_mask"},
    "backward": {"backward": "padding_mask"},
    "bounded": {"backward": "bounded_logits"},
    "as_is": {},
}


def config(kind: str, **changes: Any) -> Config:
    """One configuration; what is not given is the usual."""
    usual: Config = {
        "set": kind,
        "dtype": "bfloat16",
        "batch": 2,
        "heads": 2,
        "kv_heads": 2,
        "queries": 200,
        "keys": 192,
        "size": 64,
        "value_size": None,
        "causal": False,
        "bias": None,
        "bias_dtype": "same",
        "bias_grad": False,
        "training": True,
        "forms": ["plain", "padded"],
    }
    assert not set(changes) - set(usual), changes
    usual |= changes
    usual["value_size"] = usual["value_size"] or usual["size"]
    return usual


def trap3() -> Iterator[Config]:
    """NaN gradients by key length, query length, head size, dtype, causality, bias, grouping."""
    make = functools.partial(config, "trap3")
    lengths = (*MULTIPLES, *LONG)
    for queries in (200, 1):
        for keys in lengths:
            yield make(queries=queries, keys=keys)
    for queries in QUERIES:
        for keys in (64, 128, 192, 256, 704):
            yield make(queries=queries, keys=keys)
    for keys in (64, 128, 192, 704):
        yield make(queries=keys, keys=keys, causal=True)
        for queries in (1, 2, 65, 200, 704):
            yield make(queries=queries, keys=keys, causal=True)
    for bias, dtype in itertools.product(("B11K", "11QK", "BHQK"), ("same", "bool", "float32")):
        for queries, keys in ((200, 192), (1, 128), (64, 64), (2, 64), (200, 128)):
            yield make(queries=queries, keys=keys, bias=bias, bias_dtype=dtype)
    for queries, keys in ((200, 192), (1, 128), (200, 128)):
        for heads, kv_heads in ((4, 1), (4, 2), (1, 1)):
            yield make(queries=queries, keys=keys, heads=heads, kv_heads=kv_heads)
        for size, value_size in ((64, 128), (128, 64), (32, 64), (64, 32)):
            yield make(queries=queries, keys=keys, size=size, value_size=value_size)
    for size in range(8, 264, 8):
        for queries, keys in ((200, 64), (200, 192), (1, 64), (1, 128)):
            yield make(queries=queries, keys=keys, size=size)
    for keys in range(1, 161, 2):
        yield make(keys=keys)
    for queries, keys in itertools.product((200, 1), lengths):
        yield make(queries=queries, keys=keys, dtype="float16")
        yield make(queries=queries, keys=keys, size=128)
    for keys in range(1, 161, 2):
        yield make(queries=1, keys=keys)
    for keys in VERY_LONG:
        for queries in (1, 129, 200):
            yield make(queries=queries, keys=keys)
    for size in range(8, 264, 8):
        yield make(queries=192, keys=192, size=size, causal=True)
        yield make(queries=200, keys=192, size=size, dtype="float16")
        yield make(queries=200, keys=64, size=size, bias="BHQK")
    for queries, keys in itertools.product(QUERIES, lengths):
        yield make(queries=queries, keys=keys)
    for queries, keys in itertools.product(QUERIES, lengths):
        yield make(queries=queries, keys=keys, causal=True)
    for dtype, size in itertools.product(HALF, (32, 128, 256)):
        for queries, keys in itertools.product(QUERIES, lengths):
            yield make(queries=queries, keys=keys, dtype=dtype, size=size)
    for keys in range(1, 161, 2):
        yield make(queries=keys, keys=keys, causal=True)


def fp32() -> Iterator[Config]:
    """float32, which has no backward: head sizes, and a bias."""
    make = functools.partial(config, "fp32", dtype="float32", training=False)
    for size in range(8, 328, 8):
        yield make(queries=128, keys=128, size=size)
    for bias, size in itertools.product(("BHQK", "11QK", "B11K"), (8, 64, 72, 128)):
        for queries, keys in ((1, 1), (128, 128), (200, 192), (1, 64)):
            yield make(queries=queries, keys=keys, size=size, bias=bias)
    for size in range(8, 328, 8):
        yield make(queries=128, keys=128, size=size, bias="BHQK")
        yield make(queries=200, keys=193, size=size)
        yield make(queries=128, keys=128, size=size, causal=True)
    for queries, keys in itertools.product((1, 2, 64, 65, 128, 200), (1, 2, 63, 64, 65, 128, 129, 192, 704)):
        for size in (64, 128):
            yield make(queries=queries, keys=keys, size=size, bias="BHQK")
            yield make(queries=queries, keys=keys, size=size)
    for size in range(136, 328, 8):
        yield make(queries=1, keys=1, size=size)
        yield make(queries=128, keys=128, size=64, value_size=size)
        yield make(queries=128, keys=128, size=size, value_size=64)
    for bias in ("BHQK", "11QK", "B11K"):
        for queries, keys in ((1, 1), (128, 128), (200, 192)):
            yield make(queries=queries, keys=keys, bias=bias, bias_dtype="bool")


def bias() -> Iterator[Config]:
    """Every broadcast of a bias, declared with an expanded query dimension (`plain`, Sidestep's form) and as it is."""
    make = functools.partial(config, "bias", forms=["plain", "as_is", "padded"])
    shapes = ["".join(letters) for letters in itertools.product("B1", "H1", "Q1", "K1")]
    for shape in shapes:
        yield make(queries=128, keys=128, bias=shape)
    for shape, (queries, keys) in itertools.product(shapes, ((200, 192), (1, 128), (129, 65), (2, 2), (128, 1))):
        yield make(queries=queries, keys=keys, bias=shape)
    for shape in shapes:
        yield make(queries=128, keys=128, bias=shape, bias_grad=True)
    for shape, dtype in itertools.product(shapes, ("float32", "bool")):
        yield make(queries=128, keys=128, bias=shape, bias_dtype=dtype)
    for queries, keys in ((200, 192), (1, 128), (129, 65), (64, 64), (704, 704), (2, 2)):
        for shape in ("BHQK", "1HQK", "11QK", "B1QK"):
            yield make(queries=queries, keys=keys, bias=shape, bias_grad=True)
    for shape in shapes:
        yield make(queries=128, keys=128, bias=shape, dtype="float16")
        yield make(queries=128, keys=128, bias=shape, size=128)
        yield make(queries=128, keys=128, bias=shape, heads=4, kv_heads=2)
        yield make(queries=128, keys=128, bias=shape, dtype="float16", bias_grad=True)
        yield make(queries=200, keys=192, bias=shape, dtype="float16", bias_dtype="bool")
        yield make(queries=200, keys=192, bias=shape, bias_grad=True, size=128)
        yield make(queries=200, keys=192, bias=shape, bias_grad=True, heads=4, kv_heads=2)


def remedy() -> Iterator[Config]:
    """Whether a padding mask in the backward alone cures what one in both directions does; and one query (#1072)."""
    make = functools.partial(config, "remedy", forms=["plain", "backward", "padded"])
    for batch, heads in ((1, 2), (1, 1), (2, 2), (1, 16), (4, 16)):
        for keys, size in itertools.product((128, 64, 256, 512, 97, 192), (64, 128)):
            yield make(batch=batch, heads=heads, kv_heads=heads, queries=1, keys=keys, size=size)
    for dtype, size in itertools.product(HALF, (64, 128)):
        for queries, keys in itertools.product((200, 1, 2, 65, 704), (192, 64, 704, 1088)):
            yield make(queries=queries, keys=keys, dtype=dtype, size=size)
    for bias, dtype in itertools.product(("B11K", "11QK", "BHQK"), ("same", "bool", "float32")):
        for queries, keys in ((200, 192), (1, 64), (2, 64), (704, 704)):
            yield make(queries=queries, keys=keys, bias=bias, bias_dtype=dtype)
    for heads, kv_heads in ((4, 1), (4, 2), (1, 1)):
        yield make(heads=heads, kv_heads=kv_heads)
    for bias in ("BHQK", "11QK"):
        yield make(bias=bias, bias_grad=True)
    for size in range(8, 264, 8):
        yield make(size=size)
    for size, value_size in ((64, 128), (128, 64), (32, 64), (64, 32)):
        yield make(size=size, value_size=value_size)
    for keys in (2112, 4160, 8256):
        yield make(keys=keys)
        yield make(keys=keys, batch=1, queries=1)


def bounded() -> Iterator[Config]:
    """Bounded logits wherever they could be the remedy, among the other sets' problems."""
    for made in itertools.chain(remedy(), trap3(), bias()):
        needed = made["keys"] % 128 == 64 or (made["batch"], made["queries"], made["keys"] % 64) == (1, 1, 0)
        if needed and not made["causal"] and not made["bias_grad"]:
            yield made | {"set": "bounded", "forms": ["bounded"]}


def edges() -> Iterator[Config]:
    """Biases of a single query or key, and float32 with a bias."""
    shapes = ["".join(letters) for letters in itertools.product("B1", "H1", "Q1", "K1")]
    for shape, keys in itertools.product(shapes, (128, 64, 65, 200, 2)):
        yield config("edges", queries=1, keys=keys, bias=shape)
    for shape, size in itertools.product(("BHQK", "11QK", "B11K", "1111"), (72, 8, 64, 128)):
        for queries, keys in ((1, 1), (1, 2), (2, 1), (3, 3), (65, 63), (200, 193)):
            fields = {"dtype": "float32", "training": False, "queries": queries, "keys": keys, "bias": shape}
            yield config("edges", size=size, **fields)
            yield config("edges", size=size, batch=1, heads=1, kv_heads=1, **fields)
    for shape, dtype in itertools.product(shapes, ("float32", "bool")):
        yield config("edges", queries=1, keys=128, bias=shape, bias_dtype=dtype)
    for shape in shapes:
        yield config("edges", queries=1, keys=128, bias=shape, batch=1)
        yield config("edges", queries=1, keys=128, bias=shape, heads=1, kv_heads=1)
        yield config("edges", queries=1, keys=128, bias=shape, dtype="float16", size=128)
        yield config("edges", queries=129, keys=1, bias=shape)
        yield config("edges", queries=65, keys=63, bias=shape)
    for shape in ("BHQK", "1HQK", "B1QK", "11QK"):
        for queries, keys in ((129, 1), (1, 65), (3, 3), (65, 63)):
            yield config("edges", queries=queries, keys=keys, bias=shape, bias_grad=True)


def remedy_time() -> Iterator[Config]:
    """What the remedies cost in the backward alone, where one is needed."""
    make = functools.partial(config, "remedy_time", batch=4, heads=16, forms=["plain", "backward", "bounded"])
    for keys, size in itertools.product((704, 1088, 2112, 4160, 8256, 192), (128, 64, 96)):
        fields = {"queries": keys, "keys": keys, "size": size}
        yield make(kv_heads=16, **fields)
        if keys in (704, 2112, 8256):
            yield make(kv_heads=16, bias="B11K", **fields)
            yield make(kv_heads=4, **fields)
        if keys == 704:
            yield make(kv_heads=16, bias="BHQK", **fields)


def timing() -> Iterator[Config]:
    """Kernel time of both forms, and of flash, where the remedy is needed and where it is not."""
    for keys, size, causal in itertools.product(
        (704, 1088, 2112, 4160, 8256, 192, 1024, 4096), (128, 64), (False, True)
    ):
        yield config(
            "time", batch=4, heads=16, kv_heads=16, queries=keys, keys=keys, size=size, causal=causal
        )  # fmt: skip
    for keys in (704, 2112, 8256):
        yield config("time", batch=4, heads=16, kv_heads=4, queries=keys, keys=keys, size=128)
        yield config("time", batch=4, heads=16, kv_heads=16, queries=keys, keys=keys, size=128, bias="B11K")
    for keys in (64, 128, 1024, 8192):
        yield config("time", batch=4, heads=16, kv_heads=16, queries=1, keys=keys, size=128)


SETS: dict[str, Callable[[], Iterator[Config]]] = {
    "trap3": trap3,
    "fp32": fp32,
    "bias": bias,
    "remedy": remedy,
    "bounded": bounded,
    "edges": edges,
    "time": timing,
    "remedy_time": remedy_time,
}
TIMES = ("time", "remedy_time")


def grid(names: Sequence[str]) -> list[Config]:
    """The configurations of several sets, each once, the sets taking turns by share of their length."""
    placed: dict[str, tuple[float, Config]] = {}
    for name in names:
        configs = list({identity(made): made for made in SETS[name]()}.values())
        for place, made in enumerate(configs):
            placed.setdefault(identity(made), (place / len(configs), made))
    return [made for _, made in sorted(placed.values(), key=lambda pair: pair[0])]


def identity(made: Config) -> str:
    """What names a configuration in the output."""
    return json.dumps(made, sort_keys=True)


def label(made: Config) -> str:
    """A configuration in few characters."""
    size = made["size"] if made["size"] == made["value_size"] else f"{made['size']}/{made['value_size']}"
    heads = made["heads"] if made["heads"] == made["kv_heads"] else f"{made['heads']}/{made['kv_heads']}"
    parts = [made["dtype"].replace("float", "f"), f"h{heads}", f"{made['queries']}x{made['keys']}", f"d{size}"]
    if made["causal"]:
        parts.append("causal")
    if made["bias"]:
        parts.append(made["bias"] + {"same": "", "float32": "f32", "bool": "bool"}[made["bias_dtype"]])
    return " ".join([*parts, "dbias"] if made["bias_grad"] else parts)


# --- a child: configurations as JSON lines on stdin, results on stdout ---


Examine = Callable[[Config, Callable[[str], None]], dict[str, Any]]


def serve(prepare: Callable[[], Examine]) -> None:
    """Read configurations until there are no more, and examine each.

    Args:
        prepare: imports what is needed, and returns what examines a configuration, telling where it stands.
    """
    protocol = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to stderr

    def send(message: Mapping[str, Any]) -> None:
        protocol.write(json.dumps(message) + "\n")
        protocol.flush()

    examine = prepare()
    send({"at": "ready"})
    for line in sys.stdin:
        made = json.loads(line)
        started = time.perf_counter()
        result = examine(made, lambda at: send({"at": at}))
        send({"result": result, "seconds": round(time.perf_counter() - started, 3)})


def prepared(offline: bool) -> Examine:
    """What examines graphs on the GPU, or for the absent one."""
    profile = None
    if offline:
        from sidestep.backends import cudnn_offline

        profile = cudnn_offline.activate("h200")  # before torch is imported
    from sidestep.backends.base import Target

    return functools.partial(examine, Target(0, profile))


def problem_of(made: Config) -> Any:
    """The configuration as a problem of Sidestep's."""
    from sidestep.problem import AttentionProblem, Layout, Mask, default_scale

    batch, queries, keys = made["batch"], made["queries"], made["keys"]
    mask = None
    if made["bias"]:
        dtype = made["dtype"] if made["bias_dtype"] == "same" else made["bias_dtype"]
        layout = Layout.of(bias_shape(made))
        mask = Mask(layout.shape, layout.stride, dtype, made["bias_grad"])
    return AttentionProblem(
        device="cuda",
        dtype=made["dtype"],
        query=Layout.of((batch, made["heads"], queries, made["size"])),
        key=Layout.of((batch, made["kv_heads"], keys, made["size"])),
        value=Layout.of((batch, made["kv_heads"], keys, made["value_size"])),
        mask=mask,
        is_causal=made["causal"],
        scale=default_scale(made["size"]),
        training=made["training"],
    )


def bias_shape(made: Config) -> tuple[int, ...]:
    """The shape that a bias's letters stand for."""
    sizes = {"B": made["batch"], "H": made["heads"], "Q": made["queries"], "K": made["keys"], "1": 1}
    return tuple(sizes[letter] for letter in made["bias"])


def examine(target: Any, made: Config, at: Callable[[str], None]) -> dict[str, Any]:
    """Build every form, and run each on every set of data."""
    import cudnn
    import torch

    from sidestep import verification
    from sidestep.backends.base import Progress
    from sidestep.backends.cudnn_graph import CudnnBackend

    backend, problem = CudnnBackend(), problem_of(made)
    forms: dict[str, Any] = {}
    plans = {}
    for form in made["forms"]:
        at(f"{form} build")
        progress = Progress()
        try:
            with declared(form == "as_is"), poisoned(made["set"] not in TIMES and target.profile is None):
                plans[form] = backend.build_form(problem, target, progress, FORMS[form])
            forms[form] = {}
        except (RuntimeError, NotImplementedError, ValueError, TypeError, cudnn.cudnnGraphNotSupportedError) as error:
            # Kept whole where it is no refusal: it is about this script, or about the builder.
            text = str(error).strip().partition("Reason:")[2].strip() or str(error).strip()
            refusal = backend.verdict(error) == "unsupported"
            forms[form] = {"refused" if refusal else "error": f"{progress.direction} {progress.stage}: {text[:300]}"}
    if target.profile is not None:
        return {"forms": {name: form or {"built": True} for name, form in forms.items()}}
    if made["set"] in TIMES:
        return {"forms": forms, "microseconds": kernel_times(problem, plans)}
    for data in data_sets(made):
        inputs = tensors(made, data)
        for form, plan in plans.items():
            at(f"{form} on {data}")
            output, grads = run(plan, problem, inputs)
            torch.cuda.synchronize()
            at(f"{form} on {data}: reference")
            distances, largest_logit = verification.measure(problem, inputs, output, grads)
            allowed = verification.tolerance(problem, largest_logit)
            computed = dict(zip(RESULTS, (output, *grads), strict=False))
            errors = {
                name: float(f"{distances[long].error:.2g}") for name, long in RESULTS.items() if long in distances
            }
            found = {name: judge(computed[name], off, allowed) for name, off in errors.items()}
            forms[form][data] = {name: verdict for name, verdict in found.items() if verdict}
            if any(written_outside(whole) for whole in _results):
                forms[form][data]["outside"] = {"error": "memory beside a result was written"}
            _results.clear()
            forms[form].setdefault("largest", {})
            for name, off in errors.items():
                if name not in forms[form][data]:
                    forms[form]["largest"][name] = max(forms[form]["largest"].get(name, 0.0), off)
    return {"forms": forms}


@functools.lru_cache(maxsize=1)
def originals() -> tuple[Any, Any]:
    """The two functions of the backend that are replaced while a graph is built."""
    from sidestep.backends import cudnn_graph

    return cudnn_graph.bias_layout, cudnn_graph._allocation


class declared:  # noqa: N801 - a context manager
    """While entered, and where `as_is`, a bias is declared without expanding its query dimension (trap 4)."""

    def __init__(self, as_is: bool) -> None:
        self.as_is = as_is

    def __enter__(self) -> None:
        from sidestep.backends import cudnn_graph

        layout, _ = originals()

        def unexpanded(problem: Any) -> Any:
            declared_layout = layout(problem)
            if declared_layout is None:
                return None
            _, stride, dtype = declared_layout
            shape = problem.mask.shape
            if shape[2] == 1:
                stride = (*stride[:2], stride[3] * shape[3], stride[3])
            return shape, stride, dtype

        cudnn_graph.bias_layout = unexpanded if self.as_is else layout

    def __exit__(self, *exception: object) -> None:
        from sidestep.backends import cudnn_graph

        cudnn_graph.bias_layout = originals()[0]


_AROUND = 4096  # elements of NaN before and after each tensor
_results: list[Any] = []  # the whole buffers of the results since it was emptied


def surrounded(shape: Sequence[int], stride: Sequence[int], dtype: Any) -> tuple[Any, Any]:
    """A tensor of NaN in the middle of more NaN, so that a kernel that reads beside it shows; and the whole buffer."""
    import torch

    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    whole = torch.full((extent + 2 * _AROUND,), torch.nan, dtype=dtype, device=DEVICE)
    return whole.as_strided(tuple(shape), tuple(stride), _AROUND), whole


def written_outside(whole: Any) -> bool:
    """Whether what surrounds a tensor is not NaN any more."""
    return not bool(whole[:_AROUND].isnan().all() and whole[-_AROUND:].isnan().all())


class poisoned:  # noqa: N801 - a context manager
    """Plans made while entered get every result buffer filled with, and surrounded by, NaN before a kernel writes."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __enter__(self) -> None:
        from sidestep.backends import cudnn_graph

        _, plain = originals()

        def allocation(*arguments: Any) -> Any:
            def allocate() -> Any:
                result, whole = surrounded(*arguments[1:])
                _results.append(whole)
                return result

            return allocate

        cudnn_graph._allocation = allocation if self.on else plain  # type: ignore[assignment]

    def __exit__(self, *exception: object) -> None:
        from sidestep.backends import cudnn_graph

        cudnn_graph._allocation = originals()[1]


# --- data, reference, comparison ---


def data_sets(made: Config) -> list[str]:
    """plain; logits near -120 or +120, or all -128; rows that see one key; with a float bias, -120 through the bias.

    With a bias, `bounded` also has rows that see no key.
    """
    names = ["plain", "neg120", "pos120", "onehot"]
    if made["set"] in ("remedy", "edges", "bounded"):
        names.append("neg128")
    if made["set"] == "bounded" and made["bias"]:
        names.append("empty")
    return [*names, "bias-120"] if made["bias"] and made["bias_dtype"] != "bool" else names


def tensors(made: Config, data: str) -> Any:
    """Query, key, value, mask and the gradient of the output, on the GPU."""
    import torch

    from sidestep.verification import Inputs

    random = torch.Generator(device=DEVICE).manual_seed(0)
    dtype = getattr(torch, made["dtype"])

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=random, device=DEVICE)

    size, batch = made["size"], made["batch"]
    query = normal(batch, made["heads"], made["queries"], size)
    key = normal(batch, made["kv_heads"], made["keys"], size)
    value = normal(batch, made["kv_heads"], made["keys"], made["value_size"])
    grad = normal(batch, made["heads"], made["queries"], made["value_size"])
    amplitude = (120 / size**0.5) ** 0.5  # amplitude**2 * size / sqrt(size) = 120
    if data in ("neg120", "pos120"):
        query = amplitude + 0.05 * query
        key = (amplitude if data == "pos120" else -amplitude) + 0.05 * key
    elif data == "neg128":
        query = torch.full_like(query, (128 / size**0.5) ** 0.5)
        key = torch.full_like(key, -((128 / size**0.5) ** 0.5))
    elif data == "onehot":
        peak = (120 * size**0.5) ** 0.5  # peak**2 / sqrt(size) = 120
        rows, columns = torch.arange(made["queries"], device=DEVICE), torch.arange(made["keys"], device=DEVICE)
        query = query * 0.01 + peak * torch.nn.functional.one_hot(rows % size, size)
        key = key * 0.01 + peak * torch.nn.functional.one_hot(columns % size, size)
    mask = None
    if made["bias"]:
        mask = normal(*bias_shape(made))
        if made["bias_dtype"] == "bool":
            mask = mask > -0.5
            mask[..., 0] = True  # no row without a key
        else:
            mask = mask - 120 if data == "bias-120" else mask
            mask = mask.to(dtype if made["bias_dtype"] == "same" else torch.float32)
        if data == "empty":
            mask[0, :, ::3] = False if made["bias_dtype"] == "bool" else -torch.inf
    given = {"query": query.to(dtype), "key": key.to(dtype), "value": value.to(dtype), "grad": grad.to(dtype)}
    if mask is not None:
        given["mask"] = mask
    for name, tensor in given.items():
        if tensor.dtype is not torch.bool:
            given[name] = surrounded(tensor.shape, tensor.stride(), tensor.dtype)[0].copy_(tensor)
    return Inputs(given["query"], given["key"], given["value"], given.get("mask"), given["grad"])


# The name of a result in the output -> in verification.py.
RESULTS = {
    "out": "output",
    "dq": "gradient of query",
    "dk": "gradient of key",
    "dv": "gradient of value",
    "dbias": "gradient of attn_mask",
}


def run(plan: Any, problem: Any, inputs: Any) -> tuple[Any, Sequence[Any]]:
    """Output and gradients by a plan."""
    if not problem.training:
        return plan.infer(*inputs[:4]), ()
    output, *residuals = plan.forward(*inputs[:4])
    return output, plan.backward(inputs.grad_output, *inputs[:4], output, *residuals)


def judge(actual: Any, error: float, allowed: float) -> dict[str, Any] | None:
    """What is wrong with a result, or None; of what is not finite, the first and the last column."""
    bad = (~actual.isfinite()).sum().item()
    if bad:
        columns = sorted(set((~actual.isfinite()).nonzero()[:, -1].tolist()))
        return {"nan": f"{bad}/{actual.numel()}", "columns": [columns[0], columns[-1]]}
    return {"error": error} if error > allowed else None


# --- kernel times ---


def kernel_times(problem: Any, plans: Mapping[str, Any]) -> dict[str, float]:
    """Median microseconds of one run on the GPU; each contestant is a CUDA graph of several runs, taking turns."""
    import torch

    def normal(shape: Sequence[int]) -> Any:
        return torch.randn(*shape, device=DEVICE, dtype=getattr(torch, problem.dtype))

    query, key, value = (normal(layout.shape) for layout in (problem.query, problem.key, problem.value))
    grad = normal(problem.output_shape)
    mask = None if problem.mask is None else normal(problem.mask.shape)
    contestants: dict[str, Callable[[], Any]] = {}
    for name, plan in plans.items():
        contestants[f"{name} forward"] = functools.partial(plan.forward, query, key, value, mask)
        output, *residuals = plan.forward(query, key, value, mask)
        backward = functools.partial(plan.backward, grad, query, key, value, mask, output, *residuals)
        contestants[f"{name} backward"] = backward
    if mask is None:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        aten = torch.ops.aten
        causal, scale = problem.is_causal, problem.scale
        forward = functools.partial(
            aten._scaled_dot_product_flash_attention, query, key, value, 0.0, causal, False, scale=scale
        )
        output, logsumexp, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward()
        contestants["flash forward"] = forward
        contestants["flash backward"] = functools.partial(
            aten._scaled_dot_product_flash_attention_backward,
            *(grad, query, key, value, output, logsumexp, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset),
            scale=scale,
        )
    graphs: dict[str, tuple[Any, int]] = {}
    for name, contestant in contestants.items():
        runs = 20 if problem.key.shape[2] <= 2112 else 5
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(3):
                contestant()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(runs):
                contestant()
        graphs[name] = (graph, runs)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(14):
        for name, (graph, runs) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(start.elapsed_time(end) * 1e3 / runs)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


# --- the parent ---


class Child:
    """One child process and what it was last heard doing."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], errors: Path) -> None:
        with errors.open("a") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environ},
                text=True,
            )

    def ask(self, made: Config, seconds: float) -> dict[str, Any]:
        """The reply; where the child dies or takes too long, where it was."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        at = "start"
        limit = threading.Timer(seconds, self.process.kill)
        limit.start()
        try:
            self.process.stdin.write(json.dumps(made) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                message: dict[str, Any] = json.loads(line)
                if "at" not in message:
                    return message
                at = message["at"]
        except BrokenPipeError:
            pass
        finally:
            limit.cancel()
        return {"died": f"status {self.process.wait()} at: {at}"}

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


class Lane(NamedTuple):
    """Configurations, and how to start the children that examine them.

    Attributes:
        configs: in the order in which to take them.
        command: what follows `python`.
        environ: variables beside this process's own.
    """

    configs: Sequence[Config]
    command: Sequence[str]
    environ: Mapping[str, str] = {}


def sweep(lanes: Sequence[Lane], output: Path, children: int, seconds: float) -> int:
    """Run what the output does not hold yet, for at most `seconds`; the number of configurations run.

    Args:
        lanes: are worked on at the same time.
        output: JSON lines; what a child writes to stderr goes into a file beside it.
        children: of each lane.
        seconds: after which no configuration is begun.
    """
    held = {identity(entry["config"]) for entry in read(output)}
    queues: list[queue.SimpleQueue[Config]] = [queue.SimpleQueue() for _ in lanes]
    for todo, lane in zip(queues, lanes, strict=True):
        for made in lane.configs:
            if identity(made) not in held:
                todo.put(made)
    count, left = sum(len(lane.configs) for lane in lanes), sum(todo.qsize() for todo in queues)
    print(f"{count} configurations, {count - left} done before", file=sys.stderr)
    deadline = time.monotonic() + seconds
    lock, done = threading.Lock(), 0
    output.parent.mkdir(parents=True, exist_ok=True)

    def work(lane: Lane, todo: queue.SimpleQueue[Config], file: Any) -> None:
        nonlocal done
        child: Child | None = None
        while time.monotonic() < deadline:
            try:
                made = todo.get_nowait()
            except queue.Empty:
                break
            child = child or Child(lane.command, lane.environ, output.with_suffix(".stderr"))
            reply = child.ask(made, min(90.0, max(1.0, deadline + 20 - time.monotonic())))
            if "died" in reply:
                child.close()
                child = None
                if time.monotonic() > deadline:
                    break  # cut, which says nothing of the configuration
                if reply["died"].endswith("at: start"):
                    print(f"a child does not start; see {output.with_suffix('.stderr')}", file=sys.stderr)
                    break
            with lock:
                done += 1
                file.write(json.dumps({"config": made, **reply}) + "\n")
                file.flush()
        if child is not None:
            child.close()

    with output.open("a") as file:
        threads = [
            threading.Thread(target=work, args=(lane, todo, file))
            for lane, todo in zip(lanes, queues, strict=True)
            for _ in range(children)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return done


def read(output: Path) -> list[dict[str, Any]]:
    """The results so far; a last line that was cut is left out."""
    entries = []
    for line in output.read_text().splitlines() if output.exists() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            print(f"{output}: a line that was cut is left out", file=sys.stderr)
    return entries


def summary(entries: Sequence[Mapping[str, Any]], most: int) -> None:
    """Print what went wrong, by set, form, tensor, kind and data, and how the times compare."""
    print(f"{len(entries)} configurations: {dict(collections.Counter(entry['config']['set'] for entry in entries))}")
    groups: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    forms: collections.Counter[tuple[str, str, str]] = collections.Counter()
    largest: dict[tuple[str, str, str], float] = collections.defaultdict(float)
    for entry in entries:
        made = entry["config"]
        if "died" in entry:
            groups[made["set"], "DIED", entry["died"]].append(label(made))
            continue
        for form, result in entry["result"]["forms"].items():
            state = next((name for name in ("refused", "error", "built") if name in result), "ran")
            forms[made["set"], form, state] += 1
            if state in ("refused", "error"):
                groups[made["set"], form, state, result[state].splitlines()[0][:120]].append(label(made))
                continue
            for name, value in result.get("largest", {}).items():
                key = (made["set"], made["dtype"], name)
                largest[key] = max(largest[key], value)
            wrong: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
            for data, found in result.items():
                for name, verdict in found.items() if data not in ("largest", "built") else ():
                    wrong[name, "nan" if "nan" in verdict else "wrong"].append(data)
            for (name, kind), data_names in wrong.items():
                groups[made["set"], form, name, kind, "+".join(data_names)].append(label(made))
    print("forms:", ", ".join(f"{' '.join(key)} {count}" for key, count in sorted(forms.items())))
    print("largest error that passed:", ", ".join(f"{' '.join(key)} {value}" for key, value in sorted(largest.items())))
    for group, labels in sorted(groups.items()):
        print(f"\n{' | '.join(group)}: {len(labels)}")
        for line in sorted(labels)[:most]:
            print(f"    {line}")
        if len(labels) > most:
            print(f"    and {len(labels) - most} more")
    for entry in entries:
        times = entry.get("result", {}).get("microseconds")
        if times:
            ratios = {
                f"{name} {way}": round(times[f"{name} {way}"] / times[f"plain {way}"], 3)
                for name, way in itertools.product(("padded", "backward", "bounded", "flash"), ("forward", "backward"))
                if f"{name} {way}" in times and f"plain {way}" in times
            }
            print(f"time {label(entry['config'])}: {times}, over plain: {ratios}")


def main() -> int:
    """Sweep, then print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sets", default="trap3,fp32,bias", help=f"of {', '.join(SETS)}, separated by commas")
    parser.add_argument("--seconds", type=float, default=240.0, help="no configuration is begun after this time")
    parser.add_argument("--children", type=int, default=8)
    parser.add_argument("--most", type=int, default=30, help="configurations named for each finding")
    parser.add_argument("--limit", type=int, help="only the first so many configurations")
    parser.add_argument("--summary", action="store_true", help="only print the summary of the output")
    parser.add_argument("--offline", action="store_true", help="build for the absent H200, and run nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        serve(functools.partial(prepared, arguments.offline))
        return 0
    if arguments.output is None:
        parser.error("--output is missing")
    names = arguments.sets.split(",")
    if unknown := sorted(set(names) - set(SETS)):
        parser.error(f"unknown set {', '.join(unknown)}; known: {', '.join(SETS)}")
    children = arguments.children
    if set(TIMES) & set(names):
        if len(names) > 1:
            parser.error("times are taken alone: what runs beside them would be measured too")
        children = 1
    if not arguments.summary:
        configs = grid(names)[: arguments.limit]
        started = time.monotonic()
        command = [str(Path(__file__).resolve()), "--child", *(["--offline"] if arguments.offline else [])]
        count = sweep([Lane(configs, command)], arguments.output, children, arguments.seconds)
        print(f"{count} configurations in {time.monotonic() - started:.0f} s", file=sys.stderr)
    summary(read(arguments.output), arguments.most)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

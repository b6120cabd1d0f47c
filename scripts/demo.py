"""Sidestep's main job in one command: attention, refusals, a warm-up, and other processes that build nothing anew.

    python scripts/demo.py

Without a GPU, attention runs on CPU tensors and the warm-up builds real cuDNN graphs for an H200 that is not here.
With one, both run on it. Ends with 1 where a number is wrong, or another process builds or tries what the first did.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import sidestep
from sidestep import cli, failures, spec, warmup
from sidestep.decisions import Chosen, Failed

HERE = Path(__file__).resolve().parent
SPEC = HERE / "demo.yaml"
PLACE = HERE.parent / ".demo"
CACHE = PLACE / "cache"
# Largest difference over the largest magnitude of the float64 reference; gradients, which sum more terms, 3 times it.
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


class Case(NamedTuple):
    """One call: (B, H, S_q, D) queries, (B, H_kv, S_kv, D) keys and values, B = 2."""

    name: str
    dtype: str
    heads: int = 8
    kv_heads: int = 8
    queries: int = 128
    keys: int = 128
    head_size: int = 64
    is_causal: bool = False
    mask: str | None = None
    training: bool = False


CASES = [
    Case("plain", "float32"),
    Case("causal", "bfloat16", is_causal=True),
    Case("bool mask", "float16", queries=64, keys=96, mask="bool"),
    Case("grouped heads", "bfloat16", kv_heads=2, is_causal=True),
    Case("training", "bfloat16", is_causal=True, training=True),
    Case("training, grouped heads", "float32", kv_heads=2, training=True),
    Case("training, head size 264", "float16", heads=4, kv_heads=4, head_size=264, training=True),
    Case("training, mask with a gradient", "float32", queries=64, keys=96, mask="float32", training=True),
]


def say(text: str) -> None:
    print(text, flush=True)


def reference(query: Any, key: Any, value: Any, mask: Any, is_causal: bool) -> Any:
    """Attention in float64, written out: (B, H, S_q, D_v)."""
    import torch

    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else logits + mask
    return torch.softmax(logits, -1) @ value


def error(actual: Any, expected: Any) -> float:
    """The largest difference over the expected magnitude; infinite where something is not finite."""
    worst = (actual.double() - expected).abs().max().item()
    return worst / expected.abs().max().item() if math.isfinite(worst) else math.inf


def call(case: Case, device: str) -> bool:
    """One call, forward and, where it trains, backward; prints who answered, why, and the errors."""
    import torch

    def normal(*shape: int, dtype: str = case.dtype) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=getattr(torch, dtype))

    query = normal(2, case.heads, case.queries, case.head_size)
    key, value = (normal(2, case.kv_heads, case.keys, case.head_size) for _ in range(2))
    inputs, mask = [query, key, value], None
    if case.mask:
        added = normal(1, case.heads, case.queries, case.keys, dtype="float32")
        mask = added > -1 if case.mask == "bool" else added
        inputs.append(mask)
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    for tensor in (*inputs, *wide):
        tensor.requires_grad_(case.training and tensor.is_floating_point())
    with sidestep.observe() as seen:
        output = sidestep.scaled_dot_product_attention(
            query, key, value, mask, is_causal=case.is_causal, enable_gqa=case.heads != case.kv_heads
        )
    expected = reference(wide[0], wide[1], wide[2], wide[3] if case.mask else None, case.is_causal)
    errors = {"output": error(output, expected)}
    if case.training:
        grad_output = torch.randn_like(output)
        grads = torch.autograd.grad(output, [t for t in inputs if t.requires_grad], grad_output)
        wanted = torch.autograd.grad(expected, [t for t in wide if t.requires_grad], grad_output.double())
        errors["gradients"] = max(map(error, grads, wanted))
    right = errors["output"] <= TOLERANCE[case.dtype] and errors.get("gradients", 0) <= 3 * TOLERANCE[case.dtype]
    ((_, decisions),) = seen
    for decision in decisions:
        say(f"    {decision.backend}: {decision}")
    numbers = ", ".join(f"{name} {value:.1e}" for name, value in errors.items())
    say(f"    error against float64: {numbers}  {'right' if right else 'WRONG'}")
    return right and isinstance(decisions[-1], Chosen)


def command(cache: Path, *arguments: str) -> str:
    """What `sidestep ARGUMENTS` says, in a process of its own with that cache."""
    env = {**os.environ, "SIDESTEP_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-m", "sidestep", *arguments], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"sidestep {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def warm_up_again(cache: Path, device: str | None, order: list[str]) -> tuple[int, int, int]:
    """The same warm-up in another process: what it built, loaded and passed over."""
    arguments = ["warmup", str(SPEC), "--json", "--backends", ",".join(order)]
    answer = json.loads(command(cache, *arguments, *([] if device is None else ["--device", device])))
    for item in answer["items"]:
        say(f"  {item['outcome']:<9}  builds {item['counters']['builds']}  {item['text']}")
    stats = answer["stats"]
    return stats["builds"], stats["loads"], stats["skipped_known_bad"]


def main() -> int:
    shutil.rmtree(PLACE, ignore_errors=True)
    CACHE.mkdir(parents=True, mode=0o700)
    sidestep.configure(cache_dir=CACHE)
    import torch

    gpu = torch.cuda.is_available()
    device, profile = ("cuda", None) if gpu else ("cpu", "h200")
    torch.manual_seed(0)
    say(f"1. Attention on {torch.cuda.get_device_name() if gpu else 'the CPU (there is no GPU here)'}\n")
    right = True
    for case in CASES:
        say(f"  {case.name} ({case.dtype})")
        right &= call(case, device)
    say(f"\n  {', '.join(f'{name} {value}' for name, value in sidestep.stats().items())}")

    where = "this GPU" if gpu else "an H200 that is not here: real cuDNN builds, in a child process"
    say(f"\n2. Warm-up of {os.path.relpath(SPEC)} for {where}\n")
    outcomes = []
    order = ["cudnn"]  # alone, so that what it refuses and what it builds is seen for itself
    for outcome in warmup.warm_up(spec.load(SPEC), profile, order):
        outcomes.append(outcome)
        say(textwrap.indent(warmup.outcome_text(outcome), "  "))
    say(f"\n  {warmup.summary(outcomes)}")
    refused = {outcome.item.problem.digest() for outcome in outcomes if outcome.served_by is None}
    ok = right and bool(refused) and len(refused) < len(outcomes) and not any(outcome.is_bug for outcome in outcomes)

    known = sum(any(isinstance(d, Failed) for d in outcome.decisions) for outcome in outcomes)
    expected = (0, len(outcomes) - len(refused), known)
    say("\n3. A second process, the same warm-up\n")
    second = warm_up_again(CACHE, profile, order)
    say(f"\n  builds {second[0]}, loads {second[1]}, skipped_known_bad {second[2]}, the rest by rule")

    say("\n4. One record\n")
    record = next(failures.records())
    say(textwrap.indent(cli.record_text(record), "  "))
    say(f"\n  all of them:  SIDESTEP_CACHE_DIR={os.path.relpath(CACHE)} sidestep failures list")

    say("\n5. Another machine: export, import into an empty cache, the same warm-up\n")
    bundle, other = str(PLACE / "warm.bundle"), PLACE / "imported"
    command(CACHE, "cache", "export", bundle)
    say(f"  {os.path.relpath(bundle)}: {Path(bundle).stat().st_size / 1e3:.0f} kB")
    command(other, "cache", "import", bundle)
    third = warm_up_again(other, profile, order)
    say(f"\n  builds {third[0]}, loads {third[1]}, skipped_known_bad {third[2]}, the rest by rule")
    ok = ok and second == third == expected
    say(f"\n{'Done: numbers right, nothing built twice.' if ok else 'FAILED: see above.'}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

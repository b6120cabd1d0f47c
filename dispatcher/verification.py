"""Whether a plan's numbers are right: its output and gradients beside float64 attention, on data that show mistakes.

Random numbers hide what a kernel does wrong: gradients that are NaN where all logits are strongly negative, a mask's
row that is empty. So a plan is run on several sets of data, in the problem's own layouts, before it is trusted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from . import plans
from .events import logger, once

if TYPE_CHECKING:
    from .backends.base import Target
    from .problem import AttentionProblem, Layout

# Raised when the data or the tolerances change, so that what an older version found right is looked at again.
VERSION = 3

_BLOCK = 2**22  # logits that are compared at a time: in float64, with all that is computed of them, some 400 MB
_EMPTY_ROWS, _LEFT_PADDING, _RIGHT_PADDING, _MASK = "empty rows", "left padding", "right padding", "mask near -120"
# Of the output's gradient: no memory of its own, as that of a sum has it, and a last stride that is not 1.
_EXPANDED, _TRANSPOSED = "expanded gradient", "transposed gradient"
_NAMES = ("gradient of query", "gradient of key", "gradient of value", "gradient of attn_mask")

# Runs a plan apart on query, key, value and mask, and a gradient of the output; gives the output and the gradients.
Run = Callable[[Sequence["torch.Tensor | None"], torch.Tensor], tuple[torch.Tensor, Sequence["torch.Tensor | None"]]]


class Mismatch(NamedTuple):
    """A result that is not what it should be.

    Attributes:
        data: the set of data.
        result: `output`, or `gradient of ...`.
        error: as `Distance` says; infinite where something is not finite.
        allowed: the tolerance.
        at: the index of the largest difference.
        actual: the number there.
        expected: what it should be.
    """

    data: str
    result: str
    error: float
    allowed: float
    at: tuple[int, ...]
    actual: float
    expected: float

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{self.result} is wrong on '{self.data}': error {self.error:.2g}, allowed {self.allowed:.2g}, "
            f"largest at {self.at}: {self.actual:.6g} in place of {self.expected:.6g}"
        )


class WrongNumbersError(Exception):
    """A plan's numbers are not the reference's; the text says by how much and where, the worst first.

    Attributes:
        mismatches: every result that is wrong, the worst first.
        direction: `backward` where all outputs are right.
    """

    def __init__(self, mismatches: Sequence[Mismatch]) -> None:
        """Keep what was found."""
        self.mismatches = sorted(mismatches, key=lambda one: -one.error / one.allowed)
        forward = any(one.result == "output" for one in mismatches)
        self.direction: Literal["forward", "backward"] = "forward" if forward else "backward"
        super().__init__("\n".join(map(str, self.mismatches)))


def ensure(problem: AttentionProblem, target: Target, key: str | None, manifest: Mapping[str, Any], run: Run) -> None:
    """Verify a plan, unless it was by an earlier process.

    Not verified is a plan with dropout, whose numbers are drawn, and one for which memory does not suffice: it serves.

    Args:
        problem: what the plan serves.
        target: the device.
        key: of the mark that it was verified; None where none can be kept.
        manifest: the environment.
        run: runs the plan.

    Raises:
        WrongNumbersError: its numbers are wrong.
        Exception: whatever the plan raises.
    """
    if problem.dropout_p > 0:
        if once(f"verify dropout {problem.digest()}"):
            logger.info("not verified, for with dropout its numbers are drawn: %s", problem)
        return
    mark = {"version": VERSION, "problem": problem.to_json(), "environment": dict(manifest)}
    if key is not None and plans.is_marked(key, mark):
        return
    try:
        verify(problem, target, run)
    except (torch.OutOfMemoryError, MemoryError) as error:
        if once(f"verify memory {problem.digest()}"):
            logger.warning("not verified, for want of memory; the next process tries again: %s: %s", problem, error)
        return
    if key is not None:
        plans.mark(key, mark)


def verify(problem: AttentionProblem, target: Target, run: Run) -> None:
    """Run a plan on every set of data, and compare its output and gradients with the reference.

    Memory that results may get is filled with NaN beforehand, so that what a kernel does not write shows.

    Raises:
        WrongNumbersError: its numbers are wrong.
        Exception: whatever the plan raises.
    """
    device = torch.device("cpu") if target.index < 0 else torch.device("cuda", target.index)
    mismatches: list[Mismatch] = []
    for data in data_sets(problem):
        given = inputs(problem, device, data)
        poison(problem, device)
        output, grads = run(given[:4], given.grad_output)
        with torch.no_grad(), _any_algorithm():
            mismatches += compare(problem, given, output, grads, data)
    if mismatches:
        raise WrongNumbersError(mismatches)


# --- data ---


class Inputs(NamedTuple):
    """The tensors of a call, in a problem's layouts, and a gradient of its output."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    grad_output: torch.Tensor


def data_sets(problem: AttentionProblem) -> tuple[str, ...]:
    """The names of the sets of data that fit a problem."""
    names = ["plain", "logits near -120", "logits near 120", "logits -128", "one-hot", "repeated rows"]
    names += [_EXPANDED, _TRANSPOSED] if problem.training else []
    mask = problem.mask
    if mask is not None:
        names.append(_EMPTY_ROWS)
        names += [_LEFT_PADDING, _RIGHT_PADDING] if mask.shape[3] > 1 and mask.stride[3] else []
        names += [_MASK] if mask.dtype != "bool" else []
    return tuple(names)


def inputs(problem: AttentionProblem, device: torch.device, data: str) -> Inputs:
    """One set of data, the same at every call; torch's random state is untouched. What lies between is NaN."""
    random = torch.Generator(device).manual_seed(0)
    wide = torch.float64 if problem.dtype == "float64" else torch.float32

    def normal(layout: Layout) -> torch.Tensor:
        # An expanded dimension has one number.
        shape = [size if step else min(size, 1) for size, step in zip(layout.shape, layout.stride, strict=True)]
        return torch.randn(shape, generator=random, device=device, dtype=wide)

    query, key, value = normal(problem.query), normal(problem.key), normal(problem.value)
    size, factor = problem.query.shape[3], abs(problem.scale)
    sign = math.copysign(1.0, problem.scale)

    def amplitude(logit: float, terms: int) -> float:
        """Of query and key, `terms` of whose products are to add up to `logit`."""
        return min(math.sqrt(logit / (max(terms, 1) * factor)), 128.0) if factor else 128.0

    if data in ("logits near -120", "logits near 120"):
        level = amplitude(120, size)
        query = level + 0.05 * query
        key = sign * (level if data == "logits near 120" else -level) + 0.05 * key
    elif data == "logits -128":
        level = amplitude(128, size)
        query, key = torch.full_like(query, level), torch.full_like(key, -sign * level)
    elif data == "one-hot":
        peak = amplitude(120, 1)
        query = 0.01 * query + peak * _one_hot(query)
        key = 0.01 * key + sign * peak * _one_hot(key)
    elif data == "repeated rows":
        query, key, value = (part[..., :1, :].expand_as(part) for part in (query, key, value))
    mask = None
    if problem.mask is not None:
        mask = _place(_mask(normal(problem.mask), problem, data), problem.mask, problem.mask.dtype)
    grad = torch.randn(problem.output_shape, generator=random, device=device, dtype=wide)
    grad = grad.to(getattr(torch, problem.dtype))
    if data == _EXPANDED:
        grad = grad[:1, :1, :1, :1].expand_as(grad)
    elif data == _TRANSPOSED:
        grad = grad.mT.contiguous().mT
    return Inputs(
        _place(query, problem.query, problem.dtype),
        _place(key, problem.key, problem.dtype),
        _place(value, problem.value, problem.dtype),
        mask,
        grad,
    )


def _one_hot(like: torch.Tensor) -> torch.Tensor:
    """(S, D): row i has its 1 at i % D."""
    rows, columns = (torch.arange(size, device=like.device) for size in like.shape[-2:])
    return (rows[:, None] % max(like.shape[-1], 1) == columns).to(like.dtype)


def _mask(drawn: torch.Tensor, problem: AttentionProblem, data: str) -> torch.Tensor:
    """An attn_mask made of normal numbers; a bool one leaves no row without a key unless `data` says so."""
    assert problem.mask is not None
    boolean = problem.mask.dtype == "bool"
    mask = drawn > -0.5 if boolean else drawn
    excluded: Any = False if boolean else -torch.inf
    if boolean:
        mask[..., :1] = True
    if data == _EMPTY_ROWS:
        mask.flatten(0, 2)[::3] = excluded
    elif data in (_LEFT_PADDING, _RIGHT_PADDING):
        batch, _, queries, keys = mask.shape
        column = torch.arange(keys, device=mask.device)
        padding = torch.tensor([(b + 1) * keys // (2 * batch) for b in range(batch)], device=mask.device)
        padding = padding.view(-1, 1, 1, 1)
        keep = column >= padding if data == _LEFT_PADDING else column < keys - padding
        if queries > 1 and data == _LEFT_PADDING:
            # With a causal part, as language models have it: the first rows have no key.
            row = torch.arange(queries, device=mask.device)[:, None]
            keep = keep & (column <= row + max(keys - queries, 0))
        mask = keep.expand_as(mask) if boolean else torch.zeros_like(mask).masked_fill(~keep, -torch.inf)
    elif data == _MASK:
        mask = mask - 120
    return mask


def _place(numbers: torch.Tensor, layout: Layout, dtype: str) -> torch.Tensor:
    """`numbers`, of size 1 in expanded dimensions, in a layout; between and around them NaN, where the dtype has it.

    Around them for a tile's rows: a kernel that reads beyond the last key must not let it count.
    """
    kind = getattr(torch, dtype)
    filling = torch.nan if kind.is_floating_point else 0
    around = max(1024, min(128 * layout.stride[2], 2**20)) // 128 * 128  # in elements; the alignment stays
    whole = torch.full((layout.extent + 2 * around,), filling, dtype=kind, device=numbers.device)
    whole.as_strided(numbers.shape, layout.stride, around).copy_(numbers)
    return whole.as_strided(layout.shape, layout.stride, around)


def poison(problem: AttentionProblem, device: torch.device) -> None:
    """Fill with NaN, and free, memory of the sizes of the results: an allocator gives out first what it got last."""
    dtype = getattr(torch, problem.dtype)
    rows = math.prod(problem.query.shape[:3])
    shapes = [(shape, dtype) for shape in (problem.output_shape, (rows, problem.value.shape[3]))]
    shapes += [((rows,), torch.float32)] * 2  # logsumexp, and what a backward makes of it
    if problem.training:
        shapes += [(layout.shape, dtype) for layout in problem.inputs().values()]
        if problem.mask is not None and problem.mask.requires_grad:
            shapes.append((problem.mask.shape, getattr(torch, problem.mask.dtype)))
    taken = [torch.full(shape, torch.nan, dtype=kind, device=device) for shape, kind in shapes]
    del taken


# --- reference and comparison ---


def tolerance(problem: AttentionProblem, largest_logit: float) -> float:
    """What a distance's error may be.

    Results, and in half types the weights and the logits' gradients, are rounded to the dtype: that is seen to cost 1.5
    units of its rounding (bfloat16 6e-3, float16 8e-4, on all the data here; H200 and CPU), and 8 are allowed. Products
    and sums are rounded to float32, or float64: by `size` steps in a logit, an error which the exponential makes one
    relative to the weight, and by as many as are added up elsewhere; rounding errors add up like their square root.
    """
    batch, heads, queries, size = problem.query.shape
    keys = problem.key.shape[2]
    terms = max(keys, queries * heads // max(problem.key.shape[1], 1))
    if problem.mask is not None and problem.mask.requires_grad:
        terms = max(terms, batch * heads * queries * keys // math.prod(problem.mask.shape))
    steps = max(largest_logit, 1.0) * math.sqrt(max(size, problem.value.shape[3])) + math.sqrt(terms)
    return 8 * (torch.finfo(getattr(torch, problem.dtype)).eps / 2 + _rounding_of_products(problem) * steps)


def _rounding_of_products(problem: AttentionProblem) -> float:
    """Half the distance between neighbours, relative, of the numbers in which matrices are multiplied."""
    if problem.dtype == "float64":
        return 2.0**-52  # the reference's own included
    if problem.dtype == "float32":
        # The caller may have allowed TF32, or bfloat16, for these.
        return {"high": 2.0**-11, "medium": 2.0**-8}.get(torch.get_float32_matmul_precision(), 2.0**-24)
    reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    return torch.finfo(getattr(torch, problem.dtype)).eps / 2 if reduced else 2.0**-24


class Distance:
    """How far one result is from the reference, gathered block by block.

    Attributes:
        worst: the index of the largest difference, the number there, and what it should be.
    """

    def __init__(self, actual: torch.Tensor) -> None:
        """Of nothing compared yet."""
        self._actual = actual
        self._difference = self._expected = self._size = 0.0
        self.worst: tuple[tuple[int, ...], float, float] = ((), 0.0, 0.0)

    @property
    def error(self) -> float:
        """The largest difference over the largest expected magnitude, or over the size of rounding where it is larger.

        Infinite where something is not finite.
        """
        return self._difference / (max(self._expected, self._size) or 1.0)

    def see(self, expected: torch.Tensor, size: torch.Tensor, origin: Sequence[int]) -> None:
        """Compare the block at `origin` with what it should be; `size` is that of the parts (see `_block`)."""
        where = tuple(slice(start, start + count) for start, count in zip(origin, expected.shape, strict=True))
        actual = self._actual[where]
        difference = (actual.double() - expected).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        if not difference.numel():
            return
        largest = difference.max().item()
        if largest > self._difference:
            self._difference = largest
            index = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
            at = tuple(start + i for start, i in zip(origin, index, strict=True))
            self.worst = at, actual[index].item(), expected[index].item()
        self._expected = max(self._expected, expected.abs().max().item())
        self._size = max(self._size, size.max().item())


def compare(
    problem: AttentionProblem,
    given: Inputs,
    output: torch.Tensor,
    grads: Sequence[torch.Tensor | None],
    data: str,
) -> list[Mismatch]:
    """What of the output and gradients is too far from float64 attention; `data` names the inputs, see `measure`."""
    distances, largest_logit = measure(problem, given, output, grads)
    allowed = tolerance(problem, largest_logit)
    return [
        Mismatch(data, name, distance.error, allowed, *distance.worst)
        for name, distance in distances.items()
        if not distance.error <= allowed
    ]


def measure(
    problem: AttentionProblem, given: Inputs, output: torch.Tensor, grads: Sequence[torch.Tensor | None]
) -> tuple[dict[str, Distance], float]:
    """Output and gradients beside float64 attention, a block of it at a time.

    Args:
        problem: what was run; canonical, and without a dimension of size 0.
        given: the inputs and the gradient of the output.
        output: (B, H_q, S_q, D_v).
        grads: of query, key, value and mask, each or None; empty for inference.

    Returns:
        How far each result is off, by name: `output`, `gradient of ...`. And the largest magnitude of the logits.
    """
    named = dict(zip(_NAMES, grads, strict=False))
    results = {name: Distance(grad) for name, grad in named.items() if grad is not None}
    results["output"] = Distance(output)
    heads, kv_heads = problem.query.shape[1], problem.key.shape[1]
    groups = heads // kv_heads
    unflatten: Any = torch.unflatten
    query, grad_output = (unflatten(part, 1, (kv_heads, groups)) for part in (given.query, given.grad_output))
    mask, largest_logit = given.attn_mask, 0.0
    if mask is not None:
        mask = unflatten(mask, 1, (kv_heads, groups) if mask.shape[1] == heads else (1, 1))
    # The mask's gradient is added up over what it is broadcast over.
    mask_sums: list[torch.Tensor] = []
    if mask is not None and _NAMES[3] in results:
        mask_sums = [torch.zeros(mask.shape, dtype=torch.float64, device=mask.device) for _ in range(2)]
    for batch, head, lengths in _blocks(problem):
        key, value = given.key[batch, head].double(), given.value[batch, head].double()
        origin = (batch.start, head.start * groups)
        sums: dict[str, list[torch.Tensor]] = {}
        for rows in lengths:
            at = (batch, head, slice(None), rows)
            where = (
                () if mask is None else tuple(s if n > 1 else slice(None) for s, n in zip(at, mask.shape, strict=False))
            )
            block = _block(
                problem,
                (query[at].double(), key, value, None if mask is None else mask[where], grad_output[at].double()),
                rows.start,
                bool(results.keys() - {"output"}),
            )
            largest_logit = max(largest_logit, block.pop("logits")[0].item())
            for name, (expected, size) in block.items():
                if name not in results:
                    continue
                if name in ("output", _NAMES[0]):
                    results[name].see(expected.flatten(1, 2), size.flatten(1, 2), (*origin, rows.start, 0))
                elif name == _NAMES[3]:
                    for total, part in zip(mask_sums, (expected, size), strict=True):
                        total[where] += part.sum_to_size(total[where].shape)
                else:
                    before = sums.get(name, [0.0, 0.0])
                    sums[name] = [before[0] + expected, before[1] + size]
        for name, (expected, squares) in sums.items():
            results[name].see(expected, squares.sqrt(), (batch.start, head.start, 0, 0))
    if mask_sums:
        expected, squares = (total.flatten(1, 2) for total in mask_sums)
        results[_NAMES[3]].see(expected, squares.sqrt(), (0, 0, 0, 0))
    return results, largest_logit


def _blocks(problem: AttentionProblem) -> Iterator[tuple[slice, slice, list[slice]]]:
    """Batches, key heads and, for these, queries after queries: no more than _BLOCK logits, but for one query's."""
    batches, heads, queries, size = problem.query.shape
    kv_heads, keys = problem.key.shape[1:3]
    row = heads // kv_heads * max(keys, size, problem.value.shape[3])
    rows = min(queries, max(_BLOCK // row, 1))
    head = min(kv_heads, max(_BLOCK // (row * rows), 1))
    batch = min(batches, max(_BLOCK // (row * rows * head), 1))
    lengths = [slice(start, min(start + rows, queries)) for start in range(0, queries, rows)]
    for first in range(0, batches, batch):
        for second in range(0, kv_heads, head):
            yield slice(first, min(first + batch, batches)), slice(second, min(second + head, kv_heads)), lengths


_Block = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.Tensor]


def _block(
    problem: AttentionProblem, given: _Block, start: int, training: bool
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Output and gradients in float64, each with the size that its rounding errors are measured by.

    That size is the root of the sum of squares of what is added up for an element: where positive and negative parts
    cancel, as in the query's gradient when all keys are nearly the same, rounding errors are of the size of the parts.
    Half types round the output before the backward multiplies it with its gradient, which is an error common to a row.

    Args:
        problem: says the scale, and whether it is causal.
        given: query and gradient of the output (b, h, g, s, .), key and value (b, h, S, .), all float64, and the mask,
            which broadcasts to (b, h, g, s, S).
        start: the position of the first query.
        training: gradients are wanted.

    Returns:
        By name: of the output and the query's gradient, (b, h, g, s, .); of key, value and mask (here not reduced) sums
        over these queries, with the square of the size. And as `logits` their largest magnitude.
    """
    query, key, value, mask, grad = given
    key, value, scale = key.unsqueeze(2), value.unsqueeze(2), problem.scale
    logits = query @ key.mT * scale
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else logits + mask.double()
    if problem.is_causal:
        row, column = (torch.arange(size, device=logits.device) for size in logits.shape[-2:])
        logits = logits.masked_fill(column > row[:, None] + start, -torch.inf)
    largest = logits.abs().masked_fill(logits == -torch.inf, 0.0).max()
    empty = logits.amax(-1, keepdim=True) == -torch.inf  # no key: zeros
    weights = torch.softmax(logits.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    del logits
    output, squares = weights @ value, weights.square()
    results = {"logits": (largest, largest), "output": (output, (squares @ value.square()).sqrt())}
    if not training:
        return results
    row_sum = (grad * output).sum(-1, keepdim=True)
    row_size = (grad * output).square().sum(-1, keepdim=True).sqrt()
    d_logits = weights * (grad @ value.mT - row_sum)
    part = squares * (grad.square() @ value.square().mT + row_size.square())

    def over_queries(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Over those of every head that shares a key head."""
        return (left.mT @ right).sum(2)

    results[_NAMES[0]] = (
        d_logits @ key * scale,
        abs(scale) * ((part @ key.square()).sqrt() + row_size * (weights @ key).abs()),
    )
    results[_NAMES[1]] = (over_queries(d_logits, query) * scale, over_queries(part, query.square()) * scale**2)
    results[_NAMES[2]] = (over_queries(weights, grad), over_queries(squares, grad.square()))
    if problem.mask is not None and problem.mask.requires_grad:
        results[_NAMES[3]] = (d_logits, part)
    return results


@contextlib.contextmanager
def _any_algorithm() -> Iterator[None]:
    """Without torch.use_deterministic_algorithms, under which cuBLAS may refuse the reference's products."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)

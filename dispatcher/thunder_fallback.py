"""FallbackExecutor: Thunder's executors in an order, each asked at trace time and again when it runs, for any symbol.

For every call of a symbol that it claims, each child's own transforms are applied to a trace of that symbol alone,
which gives the child's forward and, in training, its backward. A child that raises there is recorded and left out.
When the program runs, the forwards are tried in turn; the backward is that of the child whose forward ran.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import inspect
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from thunder.common import transform_to_torch_types
from thunder.core import dtypes, prims
from thunder.core.compile_data import compile_data_and_stats, get_compile_data
from thunder.core.prims import OpTags
from thunder.core.proxies import AnyProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import Symbol, bsym_header
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import NON_FUNCTIONAL_OPS, dce
from thunder.core.transforms import get_grad, put_grad
from thunder.core.utils import sequencify
from thunder.executors import passes
from thunder.extend import (
    Executor,
    FusionExecutor,
    OperatorExecutor,
    StatefulExecutor,
    get_always_executors,
    register_executor,
    resolve_executors,
)
from thunder.torch import _torch_to_thunder_function_map
from thunder.transforms.autodiff import grad_transform_on_trace, split_into_forward_and_backward

from . import __version__, drop_in, selection
from .backends import registry
from .backends.base import Direction, Progress, Target, Verdict
from .decisions import Decision, Failed, Remembered, describe
from .errors import NoBackendError
from .problem import AttentionProblem
from .symbol_problem import SymbolProblem
from .thunder_traces import attention_problem, changed_in_place, info_of, keep_from_recomputation
from .thunder_traces import copy as copy_of

_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
_MAX_SIGNATURES = 4096
_number = itertools.count()
_Decision = Failed | Remembered


class FallbackExecutor(OperatorExecutor):  # type: ignore[misc] # thunder has no types
    """An executor that tries others in turn: `thunder.jit(model, executors=[FallbackExecutor(["cudnn", "torch"])])`.

    A child whose checker or transform raises while tracing, or whose implementation raises when it runs, is recorded
    with its traceback (`sidestep failures list`, as "thunder:NAME"), and the next one serves the call, forward and
    backward. What is on record is not asked again, in this process or in a later one, until the record expires.

    What it cannot wrap:

    - fusion across symbols: a child sees one symbol, and others' fusions cannot look into it. Name `symbols`, unless
      nothing is to be fused;
    - symbols that work in place, that return anything but tensors, or that take no tensor;
    - executors that keep state in a trace (TransformerEngine), and the functions that a child replaces while
      Thunder interprets the program (`register_operator(replaces=)`), which never reach any executor's rules;
    - a backward that fails after a forward that drew random numbers: it is recorded and raised, and the next call is
      served by another child. Without random numbers the gradients are computed by the next child from the inputs;
    - errors that no process survives: a CUDA error that is sticky, a crash.

    In training the inputs of a wrapped call are kept for the backward, also where a child would not need them.
    """

    def __init__(
        self,
        children: Sequence[Executor | str],
        *,
        name: str | None = None,
        symbols: Collection[Symbol | Callable[..., Any] | str] | None = None,
    ) -> None:
        """Register an executor over others.

        Args:
            children: Thunder's executors, by name or object, in the order in which they are asked.
            name: Thunder takes executors of one name for the same; by default made of the children's names. Give one
                to two that have the same children and other symbols.
            symbols: Thunder's symbols, torch's functions or Thunder's ids, which it claims; None for every symbol.

        Raises:
            ValueError: an unknown executor or symbol, no children, or one that keeps state in a trace.
        """
        found = resolve_executors(children)
        if not found:
            raise ValueError("FallbackExecutor needs at least one executor, for instance ['cudnn', 'sdpa', 'torch']")
        if stateful := [child.name for child in found if isinstance(child, StatefulExecutor)]:
            raise ValueError(f"{', '.join(stateful)} keeps state in a trace, which a fallback cannot share")
        super().__init__(name or f"fallback_{'_'.join(str(child.name) for child in found)}", version=__version__)
        self.children = tuple(_Child(child) for child in found)
        self.symbols = None if symbols is None else frozenset(map(_symbol_id, symbols))
        self._latest = threading.local()
        self._known: dict[tuple[str, str, int], _Decision | None] = {}
        register_executor(self)

    # --- what Thunder asks ---

    def can_execute(self, bsym: Any) -> bool:
        """Whether a child claims the symbol."""
        if self.symbols is not None and bsym.sym.id not in self.symbols:
            return False
        if not _can_be_wrapped(bsym) or not any(True for _ in self._claiming(bsym, _problem(bsym, False), [])):
            return False
        self._latest.bsym = bsym
        return True

    def get_execution_transform(self, bsym: Any) -> Callable[..., Any]:
        """What is traced in place of the symbol where no gradient is needed."""
        return functools.partial(self._wrap, bsym, False)

    def get_grad_transform(self, sym: Symbol) -> Callable[..., Any] | None:
        """What is traced in place of the symbol, with its gradients; of the symbol last asked about."""
        bsym = getattr(self._latest, "bsym", None)
        if bsym is None or bsym.sym.id != sym.id:
            return None

        def with_gradients(*args: Any, **kwargs: Any) -> Any:
            return self._wrap(bsym, True, *args, **kwargs)

        with_gradients.__signature__ = inspect.signature(sym.meta)  # type: ignore[attr-defined] # vjp() reads it
        return with_gradients

    # --- asking children ---

    def ask(self, child: _Child, problem: _Problem, direction: Direction, stage: str, step: Callable[[], Any]) -> Any:
        """What `step` returns, or the decision against the child."""
        if (known := self.known(child, problem)) is not None:
            return known
        made = selection.attempt(child, problem, _target(problem), Progress(direction, stage), step)
        if isinstance(made, Failed) and made.kind != "transient":
            self._known[child.name, problem.digest(), selection.generation] = made
        return made

    def known(self, child: _Child, problem: _Problem) -> _Decision | None:
        """What is known against a child, from this process or from the records."""
        key = (child.name, problem.digest(), selection.generation)
        if key not in self._known:
            if len(self._known) > _MAX_SIGNATURES:
                self._known.clear()
            self._known[key] = selection.remembered(child, problem, _target(problem))  # type: ignore[assignment]
        return self._known[key]

    def _claiming(self, bsym: Any, problem: _Problem, against: list[Decision]) -> Iterator[_Child]:
        for child in self.children:
            claimed = self.ask(child, problem, "forward", "checker", functools.partial(child.claims, bsym))
            if isinstance(claimed, _Decision):
                against.append(claimed)
            elif claimed:
                yield child

    # --- tracing ---

    def _wrap(self, bsym: Any, training: bool, *args: Any, **kwargs: Any) -> Any:
        draws = _draws(bsym)
        if draws:
            keep_from_recomputation(bsym)
        bsym = bsym.from_bsym(args=args, kwargs=kwargs)
        inputs = list({p.name: p for p in tree_flatten((args, kwargs))[0] if isinstance(p, Proxy)}.values())
        problem = _problem(bsym, training)
        against: list[Decision] = []
        compiled = []
        for child in self._claiming(bsym, _problem(bsym, False), against):  # a checker knows nothing of gradients
            make = functools.partial(_Compiled, child, bsym, inputs, training)
            made = self.ask(child, problem, "forward", "transform", make)
            if isinstance(made, _Decision):
                against.append(made)
            else:
                compiled.append(made)
        if not compiled:
            raise NoBackendError(f"{self.name}: no executor can serve {problem}:\n{describe(against)}", against)
        call = _Call(self, bsym, inputs, compiled, draws)
        with bsym_header(f"{bsym.sym.id}, by the first that can: {', '.join(c.child.executor.name for c in compiled)}"):
            outputs = call.trace_training() if training and call.differentiable else call.trace_inference()
        return outputs[0] if isinstance(bsym.output, Proxy) else type(bsym.output)(outputs)

    def operator(self, name: str, meta: Callable[..., Any], fn: Callable[..., Any], tags: Any = None) -> Symbol:
        """An operator of one trace; nothing keeps it when the trace goes."""
        symbol = self.register_operator(name, meta=meta, fn=fn, tags=tags)
        del self.opmap[name]
        return symbol


_Problem = AttentionProblem | SymbolProblem


class _Child:
    """One of Thunder's executors, as records know it."""

    builds = False

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.name = f"thunder:{executor.name}"

    def claims(self, bsym: Any) -> bool:
        """The executor's own answer."""
        fusing = isinstance(self.executor, FusionExecutor)
        return bool(self.executor.can_fuse(bsym) if fusing else self.executor.can_execute(bsym))

    def versions(self) -> dict[str, str | int]:
        """Versions on which its verdicts depend."""
        versions: dict[str, str | int] = {
            "thunder": importlib.metadata.version("lightning-thunder"),
            "torch": torch.__version__,
            "executor_version": str(self.executor.version),
        }
        if self.executor.name in ("cudnn", "nvfuser"):  # of the same libraries
            versions |= registry.get(self.executor.name).versions()
        return versions

    def verdict(self, error: Exception) -> Verdict:
        """What an exception means: the library's own refusals, and torch's, which are RuntimeErrors."""
        if self.executor.name in ("cudnn", "nvfuser"):
            return registry.get(self.executor.name).verdict(error)
        return "unsupported" if isinstance(error, (RuntimeError, NotImplementedError)) else "error"


class _Compiled:
    """A child's forward and, in training, backward for one call of a symbol.

    Attributes:
        child: whose they are.
        forward: takes the inputs, returns (outputs, saved tensors, saved others).
        backward: takes the saved tensors, the saved others and the gradients of the outputs; None where there is none.
        places: where a backward finds each saved tensor: ("input" | "output" | "slot", index).
        slots: how many of them are neither inputs nor outputs.
        graded: the inputs that get a gradient.
    """

    def __init__(self, child: _Child, bsym: Any, inputs: Sequence[Proxy], training: bool) -> None:
        self.child = child
        data = copy.copy(get_compile_data())
        executors = (child.executor, *(e for e in get_always_executors() if e != child.executor))
        if data is not None:
            data.executors_list = executors
            data.autocast_stack = type(data.autocast_stack)()  # autocast has been applied already
        # The statistics are those of the whole program, and this trace is none of its traces.
        with compile_data_and_stats(data, None):
            with tracectx(None):
                trace = dce(_trace_of_one(bsym, inputs, training))
                if training:
                    trace = grad_transform_on_trace(trace)
                trace = passes.transform_for_execution(trace, executors)
                backward = None
                if training:
                    trace, backward = split_into_forward_and_backward(trace)
            returned = trace.bound_symbols[-1].args
            outputs = returned[0]["output"]
            saved = returned[1][0] if training else ()
            names = {proxy.name: ("input", index) for index, proxy in enumerate(inputs)}
            names |= {out.name: ("output", index) for index, out in enumerate(outputs) if isinstance(out, Proxy)}
            slots = itertools.count()
            self.places = [names.get(proxy.name) or ("slot", next(slots)) for proxy in saved]
            self.slots = next(slots)
            run = transform_to_torch_types(passes.del_last_used(trace)).python_callable()
            self._run, self._training = run, training
            self.backward: Callable[..., Any] | None = None
            self.graded: set[int] = set()
            if backward is not None:
                grads = backward.bound_symbols[-1].args[0]
                self.graded = {index for index, grad in enumerate(grads) if grad is not None}
                backward = passes.del_last_used(backward, clear_mutable_collections=True)
                self.backward = backward.python_callable()

    def forward(self, *inputs: Any) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Outputs, and what is saved: tensors and others."""
        if not self._training:
            return self._run(*inputs)["output"], (), ()
        returned, (saved, others) = self._run(*inputs)
        return returned["output"], saved, others


def _trace_of_one(bsym: Any, inputs: Sequence[Proxy], training: bool) -> TraceCtx:
    """A trace whose arguments are `inputs`, and which calls the symbol and returns its outputs."""

    def one_symbol(*_: Any) -> None:
        pass

    kind = inspect.Parameter.POSITIONAL_ONLY
    one_symbol.__signature__ = inspect.Signature([inspect.Parameter(p.name, kind) for p in inputs])  # type: ignore[attr-defined]
    trace = TraceCtx(one_symbol)
    with tracectx(trace):
        own: dict[str, Any] = {}
        for proxy in inputs:
            made: Any = proxy
            if isinstance(proxy, TensorProxy):
                grad = training and dtypes.is_inexact_dtype(proxy.dtype)
                made = TensorProxy(
                    proxy.name, shape=proxy.shape, device=proxy.device, dtype=proxy.dtype, requires_grad=grad
                )
            else:
                trace.add_name(proxy.name)
            prims.unpack_trivial(made, name=made.name)
            own[proxy.name] = made
        trace.args, trace.kwargs = tuple(own.values()), {}
        args, kwargs = tree_map(lambda x: own[x.name] if isinstance(x, Proxy) else x, (bsym.args, bsym.kwargs))
        output = bsym.sym(*args, **kwargs)
        prims.python_return({"output": tuple(sequencify(output)), "flat_args": list(trace.args)})
    return trace


class _Call:
    """One call of a symbol in a trace: its operators, and what they run."""

    def __init__(
        self, owner: FallbackExecutor, bsym: Any, inputs: list[Proxy], compiled: list[_Compiled], draws: bool
    ) -> None:
        self.owner, self.bsym, self.inputs, self.compiled, self.draws = owner, bsym, inputs, compiled, draws
        self.outputs = list(sequencify(bsym.output))
        self.name = f"fallback_{bsym.sym.name}_{next(_number)}"
        self.graded = sorted(set().union(*(one.graded for one in compiled)))
        self.differentiable = bool(self.graded)
        self.slots = max(one.slots for one in compiled)
        self._usable: dict[Any, tuple[_Problem, list[_Compiled]]] = {}

    # what the trace sees

    def trace_inference(self) -> list[Any]:
        """The operator's outputs, in the trace being built."""
        self.training = False
        operator = self.owner.operator(
            self.name, lambda *_: self._like_outputs(), lambda *given: tuple(self.forward(given)[1]), self._tags()
        )
        return list(operator(*self.inputs))

    def trace_training(self) -> list[Any]:
        """The same, with the gradients."""
        self.training = True
        device = self.outputs[0].device
        known = [*self.inputs, *self.outputs]
        self.copied = changed_in_place(known)

        def meta(*_: Any) -> Any:
            # Children differ in what they save, and which one serves is not known yet: this is nominal.
            saved = [
                TensorProxy(prefix="saved", shape=(1,), dtype=dtypes.float32, device=device) for _ in range(self.slots)
            ]
            copies = [TensorProxy(like=known[place], requires_grad=False) for place in self.copied]
            return (*self._like_outputs(), *saved, AnyProxy(None, prefix="served_by"), *copies)

        def backward_meta(*_: Any) -> Any:
            return tuple(TensorProxy(like=self.inputs[index], requires_grad=False) for index in self.graded)

        forward = self.owner.operator(f"{self.name}_forward", meta, self._run_training, self._tags())
        backward = self.owner.operator(f"{self.name}_backward", backward_meta, self._run_backward)
        made = forward(*self.inputs)
        count = len(self.outputs)
        outputs, saved, served_by = made[:count], made[count : count + self.slots], made[count + self.slots]
        kept = [*self.inputs, *outputs]
        for place, copied in zip(self.copied, made[count + self.slots + 1 :], strict=True):
            kept[place] = copied
        gradients = tuple(get_grad(out) if dtypes.is_inexact_dtype(out.dtype) else None for out in outputs)
        inputs = len(self.inputs)
        grads = backward(served_by, gradients, tuple(kept[:inputs]), tuple(kept[inputs:]), tuple(saved))
        for index, grad in zip(self.graded, grads, strict=True):
            put_grad(self.inputs[index], grad)
        return list(outputs)

    def _tags(self) -> tuple[OpTags, ...]:
        return (OpTags.DONT_AUTO_RECOMPUTE_IN_BACKWARD, *((OpTags.RANDOM_OP,) if self.draws else ()))

    def _like_outputs(self) -> tuple[Any, ...]:
        return tuple(TensorProxy(like=out, requires_grad=False) for out in self.outputs)

    # what runs

    def _run_training(self, *given: Any) -> tuple[Any, ...]:
        one, outputs, saved, others = self.forward(given)
        kept = [tensor for tensor, (kind, _) in zip(saved, one.places, strict=True) if kind == "slot"]
        nothing = [None] * (self.slots - len(kept))
        copies = [copy_of([*given, *outputs][place]) for place in self.copied]
        return (*outputs, *kept, *nothing, _Served(one, tuple(others)), *copies)

    def _run_backward(
        self,
        served: _Served,
        gradients: Sequence[Any],
        given: Sequence[Any],
        outputs: Sequence[Any],
        kept: Sequence[Any],
    ) -> tuple[Any, ...]:
        found = {"input": given, "output": outputs, "slot": kept}
        saved = [found[kind][index] for kind, index in served.one.places]
        problem, usable = self._usable_for(given)
        made = self._backward(served.one, problem, saved, served.others, gradients, given)
        if not isinstance(made, _Decision):
            return tuple(made)
        with contextlib.suppress(ValueError):
            usable.remove(served.one)
        if self.draws:
            raise NoBackendError(
                f"{self.owner.name}: the backward of {made.backend} failed on {problem}, whose forward drew random "
                f"numbers, so that no other executor can compute these gradients: {made}",
                [made],
            )
        against: list[Decision] = [made]
        while usable:  # each failure shortens it
            one, _, saved_now, others = self.forward(given)
            again = self._backward(one, problem, list(saved_now), tuple(others), gradients, given)
            if not isinstance(again, _Decision):
                return tuple(again)
            against.append(again)
            usable.remove(one)
        raise self._nobody(problem, against)

    def forward(self, given: Sequence[Any]) -> tuple[_Compiled, Sequence[Any], Sequence[Any], Sequence[Any]]:
        """By the first child that can: what it ran, the outputs, the tensors and the others that it saved."""
        problem, usable = self._usable_for(given)
        against: list[Decision] = []
        for one in list(usable):
            made = self.owner.ask(one.child, problem, "forward", "execute", functools.partial(one.forward, *given))
            if not isinstance(made, _Decision):
                return (one, *made)
            against.append(made)
            if not (isinstance(made, Failed) and made.kind == "transient"):
                with contextlib.suppress(ValueError):  # another thread may have met it too
                    usable.remove(one)
        raise self._nobody(problem, against)

    def _backward(
        self, one: _Compiled, problem: _Problem, saved: list[Any], others: Sequence[Any], gradients: Sequence[Any],
        given: Sequence[Any],
    ) -> Any:  # fmt: skip
        def step() -> tuple[Any, ...]:
            grads = one.backward([saved, list(others)], list(gradients)) if one.backward else [None] * len(given)
            return tuple(torch.zeros_like(given[i]) if grads[i] is None else grads[i] for i in self.graded)

        return self.owner.ask(one.child, problem, "backward", "execute", step)

    def _usable_for(self, given: Sequence[Any]) -> tuple[_Problem, list[_Compiled]]:
        signature = (
            selection.generation,
            *[(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in given],
        )
        found = self._usable.get(signature)
        if found is None:
            if len(self._usable) >= _MAX_SIGNATURES:
                self._usable.clear()
            actual = dict(zip((proxy.name for proxy in self.inputs), given, strict=True))
            problem = _problem(self.bsym, self.training, actual)
            found = problem, [one for one in self.compiled if self.owner.known(one.child, problem) is None]
            self._usable[signature] = found
        return found

    def _nobody(self, problem: _Problem, against: Sequence[Decision]) -> NoBackendError:
        known = [self.owner.known(one.child, problem) for one in self.compiled]
        listed: list[Decision] = list(against) or [decision for decision in known if decision is not None]
        return NoBackendError(
            f"{self.owner.name}: no executor can serve {problem}:\n{describe(listed)}\nsee `sidestep failures list`",
            listed,
        )


class _Served:
    """Whose forward ran, and what it saved besides tensors."""

    def __init__(self, one: _Compiled, others: tuple[Any, ...]) -> None:
        self.one, self.others = one, others

    def __repr__(self) -> str:
        return f"<{self.one.child.executor.name}>"


# --- symbols and problems ---


def _symbol_id(symbol: Any) -> Any:
    if isinstance(symbol, str):
        return symbol
    if symbol in (torch._C._nn.scaled_dot_product_attention, drop_in.scaled_dot_product_attention):
        return _ATTENTION  # Thunder knows the one that torch.nn.functional had when Thunder was imported
    found: Any = symbol if isinstance(symbol, Symbol) else _torch_to_thunder_function_map.get(symbol)
    if inspect.isfunction(found):  # those that know DTensor choose between two symbols
        found = inspect.getclosurevars(found).nonlocals.get("single_device_symbol")
    if not isinstance(found, Symbol):
        raise ValueError(f"{symbol!r} is no symbol of Thunder's, nor a function of torch's that it knows")
    return found.id


def _can_be_wrapped(bsym: Any) -> bool:
    sym = bsym.sym
    if sym.executor is not None or sym.is_fusion or sym.id in (prims.PrimIDs.RETURN, prims.PrimIDs.UNPACK_TRIVIAL):
        return False
    in_place = OpTags.IN_PLACE in (sym.tags or ()) or sym.id == prims.PrimIDs.COPY_
    outputs = sequencify(bsym.output)
    tensors = bool(outputs) and all(isinstance(out, TensorProxy) for out in outputs)
    return not in_place and tensors and any(isinstance(arg, TensorProxy) for arg in bsym.flat_args)


def _draws(bsym: Any) -> bool:
    """Whether the call draws random numbers: dropout with a probability of 0 does not."""
    if bsym.sym.id in NON_FUNCTIONAL_OPS or OpTags.RANDOM_OP in (bsym.sym.tags or ()):
        given = _arguments(bsym)
        p = given.get("dropout_p", given.get("p"))
        if p is None or isinstance(p, Proxy) or p > 0:
            return True
    return any(map(_draws, bsym.subsymbols))


def _arguments(bsym: Any) -> dict[str, Any]:
    bound = inspect.signature(bsym.sym.meta).bind(*bsym.args, **bsym.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _problem(bsym: Any, training: bool, actual: dict[str, Any] | None = None) -> _Problem:
    """What is asked: as the trace knows it, or with the tensors and numbers that its proxies stand for."""
    given = _arguments(bsym)
    if actual is not None:
        given = tree_map(lambda x: actual[x.name] if isinstance(x, Proxy) else x, given)
    device = next(arg.device for arg in bsym.flat_args if isinstance(arg, TensorProxy))
    # The parameters' names are the same.
    attention = attention_problem(**given, training=training) if bsym.sym.id == _ATTENTION else None
    if attention is not None:
        return attention
    return SymbolProblem(
        symbol=str(bsym.sym.id),
        device="cuda" if device.type == "cuda" else "cpu",
        training=training,
        arguments={name: _description(value) for name, value in given.items()},
    )


def _description(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, TensorProxy)):
        info = info_of(value)
        stride = {"stride": list(value.stride())} if isinstance(value, torch.Tensor) else {}
        return {"shape": list(info.shape), "dtype": info.dtype, **stride}
    if isinstance(value, NumberProxy):
        return {"number": value.python_type.__name__}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, (list, tuple)):
        return [_description(one) for one in value]
    return str(value)


def _target(problem: _Problem) -> Target:
    if problem.device == "cpu":
        return Target(-1)
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return Target(torch.cuda.current_device() if started else 0)

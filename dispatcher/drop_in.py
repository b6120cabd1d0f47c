"""The dispatcher behind `torch.nn.functional.scaled_dot_product_attention`, for a process or for a block.

What is replaced is the attribute of `torch.nn.functional`, and nothing else. So these reach the dispatcher: calls
by that name, `torch.nn.MultiheadAttention` and `torch.nn.Transformer*Layer` where they call it, and libraries that look
the name up at each call. Two ways around it cannot be closed from Python: a name that was bound before
(`from torch.nn.functional import scaled_dot_product_attention`), and torch's fused C++ paths
(`torch.backends.mha.set_fastpath_enabled(False)` turns those of `torch.nn` off).

A drop-in must not break what worked: what Sidestep does not take (nested tensors, DTensor, vmap and torch.func, other
devices, `torch.jit.trace`) is answered by torch's own function, which also says what is wrong with a wrong call.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import attention, routing
from .errors import InvalidCallError

_DEVICES = ("cpu", "cuda")
_no_dispatch = torch.Tensor.__torch_dispatch__
_functional: Any = torch.nn.functional
_original: Any = _functional.scaled_dot_product_attention
_lock = threading.Lock()
_blocks = 0  # open blocks of installed(), of all threads
_process = False  # install() was called
_active = False
# The switches of torch.nn.attention.sdpa_kernel and torch.backends.cuda.enable_*_sdp.
_flash, _efficient = torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled
_math, _cudnn = torch._C._get_math_sdp_enabled, torch._C._get_cudnn_sdp_enabled


def install() -> None:
    """Put the dispatcher behind `torch.nn.functional.scaled_dot_product_attention`, for all threads, until `uninstall`.

    Doing it twice is doing it once. See the module's text for what it reaches, and docs/torch.md.
    """
    global _process
    with _lock:
        _process = True
        _apply()


def uninstall() -> None:
    """Undo `install`; open blocks of `installed` go on until they end."""
    global _process
    with _lock:
        _process = False
        _apply()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """As `install`, until the block ends, by an exception too; blocks may be nested and overlap between threads."""
    global _blocks
    with _lock:
        _blocks += 1
        _apply()
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            _apply()


def _apply() -> None:
    """Make torch's attribute what `_process` and `_blocks` say."""
    global _active, _original
    _active = _process or _blocks > 0
    current = _functional.scaled_dot_product_attention
    if _active and current is not scaled_dot_product_attention:
        _original = current
        _functional.scaled_dot_product_attention = scaled_dot_product_attention
    elif not _active and current is scaled_dot_product_attention:
        _functional.scaled_dot_product_attention = _original
    # Otherwise somebody has put a function of theirs over ours, and calls it: it only passes calls on from now on.


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What stands in for torch's function while it is installed."""
    if not _active or torch._C._is_tracing():
        return _torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if has_torch_function_variadic(query, key, value, attn_mask):
        return _overridden(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    backends = None if _flash() and _cudnn() and _efficient() and _math() else permitted()
    try:
        # Thunder's proxies have no __torch_dispatch__; of torch's function Thunder knows what to make.
        own = getattr(type(query), "__torch_dispatch__", None) is not _no_dispatch
        if backends == () or own or query.device.type not in _DEVICES:
            return _torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return attention.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, backends=backends
        )
    except InvalidCallError:
        return _torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _in_graph(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What torch.compile sees in its place."""
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in (query, key, value))
    if not _active or not plain or query.device.type not in _DEVICES:
        return _torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    from .torch_op import attention

    return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


attention.traced_as(scaled_dot_product_attention, _in_graph)

# torch.jit.script knows functions by their id, and compiles none that it does not know: for it ours is torch's.
torch.jit._builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")


def _torch(*arguments: Any) -> torch.Tensor:
    options = {"scale": arguments[6]}
    if arguments[7]:  # Thunder's symbol for torch's function has no such parameter
        options["enable_gqa"] = arguments[7]
    output: torch.Tensor = _original(*arguments[:6], **options)
    return output


def _overridden(*arguments: Any) -> torch.Tensor:
    """A subclass of Tensor knows torch's function, and a mode (torch.set_default_device is one) the installed one."""
    if any(map(_overrides, arguments[:4])):
        return _torch(*arguments)
    output: torch.Tensor = handle_torch_function(scaled_dot_product_attention, arguments[:4], *arguments)
    return output


def _overrides(tensor: Any) -> bool:
    function = getattr(type(tensor), "__torch_function__", None)
    none: Any = (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl, None)
    return function not in none or (type(tensor) is not torch.Tensor and function == none[0])


def permitted() -> tuple[str, ...]:
    """The backends of the present order that torch's switches allow; a backend without a switch goes with flash.

    What `sdpa_kernel` says of torch's kernels is said of Sidestep's use of them; its priorities are not looked at, for
    the order is Sidestep's.
    """
    return _permitted(routing.backends_of(attention._get_order()), _flash(), _cudnn(), _efficient(), _math())


@functools.lru_cache(maxsize=64)
def _permitted(order: tuple[str, ...], flash: bool, cudnn: bool, efficient: bool, math: bool) -> tuple[str, ...]:
    switches = {"cudnn": cudnn, "torch_efficient": efficient, "torch_math": math}
    return tuple(name for name in order if switches.get(name, flash))

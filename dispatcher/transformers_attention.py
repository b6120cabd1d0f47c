"""`attn_implementation="sidestep"` for Hugging Face transformers.

    import sidestep.transformers_attention
    sidestep.transformers_attention.register()
    model = LlamaForCausalLM(LlamaConfig(attn_implementation="sidestep"))

The masks are those of "sdpa", and so is the meaning of every argument (transformers, integrations/sdpa_attention.py);
key heads are never repeated in memory, with a mask neither.
"""

from __future__ import annotations

from typing import Any

import torch

from .attention import scaled_dot_product_attention


def register(name: str = "sidestep") -> None:
    """Make `attn_implementation=name` known to transformers in this process; doing it twice is doing it once.

    Args:
        name: what models are to call it; "sdpa" puts it behind every model that asks for nothing else.

    Raises:
        ImportError: there is no transformers, or one without AttentionInterface and AttentionMaskInterface (before
            4.53).
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What a model's attention layer calls.

    Args:
        module: the layer; its `is_causal` counts where the argument is None.
        query: (B, H_q, S_q, D).
        key: (B, H_kv, S_kv, D).
        value: (B, H_kv, S_kv, D_v).
        attention_mask: bool or float, broadcastable to (B, H_q, S_q, S_kv); a layer with one is not causal besides.
        dropout: probability.
        scaling: factor of the logits.
        is_causal: only keys up to the query's own.
        position_bias: added to the logits, as T5 has it.
        **others: ignored, but for what cannot be done.

    Returns:
        (B, S_q, H_q, D_v), and no weights.

    Raises:
        ValueError: `softcap`, which needs attn_implementation="eager".
    """
    if others.get("softcap") is not None:
        raise ValueError('attn_implementation="sidestep" knows no softcap; use "eager" or "flex_attention"')
    length = query.shape[2]
    # One query sees all keys, which are those of the cache.
    causal = (
        length > 1
        and attention_mask is None
        and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    )
    if causal and key.shape[2] > length:  # an empty static cache: what lies behind the queries is masked
        key, value = key[:, :, :length], value[:, :, :length]
        position_bias = None if position_bias is None else position_bias[..., :length]
    if position_bias is not None:
        from transformers.integrations.sdpa_attention import create_position_bias_mask

        attention_mask = create_position_bias_mask(position_bias, attention_mask, causal, query, key)
        causal = False
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, causal, scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).contiguous(), None

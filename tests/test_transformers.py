"""attn_implementation="sidestep": small random models give what they give with "sdpa"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as transformers_package
from process import Counters

import sidestep
from sidestep import transformers_attention

transformers: Any = transformers_package

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LLAMA = {**SMALL, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}
BERT = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(autouse=True)
def registered() -> None:
    transformers_attention.register()
    transformers_attention.register()


def pair(kind: str) -> list[Any]:
    """The same model with "sdpa" and with "sidestep"."""
    models = []
    for name in ("sdpa", "sidestep"):
        torch.manual_seed(0)
        if kind == "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, attn_implementation=name))
        else:
            model = transformers.BertForMaskedLM(transformers.BertConfig(**BERT, attn_implementation=name))
        assert model.config._attn_implementation == name
        models.append(model)
    return models


TOKENS = torch.arange(1, 21).reshape(2, 10)
PADDED = {
    "llama": torch.tensor([[1] * 10, [0] * 4 + [1] * 6]),  # on the left, as for generation
    "bert": torch.tensor([[1] * 10, [1] * 6 + [0] * 4]),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_outputs_and_gradients(kind: str, padded: bool, counters: Counters) -> None:
    mask = PADDED[kind] if padded else None
    found = []
    for model in pair(kind):
        output = model(TOKENS, attention_mask=mask, labels=TOKENS)
        output.loss.backward()
        logits = output.logits if mask is None else output.logits[mask.bool()]
        found.append([logits, *(parameter.grad for parameter in model.parameters())])
    assert len(found[0]) > 20
    torch.testing.assert_close(found[1], found[0])
    assert counters.calls == 2  # layers, of one of the two models


CACHES: list[dict[str, Any]] = [{}, {"cache_implementation": "static", "disable_compile": True}, {"use_cache": False}]


@pytest.mark.parametrize("cache", CACHES, ids=["dynamic", "static", "none"])
@pytest.mark.parametrize("padded", [False, True])
def test_generation(padded: bool, cache: dict[str, Any], counters: Counters) -> None:
    mask = PADDED["llama"] if padded else torch.ones_like(TOKENS)
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True, **cache}
    plain, ours = (model.eval().generate(TOKENS, attention_mask=mask, **options) for model in pair("llama"))
    assert ours.sequences.shape == (2, 15)
    assert torch.equal(ours.sequences, plain.sequences)
    torch.testing.assert_close(ours.logits, plain.logits)
    assert counters.calls == 2 * 5


def test_half_precision_and_dropout_run() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, attn_implementation="sidestep", attention_dropout=0.5)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    first, second = (model(TOKENS).logits for _ in range(2))
    assert not torch.equal(first, second)
    first.float().sum().backward()
    model.eval()
    assert torch.equal(model(TOKENS).logits, model(TOKENS).logits)


def test_position_bias_and_causal_over_a_longer_cache() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layer = torch.nn.Module()
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool).tril()
    for arguments in (
        {"is_causal": True, "attention_mask": None},
        {"is_causal": True, "attention_mask": None, "position_bias": torch.randn(1, 4, 5, 7)},
        {"is_causal": False, "attention_mask": None, "position_bias": torch.randn(1, 4, 5, 7)},
        {"attention_mask": mask, "position_bias": torch.randn(1, 4, 5, 7)},
        {"attention_mask": mask, "scaling": 0.5},
    ):
        theirs = sdpa_attention_forward(layer, query, key, value, **arguments)[0]
        ours = transformers_attention.attention_forward(layer, query, key, value, **arguments)[0]
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="softcap"):
        transformers_attention.attention_forward(layer, query, key, value, None, softcap=30.0)


def test_a_compiled_model() -> None:
    torch._dynamo.reset()
    plain, ours = pair("llama")
    expected, found = plain(TOKENS).logits, torch.compile(ours, backend="aot_eager")(TOKENS).logits
    torch.testing.assert_close(found, expected)


def test_the_order_is_the_dispatchers() -> None:
    _, ours = pair("bert")
    with sidestep.use_backends("torch_math"), sidestep.observe() as seen:
        ours(TOKENS)
    assert {decisions[-1].backend for _, decisions in seen} == {"torch_math"}

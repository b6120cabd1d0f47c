"""The presets of well-known models: what they mean, from the command line too, and that cuDNN takes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from sidestep.backends import registry
from sidestep.cli import main
from sidestep.models import models, spec_of
from sidestep.problem import AttentionProblem, Layout
from sidestep.spec import SpecError


def problems(*arguments: str) -> list[AttentionProblem]:
    """What `warmup --dry-run` lists."""
    run = CliRunner().invoke(main, ["warmup", *arguments, "--dry-run", "--json"])
    assert run.exit_code == 0, run.output
    return [AttentionProblem.from_json(item["problem"]) for item in json.loads(run.stdout)["items"]]


def bshd(batch: int, heads: int, length: int, size: int) -> Layout:
    return Layout.of((batch, heads, length, size), (length * heads * size, size, heads * size, 1))


def test_one_model_from_the_command_line() -> None:
    found = problems("--model", "llama-3-8b", "--batch", "1,2", "--length", "2048,4096", "--training")
    assert len(found) == 4
    assert found[0] == AttentionProblem(
        device="cuda",
        dtype="bfloat16",
        query=bshd(1, 32, 2048, 128),
        key=bshd(1, 8, 2048, 128),
        value=bshd(1, 8, 2048, 128),
        is_causal=True,
        scale=128**-0.5,
        training=True,
    )
    assert {(p.query.shape[0], p.query.shape[2], p.key.shape[2]) for p in found} == {
        (batch, length, length) for batch in (1, 2) for length in (2048, 4096)
    }


def test_inference_is_the_default_and_both_may_be_asked_for() -> None:
    given = ("--model", "gpt2", "--length", "512")
    assert [(p.training, p.dropout_p) for p in problems(*given)] == [(False, 0.0)]
    assert [(p.training, p.dropout_p) for p in problems(*given, "--training")] == [(True, 0.1)]
    both = problems(*given, "--training", "--inference")
    assert [(p.training, p.dropout_p) for p in both] == [(False, 0.0), (True, 0.1)]


def test_dtype_and_layout() -> None:
    given = ("--model", "bert-base", "--length", "128", "--dtype", "float16,float32", "--layout", "bhsd,bshd")
    found = problems(*given)
    assert {p.dtype for p in found} == {"float16", "float32"}
    assert {p.query for p in found} == {Layout.of((1, 12, 128, 64)), bshd(1, 12, 128, 64)}
    assert not any(p.is_causal for p in found)


def test_lengths_that_the_model_fixes() -> None:
    found = problems("--model", "whisper-large-v3,llama-3.2-1b", "--length", "64", "--batch", "3")
    assert [(p.query.shape, p.key.shape[2], p.is_causal) for p in found] == [
        ((3, 20, 1500, 64), 1500, False),
        ((3, 20, 448, 64), 448, True),
        ((3, 20, 448, 64), 1500, False),
        ((3, 32, 64, 64), 64, True),
    ]


def test_with_a_spec_both_are_taken_each_problem_once(tmp_path: Any) -> None:
    path = tmp_path / "spec.yaml"
    same = "{batch: 1, heads: 32, kv_heads: 8, query_length: 64, head_size: 64, causal: true, layout: bshd}"
    path.write_text(f"problems: [{same}, {{batch: 1, heads: 2, query_length: 3, head_size: 4}}]")
    found = problems(str(path), "--model", "llama-3.2-1b", "--length", "64,65")
    assert [(p.query.shape[1], p.query.shape[2]) for p in found] == [(32, 64), (2, 3), (32, 65)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a SPEC, or --model NAME"),
        (["--batch", "2", "--training"], "--batch, --training: of --model"),
        (["--model", "llama-9"], "unknown model llama-9; known: llama-3-8b, "),
        (["--model", "gpt2"], "gpt2: how long are the calls? Give --length"),
        (["--model", "vit-b-16", "--length", "8"], "vit-b-16: the model fixes its lengths"),
        (["--model", "gpt2", "--length", "8,x"], "expected whole numbers with commas between them, got '8,x'"),
        (["--model", "gpt2", "--length", "-8"], "gpt2[0]: query_length: expected a whole number"),
        (["--model", "gpt2", "--length", "8", "--dtype", "half"], "gpt2[0]: dtype: expected one of float16"),
    ],
)
def test_wrong_usage_is_2(arguments: list[str], said: str) -> None:
    run = CliRunner().invoke(main, ["warmup", *arguments, "--dry-run"])
    assert (run.exit_code, run.stdout) == (2, "")
    assert said in run.stderr


@pytest.mark.parametrize("order", [["--list-models", "--json"], ["--json", "--list-models"]])
def test_the_list_of_models(order: list[str]) -> None:
    run = CliRunner().invoke(main, ["warmup", *order])
    items = json.loads(run.stdout)["items"]
    assert [item["name"] for item in items] == list(models())
    assert len(items) >= 14
    assert all(item["source"].startswith("https://huggingface.co/") for item in items)
    text = CliRunner().invoke(main, ["warmup", "--list-models"])
    assert all(any(word == name for word in text.stdout.split()) for name in models())
    assert "heads 28, kv_heads 4, head_size 128, causal" in text.stdout


@pytest.mark.parametrize("name", models())
def test_no_rule_of_cudnn_is_against_a_model(name: str) -> None:
    lengths = (512,) if models()[name].lengths_are_given else ()
    items = spec_of([name], (1, 2), lengths, training=(False, True)).items
    assert len(items) == 4 * len(models()[name].problems)
    backend = registry.get("cudnn")
    assert [backend.rejects(item.problem) for item in items] == [()] * len(items)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(SpecError, match="unknown model x, y"):
        spec_of(["x", "gpt2", "y"], (1,), (8,))

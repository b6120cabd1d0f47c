"""Rules about wrong numbers: the borders of the shipped ones, a user's, what is refused in a file, and the remedy.

The graphs with the remedy are built by cuDNN for an H200 that is not here, in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from process import Counters, reload_settings
from reference import assert_close, attention

import sidestep
from sidestep import environment, selection
from sidestep.backends import cudnn_graph, known_bad, registry
from sidestep.backends.base import Progress, Target
from sidestep.backends.cudnn_offline import load_profile
from sidestep.backends.known_bad import BOUNDED_LOGITS, NEXT_BACKEND, PADDING_MASK, RuleError, rejections
from sidestep.decisions import Rejected, Untried
from sidestep.problem import AttentionProblem

HERE: dict[str, str | int] = {"cudnn": 91900, "cudnn_frontend": "1.32.0", "compute_capability": "9.0"}


def make(
    queries: int = 200,
    keys: int = 192,
    size: int = 64,
    value_size: int | None = None,
    mask: tuple[int, ...] | None = None,
    device: str = "cuda",
    mask_grad: bool = False,
    mask_dtype: str | None = None,
    batch: int = 2,
    kv_heads: int = 4,
    **changes: Any,
) -> AttentionProblem:
    """A training problem of bfloat16, 4 heads."""
    data = {
        "device": device,
        "dtype": "bfloat16",
        "query": {"shape": (batch, 4, queries, size)},
        "key": {"shape": (batch, kv_heads, keys, size)},
        "value": {"shape": (batch, kv_heads, keys, value_size or size)},
        "training": True,
        **changes,
    }
    if mask is not None:
        data["mask"] = {"shape": mask, "dtype": mask_dtype or data["dtype"], "requires_grad": mask_grad}
    return AttentionProblem.from_json(data)


def form(problem: AttentionProblem, **facts: Any) -> str | None:
    """The remedy in the backward, which is where every shipped rule wants one."""
    forms = known_bad.forms("cudnn", problem, {**HERE, **facts})
    assert set(forms) <= {"backward"}
    return forms.get("backward")


def rejected_by(problem: AttentionProblem, **facts: Any) -> list[str]:
    """The names of the rules."""
    return [reason.partition("(rule ")[2].partition(";")[0] for reason in rejections("cudnn", problem, HERE | facts)]


# --- the shipped rules ---


@pytest.mark.parametrize("keys", [64, 192, 320, 704, 1088, 2112, 4160, 8256])
def test_dq_of_half_a_tile_gets_the_cheaper_remedy(keys: int) -> None:
    assert form(make(keys=keys)) == BOUNDED_LOGITS
    assert form(make(keys=keys, queries=64)) == BOUNDED_LOGITS
    assert form(make(keys=keys, queries=63)) == PADDING_MASK
    assert form(make(keys=keys, kv_heads=2)) == PADDING_MASK
    assert form(make(keys=keys, size=8)) == PADDING_MASK
    assert form(make(keys=keys, dropout_p=0.1)) == PADDING_MASK
    assert form(make(keys=keys, size=72)) == PADDING_MASK
    assert form(make(keys=keys, size=72, value_size=64)) == PADDING_MASK
    assert form(make(keys=keys, value_size=72)) == PADDING_MASK
    for size in (64, 72, 128):
        assert form(make(keys=keys, size=size, dtype="float16", mask=(2, 1, 1, keys))) == BOUNDED_LOGITS
        assert form(make(keys=keys, size=size, mask=(2, 4, 200, keys), mask_grad=True)) == PADDING_MASK
    assert form(make(keys=keys, training=False)) is None, "the forward is right"
    assert form(make(keys=keys, is_causal=True)) is None, "causal was right, and would be 7 to 10 % slower"
    assert rejected_by(make(keys=keys)) == []


@pytest.mark.parametrize("keys", [1, 32, 63, 65, 96, 127, 128, 129, 191, 193, 256, 640, 703, 705])
def test_other_key_lengths_are_left_alone(keys: int) -> None:
    assert form(make(keys=keys)) is None
    assert form(make(keys=keys, queries=2)) is None
    assert form(make(keys=keys, mask=(2, 1, 1, keys))) is None


@pytest.mark.parametrize("keys", [64, 128, 256, 1024])
def test_one_query_over_multiples_of_64_gets_a_remedy(keys: int) -> None:
    half_tile = PADDING_MASK if keys == 64 else None
    assert form(make(queries=1, keys=keys, batch=1)) == PADDING_MASK
    assert form(make(queries=1, keys=keys, batch=1, size=72)) == PADDING_MASK
    assert form(make(queries=1, keys=keys, batch=2)) == half_tile, "right with every other batch"
    assert form(make(queries=2, keys=keys, batch=1)) == half_tile
    assert form(make(queries=1, keys=keys + 1, batch=1)) is None
    assert form(make(queries=1, keys=keys, batch=1, training=False)) is None
    assert form(make(queries=1, keys=keys, batch=1, is_causal=True)) is None


def test_remedies_are_for_the_architecture_and_versions_that_need_them() -> None:
    for problem, remedy in ((make(), BOUNDED_LOGITS), (make(size=128), PADDING_MASK)):
        assert form(problem, cudnn=92600) == remedy, "reported with 9.26"
        assert form(problem, compute_capability="10.0") is None
        assert form(problem, compute_capability="8.0") is None
        assert form(problem, cudnn=89999) is None
        assert known_bad.forms("cudnn", problem, {}) == {"backward": remedy}, "what cannot be read lies in every range"
        assert known_bad.forms("torch_flash", problem, HERE) == {}


@pytest.mark.parametrize(
    ("problem", "rules"),
    [
        (make(dtype="float32", size=128, training=False), []),
        (make(dtype="float32", size=320, value_size=128), []),
        (make(dtype="float32", size=128, value_size=136), ["cudnn-float32-value-head-size"]),
        (make(dtype="bfloat16", size=256), []),
        (make(dtype="float32", mask=(1, 1, 200, 192), training=False), ["cudnn-float32-bias"]),
        (make(dtype="float16", mask=(1, 1, 200, 192)), []),
        (make(mask=(2, 4, 1, 192), mask_grad=True), ["cudnn-mask-gradient-one-row"]),
        (make(mask=(2, 4, 1, 192)), []),
        (make(mask=(1, 1, 200, 192), mask_grad=True), []),
        (make(mask=(2, 4, 1, 192), mask_grad=True, queries=1), []),
        (make(mask=(2, 4, 200, 1), mask_grad=True), ["cudnn-mask-gradient-one-column", "cudnn-mask-one-column"]),
        (make(mask=(2, 4, 200, 1)), ["cudnn-mask-one-column"]),
        (make(mask=(2, 4, 200, 1), training=False), []),
        (make(mask=(2, 4, 200, 1), keys=1), []),
        (make(mask=(2, 4, 200, 1), mask_grad=True, keys=1), []),
        (make(mask=(2, 4, 1, 1), queries=1), ["cudnn-mask-one-column", "cudnn-one-query-mask-one-column"]),
        (make(mask=(2, 4, 1, 1), queries=1, training=False), ["cudnn-one-query-mask-one-column"]),
        (make(mask=(2, 4, 1, 1), queries=2, training=False), []),
        (make(dtype="float32", queries=1, kv_heads=2, training=False), ["cudnn-float32-one-query-grouped"]),
        (make(dtype="float32", queries=1, training=False), []),
        (make(dtype="float32", queries=2, kv_heads=2, training=False), []),
        (make(queries=1, kv_heads=2, training=False), []),
    ],
    ids=str,
)
def test_borders_of_rules_that_leave_cudnn_out(problem: AttentionProblem, rules: list[str]) -> None:
    assert rejected_by(problem) == rules
    assert rejected_by(problem, cudnn=99999, compute_capability="10.0") == rules


def test_every_shipped_rule_has_a_name_of_its_own_and_a_known_backend() -> None:
    rules = known_bad.load(known_bad.SHIPPED)
    assert len({rule.name for rule in rules}) == len(rules) > 0
    assert {rule.backend for rule in rules} <= set(registry.known())


def test_a_rejection_says_what_is_wrong_and_where_to_read_about_it() -> None:
    target = Target(0, load_profile("h200"))
    (decision,) = selection.explain(make(dtype="float32", size=160), ("cudnn",), target)
    assert isinstance(decision, Rejected)
    assert str(decision.reasons[0]) == (
        "float32 with a value's head size over 128: the columns of the output from the 129th on are never written "
        "(rule cudnn-float32-value-head-size; docs/gpu-notes.md, 5)"
    )
    (decision,) = selection.explain(make(), ("cudnn",), target)
    assert isinstance(decision, Untried), "a remedied graph is cuDNN's own"


# --- a user's file ---

RULE = {
    "name": "mine",
    "backend": "torch_flash",
    "effect": "numbers I do not like",
    "remedy": "next_backend",
    "report": "https://example.com/1",
    "reproduced": "here",
}


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value)


def rule_file(folder: Path, **changes: Any) -> Path:
    """RULE with some of its fields changed (None: left out)."""
    path = folder / "rules.toml"
    fields = {name: value for name, value in (RULE | changes).items() if value is not None}
    path.write_text("[[rule]]\n" + "".join(f"{name} = {toml(value)}\n" for name, value in fields.items()))
    return path


def test_a_users_rule_sends_a_call_to_the_next_backend(tmp_path: Path, counters: Counters) -> None:
    query = torch.randn(1, 2, 5, 8)
    order = ("torch_flash", "torch_math")

    def served() -> str:
        with sidestep.observe() as seen:
            output = sidestep.scaled_dot_product_attention(query, query, query, backends=order)
        assert_close(output, attention(query, query, query), "output")
        return str(seen[0][1][-1].backend)

    assert served() == "torch_flash"
    sidestep.configure(rules=rule_file(tmp_path, when={"query_length": {"min": 5, "max": 5}}))
    assert served() == "torch_math", "routes and plans of before are forgotten"
    assert counters.build_failures == 0
    sidestep.configure(rules=rule_file(tmp_path, when={"query_length": {"over": 5}}))
    assert served() == "torch_flash"
    sidestep.configure(rules=None)
    assert known_bad.rules("torch_flash") == ()


def test_the_variable_reaches_a_command(tmp_path: Path) -> None:
    path = rule_file(tmp_path, backend="cudnn", when={"head_size": 64})
    shape = ["--batch", "1", "--heads", "2", "--query-length", "128", "--head-size", "64", "--backends", "cudnn"]
    command = [sys.executable, "-m", "sidestep", "explain", *shape, "--device", "h200"]
    env = {**os.environ, "SIDESTEP_RULES": str(path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert "numbers I do not like (rule mine; https://example.com/1)" in done.stdout
    path.write_text("[[rule]]\n")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 2
    assert "SIDESTEP_RULES=" in done.stderr
    assert "rule 1: name: expected a text" in done.stderr


@pytest.mark.parametrize(
    ("test", "here", "there"),
    [
        ({"when": {"dtype": ["float16", "bfloat16"]}}, {}, {"dtype": "float32"}),
        ({"when": {"key_length": {"mod": 64, "is": 0}}}, {}, {"keys": 191}),
        ({"when": {"mask": False}}, {}, {"mask": (1, 1, 200, 192)}),
        ({"when": {"mask_dtype": "bfloat16"}}, {"mask": (1, 1, 200, 192)}, {}),
        ({"when": {"mask_broadcasts_keys": True}}, {"mask": (1, 1, 200, 1)}, {"mask": (1, 1, 200, 192)}),
        ({"when": {"mask_broadcasts_batch": False, "mask": True}}, {"mask": (2, 1, 1, 192)}, {"mask": (1, 1, 1, 192)}),
        ({"when": {"mask_broadcasts_heads": True}}, {"mask": (1, 1, 200, 1)}, {"mask": (1, 4, 200, 192)}),
        ({"when": {"dropout": True}}, {"dropout_p": 0.1}, {}),
        ({"direction": "backward"}, {}, {"training": False}),
        ({"architecture": {"min": "8.0", "max": "9.0"}}, {}, {"device": "cpu"}),
    ],
)
def test_each_kind_of_condition(
    tmp_path: Path, test: dict[str, Any], here: dict[str, Any], there: dict[str, Any]
) -> None:
    sidestep.configure(rules=rule_file(tmp_path, **test))
    assert rejections("torch_flash", make(**here), HERE) != ()
    assert rejections("torch_flash", make(**there), HERE) == ()


@pytest.mark.parametrize(
    ("versions", "applies"),
    [
        ({"torch": "2.11.0"}, True),
        ({"torch": {"min": "2.9", "max": "2.11.0"}}, True),
        ({"torch": {"max": "2.10.1"}}, False),
        ({"torch": {"over": "2.11.0"}}, False),
        ({"cudnn": {"min": 91900, "max": 91900}}, True),
        ({"cudnn": {"over": 91900}}, False),
        ({"cudnn": [91800, 91900]}, True),
        ({"torch": "2.11"}, True),
        ({"torch": {"max": "2.11"}}, True),
        ({"torch": {"over": "2.11"}}, False),
        ({"torch": {"max": 21000}}, True),  # 2.11.0 and 21000 cannot be compared
        ({"cudnn": {"max": "9.19.0"}}, True),
        ({"driver": {"max": "580"}}, True),
    ],
)
def test_versions_are_compared_as_numbers(tmp_path: Path, versions: dict[str, Any], applies: bool) -> None:
    sidestep.configure(rules=rule_file(tmp_path, versions=versions))
    assert bool(rejections("torch_flash", make(), {"torch": "2.11.0+cu130", "cudnn": 91900, "driver": "?"})) == applies


def test_a_rule_about_a_group_is_about_each_of_it(tmp_path: Path) -> None:
    sidestep.configure(rules=rule_file(tmp_path, backend="torch"))
    assert [name for name in registry.known() if rejections(name, make(), HERE)] == [
        "torch_flash",
        "torch_efficient",
        "torch_math",
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"effect": None}, "rule 'mine': effect: expected a text, got None"),
        ({"name": 3}, "rule 1: name: expected a text, got 3"),
        ({"wehn": {}}, "rule 'mine': unknown field 'wehn'; known: name, backend"),
        ({"direction": "both"}, "rule 'mine': direction: expected 'forward' or 'backward', got 'both'"),
        ({"remedy": "prayer"}, "rule 'mine': unknown remedy 'prayer'; known: next_backend, padding_mask, "),
        ({"remedy": "padding_mask"}, "rule 'mine': remedy 'padding_mask' is one of cudnn, not of 'torch_flash'"),
        ({"backend": "cudnn", "remedy": "bounded_logits"}, "remedy 'bounded_logits': expected direction 'backward'"),
        ({"backend": "cudnn", "remedy": "bounded_logits", "direction": "forward"}, "expected direction 'backward'"),
        ({"when": {"length": 3}}, "rule 'mine': when: unknown condition 'length'; known: dtype, "),
        ({"when": {"causal": 0}}, "rule 'mine': when.causal: expected true or false, got 0"),
        ({"when": {"key_length": True}}, "rule 'mine': when.key_length: expected a whole number, got True"),
        ({"when": {"key_length": {"above": 3}}}, "rule 'mine': when.key_length: unknown operator 'above'; known: min"),
        ({"when": {"key_length": {"mod": 3}}}, "when.key_length: expected at least one operator, 'mod' (not 0) and"),
        ({"when": {"key_length": {"mod": 0, "is": 0}}}, "when.key_length: expected at least one operator"),
        ({"when": {"key_length": {}}}, "when.key_length: expected at least one operator"),
        ({"when": {"dtype": {"min": "a"}}}, "rule 'mine': when.dtype: unknown operator 'min'; known: "),
        ({"when": 1}, "rule 'mine': when: expected a table, got 1"),
        ({"versions": {"torch": 2.11}}, "rule 'mine': versions.torch: expected a text, got 2.11"),
        ({"versions": {"cudnn": {"min": 1, "max": "2"}}}, "versions.cudnn: expected a whole number, got '2'"),
        ({"architecture": 9}, "rule 'mine': architecture: expected a text, got 9"),
        ({"architecture": "Hopper"}, "rule 'mine': architecture: expected a version, as '2.11.0', got 'Hopper'"),
        ({"versions": {"torch": "newest"}}, "versions.torch: expected a version, as '2.11.0', got 'newest'"),
        ({"backend": "cudn"}, "rule 'mine': backend: unknown backend 'cudn'; known: cudnn, "),
        ({"when": {"dtype": "half"}}, "when.dtype: expected one of float16, bfloat16, float32, float64, got 'half'"),
        ({"when": {"batch": []}}, "when.batch: never holds, so the rule would never apply: []"),
        ({"when": {"batch": {"mod": 4, "is": 4}}}, "when.batch: never holds"),
        ({"when": {"batch": {"mod": -4, "is": 1}}}, "when.batch: never holds"),
        ({"when": {"batch": {"min": 4, "max": 3}}}, "when.batch: never holds"),
        ({"when": {"batch": {"over": 3, "max": 3}}}, "when.batch: never holds"),
        ({"versions": {"torch": {"min": "2.10", "max": "2.9"}}}, "versions.torch: never holds"),
        ({"architecture": []}, "architecture: never holds"),
    ],
)
def test_what_no_rule_can_say(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = rule_file(tmp_path, **changes)
    with pytest.raises(sidestep.SettingError) as caught:
        sidestep.configure(rules=path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "rules cannot be read"),
        ("[[rule", "rules cannot be read"),
        ("rule = 3", "expected a list of [[rule]] and nothing else, found rule"),
        ("[[rules]]", "expected a list of [[rule]] and nothing else, found rules"),
        ("rule = [3]", "rule 1: expected a table, got 3"),
        ("x = " + "[" * 100_000, "rules cannot be read"),
    ],
)
def test_what_is_no_file_of_rules(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "rules.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RuleError) as caught:
        known_bad.load(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


# --- what is kept ---


def test_rules_that_change_a_graph_are_part_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(0, load_profile("h200"))

    def manifests() -> list[Any]:
        return [environment.manifest(registry.get(name), "cuda", target) for name in ("cudnn", "torch_math")]

    before = manifests()
    assert "remedies" in before[0]
    assert "remedies" not in before[1]
    mine = {"backend": "cudnn", "when": {"key_length": 100}}
    monkeypatch.setenv("SIDESTEP_RULES", str(rule_file(tmp_path, **mine, remedy="padding_mask")))
    reload_settings()
    changed = manifests()
    assert changed[0].pop("remedies") != before[0]["remedies"]
    assert changed[0] == {name: value for name, value in before[0].items() if name != "remedies"}
    assert changed[1] == before[1]
    both = {"forward": PADDING_MASK, "backward": PADDING_MASK}
    assert known_bad.forms("cudnn", make(keys=100), HERE) == both, "the rule names no direction"
    sidestep.configure(rules=rule_file(tmp_path, **mine, remedy=NEXT_BACKEND))
    assert manifests() == before, "a rule that leaves a backend out changes no graph"
    assert rejected_by(make(keys=100)) == ["mine"]


# --- the remedy ---

BUILD = """
import json, sys
from sidestep.backends import cudnn_offline
profile = cudnn_offline.activate("h200")
from sidestep.backends import cudnn_graph
from sidestep.backends.base import Progress, Target
from sidestep.problem import AttentionProblem
backend, target, build, forms = cudnn_graph.CudnnBackend(), Target(0, profile), cudnn_graph._build, []
def keep(*arguments):
    graph = build(*arguments)
    names = [tensor.get("name") for tensor in json.loads(str(graph))["tensors"]]
    forms.append(arguments[-1])
    assert ("seq_len_q" in names, "seq_len_kv" in names) == (forms[-1] == "padding_mask",) * 2
    return graph
cudnn_graph._build = keep
def build_form(problem, forms):
    try:
        backend.build_form(problem, target, Progress(), forms)
        return None
    except Exception as error:
        return backend.verdict(error)
for line in sys.argv[1:]:
    problem = AttentionProblem.from_json(json.loads(line))
    forms.clear()
    backend.build(problem, target, Progress())
    chosen = forms.copy()
    padded = build_form(problem, {"forward": "padding_mask", "backward": "padding_mask"})
    print(json.dumps([*chosen, padded, build_form(problem, {"backward": "bounded_logits"})]), flush=True)
"""


def test_graphs_with_a_remedy_build_and_rules_choose_them() -> None:
    """Backward and forward as the rules want them; the padding mask builds for all, bounded logits where they can."""
    grouped = {"shape": (2, 1, 192, 64)}
    problems = {
        "needed": (make(), BOUNDED_LOGITS, None),
        "larger heads": (make(size=128), PADDING_MASK, None),
        "one query": (make(queries=1, keys=128, batch=1), PADDING_MASK, None),
        "bias": (make(mask=(2, 1, 1, 192)), BOUNDED_LOGITS, None),
        "bool mask": (make(mask=(2, 1, 200, 192), mask_dtype="bool"), BOUNDED_LOGITS, None),
        "bias of larger heads": (make(mask=(1, 4, 200, 192), size=128), BOUNDED_LOGITS, None),
        "gradient of the bias": (make(mask=(1, 4, 200, 192), mask_grad=True), PADDING_MASK, "unsupported"),
        "dropout": (make(dropout_p=0.1), PADDING_MASK, None),
        "deterministic": (make(deterministic=True), BOUNDED_LOGITS, None),
        "grouped": (make(key=grouped, value=grouped), PADDING_MASK, None),
        "causal": (make(is_causal=True), None, "unsupported"),
        "another length": (make(keys=200), None, None),
    }
    command = [sys.executable, "-c", BUILD, *(json.dumps(problem.to_json()) for problem, *_ in problems.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    found = dict(zip(problems, map(json.loads, done.stdout.splitlines()), strict=True))
    assert found == {name: [chosen, None, None, bounded] for name, (_, chosen, bounded) in problems.items()}
    assert "leaked" not in done.stderr, "graphs that are never freed: what cudnn's bindings say at exit"


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [200, 1])
@pytest.mark.parametrize("mask", [False, True])
def test_the_remedy_on_another_stream_and_in_a_cuda_graph(queries: int, mask: bool) -> None:
    """Strongly negative logits, whose gradients are NaN without it; the lengths are there for whoever reads them."""
    amplitude = (120 / 64**0.5) ** 0.5
    query, key, value = leaves = [
        (sign * amplitude + 0.05 * torch.randn(2, 4, length, 64, device="cuda")).to(torch.bfloat16).requires_grad_()
        for sign, length in ((1, queries), (-1, 192), (0, 192))
    ]
    bias = torch.randn(2, 1, 1, 192, device="cuda").to(torch.bfloat16) if mask else None
    grad = torch.randn(2, 4, queries, 64, device="cuda").to(torch.bfloat16)

    def step() -> tuple[torch.Tensor, ...]:
        output = sidestep.scaled_dot_product_attention(query, key, value, bias, backends="cudnn")
        # Detached, or the autograd graph stays, and with it a stream that a capture must not ask.
        return (output.detach(), *torch.autograd.grad(output, leaves, grad))

    first = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    sidestep.configure(strict=True)  # plans are forgotten; the graph still reads the lengths
    graph.replay()
    torch.cuda.synchronize()
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    output = attention(wide[0], wide[1], wide[2], None if bias is None else bias.double())
    expected = (output, *torch.autograd.grad(output, wide, grad.double()))
    for results in (first, second, captured):
        assert_close(results[0], expected[0], "output")
        for name, result, wanted in zip(("dq", "dk", "dv"), results[1:], expected[1:], strict=True):
            # Keys that are nearly the same cancel in dQ, so rounding is of the size of its parts.
            assert result.isfinite().all(), name
            assert (result.double() - wanted).abs().max() < 0.1 * max(wanted.abs().max().item(), 0.1), name


@pytest.mark.gpu
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("changes", [{"dropout_p": 0.25}, {"deterministic": True}, {"mask": (2, 1, 1, 192)}], ids=str)
def test_the_remedies_agree(changes: dict[str, Any], size: int, negative: bool) -> None:
    """On one forward's residuals, so that dropout is the same; without a remedy the gradient of query is NaN."""
    problem, target, backend = make(size=size, **changes), Target(0), cudnn_graph.CudnnBackend()
    amplitude = (120 / size**0.5) ** 0.5 if negative else 0.0
    query, key, value, grad = (
        (mean * amplitude + (0.05 if mean and negative else 1) * torch.randn(2, 4, length, size, device="cuda")).to(
            torch.bfloat16
        )
        for mean, length in ((1, 200), (-1, 192), (0, 192), (0, 200))
    )
    mask = torch.randn(2, 1, 1, 192, device="cuda").to(torch.bfloat16) if "mask" in changes else None
    plans: dict[str, Any] = {
        remedy: backend.build_form(problem, target, Progress(), {"backward": remedy} if remedy else {})
        for remedy in (PADDING_MASK, BOUNDED_LOGITS, "")
    }
    output, *residuals = plans[""].forward(query, key, value, mask)
    padded, bounded, plain = (
        plan.backward(grad, query, key, value, mask, output, *residuals)[:3] for plan in plans.values()
    )
    assert bool(plain[0].isnan().any()) == negative, "the case is one that needs a remedy"
    for one, other in zip(padded, bounded, strict=True):
        assert one.isfinite().all()
        assert other.isfinite().all()
        assert (one.float() - other.float()).abs().max() <= 0.02 * one.float().abs().max()

"""record_problems: the SPEC of a real run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from process import Counters
from test_warmup import sidestep as command

import sidestep
from sidestep import selection
from sidestep.events import subscribers
from sidestep.problem import AttentionProblem, Layout, Mask
from sidestep.spec import SpecError, dump, load, parse


def recorded(path: Path) -> list[AttentionProblem]:
    return [item.problem for item in load(path).items]


def attend(
    length: int = 8, heads: int = 4, kv_heads: int = 4, transposed: bool = False, **arguments: Any
) -> torch.Tensor:
    """One call on CPU tensors."""

    def make(heads: int) -> torch.Tensor:
        if transposed:
            return torch.randn(2, length, heads, 16).transpose(1, 2)
        return torch.randn(2, heads, length, 16)

    query, key, value = make(heads), make(kv_heads), make(kv_heads)
    query.requires_grad_(arguments.pop("training", False))
    return sidestep.scaled_dot_product_attention(query, key, value, enable_gqa=heads != kv_heads, **arguments)


CALLS: list[Callable[[], torch.Tensor]] = [
    lambda: attend(is_causal=True),
    lambda: attend(transposed=True, training=True),
    lambda: attend(attn_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool)),
    lambda: attend(attn_mask=torch.zeros(8).expand(8, 8)),
    lambda: attend(kv_heads=2, scale=1e-5),
    lambda: attend(dropout_p=0.1),
]


def test_the_problems_of_a_run_come_back_each_once_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    with sidestep.observe() as seen, sidestep.record_problems(path):
        for call in [*CALLS, *CALLS]:
            call()
    assert recorded(path) == [problem for problem, _ in seen]
    assert len(seen) == len(CALLS)
    strides = [problem.query.stride for problem in recorded(path)]
    assert strides[:2] == [(512, 128, 16, 1), (512, 16, 64, 1)]
    assert [problem.training for problem in recorded(path)[:2]] == [False, True]
    assert recorded(path)[4].scale == 1e-5
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.yaml", "sidestep-cache"]


def test_what_was_decided_before_is_recorded_and_not_built_again(tmp_path: Path, counters: Counters) -> None:
    attend(length=9)
    attend(length=10)

    def plans() -> dict[Any, Any]:
        return {key: plan for kept in selection._memory._plans.values() for key, (plan, _) in kept.items()}

    before = plans()
    counters.reset()
    with sidestep.record_problems(tmp_path / "run.yaml"):
        for _ in range(3):
            attend(length=9)
    assert [problem.query.shape[2] for problem in recorded(tmp_path / "run.yaml")] == [9]
    assert (counters.selections, counters.hits, counters.builds) == (1, 2, 0)
    assert plans() == before  # the very same objects
    counters.reset()
    attend(length=9)
    assert (counters.hits, counters.selections) == (1, 0)


def test_the_file_is_written_as_a_whole_at_the_end_after_an_exception_too(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("before")

    def run() -> None:
        with sidestep.record_problems(path):
            attend()
            assert path.read_text() == "before"
            raise KeyError("the run's own")

    with pytest.raises(KeyError, match="the run's own"):
        run()
    assert len(recorded(path)) == 1
    assert subscribers == []


def test_blocks_nest(tmp_path: Path) -> None:
    with sidestep.record_problems(tmp_path / "outer.yaml"):
        attend(length=3)
        attend(length=4)
        with sidestep.record_problems(tmp_path / "inner.yaml"):
            attend(length=4)
            attend(length=5)
        attend(length=6)
    assert [problem.query.shape[2] for problem in recorded(tmp_path / "inner.yaml")] == [4, 5]
    assert [problem.query.shape[2] for problem in recorded(tmp_path / "outer.yaml")] == [3, 4, 5, 6]


def test_every_thread_is_heard(tmp_path: Path) -> None:
    lengths = range(20, 28)
    with sidestep.record_problems(tmp_path / "run.yaml"):
        threads = [threading.Thread(target=attend, args=(length,)) for length in lengths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {problem.query.shape[2] for problem in recorded(tmp_path / "run.yaml")} == set(lengths)


def test_the_folder_may_change_in_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with sidestep.record_problems("run.yaml"):
        monkeypatch.chdir(tmp_path / "elsewhere")
        attend()
    assert len(recorded(tmp_path / "run.yaml")) == 1


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("run.yaml")
    with sidestep.record_problems(tmp_path / "link"):
        attend()
    assert (tmp_path / "link").is_symlink()
    assert len(recorded(tmp_path / "run.yaml")) == 1


@pytest.mark.parametrize("name", ["", "absent/run.yaml", "file/run.yaml", "pipe"])
def test_a_path_that_cannot_be_written_is_told_before_the_block(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")  # as /dev/null, which a rename would make a mere file
    ran = False
    with pytest.raises(OSError, match="give a file in a folder of yours that exists") as caught:
        with sidestep.record_problems(tmp_path / name):
            ran = True
    assert not ran
    assert caught.value.filename == str(tmp_path / name)


def test_a_block_without_a_call_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with sidestep.record_problems(tmp_path / "run.yaml"):
        pass
    assert "no call reached a backend" in caplog.text
    with pytest.raises(SpecError, match="one entry or more"):
        load(tmp_path / "run.yaml")


def test_a_warm_up_reads_a_recorded_spec(tmp_path: Path) -> None:
    layout = Layout((2, 4, 8, 16), (512, 16, 64, 1))
    bias = Mask((1, 1, 8, 8), (1, 1, 0, 1), "bfloat16", True)
    gpu = AttentionProblem("cuda", "bfloat16", layout, layout, layout, bias, scale=0.1 + 0.2, training=True)
    path = tmp_path / "run.yaml"
    with sidestep.record_problems(path):
        attend(is_causal=True)
    path.write_text(dump([gpu, *recorded(path)]))
    run = command("warmup", path, "--device", "h200", "--dry-run", "--json")
    assert run.code == 0, run.stderr
    assert [AttentionProblem.from_json(item["problem"]) for item in run.items] == [gpu]
    assert "1 problems of device cpu skipped" in run.stderr
    here = command("warmup", path, "--dry-run", "--json")
    assert [item["problem"]["device"] for item in here.items] == ["cuda", "cpu"]


def test_numbers_survive_the_text() -> None:
    layout = Layout.of((1, 1, 2, 3))
    for scale in (1e-5, 1e300, 0.1 + 0.2, 3**-0.5, 5e-324):
        problem = AttentionProblem("cuda", "float16", layout, layout, layout, scale=scale)
        (item,) = parse(dump([problem])).items
        assert item.problem == problem

"""The oldest and the newest supported frontend: real builds for an absent H200, with the same verdicts from both.

No GPU and no mock: cuDNN itself decides. The newest frontend is the installed one; the oldest lies in a folder of its
own (`make test` puts it there), which a child process finds first. One child for each frontend does all the builds.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
Frontend = Literal["oldest", "newest"]
both = pytest.mark.parametrize("frontend", ["oldest", "newest"])

# Changes to a problem of shape (2, 4, 128, 64), bfloat16, contiguous, no mask, inference.
PROBLEMS: dict[str, dict[str, Any]] = {
    "inference": {},
    "training": {"training": True},
    "causal, grouped heads": {"training": True, "causal": True, "kv_heads": 2},
    "dropout": {"training": True, "dropout": 0.1},
    "odd lengths, float16 mask": {"training": True, "dtype": "float16", "length": 77, "mask": [2, 1, 1, 77]},
    "(B, S, H, D) in memory": {"training": True, "stride": [32768, 64, 256, 1]},
    "head size 512": {"head_size": 512},
    "float32": {"dtype": "float32"},
    "float32 training": {"training": True, "dtype": "float32"},
    "head size 264 training": {"training": True, "head_size": 264},
    "head size 512 training": {"training": True, "head_size": 512},
    "causal float32 training": {"training": True, "causal": True, "dtype": "float32"},
    "head size 65 training": {"training": True, "head_size": 65},
    "rows of 65": {"stride": [33280, 8320, 65, 1]},
    "gradient of a float32 mask": {
        "training": True,
        "dtype": "float16",
        "mask": [2, 1, 128, 128],
        "mask_dtype": "float32",
        "mask_grad": True,
    },
}
BUILT = {name: 2 if changes.get("training") else 1 for name, changes in list(PROBLEMS.items())[:8]}
# cuDNN's own words for a refusal, alike in both frontends; what stands around them differs.
HEAD_SIZE = "hidden_dim should be less than or equal to 256"
DATA_TYPE = "CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE; Reason: Data type for Q tensor should be half / bf16"
HEAD_SIZE_8 = "hidden_dim should be multiple of 8"
REFUSED = {
    "float32 training": DATA_TYPE,
    "head size 264 training": HEAD_SIZE,
    "head size 512 training": HEAD_SIZE,
    "causal float32 training": DATA_TYPE,
    "head size 65 training": HEAD_SIZE_8,
}
# The oldest finds in `validate` what the newest leaves to its engines.
STAGE = {
    ("oldest", HEAD_SIZE): "validate",
    ("newest", HEAD_SIZE): "create_execution_plans",
    ("oldest", DATA_TYPE): "create_execution_plans",
    ("newest", DATA_TYPE): "create_execution_plans",
    ("oldest", HEAD_SIZE_8): "validate",
    ("newest", HEAD_SIZE_8): "validate",
}
BY_RULE = {"rows of 65": "not multiples of 16 bytes", "gradient of a float32 mask": "a float32 mask over float16"}

# A child: the problems as JSON on stdin, what became of them as JSON on the last line of stdout.
CHILD = """
import ctypes, json, sys, tempfile
from pathlib import Path
from sidestep.backends import cudnn_offline

MODE = sys.argv[1]
if MODE.endswith("NVRTC"):
    class Hiding(ctypes.CDLL):  # torch loads every library of its wheels when it is imported; not these
        def __init__(self, name=None, *rest, **more):
            if "nvrtc" in str(name):
                raise OSError(f"hidden: {name}")
            super().__init__(name, *rest, **more)
    ctypes.CDLL = Hiding
    import torch
    import cudnn
    with tempfile.TemporaryDirectory() as folder:
        ctypes.CDLL(str(cudnn_offline.build_stand_in_driver(Path(folder))), mode=ctypes.RTLD_GLOBAL)
profile = cudnn_offline.activate("h200") if MODE == "builds" else cudnn_offline.load_profile("h200")

import cudnn
import sidestep
from sidestep import failures, selection, stores
from sidestep.backends import registry
from sidestep.backends.base import Target
from sidestep.problem import AttentionProblem, Layout, Mask, default_scale

def problem(dtype="bfloat16", length=128, head_size=64, kv_heads=4, causal=False, training=False, dropout=0.0,
            stride=None, mask=None, mask_dtype=None, mask_grad=False):
    query = Layout.of((2, 4, length, head_size), stride)
    key = Layout.of((2, kv_heads, length, head_size), stride)
    if mask:
        mask = Mask(tuple(mask), Layout.of(mask).stride, mask_dtype or dtype, mask_grad)
    return AttentionProblem("cuda", dtype, query, key, key, mask, causal, dropout, default_scale(head_size), training)

def ask(changes):
    asked, before = problem(**changes), sidestep.stats()
    selected = selection.select(asked, ("cudnn",), Target(0, profile), strict=False)
    decision = selected.decisions[-1]
    result = {"decision": type(decision).__name__, "kind": getattr(decision, "kind", None),
              "reasons": getattr(decision, "reasons", None), "text": str(selected.cause), "settled": selected.settled}
    for record in failures.records():
        if AttentionProblem.from_json(record.problem) == asked:
            result["record"] = {"kind": record.kind, "direction": record.direction, "stage": record.stage,
                                "type": record.exception_type, "text": record.exception_text,
                                "traceback": record.traceback, "built_on": record.built_on,
                                "environment": record.environment}
    result["grown"] = {name: value - before[name] for name, value in sidestep.stats().items() if value != before[name]}
    return result

problems = json.load(sys.stdin)
first = {name: ask(changes) for name, changes in problems.items()}
stats = sidestep.stats()
selection.forget_plans()
stores.reset()
again = {name: ask(changes) for name, changes in problems.items()}
print(json.dumps({"version": cudnn.__version__, "file": cudnn.__file__, "first": first, "again": again, "stats": stats,
                  "nvrtc": [path.name for path in cudnn_offline._loaded_files("libnvrtc")]}))
"""


def folder_of(frontend: Frontend) -> Path | None:
    """Where the oldest frontend lies; None for the newest, which is installed."""
    if frontend == "newest":
        return None
    wanted = re.search(r"^OLDEST_FRONTEND \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert wanted is not None
    folder = Path(os.environ.get("OLDEST_FRONTEND_FOLDER") or ROOT / ".frontends" / wanted[1])
    if not (folder / "cudnn").is_dir():
        pytest.fail(
            f"the oldest supported frontend is not in {folder}. `make test` and `make install-dev` put it there; "
            f"by hand: pip install --no-deps --target {folder} nvidia-cudnn-frontend=={wanted[1]}",
            pytrace=False,
        )
    return folder


def child(
    frontend: Frontend, mode: str, names: tuple[str, ...], libraries: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Ask one child about the named problems, with an empty failure cache and `libraries` searched first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SIDESTEP_", "PYTHON", "LD_"))}
    folder = folder_of(frontend)
    with tempfile.TemporaryDirectory() as cache:
        env = {**kept, "SIDESTEP_CACHE_DIR": cache}
        if folder is not None:
            env["PYTHONPATH"] = str(folder)
        if libraries is not None:
            env["LD_LIBRARY_PATH"] = str(libraries)
        return subprocess.run(
            [sys.executable, "-c", CHILD, mode],
            input=json.dumps({name: PROBLEMS[name] for name in names}),
            env=env,
            cwd=cache,
            capture_output=True,
            text=True,
            timeout=1200,
        )


def found(frontend: Frontend, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a child found, with the frontend that was meant."""
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    folder = folder_of(frontend)
    assert folder is None or Path(result["file"]).is_relative_to(folder)
    return result


@functools.cache
def building_child(frontend: Frontend) -> subprocess.CompletedProcess[str]:
    """The child that builds; it runs once for all tests, even where it fails."""
    return child(frontend, "builds", tuple(PROBLEMS))


def builds(frontend: Frontend) -> dict[str, Any]:
    """What the child found that builds."""
    return found(frontend, building_child(frontend))


def test_versions() -> None:
    """Two frontends, and the oldest is the lower bound of pyproject.toml."""
    versions = {frontend: builds(frontend)["version"] for frontend in ("oldest", "newest")}
    assert f'"nvidia-cudnn-frontend>={versions["oldest"].removesuffix(".0")}"' in (ROOT / "pyproject.toml").read_text()
    assert versions["oldest"] != versions["newest"]


def test_every_problem_has_an_expected_outcome() -> None:
    assert [*BUILT, *REFUSED, *BY_RULE] == list(PROBLEMS)


@both
@pytest.mark.parametrize("name", BUILT)
def test_builds(frontend: Frontend, name: str) -> None:
    result = builds(frontend)["first"][name]
    assert result["decision"] == "Chosen", result["text"]
    assert "record" not in result
    assert result["grown"] == {"selections": 1, "builds": BUILT[name]}


@both
@pytest.mark.parametrize("name", BUILT)
def test_what_was_built_is_loaded(frontend: Frontend, name: str) -> None:
    """By the frontend itself: it reads the serialized graphs for the absent device."""
    assert builds(frontend)["again"][name]["grown"] == {"selections": 1, "loads": 1}


@both
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_recorded(frontend: Frontend, name: str) -> None:
    """The backward is built first: where it is refused, no forward is built."""
    result = builds(frontend)["first"][name]
    assert (result["decision"], result["kind"], result["settled"]) == ("Failed", "unsupported", True)
    assert result["grown"] == {"selections": 1, "builds": 1, "build_failures": 1}
    record = result["record"]
    assert (record["kind"], record["direction"], record["built_on"]) == ("unsupported", "backward", "offline")
    assert record["type"].endswith(".cudnnGraphNotSupportedError")
    assert record["stage"] == STAGE[frontend, REFUSED[name]]
    assert REFUSED[name] in record["text"]
    assert record["text"] in record["traceback"]
    assert "cudnn_graph.py" in record["traceback"]
    assert record["environment"]["cudnn_frontend"] == builds(frontend)["version"]
    assert record["environment"]["device"] == "NVIDIA H200"


@both
@pytest.mark.parametrize("name", BY_RULE)
def test_rules_build_nothing_and_record_nothing(frontend: Frontend, name: str) -> None:
    result = builds(frontend)["first"][name]
    assert result["decision"] == "Rejected"
    assert BY_RULE[name] in "; ".join(result["reasons"])
    assert "record" not in result
    assert result["grown"] == {"selections": 1}


@both
def test_what_was_refused_is_not_built_again(frontend: Frontend) -> None:
    again = builds(frontend)["again"]
    assert set(again) == set(PROBLEMS)
    for name in REFUSED:
        assert again[name]["decision"] == "Remembered"
        assert again[name]["grown"] == {"selections": 1, "skipped_known_bad": 1}
    for name in BY_RULE:
        assert again[name]["grown"] == {"selections": 1}


def test_both_frontends_agree() -> None:
    def verdicts(frontend: Frontend) -> dict[str, Any]:
        return {
            name: (result["decision"], result["kind"], result["reasons"], result.get("record", {}).get("direction"))
            for name, result in builds(frontend)["first"].items()
        }

    assert verdicts("oldest") == verdicts("newest")
    assert builds("oldest")["stats"] == builds("newest")["stats"]
    graphs = sum(BUILT.values()) + len(REFUSED)
    expected = {"selections": len(PROBLEMS), "builds": graphs, "build_failures": len(REFUSED), "skipped_known_bad": 0}
    assert expected.items() <= builds("newest")["stats"].items()


# What cuDNN says where the machine is lacking; the class is the one that means "unsupported".
LACKING = {
    "no driver": ("CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING", "this->libcuda == nullptr"),
    "no NVRTC": ("CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING", "Could not open libnvrtc"),
    "broken NVRTC": ("CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED", "NVRTC_SUCCESS"),
}


@both
@pytest.mark.parametrize("mode", LACKING)
def test_a_lacking_machine_is_not_a_refusal(frontend: Frontend, mode: str, tmp_path: Path) -> None:
    """No record, whatever the machine lacks; what the frontend itself refuses before it needs the machine has one.

    A file that is no library, where the loader looks first, hides the real one, so that this is seen with a GPU too.
    NVRTC is broken where it cannot load its builtins.
    """
    pattern = {"no driver": None, "no NVRTC": "libnvrtc.so.*", "broken NVRTC": "libnvrtc-builtins.so.*"}[mode]
    wheels = Path(torch.__file__).parent.parent / "nvidia"
    hidden = [path.name for path in wheels.glob(f"*/lib/{pattern}")] if pattern else ["libcuda.so.1"]
    assert hidden
    for name in hidden:
        (tmp_path / name).touch()
    # Refused by the frontend alone, and, where NVRTC loads, by cuDNN before it compiles: a broken one changes neither.
    refused = ["head size 264 training"] + (["float32 training"] if mode == "broken NVRTC" else [])
    lacking = ["inference", "training"] + ([] if mode == "broken NVRTC" else ["float32 training"])
    result = found(frontend, child(frontend, mode, (*lacking, *refused), tmp_path))
    for name in lacking:
        first, again = result["first"][name], result["again"][name]
        for words in LACKING[mode]:
            assert words in first["text"]
        for asked in (first, again):
            assert (asked["decision"], asked["kind"], asked["settled"]) == ("Failed", "transient", False), asked
            assert "record" not in asked
            assert asked["grown"] == {"selections": 1, "builds": 1, "build_failures": 1}
    for name in refused:
        assert result["first"][name]["record"]["kind"] == "unsupported"
        assert REFUSED[name] in result["first"][name]["record"]["text"]
        assert result["again"][name]["decision"] == "Remembered"

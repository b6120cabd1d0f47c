"""Graphs for a GPU that is not here: real builds and real refusals, each in a process of its own.

No GPU and no mock: cuDNN itself decides.  The child scripts are what a warm-up's children do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sidestep.backends import cudnn_offline
from sidestep.backends.cudnn_offline import OfflineError, check_version, load_profile

# The end of every child script: its result as JSON on the last line of stdout.
PRELUDE = """
import ctypes, json, sys, tempfile
from pathlib import Path
from sidestep.backends import cudnn_offline
from sidestep.backends.cudnn_offline import OfflineError, activate, build_stand_in_driver, load_profile

def attention(profile, direction, head_size):
    '''Build bf16 causal attention of shape (2, 4, 128, head_size); return its bytes, or cuDNN's refusal.'''
    import cudnn
    bf16, fp32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=bf16, intermediate_data_type=fp32, compute_data_type=fp32,
        device_property=profile.device_property(), sm_version=profile.sm_version, sm_count=profile.sm_count,
    )
    dim, stride = [2, 4, 128, head_size], [512 * head_size, 128 * head_size, head_size, 1]
    def tensor(name):
        return graph.tensor(name=name, dim=dim, stride=stride, data_type=bf16)
    causal = dict(diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT, diagonal_band_right_bound=0)
    query, key, value = tensor("query"), tensor("key"), tensor("value")
    try:
        if direction == "forward":
            out, stats = graph.sdpa(q=query, k=key, v=value, attn_scale=0.125, generate_stats=True, **causal)
            stats.set_output(True).set_data_type(fp32)
            outputs = [out]
        else:
            stats = graph.tensor(name="stats", dim=[2, 4, 128, 1], stride=[512, 128, 1, 1], data_type=fp32)
            outputs = graph.sdpa_backward(
                q=query, k=key, v=value, o=tensor("out"), dO=tensor("d_out"), stats=stats, attn_scale=0.125, **causal
            )
        for output in outputs:
            output.set_output(True).set_dim(dim).set_stride(stride).set_data_type(bf16)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError as error:
        return {"refused": str(error)}
    return {"bytes": len(bytes(graph.serialize()))}

def offline_error(function, *arguments):
    try:
        function(*arguments)
    except OfflineError as error:
        return str(error)
    return None

def report(**result):
    print(json.dumps(result))
"""


def child(script: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run `script` after the prelude in a new Python; return what it reports."""
    clean = {name: value for name, value in os.environ.items() if name not in ("CC", "LD_LIBRARY_PATH", "LD_PRELOAD")}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def write_profile(path: Path, **changes: Any) -> str:
    """Write the shipped profile with some of its keys changed (None: left out)."""
    profile = load_profile("h200")
    content = {"schema": 1, "name": "h200", "cudnn": profile.cudnn, "properties": profile.properties, **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return str(path)


def test_profile_of_the_h200() -> None:
    profile = load_profile("h200")
    assert (profile.name, profile.cudnn) == ("h200", 91900)
    assert (profile.sm_version, profile.sm_count) == (90, 132)
    assert (profile.device_name, profile.driver_version, profile.l2_bytes) == ("NVIDIA H200", 13000, 60 * 2**20)


def test_profile_from_a_path(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "mine.json", name="mine")
    assert load_profile(path).name == "mine"
    assert load_profile(path).properties == load_profile("h200").properties


def test_profile_of_the_loaded_cudnn_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = int(cudnn_offline._import_cudnn().backend_version())
    for version in (loaded - 100, loaded, loaded + 100):
        write_profile(tmp_path / f"h200_{version}.json", cudnn=version)
    monkeypatch.setattr(cudnn_offline, "PROFILE_FOLDER", tmp_path)
    assert load_profile("h200").cudnn == loaded
    (tmp_path / f"h200_{loaded}.json").unlink()
    assert load_profile("h200").cudnn == loaded + 100


def test_unknown_profile_lists_the_shipped_ones() -> None:
    with pytest.raises(OfflineError, match=r"'b300'.*\(h200\).*sidestep device-profile"):
        load_profile("b300")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[]", "found 'list'"),
        (b"{}", "found None"),
        (b'{"schema": 2}', "found 2"),
        (b'{"schema": 1, "name": "x", "cudnn": true}', "cudnn, properties missing or of a wrong type"),
        (b'{"schema": 1, "name": "x", "cudnn": 91900, "properties": {"deviceVer": "900"}}', "properties.deviceVer, "),
    ],
)
def test_damaged_profile(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(OfflineError, match=says) as caught:
        load_profile(str(path))
    assert f"sidestep device-profile {path}" in str(caught.value)


def test_version_check_names_both_versions_and_the_remedy() -> None:
    profile = load_profile("h200")
    check_version(profile, 91900)
    with pytest.raises(OfflineError, match=r"91900.*92800.*sidestep device-profile FILE.*install cuDNN 91900"):
        check_version(profile, 92800)


def test_forward_builds_and_torch_is_not_needed() -> None:
    result = child("""
profile = activate("h200")
first = attention(profile, "forward", 64)
report(first=first, torch="torch" in sys.modules, folder=[str(p) for p in cudnn_offline._loaded_files("libcuda.so")],
       left=[p for p in map(str, cudnn_offline._loaded_files("libcuda.so")) if Path(p).parent.exists()])
""")
    assert result["first"].get("bytes", 0) > 50_000, result  # 78 kB with 9.19: the kernels are inside
    assert result["torch"] is False
    assert len(result["folder"]) == 1
    assert result["left"] == []


def test_head_size_264_builds_forward_and_is_refused_backward() -> None:
    result = child("""
profile = activate("h200")
report(forward=attention(profile, "forward", 264), backward=attention(profile, "backward", 264),
       usual=attention(profile, "backward", 64))
""")
    assert result["forward"].get("bytes", 0) > 50_000, result
    assert "hidden_dim should be less than or equal to 256" in result["backward"]["refused"]
    assert result["usual"].get("bytes", 0) > 50_000, result


def test_without_the_stand_in_the_refusal_is_of_the_same_class() -> None:
    """Why `activate` exists: the class alone says "unsupported", and only a status name in the text tells."""
    result = child("""
if Path("/dev/nvidiactl").exists():
    report(skipped=True)
else:
    report(**attention(load_profile("h200"), "forward", 64))
""")
    if result.get("skipped"):
        pytest.skip("there is a driver here")
    assert "CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING" in result["refused"]


def test_without_nvrtc_the_refusal_is_of_the_same_class() -> None:
    """NVRTC without its builtins, which is what a process gets that imported neither torch nor called `activate`."""
    result = child("""
with tempfile.TemporaryDirectory() as folder:
    ctypes.CDLL(str(build_stand_in_driver(Path(folder))), mode=ctypes.RTLD_GLOBAL)
report(**attention(load_profile("h200"), "forward", 64),
       builtins=[str(path) for path in cudnn_offline._loaded_files("libnvrtc-builtins")])
""")
    if result["builtins"]:
        pytest.skip(f"the system's library path has {result['builtins'][0]}")
    assert "CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED" in result["refused"]
    assert "NVRTC" in result["refused"]


def test_missing_nvrtc_is_an_offline_error(tmp_path: Path) -> None:
    # A cuDNN that names an NVRTC which no machine has.
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudnn_graph.so.9").write_bytes(b"\0libnvrtc.so.99\0")
    script = """
real = cudnn_offline._loaded_cudnn_folder()
with tempfile.TemporaryDirectory() as driver:
    ctypes.CDLL(str(build_stand_in_driver(Path(driver))), mode=ctypes.RTLD_GLOBAL)
cudnn_offline._loaded_cudnn_folder = lambda: Path(FOLDER)
missing = offline_error(cudnn_offline.prove_nvrtc, 90)
cudnn_offline._loaded_cudnn_folder = lambda: real
report(missing=missing, too_new=offline_error(cudnn_offline.prove_nvrtc, 999),
       good=offline_error(cudnn_offline.prove_nvrtc, 90))
"""
    result = child(script.replace("FOLDER", repr(str(folder))))
    assert "libnvrtc.so.99" in result["missing"]
    assert "pip install nvidia-cuda-nvrtc" in result["missing"]
    assert "cannot compile for sm_999: NVRTC_ERROR_INVALID_OPTION" in result["too_new"]
    assert result["good"] is None


def test_profile_of_another_version_is_refused(tmp_path: Path) -> None:
    path = write_profile(tmp_path / "h200_9.28.json", cudnn=92800)
    result = child(f"report(error=offline_error(activate, {path!r}), loaded=cudnn_offline._loaded_files('libcuda.so'))")
    assert "is for cuDNN 92800" in result["error"]
    assert result["loaded"] == []


def test_profile_that_cudnn_does_not_accept(tmp_path: Path) -> None:
    properties = dict(load_profile("h200").properties)
    del properties["warpSize"]
    path = write_profile(tmp_path / "damaged.json", properties=properties)
    result = child(f"report(error=offline_error(activate, {path!r}))")
    assert "does not accept the properties of device profile 'h200'" in result["error"]
    assert "CUDNN_STATUS_BAD_PARAM" in result["error"]


def test_no_compiler(tmp_path: Path) -> None:
    script = "report(error=offline_error(activate, 'h200'))"
    assert "there is no cc, gcc or clang" in child(script, {"PATH": str(tmp_path)})["error"]
    named = child(script, {"CC": str(tmp_path / "cc"), "PATH": str(tmp_path)})["error"]
    assert f"CC={tmp_path / 'cc'} is not there" in named
    failing = tmp_path / "failing-cc"
    failing.write_text("#!/bin/sh\necho no such thing >&2\nexit 3\n")
    failing.chmod(0o755)
    error = child(script, {"CC": f"{failing} -m64"})["error"]
    assert "no such thing" in error
    assert f"{failing} -m64" in error


def test_a_driver_in_the_process_is_refused() -> None:
    result = child("""
with tempfile.TemporaryDirectory() as folder:
    ctypes.CDLL(str(build_stand_in_driver(Path(folder))))
report(error=offline_error(activate, "h200"))
""")
    assert "already loaded in this process" in result["error"]
    assert "libcuda.so.1" in result["error"]


def test_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for folder in (shared, link):
        result = child(f"report(error=offline_error(build_stand_in_driver, Path({str(folder)!r})))")
        assert "nobody else can write to" in result["error"]
        assert list(shared.iterdir()) == []


def test_stand_in_answers_what_a_build_asks_and_nothing_else() -> None:
    result = child("""
with tempfile.TemporaryDirectory() as folder:
    driver = ctypes.CDLL(str(build_stand_in_driver(Path(folder), driver_version=12080)))
number, text, handle = ctypes.c_int(), ctypes.c_char_p(), ctypes.c_void_p()
statuses = [driver.cuInit(0), driver.cuDriverGetVersion(ctypes.byref(number))]
driver.cuGetErrorString(100, ctypes.byref(text))
statuses.append(driver.cuLibraryLoadData(ctypes.byref(handle)))
report(statuses=statuses, version=number.value, text=text.value.decode(), handle=bool(handle.value),
       others=[driver.cuDeviceGetCount(ctypes.byref(number)), driver.cuMemAlloc_v2(None, 8), driver.cuLaunchKernel()])
""")
    assert result["statuses"] == [0, 0, 0]
    assert result["version"] == 12080
    assert "no GPU" in result["text"]
    assert result["handle"] is True
    assert result["others"] == [100, 100, 100]  # CUDA_ERROR_NO_DEVICE

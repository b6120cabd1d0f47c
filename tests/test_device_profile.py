"""`sidestep device-profile`: what is recorded on a GPU is what is shipped for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sidestep.backends import cudnn_offline


def record(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sidestep", "device-profile", str(path), "--name", "here"]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


@pytest.mark.gpu
def test_it_is_the_shipped_one_on_an_h200(tmp_path: Path) -> None:
    import torch

    done = record(tmp_path / "profile.json")
    assert done.returncode == 0, done.stderr
    recorded = cudnn_offline.load_profile(str(tmp_path / "profile.json"))
    assert (recorded.name, recorded.device_name) == ("here", torch.cuda.get_device_properties(0).name)
    shipped = cudnn_offline.load_profile("h200")
    if (recorded.device_name, recorded.cudnn) == (shipped.device_name, shipped.cudnn):
        own = {"pciDeviceId", "totalGlobalMem", "driverVer"}  # of the one machine
        assert recorded.properties.keys() == shipped.properties.keys()
        differing = {name for name, value in shipped.properties.items() if recorded.properties[name] != value}
        assert differing <= own


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.fail("deselect this on a GPU machine: --gpu-only")
    done = record(tmp_path / "profile.json")
    assert done.returncode == 1
    assert "Run this on the machine that has the GPU" in done.stderr
    assert not (tmp_path / "profile.json").exists()

"""What a record is valid for: versions and device on which one backend's verdicts depend.

A backend's manifest holds its own library's versions and not the others', so that a machine without
nvFuser and one with it, or a machine without the GPU and the GPU machine, agree about cuDNN's records.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
from typing import TYPE_CHECKING

from .backends import known_bad
from .events import logger, once

if TYPE_CHECKING:
    from .backends.base import Backend, Target

SCHEMA = 1
Manifest = dict[str, "str | int"]


def manifest(backend: Backend, device: str, target: Target) -> Manifest | None:
    """The environment of one backend on one device; None where a field that should be there cannot be read.

    Without a manifest nothing is kept and nothing is remembered.
    """
    try:
        rules = known_bad.identity(backend.name)
        return {"schema": SCHEMA, **backend.versions(), **rules, **_device_fields(device, target)}
    except (ImportError, OSError, RuntimeError, AttributeError, AssertionError) as error:
        if once(f"manifest {backend.name} {device}"):
            logger.info("%s: environment unreadable, so its failures are not kept: %r", backend.name, error)
        return None


def digest(fields: Manifest) -> str:
    """16 hex digits that name a manifest in keys."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def _device_fields(device: str, target: Target) -> Manifest:
    if device == "cpu":
        return {"device": "cpu"}
    profile = target.profile
    if profile is not None:
        return {
            "device": profile.device_name,
            "compute_capability": f"{profile.sm_version // 10}.{profile.sm_version % 10}",
            "sm_count": profile.sm_count,
            "l2_bytes": profile.l2_bytes,
            "driver": profile.driver_version,
            "cuda_runtime": _cuda_runtime(),
        }
    return dict(_local_gpu(target.index))


@functools.cache
def _local_gpu(index: int) -> tuple[tuple[str, str | int], ...]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    fields: Manifest = {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": _driver_version(),
        "cuda_runtime": _cuda_runtime(),
    }
    return tuple(fields.items())


def _cuda_runtime() -> str:
    import torch

    if torch.version.cuda is None:
        raise RuntimeError("this torch was built without CUDA")
    return torch.version.cuda


def _driver_version() -> int:
    """What cuDriverGetVersion answers; torch and the frontend do not hand it on."""
    version = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    if status != 0:
        raise RuntimeError(f"cuDriverGetVersion failed with status {status}")
    return version.value

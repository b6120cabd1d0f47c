"""cuDNN graphs for a GPU that is not here.

cuDNN plans and compiles a graph from a description of the device; what it
misses on a machine without a GPU is the driver library.  A stand-in for
`libcuda.so.1`, in which the few calls a build makes succeed and every other
one fails, is enough: `activate()` makes it, loads it, and proves that the
run-time compiler works.  The promises:

- A child process only.  Where a driver library is already loaded, real or
  not, `activate()` refuses; after it, nothing in the process can reach a GPU.
- The stand-in is compiled into a fresh folder that only this user can enter,
  loaded, and removed: no native code is ever loaded from a place that
  somebody else can write to.
- After `activate()` a refused build is cuDNN's own verdict.  Without a driver
  or without NVRTC, cuDNN raises the very class that means "unsupported", so
  both are checked beforehand and are an `OfflineError`.

Nothing is loaded at import: neither torch nor cudnn.  torch is never needed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROFILE_FOLDER = Path(__file__).parent / "device_profiles"
PROFILE_SCHEMA = 1

# cuDNN's own names (`create_device_properties(0).serialize()`) of the fields that the package itself reads.
_FIELDS = {"deviceVer": int, "multiProcessorCount": int, "driverVer": int, "l2CacheSize": int, "deviceName": str}

# What a build calls (found by building; cuda.h has the signatures).  Handles must not be null: cuDNN takes null for
# a failure.  16 is the largest cluster of an sm_90 (CUDA C++ Programming Guide, "Thread Block Clusters").
_DRIVER_SOURCE = """\
static int handle;
static int give(void **out) { *out = &handle; return 0; }
static int text(const char **out) { *out = "stand-in driver of sidestep: there is no GPU in this process"; return 0; }
static int zero(int *out) { *out = 0; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *out) { *out = %(driver_version)d; return 0; }
int cuGetErrorString(int code, const char **out) { return text(out); }
int cuGetErrorName(int code, const char **out) { return text(out); }
int cuLibraryLoadData(void **out) { return give(out); }
int cuLibraryGetKernel(void **out) { return give(out); }
int cuLibraryGetModule(void **out) { return give(out); }
int cuLibraryUnload(void *library) { return 0; }
int cuModuleLoadData(void **out) { return give(out); }
int cuModuleLoadDataEx(void **out) { return give(out); }
int cuModuleGetFunction(void **out) { return give(out); }
int cuModuleUnload(void *module) { return 0; }
int cuKernelGetFunction(void **out) { return give(out); }
int cuKernelGetAttribute(int *out) { return zero(out); }
int cuKernelSetAttribute(void) { return 0; }
int cuFuncGetAttribute(int *out) { return zero(out); }
int cuFuncSetAttribute(void) { return 0; }
int cuOccupancyMaxPotentialClusterSize(int *out) { *out = 16; return 0; }
"""
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, cuda.h
_COMPILE_LIMIT_S = 120  # it takes well under a second; a compiler that hangs must not hang a warm-up


class OfflineError(RuntimeError):
    """Graphs for another GPU cannot be built here; the text says why and what to do.

    It is about this machine and says nothing about any attention problem: never keep it as a refusal.
    """


@dataclass(frozen=True)
class DeviceProfile:
    """What cuDNN wants to know of a GPU, recorded on that GPU.

    Attributes:
        name: short name, as `--device` takes it.
        cudnn: version of the cuDNN that wrote the properties (`cudnn.backend_version()`: 91900 is 9.19.0).  Another
            version wants other fields and refuses these.
        properties: `create_device_properties(0).serialize()`, as an object.
    """

    name: str
    cudnn: int
    properties: dict[str, Any] = field(hash=False)  # a profile is part of a Target, which is part of a key

    @property
    def sm_version(self) -> int:
        """Compute capability as `pygraph(sm_version=...)` takes it: 90 for 9.0."""
        return int(self.properties["deviceVer"]) // 10  # deviceVer is 900 there

    @property
    def sm_count(self) -> int:
        """Number of multiprocessors."""
        return int(self.properties["multiProcessorCount"])

    @property
    def device_name(self) -> str:
        """The name the driver gives the GPU: `NVIDIA H200`."""
        return str(self.properties["deviceName"])

    @property
    def driver_version(self) -> int:
        """What `cuDriverGetVersion` gave there: 13000."""
        return int(self.properties["driverVer"])

    @property
    def l2_bytes(self) -> int:
        """Size of the level 2 cache in bytes."""
        return int(self.properties["l2CacheSize"])

    def device_property(self) -> Any:
        """Return the object that `pygraph(device_property=...)` takes.

        Raises:
            OfflineError: the loaded cuDNN does not accept the properties.
        """
        cudnn = _import_cudnn()
        try:
            return cudnn.create_device_properties(json.dumps(self.properties))
        except RuntimeError as error:  # a missing field, a wrong type, an unknown architecture: all the same class
            raise OfflineError(
                f"cuDNN {cudnn.backend_version()} does not accept the properties of device profile {self.name!r}, "
                f"which was recorded with cuDNN {self.cudnn}: {error}. {_record_it_anew(cudnn.backend_version())}"
            ) from error


def load_profile(name_or_path: str) -> DeviceProfile:
    """Return a shipped profile by its name, or the one in a file.

    A shipped name comes first: write `./h200` for a file of that name.  Where a name is shipped for several versions
    of cuDNN, the one of the loaded version is taken, else the newest.

    Raises:
        OfflineError: no such name or file, or the file is not a device profile.
    """
    shipped = [_read_profile(path) for path in sorted(PROFILE_FOLDER.glob("*.json"))]
    found = [profile for profile in shipped if profile.name == name_or_path]
    if len(found) > 1:
        loaded = int(_import_cudnn().backend_version())
        found.sort(key=lambda profile: (profile.cudnn == loaded, profile.cudnn), reverse=True)
    if found:
        return found[0]
    path = Path(name_or_path)
    if not path.is_file():
        names = ", ".join(sorted({profile.name for profile in shipped}))
        raise OfflineError(
            f"no device profile {name_or_path!r}: it is neither a shipped name ({names}) nor a file. "
            "Record one on the GPU with: sidestep device-profile FILE"
        )
    return _read_profile(path)


def record_profile(path: Path, name: str, index: int = 0) -> DeviceProfile:
    """Write the profile of a GPU of this machine to `path`, and return it.

    Args:
        path: the file, which is replaced.
        name: the profile's short name.
        index: of the GPU.

    Raises:
        OfflineError: there is no such GPU, or the file cannot be written.
    """
    cudnn = _import_cudnn()
    try:
        text = cudnn.create_device_properties(index).serialize()
    except RuntimeError as error:
        raise OfflineError(
            f"cuDNN sees no GPU {index} here: {error}. Run this on the machine that has the GPU"
        ) from error
    properties = json.loads(text if isinstance(text, str) else bytes(text))
    content = {
        "schema": PROFILE_SCHEMA,
        "name": name,
        "cudnn": int(cudnn.backend_version()),
        "properties": properties,
    }
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise OfflineError(f"device profile {path} cannot be written: {error}") from error
    return _read_profile(path)


def check_version(profile: DeviceProfile, backend_version: int) -> None:
    """Make sure that the profile and the loaded cuDNN are of one version.

    Args:
        profile: the profile to be used.
        backend_version: `cudnn.backend_version()`.

    Raises:
        OfflineError: they are not.
    """
    if profile.cudnn != backend_version:
        raise OfflineError(
            f"device profile {profile.name!r} is for cuDNN {profile.cudnn}, and cuDNN {backend_version} is loaded: "
            f"plans of one version do not serve another. {_record_it_anew(backend_version)}, "
            f"or install cuDNN {profile.cudnn} here."
        )


def build_stand_in_driver(folder: Path, driver_version: int = 13000) -> Path:
    """Compile the stand-in for `libcuda.so.1` into `folder` and return its path.

    It has every driver function that the loaded cuDNN's libraries name.  Scanning them (0.5 GB) takes about 0.6 s,
    the compiler 0.1 s, so nothing is kept for the next process.

    Args:
        folder: an existing folder of this user that nobody else can write to.
        driver_version: what its `cuDriverGetVersion` answers.

    Raises:
        OfflineError: others can write to the folder, there is no cuDNN, or no C compiler that works.
    """
    return _compile(folder, _scan(_loaded_cudnn_folder(), rb"cu", rb"cu[A-Z][A-Za-z0-9_]+"), driver_version)


def activate(name_or_path: str) -> DeviceProfile:
    """Make this process one that builds graphs for another GPU, and return the GPU's profile.

    Call it first in a child process, before anything of CUDA is touched, and once.

    Args:
        name_or_path: as for `load_profile`.

    Raises:
        OfflineError: not Linux; a driver library is already loaded in this process; the profile is unknown, damaged
            or of another cuDNN; there is no cuDNN, no C compiler or no NVRTC that works.
    """
    if not sys.platform.startswith("linux"):
        raise OfflineError(f"graphs for another GPU are built on Linux only, and this is {sys.platform}")
    _refuse_a_loaded_driver()
    profile = load_profile(name_or_path)
    check_version(profile, int(_import_cudnn().backend_version()))
    _refuse_a_loaded_driver()  # importing cudnn loads none (tried with 1.28 and 1.32); if one does, stop here
    with tempfile.TemporaryDirectory(prefix="sidestep-") as name:  # made 0700
        library = build_stand_in_driver(Path(name), profile.driver_version)
        try:
            # Global, and of the soname that cuDNN asks for: its dlopen finds this one. Removing the file is harmless.
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise OfflineError(
                f"the stand-in driver does not load from {library}: {error}. "
                "Set TMPDIR to a folder from which code may be executed"
            ) from error
    profile.device_property()  # a damaged profile shows here, not as a refused graph
    prove_nvrtc(profile.sm_version)
    return profile


def _record_it_anew(backend_version: int) -> str:
    return f"Record it on the GPU, with cuDNN {backend_version}: sidestep device-profile FILE"


def _read_profile(path: Path) -> DeviceProfile:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:  # ValueError: neither UTF-8 nor JSON
        raise OfflineError(
            f"device profile {path} cannot be read: {error}. Record it anew on the GPU: sidestep device-profile {path}"
        ) from error
    if not isinstance(content, dict) or content.get("schema") != PROFILE_SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise OfflineError(
            f'{path} is no device profile of this version: expected an object with "schema": {PROFILE_SCHEMA}, '
            f"found {found!r}. Record it anew on the GPU: sidestep device-profile {path}"
        )
    expected = {"name": str, "cudnn": int, "properties": dict}
    wrong = [key for key, kind in expected.items() if type(content.get(key)) is not kind]
    if "properties" not in wrong:
        properties = content["properties"]
        wrong += [f"properties.{key}" for key, kind in _FIELDS.items() if type(properties.get(key)) is not kind]
    if wrong:
        raise OfflineError(
            f"device profile {path} is damaged: {', '.join(wrong)} missing or of a wrong type. "
            f"Record it anew on the GPU: sidestep device-profile {path}"
        )
    return DeviceProfile(content["name"], content["cudnn"], content["properties"])


def _import_cudnn() -> Any:
    try:
        import cudnn
    except (ImportError, OSError) as error:  # OSError: its cuDNN does not load
        raise OfflineError(
            f"the cuDNN frontend does not import: {error}. Install it: pip install nvidia-cudnn-frontend"
        ) from error
    return cudnn


def _loaded_files(prefix: str) -> list[Path]:
    """The files mapped into this process whose names begin with `prefix`."""
    fields = (line.rstrip("\n").split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = {Path(parts[5].removesuffix(" (deleted)")) for parts in fields if len(parts) == 6}
    return sorted(path for path in paths if path.name.startswith(prefix))


def _refuse_a_loaded_driver() -> None:
    loaded = _loaded_files("libcuda.so")
    if loaded:
        raise OfflineError(
            f"a driver library is already loaded in this process: {loaded[0]}. Graphs for another GPU need a process "
            "of their own: start a new Python and call activate() in it first (warmup --device does so)"
        )


def _loaded_cudnn_folder() -> Path:
    """The folder of the very cuDNN that the frontend uses, wherever it found it."""
    _import_cudnn()
    loaded = _loaded_files("libcudnn.so")
    if not loaded:
        raise OfflineError(
            "the cuDNN frontend found no cuDNN library. Install a CUDA build of torch, which brings it, "
            "or: pip install nvidia-cudnn-cu13"
        )
    return loaded[0].parent


def _scan(folder: Path, start: bytes, name: bytes) -> list[str]:
    """All C strings in the cuDNN libraries of `folder` that begin with `start` and match `name` as a whole."""
    found: set[str] = set()
    whole = re.compile(name + rb"\0")
    for path in {path.resolve() for path in folder.glob("libcudnn*.so*")}:
        # mmap.find is ten times as fast as a regular expression over the file.
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(b"\0" + start)
            while at >= 0:
                if match := whole.match(content, at + 1):
                    found.add(match.group()[:-1].decode())
                at = content.find(b"\0" + start, at + 1)
    return sorted(found)


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    tried = f"CC={shlex.join(chosen)} is not there" if chosen else "CC is not set, and there is no cc, gcc or clang"
    raise OfflineError(
        f"graphs for another GPU need a C compiler for the stand-in driver: {tried}. "
        "Install one (apt-get install gcc) or set CC"
    )


def _compile(folder: Path, names: list[str], driver_version: int) -> Path:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise OfflineError(
            f"{folder} must be a folder of yours that nobody else can write to, since code is loaded from it: "
            f"chmod 700 {folder}, or give another"
        )
    source = _DRIVER_SOURCE % {"driver_version": driver_version}
    defined = set(re.findall(r"^int (\w+)", source, re.MULTILINE))
    source += "".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in names if name not in defined)
    library = folder / "libcuda.so.1"
    # -w: parameters that C does not need are left out. No C library: nothing of it is used.
    options = ["-x", "c", "-", "-shared", "-fPIC", "-w", "-nostdlib", f"-Wl,-soname,{library.name}", "-o", str(library)]
    command = [*_compiler(), *options]
    try:
        done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OfflineError(f"the C compiler does not run: {error}. Set CC to one that does") from error
    if done.returncode != 0:
        raise OfflineError(
            f"the C compiler could not make the stand-in driver ({shlex.join(command)}):\n{done.stderr.strip()}\n"
            "Set CC to a compiler that can make shared libraries"
        )
    return library


def prove_nvrtc(sm_version: int) -> None:
    """Load the NVRTC that cuDNN will ask for, and compile an empty kernel with it.

    cuDNN looks beside itself and then where the system looks; so does this, and a library that is loaded under its
    soname is found by cuDNN's dlopen wherever it came from.

    Raises:
        OfflineError: no NVRTC loads, or it cannot compile for the architecture.
    """
    folder = _loaded_cudnn_folder()
    names = _scan(folder, b"libnvrtc.so.", rb"libnvrtc\.so\.\d+")
    remedy = "Install a CUDA build of torch, which brings it, or: pip install nvidia-cuda-nvrtc"
    # The wheels' layout: nvidia/cudnn/lib beside nvidia/cu13/lib, or beside nvidia/cuda_nvrtc/lib before CUDA 13.
    places = [str(path) for name in names for path in folder.parent.parent.glob(f"*/lib/{name}")] + names
    nvrtc = None
    trouble = [f"cuDNN in {folder} names no NVRTC library"] if not places else []
    for place in places:
        try:
            # NVRTC opens its builtins by name alone and does not look beside itself; without them cuDNN finds NVRTC
            # and still fails.  A bare name means the system's library path, which has both.
            for builtins in sorted(Path(place).parent.glob("libnvrtc-builtins.so.*") if "/" in place else ()):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            nvrtc = ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
            break
        except OSError as error:
            trouble.append(str(error))
    if nvrtc is None:
        raise OfflineError(f"cuDNN compiles with NVRTC, which does not load: {'; '.join(trouble)}. {remedy}")
    program = ctypes.c_void_p()
    kernel = b'extern "C" __global__ void empty() {}'
    option = (ctypes.c_char_p * 1)(f"--gpu-architecture=sm_{sm_version}".encode())
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), kernel, None, 0, None, None)
    status = status or nvrtc.nvrtcCompileProgram(program, 1, option)
    if status != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        reason = nvrtc.nvrtcGetErrorString(status).decode()
        raise OfflineError(f"NVRTC ({nvrtc._name}) cannot compile for sm_{sm_version}: {reason}. {remedy}")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

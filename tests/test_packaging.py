"""The package as it is installed: what is in it, what importing it does, and which way its imports point."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]  # package -> folder
DATA = (
    "backends/*.toml",
    "backends/device_profiles/*.json",
    "dispatcher/py.typed",
    "dispatcher/*.yaml",
    "scripts/*.yaml",
)
LIGHT = (
    "sidestep",
    "sidestep.cache",
    "sidestep.cache.records",
    "sidestep.cli",
    "sidestep.failures",
    "sidestep.models",
    "sidestep.problem",
    "sidestep.recording",
    "sidestep.symbol_problem",
    "sidestep.warmup",
)
HEAVY = ("torch", "cudnn", "numpy", "thunder", "nvfuser_direct", "redis", "triton")
OPTIONAL = ("thunder", "redis", "nvfuser_direct", "transformers")  # not required: never imported at module level


def sources() -> list[Path]:
    """Every module of the package, as it lies in the tree."""
    return sorted(path for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """`dispatcher/api.py` is sidestep.api."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    package = next(name for name, mapped in FOLDERS.items() if mapped == folder)
    return ".".join([package, *(part for part in rest if part != "__init__")])


MODULES = {module_name(path): path for path in sources()}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """Full name, line and whether it is only for type checkers, of everything that a module imports."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]

    def walk(node: ast.AST, typing_only: bool) -> Iterator[tuple[str, int, bool]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, typing_only
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno, typing_only
        for field, value in ast.iter_fields(node):
            guarded = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and field == "body"
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, typing_only or guarded)

    yield from walk(tree_of(path), False)


def inside(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def python(*arguments: str, cwd: Path, path: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """What a new Python elsewhere prints.

    Given `path`, that folder is searched for packages first, and the editable install is out of the way: -S leaves the
    site-packages' .pth files unread, and the folder itself is searched after `path` for the dependencies.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SIDESTEP_", "PYTHON"))}
    if path is not None:
        site = Path(pytest.__file__).parent.parent
        variables["PYTHONPATH"] = os.pathsep.join([str(path), str(site)])
        arguments = ("-S", *arguments)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env={**variables, **(env or {})}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Imported by those who have thunder, which at its import starts more than these tests allow.
THUNDER = tuple(name for name in MODULES if name.startswith("sidestep.thunder_"))

# --- what is built and installed ---


def test_every_folder_with_modules_is_a_listed_package() -> None:
    found = {
        ".".join([package, *part.relative_to(ROOT / folder).parts])
        for package, folder in FOLDERS.items()
        for part in [ROOT / folder, *(ROOT / folder).rglob("*")]
        if part.is_dir() and any(part.glob("*.py"))
    }
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])
    visible = {path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."} - {
        ROOT / "build",
        ROOT / "dist",
    }
    assert {path.name for path in visible if any(path.glob("*.py"))} == {"tests", *FOLDERS.values()}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, built from a copy of the tree, which stays clean, and the wheel built from the sdist."""
    folder, before = tmp_path_factory.mktemp("build"), set(ROOT.iterdir())
    hidden = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, folder / "copy", ignore=hidden)
    build = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
    python("-c", build.format("sdist"), str(folder), cwd=folder / "copy")
    (sdist,) = folder.glob("sidestep-*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    python("-c", build.format("wheel"), str(folder), cwd=unpacked)
    assert set(ROOT.iterdir()) == before
    return folder


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    (path,) = built.glob("sidestep-*-py3-none-any.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and nothing else, as pip installs it."""
    target = tmp_path_factory.mktemp("installed")
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    python(*pip, "--target", str(target), str(wheel), cwd=target)
    return target


def expected() -> set[str]:
    """What the wheel must hold, by its path there."""
    data = [path for pattern in DATA for path in ROOT.glob(pattern)]
    names = set()
    for path in [*sources(), *data]:
        folder, *rest = path.relative_to(ROOT).parts
        names.add("/".join([*next(name for name, at in FOLDERS.items() if at == folder).split("."), *rest]))
    return names


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = f"sidestep-{PROJECT['project']['version']}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == expected()
    assert {"licenses/LICENSE", "METADATA", "entry_points.txt"} <= {name.removeprefix(info) for name in names}
    assert any(name.startswith("sidestep/backends/device_profiles/h200") for name in names)
    assert "sidestep/py.typed" in names


def test_no_file_of_the_packages_is_forgotten() -> None:
    """A file of a kind that no line of package-data names would be in the tree and not in the wheel."""
    known = {*sources(), *(path for pattern in DATA for path in ROOT.glob(pattern))}
    found = {path for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert {path for path in found if "__pycache__" not in path.parts and path.name[0] != "."} == known


def test_sdist_holds_the_package_and_its_tests(built: Path) -> None:
    (path,) = built.glob("sidestep-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    shipped = [*sources(), *ROOT.glob("tests/*.py"), *(path for pattern in DATA for path in ROOT.glob(pattern))]
    wanted = {str(path.relative_to(ROOT)) for path in shipped}
    wanted |= {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt"}
    assert wanted <= names, wanted - names
    assert not [name for name in names if "__pycache__" in name]


def test_wheel_imports_as_a_whole(installed: Path, tmp_path: Path) -> None:
    script = f"""
import importlib, json, sidestep
print(json.dumps([sidestep.__file__, *(importlib.import_module(name).__file__ for name in {sorted(MODULES)!r})]))
"""
    files = json.loads(python("-c", script, cwd=tmp_path, path=installed).splitlines()[-1])
    assert len(files) == len(MODULES) + 1
    assert all(Path(file).is_relative_to(installed) for file in files), files
    top = {path.name for path in installed.iterdir()}
    assert top == {"sidestep", f"sidestep-{PROJECT['project']['version']}.dist-info", "bin"}


def test_version(installed: Path, tmp_path: Path) -> None:
    import sidestep

    assert sidestep.__version__ == PROJECT["project"]["version"]
    assert sidestep.__version__ in python("-m", "sidestep", "--version", cwd=tmp_path, path=installed)


def test_scripts_run_as_files_too(installed: Path, tmp_path: Path) -> None:
    """scripts/ stands beside folders called cache and backends, which must not be imported by those names."""
    for path in (ROOT / "scripts").glob("*.py"):
        absolute = [name for name, _, _ in imports(path) if name.startswith("sidestep")]
        relative = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom) and node.level]
        assert not relative, f"{path}: scripts import sidestep absolutely"
        assert path.name in ("__init__.py", "report.py", "typecheck.py") or absolute, path


# --- what importing does ---

IMPORT = """
import json, os, sys, threading
before = dict(os.environ)
import importlib
for name in {names!r}:
    importlib.import_module(name)
print(json.dumps({{
    "heavy": [name for name in {heavy!r} if name in sys.modules],
    "environ": dict(os.environ) == before,
    "cuda": "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized(),
    "threads": threading.active_count(),
    "handlers": len(__import__("logging").getLogger("sidestep").handlers),
}}))
"""


def after_import(names: list[str], folder: Path) -> dict[str, Any]:
    """What a process looks like that imported `names` with an empty home at `folder`."""
    home = folder / "home"
    home.mkdir()
    env = {name: str(home) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "TMPDIR")}
    script = IMPORT.format(names=names, heavy=HEAVY)
    result: dict[str, Any] = json.loads(python("-B", "-c", script, cwd=home, env=env).splitlines()[-1])
    result["files"] = sorted(str(path.relative_to(home)) for path in home.rglob("*"))
    return result


NOTHING = {"environ": True, "cuda": False, "threads": 1, "handlers": 0, "files": []}


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_import_nothing_heavy(name: str, tmp_path: Path) -> None:
    assert after_import([name], tmp_path) == {"heavy": [], **NOTHING}


def test_importing_every_module_does_nothing(tmp_path: Path) -> None:
    """Importing torch may write to the environment too, so the comparison is with a process that did only that."""
    home = tmp_path / "torch"
    home.mkdir()
    alone = after_import(["torch"], home)
    package = [name for name in MODULES if not inside(name, "sidestep.scripts", "sidestep.__main__", *THUNDER)]
    result = after_import(["torch", *package], tmp_path)
    assert {key: result[key] for key in ("cuda", "handlers", "files")} == {"cuda": False, "handlers": 0, "files": []}
    assert (result["environ"], result["threads"]) == (alone["environ"], alone["threads"])
    assert set(result["heavy"]) == set(alone["heavy"])


def test_public_names_resolve_and_are_what_type_checkers_see() -> None:
    import sidestep

    for name in sidestep.__all__:
        assert getattr(sidestep, name) is not None
    assert sorted(sidestep.__all__) == sidestep.__all__
    seen = {name.rpartition(".")[2] for name, _, typing_only in imports(MODULES["sidestep"]) if typing_only}
    assert seen - {"Any"} == set(sidestep.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="no_such_name"):
        sidestep.no_such_name  # noqa: B018


def test_doctests() -> None:
    """Over the imported modules, by their installed names."""
    failed = {}
    for name in MODULES:
        if not name.endswith("__main__"):
            result = doctest.testmod(importlib.import_module(name))
            if result.failed:
                failed[name] = result
    assert not failed


# --- which way imports point, and what is never used ---


def test_no_module_shadows_a_dependency() -> None:
    taken = {"torch", "redis", "cudnn", "diskcache", "click", "rich", "yaml", "platformdirs", "thunder", "transformers"}
    assert not [path for path in sources() if path.stem in taken]


def test_folders_are_never_imported_by_their_own_names() -> None:
    """With the root on sys.path these would be second copies of the modules."""
    folders = tuple(FOLDERS.values())
    files = [*sources(), *(ROOT / "tests").rglob("*.py")]
    found = [
        f"{path}:{node.lineno}"
        for path in files
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Import) and any(inside(alias.name, *folders) for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and not node.level and inside(node.module or "", *folders))
    ]
    assert not found


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("sidestep.cache", ("sidestep.cache",)),
        ("sidestep.backends", ("sidestep.backends", "sidestep.problem", "sidestep.decisions")),
    ],
)
def test_arrows_point_one_way(package: str, allowed: tuple[str, ...]) -> None:
    found = [
        f"{path}:{line}: {name}"
        for module, path in MODULES.items()
        if inside(module, package)
        for name, line, _ in imports(path)
        if inside(name, "sidestep") and not inside(name, *allowed)
    ]
    assert not found


def test_only_dispatcher_joins_backends_and_cache() -> None:
    """`problem` and `decisions`, which the backends see, know of neither."""
    for module in ("sidestep.problem", "sidestep.decisions"):
        ours = [
            name for name, _, typing_only in imports(MODULES[module]) if inside(name, "sidestep") and not typing_only
        ]
        assert not [name for name in ours if inside(name, "sidestep.backends", "sidestep.cache", "sidestep.selection")]


def test_optional_packages_are_imported_where_they_are_used() -> None:
    found = []
    for module, path in MODULES.items():
        if module in THUNDER:
            continue
        top = [node for node in tree_of(path).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        lines = {node.lineno for node in top}
        found += [f"{path}:{line}" for name, line, _ in imports(path) if line in lines and inside(name, *OPTIONAL)]
    assert not found


def test_nothing_that_runs_data_as_code() -> None:
    found = []
    for path in sources():
        names = [name for name, _, _ in imports(path)]
        found += [f"{path}: import {name}" for name in names if inside(name, "pickle", "marshal", "shelve", "dill")]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "pickle.loads"):
                    found.append(f"{path}:{node.lineno}: {called}")
            if ast.unparse(node) in ("yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader"):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    assert not found


def broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in caught)


def test_broad_handlers_are_in_selection_and_lead_there() -> None:
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and broad(node)
    ]
    assert found  # or this test looks at nothing
    # In autograd because each frame of a backward costs, and all it does is to call selection.
    assert sorted(set(found)) == ["dispatcher/autograd.py", "dispatcher/selection.py"]
    assert found.count("dispatcher/autograd.py") == 1


# --- the pinned versions ---


def test_constraints_fit_the_lower_bounds() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins: dict[str, str] = {}
    for line in lines:
        requirement = Requirement(line)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        pins[canonicalize_name(requirement.name)] = specifier.version
    assert (pins["torch"], pins["nvidia-cudnn-frontend"], pins["lightning-thunder"]) == ("2.11.0", "1.32.0", "0.2.6")
    project = PROJECT["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    for line in asked:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name}: not pinned in constraints.txt"
        assert requirement.specifier.contains(pins[name]), f"{line}, and constraints.txt has {pins[name]}"
        assert {part.operator for part in requirement.specifier} <= {">="}, f"{line}: lower bounds only"
        assert requirement.specifier or name == "types-pyyaml", f"{line}: no lower bound"


def test_the_oldest_frontend_is_the_lower_bound() -> None:
    bounds = {
        requirement.name: requirement.specifier for requirement in map(Requirement, PROJECT["project"]["dependencies"])
    }
    oldest = re.search(r"^OLDEST_FRONTEND \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert oldest is not None
    assert oldest[1].removesuffix(".0") == str(bounds["nvidia-cudnn-frontend"]).removeprefix(">=")

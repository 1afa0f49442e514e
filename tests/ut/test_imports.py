"""Who imports what, and how long files may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import hpcli
import hyper_parallel

LIBRARY = Path(hyper_parallel.__file__).parent
COMMAND = Path(hpcli.__file__).parent
FRAMEWORKS = {"torch", "mindspore", "torch_npu"}
LONGEST_FILE = 400


def imported(path: Path) -> set[str]:
    """The top packages that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def loaded_after(code: str) -> set[str]:
    """The top packages that a new interpreter has loaded after running ``code``."""
    script = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(run.stdout.split())


@pytest.mark.parametrize("path", sorted((LIBRARY / "core").rglob("*.py")), ids=lambda path: path.name)
def test_core_imports_neither_a_framework_nor_a_platform(path):
    assert not imported(path) & (FRAMEWORKS | {"numpy", "hpcli"})
    assert "hyper_parallel.platform" not in path.read_text()


@pytest.mark.parametrize("path", sorted(LIBRARY.rglob("*.py")), ids=lambda path: str(path.relative_to(LIBRARY)))
def test_the_library_does_not_know_its_command(path):
    assert "hpcli" not in imported(path)


def test_importing_the_library_imports_no_framework():
    modules = [f"hyper_parallel.core.{path.stem}" for path in (LIBRARY / "core").glob("*.py") if path.stem != "__init__"]
    loaded = loaded_after(f"import hyper_parallel, hyper_parallel.api, {', '.join(modules)}\nhyper_parallel.ParallelMesh")
    assert "hyper_parallel" in loaded
    assert not loaded & (FRAMEWORKS | {"numpy"})


def test_the_command_line_starts_without_a_framework():
    loaded = loaded_after("import hpcli.app, hpcli.launch, hpcli.config, hpcli.models.description, hpcli.data.text")
    assert "hpcli" in loaded
    assert not loaded & FRAMEWORKS


def test_public_names_are_loaded_when_they_are_used_and_others_are_refused():
    assert "torch" in loaded_after("import hyper_parallel; hyper_parallel.clip_grad_norm_([], 1.0)")
    assert set(hyper_parallel.__all__) == set(hyper_parallel._HOMES) == set(dir(hyper_parallel))
    assert all(callable(getattr(hyper_parallel, name)) for name in hyper_parallel.__all__)
    with pytest.raises(AttributeError, match="'hyper_parallel' has no attribute 'clip_grad_norm'"):
        _ = hyper_parallel.clip_grad_norm


@pytest.mark.parametrize("package", [LIBRARY, COMMAND], ids=lambda path: path.name)
def test_no_file_is_long(package):
    lengths = {path.name: len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    """pytest's own list leaves out every folder called dist."""
    folders = {path.parent for path in Path(__file__).parents[1].rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(Path(__file__).parents[1]).parts}
    left_out = {name for name in names for pattern in pytestconfig.getini("norecursedirs") if fnmatch(name, pattern)}
    assert "dist" in names and not left_out

"""The house's rules, enforced over all modules: who may import whom, what stays light, what is never used.

The import table is DESIGN section 5 as data. A new edge needs a line here and its reason.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from code_from_data import faults

import swarmnode

PACKAGE = Path(swarmnode.__file__).parent
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80

FOUNDATION = {"ids", "errors", "config", "machine", "private_files", "local_access", "available_memory"}
RULES = {"ring", "cluster"}
SERVICES = {"api", "wire", "catalog", "ui"}
BASE = {*FOUNDATION, *RULES}
MAY_IMPORT: dict[str, set[str]] = {
    # what decides knows nothing but ids and errors
    "ids": set(),
    "errors": set(),
    "machine": set(),
    "config": {"errors"},
    "available_memory": set(),
    "private_files": {"errors"},
    "local_access": {"errors", "private_files"},
    "ring": {"ids", "errors", "machine"},
    "cluster": {"ids", "errors", "machine"},
    "driver": {"machine"},
    # the middle level: rules and foundation; beside each other only where a line says so
    "wire": BASE,
    "catalog": BASE,
    "api": {*BASE, "swarmnode"},  # the version in /health
    "ui": BASE,
    "compute": {*BASE, "wire", "catalog", "swarmnode"},  # frames, shards; the version, which step costs are kept under
    # services made of the parts
    "roles": {*BASE, *SERVICES, "driver", "compute"},  # compute: only LIGHT_COMPUTE, below
    # composition and entry
    "node": {*BASE, *SERVICES, "driver", "roles"},
    "cli": {*BASE, *SERVICES, "driver", "roles", "node", "compute", "swarmnode"},  # compute: the worker's entry, lazily
    "__main__": {"cli"},
    "swarmnode": set(),
}
LIGHT_COMPUTE = {"swarmnode.compute.worker_spec", "swarmnode.compute.supported", "swarmnode.compute.spec"}
"""All that roles/ may take from compute/: types and tables, no torch."""
LAZY_COMPUTE = {"cli"}
"""These import compute/ inside a function only, so that no node ever loads torch."""
HEAVY = ("torch", "transformers", "tokenizers", "bitsandbytes", "peft", "torchao", "gguf", "accelerate")
PURE_MUST_NOT_IMPORT = {
    "trio", "torch", "time", "random", "socket", "os", "asyncio", "threading", "subprocess", "httpx", "datetime",
    "secrets", "uuid", "transformers", "numpy",
}  # fmt: skip
ARCHIVES_MAY_BE_READ_IN = {"swarmnode.catalog.source_wheel"}
BESIDE = ("sims", "benchmarks")
"""Folders beside the package whose programs read what others sent, too."""


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["swarmnode", *path.relative_to(PACKAGE).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def unit(module: str) -> str:
    """The folder or top-level module a name belongs to: what the table speaks of."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "swarmnode"


def imports(tree: ast.AST) -> list[tuple[ast.AST, str]]:
    """Every module a tree imports, `from package import module` counted as the module."""
    found: list[tuple[ast.AST, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            base = node.module or ""
            found += [(node, f"{base}.{a.name}" if f"{base}.{a.name}" in modules() else base) for a in node.names]
    return found


def inside_functions(tree: ast.Module) -> set[int]:
    return {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
    }


def for_types_only(tree: ast.Module) -> set[int]:
    """Nodes under `if TYPE_CHECKING`: they are never executed."""
    return {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.If) and isinstance(outer.test, ast.Name) and outer.test.id == "TYPE_CHECKING"
        for part in outer.body
        for inner in ast.walk(part)
    }


def test_every_folder_has_a_place_in_the_table() -> None:
    assert {unit(name) for name in modules()} <= set(MAY_IMPORT)


@pytest.mark.parametrize("module", modules())
def test_imports_go_down_only(module: str) -> None:
    me = unit(module)
    allowed = MAY_IMPORT[me]
    upward = [
        f"line {node.lineno}: {target}"  # type: ignore[attr-defined]
        for node, target in imports(modules()[module])
        if target.split(".")[0] == "swarmnode" and unit(target) not in {me, *allowed}
    ]
    assert not upward, f"{module} may import {sorted(allowed)}"


@pytest.mark.parametrize("module", [name for name in modules() if unit(name) in ("roles", "node", "cli")])
def test_nodes_take_nothing_heavy_from_compute(module: str) -> None:
    tree = modules()[module]
    lazy, types = inside_functions(tree), for_types_only(tree)
    taken = [(node, t) for node, t in imports(tree) if t.startswith("swarmnode.compute") and id(node) not in types]
    eager = {
        t for node, t in taken if t not in LIGHT_COMPUTE and (unit(module) not in LAZY_COMPUTE or id(node) not in lazy)
    }
    assert not eager


@pytest.mark.parametrize("module", [name for name in modules() if unit(name) != "compute"])
def test_torch_and_its_kin_are_imported_only_under_compute(module: str) -> None:
    assert not [target for _, target in imports(modules()[module]) if target.split(".")[0] in HEAVY]


@pytest.mark.parametrize("module", [name for name in modules() if unit(name) in RULES])
def test_what_decides_has_no_io_clock_or_chance(module: str) -> None:
    tops = {target.split(".")[0] for _, target in imports(modules()[module])}
    assert not tops & PURE_MUST_NOT_IMPORT


@pytest.mark.parametrize("module", modules())
def test_nothing_runs_code_from_data(module: str) -> None:
    assert faults(modules()[module], archives=module in ARCHIVES_MAY_BE_READ_IN) == []


@pytest.mark.parametrize("folder", BESIDE)
def test_nothing_beside_the_package_does(folder: str) -> None:
    paths = sorted((PACKAGE.parent / folder).rglob("*.py"))
    assert paths
    assert {str(p): f for p in paths if (f := faults(ast.parse(p.read_text(encoding="utf-8"))))} == {}


PLANTED = [
    "import torch\ntorch.load('x')",
    "from torch import load\nload('x')",
    "from torch import load as fetch\nfetch('x')",
    "import torch as t\nt.load('x')",
    "import torch\nread = torch.load\nread('x')",
    "import torch\nmap(torch.load, ['x'])",
    "import torch\ngetattr(torch, 'load')('x')",
    "import torch\ntorch.jit.load('x')",
    "from torch import jit\njit.load('x')",
    "import torch.jit as j\nj.load('x')",
    "import torch\ntorch.hub.load('x', 'y')",
    "exec('x')",
    "import builtins\nbuiltins.exec('x')",
    "from builtins import eval as e\ne('x')",
    "e = exec\ne('x')",
    "def f(run=eval):\n    run('x')",
    "compile('x', 'y', 'exec')",
    "__import__('pickle').loads(b'')",
    "import importlib\nimportlib.import_module('pickle').loads(b'')",
    "from importlib import import_module\nimport_module('pickle')",
    "import importlib.util\nimportlib.util.spec_from_file_location('x', 'y')",
    "import numpy as np\nnp.load('x', allow_pickle=True)",
    "import numpy as np\nnp.load('x', None, True)",
    "import numpy\nnumpy.load('x', None, trusted)",
    "from numpy import load\nload('x', allow_pickle=trusted)",
    "import joblib\njoblib.load('x')",
    "import pandas as pd\npd.read_pickle('x')",
    "from pandas import read_pickle\nread_pickle('x')",
    "import yaml\nyaml.load('x', Loader=yaml.Loader)",
    "from yaml import unsafe_load\nunsafe_load('x')",
    "import shutil\nshutil.unpack_archive('x')",
    "from shutil import unpack_archive as u\nu('x')",
    "import zipfile\nzipfile.ZipFile('x').extractall()",
    "from zipfile import ZipFile",
    "archive.extract('x')",
    "import tarfile",
    "from marshal import loads",
    "def f():\n    import pickle",
    "import _pickle",
    "model.from_pretrained('x', trust_remote_code=True)",
    "model.from_pretrained('x', trust_remote_code=given)",
]


@pytest.mark.parametrize("source", PLANTED)
def test_every_spelling_that_was_planted_is_found(source: str) -> None:
    assert faults(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('x')",
        "model.eval()",
        "import json\njson.load(file)",
        "import numpy\nnumpy.load('x', None, False)",
        "import yaml\nyaml.safe_load('x')",
        "model.from_pretrained('x', trust_remote_code=False)",
        "import importlib.util\nimportlib.util.find_spec('torch')",
        "def load(path): ...\nload('x')",
    ],
)
def test_what_only_looks_like_it_is_not(source: str) -> None:
    assert faults(ast.parse(source)) == []


def test_archives_are_read_in_one_place() -> None:
    assert faults(ast.parse("import zipfile")) != []
    assert faults(ast.parse("import zipfile"), archives=True) == []
    assert faults(ast.parse("import zipfile\nzipfile.ZipFile('x').extractall()"), archives=True) != []


@pytest.mark.parametrize("module", modules())
def test_the_house_is_kept_tidy(module: str) -> None:
    tree = modules()[module]
    assert ast.get_docstring(tree), "a module says its one job first"
    source = Path(tree_path(module)).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_FILE_LINES
    assert not [word for word in ("TODO", "FIXME", "XXX") if word in source]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, f"{node.name} has two jobs"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except hides cancellation"


def tree_path(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


BLOCKER = """
import importlib, json, sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Refuse())
failed = {{}}
for name in {names}:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = repr(error)
print(json.dumps(failed))
"""


def eagerly_heavy() -> set[str]:
    """Modules of compute/ that import torch or its kin when they are imported, themselves or through another."""
    heavy: set[str] = set()
    direct: dict[str, set[str]] = {}
    for name, tree in modules().items():
        skipped = inside_functions(tree) | for_types_only(tree)
        direct[name] = {target for node, target in imports(tree) if id(node) not in skipped}
    while True:
        found = {
            name
            for name, targets in direct.items()
            if any(t.split(".")[0] in (*HEAVY, "numpy") for t in targets) or targets & heavy
        }
        if found == heavy:
            return heavy
        heavy = found


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_nodes_take_from_compute_is_light() -> None:
    assert set(modules()) >= LIGHT_COMPUTE
    assert not LIGHT_COMPUTE & eagerly_heavy()


def test_all_but_torchs_own_modules_import_without_torch() -> None:
    heavy = eagerly_heavy()
    assert {unit(name) for name in heavy} <= {"compute"}
    names = [name for name in modules() if name not in heavy and unit(name) != "__main__"]
    failed = json.loads(run_python(BLOCKER.format(heavy=set(HEAVY), names=names)))
    assert failed == {}


LOADED = "import sys; {what}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
TOO_HEAVY = {*HEAVY, "fastapi", "pydantic", "hypercorn", "trio", "h2", "numpy", "huggingface_hub", "cryptography"}


def test_importing_the_package_loads_next_to_nothing() -> None:
    loaded = set(run_python(LOADED.format(what="import swarmnode")).split())
    assert not loaded & {*TOO_HEAVY, "typer", "rich", "httpx", "platformdirs"}


def test_the_help_text_loads_neither_torch_nor_a_server() -> None:
    code = """
import sys
sys.argv = ["swarmnode", "--help"]
from swarmnode.cli import main
try:
    main()
except SystemExit as done:
    assert not done.code
print("MODULES", *sorted({name.split(".")[0] for name in sys.modules}))
"""
    *page, last = run_python(code).strip().splitlines()
    assert any("model-load" in line for line in page)
    assert not set(last.split()) & TOO_HEAVY

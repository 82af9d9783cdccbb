"""Finds what runs code that came as data: by the full name that an expression stands for, however it was imported."""

from __future__ import annotations

import ast

MODULES = frozenset(
    {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
    | {"tarfile", "imp", "runpy", "code", "codeop"}
)
"""Not even imported."""
BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
NAMES = frozenset(
    {
        *BUILTINS,
        *(f"builtins.{name}" for name in BUILTINS),
        "torch.load",
        "torch.jit.load",
        "torch.hub.load",
        "torch.hub.load_state_dict_from_url",
        "torch.package.PackageImporter",
        "torch.serialization.load",
        "shutil.unpack_archive",
        "importlib.import_module",
        "importlib.__import__",
        "importlib.util.spec_from_file_location",
        "importlib.util.module_from_spec",
        "importlib.machinery.SourceFileLoader",
        "pandas.read_pickle",
        "yaml.load",
        "yaml.load_all",
        "yaml.full_load",
        "yaml.unsafe_load",
        "numpy.lib.format.read_array",
    }
)
"""Not even mentioned: a name that is passed on is called elsewhere."""
METHODS = frozenset({"extract", "extractall", "unpack_archive", "read_pickle", "to_pickle"})
ARCHIVES = "zipfile"
"""Allowed in one module, which streams one named member."""
TRUSTING = frozenset({"trust_remote_code", "allow_pickle"})
PICKLE_AT = 2
"""The position of `allow_pickle` among numpy.load's arguments."""


def faults(tree: ast.AST, *, archives: bool = False) -> list[str]:
    """One line for each; `archives` where zipfile may be used."""
    known = _known_names(tree)
    return [
        f"line {getattr(node, 'lineno', 0)}: {text}"
        for node in ast.walk(tree)
        for text in _faults_of(node, known, archives=archives)
    ]


def _known_names(tree: ast.AST) -> dict[str, str]:
    """What the module's own names stand for: imports, and assignments of one dotted name to another."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) else None
        stands_for = _full_name(value, known) if value is not None else None
        if stands_for is not None and stands_for.split(".")[0] in {*known.values(), *BUILTINS, "builtins"}:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[attr-defined]
            known |= {target.id: stands_for for target in targets if isinstance(target, ast.Name)}
    return known


def _full_name(node: ast.AST, known: dict[str, str]) -> str | None:
    """The dotted name of an expression, with the module's own names resolved; None for anything else."""
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = _full_name(node.value, known)
        return None if owner is None else f"{owner}.{node.attr}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        first, name = [*node.args, None, None][:2]
        if first is not None and isinstance(name, ast.Constant):
            return f"{_full_name(first, known)}.{name.value}"
    return None


def _faults_of(node: ast.AST, known: dict[str, str], *, archives: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return _imported([alias.name for alias in node.names], archives=archives)
    if isinstance(node, ast.ImportFrom):
        return _imported([f"{node.module}.{alias.name}" for alias in node.names], archives=archives)
    found = []
    name = _full_name(node, known) if isinstance(node, ast.Name | ast.Attribute | ast.Call) else None
    if name is not None and name in NAMES:
        found.append(name)
    if isinstance(node, ast.Attribute) and node.attr in METHODS:
        found.append(f".{node.attr}")
    if isinstance(node, ast.Call):
        found += _trusting(node, known)
    return found


def _imported(names: list[str], *, archives: bool) -> list[str]:
    found = [name for name in names if name.split(".")[0] in MODULES or name in NAMES]
    found += [name for name in names if name.split(".")[-1] in METHODS]
    return found + [name for name in names if name.split(".")[0] == ARCHIVES and not archives]


def _trusting(call: ast.Call, known: dict[str, str]) -> list[str]:
    """Anything but a literal False for an argument that lets data bring code along."""
    given = [(keyword.arg, keyword.value) for keyword in call.keywords]
    if (_full_name(call.func, known) or "").endswith("numpy.load") and len(call.args) > PICKLE_AT:
        given.append(("allow_pickle", call.args[PICKLE_AT]))
    return [
        str(name)
        for name, value in given
        if name in TRUSTING and not (isinstance(value, ast.Constant) and value.value is False)
    ]

"""Imports point one way: each room imports only what the table below allows, wherever in a module the import stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import for_each

ROOT = Path(__file__).resolve().parents[1]

#: What each room may import of the others. The leaves (errors, settings) are open to all.
MAY_IMPORT = {
    "kernels": set(),
    "featurizer": {"kernels"},
    "datasets": {"kernels"},
    "costmodel": {"featurizer", "kernels"},
    "training": {"datasets", "featurizer", "costmodel", "kernels"},
    # Of datasets only what needs neither pandas nor pyarrow.
    "runtime": {
        "kernels",
        "featurizer",
        "costmodel",
        "datasets.record",
        "datasets.timing",
        "datasets.journal",
    },
}
LEAVES = {"errors": set(), "settings": {"errors"}}
ROOMS = tuple(MAY_IMPORT)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement in a node, however deep: no import stands in an expression."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, field, None)
        for each in inner if isinstance(inner, list) else ():
            yield each
            yield from statements(each)


def imported(source: str, module: str) -> Iterator[str]:
    """Every module, or name in one, that a module's source imports: ``kernelcast.kernels.problem.Problem``."""
    tree = ast.parse(source)
    # Calls that import are rare, and to look for them takes longer than all else here.
    calls = "import_module" in source or "__import__" in source
    for node in ast.walk(tree) if calls else statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and node.args:
                yield from named(node.args[0])


def named(argument: ast.expr) -> Iterator[str]:
    """The module that an argument names, as far as it is written out."""
    parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
    if parts and isinstance(parts[0], ast.Constant) and isinstance(parts[0].value, str):
        yield parts[0].value.rstrip(".")


def within(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


def faults(source: str, module: str) -> list[str]:
    """The imports of a module of kernelcast that point the wrong way."""
    own = module.split(".")[1] if "." in module else ""
    found = []
    for name in imported(source, module):
        if name.split(".")[0] in ROOMS:
            found.append(f"{module} imports {name} as a top-level name")
        if name.split(".")[0] != "kernelcast" or own not in (*ROOMS, *LEAVES):
            continue
        inner = name.removeprefix("kernelcast").removeprefix(".")
        allowed = LEAVES[own] if own in LEAVES else {own, *LEAVES, *MAY_IMPORT[own]}
        if not any(within(inner, each) for each in allowed):
            found.append(f"{module} imports {name}")
    return found


def modules() -> dict[str, Path]:
    """Every module of the package by the name that it has when installed."""
    found = {}
    for folder, package in [("kernelcast", "kernelcast"), *((room, f"kernelcast.{room}") for room in ROOMS)]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            # What is in an __init__ is written from inside its package, for relative imports.
            found[".".join([package, *parts])] = path
    return found


def test_every_room_is_there():
    found = modules()
    for room in ROOMS:
        assert f"kernelcast.{room}.__init__" in found
    assert "kernelcast.kernels.ops.gemm.vendor" in found
    assert len(found) > 50


@for_each(("module", "path"), modules().items())
def test_imports_point_one_way(module, path):
    assert faults(path.read_text(encoding="utf-8"), module) == []


def test_no_script_imports_a_room_as_a_top_level_name():
    scripts = [path for folder in ("tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")]
    assert Path(__file__) in scripts
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in scripts
        for name in imported(path.read_text(encoding="utf-8"), "script")
        if name.split(".")[0] in ROOMS
    ]
    assert wrong == []


@for_each(
    "within",
    [
        "class A:\n    def f(self):\n        {}",
        "try:\n    {}\nexcept E:\n    pass",
        "try:\n    pass\nexcept E:\n    {}",
        "try:\n    pass\nexcept E:\n    pass\nelse:\n    {}",
        "try:\n    pass\nfinally:\n    {}",
        "for a in b:\n    pass\nelse:\n    {}",
        "with a:\n    while b:\n        {}",
        "match a:\n    case 1:\n        {}",
        "if a:\n    pass\nelif b:\n    {}",
        "async def f():\n    async with a:\n        {}",
    ],
)
def test_an_import_is_found_wherever_it_stands(within):
    assert list(imported(within.format("import a.b"), "m")) == ["a.b"]
    both = within.format("import a.b; import_module('c')")
    assert sorted(imported(both, "m")) == ["a.b", "c"]


def test_the_rooms_are_those_that_are_packaged():
    for script in ("setup.py", "tests/tools/link_farm.py"):
        tree = ast.parse((ROOT / script).read_text(encoding="utf-8"))
        [value] = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ROOMS"
        ]
        assert sorted(value) == sorted(ROOMS)


@for_each(
    ("module", "source"),
    [
        ("kernelcast.kernels.problem", "import kernelcast.featurizer"),
        ("kernelcast.kernels.problem", "from kernelcast import featurizer"),
        ("kernelcast.kernels.problem", "from kernelcast.costmodel.forest import Forest"),
        ("kernelcast.kernels.problem", "import kernelcast"),
        ("kernelcast.kernels.problem", "def inside():\n    if x:\n        from kernelcast import runtime"),
        ("kernelcast.kernels.problem", "if TYPE_CHECKING:\n    from kernelcast.runtime import Selection"),
        ("kernelcast.kernels.problem", "from ..datasets import record"),
        ("kernelcast.kernels.ops.gemm.__init__", "from .... import datasets"),
        ("kernelcast.kernels.problem", "import_module('kernelcast.datasets')"),
        ("kernelcast.kernels.problem", "importlib.import_module(f'kernelcast.datasets.{name}')"),
        ("kernelcast.featurizer.extra", "from kernelcast.datasets import record"),
        ("kernelcast.datasets.store", "from kernelcast.featurizer import Featurizer"),
        ("kernelcast.costmodel.model", "from kernelcast.training import data"),
        ("kernelcast.training.train", "from kernelcast.runtime import Selector"),
        ("kernelcast.training.train", "from kernelcast.cli import app"),
        ("kernelcast.runtime.selector", "from kernelcast.datasets import Store"),
        ("kernelcast.runtime.selector", "from kernelcast.datasets.store import Store"),
        ("kernelcast.runtime.selector", "import kernelcast.datasets"),
        ("kernelcast.runtime.selector", "import kernelcast.datasets.records"),
        ("kernelcast.errors", "from kernelcast import settings"),
        ("kernelcast.settings", "from kernelcast.kernels import Problem"),
        ("kernelcast.kernels.problem", "import datasets"),
        ("kernelcast.api", "from kernels import problem"),
        ("kernelcast.cli.app", "import runtime.selector as s"),
    ],
)
def test_the_check_itself_finds_what_points_the_wrong_way(module, source):
    assert len(faults(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kernelcast.kernels.registry", "import_module(f'kernelcast.kernels.ops.{name}')"),
        (
            "kernelcast.kernels.registry",
            "from kernelcast.kernels import ops\nfrom kernelcast.errors import A",
        ),
        ("kernelcast.kernels.registry", "from . import ops\nfrom .problem import Problem"),
        (
            "kernelcast.runtime.selector",
            "from kernelcast.datasets.timing import measure\nimport numpy.datasets",
        ),
        (
            "kernelcast.runtime.selector",
            "from kernelcast import settings\nfrom kernelcast.datasets import journal",
        ),
        ("kernelcast.settings", "from kernelcast.errors import SettingsError"),
        ("kernelcast.cli.app", "from kernelcast.training import train\nfrom kernelcast import runtime"),
    ],
)
def test_the_check_itself_passes_what_points_the_right_way(module, source):
    assert faults(source, module) == []

"""What is built and installed: one top-level name, everything in it, importable from anywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from kernelcast.costmodel.walk import engine

pytest.importorskip("build")

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kernels", "featurizer", "datasets", "costmodel", "training", "runtime")
SOURCES = sorted(path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).glob("_*.c"))
COMPILED = {f"kernelcast/{path.with_suffix('').as_posix()}.abi3.so" for path in SOURCES}

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging")]

SHOW_IMPORTS = """
import importlib, pkgutil, sys
import kernelcast
seen = []
for module in pkgutil.walk_packages(kernelcast.__path__, "kernelcast."):
    # Bodies of kernels need triton to be imported, and a __main__ runs.
    if module.name.endswith(("_jit", "__main__")):
        continue
    found = importlib.import_module(module.name)
    assert found.__file__.startswith(sys.prefix), (module.name, found.__file__)
    seen.append(module.name)
print("\\n".join(seen))
"""

SHOW_ENGINE = """
import numpy as np
from kernelcast.costmodel import Forest
from kernelcast.costmodel.walk import Walk, engine
forest = Forest(np.zeros((1, 1), int), np.ones((1, 1)), np.array([[2.0, 3.0]]), base=0.5, width=1)
print(engine(), Walk([forest]).predict(np.array([[0.0], [1.0]], np.float32)).tolist())
"""

FAKES = """
import datasets, kernels, kernelcast.datasets, kernelcast.kernels
assert (datasets.WHO, kernels.WHO) == ("theirs", "theirs"), (datasets, kernels)
assert kernelcast.datasets.__name__ == "kernelcast.datasets"
assert kernelcast.kernels.problem("gemm", m=1, n=1, k=1)["k"] == 1
assert not hasattr(kernelcast.datasets, "WHO")
"""


def run(*command: object, cwd: Path, path: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel built from it). From a copy: a build leaves files beside the sources."""
    work = tmp_path_factory.mktemp("build")
    source = work / "source"
    source.mkdir()
    for name in ("kernelcast", *ROOMS):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "dist", source, cwd=work)
    [sdist], [wheel] = (work / "dist").glob("*.tar.gz"), (work / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel(built):
    return built[1]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    return install(wheel, tmp_path_factory.mktemp("installed"))


def install(wheel, folder):
    """The Python of a new environment that has the wheel, and the libraries of this one but not its kernelcast."""
    folder = folder / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    command = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    run(*command, cwd=folder)
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    # A path from a .pth file comes after the environment's own, and .pth files found there are not read.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_only_top_level_name_is_kernelcast(wheel):
    tops = {name.split("/")[0] for name in names_in(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kernelcast"}
    assert len(tops) == 2
    with zipfile.ZipFile(wheel) as archive:
        [path] = [name for name in archive.namelist() if name.endswith("top_level.txt")]
        assert archive.read(path).decode().split() == ["kernelcast"]


def test_every_module_and_folder_is_in_the_wheel(wheel):
    found = names_in(wheel)
    assert "kernelcast/py.typed" in found
    wanted = set()
    for folder, place in [("kernelcast", "kernelcast"), *((room, f"kernelcast/{room}") for room in ROOMS)]:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".so", ".c"):
                wanted.add(f"{place}/{path.relative_to(ROOT / folder).as_posix()}")
    ours = {name for name in found if name.startswith("kernelcast/")}
    # Without a C compiler the wheel lacks what is compiled, and works.
    assert ours - COMPILED == wanted
    assert "kernelcast/costmodel/_walk.pyi" in wanted


def test_no_folder_with_modules_lacks_an_init():
    for folder in ("kernelcast", *ROOMS):
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path.parent


def test_the_source_distribution_holds_what_a_build_needs(built):
    with tarfile.open(built[0]) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "kernels/ops/gemm/vendor.py"} <= inside
    assert "costmodel/_walk.c" in {path.as_posix() for path in SOURCES} <= inside


def test_one_wheel_serves_every_version_of_python(wheel):
    assert wheel.name.startswith("kernelcast-0.1.0-cp311-abi3-")


@pytest.mark.skipif(engine() != "compiled", reason="kernelcast was installed without a C compiler")
def test_what_is_compiled_is_in_the_wheel_and_is_used(wheel, installed, tmp_path):
    assert "kernelcast/costmodel/_walk.abi3.so" in COMPILED <= names_in(wheel)
    assert run(installed, "-c", SHOW_ENGINE, cwd=tmp_path).split() == ["compiled", "[[2.5,", "3.5]]"]


def test_without_a_compiler_numpy_walks(built, tmp_path):
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", source)
    run("env", "CC=/bin/false", *build, cwd=tmp_path)
    [wheel] = (source / "dist").iterdir()
    assert not {name for name in names_in(wheel) if name.endswith((".so", ".c"))}
    assert "kernelcast/costmodel/_walk.pyi" in names_in(wheel)
    python = install(wheel, tmp_path)
    assert run(python, "-c", SHOW_ENGINE, cwd=tmp_path).split() == ["numpy", "[[2.5,", "3.5]]"]


def test_the_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [path] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        facts = Parser().parsestr(archive.read(path).decode())
    assert facts["Name"] == "kernelcast"
    assert facts["License-Expression"] == "Apache-2.0"
    assert facts["Requires-Python"] == ">=3.11"
    assert set(facts.get_all("Provides-Extra")) == {"train", "ray", "dev"}
    base = {
        re.match(r"[A-Za-z0-9_-]+", line)[0]
        for line in facts.get_all("Requires-Dist")
        if "extra ==" not in line
    }
    assert base == {"numpy", "torch", "triton", "filelock", "typer", "rich"}


def test_every_module_can_be_imported_from_another_folder(installed, tmp_path):
    seen = run(installed, "-c", SHOW_IMPORTS, cwd=tmp_path).split()
    assert {f"kernelcast.{room}" for room in ROOMS} <= set(seen)
    assert {"kernelcast.errors", "kernelcast.cli", "kernelcast.kernels.ops.gemm.split_k"} <= set(seen)
    assert len(seen) > 80


def test_packages_of_other_publishers_keep_their_names(installed, tmp_path):
    theirs = tmp_path / "theirs"
    for name in ("datasets", "kernels"):
        (theirs / name).mkdir(parents=True)
        (theirs / name / "__init__.py").write_text("WHO = 'theirs'\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(installed, "-c", FAKES, cwd=elsewhere, path=theirs)
    missing = "import importlib.util as u; print([n for n in {!r} if u.find_spec(n)])".format(
        ["kernels", "featurizer", "costmodel", "training", "runtime"]
    )
    assert run(installed, "-c", missing, cwd=elsewhere).strip() == "[]"


def test_the_command_is_installed(installed, tmp_path):
    assert "select" in run(installed.parent / "kernelcast", "--help", cwd=tmp_path)

"""Importing kernelcast, and listing candidates, loads none of the heavy libraries."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cases import for_each

HEAVY = ("torch", "triton", "pandas", "sklearn", "xgboost", "mlflow", "pyarrow", "matplotlib", "ray", "scipy")

LIST = """
from kernelcast import kernels
from kernelcast.kernels.devices import device
described = kernels.problem("gemm", m=512, n=512, k=512, dtype="float16")
table = kernels.candidates(described, device("a100"), subset="default")
assert "triton_tiled" in {block.variant for block in table.blocks}
"""
RANK = f"""{LIST}
from kernelcast.costmodel import AnalyticModel
assert len(AnalyticModel().predict(described, table, device("a100")).order()) == len(table)
"""


def loaded_by(code: str) -> set[str]:
    """The heavy libraries that a new process has loaded after some code."""
    show = f"\nimport sys, json\nprint(json.dumps([n for n in {HEAVY!r} if n in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code + show], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_check_itself_sees_a_library():
    assert loaded_by("import sys\nsys.modules['pandas'] = sys") == {"pandas"}


CODES = [
    "import kernelcast, kernelcast.errors, kernelcast.settings; dir(kernelcast)",
    "import kernelcast.kernels, kernelcast.featurizer, kernelcast.costmodel, kernelcast.runtime",
    "import kernelcast; kernelcast.Selector; kernelcast.Problem; kernelcast.select; kernelcast.device('h100')",
    "import kernelcast.datasets, kernelcast.datasets.timing, kernelcast.datasets.journal, kernelcast.training",
    "import kernelcast.cli",
    "from kernelcast import kernels\nfor name in kernels.operation_names(): kernels.variants(name)",
    LIST,
    RANK,
]


def test_nothing_heavy_is_loaded():
    """All in one process: what is loaded stays loaded."""
    assert loaded_by("\n".join(CODES)) == set()


@pytest.mark.slow
@for_each("code", CODES)
def test_nothing_heavy_is_loaded_by_any_alone(code):
    assert loaded_by(code) == set()


def test_the_name_alone_loads_nothing_but_the_standard_library():
    code = """
import sys
before = set(sys.modules)
import kernelcast
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert new <= {"kernelcast", *sys.stdlib_module_names} | {n for n in new if n.startswith("__editable__")}, new
assert "numpy" not in sys.modules
"""
    assert loaded_by(code) == set()

"""What the run time needs: numpy, torch and the few libraries of a plain install, and nothing at import."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

#: Libraries of the extra, which a plain install does without.
EXTRA = ("pandas", "pyarrow", "sklearn", "xgboost", "mlflow", "matplotlib", "scipy", "ray")

BLOCK = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked by a test")


BLOCKED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Blocker())
"""


def run(code, *arguments, blocked=()):
    """Run a program with some libraries blocked; its last line is JSON."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + textwrap.dedent(code), ",".join(blocked), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_verifying_selection_needs_nothing_of_the_extra(tmp_path):
    seen = run(
        """
        import json, pathlib
        import torch
        import kernelcast as kc
        from kernelcast.datasets.timing import TimingPlan

        root = pathlib.Path(sys.argv[2])
        torch.set_num_threads(1)
        kc.configure(cache=root / "cache", store=root / "store", models=root / "models", mode="verify", top_k=2,
                     plan=TimingPlan(rounds=2, seconds=0.5))
        selection = kc.select("gemm", m=32, n=32, k=64)
        a, b = torch.randn(32, 64), torch.randn(64, 32)
        difference = float((kc.matmul(a, b) - a @ b).abs().max())
        again = kc.select("gemm", m=32, n=32, k=64)
        journal, = (root / "store" / "journal").iterdir()
        print(json.dumps({"source": selection.source, "measured": selection.measured, "difference": difference,
                          "again": again.source, "records": len(journal.read_text().splitlines()),
                          "loaded": sorted(BLOCKED & {name.partition(".")[0] for name in sys.modules})}))
        """,
        tmp_path,
        blocked=EXTRA,
    )
    assert seen["difference"] < 1e-3
    assert {**seen, "difference": 0} == {
        "source": "verified", "measured": 2, "difference": 0, "again": "cached", "records": 2, "loaded": []
    }  # fmt: skip


def test_predicting_for_another_device_needs_no_torch(tmp_path):
    seen = run(
        """
        import json, pathlib
        from kernelcast.kernels import problem
        from kernelcast.kernels.devices import device
        from kernelcast.runtime import Selector

        selector = Selector(device("h100"), models=pathlib.Path(sys.argv[2]), cache=False, store=False, mode="predict")
        selection = selector.select(problem("gemm", m=64, n=64, k=4096, dtype="float16"))
        print(json.dumps({"source": selection.source, "device": selection.device}))
        """,
        tmp_path,
        blocked=(*EXTRA, "torch", "triton"),
    )
    assert seen == {"source": "analytic", "device": "h100-sxm5-80gb"}


@pytest.mark.parametrize(
    "module", ["kernelcast", "kernelcast.runtime", "kernelcast.api", "kernelcast.datasets.timing"]
)
def test_importing_loads_nothing_heavy(module):
    loaded = run(
        f"""
        import importlib, json
        importlib.import_module({module!r})
        print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
        """
    )
    assert not {*EXTRA, "torch", "triton"} & set(loaded)
    if module == "kernelcast":
        assert "numpy" not in loaded

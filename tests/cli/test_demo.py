from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from cases import for_each

from kernelcast import kernels
from kernelcast.cli.demo import shape_text
from kernelcast.demo_problems import OPERATIONS, held_out_problems, training_problems
from kernelcast.kernels.detect import detect
from kernelcast.kernels.devices import device

DEVICES = [detect("cpu"), device("h100-sxm5-80gb")]


@for_each("where", DEVICES, ids=lambda where: where.kind)
@for_each("operation", OPERATIONS)
def test_there_are_at_least_twelve_training_problems_and_no_held_out_shape_is_among_them(operation, where):
    training, held_out = training_problems(operation, where), held_out_problems(operation, where)
    assert len(training) >= 12
    assert len(held_out) >= 5
    assert len(set(training)) == len(training)
    assert {problem.shape for problem in training}.isdisjoint(problem.shape for problem in held_out)
    for problem in [*training, *held_out]:
        assert problem.dtype == ("float16" if where.kind == "gpu" else "float32")
        assert (problem.threads == 0) == (where.kind == "gpu")
        # There is something to choose between, on either kind of device.
        assert len(kernels.candidates(problem, where, subset="default")) >= 2


def test_a_problem_in_short_names_what_is_not_the_default():
    problem = kernels.problem("attention", batch=1, heads=8, q_len=4, kv_len=4, head_dim=64, causal=True)
    assert shape_text(problem) == "batch=1 heads=8 kv_heads=8 q_len=4 kv_len=4 head_dim=64 causal"
    assert shape_text(kernels.problem("gemm", m=1, n=2, k=3)) == "m=1 n=2 k=3"
    assert shape_text(kernels.problem("gemm", m=1, n=2, k=3, layout="nt")) == "m=1 n=2 k=3 layout=nt"


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_the_demonstration_of_one_operation_end_to_end(tmp_path):
    environment = {**os.environ, "KERNELCAST_HOME": str(tmp_path / "home"), "KERNELCAST_DISABLE": "0"}
    environment.pop("KERNELCAST_MODE", None)
    command = [sys.executable, "-m", "kernelcast", "demo", "--op", "softmax", "--no-track", "--json"]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout)
    (found,) = figures["operations"]
    expected = held_out_problems("softmax", detect("cpu"))
    assert figures["complete"] is True
    assert found["held_out_problems"] == len(found["selections"]) == len(expected)
    assert 0.0 < found["efficiency_with_default"]["3"]["geomean"] <= 1.0
    for selection in found["selections"]:
        assert selection["source"] == "verified"
        assert selection["measured"] == 3
        # How much faster depends on what else runs here; that the default raced along does not.
        assert selection["default_us"] > 0
        if selection["candidate"]["variant"] == "vendor":
            assert selection["speedup"] == 1.0
    for name in ("store", "models", "report"):
        assert figures[name].startswith(str(tmp_path / "home"))
    assert (tmp_path / "home" / "report.html").read_text().startswith("<!DOCTYPE html>")

    refused = subprocess.run(
        [*command[:4], "--op", "conv3d"], env=environment, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "Known: gemm, conv2d, attention, softmax" in refused.stderr

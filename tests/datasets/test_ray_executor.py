"""Measuring through a local Ray cluster, and losing a worker in the middle."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kernelcast.datasets.collect import collect
from kernelcast.datasets.isolation import Limits
from kernelcast.datasets.jobs import Job
from kernelcast.datasets.ray_executor import Actor, RayExecutor
from kernelcast.datasets.store import Store
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import KernelcastError, MissingExtraError
from kernelcast.kernels import Candidate, problem, registry
from kernelcast.kernels.detect import detect

NAME = "test_misbehaving"
HERE = detect("cpu")
PLAN = TimingPlan(rounds=3, seconds=1.0, sample_us=20.0)
INIT = {"num_cpus": 2, "num_gpus": 0, "include_dashboard": False}
TOOLS = Path(__file__).parents[1] / "tools"

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@pytest.fixture(autouse=True)
def _in_the_catalogue(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELCAST_TEST_MARKS", str(tmp_path))
    # Ray has its workers import from the current folder first, where the package's parts lie unpacked.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOOLS), os.environ.get("PYTHONPATH", "")]))
    import misbehaving

    if NAME not in registry._operations:
        misbehaving.register()
    yield
    misbehaving.forget()


def good(copy=0):
    return Candidate.of("vendor", {"copy": copy})


def bad(deed, call=0):
    return Candidate.of("bad", {"deed": deed, "call": call})


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"kernelcast\[ray\]"):
        RayExecutor()


def test_an_actor_refuses_jobs_of_another_device():
    actor = Actor("cpu", {"seconds": 1.0, "memory_bytes": 2.0**30})
    assert actor.describe() == {"device": HERE.to_dict(), "pid": os.getpid()}
    other = replace(HERE, name="another", cores=HERE.cores + 1)
    (told,) = actor.begin({"device": other.to_dict()})
    assert told["kind"] == "refused"
    assert told["detail"] == f"The job is for a another; this worker has a {HERE.name}."
    assert actor.poll() == []
    missing = {
        "device": HERE.to_dict(),
        "problem": problem(NAME, n=4, threads=1).to_dict(),
        "candidates": [[0, Candidate.of("nowhere").key]],
        "imports": [],
    }
    (told,) = actor.begin(missing)
    assert told["kind"] == "refused"
    assert "KERNELCAST_IMPORT" in told["detail"]
    actor.stop()


@needs_ray
@pytest.mark.slow
def test_a_worker_killed_in_the_middle_costs_its_current_candidate_alone(tmp_path):
    """The job goes on in a new worker, with what the lost one had told of it."""
    job = Job(problem(NAME, n=8, threads=1), (good(0), bad("exit"), bad("wait"), good(1)))
    plain = Job(problem("softmax", rows=8, columns=8, threads=1), (Candidate.of("vendor"),))
    killed, checked = [], []

    def kill(executor):
        deadline = time.monotonic() + 200
        # Until the collecting process has heard of the first two.
        while time.monotonic() < deadline:
            if (tmp_path / "waiting").exists() and max(checked, default=0) >= 2:
                break
            time.sleep(0.01)
        killed.extend(executor.pids)
        os.kill(executor.pids[0], signal.SIGKILL)

    with RayExecutor(limits=Limits(seconds=10.0), init=INIT) as executor:
        assert executor.device == HERE
        assert executor.left_out == []
        assert len(executor.pids) == 1  # two on one CPU would disturb each other
        thread = threading.Thread(target=kill, args=(executor,))
        thread.start()
        results = {
            result.job.problem.operation: result
            for result in executor.run(
                [job, plain], plan=PLAN, workload="w", on_candidate=lambda job, count: checked.append(count)
            )
        }
        thread.join()
        assert len(killed) == 1
        assert executor.pids != killed
    found = {str(each.candidate): each.outcome for each in results[NAME].measurements}
    assert found == {
        str(good(0)): "ok",
        str(bad("exit")): "crash",
        str(bad("wait")): "timeout",  # waits again in the next worker, now until the limit
        str(good(1)): "ok",
    }
    assert [each.outcome for each in results["softmax"].measurements] == ["ok"]
    assert {each.device_fingerprint for each in results[NAME].measurements} == {HERE.fingerprint}
    assert {each.workload for each in results[NAME].measurements} == {"w"}
    # The one that ended its process had been told of, and was not run again.
    assert max(checked) == 4


@needs_ray
@pytest.mark.slow
def test_collecting_on_a_cluster_and_a_device_that_it_lacks(tmp_path):
    problems = [problem("softmax", rows=rows, columns=8, threads=1) for rows in (4, 8, 16)]
    with RayExecutor(HERE.name, init=INIT) as executor:
        with pytest.raises(KernelcastError, match="No device of the Ray cluster is a h100"):
            RayExecutor("h100")
        summary = collect(
            problems, executor.device, tmp_path / "store", plan=PLAN, executor=executor, workload="w"
        )
        again = collect(problems, executor.device, tmp_path / "store", plan=PLAN, executor=executor)
    assert (summary.problems, summary.complete) == (3, True)
    assert summary.outcomes == {"ok": summary.measured}
    assert (again.measured, again.known) == (0, summary.measured)
    assert len(Store(tmp_path / "store").ids()) == summary.measured > 3

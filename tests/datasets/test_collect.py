"""Collecting: what is known is not measured again, and nothing that was measured is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import pytest
import torch

from kernelcast.datasets.collect import Progress, collect, record_id
from kernelcast.datasets.journal import Journal
from kernelcast.datasets.store import Store
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import KernelcastError, StoreError
from kernelcast.kernels import (
    Device,
    Dim,
    Operation,
    Parameter,
    ProblemSchema,
    Rule,
    Tolerance,
    Variant,
    Work,
    candidates,
    problem,
    register_operation,
    register_variant,
    registry,
)
from kernelcast.kernels.detect import detect
from kernelcast.kernels.devices import device as known_device

HERE = detect("cpu")
PLAN = TimingPlan(rounds=2, seconds=0.2, sample_us=20.0)
BUILT: list[tuple[int, str]] = []


class Doubling(Operation):
    """y = 2 x."""

    name = "test_collect"
    doc = "2 x"
    schema = ProblemSchema("test_collect", (Dim("n", "elements"),), ("float32",))

    def make_inputs(self, problem, *, seed, device):
        return (torch.randn(problem["n"], generator=torch.Generator().manual_seed(seed)),)

    def reference(self, problem, *inputs):
        return 2 * inputs[0].double()

    def tolerance(self, problem):
        return Tolerance(1e-3, 1e-6)

    def flops(self, problem):
        return float(problem["n"])

    def traffic_bytes(self, problem):
        return 8.0 * problem["n"]


class Vendor(Variant):
    """What the others are copies of."""

    name = "vendor"
    backend = "vendor"
    doc = "2 x"

    def work(self, problem, columns, device):
        return Work(1.0, 1.0)

    def build(self, problem, config):
        BUILT.append((problem["n"], self.name))
        return lambda x: 2 * x


class Chunked(Vendor):
    """Two configs, one of them in the quick subset."""

    name = "chunked"
    backend = "torch"
    parameters = (Parameter("chunks", (1, 2), "parts", quick=(1,)),)


class Broken(Vendor):
    """Fails wherever it is legal."""

    name = "broken"
    backend = "torch"
    rules = (Rule("odd", "as a test wants it", check=lambda problem, columns, device: problem["n"] % 2 == 1),)

    def build(self, problem, config):
        BUILT.append((problem["n"], self.name))
        raise RuntimeError("cannot be built")


@pytest.fixture(autouse=True)
def _in_the_catalogue():
    """The operation above is there for this file's tests alone."""
    register_operation(Doubling)
    for variant in (Vendor, Chunked, Broken):
        register_variant(Doubling.name)(variant)
    BUILT.clear()
    yield
    del registry._operations[Doubling.name], registry._variants[Doubling.name]


def problems(*sizes):
    return [problem("test_collect", n=n, threads=1) for n in sizes]


def run(store, *sizes, **options):
    return collect(problems(*sizes), HERE, store, plan=PLAN, **options)


def test_every_legal_candidate_is_measured_once(tmp_path):
    summary = run(tmp_path, 8, 9, workload="w")
    # 8 has vendor and chunked twice; 9 has broken as well.
    assert (summary.problems, summary.measured, summary.known) == (2, 7, 0)
    assert summary.outcomes == {"ok": 6, "crash": 1}
    assert summary.failures == [
        "broken on test_collect(n=9, float32, threads=1): crash: RuntimeError: cannot be built."
    ]
    assert summary.complete
    assert not summary.interrupted
    records = list(Store(tmp_path).measurements())
    assert len(records) == 7
    assert {r.id for r in records} == {
        record_id(p, c, HERE) for p in problems(8, 9) for c in candidates(p, HERE)
    }
    assert {r.workload for r in records} == {"w"}
    assert Store(tmp_path).devices() == {HERE.fingerprint: HERE}


def test_a_second_run_measures_nothing_and_failures_are_known_too(tmp_path):
    run(tmp_path, 8, 9)
    BUILT.clear()
    summary = run(tmp_path, 8, 9)
    assert (summary.measured, summary.known, summary.complete) == (0, 7, True)
    assert summary.outcomes == {}
    assert BUILT == []
    assert len(list(Store(tmp_path).measurements())) == 7


def test_after_compaction_all_is_known_still(tmp_path):
    run(tmp_path, 8)
    Store(tmp_path).compact()
    assert run(tmp_path, 8, 10).measured == 3


def test_a_new_variant_is_all_that_is_measured(tmp_path):
    run(tmp_path, 8, 9)

    class Late(Vendor):
        """Comes after the first run."""

        name = "late_comer"

    BUILT.clear()
    register_variant("test_collect")(Late)
    summary = run(tmp_path, 8, 9)
    assert (summary.measured, summary.known) == (2, 7)
    assert BUILT == [(8, "late_comer"), (9, "late_comer")]
    assert len(Store(tmp_path).ids()) == 9


def test_a_variant_that_fails_in_the_same_way_is_named_once_and_a_wrong_default_is_doubted(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Doubling, "reference", lambda self, problem, x: 3 * x.double())
    summary = run(tmp_path, 8, 9, 11)
    assert [(sentence.split(":")[0], "This is the default" in sentence) for sentence in summary.failures] == [
        ("vendor on test_collect(n=8, float32, threads=1)", True),
        ("chunked(chunks=1) on test_collect(n=8, float32, threads=1)", False),
        ("broken on test_collect(n=9, float32, threads=1)", False),
    ]


def test_a_problem_given_twice_is_measured_once(tmp_path):
    summary = run(tmp_path, 8, 8)
    assert (summary.problems, summary.measured, summary.known) == (1, 3, 0)


def test_subset_and_backends_choose(tmp_path):
    assert run(tmp_path, 8, subset="default").measured == 2
    assert run(tmp_path, 8, backends=["torch"]).measured == 1
    assert run(tmp_path, 8).measured == 0


def test_a_budget_ends_the_problem_in_hand_with_what_was_checked_and_starts_no_other(tmp_path):
    summary = run(tmp_path, 8, 10, 12, budget_seconds=1e-9)
    assert (summary.problems, summary.measured, summary.complete) == (0, 0, False)

    def slow(progress: Progress):
        if progress.problem is not None:
            time.sleep(0.2)

    summary = run(tmp_path, 8, 10, 12, budget_seconds=0.1, on_progress=slow)
    assert (summary.problems, summary.measured) == (1, 1)
    assert not summary.complete
    assert not summary.interrupted
    (unfinished,) = summary.unfinished
    assert (unfinished.measured, unfinished.candidates, unfinished.best) == (1, 3, "vendor")
    assert unfinished.latency_us > 0
    summary = run(tmp_path, 8, 10, 12)
    assert (summary.measured, summary.known, summary.unfinished) == (8, 1, [])


def test_the_last_problem_cut_short_leaves_the_collection_incomplete(tmp_path):
    def slow(progress: Progress):
        if progress.problem is not None:
            time.sleep(0.2)

    summary = run(tmp_path, 8, budget_seconds=0.1, on_progress=slow)
    assert (summary.measured, summary.complete) == (1, False)
    summary = run(tmp_path, 8, budget_seconds=3600.0)
    assert (summary.measured, summary.complete, summary.unfinished) == (2, True, [])


def test_progress_counts_up_to_the_total(tmp_path):
    run(tmp_path, 8)
    seen: list[Progress] = []
    run(tmp_path, 8, 9, on_progress=seen.append)
    assert {p.total for p in seen} == {7}
    done = [p.done for p in seen]
    assert done == sorted(done)
    assert done[0] == 3
    assert (seen[-1].done, seen[-1].measured, seen[-1].known) == (7, 4, 3)


def test_an_interrupt_ends_with_what_was_done(tmp_path):
    def interrupt(progress: Progress):
        if progress.problem is not None and progress.problem["n"] == 10:
            raise KeyboardInterrupt

    summary = run(tmp_path, 8, 10, 12, on_progress=interrupt)
    assert (summary.complete, summary.interrupted) == (False, True)
    assert (summary.measured, summary.outcomes) == (3, {"ok": 3})
    assert len(Store(tmp_path).ids()) == 3
    summary = run(tmp_path, 8, 10, 12)
    assert (summary.measured, summary.known, summary.complete) == (6, 3, True)


@pytest.fixture
def interruptible():
    """Interrupts raise KeyboardInterrupt: what starts a job in the background may have had them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_records_are_written_waits_for_the_last_of_them(
    tmp_path, monkeypatch, interruptible
):
    append = Journal.append

    def interrupted(self, measurement):
        append(self, measurement)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Journal, "append", interrupted)
    before = signal.getsignal(signal.SIGINT)
    summary = run(tmp_path, 8, 10)
    assert signal.getsignal(signal.SIGINT) is before
    assert (summary.problems, summary.measured, summary.interrupted) == (1, 3, True)
    assert len(Store(tmp_path).ids()) == 3


def test_collecting_in_another_thread(tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(run(tmp_path, 8)))
    thread.start()
    thread.join()
    assert done[0].measured == 3


def test_what_does_not_fit_in_memory_is_skipped_and_said(tmp_path):
    seen: list[Progress] = []
    summary = run(tmp_path, 8, 2**39, 10, on_progress=seen.append)
    assert (seen[-1].done, seen[-1].total) == (6, 6)
    assert (summary.measured, summary.complete) == (6, True)
    assert len(summary.skipped) == 1
    assert "GiB" in summary.skipped[0]
    assert len(Store(tmp_path).ids()) == 6


@pytest.mark.parametrize(
    "elsewhere",
    [known_device("a100"), replace(HERE, cores=HERE.cores + 1, name="another")],
    ids=["gpu", "another cpu"],
)
def test_another_machines_device_is_refused(tmp_path, elsewhere: Device):
    if elsewhere.kind == "gpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(KernelcastError, match=elsewhere.name):
        collect(problems(8), elsewhere, tmp_path / "store", plan=PLAN)
    assert not (tmp_path / "store").exists()


def test_a_store_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be created"):
        run(tmp_path / "file" / "store", 8)


# --- Kills, in processes of their own ---

OPERATION = """
import time
import torch
from kernelcast.kernels import *


class Slow(Operation):
    name = "test_collect_killed"
    doc = "2 x"
    schema = ProblemSchema("test_collect_killed", (Dim("n", "elements"),), ("float32",))

    def make_inputs(self, problem, *, seed, device):
        return (torch.ones(problem["n"]),)

    def reference(self, problem, *inputs):
        return 2 * inputs[0].double()

    def tolerance(self, problem):
        return Tolerance(1e-3, 1e-6)

    def flops(self, problem):
        return 1.0

    def traffic_bytes(self, problem):
        return 8.0 * problem["n"]


class Vendor(Variant):
    name = "vendor"
    backend = "vendor"
    doc = "2 x"
    parameters = (Parameter("which", tuple(range(5)), "copies of one"),)

    def work(self, problem, columns, device):
        return Work(1.0, 1.0)

    def build(self, problem, config):
        def run(x):
            time.sleep(0.001)
            return 2 * x

        return run


register_operation(Slow)
register_variant("test_collect_killed")(Vendor)
"""

RUN = """
import json, signal, sys
from pathlib import Path
import slow_operation
from kernelcast.datasets.collect import collect
from kernelcast.datasets.timing import TimingPlan
from kernelcast.kernels import problem
from kernelcast.kernels.detect import detect

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may have it ignored
    wanted = [problem("test_collect_killed", n=n) for n in range(1, int(sys.argv[2]) + 1)]
    plan = TimingPlan(rounds=2, seconds=0.1, sample_us=10.0)
    print("ready", flush=True)
    summary = collect(wanted, detect("cpu"), Path(sys.argv[1]), plan=plan)
    print(json.dumps({"measured": summary.measured, "known": summary.known, "complete": summary.complete,
                      "interrupted": summary.interrupted}))
"""


class Child:
    """Runs the script above on so many problems of five candidates."""

    def __init__(self, folder, store, count):
        (folder / "slow_operation.py").write_text(OPERATION)
        (folder / "run.py").write_text(textwrap.dedent(RUN))
        self.journal = store / "journal"
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "run.py"), str(store), str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # The script's own folder is to be found, and the parent's safe path would leave it out.
            env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        )

    def wait_for_records(self, count, timeout=120.0):
        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            lines = sum(path.read_bytes().count(b"\n") for path in self.journal.glob("*.jsonl"))
            if lines >= count:
                return
            time.sleep(0.002)
        raise AssertionError(f"no {count} records: {self.process.communicate()}")

    def result(self):
        out, err = self.process.communicate(timeout=240)
        assert self.process.returncode == 0, err
        return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_killed_at_random_moments_keeps_what_was_complete_and_measures_only_the_rest(tmp_path):
    store, count = tmp_path / "store", 40
    moments = random.Random(0)
    complete: set[str] = set()
    for _ in range(4):
        child = Child(tmp_path, store, count)
        child.wait_for_records(len(complete) + moments.randrange(1, 40))
        time.sleep(moments.random() * 0.05)
        child.process.send_signal(signal.SIGKILL)
        child.process.wait()
        ids = Store(store).ids()
        assert complete < ids
        complete = ids
    # A line that was cut short is no record, and no fault.
    assert Store(store).check() == []
    assert Child(tmp_path, store, count).result() == {
        "measured": 5 * count - len(complete),
        "known": len(complete),
        "complete": True,
        "interrupted": False,
    }
    lines = [
        json.loads(line)["id"]
        for path in (store / "journal").glob("*.jsonl")
        for line in path.read_bytes().split(b"\n")[:-1]
    ]
    assert len(lines) == len(set(lines)) == 5 * count


@pytest.mark.slow
def test_ctrl_c_ends_with_a_summary(tmp_path):
    store, count = tmp_path / "store", 200
    child = Child(tmp_path, store, count)
    child.wait_for_records(10)
    child.process.send_signal(signal.SIGINT)
    summary = child.result()
    assert (summary["complete"], summary["interrupted"]) == (False, True)
    assert 10 <= summary["measured"] < 5 * count
    assert summary["measured"] == len(Store(store).ids())


def test_a_line_that_a_kill_cut_short_is_measured_again(tmp_path):
    run(tmp_path, 8)
    (path,) = (tmp_path / "journal").glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    summary = run(tmp_path, 8)
    assert (summary.measured, summary.known) == (1, 2)
    assert len(Store(tmp_path).ids()) == 3


def test_two_writers_share_a_store(tmp_path):
    with Journal(tmp_path) as other:
        run(tmp_path, 8)
        other.append(replace(next(Store(tmp_path).measurements()), workload="again"))
    assert run(tmp_path, 8).known == 3
    assert len(Store(tmp_path).ids()) == 3

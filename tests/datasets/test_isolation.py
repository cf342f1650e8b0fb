"""What a candidate does in a child is its outcome, and the others go on."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from kernelcast.datasets import jobs as jobs_module
from kernelcast.datasets.collect import collect
from kernelcast.datasets.isolation import Isolated, Limits, Supervisor, trusted
from kernelcast.datasets.isolation_job import LOST_ROUNDS, LOST_SILENT, JobState, imports_of
from kernelcast.datasets.jobs import InProcess, Job
from kernelcast.datasets.observing import Facts, Observer
from kernelcast.datasets.record import Protocol
from kernelcast.datasets.store import Store
from kernelcast.datasets.timing import TimingPlan, measure
from kernelcast.errors import KernelcastError, SettingsError
from kernelcast.kernels import Candidate, problem, registry
from kernelcast.kernels.detect import detect
from kernelcast.kernels.devices import device as known_device

NAME = "test_misbehaving"
HERE = detect("cpu")
PLAN = TimingPlan(rounds=4, least_rounds=2, seconds=5.0, sample_us=20.0)
TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture(autouse=True)
def _in_the_catalogue(tmp_path, monkeypatch):
    """The operation is there for this file's tests alone; its variants leave their marks in a folder of the test's."""
    monkeypatch.setenv("KERNELCAST_TEST_MARKS", str(tmp_path))
    import misbehaving

    if NAME not in registry._operations:
        misbehaving.register()
    yield
    misbehaving.forget()


def good(copy=0):
    return Candidate.of("vendor", {"copy": copy})


def bad(deed, call=1):
    return Candidate.of("bad", {"deed": deed, "call": call})


def job_of(*candidates, n=64, seconds=math.inf):
    return Job(problem(NAME, n=n, threads=1), candidates, seconds)


# --- What is made of what a child told ---


def state_of(*candidates, plan=PLAN, seconds=math.inf):
    state = JobState(job_of(*candidates, seconds=seconds), HERE, plan, "w")
    facts = Facts.here(state.job.problem, candidates, HERE, Protocol("p", cache="warm"))
    state.take({"kind": "begun", "facts": json.loads(json.dumps(facts.to_dict()))})
    return state


def prepare(state, *numbers):
    for number in numbers:
        state.take({"kind": "prepared", "number": number})


def rounds(state, *rows):
    state.take({"kind": "timing"})
    for row in rows:
        # As JSON has it: keys are texts.
        state.take({"kind": "round", "samples": {str(number): value for number, value in row.items()}})


def lose(state, number, outcome="crash", outside=False):
    state.take({"kind": "lost", "number": number, "outcome": outcome, "detail": "gone", "outside": outside})


def outcomes(result):
    return {str(each.candidate): (each.outcome, each.samples_us) for each in result.measurements}


def test_a_job_that_ends_well_has_every_sample_and_the_error_of_each():
    state = state_of(good(0), good(1))
    prepare(state, 0, 1)
    rounds(state, {0: 10.0, 1: 20.0}, {0: 12.0, 1: 22.0}, {0: 11.0})
    state.take({"kind": "done"})
    assert state.ended
    result = state.result()
    assert [each.samples_us for each in result.measurements] == [(10.0, 12.0, 11.0), (20.0, 22.0)]
    assert [each.workload for each in result.measurements] == ["w", "w"]
    assert result.skipped == ""
    assert all(each.protocol.error_log > 0 for each in result.measurements)
    assert result.measurements[0].environment.variant_hash != "unknown"


def test_the_one_that_ran_gets_the_outcome_and_the_rest_is_for_the_next_process():
    state = state_of(good(0), bad("segfault"), good(1), good(2))
    prepare(state, 0)
    lose(state, 1)
    assert not state.ended
    # What was never prepared comes first.
    assert state.todo == [2, 3, 0]
    assert [number for number, _ in state.request()["candidates"]] == [2, 3, 0]
    prepare(state, 2, 3, 0)
    rounds(state, *[{0: 1.0, 2: 2.0, 3: 3.0}] * 2)
    state.take({"kind": "done"})
    found = outcomes(state.result())
    assert found[str(bad("segfault"))] == ("crash", ())
    assert found[str(good(0))] == ("ok", (1.0, 1.0))
    assert [each.candidate for each in state.result().measurements] == list(state.job.candidates)


def test_samples_of_enough_rounds_are_kept_and_a_single_round_is_measured_again():
    state = state_of(good(0), good(1), bad("hang", 40))
    prepare(state, 0, 1, 2)
    rounds(state, {0: 1.0, 1: 9.0, 2: 1.0})
    lose(state, 2, "timeout")
    assert state.todo == [0, 1]
    state = state_of(good(0), good(1), bad("hang", 40))
    prepare(state, 0, 1, 2)
    # The second was out of the race after one round: that is all that it gets.
    rounds(state, {0: 1.0, 1: 9.0, 2: 1.0}, {0: 1.5, 2: 1.0})
    lose(state, 2, "timeout")
    assert state.ended
    assert outcomes(state.result()) == {
        str(good(0)): ("ok", (1.0, 1.5)),
        str(good(1)): ("ok", (9.0,)),
        str(bad("hang", 40)): ("timeout", ()),
    }


def test_after_some_losses_in_the_rounds_any_sample_is_kept():
    candidates = [good(0), *(bad("hang", call) for call in (1, 4, 40))]
    state = state_of(*candidates)
    for lost in range(1, LOST_ROUNDS + 1):
        assert 0 in state.todo
        prepare(state, *state.todo)
        rounds(state, dict.fromkeys(state.todo, 1.0))
        lose(state, lost)
    assert state.ended
    assert outcomes(state.result())[str(good(0))] == ("ok", (1.0,))


def test_a_process_that_others_ended_is_not_blamed_on_the_candidate_the_first_time():
    state = state_of(good(0), good(1))
    prepare(state, 0)
    lose(state, 1, outside=True)
    assert state.todo == [1, 0]
    lose(state, 1, outside=True)
    assert state.todo == [0]
    assert outcomes(state.result()) == {str(good(1)): ("crash", ())}


def test_processes_that_end_without_telling_anything_end_the_job():
    state = state_of(good(0), good(1))
    prepare(state, 0)
    for _ in range(LOST_SILENT):
        assert not state.ended
        lose(state, None)
    assert state.ended
    assert state.result().measurements == ()
    assert "without a candidate to blame: gone" in state.result().skipped


def test_what_a_budget_leaves_out_is_not_in_the_result():
    state = state_of(good(0), good(1), seconds=1.0)
    prepare(state, 0)
    rounds(state, {0: 1.0})
    state.take({"kind": "done"})
    result = state.result()
    assert [each.candidate for each in result.measurements] == [good(0)]
    assert result.skipped == ""


def test_an_interrupt_keeps_outcomes_and_what_was_timed_well_enough():
    state = state_of(good(0), bad("raise"), good(1))
    prepare(state, 0, 2)
    state.take({"kind": "failed", "number": 1, "outcome": "crash", "detail": "refuses"})
    rounds(state, {0: 1.0, 2: 1.0})
    state.interrupt()
    assert list(outcomes(state.result())) == [str(bad("raise"))]


def test_failed_compilations_are_outcomes_before_anything_was_measured():
    candidates = (good(0), good(1))
    state = JobState(job_of(*candidates), HERE, PLAN, "w")
    facts = Facts.here(state.job.problem, candidates, HERE, Protocol("p"))
    state.take(
        {"kind": "compiled", "facts": facts.to_dict(), "outcomes": {"0": ["timeout", "compiling: over 1 s"]}}
    )
    assert state.todo == [1]
    (record,) = state.result().measurements
    assert (record.candidate, record.outcome, record.detail) == (good(0), "timeout", "compiling: over 1 s")


def test_what_is_left_goes_by_the_numbers_that_were_given():
    first = state_of(good(0), good(1), bad("raise"))
    first.take({"kind": "failed", "number": 0, "outcome": "crash", "detail": "x"})
    numbers = first.todo
    second = JobState(job_of(good(1), bad("raise")), HERE, PLAN, "", numbers)
    assert second.todo == [1, 2]
    assert second.request()["candidates"] == first.request()["candidates"]


def test_modules_to_import_are_those_outside_the_package():
    import misbehaving

    assert imports_of(job_of(good())) == [["misbehaving", misbehaving.__file__]]
    assert imports_of(Job(problem("softmax", rows=2, columns=2), (Candidate.of("vendor"),))) == []


def test_the_backend_says_who_is_trusted_unless_the_variant_does(monkeypatch):
    import misbehaving

    here = problem(NAME, n=4)
    assert (trusted(here, good()), trusted(here, bad("wrong"))) == (True, False)
    monkeypatch.setattr(misbehaving.Bad, "trusted", True)
    monkeypatch.setattr(misbehaving.Good, "trusted", False)
    assert (trusted(here, good()), trusted(here, bad("wrong"))) == (False, True)
    rows = problem("softmax", rows=2, columns=2)
    names = registry.variants("softmax")
    assert {name for name in names if not trusted(rows, Candidate.of(name))} == {
        name for name in names if name.startswith("triton")
    }


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"seconds": math.inf}, {"memory_bytes": 0}])
def test_limits_must_be_positive(limits):
    with pytest.raises(SettingsError, match="must be positive"):
        Limits(**limits)


def test_a_measuring_process_does_not_collect(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs_module, "_in_child", True)
    with pytest.raises(KernelcastError, match="__main__"):
        collect([problem(NAME, n=4)], HERE, tmp_path / "store")
    with pytest.raises(KernelcastError, match="__main__"):
        list(Isolated(HERE).run([job_of(good())], plan=PLAN, workload=""))


def test_trusted_jobs_are_measured_in_this_process(monkeypatch):
    monkeypatch.setattr(Supervisor, "begin", lambda *_: pytest.fail("a child was started"))
    with Isolated(HERE, only_untrusted=True) as executor:
        (result,) = executor.run([job_of(good())], plan=PLAN, workload="w")
    assert [each.outcome for each in result.measurements] == ["ok"]


# --- The hooks of the protocol, in this process ---


class Log(Observer):
    def __init__(self):
        self.seen = []

    def begun(self, facts):
        self.seen.append("begun")

    def preparing(self, number):
        self.seen.append(("preparing", number))

    def prepared(self, number):
        self.seen.append(("prepared", number))

    def failed(self, number, outcome, detail):
        self.seen.append(("failed", number, outcome))

    def timing(self):
        self.seen.append("timing")

    def visiting(self, number):
        self.seen.append(("visiting", number))

    def round(self, samples_us):
        self.seen.append(("round", sorted(samples_us)))


def test_an_observer_is_told_what_is_done_in_order():
    log = Log()
    table = [good(), bad("wrong"), bad("raise", 4)]
    plan = TimingPlan(rounds=2, sample_us=1.0, hopeless=1e9)
    trial = measure(problem(NAME, n=8, threads=1), table, HERE, plan=plan, observer=log)
    assert log.seen[:8] == [
        "begun",
        ("preparing", 0),
        ("prepared", 0),
        ("preparing", 1),
        ("failed", 1, "wrong_result"),
        ("prepared", 1),
        ("preparing", 2),
        ("prepared", 2),
    ]
    assert log.seen[8] == "timing"
    # Two calls in the check, one that is dropped, and the one that raises.
    assert log.seen.count(("failed", 2, "crash")) == 1
    assert log.seen.count(("visiting", 2)) == 1
    assert [each for each in log.seen if each[0] == "round"] == [("round", [0])] * 2
    assert [each.outcome for each in trial.measurements] == ["ok", "wrong_result", "crash"]


def test_scratch_memory_beyond_the_limit_is_an_outcome_without_running():
    log = Log()
    table = [good(), Candidate.of("hungry")]
    trial = measure(problem(NAME, n=8, threads=1), table, HERE, plan=PLAN, observer=log, memory_bytes=2.0**30)
    assert [each.outcome for each in trial.measurements] == ["ok", "out_of_resources"]
    assert "1024.00 GiB" in trial.measurements[1].detail
    assert ("preparing", 1) not in log.seen
    assert [each.outcome for each in measure(problem(NAME, n=8), table, HERE, plan=PLAN).measurements] == [
        "ok",
        "ok",
    ]


def test_a_problem_beyond_the_limit_is_refused():
    with pytest.raises(KernelcastError, match=r"needs about 0\.0 GiB"):
        measure(problem(NAME, n=10**5, threads=1), [good()], HERE, plan=PLAN, memory_bytes=1000.0)


def test_a_budget_leaves_candidates_out_and_times_those_that_were_checked():
    table = [good(0), good(1), good(2)]
    trial = measure(problem(NAME, n=8, threads=1), table, HERE, plan=PLAN, budget_seconds=1e-6)
    assert [(each.candidate, each.outcome) for each in trial.measurements] == [(good(0), "ok")]
    assert len(trial.measurements[0].samples_us) == 1
    assert len(trial.paired_log) == 1
    (result,) = InProcess(HERE).run([job_of(*table, seconds=1e-6)], plan=PLAN, workload="")
    assert (len(result.measurements), result.skipped) == (1, "")


# --- Children ---


@pytest.mark.slow
def test_whatever_a_candidate_does_is_its_outcome_and_the_others_go_on(tmp_path):
    deeds = {
        "segfault": "crash",
        "hang": "timeout",
        "memory": "out_of_resources",
        "bad_alloc": "out_of_resources",
        "exit": "crash",
        "raise": "crash",
        "wrong": "wrong_result",
        "nan": "wrong_result",
        "mutate": "wrong_result",
    }
    table = [good(0), *map(bad, deeds), bad("killed_once"), good(1), Candidate.of("hungry")]
    with Isolated(HERE, limits=Limits(seconds=1.5, memory_bytes=2.0**30)) as executor:
        (result,) = executor.run([job_of(*table)], plan=PLAN, workload="w")
        pid = executor._supervisor._child.pid
    assert [each.candidate for each in result.measurements] == table
    found = {str(each.candidate): each.outcome for each in result.measurements}
    assert found == {
        **{str(bad(deed)): outcome for deed, outcome in deeds.items()},
        str(good(0)): "ok",
        str(good(1)): "ok",
        str(bad("killed_once")): "ok",
        str(Candidate.of("hungry")): "out_of_resources",
    }
    details = {each.candidate: each.detail for each in result.measurements}
    assert "SIGSEGV" in details[bad("segfault")]
    assert "string_at" in details[bad("segfault")]
    assert details[bad("hang")] == "over 1.5 s"
    assert "are NaN" in details[bad("nan")]
    assert "with exit status 0" in details[bad("exit")]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_a_death_in_the_rounds_costs_the_one_that_ran(tmp_path):
    # Two calls in the check and two in each visit: the eighth is in the third round.
    plan = TimingPlan(
        rounds=6, least_rounds=2, seconds=60.0, candidate_seconds=60.0, sample_us=1.0, hopeless=1e9
    )
    table = [good(0), bad("abort", 40), bad("segfault", 8), good(1)]
    with Isolated(HERE) as executor:
        first, second = executor.run([job_of(*table), job_of(good(2))], plan=plan, workload="")
    found = {each.candidate: each for each in first.measurements}
    assert found[bad("segfault", 8)].outcome == "crash"
    assert "SIGSEGV" in found[bad("segfault", 8)].detail
    assert [found[each].outcome for each in (good(0), good(1), bad("abort", 40))] == ["ok"] * 3
    assert [len(found[each].samples_us) for each in (good(0), good(1), bad("abort", 40))] == [2] * 3
    assert [each.outcome for each in second.measurements] == ["ok"]


@pytest.mark.slow
def test_inputs_that_end_the_process_end_their_job_alone():
    with Isolated(HERE) as executor:
        first, second = executor.run([job_of(good(), n=13), job_of(good())], plan=PLAN, workload="")
    assert (first.measurements, second.skipped) == ((), "")
    assert "SIGABRT" in first.skipped
    assert [each.outcome for each in second.measurements] == ["ok"]


@pytest.mark.slow
def test_a_child_measures_what_this_process_does_and_refuses_another_device(tmp_path):
    here = problem("softmax", rows=8, columns=8, threads=1)
    job = Job(here, tuple(registry.candidates(here, HERE)))
    with Isolated(HERE) as executor:
        (result,) = executor.run([job], plan=PLAN, workload="w")
    (expected,) = InProcess(HERE).run([job], plan=PLAN, workload="w")
    assert [each.id for each in result.measurements] == [each.id for each in expected.measurements]
    assert {each.outcome for each in result.measurements} == {"ok"}
    for one, other in zip(result.measurements, expected.measurements, strict=True):
        assert {**one.protocol.to_dict(), "error_log": 0} == {**other.protocol.to_dict(), "error_log": 0}
    from dataclasses import replace

    with Isolated(replace(HERE, name="another", cores=HERE.cores + 1)) as executor:
        (result,) = executor.run([job], plan=PLAN, workload="w")
    assert result.measurements == ()
    assert "another is not here to measure on" in result.skipped


@pytest.mark.slow
def test_a_budget_ends_a_candidate_that_is_being_prepared(monkeypatch):
    monkeypatch.setattr("kernelcast.datasets.isolation.BUDGET_GRACE_S", 0.0)
    with Isolated(HERE) as executor:
        list(executor.run([job_of(good())], plan=PLAN, workload=""))  # has a child started
        started = time.monotonic()
        (result,) = executor.run([job_of(bad("wait"), good(), seconds=1.0)], plan=PLAN, workload="")
    assert time.monotonic() - started < 100  # it would wait for 600 s
    assert (result.measurements, result.skipped) == ((), "")


SCRIPT = """
import json, os, signal, sys
from pathlib import Path

from kernelcast.datasets.collect import collect
from kernelcast.datasets.isolation import Isolated, Limits
from kernelcast.datasets.timing import TimingPlan
from kernelcast.kernels import problem
from kernelcast.kernels.detect import detect
from kernelcast.kernels.user import kernel
import misbehaving


@kernel("test_isolation_script", tensors={"x": ("n",)}, space={"copies": (1, 2)}, reference=lambda x: 2 * x)
def double(x, *, copies):
    misbehaving.do(os.environ["DEED"] if copies == 2 else "", x)
    return 2 * x


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may have it ignored
    here = detect("cpu")
    with Isolated(here) as executor:
        print("ready", flush=True)
        summary = collect(
            [problem("test_isolation_script", n=8, threads=1)], here, Path(sys.argv[1]),
            plan=TimingPlan(rounds=2, seconds=1.0), executor=executor,
        )
    print(json.dumps({"outcomes": dict(summary.outcomes), "interrupted": summary.interrupted,
                      "skipped": summary.skipped}))
"""


class Script:
    """Collects a kernel of its own whose second config does something."""

    def __init__(self, folder, deed):
        path = folder / "script.py"
        path.write_text(textwrap.dedent(SCRIPT))
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(path), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TOOLS), "OMP_NUM_THREADS": "1", "DEED": deed},
        )

    def children(self):
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = status.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid and fields[0] != "Z":
                found.append(int(status.parent.name))
        return found

    def wait_for_mark(self, timeout=120.0):
        deadline = time.monotonic() + timeout
        while not (self.folder / "waiting").exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def result(self):
        out, err = self.process.communicate(timeout=240)
        assert self.process.returncode == 0, err
        return json.loads(out.splitlines()[-1])


def wait_until(condition, timeout=60.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_script_with_a_kernel_of_its_own_is_measured_outside(tmp_path):
    assert Script(tmp_path, "segfault").result() == {
        # The default is the first config; it has no config of its own.
        "outcomes": {"ok": 1, "crash": 1},
        "interrupted": False,
        "skipped": [],
    }
    records = list(Store(tmp_path / "store").measurements())
    assert sorted(each.outcome for each in records) == ["crash", "ok"]
    # Known from now on.
    assert Script(tmp_path, "segfault").result()["outcomes"] == {}


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ctrl_c_and_the_parents_death_end_the_child(tmp_path):
    script = Script(tmp_path, "wait")
    script.wait_for_mark()
    (child,) = script.children()
    script.process.send_signal(signal.SIGINT)
    result = script.result()
    assert result["interrupted"]
    assert not alive(child)

    (tmp_path / "waiting").unlink()
    script = Script(tmp_path, "wait")
    script.wait_for_mark()
    (child,) = script.children()
    script.process.send_signal(signal.SIGKILL)
    script.process.communicate()
    wait_until(lambda: not alive(child))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_child_of_a_thread_that_has_ended_goes_on():
    results = []
    executor = Isolated(HERE)
    with executor:
        thread = threading.Thread(
            target=lambda: results.extend(executor.run([job_of(good())], plan=PLAN, workload=""))
        )
        thread.start()
        thread.join()
        pid = executor._supervisor._child.pid
        results.extend(executor.run([job_of(good(1))], plan=PLAN, workload=""))
        assert executor._supervisor._child.pid == pid
    assert [each.measurements[0].outcome for each in results] == ["ok", "ok"]


def test_a_failure_that_spoils_the_gpu_is_told_before_the_process_ends(monkeypatch):
    import mmap

    from kernelcast.datasets import isolation_child as child

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(child.os, "_exit", leave)
    monkeypatch.setattr(child, "_gpu_works", lambda: False)
    reading, writing = os.pipe()
    with mmap.mmap(-1, child.HAND.size) as page, os.fdopen(reading, "rb") as answers:
        for gpu in (False, True):
            reporter = child.Reporter(writing, page, gpu=gpu)
            reporter.numbers = [7, 5]
            reporter.preparing(1)
            assert child.HAND.unpack_from(page) == (1, 5)
            with pytest.raises(SystemExit, match=str(child.SPOILED)) if gpu else contextlib.nullcontext():
                reporter.failed(1, "crash", "illegal access")
            told = json.loads(answers.readline())
            assert told == {"kind": "failed", "number": 5, "outcome": "crash", "detail": "illegal access"}
            assert child.HAND.unpack_from(page)[1] == child.NOBODY
    os.close(writing)


@pytest.mark.gpu
def test_an_illegal_access_costs_its_candidate_alone():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    job = Job(problem(NAME, n=64), (good(0), bad("poison"), good(1), bad("memory"), bad("nan")))
    with Isolated(detect("gpu"), limits=Limits(memory_bytes=2.0**30)) as executor:
        (result,) = executor.run([job], plan=PLAN, workload="")
    assert [each.outcome for each in result.measurements] == [
        "ok",
        "crash",
        "ok",
        "out_of_resources",
        "wrong_result",
    ]
    assert "assert" in result.measurements[1].detail


def test_devices_that_cannot_be_compiled_for_are_left_to_their_launches():
    from kernelcast.datasets.precompile import precompile

    assert precompile(job_of(good(), good(1), good(2)), HERE, time_limit_s=1.0) is None
    gpu = known_device("a100")
    assert precompile(job_of(good(), good(1), good(2)), gpu, time_limit_s=1.0) is None

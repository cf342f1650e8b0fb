"""One child a device, jobs handed out one at a time, and a lost child costs only what it ran."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from kernelcast.datasets.collect import collect
from kernelcast.datasets.isolation import Limits, Supervisor
from kernelcast.datasets.jobs import Exhaustive, Job
from kernelcast.datasets.observing import Facts
from kernelcast.datasets.pool import Place, ProcessPool, places, visible_devices
from kernelcast.datasets.record import Protocol
from kernelcast.datasets.store import Store
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import KernelcastError
from kernelcast.kernels import Candidate, problem, registry
from kernelcast.kernels.detect import detect

NAME = "test_misbehaving"
HERE = detect("cpu")
OTHER = replace(HERE, name="another", cores=HERE.cores + 1)
PLAN = TimingPlan(rounds=2, seconds=1.0, sample_us=20.0)


@pytest.fixture(autouse=True)
def _in_the_catalogue(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELCAST_TEST_MARKS", str(tmp_path))
    import misbehaving

    if NAME not in registry._operations:
        misbehaving.register()
    yield
    misbehaving.forget()


def good(copy=0):
    return Candidate.of("vendor", {"copy": copy})


def waiting():
    return Candidate.of("bad", {"deed": "wait", "call": 0})


def job_of(n, *candidates):
    return Job(problem(NAME, n=n, threads=1), candidates or (good(0), good(1)))


def test_a_cpu_has_one_worker():
    with ProcessPool(HERE, found=[Place(HERE)]) as pool:
        assert len(pool) == 1
    if detect().kind == "cpu":
        assert places() == [Place(HERE)]


def test_devices_that_differ_stay_idle_and_are_named():
    found = [Place(HERE, (("A", "0"),)), Place(OTHER), Place(HERE, (("A", "1"),))]
    with ProcessPool(HERE, found=found) as pool:
        assert len(pool) == 2
        assert pool.left_out == ["another"]
        assert [each._source._environment for each in pool._supervisors] == [{"A": "0"}, {"A": "1"}]
    with pytest.raises(KernelcastError, match=f"No device of this machine is a another; it has: {HERE.name}"):
        ProcessPool(OTHER, found=[Place(HERE)])


@pytest.mark.parametrize(
    ("setting", "count", "expected"),
    [
        (None, 2, ["0", "1"]),
        ("", 1, ["0"]),
        ("3,1", 2, ["3", "1"]),
        ("GPU-ab, GPU-cd", 2, ["GPU-ab", "GPU-cd"]),
        ("2", 2, ["0", "1"]),  # not what torch goes by, then
    ],
)
def test_each_gpu_is_shown_as_this_process_sees_it(setting, count, expected):
    assert visible_devices(setting, count) == expected


class Told:
    """A supervisor's children, faked: each job is told at once, and who has which at a time is noted."""

    def __init__(self, monkeypatch):
        self.begun: list[tuple[int, int]] = []
        self.most = self.now = 0
        monkeypatch.setattr(Supervisor, "begin", lambda each, state: self._begin(each, state))
        monkeypatch.setattr(Supervisor, "attend", lambda each: self._attend(each))

    def _begin(self, supervisor, state):
        supervisor.state = state
        self.begun.append((id(supervisor), state.job.problem["n"]))
        self.now += 1
        self.most = max(self.most, self.now)

    def _attend(self, supervisor):
        supervisor.state.take({"kind": "refused", "detail": f"{supervisor.state.job.problem['n']} was told"})
        self.now -= 1
        return []


def test_each_worker_has_one_job_at_a_time_and_all_are_done(monkeypatch):
    told = Told(monkeypatch)
    taken = []

    def jobs():
        for n in range(2, 9):
            taken.append(n)
            yield job_of(n)

    with ProcessPool(HERE, found=[Place(HERE), Place(HERE, (("A", "1"),))]) as pool:
        results = []
        for result in pool.run(jobs(), plan=PLAN, workload=""):
            # No job is taken before a worker is free for it.
            assert len(taken) <= len(results) + 2
            results.append(result.skipped)
    assert sorted(results) == [f"{n} was told" for n in range(2, 9)]
    assert told.most == 2
    assert len({worker for worker, _ in told.begun}) == 2


def test_an_interrupt_gives_what_was_measured_before_it_ends(monkeypatch):
    def begin(supervisor, state):
        supervisor.state = state

    def attend(supervisor):
        job = supervisor.state.job
        facts = Facts.here(job.problem, job.candidates, HERE, Protocol("p"))
        supervisor.state.take({"kind": "begun", "facts": facts.to_dict()})
        supervisor.state.take({"kind": "failed", "number": 1, "outcome": "crash", "detail": "x"})
        raise KeyboardInterrupt

    monkeypatch.setattr(Supervisor, "begin", begin)
    monkeypatch.setattr(Supervisor, "attend", attend)
    with ProcessPool(HERE, found=[Place(HERE)]) as pool:
        results = pool.run([job_of(8), job_of(9)], plan=PLAN, workload="")
        assert [(each.candidate, each.outcome) for each in next(results).measurements] == [(good(1), "crash")]
        with pytest.raises(KeyboardInterrupt):
            next(results)
    assert pool._supervisors[0].state is None


@pytest.mark.slow
def test_a_killed_worker_costs_what_it_ran_and_the_store_has_everything_once(tmp_path):
    killed = []

    def kill(pool):
        deadline = time.monotonic() + 120
        while not (tmp_path / "waiting").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        (busy,) = [
            each._child for each in pool._supervisors if each._child is not None and each._child.in_hand == 2
        ]
        killed.append(busy.pid)
        os.kill(busy.pid, signal.SIGKILL)

    class Some(Exhaustive):
        """One problem of them all has the candidate that waits, as its third."""

        def start(self, problems, tables, known):
            self._jobs = [
                Job(each, (good(0), good(1), waiting())[: 3 if each["n"] == 8 else 2]) for each in problems
            ]

    with ProcessPool(HERE, found=[Place(HERE)], workers=2, limits=Limits(seconds=10.0)) as pool:
        thread = threading.Thread(target=kill, args=(pool,))
        thread.start()
        summary = collect(
            [problem(NAME, n=n, threads=1) for n in (8, 9, 10)],
            HERE,
            tmp_path / "store",
            plan=PLAN,
            strategy=Some(),
            executor=pool,
        )
        thread.join()
    assert len(killed) == 1
    # It waits again in the next child, now until the limit.
    assert summary.outcomes == {"ok": 6, "timeout": 1}
    records = list(Store(tmp_path / "store").measurements())
    assert len({each.id for each in records}) == len(records) == 7
    assert {each.device_fingerprint for each in records} == {HERE.fingerprint}

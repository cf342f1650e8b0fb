"""Replaying records: the same measurements come out, as a strategy asks for them, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kernelcast.datasets import Environment, Measurement, Protocol, Store
from kernelcast.datasets.collect import Progress
from kernelcast.datasets.jobs import Exhaustive, Job
from kernelcast.datasets.replay import Recorded, Recording, replay
from kernelcast.datasets.strategy import Limit, Limited, Random
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import StoreError
from kernelcast.kernels import Candidate, Problem
from kernelcast.kernels.devices import device

A100, H100 = device("a100"), device("h100")
VENDOR = Candidate.of("vendor")


def tile(size: int) -> Candidate:
    return Candidate.of("triton_toy", {"tile": size})


def toy(m: int) -> Problem:
    return Problem("toy", (("m", m),), "float32")


def measured(
    problem: Problem,
    candidate: Candidate,
    *samples_us: float,
    workload: str = "net",
    source: str = "elsewhere",
    created_at: float = 0.0,
    on=A100,
) -> Measurement:
    return Measurement(
        problem=problem,
        candidate=candidate,
        device=on.name,
        device_fingerprint=on.fingerprint,
        environment=Environment(source=source),
        protocol=Protocol("theirs", error_log=0.25),
        samples_us=samples_us,
        outcome="ok" if samples_us else "out_of_resources",
        workload=workload,
        created_at=created_at,
    )


def recorded(folder, *measurements, devices=(A100,)):
    store = Store(folder)
    for each in devices:
        store.add_device(each)
    store.add_many(measurements)
    return folder


@pytest.fixture
def root(tmp_path):
    """Three problems of the workload ``net``, one of ``other``; one candidate failed."""
    rows = [measured(toy(m), tile(size), 10.0 * m + size) for m in (1, 2, 3) for size in (16, 32, 64)]
    rows += [measured(toy(m), VENDOR, 5.0 * m, 6.0 * m) for m in (1, 2, 3)]
    rows += [measured(toy(1), tile(128)), measured(toy(9), VENDOR, 1.0, workload="other")]
    return recorded(tmp_path / "recorded", *rows)


def contents(folder, **conditions):
    return {each.id: each.to_dict() for each in Store(folder).measurements(**conditions)}


def test_a_recording_has_the_recorded_candidates_the_default_first(root):
    found = Recording.read(root, "toy", device="a100", workloads=["net"])
    assert set(found.problems) == {toy(1), toy(2), toy(3)}
    assert found.device == A100
    tables = dict(zip(found.problems, found.tables, strict=True))
    assert tables[toy(1)] == (VENDOR, tile(128), tile(16), tile(32), tile(64))
    assert tables[toy(2)] == (VENDOR, tile(16), tile(32), tile(64))
    assert found.measurements[toy(2), tile(32)].samples_us == (52.0,)
    assert found.measurements[toy(1), tile(128)].outcome == "out_of_resources"
    assert len(found.measurements) == 13
    assert len(Recording.read(root, "toy").problems) == 4


def test_everything_replayed_is_the_same_records(root, tmp_path):
    summary = replay(Recording.read(root, "toy", device=A100), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(root)
    assert Store(tmp_path / "out").devices() == {A100.fingerprint: A100}
    assert (summary.problems, summary.measured, summary.known) == (4, 14, 0)
    assert summary.outcomes == {"ok": 13, "out_of_resources": 1}
    assert (summary.complete, summary.interrupted, summary.skipped) == (True, False, [])


def test_a_strategy_chooses_and_a_second_run_goes_on(root, tmp_path):
    recording = Recording.read(root, "toy", workloads=["net"])
    seen: list[Progress] = []
    limit = Limit.parse("50%")
    summary = replay(recording, tmp_path / "out", strategy=Random(limit, seed=2), on_progress=seen.append)
    first = contents(tmp_path / "out")
    assert (summary.measured, len(first)) == (6, 6)
    assert [(each.done, each.total) for each in seen] == [(0, 6), (6, 6)]
    again = replay(recording, tmp_path / "out", strategy=Random(limit, seed=2))
    assert (again.measured, again.known, again.problems) == (0, 6, 0)
    rest = replay(recording, tmp_path / "out")
    assert (rest.measured, rest.known, rest.problems) == (7, 6, 3)
    assert contents(tmp_path / "out") == contents(root, workloads=["net"])


def test_the_strategy_hears_of_each_round_before_the_next(root, tmp_path):
    heard = []

    class OneByOne(Exhaustive):
        """A problem a round."""

        def propose(self):
            assert len(heard) == len(set(heard))
            job, self._jobs = self._jobs[:1], self._jobs[1:]
            return job

        def tell(self, result):
            heard.append(result.job.problem)
            # What a round gave is in the store before the strategy hears of it.
            assert len(Store(tmp_path / "out").ids()) >= sum(len(table_of[each]) for each in heard)

    recording = Recording.read(root, "toy")
    table_of = dict(zip(recording.problems, recording.tables, strict=True))
    replay(recording, tmp_path / "out", strategy=OneByOne())
    assert heard == list(recording.problems)


def test_known_measurements_reach_the_strategy(root, tmp_path):
    recording = Recording.read(root, "toy")
    replay(recording, tmp_path / "out", strategy=Limited(Exhaustive(), Limit(count=3)))
    given = {}

    class Reading(Exhaustive):
        needs_known = True

        def start(self, problems, tables, known):
            given.update(known)
            super().start(problems, tables, known)

    replay(recording, tmp_path / "out", strategy=Reading())
    assert {each.id for each in given.values()} <= set(contents(root))
    assert len(given) == 3


def test_a_budget_ends_between_rounds(root, tmp_path):
    summary = replay(Recording.read(root, "toy"), tmp_path / "out", budget_seconds=1e-9)
    assert (summary.complete, summary.interrupted, summary.measured) == (False, False, 0)


def test_an_interrupt_keeps_what_was_written(root, tmp_path):
    class Interrupted(Exhaustive):
        def tell(self, result):
            raise KeyboardInterrupt

    summary = replay(Recording.read(root, "toy"), tmp_path / "out", strategy=Interrupted())
    assert (summary.complete, summary.interrupted) == (False, True)
    assert len(Store(tmp_path / "out").ids()) == 14


def test_a_candidate_that_was_not_recorded_is_skipped_and_said(root):
    executor = Recorded(Recording.read(root, "toy"))
    job = Job(toy(2), (tile(32), tile(999), VENDOR))
    seen = []
    (result,) = executor.run(
        [job], plan=TimingPlan(), workload="mine", on_candidate=lambda of, count: seen.append(count)
    )
    assert result.job is job
    assert [each.candidate for each in result.measurements] == [tile(32), VENDOR]
    assert result.skipped == "1 candidates of toy(m=2, float32) were not recorded."
    assert {each.workload for each in result.measurements} == {"net"}
    assert seen == [3]


# --- what a recording is made of ---


def test_of_several_records_of_a_candidate_the_newest_counts(tmp_path):
    old = measured(toy(1), VENDOR, 9.0, source="a", created_at=1.0)
    new = measured(toy(1), VENDOR, 8.0, source="b", created_at=2.0)
    equal = [measured(toy(2), VENDOR, 1.0 + n, source=f"s{n}") for n in range(4)]
    root = recorded(tmp_path / "r", new, old, *equal)
    found = Recording.read(root, "toy")
    assert found.measurements[toy(1), VENDOR] == new
    assert found.measurements[toy(2), VENDOR].id == max(each.id for each in equal)
    assert len(found.measurements) == 2


def test_candidates_of_a_problem_come_from_one_workload(tmp_path):
    few = [measured(toy(1), tile(s), 1.0, workload="few", source="a", created_at=9.0) for s in (16, 32)]
    many = [measured(toy(1), tile(s), 2.0, workload="many", source="b") for s in (16, 32, 64)]
    found = Recording.read(recorded(tmp_path / "r", *few, *many), "toy")
    assert found.tables == ((tile(16), tile(32), tile(64)),)
    assert {each.workload for each in found.measurements.values()} == {"many"}
    only = Recording.read(tmp_path / "r", "toy", workloads=["few"])
    assert only.tables == ((tile(16), tile(32)),)


def test_a_store_with_several_devices_needs_a_name(tmp_path):
    rows = [measured(toy(1), VENDOR, 1.0), measured(toy(1), VENDOR, 2.0, on=H100)]
    root = recorded(tmp_path / "r", *rows, devices=(A100, H100))
    with pytest.raises(StoreError, match=r"has 2 devices; name one of them: .*a100.*h100"):
        Recording.read(root, "toy")
    for name in ("h100", H100.name, H100.fingerprint, H100):
        found = Recording.read(root, "toy", device=name)
        assert found.device == H100
        assert [each.latency_us for each in found.measurements.values()] == [2.0]


def test_two_devices_of_one_name_are_told_apart_by_fingerprint(tmp_path):
    twin = replace(A100, l2_bytes=A100.l2_bytes * 2)
    root = recorded(tmp_path / "r", measured(toy(1), VENDOR, 1.0, on=twin), devices=(A100, twin))
    with pytest.raises(StoreError, match=f"2 devices with different facts.*{twin.fingerprint}"):
        Recording.read(root, "toy", device="a100")
    assert Recording.read(root, "toy", device=twin.fingerprint).device == twin


@pytest.mark.parametrize(
    ("operation", "options", "message"),
    [
        ("toy", {"device": "h100"}, r"no records of h100. Its devices: a100"),
        ("toy", {"device": "my-card"}, r"no records of my-card"),
        ("other", {}, r"no records of other on a100\S*; kernelcast data summary"),
        ("toy", {"workloads": ["net", "nte"]}, r"of the workload nte;"),
    ],
)
def test_what_is_not_there_is_said(root, operation, options, message):
    with pytest.raises(StoreError, match=message):
        Recording.read(root, operation, **options)


def test_no_store_and_the_same_store(root, tmp_path):
    with pytest.raises(StoreError, match="no store at"):
        Recording.read(tmp_path / "absent", "toy")
    with pytest.raises(StoreError, match="is the store that is replayed"):
        replay(Recording.read(root, "toy"), root)


def test_an_operation_that_the_catalogue_lacks_and_failures_keep_their_facts(root, tmp_path):
    replay(Recording.read(root, "toy"), tmp_path / "out")
    (failed,) = Store(tmp_path / "out").measurements(outcome="out_of_resources")
    assert math.isnan(failed.latency_us)
    assert failed.protocol == Protocol("theirs", error_log=0.25)

"""The active strategy: what it may ask for, that it asks alike, and that it asks where the model is unsure."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.datasets import Environment, Measurement, Protocol, Store, import_files
from kernelcast.datasets.jobs import Exhaustive, Result
from kernelcast.datasets.replay import Recording, replay
from kernelcast.datasets.strategy import Limit, Random
from kernelcast.errors import MissingExtraError, ModelError
from kernelcast.kernels import Candidate, Problem
from kernelcast.kernels.devices import device
from kernelcast.training.active import Active, ActivePlan, expected_improvement, positions
from kernelcast.training.data import load_problems, split_workloads
from kernelcast.training.evaluate import evaluate

A100 = device("a100")
A100_FILE = Path(__file__).resolve().parents[3] / "shared" / "data" / "autoheuristic" / "a100_mm.zip"
VENDOR = Candidate.of("vendor")
SIZES = (16, 32, 64, 128)
#: Few rounds of the smallest models: for tests of what may be asked for.
FEW = ActivePlan(start_share=0.3, round_share=0.35, trees=4, depth=2)


def tile(size: int) -> Candidate:
    return Candidate.of("triton_toy", {"tile": size})


def toy(m: int, n: int = 64, operation: str = "toy", dtype: str = "float32") -> Problem:
    return Problem(operation, (("m", m), ("n", n)), dtype)


def measured(problem: Problem, candidate: Candidate, latency_us: float) -> Measurement:
    return Measurement(
        problem=problem,
        candidate=candidate,
        device=A100.name,
        device_fingerprint=A100.fingerprint,
        environment=Environment(),
        protocol=Protocol("test"),
        samples_us=(latency_us,) if math.isfinite(latency_us) else (),
        outcome="ok" if math.isfinite(latency_us) else "crash",
    )


def smooth(problem: Problem, candidate: Candidate) -> float:
    """A latency: the best tile grows with m."""
    facts = dict(problem.dims)
    best = math.log2(facts["m"]) / 2
    at = 3.0 if candidate == VENDOR else math.log2(candidate.parameters["tile"]) - 2
    return facts["m"] * facts["n"] * 1e-3 * math.exp(0.3 * abs(at - best))


def run(strategy, problems, tables, *, latency=smooth, known=None, stop=10**9):
    """What a strategy asks for, a list of jobs a round; what it proposes twice or knows already is a fault."""
    known = dict(known or {})
    strategy.start(problems, tables, known)
    rounds = []
    places = {problem: set(table) for problem, table in zip(problems, tables, strict=True)}
    asked = set(known)
    while jobs := strategy.propose():
        for job in jobs:
            assert job.candidates
            for candidate in job.candidates:
                assert candidate in places[job.problem]
                assert (job.problem, candidate) not in asked
                asked.add((job.problem, candidate))
            strategy.tell(
                Result(job, tuple(measured(job.problem, c, latency(job.problem, c)) for c in job.candidates))
            )
        rounds.append([(job.problem, job.candidates) for job in jobs])
        if sum(len(c) for jobs in rounds for _, c in jobs) >= stop:
            break
    return rounds


def sizes(rounds):
    return [sum(len(candidates) for _, candidates in jobs) for jobs in rounds]


def grid(count: int, operation: str = "toy") -> list[Problem]:
    rng = np.random.default_rng(7)
    drawn = {(int(2 ** rng.uniform(0, 12)), int(2 ** rng.uniform(0, 12))) for _ in range(count)}
    return [toy(m, n, operation) for m, n in sorted(drawn)]


def tables_of(problems, count=9):
    return [[VENDOR, *(tile(8 * each) for each in range(1, count))] for _ in problems]


# --- the figures behind a choice ---


@pytest.mark.parametrize(
    ("mean", "error", "expected"),
    # By hand: with the mean at the best, error / sqrt(2 pi); far below, the distance; far above, nothing.
    [(0.0, 1.0, 0.398942), (0.0, 0.5, 0.199471), (-10.0, 0.1, 10.0), (10.0, 0.1, 0.0), (1.0, 1.0, 0.083315)],
)
def test_expected_improvement(mean, error, expected):
    assert expected_improvement(0.0, np.array([mean]), np.array([error])) == pytest.approx(
        [expected], abs=1e-6
    )


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.05, 2))
def test_expected_improvement_is_the_mean_of_what_is_gained(best, mean, error):
    # A value at the middle of each of 20,000 equally likely slices.
    from statistics import NormalDist

    slices = (np.arange(2000) + 0.5) / 2000
    values = mean + error * np.array([NormalDist().inv_cdf(each) for each in slices])
    gained = np.maximum(best - values, 0.0).mean()
    assert expected_improvement(best, np.array([mean]), np.array([error]))[0] == pytest.approx(
        gained, abs=2e-3 * max(error, 1)
    )


def test_distances_are_octaves_of_a_dimension():
    at = positions(
        [
            toy(16, 16),
            toy(64, 16),
            toy(16, 16, dtype="float16"),
            toy(17, 16),
            Problem("toy", (("m", 16), ("n", 16)), "float32", (("causal", True), ("layout", "nt"))),
            Problem("toy", (("m", 16), ("n", 16)), "float32", (("causal", True), ("layout", "tn"))),
        ]
    )
    distance = np.sqrt(((at[:, None] - at[None]) ** 2).sum(axis=-1))
    assert distance[0, 1] == pytest.approx(2.0)
    assert distance[0, 2] == pytest.approx(2.0)
    # Almost the same m, which no power of two divides.
    assert distance[0, 3] == pytest.approx(math.hypot(math.log2(17 / 16), 4 * 0.75))
    assert distance[4, 5] == pytest.approx(2.0)
    assert np.array_equal(distance, distance.T)


# --- what may be asked for ---


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=12)
@given(
    problems=st.integers(1, 40),
    candidates=st.integers(1, 12),
    count=st.integers(1, 300),
    seed=st.integers(0, 3),
)
def test_the_limit_is_met_exactly_and_nothing_is_asked_twice(problems, candidates, count, seed):
    found = grid(problems)
    tables = tables_of(found, candidates)
    strategy = Active(A100, limit=Limit(count=count), seed=seed, plan=FEW)
    rounds = run(strategy, found, tables)
    assert sum(sizes(rounds)) == strategy.total == min(count, len(found) * candidates)


@pytest.mark.slow
def test_rounds_are_the_stated_shares():
    found = grid(120)
    tables = tables_of(found)
    assert sizes(run(Active(A100, limit=Limit(count=400), plan=FEW), found, tables)) == [120, 140, 140]
    assert ActivePlan().start_share + 8 * ActivePlan().round_share == pytest.approx(1.0)


@pytest.mark.slow
def test_the_same_data_and_seed_give_the_same_choice():
    found = grid(60)
    first, again, other = (
        run(Active(A100, limit=Limit(count=200), seed=seed, plan=FEW), found, tables_of(found))
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


@pytest.mark.slow
def test_results_that_come_in_another_order_change_nothing():
    found = grid(60)

    def backwards(strategy):
        strategy.start(found, tables_of(found), {})
        rounds = []
        while jobs := strategy.propose():
            rounds.append([(job.problem, job.candidates) for job in jobs])
            for job in reversed(jobs):
                for candidate in reversed(job.candidates):
                    strategy.tell(
                        Result(job, (measured(job.problem, candidate, smooth(job.problem, candidate)),))
                    )
        return rounds

    options = {"limit": Limit(count=200), "plan": FEW}
    assert backwards(Active(A100, **options)) == run(Active(A100, **options), found, tables_of(found))


def test_the_first_round_is_spread_out():
    # A crowd of like problems, and a few that lie elsewhere.
    crowd = [toy(1000 + n, 1000) for n in range(1, 200, 2)]
    lonely = [toy(1, 1), toy(4096, 1), toy(1, 4096), toy(64, 64, dtype="float16")]
    found = [*crowd, *lonely]
    strategy = Active(A100, limit=Limit(count=180), plan=FEW)
    (jobs, *_) = run(strategy, found, tables_of(found), stop=1)
    assert len(jobs) == 6
    assert set(lonely) <= {problem for problem, _ in jobs}
    assert all(candidates[0] == VENDOR and len(candidates) >= 3 for _, candidates in jobs)


@pytest.mark.slow
def test_what_is_known_is_neither_asked_again_nor_in_vain():
    found = grid(60)
    tables = tables_of(found)
    known = {
        (problem, candidate): measured(problem, candidate, smooth(problem, candidate))
        for problem in found[::3]
        for candidate in tables[0]
    }
    strategy = Active(A100, limit=Limit(count=len(known) + 90), plan=FEW)
    assert strategy.needs_known
    rounds = run(strategy, found, tables, known=known)
    assert strategy.total == len(known) + 90
    assert sum(sizes(rounds)) == 90
    # Nothing is left of the problems that are known, so all of it is of new ones.
    assert {problem for jobs in rounds for problem, _ in jobs} <= set(found) - set(found[::3])


@pytest.mark.slow
def test_an_ended_collection_goes_on_to_the_limit():
    found = grid(60)
    tables = tables_of(found)
    limit = Limit.parse("40%")
    done = run(Active(A100, limit=limit, plan=FEW), found, tables, stop=60)
    known = {(p, c): measured(p, c, smooth(p, c)) for jobs in done for p, cs in jobs for c in cs}
    rest = run(Active(A100, limit=limit, plan=FEW), found, tables, known=known)
    assert len(known) + sum(sizes(rest)) == limit.of(sum(map(len, tables)))


def test_a_limit_below_what_is_known_asks_for_nothing():
    found = grid(10)
    tables = tables_of(found)
    known = {(p, c): measured(p, c, 1.0) for p in found for c in tables[0][:3]}
    strategy = Active(A100, limit=Limit(count=5), plan=FEW)
    assert run(strategy, found, tables, known=known) == []
    assert strategy.total == len(known)


def test_without_a_limit_everything_is_measured_in_the_end():
    found = grid(12)
    assert sum(sizes(run(Active(A100, plan=FEW), found, tables_of(found)))) == 9 * len(found)


def test_failures_count_and_teach_nothing_wrong():
    found = grid(40)

    def half_fail(problem, candidate):
        if dict(problem.dims)["m"] % 2 or candidate == tile(8):
            return math.inf
        return smooth(problem, candidate)

    strategy = Active(A100, limit=Limit(count=180), plan=FEW)
    assert sum(sizes(run(strategy, found, tables_of(found), latency=half_fail))) == 180
    every = Active(A100, limit=Limit(count=180), plan=FEW)
    assert sum(sizes(run(every, found, tables_of(found), latency=lambda *_: math.inf))) == 180


def test_a_job_that_was_skipped_is_not_proposed_again():
    found = grid(30)
    tables = tables_of(found)
    strategy = Active(A100, limit=Limit(count=100), plan=FEW)
    strategy.start(found, tables, {})
    asked = Counter()
    while jobs := strategy.propose():
        for number, job in enumerate(jobs):
            asked.update((job.problem, candidate) for candidate in job.candidates)
            ran = () if number == 0 else job.candidates
            strategy.tell(
                Result(job, tuple(measured(job.problem, c, smooth(job.problem, c)) for c in ran), "too large")
            )
    assert set(asked.values()) == {1}
    assert sum(asked.values()) == 100


def test_operations_share_the_limit_by_their_candidates():
    found = [*grid(40), *grid(20, "other_toy")]
    tables = tables_of(found)
    strategy = Active(A100, limit=Limit.parse("25%"), plan=FEW)
    rounds = run(strategy, found, tables)
    counts = Counter()
    for jobs in rounds:
        for problem, candidates in jobs:
            counts[problem.operation] += len(candidates)
    whole = Counter(problem.operation for problem in found for _ in tables[0])
    assert sum(counts.values()) == strategy.total == sum(whole.values()) // 4
    for name in whole:
        assert abs(counts[name] - whole[name] / 4) <= 1


# --- what it chooses ---


@pytest.mark.slow
def test_later_rounds_go_where_the_model_is_unsure():
    # In one half all is smooth; in the other the order of candidates changes from problem to problem.
    calm = [toy(m, 64) for m in range(100, 300)]
    wild = [toy(m, 64, dtype="float16") for m in range(100, 300)]

    def latency(problem, candidate):
        if problem.dtype == "float32":
            return 10.0 + (5.0 if candidate == VENDOR else candidate.parameters["tile"])
        seed = sum((problem.key + candidate.key).encode()) * 7919
        return 10.0 + 90.0 * np.random.default_rng(seed).random()

    found = [*calm, *wild]
    strategy = Active(A100, limit=Limit(count=900), plan=ActivePlan(trees=30, depth=4))
    rounds = run(strategy, found, tables_of(found), latency=latency)
    later = Counter(problem.dtype for jobs in rounds[1:] for problem, _ in jobs)
    assert later["float16"] > 2 * later["float32"]


@pytest.mark.slow
def test_large_spaces_are_measured_in_part_and_the_promising_go_on():
    found = grid(40)
    # The default is the slowest, and the last in the table.
    tables = [[*(tile(size) for size in range(1, 200)), VENDOR] for _ in found]
    plan = ActivePlan(trees=30, depth=4, per_problem=12, pool=64)

    def latency(problem, candidate):
        return 60.0 if candidate == VENDOR else 50.0 - 0.2 * candidate.parameters["tile"]

    rounds = run(Active(A100, limit=Limit(count=700), plan=plan), found, tables, latency=latency)
    first, later = rounds[0], [each for jobs in rounds[1:] for each in jobs]
    assert all(len(candidates) <= 12 for _, candidates in first)
    assert all(VENDOR in candidates for _, candidates in first)
    opened = {problem for problem, _ in first}
    more = [c.parameters["tile"] for p, candidates in later if p in opened for c in candidates if c != VENDOR]
    # Large tiles are fast: what is measured further of a problem is of them.
    assert more
    assert np.median(more) > 140
    assert sum(sizes(rounds)) == 700


def test_a_pool_that_is_used_up_is_filled_again():
    found = grid(3)
    tables = [[VENDOR, *(tile(size) for size in range(1, 60))] for _ in found]
    plan = ActivePlan(trees=5, depth=2, per_problem=4, pool=8)
    assert sum(sizes(run(Active(A100, plan=plan), found, tables))) == sum(map(len, tables))


# --- what is refused ---


@pytest.mark.parametrize("module", ["xgboost", "sklearn"])
def test_without_the_libraries_the_error_names_the_extra(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"The active strategy needs .*kernelcast\[train\]"):
        Active(A100)


@pytest.mark.parametrize(
    "changes",
    [
        {"start_share": 0.0},
        {"round_share": 1.5},
        {"more_share": -0.1},
        {"per_problem": 1},
        {"pool": 0},
        {"trees": 0},
    ],
)
def test_an_impossible_plan_is_refused(changes):
    with pytest.raises(ModelError, match="active plan"):
        ActivePlan(**changes)


# --- on recorded data ---


@pytest.mark.slow
@pytest.mark.data
def test_a_quarter_of_recorded_products_teaches_nearly_what_all_do(tmp_path):
    if not A100_FILE.is_file():
        pytest.skip("the recorded measurements are absent")
    members = {"timm": "a100/a100_timm_train_mm.txt", "hf": "a100/a100_hf_train_mm.txt"}
    for workload, member in members.items():
        import_files(
            "autoheuristic",
            [f"{A100_FILE}:{member}"],
            device=A100,
            workload=workload,
            store=tmp_path / "recorded",
        )
    whole = Recording.read(tmp_path / "recorded", "gemm", workloads=["timm"])
    # Every third problem, to be quick.
    recording = replace(whole, problems=whole.problems[::3], tables=whole.tables[::3])
    assert sum(map(len, recording.tables)) == 8_795
    test = load_problems(Store(tmp_path / "recorded"), "gemm", device=A100, workloads=["hf"])

    def efficiency(strategy) -> float:
        out = tmp_path / type(strategy).__name__
        summary = replay(recording, out, strategy=strategy)
        assert summary.measured == (8_795 if isinstance(strategy, Exhaustive) else 2_198)
        fitted = load_problems(Store(out), "gemm", device=A100)
        train, held_out = split_workloads([*fitted, *test], ["timm"], ["hf"])
        small = {
            "n_estimators": 50,
            "max_depth": 5,
            "learning_rate": 0.15,
            "error_folds": 1,
            "n_jobs": 1,
        }
        found = evaluate(train, held_out, seeds=1, estimator_params=small)
        return found.efficiency_with_default["3"]["geomean"]

    full, active, random = (
        efficiency(one)
        for one in (
            Exhaustive(),
            Active(A100, limit=Limit.parse("25%"), plan=ActivePlan(trees=30)),
            Random(Limit.parse("25%")),
        )
    )
    assert active > full - 0.01
    assert active > random - 0.005
